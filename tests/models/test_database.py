"""The database: what cancelled requests, other processes, dead wires and old schemas may not do to it."""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
import sqlite3
import subprocess
import sys
import textwrap
import threading
import time
from contextvars import ContextVar
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import asyncpg
import pytest
from tortoise import Tortoise
from tortoise.connection import get_connection
from tortoise.exceptions import DoesNotExist, IntegrityError, OperationalError
from tortoise.expressions import F
from tortoise.migrations.executor import MigrationExecutor
from tortoise.transactions import in_transaction

import models.migrations
from models import api_key, ids, ledger, wallet
from models import database as database_module
from models.account import Account
from models.api_key import ApiKey
from models.clock import now_ms
from models.database import Database, Deadline, Lane, _numbered, migrate, pending_migrations, sqlite_file
from models.errors import DatabaseUnavailable, InsufficientCredits, NotFound
from tests.cast import enter, give
from tests.house import PatientDatabase

ROOT = Path(__file__).resolve().parents[2]
CONSTRAINT_HELD = (sqlite3.IntegrityError, asyncpg.IntegrityConstraintViolationError)


@pytest.fixture(autouse=True)
async def nothing_left_open():
    """Keep one test's failure from being the next one's."""
    yield
    await Tortoise.close_connections()


def says(sql, *arguments):
    """Return a function that makes a script of one statement."""

    def script():
        rows = yield sql, arguments
        return [tuple(row) for row in rows]

    return script


@contextlib.contextmanager
def never_stuck(books):
    """When a test finds the database wedged, see that it can be closed nevertheless."""
    try:
        yield
    except BaseException:
        for task in list(books._owned):
            task.cancel()
        raise


def account_row(number=0, plan="x"):
    name = ids.new_id("acc")
    return Account(
        id=name, email=f"{name}@example.com", plan=plan, state="active", version=1, created_at_ms=number
    )


async def outside(books):
    """Connect to the same PostgreSQL database by other means."""
    return await asyncpg.connect(books.url)


# Placeholders, addresses


@pytest.mark.parametrize(
    ("sql", "numbered"),
    [
        ("SELECT 1", "SELECT 1"),
        ("a = ? AND b = ?", "a = $1 AND b = $2"),
        ("?" * 12, "".join(f"${n}" for n in range(1, 13))),
        ("(?, ?)", "($1, $2)"),
    ],
)
def test_placeholders(sql, numbered):
    assert _numbered(sql) == numbered


def test_addresses():
    assert sqlite_file("sqlite:///data/x.sqlite3") == Path("data/x.sqlite3")
    assert sqlite_file("sqlite:////data/x.sqlite3") == Path("/data/x.sqlite3")
    assert Database("sqlite:///x").dialect == "sqlite"
    assert Database("postgres://u:p@h/d").dialect == Database("postgresql://h/d").dialect == "postgres"


# Settings of the connections


async def test_a_commit_survives_the_host(books):
    if books.dialect == "sqlite":
        settings = {
            pragma: (await books.run(says(f"SELECT * FROM pragma_{pragma}")))[0][0]
            for pragma in ("journal_mode", "synchronous", "busy_timeout", "foreign_keys")
        }
        assert settings == {"journal_mode": "wal", "synchronous": 2, "busy_timeout": 5000, "foreign_keys": 1}
    else:
        names = ("synchronous_commit", "statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout")
        settings = [(await books.fetch(f"SHOW {name}"))[0][0] for name in names]
        assert settings == ["on", "5s", "1s", "10s"]


@pytest.mark.parametrize("database_kind", ["sqlite"], indirect=True)
@pytest.mark.parametrize("read", ["fetch", "report"])
async def test_reading_connections_cannot_write(books, read):
    with pytest.raises(DatabaseUnavailable) as refusal:
        await getattr(books, read)("INSERT INTO marks (name, value) VALUES ('a', 1)")
    assert "readonly" in str(refusal.value.__cause__)
    assert await books.run(says("SELECT * FROM marks")) == []


async def test_a_snapshot_cannot_write(books):
    with pytest.raises(DatabaseUnavailable):
        async with books.snapshot() as read:
            await read("INSERT INTO marks (name, value) VALUES ('a', 1) RETURNING name")
    assert await books.run(says("SELECT * FROM marks")) == []


async def test_the_database_has_a_clock(books):
    rows = await books.fetch(f"SELECT {books.now_ms_sql}")
    assert abs(rows[0][0] - now_ms()) < 1000


async def test_rows_are_read_by_place_and_by_name(books):
    (row,) = await books.fetch("SELECT 1 AS one, 'b' AS two WHERE CAST(? AS TEXT) = 'x'", ("x",))
    assert (row[0], row["one"], row["two"]) == (1, 1, "b")


# Scripts and groups


