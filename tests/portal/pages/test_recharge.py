"""The credits page when credit runs low: the mail, auto-recharge, the kept card; and codes."""

from __future__ import annotations

import asyncio
import re

import pytest

from models import auto_recharge, ids, ledger, low_credit, payment_card, redeem_code, top_up, wallet
from models.clock import now_ms
from models.payment_card import Card
from portal.tries import CODES_PER_ACCOUNT
from tests.cast import enter, sign_in
from tests.portal.pages.chromium import at_home
from tests.visitor import Visitor

CREDITS = "/dashboard/billing/credits"
DOLLAR = 1_000_000
ON = {"recharge_below": "5", "recharge_amount": "20", "recharge_ceiling": "60"}


async def posted(books, actor):
    return (await wallet.balance(books, actor.account.id)).posted


async def keep_card(books, actor, method="pm_pays"):
    card = Card(f"tcus_{actor.account.id}", method, "visa", "4242")
    await books.run(lambda: payment_card.keep(actor.account.id, "test", card))


async def card_of(books, actor):
    return await payment_card.find(books, actor.account.id, "test")


async def chosen_by(books, actor):
    return await auto_recharge.find(books, actor.account.id)


async def new_code(books, amount=5 * DOLLAR, **limits):
    code = redeem_code.new_code()
    await books.run(lambda: redeem_code.create(code, amount, **limits))
    return code


# The low-credit mail


@pytest.mark.parametrize(("typed", "kept"), [("12.50", 12_500_000), ("$0", 0), ("", 0), ("0.01", 10_000)])
async def test_the_threshold_of_the_mail_is_set(reader, house_books, alice, typed, kept):
    assert 'value="5.00"' in (await reader.get(CREDITS)).text
    answer = await reader.post(f"{CREDITS}/low-credit", {"low_credit": typed})
    assert answer.location == f"{CREDITS}?said=saved"
    assert await low_credit.threshold(house_books, alice.account.id) == kept
    assert "Saved." in (await reader.get(answer.location)).text
    assert f'value="${kept / 1e6:.2f}"' in (await reader.get("/dashboard/settings")).text


@pytest.mark.parametrize("typed", ["-1", "x", "1e3", "0.001", "999999999", "٢"])
async def test_a_threshold_that_will_not_do_is_shown_again(reader, house_books, alice, typed):
    await reader.get(CREDITS)
    answer = await reader.post(f"{CREDITS}/low-credit", {"low_credit": typed})
    assert answer.status == 422 and f'value="{typed}"' in answer.text and 'aria-invalid="true"' in answer.text
    assert await low_credit.threshold(house_books, alice.account.id) == 5 * DOLLAR


# The card and auto-recharge


async def test_a_card_is_kept_by_consent_alone(reader, house_books, alice):
    for ticked in ({}, {"keep_card": "no"}, {"keep_card": "yes"}):
        page = await reader.get(CREDITS)
        box = re.search(r'<input type="checkbox" name="keep_card"[^>]*>', page.raw)
        assert box and "checked" not in box[0]
        checkout = (await reader.post(CREDITS, {"amount": "20", **ticked})).location
        await reader.get(checkout)
        await reader.post(f"{checkout}/pay")
        assert (await card_of(house_books, alice) is not None) == (ticked.get("keep_card") == "yes")
    assert "•••• 4242" in (await reader.get(CREDITS)).text


async def test_a_quick_amount_buys_too(reader, house_books, alice):
    await reader.get(CREDITS)
    await reader.post(CREDITS, {"quick": "50", "amount": "", "keep_card": "yes"})
    (made,) = await top_up.recent(house_books, alice.account.id, limit=5)
    assert made.amount_microusd == 50 * DOLLAR and made.keeps_card


async def test_without_a_card_there_is_nothing_to_turn_on(reader, house_books, alice):
    page = await reader.get(CREDITS)
    assert "No card is kept." in page.text and "Turn on auto-recharge" not in page.text
    answer = await reader.post(f"{CREDITS}/auto-recharge", ON)
    assert answer.status == 409 and "No card is kept" in answer.text
    assert await chosen_by(house_books, alice) is None


async def test_it_is_turned_on_changed_and_off(reader, house_books, alice):
    await keep_card(house_books, alice)
    assert "Turn on auto-recharge" in (await reader.get(CREDITS)).text
    extra = {"is_on": "0", "account_id": "acc_other", "due_at_ms": "0", "off_reason": "declined"}
    answer = await reader.post(f"{CREDITS}/auto-recharge", {**ON, **extra})
    assert answer.location == f"{CREDITS}?said=recharge-on"
    chosen = await chosen_by(house_books, alice)
    assert (chosen.is_on, chosen.below_microusd, chosen.amount_microusd, chosen.ceiling_microusd) == (
        True, 5 * DOLLAR, 20 * DOLLAR, 60 * DOLLAR
    )
    page = await reader.get(answer.location)
    assert "Auto-recharge is on." in page.text and "Save changes" in page.text
    await reader.post(f"{CREDITS}/auto-recharge", {**ON, "recharge_below": "$7.50"})
    assert (await chosen_by(house_books, alice)).below_microusd == 7_500_000
    answer = await reader.post(f"{CREDITS}/auto-recharge/off")
    assert "Auto-recharge is off." in (await reader.get(answer.location)).text
    chosen = await chosen_by(house_books, alice)
    assert not chosen.is_on and chosen.off_reason is None and await card_of(house_books, alice)


