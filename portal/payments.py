"""Payments: the seam between an order of credit and whoever takes the money for it.

A processor knows how to begin a checkout somewhere; what is learned of it afterwards, by an event it sends, by
asking it, or by a button, is news to the same few functions here. They may be told anything any number of
times, in any order, by several processes. The built-in test checkout is a processor too: a page of ours that
only pretends to take money, and then does exactly what a real payment does.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

from models import account as accounts
from models import auto_recharge, clock, dispute, payment_card, payment_event, refund, top_up
from models.database import Database, Script
from models.dispute import Dispute
from models.errors import NotFound
from models.ledger import Violation
from models.payment_card import Card
from models.payment_event import Event
from models.refund import NotRefundable, Refund
from models.settings import Settings
from models.top_up import CURRENCY, FAILED, PAID, Payment, Reversal, TopUp, WrongPayment

BEGIN_S = 15
ASK_S = 4
WRITE_S = 10
# The orders one process asks about in one round, and how far back everything is listed.
ASKED_AT_ONCE = 20
LISTED_EVERY_MS = 3600 * 1000
LISTED_AGAIN_MS = 5 * 60 * 1000
LISTED_BACK_MS = 4 * 24 * 3600 * 1000
LISTED_MARK = "payments_listed_at_ms"
REFUND_REPEATED_AFTER_MS = 2 * 60 * 1000
# The processor forgets after a day that an order was begun, and would begin another checkout for it.
BEGUN_AGAIN_MS = 23 * 3600 * 1000
TEST = "test"
TEST_CHECKOUT_PATH = "/test-checkout"
CARD_PAYS, CARD_DECLINES, CARD_ASKS = "pm_pays", "pm_declines", "pm_asks"

_log = logging.getLogger("tollgate.payments")


class CheckoutFailed(Exception):
    """Report that the processor refused: nobody was asked for money, and repeating it will not help."""


class CustomerUnknown(CheckoutFailed):
    """Report that the processor knows a customer no more; the account is to be introduced again."""


class KeyRefused(CheckoutFailed):
    """Report that the processor does not know us by our secret key: this says nothing of what was asked before."""


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


@dataclass(frozen=True, slots=True)
class Closed:
    """Say that an order's checkout is over and nothing was paid; `state` is one of models.top_up."""

    processor: str
    top_up_id: str
    checkout_id: str
    state: str


@dataclass(frozen=True, slots=True)
class Declined:
    """Say that a card was declined at an order's checkout, which goes on."""

    processor: str
    top_up_id: str
    failure: str | None


@dataclass(frozen=True, slots=True)
class AskAgain:
    """Say that a refund did not last: what was given back of a payment in all is to be asked for."""

    processor: str
    payment_id: str
    refund_id: str | None


News = Payment | Reversal | Dispute | Closed | Declined | AskAgain


@dataclass(frozen=True, slots=True)
class Found:
    """Be something in a processor's list: news, or what could not be read as such."""

    news: News | WrongPayment
    is_from_here: bool


