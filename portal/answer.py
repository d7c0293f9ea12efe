"""Answers of the portal: a whole page, a fragment of one, a form again with its errors, a way onward."""

from __future__ import annotations

from typing import Any

from quart import Response, g, redirect, request

from portal.rendering import render

# What a page says at its top after something was done, by the name that stands in its address.
SAID = {
    "saved": "Saved.",
    "revoked": "The key is revoked. It is refused from now on.",
    "signed-out": "You are signed out.",
    "session-ended": "That session is ended.",
    "sessions-ended": "All other sessions are ended.",
    "password-changed": "Your password is changed and all other sessions are ended.",
    "verified": "Your address is verified. Welcome.",
    "email-changed": "Your address is changed.",
    "totp-on": "The second factor is on.",
    "totp-off": "The second factor is off.",
    "passkey-added": "The passkey is added.",
    "passkey-removed": "The passkey is removed.",
    "closed": "Your account is closed.",
    "password-reset": "Your password is changed. Sign in with the new one.",
    "recharge-on": "Auto-recharge is on.",
    "recharge-off": "Auto-recharge is off.",
    "card-forgotten": "The card is forgotten, and auto-recharge is off.",
    "email-asked": "A link is on its way to the new address. Until it is used, nothing changes.",
    "key-saved": "Saved. It holds from the key's next call on.",
    "key-made": "That form had made its key already, or was too old. A key is shown only once: if you have not"
                " stored it, rotate or revoke it.",
}


async def page(template: str, *, status: int = 200, **view: Any) -> Response:
    """Return a rendered page or fragment; 422 for a form that is shown again with its errors."""
    said = SAID.get(request.args.get("said", ""))
    text = await render(template, said=said, session=g.get("session"), **view)
    return Response(text, status, content_type="text/html; charset=utf-8")


async def onward(path: str) -> Response:
    """Send the browser to another page after something was done; htmx follows like a link."""
    return redirect(path, 303)


def wants_fragment() -> bool:
    """Return whether htmx asks for a part of the page and not for the page."""
    return request.headers.get("hx-request-type") == "partial"
