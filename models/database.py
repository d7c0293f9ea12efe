"""The database: open, close, migrate, and the three ways to talk to it.

- `run` and `Lane.run`: *scripts*, the money statements. A script is a generator that yields
  `(sql, arguments)` and receives the rows; it knows nothing of threads, pools or transactions, is the
  same for both databases, and runs inside one transaction that no cancelled request can reach. On
  SQLite a lane's whole group of scripts waits once: for the disk, at its commit; `run` is for what no
  call waits for, of any size, and runs on a thread. A script that asks only whether a row was changed
  says `RETURNING 1`, which SQLite tells for nothing: any other RETURNING makes it keep a table aside.
- `transaction`: Tortoise ORM work in a transaction of its own, equally out of reach.
- `fetch` and `report`: reads, on connections that never write.

Every wait on a request path has a deadline: past it the caller gets `DatabaseUnavailable` while the
statement, which may still commit, is left to whoever owns its outcome.
"""

from __future__ import annotations

import asyncio
import contextvars
import fcntl
import logging
import sqlite3
import zlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import IO, Any, Literal, TypeVar

import asyncpg
import msgspec
from tortoise import Tortoise
from tortoise.backends.base.config_generator import expand_db_url
from tortoise.connection import get_connection
from tortoise.exceptions import BaseORMException, DBConnectionError, OperationalError
from tortoise.migrations.executor import MigrationExecutor
from tortoise.transactions import in_transaction

from models.errors import DatabaseUnavailable, DomainError

T = TypeVar("T")
Row = Any  # sqlite3.Row or asyncpg.Record: both give columns by position and by name
Statement = tuple[str, tuple[Any, ...]]
Script = Generator[Statement, Sequence[Row], T]

REQUEST_DEADLINE_S = 1.5
SILENCE_MAX_S = 15
GROUP_MEMBERS_MAX = 64
# A group keeps the accounts of its members from those of other processes for as long as it takes, and on PostgreSQL
# each member's statements take their round trips; a commit is shared well enough by these.
GROUP_MEMBERS_MAX_ON_POSTGRES = 16
POOL_CONNECTIONS_MAX = 10
REPORTS_AT_ONCE = 2
REPORTS_WAITING_MAX = 50
# RETURNING and AS MATERIALIZED: https://sqlite.org/releaselog/3_35_0.html
SQLITE_LEAST = (3, 35, 0)
MIGRATION_LOCK = 7_236_001  # any constant; all processes of all versions must agree on it
GATES = 1  # the first half of the advisory locks that stand for accounts; as above
_WHETHER = " RETURNING 1"
TABLES_MODULES = ["models.account", "models.api_key"]

_log = logging.getLogger("tollgate.database")