async def test_a_script_is_told_how_many_rows_it_changed(books):
    names = ["a", "b", "c"]

    def script(change, *arguments):
        # Every time another text of the same words, as a statement that is put together is.
        rows = yield "".join(["UPDATE marks ", change, " RETURNING 1"]), arguments
        known = yield "".join(["SELECT name FROM ", "marks ORDER BY name"]), ()
        return [tuple(row) for row in rows], [row["name"] for row in known]

    await books.run(says("INSERT INTO marks (name, value) VALUES ('a', 1), ('b', 1), ('c', 2)"))
    for _ in range(2):
        assert await books.run(lambda: script("SET value = value WHERE value = ?", 1)) == ([(1,), (1,)], names)
        assert await books.run(lambda: script("SET value = value WHERE value = ?", 9)) == ([], names)
    again = says("INSERT INTO marks (name, value) VALUES ('a', 1) ON CONFLICT (name) DO NOTHING RETURNING 1")
    assert await books.run(again) == []
    fresh = says("INSERT INTO marks (name, value) VALUES ('d', 1) ON CONFLICT (name) DO NOTHING RETURNING 1")
    assert await books.run(fresh) == [(1,)]


async def test_a_script_that_refuses_leaves_nothing(books):
    def script():
        yield "INSERT INTO marks (name, value) VALUES ('a', 1)", ()
        raise NotFound("no")

    with pytest.raises(NotFound):
        await books.run(script)
    assert await books.run(says("SELECT * FROM marks")) == []


async def test_a_refusal_or_error_of_one_member_leaves_its_neighbours(books):
    runs = []

    def good(name):
        def script():
            runs.append(name)
            yield "INSERT INTO marks (name, value) VALUES (?, 1)", (name,)
            return name

        return script

    def refuses():
        yield "SELECT 1", ()
        yield "UPDATE marks SET value = 2 WHERE name = 'nobody' RETURNING name", ()
        raise NotFound("no")

    def refuses_late(sql):
        def script():
            yield sql, ()
            raise NotFound("no")

        return script

    def clashes():
        yield "INSERT INTO marks (name, value) VALUES ('clash', 1)", ()
        yield "INSERT INTO marks (name, value) VALUES ('clash', 2)", ()

    first, refused, second = await books.run_group([good("a"), refuses, good("b")])
    assert (first, type(refused), second) == ("a", NotFound, "b")
    assert runs == ["a", "b"]  # nothing was written by the one that refused, so nothing is done over
    first, clash, refused, second = await books.run_group([good("c"), clashes, refuses, good("d")])
    assert (first, type(refused), second) == ("c", NotFound, "d")
    assert isinstance(clash, CONSTRAINT_HELD)
    assert runs == ["a", "b", "c", "c", "d"]  # the group was given up at the clash and done over singly
    for n, sql in enumerate((
        "INSERT INTO marks (name, value) VALUES ('refused', 1)",
        "INSERT INTO marks (name, value) VALUES ('refused', 1) RETURNING name",
        "UPDATE marks SET value = 99",
    )):
        first, refused, second = await books.run_group([good(f"e{n}"), refuses_late(sql), good(f"f{n}")])
        assert (first, type(refused), second) == (f"e{n}", NotFound, f"f{n}")
        assert runs[-3:] == [f"e{n}", f"e{n}", f"f{n}"]  # what was written had to be undone
    names = [*"abcd", *(f"{letter}{n}" for letter in "ef" for n in range(3))]
    assert await books.run(says("SELECT name, value FROM marks ORDER BY name")) == [(name, 1) for name in names]


async def test_a_single_script_that_clashes_is_told_so(books):
    await books.run(says("INSERT INTO marks (name, value) VALUES ('a', 1)"))
    with pytest.raises(CONSTRAINT_HELD):
        await books.run(says("INSERT INTO marks (name, value) VALUES ('a', 1)"))


async def test_a_defect_in_a_script_is_told_and_undone(books):
    def defect():
        yield "INSERT INTO marks (name, value) VALUES ('a', 1)", ()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await books.run(defect)
    assert await books.run(says("SELECT * FROM marks")) == []


@pytest.mark.parametrize("database_kind", ["postgres"], indirect=True)
async def test_deadlocks_are_survived(books):
    """Two groups that lock two accounts in opposite order: both end right, whoever the victim was."""
    here, there = [await enter(books, name) for name in ("here", "there")]

    def taking(account_id, reference):
        def script():
            balance = yield from wallet.credit(
                account_id, 1, ledger.ADJUSTMENT, reference, ledger.PROMOTIONS, None, now_ms()
            )
            yield "SELECT pg_sleep(0.2)", ()
            return balance

        return script

    def group(*order):
        return books.run_group([taking(actor.account.id, ids.new_id("adj")) for actor in order])

    outcomes = await asyncio.gather(group(here, there), group(there, here))
    assert sorted(balance for outcome in outcomes for balance in outcome) == [1, 1, 2, 2]
    assert (await ledger.audit(books, full=True)).violations == ()


