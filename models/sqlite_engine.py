"""Tortoise's SQLite backend, made safe: what a cancelled request can never do to it.

The stock backend hangs for ever once a task is cancelled while it enters a transaction (it holds
the connection's lock and never gives it back), begins transactions that fail at once when two
processes write, and leaves a bulk insert's transaction open when cancelled. Here every transaction
begins with BEGIN IMMEDIATE, so that it waits for its turn, and begin, commit and roll back run in
tasks of their own that a cancellation cannot reach.

`in_thread` runs a whole function on the connection's thread in one hop, which is how the money
statements run (models/database.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import sqlite3
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

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
    """Hold the connection's lock; unlike the stock wrapper, give it back when the file cannot be opened."""

    async def __aenter__(self) -> Any:
        await self._lock.acquire()
        try:
            await self.ensure_connection()
        except BaseException:
            self._lock.release()
            raise
        return self.connection


class SafeSqliteClient(SqliteClient):
    """Be the Tortoise client of one SQLite connection with a thread of its own."""

    def acquire_connection(self) -> _Held:
        return _Held(self._lock, self)

    def _in_transaction(self) -> _Context:
        return _Context(_Transaction(self), self._lock)

    async def create_connection(self, with_db: bool) -> None:
        await asyncio.shield(_out_of_reach(super().create_connection(with_db)))

    @translate_exceptions
    async def execute_many(self, query: str, values: list[list[Any]]) -> None:
        await asyncio.shield(_out_of_reach(self.in_thread(lambda connection: _many(connection, query, values))))

    async def in_thread(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run `work(connection)` on the connection's thread, alone; must not be cancelled midway."""
        async with self.acquire_connection() as connection:
            # aiosqlite offers no public way to run a function of several statements in one hop;
            # `_execute` is what its own methods are made of.
            return await connection._execute(work, connection._conn)


def _many(connection: sqlite3.Connection, query: str, values: list[list[Any]]) -> None:
    connection.execute("BEGIN IMMEDIATE")
    try:
        connection.executemany(query, values)
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


client_class = SafeSqliteClient
