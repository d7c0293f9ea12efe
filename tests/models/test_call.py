"""Calls: admission, outcome, and every way in which the two can go wrong."""

from __future__ import annotations

import asyncio
import itertools
import random
import secrets

import pytest
from msgspec import structs

from models import api_key, call, clock, idempotency, ids, ledger, wallet
from models.clock import now_ms
from models.database import Lane
from models.errors import (
    CallerChanged,
    IdempotencyKeyReused,
    InsufficientCredits,
    NotFound,
    RateLimited,
    UnknownKey,
)
from models.rate_limit import Limit, account_bucket
from models.usage import Usage
from tests.cast import enter, give

PRICE = 10  # micro-dollars a token, for the input's one as for the output's


def affordable(available):
    return (min(available // PRICE - 1, 1000), available // PRICE * PRICE) if available >= 2 * PRICE else None


async def wanted(books, actor, *, hold=1000, included=0, included_output_limit=16, at_ms=None, **more):
    """Build an admission of the actor, the key freshly read unless given."""
    at_ms = at_ms or now_ms()
    key = more.pop("key", None)
    if key is None:
        (row,) = await books.fetch("SELECT hash FROM api_keys WHERE id = ?", (actor.key_id,))
        key = await api_key.live_by_hash(books, row[0])
    made = call.Admission(
        call_id=ids.new_id("req"), owner="prc_1", key=key, surface="chat", path="/v1/chat/completions", offer="m",
        streamed=True, rates='{"r": 1}', now_ms=at_ms, limits=(), month=clock.month(at_ms), included_limit=included,
        included_output_limit=included_output_limit, output_limit=99, hold=hold, affordable=lambda _: None,
    )
    return structs.replace(made, **more)


async def admit(books, actor, **more):
    made = await wanted(books, actor, **more)
    return await books.run(lambda: call.admit(made))


def outcome(cost=0, **more):
    return call.Outcome(id=secrets.token_hex(8), status=200, cost=cost, **more)


async def state_of(books, call_id):
    (row,) = await books.fetch("SELECT * FROM calls WHERE id = ?", (call_id,))
    return row


async def entries_of(books, actor):
    rows = await books.fetch("SELECT kind, amount_microusd FROM ledger WHERE account_id = ?", (actor.account.id,))
    return [tuple(row) for row in rows]


async def money_of(books, actor):
    balance = await wallet.balance(books, actor.account.id)
    return balance.posted, balance.held


async def audited(books):
    assert [str(violation) for violation in (await ledger.audit(books, full=True)).violations] == []


# Admission


async def test_a_call_holds_what_it_may_cost(books):
    actor = await enter(books, credit_microusd=1500)
    admitted = await admit(books, actor)
    assert (admitted.hold, admitted.output_limit, admitted.included_month) == (1000, 99, None)
    assert (admitted.included_remaining, admitted.spend_period, admitted.standing) == (None, None, None)
    assert await money_of(books, actor) == (1500, 1000)
    row = await state_of(books, admitted.call_id)
    assert (row["state"], row["hold_microusd"], row["output_limit"], row["rates"]) == ("open", 1000, 99, '{"r": 1}')
    with pytest.raises(InsufficientCredits) as refusal:
        await admit(books, actor)
    assert (refusal.value.needed, refusal.value.available, refusal.value.reason) == (1000, 500, "balance")
    assert await money_of(books, actor) == (1500, 1000)
    await audited(books)


async def test_a_refusal_for_credit_leaves_its_row_and_its_count(books):
    actor = await enter(books, credit_microusd=10)
    claim = idempotency.Claim("k", "f")
    one = await wanted(
        books, actor, limits=(Limit(account_bucket(actor.account.id), 2),), idempotency=claim
    )
    with pytest.raises(InsufficientCredits):
        await books.run(lambda: call.admit(one))
    row = await state_of(books, one.call_id)
    assert (row["state"], row["status"], row["error_code"]) == ("refused", 402, "insufficient_credits")
    assert (row["hold_microusd"], row["rates"], row["included_month"]) == (0, None, None)
    (window,) = await books.fetch("SELECT count FROM rate_windows")
    assert window[0] == 1
    assert await idempotency.find(books, actor.account.id, "k", now_ms()) is None
    await audited(books)


async def test_a_refusal_by_rate_leaves_nothing(books):
    actor = await enter(books, credit_microusd=5000)
    limits = (Limit("wide", 5), Limit("narrow", 1))
    admitted = await admit(books, actor, limits=limits)
    assert (admitted.standing.limit, admitted.standing.remaining) == (1, 0)
    one = await wanted(books, actor, limits=limits, idempotency=idempotency.Claim("k", "f"))
    with pytest.raises(RateLimited) as refusal:
        await books.run(lambda: call.admit(one))
    assert (refusal.value.bucket, refusal.value.limit) == ("narrow", 1)
    assert {tuple(row) for row in await books.fetch("SELECT bucket, count FROM rate_windows")} == {
        ("wide", 1), ("narrow", 1),
    }
    with pytest.raises(NotFound):
        await call.find(books, actor.account.id, one.call_id)
    assert await idempotency.find(books, actor.account.id, "k", now_ms()) is None
    assert await money_of(books, actor) == (5000, 1000)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ("UPDATE api_keys SET revoked_at_ms = 1", UnknownKey),
        ("UPDATE api_keys SET expires_at_ms = 1", UnknownKey),
        ("UPDATE accounts SET state = 'suspended'", UnknownKey),
        ("UPDATE accounts SET state = 'closed'", UnknownKey),
        ("DELETE FROM api_keys", UnknownKey),
        ("UPDATE api_keys SET version = 2", CallerChanged),
        ("UPDATE accounts SET version = 2", CallerChanged),
    ],
)
async def test_a_key_that_changed_since_it_was_read(books, change, error):
    actor = await enter(books, credit_microusd=5000)
    one = await wanted(books, actor, idempotency=idempotency.Claim("k", "f"))

    def script():
        yield change, ()

    await books.run(script)
    with pytest.raises(error):
        await books.run(lambda: call.admit(one))
    assert await money_of(books, actor) == (5000, 0)
    assert list(await books.fetch("SELECT id FROM calls")) == []
    assert list(await books.fetch("SELECT key FROM idempotency_keys")) == []


