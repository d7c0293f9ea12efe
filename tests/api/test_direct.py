"""The short way and the long one: a path with a slash at its end goes through the framework, to the same answer."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest

from models import wallet
from models.database import Database
from tests.cast import Actor, enter
from tests.house import House

WAYS = ("/v1/chat/completions", "/v1/chat/completions/", "/v1/public/chat", "/v1/public/chat/")
# What differs between two answers to the same question.
OWN = ("x-request-id", "date", "x-ratelimit-remaining-requests", "x-ratelimit-reset-requests")
QUESTIONS: dict[str, tuple[dict[str, Any] | bytes, dict[str, str], int]] = {
    "whole": ({}, {}, 200),
    "stream": ({"stream": True}, {}, 200),
    "a provider of another script": ({"model": "vendor/twin by call"}, {}, 200),
    "no JSON": (b"{", {}, 400),
    "no model": ({"model": "nothing"}, {}, 404),
    "wrong type": (b"{}", {"Content-Type": "text/plain"}, 415),
    "compressed": (b"{}", {"Content-Encoding": "gzip"}, 415),
    "no key": ({}, {"Authorization": ""}, 401),
    "failing upstream": ({"messages": [{"role": "user", "content": "status:500"}]}, {}, 502),
    "odd idempotency key": ({}, {"Idempotency-Key": "x" * 300}, 400),
}


def question(changes: dict[str, Any] | bytes) -> bytes:
    """Return a request's body."""
    if isinstance(changes, bytes):
        return changes
    asked = {"model": "twin", "max_tokens": 50, "messages": [{"role": "user", "content": "say:hello_there"}]}
    return json.dumps(asked | changes).encode()


@pytest.mark.parametrize("asked", QUESTIONS)
async def test_both_ways_lead_to_the_same_answer(
    house: House, alice: Actor, http: aiohttp.ClientSession, asked: str
) -> None:
    changes, headers, status = QUESTIONS[asked]
    seen = []
    for path in WAYS[:2]:
        async with http.post(
            house.base_url + path, data=question(changes),
            headers={"Content-Type": "application/json", **alice.headers, **headers},
        ) as answer:
            text = (await answer.read()).decode()
            assert answer.status == status, text
            own = [answer.headers["x-request-id"], answer.headers["x-request-id"].removeprefix("req_")]
        for mark in own:
            text = text.replace(mark, "…")
        created = json.loads(text).get("created") if text.startswith("{") else None
        text = text.replace(f'"created":{created}', "") if created else text
        shown = {name.lower(): value for name, value in answer.headers.items() if name.lower() not in OWN}
        shown.pop("transfer-encoding", None)
        seen.append((shown, [line.partition('"created"')[0] for line in text.splitlines()]))
    assert seen[0] == seen[1]


@pytest.mark.parametrize("path", WAYS[:2])
async def test_a_client_that_leaves_ends_its_call_on_both_ways(
    house: House, house_books: Database, path: str
) -> None:
    for content, stream in (("hang", False), ("hang", True), ("tokens:200 pace:0.2 chunk:1", True)):
        actor = await enter(house_books, "leaver", plan="wallet", credit_microusd=1_000_000)
        text = question({"stream": stream, "messages": [{"role": "user", "content": content}]})
        reader, writer = await asyncio.open_connection("127.0.0.1", house.port)
        writer.write(
            f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"Authorization: Bearer {actor.key}\r\nContent-Length: {len(text)}\r\n\r\n".encode() + text
        )
        await held(house_books, actor, True)
        if content != "hang":
            await reader.readuntil(b"data: ")
        writer.close()
        await held(house_books, actor, False)


async def held(books: Database, actor: Actor, something: bool) -> None:
    """Wait until something, or nothing, is held of an actor's credit."""
    async with asyncio.timeout(20):
        while ((await wallet.balance(books, actor.account.id)).held > 0) is not something:
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("path", WAYS)
async def test_other_methods_go_the_long_way(house: House, http: aiohttp.ClientSession, path: str) -> None:
    async with http.get(house.base_url + path) as answer:
        assert answer.status == 405 and answer.headers["allow"]
    async with http.options(house.base_url + path) as answer:
        assert answer.status == 204 and "content-type" not in answer.headers


async def test_a_client_that_leaves_in_its_body_costs_nothing(
    house: House, house_books: Database, alice: Actor
) -> None:
    for cut in (0, 30, -1):
        text = question({})
        _, writer = await asyncio.open_connection("127.0.0.1", house.port)
        writer.write(
            f"POST {WAYS[0]} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"Authorization: Bearer {alice.key}\r\nContent-Length: {len(text)}\r\n\r\n".encode() + text[:cut]
        )
        await writer.drain()
        writer.close()
        await writer.wait_closed()
    rows = await house_books.fetch("SELECT state FROM calls WHERE account_id = ?", (alice.account.id,))
    assert list(rows) == []
