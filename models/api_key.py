"""API keys: made, found by their hash, limited, rotated, revoked.

What an account does to its keys happens under the lock of the account's own row, so that no two of its
requests together go past the number of keys it may have.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from tortoise import fields
from tortoise.models import Model

from models import clock, credentials, ids
from models.account import Account
from models.database import Database, Row, Script
from models.errors import DomainError, InsufficientCredits, NotFound

SPEND_PERIODS = ("day", "month")
NAME_LENGTH_MAX = 100
NO_LIMIT = (1 << 63) - 1  # the largest BIGINT
LIVE_KEYS_MAX = 100
LISTED_AT_ONCE = 50
DAY_MS = 24 * 3600 * 1000
# A key that has done nothing for so long is called idle.
IDLE_MS = 30 * DAY_MS
# How long a form for a new key may stay open; see `id_of_form`.
FORM_LIFE_MS = DAY_MS
CLOCKS_APART_MS = 60 * 1000


class EmailNotVerified(DomainError):
    """Report an account that must verify its address before it gets a key."""


class TooManyKeys(DomainError):
    """Report an account that has as many live keys as it may have."""


class MadeAlready(DomainError):
    """Report that the form was sent before: its key exists, and was shown to whoever sent it first."""


class ApiKey(Model):
    """Hold one key, without the key itself. Absent limits are None; lists are JSON.

    `version` grows with every change that a cached caller must notice. `rotated_from` is the key that this
    one took over from.
    """

    id = fields.CharField(primary_key=True, max_length=40)
    account = fields.ForeignKeyField("models.Account", related_name="keys", db_constraint=False)
    name = fields.TextField()
    hash = fields.TextField()
    shown_prefix = fields.TextField()
    shown_suffix = fields.TextField()
    scopes = fields.TextField(null=True)
    models = fields.TextField(null=True)
    addresses = fields.TextField(null=True)
    spend_limit_microusd = fields.BigIntField(null=True)
    spend_period = fields.TextField(null=True)
    requests_per_minute = fields.BigIntField(null=True)
    hidden = fields.BigIntField(default=0)
    version = fields.BigIntField(default=1)
    created_at_ms = fields.BigIntField()
    expires_at_ms = fields.BigIntField(null=True)
    revoked_at_ms = fields.BigIntField(null=True)
    last_used_at_ms = fields.BigIntField(null=True)
    rotated_from = fields.TextField(null=True)

    class Meta:
        table = "api_keys"


@dataclass(frozen=True, slots=True)
class LiveKey:
    """Hold what a call needs to know of its key and account, as read in one row.

    `scopes`, `models` and `addresses` narrow the key when present. `account_version` and `version`
    let the admission notice that this value has become stale.
    """

    id: str
    version: int
    account_id: str
    account_version: int
    plan: str
    scopes: frozenset[str] | None
    models: frozenset[str] | None
    addresses: tuple[str, ...] | None
    spend_limit_microusd: int | None
    spend_period: str | None
    requests_per_minute: int | None
    expires_at_ms: int | None


@dataclass(frozen=True, slots=True)
class Limits:
    """Say what narrows a key; None does not narrow. Amounts in micro-dollars."""

    scopes: list[str] | None = None
    models: list[str] | None = None
    addresses: list[str] | None = None
    spend_limit_microusd: int | None = None
    spend_period: str | None = None
    requests_per_minute: int | None = None

    def columns(self) -> tuple[str | int | None, ...]:
        """Return the values as they are stored, in the order of _LIMIT_COLUMNS."""
        return (
            _listed(self.scopes), _listed(self.models), _listed(self.addresses), self.spend_limit_microusd,
            self.spend_period if self.spend_limit_microusd is not None else None, self.requests_per_minute,
        )


_LIMIT_COLUMNS = ("scopes", "models", "addresses", "spend_limit_microusd", "spend_period", "requests_per_minute")
_LIVE = (
    "k.revoked_at_ms IS NULL AND (k.expires_at_ms IS NULL OR k.expires_at_ms > ?) AND a.state = 'active'"
)
_SELECT_LIVE = (
    "SELECT k.id, k.version, k.account_id, a.version AS account_version, a.plan, k.scopes, k.models,"
    " k.addresses, k.spend_limit_microusd, k.spend_period, k.requests_per_minute, k.expires_at_ms"
    f" FROM api_keys k JOIN accounts a ON a.id = k.account_id WHERE k.hash = ? AND {_LIVE}"
)
# Used inside the admission's INSERT: the key is live and is the one the caller was built from.
LIVE_AND_UNCHANGED = (
    "EXISTS (SELECT 1 FROM api_keys k JOIN accounts a ON a.id = k.account_id"
    f" WHERE k.id = ? AND k.version = ? AND a.version = ? AND {_LIVE})"
)


async def create(
    account: Account,
    name: str,
    *,
    scopes: list[str] | None = None,
    models: list[str] | None = None,
    addresses: list[str] | None = None,
    spend_limit_microusd: int | None = None,
    spend_period: str | None = None,
    requests_per_minute: int | None = None,
    expires_at_ms: int | None = None,
) -> tuple[ApiKey, str]:
    """Create a key and return it with its plain text, which exists nowhere else from now on."""
    plain = credentials.new_key()
    key = await ApiKey.create(
        id=ids.new_id("key"),
        account_id=account.id,
        name=name.strip()[:NAME_LENGTH_MAX],
        hash=credentials.key_hash(plain),
        shown_prefix=plain[: credentials.SHOWN_PREFIX_LENGTH],
        shown_suffix=plain[-credentials.SHOWN_SUFFIX_LENGTH :],
        scopes=_listed(scopes),
        models=_listed(models),
        addresses=_listed(addresses),
        spend_limit_microusd=spend_limit_microusd,
        spend_period=spend_period,
        requests_per_minute=requests_per_minute,
        created_at_ms=clock.now_ms(),
        expires_at_ms=expires_at_ms,
    )
    return key, plain


def id_of_form(account_id: str, form: str) -> str:
    """Return the id of the key that a form makes, the same however often it is sent.

    `form` is an id that the form was given when it was shown; it says nothing about the key's own id to
    another account. Raises MadeAlready for a form so old that it may not be sent any more.
    """
    try:
        made_at_ms = ids.made_at_ms(form)
    except ValueError:
        raise MadeAlready(form) from None
    if not -CLOCKS_APART_MS <= clock.now_ms() - made_at_ms < FORM_LIFE_MS:
        raise MadeAlready(form)
    digest = hashlib.sha256(f"{account_id}:{form}".encode()).digest()
    return ids.id_with("key", made_at_ms, int.from_bytes(digest[:10]))


def make(
    account_id: str, key_id: str, plain: str, name: str, limits: Limits, expires_at_ms: int | None
) -> Script[None]:
    """Write down a new key whose plain text the caller holds.

    Raises EmailNotVerified, TooManyKeys, or MadeAlready when there is a key of this id.
    """
    rows = yield (
        "UPDATE accounts SET version = version WHERE id = ? AND state = 'active' RETURNING email_verified_at_ms",
        (account_id,),
    )
    if not rows:
        raise NotFound(f"there is no account {account_id}")
    if rows[0][0] is None:
        raise EmailNotVerified(account_id)
    yield from _insert(account_id, key_id, plain, name, limits.columns(), expires_at_ms, None)


def edit(account_id: str, key_id: str, name: str, limits: Limits, expires_at_ms: int | None) -> Script[None]:
    """Change the name and limits of a live key; every process notices at its next call. Raises NotFound."""
    assignments = ", ".join(f"{column} = ?" for column in _LIMIT_COLUMNS)
    rows = yield (
        f"UPDATE api_keys SET name = ?, {assignments}, expires_at_ms = ?, version = version + 1"
        f" WHERE id = ? AND account_id = ? AND hidden = 0 AND {_LIVE_ROW} RETURNING id",
        (name[:NAME_LENGTH_MAX], *limits.columns(), expires_at_ms, key_id, account_id, clock.now_ms()),
    )
    if not rows:
        raise NotFound(f"there is no key {key_id}")


def rotate(
    account_id: str, key_id: str, new_id: str, plain: str, *, grace_ms: int, expires_at_ms: int | None
) -> Script[str]:
    """Make a key with the name and limits of another, which ends after a grace; return the name.

    A limit on spending counts anew. Raises NotFound unless the old key is live, TooManyKeys, MadeAlready.
    """
    yield ("UPDATE accounts SET version = version WHERE id = ? RETURNING id", (account_id,))
    if (yield ("SELECT 1 FROM api_keys WHERE id = ? AND account_id = ?", (new_id, account_id))):
        raise MadeAlready(new_id)
    now = clock.now_ms()
    rows = yield (
        "UPDATE api_keys SET version = version + 1, expires_at_ms ="
        " CASE WHEN expires_at_ms IS NULL OR expires_at_ms > ? THEN ? ELSE expires_at_ms END"
        f" WHERE id = ? AND account_id = ? AND hidden = 0 AND {_LIVE_ROW}"
        f" RETURNING name, {', '.join(_LIMIT_COLUMNS)}",
        (now + grace_ms, now + grace_ms, key_id, account_id, now),
    )
    if not rows:
        raise NotFound(f"there is no key {key_id}")
    name, *columns = rows[0]
    yield from _insert(account_id, new_id, plain, name, tuple(columns), expires_at_ms, key_id)
    return name


def _insert(
    account_id: str, key_id: str, plain: str, name: str, columns: tuple[str | int | None, ...],
    expires_at_ms: int | None, rotated_from: str | None,
) -> Script[None]:
    """Write a key's row under the lock of its account."""
    now = clock.now_ms()
    if (yield ("SELECT 1 FROM api_keys WHERE id = ?", (key_id,))):
        raise MadeAlready(key_id)
    rows = yield (
        f"SELECT COUNT(*) FROM api_keys WHERE account_id = ? AND hidden = 0 AND {_LIVE_ROW}", (account_id, now)
    )
    if rows[0][0] >= LIVE_KEYS_MAX:
        raise TooManyKeys(account_id)
    yield (
        "INSERT INTO api_keys (id, account_id, name, hash, shown_prefix, shown_suffix,"
        f" {', '.join(_LIMIT_COLUMNS)}, created_at_ms, expires_at_ms, rotated_from)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            key_id, account_id, name[:NAME_LENGTH_MAX], credentials.key_hash(plain),
            plain[: credentials.SHOWN_PREFIX_LENGTH], plain[-credentials.SHOWN_SUFFIX_LENGTH :], *columns, now,
            expires_at_ms, rotated_from,
        ),
    )


