"""Measure the pages over a large history, and what they cost the calls: `python -m tests.bench.pages`.

One account with very many calls among those of others, on SQLite and on PostgreSQL: the usage page, its filters,
its live polls while calls run, and exports of everything. `BENCH_ROWS`, `BENCH_ROWS_ALL`, `BENCH_SECONDS`,
`BENCH_RATE`, `BENCH_DATABASES` and `BENCH_EXPORTS` make it smaller: with 20000, 20000 and 3 it takes half a minute.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import sqlite3
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import asyncpg

from models import call as calls
from models import ids, ledger, usage_day, wallet
from models.clock import now_ms
from models.database import Database, Script, migrate
from models.export import PARTS
from models.migrations.m0002_portal import SUMS_OF_CALLS
from tests.bench.__main__ import body, child_of, databases, free_port, memory_mb, running, wait_for
from tests.cast import Actor, enter, sign_in
from tests.house import House, books_at

ROWS = int(os.environ.get("BENCH_ROWS", "1000000"))
ROWS_ALL = max(int(os.environ.get("BENCH_ROWS_ALL", "5000000")), ROWS)
SECONDS = int(os.environ.get("BENCH_SECONDS", "20"))
RATE = int(os.environ.get("BENCH_RATE", "200"))
DATABASES = os.environ.get("BENCH_DATABASES", "sqlite,postgres").split(",")
CHOSEN_EXPORTS = os.environ.get("BENCH_EXPORTS", "calls as CSV,calls as JSON,the whole account").split(",")
ASKED, ASKED_IN_A_HURRY = 100, 10
# Between two pages: of somebody who clicks without reading, and of a script that takes all it can get.
PAUSE_S, HURRY_S = 0.25, 0.02
WATCHERS = 10
POLL_S = 2
WAITING_MAX = 500
HISTORY_DAYS = 90
OTHERS = 40
OFFERS = 20
KEYS = 20
RARE = 12
BATCH = 50_000
# The last audit was just now: it looks back two hours, and the ledger of before is none of the pages' business.
LEDGER_MS = 3 * 3600 * 1000
COLUMNS = (
    "id", "account_id", "key_id", "surface", "path", "offer", "streamed", "state", "input_tokens",
    "cached_input_tokens", "output_tokens", "cost_microusd", "charged_microusd", "charged_from", "status",
    "error_code", "latency_ms", "first_byte_ms", "created_at_ms", "finished_at_ms",
)


def history(mine: Actor, chance: random.Random) -> Iterator[tuple[Any, ...]]:
    """Give the calls of three months, the oldest first; a few failed, a few were refused, a dozen are rare."""
    now = now_ms()
    start, step = now - HISTORY_DAYS * usage_day.DAY_MS, HISTORY_DAYS * usage_day.DAY_MS / ROWS_ALL
    every = ROWS_ALL / ROWS
    rare = {int(n * ROWS_ALL / RARE / every) for n in range(RARE)}
    counted = 0
    for n in range(ROWS_ALL):
        at_ms = int(start + n * step)
        is_mine = int((n + 1) / every) > int(n / every)
        account = mine.account.id if is_mine else f"acc_{n % OTHERS:026}"
        key, offer = f"key_{chance.randrange(KEYS):026}", f"model-{chance.randrange(OFFERS)}"
        if is_mine:
            key = mine.key_id if chance.random() < 0.5 else key
            if counted in rare:
                key, offer = "key_rare", "rare"
            counted += 1
        drawn = chance.random()
        state, status, code = (
            ("settled", 200, None) if drawn > 0.03 else ("released", 502, "upstream_error") if drawn > 0.01
            else ("refused", 429, "rate_limit_exceeded")
        )
        served = state == "settled"
        cost = chance.randrange(5000) if served else 0
        call_id = ids.first_id_at("req", at_ms)[:-12] + f"{n:012}"
        yield (
            call_id, account, key, "chat", "/v1/chat/completions", offer, 1, state, 900 if served else 0,
            100 if served else 0, 250 if served else 0, cost, cost, "wallet" if served else None, status, code,
            chance.randrange(100, 9000), chance.randrange(50, 900), at_ms, at_ms + 1000,
        )


async def fill(database: Database, mine: Actor) -> None:
    """Write the history, its sums, and the ledger of its last hours; and see that the books add up."""
    charged: list[tuple[str, str, int, int]] = []
    since = now_ms() - LEDGER_MS

    def noted() -> Iterator[tuple[Any, ...]]:
        for row in history(mine, random.Random(7)):
            call_id, account_id, amount, at_ms = row[0], row[1], row[12], row[18]
            if at_ms > since and amount:
                charged.append((call_id, account_id, amount, at_ms))
            yield row

    await fill_calls(database, noted())
    for entries in (charged[n : n + 500] for n in range(0, len(charged), 500)):
        await database.run(lambda entries=entries: charge(mine, entries), deadline_s=60)
    await database.run(lambda: audited(now_ms()))
    if violations := (await ledger.audit(database, full=False)).violations:
        raise RuntimeError(f"the books do not add up: {violations[0]}")


def charge(mine: Actor, entries: list[tuple[str, str, int, int]]) -> Script[None]:
    """Take what calls cost from the wallet; the others have none, and only their entries."""
    for call_id, account_id, amount, at_ms in entries:
        if account_id == mine.account.id:
            yield from wallet.settle(account_id, 0, amount, call_id, at_ms)
        else:
            yield from ledger.append(ledger.Entry(
                account_id, at_ms * 1000 + hash(call_id) % 1000, ledger.USAGE, call_id, -amount, 0, ledger.REVENUE,
                None, at_ms,
            ))


def audited(at_ms: int) -> Script[None]:
    """Say when the books were last found to add up."""
    yield "INSERT INTO marks (name, value) VALUES (?, ?)", (ledger.AUDIT_MARK, at_ms)


BOUNDS_OF_SUMS = f"""UPDATE usage_days SET first_id = made.first_id, last_id = made.last_id
    FROM (SELECT account_id, {{day}} AS day, offer, key_id, {usage_day.OUTCOME_SQL} AS outcome,
        MIN({{id}}) AS first_id, MAX({{id}}) AS last_id FROM calls WHERE state <> 'open'
        GROUP BY 1, 2, 3, 4, 5) AS made
    WHERE usage_days.account_id = made.account_id AND usage_days.day = made.day
        AND usage_days.offer = made.offer AND usage_days.key_id = made.key_id
        AND usage_days.outcome = made.outcome"""


async def fill_calls(database: Database, rows: Iterator[tuple[Any, ...]]) -> None:
    """Write calls, and what they add up to."""
    sql = {"day": usage_day.day_sql(database.dialect), "id": calls.CALL_ID_SQL[database.dialect]}
    sums, bounds = SUMS_OF_CALLS.format(**sql), BOUNDS_OF_SUMS.format(**sql)
    if database.dialect == "sqlite":
        connection = sqlite3.connect(database.file, isolation_level=None)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = OFF")
        connection.execute("BEGIN")
        connection.executemany(
            f"INSERT INTO calls ({', '.join(COLUMNS)}) VALUES ({', '.join('?' * len(COLUMNS))})", rows
        )
        connection.execute(sums)
        connection.execute(bounds)
        connection.execute("COMMIT")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        connection.close()
        return
    connection = await asyncpg.connect(database.url)
    while batch := [row for _, row in zip(range(BATCH), rows, strict=False)]:
        await connection.copy_records_to_table("calls", records=batch, columns=COLUMNS)
    await connection.execute(sums)
    await connection.execute(bounds)
    await connection.execute("VACUUM ANALYZE")
    await connection.close()


def p(percent: int, values: list[float]) -> str:
    """Return a percentile of seconds in milliseconds."""
    if not values:
        return "–"
    ordered = sorted(values)
    return f"{ordered[min(len(ordered) * percent // 100, len(ordered) - 1)] * 1000:.1f}"


class Export(NamedTuple):
    """Be a file of everything, one row a line."""

    name: str
    path: str
    lines_around: int
    ending: bytes


EXPORTS = tuple(export for export in (
    Export("calls as CSV", "/dashboard/usage/export.csv?period=all", 1, b"\r\n"),
    Export("calls as JSON", "/dashboard/usage/export.json?period=all", 2, b"\n]\n"),
    # Beside the calls there are a few rows of the account's own and, for each call of the last hours, one of the
    # ledger; each table takes a line more.
    Export("the whole account", "/dashboard/settings/export", len(PARTS), b"]}\n"),
) if export.name in CHOSEN_EXPORTS)


class Watcher:
    """Be a browser that is signed in to the house."""

    def __init__(self, http: aiohttp.ClientSession, house: House, cookies: dict[str, str]) -> None:
        self.http, self.base_url = http, house.base_url
        self.pid = child_of(house.process.pid)
        self.refused = 0
        self.headers = {"Cookie": "; ".join(f"{name}={value}" for name, value in cookies.items())}

    async def get(self, path: str, **headers: str) -> tuple[float, int, str, str]:
        """Return seconds, status, text and tag of a page."""
        began = time.perf_counter()
        async with self.http.get(self.base_url + path, headers=self.headers | headers) as answer:
            text = await answer.text()
            self.refused += answer.status not in (200, 304)
            return time.perf_counter() - began, answer.status, text, answer.headers.get("hx-ptag", "")

    def spent_s(self) -> float:
        """Return how many seconds of a processor the server has had."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    async def poll(self, seconds: float, taken: list[float], *, after_s: float) -> None:
        """Ask for what is new as a page does that was opened a little later than others."""
        tag, until = "", time.monotonic() + seconds
        await asyncio.sleep(after_s)
        while time.monotonic() < until:
            took, _, _, tag = await self.get(
                "/dashboard/usage/live", **{"hx-request": "true", "hx-request-type": "partial", "hx-ptag": tag}
            )
            taken.append(took)
            await asyncio.sleep(max(POLL_S - took, 0))


