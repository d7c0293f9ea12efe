"""A kill, a full disk or an I/O error at each write of one call's life; the books add up after every one.

strace counts the system calls of the serving process and strikes at the n-th. CHAOS=whole takes every n.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import aiohttp
import pytest

from models import ledger, wallet
from models.database import Database
from tests.cast import Actor, enter
from tests.conftest import missing
from tests.house import House

WHOLE = os.environ.get("CHAOS") == "whole"
HOUSES = 4 if WHOLE else 2
# After so many that found no n-th write any more, the call's life is over.
SPARED_IN_A_ROW = 3
ATTACHED_WITHIN_S = 20
DIES_WITHIN_S = 5
CLEAN_WITHIN_S = 90
CREDIT = 1_000_000
INPUT_MICROUSD_MAX = 50
TOKEN_MICROUSD = 10
# Long enough for one checkpoint, which comes every two seconds.
SCRIPT = {
    "model": "twin", "max_tokens": 100, "stream": True,
    "messages": [{"role": "user", "content": "tokens:25 pace:0.1"}],
}
KILL = "signal=SIGKILL"
STRIKES = {
    # What strikes where, and the few n of the short form.
    "sqlite": (
        ("pwrite64", KILL, (9, 24)),
        ("fdatasync", KILL, (2,)),
        ("sendto", KILL, (3,)),
        ("pwrite64", "error=ENOSPC", (20,)),
        ("fdatasync", "error=ENOSPC", ()),
        ("pwrite64", "error=EIO", ()),
        ("fdatasync", "error=EIO", (2,)),
    ),
    "postgres": (("sendto", KILL, (12, 30)),),
}


@dataclass(slots=True)
class Sweep:
    """Go through the writes of a call's life, one call each, with several houses at once."""

    syscall: str
    effect: str
    numbers: Iterator[int]
    spared_in_a_row: int = 0
    struck: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)

    @property
    def over(self) -> bool:
        """Return whether there are no more writes to strike at."""
        return self.spared_in_a_row >= SPARED_IN_A_ROW

    async def work(self, houses: asyncio.Queue[House], database: Database) -> None:
        """Strike at one write after the other, until there are none."""
        while not self.over and (n := next(self.numbers, None)) is not None:
            house = await houses.get()
            await self._strike(house, database, n)
            houses.put_nowait(house)

    async def _strike(self, house: House, database: Database, n: int) -> None:
        alice = await enter(database, plan="wallet", credit_microusd=CREDIT)
        child = house.children()[-1]
        tracer, output = await self._attach(child, n, house.folder)
        text = await call(house, alice)
        killed = self.effect == KILL and await dies(child, DIES_WITHIN_S if not is_whole(text) else 0.5)
        await asyncio.to_thread(detach, tracer)
        struck = killed or "(INJECTED)" in output.read_text()
        self.struck += struck
        self.spared_in_a_row = 0 if struck else self.spared_in_a_row + 1
        if killed:
            end(house)
            house.log_path.unlink()
            await asyncio.to_thread(house.start)
        where = f"{self.effect} at {self.syscall} {n}"
        outcome = await check(database, alice, text, where)
        self.outcomes[outcome] += struck
        if self.effect != KILL:
            # It goes on without a restart.
            assert is_whole(await call(house, alice)), where

    async def _attach(self, pid: int, n: int, folder: Path) -> tuple[subprocess.Popen[bytes], Path]:
        output = folder / f"strace-{self.syscall}-{n}.txt"
        command = [
            "strace", "-f", "-p", str(pid), "-o", str(output), "-e", f"trace={self.syscall}",
            "-e", f"inject={self.syscall}:{self.effect}:when={n}",
        ]
        said = folder / "strace-said.txt"
        with open(said, "wb") as stderr:
            tracer = subprocess.Popen(command, stderr=stderr, stdout=stderr)
        deadline = time.monotonic() + ATTACHED_WITHIN_S
        while " attached" not in said.read_text():
            if tracer.poll() is not None:
                missing(f"the right to trace a process ({said.read_text().strip()})")
            assert time.monotonic() < deadline, "strace does not attach"
            await asyncio.sleep(0.02)
        return tracer, output


