"""Connections as we keep them: Hypercorn's own, but for how they wait between two requests.

Hypercorn starts a task for every wait and cancels it at the next request, which takes as long as the
request's own look at its key. Here a connection is noted down when it begins to wait, and one task looks
after all of them. There is no switch for it, so `Connection` stands in the place of Hypercorn's class.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from hypercorn.asyncio import run
from hypercorn.asyncio.tcp_server import TCPServer
from hypercorn.asyncio.worker_context import WorkerContext
from hypercorn.events import Closed, Event, RawData

LOOK_S = 1
READ_BYTES_MAX = 1 << 16

_log = logging.getLogger("tollgate.server")


def install(keep_alive_s: float, head_s: float) -> None:
    """Let Hypercorn keep its connections by this module.

    A connection may wait `keep_alive_s` for its next request, whose head must then be whole within `head_s`.
    """
    run.TCPServer = partial(Connection, idle=Idle(keep_alive_s, head_s))


class Connection(TCPServer):
    """Serve one connection."""

    def __init__(self, *arguments: Any, idle: Idle) -> None:
        super().__init__(*arguments)
        self._idle = idle
        self.idle_task = _Wait(self, idle)

    async def run(self) -> None:
        """Serve until the client or we have had enough."""
        self._idle.watch(self.context)
        await super().run()

    async def protocol_send(self, event: Event | bytes) -> None:
        """Send what the protocol gives. A client that has left, or was cut, is told to the protocol alone."""
        data = event.data if isinstance(event, RawData) else event
        if not isinstance(data, bytes):
            await super().protocol_send(event)
            return
        async with self.send_lock:
            try:
                self.writer.write(data)
                if not self._is_sent():
                    await self.writer.drain()
            except (OSError, RuntimeError):
                # Hypercorn knows those that close; one that the kernel cuts for taking nothing is a time-out.
                await self.protocol.handle(Closed())

    def _is_sent(self) -> bool:
        """Return whether all has gone, so that there is nothing that `drain` could wait for or tell."""
        transport = self.writer.transport
        return (
            not transport.get_write_buffer_size() and not transport.is_closing() and self.reader.exception() is None
        )

    async def _read_data(self) -> None:
        # As Hypercorn does it, but that a head is noted when it begins.
        while not self.reader.at_eof():
            try:
                data = await self.reader.read(READ_BYTES_MAX)
            except (OSError, TimeoutError):
                break
            await self.protocol.handle(RawData(data))
            self._idle.note_head(self)
        await self.protocol.handle(Closed())

    async def close_idle(self) -> None:
        """Close a connection that waits for its next request."""
        await self._initiate_server_close()


class Idle:
    """Close the connections that wait too long for their next request, and all that wait when the server stops."""

    def __init__(self, keep_alive_s: float, head_s: float) -> None:
        self._keep_alive_s = keep_alive_s
        self._head_s = head_s
        # Since when each has waited, and since when its next request has been coming; the last to begin last.
        self._since_s: dict[Connection, float] = {}
        self._coming_s: dict[Connection, float] = {}
        self._watcher: asyncio.Task[None] | None = None

    def note(self, connection: Connection) -> None:
        """Note that a connection waits from now on."""
        self.forget(connection)
        self._since_s[connection] = asyncio.get_running_loop().time()

    def note_head(self, connection: Connection) -> None:
        """Note that a connection that waits has sent something."""
        if connection in self._since_s and connection not in self._coming_s:
            self._coming_s[connection] = asyncio.get_running_loop().time()

    def forget(self, connection: Connection) -> None:
        """Note that a connection waits no more."""
        self._since_s.pop(connection, None)
        self._coming_s.pop(connection, None)

    def watch(self, context: WorkerContext) -> None:
        """See to it that somebody looks after the connections of a server."""
        if self._watcher is None or self._watcher.done():
            self._watcher = asyncio.create_task(self._watch(context))

    async def _watch(self, context: WorkerContext) -> None:
        stopping = asyncio.create_task(context.terminated.wait())
        while not stopping.done():
            await asyncio.wait((stopping,), timeout=LOOK_S)
            now_s = asyncio.get_running_loop().time()
            await self._close_overdue(self._coming_s, now_s - self._head_s)
            await self._close_overdue(self._since_s, now_s if stopping.done() else now_s - self._keep_alive_s)
        # What is busy now waits no more once it has answered: Hypercorn closes it then.

    async def _close_overdue(self, since_s: dict[Connection, float], due_s: float) -> None:
        while since_s:
            connection, began_s = next(iter(since_s.items()))
            if began_s > due_s:
                return
            self.forget(connection)
            try:
                await connection.close_idle()
            except Exception:
                _log.exception("an idle connection could not be closed")


class _Wait:
    """Be what Hypercorn takes for a connection's idle task."""

    def __init__(self, connection: Connection, idle: Idle) -> None:
        self.idle = idle
        self._connection = connection

    async def restart(self, _task_group: Any, _action: Callable[[], Any]) -> None:
        self.idle.note(self._connection)

    async def stop(self) -> None:
        self.idle.forget(self._connection)
