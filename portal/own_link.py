"""Own links: whether a verification link is opened in the browser that signed up for it.

Anybody may sign up with anybody's address and a password of their own. The browser that does so gets a
cookie made from the link's secret; only there does the link open the account with that password.
"""

from __future__ import annotations

import hashlib
import hmac

from quart import Response, request

from models.one_time_link import LIFE_MS
from portal.guard import Guard


def mark(guard: Guard, response: Response, secret: str) -> Response:
    """Let the browser that asked for a link be known again when it opens it."""
    guard.set_cookie(response, _name(guard), _mark_of(secret), LIFE_MS // 1000)
    return response


def is_ours(guard: Guard, secret: str) -> bool:
    """Return whether this browser is the one that asked for a link."""
    held = request.cookies.get(_name(guard), "")
    return hmac.compare_digest(held.encode(errors="replace"), _mark_of(secret).encode())


def _name(guard: Guard) -> str:
    return guard.session_cookie.replace("session", "signup")


def _mark_of(secret: str) -> str:
    # Not the hash that is stored: who reads the database makes no cookie from it.
    return hashlib.sha256(b"sign-up:" + secret.encode(errors="replace")).hexdigest()
