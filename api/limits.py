"""What a request may do before it costs anything: scope, rate, calls at once, body size.

A call's rate is counted exactly, in the transaction that admits it. Here are only the refusals that
need no database, each by what one process knows: a window known to be full; the coarse limits on what
is not metered, which is lists and the like, calls refused for what is in them, and requests without a
good key; the calls an account runs at once; and the bytes of all bodies.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator

from api.auth import Caller
from api.client_address import neighbourhood
from api.errors import ApiError, too_many, unavailable
from api.exchange import AtEnd, Exchange
from models import rate_limit
from models.clock import now_ms
from models.errors import RateLimited

JSON_BODY_BYTES_MAX = 1 << 20
CHAT_BODY_BYTES_MAX = 32 << 20
# All bodies of a process that are being read or worked on, but for small ones. In memory a body takes
# about four times its size while its call runs. One account may have half of it.
BODIES_BYTES_MAX = 128 << 20
SMALL_BODY_BYTES = 64 << 10
# Beyond the timeout, each second a body takes must be paid for with this much of it.
BODY_BYTES_PER_S_MIN = 16 << 10
UNMETERED_PER_CALL = 10
JSON_TYPE = "application/json"
BUCKETS_MAX = 50_000


class Limits:
    """Remember, per process, which windows are full and what is running."""

    def __init__(self, *, bad_keys_per_minute: int = 60) -> None:
        self._bad_keys_per_minute = bad_keys_per_minute
        self._full: OrderedDict[str, RateLimited] = OrderedDict()
        self._unmetered = Windows()
        self._refused = Windows()
        self._unauthorised = Windows()
        self._running: dict[str, int] = {}
        self._bodies_bytes = 0
        self._bodies_bytes_of: dict[str, int] = {}

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
        """Count a list or a replay of an account. Raises RateLimited at ten times the plan's rate.

        It is not counted in the books, but costs a read or two.
        """
        self._unmetered.count(caller.account_id, _unmetered_limit(caller))

    def count_refused(self, caller: Caller) -> None:
        """Count a call that was refused for what is in it. Raises RateLimited at ten times the plan's rate.

        Each costs the reading of its body, a read of the key and a row. After too many of them no large body
        of the account is read any more; a small one is, because it may be a good call.
        """
        self._refused.count(caller.account_id, _unmetered_limit(caller))

    def count_unauthorised(self, address: str) -> None:
        """Count a request without a good key. Raises ApiError 429 when its address had too many of them."""
        try:
            self._unauthorised.count(neighbourhood(address), self._bad_keys_per_minute)
        except RateLimited:
            raise too_many("Too many requests without a valid API key came from your address.") from None

    def enter(self, caller: Caller, at_end: AtEnd) -> Presence:
        """Count a request among its account's running ones until its end.

        Raises ApiError 429 when the plan allows no more of them at once in one process.
        """
        running = self._running.get(caller.account_id, 0)
        if running >= caller.plan.concurrent_calls:
            raise too_many(f"Limit of {caller.plan.concurrent_calls} calls at once reached.")
        self._running[caller.account_id] = running + 1
        presence = Presence(self, caller)
        presence.last_until(at_end)
        return presence

    def leave(self, account_id: str, body_bytes: int) -> None:
        """Forget a request that has ended."""
        running = self._running[account_id] - 1
        if running:
            self._running[account_id] = running
        else:
            del self._running[account_id]
        if body_bytes:
            self._bodies_bytes -= body_bytes
            self._bodies_bytes_of[account_id] -= body_bytes
            if not self._bodies_bytes_of[account_id]:
                del self._bodies_bytes_of[account_id]

    def take_room(self, caller: Caller, more_bytes: int) -> None:
        """Set room aside for so much more of a large body.

        Raises RateLimited when the caller had too many calls refused, ApiError 503 when there is no room.
        """
        self._refused.check(caller.account_id, _unmetered_limit(caller))
        own = self._bodies_bytes_of.get(caller.account_id, 0) + more_bytes
        if self._bodies_bytes + more_bytes > BODIES_BYTES_MAX or own > BODIES_BYTES_MAX // 2:
            raise unavailable("Too many large bodies are being worked on at the moment. Nothing was charged.")
        self._bodies_bytes += more_bytes
        self._bodies_bytes_of[caller.account_id] = own


class Presence:
    """Be a request that runs: it counts, and its body does, until all work on it has ended."""

    def __init__(self, limits: Limits, caller: Caller) -> None:
        self._limits = limits
        self._caller = caller
        self._works = 0
        self._body_bytes = 0
        self._counted_bytes = 0

    def last_until(self, at_end: AtEnd) -> None:
        """Go on counting until this end, too, has come."""
        self._works += 1
        at_end(self._ended)

    def announce_body(self, length: int) -> None:
        """Set room aside for a body of such a length. Raises as `Limits.take_room`."""
        if length > SMALL_BODY_BYTES:
            self._limits.take_room(self._caller, length)
            self._counted_bytes = length

    def take_body(self, more_bytes: int) -> None:
        """Count more of the request's body; room is set aside for what was not announced. Raises as above."""
        self._body_bytes += more_bytes
        uncounted = self._body_bytes - self._counted_bytes
        if uncounted > 0 and self._body_bytes > SMALL_BODY_BYTES:
            self._limits.take_room(self._caller, uncounted)
            self._counted_bytes += uncounted

    def _ended(self) -> None:
        self._works -= 1
        if not self._works:
            self._limits.leave(self._caller.account_id, self._counted_bytes)


