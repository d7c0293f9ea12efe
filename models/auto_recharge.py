"""Auto-recharge: credit bought with a kept card when the balance falls below a threshold.

The wallet's table marks an account as due (models/migrations/m0004_recharge.py) in the statement that takes its
balance below the threshold. Whoever finds it due looks once more, under the lock of the account's row here: is
it on, is the balance still low, does the month's ceiling leave room, is no charge open. A balance that is low
because credit was given back or asked back buys nothing until calls use credit again. Then the order of a top-up
and the charge of it are written down together, before anybody is asked for money. An account has one open charge
at a time, which an index holds too; it is repeated by the order's own id until its outcome is known.

Locks are taken in the order: order, charge, wallet, account's row. `begin` takes the account's row first, but then
locks nothing that was there before it.
"""

from __future__ import annotations

from dataclasses import dataclass

from models import clock, ledger, outbox, payment_card, top_up
from models.account import ACTIVE
from models.clock import now_ms
from models.database import Database, Script
from models.errors import DomainError
from models.payment_card import Card
from models.top_up import TopUp

DECLINED, AUTHENTICATION, UNCLEAR, FORGOTTEN = "declined", "authentication", "failed", "forgotten"
TAKEN_AT_ONCE = 20
# Longer than a charge may take, so that nobody else asks meanwhile.
CLAIMED_MS = 60 * 1000
HELD_UP_MS = 3600 * 1000


class NoCard(DomainError):
    """Report that there is no card to charge."""


class ChargeOpen(DomainError):
    """Report that another charge of the account is open."""


@dataclass(frozen=True, slots=True)
class AutoRecharge:
    """Be what an account has chosen. `off_reason` says why we turned it off, if we did."""

    account_id: str
    is_on: bool
    below_microusd: int
    amount_microusd: int
    ceiling_microusd: int
    off_reason: str | None
    changed_at_ms: int


@dataclass(frozen=True, slots=True)
class AtCeiling:
    """Be a month that has no room for another charge, as its account is to be told.

    `changed_at_ms` is when what the account has chosen was chosen.
    """

    month: str
    ends_at_ms: int
    balance_microusd: int
    amount_microusd: int
    charged_microusd: int
    ceiling_microusd: int
    changed_at_ms: int


@dataclass(frozen=True, slots=True)
class Charge:
    """Be an open charge that is ours to make. `is_wanted` is false once its account has turned it off."""

    top_up_id: str
    account_id: str
    tries: int
    created_at_ms: int
    card: Card
    is_wanted: bool


async def find(database: Database, account_id: str) -> AutoRecharge | None:
    """Return what an account has chosen."""
    rows = await database.fetch(
        "SELECT account_id, is_on, below_microusd, amount_microusd, ceiling_microusd, off_reason, changed_at_ms"
        " FROM auto_recharges WHERE account_id = ?",
        (account_id,),
    )
    if not rows:
        return None
    account, is_on, *rest = rows[0]
    return AutoRecharge(account, bool(is_on), *rest)


async def charged_in(database: Database, account_id: str, month: str) -> int:
    """Return what a month's charges come to, those included whose outcome is not known yet."""
    return int((await database.fetch(*_charged_in(account_id, month)))[0][0])


async def has_open(database: Database, account_id: str) -> bool:
    """Return whether a charge is under way."""
    return bool(await database.fetch(*_open_of(account_id)))


async def waits_for_use(database: Database, account_id: str) -> bool:
    """Return whether nothing is bought because the last thing that happened was that credit was taken back."""
    return bool(await database.fetch(*_taken_back(account_id)))


def turn_on(account_id: str, processor: str, below: int, amount: int, ceiling: int) -> Script[None]:
    """Turn it on, or change it. Raises NoCard."""
    now = now_ms()
    yield ("UPDATE wallets SET recharge_below_microusd = ? WHERE account_id = ?", (below, account_id))
    rows = yield (
        "INSERT INTO auto_recharges (account_id, is_on, below_microusd, amount_microusd, ceiling_microusd,"
        " due_at_ms, changed_at_ms)"
        " SELECT account_id, 1, CAST(? AS BIGINT), CAST(? AS BIGINT), CAST(? AS BIGINT), 0,"
        " CAST(? AS BIGINT) FROM payment_cards"
        " WHERE account_id = ? AND processor = ? AND payment_method_id IS NOT NULL"
        " ON CONFLICT (account_id) DO UPDATE SET is_on = 1, below_microusd = excluded.below_microusd,"
        " amount_microusd = excluded.amount_microusd, ceiling_microusd = excluded.ceiling_microusd,"
        " off_reason = NULL, due_at_ms = 0, told_month = '', changed_at_ms = excluded.changed_at_ms"
        " RETURNING account_id",
        (below, amount, ceiling, now, account_id, processor),
    )
    if not rows:
        raise NoCard("there is no card to charge")


