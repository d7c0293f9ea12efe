"""A disk that fills up under load: 503 for new calls, old data whole, and it recovers without a restart.

The database lies on a file system of a few megabytes; CHAOS=whole fills and frees it several times over.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import aiohttp
import pytest

from models import wallet
from models.database import Database
from tests.cast import Actor, enter
from tests.chaos.own_postgres import OwnPostgres
from tests.conftest import missing
from tests.house import House

WHOLE = os.environ.get("CHAOS") == "whole"
ROUNDS = 4 if WHOLE else 1
FULL_S = 10 if WHOLE else 2
REFUSED_IN_A_ROW = 10
CLIENTS = 8
STREAMS = 6
REFUSED_WITHIN_S = 5
ENDED_WITHIN_S = 30
NOTICED_WITHIN_S = 60
WORKS_AGAIN_S = 30
CLEAN_WITHIN_S = 90
DISK_MB = {"sqlite": 8, "postgres": 128}
CREDIT = 1_000_000_000
DONE = "data: [DONE]\n\n"


@pytest.fixture
def disk(database_kind: str) -> Iterator[Path]:
    """Give the folder of a file system of its own that is soon full."""
    folder = Path(tempfile.mkdtemp(prefix="tollgate-disk-"))
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK_MB[database_kind]}m", "none", folder],
        capture_output=True, check=False,
    )
    if mounted.returncode:
        folder.rmdir()
        missing("the right to mount a small file system")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def database_url(database_kind: str, disk: Path) -> Iterator[str]:
    """Give the address of a database on that disk."""
    if database_kind == "sqlite":
        yield f"sqlite:///{disk}/books.sqlite3"
        return
    server = OwnPostgres(disk / "data")
    yield server.url
    server.close()


def fill(disk: Path) -> None:
    """Leave no byte free."""
    with open(disk / "ballast", "ab", buffering=0) as ballast:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while ballast.write(b"x" * size):
                    pass
            except OSError:
                continue


def free(disk: Path) -> None:
    """Make room again."""
    (disk / "ballast").unlink()


async def call(session: aiohttp.ClientSession, house: House, actor: Actor, text: str, *, stream: bool):
    """Make one call; return its status, whether it came to its end, how long it took, and what came."""
    asked = {
        "model": "twin", "max_tokens": 500, "stream": stream, "messages": [{"role": "user", "content": text}]
    }
    began = time.monotonic()
    async with session.post(
        f"{house.base_url}/v1/chat/completions", json=asked, headers=actor.headers
    ) as answer:
        body = await answer.text()
    whole = answer.status == 200 and (not stream or body.endswith(DONE))
    return answer.status, whole, time.monotonic() - began, body


async def test_the_disk_fills_up_under_load(
    database_kind: str, database_url: str, disk: Path, twin: str, tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    house = House(tmp_path, database_url, twin).start()
    database = Database(database_url)
    await database.open()
    alice = await enter(database, plan="wallet", credit_microusd=CREDIT)
    connector = aiohttp.TCPConnector(limit=0)
    whole = unconfirmed = 0
    try:
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=120)) as session:
            for _ in range(ROUNDS):
                async with asyncio.TaskGroup() as group:
                    told, streams = await fill_and_free(group, house, session, alice, disk, record_property)
                for status, ended, took_s, body in told:
                    assert ended or status == 503, (status, body)
                    # A call whose hold just found room may wait until its charge finds some.
                    waited = "could not be confirmed" in body
                    assert status == 200 or took_s < (ENDED_WITHIN_S if waited else REFUSED_WITHIN_S)
                    assert "sqlite" not in body and "No space" not in body and "asyncpg" not in body
                    unconfirmed += waited
                # A stream whose charge finds no room waits for it, and ends in an error frame if there is none.
                assert all(status == 200 for status, *_ in streams)
                whole += sum(ended for _, ended, *_ in [*told, *streams])
                unconfirmed += sum(not ended for _, ended, *_ in streams)
        clean_s = await until_nothing_is_open(database, alice)
        print(f"nothing open or held after, s: {clean_s:.1f}")
        record_property("nothing open or held after, s", round(clean_s, 1))
        charged = await database.fetch(
            "SELECT COUNT(*) FROM calls WHERE account_id = ? AND charged_microusd > 0", (alice.account.id,)
        )
        assert whole <= charged[0][0] <= whole + unconfirmed
    finally:
        await database.close()
        if house.process is not None:
            house.stop()
    audit = house.command("audit", "--full")
    assert audit.returncode == 0, audit.stdout + audit.stderr
    if database_kind == "sqlite":
        with closing(sqlite3.connect(database_url.removeprefix("sqlite:///"))) as file:
            assert file.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    errors = [line for line in house.log_lines() if line["level"] == "error"]
    assert not errors, errors[:3]


async def fill_and_free(
    group: asyncio.TaskGroup, house: House, session: aiohttp.ClientSession, actor: Actor, disk: Path,
    record_property: Callable[[str, object], None],
) -> tuple[list[tuple], list[tuple]]:
    """Fill the disk under load and free it; return what the clients were told, streams of before apart."""
    told: list[tuple] = []
    stopping = False

    async def keep_calling(number: int) -> None:
        turn = number
        while not stopping:
            turn += 1
            told.append(await call(session, house, actor, "tokens:20", stream=turn % 2 == 0))
            await asyncio.sleep(0.02)

    clients = [group.create_task(keep_calling(n)) for n in range(CLIENTS)]
    streams = [
        group.create_task(call(session, house, actor, f"tokens:40 pace:{(n + 1) * FULL_S / 80:.3f}", stream=True))
        for n in range(STREAMS)
    ]
    await asyncio.sleep(1)
    await asyncio.to_thread(fill, disk)
    # What was allotted already is still there to be used up; then nothing goes any more.
    deadline = time.monotonic() + NOTICED_WITHIN_S
    late: list[asyncio.Task[tuple]] = []
    while [one.result()[0] for one in late if one.done()][-REFUSED_IN_A_ROW:] != [503] * REFUSED_IN_A_ROW:
        assert time.monotonic() < deadline, "the database never noticed that the disk is full"
        await asyncio.to_thread(fill, disk)
        late.append(group.create_task(call(session, house, actor, "tokens:20", stream=False)))
        await asyncio.sleep(0.1)
    assert await asyncio.to_thread(house.status, "/healthz") == 200
    await asyncio.sleep(FULL_S)
    ready = await asyncio.to_thread(house.status, "/readyz")
    await asyncio.to_thread(free, disk)
    freed_s = time.monotonic()
    deadline = freed_s + WORKS_AGAIN_S
    while not (again := await call(session, house, actor, "tokens:20", stream=False))[1]:
        told.append(again)
        assert time.monotonic() < deadline, "it does not recover without a restart"
        await asyncio.sleep(0.2)
    told.append(again)
    works_s = time.monotonic() - freed_s
    stopping = True
    await asyncio.gather(*clients)
    told += await asyncio.gather(*late)
    ended = await asyncio.gather(*streams)
    figures = {
        "ready while full": ready, "works again after, s": round(works_s, 2),
        "answered": sum(one[1] for one in told), "refused": sum(one[0] == 503 for one in told),
        "slowest refusal, s": round(max(one[2] for one in told if one[0] == 503), 2),
        "streams whole": sum(one[1] for one in ended),
    }
    for name, value in figures.items():
        print(f"{name}: {value}")
        record_property(name, value)
    return told, ended


async def until_nothing_is_open(database: Database, actor: Actor) -> float:
    """Return how long it took until no call was open and nothing held."""
    began_s = time.monotonic()
    deadline = began_s + CLEAN_WITHIN_S
    while True:
        rows = await database.fetch("SELECT COUNT(*) FROM calls WHERE state = 'open'", deadline_s=10)
        held = (await wallet.balance(database, actor.account.id)).held
        if not rows[0][0] and not held:
            return time.monotonic() - began_s
        assert time.monotonic() < deadline, f"{rows[0][0]} calls are open and {held} held"
        await asyncio.sleep(0.5)
