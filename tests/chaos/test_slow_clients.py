"""Clients that do not read, or send a byte a second: cut in time, charged rightly, and nobody else's trouble.

The short form runs a small crowd; CHAOS=whole the full one, and the limit on headers, which takes long.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path

import aiohttp
import pytest

from models.database import Database
from portal.server import KEEP_ALIVE_S
from portal.slow_clients import UNSENT_BYTES_MAX
from tests.cast import Actor, enter
from tests.conftest import DATABASES, missing
from tests.house import House, Houses, books_of

WHOLE = os.environ.get("CHAOS") == "whole"
UNREAD = 500 if WHOLE else 30
DRIBBLING = 500 if WHOLE else 30
CALLS_MEASURED = 400 if WHOLE else 60
WAVE = 10
WAVE_WITHIN_S = 30
REST_S = 1
REST_WITHIN_S = 230
HELD_S = 20 if WHOLE else 2
TIMEOUT_S = 2
CROWD_TIMEOUT_S = 240 if WHOLE else 8
CREDIT = 1_000_000_000
# 620 KB on the wire: more than the sockets between us and a client that does not read will hold. The paced
# one is 1.2 MB and takes its upstream eight seconds, so that it is still at it when its client is cut.
LONG_TOKENS = 8000
LONG = "tokens:8000 chunk:4"
LONG_AT_ONCE = "tokens:8000 chunk:4 burst"
SHORT = {"model": "twin", "max_tokens": 20, "messages": [{"role": "user", "content": "say:hello"}]}
LONG_AND_PACED = "tokens:8000 chunk:2 pace:0.002"
BYTES_PER_STALLED_CALL_MAX = 2_000_000


@pytest.fixture(params=DATABASES if WHOLE else ("sqlite",))
def database_kind(request: pytest.FixtureRequest) -> str:
    """Run a test once per database, in the short form on one: slowness is the same before both."""
    if not hasattr(socket, "TCP_USER_TIMEOUT"):
        missing("TCP_USER_TIMEOUT, the limit on how long a client may not read")
    return request.param


@pytest.fixture
async def impatient(database_kind: str, own_houses: Houses) -> House:
    """Give a Tollgate that waits for its clients for a few seconds only."""
    return await own_houses.named("impatient", database_kind, CLIENT_TIMEOUT_SECONDS=str(TIMEOUT_S))


@pytest.fixture
async def books(impatient: House) -> AsyncIterator[Database]:
    """Give its database."""
    async with books_of(impatient) as books:
        yield books


class Client:
    """Be a client that sends and reads only what it is told to, with as small a receive buffer as can be."""

    def __init__(self, house: House) -> None:
        self.socket = socket.socket()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.socket.connect(("127.0.0.1", house.port))
        self.socket.setblocking(False)

    async def ask(self, actor: Actor, text: str, *lines: str, stream: bool = True) -> None:
        """Send a whole request for a long answer."""
        body = json.dumps(asked(text, stream=stream))
        await self.send(request_head(actor, body, *lines) + body.encode())

    async def send(self, data: bytes) -> None:
        """Send bytes."""
        await asyncio.get_running_loop().sock_sendall(self.socket, data)

    async def read_to_the_end(self) -> bytes:
        """Read until the other side closes, in whichever way."""
        collected = b""
        loop = asyncio.get_running_loop()
        with suppress(ConnectionError):
            while data := await asyncio.wait_for(loop.sock_recv(self.socket, 65536), 30):
                collected += data
        return collected

    def is_held_by(self, house: House) -> bool:
        """Return whether the server's side of the connection exists still."""
        port = self.socket.getsockname()[1]
        ends = f" 0100007F:{house.port:04X} 0100007F:{port:04X} 01 "  # 01: established
        return ends in Path("/proc/net/tcp").read_text()

    def close(self) -> None:
        """Leave."""
        self.socket.close()


def asked(text: str, *, stream: bool) -> dict[str, object]:
    """Return a request for a long answer."""
    messages = [{"role": "user", "content": text}]
    return {"model": "twin", "max_tokens": LONG_TOKENS, "messages": messages, "stream": stream}


def request_head(actor: Actor, body: str, *lines: str) -> bytes:
    """Return the head of a chat request."""
    return "\r\n".join([
        "POST /v1/chat/completions HTTP/1.1", "Host: tollgate", f"Authorization: Bearer {actor.key}",
        "Content-Type: application/json", f"Content-Length: {len(body)}", *lines, "", "",
    ]).encode()


async def until(what: Callable[[], object], within_s: float, message: str) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + within_s
    while not what():
        assert time.monotonic() < deadline, message
        await asyncio.sleep(0.1)


async def only_call(books: Database, actor: Actor, within_s: float) -> dict[str, object]:
    """Return an account's only call once it has ended."""
    deadline = time.monotonic() + within_s
    while True:
        rows = await books.fetch("SELECT * FROM calls WHERE account_id = ?", (actor.account.id,))
        if rows and rows[0]["state"] != "open":
            assert len(rows) == 1
            return dict(rows[0])
        assert time.monotonic() < deadline, "the call did not end"
        await asyncio.sleep(0.2)


