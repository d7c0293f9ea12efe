"""The edge: what holds for every answer and every request, whichever room it is for.

`guarded` stands between the server and Quart. It gives every answer the headers of its kind, so that no
route can forget them, and lets a request's body in only when somebody wants to read it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any
from urllib.parse import urlsplit

import msgspec

from models.ids import new_id
from models.settings import Settings

Receive = Callable[[], Awaitable[dict[str, Any]]]
Dropping = Callable[[Receive], AbstractAsyncContextManager[None]]
Headers = list[tuple[bytes, bytes]]
Asgi = Callable[[dict[str, Any], Any, Any], Awaitable[None]]

HSTS_KEPT_S = 365 * 24 * 3600
SMALL_BODY_BYTES = 64 << 10
# The headers a key comes in: a cache that kept an answer for one must not give it to another.
_VARY = b"Authorization, X-API-Key, Api-Key"
_ALL: Headers = [
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
]
_CHECKOUT = "https://checkout.stripe.com"
# Any origin may read the API: its callers prove themselves by a key, never by a cookie.
_API: Headers = [
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
    (b"cross-origin-resource-policy", b"cross-origin"),
]
_PRIVATE: Headers = [(b"cache-control", b"private, no-store"), (b"vary", _VARY)]
# What we may refuse before there is a request to speak of, in the API's own words.
_CODES = {400: "invalid_request", 500: "internal_error"}
_MESSAGES = {
    400: "The request is not valid HTTP, or can be read in two ways.",
    431: "The head of the request is too large.",
    500: "Something went wrong on our side.",
    501: "The request's transfer coding is not supported; send it plain or chunked.",
}

_log = logging.getLogger("tollgate.edge")


class Policy:
    """Know the headers of every answer."""

    def __init__(self, settings: Settings, cors: Headers) -> None:
        secure = [(b"strict-transport-security", b"max-age=%d" % HSTS_KEPT_S)] if settings.production else []
        self._pages = [*_ALL, *_pages(settings), *secure]
        self._described = [*_ALL, *_API, *cors, *secure]
        self._api = [*self._described, *_PRIVATE]

    def of(self, path: str) -> Headers:
        """Return the headers of answers at a path."""
        if path.startswith("/v1/") or path == "/v1":
            return self._api
        return self._described if path == "/openapi.json" else self._pages

    def refusal(self, status: int) -> tuple[Headers, bytes]:
        """Return headers and body of an answer to what is no request that a room could take."""
        request_id = new_id("req")
        server = status >= 500
        body = msgspec.json.encode({
            "error": {
                "message": _MESSAGES.get(status, _MESSAGES[400]),
                "type": "server_error" if server and status != 501 else "invalid_request_error",
                "param": None,
                "code": _CODES.get(status, "invalid_request"),
                "request_id": request_id,
            },
            "request_id": request_id,
        })
        headers = [(b"content-type", b"application/json"), (b"x-request-id", request_id.encode()), *self._api]
        return headers, body


def _pages(settings: Settings) -> Headers:
    """Return what pages add. A form may lead to a checkout, which is Stripe's or that of its stand-in."""
    base = settings.stripe.api_base if settings.stripe is not None else None
    policy = (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self';"
        f" connect-src 'self'; form-action 'self' {base or _CHECKOUT}; frame-ancestors 'none';"
        " base-uri 'none'; object-src 'none'"
    )
    return [
        (b"content-security-policy", policy.encode()),
        (b"cross-origin-resource-policy", b"same-origin"),
    ]


def guarded(serve: Asgi, policy: Policy, dropping: Dropping) -> Asgi:
    """Return the application with the edge around it.

    `dropping(receive)` takes what still comes while the edge itself answers.
    """

    async def refuse(receive: Receive, send: Any, status: int) -> None:
        headers, body = policy.refusal(status)
        length = (b"content-length", b"%d" % len(body))
        async with dropping(receive):
            await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
            await send({"type": "http.response.body", "body": body, "more_body": False})

    async def asgi(scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await serve(scope, receive, send)
            return
        if scope["type"] == "websocket":
            # There are none here. Our server does not even ask; another one might.
            await receive()
            await send({"type": "websocket.close", "code": 1000})
            return
        if not _has_path(scope["path"]):
            await refuse(receive, send, 400)
            return
        headers = policy.of(scope["path"])
        gate = Gate(scope, receive) if _is_to_wait(scope) else None
        started = False

        # Not a coroutine of its own: there would be one for every piece of a stream.
        def dressed(message: dict[str, Any]) -> Awaitable[None]:
            nonlocal started
            if not started and message["type"] == "http.response.start":
                started = True
                message["headers"] = [*message["headers"], *headers]
                if gate is not None:
                    gate.shut()
            return send(message)

        try:
            await serve(scope, receive if gate is None else gate.receive, dressed)
        except Exception:
            # Nothing of Quart's handlers caught it. Without this Hypercorn would answer in its own way.
            if started:
                raise
            _log.exception("a request failed outside of every room")
            await refuse(receive, dressed, 500)

    return asgi


class Gate:
    """Keep a request's body out until it is wanted.

    Quart takes in whatever comes, 32 MB of it, while a key is still being looked up. Behind the gate a
    body waits in the client's socket instead, but for the few pieces that the server had read already.
    """

    def __init__(self, scope: dict[str, Any], receive: Receive) -> None:
        self._receive = receive
        self._open = asyncio.Event()
        self._wanted = True
        self._continue = scope["extensions"].get("tollgate.continue") if "extensions" in scope else None
        scope["tollgate.body"] = self

    async def open(self) -> None:
        """Let the body in; a client that waits to be told so is told."""
        if self._continue is not None:
            await self._continue()
        self._open.set()

    def shut(self) -> None:
        """Drop what still comes: there is an answer."""
        self._wanted = False
        self._open.set()

    async def receive(self) -> dict[str, Any]:
        """Return the next message from the client, once the gate is open."""
        if not self._open.is_set():
            await self._open.wait()
        message = await self._receive()
        while not self._wanted and message["type"] == "http.request":
            message = await self._receive()
        return message


def _has_path(path: str) -> bool:
    """Return whether a request's target names a path, be it after a scheme and a host."""
    if path.startswith("/"):
        return True
    try:
        return urlsplit(path).path.startswith("/") and path.startswith(("http://", "https://"))
    except ValueError:
        return False


def _is_to_wait(scope: dict[str, Any]) -> bool:
    """Return whether a request's body is to wait: a small one has come with its head, more often than not."""
    for name, value in scope["headers"]:
        if name == b"content-length":
            return int(value) > SMALL_BODY_BYTES or "tollgate.continue" in scope.get("extensions", ())
        if name == b"transfer-encoding":
            return True
    return False