async def measure_pages(
    watcher: Watcher, middle: str, pause_s: float, times: int, rest_s: float = 0
) -> list[tuple[float, float]]:
    """Print how long each page takes, asked for so many times, and return between which moments it was.

    Before each page nothing is asked for `rest_s`, so that calls beside pages and calls alone share what else the
    machine does.
    """
    asked: list[tuple[float, float]] = []
    loop = asyncio.get_running_loop()
    print(f"load average {os.getloadavg()[0]:.1f}\n")
    print("| page | first ms | p50 ms | p95 ms | CPU ms | kB |\n|---|---:|---:|---:|---:|---:|", flush=True)
    day = usage_day.day_of(now_ms() - 20 * usage_day.DAY_MS)
    live = {"hx-request": "true", "hx-request-type": "partial"}
    for name, path in (
        ("overview", "/dashboard"), ("usage, 30 days", "/dashboard/usage"),
        ("usage, all time", "/dashboard/usage?period=all"),
        ("an old page", f"/dashboard/usage?period=all&after={middle}"),
        ("one day", f"/dashboard/usage?period=custom&from={day}&to={day}"),
        ("a common key", "/dashboard/usage?period=all&key=key_00000000000000000000000003"),
        ("a rare key", "/dashboard/usage?period=all&key=key_rare"),
        ("a rare model", "/dashboard/usage?period=all&model=rare"),
        ("a rare model that failed", "/dashboard/usage?period=all&model=rare&status=failed"),
        ("failed", "/dashboard/usage?period=all&status=failed"),
        ("refused", "/dashboard/usage?period=all&status=refused"),
        ("running", "/dashboard/usage?period=all&status=running"),
        ("an unknown key", "/dashboard/usage?period=all&key=key_none"), ("one call", f"/dashboard/usage/{middle}"),
    ):
        await asyncio.sleep(rest_s)
        began = loop.time()
        await measure_page(watcher, pause_s, times, name, path)
        asked.append((began, loop.time()))
    _, _, _, tag = await watcher.get("/dashboard/usage/live", **live)
    await measure_page(
        watcher, pause_s, times, "live poll, nothing new", "/dashboard/usage/live", **live, **{"hx-ptag": tag}
    )
    await measure_page(watcher, pause_s, times, "the overview's poll", "/dashboard/latest", **live)
    return asked


