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

from models import account as accounts
from models import auto_recharge, payment_card, top_up
from models.database import Database
from models.errors import NotFound
from models.payment_card import Card
from models.refund import Refund
from models.settings import Settings
from models.top_up import CURRENCY, PAID, Payment, TopUp

BEGIN_S = 15
TEST = "test"
TEST_CHECKOUT_PATH = "/test-checkout"
CARD_PAYS, CARD_DECLINES, CARD_ASKS = "pm_pays", "pm_declines", "pm_asks"

_log = logging.getLogger("tollgate.payments")


class CheckoutFailed(Exception):
    """Report that the processor refused: nobody was asked for money, and repeating it will not help."""


class ProcessorUnavailable(Exception):
    """Report that the processor gave no clear answer: what was asked may or may not have happened.

    Ask again, with the same order or refund: it happens at most once.
    """


class CardDeclined(Exception):
    """Report that a kept card was not charged; `code` is the processor's word for why."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


class AuthenticationRequired(Exception):
    """Report that a kept card was not charged because its owner has to be there for it."""


@dataclass(frozen=True, slots=True)
class Checkout:
    """Say where an order is paid: the processor's id of the checkout and its address."""

    id: str
    url: str


@dataclass(frozen=True, slots=True)
class Dispute:
    """Be a payment that its payer's bank asks back. `state` is a state of models.dispute."""

    id: str
    payment_id: str
    total_microusd: int
    currency: str
    state: str


@dataclass(frozen=True, slots=True)
class Known:
    """Say what the processor knows of an order. `state` is one of models.top_up.

    `refunded_microusd` is all that was given back of it so far, tax included.
    """

    state: str
    payment: Payment | None = None
    failure: str | None = None
    refunded_microusd: int = 0
    disputes: tuple[Dispute, ...] = ()


@dataclass(frozen=True, slots=True)
class Refunded:
    """Say what became of a refund: the processor's id of it, whether it stands, and all given back so far."""

    id: str
    stands: bool
    refunded_microusd: int


class Processor(Protocol):
    """Whoever takes the money. `name` stands in the books, `title` on the page.

    Every method may raise ProcessorUnavailable. Asked again with the same order or refund, each does the
    same once: the order's and the refund's own ids are what the processor knows the request by.
    """

    name: str
    title: str

    async def introduce(self, account_id: str, email: str) -> str:
        """Make an account known and return who it is there, its customer id."""

    async def begin(self, ordered: TopUp, return_url: str, *, customer: str, keeps_card: bool) -> Checkout:
        """Begin a checkout for an order; the same order again begins the same one. Raises CheckoutFailed."""

    async def look_up(self, ordered: TopUp) -> Known:
        """Return what is known of an order, now."""

    async def charge(self, ordered: TopUp, card: Card) -> Payment:
        """Charge an order to a kept card while nobody is there. Raises CardDeclined, AuthenticationRequired."""

    async def refund(self, asked: Refund, ordered: TopUp) -> Refunded:
        """Give money back. Raises CheckoutFailed when the processor refuses."""

    async def forget(self, card: Card) -> None:
        """Forget a kept card; one that is forgotten already does no harm."""

    async def close(self) -> None:
        """Close what is open."""


