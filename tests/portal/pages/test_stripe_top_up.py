"""Buying by Stripe in a browser: with its event, without it, and without coming back; the history that follows."""

from __future__ import annotations

import re

import pytest

from models import top_up
from models.clock import now_ms
from tests.cast import enter
from tests.portal.pages.chromium import at_home
from tests.portal.pages.reader import reader_of
from tests.portal.shop import PRICE

CREDITS = "/dashboard/billing/credits"


@pytest.fixture
async def alice(shop):
    return await enter(shop.books, "alice", plan="free")


async def at_checkout(shop, page, amount="12.34"):
    await page.goto(f"{shop.house.base_url}{CREDITS}")
    await page.fill("#amount", amount)
    await page.press("#amount", "Enter")
    await page.wait_for_url(f"{shop.stripe.url}/pay/*")
    assert f"${amount}" in await page.inner_text("h1")


async def test_a_top_up_in_a_browser_is_in_the_credit_within_seconds(shop, alice):
    shop.stripe.delivers, shop.stripe.copies = True, 3
    async with at_home(shop.house, shop.books, alice) as context:
        page = await context.new_page()
        await at_checkout(shop, page)
        await page.click("text=Decline")
        await page.click("text=Pay >> nth=-1")
        await page.wait_for_selector("text=$12.34 is in your credit.", timeout=20_000)
        await page.wait_for_selector("#purchases-table >> text=Receipt >> nth=-1", timeout=20_000)
        row = page.locator("#purchases-table tbody tr")
        assert await row.count() == 1 and "paid" in await row.inner_text()
        await row.locator("a", has_text="Receipt").click()
        assert "Receipt for $12.34" in await page.inner_text("body")
    assert await shop.posted(alice) == 12_340_000 and await shop.is_sound()


async def test_without_an_event_the_page_that_one_comes_back_to_asks(shop, alice):
    async with at_home(shop.house, shop.books, alice, java_script_enabled=False) as context:
        page = await context.new_page()
        await at_checkout(shop, page)
        await page.click("text=Pay >> nth=-1")
        await page.wait_for_selector("#told", timeout=20_000)
        # Where Stripe takes long, the page says so and asks again when it is loaded again.
        for _ in range(4):
            if "is in your credit" in await page.inner_text("#told"):
                break
            await page.reload()
        assert "$12.34 is in your credit." in await page.inner_text("#told")
        assert await page.locator("text=Receipt >> nth=-1").count() == 1
    assert await shop.posted(alice) == 12_340_000


async def test_without_an_event_and_without_coming_back_the_order_is_asked_for(shop, alice):
    async with at_home(shop.house, shop.books, alice) as context:
        page = await context.new_page()
        await at_checkout(shop, page)
    (ordered,) = await top_up.recent(shop.books, alice.account.id, limit=2)
    shop.stripe.pay(ordered.checkout_id)

    def five_minutes_pass():
        yield ("UPDATE top_ups SET asked_at_ms = asked_at_ms - ? WHERE id = ?", (top_up.ASKED_EVERY_MS, ordered.id))

    await shop.books.run(five_minutes_pass)
    async with at_home(shop.house, shop.books, alice) as context:
        page = await context.new_page()
        await page.goto(f"{shop.house.base_url}{CREDITS}")
        await page.wait_for_selector("#purchases-table >> text=paid", timeout=20_000)
    assert await shop.posted(alice) == 12_340_000 and await shop.is_sound()


async def test_the_history_shows_what_became_of_each_order(shop, http, alice):
    reader = await reader_of(shop.house, http, shop.books, alice)
    wanted = {}
    for happens, words in (
        ("nothing", "waiting for payment"), ("pay", "paid"), ("expire", "expired"), ("bounce", "not paid"),
        ("decline", "card declined, still open"), ("part", "partly refunded"), ("all", "refunded"),
        ("dispute", "disputed"), ("lost", "charged back"), ("won", "paid"),
    ):
        ordered = await shop.order(alice)
        wanted[ordered.id] = words
        session = shop.stripe.session_of(ordered.id)
        first = len(shop.stripe.events)
        if happens in ("expire", "decline", "pay"):
            getattr(shop.stripe, happens)(session["id"])
        elif happens == "bounce":
            shop.stripe.pay(session["id"], takes_days=True)
            shop.stripe.bounce(session["id"])
        elif happens != "nothing":
            shop.stripe.pay(session["id"])
            paid_by = session["payment_intent"]
            if happens in ("part", "all"):
                shop.stripe.give_back(paid_by, 500 if happens == "part" else 2000)
            else:
                made = shop.stripe.dispute(paid_by)
                if happens != "dispute":
                    shop.stripe.close_dispute(made["id"], happens)
        for event in shop.stripe.events[first:]:
            await shop.insist(event)
    page = await reader.get(CREDITS)
    rows = dict(re.findall(r'<tr id="(top_\w+)">(.*?)</tr>', page.raw, re.DOTALL))
    for top_up_id, words in wanted.items():
        shown = re.search(r'class="state[^"]*">(?:<[^>]*>)*\s*([^<]+)<', rows[top_up_id])
        assert shown and shown[1].strip() == words, (words, rows[top_up_id])
    assert "A payment is disputed, so the credit is frozen" in page.text
    assert page.raw.count("Go on to payment") == 2 and await shop.is_sound()