class Database:
    """Hold the open connections of one process."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.dialect: Literal["sqlite", "postgres"] = "sqlite" if url.startswith("sqlite:") else "postgres"
        self._owned: set[asyncio.Task[Any]] = set()
        self._reports = asyncio.Semaphore(REPORTS_AT_ONCE)
        self._reports_waiting = 0
        # Looked up once: Tortoise finds it anew by the context of each task. Lanes have none.
        self._client: Any = None

    @property
    def now_ms_sql(self) -> str:
        """Return an SQL expression for the database's own clock, in milliseconds since 1970."""
        if self.dialect == "sqlite":
            return "CAST(ROUND((julianday('now') - 2440587.5) * 86400000) AS INTEGER)"
        return "CAST(EXTRACT(EPOCH FROM clock_timestamp()) * 1000 AS BIGINT)"

    @property
    def file(self) -> Path:
        """Return the path of the SQLite file."""
        return sqlite_file(self.url)

    async def open(self) -> None:
        """Connect. Raises DatabaseUnavailable when the database cannot be reached, or is too old."""
        if self.dialect == "sqlite":
            _require_sqlite()
            self.file.parent.mkdir(parents=True, exist_ok=True)
        await Tortoise.init(config=_tortoise_config(self.url), _enable_global_fallback=True)
        try:
            await self.fetch("SELECT 1", deadline_s=10)
        except DatabaseUnavailable:
            await Tortoise.close_connections()
            raise
        self._client = get_connection(self.dialect)

    async def close(self) -> None:
        """Wait for what is still being written, then disconnect."""
        while self._owned:
            await asyncio.wait(list(self._owned))
        self._client = None
        await Tortoise.close_connections()

    async def run(
        self, make: Callable[[], Script[T]], *, gate: str | None = None, deadline_s: float = REQUEST_DEADLINE_S
    ) -> T:
        """Run one script in its own transaction, behind a gate if need be, and return what it returns.

        Raises the script's DomainError after rolling back, DatabaseUnavailable on anything the
        database refuses, and again after `deadline_s`; the transaction may commit even then.
        """
        return await self.wait(self.own(self.run_one(make, gate)), deadline_s)

    async def transaction(self, work: Callable[[], Awaitable[T]], *, deadline_s: float = REQUEST_DEADLINE_S) -> T:
        """Run Tortoise ORM work in a transaction that a cancelled request cannot wedge.

        `work` must not start tasks: they would inherit the transaction.
        """
        return await self.wait(self.own(self._in_transaction(work)), deadline_s)

    async def fetch(
        self, sql: str, arguments: tuple[Any, ...] = (), *, deadline_s: float = REQUEST_DEADLINE_S
    ) -> Sequence[Row]:
        """Return the rows of a small read: an indexed look-up on a request path."""
        return await self._read("lookups", sql, arguments, deadline_s)

    async def report(
        self, sql: str, arguments: tuple[Any, ...] = (), *, deadline_s: float = 30
    ) -> Sequence[Row]:
        """Return the rows of a report or search; it may be slow without holding up a call."""
        if self._reports_waiting >= REPORTS_WAITING_MAX:
            raise DatabaseUnavailable("too many reports are being made")
        return await self.wait(self.own(self._report(sql, arguments)), deadline_s)

    async def report_in_bulk(
        self, sql: str, arguments: tuple[Any, ...], columns: Sequence[str], *, deadline_s: float = 30
    ) -> Sequence[Row]:
        """Return the rows of a report that may be many, by name; no column holds bytes.

        On SQLite they come in one piece: after each row that a thread fetches by itself it waits for its turn
        beside the event loop, which for a thousand of them takes ten times as long as reading them.
        """
        if self.dialect != "sqlite":
            return await self.report(sql, arguments, deadline_s=deadline_s)
        (made,) = await self.report(
            f"SELECT json_group_array(json_array({', '.join(columns)})) FROM ({sql})", arguments,
            deadline_s=deadline_s,
        )
        return [dict(zip(columns, values, strict=True)) for values in msgspec.json.decode(made[0])]

    @asynccontextmanager
    async def snapshot(self) -> AsyncIterator[Callable[..., Awaitable[Sequence[Row]]]]:
        """Give a `read(sql, arguments)` whose every call sees one and the same moment."""
        try:
            async with self._sqlite_snapshot() if self.dialect == "sqlite" else self._postgres_snapshot() as read:
                yield read
        except _DATABASE_ERRORS as error:
            raise _unavailable(error) from error

    @asynccontextmanager
    async def _sqlite_snapshot(self) -> AsyncIterator[Callable[..., Awaitable[Sequence[Row]]]]:
        # One thread, so that the connection is closed only after a read that nobody waits for any more.
        thread = ThreadPoolExecutor(1, "snapshot")
        in_thread = partial(asyncio.get_running_loop().run_in_executor, thread)
        try:
            connection = await in_thread(_snapshot_connection, self.file)

            async def read(sql: str, arguments: tuple[Any, ...] = ()) -> Sequence[Row]:
                return await in_thread(lambda: connection.execute(sql, arguments).fetchall())

            try:
                await read("BEGIN")
                yield read
            finally:
                connection.interrupt()
                await in_thread(connection.close)
        finally:
            thread.shutdown(wait=False)

    @asynccontextmanager
    async def _postgres_snapshot(self) -> AsyncIterator[Callable[..., Awaitable[Sequence[Row]]]]:
        async with (
            get_connection(self.dialect).acquire_connection() as connection,
            connection.transaction(isolation="repeatable_read", readonly=True),
        ):
            await connection.execute("SET LOCAL statement_timeout = 0")

            async def read(sql: str, arguments: tuple[Any, ...] = ()) -> Sequence[Row]:
                return await connection.fetch(_numbered(sql), *arguments)

            yield read

    def own(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run something in a task that belongs to the database and not to a request.

        It starts with an empty context, so that no transaction of the caller leaks into it, and
        `close` waits for it.
        """
        task = asyncio.get_running_loop().create_task(work, context=contextvars.Context())
        self._owned.add(task)
        task.add_done_callback(self._owned.discard)
        return task

    async def wait(self, task: asyncio.Future[T], deadline_s: float) -> T:
        """Wait for an owned task without ever cancelling it."""
        try:
            done, _ = await asyncio.wait((task,), timeout=deadline_s)
        except asyncio.CancelledError:
            task.add_done_callback(_read_exception)
            raise
        if not done:
            task.add_done_callback(_read_exception)
            raise DatabaseUnavailable("the database did not answer in time")
        return task.result()

    async def run_one(self, make: Callable[[], Script[T]], gate: str | None = None) -> T:
        """Run one script in the calling task; only for tasks that nobody cancels."""
        outcome = (await self.run_group([make], None if gate is None else [gate], aside=True))[0]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def run_group(
        self, makes: Sequence[Callable[[], Script[Any]]], gates: Sequence[str] | None = None, *, aside: bool = False
    ) -> list[Any]:
        """Run scripts in one transaction and return each one's value, or its exception.

        `gates` names for each script what it shares with scripts of other groups, an account say.
        Several scripts in one transaction take the locks of one account in no order that could be
        kept, so on PostgreSQL a group first takes the gates of all its members. On SQLite the statements
        hold up the event loop unless they run `aside`.

        A script that raises a DomainError before it has written anything is done, and its neighbours
        go on. One that has written, and everything the database refuses (deadlock, disk full,
        connection lost), undoes the group: its members are tried once more one by one, so that one
        member's trouble is not its neighbours'. Only for tasks that nobody cancels.
        """
        try:
            return await self._run_group_once(makes, gates, aside=aside)
        except _Undo as undo:
            if len(makes) == 1:
                return [undo.cause]
        except Exception as error:
            if len(makes) == 1 and not _may_succeed_again(error):
                return [_told(error)]
            _log.warning("%d scripts are tried again singly: %s", len(makes), type(error).__name__)
        outcomes, shut = [], set()
        for make, gate in zip(makes, gates or [None] * len(makes), strict=True):
            outcomes.append(await self._run_alone(make, gate, shut))
        return outcomes

    async def _run_alone(self, make: Callable[[], Script[Any]], gate: str | None, shut: set[str | None]) -> Any:
        """Run one member of a group that was undone. `shut` are the gates that somebody keeps for himself."""
        if gate in shut:
            # Waiting for the same lock once for each would take the patience of all who wait behind.
            return DatabaseUnavailable("locked")
        try:
            return (await self._run_group_once([make], None if gate is None else [gate]))[0]
        except _Undo as undo:
            return undo.cause
        except Exception as error:
            if gate is not None and isinstance(error, asyncpg.LockNotAvailableError):
                shut.add(gate)
            return _told(error)

    async def _run_group_once(
        self, makes: Sequence[Callable[[], Script[Any]]], gates: Sequence[str] | None, *, aside: bool = False
    ) -> list[Any]:
        client = self._client or get_connection(self.dialect)
        if self.dialect == "sqlite":
            return await client.run_in_transaction(
                lambda connection: [_member_on_sqlite(connection, make) for make in makes], aside=aside
            )
        async with client.acquire_connection() as connection, _cut_when_silent(connection):
            try:
                # Not by `connection.transaction()`: the gates come in the same message as the beginning.
                await connection.execute(_begin_with(gates or ()))
                outcomes = [await _member_on_postgres(connection, make) for make in makes]
                await connection.execute("COMMIT")
            except BaseException:
                if not connection.is_closed():
                    await connection.execute("ROLLBACK")
                raise
            return outcomes

    async def _in_transaction(self, work: Callable[[], Awaitable[T]]) -> T:
        try:
            async with in_transaction(self.dialect) as client:
                if self.dialect == "postgres":
                    async with _cut_when_silent(client._connection):
                        return await work()
                # A query that was built outside the transaction waits for its end: better both fail.
                async with asyncio.timeout(SILENCE_MAX_S):
                    return await work()
        except _UNREACHABLE_ERRORS as error:
            raise _unavailable(error) from error
        except OperationalError as error:
            # Tortoise's own complaints are of this class too; SQLite's are wrapped in it.
            if error.args and isinstance(error.args[0], sqlite3.OperationalError):
                raise _unavailable(error) from error
            raise

    async def _report(self, sql: str, arguments: tuple[Any, ...]) -> Sequence[Row]:
        # On PostgreSQL reports share the pool with the calls, and must never have all of it.
        self._reports_waiting += 1
        try:
            async with self._reports:
                return await self._read_now("reports", sql, arguments)
        finally:
            self._reports_waiting -= 1

    async def _read(self, alias: str, sql: str, arguments: tuple[Any, ...], deadline_s: float) -> Sequence[Row]:
        return await self.wait(self.own(self._read_now(alias, sql, arguments)), deadline_s)

    async def _read_now(self, alias: str, sql: str, arguments: tuple[Any, ...]) -> Sequence[Row]:
        try:
            if self.dialect == "sqlite":
                client = get_connection(alias)
                return await client.in_thread(lambda connection: connection.execute(sql, arguments).fetchall())
            client = get_connection(self.dialect)
            async with client.acquire_connection() as connection, _cut_when_silent(connection):
                return await connection.fetch(_numbered(sql), *arguments)
        except _DATABASE_ERRORS as error:
            raise _unavailable(error) from error


@dataclass(slots=True)
class _Waiting:
    order: tuple[Any, ...]
    make: Callable[[], Script[Any]]
    told: Callable[[Any], None]


class Lane:
    """Let scripts that arrive together share one transaction (group commit).

    While one group is being committed the next one gathers, so that nobody ever waits for a timer.
    Members run in the order of `order` (account, then call), the same in every process, and an
    account's members of one group at a time, so that two groups do not lock each other out.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._most = GROUP_MEMBERS_MAX if database.dialect == "sqlite" else GROUP_MEMBERS_MAX_ON_POSTGRES
        self._waiting: list[_Waiting] = []
        self._worker: asyncio.Task[None] | None = None

    def post(self, order: tuple[Any, ...], make: Callable[[], Script[Any]], told: Callable[[Any], None]) -> None:
        """Queue a script; `told` is called once with what it returned, or with the exception it raised."""
        self._waiting.append(_Waiting(order, make, told))
        if self._worker is None or self._worker.done():
            self._worker = self._database.own(self._work())

    def submit(self, order: tuple[Any, ...], make: Callable[[], Script[T]]) -> asyncio.Future[T]:
        """Queue a script; the future is its outcome. Cancelling the future does not undo it."""
        result: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self.post(order, make, lambda outcome: deliver(result, outcome))
        return result

    async def run(
        self, order: tuple[Any, ...], make: Callable[[], Script[T]], *, deadline_s: float = REQUEST_DEADLINE_S
    ) -> T:
        """Queue a script and wait for its outcome, at most `deadline_s`."""
        return await self._database.wait(self.submit(order, make), deadline_s)

    async def _work(self) -> None:
        while self._waiting:
            group = self._waiting[:self._most]
            del self._waiting[:self._most]
            group.sort(key=lambda member: member.order)
            try:
                outcomes = await self._database.run_group(
                    [member.make for member in group], [str(member.order[0]) for member in group]
                )
            except Exception as error:  # a defect in a script: everyone who waits is told
                _log.exception("a group of scripts failed")
                outcomes = [error] * len(group)
            for member, outcome in zip(group, outcomes, strict=True):
                try:
                    member.told(outcome)
                except Exception:
                    _log.exception("an outcome could not be told")


class Deadline:
    """Give up the futures that are not done in time. One timer serves them all: a timer each costs more."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._watched: deque[tuple[float, asyncio.Future[Any]]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, future: asyncio.Future[Any]) -> None:
        """Fail a future with DatabaseUnavailable unless it is done within the deadline from now."""
        loop, watched = asyncio.get_running_loop(), self._watched
        while watched and watched[0][1].done():
            watched.popleft()
        watched.append((loop.time() + self.seconds, future))
        if self._timer is None:
            self._timer = loop.call_later(self.seconds, self._look)

    def _look(self) -> None:
        loop, watched = asyncio.get_running_loop(), self._watched
        self._timer = None
        while watched and (watched[0][1].done() or watched[0][0] <= loop.time()):
            _, future = watched.popleft()
            if not future.done():
                future.set_exception(DatabaseUnavailable("the database did not answer in time"))
                future.add_done_callback(_read_exception)
        if watched:
            self._timer = loop.call_at(watched[0][0], self._look)


def deliver(result: asyncio.Future[Any], outcome: Any) -> None:
    """Give a future what a lane told, unless nobody waits for it any more."""
    if result.done():
        return
    if isinstance(outcome, Exception):
        result.set_exception(outcome)
        result.add_done_callback(_read_exception)
    else:
        result.set_result(outcome)


async def migrate(url: str) -> list[str]:
    """Bring the schema up to date and return the names of the migrations applied.

    One process at a time: a file lock on SQLite, an advisory lock on PostgreSQL. An SQLite file
    that holds data is copied beside itself first.
    """
    database = Database(url)
    if database.dialect == "sqlite":
        _require_sqlite()
        database.file.parent.mkdir(parents=True, exist_ok=True)
        lock = await asyncio.to_thread(_migration_lock, database.file)
        try:
            return await _migrate_now(database)
        finally:
            lock.close()
    return await _migrate_postgres(database)


async def pending_migrations(url: str) -> list[str]:
    """Return the names of the migrations that `migrate` would apply."""
    if url.startswith("sqlite:") and not sqlite_file(url).exists():
        url = "sqlite:///:memory:"
    await Tortoise.init(config=_tortoise_config(url), _enable_global_fallback=True)
    try:
        await get_connection(Database(url).dialect).execute_query("SELECT 1")  # `plan` takes no answer for "none"
        plan = await _executor(url).plan()
        return [step.migration.name for step in plan]
    except _DATABASE_ERRORS as error:
        raise _unavailable(error) from error
    finally:
        await Tortoise.close_connections()


def sqlite_file(url: str) -> Path:
    """Return the file of an SQLite address: `sqlite:///relative` or `sqlite:////absolute`."""
    return Path(url.removeprefix("sqlite:///"))


async def _migrate_postgres(database: Database) -> list[str]:
    config = _tortoise_config(database.url)
    settings = config["connections"][database.dialect]["credentials"]["server_settings"]
    # An index on a large table takes its time, and the lock is held while another process migrates.
    settings |= {"statement_timeout": "0", "lock_timeout": "0", "idle_in_transaction_session_timeout": "0"}
    await Tortoise.init(config=config, _enable_global_fallback=True)
    try:
        async with get_connection(database.dialect).acquire_connection() as connection:
            await connection.execute("SELECT pg_advisory_lock($1)", MIGRATION_LOCK)
            try:
                return await _apply(database.url)
            finally:
                await connection.execute("SELECT pg_advisory_unlock($1)", MIGRATION_LOCK)
    except _DATABASE_ERRORS as error:
        raise _unavailable(error) from error
    finally:
        await Tortoise.close_connections()


def _require_sqlite() -> None:
    """Raise DatabaseUnavailable when this Python's SQLite is too old, or was built without JSON."""
    if sqlite3.sqlite_version_info < SQLITE_LEAST:
        least = ".".join(map(str, SQLITE_LEAST))
        raise DatabaseUnavailable(f"SQLite {least} or later is needed; this Python has {sqlite3.sqlite_version}")
    try:
        with closing(sqlite3.connect(":memory:")) as connection:
            connection.execute("SELECT json_group_array(1)")
    except sqlite3.OperationalError as error:
        raise DatabaseUnavailable("SQLite's JSON functions are needed; this Python's SQLite has none") from error


async def _migrate_now(database: Database) -> list[str]:
    names = await pending_migrations(database.url) if database.file.exists() else []
    await Tortoise.init(config=_tortoise_config(database.url), _enable_global_fallback=True)
    try:
        if names:
            await asyncio.to_thread(_back_up, database.file, names[0])
        return await _apply(database.url)
    except _DATABASE_ERRORS as error:
        raise _unavailable(error) from error
    finally:
        await Tortoise.close_connections()


async def _apply(url: str) -> list[str]:
    applied: list[str] = []
    executor = _executor(url)
    executor.recorder.record_applied = _nothing_to_record
    await executor.migrate(
        progress=lambda event, _, name: applied.append(name) if event == "apply_done" else None
    )
    return applied


async def _nothing_to_record(app: str, name: str) -> None:
    """Do nothing: our migrations record themselves, in their own transaction."""


def _executor(url: str) -> MigrationExecutor:
    return MigrationExecutor(get_connection(Database(url).dialect), _tortoise_config(url)["apps"])


def _migration_lock(file: Path) -> IO[str]:
    """Wait for the lock that lets one process migrate at a time; closing the file gives it back."""
    lock = open(file.with_name(file.name + ".migrate.lock"), "w")  # noqa: SIM115 - held by the caller
    fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


def _back_up(file: Path, migration: str) -> None:
    """Copy a populated database file to `<file>.before-<migration>`, unless that exists already."""
    target = file.with_name(f"{file.name}.before-{migration}")
    partial_copy = target.with_name(f"{target.name}.partial")
    with closing(sqlite3.connect(file)) as source:
        populated = source.execute("SELECT 1 FROM sqlite_master WHERE name = 'accounts'").fetchone()
        if not populated or target.exists():
            return
        partial_copy.unlink(missing_ok=True)
        with closing(sqlite3.connect(partial_copy)) as copy:
            source.backup(copy)
    partial_copy.rename(target)


def _tortoise_config(url: str) -> dict[str, Any]:
    # Connections are named after the database: Tortoise caches SQL by the connection's name alone.
    writer = Database(url).dialect
    apps = {
        "models": {
            "models": TABLES_MODULES,
            "default_connection": writer,
            "migrations": "models.migrations",
        }
    }
    if not url.startswith("sqlite:"):
        connection = expand_db_url(url) | {"engine": "models.asyncpg_engine"}
        connection["credentials"] |= {
            "minsize": 1,
            "maxsize": POOL_CONNECTIONS_MAX,
            "server_settings": {
                "application_name": "tollgate",
                "statement_timeout": "5s",
                "lock_timeout": "1s",
                "idle_in_transaction_session_timeout": "10s",
                # A report of one page must not take every processor from the calls, and no statement runs for so
                # long that compiling it would pay.
                "max_parallel_workers_per_gather": "0",
                "jit": "off",
            },
            "timeout": 5,
        }
        return {"connections": {writer: connection}, "apps": apps}
    writing = {
        "file_path": str(sqlite_file(url)),
        "busy_timeout": 5000,
        "journal_mode": "WAL",
        # NORMAL would lose the last commits when the host dies: a paid call must outlive it.
        "synchronous": "FULL",
        "journal_size_limit": 64 << 20,
        "foreign_keys": "ON",
        "cache_size": -16_000,
    }
    reading = writing | {"query_only": "ON"}
    engine = "models.sqlite_engine"
    return {
        "connections": {
            writer: {"engine": engine, "credentials": writing},
            "lookups": {"engine": engine, "credentials": reading},
            "reports": {"engine": engine, "credentials": reading},
        },
        "apps": apps,
    }


class _Undo(Exception):
    """Carry the refusal of a script that had written already: its transaction must not be kept."""

    def __init__(self, cause: DomainError) -> None:
        super().__init__(cause)
        self.cause = cause


def _member_on_sqlite(connection: sqlite3.Connection, make: Callable[[], Script[Any]]) -> Any:
    changes = connection.total_changes
    try:
        return _drive_on_sqlite(connection, make())
    except DomainError as error:
        if connection.total_changes != changes:
            raise _Undo(error) from error
        return error


def _drive_on_sqlite(connection: sqlite3.Connection, script: Script[T]) -> T:
    try:
        sql, arguments = next(script)
        while True:
            plain = _without_returning(sql)
            cursor = connection.execute(plain, arguments)
            rows = cursor.fetchall() if len(plain) == len(sql) else [(1,)] * cursor.rowcount
            sql, arguments = script.send(rows)
    except StopIteration as end:
        return end.value


@lru_cache(maxsize=1024)
def _without_returning(sql: str) -> str:
    """Return a statement that asks only for the number of rows it changes without the words that ask."""
    return sql.removesuffix(_WHETHER)


def _begin_with(gates: Sequence[str]) -> str:
    """Return what begins a transaction and takes its gates, in the order in which everybody takes them."""
    if not gates:
        return "BEGIN"
    numbers = sorted({zlib.crc32(gate.encode()) - (1 << 31) for gate in gates})
    array = ",".join(map(str, numbers))
    return f"BEGIN; SELECT pg_advisory_xact_lock({GATES}, n) FROM unnest('{{{array}}}'::int4[]) AS n"


async def _member_on_postgres(connection: asyncpg.Connection, make: Callable[[], Script[Any]]) -> Any:
    script, rows, written = make(), None, False
    try:
        while True:
            sql, arguments = script.send(rows)
            rows = await connection.fetch(_numbered(sql), *arguments)
            # What returns its rows and has none has changed none.
            written = written or (not sql.startswith("SELECT") and (bool(rows) or "RETURNING" not in sql))
    except StopIteration as end:
        return end.value
    except DomainError as error:
        if written:
            raise _Undo(error) from error
        return error


@asynccontextmanager
async def _cut_when_silent(connection: asyncpg.Connection) -> AsyncIterator[None]:
    """Drop a connection whose server says nothing for long.

    Statements end by timeouts of the server's own, so then it is the server or the wire that is gone,
    which a socket alone may not notice for hours.
    """
    timer = asyncio.get_running_loop().call_later(SILENCE_MAX_S, connection.terminate)
    try:
        yield
    finally:
        timer.cancel()


@lru_cache(maxsize=1024)
def _numbered(sql: str) -> str:
    """Return a statement with PostgreSQL's `$1` for each `?`. No statement of ours quotes a `?`."""
    first, *rest = sql.split("?")
    return first + "".join(f"${n}{part}" for n, part in enumerate(rest, 1))


def _snapshot_connection(file: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(
        f"{file.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None, check_same_thread=False, timeout=5
    )
    connection.row_factory = sqlite3.Row
    return connection


_UNREACHABLE_ERRORS = (
    sqlite3.Error,
    asyncpg.PostgresConnectionError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,  # a connection that is cut at the very moment it is used
    asyncpg.InsufficientResourcesError,
    asyncpg.OperatorInterventionError,
    asyncpg.ObjectNotInPrerequisiteStateError,  # a lock not had in time is one of these
    asyncpg.TransactionRollbackError,
    DBConnectionError,
    OSError,
    TimeoutError,
)
_DATABASE_ERRORS = (*_UNREACHABLE_ERRORS, asyncpg.PostgresError, BaseORMException)
# Values or statements the database will never take: trying again would only delay the news.
_DEFECTS = (
    sqlite3.IntegrityError,
    sqlite3.ProgrammingError,
    sqlite3.InterfaceError,
    sqlite3.DataError,
    asyncpg.DataError,
    asyncpg.IntegrityConstraintViolationError,
    asyncpg.SyntaxOrAccessError,
)


def _told(error: Exception) -> Exception:
    """Return what a script's caller is told: the database is not available, or our own defect as it is."""
    if isinstance(error, _DEFECTS) or not isinstance(error, _DATABASE_ERRORS):
        return error
    return _unavailable(error)


def _may_succeed_again(error: BaseException) -> bool:
    return isinstance(error, asyncpg.SerializationError | asyncpg.DeadlockDetectedError)


def _unavailable(error: BaseException) -> DatabaseUnavailable:
    _log.warning("the database refused: %s: %s", type(error).__name__, error)
    refusal = DatabaseUnavailable(f"{type(error).__name__}")
    refusal.__cause__ = error
    return refusal


def _read_exception(task: asyncio.Future[Any]) -> None:
    """Look at an outcome nobody waits for any more, so that asyncio does not complain."""
    if not task.cancelled():
        task.exception()
