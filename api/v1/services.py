"""What every handler under /v1 needs: who calls, JSON answers, refusals."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from quart import Response, g, request
from werkzeug.exceptions import HTTPException

from api.auth import Authenticator, Caller, credential_in
from api.client_address import ClientAddress
from api.errors import ApiError, from_error
from api.gateway import Gateway, Reply, Request
from api.limits import Limits, require_address, require_scope
from models import call as calls
from models import credentials, idempotency
from models.catalog import Catalog
from models.clock import now_ms
from models.database import Database
from models.errors import RateLimited

_log = logging.getLogger("tollgate.v1")
# Refusals that stand in the account's usage; a 402 of the admission has its row already.
RECORDED_STATUSES = (400, 403, 429)
BLUEPRINT = "v1"
KEYS_IN_ADDRESS = {"api_key", "apikey", "key", "x_api_key", "access_token", "token", "authorization", "secret"}

View = TypeVar("View", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Need:
    """Say what a view needs of its caller."""

    scope: str | None
    write: bool
    metered: bool


@dataclass(frozen=True, slots=True)
class Services:
    """Hold what handlers are given. One per application."""

    database: Database
    catalog: Callable[[], Catalog]
    authenticator: Authenticator
    limits: Limits
    gateway: Gateway
    public_url: str
    client_timeout_s: int
    addresses: ClientAddress
    needs: dict[str, Need] = field(default_factory=dict)

    def need(self, scope: str | None, *, write: bool = False, metered: bool = False) -> Callable[[View], View]:
        """Declare, next to its route, what a view needs. Without that it is closed to everybody.

        `scope` None needs nothing beyond a live key. A metered view is admitted by the gateway, which
        notices a key that has changed; for any other the key's row is read.
        """

        def declare(view: View) -> View:
            self.needs[f"{BLUEPRINT}.{view.__name__}"] = Need(scope, write or metered, metered)
            return view

        return declare

    async def authorise(self) -> None:
        """Let a request pass to its view as `g.caller`. Raises ApiError 400, 401, 403 or 429, RateLimited."""
        if request.query_string:
            _refuse_key_in_address()
        need = self.needs.get(request.endpoint or "")
        if need is None:
            _log.error("no scope is declared for %s", request.endpoint)
            raise ApiError(403, "scope_denied", "This path is not open.")
        g.metered_scope = need.scope if need.metered else None
        await self._check(need, await self.authenticator.caller(_credential(), fresh=not need.metered))
        if need.metered:
            g.presence = self.limits.enter(g.caller)

    async def reauthorise(self) -> None:
        """Read and check the caller anew whose key or account has changed. Raises as above."""
        await self._check(self.needs[request.endpoint], await self.authenticator.confirm(g.caller))

    async def _check(self, need: Need, caller: Caller) -> None:
        g.caller = caller
        if caller.key.addresses is not None:
            require_address(caller, self.addresses.of(request))
        if need.scope is not None:
            require_scope(caller, need.scope, write=need.write)
        if need.metered:
            self.limits.check_rate(caller)
        else:
            self.limits.count_unmetered(caller)


def _refuse_key_in_address() -> None:
    """Refuse a key in the query: whatever stands in an address is written down on its way."""
    for name, value in request.args.items(multi=True):
        if name.lower().replace("-", "_") in KEYS_IN_ADDRESS or value.startswith(credentials.PREFIX):
            raise ApiError(
                400, "invalid_request",
                "Do not send an API key in the address, where logs and caches keep it: revoke this key, and send"
                " a new one in the header Authorization: Bearer <API key>.",
                param=name[:60],
            )


def gateway_request(body: bytes) -> Request:
    """Return the facts of the current HTTP request that the gateway needs. Raises ApiError 400."""
    key = request.headers.get("idempotency-key")
    claim = None
    if key is not None:
        if not 0 < len(key) <= idempotency.KEY_LENGTH_MAX or not key.isprintable() or not key.isascii():
            raise ApiError(
                400, "invalid_request",
                f"Idempotency-Key must be 1 to {idempotency.KEY_LENGTH_MAX} printable ASCII characters.",
                param="Idempotency-Key",
            )
        claim = idempotency.Claim(key, _fingerprint(body))
    return Request(
        id=g.request_id, path=request.path.rstrip("/"), started_s=g.started_s, presence=g.presence, claim=claim
    )


def respond(reply: Reply) -> Response:
    """Return the HTTP response of a gateway's reply."""
    response = Response(reply.body, reply.status, content_type=reply.content_type)
    response.timeout = None
    response.headers.update(reply.headers)
    return response


