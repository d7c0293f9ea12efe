"""Top-ups: ordered first, credited exactly once, whatever comes how often from how many sides."""

from __future__ import annotations

import asyncio
import random
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models import ids, ledger, top_up, wallet
from models.account import Account
from models.clock import now_ms
from models.database import Database, migrate
from models.errors import NotFound, RateLimited
from models.top_up import EXPIRED, FAILED, PAID, PENDING, Payment, WrongPayment
from tests.cast import enter
from tests.house import ROOT

PRICE = 20_000_000


async def ordered(books, actor, amount=PRICE, checkout="cs_1"):
    made = await books.run(lambda: top_up.order(actor.account.id, amount, "test"))
    if checkout is not None:
        checkout = f"{checkout}{made.id}"
        await books.run(lambda: top_up.begun(made.id, checkout, f"/pay/{checkout}"))
    return await top_up.find(books, actor.account.id, made.id)


def payment_of(made, **other):
    return Payment(**{
        "processor": "test", "checkout_id": made.checkout_id, "amount_microusd": made.amount_microusd,
        "currency": "usd", "receipt_url": "/receipt", **other,
    })


async def pay(books, made, **other):
    return await books.run(lambda: top_up.pay(payment_of(made, **other)), deadline_s=10)


async def posted(books, actor):
    return (await wallet.balance(books, actor.account.id)).posted


async def is_sound(books):
    return not (await ledger.audit(books, full=True)).violations


async def test_a_paid_order_is_credited_with_its_entry_and_changes_the_plan(books):
    alice = await enter(books, plan="free")
    made = await ordered(books, alice)
    assert made.state == PENDING and await posted(books, alice) == 0
    assert await pay(books, made)
    paid = await top_up.find(books, alice.account.id, made.id)
    assert (paid.state, paid.receipt_url) == (PAID, "/receipt") and paid.paid_at_ms >= made.created_at_ms
    rows = await books.fetch("SELECT * FROM ledger WHERE account_id = ?", (alice.account.id,))
    assert [(row["kind"], row["reference"], row["amount_microusd"], row["debit_account"]) for row in rows] == [
        ("top_up", made.id, PRICE, "payments:test")
    ]
    account = await Account.get(id=alice.account.id)
    assert (account.plan, account.version) == ("payg", 2)
    assert await is_sound(books)


@pytest.mark.parametrize("plan", ["payg", "wallet"])
async def test_any_other_plan_stays(books, plan):
    alice = await enter(books, plan=plan)
    await pay(books, await ordered(books, alice))
    account = await Account.get(id=alice.account.id)
    assert (account.plan, account.version) == (plan, 1)


async def test_a_second_top_up_leaves_plan_and_version_alone(books):
    alice = await enter(books, plan="free")
    for _ in range(2):
        assert await pay(books, await ordered(books, alice))
    account = await Account.get(id=alice.account.id)
    assert (account.plan, account.version) == ("payg", 2) and await posted(books, alice) == 2 * PRICE


async def test_repetition_credits_nothing(books):
    alice = await enter(books)
    made = await ordered(books, alice)
    assert [await pay(books, made) for _ in range(3)] == [True, False, False]
    assert await posted(books, alice) == PRICE


async def test_what_was_not_ordered_is_not_credited(books):
    alice = await enter(books)
    made = await ordered(books, alice)
    for other in (
        {"amount_microusd": PRICE + 1}, {"amount_microusd": 0}, {"amount_microusd": -PRICE}, {"currency": "eur"},
    ):
        with pytest.raises(WrongPayment):
            await pay(books, made, **other)
    for other in ({"checkout_id": "cs_unknown"}, {"processor": "stripe"}, {"top_up_id": ids.new_id("top")}):
        with pytest.raises(NotFound):
            await pay(books, made, **other)
    assert await posted(books, alice) == 0
    assert (await top_up.find(books, alice.account.id, made.id)).state == PENDING


