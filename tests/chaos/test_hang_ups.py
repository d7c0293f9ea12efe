"""Clients that hang up at any moment on any route leave nothing behind: no wait, no hold, no connection."""

from __future__ import annotations

import asyncio
import json
import random
import re
import socket
import struct
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from models.database import Database
from models.ids import new_id
from tests.cast import Actor, enter
from tests.chaos.history import Ending, History, Told, assert_books_agree, until_nothing_is_held
from tests.chaos.load import CREDIT_MICROUSD, asking
from tests.chaos.sizes import ANSWER_S_MAX, HANG_UPS, HANG_UPS_AT_ONCE
from tests.house import House

MOMENTS = ("connected", "in the head", "in the body", "waiting", "in the answer")
CONNECTION_LEFT_S_MAX = 10
_REQUEST_ID = re.compile(rb"\r\nx-request-id: (req_\w+)\r\n")
# States of /proc/net/tcp in which one of our sockets is still there: established, close-wait.
_HELD_STATES = ("01", "08")


@dataclass(frozen=True, slots=True)
class Route:
    """A request that can be made of the house; `body` for those that have one."""

    name: str
    path: str
    body: dict[str, object] | None = None
    keyed: bool = False

    @property
    def is_call(self) -> bool:
        """Return whether it is metered."""
        return self.body is not None


PATIENT = "tokens:25 pace:0.02 delay:0.1"
ROUTES = (
    Route("chat", "/v1/chat/completions", asking(False, PATIENT)),
    Route("stream", "/v1/chat/completions", asking(True, PATIENT)),
    Route("keyed chat", "/v1/chat/completions", asking(False, PATIENT), keyed=True),
    Route("keyed stream", "/v1/chat/completions", asking(True, PATIENT), keyed=True),
    Route("public chat", "/v1/public/chat", asking(False, PATIENT)),
    Route("models", "/v1/models"),
    Route("usage", "/v1/usage"),
    Route("balance", "/v1/balance"),
    Route("home page", "/"),
    Route("health", "/healthz"),
    Route("readiness", "/readyz"),
    Route("metrics", "/metrics"),
    Route("openapi", "/openapi.json"),
)


async def test_hang_ups_on_every_route_leave_nothing_behind(
    started: House, trio_books: Database, chance: random.Random, figure
) -> None:
    alice = await enter(trio_books, "alice", plan="wallet", credit_microusd=CREDIT_MICROUSD)
    bob = await enter(trio_books, "bob", plan="wallet", credit_microusd=CREDIT_MICROUSD)
    children = started.children()
    history = History()
    seen: Counter[tuple[str, str]] = Counter()
    at_once = asyncio.Semaphore(HANG_UPS_AT_ONCE)

    async def one(number: int) -> None:
        async with at_once:
            route = ROUTES[number % len(ROUTES)]
            moment = chance.choice([moment for moment in MOMENTS if route.is_call or moment != "in the body"])
            seen[route.name, moment] += 1
            await hang_up(started, alice, route, moment, chance, history)

    await asyncio.gather(*(one(number) for number in range(HANG_UPS)))
    answers = await time_every_route(started, bob)
    figure("slowest answer afterwards (s)", max(answers.values()))
    figure("held afterwards for (s)", await until_nothing_is_held(trio_books))
    figure("connections left for (s)", await until_no_connection_is_left(started))
    figure("hang-ups", dict(Counter(moment for _, moment in seen.elements())))
    figure("calls", dict(history.endings()))
    assert max(answers.values()) < ANSWER_S_MAX, answers
    assert len(seen) == len(ROUTES) * len(MOMENTS) - sum(not route.is_call for route in ROUTES) or HANG_UPS < 1000
    assert started.children() == children, "a process did not survive it"
    assert [line for line in started.log_lines() if line["level"] == "error"] == []
    await assert_books_agree(started, trio_books, history)
    assert started.stop() == 0


