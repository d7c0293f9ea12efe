"""The pulse of one running call: when bytes and tokens last came, and how to stop it from outside.

One sweep a second looks at every running call, so that no timer is armed per chunk. The sweep
either ticks a call (its stream has been silent: time for a ping) or stops it (a deadline, a drain,
a revoked key). Both reach the running task as a cancellation that carries a reason, the way
`asyncio.timeout` does it; a client that left is a cancellation without one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


class Pulse:
    """Watch one running call. Times are in seconds of the event loop's clock.

    `task` is the task that runs the call at present. `heard_at` moves with every byte from the
    upstream, comments included; `token_at` with every piece of generated text; `sent_at` with
    every byte to the client. `reading` is true while the upstream is waited for: time during which
    the client does not read is no fault of the upstream's.
    """

    __slots__ = (
        "_base_cancels", "_cancels", "_fresh", "_ours", "_since", "_tick", "_token_at", "_waited_s", "heard_at",
        "reading", "reason", "sent_at", "started_at", "task",
    )

    def __init__(self) -> None:
        now = asyncio.get_running_loop().time()
        self.move_to_current_task()
        self._tick = False
        self._ours: bool | None = None
        self._fresh = True
        self._since = now
        self._waited_s = 0.0
        self._token_at: float | None = None
        self.reading = False
        self.reason: str | None = None
        self.started_at = self.heard_at = self.sent_at = now

    @property
    def token_at(self) -> float | None:
        """Return when generated text last came, None before the first."""
        return self._token_at

    @token_at.setter
    def token_at(self, at_s: float) -> None:
        self._token_at = at_s
        self._waited_s = 0.0

    def move_to_current_task(self) -> None:
        """Watch the task that is running now; to be called when the call changes tasks."""
        self.task = asyncio.current_task()
        self._base_cancels = self.task.cancelling() if self.task else 0
        self._cancels = 0

    def silent_for_s(self, now_s: float) -> float:
        """Return how long the upstream has been waited for without a byte of it."""
        return now_s - max(self._since, self.heard_at) if self.reading else 0.0

    def without_token_for_s(self, now_s: float) -> float:
        """Return how long the upstream has been waited for, in all, since the last text."""
        return self._waited_s + (now_s - self._since if self.reading else 0.0)

    def tick(self) -> None:
        """Wake the adapter from a silent read, so that the client can be sent a ping."""
        if self.reading and not self._tick and self.reason is None and self.task:
            self._tick = True
            self._cancel()

    def stop(self, reason: str) -> None:
        """Stop the call: what it awaits is cancelled, and `stopped()` will be true."""
        if self.reason is None and self.task and not self.task.done():
            self.reason = reason
            self._cancel()

    def stopped(self) -> bool:
        """Return, in an `except CancelledError`, whether `stop` caused it, and take that cancellation
        back; false when it was the client who left."""
        if self.reason is None:
            return False
        if self._ours is None:
            self._ours = self._cleared()
        return self._ours

    async def read(self, waiting: Awaitable[T]) -> T | None:
        """Await bytes from an upstream; None means a tick came first: nothing was read, read again.

        `waiting` must be safe to cancel: a read of a buffered stream is, a request on its way is not.
        """
        loop = asyncio.get_running_loop()
        if self._fresh:
            self._since = loop.time()
        self._fresh = False
        self.reading = True
        try:
            result = await waiting
        except asyncio.CancelledError:
            if self._tick and self.reason is None and self._cleared():
                return None
            raise
        finally:
            self.reading = False
            self._tick = False
        self._fresh = True
        self._waited_s += loop.time() - self._since
        return result

    def _cancel(self) -> None:
        self._cancels += 1
        self.task.cancel()

    def _cleared(self) -> bool:
        """Take our own cancellations back; false when somebody else cancelled the task as well."""
        if self.task is None:
            return False
        left = self.task.cancelling()
        for _ in range(self._cancels):
            left = self.task.uncancel()
        self._cancels = 0
        return left <= self._base_cancels
