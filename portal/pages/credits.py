"""Credits: what is left, what is held, buying more, and everything that changed the balance but calls."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from urllib.parse import urlencode

from quart import Response, g, request
from werkzeug.exceptions import NotFound as NoPage

from models import clock, included_calls, ledger, top_up, wallet
from models.errors import NotFound, RateLimited
from models.money import MICROUSD_PER_USD
from models.settings import TOP_UP_MIN_USD
from models.top_up import TopUp
from models.wallet import Balance
from portal.answer import onward, page
from portal.format import usd
from portal.forms import Form, sent_form
from portal.pages import Pages, recharge
from portal.payments import CheckoutFailed, ProcessorUnavailable

PATH = "/dashboard/billing/credits"
QUICK_USD = (10, 20, 50, 100)
PURCHASES_SHOWN = 10
MOVEMENTS_SHOWN = 10
# What a purchase is called, and the colour of its dot.
STATES = {
    "pending": ("waiting for payment", "busy"),
    "paid": ("paid", "good"),
    "failed": ("not paid", "bad"),
    "expired": ("expired", ""),
}
# How soon the processor is asked again about an order whose buyer waits on the page.
ASKED_AGAIN_MS = 1000
ASKED_WHILE_WAITING_MS = 10_000
_TOP_UP_ID = re.compile(r"top_[0-9a-z]{26}")


@dataclass(frozen=True, slots=True)
class Purchase:
    """Show one top-up."""

    id: str
    amount_microusd: int
    word: str
    kind: str
    at_ms: int
    receipt_url: str | None
    checkout_url: str | None
    is_unclear: bool
    taken_back_microusd: int


@dataclass(frozen=True, slots=True)
class Movement:
    """Show one other change of the balance."""

    seq: int
    what: str
    reason: str
    amount: str
    balance_after_microusd: int
    at_ms: int


@dataclass(frozen=True, slots=True)
class Standing:
    """Show where the account stands: all that changes by itself while the page is open."""

    balance: Balance
    included_left: int
    included_limit: int
    renews_at_ms: int
    told: TopUp | None
    purchases: list[Purchase]
    newer: str | None
    older: str | None
    movements: list[Movement]
    movements_older: str | None
    query: str

    @property
    def digest(self) -> str:
        """Return what differs whenever anything shown does."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:32]


def register(pages: Pages) -> None:
    """Add the page."""
    blueprint, payments, settings = pages.blueprint, pages.payments, pages.settings
    highest = settings.top_up_max_usd

    async def answer(
        form: Form | None = None, *, status: int = 200, failed: bool = False, unclear: bool = False, **forms: Form
    ) -> Response:
        return await page(
            "credits/index.html", status=status, standing=await _standing(pages), form=form, failed=failed,
            unclear=unclear,
            sells=payments.processor is not None, is_test=settings.test_checkout, lowest_usd=TOP_UP_MIN_USD,
            highest_usd=highest, quick_usd=[amount for amount in QUICK_USD if amount <= highest],
            recharge=await recharge.of_account(pages), forms=forms,
            adds_tax=settings.stripe is not None and settings.stripe.tax,
        )

    recharge.add(pages, answer)

    @blueprint.get(PATH)
    async def credits() -> Response:
        await _ask_about_told(pages, ASKED_AGAIN_MS)
        return await answer()

    @blueprint.get(f"{PATH}/standing")
    async def credits_standing() -> Response:
        await _ask_about_told(pages, ASKED_WHILE_WAITING_MS)
        standing = await _standing(pages)
        if request.headers.get("hx-ptag") == standing.digest:
            return Response(b"", 304)
        response = await page("credits/_live.html", standing=standing)
        response.headers["hx-ptag"] = standing.digest
        return response

    @blueprint.post(PATH)
    async def begin_top_up() -> Response:
        if payments.processor is None:
            raise NoPage
        form = await sent_form()
        amount = form.dollars(
            "quick" if form.typed("quick") else "amount", TOP_UP_MIN_USD * MICROUSD_PER_USD,
            highest * MICROUSD_PER_USD, required=True,
        )
        if amount is None:
            return await answer(form, status=422)
        try:
            ordered = await payments.begin(
                g.session.account_id, amount, keeps_card=form.typed("keep_card") == "yes"
            )
        except CheckoutFailed:
            return await answer(form, status=502, failed=True)
        except ProcessorUnavailable:
            return await answer(status=502, unclear=True)
        except RateLimited:
            form.refuse("amount", "You have begun many top-ups in this hour. Pay one of those, or wait a little.")
            return await answer(form, status=429)
        return await onward(ordered.checkout_url or PATH)

    @blueprint.post(f"{PATH}/<top_up_id>/resume")
    async def resume_top_up(top_up_id: str) -> Response:
        try:
            ordered = await payments.resume(g.session.account_id, top_up_id)
        except CheckoutFailed:
            return await answer(status=502, failed=True)
        except ProcessorUnavailable:
            return await answer(status=502, unclear=True)
        return await onward(ordered.checkout_url or PATH)


