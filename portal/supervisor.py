"""The supervisor: it keeps the serving processes alive, and passes signals on.

It imports none of what serves: a second of every start, and the memory of another process, are better spent.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

from models.settings import Settings

CHILD_START_PAUSE_S = 1
CHILD_START_PAUSE_MAX_S = 30
CHILD_STOP_EXTRA_S = 15
EXIT_WEDGED = 70

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
            from prometheus_client import multiprocess  # noqa: PLC0415 - of use to several processes only

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
