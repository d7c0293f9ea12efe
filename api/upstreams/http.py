"""The shared HTTP client of all upstreams, and the one place where a provider's failure is named.

Nothing a provider writes reaches a client or the ordinary log from here: messages and details are our
own, and its words go into `UpstreamFault.said`, which is shown to whoever debugs and to nobody else.
"""

from __future__ import annotations

import asyncio
import errno
import math
import os
import re
import socket
import ssl
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import Any

import aiohttp
import msgspec
from aiohttp.abc import ResolveResult
from aiohttp.http_exceptions import HttpProcessingError

from api.calls import UpstreamFault

CONNECT_S = 5
DNS_S = 3
DNS_CACHE_S = 300
KEEPALIVE_S = 30
"""How long an idle connection is kept; below the idle limit of the providers (60 s and more)."""
ERROR_BODY_S = 5
ERROR_BODY_BYTES_MAX = 64 << 10
ANSWER_BYTES_MAX = 32 << 20
REUSE_WAIT_S = 0.05
RETRY_AFTER_S_MAX = 60
DETAIL_CHARS_MAX = 500

CONNECTION_ERRORS = (aiohttp.ClientError, HttpProcessingError, OSError, ValueError)
"""What aiohttp raises when a connection fails; OSError includes TimeoutError, ValueError a bad URL
or header."""

_DROPPED = (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError, ConnectionResetError, BrokenPipeError)
_RETRY_SAME = frozenset({408, 409, 425, *range(500, 600)})
_OUR_ACCOUNT = frozenset({401, 402, 403, 404})
_PLAIN_PARAM = re.compile(r"[A-Za-z0-9_.\[\]]{1,64}")
_PLAIN_WORD = re.compile(r"[A-Za-z]{2,24}([_.-][A-Za-z]{1,24}){0,5}")
_PLAIN_REQUEST_ID = re.compile(r"[\w.:/=+-]{1,128}", re.ASCII)
_CONTEXT_LENGTH = re.compile(
    r"context[_ -]?length|context[_ -]?window|maximum context|prompt is too long|input is too long"
    r"|too many (input )?tokens|reduce the length|token count.{0,40}exceeds",
    re.IGNORECASE,
)
_CONTENT_POLICY = re.compile(
    r"content[_ -]?(policy|filter|management)|responsible_?ai|moderation_blocked|flagged|safety system",
    re.IGNORECASE,
)
_BAD_CREDENTIAL = re.compile(r"api[_ -]?key", re.IGNORECASE)

# What providers write into `code`, `type` or `status` of an error, as the HTTP status it stands for.
# The first that occurs wins, so the specific ones come first.
_STATUS_OF_WORD = {
    "context_length_exceeded": 400,
    "content_filter": 400,
    "content_policy_violation": 400,
    "model_not_found": 404,
    "invalid_api_key": 401,
    "rate_limit_exceeded": 429,
    "rate_limit_error": 429,
    "insufficient_quota": 429,
    "too_many_requests": 429,
    "resource_exhausted": 429,
    "request_too_large": 413,
    "authentication_error": 401,
    "unauthenticated": 401,
    "billing_error": 402,
    "permission_error": 403,
    "permission_denied": 403,
    "not_found_error": 404,
    "not_found": 404,
    "overloaded_error": 529,
    "overloaded": 529,
    "unavailable": 503,
    "service_unavailable": 503,
    "timeout": 504,
    "timeout_error": 504,
    "deadline_exceeded": 504,
    "server_error": 500,
    "internal_error": 500,
    "internal_server_error": 500,
    "internal": 500,
    "api_error": 500,
    "invalid_request_error": 400,
    "invalid_argument": 400,
    "badrequesterror": 400,
}