async def upstream_states(http: aiohttp.ClientSession, twin: str) -> Counter[str]:
    """Return how many of the upstream's answers are open, done or aborted."""
    async with http.get(f"{twin.removesuffix('/v1')}/requests") as answer:
        return Counter(seen["state"] for seen in (await answer.json())["requests"])


@pytest.mark.parametrize("kind", ["streamed", "keyed", "plain"])
async def test_a_client_that_stops_reading_is_cut(
    impatient: House, books: Database, twin: str, http: aiohttp.ClientSession, kind: str
) -> None:
    alice = await enter(books, plan="wallet", credit_microusd=CREDIT)
    text = LONG_AND_PACED if kind == "streamed" else LONG
    key = f"unread-{alice.account.id}"
    before = await upstream_states(http, twin)
    client = Client(impatient)
    await client.ask(
        alice, text, *[f"Idempotency-Key: {key}"] * (kind == "keyed"), stream=kind != "plain"
    )
    assert client.is_held_by(impatient)
    call = await only_call(books, alice, TIMEOUT_S + 20)
    await until(lambda: not client.is_held_by(impatient), TIMEOUT_S + 20, "the connection was kept")
    assert call["state"] == "settled"
    if kind == "streamed":
        # For what left us, and what waited in the sockets on the way: a fraction of the whole.
        assert (call["status"], call["error_code"]) == (499, "client_closed")
        assert 100 < call["output_tokens"] < LONG_TOKENS * 3 // 4
        assert 0 < call["charged_microusd"] - 10 * call["output_tokens"] < 100
        assert (await upstream_states(http, twin))["aborted"] == before["aborted"] + 1
    else:
        # A plain answer was whole when it was sent; a keyed call runs to its end for the retry.
        assert (call["status"], call["output_tokens"]) == (200, LONG_TOKENS)
    assert b"data: [DONE]" not in await client.read_to_the_end()
    client.close()
    if kind == "keyed":
        async with http.post(
            f"{impatient.base_url}/v1/chat/completions", json=asked(text, stream=True),
            headers=alice.headers | {"Idempotency-Key": key},
        ) as answer:
            assert answer.headers["idempotent-replayed"] == "true"
            assert (await answer.text()).endswith("data: [DONE]\n\n")
    assert_books_are_clean(impatient)


@pytest.mark.parametrize("pause_s", [60, 0.2], ids=["silent", "dribbling"])
async def test_a_body_that_does_not_come_is_answered_and_closed(
    impatient: House, books: Database, pause_s: float
) -> None:
    alice = await enter(books, plan="wallet", credit_microusd=CREDIT)
    client = Client(impatient)
    await client.send(request_head(alice, " " * 500))
    began = time.monotonic()
    dribble = asyncio.create_task(keep_dribbling(client, b" " * 500, pause_s))
    answer = await client.read_to_the_end()
    assert TIMEOUT_S - 1 < time.monotonic() - began < TIMEOUT_S + 10
    dribble.cancel()
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ") and b"content-type: application/json" in head.lower()
    error = json.loads(body)["error"]
    assert error["code"] == "request_timeout" and error["request_id"].startswith("req_")
    client.close()
    assert not await books.fetch("SELECT id FROM calls WHERE account_id = ?", (alice.account.id,))


async def keep_dribbling(client: Client, data: bytes, pause_s: float) -> None:
    """Send a byte at a time until it is over or the other side has closed."""
    with suppress(ConnectionError):
        for n in range(len(data)):
            await asyncio.sleep(pause_s)
            await client.send(data[n : n + 1])


