"""Usage by day: every outcome adds itself once, to the day its call began on; lists find what lies apart."""

from __future__ import annotations

import asyncio
import random
import secrets

import pytest

from models import call, clock, ids, usage_day
from models.clock import now_ms
from models.errors import InsufficientCredits
from models.usage import Usage
from models.usage_day import DAY_MS, Part, Sums
from tests.cast import enter
from tests.models.test_call import admit, audited, outcome, wanted

USED = Usage(input_tokens=70, cached_input_tokens=20, cache_write_tokens=5, output_tokens=9)


async def days_of(books, actor):
    rows = await books.fetch(
        "SELECT day, offer, key_id, outcome, calls, input_tokens, cached_input_tokens, output_tokens,"
        " cost_microusd, charged_microusd FROM usage_days WHERE account_id = ? ORDER BY day, offer, outcome",
        (actor.account.id,),
    )
    assert all(row["key_id"] == actor.key_id for row in rows)
    return [(row["day"], row["offer"], row["outcome"], *tuple(row)[4:]) for row in rows]


def refusal(actor, *, status=429, at_ms=None, offer="m", call_id=None):
    at_ms = at_ms or now_ms()
    return call.Refusal(
        call_id or ids.new_id("req"), actor.account.id, actor.key_id, "chat", "/v1/x", offer, False, status,
        "rate_limited", at_ms, 1,
    )


async def made(books, actor, at_ms, *, offer="m", status=200, ended=True, age_ms=200):
    """Write a call of a moment as history has it, its id a little older than itself."""
    call_id = ids.first_id_at("req", at_ms - age_ms)[:-10] + secrets.token_hex(5)
    admitted = await admit(books, actor, at_ms=at_ms, call_id=call_id, offer=offer, hold=1)
    if ended and status == 200:
        await books.run(lambda: call.settle(call_id, outcome(1)))
    elif ended:
        await books.run(lambda: call.release(call_id, call.Outcome(id=call_id, status=status)))
    return admitted.call_id


# Sums


async def test_what_a_call_came_to_is_in_its_day(books):
    actor = await enter(books, credit_microusd=10_000)
    yesterday = now_ms() - DAY_MS
    one = await admit(books, actor, at_ms=yesterday)
    assert await days_of(books, actor) == []  # it has not ended
    ended = outcome(300, usage=USED)
    for _ in range(3):  # an outcome that is repeated is the same outcome
        await books.run(lambda: call.settle(one.call_id, ended))
        await books.run(lambda: call.release(one.call_id, outcome()))
    day = clock.day(yesterday)
    assert await days_of(books, actor) == [(day, "m", "served", 1, 75, 20, 9, 300, 300)]
    two = await admit(books, actor, at_ms=yesterday)
    await books.run(lambda: call.settle(two.call_id, outcome(2000, usage=USED)))
    assert await days_of(books, actor) == [(day, "m", "served", 2, 150, 40, 18, 2300, 1300)]
    await audited(books)


async def test_every_other_end_is_in_its_day(books):
    actor = await enter(books, credit_microusd=10_000)
    day = clock.day(now_ms())
    free = await admit(books, actor, included=5, offer="free")
    await books.run(lambda: call.settle(free.call_id, outcome(40, usage=USED)))
    broken = await admit(books, actor, offer="broken")
    cut = call.Outcome(id="cut", status=502, usage=Usage(output_tokens=3), cost=30)
    await books.run(lambda: call.settle(broken.call_id, cut))
    for status in (499, 502, 200):
        gone = await admit(books, actor, offer="released", included=5 if status == 499 else 0)
        ended = call.Outcome(id=secrets.token_hex(4), status=status)
        assert await books.run(lambda gone=gone, ended=ended: call.release(gone.call_id, ended))
    for tokens in (0, 7):
        dead = await admit(books, actor, offer="expired", input_tokens=11)
        await books.run(lambda dead=dead, tokens=tokens: call.checkpoint("prc_1", [(dead.call_id, 50, tokens)]))
        for _ in range(2):
            await books.run(lambda dead=dead: call.expire(books, dead.call_id), gate=actor.account.id)
    short = await wanted(books, actor, hold=10**9, offer="refused")
    with pytest.raises(InsufficientCredits):
        await books.run(lambda: call.admit(short))
    assert await days_of(books, actor) == [
        (day, "broken", "failed", 1, 0, 0, 3, 30, 30),
        (day, "expired", "failed", 2, 11, 0, 7, 50, 50),
        (day, "free", "served", 1, 75, 20, 9, 40, 0),
        (day, "refused", "refused", 1, 0, 0, 0, 0, 0),
        (day, "released", "failed", 3, 0, 0, 0, 0, 0),
    ]
    # An answer that could not be charged was not given: its row does not say 200.
    rows = await books.fetch("SELECT status FROM calls WHERE offer = 'released' ORDER BY status")
    assert [row[0] for row in rows] == [499, 502, 503]
    await audited(books)