async def test_the_output_limit_is_lowered_to_what_fits(books):
    actor = await enter(books, credit_microusd=505)
    admitted = await admit(books, actor, affordable=affordable)
    assert (admitted.hold, admitted.output_limit) == (500, 49)
    with pytest.raises(InsufficientCredits):
        await admit(books, actor, affordable=affordable)
    assert await money_of(books, actor) == (505, 500)


async def test_a_disputed_wallet_is_refused_whatever_it_holds(books):
    actor = await enter(books, credit_microusd=5000)

    def script():
        yield "UPDATE wallets SET disputed = 1", ()

    await books.run(script)
    with pytest.raises(InsufficientCredits) as refusal:
        await admit(books, actor, included=5, affordable=affordable)
    assert refusal.value.reason == "disputed"
    assert list(await books.fetch("SELECT used FROM included_calls")) == []


async def test_a_key_s_spending_limit(books):
    actor = await enter(books, credit_microusd=9000, spend_limit_microusd=1500, spend_period="day")
    first = await admit(books, actor)
    assert first.spend_period == clock.day(now_ms())
    with pytest.raises(InsufficientCredits) as refusal:
        await admit(books, actor)
    assert (refusal.value.reason, refusal.value.available, refusal.value.needed) == ("key_limit", 500, 1000)
    lowered = await admit(books, actor, affordable=affordable)
    assert lowered.hold == 500
    await books.run(lambda: call.settle(first.call_id, outcome(200)))
    await books.run(lambda: call.release(lowered.call_id, outcome()))
    rows = await books.fetch("SELECT reserved_microusd, spent_microusd FROM key_spend")
    assert [tuple(row) for row in rows] == [(0, 200)]
    tomorrow = now_ms() + 24 * 3600 * 1000
    assert (await admit(books, actor, at_ms=tomorrow, hold=1500)).hold == 1500
    await audited(books)


