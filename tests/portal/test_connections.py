"""Connections between two requests: kept while they may be of use, closed when they only cost."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from models.credentials import new_key
from tests.cast import Actor
from tests.house import House

GET = b"GET /healthz HTTP/1.1\r\nHost: tollgate.test\r\n\r\n"
CLIENT_S = 2


@pytest.fixture
async def impatient(tmp_path: Path, new_database, twin: str) -> AsyncIterator[House]:
    """Give a house that waits two seconds for a client."""
    house = House(
        tmp_path, await new_database("sqlite"), twin, CLIENT_TIMEOUT_SECONDS=str(CLIENT_S), DRAIN_SECONDS="1"
    ).start()
    yield house
    house.stop()


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Make one request over a connection that is kept."""
    writer.write(GET)
    assert (await reader.readuntil(b"ok\n")).startswith(b"HTTP/1.1 200")


async def closed_after_s(reader: asyncio.StreamReader) -> float:
    """Return how long it takes until the server closes."""
    began = time.monotonic()
    async with asyncio.timeout(30):
        assert await reader.read() == b""
    return time.monotonic() - began


async def test_a_head_must_come_in_time_but_its_beginning_may_wait(impatient: House) -> None:
    silent = await asyncio.open_connection("127.0.0.1", impatient.port)
    used = await asyncio.open_connection("127.0.0.1", impatient.port)
    slow = [await asyncio.open_connection("127.0.0.1", impatient.port) for _ in range(2)]
    await ask(*used)
    await ask(*slow[1])  # a later head counts as the first one does
    for _, writer in slow:
        writer.write(GET[:20])
    waits = await asyncio.gather(*(closed_after_s(reader) for reader, _ in slow))
    assert all(wait > CLIENT_S * 0.9 for wait in waits)
    await asyncio.sleep(CLIENT_S)
    await ask(*silent)
    await ask(*used)


async def test_a_head_in_pieces_is_read(impatient: House) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", impatient.port)
    for _ in range(3):
        for start in range(0, len(GET), 16):
            writer.write(GET[start : start + 16])
            await asyncio.sleep(0.05)
        assert (await reader.readuntil(b"ok\n")).startswith(b"HTTP/1.1 200")


async def test_idle_connections_are_let_go_when_their_clients_leave(house: House) -> None:
    fresh = [await asyncio.open_connection("127.0.0.1", house.port) for _ in range(10)]
    used = [await asyncio.open_connection("127.0.0.1", house.port) for _ in range(10)]
    for reader, writer in used:
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: tollgate.test\r\n\r\n")
        assert (await reader.readuntil(b"ok\n")).startswith(b"HTTP/1.1 200")
    for _, writer in fresh + used:
        writer.close()
        await writer.wait_closed()
    await until_none_is_abandoned(house)


async def until_none_is_abandoned(house: House) -> None:
    """Wait until the house has closed what its clients have closed."""
    deadline = time.monotonic() + 10
    while left := house.abandoned_connections():
        assert time.monotonic() < deadline, f"{left} connections are kept although their clients have left"
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/public/chat", "/v1/chat/completions/", "nowhere"])
@pytest.mark.parametrize("announced", ["length", "chunks"])
@pytest.mark.parametrize("whose", ["nobody", "alice"])
async def test_a_refusal_amid_a_large_body_leaves_nothing_behind(
    house: House, alice: Actor, path: str, announced: str, whose: str
) -> None:
    """The client reads its answer, then leaves in the middle of its body."""
    kind = "Content-Length: 99999999" if announced == "length" else "Transfer-Encoding: chunked"
    piece = b" " * (1 << 20) if announced == "length" else b"100000\r\n" + b" " * (1 << 20) + b"\r\n"
    head = (
        f"POST {path} HTTP/1.1\r\nHost: tollgate.test\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {alice.key if whose == 'alice' else new_key()}\r\n{kind}\r\n\r\n"
    ).encode()
    for _ in range(3):
        reader, writer = await asyncio.open_connection("127.0.0.1", house.port)
        # Longer than any body may be: so far some of these read it, the others refuse it long before.
        writer.write(head + 34 * piece)
        answer = (await reader.readuntil(b"\r\n\r\n")).lower()
        assert answer.split()[1] in (b"400", b"401", b"413")
        await reader.readexactly(int(answer.partition(b"content-length:")[2].split()[0]))
        writer.close()
        ended, _ = await asyncio.wait((asyncio.create_task(writer.wait_closed()),), timeout=10)
        assert ended, "the server neither reads nor closes"
    await until_none_is_abandoned(house)


async def test_a_stop_waits_for_no_idle_connection(impatient: House) -> None:
    idle = [await asyncio.open_connection("127.0.0.1", impatient.port) for _ in range(5)]
    for connection in idle[:3]:
        await ask(*connection)
    impatient.signal(signal.SIGTERM)
    await asyncio.gather(*(closed_after_s(reader) for reader, _ in idle))
    assert impatient.process is not None
    await asyncio.to_thread(impatient.process.wait, 20)
    assert impatient.process.returncode == 0
