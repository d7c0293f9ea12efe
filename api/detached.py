"""A call that outlives its client: run in a task of its own, read from by whoever is still there."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING

from api.pulse import Pulse

if TYPE_CHECKING:
    from api.exchange import Reply

PIECES_WAITING_MAX = 256


class Detached:
    """Hand the reply of a running call over, and its pieces one by one.

    While the client reads, it sets the pace; once it has left, the call runs to its end unread. A client
    that stays but does not read holds the call up only until its pulse stops it.
    """

    def __init__(self, start: Callable[[], Awaitable[Reply]], pulse: Pulse) -> None:
        self._start = start
        self._pulse = pulse
        self._pieces: asyncio.Queue[bytes | None] = asyncio.Queue(PIECES_WAITING_MAX)
        self._reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._left = False

    async def run(self) -> None:
        """Run the call; to be run as a task of its own."""
        self._pulse.move_to_current_task()
        try:
            reply = await self._start()
        except BaseException as error:
            if not self._reply.done():
                self._reply.set_exception(error if isinstance(error, Exception) else RuntimeError("cancelled"))
                # Nobody may be there any more to look at it.
                self._reply.exception()
            return
        if isinstance(reply.body, bytes):
            self._hand_over(reply)
            return
        source, reply.body = reply.body, _Reader(self._pieces, self._leave)
        self._hand_over(reply)
        try:
            async with aclosing(source):
                async for piece in source:
                    if not self._left:
                        await self._pieces.put(piece)
        finally:
            # Never waits: a reader that does not read must not keep an ended call alive.
            if self._pieces.full():
                self._pieces.get_nowait()
            self._pieces.put_nowait(None)

    async def reply(self) -> Reply:
        """Return the call's reply; a caller that is cancelled here leaves the call running."""
        try:
            return await asyncio.shield(self._reply)
        except asyncio.CancelledError:
            self._leave()
            raise

    def _hand_over(self, reply: Reply) -> None:
        if not self._reply.done():
            self._reply.set_result(reply)

    def _leave(self) -> None:
        self._left = True
        while not self._pieces.empty():
            self._pieces.get_nowait()


class _Reader:
    """Yield the pieces of a reply.

    Not a generator: closing one that was never asked for its first piece would tell nobody.
    """

    def __init__(self, pieces: asyncio.Queue[bytes | None], leave: Callable[[], None]) -> None:
        self._pieces = pieces
        self._leave = leave

    def __aiter__(self) -> _Reader:
        return self

    async def __anext__(self) -> bytes:
        piece = await self._pieces.get()
        if piece is None:
            self._leave()
            raise StopAsyncIteration
        return piece

    async def aclose(self) -> None:
        """Read no further."""
        self._leave()