async def test_the_wallet_is_named_when_it_is_shorter_than_the_key_s_limit(books):
    actor = await enter(books, credit_microusd=300, spend_limit_microusd=900, spend_period="month")
    with pytest.raises(InsufficientCredits) as refusal:
        await admit(books, actor)
    assert (refusal.value.reason, refusal.value.available) == ("balance", 300)
    rows = await books.fetch("SELECT reserved_microusd FROM key_spend WHERE reserved_microusd > 0")
    assert list(rows) == []


async def test_included_calls_come_first_and_hold_nothing(books):
    actor = await enter(books, credit_microusd=1000, spend_limit_microusd=0, spend_period="day")
    admitted = await admit(books, actor, included=2)
    assert (admitted.hold, admitted.output_limit, admitted.included_remaining) == (0, 16, 1)
    assert admitted.included_month == clock.month(now_ms())
    settled = await books.run(lambda: call.settle(admitted.call_id, outcome(700)))
    assert settled == call.Settled(0, "included", 0)
    assert await money_of(books, actor) == (1000, 0)
    assert await entries_of(books, actor) == [("adjustment", 1000)]
    assert (await state_of(books, admitted.call_id))["cost_microusd"] == 700
    await audited(books)


async def test_an_included_call_too_small_for_the_input_goes_to_the_wallet_and_says_so(books):
    actor = await enter(books, credit_microusd=1000)
    admitted = await admit(books, actor, included=2, included_output_limit=None)
    assert (admitted.hold, admitted.included_month, admitted.included_remaining) == (1000, None, 2)
    with pytest.raises(InsufficientCredits) as refusal:
        await admit(books, actor, included=2, included_output_limit=None)
    assert refusal.value.included_too_small
    limited = await enter(books, credit_microusd=1000, spend_limit_microusd=5, spend_period="day")
    with pytest.raises(InsufficientCredits) as refusal:
        await admit(books, limited, included=2, included_output_limit=None)
    assert (refusal.value.reason, refusal.value.included_too_small) == ("key_limit", True)


async def test_two_hundred_callers_on_the_last_cent(books):
    """P3: as many are admitted as there is money for, and not one more, whatever the prices."""
    actor = await enter(books, credit_microusd=10_000)
    lanes = [Lane(books) for _ in range(3)]
    holds = [random.Random(3).choice([100, 250, 700]) for _ in range(200)]
    admissions = [await wanted(books, actor, hold=hold) for hold in holds]
    outcomes = await asyncio.gather(
        *(
            lanes[n % 3].run((actor.account.id, one.call_id), lambda one=one: call.admit(one), deadline_s=30)
            for n, one in enumerate(admissions)
        ),
        return_exceptions=True,
    )
    admitted = [result for result in outcomes if isinstance(result, call.Admitted)]
    refused = [result for result in outcomes if isinstance(result, InsufficientCredits)]
    assert len(admitted) + len(refused) == 200
    held = sum(result.hold for result in admitted)
    assert await money_of(books, actor) == (10_000, held)
    assert 10_000 - 100 < held <= 10_000  # whoever wanted the least was refused last
    await asyncio.gather(*(
        lanes[n % 3].run(
            (actor.account.id, one.call_id), lambda one=one: call.settle(one.call_id, outcome(one.hold + 5)),
            deadline_s=30,
        )
        for n, one in enumerate(admitted)
    ))
    assert await money_of(books, actor) == (10_000 - held, 0)
    await audited(books)


async def test_the_last_included_call_is_given_once(books):
    """P4: of 200 callers at 499 of 500, exactly one is free."""
    actor = await enter(books)
    month = clock.month(now_ms())

    def script():
        yield "INSERT INTO included_calls (account_id, month, used) VALUES (?, ?, 499)", (actor.account.id, month)

    await books.run(script)
    admissions = [await wanted(books, actor, included=500) for _ in range(200)]
    lanes = [Lane(books) for _ in range(3)]
    outcomes = await asyncio.gather(
        *(
            lanes[n % 3].run((actor.account.id, one.call_id), lambda one=one: call.admit(one), deadline_s=30)
            for n, one in enumerate(admissions)
        ),
        return_exceptions=True,
    )
    free = [result for result in outcomes if isinstance(result, call.Admitted)]
    assert [one.included_remaining for one in free] == [0]
    assert sum(isinstance(result, InsufficientCredits) for result in outcomes) == 199


