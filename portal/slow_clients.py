"""Clients that stop reading: cut by the kernel, which alone sees whether their side takes bytes.

A client that stays connected but does not read holds up its answer, the upstream behind it and the money
set aside for it. From inside, a write that waits for such a client looks like one that waits for a slow
but honest one, and closing its connection would wait for the very bytes it does not take. So the limit
is the socket's: past it the kernel drops the connection, the server sees a client that left, and the
call ends like every call whose client left.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from typing import Any

# What waits in the kernel for one client. Left to itself the kernel takes 4 MB, thousands of tokens
# that would be paid for and never read.
UNSENT_BYTES_MAX = 128 << 10

_log = logging.getLogger("tollgate.server")


def limit_unread(listener: socket.socket, timeout_s: int) -> None:
    """Let the connections of a listener end when their client takes no byte of what waits for so long.

    Also bounds what waits. Where the system has no such limits (macOS), a stream's own time limit is
    all there is.
    """
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_s * 1000)
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES_MAX)


def note_cuts(loop: asyncio.AbstractEventLoop) -> None:
    """Log a connection that was cut in one line; Hypercorn lets such ends through as errors of its own."""

    def note(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, OSError) and error.errno == errno.ETIMEDOUT:
            _log.info("a client that took nothing any more was cut")
        elif not isinstance(error, asyncio.CancelledError):  # which ends what is left open after a drain
            loop.default_exception_handler(context)

    loop.set_exception_handler(note)
