"""Results: how a call ended, in the words that every page and every file uses for it."""

from __future__ import annotations

from models import usage_day
from models.call import RUNNING
from models.database import Row

CLIENT_CLOSED = 499
# What a refusal is called in one word; anything else that was refused is just that.
REFUSED_WORDS = {
    400: "invalid", 401: "bad key", 402: "no credit", 403: "denied", 404: "unknown", 413: "too large",
    429: "limited",
}


def outcome_of(row: Row) -> str:
    """Return how a call ended in one word: served, failed, refused, or running."""
    if row["state"] == "open":
        return RUNNING
    if row["state"] == "refused":
        return usage_day.REFUSED
    return usage_day.FAILED if row["status"] is None else usage_day.outcome_of(row["status"])


def words_of(row: Row) -> tuple[str, str]:
    """Return the words beside the dot, and the dot's kind."""
    outcome, status = outcome_of(row), row["status"]
    if outcome == RUNNING:
        return "running", "busy"
    if outcome == usage_day.SERVED:
        return f"{status} served", "good"
    if outcome == usage_day.REFUSED:
        times = f" × {row['repeated']:,}" if row["repeated"] > 1 else ""
        return f"{status} {REFUSED_WORDS.get(status, 'refused')}{times}", "warn"
    word = "left" if status == CLIENT_CLOSED else "cut off" if row["state"] == "expired" else "failed"
    return f"{status or ''} {word}".strip(), "bad"