def answer(value: Any, status: int = 200) -> Response:
    """Return a JSON answer."""
    return Response(msgspec.json.encode(value), status, content_type="application/json")


def error_response(error: ApiError) -> Response:
    """Return the HTTP response of an error."""
    response = answer(error.body(g.request_id), error.status)
    response.headers.update(error.headers)
    return response


async def refused(services: Services, error: Exception) -> Response:
    """Return the response of anything that was raised under /v1, and write refused calls down."""
    if isinstance(error, HTTPException):
        return error_response(from_http(error))
    failure = from_error(error, public_url=services.public_url)
    caller: Caller | None = g.get("caller")
    if failure.status == 401:
        failure = _unauthorised(services, failure)
    elif g.get("metered_scope") and caller is not None and failure.status in (400, 403, 404, 413, 415, 429):
        # The caller may have come from memory: a revoked key is told so, whatever else is wrong.
        try:
            await services.authenticator.confirm(caller)
        except ApiError as gone:
            return error_response(_unauthorised(services, gone))
        except Exception as unavailable:
            return error_response(from_error(unavailable, public_url=services.public_url))
        if failure.status != 429:
            try:
                services.limits.count_refused(caller)
            except RateLimited as flood:
                failure = from_error(flood, public_url=services.public_url)
        if failure.status in RECORDED_STATUSES:
            services.gateway.metering.refuse(_refusal(caller, failure))
    if failure.status == 500:
        _log.error("a request failed by our own fault", exc_info=error, extra={"request_id": g.request_id})
    return error_response(failure)


def _unauthorised(services: Services, failure: ApiError) -> ApiError:
    """Return a 401, or the 429 that takes its place for an address that had too many of them."""
    try:
        services.limits.count_unauthorised(services.addresses.of(request))
    except ApiError as flood:
        return flood
    return failure


def from_http(error: HTTPException) -> ApiError:
    """Return the error of the framework's own refusals: unknown paths, wrong methods, oversize."""
    match error.code:
        case 404:
            return ApiError(404, "not_found", f"There is nothing at {request.method} {request.path[:200]}.")
        case 405:
            return ApiError(
                405, "method_not_allowed", f"{request.path[:200]} does not take {request.method}.",
                headers={"Allow": ", ".join(sorted(getattr(error, "valid_methods", None) or []))},
            )
        case 413:
            return ApiError(413, "payload_too_large", "The body is too large.")
        case 408:
            return ApiError(408, "request_timeout", "The body did not arrive.")
        case code if code is not None and 400 <= code < 500:
            return ApiError(400, "invalid_request", "The request could not be understood.")
        case _:
            return ApiError(500, "internal_error", "Something went wrong on our side.")


def _credential() -> str | None:
    headers = request.headers
    return credential_in(headers.get("authorization"), headers.get("x-api-key"), headers.get("api-key"))


def _fingerprint(body: bytes) -> str:
    """Return what stands for method, path and canonical body of the current request."""
    try:
        canonical = msgspec.json.encode(msgspec.json.decode(body), order="deterministic")
    except (msgspec.DecodeError, RecursionError):
        canonical = body
    head = f"{request.method} {request.path.rstrip('/')}\n".encode()
    return hashlib.sha256(head + canonical).hexdigest()


def _refusal(caller: Caller, failure: ApiError) -> calls.Refusal:
    latency_ms = round((asyncio.get_running_loop().time() - g.started_s) * 1000)
    return calls.Refusal(
        call_id=g.request_id,
        account_id=caller.account_id,
        key_id=caller.key.id,
        surface=g.metered_scope,
        path=request.path.rstrip("/"),
        offer=_storable(g.get("offer", "")),
        streamed=bool(g.get("streamed", False)),
        status=failure.status,
        error_code=failure.code,
        created_at_ms=now_ms() - latency_ms,
        latency_ms=latency_ms,
    )


def _storable(text: str) -> str:
    """Return a name from a request as both databases take it: no NUL, no half of a surrogate pair."""
    return text[:100].replace("\0", "").encode("utf-8", "replace").decode()
