"""Idempotency keys at the edge: replays are limited, and a call whose client has left still counts as running."""

from __future__ import annotations

import asyncio

import aiohttp

from models import idempotency
from models.clock import now_ms
from models.database import Database
from tests.api.envelope import refused
from tests.api.v1.test_chat import body
from tests.cast import enter
from tests.house import House


async def test_replays_are_limited_at_ten_times_the_rate(
    house: House, house_books: Database, http: aiohttp.ClientSession
) -> None:
    slow = await enter(house_books, "slow", plan="slow")
    headers, statuses = {"Idempotency-Key": "again", **slow.headers}, []
    for _ in range(32):
        async with http.post(f"{house.base_url}/v1/chat/completions", json=body(), headers=headers) as answer:
            await answer.read()
            statuses.append(answer.status)
    assert statuses == [200] * 31 + [429]


async def test_what_broke_off_is_not_to_be_retried(
    house: House, house_books: Database, http: aiohttp.ClientSession
) -> None:
    """The SDKs try a 502 again by themselves; under the same key the answer would be the same for a day."""
    alice = await enter(house_books, "alice", plan="wallet", credit_microusd=1_000_000)
    headers = {"Idempotency-Key": "broken", **alice.headers}
    async with http.post(f"{house.base_url}/v1/chat/completions", json=body(), headers=headers) as answer:
        call_id = answer.headers["x-request-id"]
        assert answer.status == 200
    await house_books.run(lambda: idempotency.fail(alice.account.id, "broken", call_id))
    kept = await idempotency.find(house_books, alice.account.id, "broken", now_ms())
    assert kept.state == "failed"
    async with http.post(f"{house.base_url}/v1/chat/completions", json=body(), headers=headers) as answer:
        await refused(answer, 502, "upstream_error")
        assert answer.headers["x-should-retry"] == "false"


async def test_a_call_goes_on_counting_when_its_client_has_left(
    house: House, house_books: Database, http: aiohttp.ClientSession
) -> None:
    single, chat = await enter(house_books, "single", plan="single"), f"{house.base_url}/v1/chat/completions"
    headers = {"Idempotency-Key": "long", **single.headers}
    running = asyncio.create_task(http.post(chat, json=body("delay:4"), headers=headers))
    async with asyncio.timeout(20):
        while not await house_books.fetch("SELECT 1 FROM calls WHERE account_id = ?", (single.account.id,)):
            await asyncio.sleep(0.05)
    running.cancel()
    async with http.post(chat, json=body(), headers=single.headers) as answer:
        inner = await refused(answer, 429, "rate_limit_exceeded")
        assert "1 calls at once" in inner["message"] and answer.headers["retry-after"] == "60"
    async with asyncio.timeout(20):
        while True:
            async with http.post(chat, json=body(), headers=single.headers) as answer:
                if answer.status == 200:
                    break
            await asyncio.sleep(0.2)
    [first] = await house_books.fetch(
        "SELECT c.state FROM calls c JOIN idempotency_keys k ON k.call_id = c.id WHERE k.account_id = ?",
        (single.account.id,),
    )
    assert first[0] == "settled", "it was let in before the first had ended"