async def shown(
    database: Database, account_id: str, *, ended: bool = False, before: str | None = None
) -> Sequence[Row]:
    """Return an account's keys, newest first: all live ones, or a page of those that have ended.

    A page has one row more than LISTED_AT_ONCE when another follows. Hidden keys are never among them.
    """
    now = clock.now_ms()
    if not ended:
        return await database.fetch(
            f"{_SELECT_SHOWN} WHERE account_id = ? AND hidden = 0 AND {_LIVE_ROW} ORDER BY id DESC",
            (account_id, now),
        )
    condition, arguments = ("AND id < ?", (before,)) if before is not None else ("", ())
    return await database.fetch(
        f"{_SELECT_SHOWN} WHERE account_id = ? AND hidden = 0 AND NOT ({_LIVE_ROW}) {condition}"
        " ORDER BY id DESC LIMIT ?",
        (account_id, now, *arguments, LISTED_AT_ONCE + 1),
    )


async def find(database: Database, account_id: str, key_id: str) -> Row:
    """Return one key of an account, live or not. Raises NotFound."""
    rows = await database.fetch(
        f"{_SELECT_SHOWN} WHERE id = ? AND account_id = ? AND hidden = 0", (key_id, account_id)
    )
    if not rows:
        raise NotFound(f"there is no key {key_id}")
    return rows[0]


