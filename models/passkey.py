"""Passkeys: key pairs that a device keeps; it signs a challenge of ours, which is good once (WebAuthn, level 3).

A passkey is asked to verify its user, by a finger or a PIN, and so stands for both factors.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace

import webauthn
from webauthn.helpers import (
    base64url_to_bytes,
    bytes_to_base64url,
    generate_challenge,
    parse_authentication_credential_json,
    parse_client_data_json,
)
from webauthn.helpers.structs import (
    AuthenticatorSelectionCriteria,
    PublicKeyCredentialDescriptor,
    ResidentKeyRequirement,
    UserVerificationRequirement,
)

from models import ids, outbox
from models.clock import now_ms
from models.database import Database, Row, Script
from models.errors import DomainError, NotFound

REGISTER, SIGN_IN = "register", "sign_in"
CHALLENGE_MS = 5 * 60 * 1000
CHALLENGES_MAX = 5
PASSKEYS_MAX = 20
NAME_LENGTH_MAX = 60
PRUNED_AT_ONCE = 500


class PasskeyRefused(DomainError):
    """Report an answer of a device that will not do; its owner is not told why."""


@dataclass(frozen=True, slots=True)
class Party:
    """Be who asks: the domain that passkeys belong to, the origin of its pages, its name."""

    domain: str
    origin: str
    name: str


@dataclass(frozen=True, slots=True)
class NewPasskey:
    """Hold a passkey that a device has made."""

    credential_id: str
    public_key: str
    sign_count: int


def new_challenge() -> bytes:
    """Return a new challenge: 512 random bits."""
    return generate_challenge()


def registration_options(party: Party, challenge: bytes, account_id: str, email: str, known: list[Row]) -> str:
    """Return what a browser needs to make a passkey, as JSON."""
    return webauthn.options_to_json(webauthn.generate_registration_options(
        rp_id=party.domain, rp_name=party.name, user_id=account_id.encode(), user_name=email, challenge=challenge,
        authenticator_selection=AuthenticatorSelectionCriteria(
            resident_key=ResidentKeyRequirement.REQUIRED, user_verification=UserVerificationRequirement.REQUIRED
        ),
        exclude_credentials=[
            PublicKeyCredentialDescriptor(id=base64url_to_bytes(row["credential_id"])) for row in known
        ],
    ))


def sign_in_options(party: Party, challenge: bytes) -> str:
    """Return what a browser needs to find and use a passkey, as JSON."""
    return webauthn.options_to_json(webauthn.generate_authentication_options(
        rp_id=party.domain, challenge=challenge, user_verification=UserVerificationRequirement.REQUIRED
    ))


def offer(purpose: str, challenge: bytes, account_id: str | None = None) -> Script[None]:
    """Remember a challenge until it is answered; of an account no more than its newest few."""
    if account_id is not None:
        yield (
            "DELETE FROM challenges WHERE account_id = ? AND hash NOT IN (SELECT hash FROM challenges"
            " WHERE account_id = ? ORDER BY expires_at_ms DESC, hash LIMIT ?)",
            (account_id, account_id, CHALLENGES_MAX - 1),
        )
    yield (
        "INSERT INTO challenges (hash, purpose, account_id, expires_at_ms) VALUES (?, ?, ?, ?)",
        (_hashed(challenge), purpose, account_id, now_ms() + CHALLENGE_MS),
    )


def take(purpose: str, challenge: bytes, account_id: str | None = None) -> Script[None]:
    """Use up a challenge that was offered. Raises PasskeyRefused."""
    rows = yield (
        "DELETE FROM challenges WHERE hash = ? AND purpose = ? AND COALESCE(account_id, '') = ?"
        " AND expires_at_ms > ? RETURNING hash",
        (_hashed(challenge), purpose, account_id or "", now_ms()),
    )
    if not rows:
        raise PasskeyRefused


def answered_challenge(credential: str) -> bytes:
    """Return the challenge that a device says it has answered. Raises PasskeyRefused."""
    return _parsed(_challenge, credential)


def credential_of(credential: str) -> str:
    """Return the id of the passkey that a device has answered with. Raises PasskeyRefused."""
    return bytes_to_base64url(_parsed(parse_authentication_credential_json, credential).raw_id)


def read_registration(party: Party, credential: str, challenge: bytes) -> NewPasskey:
    """Return the passkey that a device has made. Raises PasskeyRefused."""
    made = _parsed(
        webauthn.verify_registration_response, credential=credential, expected_challenge=challenge,
        expected_rp_id=party.domain, expected_origin=party.origin, require_user_verification=True,
    )
    return NewPasskey(
        bytes_to_base64url(made.credential_id), bytes_to_base64url(made.credential_public_key), made.sign_count
    )


def read_sign_in(party: Party, credential: str, challenge: bytes, stored: Row) -> int:
    """Check the signature of a stored passkey and return its new count. Raises PasskeyRefused."""
    used = _parsed(
        webauthn.verify_authentication_response, credential=credential, expected_challenge=challenge,
        expected_rp_id=party.domain, expected_origin=party.origin, require_user_verification=True,
        credential_public_key=base64url_to_bytes(stored["public_key"]),
        credential_current_sign_count=stored["sign_count"],
    )
    return used.new_sign_count


async def of_credential(database: Database, credential_id: str) -> Row:
    """Return a passkey of an active account. Raises PasskeyRefused."""
    rows = await database.fetch(
        "SELECT p.id, p.account_id, p.public_key, p.sign_count, a.email FROM passkeys p"
        " JOIN accounts a ON a.id = p.account_id WHERE p.credential_id = ? AND a.state = 'active'"
        " AND a.email_verified_at_ms IS NOT NULL",
        (credential_id,),
    )
    if not rows:
        raise PasskeyRefused
    return rows[0]


async def of_account(database: Database, account_id: str) -> list[Row]:
    """Return the passkeys of an account, newest first."""
    return list(await database.fetch(
        "SELECT id, credential_id, name, created_at_ms, last_used_at_ms FROM passkeys WHERE account_id = ?"
        " ORDER BY id DESC LIMIT ?",
        (account_id, PASSKEYS_MAX),
    ))


def add(account_id: str, made: NewPasskey, name: str, notice: outbox.Letter) -> Script[None]:
    """Add a passkey to an account. Raises PasskeyRefused when somebody has it, or too many are there."""
    count = yield ("SELECT COUNT(*) AS n FROM passkeys WHERE account_id = ?", (account_id,))
    if count[0]["n"] >= PASSKEYS_MAX:
        raise PasskeyRefused
    rows = yield (
        "INSERT INTO passkeys (id, account_id, credential_id, public_key, sign_count, name, created_at_ms)"
        " VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (credential_id) DO NOTHING RETURNING id",
        (
            ids.new_id("pass"), account_id, made.credential_id, made.public_key, made.sign_count,
            name[:NAME_LENGTH_MAX], now_ms(),
        ),
    )
    if not rows:
        raise PasskeyRefused
    yield from _tell(account_id, notice)


def remove(account_id: str, passkey_id: str, notice: outbox.Letter) -> Script[None]:
    """Remove a passkey of an account. Raises NotFound."""
    rows = yield (
        "DELETE FROM passkeys WHERE id = ? AND account_id = ? RETURNING id", (passkey_id, account_id)
    )
    if not rows:
        raise NotFound(f"there is no passkey {passkey_id}")
    yield from _tell(account_id, notice)


def note_used(passkey_id: str, sign_count: int) -> Script[None]:
    """Note that a passkey was used. Raises PasskeyRefused when its count has been seen before."""
    rows = yield (
        "UPDATE passkeys SET sign_count = ?, last_used_at_ms = ? WHERE id = ? AND (sign_count < ? OR ? = 0)"
        " RETURNING id",
        (sign_count, now_ms(), passkey_id, sign_count, sign_count),
    )
    if not rows:
        raise PasskeyRefused


def prune(at_ms: int) -> Script[bool]:
    """Forget challenges that have expired, a batch of them; return whether there may be more."""
    rows = yield (
        "DELETE FROM challenges WHERE hash IN (SELECT hash FROM challenges WHERE expires_at_ms < ? LIMIT ?)"
        " RETURNING hash",
        (at_ms, PRUNED_AT_ONCE),
    )
    return len(rows) == PRUNED_AT_ONCE


def _challenge(credential: str) -> bytes:
    sent = json.loads(credential)["response"]["clientDataJSON"]
    return parse_client_data_json(base64url_to_bytes(sent)).challenge


def _tell(account_id: str, notice: outbox.Letter) -> Script[None]:
    rows = yield ("SELECT email FROM accounts WHERE id = ?", (account_id,))
    yield from outbox.put(replace(notice, recipient=rows[0]["email"], account_id=account_id))


def _parsed(read, *arguments, **named):
    """Read what a device sent. It may be anything, and so may be what the reader trips over."""
    try:
        return read(*arguments, **named)
    except Exception as error:
        raise PasskeyRefused from error


def _hashed(challenge: bytes) -> str:
    return hashlib.sha256(challenge).hexdigest()
