"""Usage by day: what an account's calls of one UTC day came to, by offer, key and how they ended.

These sums are written in the very transactions that end a call (models/call.py), so they are exact at any moment
and no page has to read history. The day is the one a call began on. The audit holds them against the calls.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, timedelta
from typing import Any, NamedTuple

import msgspec

from models import clock
from models.clock import now_ms
from models.database import Database, Row, Script

SERVED, FAILED, REFUSED = "served", "failed", "refused"
OUTCOMES = (SERVED, FAILED, REFUSED)
DAY_MS = 24 * 3600 * 1000
ERROR_STATUS_LEAST = 400
READ_DEADLINE_S = 5
KEPT_MS = 60 * 1000
KEPT_MAX = 500

# Less and greater than every id: what the bounds of a sum are when they are not known (models/migrations/m0005).
_BEFORE_ALL, _AFTER_ALL = "", "~"

# How a call's row ended, for statements over calls that are not open.
OUTCOME_SQL = (
    "CASE WHEN state = 'refused' THEN 'refused' WHEN state = 'released' OR status >= 400 THEN 'failed'"
    " ELSE 'served' END"
)
COLUMNS = ("calls", "input_tokens", "cached_input_tokens", "output_tokens", "cost_microusd", "charged_microusd")
_SUMS_SQL = ", ".join(f"SUM({name}) AS {name}" for name in COLUMNS)
_ALL_SUMS_SQL = f"{_SUMS_SQL}, SUM(failed) AS failed, SUM(refused) AS refused"
_OUTCOMES_SQL = ", ".join(
    f"SUM(CASE WHEN outcome = '{name}' THEN calls ELSE 0 END) AS {name}" for name in (FAILED, REFUSED)
)


class Sums(msgspec.Struct, frozen=True):
    """Add up calls; amounts in micro-dollars. `input_tokens` are all but the cached ones.

    `failed` and `refused` say how many of the calls ended so.
    """

    calls: int = 0
    input_tokens: int = 0
    cached_input_tokens: int = 0
    output_tokens: int = 0
    cost: int = 0
    charged: int = 0
    failed: int = 0
    refused: int = 0

    @property
    def tokens(self) -> int:
        """Return the tokens of every class."""
        return self.input_tokens + self.cached_input_tokens + self.output_tokens


@dataclass(frozen=True, slots=True)
class Summary:
    """Hold what a part of an account's usage adds up to, by day and by offer, and in all."""

    by_day: dict[str, Sums]
    by_offer: dict[str, Sums]

    @property
    def all(self) -> Sums:
        """Return one sum of everything."""
        return together(self.by_day.values())

    @property
    def offers(self) -> list[tuple[str, Sums]]:
        """Return the sums of each offer, the dearest first."""
        return sorted(self.by_offer.items(), key=lambda one: (-one[1].charged, -one[1].calls, one[0]))


@dataclass(frozen=True, slots=True)
class Part:
    """Narrow sums to a part of an account's usage. Days are included at both ends; None does not narrow."""

    from_day: str | None = None
    until_day: str | None = None
    key_id: str | None = None
    offer: str | None = None
    outcomes: tuple[str, ...] | None = None


class Day(NamedTuple):
    """Hold a day that has calls of a part: how many, and how many calls that ended so it has at all.

    No call of the part lies before `first_id` or after `last_id`.
    """

    day: str
    matching: int
    calls: int
    first_id: str
    last_id: str


def add(
    account_id: str, call_id: str | None, created_at_ms: int, offer: str, key_id: str, outcome: str, sums: Sums
) -> Script[None]:
    """Add what has just ended to its day; in the transaction that ended it, and once.

    Without an id it is not known between which calls what is added lies.
    """
    first_id, last_id = (_BEFORE_ALL, _AFTER_ALL) if call_id is None else (call_id, call_id)
    yield (
        "INSERT INTO usage_days (account_id, day, offer, key_id, outcome, calls, input_tokens, cached_input_tokens,"
        " output_tokens, cost_microusd, charged_microusd, first_id, last_id)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
        " ON CONFLICT (account_id, day, offer, key_id, outcome) DO UPDATE"
        " SET calls = usage_days.calls + excluded.calls,"
        " input_tokens = usage_days.input_tokens + excluded.input_tokens,"
        " cached_input_tokens = usage_days.cached_input_tokens + excluded.cached_input_tokens,"
        " output_tokens = usage_days.output_tokens + excluded.output_tokens,"
        " cost_microusd = usage_days.cost_microusd + excluded.cost_microusd,"
        " charged_microusd = usage_days.charged_microusd + excluded.charged_microusd,"
        " first_id = CASE WHEN excluded.first_id < usage_days.first_id THEN excluded.first_id"
        " ELSE usage_days.first_id END,"
        " last_id = CASE WHEN excluded.last_id > usage_days.last_id THEN excluded.last_id"
        " ELSE usage_days.last_id END",
        (
            account_id, day_of(created_at_ms), offer, key_id, outcome, sums.calls, sums.input_tokens,
            sums.cached_input_tokens, sums.output_tokens, sums.cost, sums.charged, first_id, last_id,
        ),
    )


def outcome_of(status: int) -> str:
    """Return how a call that was admitted has ended, by the status it was answered with."""
    return SERVED if status < ERROR_STATUS_LEAST else FAILED


