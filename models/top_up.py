"""Top-ups: credit bought. The order is a row first; what was paid for it is credited exactly once.

An order is `pending`, then `paid`, `failed` or `expired`. What a processor took must be credited whatever
was believed before, so an order that seemed failed or expired can still become paid; nothing turns a paid
one back. The transition is one guarded UPDATE: one row changed means the credit is ours to give, none means
somebody has given it.

What is taken back later, by refunds and disputes, is kept as it was told and then mirrored in the wallet.
Scripts that bring news of a payment run behind the gate of its `payment_id`: news of a dispute and news of
the payment must not miss each other.
"""

from __future__ import annotations

from dataclasses import dataclass

from models import dispute, ids, ledger, payment_card, rate_limit, wallet
from models.clock import now_ms
from models.database import Database, Row, Script
from models.dispute import Dispute
from models.errors import DomainError, NotFound
from models.payment_card import Card
from models.plan import PLAN_OF_NEW_ACCOUNTS, PLAN_OF_PAYING_ACCOUNTS

KIND = ledger.TOP_UP
CURRENCY = "usd"
PENDING, PAID, FAILED, EXPIRED = "pending", "paid", "failed", "expired"
# A hosted checkout is open no longer than this.
LIFE_MS = 24 * 3600 * 1000
# How often a processor is asked about an order that nobody has paid.
ASKED_EVERY_MS = 5 * 60 * 1000
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
    account_id: str | None = None


@dataclass(frozen=True, slots=True)
class Reversal:
    """Say how much of an order's payment a processor has given back in all, tax included."""

    processor: str
    top_up_id: str
    payment_id: str
    total_microusd: int
    refunded_microusd: int
    currency: str


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


def restore(payment: Payment) -> Script[bool]:
    """Write an order down again as its processor remembers it; return whether that could be done.

    Books that were restored from a backup lack the orders since; what was paid is owed all the same. Only for
    what the processor itself says of a checkout that was begun here.
    """
    if payment.top_up_id is None or payment.account_id is None or payment.currency != CURRENCY:
        return False
    account = yield ("SELECT 1 FROM wallets WHERE account_id = ?", (payment.account_id,))
    if payment.amount_microusd <= 0 or not account:
        return False
    rows = yield (
        "INSERT INTO top_ups (id, account_id, amount_microusd, processor, state, created_at_ms, off_session,"
        f" asked_at_ms) VALUES (?, ?, ?, ?, '{PENDING}', ?, ?, ?) ON CONFLICT (id) DO NOTHING RETURNING id",
        (
            payment.top_up_id, payment.account_id, payment.amount_microusd, payment.processor,
            ids.made_at_ms(payment.top_up_id), int(payment.checkout_id is None), now_ms(),
        ),
    )
    return bool(rows)


def pay(payment: Payment) -> Script[bool]:
    """Credit what was paid; return whether it was this time. Repeat it as often as you like.

    Raises NotFound for an unknown checkout, WrongPayment for what was not ordered.
    """
    found = yield from _ordered(payment)
    _require_as_ordered(found, payment)
    now = now_ms()
    rows = yield (
        f"UPDATE top_ups SET state = '{PAID}', paid_at_ms = ?, checkout_id = COALESCE(checkout_id, ?),"
        " receipt_url = COALESCE(?, receipt_url), total_microusd = ?, payment_id = COALESCE(payment_id, ?),"
        f" failure = NULL WHERE id = ? AND state IN ('{PENDING}', '{FAILED}', '{EXPIRED}')"
        " RETURNING account_id, amount_microusd",
        (
            now, payment.checkout_id, payment.receipt_url, payment.total_microusd or payment.amount_microusd,
            payment.payment_id, found.id,
        ),
    )
    if rows:
        account_id, amount = rows[0]
        # The version grows, so that callers kept in memory learn of their new plan. The account comes before its
        # wallet, as where an account is closed.
        yield (
            "UPDATE accounts SET plan = ?, version = version + 1 WHERE id = ? AND plan = ?",
            (PLAN_OF_PAYING_ACCOUNTS, account_id, PLAN_OF_NEW_ACCOUNTS),
        )
        yield from wallet.credit(account_id, amount, KIND, found.id, _source(found), None, now)
        # What was refunded or disputed may have been news before the payment was.
        yield from mirror(found.id)
    elif payment.receipt_url is not None and found.receipt_url is None:
        yield ("UPDATE top_ups SET receipt_url = ? WHERE id = ?", (payment.receipt_url, found.id))
    if payment.card is not None:
        yield from _keep_card(found, payment.card)
    return bool(rows)


