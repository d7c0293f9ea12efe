"""Low credit: one mail each time a balance falls below its account's threshold.

The wallets notice it themselves (models/migrations/m0004_recharge.py): the statement that takes a balance from at
or above the threshold to below it writes a row here, in the same transaction, whatever the cause. Whoever mails
deletes the row together with putting the letter in the outbox, so there is exactly one letter a crossing. The next
one can only come after the balance has risen to the threshold again. A threshold that is changed is no crossing.
"""

from __future__ import annotations

from dataclasses import dataclass

from models import outbox
from models.account import ACTIVE
from models.database import Database, Script

DEFAULT_MICROUSD = 5_000_000
NOTED_AT_ONCE = 50


@dataclass(frozen=True, slots=True)
class Crossing:
    """Be a fall below the threshold. `seq` is that of the ledger entry that made it."""

    account_id: str
    seq: int
    below_microusd: int
    balance_microusd: int
    email: str | None


async def threshold(database: Database, account_id: str) -> int:
    """Return the credit below which a mail is sent, 0 for none."""
    rows = await database.fetch("SELECT low_credit_microusd FROM wallets WHERE account_id = ?", (account_id,))
    return rows[0][0]


def set_threshold(account_id: str, below_microusd: int) -> Script[None]:
    """Change the credit below which a mail is sent; 0 for none."""
    yield ("UPDATE wallets SET low_credit_microusd = ? WHERE account_id = ?", (below_microusd, account_id))


async def waiting(database: Database) -> list[Crossing]:
    """Return crossings that nobody was told of; without an address where nobody is to be."""
    rows = await database.fetch(
        "SELECT l.account_id, l.seq, l.below_microusd, l.balance_microusd, CASE WHEN a.state = ?"
        " AND a.email_verified_at_ms IS NOT NULL THEN a.email END AS email"
        " FROM low_credits l LEFT JOIN accounts a ON a.id = l.account_id LIMIT ?",
        (ACTIVE, NOTED_AT_ONCE),
    )
    return [Crossing(*row) for row in rows]


def tell(crossing: Crossing, letter: outbox.Letter | None) -> Script[bool]:
    """Put the letter of a crossing in the outbox; return whether nobody had before."""
    rows = yield (
        "DELETE FROM low_credits WHERE account_id = ? AND seq = ? RETURNING seq",
        (crossing.account_id, crossing.seq),
    )
    if rows and letter is not None:
        yield from outbox.put(letter)
    return bool(rows)
