"""Disputes: payments that their payers' banks ask back, known by the processor's own ids.

A dispute is `asked` (the bank only inquires: no money has moved), then `open`, then `won` or `lost`. News may
come in any order, so a dispute only ever goes forward; the payment it speaks of may be news of tomorrow.
"""

from __future__ import annotations

from dataclasses import dataclass

from models.clock import now_ms
from models.database import Script

ASKED, OPEN, WON, LOST = "asked", "open", "won", "lost"
_RANK = "CASE {} WHEN 'asked' THEN 0 WHEN 'open' THEN 1 ELSE 2 END"


@dataclass(frozen=True, slots=True)
class Dispute:
    """Be one dispute. `total_microusd` is what is asked back, tax included."""

    id: str
    processor: str
    payment_id: str
    total_microusd: int
    state: str


def note(told: Dispute) -> Script[None]:
    """Write down how a dispute stands, unless something later is known already."""
    now = now_ms()
    closed = now if told.state in (WON, LOST) else None
    yield (
        "INSERT INTO disputes (id, processor, payment_id, total_microusd, state, created_at_ms, closed_at_ms)"
        " VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET state = excluded.state,"
        " total_microusd = excluded.total_microusd, closed_at_ms = excluded.closed_at_ms"
        " WHERE disputes.payment_id = excluded.payment_id"
        f" AND {_RANK.format('disputes.state')} < {_RANK.format('excluded.state')}",
        (told.id, told.processor, told.payment_id, told.total_microusd, told.state, now, closed),
    )


def of_payment(processor: str, payment_id: str) -> Script[list[Dispute]]:
    """Return the disputes of a payment."""
    rows = yield (
        "SELECT id, processor, payment_id, total_microusd, state FROM disputes WHERE processor = ?"
        " AND payment_id = ?",
        (processor, payment_id),
    )
    return [Dispute(*row) for row in rows]
