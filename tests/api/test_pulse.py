"""The pulse: ticks, stops, and a client that leaves, told apart however close together they come."""

from __future__ import annotations

import asyncio

import pytest

from api.pulse import Pulse


async def waiting(pulse: Pulse, log: list[str]) -> None:
    """Read for ever, noting what happens."""
    pulse.move_to_current_task()
    while True:
        try:
            if await pulse.read(asyncio.sleep(60)) is None:
                log.append("tick")
        except asyncio.CancelledError:
            log.append("stopped" if pulse.stopped() else "left")
            raise


async def begun() -> tuple[Pulse, asyncio.Task[None], list[str]]:
    """Return a pulse whose task is reading."""
    log: list[str] = []
    pulse = Pulse()
    task = asyncio.create_task(waiting(pulse, log))
    await asyncio.sleep(0)
    return pulse, task, log


async def ended(task: asyncio.Task[None]) -> None:
    """Wait for a task that ends by a cancellation."""
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_tick_wakes_a_read_and_nothing_else() -> None:
    pulse, task, log = await begun()
    for _ in range(3):
        pulse.tick()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert log == ["tick"] * 3 and task.cancelling() == 0
    task.cancel()
    await ended(task)
    assert log[-1] == "left"


async def test_a_stop_is_told_from_a_client_that_left() -> None:
    pulse, task, log = await begun()
    pulse.stop("drained")
    await ended(task)
    assert log == ["stopped"] and pulse.reason == "drained"


async def test_a_tick_and_a_stop_at_once_are_a_stop() -> None:
    pulse, task, log = await begun()
    pulse.tick()
    pulse.stop("drained")
    await ended(task)
    assert log == ["stopped"]


async def test_a_client_that_leaves_as_we_stop_has_left() -> None:
    pulse, task, log = await begun()
    pulse.stop("drained")
    task.cancel()
    await ended(task)
    assert log == ["left"]


async def test_only_waiting_for_the_upstream_counts_as_its_silence() -> None:
    pulse = Pulse()
    now = asyncio.get_running_loop().time()
    assert pulse.silent_for_s(now + 100) == 0
    reading = asyncio.create_task(pulse.read(asyncio.sleep(60)))
    await asyncio.sleep(0)
    assert 99 < pulse.silent_for_s(now + 100) < 101
    pulse.heard_at = now + 90
    assert 9 < pulse.silent_for_s(now + 100) < 11
    assert 99 < pulse.without_token_for_s(now + 100) < 101
    reading.cancel()
    await ended(reading)