class Processor(Protocol):
    """Whoever takes the money. `name` stands in the books, `title` on the page.

    Every method may raise ProcessorUnavailable. Asked again with the same order or refund, each does the
    same once: the order's and the refund's own ids are what the processor knows the request by.
    """

    name: str
    title: str

    async def introduce(self, account_id: str, email: str) -> str:
        """Make an account known and return who it is there, its customer id."""

    async def begin(
        self, ordered: TopUp, return_url: str, *, customer: str, keeps_card: bool, email: str | None = None
    ) -> Checkout:
        """Begin a checkout for an order; the same order again begins the same one. Raises CheckoutFailed."""

    async def look_up(self, ordered: TopUp) -> Known:
        """Return what is known of an order, now."""

    async def charge(self, ordered: TopUp, card: Card) -> Payment:
        """Charge an order to a kept card while nobody is there. Raises CardDeclined, AuthenticationRequired."""

    async def refund(self, asked: Refund, ordered: TopUp) -> Refunded:
        """Give money back. Raises CheckoutFailed when the processor refuses."""

    async def forget(self, card: Card) -> None:
        """Forget a kept card; one that is forgotten already does no harm."""

    async def forget_customer(self, customer_id: str) -> None:
        """Forget a customer and his cards; what he paid stays known. One who is forgotten already does no harm."""

    def recent(self, since_ms: int) -> AsyncIterator[Found]:
        """Yield every payment, refund and dispute since a moment that may be of ours."""

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

    async def begin(
        self, ordered: TopUp, return_url: str, *, customer: str, keeps_card: bool, email: str | None = None
    ) -> Checkout:
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

    async def forget_customer(self, customer_id: str) -> None:
        """Do nothing: there is no customer."""

    async def recent(self, since_ms: int) -> AsyncIterator[Found]:
        """Yield nothing: what there is, is in our own books."""
        for one in ():
            yield one

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
        self._aside: set[asyncio.Task[None]] = set()
        self.processor = processor

    async def close(self) -> None:
        """Stop asking, then close what the processor has open."""
        for task in self._aside:
            task.cancel()
        await asyncio.gather(*self._aside, return_exceptions=True)
        if self.processor is not None:
            await self.processor.close()

    async def begin(self, account_id: str, amount_microusd: int, *, keeps_card: bool = False) -> TopUp:
        """Write an order down, then begin its checkout, and return it.

        Raises CheckoutFailed, and then the order has failed; ProcessorUnavailable, and then it waits for
        `resume`; RateLimited after too many orders.
        """
        processor = self.processor
        if processor is None:
            raise NotFound("credit is not sold here")
        ordered = await self._database.run(
            lambda: top_up.order(account_id, amount_microusd, processor.name, keeps_card=keeps_card)
        )
        return await self._begun(ordered)

    async def resume(self, account_id: str, top_up_id: str) -> TopUp:
        """Begin the checkout of an order again of which nobody knows whether it was begun; return the order.

        It is begun at most once. Raises as `begin` does, and NotFound.
        """
        ordered = await top_up.find(self._database, account_id, top_up_id)
        if self.processor is None or ordered.processor != self.processor.name or ordered.off_session:
            raise NotFound(f"there is no top-up {top_up_id}")
        if ordered.state != top_up.PENDING or ordered.checkout_url is not None:
            return ordered
        if clock.now_ms() - ordered.created_at_ms > BEGUN_AGAIN_MS:
            raise NotFound(f"{top_up_id} is too old")
        return await self._begun(ordered)

    async def _begun(self, ordered: TopUp) -> TopUp:
        back = f"{self._public_url}/dashboard/billing/credits?top_up={ordered.id}"
        try:
            async with asyncio.timeout(BEGIN_S):
                try:
                    checkout = await self._checkout_of(ordered, back)
                except CustomerUnknown:
                    name = self.processor.name
                    await self._database.run(lambda: payment_card.forget_customer(ordered.account_id, name))
                    checkout = await self._checkout_of(ordered, back)
        except CheckoutFailed as error:
            _log.warning("a checkout was refused: %s", error, extra={"top_up": ordered.id})
            await self._database.run(lambda: top_up.fail(ordered.id))
            raise
        except Exception as error:
            _log.warning(
                "it is unclear whether a checkout began: %s", type(error).__name__, extra={"top_up": ordered.id}
            )
            raise ProcessorUnavailable from error
        await self._database.run(lambda: top_up.begun(ordered.id, checkout.id, checkout.url))
        return await top_up.find(self._database, ordered.account_id, ordered.id)

    async def _checkout_of(self, ordered: TopUp, back: str) -> Checkout:
        account = await accounts.Account.get(id=ordered.account_id)
        customer = await self.customer(account.id)
        return await self.processor.begin(
            ordered, back, customer=customer, keeps_card=bool(ordered.keeps_card), email=account.email
        )

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

    async def hear(self, event: Event, news: News | None) -> str:
        """Take an event of the processor's and return what came of it, once that is written down for good.

        Raises DatabaseUnavailable, ProcessorUnavailable and CheckoutFailed: then the event must come again.
        """
        if news is None:
            return await self.refuse(event, payment_event.IGNORED, None)
        try:
            if isinstance(news, AskAgain):
                await self._ask_again(news)
            is_new = await self._database.run(
                lambda: _heard(event, news), gate=_gate_of(news), deadline_s=WRITE_S
            )
        except NotFound as error:
            _log.warning("an event is about an order that is not here: %s", error, extra={"event": event.id})
            return await self.refuse(event, payment_event.IGNORED, str(error))
        except WrongPayment as error:
            _log.error("an event is not what was ordered: %s", error, extra={"event": event.id})
            return await self.refuse(event, payment_event.REFUSED, str(error))
        if is_new:
            _log.info("%s", event.type, extra={"event": event.id, "object": event.object_id})
            if isinstance(news, Payment) and news.receipt_url is None and news.top_up_id is not None:
                self._start(self._complete(news.top_up_id))
        return payment_event.DONE

    async def refuse(self, event: Event, outcome: str, detail: str | None) -> str:
        """Write down an event that has no effect, and return its outcome."""
        await self._database.run(lambda: payment_event.note(event, outcome, detail), deadline_s=WRITE_S)
        return outcome

    async def paid(self, payment: Payment) -> bool:
        """Take the news that a checkout was paid, as often as it comes; return whether it was news.

        Raises NotFound and WrongPayment, which no repetition will mend, and DatabaseUnavailable, which one will.
        """
        try:
            is_news = await self._database.run(
                lambda: top_up.pay(payment), gate=payment.payment_id, deadline_s=WRITE_S
            )
        except WrongPayment as error:
            _log.error("a payment is not what was ordered: %s", error)
            raise
        if is_news:
            _log.info("a top-up was paid", extra={"checkout": payment.checkout_id, "processor": payment.processor})
        return is_news

    async def failed(self, top_up_id: str, failure: str | None = None) -> None:
        """Take the news that an order was not paid."""
        await self._database.run(lambda: top_up.fail(top_up_id, failure))

    async def expired(self, top_up_id: str) -> None:
        """Take the news that an order can no longer be paid."""
        await self._database.run(lambda: top_up.expire(top_up_id))

    async def ask(self, top_up_id: str, *, unless_asked_within_ms: int) -> None:
        """Ask the processor about an open order whose buyer waits; no answer in time is no harm."""
        if self.processor is None:
            return
        now = clock.now_ms()
        ordered = await self._database.run(lambda: top_up.claim_one(top_up_id, now, now - unless_asked_within_ms))
        if ordered is None or ordered.processor != self.processor.name:
            return
        try:
            async with asyncio.timeout(ASK_S):
                await self.learn(ordered)
        except (ProcessorUnavailable, CheckoutFailed, TimeoutError, NotFound, WrongPayment) as error:
            _log.warning("asking about a top-up failed: %s", type(error).__name__, extra={"top_up": top_up_id})

    async def learn(self, ordered: TopUp) -> Known:
        """Ask the processor about an order, write down what is news, and return what it said.

        Raises ProcessorUnavailable, CheckoutFailed, WrongPayment.
        """
        if ordered.checkout_id is None and not ordered.off_session and ordered.processor == TEST:
            return Known(ordered.state)
        known = await self.processor.look_up(ordered)
        payment = known.payment
        if payment is not None:
            await self.paid(payment)
            if payment.payment_id is not None:
                given_back = Reversal(
                    ordered.processor, ordered.id, payment.payment_id,
                    payment.total_microusd or payment.amount_microusd, known.refunded_microusd, payment.currency,
                )
                await self._write(given_back, instead_of_microusd=ordered.told_refunded_microusd)
            for one in known.disputes:
                await self._write(one)
        elif known.state == FAILED:
            await self.failed(ordered.id, known.failure)
        elif known.state == top_up.EXPIRED:
            await self.expired(ordered.id)
        return known

    async def refund(self, top_up_id: str, amount_microusd: int | None, *, forced: bool) -> Refund:
        """Give an amount back, or without one all that may be; return the refund that was made.

        Raises NotFound, NotRefundable, ProcessorUnavailable; after the last the refund is taken up again by
        itself.
        """
        if self.processor is None:
            raise NotRefundable("nobody takes money here, so nobody can give it back")
        asked, ordered = await self._database.run(
            lambda: refund.ask(top_up_id, amount_microusd, processor=self.processor.name, forced=forced),
            deadline_s=WRITE_S,
        )
        await self._give_back(asked, ordered)
        return asked

    async def _forget_customer(self, customer_id: str) -> None:
        await self.processor.forget_customer(customer_id)
        await self._database.run(
            lambda: payment_card.forgotten(self.processor.name, customer_id), deadline_s=WRITE_S
        )

    async def _give_back(self, asked: Refund, ordered: TopUp) -> None:
        try:
            told = await self.processor.refund(asked, ordered)
        except CheckoutFailed as error:
            await self._database.run(lambda: refund.end(asked.id, None, stands=False), deadline_s=WRITE_S)
            _log.error("a refund was refused: %s", error, extra={"refund": asked.id})
            raise NotRefundable(f"the processor refuses: {error}; nothing was refunded") from error

        def write() -> Script[None]:
            yield from refund.end(asked.id, told.id, stands=told.stands)
            yield from top_up.refunded(Reversal(
                ordered.processor, ordered.id, ordered.payment_id or "",
                ordered.total_microusd or ordered.amount_microusd, told.refunded_microusd, CURRENCY,
            ))

        await self._database.run(write, gate=ordered.payment_id, deadline_s=WRITE_S)
        if not told.stands:
            raise NotRefundable("the refund failed at the processor; the wallet has its amount again")

    async def reconcile(self) -> None:
        """Learn what no event has told: open orders, refunds that hang, and once in an hour everything recent.

        And have the customers forgotten whose accounts are closed.

        Any process may do it; each order, and the list, is one process's at a time.
        """
        if self.processor is None:
            return
        now, name = clock.now_ms(), self.processor.name
        for ordered in await self._database.run(lambda: top_up.claim(name, now, ASKED_AT_ONCE), deadline_s=WRITE_S):
            await self._reconciled(ordered.id, self.learn(ordered))
        for asked in await refund.pending(self._database, name, now - REFUND_REPEATED_AFTER_MS, ASKED_AT_ONCE):
            ordered = await top_up.find(self._database, asked.account_id, asked.top_up_id)
            await self._reconciled(asked.id, self._give_back(asked, ordered))
        for customer_id in await self._database.run(
            lambda: payment_card.claim_former(name, now, ASKED_AT_ONCE), deadline_s=WRITE_S
        ):
            await self._reconciled(customer_id, self._forget_customer(customer_id))
        if await self._database.run(lambda: _claim_list(now)):
            try:
                await self.reconcile_list(now - LISTED_BACK_MS)
            except (ProcessorUnavailable, CheckoutFailed) as error:
                _log.warning("listing payments failed: %s: %s", type(error).__name__, error)
                await self._database.run(lambda: _list_again(now))
            except Exception:
                await self._database.run(lambda: _list_again(now))
                raise

    async def reconcile_list(self, since_ms: int) -> list[Violation]:
        """Compare every payment, refund and dispute of the processor's since a moment with our orders.

        What is missing here is written; what is not ours to write is returned, and logged. Whatever else is wrong
        with one of them keeps none of the others waiting, and is raised at the end.
        """
        extra: list[Violation] = []
        trouble: Exception | None = None
        async for found in self.processor.recent(since_ms):
            try:
                try:
                    await self._write_listed(found.news)
                except NotFound:
                    if not found.is_from_here or not await self._restored(found.news):
                        raise
            except (NotFound, WrongPayment) as error:
                if found.is_from_here or isinstance(error, WrongPayment):
                    extra.append(Violation("R5", self.processor.name, str(error)))
            except Exception as error:
                subject = getattr(found.news, "top_up_id", None) or getattr(found.news, "id", None)
                _log.error("%s cannot be written: %s", subject, type(error).__name__)
                trouble = trouble or error
        for one in extra:
            _log.error("the processor has what the books have not: %s", one)
        if trouble is not None:
            raise trouble
        return extra

    async def _write_listed(self, news: News | WrongPayment) -> None:
        if isinstance(news, WrongPayment):
            raise news
        if not isinstance(news, Payment):
            await self._write(news)
        elif await self.paid(news):
            _log.warning("a payment was never told of", extra={"top_up": news.top_up_id})

    async def _restored(self, news: News | WrongPayment) -> bool:
        """Write down again, and credit, an order that was paid and that books restored from a backup lack."""
        if not isinstance(news, Payment):
            return False
        if not await self._database.run(lambda: top_up.restore(news), deadline_s=WRITE_S):
            return False
        _log.error("an order that was lost is written down again", extra={"top_up": news.top_up_id})
        await self.paid(news)
        return True

    async def _reconciled(self, subject: str, work: Coroutine[Any, Any, Any]) -> None:
        """Do one of many things; whatever is wrong with it keeps none of the others waiting."""
        try:
            await work
        except (ProcessorUnavailable, CheckoutFailed, NotFound, WrongPayment, NotRefundable) as error:
            _log.warning("reconciling %s: %s: %s", subject, type(error).__name__, error)
        except Exception:
            _log.exception("reconciling %s failed", subject)

    async def _write(self, news: News, *, instead_of_microusd: int | None = None) -> None:
        await self._database.run(
            lambda: _written(news, instead_of_microusd), gate=_gate_of(news), deadline_s=WRITE_S
        )

    async def _ask_again(self, news: AskAgain) -> None:
        found = await top_up.by_payment(self._database, news.processor, news.payment_id)
        if found is not None:
            if news.refund_id is not None:
                await self._database.run(lambda: refund.end(news.refund_id, None, stands=False), deadline_s=WRITE_S)
            await self.learn(found)

    async def _complete(self, top_up_id: str) -> None:
        """Learn the receipt and the card of an order that was just paid; the reconciling does it else."""
        ordered = await top_up.by_id(self._database, top_up_id)
        if ordered is None or ordered.processor != self.processor.name:
            return
        await self._reconciled(top_up_id, self.learn(ordered))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._aside.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._aside.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _log.warning("completing a top-up failed: %s", type(task.exception()).__name__)