class Crowd:
    """Be many clients that misbehave at once, each of which comes again when it is cut."""

    def __init__(self, house: House, actor: Actor) -> None:
        self._house = house
        self._actor = actor
        self._tasks: list[asyncio.Task[None]] = []
        self.unread: list[Client] = []
        self.longest_head_s = 0.0

    async def come(self) -> None:
        """Bring everybody in."""
        for n in range(DRIBBLING):
            send = self._dribble_head if n % 2 else self._dribble_body
            self._tasks.append(asyncio.create_task(send()))
        # Not all at once: that would be overload, which is answered by 503s.
        while len(self.unread) < UNREAD:
            for _ in range(min(WAVE, UNREAD - len(self.unread))):
                client = Client(self._house)
                self.unread.append(client)
                await client.ask(self._actor, LONG_AT_ONCE)
            await until(
                lambda: len(stalled(self._house)) == len(self.unread), WAVE_WITHIN_S, "the crowd does not stall"
            )

    async def leave(self) -> None:
        """Send everybody away."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for client in self.unread:
            client.close()

    async def _dribble_body(self) -> None:
        body = json.dumps(asked(LONG, stream=True))
        while True:
            client = Client(self._house)
            await client.send(request_head(self._actor, body))
            await keep_dribbling(client, body.encode()[:-1], 1)
            client.close()

    async def _dribble_head(self) -> None:
        while True:
            client = Client(self._house)
            began = time.monotonic()
            await keep_dribbling(client, b"GET /v1/models HTTP/1.1\r\nX-Slow: " + b"a" * 4000, 1)
            self.longest_head_s = max(self.longest_head_s, time.monotonic() - began)
            client.close()


async def p99s_ms(*asked: tuple[House, Actor]) -> list[float]:
    """Return the 99th percentile of how long a normal call takes at each house.

    They are asked in turn, one call after the other, so that a busy machine is as busy for one as for the other.
    """
    took: list[list[float]] = [[] for _ in asked]
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as session:
        for _ in range(CALLS_MEASURED):
            for times, (house, actor) in zip(took, asked, strict=True):
                began = time.perf_counter()
                async with session.post(
                    f"{house.base_url}/v1/chat/completions", json=SHORT, headers=actor.headers
                ) as answer:
                    assert answer.status == 200
                    await answer.read()
                times.append((time.perf_counter() - began) * 1000)
    return [statistics.quantiles(times, n=100)[98] for times in took]


def resident_bytes(house: House) -> int:
    """Return the memory of the serving processes."""
    lines = [Path(f"/proc/{pid}/status").read_text() for pid in house.children()]
    return sum(int(line.partition("VmRSS:")[2].split()[0]) * 1024 for line in lines)


async def test_a_crowd_of_slow_clients_slows_nobody_else(
    database_kind: str, new_database, twin: str, http: aiohttp.ClientSession, tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    timeout_s = CROWD_TIMEOUT_S
    url = await new_database(database_kind)
    house = House(tmp_path, url, twin, CLIENT_TIMEOUT_SECONDS=str(timeout_s)).start()
    database = Database(url)
    await database.open()
    calm = House(tmp_path / "calm", url, twin).start()
    alice = await enter(database, plan="wallet", credit_microusd=CREDIT)
    mallory = await enter(database, "mallory", plan="wallet", credit_microusd=CREDIT)
    crowd = Crowd(house, mallory)

    async def count_open() -> int:
        rows = await database.fetch(
            "SELECT COUNT(*) FROM calls WHERE account_id = ? AND state = 'open'", (mallory.account.id,),
            deadline_s=10,
        )
        return rows[0][0]

    try:
        await p99s_ms((house, alice))
        empty = resident_bytes(house)
        await crowd.come()
        await until_at_rest(house, http, twin)
        full = resident_bytes(house)
        assert max(stalled(house)) < 2 * UNSENT_BYTES_MAX
        apart_ms, beside_ms = await p99s_ms((calm, alice), (house, alice))
        await asyncio.sleep(HELD_S)
        later = resident_bytes(house)
        figures = {
            "p99 apart, ms": apart_ms, "p99 beside the crowd, ms": beside_ms, "resident alone, MB": empty / 1e6,
            "resident with the crowd, MB": full / 1e6, "resident later, MB": later / 1e6,
        }
        for name, value in figures.items():
            print(f"{name}: {value:.1f}")
            record_property(name, round(value, 1))
        assert beside_ms < (2 * apart_ms if WHOLE else 1000)
        assert full - empty < UNREAD * BYTES_PER_STALLED_CALL_MAX
        assert later - full < 10e6, "memory grows while nobody reads"
        assert house.status("/readyz") == 200
        deadline = time.monotonic() + timeout_s + 60
        while await count_open():
            assert time.monotonic() < deadline, f"{await count_open()} calls of clients that do not read go on"
            await asyncio.sleep(0.5)
        if WHOLE:
            assert 0 < crowd.longest_head_s < KEEP_ALIVE_S + 10
    finally:
        await crowd.leave()
        calm.stop()
        await database.close()
    assert_books_are_clean(house)
    assert house.stop() == 0
    assert house.log().count("took nothing any more") == UNREAD
    assert "Error in ASGI" not in house.log() and "Traceback" not in house.log()


async def until_at_rest(house: House, http: aiohttp.ClientSession, twin: str) -> None:
    """Wait until all that do not read have stalled, and everybody has moved what could be moved."""

    def used_s() -> float:
        fields = [Path(f"/proc/{pid}/stat").read_text().split() for pid in house.children()]
        return sum(int(field[13]) + int(field[14]) for field in fields) / os.sysconf("SC_CLK_TCK")

    deadline = time.monotonic() + REST_WITHIN_S
    while True:
        before = used_s()
        await asyncio.sleep(REST_S)
        states = await upstream_states(http, twin)
        if len(stalled(house)) == UNREAD and not states["open"] and used_s() - before < REST_S / 4:
            return
        assert time.monotonic() < deadline, f"{len(stalled(house))} of the crowd's streams have stalled"


def stalled(house: House) -> list[int]:
    """Return what waits, in bytes, in each of the server's connections whose client has stopped reading."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    # Established, and with the timer that asks a full receiver whether there is room again.
    return [
        int(line[4].partition(":")[0], 16) for line in lines
        if line[1].endswith(f":{house.port:04X}") and line[3] == "01" and line[5].startswith("04:")
    ]


def assert_books_are_clean(house: House) -> None:
    """Reconcile the whole books by the operator's own command."""
    audit = house.command("audit", "--full")
    assert audit.returncode == 0, audit.stdout + audit.stderr
