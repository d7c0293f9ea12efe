"""Charts: sums by day or month as bars, of what was spent, or of calls where nothing was."""

from __future__ import annotations

from collections.abc import Iterable

from models.usage_day import Sums
from portal.format import usd

SPEND, CALLS = "Spend", "Calls"
Bar = tuple[str, int, str]


def bars_of(spans: Iterable[tuple[str, Sums]]) -> tuple[str, list[Bar]]:
    """Return of what a chart is, and its bars: (label, height, what is said of it)."""
    spans = list(spans)
    of = SPEND if any(sums.charged for _, sums in spans) else CALLS
    return of, [
        (label, sums.charged if of == SPEND else sums.calls, f"{usd(sums.charged)}, {sums.calls:,} calls")
        for label, sums in spans
    ]
