"""Tortoise's SQLite backend, made safe: what a cancelled request can never do to it.

The stock backend hangs for ever once a task is cancelled while it enters a transaction (it holds
the connection's lock and never gives it back), begins transactions that fail at once when two
processes write, and leaves a bulk insert's transaction open when cancelled. Here every transaction
begins with BEGIN IMMEDIATE, so that it waits for its turn, and begin, commit and roll back run in
tasks of their own that a cancellation cannot reach.

`run_in_transaction` is how the money statements run (models/database.py): those of calls on the event loop
itself, where a statement takes microseconds, while what may wait, for another process's turn to write and
for the disk, waits on the connection's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import sqlite3
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import aiosqlite
from tortoise.backends.base.client import ConnectionWrapper
from tortoise.backends.sqlite.client import (
    SqliteClient,
    SqliteTransactionContext,
    SqliteTransactionWrapper,
    translate_exceptions,
)
from tortoise.connection import get_connections
from tortoise.exceptions import OperationalError, TransactionManagementError

T = TypeVar("T")
BUSY_TIMEOUT_MS = 5000
# Statements that hold up the event loop for so long have to fetch pages from a slow disk: then a thread is
# better, for a while.
HELD_UP_MAX_S = 0.05
ON_THREAD_S = 30
_unfinished: set[asyncio.Task[Any]] = set()


def _out_of_reach(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Run something in a task that nobody else can cancel, with none of the caller's context."""
    task = asyncio.get_running_loop().create_task(work, context=contextvars.Context())
    _unfinished.add(task)
    task.add_done_callback(_unfinished.discard)
    return task


class _Transaction(SqliteTransactionWrapper):
    async def begin(self) -> None:
        try:
            await self._connection.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError as error:
            raise OperationalError(error) from error


class _Context(SqliteTransactionContext):
    async def __aenter__(self) -> Any:
        await self._trxlock.acquire()
        beginning = _out_of_reach(self._begin())
        try:
            await asyncio.shield(beginning)
        except BaseException:
            _out_of_reach(self._undo(beginning))
            raise
        self.token = get_connections().set(self.connection_name, self.connection)
        return self.connection

    async def __aexit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        get_connections().reset(self.token)
        await asyncio.shield(_out_of_reach(self._end(exc_type)))

    async def _begin(self) -> None:
        await self.ensure_connection()
        self.connection._parent.be_patient()
        await self.connection.begin()

    async def _undo(self, beginning: asyncio.Task[None]) -> None:
        try:
            with contextlib.suppress(BaseException):
                await beginning
                await self.connection._connection.rollback()
        finally:
            self._trxlock.release()

    async def _end(self, exc_type: Any) -> None:
        try:
            if self.connection._finalized:
                return
            if exc_type is None:
                await self.connection.commit()
            elif exc_type is not TransactionManagementError:
                await self.connection.rollback()
        except BaseException:
            # A commit that fails (a full disk, a deferred constraint) may leave its transaction open.
            with contextlib.suppress(sqlite3.Error):
                await self.connection._connection.rollback()
            raise
        finally:
            self._trxlock.release()


class _Held(ConnectionWrapper):
    """Hold the connection's lock.

    Unlike the stock wrapper, give it back when the file cannot be opened, and not before the thread is done
    with what was asked of it, even if whoever asked was cancelled.
    """

    def __init__(self, lock: asyncio.Lock, client: SafeSqliteClient, *, patient: bool = True) -> None:
        super().__init__(lock, client)
        self._patient = patient

    async def __aenter__(self) -> Any:
        await self._lock.acquire()
        try:
            await self.ensure_connection()
            if self._patient:
                self.client.be_patient()
        except BaseException:
            self._lock.release()
            raise
        return self.connection

    async def __aexit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        if exc_type is None or not issubclass(exc_type, asyncio.CancelledError):
            self._lock.release()
            return
        _out_of_reach(self._release_when_idle())

    async def _release_when_idle(self) -> None:
        try:
            with contextlib.suppress(ValueError):  # closed meanwhile
                await self.connection._execute(lambda: None)
        finally:
            self._lock.release()


