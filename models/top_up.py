"""Top-ups: credit bought. The order is a row first; what was paid for it is credited exactly once.

An order is `pending`, then `paid`, `failed` or `expired`. What a processor took must be credited whatever
was believed before, so an order that seemed failed or expired can still become paid; nothing turns a paid
one back. The transition is one guarded UPDATE: one row changed means the credit is ours to give, none means
somebody has given it.
"""

from __future__ import annotations

from dataclasses import dataclass

from models import ids, rate_limit, wallet
from models.clock import now_ms
from models.database import Database, Row, Script
from models.errors import DomainError, NotFound
from models.payment_card import Card
from models.plan import PLAN_OF_NEW_ACCOUNTS, PLAN_OF_PAYING_ACCOUNTS

KIND = "top_up"
CURRENCY = "usd"
PENDING, PAID, FAILED, EXPIRED = "pending", "paid", "failed", "expired"
# A hosted checkout is open no longer than this.
LIFE_MS = 24 * 3600 * 1000
ORDERS_PER_HOUR = 30
EXPIRED_AT_ONCE = 500
_HOUR_MS = 3600 * 1000
_AFTER_ALL = ids.first_id_at("top", (1 << 48) - 1)
_COLUMNS = (
    "id, account_id, amount_microusd, processor, state, checkout_id, checkout_url, receipt_url, created_at_ms,"
    " paid_at_ms, total_microusd, payment_id, failure, keeps_card, off_session, told_refunded_microusd,"
    " refunded_microusd, disputed_microusd, frozen, reversals"
)


class WrongPayment(DomainError):
    """Report a payment that is not what was ordered: another amount, another currency."""


@dataclass(frozen=True, slots=True)
class TopUp:
    """Be one order. The checkout is where its buyer pays."""

    id: str
    account_id: str
    amount_microusd: int
    processor: str
    state: str
    checkout_id: str | None
    checkout_url: str | None
    receipt_url: str | None
    created_at_ms: int
    paid_at_ms: int | None
    total_microusd: int | None
    payment_id: str | None
    failure: str | None
    keeps_card: int
    off_session: int
    told_refunded_microusd: int
    refunded_microusd: int
    disputed_microusd: int
    frozen: int
    reversals: int


@dataclass(frozen=True, slots=True)
class Payment:
    """Say what a processor took for which checkout. `top_up_id` is the order, where the processor knows it.

    `amount_microusd` is what was paid for the credit, `total_microusd` the same with tax; `payment_id` is what
    refunds and disputes will speak of; `card` is there when its owner agreed to have it kept. A payment that
    was made off session has no checkout.
    """

    processor: str
    checkout_id: str | None
    amount_microusd: int
    currency: str
    receipt_url: str | None = None
    top_up_id: str | None = None
    total_microusd: int | None = None
    payment_id: str | None = None
    card: Card | None = None


def order(
    account_id: str, amount_microusd: int, processor: str, *, keeps_card: bool = False, off_session: bool = False
) -> Script[TopUp]:
    """Write an order down, before anybody is asked for money. Raises RateLimited.

    `keeps_card` is its buyer's consent to have the card kept; `off_session` says that nobody is there to pay:
    it is charged to a card kept before.
    """
    now = now_ms()
    yield from rate_limit.count(
        rate_limit.Limit(f"top-ups:{account_id}", ORDERS_PER_HOUR), now, window_ms=_HOUR_MS
    )
    rows = yield (
        "INSERT INTO top_ups (id, account_id, amount_microusd, processor, state, created_at_ms, keeps_card,"
        f" off_session, asked_at_ms) VALUES (?, ?, ?, ?, '{PENDING}', ?, ?, ?, ?) RETURNING {_COLUMNS}",
        (
            ids.new_id("top"), account_id, amount_microusd, processor, now, int(keeps_card), int(off_session), now,
        ),
    )
    return _top_up(rows[0])


def begun(top_up_id: str, checkout_id: str, checkout_url: str) -> Script[None]:
    """Note where an order is paid."""
    yield (
        "UPDATE top_ups SET checkout_id = ?, checkout_url = ? WHERE id = ? AND checkout_id IS NULL",
        (checkout_id, checkout_url, top_up_id),
    )


