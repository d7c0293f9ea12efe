"""The balance: posted, held and available credit, and the included calls of the month."""

from __future__ import annotations

from datetime import UTC, datetime

import aiohttp

from models.database import Database
from tests.api.envelope import refused
from tests.api.v1.test_chat import body
from tests.api.v1.test_usage import ask
from tests.cast import Actor, enter, give
from tests.house import House


async def balance(house: House, http: aiohttp.ClientSession, actor: Actor, path: str = "/v1/balance") -> dict:
    """Return the actor's balance."""
    async with http.get(house.base_url + path, headers=actor.headers) as answer:
        assert answer.status == 200
        assert answer.headers["cache-control"] == "private, no-store"
        return await answer.json()


async def test_is_zero_for_a_new_account(
    house: House, house_books: Database, http: aiohttp.ClientSession
) -> None:
    fresh = await enter(house_books, "fresh", plan="included")
    for path in ("/v1/balance", "/v1/balance/"):
        told = await balance(house, http, fresh, path)
        included = told.pop("included_calls")
        assert told == {
            "object": "balance", "currency": "usd", "plan": "included",
            "available_usd": "0.000000", "posted_usd": "0.000000", "held_usd": "0.000000",
            "available_microusd": 0, "posted_microusd": 0, "held_microusd": 0,
        }
        renews = datetime.fromtimestamp(included.pop("renews_at"), UTC)
        assert (renews.day, renews.hour, renews.minute, renews.second) == (1, 0, 0, 0)
        assert renews > datetime.now(UTC)
        assert included == {"limit": 500, "used": 0, "remaining": 500}


async def test_falls_by_what_a_call_costs(
    house: House, house_books: Database, alice: Actor, http: aiohttp.ClientSession
) -> None:
    await ask(house, http, alice, "usage:100,20")
    told = await balance(house, http, alice)
    assert (told["posted_usd"], told["held_usd"], told["available_usd"]) == ("9.999700", "0.000000", "9.999700")
    assert told["available_microusd"] == 9_999_700
    assert told["included_calls"]["limit"] == told["included_calls"]["used"] == 0
    await give(house_books, alice.account.id, 300)
    assert (await balance(house, http, alice))["available_usd"] == "10.000000"


async def test_shows_what_a_running_call_holds(
    house: House, alice: Actor, http: aiohttp.ClientSession
) -> None:
    async with http.post(
        f"{house.base_url}/v1/chat/completions", json=body("tokens:20 pace:0.05", stream=True),
        headers=alice.headers,
    ) as answer:
        await answer.content.readline()
        told = await balance(house, http, alice)
        assert told["posted_microusd"] == 10_000_000 and told["held_microusd"] > 0
        assert told["available_microusd"] == told["posted_microusd"] - told["held_microusd"]
        await answer.read()
    assert (await balance(house, http, alice))["held_microusd"] == 0


async def test_counts_included_calls_and_failures_are_given_back(
    house: House, house_books: Database, http: aiohttp.ClientSession
) -> None:
    carol = await enter(house_books, "carol", plan="included", credit_microusd=5_000_000)
    async with http.post(
        f"{house.base_url}/v1/chat/completions", json=body(), headers=carol.headers
    ) as answer:
        assert answer.headers["x-included-remaining"] == "499"
        assert (await answer.json())["usage"]["cost_usd"] == answer.headers["x-tollgate-cost"] == "0.000000"
    await ask(house, http, carol, "status:403")
    await ask(house, http, carol, n=0)
    told = await balance(house, http, carol)
    assert told["included_calls"].items() >= {"limit": 500, "used": 1, "remaining": 499}.items()
    assert told["posted_microusd"] == 5_000_000


async def test_is_each_ones_own(
    house: House, alice: Actor, bob: Actor, http: aiohttp.ClientSession
) -> None:
    await ask(house, http, alice, "usage:100,20")
    assert (await balance(house, http, bob))["posted_microusd"] == 10_000_000


async def test_a_live_key_is_enough(house: House, house_books: Database, http: aiohttp.ClientSession) -> None:
    actor = await enter(house_books, "scoped", plan="wallet", scopes=[])
    assert (await balance(house, http, actor))["object"] == "balance"
    away = await enter(house_books, "away", plan="wallet", addresses=["192.0.2.1"])
    async with http.get(f"{house.base_url}/v1/balance", headers=away.headers) as answer:
        await refused(answer, 403, "scope_denied")
