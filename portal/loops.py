"""Background loops. Each claims what it works on by guarded updates, so any process may run any of them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Protocol

from models import call as calls
from models import (
    idempotency,
    ledger,
    one_time_link,
    outbox,
    passkey,
    payment_event,
    process,
    rate_limit,
    session,
    top_up,
)
from models.clock import now_ms
from models.database import Database
from models.errors import DatabaseUnavailable

CHECKPOINT_S = 2
SWEEP_S = 1
NOTES_S = 1
REAP_S = 15
# A call is reaped only when the same reaper has seen its owner silent twice, this far apart by its own
# monotonic clock: a jump of the wall clock alone reaps nothing.
REAP_AGAIN_S = 15
PRUNE_S = 600
RECONCILE_S = 10
MAIL_S = 1
LOW_CREDIT_S = 1
AUDIT_S = 3600
# Each line is written on the event loop, and calls wait meanwhile.
VIOLATIONS_LOGGED_MAX = 100
RATE_WINDOWS_KEPT_MS = 2 * 3600 * 1000
# A call of ours that we do not know of, this long after it was admitted, was lost by us.
STRAY_S = 120

_log = logging.getLogger("tollgate.loops")


class RunningCalls(Protocol):
    """The calls of this process, as far as the loops need to know them."""

    running: dict[str, Any]

    async def checkpoint(self) -> None:
        """Write down how far the streams have come."""

    async def write_notes(self) -> None:
        """Write down refused calls and when keys were used."""


class Watchdog(Protocol):
    """What looks after the running calls each second."""

    def sweep(self) -> None:
        """Send pings, stop what is stalled."""

    async def stop_ended_keys(self) -> None:
        """Stop the streams of revoked keys."""


class Deliverer(Protocol):
    """Who carries the mail."""

    async def deliver(self) -> None:
        """Deliver the letters that are due."""


class CreditWatch(Protocol):
    """Who looks after accounts whose credit runs low."""

    async def tell(self) -> None:
        """Mail those whose credit has run low."""

    async def recharge(self) -> None:
        """Buy credit for those who want that."""


class Reconciler(Protocol):
    """Who asks the payment processor what it has not told."""

    async def reconcile(self) -> None:
        """Ask about what is open."""


class Loops:
    """Run the loops of one process."""

    def __init__(
        self, database: Database, own: process.Process, metering: RunningCalls, gateway: Watchdog,
        postman: Deliverer, payments: Reconciler, credit_watch: CreditWatch,
    ) -> None:
        self._database = database
        self._own = own
        self._metering = metering
        self._gateway = gateway
        self._postman = postman
        self._credit_watch = credit_watch
        self._payments = payments
        self._tasks: list[asyncio.Task[None]] = []
        self._suspects: dict[str, float] = {}
        self._strays: dict[str, float] = {}
        self.beaten_at_s = time.monotonic()

    def moved(self) -> None:
        """Tell the watchdog that the event loop moves."""
        self.beaten_at_s = time.monotonic()

    async def start(self) -> None:
        """Give back what dead processes of this host left, then start."""
        await self._release_dead_neighbours()
        for period_s, work in (
            (process.BEAT_S, self._beat),
            (SWEEP_S, self._sweep),
            (CHECKPOINT_S, self._metering.checkpoint),
            (NOTES_S, self._metering.write_notes),
            (process.BEAT_S, self._gateway.stop_ended_keys),
            (REAP_S, self._reap),
            (PRUNE_S, self._prune),
            (MAIL_S, self._postman.deliver),
            (LOW_CREDIT_S, self._credit_watch.tell),
            (LOW_CREDIT_S, self._credit_watch.recharge),
            (RECONCILE_S, self._payments.reconcile),
        ):
            self._tasks.append(asyncio.create_task(_every(period_s, work)))
        self._tasks.append(asyncio.create_task(_every(AUDIT_S, self._audit, at_once=True)))

    async def stop(self) -> None:
        """Stop all loops."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()

    async def sign_off(self) -> None:
        """Strike this process off the list of living ones."""
        with suppress(DatabaseUnavailable):
            await self._database.run(lambda: process.leave(self._own.id), deadline_s=5)

    async def _beat(self) -> None:
        await self._database.run(lambda: process.beat(self._database, self._own), deadline_s=10)

    async def _sweep(self) -> None:
        self.moved()
        self._gateway.sweep()

    async def _reap(self) -> None:
        """End the calls of dead processes: those of this host by their locks, others by their silence."""
        await self._release_dead_neighbours()
        now = time.monotonic()
        silent = await calls.open_of_dead(self._database)
        seen = {call_id: self._suspects.get(call_id, now) for call_id, owner in silent if owner != self._own.id}
        self._suspects = seen
        for call_id, since in seen.items():
            if now - since >= REAP_AGAIN_S:
                await self._expire(call_id, None)
        await self._reap_strays(now)

    async def _reap_strays(self, now: float) -> None:
        """End open calls of this very process that nothing in it runs any more."""
        running = self._metering.running
        open_here = await calls.open_of(self._database, self._own.id)
        self._strays = {
            call_id: self._strays.get(call_id, now) for call_id in open_here if call_id not in running
        }
        for call_id, since in list(self._strays.items()):
            if now - since >= STRAY_S:
                await self._expire(call_id, self._own.id)

    async def _release_dead_neighbours(self) -> None:
        among = await process.of_host(self._database, self._own.host)
        for process_id in await asyncio.to_thread(self._own.dead_neighbours, among):
            for call_id in await calls.open_of(self._database, process_id):
                await self._expire(call_id, process_id)
            await self._database.run(lambda gone=process_id: process.leave(gone), deadline_s=5)

    async def _expire(self, call_id: str, dead_owner: str | None) -> None:
        account_id = await calls.account_of(self._database, call_id)
        ended = await self._database.run(
            lambda: calls.expire(self._database, call_id, dead_owner=dead_owner), gate=account_id, deadline_s=5
        )
        if ended:
            _log.warning("a call was ended for a process that is gone", extra={"request_id": call_id})

    async def _prune(self) -> None:
        now = now_ms()
        # In batches: on SQLite one long deletion would keep every call waiting for its turn to write.
        while await self._database.run(lambda: idempotency.prune(now), deadline_s=30):
            pass
        while await self._database.run(lambda: rate_limit.prune(now - RATE_WINDOWS_KEPT_MS), deadline_s=30):
            pass
        for prune in (
            session.prune, one_time_link.prune, passkey.prune, outbox.prune, top_up.expire_old, payment_event.prune,
        ):
            while await self._database.run(lambda prune=prune: prune(now), deadline_s=30):
                pass
        await self._database.run(lambda: process.prune(self._database), deadline_s=30)

    async def _audit(self) -> None:
        report = await ledger.audit(self._database, full=False)
        for violation in report.violations[:VIOLATIONS_LOGGED_MAX]:
            _log.error("the books do not add up: %s", violation)
        if more := report.violations[VIOLATIONS_LOGGED_MAX:]:
            _log.error("the books do not add up in %d more places; `portal audit` names them", len(more))


async def _every(period_s: float, work: Callable[[], Awaitable[None]], *, at_once: bool = False) -> None:
    """Do something again and again until cancelled; a failure is logged and tried again next time."""
    name = getattr(work, "__name__", repr(work)).strip("_")
    pause_s = 0.0 if at_once else period_s
    while True:
        await asyncio.sleep(pause_s)
        pause_s = period_s
        try:
            await work()
        except DatabaseUnavailable as error:
            _log.warning("%s: the database is not available: %s", name, error)
        except Exception:
            _log.exception("%s failed", name)