# Idempotency keys


async def test_one_of_many_equal_requests_runs(books):
    """P9: fifty at once with one key and body: one call, one hold, forty-nine that are told of it."""
    actor = await enter(books, credit_microusd=100_000)
    claim = idempotency.Claim("k", "f")
    admissions = [await wanted(books, actor, idempotency=claim) for _ in range(50)]
    lanes = [Lane(books) for _ in range(3)]
    outcomes = await asyncio.gather(*(
        lanes[n % 3].run((actor.account.id, one.call_id), lambda one=one: call.admit(one), deadline_s=30)
        for n, one in enumerate(admissions)
    ))
    (admitted,) = [result for result in outcomes if isinstance(result, call.Admitted)]
    kept = [result for result in outcomes if isinstance(result, idempotency.Kept)]
    assert {(one.call_id, one.state) for one in kept} == {(admitted.call_id, "running")}
    assert len(kept) == 49
    assert await money_of(books, actor) == (100_000, 1000)
    answer = idempotency.StoredAnswer(200, "application/json", b"\x00{}\xff")
    await books.run(lambda: call.settle(admitted.call_id, outcome(10, answer=answer)))
    replay = await admit(books, actor, idempotency=claim)
    assert (replay.state, replay.status, replay.body) == ("done", 200, b"\x00{}\xff")
    assert await entries_of(books, actor) == [("adjustment", 100_000), ("usage", -10)]


async def test_another_request_under_a_used_key_is_refused(books):
    actor = await enter(books, credit_microusd=5000)
    await admit(books, actor, idempotency=idempotency.Claim("k", "f"))
    with pytest.raises(IdempotencyKeyReused):
        await admit(books, actor, idempotency=idempotency.Claim("k", "g"))
    other = await enter(books, credit_microusd=5000)
    assert isinstance(await admit(books, other, idempotency=idempotency.Claim("k", "g")), call.Admitted)
    assert await money_of(books, actor) == (5000, 1000)


@pytest.mark.parametrize(
    ("end", "state"),
    [
        (lambda one: call.settle(one, outcome(5)), "failed"),
        (lambda one: call.settle(one, outcome(5, answer=idempotency.StoredAnswer(200, "t", None))), "lost"),
        (lambda one: call.settle(one, outcome(5, answer=idempotency.StoredAnswer(200, "t", b""))), "done"),
        (lambda one: call.release(one, outcome()), None),
    ],
)
async def test_what_becomes_of_a_key(books, end, state):
    actor = await enter(books, credit_microusd=5000)
    claim = idempotency.Claim("k", "f")
    admitted = await admit(books, actor, idempotency=claim)
    await books.run(lambda: end(admitted.call_id))
    kept = await idempotency.find(books, actor.account.id, "k", now_ms())
    assert (kept.state if kept else None) == state
    again = await admit(books, actor, idempotency=claim)
    assert isinstance(again, call.Admitted if state is None else idempotency.Kept)


# Outcomes


async def test_charged_is_the_cost_but_never_above_the_hold(books):
    actor = await enter(books, credit_microusd=5000)
    for cost, charged, loss in ((0, 0, 0), (1, 1, 0), (1000, 1000, 0), (1001, 1000, 1)):
        admitted = await admit(books, actor)
        usage = Usage(1, 2, 3, 4, 5, 6, 7, 8)
        settled = await books.run(
            lambda one=admitted.call_id, cost=cost, usage=usage: call.settle(one, outcome(cost, usage=usage))
        )
        assert settled == call.Settled(charged, "wallet", loss)
        row = await state_of(books, admitted.call_id)
        assert (row["state"], row["charged_microusd"], row["house_loss_microusd"]) == ("settled", charged, loss)
        assert [row[name] for name in (
            "input_tokens", "cached_input_tokens", "cache_write_tokens", "output_tokens", "reasoning_tokens",
            "images", "audio_ms", "characters", "cost_microusd",
        )] == [1, 2, 3, 4, 5, 6, 7, 8, cost]
    assert (await entries_of(books, actor))[1:] == [("usage", -1), ("usage", -1000), ("usage", -1000)]
    assert await money_of(books, actor) == (5000 - 2001, 0)
    await audited(books)