async def charged_since(database: Database, account_id: str, day: str) -> dict[str, int]:
    """Return what each key of an account was charged from a UTC day on, in micro-dollars."""
    rows = await database.fetch(
        "SELECT key_id, CAST(SUM(charged_microusd) AS BIGINT) AS charged FROM usage_days"
        " WHERE account_id = ? AND day >= ? GROUP BY key_id",
        (account_id, day),
    )
    return {row["key_id"]: row["charged"] for row in rows}


def state_of(key: Row, now_ms: int) -> str:
    """Return a key's state: active, idle, expired or revoked."""
    if key["revoked_at_ms"] is not None:
        return "revoked"
    if key["expires_at_ms"] is not None and key["expires_at_ms"] <= now_ms:
        return "expired"
    last_ms = key["last_used_at_ms"] or key["created_at_ms"]
    return "active" if now_ms - last_ms < IDLE_MS else "idle"


_LIVE_ROW = "revoked_at_ms IS NULL AND (expires_at_ms IS NULL OR expires_at_ms > ?)"
_SELECT_SHOWN = (
    f"SELECT id, name, shown_prefix, shown_suffix, {', '.join(_LIMIT_COLUMNS)}, created_at_ms, expires_at_ms,"
    " revoked_at_ms, last_used_at_ms, rotated_from FROM api_keys"
)


async def revoke(account_id: str, key_id: str) -> None:
    """Revoke a key of an account: every process refuses it from its next call on. Raises NotFound."""
    found = await ApiKey.filter(id=key_id, account_id=account_id).exists()
    if not found:
        raise NotFound(f"there is no key {key_id}")
    await ApiKey.filter(id=key_id, account_id=account_id, revoked_at_ms=None).update(
        revoked_at_ms=clock.now_ms()
    )