class SafeSqliteClient(SqliteClient):
    """Be the Tortoise client of one SQLite connection with a thread of its own."""

    _on_thread_until_s = 0.0
    _is_patient = True

    def acquire_connection(self) -> _Held:
        return _Held(self._lock, self)

    def _in_transaction(self) -> _Context:
        return _Context(_Transaction(self), self._lock)

    async def create_connection(self, with_db: bool) -> None:
        await asyncio.shield(_out_of_reach(self._connect()))

    async def _connect(self) -> None:
        # As the stock client does it, but that the event loop may use the connection as well.
        connecting = aiosqlite.connect(self.filename, isolation_level=None, check_same_thread=False)
        # A connection that nobody closed, after a cancelled start say, must not keep its process from ending.
        connecting._thread.daemon = True
        connection = await connecting
        connection._conn.row_factory = sqlite3.Row
        try:
            for pragma, value in self.pragmas.items():
                await connection.execute(f"PRAGMA {pragma}={value}")
        except BaseException:
            await connection.close()
            raise
        self._connection, self._is_patient = connection, True

    @translate_exceptions
    async def execute_many(self, query: str, values: list[list[Any]]) -> None:
        await asyncio.shield(_out_of_reach(self.in_thread(lambda connection: _many(connection, query, values))))

    async def in_thread(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run `work(connection)` on the connection's thread, alone; must not be cancelled midway."""
        async with self.acquire_connection() as connection:
            # aiosqlite offers no public way to run a function of several statements in one hop;
            # `_execute` is what its own methods are made of.
            return await connection._execute(work, connection._conn)

    async def run_in_transaction(self, work: Callable[[sqlite3.Connection], T], *, aside: bool = False) -> T:
        """Run `work(connection)` in a transaction, alone; must not be cancelled midway.

        All of it runs on the connection's thread when it is to run `aside`.
        """
        async with _Held(self._lock, self, patient=False) as connection:
            raw = connection._conn
            if aside or time.monotonic() < self._on_thread_until_s:
                self.be_patient()
                return await connection._execute(_in_transaction, raw, work)
            if not self._begun_at_once(raw):
                self.be_patient()
                await connection._execute(raw.execute, "BEGIN IMMEDIATE")
            try:
                result = self._timed(work, raw)
                await connection._execute(raw.execute, "COMMIT")
            except BaseException:
                await connection._execute(_roll_back, raw)
                raise
            return result

    def be_patient(self) -> None:
        """Let the connection wait while another process writes; to be called by whoever holds it.

        One transaction after another begins at once or not at all, so that its patience stays as it was left.
        """
        if not self._is_patient:
            self._connection._conn.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
            self._is_patient = True

    def _begun_at_once(self, connection: sqlite3.Connection) -> bool:
        """Begin a transaction unless another process writes just now."""
        if self._is_patient:
            connection.execute("PRAGMA busy_timeout = 0")
            self._is_patient = False
        try:
            connection.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError as error:
            # The low byte is the error, the rest says which kind of it.
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:
                raise
            return False
        return True

    def _timed(self, work: Callable[[sqlite3.Connection], T], raw: sqlite3.Connection) -> T:
        began_s = time.monotonic()
        result = work(raw)
        ended_s = time.monotonic()
        if ended_s - began_s > HELD_UP_MAX_S:
            self._on_thread_until_s = ended_s + ON_THREAD_S
        return result


def _in_transaction(connection: sqlite3.Connection, work: Callable[[sqlite3.Connection], T]) -> T:
    connection.execute("BEGIN IMMEDIATE")
    try:
        result = work(connection)
        connection.execute("COMMIT")
    except BaseException:
        _roll_back(connection)
        raise
    return result


def _roll_back(connection: sqlite3.Connection) -> None:
    # A full disk or an I/O error may have rolled back already.
    if connection.in_transaction:
        connection.execute("ROLLBACK")


def _many(connection: sqlite3.Connection, query: str, values: list[list[Any]]) -> None:
    _in_transaction(connection, lambda held: held.executemany(query, values))


client_class = SafeSqliteClient
