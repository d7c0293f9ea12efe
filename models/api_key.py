"""API keys: made, found by their hash, limited, revoked."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from tortoise import fields
from tortoise.models import Model

from models import clock, credentials, ids
from models.account import Account
from models.database import Database, Row, Script
from models.errors import InsufficientCredits, NotFound

SPEND_PERIODS = ("day", "month")
NAME_LENGTH_MAX = 100
NO_LIMIT = (1 << 63) - 1  # the largest BIGINT


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
            " WHERE key_spend.spent_microusd + key_spend.reserved_microusd + ? <= ? RETURNING period",
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