class TestCheckout:
    """Pretend to take money: a page of ours for who is there, three cards for who is not.

    The card `pm_pays` pays, `pm_declines` is declined, `pm_asks` wants its owner to be there.
    """

    __test__ = False  # a name that pytest would take for a test
    name = TEST
    title = "Test checkout"

    async def introduce(self, account_id: str, email: str) -> str:
        """Return a name made of the account's."""
        return f"tcus_{account_id}"

    async def begin(self, ordered: TopUp, return_url: str, *, customer: str, keeps_card: bool) -> Checkout:
        """Return the address of our own page."""
        checkout_id = f"tc_{secrets.token_urlsafe(24)}"
        return Checkout(checkout_id, f"{TEST_CHECKOUT_PATH}/{checkout_id}")

    async def look_up(self, ordered: TopUp) -> Known:
        """Return what our own books say: there is nobody else who would know."""
        if ordered.state != PAID:
            return Known(ordered.state, failure=ordered.failure)
        return Known(PAID, self._payment(ordered, None), refunded_microusd=ordered.told_refunded_microusd)

    async def charge(self, ordered: TopUp, card: Card) -> Payment:
        """Pretend what the card stands for."""
        if card.payment_method_id == CARD_DECLINES:
            raise CardDeclined("card_declined")
        if card.payment_method_id == CARD_ASKS:
            raise AuthenticationRequired
        return self._payment(ordered, card)

    async def refund(self, asked: Refund, ordered: TopUp) -> Refunded:
        """Pretend that the money went back."""
        return Refunded(f"tre_{asked.id}", True, ordered.told_refunded_microusd + asked.total_microusd)

    async def forget(self, card: Card) -> None:
        """Do nothing: there is no card."""

    async def close(self) -> None:
        """Do nothing: nothing is open."""

    def pretended(self, ordered: TopUp, customer: str) -> Payment:
        """Return what our page takes for an order: its own words on what was paid, not what was ordered."""
        card = Card(customer, CARD_PAYS, "visa", "4242") if ordered.keeps_card else None
        return self._payment(ordered, card)

    def _payment(self, ordered: TopUp, card: Card | None) -> Payment:
        checkout_id = ordered.checkout_id or f"tc_{ordered.id}"
        return Payment(
            processor=TEST, checkout_id=checkout_id, amount_microusd=ordered.amount_microusd, currency=CURRENCY,
            receipt_url=f"{TEST_CHECKOUT_PATH}/{checkout_id}/receipt", top_up_id=ordered.id,
            payment_id=f"tpi_{ordered.id}", card=card,
        )


class Payments:
    """Sell credit. `processor` is None where nobody takes money."""

    def __init__(self, database: Database, settings: Settings, processor: Processor | None) -> None:
        self._database = database
        self._public_url = settings.public_url
        self.processor = processor

    async def begin(self, account_id: str, amount_microusd: int, *, keeps_card: bool = False) -> TopUp:
        """Write an order down, then begin its checkout, and return it.

        Raises CheckoutFailed, and then the order has failed; RateLimited after too many orders.
        """
        processor = self.processor
        if processor is None:
            raise NotFound("credit is not sold here")
        ordered = await self._database.run(
            lambda: top_up.order(account_id, amount_microusd, processor.name, keeps_card=keeps_card)
        )
        back = f"{self._public_url}/dashboard/billing/credits?top_up={ordered.id}"
        try:
            async with asyncio.timeout(BEGIN_S):
                customer = await self.customer(account_id)
                checkout = await processor.begin(ordered, back, customer=customer, keeps_card=keeps_card)
        except Exception as error:
            _log.warning("a checkout could not be begun: %s", type(error).__name__, extra={"top_up": ordered.id})
            await self._database.run(lambda: top_up.fail(ordered.id))
            raise CheckoutFailed from error
        await self._database.run(lambda: top_up.begun(ordered.id, checkout.id, checkout.url))
        return await top_up.find(self._database, account_id, ordered.id)

    async def customer(self, account_id: str) -> str:
        """Return who an account is to the processor; it is made known there once."""
        name = self.processor.name
        known = await payment_card.customer_of(self._database, account_id, name)
        if known is not None:
            return known
        account = await accounts.Account.get(id=account_id)
        made = await self.processor.introduce(account_id, account.email)
        return await self._database.run(lambda: payment_card.keep_customer(account_id, name, made))

    async def forget_card(self, account_id: str) -> None:
        """Forget an account's card, here at once and there as soon as it is possible."""
        processor = self.processor
        if processor is None:
            return
        card = await payment_card.find(self._database, account_id, processor.name)
        await self._database.run(lambda: auto_recharge.forget_card(account_id, processor.name))
        if card is not None:
            try:
                async with asyncio.timeout(BEGIN_S):
                    await processor.forget(card)
            except Exception as error:
                # It is charged no more: nobody here knows it.
                _log.warning("a card was not forgotten by its processor: %s", type(error).__name__)

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