async def measure_page(
    watcher: Watcher, pause_s: float, times: int, name: str, path: str, **headers: str
) -> None:
    """Print how long a page takes, and how much of a processor the server had meanwhile for each one."""
    answers, before = [], watcher.spent_s()
    for _ in range(times):
        answers.append(await watcher.get(path, **headers))
        await asyncio.sleep(pause_s)
    spent, size = (watcher.spent_s() - before) / times, len(answers[-1][2].encode()) / 1000
    taken = [one[0] for one in answers]
    print(
        f"| {name} | {taken[0] * 1000:.1f} | {p(50, taken)} | {p(95, taken)} | {spent * 1000:.1f} | {size:.0f} |",
        flush=True,
    )


Calls = list[tuple[float, float]]


def times_of(calls: Calls) -> list[float]:
    """Return how long calls took."""
    return [took for _, took in calls]


async def make_calls(http: aiohttp.ClientSession, house: House, actor: Actor, until: asyncio.Event) -> Calls:
    """Make calls at the rate, answered in time or not, and return when each was due and how long it took."""
    taken, failed = [], [0]
    text, started, loop = body("twin", stream=False), 0, asyncio.get_running_loop()
    headers = actor.headers | {"Content-Type": "application/json"}
    began, tasks = loop.time(), set()

    async def make(due: float) -> None:
        try:
            async with http.post(house.base_url + "/v1/chat/completions", data=text, headers=headers) as answer:
                await answer.read()
        except aiohttp.ClientError:
            failed[0] += 1
            return
        failed[0] += answer.status != 200
        # From when it was due: a server that holds everybody up cannot hide it.
        taken.append((due, loop.time() - due))

    while not until.is_set():
        due = began + started / RATE
        await asyncio.sleep(max(due - loop.time(), 0))
        started += 1
        if len(tasks) == WAITING_MAX:
            failed[0] += 1  # a queue that only grows measures nothing
            continue
        task = asyncio.create_task(make(due))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    await asyncio.gather(*tasks)
    if failed[0]:
        print(f"{failed[0]} of {started} calls failed")
    return taken