ENDS = {
    "settle": lambda books, one: call.settle(one, outcome(300)),
    "settle again": lambda books, one: call.settle(one, outcome(500)),
    "release": lambda books, one: call.release(one, outcome()),
    "expire": lambda books, one: call.expire(books, one, dead_owner="prc_1"),
}


@pytest.mark.parametrize("order", list(itertools.permutations(ENDS, 3)))
async def test_the_first_outcome_is_the_only_one(books, order):
    actor = await enter(books, credit_microusd=1000)
    admitted = await admit(books, actor)
    await books.run(lambda: call.checkpoint("prc_1", [(admitted.call_id, 100, 7)]))
    results = [
        await books.run(lambda end=ENDS[name]: end(books, admitted.call_id)) for name in order
    ]
    assert results[0] and not any(results[1:])
    charged = {"settle": 300, "settle again": 500, "release": 0, "expire": 100}[order[0]]
    assert await money_of(books, actor) == (1000 - charged, 0)
    await audited(books)


async def test_a_settlement_whose_answer_was_lost_is_recognised(books):
    actor = await enter(books, credit_microusd=1000)
    admitted = await admit(books, actor)
    mine = outcome(300)
    first = await books.run(lambda: call.settle(admitted.call_id, mine))
    assert await books.run(lambda: call.settle(admitted.call_id, mine)) == first == call.Settled(300, "wallet", 0)
    assert await books.run(lambda: call.settle(admitted.call_id, outcome(300))) is None
    assert await entries_of(books, actor) == [("adjustment", 1000), ("usage", -300)]


async def test_a_release_gives_everything_back(books):
    actor = await enter(books, credit_microusd=1000, spend_limit_microusd=1000, spend_period="day")
    paid, free = await admit(books, actor), await admit(books, actor, included=1)
    for admitted in (paid, free):
        assert await books.run(lambda one=admitted.call_id: call.release(one, outcome()))
        assert not await books.run(lambda one=admitted.call_id: call.release(one, outcome()))
    assert await money_of(books, actor) == (1000, 0)
    assert [row[0] for row in await books.fetch("SELECT used FROM included_calls")] == [0]
    assert [row[0] for row in await books.fetch("SELECT reserved_microusd FROM key_spend")] == [0]
    assert (await admit(books, actor, included=1)).included_month is not None
    await audited(books)


async def test_attempts_are_written_down_when_there_were_several(books):
    actor = await enter(books, credit_microusd=5000)
    tries = (call.Attempt("a", 500, 1, 2), call.Attempt("b", 200, 2, 3, "up_1"))
    for attempts, rows in ((tries, 2), (tries[1:], 0)):
        admitted = await admit(books, actor)
        await books.run(
            lambda one=admitted.call_id, made=attempts: call.settle(one, outcome(1, attempts=made, upstream="b"))
        )
        assert len(await call.attempts_of(books, admitted.call_id)) == rows
    assert [(row["n"], row["upstream"]) for row in await books.fetch("SELECT * FROM attempts ORDER BY n")] == [
        (1, "a"), (2, "b"),
    ]


# Holding more


async def test_holding_more(books):
    actor = await enter(books, credit_microusd=2000)
    admitted = await admit(books, actor)
    assert await books.run(lambda: call.extend(admitted.call_id, actor.account.id, 600)) is True
    with pytest.raises(InsufficientCredits):
        await books.run(lambda: call.extend(admitted.call_id, actor.account.id, 401))
    assert await money_of(books, actor) == (2000, 1600)
    settled = await books.run(lambda: call.settle(admitted.call_id, outcome(1599)))
    assert (settled.charged, settled.house_loss) == (1599, 0)
    assert await books.run(lambda: call.extend(admitted.call_id, actor.account.id, 1)) is False
    await audited(books)