def turn_off(account_id: str, reason: str | None = None) -> Script[bool]:
    """Turn it off, for a reason of ours or because its owner wants it; return whether it was on."""
    yield ("UPDATE wallets SET recharge_below_microusd = 0 WHERE account_id = ?", (account_id,))
    rows = yield (
        "UPDATE auto_recharges SET is_on = 0, due_at_ms = NULL, off_reason = ?, changed_at_ms = ?"
        " WHERE account_id = ? AND is_on = 1 RETURNING account_id",
        (reason, now_ms(), account_id),
    )
    return bool(rows)


def forget_card(account_id: str, processor: str) -> Script[None]:
    """Keep no card any more, and so turn auto-recharge off."""
    yield from turn_off(account_id, FORGOTTEN)
    yield from payment_card.forget(account_id, processor)


async def due(database: Database) -> list[str]:
    """Return accounts to look at: their balance fell, a charge ended, a month began."""
    rows = await database.fetch(
        "SELECT account_id FROM auto_recharges WHERE due_at_ms <= ? ORDER BY due_at_ms LIMIT ?",
        (now_ms(), TAKEN_AT_ONCE),
    )
    return [account_id for (account_id,) in rows]


def begin(account_id: str, processor: str) -> Script[TopUp | AtCeiling | None]:
    """Order a top-up for an account that is due, if it still needs one and may have one.

    Returns AtCeiling when its month has no room and it was not told so; it stays due until it is. Raises
    RateLimited after too many orders, and ChargeOpen.
    """
    now = now_ms()
    # This changes nothing but keeps everybody else away from the account's row until the end.
    rows = yield (
        "UPDATE auto_recharges SET due_at_ms = due_at_ms WHERE account_id = ? AND is_on = 1 AND due_at_ms <= ?"
        " RETURNING below_microusd, amount_microusd, ceiling_microusd, told_month, changed_at_ms",
        (account_id, now),
    )
    if not rows:
        return None
    below, amount, ceiling, told_month, changed_at_ms = rows[0]
    wallets = yield ("SELECT posted_microusd, disputed FROM wallets WHERE account_id = ?", (account_id,))
    posted, disputed = wallets[0]
    open_now = yield _open_of(account_id)
    if posted >= below or open_now:
        # The next fall makes it due again, and so does the end of the charge.
        yield from put_off(account_id, None)
        return None
    month, ends_at_ms = clock.month(now), clock.month_end_ms(now)
    charged = int((yield _charged_in(account_id, month))[0][0])
    if charged + amount > ceiling:
        if told_month != month:
            return AtCeiling(month, ends_at_ms, posted, amount, charged, ceiling, changed_at_ms)
        yield from put_off(account_id, ends_at_ms)
        return None
    cards = yield (
        "SELECT customer_id, payment_method_id, brand, last4 FROM payment_cards WHERE account_id = ?"
        " AND processor = ? AND payment_method_id IS NOT NULL",
        (account_id, processor),
    )
    taken_back = yield _taken_back(account_id)
    if disputed or not cards or taken_back:
        # More money into a frozen wallet would help nobody, and what was just given back is not to be taken again.
        yield from put_off(account_id, now + HELD_UP_MS)
        return None
    ordered = yield from top_up.order(account_id, amount, processor, off_session=True)
    mine = yield (
        "INSERT INTO recharges (top_up_id, account_id, month, state, customer_id, payment_method_id, brand, last4,"
        " created_at_ms) VALUES (?, ?, ?, 'open', ?, ?, ?, ?, ?)"
        " ON CONFLICT (account_id) WHERE state = 'open' DO NOTHING RETURNING top_up_id",
        (ordered.id, account_id, month, *cards[0], now),
    )
    if not mine:
        raise ChargeOpen(f"a charge of {account_id} is open")
    yield from put_off(account_id, None)
    return ordered


def tell_ceiling(account_id: str, reached: AtCeiling, letter: outbox.Letter) -> Script[bool]:
    """Wait for the month's end and tell the account so, once; return whether it was news.

    Nothing is done once its owner has chosen anew: there may be room again.
    """
    rows = yield (
        "UPDATE auto_recharges SET told_month = ?, due_at_ms = ? WHERE account_id = ? AND is_on = 1"
        " AND told_month <> ? AND changed_at_ms = ? RETURNING account_id",
        (reached.month, reached.ends_at_ms, account_id, reached.month, reached.changed_at_ms),
    )
    if rows:
        yield from outbox.put(letter)
    return bool(rows)


