"""Included calls: the free calls of an account's UTC month, used before the wallet."""

from __future__ import annotations

from models.database import Database, Script


def take(account_id: str, month: str, limit: int) -> Script[int | None]:
    """Use one included call; return how many are used now, or None when none is left.

    An account whose wallet is below zero or disputed gets none.
    """
    rows = yield (
        "INSERT INTO included_calls (account_id, month, used)"
        " SELECT CAST(? AS TEXT), CAST(? AS TEXT), 1 WHERE EXISTS"
        " (SELECT 1 FROM wallets WHERE account_id = ? AND posted_microusd >= 0 AND disputed = 0)"
        " ON CONFLICT (account_id, month) DO UPDATE SET used = included_calls.used + 1"
        " WHERE included_calls.used < ? RETURNING used",
        (account_id, month, account_id, limit),
    )
    return rows[0][0] if rows else None


def give_back(account_id: str, month: str) -> Script[None]:
    """Return an included call to the month it came from."""
    yield (
        "UPDATE included_calls SET used = used - 1 WHERE account_id = ? AND month = ?",
        (account_id, month),
    )


def used(account_id: str, month: str) -> Script[int]:
    """Return how many included calls of a month are used."""
    rows = yield (_SELECT_USED, (account_id, month))
    return rows[0][0] if rows else 0


async def used_now(database: Database, account_id: str, month: str) -> int:
    """Return how many included calls of a month are used, outside any transaction."""
    rows = await database.fetch(_SELECT_USED, (account_id, month))
    return rows[0][0] if rows else 0


_SELECT_USED = "SELECT used FROM included_calls WHERE account_id = ? AND month = ?"
