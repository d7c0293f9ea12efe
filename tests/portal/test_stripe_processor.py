"""The Stripe processor, by the real library against the stand-in: orders, charges, refunds, and unclear answers."""

from __future__ import annotations

import asyncio

import pytest

from models import account as accounts
from models import ids, ledger, payment_card, refund, top_up, wallet
from models.clock import now_ms
from models.dispute import Dispute
from models.outbox import Letter
from models.payment_card import Card
from models.payment_event import Event
from models.refund import NotRefundable
from models.settings import read_settings
from models.top_up import EXPIRED, FAILED, PAID, PENDING, Payment, WrongPayment
from portal import payments
from portal.payments import (
    AuthenticationRequired,
    CardDeclined,
    CheckoutFailed,
    Payments,
    ProcessorUnavailable,
    processor_of,
)
from tests.cast import enter
from tests.twins.stripe import SECRET_KEY, WEBHOOK_SECRET, FakeStripe

PRICE = 20_000_000


@pytest.fixture
def fake():
    """Give Stripe."""
    twin = FakeStripe().start()
    twin.delivers = False
    yield twin
    twin.stop()


def environ_of(fake, **other):
    return {
        "STRIPE_SECRET_KEY": SECRET_KEY, "STRIPE_WEBHOOK_SECRET": WEBHOOK_SECRET, "STRIPE_API_BASE": fake.url,
        **other,
    }


@pytest.fixture
async def selling(fake, books, request):
    """Give payments that sell by Stripe."""
    settings = read_settings(environ_of(fake, **getattr(request, "param", {})))
    selling = Payments(books, settings, processor_of(settings))
    yield selling
    await selling.close()


async def state_of(books, ordered):
    return await top_up.find(books, ordered.account_id, ordered.id)


async def posted(books, actor):
    return (await wallet.balance(books, actor.account.id)).posted


async def is_sound(books):
    return not (await ledger.audit(books, full=True)).violations


