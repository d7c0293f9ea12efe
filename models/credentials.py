"""API keys as text: how one is made, checked offline, hashed and shown.

A key is `sk-tg-`, 30 base62 characters from a secure source (178 bits) and 6 base62 characters of
the CRC-32 over what precedes them, so that a scanner recognises a leaked key without asking us, and
a mistyped one is refused without asking the database.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import string
import zlib

PREFIX = "sk-tg-"
SECRET_LENGTH = 30
CHECKSUM_LENGTH = 6
_BASE62 = string.digits + string.ascii_uppercase + string.ascii_lowercase
_SHAPE = re.compile(rf"{PREFIX}[0-9A-Za-z]{{{SECRET_LENGTH + CHECKSUM_LENGTH}}}")
SHOWN_PREFIX_LENGTH = len(PREFIX) + 4
SHOWN_SUFFIX_LENGTH = 4


def new_key() -> str:
    """Return a new API key. It is to be shown once and never stored."""
    body = PREFIX + "".join(secrets.choice(_BASE62) for _ in range(SECRET_LENGTH))
    return body + _checksum(body)


def is_well_formed(text: str) -> bool:
    """Return whether a text has the shape and checksum of a key."""
    return _SHAPE.fullmatch(text) is not None and _checksum(text[:-CHECKSUM_LENGTH]) == text[-CHECKSUM_LENGTH:]


def key_hash(key: str) -> str:
    """Return the SHA-256 of a key in hex: the only form in which it is stored."""
    return hashlib.sha256(key.encode()).hexdigest()


def _checksum(body: str) -> str:
    value = zlib.crc32(body.encode())
    digits = ""
    for _ in range(CHECKSUM_LENGTH):
        value, digit = divmod(value, 62)
        digits = _BASE62[digit] + digits
    return digits
