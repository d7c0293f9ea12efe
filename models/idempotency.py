"""Idempotency keys: the same key and request get the same answer, one charge, one upstream call.

A row is `running` until the transaction that settles its call stores the answer with it (`done`),
so "charged" and "answer kept" are one fact. Failures that cost nothing delete it: a retry is a real
retry. `lost` means charged, but the answer was too large to keep; `failed` means that the process
died after part of the answer had been delivered and charged.
"""

from __future__ import annotations

from dataclasses import dataclass

from models.database import Database, Script

KEPT_MS = 24 * 3600 * 1000
BODY_BYTES_MAX = 1 << 20
KEY_LENGTH_MAX = 255
PRUNED_AT_ONCE = 100


@dataclass(frozen=True, slots=True)
class Claim:
    """Ask for a key on behalf of a call. `fingerprint` stands for method, path and canonical body."""

    key: str
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Kept:
    """Hold what is known of a key that was used before: its call, and the answer when there is one."""

    call_id: str
    fingerprint: str
    state: str
    status: int | None
    content_type: str | None
    body: bytes | None


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """Hold an answer to be kept; `body` None means it was too large."""

    status: int
    content_type: str
    body: bytes | None


def claim(account_id: str, wanted: Claim, call_id: str, now_ms: int) -> Script[Kept | None]:
    """Take a key for a call; return what is kept under it when somebody took it before."""
    rows = yield (
        "INSERT INTO idempotency_keys (account_id, key, fingerprint, call_id, state, expires_at_ms)"
        " VALUES (?, ?, ?, ?, 'running', ?) ON CONFLICT (account_id, key) DO UPDATE SET"
        " fingerprint = excluded.fingerprint, call_id = excluded.call_id, state = 'running', status = NULL,"
        " content_type = NULL, body = NULL, expires_at_ms = excluded.expires_at_ms"
        " WHERE idempotency_keys.expires_at_ms <= ? AND idempotency_keys.state <> 'running' RETURNING 1",
        (account_id, wanted.key, wanted.fingerprint, call_id, now_ms + KEPT_MS, now_ms),
    )
    if rows:
        return None
    rows = yield (_SELECT, (account_id, wanted.key))
    return _kept(rows[0])


def keep(account_id: str, key: str, call_id: str, answer: StoredAnswer) -> Script[None]:
    """Store the answer of a settled call under its key."""
    yield (
        "UPDATE idempotency_keys SET state = ?, status = ?, content_type = ?, body = ?"
        " WHERE account_id = ? AND key = ? AND call_id = ?",
        (
            "lost" if answer.body is None else "done", answer.status, answer.content_type, answer.body,
            account_id, key, call_id,
        ),
    )


def fail(account_id: str, key: str, call_id: str) -> Script[None]:
    """Mark a key whose call was charged for a part that was delivered before its process died."""
    yield (
        "UPDATE idempotency_keys SET state = 'failed', status = 502"
        " WHERE account_id = ? AND key = ? AND call_id = ?",
        (account_id, key, call_id),
    )


def forget(account_id: str, key: str, call_id: str) -> Script[None]:
    """Free a key whose call cost nothing."""
    yield (
        "DELETE FROM idempotency_keys WHERE account_id = ? AND key = ? AND call_id = ?",
        (account_id, key, call_id),
    )


def prune(now_ms: int) -> Script[bool]:
    """Forget keys that have expired, a batch of them; return whether there may be more."""
    rows = yield (
        "DELETE FROM idempotency_keys WHERE expires_at_ms <= ? AND state <> 'running' AND (account_id, key) IN"
        " (SELECT account_id, key FROM idempotency_keys WHERE expires_at_ms <= ? AND state <> 'running' LIMIT ?)"
        " RETURNING key",
        (now_ms, now_ms, PRUNED_AT_ONCE),
    )
    return len(rows) == PRUNED_AT_ONCE


async def find(database: Database, account_id: str, key: str, now_ms: int) -> Kept | None:
    """Return what is kept under a key, or None when it is free."""
    rows = await database.fetch(_SELECT, (account_id, key))
    if not rows or (rows[0]["expires_at_ms"] <= now_ms and rows[0]["state"] != "running"):
        return None
    return _kept(rows[0])


_SELECT = (
    "SELECT call_id, fingerprint, state, status, content_type, body, expires_at_ms"
    " FROM idempotency_keys WHERE account_id = ? AND key = ?"
)


def _kept(row: object) -> Kept:
    call_id, fingerprint, state, status, content_type, body, _ = row
    return Kept(call_id, fingerprint, state, status, content_type, None if body is None else bytes(body))
