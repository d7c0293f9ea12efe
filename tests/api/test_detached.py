"""A detached call: paced by its reader, outliving it, and never kept alive by one that does not read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from api.detached import PIECES_WAITING_MAX, Detached
from api.exchange import Reply
from api.pulse import Pulse


class Source:
    """Yield numbered pieces and note how it ended."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.made = 0
        self.ended = ""

    async def pieces(self, pulse: Pulse) -> AsyncIterator[bytes]:
        """Yield until done or stopped."""
        try:
            while self.made < self.count:
                self.made += 1
                yield b"%d " % self.made
                await asyncio.sleep(0)
            self.ended = "done"
        finally:
            self.ended = self.ended or "closed"


def begun(source: Source) -> tuple[Detached, asyncio.Task[None], Pulse]:
    """Start a call that streams from a source."""
    pulse = Pulse()

    async def start() -> Reply:
        return Reply(200, source.pieces(pulse), "text/event-stream")

    detached = Detached(start, pulse)
    return detached, asyncio.create_task(detached.run()), pulse


async def test_a_reader_gets_every_piece_and_sets_the_pace() -> None:
    source = Source(2 * PIECES_WAITING_MAX)
    detached, task, _ = begun(source)
    reply = await detached.reply()
    await asyncio.sleep(0.05)
    assert source.made <= PIECES_WAITING_MAX + 2
    assert b"".join([piece async for piece in reply.body]).split()[-1] == b"%d" % source.count
    await task
    assert source.ended == "done"


async def test_it_runs_to_its_end_when_its_reader_leaves() -> None:
    source = Source(3 * PIECES_WAITING_MAX)
    detached, task, _ = begun(source)
    reply = await detached.reply()
    assert await anext(reply.body) == b"1 "
    await reply.body.aclose()
    async with asyncio.timeout(20):
        await task
    assert source.ended == "done"


async def test_it_can_be_stopped_while_its_reader_does_not_read() -> None:
    source = Source(10**9)
    detached, task, pulse = begun(source)
    await detached.reply()
    await asyncio.sleep(0.05)
    pulse.stop("drained")
    done, _ = await asyncio.wait((task,), timeout=20)
    assert done, "an unread call went on"
    assert source.ended == "closed"


async def test_a_failure_before_the_reply_is_the_callers() -> None:
    async def start() -> Reply:
        raise ValueError("refused")

    detached = Detached(start, Pulse())
    task = asyncio.create_task(detached.run())
    with pytest.raises(ValueError, match="refused"):
        await detached.reply()
    await task


async def test_a_caller_that_is_cancelled_leaves_the_call_running() -> None:
    source = Source(5)
    detached, task, _ = begun(source)
    waiting = asyncio.create_task(detached.reply())
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await task
    assert source.ended == "done"


async def test_it_runs_to_its_end_when_its_reader_never_begins() -> None:
    source = Source(3 * PIECES_WAITING_MAX)
    detached, task, _ = begun(source)
    reply = await detached.reply()
    await reply.body.aclose()
    await asyncio.wait_for(task, 20)
    assert source.ended == "done"