async def test_hanging_up_is_a_failure_whether_it_is_paid_or_not(books, monkeypatch):
    monkeypatch.setattr(call, "HANG_UPS_PER_HOUR", 1)
    actor = await enter(books, credit_microusd=10_000)
    for _ in range(2):
        one = await admit(books, actor)
        free, paid = call.Outcome(id="f", status=499), call.Outcome(id="p", status=499, cost=5, usage=Usage(5))
        await books.run(
            lambda one=one, free=free, paid=paid: call.hang_up(actor.account.id, one.call_id, free, paid, now_ms())
        )
    assert await days_of(books, actor) == [(clock.day(now_ms()), "m", "failed", 2, 5, 0, 0, 5, 5)]
    await audited(books)


async def test_refusals_count_as_often_as_they_happened(books):
    actor = await enter(books, credit_microusd=5000)
    one, other = refusal(actor), refusal(actor, offer="n")
    for more in (12, 3):
        await books.run(lambda more=more: call.write_refusals([(one, more), (other, 1)]))
    running = await admit(books, actor)
    await books.run(lambda: call.write_refusals([(refusal(actor, call_id=running.call_id), 9)]))
    day = clock.day(now_ms())
    assert await days_of(books, actor) == [
        (day, "m", "refused", 15, 0, 0, 0, 0, 0), (day, "n", "refused", 2, 0, 0, 0, 0, 0),
    ]
    await audited(books)


async def test_sums_of_a_part_and_of_nobody_else(books):
    actor, other = await enter(books, credit_microusd=10_000), await enter(books, credit_microusd=10_000)
    now = now_ms()
    for back, offer, status in ((0, "m", 200), (1, "m", 200), (1, "n", 502), (9, "n", 200)):
        await made(books, actor, now - back * DAY_MS, offer=offer, status=status)
    await made(books, other, now)
    await books.run(lambda: call.write_refusals([(refusal(actor, at_ms=now), 1)]))
    mine = actor.account.id

    async def calls_of(**part):
        found = (await usage_day.summary(books, mine, Part(**part))).all
        return found.calls, found.failed, found.refused

    assert await calls_of() == (5, 1, 1)
    assert await calls_of(from_day=clock.day(now - DAY_MS)) == (4, 1, 1)
    assert await calls_of(until_day=clock.day(now - 2 * DAY_MS)) == (1, 0, 0)
    assert await calls_of(offer="n", outcomes=("failed",)) == (1, 1, 0)
    assert await calls_of(key_id=other.key_id) == (0, 0, 0)
    found = await usage_day.summary(books, mine, Part())
    assert {day: sums.calls for day, sums in found.by_day.items()} == {
        clock.day(now - 9 * DAY_MS): 1, clock.day(now - DAY_MS): 2, clock.day(now): 2,
    }
    assert [(offer, sums.calls, sums.charged) for offer, sums in found.offers] == [("m", 3, 2), ("n", 2, 1)]
    assert await usage_day.offers_of(books, mine, "2000-01-01", limit=9) == ["m", "n"]
    assert await usage_day.offers_of(books, mine, clock.day(now), limit=9) == ["m"]
    assert await usage_day.offers_of(books, mine, "2000-01-01", limit=1) == ["m"]
    assert await usage_day.offers_of(books, "acc_nobody", "2000-01-01", limit=9) == []
    # Old days are remembered, new ones are not; together they are what they are without.
    older = usage_day.OlderDays()
    await made(books, actor, now - 4 * DAY_MS)
    for _ in range(2):
        for day in (None, clock.day(now), clock.day(now - DAY_MS), clock.day(now - 9 * DAY_MS)):
            for part in (Part(from_day=day), Part(until_day=day), Part(offer="n", from_day=day)):
                assert await usage_day.summary(books, mine, part, older) == await usage_day.summary(
                    books, mine, part
                )
        await made(books, actor, now, offer="n")
    assert (await usage_day.summary(books, other.account.id, Part(), older)).all.calls == 1
    assert (await usage_day.summary(books, "acc_nobody", Part())).all == Sums()


