"""Sessions of the dashboard: a random cookie whose SHA-256 is kept, ended by time, sign-out or password.

A session is `half` between a right password and the second factor, and then shows nothing at all.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass

from models import ids
from models.clock import now_ms
from models.database import Database, Row, Script
from models.errors import DomainError

DAY_MS = 24 * 3600 * 1000
IDLE_MS = 14 * DAY_MS
LIFE_MS = 30 * DAY_MS
HALF_LIFE_MS = 10 * 60 * 1000
# How long after a password or second factor something dangerous may be done without asking again.
PROVEN_MS = 15 * 60 * 1000
SEEN_STEP_MS = 60 * 1000
AGENT_LENGTH_MAX = 200
PRUNED_AT_ONCE = 500
HALF, WHOLE = "half", "whole"


class SessionEnded(DomainError):
    """Report that a session ended while its request was worked on."""


@dataclass(frozen=True, slots=True)
class Session:
    """Hold one session with what every page needs of its account."""

    id: str
    state: str
    account_id: str
    email: str
    name: str
    time_zone: str
    plan: str
    has_totp: bool
    proven_at_ms: int
    seen_at_ms: int

    def was_proven(self, at_ms: int) -> bool:
        """Return whether its owner has shown a password or second factor a short while ago."""
        return at_ms - self.proven_at_ms < PROVEN_MS


def new_cookie() -> str:
    """Return a new cookie: 256 random bits."""
    return secrets.token_urlsafe(32)


def hashed(cookie: str) -> str:
    """Return the form in which a cookie is stored."""
    return hashlib.sha256(cookie.encode(errors="replace")).hexdigest()


def begin(account_id: str, cookie: str, *, address: str, agent: str, state: str = WHOLE) -> Script[str]:
    """Begin a session and return its id."""
    now, session_id = now_ms(), ids.new_id("ses")
    yield (
        "INSERT INTO sessions (id, hash, account_id, state, address, agent, created_at_ms, proven_at_ms,"
        " seen_at_ms, expires_at_ms) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            session_id, hashed(cookie), account_id, state, address, agent[:AGENT_LENGTH_MAX], now, now, now,
            now + (LIFE_MS if state == WHOLE else HALF_LIFE_MS),
        ),
    )
    return session_id


async def find(database: Database, cookie: str) -> Session | None:
    """Return the session of a cookie unless it has ended or its account is not active."""
    now = now_ms()
    rows = await database.fetch(
        "SELECT s.id, s.state, s.account_id, a.email, a.name, a.time_zone, a.plan, a.totp_secret, s.proven_at_ms,"
        " s.seen_at_ms FROM sessions s JOIN accounts a ON a.id = s.account_id"
        " WHERE s.hash = ? AND s.expires_at_ms > ? AND s.seen_at_ms > ? AND a.state = 'active'",
        (hashed(cookie), now, now - IDLE_MS),
    )
    return _session(rows[0]) if rows else None


def hold(account_id: str, session_id: str) -> Script[None]:
    """Lock an account and make sure that a session of it is still there. Raises SessionEnded.

    A password takes a while to check; who was thrown out meanwhile must not go on. The lock comes first, so
    that what ends sessions, and has it too, has either been or comes after.
    """
    yield ("UPDATE accounts SET version = version WHERE id = ? RETURNING id", (account_id,))
    rows = yield ("SELECT 1 FROM sessions WHERE id = ? AND account_id = ?", (session_id, account_id))
    if not rows:
        raise SessionEnded


def seen(session_id: str, at_ms: int) -> Script[None]:
    """Note that a session was used."""
    yield ("UPDATE sessions SET seen_at_ms = ? WHERE id = ? AND seen_at_ms < ?", (at_ms, session_id, at_ms))


def prove(session_id: str) -> Script[None]:
    """Note that the owner of a session has just shown a password or second factor."""
    yield ("UPDATE sessions SET proven_at_ms = ? WHERE id = ?", (now_ms(), session_id))


def end(account_id: str, session_id: str) -> Script[bool]:
    """End one session of an account; return whether there was one."""
    rows = yield ("DELETE FROM sessions WHERE id = ? AND account_id = ? RETURNING id", (session_id, account_id))
    return bool(rows)


def end_all(account_id: str, *, but: str = "") -> Script[int]:
    """End the sessions of an account, but for one; return how many."""
    rows = yield ("DELETE FROM sessions WHERE account_id = ? AND id <> ? RETURNING id", (account_id, but))
    return len(rows)


async def of_account(database: Database, account_id: str) -> list[Row]:
    """Return an account's whole sessions, the last used first."""
    now = now_ms()
    return list(await database.fetch(
        "SELECT id, address, agent, created_at_ms, seen_at_ms FROM sessions WHERE account_id = ?"
        " AND state = 'whole' AND expires_at_ms > ? AND seen_at_ms > ? ORDER BY seen_at_ms DESC, id LIMIT 100",
        (account_id, now, now - IDLE_MS),
    ))


def prune(at_ms: int) -> Script[bool]:
    """Forget sessions that have ended, a batch of them; return whether there may be more."""
    rows = yield (
        "DELETE FROM sessions WHERE id IN (SELECT id FROM sessions WHERE expires_at_ms < ? LIMIT ?) RETURNING id",
        (at_ms, PRUNED_AT_ONCE),
    )
    return len(rows) == PRUNED_AT_ONCE


def _session(row: Row) -> Session:
    return Session(
        id=row["id"], state=row["state"], account_id=row["account_id"], email=row["email"], name=row["name"],
        time_zone=row["time_zone"], plan=row["plan"], has_totp=row["totp_secret"] is not None,
        proven_at_ms=row["proven_at_ms"], seen_at_ms=row["seen_at_ms"],
    )
