"""Credit that runs low: told once, bought once, within the ceiling; whatever a processor or a kill does."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from dataclasses import dataclass, field

import pytest

from models import account as accounts
from models import auto_recharge, clock, ids, ledger, low_credit, outbox, payment_card, top_up, wallet
from models.clock import now_ms
from models.database import Database
from models.payment_card import Card
from models.settings import read_settings
from models.top_up import CURRENCY, Payment, TopUp
from portal.app import create_app
from portal.low_credit import GIVEN_UP_MS, HOUR_MS, REPEATED_MS, LowCredit
from portal.payments import (
    AuthenticationRequired,
    CardDeclined,
    CheckoutFailed,
    Known,
    Payments,
    ProcessorUnavailable,
    TestCheckout,
)
from tests.cast import enter, give

DOLLAR = 1_000_000
CARD = Card("cus_1", "pm_1", "visa", "4242")


@dataclass
class Till(TestCheckout):
    """Take money once for each order, however often it is asked, and remember it; fail on demand."""

    taken: Counter = field(default_factory=Counter)
    asked: Counter = field(default_factory=Counter)
    trouble: list[Exception] = field(default_factory=list)
    takes_before_trouble: bool = False
    slow_s: float = 0

    async def charge(self, ordered: TopUp, card: Card) -> Payment:
        self.asked[ordered.id] += 1
        if self.slow_s:
            await asyncio.sleep(self.slow_s)
        if self.trouble:
            if self.takes_before_trouble:
                self.taken[ordered.id] = 1
            raise self.trouble.pop(0)
        assert card == CARD
        self.taken[ordered.id] = 1
        return self.payment(ordered)

    def payment(self, ordered: TopUp) -> Payment:
        return Payment(
            processor="test", checkout_id=None, amount_microusd=ordered.amount_microusd, currency=CURRENCY,
            top_up_id=ordered.id, payment_id=f"pi_{ordered.id}",
        )

    async def look_up(self, ordered: TopUp) -> Known:
        if self.taken[ordered.id]:
            return Known("paid", self.payment(ordered))
        return Known("pending")


async def write(kind: str, recipient: str, **view: object) -> outbox.Letter:
    return outbox.Letter(recipient, kind, kind, str(view.get("reason")), "")


def watch(books: Database, till: Till) -> LowCredit:
    """Return what a process of its own would run."""
    return LowCredit(books, Payments(books, read_settings({}), till), write)


async def with_recharge(
    books: Database, *, posted: int = 6, below: int = 5, amount: int = 10, ceiling: int = 100
) -> str:
    """Return an account that has turned it on."""
    alice = (await enter(books, credit_microusd=posted * DOLLAR)).account.id
    await books.run(lambda: payment_card.keep(alice, "test", CARD))
    await books.run(
        lambda: auto_recharge.turn_on(alice, "test", below * DOLLAR, amount * DOLLAR, ceiling * DOLLAR)
    )
    return alice


async def spend(books: Database, account_id: str, dollars: int) -> None:
    def script():
        assert (yield from wallet.reserve(account_id, dollars * DOLLAR))
        amount = dollars * DOLLAR
        yield from wallet.settle(account_id, amount, amount, ids.new_id("req"), now_ms())

    await books.run(script)


async def posted(books: Database, account_id: str) -> int:
    return (await wallet.balance(books, account_id)).posted // DOLLAR


async def letters(books: Database, account_id: str) -> list[str]:
    rows = await books.fetch("SELECT letter FROM outbox WHERE account_id = ? ORDER BY id", (account_id,))
    return [row[0] for row in rows]


async def orders(books: Database, account_id: str) -> list[str]:
    return [one.state for one in await top_up.recent(books, account_id, limit=50)]


async def age(books: Database, account_id: str, by_ms: int = 0) -> None:
    """Let every claim and wait be over, and charges be as old as that."""
    def script():
        yield (
            "UPDATE recharges SET claimed_until_ms = 0, created_at_ms = created_at_ms - ? WHERE account_id = ?",
            (by_ms, account_id),
        )

    await books.run(script)


async def test_a_fall_below_the_threshold_buys_once(books: Database) -> None:
    till, alice = Till(), await with_recharge(books)
    await watch(books, till).recharge()
    assert not till.taken
    await spend(books, alice, 2)
    await asyncio.gather(*(watch(books, till).recharge() for _ in range(6)))
    await watch(books, till).recharge()
    assert await posted(books, alice) == 14 and await orders(books, alice) == ["paid"]
    assert sum(till.taken.values()) == 1 and await letters(books, alice) == ["recharged"]
    (made,) = await top_up.recent(books, alice, limit=2)
    assert made.off_session and made.amount_microusd == 10 * DOLLAR
    assert await auto_recharge.due(books) == []
    await spend(books, alice, 10)
    await watch(books, till).recharge()
    assert await posted(books, alice) == 14 and sum(till.taken.values()) == 2
    assert not [v for v in (await ledger.audit(books, full=True)).violations if v.rule != "R3"]


async def test_nothing_is_bought_when_off_or_when_nobody_falls(books: Database) -> None:
    till, alice = Till(), await with_recharge(books)
    await books.run(lambda: auto_recharge.turn_off(alice))
    await spend(books, alice, 4)
    await watch(books, till).recharge()
    assert not till.asked and await orders(books, alice) == []
    bob = (await enter(books, "bob", credit_microusd=DOLLAR)).account.id
    with pytest.raises(auto_recharge.NoCard):
        await books.run(lambda: auto_recharge.turn_on(bob, "test", DOLLAR, 10 * DOLLAR, 10 * DOLLAR))
    await books.run(lambda: payment_card.keep(bob, "stripe", CARD))
    with pytest.raises(auto_recharge.NoCard):
        await books.run(lambda: auto_recharge.turn_on(bob, "test", DOLLAR, 10 * DOLLAR, 10 * DOLLAR))
    assert (await books.fetch(
        "SELECT recharge_below_microusd FROM wallets WHERE account_id = ?", (bob,)
    ))[0][0] == 0


async def test_who_is_below_already_is_served_at_once_and_until_it_is_enough(books: Database) -> None:
    till, alice = Till(), await with_recharge(books, posted=1, below=25)
    for _ in range(6):
        await watch(books, till).recharge()
    assert await posted(books, alice) == 31 and sum(till.taken.values()) == 3


async def test_the_ceiling_of_the_month_holds(books: Database, monkeypatch) -> None:
    till, alice = Till(), await with_recharge(books, posted=1, below=100, ceiling=35)
    for _ in range(8):
        await asyncio.gather(*(watch(books, till).recharge() for _ in range(3)))
        await books.run(lambda: auto_recharge.put_off(alice, 0))
    assert await posted(books, alice) == 31 and sum(till.taken.values()) == 3
    assert await auto_recharge.charged_in(books, alice, clock.month(now_ms())) == 30 * DOLLAR
    await watch(books, till).recharge()
    due = (await books.fetch("SELECT due_at_ms FROM auto_recharges WHERE account_id = ?", (alice,)))[0][0]
    assert due == clock.month_end_ms(now_ms())
    assert sorted(await letters(books, alice)) == ["recharge_waits"] + ["recharged"] * 3
    # Credit that its owner buys does not count, and a new month begins at nothing.
    mine = await books.run(lambda: top_up.order(alice, 10 * DOLLAR, "test"))
    await books.run(lambda: top_up.pay(till.payment(mine)))
    assert await auto_recharge.charged_in(books, alice, clock.month(now_ms())) == 30 * DOLLAR
    month_end = due + 1000
    monkeypatch.setattr(auto_recharge, "now_ms", lambda: month_end)
    await watch(books, till).recharge()
    assert sum(till.taken.values()) == 4 and await posted(books, alice) == 51


async def test_the_ceiling_is_told_of_once_a_month_and_after_each_choice(books: Database, monkeypatch) -> None:
    till, alice = Till(), await with_recharge(books, posted=1, below=5, ceiling=10)
    await watch(books, till).recharge()
    await spend(books, alice, 7)

    async def told() -> int:
        await asyncio.gather(*(watch(books, till).recharge() for _ in range(4)))
        return (await letters(books, alice)).count("recharge_waits")

    assert await told() == 1
    # It falls below the threshold a second time.
    await give(books, alice, 5 * DOLLAR)
    await spend(books, alice, 5)
    assert await told() == 1 and await auto_recharge.due(books) == []
    # A ceiling that still has no room is another one to be told of; one that has is not, if it is raised meanwhile.
    await books.run(lambda: auto_recharge.turn_on(alice, "test", 5 * DOLLAR, 10 * DOLLAR, 19 * DOLLAR))
    assert await told() == 2
    await books.run(lambda: auto_recharge.turn_on(alice, "test", 5 * DOLLAR, 10 * DOLLAR, 18 * DOLLAR))
    reached = await books.run(lambda: auto_recharge.begin(alice, "test"))
    assert (reached.charged_microusd, reached.ceiling_microusd) == (10 * DOLLAR, 18 * DOLLAR)
    later = now_ms() + 1000
    monkeypatch.setattr(auto_recharge, "now_ms", lambda: later)
    await books.run(lambda: auto_recharge.turn_on(alice, "test", 5 * DOLLAR, 10 * DOLLAR, 20 * DOLLAR))
    letter = outbox.Letter("a@example.com", "recharge_waits", "", "", "", alice)
    assert not await books.run(lambda: auto_recharge.tell_ceiling(alice, reached, letter))
    assert await told() == 2 and sum(till.taken.values()) == 2


async def test_a_kill_before_the_letter_about_the_ceiling_loses_nothing(books: Database) -> None:
    till, alice = Till(), await with_recharge(books, posted=1, below=5, amount=10, ceiling=10)
    await watch(books, till).recharge()
    await spend(books, alice, 7)
    assert isinstance(await books.run(lambda: auto_recharge.begin(alice, "test")), auto_recharge.AtCeiling)
    assert await auto_recharge.due(books) == [alice]
    await watch(books, till).recharge()
    assert await letters(books, alice) == ["recharged", "recharge_waits"] and sum(till.taken.values()) == 1


@pytest.mark.parametrize("trouble", [CardDeclined("card_declined"), AuthenticationRequired()])
async def test_a_refused_card_ends_it_and_says_so_once(books: Database, trouble: Exception) -> None:
    till, alice = Till(trouble=[trouble] * 9), await with_recharge(books)
    await spend(books, alice, 2)
    for _ in range(3):
        await asyncio.gather(*(watch(books, till).recharge() for _ in range(3)))
        await age(books, alice)
    chosen = await auto_recharge.find(books, alice)
    reason = "declined" if isinstance(trouble, CardDeclined) else "authentication"
    assert (chosen.is_on, chosen.off_reason) == (False, reason)
    assert await orders(books, alice) == ["failed"] and await posted(books, alice) == 4
    assert sum(till.asked.values()) == 1 and await letters(books, alice) == ["recharge_off"]
    await give(books, alice, 5 * DOLLAR)
    await spend(books, alice, 5)
    await watch(books, till).recharge()
    assert sum(till.asked.values()) == 1
    assert await auto_recharge.charged_in(books, alice, clock.month(now_ms())) == 0


@pytest.mark.parametrize("takes", [False, True])
async def test_an_unclear_charge_is_repeated_by_the_same_order(books: Database, takes: bool) -> None:
    till = Till(trouble=[ProcessorUnavailable(), TimeoutError(), OSError()], takes_before_trouble=takes)
    alice = await with_recharge(books)
    await spend(books, alice, 2)
    for _ in range(4):
        await watch(books, till).recharge()
        await watch(books, till).recharge()  # not before its time
        # What may have been charged counts towards the ceiling like what was.
        assert await auto_recharge.charged_in(books, alice, clock.month(now_ms())) == 10 * DOLLAR
        await age(books, alice)
    assert await posted(books, alice) == 14 and await orders(books, alice) == ["paid"]
    assert list(till.asked.values()) == [4] and list(till.taken.values()) == [1]
    assert (await auto_recharge.find(books, alice)).is_on and await letters(books, alice) == ["recharged"]


async def test_what_a_killed_process_left_is_taken_up(books: Database) -> None:
    till, alice = Till(slow_s=30), await with_recharge(books)
    await spend(books, alice, 2)
    killed = asyncio.create_task(watch(books, till).recharge())
    while not till.asked:
        await asyncio.sleep(0.01)
    killed.cancel()
    await asyncio.gather(killed, return_exceptions=True)
    till.slow_s = 0
    await watch(books, till).recharge()
    assert sum(till.asked.values()) == 1, "the claim of the dead still stands"
    await age(books, alice)
    await watch(books, till).recharge()
    assert await posted(books, alice) == 14 and list(till.asked.values()) == [2]
    assert await orders(books, alice) == ["paid"]


@pytest.mark.parametrize("learned", ["paid", "failed", "expired"])
async def test_what_somebody_else_learned_of_the_order_is_believed(books: Database, learned: str) -> None:
    till = Till(trouble=[ProcessorUnavailable()])
    alice = await with_recharge(books)
    await spend(books, alice, 2)
    await watch(books, till).recharge()
    (made,) = await top_up.recent(books, alice, limit=2)
    if learned == "paid":
        await books.run(lambda: top_up.pay(till.payment(made)))
    else:
        await books.run(lambda: (top_up.fail if learned == "failed" else top_up.expire)(made.id))
    await age(books, alice)
    await watch(books, till).recharge()
    await watch(books, till).recharge()
    assert sum(till.asked.values()) == 1 and not await auto_recharge.has_open(books, alice)
    assert await posted(books, alice) == (14 if learned == "paid" else 4)
    assert (await auto_recharge.find(books, alice)).is_on == (learned == "paid")
    assert await letters(books, alice) == ["recharged" if learned == "paid" else "recharge_off"]


async def test_after_most_of_a_day_it_is_only_looked_up(books: Database) -> None:
    for takes in (True, False):
        till = Till(trouble=[ProcessorUnavailable()], takes_before_trouble=takes)
        alice = await with_recharge(books)
        await spend(books, alice, 2)
        await watch(books, till).recharge()
        await age(books, alice, REPEATED_MS + 1000)
        await watch(books, till).recharge()
        assert sum(till.asked.values()) == 1
        assert await posted(books, alice) == (14 if takes else 4)
        await age(books, alice, GIVEN_UP_MS - REPEATED_MS)
        await watch(books, till).recharge()
        assert (await auto_recharge.find(books, alice)).off_reason == (None if takes else "failed")
        assert await orders(books, alice) == ["paid" if takes else "failed"]


async def test_a_look_up_that_is_refused_decides_nothing(books: Database) -> None:
    till, alice = Till(), await with_recharge(books, posted=4)
    till.trouble, till.takes_before_trouble = [ProcessorUnavailable("cut")], True
    await watch(books, till).recharge()
    await age(books, alice, REPEATED_MS + HOUR_MS)
    look_up = till.look_up

    async def refused(ordered: TopUp) -> Known:
        till.look_up = look_up
        raise CheckoutFailed("AuthenticationError 401")

    till.look_up = refused
    await watch(books, till).recharge()
    assert await orders(books, alice) == ["pending"] and (await auto_recharge.find(books, alice)).is_on
    await age(books, alice)
    await watch(books, till).recharge()
    assert await orders(books, alice) == ["paid"] and await letters(books, alice) == ["recharged"]


async def test_turned_off_while_a_charge_is_unclear_asks_no_more(books: Database) -> None:
    till = Till(trouble=[ProcessorUnavailable()])
    alice = await with_recharge(books)
    await spend(books, alice, 2)
    await watch(books, till).recharge()
    await books.run(lambda: auto_recharge.forget_card(alice, "test"))
    await age(books, alice)
    await watch(books, till).recharge()
    assert sum(till.asked.values()) == 1 and await auto_recharge.has_open(books, alice)
    await age(books, alice, HOUR_MS)
    await watch(books, till).recharge()
    assert not await auto_recharge.has_open(books, alice) and await orders(books, alice) == ["failed"]
    assert sum(till.asked.values()) == 1 and await letters(books, alice) == []
    assert await payment_card.find(books, alice, "test") is None


async def test_turned_off_before_anybody_was_asked_charges_nothing(books: Database) -> None:
    till, alice = Till(), await with_recharge(books)
    await spend(books, alice, 2)
    await books.run(lambda: auto_recharge.begin(alice, "test"))
    await books.run(lambda: auto_recharge.turn_off(alice))
    await watch(books, till).recharge()
    assert not till.asked and await orders(books, alice) == ["failed"]


async def test_an_account_has_one_open_charge(books: Database) -> None:
    alice = await with_recharge(books, posted=1)
    made = await asyncio.gather(
        *(books.run(lambda: auto_recharge.begin(alice, "test"), deadline_s=10) for _ in range(8)),
        return_exceptions=True,
    )
    assert sum(isinstance(one, TopUp) for one in made) == 1, made
    assert await orders(books, alice) == ["pending"]


async def test_the_index_holds_what_the_row_s_lock_holds(books: Database) -> None:
    """Whoever came past the account's row would still not open a second charge."""
    alice = await with_recharge(books, posted=1)
    await books.run(lambda: auto_recharge.begin(alice, "test"))

    def second():
        made = yield from top_up.order(alice, 10 * DOLLAR, "test", off_session=True)
        rows = yield (
            "INSERT INTO recharges (top_up_id, account_id, month, state, customer_id, payment_method_id, brand,"
            " last4, created_at_ms) VALUES (?, ?, '2026-01', 'open', '', '', '', '', 0)"
            " ON CONFLICT (account_id) WHERE state = 'open' DO NOTHING RETURNING top_up_id", (made.id, alice),
        )
        return len(rows)

    assert await books.run(second) == 0