async def test_a_payment_finds_its_order_by_the_order_s_own_id_when_the_checkout_s_was_lost(books):
    alice = await enter(books)
    made = await ordered(books, alice, checkout=None)
    assert await pay(books, made, checkout_id="cs_late", top_up_id=made.id)
    assert not await pay(books, made, checkout_id="cs_late")
    assert await posted(books, alice) == PRICE


@pytest.mark.parametrize("end", [top_up.fail, top_up.expire])
async def test_what_seemed_over_is_credited_when_it_was_paid_after_all_and_stays_paid(books, end):
    alice = await enter(books)
    made = await ordered(books, alice)
    assert await books.run(lambda: end(made.id)) and not await books.run(lambda: end(made.id))
    assert await pay(books, made)
    assert not await books.run(lambda: end(made.id))
    assert (await top_up.find(books, alice.account.id, made.id)).state == PAID
    assert await posted(books, alice) == PRICE


async def test_old_orders_expire_and_young_and_paid_ones_do_not(books):
    alice = await enter(books)
    open_one, paid = await ordered(books, alice), await ordered(books, alice)
    await pay(books, paid)
    assert not await books.run(lambda: top_up.expire_old(now_ms()))
    assert (await top_up.find(books, alice.account.id, open_one.id)).state == PENDING
    assert not await books.run(lambda: top_up.expire_old(now_ms() + top_up.LIFE_MS + 1000))
    assert (await top_up.find(books, alice.account.id, open_one.id)).state == EXPIRED
    assert (await top_up.find(books, alice.account.id, paid.id)).state == PAID


async def test_orders_are_limited_in_an_hour(books):
    alice, bob = await enter(books), await enter(books, "bob")
    for _ in range(top_up.ORDERS_PER_HOUR):
        await ordered(books, alice)
    with pytest.raises(RateLimited):
        await ordered(books, alice)
    await ordered(books, bob)


async def test_somebody_else_s_orders_are_not_found(books):
    alice, bob = await enter(books), await enter(books, "bob")
    made = await ordered(books, alice)
    with pytest.raises(NotFound):
        await top_up.find(books, bob.account.id, made.id)
    with pytest.raises(NotFound):
        await top_up.by_checkout(books, bob.account.id, "test", made.checkout_id)
    assert await top_up.recent(books, bob.account.id, limit=10) == []


async def test_pages_of_orders_meet(books):
    alice = await enter(books)
    made = [(await ordered(books, alice)).id for _ in range(7)]
    newest = sorted(made, reverse=True)
    account = alice.account.id
    first = await top_up.recent(books, account, limit=3)
    second = await top_up.recent(books, account, limit=3, before=first[-1].id)
    back = await top_up.recent(books, account, limit=3, after=second[0].id)
    assert [one.id for one in (*first, *second)] == newest[:6] and back == first


async def test_movements_are_what_is_neither_call_nor_top_up(books):
    alice, bob = await enter(books, credit_microusd=5), await enter(books, "bob", credit_microusd=6)
    await pay(books, await ordered(books, alice))
    await books.run(lambda: wallet.credit(alice.account.id, 7, "promotion", ids.new_id("adj"), "x", "x", 1))
    rows = await ledger.movements(books, alice.account.id, limit=10)
    assert [(row["kind"], row["amount_microusd"]) for row in rows] == [("promotion", 7), ("adjustment", 5)]
    older = await ledger.movements(books, alice.account.id, limit=10, before=rows[0]["seq"])
    assert [row["amount_microusd"] for row in older] == [5]
    assert [row["amount_microusd"] for row in await ledger.movements(books, bob.account.id, limit=10)] == [6]


# On PostgreSQL the plan of an almost empty table says nothing.
@pytest.mark.parametrize("database_kind", ["sqlite"], indirect=True)
async def test_neither_list_reads_the_history_of_calls(books):
    """Each is answered by its index alone."""
    for sql, index in (
        ("SELECT seq FROM ledger WHERE account_id = ? AND kind <> 'usage' AND kind <> 'top_up' AND seq < 9"
         " ORDER BY seq DESC LIMIT 5", "ledger_other"),
        ("SELECT id FROM top_ups WHERE account_id = ? AND id < 'z' ORDER BY id DESC LIMIT 5", "top_ups_account"),
        ("SELECT id FROM top_ups WHERE state = 'pending' AND id < ? LIMIT 5", "top_ups_pending"),
    ):
        plan = " ".join(row[3] for row in await books.fetch(f"EXPLAIN QUERY PLAN {sql}", ("x",)))
        assert f"{index} " in plan and "SEARCH" in plan and "TEMP B-TREE" not in plan, plan


