"""A stand-in for Stripe's API over a real socket, in a thread: stateful, with a hosted pay page and signed events.

It keeps customers, checkout sessions, payment intents, charges, refunds, disputes and events, honours idempotency
keys, and pages its lists. `delivers` says what becomes of events by themselves: each is sent `copies` times, or
none is (dropped); either way it is in `events`, to be signed and sent by a test when and as often as it likes.
`trouble` cuts connections before or after a request has had its effect.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import hmac
import html
import itertools
import json
import random
import re
import secrets
import threading
import time
from collections.abc import Mapping
from typing import Any

import aiohttp
from aiohttp import web

SECRET_KEY, LIVE_KEY = "sk_test_twin0123456789abcdef", "sk_live_twin0123456789abcdef"
WEBHOOK_SECRET = "whsec_twin0123456789abcdef0123456789"
CARDS = {"pm_pays": "4242", "pm_declines": "0002", "pm_asks": "3184"}
_FILTERS = ("status", "payment_intent", "customer")
API_VERSION = "2026-10-28.endive"
Thing = dict[str, Any]


class FakeStripe:
    """Be Stripe. Objects are plain dictionaries by id, to be looked at and changed by tests."""

    def __init__(self, *, live: bool = False) -> None:
        self.live = live
        self.things: dict[str, Thing] = {}
        self.events: list[Thing] = []
        self.requests: list[tuple[str, str]] = []
        self.keys: dict[str, tuple[str, int, Thing]] = {}
        self.webhook_url: str | None = None
        self.delivers = True
        self.copies = 1
        self.delay_s = 0.0
        self.trouble: list[tuple[str, str]] = []
        self._numbers = itertools.count(1)
        self._running: set[asyncio.Task[None]] = set()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    # Its life

    def start(self) -> FakeStripe:
        """Listen on a free port."""
        self._thread.start()
        assert self._ready.wait(20)
        return self

    def stop(self) -> None:
        """Listen no more."""
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(20)

    async def _serve(self) -> None:
        self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application()
        app.router.add_route("*", "/v1/{path:.*}", self._api)
        app.router.add_get("/pay/{id}", self._pay_page)
        app.router.add_post("/pay/{id}", self._pay_form)
        app.router.add_get("/receipt/{id}", self._receipt)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
        self.url = f"http://127.0.0.1:{port}"
        self._ready.set()
        await self._ended.wait()
        for task in self._running:
            task.cancel()
        await runner.cleanup()

    # What tests do at the hosted page or on Stripe's side

    def pay(self, session_id: str, *, takes_days: bool = False) -> Thing:
        """Pay a session; a payment that takes days is completed unpaid, until `arrive` or `bounce`."""
        session = self.things[session_id]
        assert session["status"] == "open", session["status"]
        intent = self._intent(
            session["amount_total"], session["currency"], session["customer"], session["_paid_by"], "pm_pays"
        )
        session.update(status="complete", payment_intent=intent["id"], url=None)
        if takes_days:
            intent["status"] = "processing"
        else:
            self._succeed(intent)
            session["payment_status"] = "paid"
        self.emit("checkout.session.completed", session)
        return session

    def arrive(self, session_id: str) -> None:
        """Let a payment that takes days succeed."""
        session = self.things[session_id]
        self._succeed(self.things[session["payment_intent"]])
        session["payment_status"] = "paid"
        self.emit("checkout.session.async_payment_succeeded", session)

    def bounce(self, session_id: str) -> None:
        """Let a payment that takes days fail."""
        session = self.things[session_id]
        intent = self.things[session["payment_intent"]]
        intent.update(status="requires_payment_method", last_payment_error={"code": "insufficient_funds"})
        self.emit("checkout.session.async_payment_failed", session)

    def decline(self, session_id: str) -> None:
        """Decline a card at a session, which stays open."""
        session = self.things[session_id]
        amount, paid_by = session["amount_total"], session["_paid_by"]
        intent = self._intent(amount, "usd", session["customer"], paid_by, "pm_declines")
        error = {"code": "card_declined", "decline_code": "lost_card"}
        intent.update(status="requires_payment_method", last_payment_error=error)
        session["payment_intent"] = intent["id"]
        self.emit("payment_intent.payment_failed", intent)

    def expire(self, session_id: str) -> None:
        """Let a session's day pass."""
        self.things[session_id].update(status="expired", url=None)
        self.emit("checkout.session.expired", self.things[session_id])

    def give_back(self, payment_id: str, cents: int, metadata: Thing | None = None) -> Thing:
        """Refund by Stripe's own dashboard."""
        charge = self.things[self.things[payment_id]["latest_charge"]]
        if charge["amount_refunded"] + cents > charge["amount"]:
            raise Refusal(400, "charge_already_refunded", "Charge has already been refunded.")
        charge["amount_refunded"] += cents
        charge["refunded"] = charge["amount_refunded"] == charge["amount"]
        made = self._new("re", "refund", amount=cents, currency="usd", charge=charge["id"], status="succeeded",
                         payment_intent=payment_id, metadata=metadata or {})
        self.emit("charge.refunded", charge)
        return made

    def bounce_refund(self, refund_id: str) -> None:
        """Let a refund fail after all."""
        made = self.things[refund_id]
        made["status"] = "failed"
        charge = self.things[made["charge"]]
        charge["amount_refunded"] -= made["amount"]
        charge["refunded"] = False
        self.emit("refund.failed", made)

    def dispute(self, payment_id: str, cents: int | None = None, status: str = "needs_response") -> Thing:
        """Have a payment asked back by its payer's bank."""
        charge = self.things[self.things[payment_id]["latest_charge"]]
        charge["disputed"] = True
        made = self._new("dp", "dispute", amount=cents or charge["amount"], currency="usd", charge=charge["id"],
                         payment_intent=payment_id, status=status, reason="fraudulent", metadata={})
        self.emit("charge.dispute.created", made)
        return made

    def close_dispute(self, dispute_id: str, status: str) -> None:
        """Decide a dispute: won or lost."""
        self.things[dispute_id]["status"] = status
        self.emit("charge.dispute.closed", self.things[dispute_id])

    def of(self, kind: str) -> list[Thing]:
        """Return all objects of a kind, oldest first."""
        return [thing for thing in self.things.values() if thing["object"] == kind]

    def session_of(self, top_up_id: str) -> Thing:
        """Return the one session of an order; there must be one."""
        (found,) = [one for one in self.of("checkout.session") if one["metadata"].get("top_up") == top_up_id]
        return found

    # Events

    def emit(self, kind: str, subject: Thing) -> Thing:
        """Write an event down and, unless events are dropped, send it."""
        event = {
            "id": f"evt_{secrets.token_hex(8)}", "object": "event", "api_version": API_VERSION, "type": kind,
            "created": int(time.time()), "livemode": self.live, "pending_webhooks": 1, "request": None,
            "data": {"object": public(subject)},
        }
        self.events.append(event)
        if self.delivers and self.webhook_url:
            self._loop.call_soon_threadsafe(self._begin_delivery, event)
        return event

    def _begin_delivery(self, event: Thing) -> None:
        task = self._loop.create_task(self._deliver(event))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _deliver(self, event: Thing) -> None:
        await asyncio.sleep(self.delay_s * random.random())
        async with aiohttp.ClientSession() as http:
            for _ in range(self.copies):
                await deliver(http, self.webhook_url or "", event)

    # Its API

    async def _api(self, request: web.Request) -> web.StreamResponse:
        path = request.match_info["path"]
        self.requests.append((request.method, path))
        trouble = self._take_trouble(f"{request.method} {path}")
        if trouble == "before":
            request.transport.close()  # type: ignore[union-attr]
            return web.Response()
        if trouble and trouble.isdigit():
            return web.json_response({"error": {"message": "trouble", "type": "api_error"}}, status=int(trouble))
        if request.headers.get("authorization") != f"Bearer {SECRET_KEY if not self.live else LIVE_KEY}":
            return web.json_response({"error": {"message": "no", "type": "invalid_request_error"}}, status=401)
        fields = nested((await request.post()) if request.method == "POST" else request.query)
        status, body = self._once(request, path, fields)
        if trouble == "after":
            request.transport.close()  # type: ignore[union-attr]
        return web.json_response(body, status=status)

    def _take_trouble(self, asked: str) -> str | None:
        for one in self.trouble:
            if re.fullmatch(one[0], asked):
                self.trouble.remove(one)
                return one[1]
        return None

    def _once(self, request: web.Request, path: str, fields: Thing) -> tuple[int, Thing]:
        """Answer a POST with a known key as it was answered before."""
        key = request.headers.get("idempotency-key") if request.method == "POST" else None
        asked = json.dumps([path, fields], sort_keys=True)
        if key in self.keys:
            before, status, body = self.keys[key]
            if before != asked:
                return 400, {"error": {"type": "idempotency_error", "message": "other parameters"}}
            return status, body
        try:
            status, body = 200, self._answer(request.method, path, fields)
        except Refusal as error:
            status, body = error.status, error.body
        body = copy.deepcopy(body)
        if key is not None:
            self.keys[key] = (asked, status, body)
        return status, body

    def _answer(self, method: str, path: str, fields: Thing) -> Thing:
        expand = list(fields.pop("expand", {}).values()) if isinstance(fields.get("expand"), dict) else []
        known = {
            "customers": "customer", "checkout/sessions": "checkout.session", "payment_intents": "payment_intent",
            "refunds": "refund", "disputes": "dispute", "events": "event",
        }
        if method == "POST":
            makers = {
                "customers": self._make_customer, "checkout/sessions": self._make_session,
                "payment_intents": self._make_intent, "refunds": self._make_refund,
                "tax/calculations": self._make_calculation,
            }
            if path in makers:
                return self._expanded(public(makers[path](fields)), expand)
            if found := re.fullmatch(r"payment_methods/(\w+)/detach", path):
                return {"id": found[1], "object": "payment_method", "customer": None}
        elif method == "DELETE":
            if (found := re.fullmatch(r"customers/(\w+)", path)) and self.things.pop(found[1], None):
                return {"id": found[1], "object": "customer", "deleted": True}
        elif path in known:
            return self._listed(known[path], fields, expand)
        elif path.rpartition("/")[2] in self.things:
            return self._expanded(public(self.things[path.rpartition("/")[2]]), expand)
        raise Refusal(404, "resource_missing", f"No such thing: {path}")

    def _listed(self, kind: str, fields: Thing, expand: list[str]) -> Thing:
        found = list(reversed(self.events if kind == "event" else self.of(kind)))
        created = fields.get("created", {})
        found = [
            one for one in found
            if int(created.get("gte", 0)) <= one["created"] <= int(created.get("lte", 1 << 60))
            and all(one.get(name) == fields[name] for name in _FILTERS if name in fields)
        ]
        if "starting_after" in fields:
            ids = [one["id"] for one in found]
            found = found[ids.index(fields["starting_after"]) + 1:]
        # Pages are smaller than asked for, so that following them is not left to chance.
        limit = min(int(fields.get("limit", 10)), 3)
        inner = [name.removeprefix("data.") for name in expand]
        page = [self._expanded(public(one), inner) for one in found[:limit]]
        return {"object": "list", "data": page, "has_more": len(found) > limit, "url": "/v1"}

    def _expanded(self, thing: Thing, paths: list[str]) -> Thing:
        for path in paths:
            at = thing
            for name in path.split("."):
                value = at.get(name)
                if value is None:
                    break
                if isinstance(value, str):
                    at[name] = public(self.things[value])
                at = at[name]
        return thing

    def _make_customer(self, fields: Thing) -> Thing:
        return self._new("cus", "customer", email=fields.get("email"), metadata=fields.get("metadata", {}))

    def _make_session(self, fields: Thing) -> Thing:
        if fields["customer"] not in self.things:
            raise Refusal(400, "resource_missing", "No such customer", "customer")
        price = fields["line_items"]["0"]["price_data"]
        amount = int(price["unit_amount"])
        if amount < 50:
            raise Refusal(400, "amount_too_small", "too small")
        taxed = fields.get("automatic_tax", {}).get("enabled") == "true"
        made = self._new(
            "cs_test", "checkout.session", mode=fields["mode"], status="open", payment_status="unpaid",
            currency=price["currency"], amount_subtotal=amount,
            amount_total=amount + (tax_of(amount) if taxed else 0),
            customer=fields["customer"], client_reference_id=fields.get("client_reference_id"), payment_intent=None,
            metadata=fields.get("metadata", {}), success_url=fields["success_url"],
            cancel_url=fields.get("cancel_url"), automatic_tax={"enabled": taxed},
            invoice_creation=fields.get("invoice_creation"),
        )
        made["_paid_by"] = fields.get("payment_intent_data", {})
        made["url"] = f"{self.url}/pay/{made['id']}"
        return made

    def _make_calculation(self, fields: Thing) -> Thing:
        if fields["customer"] not in self.things:
            raise Refusal(400, "resource_missing", "No such customer", "customer")
        if self.things[fields["customer"]].get("address") == "unknown":
            raise Refusal(400, "customer_tax_location_invalid", "where is he?", "customer")
        (item,) = fields["line_items"].values()
        assert item["tax_behavior"] == "exclusive"
        amount = int(item["amount"])
        return self._new(
            "taxcalc", "tax.calculation", currency=fields["currency"], customer=fields["customer"],
            amount_total=amount + tax_of(amount), tax_amount_exclusive=tax_of(amount),
        )

    def _make_intent(self, fields: Thing) -> Thing:
        card = fields["payment_method"]
        calculation = fields.get("hooks", {}).get("inputs", {}).get("tax", {}).get("calculation")
        if calculation is not None and self.things[calculation]["amount_total"] != int(fields["amount"]):
            raise Refusal(400, "parameter_invalid", "the amount is not the calculation's", "amount")
        made = self._intent(int(fields["amount"]), fields["currency"], fields["customer"], fields, card)
        if card == "pm_pays":
            self._succeed(made)
            return made
        code = "card_declined" if card == "pm_declines" else "authentication_required"
        made.update(status="requires_payment_method", last_payment_error={"code": code})
        self.emit("payment_intent.payment_failed", made)
        raise Refusal(402, code, "Your card was declined.", kind="card_error")

    def _make_refund(self, fields: Thing) -> Thing:
        return self.give_back(fields["payment_intent"], int(fields["amount"]), fields.get("metadata", {}))

    def _intent(self, amount: int, currency: str, customer: str, wanted: Thing, card: str) -> Thing:
        if card not in self.things:
            self.things[card] = {
                "id": card, "object": "payment_method", "type": "card", "created": 0,
                "card": {"brand": "visa", "last4": CARDS[card]},
            }
        return self._new(
            "pi", "payment_intent", amount=amount, amount_received=0, currency=currency, customer=customer,
            payment_method=card, metadata=dict(wanted.get("metadata", {})), latest_charge=None,
            last_payment_error=None, setup_future_usage=wanted.get("setup_future_usage"),
            status="requires_confirmation", receipt_email=wanted.get("receipt_email"), hooks=wanted.get("hooks"),
        )

    def _succeed(self, intent: Thing) -> None:
        charge = self._new(
            "ch", "charge", amount=intent["amount"], amount_refunded=0, refunded=False, currency=intent["currency"],
            payment_intent=intent["id"], customer=intent["customer"], metadata=dict(intent["metadata"]),
            disputed=False, status="succeeded",
        )
        charge["receipt_url"] = f"{self.url}/receipt/{charge['id']}"
        intent.update(status="succeeded", amount_received=intent["amount"], latest_charge=charge["id"])

    def _new(self, prefix: str, kind: str, **fields: Any) -> Thing:
        made = {
            "id": f"{prefix}_{next(self._numbers)}{secrets.token_hex(6)}", "object": kind,
            "created": int(time.time()), "livemode": self.live, **fields,
        }
        self.things[made["id"]] = made
        return made

    # Its hosted page

    async def _pay_page(self, request: web.Request) -> web.Response:
        session = self.things[request.match_info["id"]]
        total = f"${session['amount_total'] / 100:.2f}"
        return web.Response(content_type="text/html", text=(
            f"<!doctype html><title>Checkout</title><h1>Pay {html.escape(total)}</h1><form method=post>"
            "<button name=how value=pay>Pay</button><button name=how value=decline>Decline</button>"
            f"</form><a href='{html.escape(session['cancel_url'] or '')}'>Back</a>"
        ))

    async def _pay_form(self, request: web.Request) -> web.Response:
        how = (await request.post())["how"]
        session = self.things[request.match_info["id"]]
        if how == "decline":
            self.decline(session["id"])
            raise web.HTTPSeeOther(f"/pay/{session['id']}")
        self.pay(session["id"])
        raise web.HTTPSeeOther(session["success_url"])

    async def _receipt(self, request: web.Request) -> web.Response:
        charge = self.things[request.match_info["id"]]
        return web.Response(text=f"Receipt for ${charge['amount'] / 100:.2f}")


