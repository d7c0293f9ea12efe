"""Credits: buying at the test checkout, what is refused, what is empty, what is somebody else's."""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path

import pytest

from models import account as accounts
from models import ledger, session, top_up, wallet
from models.account import Account
from models.database import Database, migrate
from models.settings import read_settings
from portal import payments
from portal.app import create_app
from tests.cast import enter, give, sign_in
from tests.house import House
from tests.portal.pages.chromium import at_home
from tests.portal.pages.reader import reader_of
from tests.twins.stripe import SECRET_KEY, WEBHOOK_SECRET

CREDITS = "/dashboard/billing/credits"


async def begin(reader, amount="20"):
    await reader.get(CREDITS)
    answer = await reader.post(CREDITS, {"amount": amount})
    assert answer.status == 303 and answer.location.startswith("/test-checkout/tc_"), answer.text
    return answer.location


async def posted(books, actor):
    return (await wallet.balance(books, actor.account.id)).posted


async def test_credit_is_bought_and_its_receipt_kept(reader, house_books, alice):
    checkout = await begin(reader, "12.34")
    shown = await reader.get(checkout)
    assert "This payment is pretended." in shown.text and "$12.34" in shown.text
    assert await posted(house_books, alice) == 10_000_000
    paid = await reader.post(f"{checkout}/pay")
    assert paid.status == 303 and paid.location.startswith(f"{CREDITS}?top_up=top_")
    back = await reader.get(paid.location)
    assert "$12.34 is in your credit." in back.text and "$22.34" in back.text
    assert await posted(house_books, alice) == 22_340_000
    receipt = re.search(r'href="(/test-checkout/[^"]+/receipt)"', back.text)
    kept = await reader.get(receipt[1])
    assert kept.status == 200 and "$12.34" in kept.text and "This payment was pretended" in kept.text
    assert not (await ledger.audit(house_books, full=False)).violations


async def test_paying_often_and_at_once_credits_once(reader, house_books, alice):
    checkout = await begin(reader)
    await reader.get(checkout)
    answers = await asyncio.gather(*(reader.post(f"{checkout}/pay") for _ in range(12)))
    assert {answer.status for answer in answers} == {303}
    assert await posted(house_books, alice) == 30_000_000


async def test_a_first_top_up_moves_a_free_account_and_its_running_keys_notice(house, http, house_books):
    alice = await enter(house_books, plan="free")
    reader = await reader_of(house, http, house_books, alice)
    ask = {"model": "vendor/twin by call", "messages": [{"role": "user", "content": "hi"}]}
    for paying, limit in ((False, "20"), (True, "600")):
        if paying:
            checkout = await begin(reader, "10")
            await reader.get(checkout)
            await reader.post(f"{checkout}/pay")
        async with http.post(house.base_url + "/v1/chat/completions", json=ask, headers=alice.headers) as answer:
            assert answer.status == 200 and answer.headers["x-ratelimit-limit-requests"] == limit
    assert (await Account.get(id=alice.account.id)).plan == "payg"


async def test_a_declined_payment_moves_no_money(reader, house_books, alice):
    checkout = await begin(reader)
    await reader.get(checkout)
    declined = await reader.post(f"{checkout}/decline")
    assert "was declined. No money moved." in (await reader.get(declined.location)).text
    again = await reader.post(f"{checkout}/pay")
    assert again.status == 409 and "nothing was paid for it" in again.text
    assert (await reader.get(f"{checkout}/receipt")).status == 404
    assert await posted(house_books, alice) == 10_000_000


async def test_an_order_that_waited_too_long_has_expired(reader, house_books, alice):
    checkout = await begin(reader)

    def age():
        yield ("UPDATE top_ups SET created_at_ms = created_at_ms - ? WHERE account_id = ?",
               (top_up.LIFE_MS + 1000, alice.account.id))

    await house_books.run(age)
    await reader.get(checkout)
    assert (await reader.post(f"{checkout}/pay")).status == 409
    assert "expired" in (await reader.get(CREDITS)).text
    assert await posted(house_books, alice) == 10_000_000