def test_days_are_utc_days():
    midnight = usage_day.start_of("2026-03-01")
    assert usage_day.day_of(midnight) == "2026-03-01" and usage_day.day_of(midnight - 1) == "2026-02-28"
    assert usage_day.days_before("2026-03-01", 1) == "2026-02-28"
    assert usage_day.days_before("2026-02-28", -1) == "2026-03-01"


async def test_the_database_and_we_name_days_alike(books):
    for at_ms in (0, usage_day.start_of("2024-02-29") - 1, usage_day.start_of("2024-02-29"), now_ms()):
        sql = usage_day.day_sql(books.dialect).replace("created_at_ms", f"CAST({at_ms} AS BIGINT)")
        assert (await books.fetch(f"SELECT {sql}"))[0][0] == usage_day.day_of(at_ms)


async def test_refusals_and_outcomes_at_once(books):
    """What is written outside of the lanes takes the same gate, so that nothing waits in a circle."""
    actors = [await enter(books, f"a{n}", credit_microusd=1_000_000) for n in range(3)]
    offers = [f"o{n}" for n in range(5)]
    chance = random.Random(5)

    async def refuse():
        for _ in range(20):
            group = sorted(chance.sample(actors, 2), key=lambda actor: actor.account.id)
            makes = [
                lambda actor=actor: call.write_refusals([(refusal(actor, offer=chance.choice(offers)), 1)] * 3)
                for actor in group
            ]
            assert await books.own(books.run_group(makes, [actor.account.id for actor in group], aside=True)) == [
                None, None,
            ]

    async def expire():
        for _ in range(20):
            actor = chance.choice(actors)
            one = await admit(books, actor, hold=10, offer=chance.choice(offers))
            ended = books.run(
                lambda one=one: call.expire(books, one.call_id, dead_owner="prc_1"), gate=actor.account.id,
                deadline_s=30,
            )
            assert await ended

    await asyncio.gather(refuse(), refuse(), expire(), expire())
    await audited(books)


# Lists that skip what does not match


@pytest.mark.parametrize(("at_first", "at_most"), [(3, 1_000), (2, 7), (2_000, 200_000)])
async def test_a_list_finds_what_lies_far_apart(books, monkeypatch, at_first, at_most):
    """Whether it is found by looking around, day by day, or in many goes."""
    for kind in ("CALLS", "ROWS"):
        monkeypatch.setattr(call, f"_{kind}_AT_FIRST", at_first)
        monkeypatch.setattr(call, f"_{kind}_AT_MOST", at_most)
    actor = await enter(books, credit_microusd=1_000_000)
    start = usage_day.start_of(clock.day(now_ms())) - 200 * DAY_MS
    chance = random.Random(3)
    # Side by side, far apart, and at the very edges of days.
    moments = [start + day * DAY_MS + ms for day in (0, 1, 2, 50, 51, 120, 199) for ms in (0, 5, DAY_MS - 1)]
    moments += [start + chance.randrange(199 * DAY_MS) for _ in range(20)]
    rare, failed, common = [], [], []
    for n, at_ms in enumerate(moments):
        rare.append(await made(books, actor, at_ms, offer="rare"))
        common.append(await made(books, actor, at_ms + 1000, offer="common"))
        if n % 3 == 0:
            failed.append(await made(books, actor, at_ms + 500, offer="common", status=502))
    running = await made(books, actor, now_ms(), offer="rare", ended=False)
    one = refusal(actor, at_ms=start + 60 * DAY_MS, call_id=ids.first_id_at("req", start + 60 * DAY_MS))
    await books.run(lambda: call.write_refusals([(one, 4)]))

    async def listed(size, *, ascending=False, **narrowed):
        """Walk all pages one way and then back again."""
        found, after = [], None
        while rows := await call.recent(
            books, actor.account.id, call.Filter(**narrowed), limit=size, after=after, ascending=ascending
        ):
            found += [row["id"] for row in rows]
            after = found[-1]
        back, before = [], after
        while before and (rows := await call.recent(
            books, actor.account.id, call.Filter(**narrowed), limit=size, before=before, ascending=ascending
        )):
            back = [row["id"] for row in rows] + back
            before = back[0]
        assert back == found[:-1]
        return found

    for size in (3, 100):
        for ascending in (False, True):
            def ordered(expected, ascending=ascending):
                return sorted(expected, reverse=not ascending)

            assert await listed(size, ascending=ascending, offer="rare") == ordered([*rare, running])
            assert await listed(size, ascending=ascending, outcome="failed") == ordered(failed)
            assert await listed(size, ascending=ascending, outcome="refused") == [one.call_id]
            assert await listed(size, ascending=ascending, outcome="running") == [running]
            assert await listed(size, ascending=ascending, offer="rare", outcome="served") == ordered(rare)
            assert await listed(size, ascending=ascending, status=502) == ordered(failed)
            assert await listed(size, ascending=ascending, state="released") == ordered(failed)
            assert await listed(size, ascending=ascending, key_id=actor.key_id, offer="common") == ordered(
                [*common, *failed]
            )
            assert await listed(size, ascending=ascending, offer="none") == []
    first, last = start + DAY_MS, start + 51 * DAY_MS
    assert await listed(4, offer="rare", from_ms=first, until_ms=last) == sorted(
        (one for one, at in zip(rare, moments, strict=True) if first <= at < last), reverse=True
    )


