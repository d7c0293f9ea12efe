"""Wallets: credit once, hold what is there, charge what was held."""

from __future__ import annotations

import asyncio
import sqlite3

import asyncpg
import pytest

from models import ids, ledger, wallet
from models.clock import now_ms
from models.database import Lane
from models.errors import NotFound
from models.wallet import Balance
from tests.cast import enter

CONSTRAINT_HELD = (sqlite3.IntegrityError, asyncpg.IntegrityConstraintViolationError)


def credit(account_id, amount, reference, kind=ledger.ADJUSTMENT):
    return lambda: wallet.credit(account_id, amount, kind, reference, ledger.PROMOTIONS, "because", now_ms())


async def look(books, actor):
    by_script = await books.run(lambda: wallet.look(actor.account.id))
    assert by_script == await wallet.balance(books, actor.account.id)
    return by_script


async def change(books, sql, *arguments):
    def script():
        yield sql, arguments

    await books.run(script)


async def test_a_new_wallet_is_empty(books):
    assert await look(books, await enter(books)) == Balance(0, 0, False)


@pytest.mark.parametrize(
    ("balance", "available"),
    [(Balance(10, 3, False), 7), (Balance(3, 10, False), 0), (Balance(-5, 0, False), 0), (Balance(9, 0, True), 9)],
)
def test_what_is_available(balance, available):
    assert balance.available == available


async def test_credit_is_added_once_per_reference(books):
    actor = await enter(books)
    account = actor.account.id
    assert await books.run(credit(account, 500, "r1")) == 500
    assert await books.run(credit(account, 500, "r1")) == 500
    assert await books.run(credit(account, 9, "r1")) == 500
    assert await books.run(credit(account, 7, "r2")) == 507
    assert await books.run(credit(account, 1, "r1", kind="top_up")) == 508
    rows = await books.fetch("SELECT * FROM ledger ORDER BY seq")
    assert [(row["seq"], row["amount_microusd"], row["balance_after_microusd"]) for row in rows] == [
        (1, 500, 500), (2, 7, 507), (3, 1, 508),
    ]
    assert (rows[0]["debit_account"], rows[0]["credit_account"]) == ("promotions", f"wallet:{account}")
    assert rows[0]["reason"] == "because"


async def test_the_same_credit_from_many_sides_at_once_is_added_once(books):
    """P7: a webhook delivered many times at once."""
    actor = await enter(books)
    lanes = [Lane(books) for _ in range(4)]
    balances = await asyncio.gather(*(
        lanes[n % 4].run((actor.account.id,), credit(actor.account.id, 500, "event"), deadline_s=10)
        for n in range(40)
    ))
    assert set(balances) == {500}
    assert await look(books, actor) == Balance(500, 0, False)


@pytest.mark.parametrize("amount", [0, -1])
async def test_credit_is_positive(books, amount):
    actor = await enter(books)
    with pytest.raises(ValueError, match="positive"):
        await books.run(credit(actor.account.id, amount, "r"))


async def test_unknown_accounts(books):
    with pytest.raises(NotFound):
        await books.run(credit("acc_nobody", 5, "r"))
    with pytest.raises(NotFound):
        await books.run(lambda: wallet.look("acc_nobody"))
    with pytest.raises(NotFound):
        await wallet.balance(books, "acc_nobody")
    assert await books.run(lambda: wallet.reserve("acc_nobody", 0)) is False


async def test_a_hold_needs_the_money(books):
    actor = await enter(books, credit_microusd=100)
    account = actor.account.id
    assert await books.run(lambda: wallet.reserve(account, 101)) is False
    assert await books.run(lambda: wallet.reserve(account, 60)) is True
    assert await books.run(lambda: wallet.reserve(account, 41)) is False
    assert await books.run(lambda: wallet.reserve(account, 40)) is True
    assert await books.run(lambda: wallet.reserve(account, 0)) is True
    assert await look(books, actor) == Balance(100, 100, False)


@pytest.mark.parametrize("state", ["disputed = 1", "posted_microusd = -1"])
async def test_a_wallet_disputed_or_below_zero_holds_nothing_not_even_nothing(books, state):
    actor = await enter(books, credit_microusd=100)
    await change(books, f"UPDATE wallets SET {state}")
    assert await books.run(lambda: wallet.reserve(actor.account.id, 0)) is False


async def test_settling_and_releasing(books):
    actor = await enter(books, credit_microusd=100)
    account = actor.account.id
    await books.run(lambda: wallet.reserve(account, 80))
    await books.run(lambda: wallet.settle(account, 50, 30, "req_1", 1))
    assert await look(books, actor) == Balance(70, 30, False)
    await books.run(lambda: wallet.settle(account, 10, 0, "req_2", 1))
    await books.run(lambda: wallet.release(account, 20))
    await books.run(lambda: wallet.release(account, 0))
    assert await look(books, actor) == Balance(70, 0, False)
    rows = await books.fetch("SELECT kind, reference, amount_microusd, debit_account, credit_account FROM ledger")
    assert tuple(rows[-1]) == ("usage", "req_1", -30, f"wallet:{account}", "revenue")
    assert len(rows) == 2


async def test_no_call_is_charged_twice_even_by_a_defect(books):
    """The ledger's own uniqueness is the last line: a second charge of one call is refused whole."""
    actor = await enter(books, credit_microusd=100)
    account = actor.account.id
    await books.run(lambda: wallet.reserve(account, 80))
    await books.run(lambda: wallet.settle(account, 40, 30, "req_1", 1))
    with pytest.raises(CONSTRAINT_HELD):
        await books.run(lambda: wallet.settle(account, 40, 30, "req_1", 1))
    with pytest.raises(CONSTRAINT_HELD):
        await books.run(lambda: wallet.release(account, 41))  # more than is held
    assert await look(books, actor) == Balance(70, 40, False)


async def test_the_refusal_says_what_is_missing(books):
    actor = await enter(books, credit_microusd=100)
    await books.run(lambda: wallet.reserve(actor.account.id, 70))
    short = await books.run(lambda: refusal_as_value(actor))
    assert (short.needed, short.available, short.reason, short.included_too_small) == (50, 30, "balance", True)
    await change(books, "UPDATE wallets SET disputed = 1")
    assert (await books.run(lambda: refusal_as_value(actor))).reason == "disputed"


def refusal_as_value(actor):
    short = yield from wallet.shortage(actor.account.id, 50, True)
    return vars_of(short)


def vars_of(short):
    class Plain:
        needed, available, reason = short.needed, short.available, short.reason
        included_too_small = short.included_too_small

    return Plain


async def test_large_amounts_are_exact(books):
    actor = await enter(books)
    amount = 9_007_199_254_740_993  # 2^53 + 1: what a float would lose
    assert await books.run(credit(actor.account.id, amount, ids.new_id("adj"))) == amount
    assert (await look(books, actor)).posted == amount
