"""The overview: what an account's days add up to, and which of the first steps it has taken."""

from __future__ import annotations

from dataclasses import dataclass

from models.database import Database


@dataclass(frozen=True, slots=True)
class Day:
    """Sum one UTC day, "2026-11-21". `refused` calls were turned away; `failed` ones broke. Micro-dollars."""

    day: str
    calls: int = 0
    failed: int = 0
    refused: int = 0
    charged: int = 0


@dataclass(frozen=True, slots=True)
class Steps:
    """Say which of the first steps are done."""

    verified: bool
    key: bool
    call: bool
    credit: bool

    @property
    def are_done(self) -> bool:
        """Return whether the needed ones are."""
        return self.verified and self.key and self.call


async def days(database: Database, account_id: str, first_day: str) -> dict[str, Day]:
    """Return the days on which an account called, from one on; of days without calls there is none."""
    rows = await database.fetch(
        "SELECT day, CAST(SUM(calls) AS BIGINT) AS calls,"
        " CAST(SUM(CASE WHEN outcome = 'failed' THEN calls ELSE 0 END) AS BIGINT) AS failed,"
        " CAST(SUM(CASE WHEN outcome = 'refused' THEN calls ELSE 0 END) AS BIGINT) AS refused,"
        " CAST(SUM(charged_microusd) AS BIGINT) AS charged"
        " FROM usage_days WHERE account_id = ? AND day >= ? GROUP BY day",
        (account_id, first_day),
    )
    return {
        row["day"]: Day(row["day"], row["calls"], row["failed"], row["refused"], row["charged"]) for row in rows
    }


async def first_steps(database: Database, account_id: str) -> Steps:
    """Return which of the first steps an account has taken."""
    rows = await database.fetch(
        "SELECT CASE WHEN email_verified_at_ms IS NULL THEN 0 ELSE 1 END,"
        " CASE WHEN EXISTS (SELECT 1 FROM api_keys k WHERE k.account_id = accounts.id AND k.hidden = 0)"
        " THEN 1 ELSE 0 END,"
        " CASE WHEN EXISTS (SELECT 1 FROM calls c WHERE c.account_id = accounts.id) THEN 1 ELSE 0 END,"
        " CASE WHEN EXISTS (SELECT 1 FROM ledger l WHERE l.account_id = accounts.id AND l.amount_microusd > 0)"
        " THEN 1 ELSE 0 END FROM accounts WHERE id = ?",
        (account_id,),
    )
    return Steps(*(bool(value) for value in rows[0])) if rows else Steps(False, False, False, False)