class Exported(NamedTuple):
    """Be what an export took: `grown_mb` is by how much the server grew meanwhile."""

    seconds: float
    rows: int
    size_mb: float
    grown_mb: float


async def export_all(watcher: Watcher, pid: int, export: Export) -> Exported:
    """Read an export to its end, and keep none of it."""
    resting, most, lines, size, last = memory_mb(pid), 0.0, 0, 0, b""
    began = time.perf_counter()
    async with watcher.http.get(
        watcher.base_url + export.path, headers=watcher.headers, timeout=aiohttp.ClientTimeout(total=None)
    ) as answer:
        looked = 0.0
        async for piece in answer.content.iter_any():
            lines += piece.count(b"\n")
            size += len(piece)
            last = (last + piece)[-len(export.ending) :]
            if time.perf_counter() - looked > 0.2:
                looked = time.perf_counter()
                most = max(most, memory_mb(pid) - resting)
    rows = lines - export.lines_around
    if answer.status != 200 or last != export.ending or rows < ROWS:
        raise RuntimeError(f"{export.name} is not whole: {answer.status}, {rows:,} rows, and it ends with {last}")
    return Exported(time.perf_counter() - began, rows, size / 1e6, max(most, memory_mb(pid) - resting))


def export_line(name: str, took: Exported) -> str:
    """Return a line of the exports' table."""
    return f"| {name} | {took.rows:,} | {took.size_mb:.0f} | {took.seconds:.1f} | {took.grown_mb:.1f} |"


