"""Tortoise's asyncpg backend, made safe: a transaction that cannot begin gives its connection back.

The stock backend takes a connection from the pool and forgets it when BEGIN fails or is cancelled:
after ten such (a restarted server, clients that leave) the pool is empty for ever.
"""

from __future__ import annotations

from typing import Any

import asyncpg
from tortoise.backends.asyncpg.client import AsyncpgDBClient, TransactionWrapper
from tortoise.backends.base.client import TransactionContextPooled


class _Context(TransactionContextPooled):
    async def __aenter__(self) -> Any:
        try:
            return await super().__aenter__()
        except BaseException:
            if self.client._connection is not None:
                await self.client._parent._pool.release(self.client._connection)
            raise


class SafeAsyncpgClient(AsyncpgDBClient):
    """Be the Tortoise client of a pool of PostgreSQL connections."""

    async def create_pool(self, **kwargs: Any) -> asyncpg.Pool:
        """Make the pool, whose connections are given back without a round trip to reset them."""
        return await asyncpg.create_pool(None, reset=_keep, **kwargs)

    def _in_transaction(self) -> _Context:
        return _Context(TransactionWrapper(self), self._pool_init_lock)


async def _keep(_: asyncpg.Connection) -> None:
    """Leave a connection as it is: nobody here sets, listens or locks beyond a transaction's end.

    An open transaction is rolled back before this is asked.
    """


client_class = SafeAsyncpgClient