@pytest.mark.parametrize("database_kind", ["sqlite"], indirect=True)
async def test_three_processes_write_at_once(books):
    """Read, then write: with a deferred BEGIN two of three such transactions fail at once."""
    await books.run(says("INSERT INTO marks (name, value) VALUES ('n', 0)"))
    program = textwrap.dedent("""
        import asyncio, sys
        from models.database import Database

        def step():
            rows = yield "SELECT value FROM marks WHERE name = 'n'", ()
            yield "UPDATE marks SET value = ? WHERE name = 'n'", (rows[0][0] + 1,)

        async def main():
            books = Database(sys.argv[1])
            await books.open()
            try:
                for _ in range(200):
                    await books.run(step, deadline_s=30)
            finally:
                await books.close()

        asyncio.run(main())
    """)
    running = [
        subprocess.Popen(
            [sys.executable, "-c", program, books.url], cwd=ROOT, stderr=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    complaints = [await asyncio.to_thread(process.communicate) for process in running]
    assert [error for _, error in complaints] == ["", "", ""]
    assert await books.run(says("SELECT value FROM marks")) == [(600,)]


# Lanes


async def test_a_lane_gathers_in_order_and_bounds_its_groups(books, monkeypatch):
    groups, real = [], books.run_group

    async def run_group(makes, gates):
        groups.append(len(makes))
        return await real(makes, gates)

    monkeypatch.setattr(books, "run_group", run_group)
    order, lane = [], Lane(books)

    def noting(name):
        def script():
            order.append(name)
            yield "SELECT 1", ()
            return name

        return script

    names = [f"{n:03}" for n in range(130)]
    shuffled = random.Random(1).sample(names, len(names))
    results = await asyncio.gather(*(lane.run((name,), noting(name)) for name in shuffled))
    assert results == shuffled
    size = 64 if books.dialect == "sqlite" else 16
    assert groups == [size] * (130 // size) + [2]
    assert order == [name for start in range(0, 130, size) for name in sorted(shuffled[start : start + size])]


async def test_a_lane_tells_each_its_own_outcome(books):
    lane = Lane(books)

    def refuses():
        yield "SELECT 1", ()
        raise NotFound("mine")

    def value_that_is_an_exception():
        yield "INSERT INTO marks (name, value) VALUES ('kept', 1)", ()
        return InsufficientCredits(needed=2, available=1)

    outcomes = await asyncio.gather(
        lane.run((1,), says("SELECT 7")), lane.run((2,), refuses), lane.run((3,), value_that_is_an_exception),
        lane.run((4,), says("INSERT INTO marks (name, value) VALUES ('x', NULL)")),
        lane.run((5,), says("SELECT 8")),
        return_exceptions=True,
    )
    assert [outcomes[0], outcomes[4]] == [[(7,)], [(8,)]]
    assert [type(outcome) for outcome in outcomes[1:3]] == [NotFound, InsufficientCredits]
    assert isinstance(outcomes[3], CONSTRAINT_HELD)
    assert await books.run(says("SELECT name FROM marks")) == [("kept",)]


async def test_a_lane_outlives_a_defect_and_a_caller_who_leaves(books):
    lane = Lane(books)

    def defect():
        yield "SELECT 1", ()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await lane.run((1,), defect)
    leaving = asyncio.create_task(lane.run((1,), says("INSERT INTO marks (name, value) VALUES ('done', 1)")))
    await asyncio.sleep(0)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert await lane.run((2,), says("SELECT name FROM marks")) == [("done",)]


async def test_nobody_waits_for_a_lane_longer_than_the_deadline(books):
    lane, turn = Lane(books), asyncio.Event()
    real = books.run_group

    async def run_group(makes, gates):
        await turn.wait()
        return await real(makes, gates)

    books.run_group = run_group
    late = lane.submit((1,), says("SELECT 7"))
    with pytest.raises(DatabaseUnavailable):
        await books.wait(late, 0.05)
    deadline = Deadline(0.05)
    watched = [lane.submit((n,), says("SELECT 8")) for n in range(3)]
    for future in watched:
        deadline.watch(future)
    for future in watched:
        with pytest.raises(DatabaseUnavailable):
            await future
    turn.set()
    assert await late == [(7,)]
    in_time = lane.submit((1,), says("SELECT 9"))
    deadline.watch(in_time)
    assert await in_time == [(9,)]


async def test_closing_waits_for_what_is_being_written(database_kind, new_database):
    url = await new_database(database_kind)
    await migrate(url)
    books = Database(url)
    await books.open()
    lane = Lane(books)
    for n in range(100):
        lane.submit((n,), says("INSERT INTO marks (name, value) VALUES (?, 1)", str(n)))
    await books.close()
    await books.open()
    assert (await books.fetch("SELECT COUNT(*) FROM marks"))[0][0] == 100
    await books.close()


# Transactions of the ORM


async def test_a_transaction_is_whole_or_nothing(books):
    async def work(fails):
        await account_row().save(force_create=True)
        if fails:
            raise NotFound("no")
        return "kept"

    with pytest.raises(NotFound):
        await books.transaction(lambda: work(True))
    assert await Account.all().count() == 0
    assert await books.transaction(lambda: work(False)) == "kept"
    assert await Account.all().count() == 1


async def test_the_orm_s_own_complaints_stay_its_own(books):
    row, same = account_row(), account_row()
    same.email = row.email
    await row.save(force_create=True)
    with pytest.raises(DoesNotExist):
        await books.transaction(lambda: Account.get(id="acc_nobody"))
    with pytest.raises(IntegrityError):
        await books.transaction(lambda: same.save(force_create=True))


async def test_a_task_made_inside_a_transaction_does_not_join_it(books):
    inside, beside = account_row(), account_row()
    spawned = []

    async def work():
        await inside.save(force_create=True)
        spawned.append(books.own(beside.save(force_create=True)))
        spawned.append(books.own(books.run_one(says("INSERT INTO marks (name, value) VALUES ('beside', 1)"))))
        await asyncio.sleep(0.05)
        raise NotFound("undo")

    with pytest.raises(NotFound):
        await books.transaction(work)
    await asyncio.gather(*spawned)
    assert [row.id for row in await Account.all()] == [beside.id]
    assert await books.run(says("SELECT name FROM marks")) == [("beside",)]


async def test_an_owned_task_inherits_no_context(books):
    variable = ContextVar("variable", default="none")
    variable.set("the caller's")

    async def look():
        return variable.get()

    assert await books.own(look()) == "none"


@pytest.mark.parametrize("database_kind", ["sqlite"], indirect=True)
async def test_a_commit_that_fails_leaves_no_transaction_open(books):
    """For want of space or by a deferred constraint the commit itself can fail, its transaction still open."""

    async def work():
        await get_connection("sqlite").execute_query("PRAGMA defer_foreign_keys = ON")
        await ApiKey.create(
            id="key_1", account_id="acc_nobody", name="", hash="h", shown_prefix="", shown_suffix="",
            created_at_ms=0,
        )

    with pytest.raises(DatabaseUnavailable):
        await books.transaction(work)
    assert await ApiKey.all().count() == 0
    await books.transaction(lambda: account_row().save(force_create=True))
    await books.run(says("INSERT INTO marks (name, value) VALUES ('a', 1)"))


async def test_bulk_inserts_are_whole_or_nothing(books):
    rows = [account_row() for _ in range(5)]
    clash = account_row()
    clash.id = rows[0].id
    with pytest.raises(IntegrityError):
        await Account.bulk_create([*rows, clash])
    assert await Account.all().count() == 0
    await Account.bulk_create(rows)
    assert await Account.all().count() == 5


async def test_a_transaction_that_waits_for_its_own_end_is_given_up(books, monkeypatch):
    """A query built outside a transaction uses another connection than the transaction's: on SQLite, its lock."""
    monkeypatch.setattr(database_module, "SILENCE_MAX_S", 0.2)
    query = Account.all()
    if books.dialect == "sqlite":
        with pytest.raises(DatabaseUnavailable):
            await books.transaction(query.count)
    assert await books.transaction(lambda: Account.all().count()) == 0


# Cancellation


async def test_no_cancellation_wedges_the_database(books):
    """Hundreds of requests that leave at any instant: transactions, scripts, bulk inserts, reads."""
    chance = random.Random(20)
    counter = account_row(plan="counter")
    counter.version = 0
    await counter.save(force_create=True)
    lane = Lane(books)

    async def orm():
        async def work():
            await account_row(plan="fuzz").save(force_create=True)
            await Account.filter(id=counter.id).update(version=F("version") + 1)
            await Account.filter(plan="fuzz").count()

        await books.transaction(work)

    def pair():
        name = ids.new_id("acc")
        yield (
            "INSERT INTO accounts (id, email, plan, state, created_at_ms) VALUES (?, ?, 'fuzz', 'active', 0)",
            (name, name),
        )
        yield "UPDATE accounts SET version = version + 1 WHERE id = ?", (counter.id,)

    async def naked():  # a Tortoise transaction in the request's own task
        async with in_transaction(books.dialect):
            await account_row(plan="fuzz").save(force_create=True)
            await Account.filter(id=counter.id).update(version=F("version") + 1)

    async def snapshot():
        async with books.snapshot() as read:
            await read("SELECT COUNT(*) FROM accounts")
            await read("SELECT COUNT(*) FROM accounts")

    kinds = {
        "orm": orm,
        "naked": naked,
        "script": lambda: books.run(pair),
        "lane": lambda: lane.run((ids.new_id("x"),), pair),
        "bulk": lambda: Account.bulk_create([account_row(plan="bulk") for _ in range(3)]),
        "create": lambda: account_row(plan="single").save(force_create=True),
        "get": lambda: Account.get(id=counter.id),
        "fetch": lambda: books.fetch("SELECT COUNT(*) FROM accounts"),
        "report": lambda: books.report("SELECT COUNT(*) FROM accounts"),
        "snapshot": snapshot,
    }

    async def request():
        with contextlib.suppress(DatabaseUnavailable):
            await kinds[chance.choice(list(kinds))]()

    running, cancelled = set(), 0
    for _ in range(1000):
        task = asyncio.create_task(request())
        running.add(task)
        await asyncio.sleep(chance.random() * 0.0015)
        if chance.random() < 0.8:
            victim = chance.choice(list(running))
            cancelled += victim.cancel()
        running = {task for task in running if not task.done()}
        if len(running) > 12:
            await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED, timeout=5)
    if running:
        await asyncio.wait(running, timeout=10)
    assert cancelled > 200
    with never_stuck(books):
        assert all(task.done() for task in running)

    with never_stuck(books):
        for make in kinds.values():
            async with asyncio.timeout(10):
                await make()
        await asyncio.wait_for(asyncio.gather(*(books.fetch("SELECT 1") for _ in range(30))), 10)
        together = asyncio.gather(*(kind() for _ in range(5) for kind in kinds.values()))
        await asyncio.wait_for(together, 20)
    pairs = await Account.filter(plan="fuzz").count()
    assert pairs == (await Account.get(id=counter.id)).version > 50
    assert await Account.filter(plan="bulk").count() % 3 == 0
    if books.dialect == "sqlite":
        other = sqlite3.connect(books.file, timeout=0, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        other.close()
    else:
        rows = await books.fetch(
            "SELECT COUNT(*) FROM pg_stat_activity WHERE datname = current_database() AND state LIKE 'idle in%'"
        )
        assert rows[0][0] == 0


@pytest.mark.parametrize("database_kind", ["sqlite"], indirect=True)
async def test_a_snapshot_cancelled_in_a_long_read_ends_at_once(books):
    async def look():
        async with books.snapshot() as read:
            await read(
                "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 300000000)"
                " SELECT MAX(i) FROM n"
            )

    task = asyncio.create_task(look())
    await asyncio.sleep(0.2)
    began = time.monotonic()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert time.monotonic() - began < 5


# Deadlines


@contextlib.asynccontextmanager
async def blocked(books):
    """Let somebody else hold what every write needs."""
    if books.dialect == "sqlite":
        other = sqlite3.connect(books.file, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        yield
        other.execute("ROLLBACK")
        other.close()
    else:
        connection = await outside(books)
        async with connection.transaction():
            await connection.execute("LOCK TABLE accounts, marks IN ACCESS EXCLUSIVE MODE")
            yield
        await connection.close()


@pytest.mark.parametrize("way", ["run", "lane", "transaction"])
async def test_a_blocked_database_is_told_of_in_time(books, way, monkeypatch):
    monkeypatch.setattr(PatientDatabase, "wait", Database.wait)
    lane, row = Lane(books), account_row()
    write = says("INSERT INTO marks (name, value) VALUES ('late', 1) ON CONFLICT (name) DO NOTHING")
    ways = {
        "run": lambda: books.run(write),
        "lane": lambda: lane.run((1,), write),
        "transaction": lambda: books.transaction(lambda: row.save(force_create=True)),
    }
    async with blocked(books):
        began = time.monotonic()
        with pytest.raises(DatabaseUnavailable):
            await ways[way]()
        assert 0.9 < time.monotonic() - began < 5
        await books.fetch("SELECT 1")
    began = time.monotonic()
    await books.run(says("INSERT INTO marks (name, value) VALUES ('next', 1)"), deadline_s=5)
    await Lane(books).run((1,), says("SELECT 1"))
    assert await books.transaction(lambda: Account.all().count()) in (0, 1)
    assert time.monotonic() - began < 5


async def test_a_transaction_that_may_wait_is_told_of_a_lock_too(books):
    if books.dialect == "sqlite":
        await get_connection("sqlite").execute_query("PRAGMA busy_timeout = 100")
    async with blocked(books):
        with pytest.raises(DatabaseUnavailable):
            await books.transaction(lambda: account_row().save(force_create=True), deadline_s=10)


@pytest.mark.parametrize("database_kind", ["sqlite"], indirect=True)
@pytest.mark.parametrize("way", ["run", "lane", "orm", "transaction"])
async def test_everybody_waits_for_a_turn_to_write_also_behind_a_lane(books, way):
    lane, row = Lane(books), account_row()
    write = says("INSERT INTO marks (name, value) VALUES ('late', 1)")
    ways = {
        "run": lambda: books.run(write),
        "lane": lambda: lane.run((1,), write),
        "orm": lambda: row.save(force_create=True),
        "transaction": lambda: books.transaction(lambda: row.save(force_create=True)),
    }
    await lane.run((1,), says("INSERT INTO marks (name, value) VALUES ('early', 1)"))
    async with blocked(books):
        waiting = asyncio.create_task(ways[way]())
        await asyncio.sleep(0.4)
        assert not waiting.done()
    await asyncio.wait_for(waiting, 20)
    written = await books.fetch("SELECT 1 FROM marks WHERE name = 'late' UNION ALL SELECT 1 FROM accounts")
    assert len(written) == 1


@pytest.mark.parametrize("database_kind", ["sqlite"], indirect=True)
async def test_readers_do_not_wait_for_a_writer(books):
    await books.run(says("INSERT INTO marks (name, value) VALUES ('seen', 1)"))
    async with blocked(books), asyncio.timeout(5):
        assert (await books.fetch("SELECT name FROM marks"))[0][0] == "seen"
        assert (await books.report("SELECT name FROM marks"))[0][0] == "seen"


@pytest.mark.parametrize("database_kind", ["postgres"], indirect=True)
async def test_a_read_of_a_locked_table_is_told_of_in_time(books):
    async with blocked(books), asyncio.timeout(5):
        with pytest.raises(DatabaseUnavailable):
            await books.fetch("SELECT * FROM marks")
    assert list(await books.fetch("SELECT * FROM marks")) == []


async def test_a_database_that_is_not_there(tmp_path, database_kind):
    url = {
        "sqlite": f"sqlite:///{tmp_path}/books.sqlite3",
        "postgres": "postgres://nobody@127.0.0.1:1/nothing",
    }[database_kind]
    if database_kind == "sqlite":
        (tmp_path / "books.sqlite3").write_bytes(b"not a database at all" * 100)
    for work in (Database(url).open(), pending_migrations(url), migrate(url)):
        with pytest.raises(DatabaseUnavailable):
            await asyncio.wait_for(work, 5)
    threads = [thread for thread in threading.enumerate() if "_connection_worker" in thread.name]
    for thread in threads:
        await asyncio.to_thread(thread.join, 5)
    assert not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize("database_kind", ["sqlite"], indirect=True)
async def test_a_process_ends_whatever_it_has_left_open(database_kind, new_database):
    program = textwrap.dedent("""
        import asyncio, sys
        from models.database import Database

        async def main():
            books = Database(sys.argv[1])
            await books.open()

        asyncio.run(main())
    """)
    url = await new_database(database_kind)
    await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", program, url], cwd=ROOT, check=True, timeout=20
    )


@pytest.mark.parametrize("database_kind", ["postgres"], indirect=True)
async def test_a_restarted_server_costs_no_connection_for_good(books):
    """Every pooled connection is cut, again and again, just before it is used."""
    other = await outside(books)
    for _ in range(15):
        with contextlib.suppress(DatabaseUnavailable):
            await asyncio.gather(*(books.fetch("SELECT 1") for _ in range(3)))
        await other.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        for work in (
            lambda: books.transaction(lambda: Account.all().count()), lambda: books.run(says("SELECT 1")),
            lambda: books.fetch("SELECT 1"),
        ):
            with contextlib.suppress(DatabaseUnavailable):
                await work()
    await other.close()
    await asyncio.sleep(0.05)
    with never_stuck(books):
        await asyncio.gather(*(books.transaction(lambda: Account.all().count()) for _ in range(30)))
        await asyncio.gather(*(books.run(says("SELECT 1")) for _ in range(30)))


@contextlib.asynccontextmanager
async def wire_to(url):
    """Be a TCP relay in front of PostgreSQL that can fall silent; give its address and the switch."""
    host = parse_qs(urlsplit(url).query)["host"][0]
    silent = asyncio.Event()
    writers = []

    async def pump(reader, writer, while_loud):
        with contextlib.suppress(ConnectionError, asyncio.CancelledError):
            while data := await reader.read(65536):
                if while_loud():
                    writer.write(data)

    async def relay(reader, writer):
        there, back = await asyncio.open_unix_connection(f"{host}/.s.PGSQL.5432")
        writers.extend((writer, back))
        born_loud = not silent.is_set()
        loud = lambda: not (born_loud and silent.is_set())  # noqa: E731
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(pump(reader, back, loud), pump(there, writer, loud))

    server = await asyncio.start_server(relay, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    parts = urlsplit(url)
    try:
        yield f"postgres://postgres@127.0.0.1:{port}{parts.path}", silent
    finally:
        server.close()
        for writer in writers:
            writer.close()


@pytest.mark.parametrize("database_kind", ["postgres"])
async def test_a_wire_that_falls_silent_is_given_up(database_kind, new_database, monkeypatch):
    """A host that vanished answers nothing for hours: no lane may wait for it for ever."""
    monkeypatch.setattr(database_module, "SILENCE_MAX_S", 1)
    url = await new_database(database_kind)
    await migrate(url)
    async with wire_to(url) as (address, silent):
        books = Database(address)
        await books.open()
        lane = Lane(books)
        await lane.run((1,), says("SELECT 1"))
        silent.set()  # what is connected by now is dead; who connects anew is answered
        with pytest.raises(DatabaseUnavailable):
            await lane.run((1,), says("SELECT 1"), deadline_s=0.2)
        await asyncio.sleep(1.2)
        assert await lane.run((2,), says("SELECT 2")) == [(2,)]
        assert await books.run(says("SELECT 3")) == [(3,)]
        get_connection("postgres")._pool.terminate()  # a close in order would wait for the dead connections
        await books.close()


# Snapshots


async def test_a_snapshot_sees_one_moment(books):
    await books.run(says("INSERT INTO marks (name, value) VALUES ('n', 1)"))
    async with books.snapshot() as read:
        assert (await read("SELECT value FROM marks"))[0]["value"] == 1
        await books.run(says("UPDATE marks SET value = 2"))
        assert (await read("SELECT value FROM marks WHERE name = ?", ("n",)))[0][0] == 1
    async with books.snapshot() as read:
        assert (await read("SELECT value FROM marks"))[0][0] == 2


async def test_a_snapshot_of_a_file_with_an_odd_name(tmp_path):
    url = f"sqlite:///{tmp_path}/odd? name#100%.sqlite3"
    await migrate(url)
    books = Database(url)
    await books.open()
    async with books.snapshot() as read:
        assert (await read("SELECT COUNT(*) FROM ledger"))[0][0] == 0
    await books.close()


# Tables and migrations


async def columns_of(books, table):
    if books.dialect == "sqlite":
        return {row["name"] for row in await books.fetch(f"PRAGMA table_info({table})")}
    rows = await books.fetch("SELECT column_name FROM information_schema.columns WHERE table_name = ?", (table,))
    return {row[0] for row in rows}


@pytest.mark.parametrize("model", [Account, ApiKey])
async def test_models_are_their_tables(books, model):
    described = model._meta
    assert await columns_of(books, described.db_table) == set(described.fields_db_projection.values())


async def schema_of(books):
    """Return every table, index, unique and trigger by definition."""
    if books.dialect == "sqlite":
        rows = await books.fetch("SELECT type, name, sql FROM sqlite_master ORDER BY type, name")
    else:
        rows = await books.fetch(
            "SELECT 'column', table_name || '.' || column_name,"
            " data_type || is_nullable || COALESCE(column_default, '')"
            " FROM information_schema.columns WHERE table_schema = 'public' UNION ALL"
            " SELECT 'index', indexname, indexdef FROM pg_indexes WHERE schemaname = 'public' UNION ALL"
            " SELECT 'constraint', conrelid::regclass || '.' || conname, pg_get_constraintdef(oid)"
            " FROM pg_constraint WHERE connamespace = 'public'::regnamespace UNION ALL"
            " SELECT 'trigger', tgname, pg_get_triggerdef(oid) FROM pg_trigger WHERE NOT tgisinternal"
        )
    return {(row[0], row[1]): row[2] for row in rows}


async def contents_of(books):
    tables = ("accounts", "api_keys", "wallets", "ledger", "calls", "key_spend", "included_calls")
    return {
        table: sorted(tuple(row) for row in await books.fetch(f"SELECT * FROM {table}")) for table in tables
    }


async def test_rows_in_bulk_are_the_rows(books):
    texts = ["", "'\"\\", "a\nb\t\x01\x7f", "近似 \U0001f600 \u2028", "{}", "1", "x" * 10_000]
    marks = [(text, (-1) ** n * (2**63 - 1 - n)) for n, text in enumerate(texts)]

    def write():
        for name, value in marks:
            yield "INSERT INTO marks (name, value) VALUES (?, ?)", (name, value)

    await books.run(write)
    sql, columns = "SELECT name, value, NULL AS void FROM marks WHERE value <> ? ORDER BY value", [
        "name", "value", "void",
    ]
    rows = await books.report_in_bulk(sql, (7,), columns)
    assert [tuple(row[name] for name in columns) for row in rows] == sorted(
        [(name, value, None) for name, value in marks], key=lambda row: row[1]
    )
    assert [dict(row) for row in rows] == [dict(row) for row in await books.report(sql, (7,))]
    assert list(await books.report_in_bulk(f"{sql} LIMIT 0", (7,), columns)) == []
    with pytest.raises(DatabaseUnavailable):
        await books.report_in_bulk("SELECT name FROM nowhere", (), ["name"])


HISTORY = ["m0001_books", "m0002_portal", "m0003_payments", "m0004_recharge", "m0005_lists", "m0006_recharge"]


async def test_migrating_twice_changes_nothing(database_kind, new_database):
    url = await new_database(database_kind)
    assert await pending_migrations(url) == HISTORY
    assert await migrate(url) == HISTORY
    assert await pending_migrations(url) == []
    books = Database(url)
    await books.open()
    before = await schema_of(books)
    await books.close()
    assert await migrate(url) == []
    await books.open()
    assert await schema_of(books) == before
    await books.close()
    if database_kind == "sqlite":
        assert [file.name for file in books.file.parent.glob("*.before-*")] == []


async def test_several_processes_may_start_at_once(database_kind, new_database):
    url = await new_database(database_kind)
    program = textwrap.dedent("""
        import asyncio, sys
        from models.database import migrate
        print("ready", flush=True)
        sys.stdin.readline()
        print(asyncio.run(migrate(sys.argv[1])))
    """)
    running = [
        subprocess.Popen(
            [sys.executable, "-c", program, url], cwd=ROOT, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for _ in range(3)
    ]
    for process in running:
        assert process.stdout.readline() == "ready\n"
    for process in running:
        process.stdin.write("go\n")
        process.stdin.flush()
    said = [await asyncio.to_thread(process.communicate) for process in running]
    assert [error for _, error in said] == ["", "", ""]
    assert sorted(out.strip() for out, _ in said) == sorted([str(HISTORY), "[]", "[]"])


@pytest.fixture
def next_migration(tmp_path, monkeypatch):
    """Give a function that adds a migration of the given statements to the history."""
    name = f"migrations_{tmp_path.name}"
    folder = tmp_path / name
    shutil.copytree(Path(models.migrations.__file__).parent, folder, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.syspath_prepend(tmp_path)
    real = database_module._tortoise_config

    def config(url):
        made = real(url)
        made["apps"]["models"]["migrations"] = name
        return made

    def add(*statements):
        monkeypatch.setattr(database_module, "_tortoise_config", config)
        (folder / "m9999_next.py").write_text(textwrap.dedent(f"""
            from models.migrations._operations import RecordedMigration, Statements

            class Migration(RecordedMigration):
                dependencies = [("models", {HISTORY[-1]!r})]
                operations = [Statements({list(statements)!r})]
        """))

    yield add
    for module in [module for module in sys.modules if module.startswith(name)]:
        del sys.modules[module]


async def populated(url):
    await migrate(url)
    books = Database(url)
    await books.open()
    for name in ("alice", "bob"):
        actor = await enter(books, name, credit_microusd=5_000_000, spend_limit_microusd=10, spend_period="day")
        await give(books, actor.account.id, 7)
    return books


async def test_a_migration_keeps_every_row_index_and_constraint(database_kind, new_database, next_migration):
    url = await new_database(database_kind)
    books = await populated(url)
    rows, schema = await contents_of(books), await schema_of(books)
    await books.close()
    next_migration(
        "ALTER TABLE accounts ADD COLUMN nickname TEXT", "CREATE TABLE notes (id TEXT PRIMARY KEY, n BIGINT)",
        "CREATE INDEX notes_n ON notes (n)",
    )
    assert await pending_migrations(url) == ["m9999_next"]
    assert await migrate(url) == ["m9999_next"]
    assert await migrate(url) == []
    await books.open()
    after = await contents_of(books)
    after["accounts"] = [row[:-1] for row in after["accounts"]]
    assert after == rows
    new_schema = await schema_of(books)
    assert set(schema) <= set(new_schema)
    assert {key for key in schema if schema[key] != new_schema[key]} <= {("table", "accounts")}
    assert await columns_of(books, "accounts") >= {"nickname", "email"}
    with pytest.raises((*CONSTRAINT_HELD, DatabaseUnavailable), match="append only|RaiseError"):
        await books.run(says("UPDATE ledger SET amount_microusd = 1"))
    assert (await ledger.audit(books, full=True)).violations == ()
    await books.close()
    if database_kind == "sqlite":
        (copy,) = books.file.parent.glob("*.before-*")
        assert copy.name == f"{books.file.name}.before-m9999_next"
        saved = Database(f"sqlite:///{copy}")
        await saved.open()
        assert await contents_of(saved) == rows
        assert (await saved.fetch("SELECT COUNT(*) FROM tortoise_migrations"))[0][0] == len(HISTORY)
        await saved.close()


async def test_a_migration_that_fails_leaves_nothing(database_kind, new_database, next_migration):
    url = await new_database(database_kind)
    books = await populated(url)
    schema = await schema_of(books)
    await books.close()
    next_migration("ALTER TABLE accounts ADD COLUMN nickname TEXT", "SELECT nothing_of_the_kind")
    with pytest.raises(DatabaseUnavailable):
        await migrate(url)
    assert await pending_migrations(url) == ["m9999_next"]
    await books.open()
    assert await schema_of(books) == schema
    await books.close()


async def test_a_process_killed_right_after_a_migration_can_start_again(database_kind, new_database, monkeypatch):
    url = await new_database(database_kind)

    def dies(progress, event, key):
        if event == "apply_done":
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(MigrationExecutor, "_emit", staticmethod(dies))
        with pytest.raises(KeyboardInterrupt):
            await migrate(url)
    assert await migrate(url) == HISTORY[1:]
    assert await migrate(url) == []


@pytest.mark.parametrize("database_kind", ["sqlite"])
async def test_no_backup_no_migration(database_kind, new_database, next_migration, monkeypatch):
    url = await new_database(database_kind)
    books = await populated(url)
    await books.close()
    next_migration("ALTER TABLE accounts ADD COLUMN nickname TEXT")
    target = books.file.with_name(f"{books.file.name}.before-m9999_next")
    (target.parent / f"{target.name}.partial").mkdir()  # the copy cannot be written
    with pytest.raises(DatabaseUnavailable):
        await migrate(url)
    assert not target.exists()
    assert await pending_migrations(url) == ["m9999_next"]


@pytest.mark.parametrize("database_kind", ["postgres"])
async def test_a_migration_may_take_its_time(database_kind, new_database, next_migration):
    """The limits that keep calls from waiting would keep an index on a large table from ever being built."""
    url = await new_database(database_kind)
    await migrate(url)
    next_migration(
        "CREATE TABLE notes AS SELECT current_setting('statement_timeout') AS a,"
        " current_setting('lock_timeout') AS b"
    )
    await migrate(url)
    books = Database(url)
    await books.open()
    assert tuple((await books.fetch("SELECT a, b FROM notes"))[0]) == ("0", "0")
    assert (await books.fetch("SHOW statement_timeout"))[0][0] == "5s"
    await books.close()


async def test_what_a_migration_never_is(books):
    """Ids of keys and accounts are what the hot tables refer to: the few real foreign keys hold."""
    with pytest.raises((IntegrityError, OperationalError)):
        await ApiKey.create(
            id="key_1", account_id="acc_nobody", name="", hash="h", shown_prefix="", shown_suffix="",
            created_at_ms=0,
        )
    actor = await enter(books, "alice")
    with pytest.raises((IntegrityError, OperationalError)):
        await Account.filter(id=actor.account.id).delete()
    assert await api_key.ApiKey.filter(account_id=actor.account.id).count() == 1


async def test_an_old_sqlite_is_named(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sqlite3.sqlite_version_info", (3, 34, 1))
    monkeypatch.setattr("sqlite3.sqlite_version", "3.34.1")
    url = f"sqlite:///{tmp_path}/books.sqlite3"
    for use in (Database(url).open, lambda: migrate(url)):
        with pytest.raises(DatabaseUnavailable, match="SQLite 3.35.0 or later is needed; this Python has 3.34.1"):
            await use()
