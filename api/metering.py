"""Metering: admit → count → settle or release, exactly once however a call ends.

A `Meter` belongs to one running call. Whatever ends the call (a whole answer, an error, a client that
leaves, a drain) comes down to one of two verbs here, `settle` or `release`; the first one decides, and
both run in tasks that no request can cancel.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

from prometheus_client import Counter, Gauge, Histogram

from api.auth import Caller
from api.calls import ChatCall, Frame, plain_reason
from api.exchange import AtEnd
from api.pulse import Pulse
from api.terms import SLICE_TOKENS, Terms
from models import call as calls
from models import idempotency, rate_limit
from models.catalog import Offer
from models.clock import now_ms
from models.database import GROUP_MEMBERS_MAX, Database, Deadline, Lane, Script, deliver
from models.errors import DatabaseUnavailable, DomainError, InsufficientCredits
from models.process import Process
from models.usage import Usage

ADMISSION_WAIT_S = 1.5
SETTLE_PATIENCE_S = 60
SETTLE_WAIT_S = 25
SETTLE_PAUSE_S = 0.25
REFUSALS_MAX = 10_000
BYTES_PER_TOKEN = 4
IMAGE_TOKENS_LEAST = 85
# An upstream that streams a token a chunk sends chunks of about this many bytes of text.
PIECE_BYTES = (1.5, 8)
# No tokenizer makes tokens this long on average: beyond it the upstream ignores the limit it was given.
RUNAWAY_BYTES_PER_TOKEN = 16

# Refused calls that are not written down yet, by what is counted as one row, each with how often it happened.
Refusals = dict[tuple[str, ...], tuple[calls.Refusal, int]]

_log = logging.getLogger("tollgate.metering")

CALLS = Counter("tollgate_calls_total", "Calls by how they ended.", ["surface", "outcome"])
LATENCY = Histogram(
    "tollgate_call_seconds", "Time from request to outcome.", ["surface"],
    buckets=(0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 900),
)
CHARGED = Counter("tollgate_charged_microusd_total", "Charged to wallets, in micro-dollars.")
HOUSE_LOSS = Counter("tollgate_house_loss_microusd_total", "Cost above what was held, in micro-dollars.")
RUNNING = Gauge("tollgate_calls_running", "Calls running now.", multiprocess_mode="livesum")


class Lost(Exception):
    """Report that somebody else decided a call's outcome; nothing of it may be delivered any more."""


