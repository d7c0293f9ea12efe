"""Refunds asked for by the operator: a row before any money goes back."""

from __future__ import annotations

from dataclasses import dataclass

PENDING, DONE, FAILED = "pending", "done", "failed"


@dataclass(frozen=True, slots=True)
class Refund:
    """Be one refund. `total_microusd` is what goes back to the buyer, tax included."""

    id: str
    top_up_id: str
    account_id: str
    amount_microusd: int
    total_microusd: int
    state: str
    created_at_ms: int
