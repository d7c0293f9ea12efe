"""The usage list and its rows: every call of the account and of nobody else, page by page, none twice or lost."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from models import call as calls
from models import ids
from models.clock import now_ms
from models.database import Database
from tests.api.envelope import refused
from tests.api.v1.test_chat import body
from tests.cast import Actor, enter
from tests.house import House

CHATS = ("/v1/chat/completions", "/v1/public/chat")


async def page(
    house: House, http: aiohttp.ClientSession, actor: Actor, path: str = "/v1/usage", **query: object
) -> dict[str, Any]:
    """Return a page of the actor's usage."""
    async with http.get(
        house.base_url + path, headers=actor.headers, params={name: str(value) for name, value in query.items()}
    ) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.json()


async def rows_of(
    house: House, http: aiohttp.ClientSession, actor: Actor, *, least: int, **query: object
) -> list[dict[str, Any]]:
    """Return the actor's rows once there are as many as this: refused calls are written down after a moment."""
    rows: list[dict[str, Any]] = []
    for _ in range(80):
        rows = (await page(house, http, actor, limit=100, **query))["data"]
        if len(rows) >= least:
            return rows
        await asyncio.sleep(0.05)
    raise AssertionError(f"{len(rows)} rows of {least}")


async def ask(
    house: House, http: aiohttp.ClientSession, actor: Actor, text: str = "usage:10,2", path: str = CHATS[0],
    **fields: object,
) -> str:
    """Make a call and return its id."""
    async with http.post(house.base_url + path, json=body(text, **fields), headers=actor.headers) as answer:
        await answer.read()
        return answer.headers["x-request-id"]


@pytest.fixture
async def history(house_books: Database, alice: Actor, bob: Actor) -> AsyncIterator[list[str]]:
    """Write 45 calls of Alice's, several in one millisecond, among Bob's; give hers, newest first."""
    at = now_ms() // 1000 * 1000 - 3600_000
    salt = secrets.token_hex(5)
    refusals, hers = [], []
    for n in range(90):
        owner = alice if n % 2 else bob
        call_id = f"{ids.first_id_at('req', at + n // 8)[:-16]}{salt}{n:06d}"
        refusals.append((calls.Refusal(
            call_id=call_id, account_id=owner.account.id, key_id=owner.key_id, surface="chat", path=CHATS[0],
            offer="even" if n % 4 == 1 else "odd", streamed=False, status=403 if n % 3 else 400,
            error_code="scope_denied", created_at_ms=at + 1000 * n, latency_ms=1,
        ), 1))
        if owner is alice:
            hers.append(call_id)
    await house_books.run(lambda: calls.write_refusals(refusals))
    yield hers[::-1]


async def test_is_empty_at_first(house: House, alice: Actor, http: aiohttp.ClientSession) -> None:
    for path in ("/v1/usage", "/v1/usage/"):
        assert await page(house, http, alice, path) == {
            "object": "list", "data": [], "first_id": "", "last_id": "", "has_more": False
        }


async def test_shows_a_finished_call_whole(house: House, alice: Actor, http: aiohttp.ClientSession) -> None:
    before = now_ms() // 1000
    call_id = await ask(house, http, alice, "usage:100,20 cached:40 reasoning:4", stream=True)
    listed = await page(house, http, alice)
    [row] = listed["data"]
    assert (listed["first_id"], listed["last_id"], listed["has_more"]) == (call_id, call_id, False)
    for path in (f"/v1/usage/{call_id}", f"/v1/usage/{call_id}/"):
        assert await page(house, http, alice, path) == row
    assert row["id"] == row["request_id"] == call_id
    assert before <= row["created_at"] <= row["finished_at"] <= before + 30
    assert row | {
        "object": "usage", "state": "settled", "status": 200, "error_code": None, "surface": "chat",
        "path": CHATS[0], "model": "twin", "key_id": alice.key_id, "stream": True, "prompt_tokens": 100,
        "cached_tokens": 40, "cache_write_tokens": 0, "completion_tokens": 20, "reasoning_tokens": 4,
        "total_tokens": 120, "finish_reason": "stop", "cost_usd": "0.000300", "cost_microusd": 300,
        "charged_from": "wallet", "held_usd": "0.000000", "estimated": False, "repeated": 1,
    } == row
    assert 0 <= row["first_byte_ms"] <= row["latency_ms"]


