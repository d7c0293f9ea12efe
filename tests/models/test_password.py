"""Passwords: what will do, what is right, and how long it takes to say no."""

from __future__ import annotations

import asyncio
import time

import pytest

from models import password
from models.password import TooManySignIns, WeakPassword


@pytest.mark.parametrize("text", ["four unrelated words", "ünïcödé änd möre", "p@ssw0rd-of-my-own", "x7k2 " * 200])
async def test_a_good_password_is_right_and_nothing_else_is(text: str) -> None:
    password.require_fit(text, "ada@example.com")
    stored = await password.hash_of(text)
    assert stored.startswith("$argon2id$v=19$m=19456,t=2,p=1$") and text not in stored
    assert await password.is_right(text, stored)
    for wrong in (text + " ", text.upper() + "x", "", "\ud800", "\0", "x" * 2000):
        assert not await password.is_right(wrong, stored)
    assert not password.is_outdated(stored)


@pytest.mark.parametrize("text", [
    "", "short", "123456789", "1234567890", "aaaaaaaaaaaa", "abababababab", "Password1234",
    "ada.lovelace@example.com", "x" * 1025, "with a lone \ud800 half", "with a \0 zero",
])
def test_what_will_not_do(text: str) -> None:
    with pytest.raises(WeakPassword):
        password.require_fit(text, "ada.lovelace@example.com")


async def test_without_a_password_none_is_right_and_it_takes_as_long() -> None:
    stored = await password.hash_of("four unrelated words")
    taken = []
    for against in (stored, None) * 8:
        started_s = time.perf_counter()
        assert not await password.is_right("a wrong password", against)
        taken.append(time.perf_counter() - started_s)
    real, none = min(taken[0::2]), min(taken[3::2])
    assert 0.5 < none / real < 2
    assert not await password.is_right("four unrelated words", "no hash at all")


async def test_a_queue_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(password, "HASHES_WAITING_MAX", 5)
    outcomes = await asyncio.gather(*(password.hash_of("x" * 12) for _ in range(20)), return_exceptions=True)
    assert sum(isinstance(outcome, str) for outcome in outcomes) == 5
    assert sum(isinstance(outcome, TooManySignIns) for outcome in outcomes) == 15
    assert await password.hash_of("again room for one")
