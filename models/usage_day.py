"""Usage by day: what an account's calls of one UTC day came to, by offer, key and how they ended.

These sums are written in the very transactions that end a call (models/call.py), so they are exact at any moment
and no page has to read history. The day is the one a call began on. The audit holds them against the calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from functools import lru_cache
from typing import Any

from models.clock import moment
from models.database import Database, Row, Script

SERVED, FAILED, REFUSED = "served", "failed", "refused"
OUTCOMES = (SERVED, FAILED, REFUSED)
DAY_MS = 24 * 3600 * 1000
ERROR_STATUS_LEAST = 400
READ_DEADLINE_S = 5

# How a call's row ended, for statements over calls that are not open.
OUTCOME_SQL = (
    "CASE WHEN state = 'refused' THEN 'refused' WHEN state = 'released' OR status >= 400 THEN 'failed'"
    " ELSE 'served' END"
)
SUMS_SQL = (
    "SUM(calls) AS calls, SUM(input_tokens) AS input_tokens, SUM(cached_input_tokens) AS cached_input_tokens,"
    " SUM(output_tokens) AS output_tokens, SUM(cost_microusd) AS cost_microusd,"
    " SUM(charged_microusd) AS charged_microusd"
)


@dataclass(frozen=True, slots=True)
class Sums:
    """Add up calls; amounts in micro-dollars. `input_tokens` are all but the cached ones."""

    calls: int = 0
    input_tokens: int = 0
    cached_input_tokens: int = 0
    output_tokens: int = 0
    cost: int = 0
    charged: int = 0

    @property
    def tokens(self) -> int:
        """Return the tokens of every class."""
        return self.input_tokens + self.cached_input_tokens + self.output_tokens


@dataclass(frozen=True, slots=True)
class Part:
    """Narrow sums to a part of an account's usage. Days are included at both ends; None does not narrow."""

    from_day: str | None = None
    until_day: str | None = None
    key_id: str | None = None
    offer: str | None = None
    outcomes: tuple[str, ...] | None = None


def add(
    account_id: str, created_at_ms: int, offer: str, key_id: str, outcome: str, sums: Sums
) -> Script[None]:
    """Add what has just ended to its day; in the transaction that ended it, and once."""
    yield (
        "INSERT INTO usage_days (account_id, day, offer, key_id, outcome, calls, input_tokens, cached_input_tokens,"
        " output_tokens, cost_microusd, charged_microusd) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
        " ON CONFLICT (account_id, day, offer, key_id, outcome) DO UPDATE"
        " SET calls = usage_days.calls + excluded.calls,"
        " input_tokens = usage_days.input_tokens + excluded.input_tokens,"
        " cached_input_tokens = usage_days.cached_input_tokens + excluded.cached_input_tokens,"
        " output_tokens = usage_days.output_tokens + excluded.output_tokens,"
        " cost_microusd = usage_days.cost_microusd + excluded.cost_microusd,"
        " charged_microusd = usage_days.charged_microusd + excluded.charged_microusd",
        (
            account_id, day_of(created_at_ms), offer, key_id, outcome, sums.calls, sums.input_tokens,
            sums.cached_input_tokens, sums.output_tokens, sums.cost, sums.charged,
        ),
    )


def outcome_of(status: int) -> str:
    """Return how a call that was admitted has ended, by the status it was answered with."""
    return SERVED if status < ERROR_STATUS_LEAST else FAILED


