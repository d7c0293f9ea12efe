"""The second factor: codes of six digits by time (RFC 6238), and ten recovery codes for a lost device.

A code is good once: the last step that was used is kept. Recovery codes are kept as hashes.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
from dataclasses import replace

import pyotp

from models import outbox, session
from models.clock import now_ms
from models.database import Database, Script
from models.errors import DomainError

STEP_MS = 30_000
# One step of 30 s in either direction: clocks of telephones differ, and typing takes time.
STEPS_AROUND = (0, -1, 1)
CODES = 10
CODE_BYTES = 10


class WrongCode(DomainError):
    """Report a code that is wrong or was used."""


def secret_from(seed: str) -> str:
    """Return a secret made from 256 random bits, the same from the same."""
    return base64.b32encode(hashlib.sha256(f"totp:{seed}".encode()).digest()[:20]).decode()


def address(secret: str, email: str, issuer: str) -> str:
    """Return what a QR code says to an app."""
    return pyotp.TOTP(secret).provisioning_uri(name=email, issuer_name=issuer)


def step_of(secret: str, code: str, at_ms: int) -> int | None:
    """Return the step whose code this is, near a moment; None when it is a wrong one."""
    offered = "".join(code.split())
    now = at_ms // STEP_MS
    for step in (now + around for around in STEPS_AROUND):
        if hmac.compare_digest(pyotp.TOTP(secret).generate_otp(step).encode(), offered.encode(errors="replace")):
            return step
    return None


def new_codes() -> list[str]:
    """Return ten recovery codes of 80 bits."""
    codes = (base64.b32encode(secrets.token_bytes(CODE_BYTES)).decode().lower() for _ in range(CODES))
    return ["-".join(code[at : at + 4] for at in range(0, len(code), 4)) for code in codes]


def turn_on(
    account_id: str, secret: str, step: int, codes: list[str], notice: outbox.Letter, *, kept_session: str
) -> Script[bool]:
    """Turn the second factor on and end the other sessions; return whether it was off."""
    rows = yield (
        "UPDATE accounts SET totp_secret = ?, totp_last_step = ? WHERE id = ? AND totp_secret IS NULL"
        " AND state = 'active' RETURNING email",
        (secret, step, account_id),
    )
    if not rows:
        return False
    yield from set_codes(account_id, codes)
    yield from session.end_all(account_id, but=kept_session)
    yield from outbox.put(replace(notice, recipient=rows[0]["email"], account_id=account_id))
    return True


def turn_off(account_id: str, notice: outbox.Letter) -> Script[bool]:
    """Turn the second factor off; return whether it was on."""
    rows = yield (
        "UPDATE accounts SET totp_secret = NULL WHERE id = ? AND totp_secret IS NOT NULL RETURNING email",
        (account_id,),
    )
    if not rows:
        return False
    yield ("DELETE FROM recovery_codes WHERE account_id = ?", (account_id,))
    yield from outbox.put(replace(notice, recipient=rows[0]["email"], account_id=account_id))
    return True


def set_codes(account_id: str, codes: list[str]) -> Script[None]:
    """Replace an account's recovery codes."""
    yield ("DELETE FROM recovery_codes WHERE account_id = ?", (account_id,))
    for code in codes:
        yield (
            "INSERT INTO recovery_codes (account_id, hash) VALUES (?, ?)", (account_id, _hashed(account_id, code))
        )


def use(account_id: str, code: str) -> Script[None]:
    """Use a code of the app or a recovery code, which is good once. Raises WrongCode."""
    rows = yield ("SELECT totp_secret FROM accounts WHERE id = ? AND totp_secret IS NOT NULL", (account_id,))
    if not rows:
        raise WrongCode
    step = step_of(rows[0]["totp_secret"], code, now_ms())
    if step is not None:
        used = yield (
            "UPDATE accounts SET totp_last_step = ? WHERE id = ? AND totp_last_step < ? RETURNING id",
            (step, account_id, step),
        )
    else:
        used = yield (
            "UPDATE recovery_codes SET used_at_ms = ? WHERE account_id = ? AND hash = ? AND used_at_ms IS NULL"
            " RETURNING hash",
            (now_ms(), account_id, _hashed(account_id, code)),
        )
    if not used:
        raise WrongCode


async def codes_left(database: Database, account_id: str) -> int:
    """Return how many recovery codes are not used yet."""
    rows = await database.fetch(
        "SELECT COUNT(*) AS n FROM recovery_codes WHERE account_id = ? AND used_at_ms IS NULL", (account_id,)
    )
    return rows[0]["n"]


def _hashed(account_id: str, code: str) -> str:
    plain = "".join(character for character in code.lower() if character.isalnum())
    return hashlib.sha256(f"{account_id}:{plain}".encode(errors="replace")).hexdigest()
