"""The rate limit: a window of 60 seconds per account (and per key that has one), exact across processes.

A window begins with the first call after the last one ended. It is counted in the transaction that
admits the call, so a refused call is not counted, and a full window stays full until it ends.
"""

from __future__ import annotations

import msgspec

from models.database import Script, Statement
from models.errors import RateLimited

WINDOW_MS = 60_000
CLOCK_SKEW_MS = 30_000
PRUNED_AT_ONCE = 500


class Limit(msgspec.Struct, frozen=True):
    """Allow `per_window` calls in a bucket's window."""

    bucket: str
    per_window: int


class Standing(msgspec.Struct, frozen=True):
    """Say where a caller stands in a window after a call was counted."""

    limit: int
    remaining: int
    resets_at_ms: int


def account_bucket(account_id: str) -> str:
    """Return the bucket of a whole account."""
    return f"account:{account_id}"


def key_bucket(key_id: str) -> str:
    """Return the bucket of one key with a limit of its own."""
    return f"key:{key_id}"


def count(
    limit: Limit, now_ms: int, *, window_ms: int = WINDOW_MS, provided: Statement = ("1 = 1", ())
) -> Script[Standing]:
    """Count one call, provided that an SQL condition holds. Raises RateLimited, and then nothing is counted."""
    ended = now_ms - window_ms
    # A window that seems to begin later than another machine's clock could be ahead was written before
    # ours was set back: it counts as ended, or it would stay full for as long as the step was.
    future = now_ms + CLOCK_SKEW_MS
    condition, arguments = provided
    rows = yield (
        "INSERT INTO rate_windows (bucket, window_start_ms, count)"
        f" SELECT CAST(? AS TEXT), CAST(? AS BIGINT), 1 WHERE {condition}"
        " ON CONFLICT (bucket) DO UPDATE SET"
        " count = CASE WHEN rate_windows.window_start_ms <= ? OR rate_windows.window_start_ms > ? THEN 1"
        " ELSE rate_windows.count + 1 END,"
        " window_start_ms = CASE WHEN rate_windows.window_start_ms <= ? OR rate_windows.window_start_ms > ? THEN ?"
        " ELSE rate_windows.window_start_ms END"
        " WHERE rate_windows.window_start_ms <= ? OR rate_windows.window_start_ms > ? OR rate_windows.count < ?"
        " RETURNING count, window_start_ms",
        (
            limit.bucket, now_ms, *arguments, ended, future, ended, future, now_ms, ended, future, limit.per_window,
        ),
    )
    if rows:
        used, start = rows[0]
        return Standing(limit.per_window, max(limit.per_window - used, 0), start + window_ms)
    rows = yield ("SELECT window_start_ms FROM rate_windows WHERE bucket = ?", (limit.bucket,))
    start = rows[0][0] if rows else now_ms
    raise RateLimited(limit.bucket, limit.per_window, start + window_ms)


def prune(before_ms: int) -> Script[bool]:
    """Forget windows that ended long ago, a batch of them; return whether there may be more."""
    rows = yield (
        "DELETE FROM rate_windows WHERE window_start_ms < ? AND bucket IN"
        " (SELECT bucket FROM rate_windows WHERE window_start_ms < ? LIMIT ?) RETURNING bucket",
        (before_ms, before_ms, PRUNED_AT_ONCE),
    )
    return len(rows) == PRUNED_AT_ONCE
