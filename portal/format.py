"""How values look: money, numbers, times and durations, the same on every page."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, tzinfo
from zoneinfo import ZoneInfo

from jinja2 import Environment

ABSENT = "–"
MICROUSD_PER_CENT = 10_000


def usd(amount_microusd: int) -> str:
    """Return an amount to the cent, "$41.27"; an amount below a cent to its first digits, never "$0.00"."""
    sign, amount = "−" if amount_microusd < 0 else "", abs(amount_microusd)
    if 0 < amount < MICROUSD_PER_CENT // 2:
        return f"{sign}${amount / 1e6:.6f}".rstrip("0")
    cents = (amount + MICROUSD_PER_CENT // 2) // MICROUSD_PER_CENT
    return f"{sign}${cents // 100:,}.{cents % 100:02}"


def exact_usd(amount_microusd: int) -> str:
    """Return an amount to the micro-dollar without its sign of currency, "0.001934"."""
    sign = "−" if amount_microusd < 0 else ""
    amount = abs(amount_microusd)
    return f"{sign}{amount // 1_000_000:,}.{amount % 1_000_000:06}"


def number(value: int | None) -> str:
    """Return a number with thousands apart."""
    return ABSENT if value is None else f"{value:,}"


def short_number(value: int) -> str:
    """Return a large number in few digits, "1.2 M"."""
    for unit, size in (("B", 1_000_000_000), ("M", 1_000_000), ("k", 10_000)):
        if value >= size:
            divisor = 1_000 if unit == "k" else size
            return f"{value / divisor:.1f}".removesuffix(".0") + f" {unit}"
    return f"{value:,}"


def duration(ms: int | None) -> str:
    """Return a duration, "0.80 s"; one of no length to speak of in milliseconds."""
    if ms is None:
        return ABSENT
    if ms < 10:
        return f"{ms} ms"
    if ms < 10_000:
        return f"{ms / 1000:.2f} s" if ms < 1_000 else f"{ms / 1000:.1f} s"
    seconds = ms // 1000
    return f"{seconds} s" if seconds < 120 else f"{seconds // 60} min {seconds % 60} s"


def iso(at_ms: int) -> str:
    """Return a moment for machines."""
    return datetime.fromtimestamp(at_ms / 1000, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def exact_time(at_ms: int | None, zone: str = "UTC") -> str:
    """Return a moment in full, in a zone."""
    if at_ms is None:
        return ABSENT
    return datetime.fromtimestamp(at_ms / 1000, _zone(zone)).strftime("%Y-%m-%d %H:%M:%S %Z")


def short_time(at_ms: int, zone: str = "UTC") -> str:
    """Return a moment as short as it stays clear: the time today, the day and time before."""
    at, now = datetime.fromtimestamp(at_ms / 1000, _zone(zone)), datetime.now(_zone(zone))
    if at.date() == now.date():
        return at.strftime("%H:%M:%S")
    return at.strftime("%d %b %H:%M" if at.year == now.year else "%d %b %Y")


def date(at_ms: int | None, zone: str = "UTC") -> str:
    """Return the day of a moment."""
    return ABSENT if at_ms is None else datetime.fromtimestamp(at_ms / 1000, _zone(zone)).strftime("%d %b %Y")


def ago(at_ms: int | None) -> str:
    """Return how long ago a moment was, in one unit."""
    if at_ms is None:
        return "never"
    past = datetime.now(UTC) - datetime.fromtimestamp(at_ms / 1000, UTC)
    if past < timedelta(minutes=1):
        return "just now"
    for unit, size in (("day", timedelta(days=1)), ("hour", timedelta(hours=1)), ("minute", timedelta(minutes=1))):
        if past >= size:
            count = past // size
            return f"{count} {unit}{'' if count == 1 else 's'} ago"
    return "just now"


def register(templates: Environment) -> None:
    """Give the templates these as filters."""
    for made in (usd, exact_usd, number, short_number, duration, iso, exact_time, short_time, date, ago):
        templates.filters[made.__name__] = made


def _zone(name: str) -> tzinfo:
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError):
        return UTC
