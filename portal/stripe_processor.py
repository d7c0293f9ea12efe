"""Stripe: hosted checkouts, kept cards, refunds, and what its events and lists say of them.

What Stripe tells is read here once, checked for its mode, and becomes the few kinds of news that
portal.payments takes. Amounts are in cents there.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, TypeVar

import aiohttp
import stripe

from models import dispute, ids, top_up
from models.dispute import Dispute
from models.money import MICROUSD_PER_CENT
from models.payment_card import Card
from models.refund import Refund
from models.settings import Settings
from models.top_up import CURRENCY, Payment, Reversal, TopUp, WrongPayment
from portal.payments import (
    AskAgain,
    AuthenticationRequired,
    CardDeclined,
    Checkout,
    CheckoutFailed,
    Closed,
    CustomerUnknown,
    Declined,
    Found,
    KeyRefused,
    Known,
    News,
    ProcessorUnavailable,
    Refunded,
)

T = TypeVar("T")
TIMEOUT_S = 20
RETRIES_MAX = 2
PAGE = 100
# A checkout that was begun without our learning its id was begun this soon after its order.
BEGUN_WITHIN_S = 3600
# What will not become otherwise by being asked again.
REFUSED_STATUSES = (400, 402, 404)
KEY_REFUSED_STATUSES = (401, 403)
DISPUTE_STATES = {
    "needs_response": dispute.OPEN, "under_review": dispute.OPEN, "won": dispute.WON, "lost": dispute.LOST,
}
CENTS_MAX = 10**11
# On a payment that tax was added to: what of it is credit.
CREDIT_CENTS = "credit_cents"
_ORDER = re.compile(r"top_[0-9a-z]{26}")
_ID = re.compile(r"[A-Za-z0-9_]{1,255}")
_CENTS = re.compile(r"[0-9]{1,11}", re.ASCII)
PAYMENT = ["payment_intent.latest_charge", "payment_intent.payment_method"]

Told = Mapping[str, Any]


class StripeProcessor:
    """Take money by Stripe. In its test mode this is another processor by name: nothing of the two ever mixes."""

    def __init__(self, settings: Settings) -> None:
        assert settings.stripe is not None
        self._settings = settings.stripe
        self._installation = settings.public_url
        self._session: aiohttp.ClientSession | None = None
        self._made: stripe.StripeClient | None = None
        self.name = "stripe" if self._settings.live else "stripe_test"
        self.title = "Stripe" if self._settings.live else "Stripe in test mode"

    @property
    def _stripe(self) -> Any:
        if self._made is None:
            self._session = aiohttp.ClientSession()
            base = {"api": self._settings.api_base} if self._settings.api_base else None
            self._made = stripe.StripeClient(
                self._settings.secret_key,
                http_client=stripe.AIOHTTPClient(
                    session=self._session, timeout=aiohttp.ClientTimeout(total=TIMEOUT_S, connect=5)
                ),
                base_addresses=base,
                max_network_retries=RETRIES_MAX,
            )
        return self._made.v1

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = self._made = None

    async def introduce(self, account_id: str, email: str) -> str:
        """Make an account a customer."""
        made = await _asked(self._stripe.customers.create_async(
            {"email": email, "metadata": {"account": account_id, "installation": self._installation}},
            {"idempotency_key": f"customer {account_id} {email}"[:255]},
        ))
        return made.id

    async def begin(
        self, ordered: TopUp, return_url: str, *, customer: str, keeps_card: bool, email: str | None = None
    ) -> Checkout:
        """Begin a hosted checkout; the same order again begins the same one."""
        metadata = self._metadata(ordered)
        paid_by: dict[str, Any] = {"metadata": metadata}
        if keeps_card:
            paid_by["setup_future_usage"] = "off_session"
        if email and self._settings.receipts:
            paid_by["receipt_email"] = email
        price: dict[str, Any] = {
            "currency": CURRENCY,
            "unit_amount": ordered.amount_microusd // MICROUSD_PER_CENT,
            "product_data": {"name": "Prepaid credit"},
        }
        wanted: dict[str, Any] = {
            "mode": "payment",
            "client_reference_id": ordered.id,
            "customer": customer,
            "success_url": return_url,
            "cancel_url": return_url.partition("?")[0],
            "line_items": [{"quantity": 1, "price_data": price}],
            "metadata": metadata,
            "payment_intent_data": paid_by,
        }
        if self._settings.tax:
            price["tax_behavior"] = "exclusive"
            wanted |= {"automatic_tax": {"enabled": True}, "customer_update": {"address": "auto"}}
        if self._settings.invoices:
            wanted["invoice_creation"] = {"enabled": True}
        made = await _asked(self._stripe.checkout.sessions.create_async(
            wanted, {"idempotency_key": f"checkout {ordered.id} {customer}"}
        ))
        return Checkout(made.id, made.url)

    async def look_up(self, ordered: TopUp) -> Known:
        """Return what Stripe knows of an order, now."""
        if ordered.off_session:
            return await self._look_up_charge(ordered)
        session = await self._session_of(ordered)
        if session is None:
            return Known(ordered.state)
        paid_by = session["payment_intent"]
        if session["payment_status"] == "paid":
            return await self._known(self._paid_session(session), paid_by)
        state = {"expired": top_up.EXPIRED, "open": top_up.PENDING}.get(session["status"], top_up.PENDING)
        failure = _failure_of(paid_by)
        if session["status"] == "complete" and paid_by and paid_by["status"] in _ENDED_UNPAID:
            state = top_up.FAILED
        return Known(state, failure=failure)

    async def charge(self, ordered: TopUp, card: Card) -> Payment:
        """Charge an order to a kept card while nobody is there."""
        wanted: dict[str, Any] = {
            "amount": ordered.amount_microusd // MICROUSD_PER_CENT, "currency": CURRENCY,
            "customer": card.customer_id, "payment_method": card.payment_method_id,
            "off_session": True, "confirm": True, "description": "Prepaid credit",
            "metadata": {**self._metadata(ordered), "off_session": "yes"}, "expand": ["latest_charge"],
        }
        try:
            if self._settings.tax:
                await self._add_tax(wanted, ordered)
            made = await _asked(self._stripe.payment_intents.create_async(
                wanted, {"idempotency_key": f"charge {ordered.id}"}
            ))
        except stripe.CardError as error:
            if error.code == "authentication_required":
                raise AuthenticationRequired from error
            raise CardDeclined(error.code or "card_declined") from error
        except KeyRefused as error:
            raise ProcessorUnavailable(str(error)) from error
        except CheckoutFailed as error:
            raise CardDeclined("refused") from error
        return self._charged(made.to_dict())

    async def _add_tax(self, wanted: dict[str, Any], ordered: TopUp) -> None:
        """Add what Stripe Tax asks of the customer where the checkout said he is, and have Stripe record it.

        https://docs.stripe.com/tax/payment-intent: Stripe records the tax when the payment succeeds, and its part
        of what is given back; the amount is ours to set.
        """
        item = {"amount": wanted["amount"], "reference": ordered.id, "tax_behavior": "exclusive"}
        counted = await _asked(self._stripe.tax.calculations.create_async(
            {"currency": CURRENCY, "customer": wanted["customer"], "line_items": [item]},
            {"idempotency_key": f"tax {ordered.id}"},
        ))
        wanted["metadata"][CREDIT_CENTS] = str(wanted["amount"])
        wanted["amount"] = counted.amount_total
        wanted["hooks"] = {"inputs": {"tax": {"calculation": counted.id}}}

    async def refund(self, asked: Refund, ordered: TopUp) -> Refunded:
        """Give money back, once for each refund of ours."""
        try:
            return await self._refunded(asked, ordered)
        except KeyRefused as error:
            # An earlier try may have been heard.
            raise ProcessorUnavailable(str(error)) from error

    async def _refunded(self, asked: Refund, ordered: TopUp) -> Refunded:
        refunds = self._stripe.refunds
        # Idempotency keys are forgotten after a day; what is written on the refund is not.
        listed = await _asked(refunds.list_async(
            {"payment_intent": ordered.payment_id, "limit": PAGE, "expand": ["data.charge"]}
        ))
        found = next((one for one in listed.to_dict()["data"] if _metadata_of(one).get("refund") == asked.id), None)
        if found is None:
            made = await _asked(refunds.create_async(
                {
                    "payment_intent": ordered.payment_id, "amount": asked.total_microusd // MICROUSD_PER_CENT,
                    "metadata": {**self._metadata(ordered), "refund": asked.id}, "expand": ["charge"],
                },
                {"idempotency_key": f"refund {asked.id}"},
            ))
            found = made.to_dict()
        stands = found["status"] not in ("failed", "canceled")
        return Refunded(found["id"], stands, _microusd(found["charge"]["amount_refunded"]))

    async def forget(self, card: Card) -> None:
        """Detach a kept card from its customer."""
        try:
            await _asked(self._stripe.payment_methods.detach_async(card.payment_method_id))
        except CheckoutFailed:
            return  # it is not attached any more

    async def forget_customer(self, customer_id: str) -> None:
        """Delete a customer, whose payments Stripe keeps: https://docs.stripe.com/api/customers/delete."""
        try:
            await _asked(self._stripe.customers.delete_async(customer_id))
        except CheckoutFailed as error:
            if getattr(error.__cause__, "code", None) != "resource_missing":
                raise

    async def recent(self, since_ms: int) -> AsyncIterator[Found]:
        """Yield every payment, refund and dispute since a moment that may be of ours."""
        created = {"gte": since_ms // 1000}
        async for one in self._listed(self._stripe.checkout.sessions, created=created, status="complete"):
            if _names_order(one) and one["payment_status"] == "paid":
                yield self._found(one, one, self._paid_session)
        async for one in self._listed(self._stripe.payment_intents, created=created, expand=["data.latest_charge"]):
            if _names_order(one) and one["status"] == "succeeded" and "off_session" in _metadata_of(one):
                yield self._found(one, one, self._charged)
        async for one in self._listed(self._stripe.refunds, created=created, expand=["data.charge"]):
            if one["charge"] and _names_order(one["charge"]):
                yield self._found(one["charge"], one["charge"], self._given_back)
        async for one in self._listed(self._stripe.disputes, created=created):
            if one["payment_intent"]:
                yield self._found(one, one, self._disputed)

    def news_of(self, event: Told) -> News | None:
        """Return what an event says; None for what does not concern us. Raises WrongPayment."""
        subject = event["data"]["object"]
        if event["livemode"] is not self._settings.live or event.get("account") is not None:
            raise WrongPayment(f"{event['id']} is of another mode or of another Stripe account")
        match event["type"]:
            case "checkout.session.completed" | "checkout.session.async_payment_succeeded":
                if not _names_order(subject):
                    return None
                if subject["payment_status"] != "paid":
                    # Of a payment that takes days, one event comes now and another when it is made.
                    return None if event["type"].endswith("completed") else _refuse(subject, "it is not paid")
                return self._paid_session(subject)
            case "checkout.session.async_payment_failed" | "checkout.session.expired":
                if not _names_order(subject):
                    return None
                self._require_mode(subject)
                state = top_up.EXPIRED if event["type"].endswith("expired") else top_up.FAILED
                return Closed(self.name, _metadata_of(subject)["top_up"], subject["id"], state)
            case "payment_intent.payment_failed":
                if not _names_order(subject):
                    return None
                self._require_mode(subject)
                return Declined(self.name, _metadata_of(subject)["top_up"], _failure_of(subject))
            case "charge.refunded":
                return self._given_back(subject) if _names_order(subject) else None
            case "refund.failed" | "charge.refund.updated" | "refund.updated":
                if subject["status"] not in ("failed", "canceled") or not subject["payment_intent"]:
                    return None
                return AskAgain(self.name, _text(subject["payment_intent"]), self._refund_of(subject))
            case (
                "charge.dispute.created" | "charge.dispute.updated" | "charge.dispute.closed"
                | "charge.dispute.funds_withdrawn" | "charge.dispute.funds_reinstated"
            ):
                return self._disputed(subject) if subject["payment_intent"] else None
            case _:
                return None

    def _metadata(self, ordered: TopUp) -> dict[str, str]:
        return {"top_up": ordered.id, "account": ordered.account_id, "installation": self._installation}

    def _found(self, one: Told, owner: Told, read: Callable[[Told], News]) -> Found:
        """Return what is in a list. Another installation may share the account, and this one may have moved."""
        is_from_here = _metadata_of(owner).get("installation") == self._installation
        try:
            return Found(read(one), is_from_here)
        except (WrongPayment, KeyError, TypeError, AttributeError) as error:
            return Found(WrongPayment(f"{one['id']}: {error}"), is_from_here)

    def _refund_of(self, one: Told) -> str | None:
        """Return which refund of ours something is."""
        return _text(_metadata_of(one)["refund"]) if _names_order(one) and "refund" in _metadata_of(one) else None

    def _require_mode(self, one: Told) -> None:
        if one["livemode"] is not self._settings.live:
            _refuse(one, "it is of another mode")

    def _paid_session(self, session: Told) -> Payment:
        """Return the payment of a checkout. Raises WrongPayment for one that is not a plain payment."""
        self._require_mode(session)
        if session["mode"] != "payment" or session["payment_status"] != "paid":
            _refuse(session, "it is not paid")
        total = _microusd(session["amount_total"])
        taxed = (session.get("automatic_tax") or {}).get("enabled") is True
        paid_by = session["payment_intent"]
        metadata = _metadata_of(session)
        return Payment(
            processor=self.name, checkout_id=session["id"], currency=session["currency"],
            amount_microusd=_microusd(session["amount_subtotal"]) if taxed else total,
            total_microusd=total, top_up_id=metadata.get("top_up"), account_id=metadata.get("account"),
            payment_id=_text(_id_of(paid_by)), receipt_url=_receipt_of(paid_by), card=_card_of(session, paid_by),
        )

    def _charged(self, made: Told) -> Payment:
        """Return a payment off session. Raises AuthenticationRequired, CardDeclined, ProcessorUnavailable."""
        self._require_mode(made)
        if made["status"] == "requires_action":
            raise AuthenticationRequired
        if made["status"] == "processing":
            raise ProcessorUnavailable("the payment takes its time")
        if made["status"] != "succeeded":
            raise CardDeclined(_failure_of(made) or made["status"])
        metadata = _metadata_of(made)
        total = _microusd(made["amount_received"])
        credit = _microusd(_cents(metadata[CREDIT_CENTS])) if CREDIT_CENTS in metadata else total
        return Payment(
            processor=self.name, checkout_id=None, amount_microusd=credit, total_microusd=total,
            currency=made["currency"], top_up_id=metadata.get("top_up"), account_id=metadata.get("account"),
            payment_id=made["id"], receipt_url=_receipt_of(made),
        )

    def _given_back(self, charge: Told) -> Reversal:
        self._require_mode(charge)
        return Reversal(
            processor=self.name, top_up_id=_metadata_of(charge)["top_up"],
            payment_id=_text(charge["payment_intent"]), total_microusd=_microusd(charge["amount"]),
            refunded_microusd=_microusd(charge["amount_refunded"]), currency=charge["currency"],
        )

    def _disputed(self, one: Told) -> Dispute:
        self._require_mode(one)
        # What is asked back in another currency than it was paid in is all of it.
        amount = one["amount"] if one["currency"] == CURRENCY else CENTS_MAX
        return Dispute(
            _text(one["id"]), self.name, _text(one["payment_intent"]), _microusd(amount),
            DISPUTE_STATES.get(one["status"], dispute.ASKED),
        )

    async def _known(self, payment: Payment, paid_by: Told) -> Known:
        charge = paid_by["latest_charge"]
        disputes: list[Dispute] = []
        if charge["disputed"]:
            listed = self._listed(self._stripe.disputes, payment_intent=paid_by["id"])
            disputes = [self._disputed(one) async for one in listed]
        refunded = _microusd(charge["amount_refunded"])
        return Known(top_up.PAID, payment, refunded_microusd=refunded, disputes=tuple(disputes))

    async def _look_up_charge(self, ordered: TopUp) -> Known:
        found = await self._intent_of(ordered)
        if found is None:
            return Known(ordered.state)
        try:
            return await self._known(self._charged(found), found)
        except ProcessorUnavailable:
            return Known(top_up.PENDING)
        except (AuthenticationRequired, CardDeclined):
            return Known(top_up.FAILED, failure=_failure_of(found) or "authentication_required")

    async def _session_of(self, ordered: TopUp) -> Told | None:
        sessions = self._stripe.checkout.sessions
        if ordered.checkout_id is not None:
            return (await _asked(sessions.retrieve_async(ordered.checkout_id, {"expand": PAYMENT}))).to_dict()
        expand = [f"data.{name}" for name in PAYMENT]
        return await self._first_of(ordered, self._listed(sessions, created=_begun(ordered), expand=expand))

    async def _intent_of(self, ordered: TopUp) -> Told | None:
        intents = self._stripe.payment_intents
        if ordered.payment_id is not None:
            found = await _asked(intents.retrieve_async(ordered.payment_id, {"expand": ["latest_charge"]}))
            return found.to_dict()
        listed = self._listed(intents, created=_begun(ordered), expand=["data.latest_charge"])
        return await self._first_of(ordered, listed)

    async def _first_of(self, ordered: TopUp, listed: AsyncIterator[Told]) -> Told | None:
        async for one in listed:
            if _metadata_of(one).get("top_up") == ordered.id:
                return one
        return None

    async def _listed(self, resource: Any, **wanted: Any) -> AsyncIterator[Told]:
        """Yield all of a list, page by page."""
        after: dict[str, str] = {}
        while True:
            answer = (await _asked(resource.list_async({"limit": PAGE, **wanted, **after}))).to_dict()
            for one in answer["data"]:
                yield one
            if not answer["has_more"]:
                return
            after = {"starting_after": answer["data"][-1]["id"]}


_ENDED_UNPAID = ("requires_payment_method", "canceled")


async def _asked(question: Awaitable[T]) -> T:
    """Return Stripe's answer. Raises CheckoutFailed when it refuses, ProcessorUnavailable when it is unclear."""
    try:
        return await question
    except stripe.CardError:
        raise
    except stripe.IdempotencyError as error:
        raise ProcessorUnavailable("the same was asked before in other words") from error
    except stripe.StripeError as error:
        if error.code == "resource_missing" and getattr(error, "param", None) == "customer":
            raise CustomerUnknown("the customer is gone") from error
        if error.http_status in KEY_REFUSED_STATUSES:
            raise KeyRefused(f"{type(error).__name__} {error.code or error.http_status}") from error
        if error.http_status in REFUSED_STATUSES:
            raise CheckoutFailed(f"{type(error).__name__} {error.code or error.http_status}") from error
        raise ProcessorUnavailable(type(error).__name__) from error
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        raise ProcessorUnavailable(type(error).__name__) from error


def _microusd(cents: Any) -> int:
    if type(cents) is not int or not 0 <= cents <= CENTS_MAX:
        raise WrongPayment(f"{str(cents)[:40]!r} is no amount")
    return cents * MICROUSD_PER_CENT


def _cents(given: Any) -> int:
    """Return cents that were written down as text."""
    if not isinstance(given, str) or not _CENTS.fullmatch(given):
        raise WrongPayment(f"{str(given)[:40]!r} is no amount")
    return int(given)


def _text(given: Any) -> str:
    if not isinstance(given, str) or not _ID.fullmatch(given):
        raise WrongPayment(f"{str(given)[:40]!r} is no id")
    return given


def _begun(ordered: TopUp) -> dict[str, int]:
    made_s = ids.made_at_ms(ordered.id) // 1000
    return {"gte": made_s - 60, "lte": made_s + BEGUN_WITHIN_S}


def _names_order(one: Told) -> bool:
    """Return whether something is about an order, of this installation or of one that shares the account."""
    metadata = _metadata_of(one)
    if "top_up" not in metadata:
        return False
    if not _ORDER.fullmatch(metadata["top_up"]):
        _refuse(one, "it names no order")
    return True


def _metadata_of(one: Told) -> Mapping[str, str]:
    return one.get("metadata") or {}


def _id_of(one: Told | str | None) -> str | None:
    return one if one is None or isinstance(one, str) else one["id"]


def _receipt_of(paid_by: Told | str | None) -> str | None:
    charge = None if paid_by is None or isinstance(paid_by, str) else paid_by.get("latest_charge")
    return None if charge is None or isinstance(charge, str) else charge["receipt_url"]


def _failure_of(paid_by: Told | str | None) -> str | None:
    error = None if paid_by is None or isinstance(paid_by, str) else paid_by.get("last_payment_error")
    return (error.get("decline_code") or error.get("code")) if error else None


def _card_of(session: Told, paid_by: Told | str | None) -> Card | None:
    """Return the card a checkout was paid with, where it may be charged again."""
    if paid_by is None or isinstance(paid_by, str) or paid_by.get("setup_future_usage") != "off_session":
        return None
    method = paid_by.get("payment_method")
    if method is None or isinstance(method, str) or method.get("type") != "card":
        return None
    return Card(_id_of(session["customer"]) or "", method["id"], method["card"]["brand"], method["card"]["last4"])


def _refuse(one: Told, why: str) -> None:
    raise WrongPayment(f"{one['id']}: {why}")