class Session:
    """Be what all configured upstreams share; needs a running loop, close it at the end.

    `pooled` keeps connections for the next request, `fresh` opens one for each. No total and no read
    timeout: answers may take minutes, and the gateway's sweep ends silent ones.
    """

    def __init__(self) -> None:
        self.pooled = _client(keepalive_timeout=KEEPALIVE_S)
        self.fresh = _client(force_close=True)

    async def __aenter__(self) -> Session:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close every connection."""
        await self.pooled.close()
        await self.fresh.close()


def _client(**pooling: Any) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(
            limit=0, ttl_dns_cache=DNS_CACHE_S, resolver=LimitedResolver(), **pooling
        ),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=None),
        headers={"Accept-Encoding": "identity", "User-Agent": "tollgate"},
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,  # 199 KB of gzip become 200 MB: a compressed answer is refused instead
        trust_env=False,
    )


class LimitedResolver(aiohttp.ThreadedResolver):
    """Ask the system for addresses, and give up after `DNS_S` seconds."""

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Return the addresses of `host`; raises OSError."""
        try:
            async with asyncio.timeout(DNS_S):
                return await super().resolve(host, port, family)
        except TimeoutError as error:
            raise socket.gaierror(socket.EAI_AGAIN, f"no answer from DNS in {DNS_S} s") from error


async def post(
    session: Session, url: str, *, body: bytes, headers: Mapping[str, str], fresh: bool = False
) -> aiohttp.ClientResponse:
    """Send JSON and return the opened answer once it is 200 and not compressed; close it after use.

    Not to be cancelled by a tick: run it in a task of its own. Raises `UpstreamFault`. A `fresh` request
    is never sent over a connection that was idle, which the server may be closing at this very moment.
    """
    client = session.fresh if fresh else session.pooled
    headers = {"Content-Type": "application/json", **headers}
    try:
        response = await client.post(url, data=body, headers=headers, allow_redirects=False)
    except CONNECTION_ERRORS as error:
        raise connection_fault(error) from error
    try:
        _tell_reader_of_close(response)
        await _require_success(response)
    except BaseException:
        response.close()
        raise
    return response


async def abandon(request: asyncio.Task[Any]) -> None:
    """End a request in whatever state it is: its task is over and its connection given back.

    A connection whose answer was read to the end stays in the pool, any other is closed.
    """
    if request.done():
        _close_answer(request)
        return
    request.add_done_callback(_close_answer)
    request.cancel()
    await asyncio.wait({request})


async def finish_reading(response: aiohttp.ClientResponse) -> None:
    """Give the end of an answer that is complete a moment to arrive, so the connection can be reused.

    Servers send the last HTTP chunk just behind the last event. Waits at most `REUSE_WAIT_S`.
    """
    try:
        async with asyncio.timeout(REUSE_WAIT_S):
            while await response.content.readany():
                pass
    except CONNECTION_ERRORS:
        pass


async def read_capped(response: aiohttp.ClientResponse, bytes_max: int) -> tuple[bytes, bool]:
    """Return at most `bytes_max` bytes of the body, and whether that is all of it."""
    pieces: list[bytes] = []
    size = 0
    while piece := await response.content.readany():
        pieces.append(piece)
        size += len(piece)
        if size > bytes_max:
            return b"".join(pieces)[:bytes_max], False
    return b"".join(pieces), True


def request_id_of(headers: Mapping[str, str]) -> str | None:
    """Return the provider's own id of the request, for support cases; None when it is no plain id."""
    found = headers.get("x-request-id") or headers.get("request-id") or ""
    return found if _PLAIN_REQUEST_ID.fullmatch(found) else None


def retry_after_s(headers: Mapping[str, str]) -> int | None:
    """Return the provider's Retry-After, in whole seconds from 0 to 60; None when it makes no sense."""
    text = headers.get("Retry-After", "").strip()
    seconds = _seconds(text)
    if seconds is None:
        seconds = _seconds_until(text)
    if seconds is None or not 0 <= seconds < math.inf:
        return None
    return min(math.ceil(seconds), RETRY_AFTER_S_MAX)