async def test_an_included_call_holds_nothing_more(books):
    actor = await enter(books, credit_microusd=2000)
    admitted = await admit(books, actor, included=1)
    assert await books.run(lambda: call.extend(admitted.call_id, actor.account.id, 600)) is False
    await books.run(lambda: call.settle(admitted.call_id, outcome(100)))
    assert await money_of(books, actor) == (2000, 0)
    await audited(books)


@pytest.mark.parametrize("limit", [None, 1600])
async def test_holding_more_under_a_limit_that_changes_meanwhile(books, limit):
    actor = await enter(books, credit_microusd=5000, spend_limit_microusd=1000, spend_period="day")
    admitted = await admit(books, actor)
    with pytest.raises(InsufficientCredits) as refusal:
        await books.run(lambda: call.extend(admitted.call_id, actor.account.id, 1))
    assert refusal.value.reason == "key_limit"

    def script():
        period = None if limit is None else "day"
        yield "UPDATE api_keys SET spend_limit_microusd = ?, spend_period = ?, version = 2", (limit, period)

    await books.run(script)
    assert await books.run(lambda: call.extend(admitted.call_id, actor.account.id, 600))
    settled = await books.run(lambda: call.settle(admitted.call_id, outcome(1600)))
    assert settled.charged == 1600
    rows = await books.fetch("SELECT reserved_microusd, spent_microusd FROM key_spend")
    assert [tuple(row) for row in rows] == [(0, 1600)]


# Checkpoints and the reaper


def beat(books, owner, age_ms):
    def script():
        at = f"{books.now_ms_sql} - {age_ms}"
        yield (
            f"INSERT INTO processes (id, host, heartbeat_at_ms, started_at_ms) VALUES (?, 'h', {at}, {at})"
            f" ON CONFLICT (id) DO UPDATE SET heartbeat_at_ms = {at}",
            (owner,),
        )

    return books.run(script)


async def test_checkpoints_name_the_lost(books):
    actor = await enter(books, credit_microusd=5000)
    running, ended = await admit(books, actor), await admit(books, actor)
    await books.run(lambda: call.release(ended.call_id, outcome()))
    marks = [(running.call_id, 10, 3), (ended.call_id, 10, 3)]
    assert await books.run(lambda: call.checkpoint("prc_1", marks)) == [ended.call_id]
    assert await books.run(lambda: call.checkpoint("prc_2", marks[:1])) == [running.call_id]
    row = await state_of(books, running.call_id)
    assert (row["checkpoint_microusd"], row["checkpoint_output_tokens"]) == (10, 3)


@pytest.mark.parametrize(
    ("cost", "tokens", "state", "charged"),
    [(0, 0, "released", 0), (70, 0, "released", 0), (70, 3, "expired", 70), (7000, 3, "expired", 1000)],
)
async def test_a_call_whose_process_died_is_charged_at_its_checkpoint(books, cost, tokens, state, charged):
    actor = await enter(books, credit_microusd=1000, spend_limit_microusd=1000, spend_period="month")
    admitted = await admit(books, actor, idempotency=idempotency.Claim("k", "f"))
    await books.run(lambda: call.checkpoint("prc_1", [(admitted.call_id, cost, tokens)]))
    assert await books.run(lambda: call.expire(books, admitted.call_id))
    assert not await books.run(lambda: call.expire(books, admitted.call_id))
    row = await state_of(books, admitted.call_id)
    assert (row["state"], row["charged_microusd"], row["error_code"]) == (state, charged, "upstream_error")
    assert await money_of(books, actor) == (1000 - charged, 0)
    rows = await books.fetch("SELECT reserved_microusd, spent_microusd FROM key_spend")
    assert [tuple(row) for row in rows] == [(0, charged)]
    kept = await idempotency.find(books, actor.account.id, "k", now_ms())
    assert (kept.state if kept else None) == (None if state == "released" else "failed")
    assert await books.run(lambda: call.settle(admitted.call_id, outcome(900))) is None
    await audited(books)