async def hang_up(
    house: House, actor: Actor, route: Route, moment: str, chance: random.Random, history: History
) -> None:
    """Open a connection, get as far as the moment says, and leave politely or not."""
    key = new_id("try") if route.keyed else None
    head, body = _request(route, actor, key)
    told = Told(actor, f"{route.name}, {moment}", route.body or {}, idempotency_key=key)
    reader, writer = await asyncio.open_connection("127.0.0.1", house.port)
    try:
        match moment:
            case "connected":
                await asyncio.sleep(chance.uniform(0, 0.05))
                told.ending = Ending.UNREACHED
            case "in the head":
                writer.write(head[: chance.randrange(1, len(head) - 1)])
                told.ending = Ending.UNREACHED
            case "in the body":
                writer.write(head + body[: chance.randrange(0, len(body))])
                told.ending = Ending.UNREACHED
            case "waiting":
                writer.write(head + body)
                await asyncio.sleep(chance.uniform(0, 0.3))
            case "in the answer":
                writer.write(head + body)
                await _read_some(reader, chance.randrange(1, 9000), told)
        await writer.drain()
        if route.is_call:
            history.told.append(told)
    finally:
        await _leave(writer, chance)


def _request(route: Route, actor: Actor, key: str | None) -> tuple[bytes, bytes]:
    body = b"" if route.body is None else json.dumps(route.body).encode()
    lines = [
        f"{'POST' if body else 'GET'} {route.path} HTTP/1.1", "Host: tollgate.test",
        f"Authorization: Bearer {actor.key}", f"Content-Length: {len(body)}", "Content-Type: application/json",
    ]
    if key is not None:
        lines.append(f"Idempotency-Key: {key}")
    return "\r\n".join([*lines, "", ""]).encode(), body


async def _read_some(reader: asyncio.StreamReader, bytes_max: int, told: Told) -> None:
    """Read up to so many bytes, or until the answer is over or silent; note the id when it comes."""
    heard = b""
    while len(heard) < bytes_max:
        try:
            piece = await asyncio.wait_for(reader.read(min(512, bytes_max - len(heard))), 1)
        except TimeoutError:
            break
        if not piece:
            break
        heard += piece
    if (found := _REQUEST_ID.search(heard)) is not None:
        told.call_id = found[1].decode()
        told.status = int(heard.split(b" ", 2)[1])
        told.ending = Ending.CUT if told.status < 400 else Ending.REFUSED


async def _leave(writer: asyncio.StreamWriter, chance: random.Random) -> None:
    """Close with a FIN, with a RST, or only the sending half a moment before."""
    way = chance.choice(("fin", "rst", "half"))
    try:
        if way == "rst":
            writer.get_extra_info("socket").setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
            )
            writer.transport.abort()
        elif way == "half":
            writer.write_eof()
            await asyncio.sleep(chance.uniform(0, 0.2))
        writer.close()
        await writer.wait_closed()
    except OSError:
        pass  # the house closed first


async def time_every_route(house: House, actor: Actor) -> dict[str, float]:
    """Return how long each route takes to answer, in seconds: the best of three, for a busy machine's sake."""
    slowest: dict[str, float] = {}
    for route in ROUTES:
        times = []
        for _ in range(3):
            # Every connection is a new one, and so may come to any of the processes.
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as session:
                began = time.monotonic()
                async with session.request(
                    "POST" if route.is_call else "GET", house.base_url + route.path, headers=actor.headers,
                    json=route.body and route.body | {"messages": [{"role": "user", "content": "tokens:3"}]},
                ) as answer:
                    await answer.read()
                    assert answer.status == 200, (route.name, answer.status)
                times.append(time.monotonic() - began)
        slowest[route.name] = min(times)
    return slowest


async def until_no_connection_is_left(house: House) -> float:
    """Wait until the house holds no connection of a client; return how long that took, in seconds."""
    began = time.monotonic()
    while left := _connections(house.port):
        assert time.monotonic() - began < CONNECTION_LEFT_S_MAX, f"{left} connections of clients that have left"
        await asyncio.sleep(0.1)
    return time.monotonic() - began


def _connections(port: int) -> int:
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(row[1].endswith(f":{port:04X}") and row[3] in _HELD_STATES for row in rows)
