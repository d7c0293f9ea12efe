"""Three processes on one database: the last cent, the last included call, one idempotency key, a revoked key."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator

import aiohttp
import pytest

from models import api_key, clock, included_calls, usage_day, wallet
from models.database import Database
from tests.cast import enter
from tests.house import House, Houses, books_of


@pytest.fixture
async def trio(database_kind: str, own_houses: Houses) -> House:
    """Give a Tollgate of three processes."""
    return await own_houses.named("trio", database_kind, processes=3)


@pytest.fixture
async def trio_books(trio: House) -> AsyncIterator[Database]:
    """Give the trio's database."""
    async with books_of(trio) as books:
        yield books


async def many(house: House, headers: dict[str, str], count: int, **fields: object) -> list[tuple[int, bytes, str]]:
    """Send requests at once, each on a connection of its own, so that every process gets its share."""
    asked = {
        "model": "vendor/twin by call",
        "messages": [{"role": "user", "content": "say:hello"}],
        "max_tokens": 5,
        **fields,
    }
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=90)) as session:

        async def one() -> tuple[int, bytes, str]:
            async with session.post(
                f"{house.base_url}/v1/chat/completions", json=asked, headers=headers
            ) as answer:
                return answer.status, await answer.read(), answer.headers.get("idempotent-replayed", "")

        return await asyncio.gather(*(one() for _ in range(count)))


def assert_books_are_clean(house: House) -> None:
    """Reconcile the whole books by the operator's own command."""
    audit = house.command("audit", "--full")
    assert audit.returncode == 0, audit.stdout + audit.stderr


async def test_two_hundred_calls_on_a_balance_for_ten(trio: House, trio_books: Database) -> None:
    alice = await enter(trio_books, "alice", plan="wallet", credit_microusd=100_000)
    answers = Counter(status for status, _, _ in await many(trio, alice.headers, 200))
    assert answers == {200: 10, 402: 190}
    balance = await wallet.balance(trio_books, alice.account.id)
    assert (balance.posted, balance.held) == (0, 0)
    lowest = await trio_books.fetch(
        "SELECT MIN(balance_after_microusd) FROM ledger WHERE account_id = ?", (alice.account.id,)
    )
    assert lowest[0][0] == 0
    assert_books_are_clean(trio)


async def test_the_last_included_call_is_given_once(trio: House, trio_books: Database) -> None:
    alice = await enter(trio_books, "alice", plan="included")
    now = clock.now_ms()
    month = clock.month(now)

    def used_up():
        yield (
            "INSERT INTO included_calls (account_id, month, used) VALUES (?, ?, 499)", (alice.account.id, month)
        )
        # The books must agree with the counter: as many calls stand in the month.
        for n in range(499):
            yield (
                "INSERT INTO calls (id, account_id, key_id, surface, path, offer, state, included_month,"
                " charged_from, created_at_ms) VALUES (?, ?, ?, 'chat', '/', 'twin', 'settled', ?, 'included', ?)",
                (f"req_seed{n}{alice.account.id}", alice.account.id, alice.key_id, month, now),
            )
        sums = usage_day.Sums(calls=499)
        yield from usage_day.add(alice.account.id, None, now, "twin", alice.key_id, usage_day.SERVED, sums)

    await trio_books.run(used_up, deadline_s=10)
    answers = Counter(status for status, _, _ in await many(trio, alice.headers, 200))
    assert answers == {200: 1, 402: 199}
    assert await included_calls.used_now(trio_books, alice.account.id, month) == 500
    assert_books_are_clean(trio)


async def test_one_idempotency_key_is_one_call(
    trio: House, trio_books: Database, twin: str, http: aiohttp.ClientSession
) -> None:
    alice = await enter(trio_books, "alice", plan="wallet", credit_microusd=1_000_000)
    control = twin.removesuffix("/v1")
    async with http.get(f"{control}/requests") as answer:
        before = (await answer.json())["count"]
    headers = alice.headers | {"Idempotency-Key": f"once-{alice.account.id}"}
    asked = [{"role": "user", "content": "delay:1 say:hello"}]
    answers = await many(trio, headers, 50, messages=asked)
    async with http.get(f"{control}/requests") as answer:
        after = (await answer.json())["count"]
    assert {status for status, _, _ in answers} == {200}
    assert len({body for _, body, _ in answers}) == 1
    assert Counter(replayed for _, _, replayed in answers) == {"": 1, "true": 49}
    assert after - before == 1
    balance = await wallet.balance(trio_books, alice.account.id)
    assert (balance.posted, balance.held) == (990_000, 0)
    assert_books_are_clean(trio)


async def test_a_revoked_key_is_refused_by_every_process_on_its_next_call(
    trio: House, trio_books: Database
) -> None:
    alice = await enter(trio_books, "alice", plan="wallet", credit_microusd=1_000_000)
    assert {status for status, _, _ in await many(trio, alice.headers, 30)} == {200}
    await api_key.revoke(alice.account.id, alice.key_id)
    assert {status for status, _, _ in await many(trio, alice.headers, 60)} == {401}
    # Whatever else is wrong with the request: every process remembers this caller from before.
    refused = await many(trio, alice.headers, 30, messages=[])
    assert {status for status, _, _ in refused} == {401}
    assert_books_are_clean(trio)


async def test_the_rate_limit_is_exact(trio: House, trio_books: Database) -> None:
    alice = await enter(trio_books, "alice", plan="wallet", credit_microusd=1_000_000, requests_per_minute=25)
    answers = Counter(status for status, _, _ in await many(trio, alice.headers, 150))
    assert answers == {200: 25, 429: 125}
    assert_books_are_clean(trio)
