"""The wallet: prepaid credit, what is held of it, and the ledger entry behind every change.

`posted` is the balance the ledger adds up to, `held` what running calls have set aside; a call may
spend `posted - held`. Usage never takes a wallet below zero; only refunds and disputes can.
"""

from __future__ import annotations

from dataclasses import dataclass

from models import ledger
from models.database import Database, Script
from models.errors import InsufficientCredits, NotFound


@dataclass(frozen=True, slots=True)
class Balance:
    """Say what a wallet holds, in micro-dollars."""

    posted: int
    held: int
    disputed: bool

    @property
    def available(self) -> int:
        """Return what a new call may spend."""
        return max(self.posted - self.held, 0)


def reserve(account_id: str, amount: int) -> Script[bool]:
    """Hold an amount; return whether the wallet had it."""
    rows = yield (
        "UPDATE wallets SET held_microusd = held_microusd + ? WHERE account_id = ? AND disputed = 0"
        " AND posted_microusd - held_microusd >= ? RETURNING 1",
        (amount, account_id, amount),
    )
    return bool(rows)


def settle(account_id: str, held: int, charged: int, call_id: str, now_ms: int) -> Script[None]:
    """Give a hold up and take the charge, with its ledger entry."""
    if charged == 0:
        yield from release(account_id, held)
        return
    rows = yield (
        "UPDATE wallets SET posted_microusd = posted_microusd - ?, held_microusd = held_microusd - ?,"
        " seq = seq + 1 WHERE account_id = ? RETURNING 1",
        (charged, held, account_id),
    )
    if not rows:
        raise LookupError(f"there is no wallet of {account_id}")
    yield from ledger.append_charge(account_id, call_id, charged, now_ms)


def release(account_id: str, held: int) -> Script[None]:
    """Give a hold up without a charge."""
    if held:
        yield ("UPDATE wallets SET held_microusd = held_microusd - ? WHERE account_id = ?", (held, account_id))


def credit(
    account_id: str, amount: int, kind: str, reference: str, source: str, reason: str | None, now_ms: int
) -> Script[int]:
    """Add credit once per (kind, reference) and return the balance after it.

    A repetition changes nothing. Raises NotFound for an unknown account.
    """
    if amount <= 0:
        raise ValueError("credit must be positive")
    rows = yield (
        "UPDATE wallets SET seq = seq WHERE account_id = ? RETURNING posted_microusd", (account_id,)
    )
    if not rows:
        raise NotFound(f"there is no account {account_id}")
    known = yield ("SELECT 1 FROM ledger WHERE kind = ? AND reference = ?", (kind, reference))
    if known:
        return rows[0][0]
    return (yield from _post(account_id, amount, kind, reference, source, reason, now_ms))


def lock(account_id: str) -> Script[None]:
    """Keep everybody else's hands off a wallet until the transaction ends."""
    yield ("UPDATE wallets SET seq = seq WHERE account_id = ?", (account_id,))


def reverse(
    account_id: str, amount: int, kind: str, reference: str, source: str, reason: str | None, now_ms: int
) -> Script[None]:
    """Take back what was credited, or give that back again: the one way a balance may fall below zero.

    The caller makes sure that it happens once.
    """
    yield from _post(account_id, amount, kind, reference, source, reason, now_ms)


def freeze(account_id: str, payments: int) -> Script[None]:
    """Count disputed payments, up or down; while there is one, nothing may be spent."""
    yield ("UPDATE wallets SET disputed = disputed + ? WHERE account_id = ?", (payments, account_id))


def look(account_id: str) -> Script[Balance]:
    """Return what a wallet holds. Raises NotFound."""
    rows = yield (
        "SELECT posted_microusd, held_microusd, disputed FROM wallets WHERE account_id = ?", (account_id,)
    )
    if not rows:
        raise NotFound(f"there is no account {account_id}")
    posted, held, disputed = rows[0]
    return Balance(posted, held, bool(disputed))


def shortage(account_id: str, needed: int, included_too_small: bool) -> Script[InsufficientCredits]:
    """Return the refusal that tells a caller what is there and what is missing."""
    balance = yield from look(account_id)
    return InsufficientCredits(
        needed=needed,
        available=balance.available,
        reason="disputed" if balance.disputed else "debt" if balance.posted < 0 else "balance",
        included_too_small=included_too_small,
    )


async def balance(database: Database, account_id: str) -> Balance:
    """Return what a wallet holds, outside any transaction. Raises NotFound."""
    rows = await database.fetch(
        "SELECT posted_microusd, held_microusd, disputed FROM wallets WHERE account_id = ?", (account_id,)
    )
    if not rows:
        raise NotFound(f"there is no account {account_id}")
    posted, held, disputed = rows[0]
    return Balance(posted, held, bool(disputed))


def _post(
    account_id: str, amount: int, kind: str, reference: str, source: str, reason: str | None, now_ms: int
) -> Script[int]:
    """Change a balance, write the entry that says so, and return the balance after it."""
    rows = yield (
        "UPDATE wallets SET posted_microusd = posted_microusd + ?, seq = seq + 1 WHERE account_id = ?"
        " RETURNING posted_microusd, seq",
        (amount, account_id),
    )
    posted, seq = rows[0]
    yield from ledger.append(
        ledger.Entry(account_id, seq, kind, reference, amount, posted, source, reason, now_ms)
    )
    return posted
