"""The server: one of the processes that share the port, with a drain and a watchdog.

`serve_child` is our own main around Hypercorn's `serve`, because Hypercorn's command line and its workers cut
streams on stop.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from hypercorn.asyncio import serve
from quart import Quart

from models.settings import Settings
from portal import connections, http1
from portal.app import create_app, edge_policy
from portal.http1 import DatedConfig
from portal.slow_clients import limit_unread, note_cuts
from portal.supervisor import EXIT_WEDGED, bound_socket

KEEP_ALIVE_S = 75
WATCHDOG_S = 30
BACKLOG = 1024

_log = logging.getLogger("tollgate.server")


def serve_child(settings: Settings) -> None:
    """Serve in this process until told to stop."""
    app = create_app(settings)
    http1.install(edge_policy(settings).refusal)
    tollgate = app.extensions["tollgate"]
    tollgate.loops.moved()
    run_child(
        app, settings,
        drain=lambda: tollgate.gateway.drain(settings.drain_s),
        reload=tollgate.reload,
        beaten_at_s=lambda: tollgate.loops.beaten_at_s,
    )


def run_child(
    app: Quart, settings: Settings, *, drain: Callable[[], object], reload: Callable[[], None],
    beaten_at_s: Callable[[], float],
) -> None:
    """Serve until told to stop: take no new calls, finish the running ones, close the database last."""
    _allow_many_descriptors()
    listener = bound_socket(settings.host, settings.port)
    limit_unread(listener, settings.client_timeout_s)
    asyncio.run(_serve(app, settings, listener, drain, reload, beaten_at_s))


async def _serve(
    app: Quart, settings: Settings, listener: socket.socket, drain: Callable[[], object],
    reload: Callable[[], None], beaten_at_s: Callable[[], float],
) -> None:
    loop = asyncio.get_running_loop()
    note_cuts(loop)
    stop = asyncio.Event()
    # Not by `loop.add_signal_handler`: that gives the signals back to the system when the loop closes, and
    # one that comes then (a terminal sends its own beside the supervisor's) would kill an orderly exit.
    for number in (signal.SIGTERM, signal.SIGINT):
        # Once set it stays set: a second signal does not shorten the drain.
        signal.signal(number, lambda *_: _soon(loop, stop.set))
    signal.signal(signal.SIGHUP, lambda *_: _soon(loop, reload))
    _end_with_parent(loop, stop)
    _start_watchdog(beaten_at_s)

    async def stopped() -> None:
        await stop.wait()
        await drain()

    config = DatedConfig()
    config.bind = [f"fd://{listener.detach()}"]
    config.backlog = BACKLOG
    config.keep_alive_timeout = KEEP_ALIVE_S
    config.graceful_timeout = 5
    config.include_server_header = False
    config.accesslog = None
    config.errorlog = logging.getLogger("hypercorn.error")
    connections.install(KEEP_ALIVE_S, settings.client_timeout_s)
    # Not the framework's object, which would only pass everything on.
    await serve(app.asgi_app, config, shutdown_trigger=stopped)


def _allow_many_descriptors() -> None:
    """Use what the system allows: the usual 1,024 are gone with 500 streams, which have two connections each."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _soon(loop: asyncio.AbstractEventLoop, action: Callable[[], None]) -> None:
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(action)


def _end_with_parent(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    """Stop when the supervisor dies: its end of the pipe closes then."""
    descriptor = os.environ.get("TOLLGATE_ALIVE_FD")
    if descriptor is None:
        return

    def parent_is_gone() -> None:
        loop.remove_reader(int(descriptor))
        _log.error("the supervisor is gone; ending in order")
        stop.set()

    loop.add_reader(int(descriptor), parent_is_gone)


def _start_watchdog(beaten_at_s: Callable[[], float]) -> None:
    """End a process whose event loop has not moved for half a minute; its supervisor starts another."""

    def watch() -> None:
        while True:
            time.sleep(WATCHDOG_S / 6)
            if time.monotonic() - beaten_at_s() > WATCHDOG_S:
                sys.stderr.write("the event loop has not moved for too long; ending this process\n")
                faulthandler.dump_traceback(file=sys.stderr)
                os._exit(EXIT_WEDGED)

    threading.Thread(target=watch, name="watchdog", daemon=True).start()