TELLER = """
import asyncio, sys
from models import top_up
from models.database import Database
from models.top_up import Payment

async def main(url, top_up_id, checkout_id, amount):
    books = Database(url)
    await books.open()
    paid = Payment("test", checkout_id, int(amount), "usd")
    print("ready", flush=True)
    sys.stdin.readline()
    told = await asyncio.gather(*(books.run(lambda: top_up.pay(paid), deadline_s=30) for _ in range(8)))
    await books.run(lambda: top_up.fail(top_up_id), deadline_s=30)
    print(sum(told))
    await books.close()

asyncio.run(main(*sys.argv[1:]))
"""


async def test_news_told_to_several_processes_at_once_are_credited_once(books):
    alice = await enter(books, plan="free")
    made = await ordered(books, alice)
    tellers = [
        await asyncio.create_subprocess_exec(
            sys.executable, "-c", TELLER, books.url, made.id, made.checkout_id, str(PRICE), cwd=ROOT,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )
        for _ in range(4)
    ]
    for teller in tellers:
        assert await teller.stdout.readline() == b"ready\n"
    told = await asyncio.gather(*(teller.communicate(b"\n") for teller in tellers))
    assert sum(int(said) for said, _ in told) == 1
    assert await posted(books, alice) == PRICE and await is_sound(books)
    account = await Account.get(id=alice.account.id)
    assert (account.plan, account.version) == ("payg", 2)


EVENTS = st.lists(
    st.tuples(st.sampled_from(["paid", "failed", "expired", "wrong"]), st.integers(0, 2)), min_size=1, max_size=14
)


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_any_events_in_any_order_from_many_sides_credit_what_was_paid_once(kind, new_database):
    """Whatever is fired how often, by tasks on two connections of their own: credited iff it was ever paid."""
    url = asyncio.run(new_database(kind))
    asyncio.run(migrate(url))

    @given(events=EVENTS, seed=st.integers(0, 999))
    def credits_once(events, seed):
        asyncio.run(play(events, seed))

    async def play(events, seed):
        books = Database(url)
        await books.open()
        try:
            alice = await enter(books, plan="free")
            orders = [await ordered(books, alice) for _ in range(3)]
            fired = [*events, *random.Random(seed).sample(events, len(events) // 2)]
            told = await asyncio.gather(*(fire(books, orders[n], what) for what, n in fired))
            paid = {n for what, n in events if what == "paid"}
            credits = [answer for (what, _), answer in zip(fired, told, strict=True) if what == "paid" and answer]
            assert len(credits) == len(paid)
            assert await posted(books, alice) == len(paid) * PRICE
            account = await Account.get(id=alice.account.id)
            assert (account.plan, account.version) == (("payg", 2) if paid else ("free", 1))
            for n, made in enumerate(orders):
                state = (await top_up.find(books, alice.account.id, made.id)).state
                ends = {what for what, at in events if at == n} - {"paid", "wrong"}
                assert state == PAID if n in paid else state in ({FAILED, EXPIRED} if ends else {PENDING})
            assert await is_sound(books)
        finally:
            await books.close()

    async def fire(books, made, what):
        await asyncio.sleep(0)
        match what:
            case "paid":
                return await pay(books, made)
            case "wrong":
                with pytest.raises(WrongPayment):
                    await pay(books, made, amount_microusd=PRICE * 2)
            case "failed":
                return await books.run(lambda: top_up.fail(made.id), deadline_s=10)
            case "expired":
                return await books.run(lambda: top_up.expire(made.id), deadline_s=10)
        return None

    credits_once()
