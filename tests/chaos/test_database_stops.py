"""The database stops under load: nothing but 503s in time, open streams go on, and the books are whole after.

A PostgreSQL server stands still or is killed and started again; SQLite's write lock is held by somebody else.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sqlite3
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest

from models import wallet
from models.database import Database
from tests.cast import Actor, enter
from tests.chaos.own_postgres import OwnPostgres
from tests.house import House, books_at

WHOLE = os.environ.get("CHAOS") == "whole"
WAYS = ("sqlite-locked", "postgres-frozen", *(("postgres-killed",) if WHOLE else ()))
STOPPED_S = 20 if WHOLE else 5
CLIENTS = 8
LATE_EVERY_S = 0.1
CALLS_AGAIN_S = 5 if WHOLE else 1
STREAMS = 12
# From when nothing answers until nobody who asks afterwards can still be answered from before it.
SETTLED_IN_S = 0.5
REFUSED_WITHIN_S = 3
ENDED_WITHIN_S = 30
WORKS_AGAIN_S = 10
CLEAN_WITHIN_S = 90
CREDIT = 1_000_000_000
DONE = "data: [DONE]\n\n"


@dataclass(slots=True)
class Outage:
    """Stop a database and let it go on again."""

    url: str
    stop: Callable[[], object]
    resume: Callable[[], object]
    takes_reads: bool = False


@asynccontextmanager
async def outages(way: str, folder: Path) -> AsyncIterator[Outage]:
    """Give a database of its own and a way to stop it."""
    if way == "sqlite-locked":
        file = folder / "books.sqlite3"
        with closing(sqlite3.connect(file, isolation_level=None, check_same_thread=False)) as other:
            yield Outage(
                f"sqlite:///{file}", lambda: take_lock(other), lambda: other.execute("COMMIT"), takes_reads=True
            )
        return
    data = Path(tempfile.mkdtemp(prefix="tollgate-pg-"))
    server = OwnPostgres(data)
    try:
        if way == "postgres-frozen":
            yield Outage(server.url, server.freeze, server.thaw)
        else:
            yield Outage(server.url, server.kill, server.start)
    finally:
        server.close()
        shutil.rmtree(data, ignore_errors=True)


def take_lock(other: sqlite3.Connection) -> None:
    """Take the only write lock, however busy its owner is."""
    other.execute("PRAGMA busy_timeout = 10000")
    other.execute("BEGIN EXCLUSIVE")


@dataclass(slots=True)
class Told:
    """What a client was told: its status, its error, when it asked, and how long it took."""

    kind: str
    asked_at_s: float
    took_s: float = 0.0
    status: int = 0
    text: str = ""
    retry_after: str | None = None

    @property
    def whole(self) -> bool:
        """Return whether the answer came to its end."""
        return self.status == 200 and (self.kind != "streamed" or self.text.endswith(DONE))

    @property
    def unconfirmed(self) -> bool:
        """Return whether the client was told that it may have been charged."""
        return "could not be confirmed" in self.text


@dataclass(slots=True)
class Load:
    """Call a house with several clients, one call after the other, of every kind."""

    house: House
    actor: Actor
    told: list[Told] = field(default_factory=list)
    stopping: bool = False

    async def keep_calling(self, session: aiohttp.ClientSession, number: int) -> None:
        """Be one client."""
        turn = number
        while not self.stopping:
            turn += 1
            self.told.append(await self.call(session, ("plain", "streamed", "keyed")[turn % 3], f"{number}-{turn}"))
            await asyncio.sleep(0.05)

    async def call(
        self, session: aiohttp.ClientSession, kind: str, name: str, text: str = "tokens:20 pace:0.005"
    ) -> Told:
        """Make one call and return what was told."""
        told = Told(kind, time.monotonic())
        headers = self.actor.headers | ({"Idempotency-Key": f"key-{name}"} if kind == "keyed" else {})
        asked = {
            "model": "twin", "max_tokens": 2000, "stream": kind == "streamed",
            "messages": [{"role": "user", "content": text}],
        }
        async with session.post(
            f"{self.house.base_url}/v1/chat/completions", json=asked, headers=headers
        ) as answer:
            told.status, told.retry_after = answer.status, answer.headers.get("retry-after")
            told.text = await answer.text()
        told.took_s = time.monotonic() - told.asked_at_s
        return told


@pytest.mark.parametrize("way", WAYS)
async def test_the_database_stops_under_load(
    way: str, twin: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    async with outages(way, tmp_path) as outage:
        house = House(tmp_path, outage.url, twin, processes=3).start()
        def note(name: str, value: object) -> None:
            print(f"{name}: {value}")
            record_property(name, value)

        try:
            await drive(house, outage, note)
        finally:
            if house.process is not None:
                house.stop()
    errors = [line for line in house.log_lines() if line["level"] == "error"]
    assert not errors, errors[:3]


async def drive(house: House, outage: Outage, note: Callable[[str, object], object]) -> None:
    """Run the load, stop the database under it, and hold everybody to what they were told."""
    alice = await in_books(outage.url, lambda books: enter(books, plan="wallet", credit_microusd=CREDIT))
    load = Load(house, alice)
    # Each call on a connection of its own, so that every process gets its share.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session, asyncio.TaskGroup() as group:
        clients = [group.create_task(load.keep_calling(session, n)) for n in range(CLIENTS)]
        # Half of the streams end while the database is away, half after it is back.
        streams = [
            group.create_task(load.call(
                session, "streamed", "", f"tokens:100 pace:{(STOPPED_S * (0.8 if n % 2 else 1.3) + 2) / 100:.2f}"
            )) for n in range(STREAMS)
        ]
        await asyncio.sleep(2)
        await asyncio.to_thread(outage.stop)
        stopped_s = time.monotonic()
        late = []
        while time.monotonic() < stopped_s + STOPPED_S - REFUSED_WITHIN_S:
            # The clients may still wait for what they asked before: these are new ones.
            late.append(group.create_task(load.call(
                session, ("plain", "streamed", "keyed")[len(late) % 3], f"late-{len(late)}"
            )))
            await asyncio.sleep(LATE_EVERY_S)
        ready, alive = await asyncio.gather(
            asyncio.to_thread(house.status, "/readyz"), asyncio.to_thread(house.status, "/healthz")
        )
        reads = await asyncio.gather(
            *(read(session, house, alice, path) for path in ("models", "balance", "usage"))
        )
        await asyncio.sleep(max(stopped_s + STOPPED_S - time.monotonic(), 0))
        back_s = time.monotonic()
        await asyncio.to_thread(outage.resume)
        resumed_s = time.monotonic()
        works_s = await until_it_works(house, load, session)
        await asyncio.sleep(CALLS_AGAIN_S)
        load.stopping = True
        await asyncio.gather(*clients)
        load.told += await asyncio.gather(*late)
        endings = await asyncio.gather(*streams)

    assert (ready, alive) == (503, 200)
    for status, took_s in reads:
        assert status == (200 if outage.takes_reads else 503) and took_s < REFUSED_WITHIN_S
    asked_away = (stopped_s + SETTLED_IN_S, back_s - REFUSED_WITHIN_S + LATE_EVERY_S)
    away = [told for told in load.told if asked_away[0] < told.asked_at_s < asked_away[1]]
    note("calls while it was away", len(away))
    note("slowest of them, s", round(max(told.took_s for told in away), 2))
    note("works again after, s", round(works_s - resumed_s, 2))
    note("slowest call, s", round(max(told.took_s for told in load.told), 2))
    assert len(away) >= len(late) / 2 > 2
    for told in away:
        assert told.status == 503 and told.took_s < REFUSED_WITHIN_S, told
    for told in load.told:
        assert told.whole or told.status == 503, told
        assert told.took_s < ENDED_WITHIN_S
        if told.status == 503:
            error = json.loads(told.text)["error"]
            assert error["code"] == "service_unavailable" and int(told.retry_after or 0) > 0
            assert "asyncpg" not in told.text and "sqlite" not in told.text
    assert all(told.whole for told in endings), [told.text[-300:] for told in endings if not told.whole]
    assert works_s - resumed_s < WORKS_AGAIN_S
    after = [told for told in load.told if told.asked_at_s > works_s]
    assert after and all(told.whole for told in after), "calls are refused although it is back"

    clean_s = await until_nothing_is_open(outage.url, alice)
    note("nothing open or held after, s", round(clean_s - resumed_s, 2))
    audit = house.command("audit", "--full")
    assert audit.returncode == 0, audit.stdout + audit.stderr
    charged = await in_books(outage.url, lambda books: count_charged(books, alice))
    whole = sum(told.whole for told in [*load.told, *endings])
    unconfirmed = sum(told.unconfirmed for told in load.told)
    assert whole <= charged <= whole + unconfirmed, "a whole answer is unbilled, or a refused call is billed"


async def until_it_works(house: House, load: Load, session: aiohttp.ClientSession) -> float:
    """Return when every process was ready and several calls in a row were answered."""
    deadline = time.monotonic() + ENDED_WITHIN_S
    in_a_row = 0
    while in_a_row < 9:
        assert time.monotonic() < deadline, "it does not recover without a restart"
        told = await load.call(session, "plain", "")
        load.told.append(told)
        in_a_row = in_a_row + 1 if told.whole else 0
        if in_a_row == 1:
            first_s = time.monotonic()
    assert await asyncio.to_thread(house.status, "/readyz") == 200
    return first_s


async def read(session: aiohttp.ClientSession, house: House, actor: Actor, path: str) -> tuple[int, float]:
    """Return the status of a read, and how long it took."""
    began_s = time.monotonic()
    async with session.get(f"{house.base_url}/v1/{path}", headers=actor.headers) as answer:
        await answer.read()
        return answer.status, time.monotonic() - began_s


async def until_nothing_is_open(url: str, actor: Actor) -> float:
    """Return when no call was open and nothing held."""

    async def state(books: Database) -> tuple[int, int]:
        rows = await books.fetch("SELECT COUNT(*) FROM calls WHERE state = 'open'", deadline_s=10)
        return rows[0][0], (await wallet.balance(books, actor.account.id)).held

    deadline = time.monotonic() + CLEAN_WITHIN_S
    while (standing := await in_books(url, state)) != (0, 0):
        assert time.monotonic() < deadline, f"open calls and what is held: {standing}"
        await asyncio.sleep(0.5)
    return time.monotonic()


async def count_charged(books: Database, actor: Actor) -> int:
    """Return how many calls of an account were charged."""
    rows = await books.fetch(
        "SELECT COUNT(*) FROM calls WHERE account_id = ? AND charged_microusd > 0", (actor.account.id,),
        deadline_s=10,
    )
    return rows[0][0]


async def in_books(url: str, work):
    """Do something with a database opened beside the server."""
    async with books_at(url) as books:
        return await work(books)
