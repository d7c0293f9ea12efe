"""Two readers of the pages: Alice, and somebody else."""

from __future__ import annotations

import aiohttp
import pytest

from models.database import Database
from tests.cast import Actor
from tests.house import House
from tests.portal.pages.reader import Reader, reader_of


@pytest.fixture
async def reader(house: House, http: aiohttp.ClientSession, house_books: Database, alice: Actor) -> Reader:
    """Read as Alice."""
    return await reader_of(house, http, house_books, alice)


@pytest.fixture
async def other(house: House, http: aiohttp.ClientSession, house_books: Database, bob: Actor) -> Reader:
    """Read as Bob."""
    return await reader_of(house, http, house_books, bob)
