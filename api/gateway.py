"""The life of one call, top to bottom. Read me first.

A chat request arrives here parsed and authenticated. It is admitted (the one place where money is set
aside), run at an upstream, and settled (the one place where money is taken) before its last byte
leaves. Until the first byte has left, every failure is a real HTTP error and costs nothing; after it,
the status is 200 for good and a failure is an error frame, billed for what was delivered.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any

import msgspec

from api import routing, sse, terms
from api.auth import Authenticator, Caller
from api.calls import Answer, ChatCall, Frame, UpstreamChat, UpstreamFault
from api.chat_request import refuse_unpriced
from api.detached import Detached
from api.errors import ApiError, from_error, unavailable
from api.exchange import AtEnd, Reply, end_of
from api.limits import Limits, Presence, limits_of
from api.metering import Lost, Meter, Metering, estimated_input_tokens
from api.pulse import Pulse
from api.upstreams import Upstream
from models import call as calls
from models import clock, idempotency
from models.catalog import Catalog, Offer, Route
from models.errors import CallerChanged, DatabaseUnavailable, RateLimited, UnknownKey
from models.money import usd

PING_AFTER_S = 15
STALLED_AFTER_S = 30
NO_TOKEN_AFTER_S = 120
STREAM_MAX_S = 15 * 60
REPLAY_WAIT_S = 25
REPLAY_POLL_S = 0.2
CUT_WAIT_S = 5

_log = logging.getLogger("tollgate.gateway")


class Request(msgspec.Struct, frozen=True):
    """Hold what the gateway must know of an HTTP request beside its body."""

    id: str
    path: str
    started_s: float
    presence: Presence
    at_end: AtEnd
    claim: idempotency.Claim | None = None


class Gateway:
    """Run calls. One per process."""

    def __init__(
        self,
        *,
        catalog: Callable[[], Catalog],
        upstreams: Callable[[], Mapping[str, Upstream]],
        authenticator: Authenticator,
        limits: Limits,
        metering: Metering,
        public_url: str,
    ) -> None:
        self.catalog = catalog
        self.authenticator = authenticator
        self.limits = limits
        self.metering = metering
        self.draining = False
        self._upstreams = upstreams
        self._public_url = public_url

    async def chat(self, caller: Caller, call: ChatCall, request: Request) -> Reply:
        """Run one chat call from its admission to its reply.

        Raises what `errors.from_error` knows, and CallerChanged when the key or its account is not what
        the caller was built from any more: read it again, check it again, and come back.
        """
        allowed = caller.may_use(call.model)
        if not allowed and await self.authenticator.has_changed(caller):
            raise CallerChanged(caller.key.id)
        offer = routing.offer_for(self.catalog(), call.model, "chat", allowed=allowed)
        refuse_unpriced(call, offer.capabilities)
        with self.metering.entering():
            meter = await self._admit(caller, call, offer, request)
        if isinstance(meter, Reply):
            return meter
        if request.claim is not None:
            return await self._run_detached(meter, request.presence)
        self.metering.watch(meter, request.at_end)
        return await self._run(meter)

    # Admission.

    async def _admit(self, caller: Caller, call: ChatCall, offer: Offer, request: Request) -> Meter | Reply:
        """Set the money aside, or find the answer that an idempotency key has already."""
        patience = asyncio.get_running_loop().time() + REPLAY_WAIT_S
        agreed = terms.of_chat(call, offer, caller.plan)
        while True:
            if self.draining:
                raise unavailable("This server is restarting. Nothing was charged.")
            wanted = self._admission(caller, call, offer, request, agreed)
            try:
                result = await self.metering.admit(wanted)
            except (CallerChanged, UnknownKey):
                self.authenticator.forget(caller)
                raise
            except RateLimited as refusal:
                self.limits.note_full(refusal)
                raise
            if isinstance(result, calls.Admitted):
                return self._meter(caller, call, offer, request, agreed, result)
            if result.state != "running":
                self.limits.count_unmetered(caller)
                return _replay(result)
            if not await self._freed(caller, request, patience):
                raise unavailable("The first request with this Idempotency-Key is still running.")

    def _admission(
        self, caller: Caller, call: ChatCall, offer: Offer, request: Request, agreed: terms.Terms
    ) -> calls.Admission:
        now = clock.now_ms()
        return calls.Admission(
            call_id=request.id,
            owner=self.metering.process.id,
            key=caller.key,
            surface=offer.surface,
            path=request.path,
            offer=offer.id,
            streamed=call.stream,
            rates=offer.rates.to_json(),
            now_ms=now,
            limits=limits_of(caller),
            month=clock.month(now),
            included_limit=caller.plan.included_calls_per_month,
            included_output_limit=agreed.included_output_limit,
            output_limit=agreed.output_limit,
            hold=agreed.hold,
            affordable=agreed.affordable,
            idempotency=request.claim,
            input_tokens=estimated_input_tokens(call, agreed),
        )

    def _meter(
        self, caller: Caller, call: ChatCall, offer: Offer, request: Request, agreed: terms.Terms,
        admitted: calls.Admitted,
    ) -> Meter:
        meter = Meter(
            call=call, caller=caller, offer=offer, terms=agreed, admitted=admitted, pulse=Pulse(),
            started_s=request.started_s, created=clock.now_ms() // 1000, output_limit=admitted.output_limit,
        )
        # Only a wallet that gave the whole first slice lets a stream go on by holding more.
        meter.sliced = (
            admitted.included_month is None and admitted.output_limit == agreed.output_limit < agreed.ceiling
        )
        meter.upstream_limit = agreed.ceiling if meter.sliced else admitted.output_limit
        self.metering.begin(meter)
        return meter

    async def _freed(self, caller: Caller, request: Request, patience: float) -> bool:
        """Wait while another request runs under the same key; false when that takes too long."""
        while asyncio.get_running_loop().time() < patience:
            await asyncio.sleep(REPLAY_POLL_S)
            kept = await idempotency.find(
                self.metering.database, caller.account_id, request.claim.key, clock.now_ms()
            )
            if kept is None or kept.state != "running":
                return True
        return False

    # Running.

    async def _run(self, meter: Meter) -> Reply:
        """Run an admitted call in the calling task and return its reply."""
        headers = _standing_headers(meter)
        if not meter.call.stream:
            body, settled = await self._whole(meter)
            headers["x-tollgate-cost"] = usd(settled.charged)
            headers["x-upstream-model"] = meter.upstream_model or ""
            return Reply(200, body, headers=headers)
        pieces = self._stream(meter)
        first = await anext(pieces)
        headers["x-upstream-model"] = meter.upstream_model or ""
        headers["x-accel-buffering"] = "no"
        return Reply(200, _Chained(first, pieces), "text/event-stream; charset=utf-8", headers)

    async def _run_detached(self, meter: Meter, presence: Presence) -> Reply:
        """Run a call with an idempotency key to its end even if its client leaves."""
        detached = Detached(lambda: self._run(meter), meter.pulse)
        task = self.metering.database.own(detached.run())
        presence.last_until(end_of(task))
        self.metering.watch(meter, end_of(task))
        return await detached.reply()

    async def _whole(self, meter: Meter) -> tuple[bytes, calls.Settled]:
        """Return the body of a plain answer, charged."""
        try:
            answer = await self._completed(meter)
            body = await self._bill_whole(meter, answer)
            stored = idempotency.StoredAnswer(200, "application/json", _keepable(body))
            usage, estimated = meter.final_usage()
            outcome = meter.outcome(200, usage=usage, estimated=estimated, answer=stored)
            return body, await self.metering.settle(meter, outcome)
        except BaseException as error:
            failure = self._failure(meter, error)
            if failure is error:
                raise
            await self._give_back(meter, failure)
            raise failure from error

    async def _stream(self, meter: Meter) -> AsyncGenerator[bytes]:
        """Yield the pieces of a streamed answer.

        Raises only before the first piece, while the status is still open. Afterwards a failure is
        the last piece, and there is no `[DONE]`: that is a promise that the answer is whole.
        """
        recorded = _Recording() if meter.admitted.idempotency_key else None
        spoken = False
        try:
            async with aclosing(self._relayed(meter)) as pieces:
                async for piece in pieces:
                    if recorded is not None:
                        recorded.add(piece)
                    meter.pulse.sent_at = asyncio.get_running_loop().time()
                    spoken = True
                    yield piece
            tail = await self._bill_stream(meter, recorded)
            yield tail
        except GeneratorExit:
            raise
        except BaseException as error:
            failure = self._failure(meter, error)
            if not isinstance(failure, ApiError):
                raise
            if not spoken:
                await self._give_back(meter, failure)
                raise failure from error
            await self._bill_cut(meter, failure, recorded)
            yield sse.encode(failure.body(meter.id))

    async def _relayed(self, meter: Meter) -> AsyncIterator[bytes]:
        """Yield what the upstream streams; until the first token another attempt may replace it."""
        tries = routing.Tries(meter.offer)
        attempt: routing.Try | None = tries.first()
        while attempt is not None:
            if attempt.pause_s:
                await asyncio.sleep(attempt.pause_s)
            started_ms = clock.now_ms()
            preamble: list[bytes] = []
            meter.begin_attempt()
            try:
                async with aclosing(self._frames(meter, attempt)) as frames:
                    async for frame in frames:
                        meter.see(frame)
                        if not meter.pieces and not frame.finished:
                            # Kept back: an error right after the 200 can still become a real one.
                            preamble.append(frame.data)
                            if _silent_for(meter) >= PING_AFTER_S:
                                yield sse.PING
                            continue
                        if preamble:
                            frame.data = b"".join(preamble) + frame.data
                            preamble.clear()
                        if frame.data:
                            yield frame.data
                        elif _silent_for(meter) >= PING_AFTER_S:
                            yield sse.PING
                        ends = meter.is_runaway() or (meter.sliced and await self._is_uncovered(meter))
                        if ends and not frame.finished:
                            meter.finish_reason = "length"
                            yield _cut_for_length(meter)
                            break
            except UpstreamFault as fault:
                self._note_attempt(meter, attempt.route, started_ms, fault)
                if meter.pieces:
                    raise
                attempt = tries.after(fault)
                if attempt is None:
                    raise
                continue
            except BaseException:
                self._note_attempt(meter, attempt.route, started_ms)
                raise
            self._note_attempt(meter, attempt.route, started_ms, status=200)
            if preamble:
                yield b"".join(preamble)
            return

    async def _completed(self, meter: Meter) -> Answer:
        """Return an upstream's whole answer, from the second or third attempt if need be."""
        tries = routing.Tries(meter.offer)
        attempt: routing.Try | None = tries.first()
        while True:
            if attempt.pause_s:
                await asyncio.sleep(attempt.pause_s)
            started_ms = clock.now_ms()
            try:
                answer = await self._upstream(meter, attempt.route).chat_complete(
                    self._upstream_chat(meter, attempt), meter.pulse
                )
            except UpstreamFault as fault:
                self._note_attempt(meter, attempt.route, started_ms, fault)
                attempt = tries.after(fault)
                if attempt is None:
                    raise
                continue
            except BaseException:
                self._note_attempt(meter, attempt.route, started_ms)
                raise
            meter.upstream_request_id = answer.upstream_request_id
            meter.first_byte_s = asyncio.get_running_loop().time()
            self._note_attempt(meter, attempt.route, started_ms, status=200)
            return answer

    def _frames(self, meter: Meter, attempt: routing.Try) -> AsyncIterator[Frame]:
        return self._upstream(meter, attempt.route).chat_stream(self._upstream_chat(meter, attempt), meter.pulse)

    def _upstream(self, meter: Meter, route: Route) -> Upstream:
        meter.upstream, meter.upstream_model = route.upstream, route.model
        upstream = self._upstreams().get(route.upstream)
        if upstream is None:
            raise UpstreamFault("The AI provider of this model is no longer configured.")
        return upstream

    def _upstream_chat(self, meter: Meter, attempt: routing.Try) -> UpstreamChat:
        return UpstreamChat(
            call=meter.call,
            model=attempt.route.model,
            public_model=meter.offer.id,
            completion_id=meter.completion_id,
            created=meter.created,
            output_limit=meter.upstream_limit,
            fresh=attempt.fresh,
        )

    async def _is_uncovered(self, meter: Meter) -> bool:
        """Hold more for a long stream in time; true when it must end because nothing covers it."""
        if self.metering.may_extend(meter):
            self.metering.extend(meter)
        while meter.output_tokens_at_most() >= meter.output_limit < meter.terms.ceiling and not meter.capped:
            if meter.extending is None:
                self.metering.extend(meter)
            await self.metering.final_hold(meter)
        return meter.capped and meter.output_tokens_at_most() >= meter.output_limit

    def _note_attempt(
        self, meter: Meter, route: Route, started_ms: int, fault: UpstreamFault | None = None,
        status: int | None = None,
    ) -> None:
        """Write an attempt down: how it failed, or its status; None when it was broken off by us."""
        meter.attempts.append(calls.Attempt(
            upstream=route.upstream,
            status=fault.status if fault else status,
            started_at_ms=started_ms,
            ended_at_ms=clock.now_ms(),
            upstream_request_id=fault.upstream_request_id if fault else meter.upstream_request_id,
        ))
        if fault is not None:
            fault.upstream = route.upstream
            _log.warning(
                "upstream fault: %s", fault.message,
                extra={
                    "request_id": meter.id, "upstream": route.upstream, "upstream_status": fault.status,
                    "detail": fault.detail, "upstream_request_id": fault.upstream_request_id,
                },
            )
            _log.debug("the upstream said: %s", fault.said, extra={"request_id": meter.id})

    # Endings.

    async def _bill_whole(self, meter: Meter, answer: Answer) -> bytes:
        """Return the body of a plain answer with its usage and cost."""
        meter.finish_reason = answer.body["choices"][0].get("finish_reason")
        meter.text_bytes, meter.pieces = answer.text_bytes, 0
        meter.usage, meter.usage_body = answer.usage, answer.usage_body
        if answer.text_bytes and answer.usage is None:
            # A plain answer has no chunks to count: one piece makes the count go by bytes.
            meter.pieces = 1
        answer.body["usage"] = _usage_body(meter)
        return msgspec.json.encode(answer.body)

    async def _bill_stream(self, meter: Meter, recorded: _Recording | None) -> bytes:
        """Settle a stream that ended in order and return its last bytes."""
        await self.metering.final_hold(meter)
        tail = sse.DONE
        if meter.call.include_usage:
            tail = sse.encode(_usage_chunk(meter)) + tail
        usage, estimated = meter.final_usage()
        stored = None
        if recorded is not None:
            recorded.add(tail)
            stored = idempotency.StoredAnswer(200, "text/event-stream; charset=utf-8", recorded.body())
        await self.metering.settle(meter, meter.outcome(
            200, usage=usage, estimated=estimated, answer=stored
        ))
        return tail

    async def _bill_cut(self, meter: Meter, failure: ApiError, recorded: _Recording | None) -> None:
        """Settle a stream that broke off: for what was delivered, or not at all when nothing was."""
        if meter.ended:
            return
        if not meter.text_bytes:
            await self._give_back(meter, failure)
            return
        await self.metering.final_hold(meter)
        usage, estimated = meter.final_usage()
        outcome = meter.outcome(failure.status, usage=usage, estimated=estimated, error_code=failure.code)
        try:
            await self.metering.settle(meter, outcome)
        except (Lost, DatabaseUnavailable):
            _log.warning("a cut stream could not be settled at once", extra={"request_id": meter.id})

    async def _give_back(self, meter: Meter, failure: BaseException) -> None:
        """Release a call that delivered nothing, unless the client left: then its watch ends it."""
        if not isinstance(failure, ApiError):
            return
        task = self.metering.release(meter, meter.outcome(failure.status, error_code=failure.code))
        if task is not None:
            await asyncio.wait((task,), timeout=2)

    def _failure(self, meter: Meter, error: BaseException) -> BaseException:
        """Return what the client is told; a cancellation that is not ours stays one."""
        if isinstance(error, ApiError):
            return error
        if isinstance(error, asyncio.CancelledError):
            if not meter.pulse.stopped():
                return error
            return _stopped(meter.pulse.reason or "", meter.upstream)
        if isinstance(error, DatabaseUnavailable) and meter.ended:
            return unavailable(
                f"The call was answered, but its charge could not be confirmed; see GET /v1/usage/{meter.id}."
            )
        if isinstance(error, Lost):
            return ApiError(502, "upstream_error", "The call was given up before it could be answered.")
        if not isinstance(error, Exception):
            return error
        failure = from_error(error, public_url=self._public_url)
        if failure.status == 500:
            _log.error("a call failed by our own fault", exc_info=error, extra={"request_id": meter.id})
        return failure

    # Watching.

    def sweep(self) -> None:
        """Look at every running call once: send pings, and stop what is stalled or endless."""
        now = asyncio.get_running_loop().time()
        for meter in list(self.metering.running.values()):
            if meter.ended:
                continue
            pulse = meter.pulse
            if (reason := _overdue(meter, now)) is not None:
                if pulse.reason is None:
                    facts = {"request_id": meter.id, "upstream": meter.upstream, "reason": reason}
                    _log.warning("a call is stopped: it takes too long", extra=facts)
                pulse.stop(reason)
            elif meter.call.stream and now - pulse.sent_at >= PING_AFTER_S:
                pulse.tick()

    async def stop_ended_keys(self) -> None:
        """Stop the streams of keys that were revoked since they began."""
        if not self.metering.running:
            return
        for call_id in await calls.api_key.of_ended_keys(self.metering.database, self.metering.process.id):
            meter = self.metering.running.get(call_id)
            if meter is not None and not meter.ended:
                meter.pulse.stop("revoked")

    async def drain(self, limit_s: float) -> None:
        """Take no new call, let the running ones finish, end the rest with an error frame and a bill."""
        self.draining = True
        await self.metering.until_idle(limit_s)
        for meter in list(self.metering.running.values()):
            if not meter.ended:
                meter.pulse.stop("drained")
        await self.metering.until_idle(CUT_WAIT_S)