def day_of(at_ms: int) -> str:
    """Return the UTC day of a moment, e.g. "2026-11-21"."""
    return _day(at_ms // DAY_MS)


def start_of(day: str) -> int:
    """Return when a day begins, in milliseconds since 1970."""
    return int(datetime.combine(date.fromisoformat(day), datetime.min.time(), UTC).timestamp()) * 1000


def days_before(day: str, count: int) -> str:
    """Return the day so many days earlier."""
    return (date.fromisoformat(day) - timedelta(days=count)).isoformat()


def day_sql(dialect: str) -> str:
    """Return an SQL expression for the day of a call."""
    if dialect == "sqlite":
        return "strftime('%Y-%m-%d', created_at_ms / 1000, 'unixepoch')"
    return "to_char(to_timestamp(created_at_ms / 1000) AT TIME ZONE 'UTC', 'YYYY-MM-DD')"


def together(parts: Iterable[Sums]) -> Sums:
    """Return one sum of several."""
    parts = list(parts)
    return Sums(
        calls=sum(one.calls for one in parts), input_tokens=sum(one.input_tokens for one in parts),
        cached_input_tokens=sum(one.cached_input_tokens for one in parts),
        output_tokens=sum(one.output_tokens for one in parts), cost=sum(one.cost for one in parts),
        charged=sum(one.charged for one in parts),
    )


async def totals(database: Database, account_id: str, part: Part) -> dict[str, Sums]:
    """Return the sums of a part by outcome, and of everything under ""."""
    found = {row["outcome"]: _sums(row) for row in await _read(database, account_id, part, "outcome")}
    return {"": together(found.values())} | found


async def by_day(database: Database, account_id: str, part: Part) -> list[tuple[str, Sums]]:
    """Return the sums of each day that has any, the first day first."""
    return [(row["day"], _sums(row)) for row in await _read(database, account_id, part, "day")]


async def by_offer(database: Database, account_id: str, part: Part) -> list[tuple[str, Sums]]:
    """Return the sums of each offer, the dearest first."""
    found = [(row["offer"], _sums(row)) for row in await _read(database, account_id, part, "offer")]
    return sorted(found, key=lambda one: (-one[1].charged, -one[1].calls, one[0]))


async def days_with(
    database: Database, account_id: str, part: Part, *, newest_first: bool, limit: int, deadline_s: float
) -> list[tuple[str, int]]:
    """Return the next days that have any call of a part, with how many."""
    condition, arguments = _condition(account_id, part)
    rows = await database.report(
        f"SELECT day, SUM(calls) AS calls FROM usage_days WHERE {condition} GROUP BY day"
        f" ORDER BY day {'DESC' if newest_first else 'ASC'} LIMIT ?",
        (*arguments, limit),
        deadline_s=deadline_s,
    )
    return [(row["day"], int(row["calls"])) for row in rows]


async def offers_of(database: Database, account_id: str, *, limit: int) -> list[str]:
    """Return which offers an account has ever asked for, for choosing among them."""
    # From one name to the next by the index of the sums: there may be many days, there are few names.
    rows = await database.report(
        "SELECT DISTINCT offer FROM usage_days WHERE account_id = ? ORDER BY offer LIMIT ?", (account_id, limit),
        deadline_s=READ_DEADLINE_S,
    )
    return [row["offer"] for row in rows]


async def _read(database: Database, account_id: str, part: Part, group: str) -> Sequence[Row]:
    condition, arguments = _condition(account_id, part)
    return await database.report(
        f"SELECT {group}, {SUMS_SQL} FROM usage_days WHERE {condition} GROUP BY {group} ORDER BY {group}",
        arguments, deadline_s=READ_DEADLINE_S,
    )


def _condition(account_id: str, part: Part) -> tuple[str, tuple[Any, ...]]:
    conditions, arguments = ["account_id = ?"], [account_id]
    for column, value in (
        ("day >= ?", part.from_day), ("day <= ?", part.until_day), ("key_id = ?", part.key_id),
        ("offer = ?", part.offer),
    ):
        if value is not None:
            conditions.append(column)
            arguments.append(value)
    if part.outcomes is not None:
        conditions.append(f"outcome IN ({', '.join('?' * len(part.outcomes))})")
        arguments += part.outcomes
    return " AND ".join(conditions), tuple(arguments)


def _sums(row: Row) -> Sums:
    return Sums(
        calls=int(row["calls"]), input_tokens=int(row["input_tokens"]),
        cached_input_tokens=int(row["cached_input_tokens"]), output_tokens=int(row["output_tokens"]),
        cost=int(row["cost_microusd"]), charged=int(row["charged_microusd"]),
    )


@lru_cache(maxsize=64)
def _day(number: int) -> str:
    return moment(number * DAY_MS).strftime("%Y-%m-%d")
