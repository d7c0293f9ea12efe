"""Groups of scripts: one member's defect is its own, and many keys of one account do not lock each other out."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import threading
import time
from collections.abc import Generator
from functools import partial

import asyncpg
import pytest
from msgspec import structs

from models import account as accounts
from models import api_key, call, idempotency, rate_limit, sqlite_engine, wallet
from models.database import Database, Lane, _begin_with
from models.errors import DatabaseUnavailable
from models.rate_card import RateCard
from tests.cast import Actor, enter


def admission(alice: Actor, key: api_key.LiveKey, call_id: str) -> call.Admission:
    """Return a call that holds 100 micro-dollars."""
    return call.Admission(
        call_id=call_id, owner="prc_x", key=key, surface="chat", path="/v1/chat/completions", offer="twin",
        streamed=False, rates=RateCard(input=1).to_json(), now_ms=1_800_000_000_000,
        limits=(rate_limit.Limit(rate_limit.account_bucket(alice.account.id), 1_000_000),), month="2027-01",
        included_limit=0, included_output_limit=None, output_limit=10, hold=100, affordable=lambda _: None,
    )


async def test_a_defect_in_one_script_is_told_to_it_alone(books: Database) -> None:
    alice = await enter(books, credit_microusd=1000)

    def sound() -> Generator:
        rows = yield ("SELECT posted_microusd FROM wallets WHERE account_id = ?", (alice.account.id,))
        return rows[0][0]

    def crooked() -> Generator:
        yield ("SELECT 1", ())
        raise IndexError("a defect of ours")

    def untakeable() -> Generator:
        yield ("UPDATE wallets SET held_microusd = held_microusd - 1 WHERE account_id = ?", (alice.account.id,))

    outcomes = await books.run_group([sound, crooked, sound, untakeable, sound])
    assert [outcome for outcome in outcomes if isinstance(outcome, int)] == [1000] * 3
    assert isinstance(outcomes[1], IndexError)
    # A value the database will never take is a defect as well, not a database that is away.
    assert "Integrity" in type(outcomes[3]).__name__ or "Check" in type(outcomes[3]).__name__


async def test_limited_keys_of_one_account_do_not_lock_each_other_out(books: Database) -> None:
    alice = await enter(books, credit_microusd=10_000_000)
    keys = []
    for n in range(4):
        _, plain = await api_key.create(
            alice.account, f"key {n}", spend_limit_microusd=5_000_000, spend_period="month"
        )
        keys.append(await api_key.live_by_hash(books, api_key.credentials.key_hash(plain)))
    admissions, outcomes = Lane(books), Lane(books)

    async def lives(n: int) -> None:
        call_id = f"req_{n:05}{alice.account.id}"
        wanted = admission(alice, keys[n % 4], call_id)
        admitted = await admissions.run((alice.account.id, call_id), lambda: call.admit(wanted), deadline_s=20)
        assert isinstance(admitted, call.Admitted)
        ended = call.Outcome(id=call_id, status=200, cost=60)
        settled = await outcomes.run(
            (alice.account.id, call_id), lambda: call.settle(call_id, ended), deadline_s=20
        )
        assert settled is not None and settled.charged == 60

    refused: list[str] = []
    run_group = books.run_group

    async def watched(*arguments):
        results = await run_group(*arguments)
        refused.extend(type(result).__name__ for result in results if isinstance(result, Exception))
        return results

    books.run_group = watched
    for start in range(0, 400, 40):
        await asyncio.gather(*(lives(n) for n in range(start, start + 40)))
    assert refused == []
    balance = await wallet.balance(books, alice.account.id)
    assert (balance.posted, balance.held) == (10_000_000 - 400 * 60, 0)


async def test_a_clock_that_is_set_back_does_not_keep_a_window_full(books: Database) -> None:
    limit = rate_limit.Limit("account:x", 1)
    now = 1_800_000_000_000
    await books.run(lambda: rate_limit.count(limit, now))
    standing = await books.run(lambda: rate_limit.count(limit, now - 2 * 3600 * 1000))
    assert standing.remaining == 0


@pytest.mark.parametrize("then", ["the same", "a full window", "a revoked key", "its own idempotency key"])
async def test_an_admission_that_was_written_already_is_not_admitted_twice(books: Database, then: str) -> None:
    """Nor is it refused: then nobody would release it."""
    alice = await enter(books, credit_microusd=1000)
    made, plain = await api_key.create(alice.account, "key")
    key = await api_key.live_by_hash(books, api_key.credentials.key_hash(plain))
    wanted = admission(alice, key, f"req_twice{alice.account.id}")
    if then == "a full window":
        wanted = structs.replace(wanted, limits=(rate_limit.Limit("account:full", 1),))
    if then == "its own idempotency key":
        wanted = structs.replace(wanted, idempotency=idempotency.Claim("once", "fingerprint"))
    await books.run(lambda: call.admit(wanted))
    if then == "a revoked key":
        await api_key.revoke(alice.account.id, made.id)
    with pytest.raises(DatabaseUnavailable):
        await books.run(lambda: call.admit(wanted))
    assert (await wallet.balance(books, alice.account.id)).held == 100


@pytest.mark.parametrize("database_kind", ["postgres"], indirect=True)
async def test_a_gate_that_somebody_keeps_is_waited_for_twice_and_not_once_a_member(
    books: Database, caplog: pytest.LogCaptureFixture
) -> None:
    keeper = await asyncpg.connect(books.url)
    await keeper.execute(_begin_with(["kept"]))
    try:
        ran: list[int] = []

        def script(n: int) -> Generator:
            ran.append(n)
            yield ("SELECT 1", ())
            return n

        gates = ["kept" if n % 2 else "free" for n in range(20)]
        began = time.monotonic()
        outcomes = await books.run_group([partial(script, n) for n in range(20)], gates)
        took_s = time.monotonic() - began
    finally:
        await keeper.close()
    assert [outcome for outcome in outcomes if isinstance(outcome, int)] == list(range(0, 20, 2)) == ran
    assert all(isinstance(outcome, DatabaseUnavailable) for outcome in outcomes[1::2])
    assert took_s < 5  # a second for the group, a second for its first member at the kept gate
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize("database_kind", ["sqlite"], indirect=True)
async def test_the_loop_goes_on_while_another_process_writes(books: Database) -> None:
    lane = Lane(books)
    other = sqlite3.connect(books.file, isolation_level=None)

    def script() -> Generator:
        rows = yield ("SELECT 7", ())
        return rows[0][0]

    for _ in range(3):
        other.execute("BEGIN IMMEDIATE")
        waiting = lane.submit(("x",), script)
        turns, end = 0, time.monotonic() + 0.3
        while time.monotonic() < end:
            await asyncio.sleep(0.01)
            turns += 1
        assert turns > 5 and not waiting.done()
        other.execute("ROLLBACK")
        assert await waiting == 7
    other.close()


@pytest.mark.parametrize("database_kind", ["sqlite"], indirect=True)
async def test_statements_that_hold_up_the_loop_go_to_the_thread_for_a_while(
    books: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_engine, "HELD_UP_MAX_S", 0.02)
    monkeypatch.setattr(sqlite_engine, "ON_THREAD_S", 1.5)
    threads: list[bool] = []

    def slow() -> Generator:
        threads.append(threading.current_thread() is threading.main_thread())
        yield ("SELECT 1", ())
        time.sleep(0.05)
        return None

    lane = Lane(books)
    for _ in range(3):
        await lane.run(("x",), slow)
    assert threads == [True, False, False]
    await asyncio.sleep(1.6)
    await lane.run(("x",), slow)
    assert threads[-1]


@pytest.mark.parametrize("database_kind", ["sqlite"], indirect=True)
async def test_what_no_call_waits_for_never_holds_up_the_loop(books: Database) -> None:
    turns: list[bool] = []

    def large() -> Generator:
        loop.call_soon_threadsafe(turned.set)
        turns.append(turned.wait(10))
        yield ("SELECT 1", ())
        return None

    loop, turned = asyncio.get_running_loop(), threading.Event()
    await books.run(large, deadline_s=15)
    assert turns == [True]


async def test_a_read_that_is_cancelled_keeps_the_connection_until_it_is_over(books: Database) -> None:
    """The loop and the thread must never be at one connection together."""
    alice = await enter(books, credit_microusd=1000)

    def adds() -> Generator:
        yield ("UPDATE wallets SET seq = seq + 1 WHERE account_id = ?", (alice.account.id,))
        return None

    async def reads() -> None:
        await accounts.Account.filter(id=alice.account.id).count()

    lane = Lane(books)
    for n in range(100):
        reading = asyncio.create_task(reads())
        await asyncio.sleep(0.0001 * (n % 5))
        reading.cancel()
        await lane.run(("x",), adds)
        with contextlib.suppress(asyncio.CancelledError):
            await reading
    rows = await books.fetch("SELECT seq FROM wallets WHERE account_id = ?", (alice.account.id,))
    assert rows[0][0] == 101