@pytest.mark.parametrize(("field", "typed"), [
    ("recharge_below", ""), ("recharge_below", "0"), ("recharge_below", "-5"), ("recharge_below", "x"),
    ("recharge_amount", "9.99"), ("recharge_amount", "10000.01"), ("recharge_amount", "1e2"),
    ("recharge_ceiling", "19.99"), ("recharge_ceiling", ""), ("recharge_ceiling", "1000000.01"),
])
async def test_figures_that_will_not_do_are_shown_again(reader, house_books, alice, field, typed):
    await keep_card(house_books, alice)
    await reader.get(CREDITS)
    answer = await reader.post(f"{CREDITS}/auto-recharge", {**ON, field: typed})
    assert answer.status == 422
    assert re.search(rf'id="{field}"[^>]*value="{re.escape(typed)}"[^>]*aria-invalid="true"', answer.text)
    assert await chosen_by(house_books, alice) is None


async def test_a_fall_below_the_threshold_buys_and_the_page_says_so(reader, house_books, alice):
    await keep_card(house_books, alice)
    await reader.get(CREDITS)
    await reader.post(f"{CREDITS}/auto-recharge", {**ON, "recharge_below": "15"})
    for _ in range(100):
        if await posted(house_books, alice) == 30 * DOLLAR:
            break
        await asyncio.sleep(0.1)
    page = await reader.get(CREDITS)
    assert "$30.00" in page.text and "$20.00 of it used this month" in page.text
    await reader.post(f"{CREDITS}/auto-recharge", {**ON, "recharge_ceiling": "20"})
    assert "no room for another recharge" in (await reader.get(CREDITS)).text


@pytest.mark.parametrize(("method", "says"), [
    ("pm_declines", "the card was declined"), ("pm_asks", "wants you to be there"),
])
async def test_a_card_that_does_not_pay_is_told_on_the_page(reader, house_books, alice, method, says):
    await keep_card(house_books, alice, method)
    await reader.get(CREDITS)
    await reader.post(f"{CREDITS}/auto-recharge", {**ON, "recharge_below": "15"})
    for _ in range(100):
        if not (await chosen_by(house_books, alice)).is_on:
            break
        await asyncio.sleep(0.1)
    page = await reader.get(CREDITS)
    assert says in page.text and "Turn on auto-recharge" in page.text
    assert await posted(house_books, alice) == 10 * DOLLAR
    await keep_card(house_books, alice)
    await reader.post(f"{CREDITS}/auto-recharge", ON)
    assert says not in (await reader.get(CREDITS)).text


async def test_what_keeps_it_from_buying_is_told_on_the_page(reader, house_books, alice):
    await keep_card(house_books, alice)
    await reader.get(CREDITS)
    await reader.post(f"{CREDITS}/auto-recharge", ON)
    account_id, low = alice.account.id, "The balance is low because credit was given back"
    assert low not in (await reader.get(CREDITS)).text
    await house_books.run(lambda: wallet.reverse(
        account_id, -8 * DOLLAR, ledger.REFUND, ids.new_id("ref"), "payments:test", None, now_ms()
    ))
    assert low in (await reader.get(CREDITS)).text
    alone = "It is on, but there is no card to charge"
    assert alone not in (await reader.get(CREDITS)).text
    await house_books.run(lambda: payment_card.forget_customer(account_id, "test"))
    assert alone in (await reader.get(CREDITS)).text


async def test_a_card_is_forgotten(reader, house_books, alice):
    await keep_card(house_books, alice)
    await reader.get(CREDITS)
    await reader.post(f"{CREDITS}/auto-recharge", ON)
    answer = await reader.post(f"{CREDITS}/card/forget")
    page = await reader.get(answer.location)
    assert "The card is forgotten" in page.text and "•••• 4242" not in page.text and "No card is kept." in page.text
    assert await card_of(house_books, alice) is None and not (await chosen_by(house_books, alice)).is_on
    assert (await reader.post(f"{CREDITS}/card/forget")).status == 303


async def test_nobody_sees_or_changes_somebody_else_s(reader, other, house_books, alice, bob):
    await keep_card(house_books, alice)
    await reader.get(CREDITS)
    await reader.post(f"{CREDITS}/auto-recharge", ON)
    code = await new_code(house_books, uses_max=5)
    redeemed = (await reader.post(f"{CREDITS}/redeem", {"code": code})).location
    page = await other.get(redeemed)
    assert page.status == 200 and "of credit is yours" not in page.text and "•••• 4242" not in page.text
    for path in ("auto-recharge/off", "card/forget", "low-credit"):
        assert (await other.post(f"{CREDITS}/{path}", {"account_id": alice.account.id})).status == 303
    assert (await chosen_by(house_books, alice)).is_on and await card_of(house_books, alice)
    assert await low_credit.threshold(house_books, alice.account.id) == 5 * DOLLAR
    assert await chosen_by(house_books, bob) is None


