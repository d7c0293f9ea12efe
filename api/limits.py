"""What a request may do before it costs anything: scope, rate, body size.

A call's rate is counted exactly, in the transaction that admits it. Here are only the refusals that
need no database: a window known to be full, and the coarse limit on what is not metered, which is
lists and the like, and calls refused for what is in them.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from quart import Request

from api.auth import Caller
from api.errors import ApiError
from models import rate_limit
from models.clock import now_ms
from models.errors import RateLimited

CHAT_BODY_BYTES_MAX = 32 << 20
# Beyond the timeout, each second a body takes must be paid for with this much of it.
BODY_BYTES_PER_S_MIN = 16 << 10
UNMETERED_PER_CALL = 10
BUCKETS_MAX = 50_000


class Limits:
    """Remember, per process, which windows are full."""

    def __init__(self) -> None:
        self._full: OrderedDict[str, RateLimited] = OrderedDict()
        self._unmetered: OrderedDict[str, tuple[int, int]] = OrderedDict()

    def check_rate(self, caller: Caller) -> None:
        """Raise RateLimited when a window of the caller is known to be full."""
        for limit in limits_of(caller):
            refusal = self._full.get(limit.bucket)
            if refusal is None:
                continue
            # An end far ahead was noted before the clock was set back, and means nothing now.
            left_ms = refusal.until_ms - now_ms()
            if refusal.limit == limit.per_window and 0 < left_ms <= rate_limit.WINDOW_MS:
                raise RateLimited(refusal.bucket, refusal.limit, refusal.until_ms)
            del self._full[limit.bucket]

    def note_full(self, refusal: RateLimited) -> None:
        """Remember a full window until it ends."""
        self._full[refusal.bucket] = refusal
        if len(self._full) > BUCKETS_MAX:
            self._full.popitem(last=False)

    def count_unmetered(self, caller: Caller) -> None:
        """Count a list or a refused call of an account. Raises RateLimited at ten times the plan's rate.

        Neither is counted in the books, but each costs a read of the key, and a refused call a row.
        """
        now = now_ms()
        start, count = self._unmetered.get(caller.account_id, (now, 0))
        if start <= now - rate_limit.WINDOW_MS:
            start, count = now, 0
        allowed = caller.plan.requests_per_minute * UNMETERED_PER_CALL
        if count >= allowed:
            raise RateLimited("unmetered", allowed, start + rate_limit.WINDOW_MS)
        self._unmetered[caller.account_id] = (start, count + 1)
        self._unmetered.move_to_end(caller.account_id)
        if len(self._unmetered) > BUCKETS_MAX:
            self._unmetered.popitem(last=False)


def limits_of(caller: Caller) -> tuple[rate_limit.Limit, ...]:
    """Return the rate windows a call of this caller is counted in."""
    account = rate_limit.Limit(
        rate_limit.account_bucket(caller.account_id), caller.plan.requests_per_minute
    )
    if caller.key.requests_per_minute is None:
        return (account,)
    return account, rate_limit.Limit(rate_limit.key_bucket(caller.key.id), caller.key.requests_per_minute)


def require_address(caller: Caller, address: str) -> None:
    """Raise ApiError 403 when the key is not for this address."""
    if not caller.may_come_from(address):
        raise ApiError(403, "scope_denied", "This API key may not be used from this address.")


def require_scope(caller: Caller, scope: str, *, write: bool = False) -> None:
    """Raise ApiError 403 unless plan and key include a surface."""
    if not caller.may(scope, write=write):
        whose = "plan" if not caller.plan.includes(scope) else "API key"
        raise ApiError(403, "scope_denied", f"Your {whose} does not include the {scope} surface.")


async def json_body(request: Request, bytes_max: int, *, timeout_s: float) -> bytes:
    """Return the body of a JSON request.

    Raises ApiError: 415 for another type or an encoding, 413 above `bytes_max`, 408 when the client
    sends nothing for `timeout_s`, or after that so little that it would never end.
    """
    if request.headers.get("content-encoding", "identity").strip().lower() not in ("identity", ""):
        raise ApiError(415, "unsupported_media_type", "Send the body without Content-Encoding.")
    media_type = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise ApiError(
            415, "unsupported_media_type",
            f"Send JSON with the header Content-Type: application/json, not {media_type[:60]!r}.",
        )
    too_large = ApiError(
        413, "payload_too_large", f"The body is larger than {bytes_max >> 20} MB, the most this path takes."
    )
    if (request.content_length or 0) > bytes_max:
        raise too_large
    if (gate := request.scope.get("tollgate.body")) is not None:
        await gate.open()
    body = bytearray()
    pieces = aiter(request.body)
    now = asyncio.get_running_loop().time
    began_s = now()
    while True:
        earned_until_s = began_s + timeout_s + len(body) / BODY_BYTES_PER_S_MIN
        try:
            # Quart's own body timeout spans the whole body and would cut a slow but honest upload.
            async with asyncio.timeout_at(min(now() + timeout_s, earned_until_s)):
                piece = await anext(pieces)
        except StopAsyncIteration:
            return bytes(body)
        except TimeoutError:
            raise ApiError(408, "request_timeout", "The body did not arrive.") from None
        body += piece
        if len(body) > bytes_max:
            raise too_large