def connection_fault(error: BaseException, *, retry_same: bool = False) -> UpstreamFault:
    """Name a failure of the connection itself.

    A connection that was closed before it answered may be tried again: most likely the server closed
    an idle one just as we used it.
    """
    dropped = isinstance(error, _DROPPED) and not isinstance(error, aiohttp.ClientConnectorError)
    return UpstreamFault(
        "The provider could not be reached or closed the connection.",
        retry_same=retry_same or dropped,
        detail=f"{type(error).__name__} {_cause(error)}".strip(),
        said=_detail(str(error)),
    )


def malformed(detail: str, *, retry_same: bool = True, request_id: str | None = None) -> UpstreamFault:
    """Name an answer that came and is not what it should be."""
    return UpstreamFault(
        "The provider sent an answer that could not be understood.",
        status=200,
        retry_same=retry_same,
        detail=detail,
        upstream_request_id=request_id,
    )


def holds_error(body: Any) -> bool:
    """Return whether a decoded answer or event is an error report, whatever its HTTP status was."""
    return isinstance(body, dict) and (bool(body.get("error")) or body.get("object") == "error")


def fault_of_body(body: Any, *, headers: Mapping[str, str] | None = None) -> UpstreamFault:
    """Name an error that came inside a 200, in an answer or an event, by the status it speaks of."""
    return refusal(_inner_status(_error_of(body)), body, headers=headers)


def refusal(
    status: int, body: Any, *, headers: Mapping[str, str] | None = None, said: str = ""
) -> UpstreamFault:
    """Name a refusal by its HTTP status and, when it is the caller's doing, by what it complains of.

    `body` is the decoded error body, anything else when there was none.
    """
    headers = headers or {}
    error = _error_of(body)
    words = f"{_text(error, 'code')} {_text(error, 'type')} {_inner_code(error)} {_text(error, 'message')}"
    if status in (400, 422):
        fault = _refused_input(status, words, _text(error, "param"))
    elif status == 413:
        message = "The request is too large for this model."
        fault = UpstreamFault(message, status=status, answer_status=413, code="payload_too_large")
    else:
        fault = _provider_failure(status)
    if fault.answer_status == 502 and status in (429, 503, 529):
        fault.retry_after_s = retry_after_s(headers)
    fault.detail = " ".join(_plain_words(error))
    fault.said = _detail(said or words.strip())
    fault.upstream_request_id = request_id_of(headers)
    return fault


def _refused_input(status: int, words: str, param: str) -> UpstreamFault:
    plain_param = param if _PLAIN_PARAM.fullmatch(param) else None
    if "model_not_found" in words or _BAD_CREDENTIAL.search(words):
        return _provider_failure(status)  # some answer 400 for what is our configuration
    if _CONTEXT_LENGTH.search(words):
        code, message = "context_length_exceeded", "The conversation is longer than this model can take."
        plain_param = plain_param or "messages"
    elif _CONTENT_POLICY.search(words):
        code, message = "content_policy_violation", "The provider's content policy refuses this request."
    else:
        code, message = "invalid_request", "The provider refused the request as invalid for this model."
    return UpstreamFault(message, status=status, answer_status=400, code=code, param=plain_param)


def _provider_failure(status: int) -> UpstreamFault:
    if status in _OUR_ACCOUNT:
        message = "The provider refused the gateway's own access."
    elif status == 429:
        message = "The provider is limiting the gateway's rate."
    elif status >= 500:
        message = "The provider failed or is overloaded."
    else:
        message = "The provider gave an unexpected answer."
    return UpstreamFault(message, status=status, retry_same=status in _RETRY_SAME)


def _tell_reader_of_close(response: aiohttp.ClientResponse) -> None:
    """Make sure that reading the answer ends when its connection does.

    When the chunk framing breaks in mid-body, aiohttp 3.14.5 closes the connection without telling the
    reader (its C parser forgets the body before it raises), who would wait for ever.
    """
    closed = response.connection.protocol.closed if response.connection else None
    if closed is None:
        return  # the answer is here already

    def tell(_: asyncio.Future[None]) -> None:
        if not response.content.is_eof() and response.content.exception() is None:
            response.content.set_exception(aiohttp.ClientPayloadError("the connection was closed"))

    closed.remove_done_callback(_retrieve)  # one is enough, however often the connection is used
    closed.add_done_callback(_retrieve)
    closed.add_done_callback(tell)
    response.content.on_eof(lambda: closed.remove_done_callback(tell))


