"""What every handler under /v1 needs: who calls, JSON answers, refusals."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import parse_qsl

import msgspec
from quart import Response, g, request
from werkzeug.exceptions import HTTPException

from api.auth import Authenticator, Caller, credential_in
from api.client_address import ClientAddress
from api.errors import ApiError, from_error
from api.exchange import Exchange, Need, Reply
from api.gateway import Gateway, Request
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

ANY_KEY = Need(None, write=False, metered=False)

View = TypeVar("View", bound=Callable[..., Any])


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

    def need(self, need: Need) -> Callable[[View], View]:
        """Declare, next to its route, what a view needs. Without that it is closed to everybody."""

        def declare(view: View) -> View:
            self.needs[f"{BLUEPRINT}.{view.__name__}"] = need
            return view

        return declare

    async def authorise_view(self) -> None:
        """Let a request pass to its view. Raises as `authorise`."""
        await self.authorise(g.exchange, self.needs.get(request.endpoint or ""))

    async def authorise(self, exchange: Exchange, need: Need | None) -> None:
        """Let a request pass to its route, with its caller. Raises ApiError 400, 401, 403 or 429, RateLimited."""
        if exchange.query:
            _refuse_key_in_address(exchange.query)
        if need is None:
            _log.error("no scope is declared for %s %s", exchange.method, exchange.path)
            raise ApiError(403, "scope_denied", "This path is not open.")
        exchange.need = need
        caller = await self.authenticator.caller(_credential(exchange), fresh=not need.metered)
        await self._check_as_now(exchange, caller, known=need.metered)
        if need.metered:
            exchange.presence = self.limits.enter(exchange.caller, exchange.at_end)

    async def authorise_by_hash(self, exchange: Exchange, need: Need, key_hash: str) -> None:
        """Let a call of one of our own pages pass under a key that it knows by its hash. Raises as above."""
        exchange.need = need
        await self._check_as_now(exchange, await self.authenticator.caller_by_hash(key_hash), known=True)
        exchange.presence = self.limits.enter(exchange.caller, exchange.at_end)

    async def reauthorise(self, exchange: Exchange) -> None:
        """Read and check the caller anew whose key or account has changed. Raises as above."""
        self._check(exchange, await self.authenticator.confirm(exchange.caller))

    async def _check_as_now(self, exchange: Exchange, caller: Caller, *, known: bool) -> None:
        """Check a caller; one who was known already and is refused may be allowed more by now."""
        try:
            self._check(exchange, caller)
        except (ApiError, RateLimited):
            if not known or not await self.authenticator.has_changed(caller):
                raise
            self._check(exchange, await self.authenticator.caller_by_hash(caller.key_hash))

    def _check(self, exchange: Exchange, caller: Caller) -> None:
        exchange.caller, need = caller, exchange.need
        if caller.key.addresses is not None:
            require_address(caller, self.addresses.of(exchange))
        if need.scope is not None:
            require_scope(caller, need.scope, write=need.write)
        if need.metered:
            self.limits.check_rate(caller)
        else:
            self.limits.count_unmetered(caller)


def _refuse_key_in_address(query: bytes) -> None:
    """Refuse a key in the query: whatever stands in an address is written down on its way."""
    for name, value in parse_qsl(query.decode("latin-1"), keep_blank_values=True):
        if name.lower().replace("-", "_") in KEYS_IN_ADDRESS or value.startswith(credentials.PREFIX):
            raise ApiError(
                400, "invalid_request",
                "Do not send an API key in the address, where logs and caches keep it: revoke this key, and send"
                " a new one in the header Authorization: Bearer <API key>.",
                param=name[:60],
            )


def gateway_request(exchange: Exchange, body: bytes) -> Request:
    """Return the facts of a request that the gateway needs. Raises ApiError 400."""
    key = exchange.headers.get("idempotency-key")
    claim = None
    if key is not None:
        if not 0 < len(key) <= idempotency.KEY_LENGTH_MAX or not key.isprintable() or not key.isascii():
            raise ApiError(
                400, "invalid_request",
                f"Idempotency-Key must be 1 to {idempotency.KEY_LENGTH_MAX} printable ASCII characters.",
                param="Idempotency-Key",
            )
        claim = idempotency.Claim(key, _fingerprint(exchange, body))
    return Request(
        id=exchange.id, path=exchange.resource, started_s=exchange.started_s, presence=exchange.presence,
        at_end=exchange.at_end, claim=claim,
    )


def respond(reply: Reply) -> Response:
    """Return the framework's response of a reply."""
    response = Response(reply.body, reply.status, content_type=reply.content_type)
    response.timeout = None
    response.headers.update(reply.headers)
    return response