@dataclass(slots=True, eq=False)
class Meter:
    """Count one running call.

    `started_s` is by the event loop's clock, `created` in seconds since 1970. Money in micro-dollars.
    """

    call: ChatCall
    caller: Caller
    offer: Offer
    terms: Terms
    admitted: calls.Admitted
    pulse: Pulse
    started_s: float
    created: int
    held: int = 0
    output_limit: int = 0
    upstream_limit: int = 0
    sliced: bool = False
    text_bytes: int = 0
    pieces: int = 0
    usage: Usage | None = None
    usage_body: dict[str, Any] = field(default_factory=dict)
    first_byte_s: float | None = None
    finish_reason: str | None = None
    upstream: str | None = None
    upstream_model: str | None = None
    upstream_request_id: str | None = None
    attempts: list[calls.Attempt] = field(default_factory=list)
    ended: bool = False
    capped: bool = False
    extending: asyncio.Task[bool] | None = None
    release_instead: bool = False
    costed: tuple[Usage, int] | None = None

    @property
    def id(self) -> str:
        """Return the call's id, which is the request's id."""
        return self.admitted.call_id

    @property
    def completion_id(self) -> str:
        """Return the id that every chunk of the answer carries."""
        return "chatcmpl-" + self.id.removeprefix("req_")

    def begin_attempt(self) -> None:
        """Forget what an attempt that failed before its first token said of itself."""
        self.usage, self.usage_body = None, {}
        self.finish_reason = self.upstream_request_id = None

    def see(self, frame: Frame) -> None:
        """Count a frame that came from the upstream."""
        if frame.pieces:
            self.text_bytes += frame.text_bytes
            self.pieces += frame.pieces
            if self.first_byte_s is None:
                self.first_byte_s = asyncio.get_running_loop().time()
        if frame.usage is not None:
            self.usage = frame.usage
            self.usage_body = frame.usage_body or {}
        if frame.finish_reason is not None and self.finish_reason is None:
            self.finish_reason = frame.finish_reason
        if frame.upstream_request_id is not None:
            self.upstream_request_id = frame.upstream_request_id

    def output_tokens(self) -> int:
        """Return our own count of the output: chunks where they look like tokens, else bytes by four."""
        if not self.pieces:
            return 0
        low, high = PIECE_BYTES
        if low <= self.text_bytes / self.pieces <= high:
            return self.pieces
        return max(-(-self.text_bytes // BYTES_PER_TOKEN), 1)

    def output_tokens_at_most(self) -> int:
        """Return a count that the true one does not exceed, for deciding when to hold more."""
        return max(self.pieces, -(-self.text_bytes // 2)) // self.terms.choices

    def is_runaway(self) -> bool:
        """Return whether the upstream goes on far beyond the limit it was given."""
        allowed = self.upstream_limit * self.terms.choices
        return self.text_bytes > allowed * RUNAWAY_BYTES_PER_TOKEN

    def estimate(self) -> Usage:
        """Return our own count of the usage, for answers whose provider gave none."""
        return Usage(
            input_tokens=estimated_input_tokens(self.call, self.terms), output_tokens=self.output_tokens()
        )

    def final_usage(self) -> tuple[Usage, bool]:
        """Return the usage to charge by, and whether it is an estimate."""
        if self.usage is not None:
            return self.usage, False
        return self.estimate(), True

    def cost(self, usage: Usage) -> int:
        """Return what a usage costs by the rates of the call's admission, in micro-dollars."""
        # The usage of a call is told to its client and then written down.
        if self.costed is None or self.costed[0] is not usage:
            self.costed = usage, self.offer.rates.cost_microusd(usage)
        return self.costed[1]

    def charge(self, usage: Usage) -> int:
        """Return what the account pays for a usage: nothing for an included call, never above the hold."""
        return 0 if self.admitted.included_month else min(self.cost(usage), self.held)

    def outcome(
        self, status: int, *, usage: Usage | None = None, estimated: bool = False, error_code: str | None = None,
        answer: idempotency.StoredAnswer | None = None,
    ) -> calls.Outcome:
        """Return the outcome to be written."""
        now = asyncio.get_running_loop().time()
        return calls.Outcome(
            id=secrets.token_hex(8),
            status=status,
            usage=usage or Usage(),
            cost=self.cost(usage) if usage else 0,
            estimated=estimated,
            finish_reason=plain_reason(self.finish_reason),
            error_code=error_code,
            upstream=self.upstream,
            upstream_model=self.upstream_model,
            upstream_request_id=self.upstream_request_id,
            latency_ms=round((now - self.started_s) * 1000),
            first_byte_ms=None if self.first_byte_s is None else round((self.first_byte_s - self.started_s) * 1000),
            attempts=tuple(self.attempts),
            answer=answer,
        )


class Metering:
    """Hold the running calls of this process and the two lanes to the books."""

    def __init__(self, database: Database, process: Process) -> None:
        self.database = database
        self.process = process
        self.running: dict[str, Meter] = {}
        self._admissions = Lane(database)
        # SQLite writes one transaction at a time, so both kinds may as well share it.
        self._outcomes = self._admissions if database.dialect == "sqlite" else Lane(database)
        self._admission_deadline = Deadline(ADMISSION_WAIT_S)
        self._settlement_deadline = Deadline(SETTLE_WAIT_S)
        # Refusal and how often it was repeated since it was last written.
        self._refusals: Refusals = {}
        self._last_used: dict[str, int] = {}
        self._entering = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def admit(self, wanted: calls.Admission) -> calls.Admitted | idempotency.Kept:
        """Admit a call or find the answer kept under its idempotency key.

        Raises what `models.call.admit` raises, InsufficientCredits, and DatabaseUnavailable. A call
        whose admission commits after nobody waits for it any more is released.
        """
        key = wanted.key
        result = asyncio.get_running_loop().create_future()
        self._admissions.post(
            (key.account_id, wanted.call_id), lambda: calls.admit(wanted),
            lambda outcome: self._tell_admission(wanted, result, outcome),
        )
        self._admission_deadline.watch(result)
        try:
            admitted = await result
        except InsufficientCredits:
            _counter(wanted.surface, "refused").inc()
            raise
        except asyncio.CancelledError:
            if result.done() and not result.cancelled() and not result.exception():
                self._release_unwanted(wanted, result.result())
            raise
        if isinstance(admitted, calls.Admitted):
            self._last_used[key.id] = wanted.now_ms
        return admitted

    def begin(self, meter: Meter) -> None:
        """Count a call among the running ones."""
        meter.held = meter.admitted.hold
        self.running[meter.id] = meter
        self._idle.clear()
        RUNNING.inc()

    @contextmanager
    def entering(self) -> Iterator[None]:
        """Count a call that is being admitted: the process is not idle meanwhile."""
        self._entering += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._entering -= 1
            self._note_idle()

    async def until_idle(self, limit_s: float) -> None:
        """Wait until no call runs any more, at most so long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._idle.wait()

    def watch(self, meter: Meter, at_end: AtEnd) -> None:
        """See to it that the call ends when the work on it does, whatever that ended by."""
        at_end(lambda: self._end_abandoned(meter))

    async def final_hold(self, meter: Meter) -> None:
        """Wait until it is known what is held for a call: its charge is bounded by that."""
        if meter.extending is not None:
            await asyncio.wait((meter.extending,))

    async def settle(self, meter: Meter, outcome: calls.Outcome) -> calls.Settled:
        """Charge a call that delivered, and wait until the charge is durable.

        Raises Lost when somebody else decided the outcome, DatabaseUnavailable when the books cannot
        be reached for long. The settlement then goes on without the caller; of a call that has
        delivered nothing yet it becomes a release, because its answer will not be given.
        """
        meter.ended = True
        waiting = asyncio.get_running_loop().create_future()
        self._settle(meter, outcome, waiting)
        self._settlement_deadline.watch(waiting)
        try:
            settled = await waiting
        except DatabaseUnavailable:
            meter.release_instead = not meter.call.stream
            raise
        if settled is None:
            raise Lost(meter.id)
        return settled

    def settle_later(self, meter: Meter, outcome: calls.Outcome) -> None:
        """Charge a call without anybody waiting for it."""
        if not meter.ended:
            meter.ended = True
            self._settle(meter, outcome, None)

    def release(self, meter: Meter, outcome: calls.Outcome) -> asyncio.Future[bool] | None:
        """End a call at no cost. The future may be waited for (not cancelled) to know that it is done."""
        if meter.ended:
            return None
        meter.ended = True
        released = asyncio.get_running_loop().create_future()

        def told(result: Any) -> None:
            self._count_ended(meter, "released")
            _log_defect(result)
            deliver(released, result)

        self._end(meter, lambda: calls.release(meter.id, outcome), told)
        return released

    def may_extend(self, meter: Meter) -> bool:
        """Return whether a stream nears the end of what is held for it and may hold more."""
        return (
            meter.sliced
            and not meter.capped
            and meter.extending is None
            and meter.output_limit < meter.terms.ceiling
            and meter.output_tokens_at_most() * 4 >= meter.output_limit * 3
        )

    def extend(self, meter: Meter) -> None:
        """Start holding the next slice for a stream; `meter.extending` is done when that is decided."""
        wanted = max(meter.output_limit, meter.output_tokens_at_most()) + SLICE_TOKENS
        more_tokens = min(wanted, meter.terms.ceiling)
        hold = meter.offer.rates.bound_microusd(
            input_tokens_max=meter.terms.input_tokens_max,
            output_tokens_max=more_tokens * meter.terms.choices,
        )
        meter.extending = self.database.own(self._extend(meter, more_tokens, hold - meter.held))

    def refuse(self, refusal: calls.Refusal) -> None:
        """Write a refused call down within a second; a flood of 429 is one row a key and minute."""
        _counter(refusal.surface, "refused").inc()
        key: tuple[str, ...] = (refusal.call_id,)
        if refusal.status == 429:
            minute = refusal.created_at_ms // rate_limit.WINDOW_MS
            key = (refusal.key_id, refusal.path, refusal.offer, str(minute))
        known = self._refusals.get(key)
        if known is not None:
            self._refusals[key] = (known[0], known[1] + 1)
        elif len(self._refusals) < REFUSALS_MAX:
            self._refusals[key] = (refusal, 1)

    async def write_notes(self) -> None:
        """Write down refused calls and when keys were last used."""
        minute = str(now_ms() // rate_limit.WINDOW_MS)
        new = {key: refusal for key, refusal in self._refusals.items() if refusal[1]}
        # What is counted by the minute stays known until its minute is over, to be counted up.
        self._refusals = {
            key: (refusal, 0) for key, (refusal, _) in self._refusals.items() if len(key) > 1 and key[-1] == minute
        }
        used, self._last_used = self._last_used, {}
        for key, (refusal, repeated) in (await self._write_refusals(new)).items():
            _, since = self._refusals.get(key, (refusal, 0))
            self._refusals[key] = (refusal, repeated + since)
        try:
            if used:
                await self.database.run(lambda: calls.api_key.note_used(used), deadline_s=10)
        except DatabaseUnavailable:
            self._last_used = used | self._last_used

    async def _write_refusals(self, refusals: Refusals) -> Refusals:
        """Write refused calls down, many accounts' in one transaction, and return those that could not be."""
        of_accounts: dict[str, Refusals] = {}
        for key, refused in refusals.items():
            of_accounts.setdefault(refused[0].account_id, {})[key] = refused
        unwritten: Refusals = {}
        accounts = sorted(of_accounts)
        for start in range(0, len(accounts), GROUP_MEMBERS_MAX):
            group = accounts[start : start + GROUP_MEMBERS_MAX]
            makes = [partial(calls.write_refusals, list(of_accounts[account].values())) for account in group]
            work = self.database.own(self.database.run_group(makes, group, aside=True))
            try:
                outcomes = await self.database.wait(work, 10)
            except DatabaseUnavailable as error:
                outcomes = [error] * len(group)
            for account, outcome in zip(group, outcomes, strict=True):
                if isinstance(outcome, DatabaseUnavailable):
                    unwritten |= of_accounts[account]
                else:
                    _log_defect(outcome)
        return unwritten

    async def checkpoint(self) -> None:
        """Write down how far the streams have come; stop those whose outcome somebody else decided."""
        going = [meter for meter in self.running.values() if not meter.ended and meter.pieces]
        if not going:
            return
        marks = [(meter.id, meter.charge(meter.estimate()), meter.output_tokens()) for meter in going]
        owner = self.process.id
        lost = await self.database.run(lambda: calls.checkpoint(owner, marks), deadline_s=10)
        for call_id in lost:
            meter = self.running.get(call_id)
            if meter is not None and not meter.ended:
                meter.pulse.stop("lost")

    def _tell_admission(self, wanted: calls.Admission, result: asyncio.Future[Any], outcome: Any) -> None:
        if result.done() or isinstance(outcome, DatabaseUnavailable):
            self._release_unwanted(wanted, outcome)
        deliver(result, outcome)

    def _release_unwanted(self, wanted: calls.Admission, outcome: Any) -> None:
        """Release a call nobody waits for, also when it is not known whether its admission committed."""
        if isinstance(outcome, calls.Admitted | DatabaseUnavailable):
            left = calls.Outcome(id=secrets.token_hex(8), status=499, error_code="client_closed")
            order = (wanted.key.account_id, wanted.call_id)
            self._write(order, lambda: calls.release(wanted.call_id, left), _log_defect)

    def _write(
        self, order: tuple[str, str], make: Callable[[], Script[Any]], told: Callable[[Any], None]
    ) -> None:
        """Write an outcome down as soon as the database takes it; `told` gets what became of it, once."""

        def told_first(result: Any) -> None:
            if isinstance(result, DatabaseUnavailable):
                self.database.own(self._write_patiently(order, make, told))
            else:
                told(result)

        self._outcomes.post(order, make, told_first)

    async def _write_patiently(
        self, order: tuple[str, str], make: Callable[[], Script[Any]], told: Callable[[Any], None]
    ) -> None:
        """Try again for a minute; after that the reaper has the call."""
        loop = asyncio.get_running_loop()
        deadline, pause = loop.time() + SETTLE_PATIENCE_S, SETTLE_PAUSE_S
        while True:
            await asyncio.sleep(pause)
            try:
                result = await self._outcomes.submit(order, make)
            except DatabaseUnavailable as error:
                pause = min(pause * 2, 2)
                if loop.time() + pause < deadline:
                    continue
                result = error
            except Exception as error:
                result = error
            told(result)
            return

    def _end(self, meter: Meter, make: Callable[[], Script[Any]], told: Callable[[Any], None]) -> None:
        """Write a call's outcome once it is known what is held for it: its charge is bounded by that."""
        order = (meter.admitted.account_id, meter.id)
        if meter.extending is None:
            self._write(order, make, told)
        else:
            meter.extending.add_done_callback(lambda _: self._write(order, make, told))

    def _settle(self, meter: Meter, outcome: calls.Outcome, waiting: asyncio.Future[Any] | None) -> None:
        def make() -> Script[Any]:
            # Asked when the script begins, not when it is queued: the caller may have been told by then.
            return (calls.release if meter.release_instead else calls.settle)(meter.id, outcome)

        def told(result: Any) -> None:
            self._count_ended(meter, "settled")
            if isinstance(result, calls.Settled):
                self._note_charge(meter, result)
            elif not isinstance(result, Exception):
                _log.warning("the outcome of a call was decided elsewhere", extra={"request_id": meter.id})
                result = None
            if waiting is None or waiting.done():
                _log_defect(result)
            else:
                deliver(waiting, result)

        self._end(meter, make, told)

    def _note_charge(self, meter: Meter, settled: calls.Settled) -> None:
        CHARGED.inc(settled.charged if settled.charged_from == calls.FROM_WALLET else 0)
        if settled.house_loss:
            HOUSE_LOSS.inc(settled.house_loss)
            _log.error(
                "a call cost more than was held for it: %d micro-dollars are the house's loss",
                settled.house_loss, extra={"request_id": meter.id, "upstream": meter.upstream},
            )

    def _end_abandoned(self, meter: Meter) -> None:
        """End a call whose task is over without having ended it: the client left, or we have a defect."""
        if meter.ended:
            return
        if meter.text_bytes:
            usage = meter.estimate() if meter.usage is None else meter.usage
            self.settle_later(meter, meter.outcome(
                499, usage=usage, estimated=meter.usage is None, error_code="client_closed"
            ))
            return
        meter.ended = True
        self._hang_up(meter)

    def _hang_up(self, meter: Meter) -> None:
        prompt = Usage(input_tokens=meter.estimate().input_tokens)
        free = meter.outcome(499, error_code="client_closed")
        paid = meter.outcome(499, usage=prompt, estimated=True, error_code="client_closed")

        def told(result: Any) -> None:
            self._count_ended(meter, "released")
            _log_defect(result)

        self._end(meter, lambda: calls.hang_up(meter.admitted.account_id, meter.id, free, paid, now_ms()), told)

    async def _extend(self, meter: Meter, more_tokens: int, more: int) -> bool:
        account_id = meter.admitted.account_id
        granted = False
        try:
            granted = await self._admissions.submit(
                (account_id, meter.id), lambda: calls.extend(meter.id, account_id, more)
            )
        except DomainError:
            pass
        finally:
            if granted:
                meter.held += more
                meter.output_limit = more_tokens
            else:
                meter.capped = True
            meter.extending = None
        return granted

    def _note_idle(self) -> None:
        if not self.running and not self._entering:
            self._idle.set()

    def _count_ended(self, meter: Meter, outcome: str) -> None:
        if self.running.pop(meter.id, None) is not None:
            RUNNING.dec()
            self._note_idle()
            _counter(meter.offer.surface, outcome).inc()
            _latency(meter.offer.surface).observe(asyncio.get_running_loop().time() - meter.started_s)


# Finding a series by its labels takes longer than counting; there are a dozen of them.
_counter = cache(CALLS.labels)
_latency = cache(LATENCY.labels)


def _log_defect(result: Any) -> None:
    """Log that an outcome nobody waits for could not be written."""
    if isinstance(result, Exception):
        _log.error("a call could not be ended; the reaper has it now", exc_info=result)


def estimated_input_tokens(call: ChatCall, terms: Terms) -> int:
    """Return our own count of a prompt: bytes by four, and what the cheapest image is billed as."""
    text = -(-(call.input_bytes + call.file_bytes) // BYTES_PER_TOKEN)
    return min(text + call.images * IMAGE_TOKENS_LEAST, terms.input_tokens_max)