async def test_forms_of_other_sites_are_refused(reader, house_books, alice):
    await keep_card(house_books, alice)
    await reader.get(CREDITS)
    code = await new_code(house_books)
    forms = {"auto-recharge": ON, "redeem": {"code": code}, "card/forget": {}, "low-credit": {}}
    for path, fields in forms.items():
        assert (await reader.post(f"{CREDITS}/{path}", fields, Sec_Fetch_Site="cross-site")).status == 403
        assert (await reader.post(f"{CREDITS}/{path}", {**fields, "csrf_token": "0" * 64})).status == 403
    assert await chosen_by(house_books, alice) is None and await card_of(house_books, alice)
    assert await posted(house_books, alice) == 10 * DOLLAR


# Codes


async def test_a_code_is_redeemed_and_stands_in_the_history(reader, house_books, alice):
    code = await new_code(house_books)
    await reader.get(CREDITS)
    answer = await reader.post(f"{CREDITS}/redeem", {"code": code.lower()})
    page = await reader.get(answer.location)
    assert "$5.00 of credit is yours." in page.text and "$15.00" in page.text
    assert "Promotion" in page.text and f"Redeem code {code[:4]}…" in page.text and code not in page.text
    assert await posted(house_books, alice) == 15 * DOLLAR
    again = await reader.post(f"{CREDITS}/redeem", {"code": code})
    assert again.status == 422 and "You have redeemed this code already." in again.text
    assert f'value="{code}"' in again.text and await posted(house_books, alice) == 15 * DOLLAR


@pytest.mark.parametrize("typed", ["", " ", "x" * 41, "WRNG-WRNG-WRNG-WRNG", "<script>", "\0", "'; --"])
async def test_what_is_no_code_is_said_to_be_none(reader, house_books, alice, typed):
    await reader.get(CREDITS)
    answer = await reader.post(f"{CREDITS}/redeem", {"code": typed})
    assert answer.status == 422 and 'aria-invalid="true"' in answer.text
    assert 'value="<script>"' not in answer.raw
    assert await posted(house_books, alice) == 10 * DOLLAR


async def test_codes_cannot_be_guessed(open_house, open_books):
    alice = await enter(open_books)
    visitor = Visitor(open_house, await sign_in(open_books, alice))
    codes = [redeem_code.new_code() for _ in range(CODES_PER_ACCOUNT + 1)]
    answers = [await visitor.send(CREDITS, {"code": one}, to=f"{CREDITS}/redeem") for one in codes]
    assert [one.status for one in answers] == [422] * CODES_PER_ACCOUNT + [429]
    assert "Too many tries. Try again in" in answers[-1].text
    good = await new_code(open_books)
    assert (await visitor.send(CREDITS, {"code": good}, to=f"{CREDITS}/redeem")).status == 429
    assert await posted(open_books, alice) == 0


# In a browser


async def test_everything_works_without_a_script(house, house_books, alice):
    code = await new_code(house_books)
    async with at_home(house, house_books, alice, java_script_enabled=False) as context:
        page = await context.new_page()
        await page.goto(f"{house.base_url}{CREDITS}")
        await page.fill("#amount", "25")
        await page.check("[name=keep_card]")
        await page.press("#amount", "Enter")
        await page.click("text=Pay $25.00")
        await page.wait_for_selector("text=$35.00")
        await page.fill("#recharge_below", "5")
        await page.press("#recharge_below", "Enter")
        await page.wait_for_selector("text=Auto-recharge is on.")
        await page.fill("#code", code)
        await page.press("#code", "Enter")
        await page.wait_for_selector("text=$5.00 of credit is yours.")
        await page.fill("#low_credit", "3")
        await page.press("#low_credit", "Enter")
        await page.wait_for_selector("text=Saved.")
        await page.click("text=Turn off")
        await page.wait_for_selector("text=Auto-recharge is off.")
        await page.click("text=Forget this card")
        await page.wait_for_selector("text=No card is kept.")
    assert await posted(house_books, alice) == 40 * DOLLAR


async def test_nothing_scrolls_sideways_and_focus_goes_to_the_error(house, house_books, alice):
    await keep_card(house_books, alice)
    for width in (320, 768, 1440):
        async with at_home(house, house_books, alice, viewport={"width": width, "height": 900}) as context:
            page = await context.new_page()
            await page.goto(f"{house.base_url}{CREDITS}")
            await page.fill("#recharge_ceiling", "1")
            await page.click("text=Turn on auto-recharge")
            await page.wait_for_selector("#recharge_ceiling[aria-invalid=true]")
            assert await page.evaluate("document.activeElement.id") == "recharge_ceiling"
            assert not await page.evaluate("document.documentElement.scrollWidth > innerWidth")
