"""The server: independent processes that share the port, a drain, and a watchdog.

`supervise` keeps `PROCESSES` children alive and passes signals on; `run_child` is one of them: our own
main around Hypercorn's `serve`, because Hypercorn's command line and its workers cut streams on stop.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

from hypercorn.asyncio import serve
from prometheus_client import multiprocess
from quart import Quart

from models.settings import Settings
from portal import connections
from portal.http1 import DatedConfig
from portal.slow_clients import limit_unread, note_cuts

KEEP_ALIVE_S = 75
CHILD_START_PAUSE_S = 1
CHILD_START_PAUSE_MAX_S = 30
CHILD_STOP_EXTRA_S = 15
WATCHDOG_S = 30
EXIT_WEDGED = 70
BACKLOG = 1024

_log = logging.getLogger("tollgate.server")


class AddressInUse(Exception):
    """Report that somebody else serves on the port."""


def supervise(settings: Settings, command: list[str]) -> int:
    """Run the children until a signal ends them; return the exit code.

    A child that dies is started again, after a pause that grows while it keeps dying. The children
    notice through a pipe when this process itself dies, and end in order.
    """
    listener = bound_socket(settings.host, settings.port)
    port = listener.getsockname()[1]
    alive_read, alive_write = os.pipe()
    environment = os.environ | {"PORT": str(port), "TOLLGATE_ALIVE_FD": str(alive_read)}
    metrics = None
    if settings.processes > 1:
        metrics = tempfile.TemporaryDirectory(prefix="tollgate-metrics-")
        environment["PROMETHEUS_MULTIPROC_DIR"] = metrics.name

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, env=environment, pass_fds=[alive_read])

    def ended(pid: int) -> None:
        if metrics is not None:
            multiprocess.mark_process_dead(pid, metrics.name)

    try:
        return _Supervisor([start] * settings.processes, ended, settings.drain_s).run()
    finally:
        os.close(alive_write)
        os.close(alive_read)
        listener.close()
        if metrics is not None:
            metrics.cleanup()


class _Supervisor:
    def __init__(
        self, starts: list[Callable[[], subprocess.Popen[bytes]]], ended: Callable[[int], None], drain_s: int
    ) -> None:
        self._starts = starts
        self._ended = ended
        self._drain_s = drain_s
        self._children: list[subprocess.Popen[bytes] | None] = [None] * len(starts)
        self._start_at_s = [0.0] * len(starts)
        self._pause_s = [float(CHILD_START_PAUSE_S)] * len(starts)
        self._stopping = False

    def run(self) -> int:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        signal.signal(signal.SIGHUP, self._pass_on)
        while not self._stopping:
            self._look_after_children()
            time.sleep(0.1)
        return self._wait()

    def _look_after_children(self) -> None:
        now = time.monotonic()
        for n, child in enumerate(self._children):
            if child is not None and child.poll() is not None:
                _log.error("process %d ended with code %s", child.pid, child.returncode)
                # What it ran when it died runs no longer, and is not to be counted for ever.
                self._ended(child.pid)
                self._children[n] = None
                self._start_at_s[n] = now + self._pause_s[n]
                self._pause_s[n] = min(self._pause_s[n] * 2, CHILD_START_PAUSE_MAX_S)
            elif child is None and now >= self._start_at_s[n] and not self._stopping:
                self._children[n] = self._starts[n]()
                self._start_at_s[n] = now
            elif child is not None and now - self._start_at_s[n] > 2 * CHILD_START_PAUSE_MAX_S:
                self._pause_s[n] = CHILD_START_PAUSE_S

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self._stopping = True

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self._signal(number)

    def _signal(self, number: int) -> None:
        for child in self._children:
            if child is not None and child.poll() is None:
                with suppress(ProcessLookupError):
                    child.send_signal(number)

    def _wait(self) -> int:
        self._signal(signal.SIGTERM)
        deadline = time.monotonic() + self._drain_s + CHILD_STOP_EXTRA_S
        code = 0
        for child in self._children:
            if child is None:
                continue
            try:
                ended = child.wait(max(deadline - time.monotonic(), 0.1))
                # One that had not come to mind its signals yet had no call either: it ended in order.
                code = max(code, 0 if ended == -signal.SIGTERM else abs(ended))
            except subprocess.TimeoutExpired:
                _log.error("process %d did not end in time", child.pid)
                child.kill()
                child.wait()
                code = EXIT_WEDGED
        return code


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


def bound_socket(host: str, port: int) -> socket.socket:
    """Return a socket bound to the address, to be shared with the other processes of this server.

    Raises AddressInUse when somebody else listens there, which sharing alone would not notice.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    shared = os.environ.get("TOLLGATE_ALIVE_FD") is not None
    if port and not shared:
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                raise AddressInUse(f"cannot listen on {host}:{port}: {error.strerror}") from error
    bound = socket.socket(family)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    bound.bind((host, port))
    return bound


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