async def _ask_about_told(pages: Pages, unless_asked_within_ms: int) -> None:
    """Ask about the order a buyer comes back from: its event may come late, or never."""
    told = await _told(pages)
    if told is not None and told.state == top_up.PENDING and told.checkout_id is not None:
        await pages.payments.ask(told.id, unless_asked_within_ms=unless_asked_within_ms)


async def _standing(pages: Pages) -> Standing:
    database, account_id, now = pages.database, g.session.account_id, clock.now_ms()
    before, after = _top_up_id("before"), _top_up_id("after")
    plan = pages.catalog().plans.get(g.session.plan)
    limit = plan.included_calls_per_month if plan else 0
    used = await included_calls.used_now(database, account_id, clock.month(now))
    found = await top_up.recent(database, account_id, limit=PURCHASES_SHOWN + 1, before=before, after=after)
    more = len(found) > PURCHASES_SHOWN
    # A page of newer ones is cut at its far end, which is its beginning.
    shown = found[-PURCHASES_SHOWN:] if after else found[:PURCHASES_SHOWN]
    moved = await ledger.movements(database, account_id, limit=MOVEMENTS_SHOWN + 1, before=_seq("movements"))
    return Standing(
        balance=await wallet.balance(database, account_id),
        included_left=max(limit - used, 0),
        included_limit=limit,
        renews_at_ms=clock.month_end_ms(now),
        told=await _told(pages),
        purchases=[_purchase(one) for one in shown],
        newer=_link(after=shown[0].id) if shown and (more if after else before) else None,
        older=_link(before=shown[-1].id) if shown and (after or more) else None,
        movements=[_movement(row) for row in moved[:MOVEMENTS_SHOWN]],
        movements_older=_link(movements=moved[-2]["seq"]) if len(moved) > MOVEMENTS_SHOWN else None,
        query=_query(),
    )


async def _told(pages: Pages) -> TopUp | None:
    """Return the order whose buyer comes back from its checkout."""
    wanted = _top_up_id("top_up")
    if wanted is None:
        return None
    try:
        return await top_up.find(pages.database, g.session.account_id, wanted)
    except NotFound:
        return None


def _purchase(one: TopUp) -> Purchase:
    word, kind = _state_of(one)
    is_open = one.state == top_up.PENDING
    return Purchase(
        id=one.id, amount_microusd=one.amount_microusd, word=word, kind=kind,
        at_ms=one.paid_at_ms or one.created_at_ms, receipt_url=one.receipt_url,
        checkout_url=one.checkout_url if is_open else None,
        is_unclear=is_open and one.checkout_url is None and not one.off_session,
        taken_back_microusd=one.refunded_microusd + one.disputed_microusd,
    )


def _state_of(one: TopUp) -> tuple[str, str]:
    """Return what a purchase is called, and the colour of its dot."""
    if one.frozen:
        return "disputed", "bad"
    if one.disputed_microusd:
        return "charged back", "bad"
    if one.refunded_microusd:
        return ("refunded", "warn") if one.refunded_microusd == one.amount_microusd else ("partly refunded", "warn")
    if one.state == top_up.PENDING and one.failure is not None:
        return "card declined, still open", "warn"
    return STATES[one.state]


def _movement(row: ledger.Row) -> Movement:
    amount = row["amount_microusd"]
    return Movement(
        seq=row["seq"], what=row["kind"].replace("_", " ").capitalize(), reason=row["reason"] or "",
        amount=usd(amount) if amount < 0 else f"+{usd(amount)}",
        balance_after_microusd=row["balance_after_microusd"], at_ms=row["created_at_ms"],
    )


def _top_up_id(name: str) -> str | None:
    text = request.args.get(name, "")
    return text if _TOP_UP_ID.fullmatch(text) else None


def _seq(name: str) -> int | None:
    text = request.args.get(name, "")
    return int(text) if re.fullmatch(r"[0-9]{1,18}", text) else None


def _query() -> str:
    """Return the query of the fragment that shows what this page does."""
    kept = {name: _top_up_id(name) for name in ("top_up", "before", "after")} | {"movements": _seq("movements")}
    return urlencode({name: value for name, value in kept.items() if value is not None})


def _link(**cursor: object) -> str:
    return f"{PATH}?{urlencode(cursor)}"
