"""Processes: who owns the open calls, and whether it still lives.

Each process beats every 5 s by the database's clock. On the same host a lock on a file tells at
once whether a process is gone; elsewhere its silence does.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from pathlib import Path
from typing import IO

from models import ids
from models.database import Database, Script

BEAT_S = 5
SILENT_MS = 30_000
FORGOTTEN_MS = 24 * 3600 * 1000


class Process:
    """Be one running process: an id, and a lock that the system frees when it dies."""

    def __init__(self, data_dir: Path) -> None:
        self.id = ids.new_id("prc")
        self.host = host_of(data_dir)
        self._folder = data_dir / "processes"
        self._lock: IO[str] | None = None

    def start(self) -> None:
        """Take the lock."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._lock = open(self._folder / self.id, "w")  # noqa: SIM115 - held for the process's life
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def stop(self) -> None:
        """Give the lock back."""
        if self._lock is not None:
            with contextlib.suppress(OSError):
                (self._folder / self.id).unlink()
            self._lock.close()
            self._lock = None

    def dead_neighbours(self, among: set[str]) -> list[str]:
        """Return those of the given processes of this host that are certainly gone."""
        return [process_id for process_id in among if process_id != self.id and self._is_gone(process_id)]

    def _is_gone(self, process_id: str) -> bool:
        path = self._folder / process_id
        try:
            with open(path) as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        with contextlib.suppress(OSError):
            path.unlink()
        return True


def host_of(data_dir: Path) -> str:
    """Return a name for this machine and data folder: processes that share it see each other's locks."""
    path = data_dir / "host"
    if not path.exists():
        # Written apart and linked, so that no neighbour that starts with us reads half a name.
        data_dir.mkdir(parents=True, exist_ok=True)
        draft = data_dir / ids.new_id("hst")
        draft.write_text(draft.name)
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
        draft.unlink()
    return f"{socket.gethostname()}/{path.read_text()}"


def beat(database: Database, process: Process) -> Script[None]:
    """Say that a process lives. The first beat also writes it down."""
    now = database.now_ms_sql
    yield (
        f"INSERT INTO processes (id, host, heartbeat_at_ms, started_at_ms) VALUES (?, ?, {now}, {now})"
        f" ON CONFLICT (id) DO UPDATE SET heartbeat_at_ms = {now}",
        (process.id, process.host),
    )


def leave(process_id: str) -> Script[None]:
    """Strike a process off that has ended in order."""
    yield ("DELETE FROM processes WHERE id = ?", (process_id,))


async def of_host(database: Database, host: str) -> set[str]:
    """Return the ids of the processes written down for a host."""
    return {row["id"] for row in await database.fetch("SELECT id FROM processes WHERE host = ?", (host,))}


def prune(database: Database) -> Script[None]:
    """Forget processes that have been silent for a day and own nothing."""
    yield (
        f"DELETE FROM processes WHERE heartbeat_at_ms < {database.now_ms_sql} - {FORGOTTEN_MS}"
        " AND NOT EXISTS (SELECT 1 FROM calls WHERE owner = processes.id AND state = 'open')",
        (),
    )
