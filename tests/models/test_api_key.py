"""API keys: only their hash is kept, and a key that ended is ended everywhere."""

from __future__ import annotations

import asyncio

import pytest

from models import api_key, credentials
from models.api_key import ApiKey
from models.clock import now_ms
from models.database import Lane
from models.errors import InsufficientCredits, NotFound
from tests.cast import enter

NOON = 1_795_262_400_000  # 2026-11-21 12:00 UTC


def live(books, actor):
    return api_key.live_by_hash(books, credentials.key_hash(actor.key))


async def test_the_key_itself_is_stored_nowhere(books):
    actor = await enter(books)
    (row,) = await books.fetch("SELECT * FROM api_keys")
    secret = actor.key.removeprefix(credentials.PREFIX)
    assert not any(isinstance(value, str) and (actor.key in value or secret[4:-4] in value) for value in tuple(row))
    assert row["hash"] == credentials.key_hash(actor.key)
    assert actor.key.startswith(row["shown_prefix"]) and actor.key.endswith(row["shown_suffix"])
    assert len(row["shown_prefix"]) + len(row["shown_suffix"]) - len(credentials.PREFIX) == 8


async def test_what_a_call_needs_to_know_is_one_row(books):
    actor = await enter(
        books, plan="pro", scopes=["chat", "models"], models=["b", "a"], addresses=["10.0.0.0/8"],
        spend_limit_microusd=5, spend_period="day", requests_per_minute=3, expires_at_ms=now_ms() + 60_000,
    )
    key = await live(books, actor)
    assert (key.id, key.account_id, key.plan, key.version, key.account_version) == (
        actor.key_id, actor.account.id, "pro", 1, 1,
    )
    assert (key.scopes, key.models, key.addresses) == ({"chat", "models"}, {"a", "b"}, ("10.0.0.0/8",))
    assert (key.spend_limit_microusd, key.spend_period, key.requests_per_minute) == (5, "day", 3)
    plain = await live(books, await enter(books))
    assert (plain.scopes, plain.models, plain.addresses, plain.expires_at_ms) == (None, None, None, None)
    none = await live(books, await enter(books, scopes=[], models=[]))
    assert (none.scopes, none.models) == (frozenset(), frozenset())  # nothing allowed is not everything allowed


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE api_keys SET revoked_at_ms = 1",
        "UPDATE api_keys SET expires_at_ms = 1",
        "UPDATE accounts SET state = 'suspended'",
        "UPDATE accounts SET state = 'closed'",
    ],
)
async def test_a_key_that_ended_is_unknown(books, change):
    actor = await enter(books)
    assert (await live(books, actor)).id == actor.key_id
    assert await books.run(lambda: api_key.is_live(actor.key_id, now_ms()))

    def script():
        yield change, ()

    await books.run(script)
    assert await live(books, actor) is None
    assert not await books.run(lambda: api_key.is_live(actor.key_id, now_ms()))


async def test_unknown_keys(books):
    await enter(books)
    assert await api_key.live_by_hash(books, credentials.key_hash(credentials.new_key())) is None
    assert not await books.run(lambda: api_key.is_live("key_nothing", now_ms()))


async def test_a_key_ends_at_the_moment_it_expires(books):
    actor = await enter(books, expires_at_ms=NOON)
    assert await books.run(lambda: api_key.is_live(actor.key_id, NOON - 1))
    assert not await books.run(lambda: api_key.is_live(actor.key_id, NOON))


async def test_revoking(books):
    actor, other = await enter(books), await enter(books)
    for account_id, key_id in ((other.account.id, actor.key_id), (actor.account.id, "key_nothing")):
        with pytest.raises(NotFound):
            await api_key.revoke(account_id, key_id)
    await api_key.revoke(actor.account.id, actor.key_id)
    at = (await ApiKey.get(id=actor.key_id)).revoked_at_ms
    await asyncio.sleep(0.002)
    await api_key.revoke(actor.account.id, actor.key_id)
    assert (await ApiKey.get(id=actor.key_id)).revoked_at_ms == at  # the first revocation is the one that counts
    assert await live(books, actor) is None
    assert (await live(books, other)).id == other.key_id


async def test_names_are_bounded(books):
    actor = await enter(books)
    key, _ = await api_key.create(actor.account, f"  {'x' * 500}  ")
    assert key.name == "x" * api_key.NAME_LENGTH_MAX


async def test_last_use_never_goes_back(books):
    actor = await enter(books)
    for at_ms, seen in ((5, 5), (3, 5), (9, 9)):
        await books.run(lambda at_ms=at_ms: api_key.note_used({actor.key_id: at_ms, "key_gone": 1}))
        assert (await ApiKey.get(id=actor.key_id)).last_used_at_ms == seen


# Spending limits


@pytest.mark.parametrize(("period", "name"), [("day", "2026-11-21"), ("month", "2026-11")])
def test_the_period_a_limit_counts_in(period, name):
    assert api_key.spend_period(period, NOON) == name


def reserving(books, amount, limit=100, period="p"):
    return books.run(lambda: api_key.reserve_spending("key_1", period, limit, amount))


async def spend(books):
    rows = await books.fetch("SELECT period, reserved_microusd, spent_microusd FROM key_spend ORDER BY period")
    return [tuple(row) for row in rows]


async def test_a_limit_holds_to_the_micro_dollar(books):
    await reserving(books, 60)
    with pytest.raises(InsufficientCredits) as refusal:
        await reserving(books, 41)
    assert (refusal.value.needed, refusal.value.available, refusal.value.reason) == (41, 40, "key_limit")
    await reserving(books, 40)
    await books.run(lambda: api_key.settle_spending("key_1", "p", 60, 10))
    assert await spend(books) == [("p", 40, 10)]
    with pytest.raises(InsufficientCredits):
        await reserving(books, 51)
    await reserving(books, 50)
    await reserving(books, 100, period="q")
    assert await spend(books) == [("p", 90, 10), ("q", 100, 0)]


async def test_a_first_amount_above_the_limit_leaves_nothing(books):
    with pytest.raises(InsufficientCredits) as refusal:
        await reserving(books, 101)
    assert refusal.value.available == 100
    assert await spend(books) == []


async def test_a_limit_lowered_below_what_was_spent(books):
    await reserving(books, 80)
    with pytest.raises(InsufficientCredits) as refusal:
        await reserving(books, 1, limit=50)
    assert refusal.value.available == 0


async def test_many_at_once_stay_within_the_limit(books):
    lanes = [Lane(books) for _ in range(3)]
    outcomes = await asyncio.gather(
        *(
            lanes[n % 3].run((n,), lambda: api_key.reserve_spending("key_1", "p", 100, 7), deadline_s=30)
            for n in range(60)
        ),
        return_exceptions=True,
    )
    assert sum(outcome is None for outcome in outcomes) == 14
    assert await spend(books) == [("p", 98, 0)]
