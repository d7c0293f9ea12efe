"""Payment events: what processors have told us, each once, and what came of it.

An event's row is written in the transaction of its effect, so a known event that was done has had its effect.
What it carried is not kept: it has names and addresses in it.
"""

from __future__ import annotations

from dataclasses import dataclass

from models.clock import now_ms
from models.database import Script

DONE, IGNORED, REFUSED = "done", "ignored", "refused"
KEPT_MS = 90 * 24 * 3600 * 1000
PRUNED_AT_ONCE = 500
DETAIL_CHARACTERS = 300


@dataclass(frozen=True, slots=True)
class Event:
    """Be one message of a processor's."""

    id: str
    processor: str
    type: str
    object_id: str


def note(event: Event, outcome: str, detail: str | None = None) -> Script[None]:
    """Write down what came of an event; one that was done stays done."""
    yield (
        "INSERT INTO payment_events (id, processor, type, object_id, outcome, detail, created_at_ms)"
        " VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET outcome = excluded.outcome,"
        f" detail = excluded.detail WHERE payment_events.outcome <> '{DONE}'",
        (
            event.id, event.processor, event.type, event.object_id, outcome, detail and detail[:DETAIL_CHARACTERS],
            now_ms(),
        ),
    )


def is_done(event: Event) -> Script[bool]:
    """Return whether an event has had its effect."""
    rows = yield ("SELECT 1 FROM payment_events WHERE id = ? AND outcome = ?", (event.id, DONE))
    return bool(rows)


def prune(at_ms: int) -> Script[bool]:
    """Forget old events, a batch of them; return whether there may be more."""
    rows = yield (
        "DELETE FROM payment_events WHERE id IN (SELECT id FROM payment_events WHERE created_at_ms < ? LIMIT ?)"
        " RETURNING id",
        (at_ms - KEPT_MS, PRUNED_AT_ONCE),
    )
    return len(rows) == PRUNED_AT_ONCE
