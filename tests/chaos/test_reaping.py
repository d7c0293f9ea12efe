"""Dead processes are settled for, and a living call is left alone however long it waits for its first token."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter

from models.database import Database
from tests.chaos.history import Ending, History, Told, assert_books_agree, until_nothing_is_held
from tests.chaos.load import Load, asking
from tests.chaos.sizes import FIRST_TOKEN_S, PLAIN_ANSWER_S, WHOLE
from tests.house import House

PATIENT = 6
# The locks tell of a dead neighbour within a pass of the reaper; its silence would not in less than 45 s.
NEIGHBOUR_S_MAX = 40
STREAMS = 18
# Long enough to be running when their process dies; those of the others must come to their end.
STREAM_S = min(FIRST_TOKEN_S, 20)
TOKENS = 50


async def test_a_patient_call_lives_while_a_dead_neighbours_are_freed(
    started: House, trio_books: Database, chance: random.Random, figure
) -> None:
    history = History()
    load = await Load(started, history, chance=chance, moment="a neighbour dies").prepare(trio_books)
    assert started.process is not None
    if WHOLE:
        # Without its supervisor the dead process is not replaced: the survivors must settle for it.
        started.process.send_signal(signal.SIGSTOP)
    patient = [
        asyncio.create_task(load.call(load.payer, asking(streamed, f"tokens:3 delay:{delay_s}")))
        for streamed, delay_s in ((True, FIRST_TOKEN_S), (False, PLAIN_ANSWER_S)) for _ in range(PATIENT)
    ]
    words = f"tokens:{TOKENS} pace:{STREAM_S / TOKENS:.3f}"
    streams = [asyncio.create_task(load.call(load.payer, asking(True, words))) for _ in range(STREAMS)]
    await asyncio.sleep(min(STREAM_S / 2, 6))
    os.kill(chance.choice(started.children()), signal.SIGKILL)
    died_at_s = time.monotonic()
    try:
        owner = await owner_of_a_cut_call(trio_books, streams)
        left_open = await open_calls(trio_books, owner)
        while await open_calls(trio_books, owner):
            assert time.monotonic() - died_at_s < NEIGHBOUR_S_MAX, "the calls of a dead process are still open"
            await asyncio.sleep(0.2)
        freed_s = time.monotonic() - died_at_s
    finally:
        started.process.send_signal(signal.SIGCONT)
    figure("calls that the dead process left", left_open)
    figure("freed after (s)", freed_s)
    told = await asyncio.gather(*patient)
    await asyncio.gather(*streams)
    await load.close()
    figure("patient calls", dict(Counter(one.ending.value for one in told)))
    assert left_open > 0
    for kind in (told[:PATIENT], told[PATIENT:]):
        assert any(one.ending is Ending.WHOLE for one in kind), "no patient call was left alive"
    assert {one.ending for one in told} <= {Ending.WHOLE, Ending.UNKNOWN, Ending.CUT}, "one was reaped"
    await until_nothing_is_held(trio_books, 5)
    await assert_books_agree(started, trio_books, history)
    assert started.stop() == 0


async def owner_of_a_cut_call(books: Database, calls: list[asyncio.Task[Told]]) -> str:
    """Wait until a client loses its answer; return the process that the call belonged to."""
    async with asyncio.timeout(10):
        while True:
            cut = [told for call in calls if call.done() and (told := call.result()).ending is Ending.CUT]
            if cut:
                [(owner,)] = await books.fetch("SELECT owner FROM calls WHERE id = ?", (cut[0].call_id,))
                return owner
            await asyncio.sleep(0.01)


async def open_calls(books: Database, owner: str) -> int:
    """Return how many calls of a process are open."""
    [(count,)] = await books.fetch(
        "SELECT COUNT(*) FROM calls WHERE owner = ? AND state = 'open'", (owner,), deadline_s=30
    )
    return count