async def test_a_frozen_wallet_buys_nothing(books: Database) -> None:
    till, alice = Till(), await with_recharge(books, posted=1)

    def freeze():
        yield ("UPDATE wallets SET disputed = 1 WHERE account_id = ?", (alice,))

    await books.run(freeze)
    await watch(books, till).recharge()
    assert not till.asked and await auto_recharge.due(books) == []


async def take_back(books: Database, account_id: str, dollars: int, kind: str = ledger.REFUND) -> None:
    await books.run(lambda: wallet.reverse(
        account_id, -dollars * DOLLAR, kind, ids.new_id("ref"), "payments:test", None, now_ms()
    ))


async def due_now(books: Database, account_id: str) -> None:
    """Let a wait be over."""
    await books.run(lambda: auto_recharge.put_off(account_id, 0))


@pytest.mark.parametrize("kind", [ledger.REFUND, ledger.DISPUTE])
async def test_what_is_given_back_is_not_taken_again_at_once(books: Database, kind: str) -> None:
    till, alice = Till(), await with_recharge(books, posted=20)
    await asyncio.sleep(0.005)
    await take_back(books, alice, 18, kind)
    assert await auto_recharge.waits_for_use(books, alice)
    await watch(books, till).recharge()
    assert not till.asked and await auto_recharge.due(books) == []
    await due_now(books, alice)
    await watch(books, till).recharge()
    assert not till.asked
    # Who goes on calling goes on needing credit.
    await spend(books, alice, 1)
    assert not await auto_recharge.waits_for_use(books, alice)
    await due_now(books, alice)
    await watch(books, till).recharge()
    assert sum(till.taken.values()) == 1 and await posted(books, alice) == 11