async def live_by_hash(database: Database, key_hash: str) -> LiveKey | None:
    """Return the key with this hash unless it is unknown, revoked, expired, or its account inactive."""
    rows = await database.fetch(_SELECT_LIVE, (key_hash, clock.now_ms()))
    if not rows:
        return None
    row = rows[0]
    return LiveKey(
        id=row["id"],
        version=row["version"],
        account_id=row["account_id"],
        account_version=row["account_version"],
        plan=row["plan"],
        scopes=_frozen(row["scopes"]),
        models=_frozen(row["models"]),
        addresses=tuple(json.loads(row["addresses"])) if row["addresses"] else None,
        spend_limit_microusd=row["spend_limit_microusd"],
        spend_period=row["spend_period"],
        requests_per_minute=row["requests_per_minute"],
        expires_at_ms=row["expires_at_ms"],
    )


def is_live(key_id: str, now_ms: int) -> Script[bool]:
    """Return whether a key may still be used."""
    rows = yield (
        f"SELECT 1 FROM api_keys k JOIN accounts a ON a.id = k.account_id WHERE k.id = ? AND {_LIVE}",
        (key_id, now_ms),
    )
    return bool(rows)


async def of_ended_keys(database: Database, owner: str) -> set[str]:
    """Return the open calls of a process whose key was revoked or whose account is not active."""
    rows = await database.fetch(
        "SELECT c.id FROM calls c JOIN api_keys k ON k.id = c.key_id JOIN accounts a ON a.id = k.account_id"
        " WHERE c.owner = ? AND c.state = 'open' AND (k.revoked_at_ms IS NOT NULL OR a.state <> 'active')",
        (owner,),
    )
    return {row["id"] for row in rows}


async def names(
    database: Database, account_id: str, *, among: set[str] | None = None, limit: int = 1000
) -> Sequence[Row]:
    """Return (id, name) of an account's keys, also the revoked ones, the newest first; only some if so asked."""
    if among is not None and not among:
        return []
    asked = sorted(among or ())
    only = f" AND id IN ({', '.join('?' * len(asked))})" if asked else ""
    return await database.fetch(
        f"SELECT id, name FROM api_keys WHERE account_id = ?{only} ORDER BY id DESC LIMIT ?",
        (account_id, *asked, limit),
    )


def note_used(last_used_ms: dict[str, int]) -> Script[None]:
    """Write down when keys were last used, for display; gathered outside any request."""
    for key_id, at_ms in sorted(last_used_ms.items()):
        yield (
            "UPDATE api_keys SET last_used_at_ms = ? WHERE id = ?"
            " AND (last_used_at_ms IS NULL OR last_used_at_ms < ?)",
            (at_ms, key_id, at_ms),
        )


def spend_period(period: str, at_ms: int) -> str:
    """Return the name of the day or month that a key's spending limit counts in."""
    return clock.day(at_ms) if period == "day" else clock.month(at_ms)


def reserve_spending(key_id: str, period: str, limit_microusd: int, amount_microusd: int) -> Script[None]:
    """Set an amount aside under a key's own limit. Raises InsufficientCredits ("key_limit")."""
    rows = []
    if amount_microusd <= limit_microusd:
        rows = yield (
            "INSERT INTO key_spend (key_id, period, reserved_microusd, spent_microusd) VALUES (?, ?, ?, 0)"
            " ON CONFLICT (key_id, period) DO UPDATE"
            " SET reserved_microusd = key_spend.reserved_microusd + ?"
            " WHERE key_spend.spent_microusd + key_spend.reserved_microusd + ? <= ? RETURNING 1",
            (key_id, period, amount_microusd, amount_microusd, amount_microusd, limit_microusd),
        )
    if not rows:
        used = yield (
            "SELECT reserved_microusd + spent_microusd AS used FROM key_spend WHERE key_id = ? AND period = ?",
            (key_id, period),
        )
        available = max(limit_microusd - (used[0]["used"] if used else 0), 0)
        raise InsufficientCredits(needed=amount_microusd, available=available, reason="key_limit")


def settle_spending(key_id: str, period: str, reserved_microusd: int, spent_microusd: int) -> Script[None]:
    """Turn what was set aside under a key's limit into what was spent."""
    yield (
        "UPDATE key_spend SET reserved_microusd = reserved_microusd - ?, spent_microusd = spent_microusd + ?"
        " WHERE key_id = ? AND period = ?",
        (reserved_microusd, spent_microusd, key_id, period),
    )


def _listed(values: list[str] | None) -> str | None:
    return None if values is None else json.dumps(sorted(values))


def _frozen(text: str | None) -> frozenset[str] | None:
    return None if text is None else frozenset(json.loads(text))