async def test_an_order_is_one_session_of_one_customer_by_our_own_figures(selling, fake, books):
    alice = await enter(books)
    made = [await selling.begin(alice.account.id, PRICE), await selling.begin(alice.account.id, 12_340_000)]
    (customer,) = fake.of("customer")
    assert customer["email"] == alice.account.email and customer["metadata"]["account"] == alice.account.id
    for ordered in made:
        session = fake.session_of(ordered.id)
        assert (session["amount_total"], session["currency"]) == (ordered.amount_microusd // 10_000, "usd")
        assert session["customer"] == customer["id"] and session["url"] == ordered.checkout_url
        assert session["metadata"] == {
            "top_up": ordered.id, "account": alice.account.id, "installation": "http://localhost:8000",
        }
        assert session["_paid_by"]["metadata"] == session["metadata"]
        assert session["_paid_by"]["receipt_email"] == alice.account.email
        assert "setup_future_usage" not in session["_paid_by"] and ordered.processor == "stripe_test"
        assert session["success_url"].endswith(f"/dashboard/billing/credits?top_up={ordered.id}")


@pytest.mark.parametrize("selling", [{"STRIPE_TAX": "yes", "STRIPE_INVOICES": "yes", "STRIPE_RECEIPTS": "no"}],
                         indirect=True)
async def test_tax_is_paid_on_top_and_is_no_credit(selling, fake, books):
    alice = await enter(books)
    ordered = await selling.begin(alice.account.id, PRICE)
    session = fake.session_of(ordered.id)
    assert session["amount_total"] == 2380 and session["invoice_creation"] == {"enabled": "true"}
    assert "receipt_email" not in session["_paid_by"]
    fake.pay(session["id"])
    await selling.learn(ordered)
    assert await posted(books, alice) == PRICE
    made = await selling.refund(ordered.id, PRICE // 2, forced=False)
    assert made.total_microusd == 11_900_000 and await posted(books, alice) == PRICE // 2
    # What was given back elsewhere counts by its part of what was paid.
    fake.give_back(session["payment_intent"], 595)
    await selling.learn(await state_of(books, ordered))
    assert await posted(books, alice) == PRICE // 4 and await is_sound(books)
    fake.give_back(session["payment_intent"], 595)
    await selling.learn(await state_of(books, ordered))
    assert await posted(books, alice) == 0 and await is_sound(books)


@pytest.mark.parametrize("how", ["before", "after", "500"])
async def test_an_unclear_beginning_is_repeated_as_the_same_session(selling, fake, books, how):
    alice = await enter(books)
    await selling.customer(alice.account.id)
    fake.trouble += [("POST checkout/sessions", how)] * 3
    with pytest.raises(ProcessorUnavailable):
        await selling.begin(alice.account.id, PRICE)
    (made,) = await top_up.recent(books, alice.account.id, limit=9)
    assert (made.state, made.checkout_url) == (PENDING, None)
    again = await selling.resume(alice.account.id, made.id)
    assert again.id == made.id and again.checkout_url == fake.session_of(made.id)["url"]
    assert (await selling.resume(alice.account.id, made.id)).checkout_url == again.checkout_url
    assert len(fake.of("checkout.session")) == 1


async def test_a_payment_whose_beginning_was_never_answered_is_found_all_the_same(selling, fake, books):
    alice = await enter(books)
    await selling.customer(alice.account.id)
    fake.trouble += [("POST checkout/sessions", "after")] * 3
    with pytest.raises(ProcessorUnavailable):
        await selling.begin(alice.account.id, PRICE)
    (made,) = await top_up.recent(books, alice.account.id, limit=9)
    fake.pay(fake.session_of(made.id)["id"])
    await selling.learn(made)
    assert (await state_of(books, made)).state == PAID and await posted(books, alice) == PRICE


async def test_one_cut_connection_is_not_noticed(selling, fake, books):
    alice = await enter(books)
    fake.trouble += [("POST customers", "after"), ("POST checkout/sessions", "after")]
    ordered = await selling.begin(alice.account.id, PRICE)
    assert ordered.checkout_url and len(fake.of("customer")) == len(fake.of("checkout.session")) == 1


async def test_a_refusal_fails_the_order(selling, fake, books):
    alice = await enter(books)
    fake.trouble += [("POST checkout/sessions", "400")]
    with pytest.raises(CheckoutFailed):
        await selling.begin(alice.account.id, PRICE)
    (made,) = await top_up.recent(books, alice.account.id, limit=9)
    assert made.state == FAILED


async def test_many_first_orders_at_once_make_one_customer(selling, fake, books):
    alice = await enter(books)
    await asyncio.gather(*(selling.begin(alice.account.id, PRICE) for _ in range(6)))
    assert len(fake.of("customer")) == 1 and len(fake.of("checkout.session")) == 6


async def test_a_customer_that_was_deleted_is_made_again(selling, fake, books):
    alice = await enter(books)
    gone = await selling.customer(alice.account.id)
    del fake.things[gone]
    fake.keys.clear()  # as after a day
    ordered = await selling.begin(alice.account.id, PRICE)
    (customer,) = fake.of("customer")
    assert fake.session_of(ordered.id)["customer"] == customer["id"] != gone


@pytest.mark.parametrize(("happens", "state"), [
    ("pay", PAID), ("expire", EXPIRED), ("decline", PENDING), (None, PENDING), ("days", PENDING), ("arrive", PAID),
    ("bounce", FAILED),
])
async def test_asking_tells_how_an_order_stands(selling, fake, books, happens, state):
    alice = await enter(books)
    ordered = await selling.begin(alice.account.id, PRICE)
    session_id = fake.session_of(ordered.id)["id"]
    if happens in ("days", "arrive", "bounce"):
        fake.pay(session_id, takes_days=True)
    if happens not in ("days", None):
        getattr(fake, happens)(session_id)
    for _ in range(2):
        await selling.learn(ordered)
    found = await state_of(books, ordered)
    assert found.state == state and await posted(books, alice) == (PRICE if state == PAID else 0)
    assert bool(found.receipt_url) == (state == PAID) and await is_sound(books)


async def test_reconciling_asks_for_open_orders_once_in_five_minutes(selling, fake, books):
    alice = await enter(books)
    ordered = await selling.begin(alice.account.id, PRICE)
    fake.pay(fake.session_of(ordered.id)["id"])
    await selling.reconcile()
    async def asked():
        before = len(fake.requests)
        await asyncio.gather(*(selling.reconcile() for _ in range(5)))
        return len(fake.requests) - before

    assert await posted(books, alice) == PRICE  # by the list, which comes first of all
    other = await selling.begin(alice.account.id, PRICE)
    fake.pay(fake.session_of(other.id)["id"])
    assert await asked() == 0

    def age():
        earlier = now_ms() - top_up.ASKED_EVERY_MS - 1000
        yield ("UPDATE top_ups SET asked_at_ms = ? WHERE id = ?", (earlier, other.id))

    await books.run(age)
    assert await asked() == 1
    assert await posted(books, alice) == 2 * PRICE and await asked() == 0 and await is_sound(books)


async def test_the_list_writes_what_no_event_told_and_names_what_is_not_ours(selling, fake, books, caplog):
    alice = await enter(books, plan="free")
    paid, back, disputed = [await selling.begin(alice.account.id, PRICE) for _ in range(3)]
    for ordered in (paid, back, disputed):
        fake.pay(fake.session_of(ordered.id)["id"])
    fake.give_back(fake.session_of(back.id)["payment_intent"], 500)
    fake.dispute(fake.session_of(disputed.id)["payment_intent"])
    strange = fake.pay(fake._make_session({
        "mode": "payment", "customer": fake.of("customer")[0]["id"], "success_url": "/", "metadata": {
            "top_up": "top_00000000000000000000000000", "installation": "http://localhost:8000"},
        "line_items": {"0": {"price_data": {"currency": "usd", "unit_amount": "2000"}}},
    })["id"])
    like = fake.things[fake.session_of(paid.id)["id"]]
    elsewhere = {"top_up": "top_" + "1" * 26, "installation": "https://other.example"}
    fake.things["cs_other"] = like | {"id": "cs_other", "metadata": elsewhere}
    fake.things["cs_odd"] = like | {"id": "cs_odd", "amount_total": "2000"}
    fake.things["cs_none"] = like | {"id": "cs_none", "metadata": {}}
    for _ in range(2):
        extra = await selling.reconcile_list(now_ms() - payments.LISTED_BACK_MS)
        assert {one.rule for one in extra} == {"R5"} and len(extra) == 2
        assert strange["id"] in extra[1].detail and "cs_odd" in extra[0].detail
    assert "R5 stripe_test" in caplog.text
    balance = await wallet.balance(books, alice.account.id)
    assert (balance.posted, balance.disputed) == (PRICE + PRICE - 5_000_000, True) and await is_sound(books)


async def test_an_order_that_a_restored_backup_lacks_is_credited_again(selling, fake, books, caplog):
    alice = await enter(books, plan="free")
    paid, open_ = [await selling.begin(alice.account.id, PRICE) for _ in range(2)]
    fake.pay(fake.session_of(paid.id)["id"])

    def lose():
        yield ("DELETE FROM top_ups", ())

    await books.run(lose)
    for _ in range(2):
        assert await selling.reconcile_list(now_ms() - payments.LISTED_BACK_MS) == []
    assert await posted(books, alice) == PRICE and await is_sound(books)
    again = await top_up.find(books, alice.account.id, paid.id)
    assert (again.state, again.amount_microusd, again.created_at_ms) == ("paid", PRICE, ids.made_at_ms(paid.id))
    assert await top_up.by_id(books, open_.id) is None and "written down again" in caplog.text
    # An account that is lost as well is nobody to credit.
    fake.things[fake.session_of(open_.id)["id"]]["metadata"]["account"] = "acc_" + "0" * 26
    fake.pay(fake.session_of(open_.id)["id"])
    assert [one.rule for one in await selling.reconcile_list(now_ms() - payments.LISTED_BACK_MS)] == ["R5"]


async def test_a_list_that_fails_is_made_again_soon_and_not_at_once(selling, fake, books, monkeypatch):
    fake.trouble += [("GET checkout/sessions", "500")] * 3
    for _ in range(3):
        await selling.reconcile()
    assert len([path for method, path in fake.requests if path == "checkout/sessions"]) == 3
    monkeypatch.setattr(payments.clock, "now_ms", lambda: now_ms() + payments.LISTED_AGAIN_MS + 1000)
    for _ in range(3):
        await selling.reconcile()
    assert len([path for method, path in fake.requests if path == "checkout/sessions"]) == 4


async def test_one_payment_that_cannot_be_written_keeps_no_other_waiting(selling, fake, books, monkeypatch, caplog):
    alice = await enter(books)
    older, newest, other = [await selling.begin(alice.account.id, PRICE) for _ in range(3)]
    for one in (older, newest):
        fake.pay(fake.session_of(one.id)["id"])
    taken = fake.session_of(newest.id)["payment_intent"]

    def occupy(payment_id):
        yield ("UPDATE top_ups SET payment_id = ? WHERE id = ?", (payment_id, other.id))

    await books.run(lambda: occupy(taken))
    with pytest.raises(Exception, match=r"(?i)unique"):
        await selling.reconcile()
    assert (await state_of(books, older)).state == PAID and (await state_of(books, newest)).state == PENDING
    assert "cannot be written" in caplog.text
    await books.run(lambda: occupy(None))
    monkeypatch.setattr(payments.clock, "now_ms", lambda: now_ms() + payments.LISTED_AGAIN_MS + 1000)
    monkeypatch.setattr(payments, "ASKED_AT_ONCE", 0)  # the list alone
    await selling.reconcile()
    assert (await state_of(books, newest)).state == PAID and await is_sound(books)


async def test_a_payment_asked_back_in_another_currency_is_asked_back_whole(selling, fake, books):
    alice = await enter(books)
    ordered = await bought(selling, fake, books, alice)
    fake.dispute(fake.session_of(ordered.id)["payment_intent"], 100)["currency"] = "eur"
    await selling.learn(ordered)
    assert await posted(books, alice) == 0 and await is_sound(books)


async def test_an_order_of_before_a_move_still_counts(selling, fake, books):
    alice = await enter(books)
    ordered = await selling.begin(alice.account.id, PRICE)
    fake.pay(fake.session_of(ordered.id)["id"])
    moved = read_settings(environ_of(fake, PUBLIC_URL="http://localhost:9000"))
    elsewhere = Payments(books, moved, processor_of(moved))
    assert await elsewhere.reconcile_list(now_ms() - payments.LISTED_BACK_MS) == []
    await elsewhere.close()
    assert await posted(books, alice) == PRICE


async def test_a_payment_and_its_dispute_that_are_told_at_once_never_miss_each_other(selling, fake, books):
    alice = await enter(books)
    for number in range(1, 31):
        ordered = await books.run(lambda: top_up.order(alice.account.id, PRICE, "stripe_test"))
        await books.run(lambda: _forget_rate())
        paid = Payment("stripe_test", f"cs_{number}", PRICE, "usd", "/", ordered.id, payment_id=f"pi_{number}")
        told = [paid, Dispute(f"dp_{number}", "stripe_test", f"pi_{number}", PRICE, "open")]
        await asyncio.gather(*(
            selling.hear(Event(f"evt_{number}_{place}", "stripe_test", "a test", "x"), news)
            for place, news in enumerate(told)
        ))
        balance = await wallet.balance(books, alice.account.id)
        assert (balance.posted, balance.disputed) == (0, True), number
    assert await is_sound(books)


def _forget_rate():
    yield ("DELETE FROM rate_windows", ())


async def test_the_customer_of_a_closed_account_is_forgotten_there_too(selling, fake, books):
    alice, bob, carol = [await enter(books, name) for name in ("alice", "bob", "carol")]
    ordered = await selling.begin(alice.account.id, PRICE, keeps_card=True)
    fake.pay(fake.session_of(ordered.id)["id"])
    await selling.learn(ordered)
    customers = {one: await selling.customer(one.account.id) for one in (alice, bob, carol)}

    async def close(actor):
        notice = Letter(actor.account.email, "closed", "", "", "")
        await books.run(lambda: accounts.close(actor.account.id, notice))

    def known():
        return {one["id"] for one in fake.of("customer")}

    def tries():
        return sum(method == "DELETE" for method, _ in fake.requests)

    async def left():
        return [row[0] for row in await books.fetch("SELECT customer_id FROM former_customers")]

    await close(alice)
    assert await left() == [customers[alice]] and known() == set(customers.values())
    # What it could not do for lack of an answer or of a right, it tries again, but not at once.
    for trouble in ("500", "403"):
        fake.trouble = [("DELETE .*", trouble)] * 5
        await selling.reconcile()
        fake.trouble, tried = [], tries()
        await selling.reconcile()
        assert tries() == tried and await left() == [customers[alice]] and known() == set(customers.values())
        await books.run(_an_hour_later)
    await asyncio.gather(*(selling.reconcile() for _ in range(4)))
    assert await left() == [] and known() == {customers[bob], customers[carol]} and tries() == tried + 1
    # The payment is known all the same, and can be given back.
    await selling.refund(ordered.id, PRICE // 2, forced=True)
    assert await posted(books, alice) == PRICE // 2 and await is_sound(books)
    # Whom Stripe has forgotten already is forgotten.
    await close(bob)
    del fake.things[customers[bob]]
    await selling.reconcile()
    assert await left() == [] and known() == {customers[carol]}


def _an_hour_later():
    yield ("UPDATE former_customers SET due_at_ms = due_at_ms - ?", (payment_card.FORMER_AGAIN_MS,))


async def test_a_kept_card_is_kept_by_consent_alone_and_charged_while_nobody_is_there(selling, fake, books):
    alice = await enter(books)
    plain = await selling.begin(alice.account.id, PRICE)
    fake.pay(fake.session_of(plain.id)["id"])
    await selling.learn(plain)
    assert await payment_card.find(books, alice.account.id, "stripe_test") is None
    ordered = await selling.begin(alice.account.id, PRICE, keeps_card=True)
    assert fake.session_of(ordered.id)["_paid_by"]["setup_future_usage"] == "off_session"
    fake.pay(fake.session_of(ordered.id)["id"])
    await selling.learn(ordered)
    card = await payment_card.find(books, alice.account.id, "stripe_test")
    assert card == Card(fake.of("customer")[0]["id"], "pm_pays", "visa", "4242")
    # Whoever forgets a card has forgotten it, however often old news comes.
    await books.run(lambda: payment_card.forget(alice.account.id, "stripe_test"))
    await selling.learn(ordered)
    assert await payment_card.find(books, alice.account.id, "stripe_test") is None
    await selling.processor.forget(card)

    charged = await books.run(lambda: top_up.order(alice.account.id, PRICE, "stripe_test", off_session=True))
    told = [await selling.processor.charge(charged, card) for _ in range(2)]
    assert told[0] == told[1] and len([one for one in fake.of("charge") if one["amount"] == 2000]) == 3
    assert (await selling.processor.look_up(charged)).payment == told[0]
    assert await selling.paid(told[0]) and not await selling.paid(told[1])
    assert await posted(books, alice) == 3 * PRICE and await is_sound(books)


@pytest.mark.parametrize(("method", "error"), [("pm_declines", CardDeclined), ("pm_asks", AuthenticationRequired)])
async def test_a_kept_card_that_does_not_pay_says_why(selling, fake, books, method, error):
    alice = await enter(books)
    card = Card(await selling.customer(alice.account.id), method, "visa", "0002")
    ordered = await books.run(lambda: top_up.order(alice.account.id, PRICE, "stripe_test", off_session=True))
    for _ in range(2):
        with pytest.raises(error):
            await selling.processor.charge(ordered, card)
    assert len(fake.of("payment_intent")) == 1
    assert (await selling.processor.look_up(ordered)).state == FAILED
    fake.trouble += [("POST payment_intents", "before")] * 3
    other = await books.run(lambda: top_up.order(alice.account.id, PRICE, "stripe_test", off_session=True))
    with pytest.raises(ProcessorUnavailable):
        await selling.processor.charge(other, card)


@pytest.mark.parametrize("selling", [{"STRIPE_TAX": "yes"}], indirect=True)
async def test_tax_is_paid_on_top_while_nobody_is_there_too(selling, fake, books):
    alice = await enter(books)
    card = Card(await selling.customer(alice.account.id), "pm_pays", "visa", "4242")
    ordered = await books.run(lambda: top_up.order(alice.account.id, PRICE, "stripe_test", off_session=True))
    told = [await selling.processor.charge(ordered, card) for _ in range(2)]
    (intent,), (calculation,) = fake.of("payment_intent"), fake.of("tax.calculation")
    assert intent["amount_received"] == 2380 and calculation["customer"] == card.customer_id
    assert intent["hooks"] == {"inputs": {"tax": {"calculation": calculation["id"]}}}
    assert told[0] == told[1] == (await selling.processor.look_up(ordered)).payment
    assert await selling.paid(told[0]) and await posted(books, alice) == PRICE
    paid = await state_of(books, ordered)
    assert (paid.amount_microusd, paid.total_microusd) == (PRICE, 23_800_000)
    made = await selling.refund(ordered.id, PRICE // 2, forced=False)
    assert made.total_microusd == 11_900_000 and await posted(books, alice) == PRICE // 2 and await is_sound(books)


@pytest.mark.parametrize("selling", [{"STRIPE_TAX": "yes"}], indirect=True)
async def test_nothing_is_charged_where_the_tax_is_unknown(selling, fake, books):
    alice = await enter(books)
    card = Card(await selling.customer(alice.account.id), "pm_pays", "visa", "4242")
    ordered = await books.run(lambda: top_up.order(alice.account.id, PRICE, "stripe_test", off_session=True))
    fake.trouble += [("POST tax/calculations", "before")] * 3
    with pytest.raises(ProcessorUnavailable):
        await selling.processor.charge(ordered, card)
    fake.things[card.customer_id]["address"] = "unknown"
    with pytest.raises(CardDeclined):
        await selling.processor.charge(ordered, card)
    assert not fake.of("payment_intent")


@pytest.mark.parametrize("noted", ["2001", "-5", "2e3", "", "2" * 12])
async def test_credit_that_was_not_paid_for_is_none(selling, fake, books, noted):
    alice = await enter(books)
    card = Card(await selling.customer(alice.account.id), "pm_pays", "visa", "4242")
    ordered = await books.run(lambda: top_up.order(alice.account.id, PRICE, "stripe_test", off_session=True))
    await selling.processor.charge(ordered, card)
    fake.of("payment_intent")[0]["metadata"]["credit_cents"] = noted
    with pytest.raises(WrongPayment):
        await selling.paid((await selling.processor.look_up(ordered)).payment)
    assert await posted(books, alice) == 0


@pytest.mark.parametrize("status", ["401", "403"])
async def test_a_secret_key_that_is_refused_says_nothing_of_the_card(selling, fake, books, status):
    alice = await enter(books)
    card = Card(await selling.customer(alice.account.id), "pm_pays", "visa", "4242")
    ordered = await books.run(lambda: top_up.order(alice.account.id, PRICE, "stripe_test", off_session=True))
    fake.trouble += [("POST payment_intents", status)]
    with pytest.raises(ProcessorUnavailable):
        await selling.processor.charge(ordered, card)
    assert (await selling.processor.charge(ordered, card)).amount_microusd == PRICE


async def bought(selling, fake, books, actor):
    ordered = await selling.begin(actor.account.id, PRICE)
    fake.pay(fake.session_of(ordered.id)["id"])
    await selling.learn(ordered)
    return await state_of(books, ordered)


async def test_a_refund_is_made_once_and_never_of_more_than_is_unspent(selling, fake, books):
    alice = await enter(books)
    ordered = await bought(selling, fake, books, alice)
    await selling.refund(ordered.id, 5_000_000, forced=False)
    assert await posted(books, alice) == 15_000_000 and fake.of("charge")[0]["amount_refunded"] == 500
    await books.run(lambda: wallet.reserve(alice.account.id, 12_000_000))
    for amount in (3_010_000, 15_010_000, 10_000_000):
        with pytest.raises(NotRefundable):
            await selling.refund(ordered.id, amount, forced=False)
    with pytest.raises(NotRefundable):
        await selling.refund(ordered.id, 15_010_000, forced=True)
    await books.run(lambda: wallet.release(alice.account.id, 12_000_000))
    made = await selling.refund(ordered.id, None, forced=False)
    assert made.amount_microusd == 15_000_000 and await posted(books, alice) == 0
    with pytest.raises(NotRefundable):
        await selling.refund(ordered.id, None, forced=True)
    assert (await state_of(books, ordered)).refunded_microusd == PRICE and await is_sound(books)


async def test_a_forced_refund_may_take_the_balance_below_zero(selling, fake, books):
    alice = await enter(books)
    ordered = await bought(selling, fake, books, alice)
    await books.run(lambda: wallet.reserve(alice.account.id, PRICE))
    await books.run(lambda: wallet.settle(alice.account.id, PRICE, 15_000_000, "req_1", now_ms()))
    with pytest.raises(NotRefundable):
        await selling.refund(ordered.id, PRICE, forced=False)
    await selling.refund(ordered.id, PRICE, forced=True)
    assert await posted(books, alice) == -15_000_000
    assert not await books.run(lambda: wallet.reserve(alice.account.id, 1))


@pytest.mark.parametrize("how", ["before", "after"])
async def test_an_unclear_refund_is_taken_up_again_and_made_once(selling, fake, books, how, monkeypatch):
    alice = await enter(books)
    ordered = await bought(selling, fake, books, alice)
    fake.trouble += [("POST refunds", how)] * 3
    with pytest.raises(ProcessorUnavailable):
        await selling.refund(ordered.id, 5_000_000, forced=False)
    # Its amount cannot be spent meanwhile.
    assert await posted(books, alice) == 15_000_000
    fake.keys.clear()  # as after a day
    monkeypatch.setattr(payments, "REFUND_REPEATED_AFTER_MS", -1)
    await asyncio.gather(selling.reconcile(), selling.reconcile())
    assert [one["amount"] for one in fake.of("refund")] == [500]
    assert await posted(books, alice) == 15_000_000 and await is_sound(books)
    rows = await books.fetch("SELECT state FROM refunds")
    assert [row[0] for row in rows] == ["done"]


@pytest.mark.parametrize(("asked", "status"), [("GET refunds", "401"), ("POST refunds", "403")])
async def test_a_secret_key_that_is_refused_ends_no_refund_that_may_have_been_made(
    selling, fake, books, asked, status, monkeypatch
):
    alice = await enter(books)
    ordered = await bought(selling, fake, books, alice)
    fake.trouble += [("POST refunds", "after" if asked == "GET refunds" else "before")] * 3
    with pytest.raises(ProcessorUnavailable):
        await selling.refund(ordered.id, 5_000_000, forced=False)
    fake.trouble += [(asked, status)]
    monkeypatch.setattr(payments, "REFUND_REPEATED_AFTER_MS", -1)
    await selling.reconcile()
    assert await posted(books, alice) == 15_000_000
    await selling.reconcile()
    assert [one["amount"] for one in fake.of("refund")] == [500]
    assert await posted(books, alice) == 15_000_000 and await is_sound(books)
    rows = await books.fetch("SELECT state FROM refunds")
    assert [row[0] for row in rows] == ["done"]


async def test_a_refund_that_the_processor_refuses_is_in_the_wallet_again(selling, fake, books):
    alice = await enter(books)
    ordered = await bought(selling, fake, books, alice)
    fake.trouble += [("POST refunds", "400")]
    with pytest.raises(NotRefundable):
        await selling.refund(ordered.id, 5_000_000, forced=False)
    assert await posted(books, alice) == PRICE and await is_sound(books)
    assert (await state_of(books, ordered)).refunded_microusd == 0


async def test_many_refunds_at_once_give_back_no_more_than_there_is(selling, fake, books):
    alice = await enter(books)
    ordered = await bought(selling, fake, books, alice)
    told = await asyncio.gather(
        *(selling.refund(ordered.id, 9_000_000, forced=False) for _ in range(6)), return_exceptions=True
    )
    assert sum(not isinstance(one, Exception) for one in told) == 2
    assert await posted(books, alice) == 2_000_000 and fake.of("charge")[0]["amount_refunded"] == 1800
    assert await is_sound(books)


@pytest.mark.parametrize(("change", "named"), [
    ("UPDATE top_ups SET refunded_microusd = refunded_microusd + 10000", "refunded"),
    ("UPDATE top_ups SET disputed_microusd = disputed_microusd + 10000", "disputed"),
    ("UPDATE top_ups SET state = 'expired'", "paid 0"),
    ("UPDATE top_ups SET amount_microusd = amount_microusd + 10000", "credited"),
    ("UPDATE wallets SET disputed = disputed + 1", "freeze it"),
    ("UPDATE top_ups SET frozen = 0", "freeze it"),
    ("UPDATE refunds SET amount_microusd = amount_microusd + 10000", "asked 5010000"),
])
async def test_an_audit_names_payments_that_do_not_agree_with_the_books(selling, fake, books, change, named):
    alice = await enter(books)
    ordered = await bought(selling, fake, books, alice)
    await selling.refund(ordered.id, 5_000_000, forced=False)
    fake.dispute(fake.session_of(ordered.id)["payment_intent"], 100)
    await selling.learn(await state_of(books, ordered))
    assert await is_sound(books)

    def break_it():
        yield (change, ())

    await books.run(break_it)
    for full in (False, True):
        found = (await ledger.audit(books, full=full)).violations
        assert found and {one.rule for one in found} == {"R5"} and named in str(found[0])


async def test_who_comes_back_at_once_is_asked_for_at_once_and_then_not_for_a_while(selling, fake, books):
    alice = await enter(books)
    ordered = await selling.begin(alice.account.id, PRICE)
    before = len(fake.requests)
    for _ in range(5):
        await selling.ask(ordered.id, unless_asked_within_ms=60_000)
    assert len(fake.requests) - before == 1
    fake.pay(ordered.checkout_id)
    await selling.ask(ordered.id, unless_asked_within_ms=-1)
    assert await posted(books, alice) == PRICE


async def test_no_more_is_taken_back_than_was_given(selling, fake, books):
    alice = await enter(books)
    ordered = await bought(selling, fake, books, alice)
    payment_id = fake.session_of(ordered.id)["payment_intent"]
    fake.dispute(payment_id)
    fake.give_back(payment_id, 1500)
    await selling.learn(await state_of(books, ordered))
    found = await state_of(books, ordered)
    assert (found.refunded_microusd, found.disputed_microusd) == (15_000_000, 5_000_000)
    assert await posted(books, alice) == 0 and await is_sound(books)


async def test_a_refund_and_a_call_at_once_do_not_both_have_the_same_credit(books):
    async def refund_and_call(number):
        alice = await enter(books)
        ordered = await books.run(lambda: top_up.order(alice.account.id, PRICE, "stripe_test"))
        paid = Payment("stripe_test", f"cs_{number}", PRICE, "usd", "/", ordered.id, payment_id=f"pi_{number}")
        await books.run(lambda: top_up.pay(paid))
        asked, held = await asyncio.gather(
            books.run(lambda: refund.ask(ordered.id, PRICE, processor="stripe_test", forced=False)),
            books.run(lambda: wallet.reserve(alice.account.id, PRICE)), return_exceptions=True,
        )
        balance = await wallet.balance(books, alice.account.id)
        assert balance.posted - balance.held == 0 and isinstance(asked, NotRefundable) == (held is True), number

    for number in range(30):
        await refund_and_call(number)