@pytest.mark.parametrize("amount", [
    "", " ", "9.99", "0", "-20", "10000.01", "1e3", "1e9", "NaN", "Infinity", "20.001", "٢٠", "20 USD", "€20",
    "0x20", "2_0", "9" * 400, "20\0", "<script>", "'; DROP TABLE top_ups; --",
])
async def test_amounts_that_will_not_do_are_shown_again(reader, house_books, alice, amount):
    await reader.get(CREDITS)
    answer = await reader.post(CREDITS, {"amount": amount})
    assert answer.status == 422 and 'aria-invalid="true"' in answer.text
    assert f'value="{amount}"' in answer.text
    assert await top_up.recent(house_books, alice.account.id, limit=1) == []


@pytest.mark.parametrize(
    ("amount", "microusd"), [("10", 10_000_000), ("$1,000.50", 1_000_500_000), ("10000", 10**10)]
)
async def test_amounts_within_the_bounds_are_taken_exactly(reader, house_books, alice, amount, microusd):
    await begin(reader, amount)
    (made,) = await top_up.recent(house_books, alice.account.id, limit=9)
    assert made.amount_microusd == microusd


async def test_no_other_field_of_a_form_counts(reader, other, house_books, alice, bob):
    await reader.get(CREDITS)
    extra = {
        "amount_microusd": "999000000", "state": "paid", "account_id": bob.account.id, "processor": "stripe",
        "currency": "irr", "balance": "5", "posted": "5", "plan": "payg", "checkout_id": "tc_mine",
        "id": "top_mine", "refunded": "1",
    }
    answer = await reader.post(CREDITS, {"amount": "20", **extra})
    (made,) = await top_up.recent(house_books, alice.account.id, limit=9)
    assert (made.amount_microusd, made.state, made.processor) == (20_000_000, "pending", "test")
    assert made.checkout_id != "tc_mine" and await top_up.recent(house_books, bob.account.id, limit=9) == []
    await reader.get(answer.location)
    await reader.post(f"{answer.location}/pay", {"amount": "9999", **extra})
    assert await posted(house_books, alice) == 30_000_000 and await posted(house_books, bob) == 10_000_000


async def test_somebody_else_s_checkout_is_not_there(reader, other, house_books, alice, bob):
    checkout = await begin(reader)
    await other.get(CREDITS)
    for path in (checkout, "/test-checkout/tc_unknown"):
        for answer in (
            await other.get(path), await other.get(f"{path}/receipt"), await other.post(f"{path}/pay"),
            await other.post(f"{path}/decline"),
        ):
            assert answer.status == 404
    made = checkout.rpartition("/")[2]
    (ordered,) = await top_up.recent(house_books, alice.account.id, limit=2)
    told = await other.get(f"{CREDITS}?top_up={ordered.id}")
    assert told.status == 200 and made not in told.text and "Waiting for the payment" not in told.text
    assert await posted(house_books, bob) == await posted(house_books, alice) == 10_000_000


async def test_a_form_of_another_site_is_refused(reader, house_books, alice):
    checkout = await begin(reader)
    await reader.get(checkout)
    for headers in ({"Sec_Fetch_Site": "cross-site"}, {"Sec_Fetch_Site": "same-site"}):
        assert (await reader.post(f"{checkout}/pay", **headers)).status == 403
    assert (await reader.post(f"{checkout}/pay", {"csrf_token": "0" * 64})).status == 403
    assert await posted(house_books, alice) == 10_000_000


async def test_an_account_without_anything_sees_how_to_begin(house, http, house_books):
    alice = await enter(house_books, plan="free")
    page = await (await reader_of(house, http, house_books, alice)).get(CREDITS)
    assert "No purchases yet" in page.text and "$0.00" in page.text and "500" in page.text
    assert "Other changes of the balance" not in page.text


async def test_every_other_change_of_the_balance_is_explained(reader, house_books, alice):
    await give(house_books, alice.account.id, 2_500_000)
    page = await reader.get(CREDITS)
    assert "+$2.50" in page.text and "a test" in page.text and "Adjustment" in page.text and "$12.50" in page.text


async def test_purchases_come_in_pages(reader, house_books, alice):
    made = []
    for _ in range(23):
        made.append((await house_books.run(lambda: top_up.order(alice.account.id, 10_000_000, "test"))).id)
    newest, seen, path = sorted(made, reverse=True), [], CREDITS
    while path:
        page = await reader.get(path)
        shown = re.findall(r'<tr id="(top_[0-9a-z]+)"', page.text)
        assert len(shown) <= 10
        seen += shown
        older = re.search(r'rel="next" href="([^"]+)"', page.text)
        path = older[1] if older else None
    assert seen == newest
    back = re.search(r'rel="prev" href="([^"]+)"', page.text)
    page = await reader.get(back[1])
    assert re.findall(r'<tr id="(top_[0-9a-z]+)"', page.text) == newest[10:20]
    back = re.search(r'rel="prev" href="([^"]+)"', page.text)
    page = await reader.get(back[1])
    assert re.findall(r'<tr id="(top_[0-9a-z]+)"', page.text) == newest[:10] and 'rel="prev"' not in page.text