@pytest.mark.parametrize("limit", [1, 3, 50])
async def test_days_reach_into_one_another(books, monkeypatch, limit):
    """An id is as old as its call's body was slow, so around midnight ids are in another order than days are."""
    monkeypatch.setattr(call, "_CALLS_AT_FIRST", 2)
    monkeypatch.setattr(call, "_CALLS_AT_MOST", 400)
    monkeypatch.setattr(call, "_DAYS_AT_FIRST", 2)
    monkeypatch.setattr(call, "_DAYS_AT_ONCE", 3)
    chance = random.Random(limit)
    for n in range(6):
        actor = await enter(books, f"a{n}", credit_microusd=1_000_000)
        midnight = usage_day.start_of(clock.day(now_ms())) - 40 * DAY_MS
        rare = []
        for day in range(8):
            for _ in range(chance.choice((0, 1, 1, 2, 4))):
                at_ms = midnight + day * DAY_MS + chance.randrange(-40, 40) * 60_000
                age_ms = chance.choice((0, 1, 20, 59)) * 60_000
                rare.append(await made(books, actor, at_ms, offer="rare", age_ms=age_ms))
                await made(books, actor, at_ms + chance.randrange(-20, 20) * 60_000)
        for ascending in (False, True):
            for joined in (0, 6, 10_000):
                monkeypatch.setattr(call, "_ROWS_AT_MOST", joined)
                found, after = [], None
                while rows := await call.recent(
                    books, actor.account.id, call.Filter(offer="rare"), limit=limit, after=after,
                    ascending=ascending,
                ):
                    found += [row["id"] for row in rows]
                    after = found[-1]
                assert found == sorted(rare, reverse=not ascending)


async def test_a_day_is_read_between_the_first_and_the_last_that_match(books, monkeypatch):
    """However many others there are around them; but history that does not know them is read whole."""
    monkeypatch.setattr(call, "_CALLS_AT_FIRST", 2)
    monkeypatch.setattr(call, "_CALLS_AT_MOST", 20)
    actor = await enter(books, credit_microusd=1_000_000)
    start = usage_day.start_of(clock.day(now_ms())) - 10 * DAY_MS
    rare = [await made(books, actor, start + day * 2 * DAY_MS, offer="rare") for day in range(4)]
    for day in range(4):
        for n in range(15):
            await made(books, actor, start + day * 2 * DAY_MS + 3_600_000 + n)
    narrowed, asked, report = call.Filter(offer="rare"), [], books.report

    async def noted(sql, arguments=(), **how):
        asked.append(arguments)
        return await report(sql, arguments, **how)

    monkeypatch.setattr(books, "report", noted)
    found = await call.page(books, actor.account.id, narrowed, limit=9)
    assert [row["id"] for row in found.rows] == rare[::-1] and found.reached is None
    (windows,) = (arguments for arguments in asked if rare[0] in arguments)
    assert [value for value in windows if value in rare] == [one for one in rare[::-1] for _ in "<>"]
    await books.run(lambda: widest(actor))
    found = await call.page(books, actor.account.id, narrowed, limit=9)
    assert [row["id"] for row in found.rows] == rare[:2:-1] and found.reached is not None
    rows = await call.recent(books, actor.account.id, narrowed, limit=9)
    assert [row["id"] for row in rows] == rare[::-1]


def widest(actor):
    """Make sums know as little of their calls as those of before do."""
    yield "UPDATE usage_days SET first_id = '', last_id = '~' WHERE account_id = ?", (actor.account.id,)