def processor_of(settings: Settings) -> Processor | None:
    """Return who takes the money, by the settings."""
    if settings.stripe is not None:
        # Its library takes 25 MB, which those who do not sell by it need not have.
        from portal.stripe_processor import StripeProcessor  # noqa: PLC0415

        return StripeProcessor(settings)
    return TestCheckout() if settings.test_checkout else None


def _heard(event: Event, news: News) -> Script[bool]:
    """Write down an event and its effect as one; return whether it was new."""
    if (yield from payment_event.is_done(event)):
        return False
    yield from _written(news)
    yield from payment_event.note(event, payment_event.DONE)
    return True


def _written(news: News, instead_of_microusd: int | None = None) -> Script[None]:
    match news:
        case Payment():
            yield from top_up.pay(news)
        case Reversal():
            yield from top_up.refunded(news, instead_of_microusd=instead_of_microusd)
        case Dispute():
            found = yield from top_up.disputed(news)
            if found is not None and news.state == dispute.OPEN:
                _log.error("a payment is disputed", extra={"top_up": found.id, "dispute": news.id})
        case Closed() | Declined():
            yield from _closed(news)
        case AskAgain():
            pass


def _closed(news: Closed | Declined) -> Script[None]:
    found = yield from top_up.locked(news.top_up_id)
    if found is None or found.processor != news.processor:
        raise NotFound(f"there is no top-up {news.top_up_id}")
    if isinstance(news, Declined):
        yield from top_up.declined(found.id, news.failure)
        return
    if found.checkout_id not in (None, news.checkout_id):
        raise WrongPayment(f"{found.id} is paid at {found.checkout_id}, not at {news.checkout_id}")
    yield from (top_up.expire(found.id) if news.state == top_up.EXPIRED else top_up.fail(found.id, found.failure))


def _gate_of(news: News) -> str | None:
    """Return what news of one payment share, so that a dispute and its payment do not miss each other."""
    return getattr(news, "payment_id", None)


def _claim_list(at_ms: int) -> Script[bool]:
    """Return whether it is this process's turn to list everything."""
    rows = yield (
        "INSERT INTO marks (name, value) VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = excluded.value"
        " WHERE marks.value < ? RETURNING value",
        (LISTED_MARK, at_ms, at_ms - LISTED_EVERY_MS),
    )
    return bool(rows)


def _list_again(at_ms: int) -> Script[None]:
    """Let the next turn to list everything come soon: this one came to nothing."""
    yield (
        "UPDATE marks SET value = ? WHERE name = ? AND value = ?",
        (at_ms - LISTED_EVERY_MS + LISTED_AGAIN_MS, LISTED_MARK, at_ms),
    )