@pytest.mark.parametrize(
    "query", ["before=x", "after='", "top_up=%00", "movements=-1", "movements=9e9", "before=top_" + "z" * 26]
)
async def test_cursors_that_are_none_do_no_harm(reader, query):
    assert (await reader.get(f"{CREDITS}?{query}")).status == 200


async def test_the_live_part_is_sent_only_when_it_differs(reader, house_books, alice):
    page = await reader.get(CREDITS)
    tag = re.search(r'hx-ptag="([0-9a-f]{32})"', page.text)[1]
    same = await reader.get(f"{CREDITS}/standing", HX_PTag=tag)
    assert (same.status, same.text) == (304, "")
    await give(house_books, alice.account.id, 1_000_000)
    changed = await reader.get(f"{CREDITS}/standing", HX_PTag=tag)
    assert changed.status == 200 and "$11.00" in changed.text and changed.headers["hx-ptag"] != tag
    assert "<html" not in changed.text


async def test_too_many_orders_are_refused_in_words(reader, house_books, alice):
    for _ in range(top_up.ORDERS_PER_HOUR):
        await house_books.run(lambda: top_up.order(alice.account.id, 10_000_000, "test"))
    await reader.get(CREDITS)
    answer = await reader.post(CREDITS, {"amount": "33"})
    assert answer.status == 429 and "many top-ups" in answer.text and 'value="33"' in answer.text


def test_the_test_checkout_is_for_development():
    secret = {"PUBLIC_URL": "https://gateway.example", "SECRET_KEY": "s" * 40, "MAIL_TO_CONSOLE": "yes"}
    for environ, there in (({}, True), ({"TEST_CHECKOUT": "no"}, False), (secret, False)):
        settings = read_settings(environ)
        assert settings.test_checkout is there
        assert (payments.processor_of(settings) is not None) is there


@pytest.fixture
async def app(database_kind, new_database, tmp_path: Path, request):
    """Give an application without a server, of the settings a test names, with Alice and her cookie."""
    url = await new_database(database_kind)
    await migrate(url)
    named = getattr(request, "param", {})
    app = create_app(read_settings({"DATABASE_URL": url, "DATA_DIR": str(tmp_path), **named}))
    async with app.test_app():
        yield app


async def signed_in(app):
    database = app.extensions["tollgate"].database
    alice = await accounts.create(database, "alice@example.com", plan="free", verified=True)
    cookie = session.new_cookie()
    await database.run(lambda: session.begin(alice.id, cookie, address="::1", agent="a test"))
    client = app.test_client()
    client.set_cookie("localhost", "session", cookie)
    return database, alice, client


async def send(client, path, **fields):
    page = await (await client.get(CREDITS)).get_data(as_text=True)
    token = re.search(r'name="csrf_token" value="(\w+)"', page)[1]
    return await client.post(path, form={"csrf_token": token, **fields}, headers={"Sec-Fetch-Site": "same-origin"})


SELLS = {"STRIPE_SECRET_KEY": SECRET_KEY, "STRIPE_WEBHOOK_SECRET": WEBHOOK_SECRET}
TAXED = {**SELLS, "STRIPE_TAX": "yes"}


@pytest.mark.parametrize(("app", "says"), [(TAXED, True), (SELLS, False)], indirect=["app"])
async def test_who_pays_tax_is_told_before(app, says):
    _, _, client = await signed_in(app)
    text = await (await client.get(CREDITS)).get_data(as_text=True)
    assert ("to the cent, and tax where it is due." in text) is says
    assert ("Tax comes on top where it is due; the sum is of credit." in text) is says


