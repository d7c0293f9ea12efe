"""Replays under an idempotency key: free of charge, and so limited like everything that is."""

from __future__ import annotations

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
