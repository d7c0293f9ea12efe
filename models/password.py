"""Passwords: argon2id, hashed and checked in two threads of their own.

Parameters are the second of the OWASP Password Storage Cheat Sheet's equal choices (19 MiB, two passes,
one lane): the library's own default takes 64 MiB a hash, with which a burst of sign-ins exhausts a small
machine. Two at a time, a bounded queue behind them, and nothing on the event loop.
"""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

from argon2 import PasswordHasher
from argon2.exceptions import InvalidHashError, VerificationError

from models.errors import DomainError

LENGTH_MIN = 10
BYTES_MAX = 1024
HASHES_AT_ONCE = 2
HASHES_WAITING_MAX = 100

_hasher = PasswordHasher(time_cost=2, memory_cost=19_456, parallelism=1)
_threads = ThreadPoolExecutor(HASHES_AT_ONCE, "argon2")
_waiting = 0


class WeakPassword(DomainError):
    """Report a password that will not do, in a sentence for its owner."""


class TooManySignIns(DomainError):
    """Report that more passwords wait to be checked than will be in reasonable time."""


def require_fit(password: str, email: str = "") -> None:
    """Raise WeakPassword unless a new password will do."""
    if len(password) < LENGTH_MIN:
        raise WeakPassword(f"Use {LENGTH_MIN} characters or more.")
    if not _is_text(password) or len(password.encode()) > BYTES_MAX:
        raise WeakPassword(f"Use at most {BYTES_MAX} bytes of ordinary text.")
    name = email.partition("@")[0].lower()
    if len(set(password)) < 4 or password.lower() in (email.lower(), name) or password.lower() in _COMMON:
        raise WeakPassword("That one is too easy to guess. A few unrelated words make a good password.")


async def hash_of(password: str) -> str:
    """Return the hash to store. Raises TooManySignIns."""
    return await _in_thread(_hasher.hash, password)


async def is_right(password: str, stored: str | None) -> bool:
    """Return whether a password is the stored one. Without one it takes as long and is not.

    Raises TooManySignIns.
    """
    if not _is_text(password) or len(password.encode()) > BYTES_MAX:
        password, stored = "", None
    matches = await _in_thread(_matches, password, stored or _nobodys_hash())
    return matches and stored is not None


def is_outdated(stored: str) -> bool:
    """Return whether a stored hash was made with other parameters than today's."""
    return _hasher.check_needs_rehash(stored)


def _matches(password: str, stored: str) -> bool:
    try:
        return _hasher.verify(stored, password)
    except (VerificationError, InvalidHashError):
        return False


async def _in_thread(work, *arguments):
    global _waiting
    if _waiting >= HASHES_WAITING_MAX:
        raise TooManySignIns
    _waiting += 1
    try:
        return await asyncio.get_running_loop().run_in_executor(_threads, work, *arguments)
    finally:
        _waiting -= 1


@lru_cache(maxsize=1)
def _nobodys_hash() -> str:
    return _hasher.hash(os.urandom(16).hex())


def _is_text(text: str) -> bool:
    """Return whether a text can be encoded: a lone surrogate cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in text


# Passwords of ten characters and more that lists of leaked ones begin with.
_COMMON = frozenset({
    "1234567890", "12345678910", "123456789a", "qwertyuiop", "password12", "password123", "password1234",
    "1q2w3e4r5t", "1qaz2wsx3edc", "q1w2e3r4t5", "qwerty12345", "qwerty123456", "iloveyou123", "0123456789",
    "9876543210", "administrator", "letmein123", "welcome123", "changeme123", "asdfghjkl1", "passw0rd123",
    "correcthorsebatterystaple", "0987654321", "abcdefghij", "abcd123456", "abc1234567",
})