@pytest.mark.parametrize("app", [{"TEST_CHECKOUT": "no"}], indirect=True)
async def test_where_nobody_takes_money_there_is_no_checkout(app):
    database, alice, client = await signed_in(app)
    page = await (await client.get(CREDITS)).get_data(as_text=True)
    assert "Credit cannot be bought here yet" in page and 'name="amount"' not in page
    made = await database.run(lambda: top_up.order(alice.id, 10_000_000, "test"))
    await database.run(lambda: top_up.begun(made.id, "tc_1", "/test-checkout/tc_1"))
    assert (await client.get("/test-checkout/tc_1")).status_code == 404
    for path in (CREDITS, "/test-checkout/tc_1/pay", "/test-checkout/tc_1/decline"):
        assert (await send(client, path, amount="20")).status_code == 404
    assert (await wallet.balance(database, alice.id)).posted == 0


@pytest.mark.parametrize("trouble", [ConnectionError("no"), payments.CheckoutFailed(), None])
async def test_a_processor_that_cannot_begin_moves_no_money(app, monkeypatch, trouble):
    async def begin(self, ordered, return_url, **how):
        if trouble is None:
            await asyncio.sleep(60)
        raise trouble

    monkeypatch.setattr(payments.TestCheckout, "begin", begin)
    monkeypatch.setattr(payments, "BEGIN_S", 0.3)
    database, alice, client = await signed_in(app)
    answer = await send(client, CREDITS, amount="43.21")
    page = await answer.get_data(as_text=True)
    assert answer.status_code == 502 and "No money moved." in page
    (made,) = await top_up.recent(database, alice.id, limit=9)
    refused = isinstance(trouble, payments.CheckoutFailed)
    assert (made.state, made.amount_microusd) == ("failed" if refused else "pending", 43_210_000)
    assert ('value="43.21"' in page) == refused and (f"{made.id}/resume" in page) != refused


@pytest.mark.parametrize("app", [{"TOP_UP_MAX_USD": "30"}], indirect=True)
async def test_the_highest_amount_is_the_operator_s(app):
    _, _, client = await signed_in(app)
    page = await (await client.get(CREDITS)).get_data(as_text=True)
    assert 'value="20"' in page and 'value="50"' not in page and "to $30" in page
    assert (await send(client, CREDITS, amount="30.01")).status_code == 422
    assert (await send(client, CREDITS, amount="30")).status_code == 303


async def test_the_balance_appears_without_a_reload_when_paid_in_another_tab(
    house: House, house_books: Database, alice
):
    async with at_home(house, house_books, alice) as context:
        first, second = await context.new_page(), await context.new_page()
        await first.goto(f"{house.base_url}{CREDITS}")
        await first.evaluate("window.wasNotReloaded = true")
        await first.fill("#amount", "77.7")
        await second.goto(f"{house.base_url}{CREDITS}")
        await second.click("button[value='50']")
        await second.click("text=Pay $50.00")
        await second.wait_for_selector("text=$50.00 is in your credit.")
        await first.bring_to_front()
        await first.wait_for_selector("text=$60.00", timeout=15_000)
        assert await first.locator("#history tr", has_text="paid").count() == 1
        assert await first.locator("#history").count() == await first.locator("#standing").count() == 1
        assert await first.evaluate("window.wasNotReloaded") and await first.input_value("#amount") == "77.7"
        # Once more: the part that was swapped in goes on asking, and only once at a time.
        asked = []
        first.on("request", lambda one: asked.append(one.url))
        await give(house_books, alice.account.id, 1_000_000)
        await first.wait_for_selector("text=$61.00", timeout=15_000)
        asked.clear()
        began = time.monotonic()
        async with asyncio.timeout(30):
            while len(asked) < 4:
                await asyncio.sleep(0.1)
        assert time.monotonic() - began > 5


async def test_a_form_without_a_script_buys_too(house: House, house_books: Database, alice):
    async with at_home(house, house_books, alice, java_script_enabled=False) as context:
        page = await context.new_page()
        await page.goto(f"{house.base_url}{CREDITS}")
        await page.fill("#amount", "25.5")
        await page.press("#amount", "Enter")
        await page.click("text=Pay $25.50")
        await page.wait_for_selector("text=$35.50")


async def test_half_signed_in_sees_nothing(house, http, house_books, alice):
    reader = await reader_of(house, http, house_books, alice)
    cookie = session.new_cookie()
    await house_books.run(lambda: session.begin(alice.account.id, cookie, address="", agent="", state=session.HALF))
    reader._cookie = f"session={cookie}"
    for path in (CREDITS, f"{CREDITS}/standing", "/test-checkout/tc_1", "/dashboard/playground"):
        answer = await reader.get(path)
        assert answer.status == 303 and answer.location.startswith("/login")
    assert await sign_in(house_books, alice)