async def test_a_balance_below_zero_says_why(shop, http):
    alice = await enter(shop.books, plan="wallet")
    ordered = await shop.order(alice)
    session = shop.stripe.session_of(ordered.id)
    shop.stripe.pay(session["id"])
    await shop.insist(shop.stripe.events[-1])
    assert shop.house.command("credit", "refund", ordered.id, "20.01").returncode == 2
    refused = shop.house.command("credit", "refund", ordered.id, "0")
    assert refused.returncode == 2 and "more than 0" in refused.stderr
    call = {"model": "vendor/twin by call", "messages": [{"role": "user", "content": "hi"}]}
    url = f"{shop.house.base_url}/v1/chat/completions"
    async with http.post(url, json=call, headers=alice.headers) as answer:
        assert answer.status == 200
    part = shop.house.command("credit", "refund", ordered.id, "5")
    assert (part.returncode, part.stdout) == (0, "5.000000\n"), part.stderr
    refused = shop.house.command("credit", "refund", ordered.id, "15")
    assert refused.returncode == 2 and "only $14.99 is unspent" in refused.stderr
    forced = shop.house.command("credit", "refund", ordered.id, "15", "--force")
    assert forced.returncode == 0 and await shop.posted(alice) == -10_000
    made = [one["amount"] for one in shop.stripe.of("refund") if one["payment_intent"] == session["payment_intent"]]
    assert made == [500, 1500]
    page = await (await reader_of(shop.house, http, shop.books, alice)).get(CREDITS)
    assert "The balance is below zero, because a refund or a disputed payment took back credit" in page.text
    assert "−$5.00" in page.text or "-$5.00" in page.text
    async with http.post(url, json=call, headers=alice.headers) as answer:
        assert answer.status == 402 and "below zero" in (await answer.json())["error"]["message"]
    assert shop.house.command("audit", "--full").returncode == 0
    unknown = shop.house.command("credit", "refund", "top_" + "0" * 26)
    assert unknown.returncode == 2 and "there is no top-up" in unknown.stderr


async def test_an_order_whose_beginning_was_unclear_is_gone_on_with_from_the_history(shop, http, alice):
    reader = await reader_of(shop.house, http, shop.books, alice)
    await reader.get(CREDITS)
    shop.stripe.trouble += [("POST checkout/sessions", "after")] * 3
    answer = await reader.post(CREDITS, {"amount": "20"})
    assert answer.status == 502 and "The order is kept" in answer.text and "No money moved." in answer.text
    (ordered,) = await top_up.recent(shop.books, alice.account.id, limit=2)
    assert f'action="{CREDITS}/{ordered.id}/resume"' in answer.raw
    bob = await enter(shop.books, "bob")
    other = await reader_of(shop.house, http, shop.books, bob)
    await other.get(CREDITS)
    for path in (ordered.id, "top_" + "0" * 26, "x"):
        assert (await other.post(f"{CREDITS}/{path}/resume")).status == 404
    onward = await reader.post(f"{CREDITS}/{ordered.id}/resume")
    assert onward.status == 303 and onward.location == shop.stripe.session_of(ordered.id)["url"]


async def test_somebody_who_watches_an_order_asks_no_more_often_than_need_be(shop, http, alice):
    reader = await reader_of(shop.house, http, shop.books, alice)
    ordered = await shop.order(alice)
    before = len(shop.stripe.requests)
    for _ in range(6):
        await reader.get(f"{CREDITS}/standing?top_up={ordered.id}")
    assert len(shop.stripe.requests) - before <= 1
    bob = await enter(shop.books, "bob")
    other = await reader_of(shop.house, http, shop.books, bob)

    def a_while_passes():
        yield ("UPDATE top_ups SET asked_at_ms = ? WHERE id = ?", (now_ms() - 60_000, ordered.id))

    await shop.books.run(a_while_passes)
    before = len(shop.stripe.requests)
    await other.get(f"{CREDITS}?top_up={ordered.id}")
    assert len(shop.stripe.requests) == before
    shop.stripe.pay(ordered.checkout_id)
    shown = await reader.get(f"{CREDITS}/standing?top_up={ordered.id}")
    assert "$20.00 is in your credit." in shown.text and await shop.posted(alice) == PRICE


async def test_a_stripe_that_does_not_answer_keeps_no_page_waiting(shop, http, alice):
    reader = await reader_of(shop.house, http, shop.books, alice)
    ordered = await shop.order(alice)
    shop.stripe.trouble += [("GET checkout/sessions/.*", "500")] * 9
    began = now_ms()
    page = await reader.get(f"{CREDITS}?top_up={ordered.id}")
    assert page.status == 200 and "Waiting for the payment" in page.text and now_ms() - began < 6000
