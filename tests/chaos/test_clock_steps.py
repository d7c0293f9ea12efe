"""The wall clock steps by two hours, forth and back, under twenty streams: nothing is reaped, all end in order.

On PostgreSQL the database's clock steps with that of the processes, as it does on one machine.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path

import aiohttp
import pytest

from models.database import Database
from tests.chaos.history import Ending, History, Told, assert_books_agree, until_nothing_is_held
from tests.chaos.load import Load, asking
from tests.chaos.sizes import CLOCK_STAY_S, CLOCK_STEP_S, CLOCK_STREAMS
from tests.conftest import missing, running_postgres
from tests.house import House

STEPPED_CLOCK = Path(__file__).parent / "stepped_clock"
TOKENS = 60


@dataclass(frozen=True, slots=True)
class Clock:
    """Be a wall clock that can be set while processes run by it; the monotonic clock goes on as it is."""

    library: Path
    file: Path

    @property
    def environ(self) -> dict[str, str]:
        """Return the environment of a process that lives by this clock."""
        return {
            "LD_PRELOAD": str(self.library),
            "FAKETIME_TIMESTAMP_FILE": str(self.file),
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            # How often it looks at the file, in seconds; at every look at the clock would slow a process down.
            "FAKETIME_CACHE_DURATION": "1",
            "PYTHONPATH": str(STEPPED_CLOCK),
        }

    def step_to(self, offset_s: int) -> None:
        """Set the clock to so many seconds from the true time; each process sees it within a second."""
        draft = self.file.with_suffix(".new")
        draft.write_text(f"{offset_s:+d}\n")
        draft.chmod(0o644)
        draft.rename(self.file)


@pytest.fixture
def clock() -> Iterator[Clock]:
    """Give a clock that shows the true time until it is set."""
    libraries = sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))
    if not libraries:
        missing("libfaketime (Debian's package faketime)")
    # PostgreSQL runs as a user of its own, who must be able to read the time.
    folder = Path(tempfile.mkdtemp(prefix="tollgate-clock-"))
    folder.chmod(0o755)
    made = Clock(libraries[0], folder / "offset")
    made.step_to(0)
    yield made
    shutil.rmtree(folder)


@pytest.fixture
def stepped_database(database_kind: str, clock: Clock, tmp_path: Path) -> Iterator[str]:
    """Give the address of an empty database that lives by the clock: SQLite does inside its processes."""
    if database_kind == "sqlite":
        yield f"sqlite:///{tmp_path}/books.sqlite3"
        return
    with ExitStack() as running:
        with environment(clock.environ):
            url = running.enter_context(running_postgres())
        yield url


@contextmanager
def environment(changes: dict[str, str]) -> Iterator[None]:
    """Set variables of this process's environment, for the children that it starts meanwhile."""
    before = dict(os.environ)
    os.environ.update(changes)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture
async def trio(stepped_database: str, clock: Clock, twin: str, tmp_path: Path) -> AsyncIterator[House]:
    """Give a Tollgate of three processes that live by the clock; not started yet."""
    house = House(tmp_path, stepped_database, twin, processes=3, **clock.environ)
    yield house
    if house.process is not None and house.process.poll() is None:
        house.kill()


async def test_a_step_of_two_hours_reaps_nothing(
    started: House, trio_books: Database, clock: Clock, chance: random.Random, figure
) -> None:
    history = History()
    load = await Load(started, history, chance=chance, moment="stepped").prepare(trio_books)
    lasting_s = 3 * CLOCK_STAY_S + 2
    words = f"tokens:{TOKENS} pace:{lasting_s / TOKENS:.3f}"
    calls = [
        asyncio.create_task(admitted(lambda: load.call(load.payer, asking(True, words))))
        for _ in range(CLOCK_STREAMS - 2)
    ]
    waiting = asking(False, f"tokens:5 delay:{lasting_s}")
    calls += [asyncio.create_task(admitted(lambda: load.call(load.member, waiting))) for _ in range(2)]
    await asyncio.sleep(CLOCK_STAY_S / 2)
    for offset_s in (CLOCK_STEP_S, -CLOCK_STEP_S, 0):
        clock.step_to(offset_s)
        await until_clock_shows(started, trio_books, offset_s)
        during = await asyncio.gather(*(admitted(load.call_any) for _ in range(3)))
        assert_whole(during)
        await asyncio.sleep(CLOCK_STAY_S)
    assert_whole(await asyncio.gather(*calls))
    await load.close()
    figure("calls", dict(history.endings()))
    said = {line["message"] for line in started.log_lines() if line["level"] in ("warning", "error")}
    assert not said, said
    await until_nothing_is_held(trio_books, 5)
    await assert_books_agree(started, trio_books, history)
    assert started.stop() == 0


async def admitted(call: Callable[[], Awaitable[Told]]) -> Told:
    """Make a call again while it is refused for want of time: a busy machine may not write within the limit."""
    for _ in range(10):
        told = await call()
        if told.status != 503:
            break
    return told


def assert_whole(calls: list[Told]) -> None:
    """Each client has its whole answer."""
    others = [f"{told} {told.error_code}" for told in calls if told.ending is not Ending.WHOLE]
    assert not others, others


async def until_clock_shows(house: House, books: Database, offset_s: int) -> None:
    """Wait until the house, in the date of its answers, and its database show the time set."""
    async with asyncio.timeout(10), aiohttp.ClientSession() as session:
        while True:
            async with session.get(f"{house.base_url}/healthz") as answer:
                shown_s = [parsedate_to_datetime(answer.headers["date"]).timestamp()]
            if books.dialect == "postgres":
                [(now_ms,)] = await books.fetch(f"SELECT {books.now_ms_sql}", deadline_s=10)
                shown_s.append(now_ms / 1000)
            if all(abs(shown - time.time() - offset_s) < 60 for shown in shown_s):
                return
            await asyncio.sleep(0.05)
