"""A host that dies with open calls is settled for by another one, which knows it by its heartbeat alone.

Nothing but time tells a silent host from a dead one, so this waits for the reaper's own intervals: whole form only.
"""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path

from models.database import Database
from tests.chaos.history import Ending, History, assert_books_agree, until_nothing_is_held
from tests.chaos.load import Load, asking
from tests.chaos.sizes import HOLD_S_MAX
from tests.house import House


async def test_another_host_settles_for_one_that_died(
    started: House, trio_books: Database, twin: str, tmp_path: Path, chance: random.Random, figure
) -> None:
    # A data folder of its own makes it another host: its locks are not seen here, only its heartbeat.
    other = House(tmp_path / "other", started.database_url, twin, processes=3).start()
    history = History()
    here = await Load(started, history, chance=chance, moment="here").prepare(trio_books)
    there = await Load(other, history, chance=chance, moment="on the host that dies").prepare(trio_books)
    words = "tokens:400 pace:0.25"
    staying = [asyncio.create_task(here.call(here.payer, asking(True, words))) for _ in range(6)]
    dying = [asyncio.create_task(there.call(there.payer, asking(True, words))) for _ in range(12)]
    dying += [asyncio.create_task(there.call(there.payer, asking(False, "delay:100"))) for _ in range(6)]
    await asyncio.sleep(6)
    other.kill()
    died_at_s = time.monotonic()
    told = await asyncio.gather(*dying)
    assert {one.ending for one in told} == {Ending.CUT, Ending.UNKNOWN}
    account_id = there.payer.account.id
    while rows := await trio_books.fetch(
        "SELECT id FROM calls WHERE account_id = ? AND state = 'open'", (account_id,), deadline_s=30
    ):
        assert time.monotonic() - died_at_s < HOLD_S_MAX, f"{len(rows)} calls of a dead host are still open"
        await asyncio.sleep(0.2)
    figure("calls that the dead host left", len(told))
    figure("freed after (s)", time.monotonic() - died_at_s)
    rows = await trio_books.fetch("SELECT state FROM calls WHERE account_id = ?", (account_id,))
    assert sorted(row["state"] for row in rows) == ["expired"] * 12 + ["released"] * 6
    assert {one.ending for one in await asyncio.gather(*staying)} == {Ending.WHOLE}, "a living call was reaped"
    await until_nothing_is_held(trio_books, 5)
    await assert_books_agree(started, trio_books, history)
    await asyncio.gather(here.close(), there.close())
    assert started.stop() == 0