def refunded(told: Reversal, *, instead_of_microusd: int | None = None) -> Script[None]:
    """Take the news of how much of a payment was given back in all, as often as it comes, in any order.

    The figure only grows, unless `instead_of_microusd` is what it was when the processor was asked anew:
    then it becomes what the processor said. Raises NotFound, WrongPayment.
    """
    found = yield from locked(told.top_up_id)
    if found is None or found.processor != told.processor:
        raise NotFound(f"there is no top-up {told.top_up_id}")
    if told.currency != CURRENCY or told.total_microusd < found.amount_microusd or not (
        0 <= told.refunded_microusd <= told.total_microusd
    ):
        raise WrongPayment(f"{found.id}: {told.refunded_microusd} of {told.total_microusd} {told.currency} back")
    if found.payment_id not in (None, told.payment_id) or found.total_microusd not in (None, told.total_microusd):
        raise WrongPayment(f"{found.id} was paid by {found.payment_id}, not by {told.payment_id}")
    grows = told.refunded_microusd > found.told_refunded_microusd
    if grows or found.told_refunded_microusd == instead_of_microusd:
        yield (
            "UPDATE top_ups SET told_refunded_microusd = ?, payment_id = ?, total_microusd = ? WHERE id = ?",
            (told.refunded_microusd, told.payment_id, told.total_microusd, found.id),
        )
    yield from mirror(found.id)


def disputed(told: Dispute) -> Script[TopUp | None]:
    """Take the news of a dispute, as often as it comes, in any order; return the order it is about.

    None is one that nobody paid yet, as far as is known here, or an order of somebody else's.
    """
    yield from dispute.note(told)
    rows = yield (
        "SELECT id FROM top_ups WHERE processor = ? AND payment_id = ?", (told.processor, told.payment_id)
    )
    if not rows:
        return None
    yield from mirror(rows[0][0])
    return (yield from locked(rows[0][0]))


def mirror(top_up_id: str) -> Script[None]:
    """Make the wallet agree with what is refunded and disputed of an order.

    Only a paid order has anything to take back, and never more than it gave. What is told is compared with
    what the wallet has seen, under the order's lock, so that no order of news and no repetition matters.
    """
    found = yield from locked(top_up_id)
    if found is None or found.state != PAID:
        return
    disputes = []
    if found.payment_id is not None:
        disputes = yield from dispute.of_payment(found.processor, found.payment_id)
    rows = yield (
        "SELECT COALESCE(SUM(amount_microusd), 0) FROM refunds WHERE top_up_id = ? AND state <> 'failed'",
        (found.id,),
    )
    returned = min(max(_credit_of(found, found.told_refunded_microusd), int(rows[0][0])), found.amount_microusd)
    held_back = sum(one.total_microusd for one in disputes if one.state in (dispute.OPEN, dispute.LOST))
    held_back = min(_credit_of(found, held_back), found.amount_microusd - returned)
    frozen = int(any(one.state == dispute.OPEN for one in disputes))
    changes = [
        (kind, amount) for kind, amount in (
            (ledger.REFUND, found.refunded_microusd - returned),
            (ledger.DISPUTE, found.disputed_microusd - held_back),
        ) if amount
    ]
    if not changes and frozen == found.frozen:
        return
    yield (
        "UPDATE top_ups SET refunded_microusd = ?, disputed_microusd = ?, frozen = ?, reversals = ? WHERE id = ?",
        (returned, held_back, frozen, found.reversals + len(changes), found.id),
    )
    if frozen != found.frozen:
        yield from wallet.freeze(found.account_id, frozen - found.frozen)
    now = now_ms()
    for number, (kind, amount) in enumerate(changes, found.reversals + 1):
        reference = f"{found.id}:{number}"
        yield from wallet.reverse(found.account_id, amount, kind, reference, _source(found), found.id, now)


def locked(top_up_id: str) -> Script[TopUp | None]:
    """Return an order that nobody else can change before the transaction ends."""
    rows = yield (
        f"UPDATE top_ups SET reversals = reversals WHERE id = ? RETURNING {_COLUMNS}", (top_up_id,)
    )
    return _top_up(rows[0]) if rows else None


def fail(top_up_id: str, failure: str | None = None) -> Script[bool]:
    """Note that an order was not paid, and why; return whether it was still open."""
    rows = yield (
        f"UPDATE top_ups SET state = '{FAILED}', failure = ? WHERE id = ? AND state = '{PENDING}' RETURNING id",
        (failure, top_up_id),
    )
    return bool(rows)


def declined(top_up_id: str, failure: str | None) -> Script[None]:
    """Note that a card was declined at an order's checkout, where its buyer may try another."""
    yield (f"UPDATE top_ups SET failure = ? WHERE id = ? AND state = '{PENDING}'", (failure, top_up_id))