async def test_shows_a_running_call_with_its_hold(
    house: House, alice: Actor, http: aiohttp.ClientSession
) -> None:
    async with http.post(
        house.base_url + CHATS[0], json=body("tokens:100 pace:0.05", stream=True), headers=alice.headers
    ) as answer:
        await answer.content.readline()
        row = await page(house, http, alice, f"/v1/usage/{answer.headers['x-request-id']}")
        assert (row["state"], row["status"], row["finished_at"], row["latency_ms"]) == ("open", None, None, None)
        assert float(row["held_usd"]) > 0 and row["cost_microusd"] == 0
        # From the first checkpoint on, two seconds at the latest, its tokens count up.
        while not row["completion_tokens"]:
            assert row["total_tokens"] == row["prompt_tokens"]
            await asyncio.sleep(0.1)
            row = await page(house, http, alice, f"/v1/usage/{answer.headers['x-request-id']}")
        assert row["total_tokens"] == row["prompt_tokens"] + row["completion_tokens"]


async def test_an_included_call_costs_nothing(
    house: House, house_books: Database, http: aiohttp.ClientSession
) -> None:
    carol = await enter(house_books, "carol", plan="included")
    row = await page(house, http, carol, f"/v1/usage/{await ask(house, http, carol)}")
    assert (row["charged_from"], row["cost_usd"], row["completion_tokens"]) == ("included", "0.000000", 2)


@pytest.mark.parametrize("path", CHATS)
async def test_refused_calls_stand_there_at_no_cost(
    house: House, house_books: Database, alice: Actor, http: aiohttp.ClientSession, path: str
) -> None:
    poor = await enter(house_books, "poor", plan="wallet")
    mute = await enter(house_books, "mute", plan="mute")
    away = await enter(house_books, "away", plan="wallet", addresses=["192.0.2.0/24"])
    await ask(house, http, away, path=path)
    expected = [
        (alice, 400, "invalid_request", await ask(house, http, alice, path=path, n=0)),
        (poor, 402, "insufficient_credits", await ask(house, http, poor, path=path)),
        (mute, 403, "scope_denied", await ask(house, http, mute, path=path)),
    ]
    for actor, status, code, call_id in expected:
        [row] = await rows_of(house, http, actor, least=1)
        assert (row["id"], row["status"], row["error_code"]) == (call_id, status, code)
        assert (row["state"], row["cost_microusd"], row["charged_from"]) == ("refused", 0, None)
        assert (row["path"], row["key_id"], row["held_usd"]) == (path, actor.key_id, "0.000000")
        assert row["finished_at"] is not None and row["latency_ms"] >= 0
    async with asyncio.timeout(20):
        while not (found := await calls.recent(house_books, away.account.id, calls.Filter(), limit=9)):
            await asyncio.sleep(0.05)
    assert [(row["status"], row["error_code"]) for row in found] == [(403, "scope_denied")]


async def test_a_flood_of_429_is_one_row_that_counts_up(
    house: House, house_books: Database, http: aiohttp.ClientSession
) -> None:
    slow = await enter(house_books, "slow", plan="slow")
    seen = [await ask(house, http, slow) for _ in range(5)]

    async def turned_away(count: int) -> list[calls.Row]:
        async with asyncio.timeout(20):
            while True:
                rows = await calls.recent(house_books, slow.account.id, calls.Filter(status=429), limit=20)
                if sum(row["repeated"] for row in rows) == count:
                    return rows
                await asyncio.sleep(0.05)

    await turned_away(2)
    seen += [await ask(house, http, slow) for _ in range(3)]
    rows = await turned_away(5)
    # Two only when a minute began in between.
    assert len(rows) <= 2 and rows[-1]["id"] in seen
    assert {row["error_code"] for row in rows} == {"rate_limit_exceeded"}
    assert {(row["charged_microusd"], row["state"]) for row in rows} == {(0, "refused")}