def day_of(at_ms: int) -> str:
    """Return the UTC day of a moment, e.g. "2026-11-21"."""
    return clock.day(at_ms)


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
        charged=sum(one.charged for one in parts), failed=sum(one.failed for one in parts),
        refused=sum(one.refused for one in parts),
    )


class OlderDays:
    """Remember for a minute what the days before yesterday came to, so that a page that is asked for every other
    second reads two days. Nothing changes in them any more, but for calls that a crash left open.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[str, Part], tuple[int, Summary]] = {}

    async def read(self, database: Database, account_id: str, part: Part) -> Summary:
        """Return the sums of a part that ends before yesterday."""
        key, now = (account_id, part), now_ms()
        kept = self._kept.get(key)
        if kept is not None and kept[0] <= now < kept[0] + KEPT_MS:
            return kept[1]
        found = await _read(database, account_id, part)
        if len(self._kept) >= KEPT_MAX:
            self._kept.clear()
        self._kept[key] = now, found
        return found


async def summary(database: Database, account_id: str, part: Part, older: OlderDays | None = None) -> Summary:
    """Return what a part of an account's usage adds up to."""
    border = days_before(day_of(now_ms()), 2)
    if older is None or (part.from_day is not None and part.from_day > border):
        return await _read(database, account_id, part)
    last = border if part.until_day is None else min(border, part.until_day)
    found = await older.read(database, account_id, replace(part, until_day=last))
    if part.until_day is not None and part.until_day <= border:
        return found
    recent = await _read(database, account_id, replace(part, from_day=days_before(border, -1)))
    return Summary(_merged(found.by_day, recent.by_day), _merged(found.by_offer, recent.by_offer))


async def days_with(
    database: Database, account_id: str, part: Part, *, among: tuple[str, ...] | None, newest_first: bool,
    limit: int, deadline_s: float,
) -> list[Day]:
    """Return the next days that have any call of a part; `among` are the outcomes that all calls are counted of."""
    condition, arguments = _condition(account_id, part)
    ended, ended_arguments = _condition(account_id, Part(outcomes=among))
    order = "DESC" if newest_first else "ASC"
    rows = await database.report(
        # What does not match is passed over in the key; only days that match are added up.
        f"SELECT day, matching, (SELECT SUM(calls) FROM usage_days WHERE {ended} AND day = days.day) AS calls,"
        " first_id, last_id FROM (SELECT day, SUM(calls) AS matching, MIN(first_id) AS first_id,"
        f" MAX(last_id) AS last_id FROM usage_days WHERE {condition} GROUP BY day"
        f" ORDER BY day {order} LIMIT ?) AS days ORDER BY day {order}",
        (*ended_arguments, *arguments, limit),
        deadline_s=deadline_s,
    )
    return [
        Day(row["day"], int(row["matching"]), int(row["calls"]), row["first_id"], row["last_id"]) for row in rows
    ]


async def offers_of(database: Database, account_id: str, since_day: str, *, limit: int) -> list[str]:
    """Return the first offers, by name, that an account has asked for since a day, for choosing among them.

    Calls that were refused before they had named one are not among them.
    """
    rows = await database.report(
        # From one offer to the next in their index: a sum is looked at for each offer, and not all of them.
        "WITH RECURSIVE names (offer) AS (SELECT MIN(offer) FROM usage_days WHERE account_id = ? AND offer > ''"
        " UNION ALL SELECT (SELECT MIN(d.offer) FROM usage_days d WHERE d.account_id = ? AND d.offer > names.offer)"
        " FROM names WHERE names.offer IS NOT NULL)"
        " SELECT offer FROM names WHERE EXISTS (SELECT 1 FROM usage_days d"
        " WHERE d.account_id = ? AND d.offer = names.offer AND d.day >= ?) LIMIT ?",
        (account_id, account_id, account_id, since_day, limit), deadline_s=READ_DEADLINE_S,
    )
    return sorted(row["offer"] for row in rows)


async def _read(database: Database, account_id: str, part: Part) -> Summary:
    condition, arguments = _condition(account_id, part)
    # The days are read once, in the order of their key, and what that comes to is added up in two ways.
    rows = await database.report(
        f"WITH parts AS MATERIALIZED (SELECT day, offer, {_SUMS_SQL}, {_OUTCOMES_SQL} FROM usage_days"
        f" WHERE {condition} GROUP BY day, offer)"
        f" SELECT 'day' AS kind, day AS name, {_ALL_SUMS_SQL} FROM parts GROUP BY day"
        f" UNION ALL SELECT 'offer', offer, {_ALL_SUMS_SQL} FROM parts GROUP BY offer",
        arguments, deadline_s=READ_DEADLINE_S,
    )
    by_day, by_offer = (
        {row["name"]: _sums(row) for row in rows if row["kind"] == kind} for kind in ("day", "offer")
    )
    return Summary(by_day, by_offer)


def _merged(some: dict[str, Sums], others: dict[str, Sums]) -> dict[str, Sums]:
    in_both = {name: together((some[name], others[name])) for name in some.keys() & others.keys()}
    return {**some, **others, **in_both}


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
        cost=int(row["cost_microusd"]), charged=int(row["charged_microusd"]), failed=int(row["failed"]),
        refused=int(row["refused"]),
    )