async def measure(kind: str, database: Database, folder: Path, upstream: str) -> None:
    """Measure everything on one database."""
    mine = await enter(database, "bench", plan="wallet", credit_microusd=10**12)
    cookies = await sign_in(database, mine)
    began = time.monotonic()
    await fill(database, mine)
    print(f"\n## {kind}: {ROWS:,} of {ROWS_ALL:,} calls, written in {time.monotonic() - began:.0f} s\n", flush=True)
    middle = (await database.fetch(
        "SELECT id FROM calls WHERE account_id = ? AND id >= ? ORDER BY id LIMIT 1",
        (mine.account.id, ids.first_id_at("req", now_ms() - HISTORY_DAYS // 2 * usage_day.DAY_MS)), deadline_s=60,
    ))[0][0]
    house = House(folder / kind, database.url, upstream).start()
    try:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
            watcher = Watcher(http, house, cookies)
            pid = child_of(house.process.pid)
            await watcher.get("/dashboard")
            print("one after another, no calls,", end=" ")
            await measure_pages(watcher, middle, HURRY_S, ASKED)
            print(f"\nbeside {RATE} calls a second, {PAUSE_S} s apart,", end=" ")
            made, asked = await during(
                http, house, mine, measure_pages(watcher, middle, PAUSE_S, ASKED, rest_s=PAUSE_S * ASKED)
            )
            looked, alone = [], []
            for call in made:
                beside_a_page = any(start <= call[0] < end for start, end in asked)
                if call[0] < asked[-1][1]:
                    (looked if beside_a_page else alone).append(call)
            print(f"\nbeside {RATE} calls a second, {HURRY_S} s apart,", end=" ")
            hurried, _ = await during(http, house, mine, measure_pages(watcher, middle, HURRY_S, ASKED_IN_A_HURRY))
            polls: list[float] = []
            watched, _ = await during(http, house, mine, asyncio.gather(*(
                watcher.poll(SECONDS, polls, after_s=n * POLL_S / WATCHERS) for n in range(WATCHERS)
            )))
            print(f"\n| calls, {RATE} a second | p50 ms | p99 ms |\n|---|---:|---:|", flush=True)
            for beside_what, taken in (
                ("alone", alone), (f"beside a page every {PAUSE_S} s", looked),
                (f"beside a page every {HURRY_S} s", hurried), (f"watched by {WATCHERS} live pages", watched),
            ):
                print(f"| {beside_what} | {p(50, times_of(taken))} | {p(99, times_of(taken))} |", flush=True)
            beside = {
                export: await during(http, house, mine, export_all(watcher, pid, export)) for export in EXPORTS
            }
            for export, (taken, _) in beside.items():
                print(f"| beside an export: {export.name} | {p(50, times_of(taken))} | {p(99, times_of(taken))} |")
            print(f"\nlive poll while calls run: p50 {p(50, polls)} ms, p95 {p(95, polls)} ms of {len(polls)}")
            print(f"pages that were refused: {watcher.refused}; load average {os.getloadavg()[0]:.1f}")
            print("\n| export | rows | MB | s | the server grew by MB |\n|---|---:|---:|---:|---:|")
            for export, (_, exported) in beside.items():
                print(export_line(f"{export.name}, beside calls", exported), flush=True)
            for export in EXPORTS:
                print(export_line(export.name, await export_all(watcher, pid, export)), flush=True)
            print(f"\nthe server at its end: {memory_mb(pid):.0f} MB, and it was never started again", flush=True)
            if child_of(house.process.pid) != pid:
                raise RuntimeError("the server was started again")
    finally:
        house.stop()


async def during(http: aiohttp.ClientSession, house: House, actor: Actor, work: Any) -> tuple[Calls, Any]:
    """Make calls for as long as something else takes; return how long they took, and what it returned."""
    over = asyncio.Event()
    calls = asyncio.create_task(make_calls(http, house, actor, over))
    result = await work
    over.set()
    return await calls, result


async def main() -> None:
    """Measure on each database and print tables."""
    port = free_port()
    with (
        databases(DATABASES) as (folder, urls),
        running("-m", "tests.bench.upstream", str(port), log=folder / "log"),
    ):
        wait_for(port)
        for kind, url in urls.items():
            await migrate(url)
            async with books_at(url) as database:
                await measure(kind, database, folder, f"http://127.0.0.1:{port}/plain/v1")


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(asyncio.run(main()))