async def test_who_turns_it_on_after_a_refund_wants_it(books: Database) -> None:
    till, alice = Till(), await with_recharge(books, posted=20)
    await asyncio.sleep(0.005)
    await take_back(books, alice, 18)
    await asyncio.sleep(0.005)
    await books.run(lambda: auto_recharge.turn_on(alice, "test", 5 * DOLLAR, 10 * DOLLAR, 100 * DOLLAR))
    assert not await auto_recharge.waits_for_use(books, alice)
    await watch(books, till).recharge()
    assert sum(till.taken.values()) == 1 and await posted(books, alice) == 12


async def test_too_many_orders_in_an_hour_wait(books: Database) -> None:
    till, alice = Till(), await with_recharge(books, posted=1)
    for _ in range(top_up.ORDERS_PER_HOUR):
        await books.run(lambda: top_up.order(alice, 10 * DOLLAR, "test"))
    await watch(books, till).recharge()
    assert not till.asked and await auto_recharge.due(books) == []
    due = (await books.fetch("SELECT due_at_ms FROM auto_recharges WHERE account_id = ?", (alice,)))[0][0]
    assert now_ms() < due <= now_ms() + HOUR_MS


async def test_a_closed_account_is_charged_no_more(books: Database) -> None:
    till, alice = Till(), await with_recharge(books)
    await spend(books, alice, 2)
    await books.run(lambda: auto_recharge.begin(alice, "test"))
    await books.run(lambda: accounts.close(alice, outbox.Letter("a@example.com", "closed", "", "", "")))
    await watch(books, till).recharge()
    assert not till.asked and await auto_recharge.find(books, alice) is None
    assert await payment_card.find(books, alice, "test") is None