class Windows:
    """Count in windows of a minute, one a bucket; the buckets unused for longest are forgotten."""

    def __init__(self) -> None:
        self._windows: OrderedDict[str, tuple[int, int]] = OrderedDict()

    def check(self, bucket: str, allowed: int) -> None:
        """Raise RateLimited when a window is full."""
        window = self._windows.get(bucket)
        if window is not None and window[1] >= allowed and not _is_over(window[0], now_ms()):
            raise RateLimited("unmetered", allowed, window[0] + rate_limit.WINDOW_MS)

    def count(self, bucket: str, allowed: int) -> None:
        """Count one. Raises RateLimited when the window is full."""
        now = now_ms()
        start, count = self._windows.get(bucket, (now, 0))
        if _is_over(start, now):
            start, count = now, 0
        if count >= allowed:
            raise RateLimited("unmetered", allowed, start + rate_limit.WINDOW_MS)
        self._windows[bucket] = (start, count + 1)
        self._windows.move_to_end(bucket)
        if len(self._windows) > BUCKETS_MAX:
            self._windows.popitem(last=False)

    def __len__(self) -> int:
        return len(self._windows)


def _is_over(start_ms: int, at_ms: int) -> bool:
    """Return whether a window has ended. One that begins in the future is from before the clock was set back."""
    return not start_ms <= at_ms < start_ms + rate_limit.WINDOW_MS


def _unmetered_limit(caller: Caller) -> int:
    return caller.plan.requests_per_minute * UNMETERED_PER_CALL


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


async def json_body(
    exchange: Exchange, pieces: AsyncIterator[bytes], bytes_max: int = JSON_BODY_BYTES_MAX, *, timeout_s: float
) -> bytes:
    """Return the body of a JSON request.

    Raises ApiError: 415 for another type or an encoding, 413 above `bytes_max`, 503 when all bodies
    together are too large, 408 when the client sends nothing for `timeout_s`, or after that so little that
    it would never end.
    """
    headers, presence = exchange.headers, exchange.presence
    if headers.get("content-encoding", "identity").strip().lower() not in ("identity", ""):
        raise ApiError(415, "unsupported_media_type", "Send the body without Content-Encoding.")
    media_type = headers.get("content-type", JSON_TYPE).partition(";")[0].strip().lower()
    if media_type != JSON_TYPE and not media_type.endswith("+json"):
        raise ApiError(
            415, "unsupported_media_type",
            f"Send JSON with the header Content-Type: application/json, not {media_type[:60]!r}.",
        )
    # The server has refused what is no number.
    announced = int(headers.get("content-length", 0))
    if announced > bytes_max:
        raise _too_large(bytes_max)
    presence.announce_body(announced)
    if exchange.let_body_in is not None:
        await exchange.let_body_in()
    body = bytearray()
    if exchange.body_came:
        # Nothing is waited for, and a timer takes longer than the reading.
        async for piece in pieces:
            _add(body, piece, presence, bytes_max)
        return bytes(body)
    now = asyncio.get_running_loop().time
    began_s = now()
    try:
        # Quart's own body timeout spans the whole body and would cut a slow but honest upload.
        async with asyncio.timeout(timeout_s) as patience:
            async for piece in pieces:
                _add(body, piece, presence, bytes_max)
                earned_until_s = began_s + timeout_s + len(body) / BODY_BYTES_PER_S_MIN
                patience.reschedule(min(now() + timeout_s, earned_until_s))
    except TimeoutError:
        raise ApiError(408, "request_timeout", "The body did not arrive.") from None
    return bytes(body)


def _add(body: bytearray, piece: bytes, presence: Presence, bytes_max: int) -> None:
    presence.take_body(len(piece))
    body += piece
    if len(body) > bytes_max:
        raise _too_large(bytes_max)


def _too_large(bytes_max: int) -> ApiError:
    message = f"The body is larger than {bytes_max >> 20} MB, the most this path takes."
    return ApiError(413, "payload_too_large", message)