@pytest.mark.parametrize(("tokens", "used"), [(0, 0), (3, 1)])
async def test_an_included_call_whose_process_died(books, tokens, used):
    actor = await enter(books, credit_microusd=1000)
    admitted = await admit(books, actor, included=1)
    await books.run(lambda: call.checkpoint("prc_1", [(admitted.call_id, 0, tokens)]))
    assert await books.run(lambda: call.expire(books, admitted.call_id))
    assert [row[0] for row in await books.fetch("SELECT used FROM included_calls")] == [used]
    assert await money_of(books, actor) == (1000, 0)
    await audited(books)


async def test_a_living_process_is_never_reaped(books):
    actor = await enter(books, credit_microusd=1000)
    admitted = await admit(books, actor)
    assert await call.open_of_dead(books) == [(admitted.call_id, "prc_1")]
    await beat(books, "prc_1", 29_000)
    assert await call.open_of_dead(books) == []
    assert not await books.run(lambda: call.expire(books, admitted.call_id))
    assert not await books.run(lambda: call.expire(books, admitted.call_id, dead_owner="prc_2"))
    await beat(books, "prc_1", 31_000)
    assert await call.open_of_dead(books) == [(admitted.call_id, "prc_1")]
    assert await call.open_of(books, "prc_1") == [admitted.call_id]
    assert await books.run(lambda: call.expire(books, admitted.call_id))
    assert await call.open_of_dead(books) == []


async def test_hanging_up_is_free_twenty_times_an_hour(books, monkeypatch):
    monkeypatch.setattr(call, "HANG_UPS_PER_HOUR", 2)
    actor = await enter(books, credit_microusd=10_000)
    at_ms = now_ms()
    for n, charged in enumerate((0, 0, 40, 40)):
        admitted = await admit(books, actor)
        ends = (outcome(), outcome(40), at_ms + n)
        await books.run(lambda one=admitted.call_id, ends=ends: call.hang_up(actor.account.id, one, *ends))
        row = await state_of(books, admitted.call_id)
        assert (row["state"], row["charged_microusd"]) == ("settled" if charged else "released", charged)
    admitted = await admit(books, actor)
    await books.run(
        lambda: call.hang_up(actor.account.id, admitted.call_id, outcome(), outcome(40), at_ms + 3600 * 1000)
    )
    assert (await state_of(books, admitted.call_id))["state"] == "released"
    assert await money_of(books, actor) == (10_000 - 80, 0)
    await audited(books)


# Lists


async def test_lists_page_both_ways_and_keep_to_their_account(books):
    actor, other = await enter(books, credit_microusd=100_000), await enter(books, credit_microusd=5000)
    made = [(await admit(books, actor)).call_id for _ in range(5)]
    await admit(books, other)
    everything = call.Filter()

    async def page(narrowed=everything, limit=2, **where):
        return [row["id"] for row in await call.recent(books, actor.account.id, narrowed, limit=limit, **where)]

    newest = sorted(made, reverse=True)
    assert await page(limit=10) == newest
    assert await page() == newest[:2]
    assert await page(after=newest[1]) == newest[2:4]
    assert await page(before=newest[3]) == newest[1:3]
    assert await page(ascending=True, after=newest[3]) == [newest[2], newest[1]]
    assert await page(ascending=True, before=newest[1]) == [newest[3], newest[2]]
    assert await page(after=newest[4]) == await page(before=newest[0]) == []
    await books.run(lambda: call.settle(newest[0], outcome(1)))
    assert await page(call.Filter(state="settled", status=200)) == [newest[0]]
    assert await page(call.Filter(key_id=other.key_id)) == await page(call.Filter(offer="none")) == []
    at = (await state_of(books, newest[0]))["created_at_ms"]
    assert newest[0] in await page(call.Filter(from_ms=at), limit=9)
    assert newest[0] not in await page(call.Filter(until_ms=at), limit=9)
    with pytest.raises(NotFound):
        await call.find(books, other.account.id, newest[0])