class _Recording:
    """Keep the pieces of a stream for its idempotency key, up to a limit."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._bytes = 0

    def add(self, piece: bytes) -> None:
        self._bytes += len(piece)
        if self._bytes <= idempotency.BODY_BYTES_MAX:
            self._pieces.append(piece)
        else:
            self._pieces.clear()

    def body(self) -> bytes | None:
        """Return the whole stream, or None when it was too long to keep."""
        return b"".join(self._pieces) if self._bytes <= idempotency.BODY_BYTES_MAX else None


class _Chained:
    """Yield a first piece and then the rest: handed through, for a generator between costs every piece a turn."""

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes]) -> None:
        self._first: bytes | None = first
        self._rest = rest

    def __aiter__(self) -> _Chained:
        return self

    def __anext__(self) -> Awaitable[bytes]:
        if self._first is not None:
            return self._take_first()
        return self._rest.__anext__()

    async def aclose(self) -> None:
        """End the rest."""
        await self._rest.aclose()

    async def _take_first(self) -> bytes:
        first, self._first = self._first, None
        return first


def _replay(kept: idempotency.Kept) -> Reply:
    """Return the answer kept under an idempotency key. Raises ApiError when there is none to give."""
    if kept.state == "lost":
        raise ApiError(
            400, "idempotency_not_replayable",
            "The request with this Idempotency-Key was answered and charged, but its answer was too large to keep.",
            param="Idempotency-Key",
        )
    if kept.state == "failed" or kept.body is None:
        raise ApiError(
            502, "upstream_error", "The request with this Idempotency-Key broke off; use a new key.",
            # The SDKs would try a 502 again, which would only ever be told the same.
            headers={"x-should-retry": "false"},
        )
    return Reply(
        kept.status or 200, kept.body, kept.content_type or "application/json",
        {"idempotent-replayed": "true", "x-original-request-id": kept.call_id},
    )


def _standing_headers(meter: Meter) -> dict[str, str]:
    """Return where the account stands: rate window, included calls, a lowered output limit."""
    admitted = meter.admitted
    headers = {}
    if (standing := admitted.standing) is not None:
        resets_s = max(-(-(standing.resets_at_ms - clock.now_ms()) // 1000), 0)
        headers = {
            "x-ratelimit-limit-requests": str(standing.limit),
            "x-ratelimit-remaining-requests": str(standing.remaining),
            "x-ratelimit-reset-requests": f"{resets_s}s",
        }
    if admitted.included_remaining is not None:
        headers["x-included-remaining"] = str(admitted.included_remaining)
    if not meter.sliced and meter.output_limit < meter.terms.wished:
        headers["x-tollgate-max-tokens"] = str(meter.output_limit)
    return headers


def _usage_body(meter: Meter) -> dict[str, Any]:
    """Return the usage as the client sees it: the provider's own count where it makes sense."""
    usage, estimated = meter.final_usage()
    body: dict[str, Any] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_input_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }
    if usage.cache_write_tokens:
        body["prompt_tokens_details"]["cache_write_tokens"] = usage.cache_write_tokens
    body["cost_usd"] = usd(meter.charge(usage))
    if estimated:
        body["estimated"] = True
    return body