@pytest.mark.parametrize("limit", [1, 7, 20, 45, 100])
@pytest.mark.parametrize("order", ["desc", "asc"])
async def test_pages_hold_every_row_once(
    house: House, alice: Actor, http: aiohttp.ClientSession, history: list[str], limit: int, order: str
) -> None:
    if limit == 1:
        history = history[:6] if order == "desc" else history[-6:]
    wanted = history if order == "desc" else history[::-1]
    query: dict[str, object] = {"limit": limit, "order": order}
    seen: list[str] = []
    while True:
        got = await page(house, http, alice, **query)
        assert len(got["data"]) <= limit
        assert (got["first_id"], got["last_id"]) == (got["data"][0]["id"], got["data"][-1]["id"])
        seen += [row["id"] for row in got["data"]]
        if limit == 1 and len(seen) == len(wanted):
            break
        if not got["has_more"]:
            break
        query["after"] = got["last_id"]
    assert seen == wanted
    if limit == 1:
        return
    # And back again from the last row.
    query = {"limit": limit, "order": order, "before": seen[-1]}
    back: list[str] = []
    while True:
        got = await page(house, http, alice, **query)
        back = [row["id"] for row in got["data"]] + back
        if not got["has_more"]:
            break
        query["before"] = got["first_id"]
    assert back == wanted[:-1]


async def test_the_end_of_the_list_is_an_empty_page(
    house: House, alice: Actor, http: aiohttp.ClientSession, history: list[str]
) -> None:
    for query in ({"after": history[-1]}, {"before": history[0]}, {"after": history[0], "order": "asc"}):
        got = await page(house, http, alice, **query)
        assert got == {"object": "list", "data": [], "first_id": "", "last_id": "", "has_more": False}


async def test_a_page_is_twenty_rows_and_a_hundred_at_most(
    house: House, alice: Actor, http: aiohttp.ClientSession, history: list[str]
) -> None:
    got = await page(house, http, alice)
    assert len(got["data"]) == 20 and got["has_more"] is True
    for query, param in (
        ({"limit": "101"}, "limit"), ({"limit": "0"}, "limit"), ({"limit": "ten"}, "limit"),
        ({"order": "random"}, "order"), ({"state": "gone"}, "state"), ({"status": "12"}, "status"),
        ({"from": "yesterday"}, "from"), ({"until": "-1"}, "until"), ({"after": "a", "before": "b"}, "before"),
    ):
        async with http.get(f"{house.base_url}/v1/usage", params=query, headers=alice.headers) as answer:
            await refused(answer, 400, "invalid_request", param=param)


async def test_filters_narrow_and_pages_follow_them(
    house: House, alice: Actor, bob: Actor, http: aiohttp.ClientSession, history: list[str]
) -> None:
    rows = await rows_of(house, http, alice, least=45)
    for query, kept in (
        ({"model": "even"}, lambda row: row["model"] == "even"),
        ({"status": 400}, lambda row: row["status"] == 400),
        ({"state": "refused"}, lambda row: True),
        ({"state": "settled"}, lambda row: False),
        ({"key_id": alice.key_id}, lambda row: True),
        ({"key_id": bob.key_id}, lambda row: False),
        ({"from": rows[10]["created_at"]}, lambda row: row["created_at"] >= rows[10]["created_at"]),
        ({"until": rows[10]["created_at"]}, lambda row: row["created_at"] < rows[10]["created_at"]),
        ({"model": "odd", "status": 403}, lambda row: (row["model"], row["status"]) == ("odd", 403)),
    ):
        wanted = [row["id"] for row in rows if kept(row)]
        seen: list[str] = []
        step: dict[str, object] = {**query, "limit": 10}
        while True:
            got = await page(house, http, alice, **step)
            seen += [row["id"] for row in got["data"]]
            if not got["has_more"]:
                break
            step["after"] = got["last_id"]
        assert seen == wanted, query


async def test_nobody_sees_anothers_calls(
    house: House, alice: Actor, bob: Actor, http: aiohttp.ClientSession, history: list[str]
) -> None:
    """Somebody else's call is as unknown as one that never was, in every word but the id."""
    told = []
    for call_id in (history[0], ids.new_id("req"), "req_nothing"):
        async with http.get(f"{house.base_url}/v1/usage/{call_id}", headers=bob.headers) as answer:
            inner = await refused(answer, 404, "not_found")
            told.append({
                name: value.replace(call_id, "ID") for name, value in inner.items()
                if isinstance(value, str) and name != "request_id"
            })
    assert told[0] == told[1] == told[2]
    his = await rows_of(house, http, bob, least=45)
    assert not {row["id"] for row in his} & set(history)
    assert {row["key_id"] for row in his} == {bob.key_id}
    # A row of Alice's as a place to page from tells Bob nothing but his own rows.
    got = await page(house, http, bob, after=history[0], limit=100)
    assert {row["key_id"] for row in got["data"]} <= {bob.key_id}
