"""Tries: how often a stranger may sign up, sign in or ask for a link, and that answers tell nothing.

Windows are counted in the database, so that all processes count together. Addresses and names stand in
them as hashes. A browser that an account has signed in with before holds a device cookie and has windows
of its own: a stranger who guesses at the account cannot keep its owner out.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from quart import Response, g, request

from models import rate_limit
from models.account import owner_domain_of
from models.clock import now_ms
from models.database import Script
from models.errors import RateLimited
from models.password import TooManySignIns
from models.rate_limit import Limit
from models.settings import Settings
from portal.forms import Form
from portal.guard import Guard

MINUTE_MS = 60 * 1000
SIGN_IN_MS = 15 * MINUTE_MS
SIGN_INS_PER_ACCOUNT = 10
SIGN_INS_PER_NEIGHBOURHOOD = 100
HOUR_MS = 60 * MINUTE_MS
SIGN_UPS_PER_NEIGHBOURHOOD = 10
LETTERS_PER_MAILBOX = 5
ASKED_PER_NEIGHBOURHOOD = 30
CODES_PER_ACCOUNT = 10
PASSKEYS_BEGUN_PER_ACCOUNT = 10
DEVICE_KEPT_S = 365 * 24 * 3600
# Longer than the work of a sign-up takes, so that neither the work nor its absence shows.
LEVEL_S = 0.35

# A script that counts, and raises RateLimited when a window is full. What it counts was read from the request
# before: scripts run elsewhere.
Count = Callable[[], Script[None]]


class Tries:
    """Count tries, and know the browsers that an account has signed in with."""

    def __init__(self, guard: Guard, settings: Settings, neighbourhood: Callable[[str], str]) -> None:
        self._guard = guard
        self._secret = settings.secret_key.encode()
        self._sign_ups_per_domain = settings.sign_ups_per_domain
        self._neighbourhood = neighbourhood
        self.device_cookie = guard.session_cookie.replace("session", "device")

    def sign_up(self, mailbox: str) -> Count:
        """Return the count of a sign-up."""
        windows = [(f"sign-up-from:{self._from()}", SIGN_UPS_PER_NEIGHBOURHOOD, HOUR_MS)]
        if (domain := owner_domain_of(mailbox)) is not None:
            windows.append((f"sign-up-at:{_hashed(domain)}", self._sign_ups_per_domain, HOUR_MS))
        return _count(*windows)

    def letter(self, mailbox: str) -> Count:
        """Return the count of a letter that somebody asks for."""
        return _count((f"letter-to:{_hashed(mailbox)}", LETTERS_PER_MAILBOX, HOUR_MS))

    def ask(self) -> Count:
        """Return the count of a question of a stranger."""
        return _count((f"asked-from:{self._from()}", ASKED_PER_NEIGHBOURHOOD, SIGN_IN_MS))

    def sign_in(self, email: str) -> Count:
        """Return the count of a try at an account, for before its password is checked."""
        device = self._device_of(email)
        if device is not None:
            return _count((f"sign-in:{_hashed(email)}:{device}", SIGN_INS_PER_ACCOUNT, SIGN_IN_MS))
        return _count(
            (f"sign-in-from:{self._from()}", SIGN_INS_PER_NEIGHBOURHOOD, SIGN_IN_MS),
            (f"sign-in:{_hashed(email)}", SIGN_INS_PER_ACCOUNT, SIGN_IN_MS),
        )

    def confirm(self, account_id: str) -> Count:
        """Return the count of a try at a password of an account that somebody is in already."""
        return _count((f"confirm:{account_id}", SIGN_INS_PER_ACCOUNT, SIGN_IN_MS))

    def redeem(self, account_id: str) -> Count:
        """Return the count of a try at a code."""
        return _count(
            (f"redeem-from:{self._from()}", ASKED_PER_NEIGHBOURHOOD, SIGN_IN_MS),
            (f"redeem:{account_id}", CODES_PER_ACCOUNT, SIGN_IN_MS),
        )

    def second(self, account_id: str) -> Count:
        """Return the count of a try at a second factor."""
        return _count((f"second:{account_id}", SIGN_INS_PER_ACCOUNT, SIGN_IN_MS))

    def passkey(self, account_id: str) -> Count:
        """Return the count of a passkey that somebody begins to add."""
        return _count((f"passkey:{account_id}", PASSKEYS_BEGUN_PER_ACCOUNT, SIGN_IN_MS))

    def remember_device(self, response: Response, email: str) -> None:
        """Let the browser that has signed in be known again."""
        if self._device_of(email) is None:
            name = secrets.token_urlsafe(16)
            value = f"{name}.{self._signed(email, name)}"
            self._guard.set_cookie(response, self.device_cookie, value, DEVICE_KEPT_S)

    def _device_of(self, email: str) -> str | None:
        name, _, signature = request.cookies.get(self.device_cookie, "").partition(".")
        good = hmac.compare_digest(signature.encode(errors="replace"), self._signed(email, name).encode())
        return _hashed(name) if good else None

    def _signed(self, email: str, name: str) -> str:
        text = f"device\0{email}\0{name}".encode(errors="replace")
        return hmac.new(self._secret, text, hashlib.sha256).hexdigest()

    def _from(self) -> str:
        return _hashed(self._neighbourhood(g.address))


def refuse(form: Form, error: RateLimited | TooManySignIns) -> int:
    """Say on a form why it was not even looked at, and return the status to answer with."""
    if isinstance(error, TooManySignIns):
        form.refuse("form", "Too many people are signing in at this moment. Try again in a few seconds.")
        return 503
    form.refuse("form", sentence_of(error))
    return 429


def sentence_of(error: RateLimited) -> str:
    """Return what is said to who has tried too often."""
    minutes = max(1, -(-(error.until_ms - now_ms()) // MINUTE_MS))
    return f"Too many tries. Try again in {minutes} {'minute' if minutes == 1 else 'minutes'}."


@asynccontextmanager
async def level(seconds: float = LEVEL_S) -> AsyncIterator[None]:
    """Take the same time whatever is done inside."""
    started_s = time.monotonic()
    try:
        yield
    finally:
        await asyncio.sleep(max(0.0, seconds - (time.monotonic() - started_s)))


def _count(*windows: tuple[str, int, int]) -> Count:
    def script() -> Script[None]:
        for bucket, per_window, window_ms in windows:
            yield from rate_limit.count(Limit(bucket, per_window), now_ms(), window_ms=window_ms)

    return script


def _hashed(text: str) -> str:
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()[:32]
