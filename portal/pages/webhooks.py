"""Webhooks: what Stripe tells by itself. Its signature is checked over the bytes as they came.

There is no such address without a secret to check with. An answer of 200 means that the event's effect is
written down for good; 503 asks for the event to be sent again.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import re
import time
from collections.abc import Mapping
from typing import Any

from quart import Quart, Response, request

from models.errors import DatabaseUnavailable
from models.payment_event import REFUSED, Event
from models.settings import Settings
from models.top_up import WrongPayment
from portal.payments import CheckoutFailed, Payments, ProcessorUnavailable

PATH = "/webhooks/stripe"
BODY_BYTES_MAX = 1 << 20
# How far from ours the clock may be by which an event was signed: replays are old, forgeries may be of tomorrow.
AGE_S_MAX = 300
SIGNATURES_MAX = 16
EVENT_ID_CHARACTERS_MAX = 100
RETRY_AFTER_S = 30

_log = logging.getLogger("tollgate.webhooks")


class Unproven(Exception):
    """Report what did not come from Stripe, or not now."""


def register(app: Quart, settings: Settings, payments: Payments) -> None:
    """Add the address, where there is a secret."""
    if settings.stripe is None or not settings.stripe.webhook_secret:
        return
    secret = settings.stripe.webhook_secret.encode()

    @app.post(PATH)
    async def hear_stripe() -> Response:
        length = request.content_length
        if length is None:
            return _answer(411)
        if length > BODY_BYTES_MAX:
            return _answer(413)
        gate = request.scope.get("tollgate.body")
        if gate is not None:
            await gate.open()
        body = await request.get_data()
        try:
            require_signature(body, request.headers.get("stripe-signature", ""), secret, time.time())
            told, event = _read(body, payments.processor.name)
        except Unproven as error:
            _log.warning("an event was refused: %s", error)
            return _answer(400)
        try:
            try:
                news = payments.processor.news_of(told)
            except (WrongPayment, KeyError, TypeError, AttributeError) as error:
                detail = f"{type(error).__name__}: {error}"
                _log.error("an event is not as expected: %s", detail, extra={"event": event.id})
                await payments.refuse(event, REFUSED, detail)
                return _answer(200)
            await payments.hear(event, news)
        except (DatabaseUnavailable, ProcessorUnavailable, CheckoutFailed) as error:
            _log.warning("an event must come again: %s", type(error).__name__, extra={"event": event.id})
            return _answer(503)
        return _answer(200)


def require_signature(body: bytes, header: str, secret: bytes, now_s: float) -> None:
    """Raise Unproven unless a body was signed with our secret, just now."""
    times, signatures = [], []
    for part in header.split(","):
        name, _, value = part.strip().partition("=")
        if name == "t":
            times.append(value)
        elif name == "v1":
            signatures.append(value)
    if len(times) != 1 or not re.fullmatch(r"[0-9]{1,12}", times[0]):
        raise Unproven("it names no moment")
    expected = hmac.new(secret, times[0].encode() + b"." + body, hashlib.sha256).hexdigest().encode()
    # While a secret is being changed for another, an event is signed with both.
    matches = [
        hmac.compare_digest(expected, offered.encode(errors="replace")) for offered in signatures[:SIGNATURES_MAX]
    ]
    if not any(matches):
        raise Unproven("it is not signed with our secret")
    if abs(now_s - int(times[0])) > AGE_S_MAX:
        raise Unproven("it was not signed just now")


def _read(body: bytes, processor: str) -> tuple[Mapping[str, Any], Event]:
    try:
        told = json.loads(body.decode())
        subject = told["data"]["object"]
        event = Event(told["id"], processor, told["type"], str(subject.get("id", "")))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise Unproven("it cannot be read") from None
    texts = (event.id, event.type, event.object_id)
    if not all(isinstance(text, str) and text.isprintable() and text.isascii() for text in texts) or not event.id:
        raise Unproven("it cannot be read")
    if max(map(len, texts)) > EVENT_ID_CHARACTERS_MAX:
        raise Unproven("it cannot be read")
    return told, event


def _answer(status: int) -> Response:
    response = Response(b"", status, content_type="text/plain")
    response.headers["cache-control"] = "no-store"
    if status == 503:
        response.headers["retry-after"] = str(RETRY_AFTER_S)
    return response
