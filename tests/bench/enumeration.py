"""Measure whether answers or their times tell which addresses are known: `python -m tests.bench.enumeration`.

Sign-in, sign-up and the forgotten password are asked about `BENCH_ADDRESSES` (200) known addresses and as many
unknown ones, one after another in random order, on `BENCH_DATABASES` (sqlite,postgres). It ends with 1 when answers
differ, or when the times of the two kinds do by Mann and Whitney's test. Chance alone says so of one in a hundred
comparisons: one that does is to be measured again (`BENCH_ROUTES` chooses).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import random
import re
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from models import account as accounts
from models import ids, password
from models.database import Database
from tests.bench.__main__ import databases
from tests.house import House
from tests.visitor import Answer, Visitor

ADDRESSES = int(os.environ.get("BENCH_ADDRESSES", "200"))
DATABASES = os.environ.get("BENCH_DATABASES", "sqlite,postgres").split(",")
ROUTES = os.environ.get("BENCH_ROUTES", "/login,/signup,/forgot").split(",")
KINDS = ("known", "nobody")  # of one length, for the address stands in the answer
PASSWORD = "four unrelated words"
P_MIN = 0.01
WARMING = 3
VARYING = ("date", "x-request-id")


def chance_of(one: Sequence[float], other: Sequence[float]) -> float:
    """Return how likely two samples of one distribution differ by so much: Mann and Whitney's p, two-sided."""
    u = sum((a < b) + (a == b) / 2 for a in one for b in other)
    n, m = len(one), len(other)
    return math.erfc(abs(u - n * m / 2) / math.sqrt(n * m * (n + m + 1) / 12) / math.sqrt(2))


def gist(answer: Answer, *own: str) -> tuple[object, ...]:
    """Return what an answer says, without what is its request's own: the address and secrets."""
    text, headers = answer.text, sorted(item for item in answer.headers.items() if item[0] not in VARYING)
    for word in own:
        text = text.replace(word, "OWN")
    return answer.status, text, re.sub(r"[0-9a-f]{64}|[\w-]{43}|expires=[^;]*", "", str(headers), flags=re.I)


async def ask(house: House, path: str, email: str) -> tuple[float, tuple[object, ...]]:
    """Send a form as a new visitor; return how many seconds its answer took, and what it says."""
    visitor = Visitor(house)
    token = re.search(r'name="csrf_token" value="([0-9a-f]+)"', (await visitor.get(path)).text)[1]
    # At the sign-in the password is a wrong one: a right one is meant to tell.
    fields = {"csrf_token": token, "email": email, "password": f"{PASSWORD}!"}
    began = time.perf_counter()
    answer = await visitor.post(path, fields)
    took = time.perf_counter() - began
    if answer.status != (422 if path == "/login" else 303):
        raise RuntimeError(f"{path} answered {answer.status}: nothing was measured")
    return took, gist(answer, email, token)


async def compare(house: House, database: Database, path: str, chance: random.Random) -> bool:
    """Print how two kinds of addresses are answered, and return whether nothing tells them apart."""
    hashed = await password.hash_of(PASSWORD)
    number = ids.new_id("x")
    asked = [(kind, f"{kind:_<6}{n:06}.{number}@example.com") for kind in KINDS for n in range(ADDRESSES + WARMING)]
    for kind, email in asked:
        if kind == KINDS[0]:
            made = await accounts.create(database, email, plan="free", verified=True)
            await accounts.Account.filter(id=made.id).update(password_hash=hashed)
    taken: dict[str, list[float]] = {kind: [] for kind in KINDS}
    said: dict[str, set[tuple[object, ...]]] = {kind: set() for kind in KINDS}
    warming = [each for kind in KINDS for each in [each for each in asked if each[0] == kind][:WARMING]]
    measured = [each for each in asked if each not in warming]
    chance.shuffle(measured)
    for _, email in warming:
        await ask(house, path, email)
    for kind, email in measured:
        took, gisted = await ask(house, path, email)
        taken[kind].append(took)
        said[kind].add(gisted)
    likely = chance_of(*taken.values())
    alike = len(set().union(*said.values())) == 1
    cells = [f"{statistics.median(taken[kind]) * 1000:.2f}" for kind in KINDS]
    cells += [f"{statistics.quantiles(taken[kind], n=20)[-1] * 1000:.2f}" for kind in KINDS]
    print(f"| {path} | {' | '.join(cells)} | {likely:.3f} | {'alike' if alike else 'DIFFERENT'} |", flush=True)
    return alike and likely > P_MIN


async def measure(kind: str, url: str, folder: Path) -> bool:
    """Measure all routes on one database."""
    chance = random.Random()
    house = House(folder / kind, url, "http://127.0.0.1:9/v1", CLIENT_IP_HEADER="X-From").start()
    database = Database(url)
    await database.open()
    try:
        print(f"\n## {kind}: {ADDRESSES} addresses of each kind, load average {os.getloadavg()[0]:.1f}\n")
        print("| | known p50 ms | unknown p50 ms | known p95 ms | unknown p95 ms | p | answers |")
        print("|---|---:|---:|---:|---:|---:|---|", flush=True)
        return all([await compare(house, database, path, chance) for path in ROUTES])
    finally:
        await database.close()
        house.stop()


async def main() -> int:
    """Measure on each database, print tables, and return the status to end with."""
    with databases(DATABASES) as (folder, urls):
        good = [await measure(kind, url, folder) for kind, url in urls.items()]
    return 0 if all(good) else 1


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(asyncio.run(main()))