def pay(payment: Payment) -> Script[bool]:
    """Credit what was paid; return whether it was this time. Repeat it as often as you like.

    Raises NotFound for an unknown checkout, WrongPayment for what was not ordered.
    """
    found = yield from _ordered(payment)
    if (payment.amount_microusd, payment.currency) != (found.amount_microusd, CURRENCY):
        raise WrongPayment(
            f"{found.id} is for {found.amount_microusd} {CURRENCY}, paid were"
            f" {payment.amount_microusd} {payment.currency}"
        )
    now = now_ms()
    rows = yield (
        f"UPDATE top_ups SET state = '{PAID}', paid_at_ms = ?, checkout_id = COALESCE(checkout_id, ?),"
        f" receipt_url = ? WHERE id = ? AND state IN ('{PENDING}', '{FAILED}', '{EXPIRED}')"
        " RETURNING account_id, amount_microusd",
        (now, payment.checkout_id, payment.receipt_url, found.id),
    )
    if not rows:
        return False
    account_id, amount = rows[0]
    yield from wallet.credit(account_id, amount, KIND, found.id, f"payments:{payment.processor}", None, now)
    # The version grows, so that callers kept in memory learn of their new plan.
    yield (
        "UPDATE accounts SET plan = ?, version = version + 1 WHERE id = ? AND plan = ?",
        (PLAN_OF_PAYING_ACCOUNTS, account_id, PLAN_OF_NEW_ACCOUNTS),
    )
    return True


def fail(top_up_id: str) -> Script[bool]:
    """Note that an order was not paid; return whether it was still open."""
    rows = yield (
        f"UPDATE top_ups SET state = '{FAILED}' WHERE id = ? AND state = '{PENDING}' RETURNING id", (top_up_id,)
    )
    return bool(rows)


def expire(top_up_id: str) -> Script[bool]:
    """Note that an order's checkout is closed; return whether it was still open."""
    rows = yield (
        f"UPDATE top_ups SET state = '{EXPIRED}' WHERE id = ? AND state = '{PENDING}' RETURNING id", (top_up_id,)
    )
    return bool(rows)


def expire_old(at_ms: int) -> Script[bool]:
    """Expire orders that nobody paid in time, a batch of them; return whether there may be more."""
    rows = yield (
        f"UPDATE top_ups SET state = '{EXPIRED}' WHERE state = '{PENDING}' AND id IN"
        f" (SELECT id FROM top_ups WHERE state = '{PENDING}' AND id < ? LIMIT ?) RETURNING id",
        (ids.first_id_at("top", at_ms - LIFE_MS), EXPIRED_AT_ONCE),
    )
    return len(rows) == EXPIRED_AT_ONCE


async def find(database: Database, account_id: str, top_up_id: str) -> TopUp:
    """Return one order of an account. Raises NotFound."""
    rows = await database.fetch(
        f"SELECT {_COLUMNS} FROM top_ups WHERE id = ? AND account_id = ?", (top_up_id, account_id)
    )
    if not rows:
        raise NotFound(f"there is no top-up {top_up_id}")
    return _top_up(rows[0])


async def by_checkout(database: Database, account_id: str, processor: str, checkout_id: str) -> TopUp:
    """Return the order of an account that is paid at a checkout. Raises NotFound."""
    rows = await database.fetch(
        f"SELECT {_COLUMNS} FROM top_ups WHERE processor = ? AND checkout_id = ? AND account_id = ?",
        (processor, checkout_id, account_id),
    )
    if not rows:
        raise NotFound(f"there is no checkout {checkout_id}")
    return _top_up(rows[0])


async def recent(
    database: Database, account_id: str, *, limit: int, before: str | None = None, after: str | None = None
) -> list[TopUp]:
    """Return a page of an account's orders, newest first: those before an id, or those after one."""
    if after is not None:
        rows = await database.fetch(
            f"SELECT {_COLUMNS} FROM top_ups WHERE account_id = ? AND id > ? ORDER BY id LIMIT ?",
            (account_id, after, limit),
        )
        return [_top_up(row) for row in reversed(rows)]
    rows = await database.fetch(
        f"SELECT {_COLUMNS} FROM top_ups WHERE account_id = ? AND id < ? ORDER BY id DESC LIMIT ?",
        (account_id, before or _AFTER_ALL, limit),
    )
    return [_top_up(row) for row in rows]


def _ordered(payment: Payment) -> Script[TopUp]:
    """Return the order a payment is for. Its own id comes first: a crash may have lost the checkout's."""
    if payment.top_up_id is not None:
        rows = yield (
            f"SELECT {_COLUMNS} FROM top_ups WHERE id = ? AND processor = ?", (payment.top_up_id, payment.processor)
        )
    else:
        rows = yield (
            f"SELECT {_COLUMNS} FROM top_ups WHERE processor = ? AND checkout_id = ?",
            (payment.processor, payment.checkout_id),
        )
    if not rows:
        raise NotFound(f"there is no checkout {payment.checkout_id}")
    return _top_up(rows[0])


def _top_up(row: Row) -> TopUp:
    return TopUp(*row)