def claim(processor: str, at_ms: int, limit: int) -> Script[list[TopUp]]:
    """Return orders to ask the processor about, each to one caller in a while.

    Those nobody has paid yet, and the paid ones whose receipt is missing, ever less often.
    """
    rows = yield (
        "UPDATE top_ups SET asked_at_ms = ? + CASE WHEN state = 'paid' THEN ? - created_at_ms ELSE 0 END"
        " WHERE id IN (SELECT id FROM top_ups WHERE (state = 'pending' OR (state = 'paid' AND receipt_url IS NULL))"
        f" AND asked_at_ms < ? AND processor = ? AND off_session = 0 ORDER BY asked_at_ms LIMIT ?)"
        f" AND asked_at_ms < ? RETURNING {_COLUMNS}",
        (at_ms, at_ms, at_ms - ASKED_EVERY_MS, processor, limit, at_ms - ASKED_EVERY_MS),
    )
    return [_top_up(row) for row in rows]


def claim_one(top_up_id: str, at_ms: int, asked_before_ms: int) -> Script[TopUp | None]:
    """Return an open order to ask the processor about, unless somebody asked after a moment.

    A buyer may come back within a second of ordering: what nobody has asked about yet is always returned.
    """
    rows = yield (
        f"UPDATE top_ups SET asked_at_ms = ? WHERE id = ? AND state = '{PENDING}'"
        f" AND (asked_at_ms < ? OR asked_at_ms = created_at_ms) RETURNING {_COLUMNS}",
        (at_ms, top_up_id, asked_before_ms),
    )
    return _top_up(rows[0]) if rows else None


def expire(top_up_id: str) -> Script[bool]:
    """Note that an order's checkout is closed; return whether it was still open."""
    rows = yield (
        f"UPDATE top_ups SET state = '{EXPIRED}' WHERE id = ? AND state = '{PENDING}' RETURNING id", (top_up_id,)
    )
    return bool(rows)


def expire_old(at_ms: int) -> Script[bool]:
    """Expire orders that nobody paid in time, a batch of them; return whether there may be more."""
    rows = yield (
        # Of what was begun elsewhere, its processor says when it is over.
        f"UPDATE top_ups SET state = '{EXPIRED}' WHERE state = '{PENDING}' AND id IN"
        f" (SELECT id FROM top_ups WHERE state = '{PENDING}' AND id < ? AND off_session = 0"
        " AND (checkout_id IS NULL OR processor = 'test') LIMIT ?) RETURNING id",
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


async def by_id(database: Database, top_up_id: str) -> TopUp | None:
    """Return an order, whoever made it: only for what comes from its processor."""
    rows = await database.fetch(f"SELECT {_COLUMNS} FROM top_ups WHERE id = ?", (top_up_id,))
    return _top_up(rows[0]) if rows else None


async def by_payment(database: Database, processor: str, payment_id: str) -> TopUp | None:
    """Return the order a payment was for, whoever made it: only for what comes from its processor."""
    rows = await database.fetch(
        f"SELECT {_COLUMNS} FROM top_ups WHERE processor = ? AND payment_id = ?", (processor, payment_id)
    )
    return _top_up(rows[0]) if rows else None


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
        found = yield from locked(payment.top_up_id)
        if found is not None and found.processor == payment.processor:
            return found
    else:
        rows = yield (
            "SELECT id FROM top_ups WHERE processor = ? AND checkout_id = ?",
            (payment.processor, payment.checkout_id),
        )
        if rows:
            return (yield from locked(rows[0][0]))
    raise NotFound(f"there is no checkout {payment.checkout_id}")


def _require_as_ordered(found: TopUp, payment: Payment) -> None:
    """Raise WrongPayment unless a payment is the one its order asked for."""
    if (payment.amount_microusd, payment.currency) != (found.amount_microusd, CURRENCY):
        raise WrongPayment(
            f"{found.id} is for {found.amount_microusd} {CURRENCY}, paid were"
            f" {payment.amount_microusd} {payment.currency}"
        )
    if payment.total_microusd is not None and payment.total_microusd < payment.amount_microusd:
        raise WrongPayment(f"{found.id}: {payment.total_microusd} is less than its price")
    if payment.account_id not in (None, found.account_id):
        raise WrongPayment(f"{found.id} is not an order of {payment.account_id}")
    for name in ("checkout_id", "payment_id", "total_microusd"):
        known, told = getattr(found, name), getattr(payment, name)
        if known is not None and told is not None and known != told:
            raise WrongPayment(f"{found.id} has the {name} {known}, not {told}")


def _keep_card(found: TopUp, card: Card) -> Script[None]:
    """Keep the card an order was paid with, once and by consent: who forgets it later has forgotten it."""
    rows = yield (
        "UPDATE top_ups SET keeps_card = 2 WHERE id = ? AND keeps_card = 1 RETURNING account_id", (found.id,)
    )
    if rows:
        yield from payment_card.keep(found.account_id, found.processor, card)


def _credit_of(found: TopUp, total: int) -> int:
    """Return the credit that a part of what was paid stands for."""
    return total * found.amount_microusd // (found.total_microusd or found.amount_microusd)


def _source(found: TopUp) -> str:
    return f"payments:{found.processor}"


def _top_up(row: Row) -> TopUp:
    return TopUp(*row)