def _retrieve(closed: asyncio.Future[None]) -> None:
    if not closed.cancelled():
        closed.exception()  # or the loop would complain that nobody looked at it


async def _require_success(response: aiohttp.ClientResponse) -> None:
    if response.status != 200:
        raise await _refusal_of(response)
    encoding = response.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        request_id = request_id_of(response.headers)
        raise malformed("the answer is compressed, which was not asked for", request_id=request_id)


async def _refusal_of(response: aiohttp.ClientResponse) -> UpstreamFault:
    raw = b""
    try:
        async with asyncio.timeout(ERROR_BODY_S):
            raw, _ = await read_capped(response, ERROR_BODY_BYTES_MAX)
    except CONNECTION_ERRORS:
        pass  # the status says enough
    try:
        body = msgspec.json.decode(raw)
    except (ValueError, RecursionError):
        body = None
    return refusal(response.status, body, headers=response.headers, said=raw.decode("utf-8", "replace"))


def _close_answer(request: asyncio.Task[Any]) -> None:
    if request.cancelled() or request.exception():
        return
    if isinstance(request.result(), aiohttp.ClientResponse):
        request.result().close()


def _error_of(body: Any) -> dict[str, Any]:
    """Find the error object: nested in `error`, alone in a list, or the body itself."""
    if isinstance(body, list) and body:
        body = body[0]
    if not isinstance(body, dict):
        return {}
    error = body.get("error")
    if isinstance(error, dict):
        return error
    return {"message": error} if isinstance(error, str) else body


def _inner_status(error: dict[str, Any]) -> int:
    for key in ("code", "status", "status_code"):
        number = error.get(key)
        if isinstance(number, str) and number.isdecimal() and len(number) == 3:
            number = int(number)
        if type(number) is int and 400 <= number <= 599:
            return number
    named = {_text(error, key).lower() for key in ("code", "type", "status")}
    return next((status for word, status in _STATUS_OF_WORD.items() if word in named), 500)


def _inner_code(error: dict[str, Any]) -> str:
    inner = error.get("innererror")
    return _text(inner, "code") if isinstance(inner, dict) else ""


def _text(error: dict[str, Any], key: str) -> str:
    value = error.get(key)
    return str(value)[:DETAIL_CHARS_MAX] if isinstance(value, str | int) else ""


def _plain_words(error: dict[str, Any]) -> list[str]:
    """Return the error's machine-readable names, as far as they are nothing but words."""
    named = [_text(error, "code"), _text(error, "type"), _text(error, "status"), _inner_code(error)]
    return [word for word in dict.fromkeys(named) if _PLAIN_WORD.fullmatch(word)]


def _cause(error: BaseException) -> str:
    """Say why a connection failed in the system's words, without the address that errors carry."""
    cause = getattr(error, "certificate_error", None) or getattr(error, "os_error", None) or error
    if isinstance(cause, ssl.SSLCertVerificationError):
        return cause.verify_message.partition(",")[0]  # behind the comma stands the host
    if isinstance(cause, ssl.SSLError):
        return cause.reason or ""
    if isinstance(cause, socket.gaierror):
        return cause.strerror or ""
    if isinstance(cause, OSError) and cause.errno in errno.errorcode:
        return os.strerror(cause.errno)
    return ""


def _detail(text: str) -> str:
    return text[:DETAIL_CHARS_MAX]


def _seconds(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _seconds_until(text: str) -> float | None:
    try:
        return parsedate_to_datetime(text).timestamp() - time.time()
    except (ValueError, OverflowError, TypeError):
        return None
