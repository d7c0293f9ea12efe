"""Stripe's events: forged ones, and true ones in any order, any number of times, at processes that are killed."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import json
import os
import random
import signal
import sqlite3
import time

import asyncpg
import pytest

from models import payment_event, top_up, wallet
from models.clock import now_ms
from models.errors import ConfigurationError
from models.settings import read_settings
from models.top_up import EXPIRED, FAILED, PAID, PENDING
from portal.pages.webhooks import AGE_S_MAX, Unproven, require_signature
from tests.cast import enter
from tests.portal.shop import PRICE
from tests.twins.stripe import LIVE_KEY, SECRET_KEY, WEBHOOK_SECRET, body_of, signed

PAIR = {"STRIPE_SECRET_KEY": SECRET_KEY, "STRIPE_WEBHOOK_SECRET": WEBHOOK_SECRET}


@pytest.fixture
async def alice(shop):
    return await enter(shop.books, "alice", plan="free")


@pytest.fixture
async def bob(shop):
    return await enter(shop.books, "bob", plan="free")


async def paid_event(shop, actor, amount=PRICE):
    """Return an order and the event that it is paid."""
    ordered = await shop.order(actor, amount)
    shop.stripe.pay(shop.stripe.session_of(ordered.id)["id"])
    return ordered, shop.stripe.events[-1]


# The start


@pytest.mark.parametrize(("environ", "name"), [
    ({"STRIPE_SECRET_KEY": SECRET_KEY}, "STRIPE_WEBHOOK_SECRET"),
    ({**PAIR, "STRIPE_WEBHOOK_SECRET": ""}, "STRIPE_WEBHOOK_SECRET"),
    ({**PAIR, "STRIPE_WEBHOOK_SECRET": "   "}, "STRIPE_WEBHOOK_SECRET"),
    ({**PAIR, "STRIPE_WEBHOOK_SECRET": "whsec_"}, "STRIPE_WEBHOOK_SECRET"),
    ({**PAIR, "STRIPE_WEBHOOK_SECRET": "whsec_short"}, "STRIPE_WEBHOOK_SECRET"),
    ({**PAIR, "STRIPE_WEBHOOK_SECRET": "s" * 40}, "STRIPE_WEBHOOK_SECRET"),
    ({"STRIPE_WEBHOOK_SECRET": WEBHOOK_SECRET}, "STRIPE_SECRET_KEY"),
    ({**PAIR, "STRIPE_SECRET_KEY": "pk_test_0123456789abcdef"}, "STRIPE_SECRET_KEY"),
    ({**PAIR, "STRIPE_API_BASE": "http://stripe.example"}, "STRIPE_API_BASE"),
    ({**PAIR, "STRIPE_TAX": "perhaps"}, "STRIPE_TAX"),
    ({**PAIR, "TEST_CHECKOUT": "yes"}, "TEST_CHECKOUT"),
    ({"TEST_CHECKOUT": "yes", "PUBLIC_URL": "https://gateway.example", "SECRET_KEY": "s" * 40,
      "MAIL_TO_CONSOLE": "yes"}, "TEST_CHECKOUT"),
])
def test_a_start_that_would_take_forged_money_is_refused_in_a_sentence(environ, name):
    with pytest.raises(ConfigurationError) as refused:
        read_settings(environ)
    (problem,) = refused.value.problems
    assert problem.startswith(f"{name}: ") and WEBHOOK_SECRET not in problem and SECRET_KEY not in problem
    assert "whsec_short" not in problem


def test_settings_that_sell_by_stripe():
    assert read_settings({}).stripe is None and read_settings({}).test_checkout
    settings = read_settings(PAIR)
    assert not settings.test_checkout and not settings.stripe.live and settings.stripe.receipts
    assert not settings.stripe.tax and not settings.stripe.invoices and settings.stripe.api_base is None
    assert read_settings({**PAIR, "STRIPE_SECRET_KEY": LIVE_KEY}).stripe.live
    assert WEBHOOK_SECRET not in repr(settings) and SECRET_KEY not in repr(settings)


# Forgeries


def test_signatures_hold_for_their_bytes_their_secret_and_their_time():
    body, secret, now = b'{"id": "evt_1"}', WEBHOOK_SECRET.encode(), 1_800_000_000
    good = signed(body, at_s=now)
    moment, _, proof = good.partition(",")
    other = "v1=" + "0" * 64
    for header in (good, f"{moment},{other},{proof}", f"{proof},{moment}", f"{moment}, {proof},v0=abc"):
        require_signature(body, header, secret, now)
    for at in (now - AGE_S_MAX, now + AGE_S_MAX):
        require_signature(body, good, secret, at)
    bad = [
        "", ",", "=", "v1", moment, proof, f"{moment},{other}", f"{moment},v0={proof[3:]}", f"t=,{proof}",
        f"t=1e9,{proof}", f"t=-1,{proof}", f"t=١,{proof}", f"{moment},{moment},{proof}", f"{moment},{proof}0",
        f"{moment},v1=é", f"t={now + 1},{proof}", signed(body, at_s=now, secret="whsec_other"),
        signed(body + b" ", at_s=now), signed(body, at_s=now, scheme="v0"), signed(b"", at_s=now),
        signed(body, at_s=now, secret=""), f"{moment}," + ",".join([other] * 40) + f",{proof}",
    ]
    for header in bad:
        with pytest.raises(Unproven):
            require_signature(body, header, secret, now)
    for at in (now - AGE_S_MAX - 1, now + AGE_S_MAX + 1, 0, now * 2):
        with pytest.raises(Unproven):
            require_signature(body, good, secret, at)


async def test_forgeries_credit_nothing_and_are_no_error_of_ours(shop, alice, bob):
    ordered, event = await paid_event(shop, alice)
    theirs, other = await paid_event(shop, bob)
    body, now = body_of(event), time.time()
    altered = body.replace(b'"amount_total": 2000', b'"amount_total": 9000')
    assert altered != body
    unproven = {
        "no header": (body, ""), "an empty secret": (body, signed(body, secret="")),
        "another secret": (body, signed(body, secret="whsec_0123456789abcdef0123456789")),
        "old": (body, signed(body, at_s=now - 301)), "of tomorrow": (body, signed(body, at_s=now + 86_400)),
        "a little early": (body, signed(body, at_s=now + 310)), "altered": (altered, signed(body)),
        "a scheme of before": (body, signed(body, scheme="v0")), "not ascii": (body, "t=1,v1=é"),
    }
    for case, (sent, header) in unproven.items():
        assert await shop.send(sent, header=header) == 400, case
    unreadable = [
        b"", b"\xff\xfe", body.replace(b"stripe_test", b"\xff").replace(b"top_", b"\xc3("), b"[" * 100_000, b"null",
        b"[]", b"{}", b'"x"', b'{"id": 1}', b'{"id": "evt_1", "type": "x", "data": {"object": []}}', b"NaN",
        b'{"id": "evt_\\u0000", "type": "x", "data": {"object": {}}}',
        b'{"id": "evt_\\ud800", "type": "x", "data": {"object": {}}}',
        json.dumps({"id": "e" * 500, "type": "x", "data": {"object": {}}}).encode(),
        json.dumps({"id": None, "type": ["x"], "data": {"object": {}}}).encode(), b"\xef\xbb\xbf" + body,
    ]
    for sent in unreadable:
        assert await shop.send(sent, header=signed(sent)) == 400, sent[:60]

    def like(base=event, **fields):
        made = copy.deepcopy(base)
        made["id"] = f"evt_{random.getrandbits(64):x}"
        for name, value in fields.items():
            target = made if name in ("livemode", "type", "account", "data") else made["data"]["object"]
            if value is KeyError:
                del target[name]
            else:
                target[name] = value
        return made

    subject = event["data"]["object"]
    elsewhere = {"top_up": "top_" + "1" * 26, "installation": "https://other.example"}
    proven = {
        "bob's session for alice's order": like(other, metadata=subject["metadata"]),
        "alice's session for bob's order": like(metadata=other["data"]["object"]["metadata"]),
        "bob's order for alice": like(metadata={**subject["metadata"], "account": bob.account.id}),
        "a session that is not the order's": like(id="cs_another"),
        "more": like(amount_total=2001), "less": like(amount_total=1999), "nothing": like(amount_total=0),
        "negative": like(amount_total=-2000), "huge": like(amount_total=10**30), "text": like(amount_total="2000"),
        "a float": like(amount_total=2000.5), "untaxed tax": like(amount_total=2380),
        "another currency": like(currency="eur"), "no currency": like(currency=None),
        "capitals": like(currency="USD"), "unpaid": like(payment_status="unpaid"),
        "nothing to pay": like(payment_status="no_payment_required"), "no status": like(payment_status=KeyError),
        "a setup": like(mode="setup"), "a subscription": like(mode="subscription"),
        "a live event": like(livemode=True), "a live session": like(data={"object": {**subject, "livemode": True}}),
        "no mode": like(livemode=None), "a true one": like(livemode=1),
        "of a connected account": like(account="acct_1"),
        "an async success of what is unpaid": like(
            type="checkout.session.async_payment_succeeded", payment_status="unpaid"),
        "an unknown order": like(metadata={**subject["metadata"], "top_up": "top_" + "0" * 26}),
        "an injection": like(metadata={**subject["metadata"], "top_up": "' OR 1=1 --\0"}),
        "an order that is no text": like(metadata={**subject["metadata"], "top_up": ["x"]}),
        "another installation": like(metadata=elsewhere), "no metadata": like(metadata=None),
        "metadata of text": like(metadata="top_up"), "an unknown type": like(type="invoice.paid"),
        "no object": like(data={"object": {}}),
        "a refund of more than there was": like(
            data={"object": {"id": "ch_1", "livemode": False, "metadata": subject["metadata"], "currency": "usd",
                             "payment_intent": subject["payment_intent"], "amount": 2000, "amount_refunded": 9000}},
            type="charge.refunded"),
        "a refund of another sum": like(
            data={"object": {"id": "ch_1", "livemode": False, "metadata": subject["metadata"], "currency": "usd",
                             "payment_intent": subject["payment_intent"], "amount": 1000, "amount_refunded": 500}},
            type="charge.refunded"),
        **{
            f"a dispute of {amount!r}"[:40]: like(data={"object": {
                "id": f"dp_{place}", "livemode": False, "payment_intent": subject["payment_intent"],
                "amount": amount, "currency": "usd", "status": "needs_response"}}, type="charge.dispute.created")
            for place, amount in enumerate((10**30, -1, "2000", 1.5, None, True))
        },
        "an expiry of another session": like(id="cs_another", type="checkout.session.expired"),
    }
    for case, made in proven.items():
        body = body_of(made)
        assert await shop.send(body, header=signed(body)) == 200, case
        assert await shop.posted(alice) == await shop.posted(bob) == 0, case
    assert (await shop.state(ordered)).state == (await shop.state(theirs)).state == PENDING
    kept = await shop.books.fetch("SELECT outcome, COUNT(*) FROM payment_events GROUP BY outcome")
    kept = dict(tuple(row) for row in kept)
    assert kept["refused"] >= 25 and kept["ignored"] >= 5
    assert "is for 20000000 usd, paid were 20010000 usd" in shop.house.log()
    assert "Traceback" not in shop.house.log()
    # And the true one still counts, once, for its own.
    for _ in range(3):
        assert await shop.send(event) == 200
    assert (await shop.posted(alice), await shop.posted(bob)) == (PRICE, 0)
    assert await shop.is_sound()


async def test_bodies_are_measured_before_they_are_read(shop):
    large = b" " * (3 << 20)
    assert await shop.send(large, header=signed(large)) == 413
    middling = b" " * (200 << 10)
    assert await shop.send(middling, header=signed(middling)) == 400

    async def pieces():
        yield b"{}"

    async with shop.http.post(shop.url, data=pieces()) as answer:
        assert answer.status == 411
    async with shop.http.get(shop.url) as answer:
        assert answer.status == 405


async def test_without_a_secret_there_is_no_such_address(house, http):
    body, signature = b"{}", {"stripe-signature": signed(b"{}")}
    async with http.post(f"{house.base_url}/webhooks/stripe", data=body, headers=signature) as answer:
        assert answer.status == 404
        unknown = await answer.text()
    async with http.post(f"{house.base_url}/webhooks/other", data=body) as answer:
        assert answer.status == 404 and len(await answer.text()) == len(unknown)


# Any order, any number of times


async def story(shop, actor):
    """Return an order whose payment took days, was refunded in part and disputed in part, and its four events."""
    ordered = await shop.order(actor)
    session = shop.stripe.session_of(ordered.id)
    first = len(shop.stripe.events)
    shop.stripe.pay(session["id"], takes_days=True)
    shop.stripe.arrive(session["id"])
    shop.stripe.give_back(session["payment_intent"], 500)
    made = shop.stripe.dispute(session["payment_intent"], 700)
    return ordered, made, shop.stripe.events[first:]


async def test_every_order_of_events_by_eight_senders_ends_the_same(shop):
    for order in itertools.permutations(range(4)):
        alice = await enter(shop.books, plan="free")
        ordered, disputed, events = await story(shop, alice)
        for number in order:
            await asyncio.gather(*(shop.insist(events[number]) for _ in range(8)))
        balance = await wallet.balance(shop.books, alice.account.id)
        assert (balance.posted, balance.disputed) == (PRICE - 12_000_000, True), order
        found = await shop.state(ordered)
        assert (found.state, found.refunded_microusd, found.disputed_microusd) == (PAID, 5_000_000, 7_000_000)
        lines = await shop.books.fetch("SELECT kind FROM ledger WHERE account_id = ?", (alice.account.id,))
        assert sorted(line[0] for line in lines) == ["dispute", "refund", "top_up"], order
    assert await shop.is_sound()


async def test_events_at_processes_that_are_killed_end_the_same(shop):
    told = []
    for _ in range(8):
        alice = await enter(shop.books, plan="free")
        ordered, disputed, events = await story(shop, alice)
        shop.stripe.close_dispute(disputed["id"], "won" if len(told) % 2 else "lost")
        told.append((alice, [*events, shop.stripe.events[-1]]))
    everything = [event for _, events in told for event in events] * 3
    random.shuffle(everything)
    waiting = iter(everything)

    async def sender():
        for event in waiting:
            await shop.insist(event)

    async def killer():
        for _ in range(4):
            await asyncio.sleep(0.5)
            with contextlib.suppress(ProcessLookupError, IndexError):
                os.kill(random.choice(pids(shop.house)), signal.SIGKILL)

    await asyncio.gather(killer(), *(sender() for _ in range(8)))
    for number, (alice, _) in enumerate(told):
        balance = await wallet.balance(shop.books, alice.account.id)
        assert (balance.posted, balance.disputed) == (PRICE - (5 if number % 2 else 12) * 1_000_000, False)
    assert await shop.is_sound()


def pids(house):
    path = f"/proc/{house.process.pid}/task/{house.process.pid}/children"
    with open(path) as children:
        return [int(pid) for pid in children.read().split()]


async def test_three_partial_refunds_with_duplicates_add_up_in_any_order(shop):
    for order in itertools.permutations(range(4)):
        alice = await enter(shop.books)
        ordered = await shop.order(alice)
        session = shop.stripe.session_of(ordered.id)
        first = len(shop.stripe.events)
        shop.stripe.pay(session["id"])
        for cents in (500, 300, 150):
            shop.stripe.give_back(session["payment_intent"], cents)
        events = shop.stripe.events[first:]
        for number in order:
            await asyncio.gather(*(shop.insist(events[number]) for _ in range(2)))
        assert await shop.posted(alice) == PRICE - 9_500_000, order
        for event in events:
            await shop.insist(event)
        assert await shop.posted(alice) == PRICE - 9_500_000, order
    shop.stripe.give_back(session["payment_intent"], 1050)
    await shop.insist(shop.stripe.events[-1])
    found = await shop.state(ordered)
    assert await shop.posted(alice) == 0 and found.refunded_microusd == found.amount_microusd
    assert await shop.is_sound()


async def test_a_refund_before_its_payment_waits_for_it(shop, alice):
    ordered, event = await paid_event(shop, alice)
    shop.stripe.give_back(shop.stripe.session_of(ordered.id)["payment_intent"], 2000)
    await shop.insist(shop.stripe.events[-1])
    assert await shop.posted(alice) == 0 and (await shop.state(ordered)).state == PENDING
    await shop.insist(event)
    found = await shop.state(ordered)
    assert await shop.posted(alice) == 0 and (found.state, found.refunded_microusd) == (PAID, PRICE)
    assert await shop.is_sound()


async def test_a_refund_that_bounces_is_in_the_wallet_again(shop, alice):
    ordered, event = await paid_event(shop, alice)
    await shop.insist(event)
    made = shop.stripe.give_back(shop.stripe.session_of(ordered.id)["payment_intent"], 800)
    given_back = shop.stripe.events[-1]
    await shop.insist(given_back)
    assert await shop.posted(alice) == PRICE - 8_000_000
    shop.stripe.bounce_refund(made["id"])
    for again in (shop.stripe.events[-1], shop.stripe.events[-1], given_back):
        await shop.insist(again)
    assert await shop.posted(alice) == PRICE and await shop.is_sound()


CALL = {"model": "vendor/twin by call", "messages": [{"role": "user", "content": "hi"}]}


async def call(shop, actor):
    url = f"{shop.house.base_url}/v1/chat/completions"
    async with shop.http.post(url, json=CALL, headers=actor.headers) as answer:
        return answer.status, await answer.json()


async def spend(shop, actor, amount):
    await shop.books.run(lambda: wallet.reserve(actor.account.id, amount))
    reference = f"req_{now_ms()}"
    await shop.books.run(lambda: wallet.settle(actor.account.id, amount, amount, reference, now_ms()))


async def disputed(shop):
    """Return somebody who bought, made a call and disputes it, what they had left, the dispute and its event."""
    alice = await enter(shop.books, plan="wallet")
    ordered, event = await paid_event(shop, alice)
    await shop.insist(event)
    assert (await call(shop, alice))[0] == 200
    left = await shop.posted(alice)
    made = shop.stripe.dispute(shop.stripe.session_of(ordered.id)["payment_intent"])
    return alice, left, made, shop.stripe.events[-1]


async def test_a_dispute_freezes_and_won_gives_everything_back(shop):
    alice, left, made, opened = await disputed(shop)
    await shop.insist(opened)
    assert await shop.posted(alice) == left - PRICE < 0
    status, answer = await call(shop, alice)
    assert status == 402 and "frozen" in answer["error"]["message"]
    shop.stripe.close_dispute(made["id"], "won")
    for again in (shop.stripe.events[-1], opened, shop.stripe.events[-1]):
        await shop.insist(again)
    assert await shop.posted(alice) == left and (await call(shop, alice))[0] == 200


async def test_a_dispute_that_is_lost_leaves_a_debt_that_says_why(shop):
    alice, left, made, opened = await disputed(shop)
    shop.stripe.close_dispute(made["id"], "lost")
    for again in (shop.stripe.events[-1], opened, opened):
        await shop.insist(again)
    balance = await wallet.balance(shop.books, alice.account.id)
    assert (balance.posted, balance.disputed) == (left - PRICE, False)
    status, answer = await call(shop, alice)
    assert status == 402 and "below zero" in answer["error"]["message"]
    await shop.insist((await paid_event(shop, alice))[1])
    assert await shop.posted(alice) == left and (await call(shop, alice))[0] == 200


async def test_two_disputes_freeze_until_both_are_closed_and_inquiries_freeze_nothing(shop, alice):
    made = []
    for _ in range(2):
        ordered, event = await paid_event(shop, alice)
        await shop.insist(event)
        made.append(shop.stripe.dispute(shop.stripe.session_of(ordered.id)["payment_intent"], 100))
        await shop.insist(shop.stripe.events[-1])
    ordered, event = await paid_event(shop, alice)
    await shop.insist(event)
    shop.stripe.dispute(shop.stripe.session_of(ordered.id)["payment_intent"], status="warning_needs_response")
    await shop.insist(shop.stripe.events[-1])
    for one, frozen in zip(made, (True, False), strict=True):
        assert (await wallet.balance(shop.books, alice.account.id)).disputed
        shop.stripe.close_dispute(one["id"], "won")
        await shop.insist(shop.stripe.events[-1])
        assert (await wallet.balance(shop.books, alice.account.id)).disputed is frozen
    assert await shop.posted(alice) == 3 * PRICE and await shop.is_sound()


@pytest.mark.parametrize(("happens", "state"), [("expire", EXPIRED), ("bounce", FAILED), ("decline", PENDING)])
async def test_events_of_what_was_not_paid(shop, alice, happens, state):
    ordered = await shop.order(alice)
    session_id = shop.stripe.session_of(ordered.id)["id"]
    if happens == "bounce":
        shop.stripe.pay(session_id, takes_days=True)
    getattr(shop.stripe, happens)(session_id)
    for event in shop.stripe.events[-2:]:
        await shop.insist(event)
        await shop.insist(event)
    found = await shop.state(ordered)
    assert found.state == state and await shop.posted(alice) == 0
    if happens == "decline":
        assert found.failure == "lost_card"
        shop.stripe.pay(session_id)
        await shop.insist(shop.stripe.events[-1])
        assert (await shop.state(ordered)).state == PAID


async def test_taken_means_written_down(shop, alice):
    """While the books cannot be written, an event is not taken; afterwards it comes again and counts."""
    ordered, event = await paid_event(shop, alice)
    if shop.books.dialect == "sqlite":
        holder = sqlite3.connect(shop.books.file, isolation_level=None)
        holder.execute("BEGIN IMMEDIATE")
        answers = await asyncio.gather(*(shop.send(event) for _ in range(2)))
        holder.execute("ROLLBACK")
        holder.close()
    else:
        holder = await asyncpg.connect(shop.books.url)
        transaction = holder.transaction()
        await transaction.start()
        await holder.execute("SELECT 1 FROM top_ups WHERE id = $1 FOR UPDATE", ordered.id)
        answers = await asyncio.gather(*(shop.send(event) for _ in range(2)))
        await transaction.rollback()
        await holder.close()
    assert answers == [503, 503]
    await shop.insist(event)
    assert await shop.posted(alice) == PRICE and await shop.is_sound()


async def test_events_are_forgotten_after_a_while_and_then_have_no_effect_either(shop, alice):
    ordered, event = await paid_event(shop, alice)
    await shop.insist(event)
    later = now_ms() + payment_event.KEPT_MS + 1000
    while await shop.books.run(lambda: payment_event.prune(later)):
        pass
    assert not await shop.books.fetch("SELECT 1 FROM payment_events LIMIT 1")
    await shop.insist(event)
    assert await shop.posted(alice) == PRICE


async def test_an_order_at_an_unfinished_checkout_does_not_expire_by_our_clock(shop, alice):
    ordered = await shop.order(alice)
    assert not await shop.books.run(lambda: top_up.expire_old(now_ms() + 2 * top_up.LIFE_MS))
    assert (await shop.state(ordered)).state == PENDING
