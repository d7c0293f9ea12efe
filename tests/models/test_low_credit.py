"""Low credit: one mail each time a balance falls below the threshold, whatever came before."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from models import account as accounts
from models import ids, ledger, low_credit, outbox, wallet
from models.clock import now_ms
from models.database import Database
from tests.cast import enter, give

DOLLAR = 1_000_000


async def spend(books: Database, account_id: str, amount: int) -> None:
    """Charge a wallet as a call does."""
    def script():
        assert (yield from wallet.reserve(account_id, amount))
        yield from wallet.settle(account_id, amount, amount, ids.new_id("req"), now_ms())

    await books.run(script)


async def tell(books: Database, crossing: low_credit.Crossing) -> bool:
    letter = outbox.Letter(crossing.email or "nobody@example.com", "low_credit", "low", "", "", crossing.account_id)
    return await books.run(lambda: low_credit.tell(crossing, letter if crossing.email else None))


async def mails_to(books: Database, account_id: str) -> int:
    rows = await books.fetch("SELECT COUNT(*) FROM outbox WHERE account_id = ?", (account_id,))
    return rows[0][0]


async def crossings_of(books: Database, account_id: str) -> list[low_credit.Crossing]:
    return [one for one in await low_credit.waiting(books) if one.account_id == account_id]


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("spend"), st.integers(1, 8)),
        st.tuples(st.just("credit"), st.integers(1, 8)),
        st.tuples(st.just("threshold"), st.integers(0, 9)),
        st.tuples(st.just("tell"), st.integers(1, 3)),
    ),
    max_size=25,
)


async def test_any_sequence_gives_one_mail_a_crossing(books: Database) -> None:
    loop = asyncio.get_running_loop()

    @given(steps=STEPS)
    def run(steps: list[tuple[str, int]]) -> None:
        asyncio.run_coroutine_threadsafe(one(steps), loop).result(60)

    async def one(steps: list[tuple[str, int]]) -> None:
        alice = (await enter(books, credit_microusd=7 * DOLLAR)).account.id
        balance, threshold, crossings = 7, 5, 0
        for step, amount in steps:
            if step == "spend" and amount <= balance:
                await spend(books, alice, amount * DOLLAR)
                crossings += balance >= threshold > balance - amount
                balance -= amount
            elif step == "credit":
                await give(books, alice, amount * DOLLAR)
                balance += amount
            elif step == "threshold":
                await books.run(lambda below=amount * DOLLAR: low_credit.set_threshold(alice, below))
                threshold = amount
            elif step == "tell":
                # As many processes as that find the same crossings.
                found = await crossings_of(books, alice)
                await asyncio.gather(*(tell(books, one) for one in found * amount))
        for crossing in await crossings_of(books, alice):
            await tell(books, crossing)
        assert await mails_to(books, alice) == crossings

    await asyncio.to_thread(run)


async def take_back(books: Database, account_id: str, amount: int) -> None:
    """Take credit back as a refund does."""
    await books.run(lambda: wallet.reverse(
        account_id, -amount, ledger.ADJUSTMENT, ids.new_id("ref"), "refunds", None, now_ms()
    ))


async def test_a_fall_by_anything_else_counts_too(books: Database) -> None:
    alice = (await enter(books, credit_microusd=6 * DOLLAR)).account.id
    await take_back(books, alice, 9 * DOLLAR)
    (crossing,) = await crossings_of(books, alice)
    assert (crossing.below_microusd, crossing.balance_microusd) == (5 * DOLLAR, -3 * DOLLAR)
    assert not (await ledger.audit(books, full=True)).violations


async def test_nobody_is_told_without_a_threshold_or_an_account(books: Database) -> None:
    alice = (await enter(books, credit_microusd=6 * DOLLAR)).account.id
    await books.run(lambda: low_credit.set_threshold(alice, 0))
    await spend(books, alice, 6 * DOLLAR)
    await take_back(books, alice, DOLLAR)
    assert await crossings_of(books, alice) == []
    bob = (await enter(books, "bob", credit_microusd=6 * DOLLAR)).account.id
    await spend(books, bob, 2 * DOLLAR)
    (crossing,) = await crossings_of(books, bob)
    goodbye = outbox.Letter("bob@example.com", "closed", "", "", "")
    await books.run(lambda: accounts.close(bob, goodbye))
    assert await crossings_of(books, bob) == [] and not await tell(books, crossing)
    await give(books, bob, 9 * DOLLAR)
    await spend(books, bob, 9 * DOLLAR)
    assert await crossings_of(books, bob) == []


async def test_an_address_that_was_never_verified_gets_none(books: Database) -> None:
    made = await accounts.create(books, f"{ids.new_id('x')}@example.com", plan="payg")
    await give(books, made.id, 6 * DOLLAR)
    await spend(books, made.id, 2 * DOLLAR)
    (crossing,) = await crossings_of(books, made.id)
    assert crossing.email is None and await tell(books, crossing)
    assert await mails_to(books, made.id) == 0 and await crossings_of(books, made.id) == []


async def test_looking_reads_no_wallet_and_no_ledger(books: Database) -> None:
    """However many accounts and entries there are, the plan has no scan of them."""
    explain = "EXPLAIN QUERY PLAN" if books.dialect == "sqlite" else "EXPLAIN"
    rows = await books.fetch(
        f"{explain} SELECT l.account_id, a.email FROM low_credits l LEFT JOIN accounts a ON a.id = l.account_id"
    )
    plan = "\n".join(str(tuple(row.values() if hasattr(row, "values") else row)) for row in rows)
    assert "wallets" not in plan and "ledger" not in plan
    if books.dialect == "sqlite":
        assert "SCAN l" in plan and "SEARCH a" in plan
