"""Hidden keys: those under which our own pages call for an account. Nobody has ever seen their plain text.

There is one for each purpose of an account. Calls under it are counted, priced and shown like any others.
"""

from __future__ import annotations

from models import clock, credentials, ids
from models.database import Database, Script
from models.errors import DomainError

PLAYGROUND = "playground"


class Unverified(DomainError):
    """Report an account whose e-mail address is not verified yet: it may not make calls."""


async def hash_of(database: Database, account_id: str, name: str) -> str:
    """Return the hash of an account's hidden key, which is made when there is none. Raises Unverified."""
    known = await _known(database, account_id, name)
    if known is None:
        await database.run(lambda: _make(account_id, name))
        known = await _known(database, account_id, name)
    if known is None:
        raise Unverified
    return known


async def _known(database: Database, account_id: str, name: str) -> str | None:
    rows = await database.fetch(
        "SELECT hash FROM api_keys WHERE account_id = ? AND name = ? AND hidden = 1 AND revoked_at_ms IS NULL",
        (account_id, name),
    )
    return rows[0]["hash"] if rows else None


def _make(account_id: str, name: str) -> Script[None]:
    verified = yield (
        "SELECT 1 FROM accounts WHERE id = ? AND state = 'active' AND email_verified_at_ms IS NOT NULL",
        (account_id,),
    )
    if not verified:
        raise Unverified
    # The plain text is forgotten here and now. Of two that are made at once, the first stays.
    yield (
        "INSERT INTO api_keys (id, account_id, name, hash, shown_prefix, shown_suffix, hidden, version,"
        " created_at_ms) VALUES (?, ?, ?, ?, '', '', 1, 1, ?) ON CONFLICT DO NOTHING",
        (ids.new_id("key"), account_id, name, credentials.key_hash(credentials.new_key()), clock.now_ms()),
    )
