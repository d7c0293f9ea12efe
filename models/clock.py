"""Time as the books keep it: integer milliseconds since 1970, UTC; months as "2026-11"."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from functools import lru_cache

DAY_MS = 24 * 3600 * 1000


def now_ms() -> int:
    """Return the wall clock in milliseconds since 1970."""
    return time.time_ns() // 1_000_000


def moment(at_ms: int) -> datetime:
    """Return an aware UTC datetime."""
    return datetime.fromtimestamp(at_ms / 1000, UTC)


def month(at_ms: int) -> str:
    """Return the UTC calendar month that included calls belong to, e.g. "2026-11"."""
    return _day(at_ms // DAY_MS)[:7]


def day(at_ms: int) -> str:
    """Return the UTC calendar day, e.g. "2026-11-21"."""
    return _day(at_ms // DAY_MS)


def month_end_ms(at_ms: int) -> int:
    """Return when the UTC month of a moment ends and the included calls renew."""
    now = moment(at_ms)
    year, following = (now.year + 1, 1) if now.month == 12 else (now.year, now.month + 1)
    return int(datetime(year, following, 1, tzinfo=UTC).timestamp()) * 1000


@lru_cache(maxsize=64)
def _day(number: int) -> str:
    return moment(number * DAY_MS).strftime("%Y-%m-%d")
