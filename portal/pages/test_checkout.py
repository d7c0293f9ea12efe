"""The test checkout: what a processor's hosted page is to a buyer, without the money."""

from __future__ import annotations

from quart import Response, g
from werkzeug.exceptions import NotFound as NoPage

from models import top_up
from models.clock import now_ms
from models.top_up import PAID, PENDING, TopUp
from portal.answer import onward, page
from portal.pages import Pages
from portal.payments import TEST, TEST_CHECKOUT_PATH

CREDITS = "/dashboard/billing/credits"


def register(pages: Pages) -> None:
    """Add the pages, which are there only where pretended payments are."""
    blueprint, payments = pages.blueprint, pages.payments

    async def ordered(checkout_id: str) -> TopUp:
        if not pages.settings.test_checkout:
            raise NoPage
        return await top_up.by_checkout(pages.database, g.session.account_id, TEST, checkout_id)

    @blueprint.get(f"{TEST_CHECKOUT_PATH}/<checkout_id>")
    async def test_checkout(checkout_id: str) -> Response:
        return await page("test_checkout/index.html", top_up=await ordered(checkout_id))

    @blueprint.post(f"{TEST_CHECKOUT_PATH}/<checkout_id>/pay")
    async def pay_test_checkout(checkout_id: str) -> Response:
        found = await ordered(checkout_id)
        if found.state == PENDING and now_ms() - found.created_at_ms > top_up.LIFE_MS:
            await payments.expired(found.id)
            found = await ordered(checkout_id)
        if found.state not in (PENDING, PAID):
            return await page("test_checkout/index.html", status=409, top_up=found)
        customer = await payments.customer(found.account_id)
        await payments.paid(payments.processor.pretended(found, customer))
        return await onward(f"{CREDITS}?top_up={found.id}")

    @blueprint.post(f"{TEST_CHECKOUT_PATH}/<checkout_id>/decline")
    async def decline_test_checkout(checkout_id: str) -> Response:
        found = await ordered(checkout_id)
        await payments.failed(found.id)
        return await onward(f"{CREDITS}?top_up={found.id}")

    @blueprint.get(f"{TEST_CHECKOUT_PATH}/<checkout_id>/receipt")
    async def test_receipt(checkout_id: str) -> Response:
        found = await ordered(checkout_id)
        if found.state != PAID:
            raise NoPage
        return await page("test_checkout/receipt.html", top_up=found)
