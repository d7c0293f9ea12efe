"""Refunds asked for by the operator: a row before any money goes back, and out of the wallet with that row.

So nobody can spend what is on its way back. Should the processor refuse, the wallet has it again.
"""

from __future__ import annotations

from dataclasses import dataclass

from models import ids, top_up, wallet
from models.clock import now_ms
from models.database import Database, Row, Script
from models.errors import DomainError, NotFound
from models.money import MICROUSD_PER_CENT
from models.top_up import TopUp

PENDING, DONE, FAILED = "pending", "done", "failed"
_COLUMNS = "id, top_up_id, account_id, amount_microusd, total_microusd, state, processor_refund_id, created_at_ms"


class NotRefundable(DomainError):
    """Report a refund that may not be, in a sentence for whoever asked for it."""


@dataclass(frozen=True, slots=True)
class Refund:
    """Be one refund. `total_microusd` is what goes back to the buyer, tax included."""

    id: str
    top_up_id: str
    account_id: str
    amount_microusd: int
    total_microusd: int
    state: str
    processor_refund_id: str | None
    created_at_ms: int


def ask(
    top_up_id: str, amount_microusd: int | None, *, processor: str, forced: bool
) -> Script[tuple[Refund, TopUp]]:
    """Write a refund down and take its amount out of the wallet; without an amount, all that can be.

    Raises NotFound, NotRefundable. Unless forced, no more than the wallet has unspent.
    """
    found = yield from top_up.locked(top_up_id)
    if found is None:
        raise NotFound(f"there is no top-up {top_up_id}")
    if found.processor != processor:
        raise NotRefundable(f"{top_up_id} was paid by {found.processor}, and here is {processor}")
    if found.state != top_up.PAID or found.payment_id is None:
        raise NotRefundable(f"{top_up_id} is not paid, or was paid before payments could be refunded here")
    left = found.amount_microusd - found.refunded_microusd - found.disputed_microusd
    yield from wallet.lock(found.account_id)
    unspent = (yield from wallet.look(found.account_id)).available
    highest = left if forced else min(left, unspent)
    highest -= highest % MICROUSD_PER_CENT
    amount = highest if amount_microusd is None else amount_microusd
    if amount <= 0 or amount % MICROUSD_PER_CENT:
        raise NotRefundable(f"{top_up_id} has nothing to refund" if left <= 0 else "nothing of it is unspent")
    if amount > left:
        raise NotRefundable(f"only {_usd(left)} of {top_up_id} is not refunded yet")
    if amount > highest:
        raise NotRefundable(f"only {_usd(highest)} is unspent; --force refunds more, below zero if need be")
    now = now_ms()
    rows = yield (
        "INSERT INTO refunds (id, top_up_id, account_id, amount_microusd, total_microusd, state, forced,"
        f" created_at_ms) VALUES (?, ?, ?, ?, ?, '{PENDING}', ?, ?) RETURNING {_COLUMNS}",
        (ids.new_id("rfd"), found.id, found.account_id, amount, _total_of(found, amount), int(forced), now),
    )
    yield from top_up.mirror(found.id)
    return _refund(rows[0]), found


def end(refund_id: str, processor_refund_id: str | None, *, stands: bool) -> Script[None]:
    """Note what became of a refund; one that failed is given back to the wallet.

    One that had succeeded may still fail: the buyer's bank would not take it.
    """
    rows = yield (
        "UPDATE refunds SET state = ?, processor_refund_id = COALESCE(?, processor_refund_id), ended_at_ms = ?"
        f" WHERE id = ? AND state <> '{FAILED}' RETURNING top_up_id",
        (DONE if stands else FAILED, processor_refund_id, now_ms(), refund_id),
    )
    if rows:
        yield from top_up.mirror(rows[0][0])


async def pending(database: Database, processor: str, before_ms: int, limit: int) -> list[Refund]:
    """Return refunds of which nobody knows yet whether they were made."""
    rows = await database.fetch(
        f"SELECT {', '.join(f'r.{name}' for name in _COLUMNS.split(', '))} FROM refunds r"
        f" JOIN top_ups t ON t.id = r.top_up_id WHERE r.state = '{PENDING}' AND r.created_at_ms < ?"
        " AND t.processor = ? ORDER BY r.created_at_ms LIMIT ?",
        (before_ms, processor, limit),
    )
    return [_refund(row) for row in rows]


def _total_of(found: TopUp, amount: int) -> int:
    """Return what goes back for an amount of credit: its part of what was paid, up to the cent."""
    total = found.total_microusd or found.amount_microusd
    part = -(-amount * total // found.amount_microusd)
    return min(-(-part // MICROUSD_PER_CENT) * MICROUSD_PER_CENT, total)


def _usd(amount: int) -> str:
    return f"${amount // 1_000_000}.{amount % 1_000_000 // MICROUSD_PER_CENT:02d}"


def _refund(row: Row) -> Refund:
    return Refund(*row)