@pytest.fixture
def houses(books: Database, twin: str, tmp_path: Path) -> Iterator[asyncio.Queue[House]]:
    """Give several houses of one process each, to be taken and put back."""
    if shutil.which("strace") is None:
        missing("strace")
    waiting: asyncio.Queue[House] = asyncio.Queue()
    all_houses = [House(tmp_path / str(n), books.url, twin) for n in range(HOUSES)]
    for house in all_houses:
        waiting.put_nowait(house.start())
    yield waiting
    for house in all_houses:
        end(house)


async def test_a_strike_at_each_write_of_a_call(
    database_kind: str, books: Database, houses: asyncio.Queue[House],
    record_property: Callable[[str, object], None],
) -> None:
    sweeps = [
        Sweep(syscall, effect, count(1) if WHOLE else iter(few)) for syscall, effect, few in STRIKES[database_kind]
    ]
    async with asyncio.TaskGroup() as group:
        for sweep in sweeps:
            for _ in range(HOUSES):
                group.create_task(sweep.work(houses, books))
    for sweep in sweeps:
        name = f"{sweep.effect} at {sweep.syscall}"
        print(f"{name}: {sweep.struck} strikes, {dict(sweep.outcomes)}")
        record_property(name, f"{sweep.struck} strikes, {dict(sweep.outcomes)}")
    if not WHOLE:
        assert [sweep.struck for sweep in sweeps] == [len(few) for *_, few in STRIKES[database_kind]]
        return
    killed = Counter()
    for sweep in sweeps:
        assert sweep.over and sweep.struck
        killed += sweep.outcomes if sweep.effect == KILL else Counter()
    assert {"untouched", "released", "expired", "settled"} <= set(killed)


async def call(house: House, actor: Actor) -> str:
    """Make the scripted call and return all that came, also when it broke off."""
    collected = b""
    timeout = aiohttp.ClientTimeout(total=60)
    with suppress(aiohttp.ClientError):
        async with aiohttp.ClientSession(timeout=timeout) as session, session.post(
            f"{house.base_url}/v1/chat/completions", json=SCRIPT, headers=actor.headers
        ) as answer:
            async for piece in answer.content.iter_any():
                collected += piece
            assert answer.status in (200, 503), (answer.status, collected)
    return collected.decode()


async def check(database: Database, actor: Actor, text: str, where: str) -> str:
    """Hold the books to what the client saw of its call; return how the call ended."""
    deadline = time.monotonic() + CLEAN_WITHIN_S
    while True:
        rows = await database.fetch(
            "SELECT state, charged_microusd, output_tokens FROM calls WHERE account_id = ?", (actor.account.id,),
            deadline_s=10,
        )
        if not rows or rows[0]["state"] != "open":
            break
        assert time.monotonic() < deadline, f"{where}: the call stays open"
        await asyncio.sleep(0.2)
    outcome, charged, tokens = tuple(rows[0]) if rows else ("untouched", 0, 0)
    balance = await wallet.balance(database, actor.account.id)
    assert (balance.posted, balance.held) == (CREDIT - charged, 0), where
    assert (await ledger.audit(database, full=True)).violations == (), where
    delivered = text.count('"content":"') - text.count('"content":""')
    assert charged <= tokens * TOKEN_MICROUSD + INPUT_MICROUSD_MAX, where
    match outcome:
        case "untouched" | "released":
            assert charged == 0, where
        case "expired":
            assert 0 < tokens <= delivered and charged > 0, where
        case _:
            assert outcome == "settled" and charged > 0, where
    if is_whole(text):
        assert outcome == "settled" and tokens == 25, f"{where}: a whole answer has no charge"
    return outcome


def is_whole(text: str) -> bool:
    """Return whether a stream came to its end."""
    return text.endswith("data: [DONE]\n\n")


async def dies(pid: int, within_s: float) -> bool:
    """Return whether a process ends within some seconds; it is not gone at once when it is killed."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX":
                return True
        except FileNotFoundError:
            return True
        await asyncio.sleep(0.02)
    return False


def detach(tracer: subprocess.Popen[bytes]) -> None:
    """End strace; the process it looked at goes on."""
    tracer.terminate()
    try:
        tracer.wait(2)
    except subprocess.TimeoutExpired:
        tracer.kill()
        tracer.wait()


def end(house: House) -> None:
    """Kill a house in whichever state it is."""
    if house.process is None:
        return
    supervisor = house.process.pid
    children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
    for pid in [supervisor, *map(int, children)]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    house.process.wait()
    house.process = None