async def test_refusals_are_rows_at_no_cost(books):
    actor = await enter(books)
    refusal = call.Refusal(
        ids.new_id("req"), actor.account.id, actor.key_id, "chat", "/v1/x", "m", False, 429, "rate_limited", 1000, 7
    )
    for more in (12, 3):
        await books.run(lambda more=more: call.write_refusals([(refusal, more)]))
    row = await call.find(books, actor.account.id, refusal.call_id)
    assert (row["state"], row["repeated"], row["charged_microusd"]) == ("refused", 15, 0)
    assert (row["status"], row["error_code"], row["finished_at_ms"]) == (429, "rate_limited", 1007)
    await audited(books)


async def test_a_refusal_never_touches_a_call_that_ran(books):
    actor = await enter(books, credit_microusd=5000)
    admitted = await admit(books, actor)
    refusal = call.Refusal(
        admitted.call_id, actor.account.id, actor.key_id, "chat", "/v1/x", "m", False, 429, "rate_limited", 1, 1
    )
    await books.run(lambda: call.write_refusals([(refusal, 9)]))
    row = await state_of(books, admitted.call_id)
    assert (row["state"], row["repeated"], row["status"]) == ("open", 1, None)


async def test_calls_of_ended_keys(books):
    actor, other = await enter(books, credit_microusd=5000), await enter(books, credit_microusd=5000)
    mine, theirs = await admit(books, actor), await admit(books, other)
    assert await api_key.of_ended_keys(books, "prc_1") == set()
    await api_key.revoke(actor.account.id, actor.key_id)
    assert await api_key.of_ended_keys(books, "prc_1") == {mine.call_id}
    assert await api_key.of_ended_keys(books, "prc_2") == set()
    other.account.state = "suspended"
    await other.account.save()
    assert await api_key.of_ended_keys(books, "prc_1") == {mine.call_id, theirs.call_id}


async def test_the_price_is_that_of_the_admission(books):
    """P12: what a call costs is decided by the outcome's cost and the rates on its row, never read again."""
    actor = await enter(books, credit_microusd=5000)
    admitted = await admit(books, actor, rates='{"old": 1}')
    await books.run(lambda: call.settle(admitted.call_id, outcome(77)))
    row = await state_of(books, admitted.call_id)
    assert (row["rates"], row["cost_microusd"], row["charged_microusd"]) == ('{"old": 1}', 77, 77)


@pytest.mark.parametrize("database_kind", ["postgres"], indirect=True)
async def test_lanes_of_several_processes_on_one_account(books, caplog):
    """Keys with limits, idempotency keys, included and paid calls of one account, in and out at once.

    The scripts of one group take locks in many orders: without the account's gate these deadlock.
    """
    actor = await enter(books, credit_microusd=1_000_000, spend_limit_microusd=900_000, spend_period="day")
    processes = [(Lane(books), Lane(books)) for _ in range(3)]
    chance = random.Random(11)
    admissions = [
        await wanted(
            books, actor, hold=100, included=30, included_output_limit=chance.choice([None, 16]),
            limits=(Limit(account_bucket(actor.account.id), 10_000),),
            idempotency=idempotency.Claim(f"k{chance.randrange(20)}", "f") if chance.random() < 0.3 else None,
        )
        for _ in range(300)
    ]

    async def live(n, one):
        admissions_lane, outcomes_lane = processes[n % 3]
        order = (actor.account.id, one.call_id)
        admitted = await admissions_lane.run(order, lambda: call.admit(one), deadline_s=60)
        if isinstance(admitted, call.Admitted):
            ended = outcome(33)
            end = call.settle if n % 4 else call.release
            assert await outcomes_lane.run(order, lambda: end(one.call_id, ended), deadline_s=60)

    await asyncio.gather(*(live(n, one) for n, one in enumerate(admissions)))
    assert caplog.text == ""
    await give(books, actor.account.id, 1)
    assert (await money_of(books, actor))[1] == 0
    await audited(books)


