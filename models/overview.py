"""The overview: which of the first steps an account has taken."""

from __future__ import annotations

from dataclasses import dataclass

from models.database import Database


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
