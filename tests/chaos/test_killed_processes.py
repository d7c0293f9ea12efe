"""`kill -9` at any moment: what a client holds whole is in the books, nothing is charged twice or held for long."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

from models.database import Database
from tests.chaos.history import History, Told, assert_books_agree, longest_hold_s, until_nothing_is_held
from tests.chaos.load import Load
from tests.chaos.sizes import CLIENTS, HOLD_S_MAX, KILLS, KILLS_AFTER_DONE
from tests.house import House

# After the client has seen the end of its answer: as soon as can be, or a few turns of the event loop later.
AFTER_DONE_S = 0.005


async def test_kill_nine_at_random_moments(
    started: House, trio_books: Database, chance: random.Random, figure
) -> None:
    history = History()
    longest_s = 0.0
    for n in range(KILLS):
        everything = n % 2 == 1
        load = await Load(
            started, history, chance=chance, moment=f"kill {n} of {'all' if everything else 'one'}"
        ).prepare(trio_books)
        load.start(CLIENTS)
        await asyncio.sleep(chance.uniform(0, 1.2))
        if everything:
            kill_all(started)
            killed_at_s = time.monotonic()
            await restart(started, chance)
        else:
            kill_one(started, chance)
            killed_at_s = time.monotonic()
        await asyncio.sleep(chance.uniform(0, 0.5))
        await load.stop_calling()
        if everything:
            # Those that were killed first have long been settled for by their replacements.
            await until_nothing_is_held(trio_books)
            longest_s = max(longest_s, time.monotonic() - killed_at_s)
        await load.retry_keyed()
        await load.close()
    await until_nothing_is_held(trio_books)
    figure("calls", dict(history.endings()))
    figure("freed after a kill of everything, slowest, restart included (s)", longest_s)
    figure("longest hold of a call (s)", held_s := await longest_hold_s(trio_books))
    assert held_s < HOLD_S_MAX
    await assert_books_agree(started, trio_books, history)
    assert history.endings()["whole"] > 5 * KILLS, "the load was too light to prove anything"
    assert started.stop() == 0


async def test_kill_nine_right_after_the_client_saw_the_end(
    started: House, trio_books: Database, chance: random.Random, figure
) -> None:
    history = History()
    loop = asyncio.get_running_loop()
    for n in range(KILLS_AFTER_DONE):
        killed = asyncio.Event()
        # Not always the first answer: the later ones end while others are being settled.
        wholes_left = chance.randint(1, 12)

        def strike(killed: asyncio.Event = killed) -> None:
            if not killed.is_set():
                kill_all(started)
                killed.set()

        def on_whole(told: Told, n: int = n, strike: Callable[[], None] = strike) -> None:
            nonlocal wholes_left
            wholes_left -= 1
            if wholes_left == 0 and n % 2 == 0:
                strike()
            elif wholes_left == 0:
                loop.call_later(chance.uniform(0, AFTER_DONE_S), strike)

        load = await Load(
            started, history, chance=chance, moment=f"kill {n} after the end", on_whole=on_whole
        ).prepare(trio_books)
        load.start(CLIENTS)
        await asyncio.wait_for(killed.wait(), 30)
        await load.stop_calling()
        await load.close()
        await restart(started)
    await until_nothing_is_held(trio_books)
    figure("calls", dict(history.endings()))
    await assert_books_agree(started, trio_books, history)
    assert history.endings()["whole"] >= KILLS_AFTER_DONE
    assert started.stop() == 0


def kill_one(house: House, chance: random.Random) -> None:
    """Kill a random child; there may be none just now."""
    children = _children(house)
    if children:
        os.kill(chance.choice(children), signal.SIGKILL)


def kill_all(house: House) -> None:
    """Kill the supervisor and every child at once."""
    assert house.process is not None
    if house.process.poll() is not None:
        return
    # The supervisor first: it would start another child.
    for pid in [house.process.pid, *_children(house)]:
        os.kill(pid, signal.SIGKILL)


async def restart(house: House, chance: random.Random | None = None) -> None:
    """Start a killed house again; with dice, it may be killed while it starts, too."""
    assert house.process is not None
    await asyncio.to_thread(house.process.wait)
    if chance is not None and chance.random() < 0.25:
        starting = asyncio.create_task(asyncio.to_thread(house.start))
        await asyncio.sleep(chance.uniform(0.1, 2))
        kill_all(house)
        await asyncio.gather(starting, return_exceptions=True)
        if house.process.poll() is None:
            return  # a slow machine had not begun to start it
    await asyncio.to_thread(house.start)


def _children(house: House) -> list[int]:
    assert house.process is not None
    path = Path(f"/proc/{house.process.pid}/task/{house.process.pid}/children")
    return [int(pid) for pid in path.read_text().split()]
