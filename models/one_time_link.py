"""One-time links: mailed, good for half an hour and one use, void as soon as a newer one is made."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass

from models.clock import now_ms
from models.database import Database, Script
from models.errors import DomainError

VERIFY, RESET, CHANGE_EMAIL = "verify", "reset", "change_email"
LIFE_MS = 30 * 60 * 1000
PRUNED_AT_ONCE = 500


class LinkUsed(DomainError):
    """Report a link that was used, replaced or has expired; its holder is not told which."""


@dataclass(frozen=True, slots=True)
class Redeemed:
    """Say what a link was for. `password_hash` is what a sign-up chose."""

    account_id: str
    email: str
    password_hash: str | None


def new_secret() -> str:
    """Return the last part of a new link: 256 random bits."""
    return secrets.token_urlsafe(32)


def make(
    purpose: str, secret: str, account_id: str, email: str, password_hash: str | None = None
) -> Script[None]:
    """Make a link; older ones of the same account and purpose are void from now on."""
    now = now_ms()
    yield from void(account_id, purpose)
    yield (
        "INSERT INTO one_time_links (hash, purpose, account_id, email, password_hash, created_at_ms, expires_at_ms)"
        " VALUES (?, ?, ?, ?, ?, ?, ?)",
        (_hashed(secret), purpose, account_id, email, password_hash, now, now + LIFE_MS),
    )


def void(account_id: str, purpose: str) -> Script[None]:
    """Void the links of an account for a purpose."""
    yield (
        "UPDATE one_time_links SET used_at_ms = ? WHERE account_id = ? AND purpose = ? AND used_at_ms IS NULL",
        (now_ms(), account_id, purpose),
    )


async def email_of(database: Database, purpose: str, secret: str) -> str | None:
    """Return the address that a link is for, without using it; None when it cannot be used any more."""
    rows = await database.fetch(
        "SELECT email FROM one_time_links WHERE hash = ? AND purpose = ? AND used_at_ms IS NULL"
        " AND expires_at_ms > ?",
        (_hashed(secret), purpose, now_ms()),
    )
    return rows[0]["email"] if rows else None


def redeem(purpose: str, secret: str) -> Script[Redeemed]:
    """Use a link; of several at once one succeeds. Raises LinkUsed."""
    now = now_ms()
    rows = yield (
        "UPDATE one_time_links SET used_at_ms = ? WHERE hash = ? AND purpose = ? AND used_at_ms IS NULL"
        " AND expires_at_ms > ? RETURNING account_id, email, password_hash",
        (now, _hashed(secret), purpose, now),
    )
    if not rows:
        raise LinkUsed
    return Redeemed(*rows[0])


def prune(at_ms: int) -> Script[bool]:
    """Forget links that have expired, a batch of them; return whether there may be more."""
    rows = yield (
        "DELETE FROM one_time_links WHERE hash IN"
        " (SELECT hash FROM one_time_links WHERE expires_at_ms < ? LIMIT ?) RETURNING hash",
        (at_ms, PRUNED_AT_ONCE),
    )
    return len(rows) == PRUNED_AT_ONCE


def _hashed(secret: str) -> str:
    return hashlib.sha256(secret.encode(errors="replace")).hexdigest()