async def test_the_low_credit_letter_is_put_once_by_many(books: Database) -> None:
    alice = (await enter(books, credit_microusd=6 * DOLLAR)).account.id
    await spend(books, alice, 2)
    await asyncio.gather(*(watch(books, Till()).tell() for _ in range(5)))
    assert await letters(books, alice) == ["low_credit"] and await low_credit.waiting(books) == []


@pytest.mark.parametrize(("kind", "reason", "says"), [
    ("low_credit", None, "$4.99"), ("recharged", None, "Visa ending in 4242"),
    ("recharge_off", "declined", "was declined"),
    ("recharge_off", "authentication", "wants you to be there"), ("recharge_off", "failed", "could not buy"),
    ("recharge_waits", None, "has bought $80.00, and another $30.00 would pass the $100.00"),
])
async def test_letters_say_what_happened_and_where_to_go(app_of, kind: str, reason: str | None, says: str) -> None:
    letter = await app_of.extensions["tollgate"].write(
        kind, "a@example.com", link="/dashboard/billing/credits", below_microusd=5 * DOLLAR, card=CARD,
        reason=reason, balance_microusd=4_990_000, amount_microusd=20 * DOLLAR,
        reached=auto_recharge.AtCeiling(
            "2026-11", clock.month_end_ms(0), DOLLAR, 30 * DOLLAR, 80 * DOLLAR, 100 * DOLLAR, 0
        ),
    )
    for text in (letter.text, letter.html):
        assert says in text and "http://localhost:8000/dashboard/billing/credits" in text
    assert letter.subject and not re.search(r"[{}]", letter.subject + letter.text)


@pytest.fixture
def app_of(tmp_path):
    """Give an application that was not started."""
    return create_app(read_settings({"DATA_DIR": str(tmp_path)}))
