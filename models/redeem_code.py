"""Redeem codes: promotional credit that the operator gives away, to each account once.

A code is kept as a hash and its first four characters. Redeeming it takes one use by a guarded UPDATE, then writes
down who it was: two of one account's tries, at once and in different processes, end with one of them undone.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass

from models import ids, ledger, wallet
from models.clock import now_ms
from models.database import Database, Script
from models.errors import DomainError, NotFound

# Crockford's base 32: no letter that is taken for a digit. Sixteen of them are 80 random bits.
ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
LENGTH = 16
GROUP_LENGTH = 4
USES_MAX = 1_000_000
LISTED_MAX = 1000
_MISREAD = str.maketrans("OIL", "011", " -‐‑–\t")
_COLUMNS = "id, shown_prefix, amount_microusd, uses_max, used, note, created_at_ms, expires_at_ms, revoked_at_ms"


class NotRedeemed(DomainError):
    """Report a code that gives nothing. The message is the sentence for whoever typed it."""


@dataclass(frozen=True, slots=True)
class RedeemCode:
    """Be one code, without the code."""

    id: str
    shown_prefix: str
    amount_microusd: int
    uses_max: int
    used: int
    note: str
    created_at_ms: int
    expires_at_ms: int | None
    revoked_at_ms: int | None

    def state(self, at_ms: int) -> str:
        """Return whether it can be redeemed, in a word or two."""
        if self.revoked_at_ms is not None:
            return "revoked"
        if self.expires_at_ms is not None and self.expires_at_ms <= at_ms:
            return "expired"
        return "good" if self.used < self.uses_max else "used up"


@dataclass(frozen=True, slots=True)
class Redemption:
    """Say what a code gave."""

    id: str
    amount_microusd: int


def new_code() -> str:
    """Return a new code. It is to be shown once and never stored."""
    characters = "".join(secrets.choice(ALPHABET) for _ in range(LENGTH))
    return "-".join(characters[start : start + GROUP_LENGTH] for start in range(0, LENGTH, GROUP_LENGTH))


def code_hash(text: str) -> str:
    """Return the hash of a code however it was typed: in any case, with or without its hyphens."""
    return hashlib.sha256(_plain(text).encode(errors="replace")).hexdigest()


def create(
    code: str, amount_microusd: int, *, uses_max: int = 1, expires_at_ms: int | None = None, note: str = ""
) -> Script[None]:
    """Write a code down."""
    yield (
        "INSERT INTO redeem_codes (id, hash, shown_prefix, amount_microusd, uses_max, note, created_at_ms,"
        " expires_at_ms) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        (
            ids.new_id("code"), code_hash(code), _plain(code)[:GROUP_LENGTH], amount_microusd, uses_max, note,
            now_ms(), expires_at_ms,
        ),
    )


def revoke(code_or_id: str) -> Script[None]:
    """End a code, named by itself or by its id; what it gave stays given. Raises NotFound."""
    rows = yield (
        "UPDATE redeem_codes SET revoked_at_ms = COALESCE(revoked_at_ms, ?) WHERE id = ? OR hash = ? RETURNING id",
        (now_ms(), code_or_id, code_hash(code_or_id)),
    )
    if not rows:
        raise NotFound("there is no such code")


async def newest(database: Database) -> list[RedeemCode]:
    """Return the codes, newest first."""
    rows = await database.fetch(f"SELECT {_COLUMNS} FROM redeem_codes ORDER BY id DESC LIMIT ?", (LISTED_MAX,))
    return [RedeemCode(*row) for row in rows]


def redeem(account_id: str, typed: str) -> Script[Redemption]:
    """Give an account what a code is worth, once. Raises NotRedeemed, and then nothing has changed."""
    hashed, now = code_hash(typed), now_ms()
    rows = yield (
        "UPDATE redeem_codes SET used = used + 1 WHERE hash = ? AND revoked_at_ms IS NULL AND used < uses_max"
        " AND (expires_at_ms IS NULL OR expires_at_ms > ?) RETURNING id, amount_microusd, shown_prefix",
        (hashed, now),
    )
    if not rows:
        yield from _refuse(account_id, hashed, now)
    code_id, amount, shown = rows[0]
    redemption = Redemption(ids.new_id("rdm"), amount)
    mine = yield (
        "INSERT INTO redemptions (id, code_id, account_id, amount_microusd, redeemed_at_ms) VALUES (?, ?, ?, ?, ?)"
        " ON CONFLICT (code_id, account_id) DO NOTHING RETURNING id",
        (redemption.id, code_id, account_id, amount, now),
    )
    if not mine:
        raise NotRedeemed("You have redeemed this code already.")
    yield from wallet.credit(
        account_id, amount, ledger.PROMOTION, redemption.id, ledger.PROMOTIONS, f"Redeem code {shown}…", now
    )
    return redemption


async def of_account(database: Database, account_id: str, redemption_id: str) -> Redemption | None:
    """Return a redemption of an account."""
    rows = await database.fetch(
        "SELECT id, amount_microusd FROM redemptions WHERE id = ? AND account_id = ?", (redemption_id, account_id)
    )
    return Redemption(*rows[0]) if rows else None


def _refuse(account_id: str, hashed: str, now: int) -> Script[None]:
    """Say why a code gives nothing."""
    rows = yield (f"SELECT {_COLUMNS} FROM redeem_codes WHERE hash = ?", (hashed,))
    if not rows:
        raise NotRedeemed("There is no such code. Look at it again: it has 16 letters and digits.")
    code = RedeemCode(*rows[0])
    mine = yield ("SELECT 1 FROM redemptions WHERE code_id = ? AND account_id = ?", (code.id, account_id))
    if mine:
        raise NotRedeemed("You have redeemed this code already.")
    raise NotRedeemed({
        "revoked": "This code is no longer valid.",
        "expired": "This code has expired.",
        "used up": "This code has been used up.",
    }.get(code.state(now), "This code was changed just now. Try again."))


def _plain(text: str) -> str:
    return text.strip().upper().translate(_MISREAD)
