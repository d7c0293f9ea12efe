"""Identifiers: typed by a prefix, sorted by time, unguessable in their second half.

The body is a ULID (https://github.com/ulid/spec): 48 bits of milliseconds, then 80 random bits, in
26 characters of Crockford's base 32, lower case here.
"""

from __future__ import annotations

import secrets

from models.clock import now_ms

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
_PAIRS = [a + b for a in _ALPHABET for b in _ALPHABET]
BODY_LENGTH = 26


def new_id(prefix: str) -> str:
    """Return a new id such as "req_01jd3w6k5v8zq0m2n4p6r8t0vx"."""
    return f"{prefix}_{_encoded((now_ms() << 80) | secrets.randbits(80))}"


def first_id_at(prefix: str, at_ms: int) -> str:
    """Return the smallest id that a moment can have, for range queries over time."""
    return f"{prefix}_{_encoded(max(at_ms, 0) << 80)}"


def id_with(prefix: str, at_ms: int, rest: int) -> str:
    """Return the id of a moment whose 80 bits that follow are given, for an id that can be found again."""
    return f"{prefix}_{_encoded((at_ms << 80) | rest)}"


def made_at_ms(some_id: str) -> int:
    """Return when an id was made. Raises ValueError when it is not one of ours."""
    _, _, body = some_id.partition("_")
    if len(body) != BODY_LENGTH:
        raise ValueError(f"{some_id!r} is not an id")
    value = 0
    for character in body:
        value = (value << 5) | _ALPHABET.index(character)
    return value >> 80


def _encoded(value: int) -> str:
    # 130 bits hold the 128: thirteen pairs of ten bits, the first pair's top two bits are 0.
    return "".join([_PAIRS[(value >> shift) & 1023] for shift in range(120, -10, -10)])
