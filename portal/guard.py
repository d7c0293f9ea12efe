"""The guard: who may see a page, and that a form was sent from one of ours.

Every page is for signed-in accounts unless its view says otherwise (`for_anyone`, `for_half_signed_in`).
Signed in is who holds a session's cookie. A page is refused to an unknown host name; whatever changes
something must come from our own pages, by the browser's word (Sec-Fetch-Site or Origin) and by a form
token that only they can know.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Awaitable, Callable
from ipaddress import ip_address
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

from quart import Blueprint, Response, current_app, g, request
from werkzeug.exceptions import BadRequest, Forbidden, RequestEntityTooLarge, UnsupportedMediaType

from models import session as sessions
from models.clock import now_ms
from models.database import Database
from models.settings import Settings

SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
FORM_TYPES = ("application/x-www-form-urlencoded", "multipart/form-data")
FORM_BYTES_MAX = 1 << 20
TOKEN_FIELD = "csrf_token"
TOKEN_HEADER = "x-csrf-token"
ANYONE, HALF, SIGNED_IN = "anyone", "half", "signed in"

View = TypeVar("View", bound=Callable[..., Awaitable[Any]])


def for_anyone(view: View) -> View:
    """Open a view to everybody, signed in or not."""
    view.access = ANYONE  # type: ignore[attr-defined]
    return view


def for_half_signed_in(view: View) -> View:
    """Open a view to who has shown a password and owes the second factor, and to nobody else."""
    view.access = HALF  # type: ignore[attr-defined]
    return view


class Guard:
    """Stand before every view of a blueprint."""

    def __init__(self, database: Database, settings: Settings, address: Callable[[], str]) -> None:
        self._database = database
        self._settings = settings
        self._address = address
        prefix = "__Host-" if settings.production else ""
        self.session_cookie = f"{prefix}session"
        self.visit_cookie = f"{prefix}visit"
        self._own = urlsplit(settings.public_url)

    def watch(self, blueprint: Blueprint) -> None:
        """Stand before the views of a blueprint."""
        blueprint.before_request(self._admit)
        blueprint.after_request(self._mark)
        blueprint.register_error_handler(sessions.SessionEnded, self._thrown_out)

    async def _admit(self) -> Response | None:
        if not self._is_our_host(request.headers.get("host", "")):
            raise BadRequest("This address is not served here.")
        g.address = self._address()
        g.fresh_visit = None
        g.session = await self._session()
        access = getattr(current_app.view_functions[request.endpoint], "access", SIGNED_IN)
        if request.method not in SAFE_METHODS:
            await self._require_own_form()
        if access == ANYONE:
            return None
        state = sessions.HALF if access == HALF else sessions.WHOLE
        if g.session is None or g.session.state != state:
            return self._to_sign_in()
        self._note_seen(g.session)
        return None

    async def _session(self) -> sessions.Session | None:
        cookie = request.cookies.get(self.session_cookie)
        return await sessions.find(self._database, cookie) if cookie else None

    def _note_seen(self, session: sessions.Session) -> None:
        now = now_ms()
        if now - session.seen_at_ms > sessions.SEEN_STEP_MS:
            # Nobody waits for it: a page is not slower because the clock went on.
            self._database.own(self._database.run(lambda: sessions.seen(session.id, now))).add_done_callback(
                lambda task: task.cancelled() or task.exception()
            )

    async def _thrown_out(self, _: Exception) -> Response:
        return self.end_session(self._to_sign_in())

    def _to_sign_in(self) -> Response:
        here = request.full_path.rstrip("?") if request.method == "GET" else "/dashboard"
        where = f"/login?next={quote(here, safe='/')}"
        if request.headers.get("hx-request") == "true":
            return Response(b"", 204, headers={"hx-redirect": where})
        return Response(b"", 303, headers={"location": where})

    async def _require_own_form(self) -> None:
        site = request.headers.get("sec-fetch-site")
        origin = request.headers.get("origin")
        if site is not None:
            own = site in ("same-origin", "none")
        else:
            own = origin is not None and self._is_our_origin(origin)
        if not own:
            raise Forbidden("This form was sent from another site.")
        if request.mimetype not in FORM_TYPES:
            raise UnsupportedMediaType("Send a form.")
        await self._let_large_form_in()
        offered = request.headers.get(TOKEN_HEADER) or (await request.form).get(TOKEN_FIELD, "")
        if not hmac.compare_digest(offered.encode(errors="replace"), form_token(self).encode()):
            raise Forbidden("This page is too old. Load it again, then repeat what you did.")

    async def _let_large_form_in(self) -> None:
        """Let in a form that the edge keeps waiting for its size; strangers have no use for one."""
        gate = request.scope.get("tollgate.body")
        if gate is None:
            return
        if g.session is None or not 0 < (request.content_length or 0) <= FORM_BYTES_MAX:
            raise RequestEntityTooLarge
        await gate.open()

    def _is_our_host(self, host: str) -> bool:
        if host.lower() == self._own.netloc.lower():
            return True
        if self._settings.production:
            return False
        name = _name_of(host)
        return name == "localhost" or _is_address(name)

    def _is_our_origin(self, origin: str) -> bool:
        scheme, _, host = origin.partition("://")
        return scheme == self._own.scheme and self._is_our_host(host)

    async def _mark(self, response: Response) -> Response:
        if g.get("fresh_visit") is not None:
            self.set_cookie(response, self.visit_cookie, g.fresh_visit)
        # A view that may be kept says so; nothing else of the portal is kept anywhere.
        response.headers.setdefault("cache-control", "no-store")
        response.headers.add("vary", "Cookie, HX-Request, HX-Request-Type")
        return response

    def set_cookie(self, response: Response, name: str, value: str, max_age_s: int | None = None) -> None:
        """Set a cookie that scripts cannot read and other sites cannot send along."""
        response.set_cookie(
            name, value, max_age=max_age_s, path="/", secure=self._settings.production, httponly=True,
            samesite="Lax",
        )

    def begin_session(self, response: Response, cookie: str) -> Response:
        """Give the client the cookie of a session that has begun."""
        self.set_cookie(response, self.session_cookie, cookie, sessions.LIFE_MS // 1000)
        return response

    def end_session(self, response: Response) -> Response:
        """Take the client's cookie away."""
        response.delete_cookie(
            self.session_cookie, path="/", secure=self._settings.production, httponly=True, samesite="Lax"
        )
        return response