def _usage_chunk(meter: Meter) -> dict[str, Any]:
    return {
        "id": meter.completion_id,
        "object": "chat.completion.chunk",
        "created": meter.created,
        "model": meter.offer.id,
        "choices": [],
        "usage": _usage_body(meter),
    }


def _cut_for_length(meter: Meter) -> bytes:
    """Return the finish chunk of a stream that the credit, or its limit, ended."""
    chunk: dict[str, Any] = {
        "id": meter.completion_id,
        "object": "chat.completion.chunk",
        "created": meter.created,
        "model": meter.offer.id,
        "choices": [
            {"index": index, "delta": {}, "logprobs": None, "finish_reason": "length"}
            for index in range(meter.terms.choices)
        ],
    }
    if meter.call.include_usage:
        chunk["usage"] = None
    return sse.encode(chunk)


def _keepable(body: bytes) -> bytes | None:
    return body if len(body) <= idempotency.BODY_BYTES_MAX else None


def _silent_for(meter: Meter) -> float:
    return asyncio.get_running_loop().time() - meter.pulse.sent_at


def _overdue(meter: Meter, now: float) -> str | None:
    """Return why a call must be stopped, if it must."""
    pulse, offer = meter.pulse, meter.offer
    if not meter.call.stream:
        return "answer_timeout" if now - pulse.started_at > offer.answer_timeout_s else None
    if now - pulse.started_at > STREAM_MAX_S:
        return "too_long"
    if pulse.token_at is None:
        return "first_token_timeout" if now - pulse.started_at > offer.first_token_timeout_s else None
    if pulse.silent_for_s(now) > STALLED_AFTER_S:
        return "stalled"
    if pulse.without_token_for_s(now) > NO_TOKEN_AFTER_S:
        return "no_token"
    return None


def _stopped(reason: str, upstream: str | None) -> ApiError:
    match reason:
        case "drained":
            return unavailable("This server is restarting; the answer was cut short. Please retry.")
        case "revoked":
            return ApiError(401, "invalid_api_key", "The API key was revoked while this answer was running.")
        case "too_long":
            return ApiError(502, "upstream_error", f"The stream took longer than {STREAM_MAX_S // 60} minutes.")
        case "lost":
            return ApiError(502, "upstream_error", "The call was given up before it could be answered.")
        case _:
            return ApiError(
                502, "upstream_error", "The AI provider took too long to answer. Please retry.",
                extra={"upstream": {"provider": upstream, "status": None}},
            )