def answer(value: Any, status: int = 200) -> Response:
    """Return a JSON answer."""
    return Response(msgspec.json.encode(value), status, content_type="application/json")


async def refused(services: Services, exchange: Exchange, error: Exception) -> Reply:
    """Return the reply to anything that was raised under /v1, and write refused calls down."""
    if isinstance(error, HTTPException):
        return _refusal_reply(exchange, _from_http(exchange, error))
    failure = from_error(error, public_url=services.public_url)
    caller = exchange.caller
    if failure.status == 401:
        failure = _unauthorised(services, exchange, failure)
    elif caller is not None and exchange.need.metered and failure.status in (400, 403, 404, 413, 415, 429):
        # The caller may have come from memory: a revoked key is told so, whatever else is wrong.
        try:
            await services.authenticator.confirm(caller)
        except ApiError as gone:
            return _refusal_reply(exchange, _unauthorised(services, exchange, gone))
        except Exception as unavailable:
            return _refusal_reply(exchange, from_error(unavailable, public_url=services.public_url))
        if failure.status != 429:
            try:
                services.limits.count_refused(caller)
            except RateLimited as flood:
                failure = from_error(flood, public_url=services.public_url)
        if failure.status in RECORDED_STATUSES:
            services.gateway.metering.refuse(_refusal(exchange, failure))
    if failure.status == 500:
        _log.error("a request failed by our own fault", exc_info=error, extra={"request_id": exchange.id})
    return _refusal_reply(exchange, failure)


def _refusal_reply(exchange: Exchange, failure: ApiError) -> Reply:
    return Reply(failure.status, msgspec.json.encode(failure.body(exchange.id)), headers=dict(failure.headers))


def _unauthorised(services: Services, exchange: Exchange, failure: ApiError) -> ApiError:
    """Return a 401, or the 429 that takes its place for an address that had too many of them."""
    try:
        services.limits.count_unauthorised(services.addresses.of(exchange))
    except ApiError as flood:
        return flood
    return failure


def _from_http(exchange: Exchange, error: HTTPException) -> ApiError:
    """Return the error of the framework's own refusals: unknown paths, wrong methods, oversize."""
    match error.code:
        case 404:
            return ApiError(404, "not_found", f"There is nothing at {exchange.method} {exchange.path[:200]}.")
        case 405:
            return ApiError(
                405, "method_not_allowed", f"{exchange.path[:200]} does not take {exchange.method}.",
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


def _credential(exchange: Exchange) -> str | None:
    headers = exchange.headers
    return credential_in(headers.get("authorization"), headers.get("x-api-key"), headers.get("api-key"))


def _fingerprint(exchange: Exchange, body: bytes) -> str:
    """Return what stands for a request's method, path and canonical body."""
    try:
        canonical = msgspec.json.encode(msgspec.json.decode(body), order="deterministic")
    except (msgspec.DecodeError, RecursionError):
        canonical = body
    head = f"{exchange.method} {exchange.resource}\n".encode()
    return hashlib.sha256(head + canonical).hexdigest()


def _refusal(exchange: Exchange, failure: ApiError) -> calls.Refusal:
    latency_ms = round((asyncio.get_running_loop().time() - exchange.started_s) * 1000)
    return calls.Refusal(
        call_id=exchange.id,
        account_id=exchange.caller.account_id,
        key_id=exchange.caller.key.id,
        surface=exchange.need.scope,
        path=exchange.resource,
        offer=_storable(exchange.offer),
        streamed=exchange.streamed,
        status=failure.status,
        error_code=failure.code,
        created_at_ms=now_ms() - latency_ms,
        latency_ms=latency_ms,
    )


def _storable(text: str) -> str:
    """Return a name from a request as both databases take it: no NUL, no half of a surrogate pair."""
    return text[:100].replace("\0", "").encode("utf-8", "replace").decode()
