"""Payments: the seam between an order of credit and whoever takes the money for it.

A processor knows how to begin a checkout somewhere; what it learns of it afterwards, by a webhook or by a
button, it tells the same few functions here. The built-in test checkout is one of them: a page of ours that
only pretends to take money, and then does exactly what a real payment does.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from dataclasses import dataclass
from typing import Protocol

from models import top_up
from models.database import Database
from models.errors import NotFound
from models.settings import Settings
from models.top_up import Payment, TopUp

BEGIN_S = 15
TEST = "test"
TEST_CHECKOUT_PATH = "/test-checkout"

_log = logging.getLogger("tollgate.payments")


class CheckoutFailed(Exception):
    """Report that a checkout could not be begun: nobody was asked for money."""


@dataclass(frozen=True, slots=True)
class Checkout:
    """Say where an order is paid: the processor's id of the checkout and its address."""

    id: str
    url: str


class Processor(Protocol):
    """Whoever takes the money. `name` stands in the books, `title` on the page."""

    name: str
    title: str

    async def begin(self, ordered: TopUp, return_url: str) -> Checkout:
        """Begin a checkout for an order; the same order again begins the same one. Raises CheckoutFailed."""


class TestCheckout:
    """Pretend to take money."""

    __test__ = False  # a name that pytest would take for a test
    name = TEST
    title = "Test checkout"

    async def begin(self, ordered: TopUp, return_url: str) -> Checkout:
        """Return the address of our own page."""
        checkout_id = f"tc_{secrets.token_urlsafe(24)}"
        return Checkout(checkout_id, f"{TEST_CHECKOUT_PATH}/{checkout_id}")


class Payments:
    """Sell credit. `processor` is None where nobody takes money."""

    def __init__(self, database: Database, settings: Settings, processor: Processor | None) -> None:
        self._database = database
        self._public_url = settings.public_url
        self.processor = processor

    async def begin(self, account_id: str, amount_microusd: int) -> TopUp:
        """Write an order down, then begin its checkout, and return it.

        Raises CheckoutFailed, and then the order has failed; RateLimited after too many orders.
        """
        processor = self.processor
        if processor is None:
            raise NotFound("credit is not sold here")
        ordered = await self._database.run(lambda: top_up.order(account_id, amount_microusd, processor.name))
        back = f"{self._public_url}/dashboard/billing/credits?top_up={ordered.id}"
        try:
            checkout = await asyncio.wait_for(processor.begin(ordered, back), BEGIN_S)
        except Exception as error:
            _log.warning("a checkout could not be begun: %s", type(error).__name__, extra={"top_up": ordered.id})
            await self._database.run(lambda: top_up.fail(ordered.id))
            raise CheckoutFailed from error
        await self._database.run(lambda: top_up.begun(ordered.id, checkout.id, checkout.url))
        return await top_up.find(self._database, account_id, ordered.id)

    async def paid(self, payment: Payment) -> bool:
        """Take the news that a checkout was paid, as often as it comes; return whether it was news.

        Raises NotFound and WrongPayment, which no repetition will mend, and DatabaseUnavailable, which one will.
        """
        try:
            is_news = await self._database.run(lambda: top_up.pay(payment))
        except top_up.WrongPayment as error:
            _log.error("a payment is not what was ordered: %s", error)
            raise
        if is_news:
            _log.info("a top-up was paid", extra={"checkout": payment.checkout_id, "processor": payment.processor})
        return is_news

    async def failed(self, top_up_id: str) -> None:
        """Take the news that an order was not paid."""
        await self._database.run(lambda: top_up.fail(top_up_id))

    async def expired(self, top_up_id: str) -> None:
        """Take the news that an order can no longer be paid."""
        await self._database.run(lambda: top_up.expire(top_up_id))


def processor_of(settings: Settings) -> Processor | None:
    """Return who takes the money, by the settings."""
    return TestCheckout() if settings.test_checkout else None