@pytest.mark.parametrize("ascending", [False, True])
async def test_a_page_looks_through_no_more_than_it_may(books, monkeypatch, ascending):
    for kind in ("CALLS", "ROWS"):
        monkeypatch.setattr(call, f"_{kind}_AT_FIRST", 4)
        monkeypatch.setattr(call, f"_{kind}_AT_MOST", 10)
    actor = await enter(books, credit_microusd=1_000_000)
    start = usage_day.start_of(clock.day(now_ms())) - 3 * DAY_MS
    made_at = [start + n * 3600 * 1000 for n in range(60)]
    everything = [
        await made(books, actor, at, offer="rare" if n % 15 == 7 else "m") for n, at in enumerate(made_at)
    ]
    await books.run(lambda: widest(actor))
    running = await made(books, actor, made_at[30] + 1, offer="rare", ended=False)
    looked, report = [], books.report

    async def counted(sql, arguments=(), **how):
        if "LIMIT 1 OFFSET" in sql:
            looked.append(arguments[-1])
        return await report(sql, arguments, **how)

    monkeypatch.setattr(books, "report", counted)
    rare = sorted([one for n, one in enumerate(everything) if n % 15 == 7] + [running], reverse=not ascending)
    for limit in (1, 2, 50):
        found, after, goes = [], None, 0
        while True:
            looked.clear()
            part = await call.page(
                books, actor.account.id, call.Filter(offer="rare"), limit=limit, after=after, ascending=ascending
            )
            # At first four; then days of 24 calls, of which there are six left to look through.
            assert looked in ([3], [3, 5])
            assert len(part.rows) <= limit
            found += [row["id"] for row in part.rows]
            goes += 1
            if part.reached is None and len(part.rows) < limit:
                break
            after = part.reached or part.rows[-1]["id"]
        assert found == rare and goes > 5
    back = await call.recent(
        books, actor.account.id, call.Filter(offer="rare"), limit=9, before=rare[-1], ascending=ascending
    )
    assert [row["id"] for row in back] == rare[:-1]


@pytest.mark.parametrize("database_kind", ["sqlite"], indirect=True)
async def test_what_does_not_match_is_told_by_the_index(books):
    """A filter by key or model must not fetch the rows of other calls to find that out."""
    actor = await enter(books, credit_microusd=10_000)
    await made(books, actor, now_ms())
    for condition, index in (("", "calls_account"), (" AND status >= 400 AND state = 'refused'", "calls_failed")):
        rows = await books.report(
            f"EXPLAIN QUERY PLAN SELECT id FROM calls INDEXED BY {index}"
            f" WHERE account_id = ? AND key_id = 'k' AND offer = 'm'{condition} ORDER BY id DESC",
            (actor.account.id,),
        )
        assert [row["detail"] for row in rows] == [f"SEARCH calls USING COVERING INDEX {index} (account_id=?)"]


@pytest.mark.parametrize("database_kind", ["sqlite"], indirect=True)
async def test_lists_are_read_by_the_indexes_made_for_them(books, monkeypatch):
    """A filter must not read all that went well, nor all that ever was."""
    actor = await enter(books, credit_microusd=10_000)
    await made(books, actor, now_ms(), status=502)
    plans, report = [], books.report

    async def explained(sql, arguments=(), **how):
        plans.append(" ".join(row["detail"] for row in await report(f"EXPLAIN QUERY PLAN {sql}", arguments)))
        return await report(sql, arguments, **how)

    monkeypatch.setattr(books, "report", explained)
    for narrowed, index in (
        (call.Filter(), "calls_account"), (call.Filter(offer="m"), "calls_account"),
        (call.Filter(outcome="failed"), "calls_failed"), (call.Filter(status=502), "calls_failed"),
        (call.Filter(key_id="k", offer="m", outcome="refused"), "calls_failed"),
        (call.Filter(outcome="running"), "calls_open"),
    ):
        plans.clear()
        await call.recent(books, actor.account.id, narrowed, limit=5)
        assert any(index in plan for plan in plans), (narrowed, plans)
        read = [plan for plan in plans if "SEARCH calls USING" in plan and "calls_open" not in plan]
        assert all(index in plan for plan in read), (narrowed, plans)
        assert not any("SCAN calls" in plan for plan in plans), (narrowed, plans)
    monkeypatch.setattr(books, "fetch", explained)
    plans.clear()
    assert await call.open_of_dead(books) == []  # every few seconds, so it must not read history
    assert "calls_open" in plans[0] and "autoindex_calls" not in plans[0], plans