def form_token(guard: Guard) -> str:
    """Return the token that this visitor's forms must carry; one who has no cookie yet is given one."""
    if "session" not in g:
        return ""  # an address that no view serves, and so a page without forms
    cookie = request.cookies.get(guard.session_cookie) if g.session is not None else None
    cookie = cookie or g.fresh_visit or request.cookies.get(guard.visit_cookie)
    if not cookie:
        cookie = g.fresh_visit = sessions.new_cookie()
    return hashlib.sha256(b"form:" + cookie.encode(errors="replace")).hexdigest()


def safe_next(target: str | None, otherwise: str = "/dashboard") -> str:
    """Return where to go after signing in: a path of ours, whatever was asked for."""
    if not target or not target.startswith("/") or target.startswith(("//", "/\\")):
        return otherwise
    if not all("!" <= character <= "~" for character in target) or "\\" in target:
        return otherwise
    try:
        parts = urlsplit(target)
    except ValueError:
        return otherwise
    return target if not parts.scheme and not parts.netloc and not parts.path.startswith("//") else otherwise


def _name_of(host: str) -> str:
    """Return the name or address of a host with or without its port; empty when it is none."""
    try:
        parts = urlsplit(f"//{host}")
        # Reading the port is what checks it.
        return parts.hostname or "" if parts.netloc == host and parts.port != 0 and "@" not in host else ""
    except ValueError:
        return ""


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
