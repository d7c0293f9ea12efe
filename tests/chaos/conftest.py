"""Houses of three processes that a test may treat as it likes, and the dice."""

from __future__ import annotations

import random
import secrets
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from models.database import Database
from tests.chaos.sizes import SEED, WHOLE
from tests.house import House, books_of

# It takes more than a minute of waiting whatever is done.
collect_ignore = [] if WHOLE else ["test_dead_host.py"]


@pytest.fixture
async def trio(database_kind: str, new_database, twin: str, tmp_path: Path) -> AsyncIterator[House]:
    """Give a Tollgate of three processes of its own; not started yet."""
    house = House(tmp_path, await new_database(database_kind), twin, processes=3)
    yield house
    if house.process is not None and house.process.poll() is None:
        house.kill()


@pytest.fixture
async def started(trio: House) -> House:
    """Give the trio, serving."""
    return trio.start()


@pytest.fixture
async def trio_books(started: House) -> AsyncIterator[Database]:
    """Give the trio's database, opened in the test beside the server."""
    async with books_of(started) as books:
        yield books


@pytest.fixture
def chance() -> random.Random:
    """Give dice that can be thrown again: the seed stands in the output of a failed test."""
    seed = SEED or secrets.randbits(32)
    print(f"CHAOS_SEED={seed}")
    return random.Random(seed)


@pytest.fixture
def figure(record_property: Callable[[str, object], None]) -> Callable[[str, object], None]:
    """Give a function that prints a measured figure and writes it into the report."""

    def note(name: str, value: object) -> None:
        shown = round(value, 3) if isinstance(value, float) else value
        print(f"{name}: {shown}")
        record_property(name, shown)

    return note