class Refusal(Exception):
    """Refuse a request in Stripe's words."""

    def __init__(
        self, status: int, code: str, message: str, param: str | None = None, kind: str = "invalid_request_error"
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"type": kind, "code": code, "message": message, "param": param}}


def tax_of(cents: int) -> int:
    """Return the tax that comes on top of an amount here."""
    return cents * 19 // 100


def public(thing: Thing) -> Thing:
    """Return a copy without what is the twin's own."""
    return {name: copy.deepcopy(value) for name, value in thing.items() if not name.startswith("_")}


def nested(fields: Mapping[str, Any]) -> Thing:
    """Return fields such as `a[b][0]` as nested dictionaries."""
    made: Thing = {}
    for name, value in fields.items():
        first, *rest = re.findall(r"[^\[\]]+", name)
        at = made
        path = [first, *rest]
        for part in path[:-1]:
            at = at.setdefault(part, {})
        last = path[-1]
        at[str(len(at)) if name.endswith("[]") else last] = str(value)
    return made


def body_of(event: Thing) -> bytes:
    """Return an event as Stripe writes it."""
    return json.dumps(event, indent=2).encode()


def signed(body: bytes, *, secret: str = WEBHOOK_SECRET, at_s: float | None = None, scheme: str = "v1") -> str:
    """Return the header that proves a body."""
    moment = str(int(time.time() if at_s is None else at_s))
    proof = hmac.new(secret.encode(), moment.encode() + b"." + body, hashlib.sha256).hexdigest()
    return f"t={moment},{scheme}={proof}"


async def deliver(http: aiohttp.ClientSession, url: str, event: Thing | bytes, *, header: str | None = None) -> int:
    """Send an event and return the status of the answer, 0 for none."""
    body = event if isinstance(event, bytes) else body_of(event)
    headers = {"Stripe-Signature": signed(body) if header is None else header, "Content-Type": "application/json"}
    try:
        async with http.post(url, data=body, headers=headers) as answer:
            await answer.read()
            return answer.status
    except aiohttp.ClientError:
        return 0