def put_off(account_id: str, until_ms: int | None) -> Script[None]:
    """Look at an account again at a time; None: when something happens."""
    yield ("UPDATE auto_recharges SET due_at_ms = ? WHERE account_id = ? AND is_on = 1", (until_ms, account_id))


async def waiting(database: Database) -> list[str]:
    """Return the orders of open charges that nobody is making at this moment."""
    rows = await database.fetch(
        "SELECT top_up_id FROM recharges WHERE state = 'open' AND claimed_until_ms <= ? ORDER BY claimed_until_ms"
        " LIMIT ?",
        (now_ms(), TAKEN_AT_ONCE),
    )
    return [top_up_id for (top_up_id,) in rows]


def claim(top_up_id: str) -> Script[Charge | None]:
    """Take an open charge for a minute; None when somebody else has it, or when it has ended."""
    now = now_ms()
    rows = yield (
        "UPDATE recharges SET claimed_until_ms = ?, tries = tries + 1 WHERE top_up_id = ? AND state = 'open'"
        " AND claimed_until_ms <= ? RETURNING account_id, tries, created_at_ms, customer_id, payment_method_id,"
        " brand, last4",
        (now + CLAIMED_MS, top_up_id, now),
    )
    if not rows:
        return None
    account_id, tries, created_at_ms, *card = rows[0]
    wanted = yield ("SELECT 1 FROM auto_recharges WHERE account_id = ? AND is_on = 1", (account_id,))
    return Charge(top_up_id, account_id, tries, created_at_ms, Card(*card), bool(wanted))


def try_later(top_up_id: str, wait_ms: int) -> Script[None]:
    """Give an open charge back, to be repeated after a while."""
    yield (
        "UPDATE recharges SET claimed_until_ms = ? WHERE top_up_id = ? AND state = 'open'",
        (now_ms() + wait_ms, top_up_id),
    )


def paid(top_up_id: str, letter: outbox.Letter) -> Script[bool]:
    """Note that a charge was paid and credited, and tell its account; return whether that was news."""
    rows = yield (
        "UPDATE recharges SET state = 'paid' WHERE top_up_id = ? AND state = 'open' RETURNING account_id",
        (top_up_id,),
    )
    if rows:
        # It may not have been enough.
        yield from put_off(rows[0][0], 0)
        active = yield ("SELECT 1 FROM accounts WHERE id = ? AND state = ?", (rows[0][0], ACTIVE))
        if active:
            yield from outbox.put(letter)
    return bool(rows)


def failed(top_up_id: str, reason: str, letter: outbox.Letter) -> Script[bool]:
    """Note that a charge was not paid, turn auto-recharge off and say so; return whether that was news.

    Nothing is done when the order has been paid meanwhile.
    """
    yield from top_up.fail(top_up_id)
    orders = yield ("SELECT state FROM top_ups WHERE id = ?", (top_up_id,))
    if orders and orders[0][0] not in (top_up.FAILED, top_up.EXPIRED):
        return False
    rows = yield (
        "UPDATE recharges SET state = 'failed' WHERE top_up_id = ? AND state = 'open' RETURNING account_id",
        (top_up_id,),
    )
    if not rows:
        return False
    was_on = yield from turn_off(rows[0][0], reason)
    if was_on:
        yield from outbox.put(letter)
    return was_on


def _open_of(account_id: str) -> tuple[str, tuple[str]]:
    return ("SELECT 1 FROM recharges WHERE account_id = ? AND state = 'open'", (account_id,))


def _taken_back(account_id: str) -> tuple[str, tuple[str]]:
    # By a refund or a dispute, and neither used anything since nor asked for it anew.
    return (
        "SELECT 1 FROM wallets w JOIN auto_recharges a ON a.account_id = w.account_id"
        " JOIN ledger l ON l.account_id = w.account_id AND l.seq = w.seq WHERE w.account_id = ? AND a.is_on = 1"
        " AND w.posted_microusd < a.below_microusd AND l.amount_microusd < 0"
        f" AND l.kind <> '{ledger.USAGE}' AND l.created_at_ms >= a.changed_at_ms",
        (account_id,),
    )


def _charged_in(account_id: str, month: str) -> tuple[str, tuple[str, str]]:
    # The orders themselves say what became of them, whoever learned of it.
    return (
        "SELECT COALESCE(SUM(t.amount_microusd), 0) AS charged FROM recharges r"
        " JOIN top_ups t ON t.id = r.top_up_id WHERE r.account_id = ? AND r.month = ?"
        " AND t.state NOT IN ('failed', 'expired')",
        (account_id, month),
    )
