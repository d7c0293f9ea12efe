"""Included calls: so many a UTC month, and not one more."""

from __future__ import annotations

import pytest

from models import call, clock
from models.included_calls import give_back, take, used, used_now
from tests.cast import enter
from tests.models.test_call import admit, outcome

NOVEMBER, DECEMBER = "2026-11", "2026-12"
END_OF_NOVEMBER_MS = clock.month_end_ms(1_795_000_000_000)


async def test_the_five_hundredth_is_free_and_the_next_is_not(books):
    account = (await enter(books)).account.id

    def many():
        for n in range(1, 500):
            assert (yield from take(account, NOVEMBER, 500)) == n

    await books.run(many, deadline_s=10)
    assert await books.run(lambda: take(account, NOVEMBER, 500)) == 500
    assert await books.run(lambda: take(account, NOVEMBER, 500)) is None
    assert await books.run(lambda: take(account, DECEMBER, 500)) == 1
    assert await books.run(lambda: used(account, NOVEMBER)) == await used_now(books, account, NOVEMBER) == 500
    assert await books.run(lambda: used(account, "2027-01")) == await used_now(books, account, "2027-01") == 0


async def test_accounts_are_apart(books):
    one, other = [(await enter(books)).account.id for _ in range(2)]
    assert await books.run(lambda: take(one, NOVEMBER, 1)) == 1
    assert await books.run(lambda: take(other, NOVEMBER, 1)) == 1
    assert await books.run(lambda: take("acc_nobody", NOVEMBER, 1)) is None


@pytest.mark.parametrize("state", ["disputed = 1", "posted_microusd = -1"])
async def test_a_wallet_disputed_or_below_zero_has_none(books, state):
    account = (await enter(books)).account.id

    def script():
        yield f"UPDATE wallets SET {state}", ()

    assert await books.run(lambda: take(account, NOVEMBER, 5)) == 1
    await books.run(script)
    assert await books.run(lambda: take(account, NOVEMBER, 5)) is None
    assert await books.run(lambda: take(account, DECEMBER, 5)) is None


async def test_a_call_given_back_returns_to_the_month_it_came_from(books):
    """P4: admitted in the last second of November, released in December."""
    actor = await enter(books, credit_microusd=10_000)
    assert clock.month(END_OF_NOVEMBER_MS - 1) == NOVEMBER
    late = await admit(books, actor, included=2, at_ms=END_OF_NOVEMBER_MS - 1)
    early = await admit(books, actor, included=2, at_ms=END_OF_NOVEMBER_MS)
    assert (late.included_month, early.included_month) == (NOVEMBER, DECEMBER)
    await books.run(lambda: call.release(late.call_id, outcome()))
    await books.run(lambda: call.settle(early.call_id, outcome(9)))
    assert await used_now(books, actor.account.id, NOVEMBER) == 0
    assert await used_now(books, actor.account.id, DECEMBER) == 1


async def test_nothing_is_given_back_twice(books):
    account = (await enter(books)).account.id
    await books.run(lambda: take(account, NOVEMBER, 5))
    await books.run(lambda: give_back(account, NOVEMBER))
    with pytest.raises(Exception, match="(?i)check"):
        await books.run(lambda: give_back(account, NOVEMBER))
    assert await used_now(books, account, NOVEMBER) == 0
