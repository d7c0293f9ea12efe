"""A Tollgate under test: real processes on a real port, before a scripted upstream."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

from models.database import REQUEST_DEADLINE_S, Database

T = TypeVar("T")
ROOT = Path(__file__).parent.parent
START_S = 60
PATIENCE_S = 30

# What the tests' house sells. The twin's tokens are words; prices are round, so that sums are read off.
CONFIGURATION = """
[service]
name = "Tollgate under test"

[upstreams.twin]
format = "openai"
base_url = "{twin}"
api_key = "twin-upstream-key-000111222333"

[upstreams.nobody]
format = "openai"
base_url = "http://127.0.0.1:9/v1"

[upstreams.demo]
format = "demo"

[[offers]]
id = "twin"
surface = "chat"
routes = [{{ upstream = "twin", model = "twin-1" }}]
context_tokens = 128000
max_output_tokens = 16000
price_usd = {{ input_per_million = "1", output_per_million = "10" }}

[[offers]]
id = "vendor/twin by call"
surface = "chat"
routes = [{{ upstream = "twin", model = "twin-2 近似" }}]
context_tokens = 128000
max_output_tokens = 16000
price_usd = {{ per_call = "0.01", input_per_million = "0", output_per_million = "0" }}

[[offers]]
id = "unreachable"
surface = "chat"
routes = [{{ upstream = "nobody", model = "nobody" }}]
context_tokens = 128000
max_output_tokens = 16000
price_usd = {{ per_call = "0.01", input_per_million = "0", output_per_million = "0" }}

[plans.free]
included_calls_per_month = 500
included_max_cost_usd = "0.02"
requests_per_minute = 20
surfaces = ["chat", "models"]

# Paid from the first call on, and nearly unlimited in rate: for tests of the wallet.
[plans.wallet]
included_calls_per_month = 0
requests_per_minute = 100000
concurrent_calls = 100000
included_max_cost_usd = "0.02"
surfaces = ["*"]

[plans.included]
included_calls_per_month = 500
requests_per_minute = 100000
concurrent_calls = 100000
included_max_cost_usd = "0.02"
surfaces = ["*"]

[plans.slow]
included_calls_per_month = 500
requests_per_minute = 3
included_max_cost_usd = "0.02"
surfaces = ["*"]

[plans.single]
included_calls_per_month = 500
requests_per_minute = 1000
concurrent_calls = 1
included_max_cost_usd = "0.02"
surfaces = ["*"]

[plans.mute]
included_calls_per_month = 500
requests_per_minute = 100
included_max_cost_usd = "0.02"
surfaces = ["models"]
"""


class House:
    """Run `python -m portal serve` on a free port, with a folder and a database of its own."""

    def __init__(
        self, folder: Path, database_url: str, twin_url: str, *, processes: int = 1, **environ: str
    ) -> None:
        self.folder = folder
        self.database_url = database_url
        self.port = free_port()
        self.base_url = f"http://127.0.0.1:{self.port}"
        self.log_path = folder / "server.log"
        folder.mkdir(parents=True, exist_ok=True)
        configuration = folder / "tollgate.toml"
        if not configuration.exists():
            configuration.write_text(CONFIGURATION.format(twin=twin_url))
        self.environ = {
            **{name: value for name, value in os.environ.items() if not name.endswith("_API_KEY")},
            "HOST": "127.0.0.1",
            "PORT": str(self.port),
            "PUBLIC_URL": self.base_url,
            "DATA_DIR": str(folder / "data"),
            "DATABASE_URL": database_url,
            "TOLLGATE_CONFIG": str(configuration),
            "PROCESSES": str(processes),
            "DRAIN_SECONDS": "20",
            # Everybody here comes from one address, Mallory too.
            "BAD_KEYS_PER_MINUTE": "1000000",
            "SIGN_UPS_PER_DOMAIN": "1000000",
            **environ,
        }
        self.process: subprocess.Popen[bytes] | None = None
        self._is_leaving = False

    def start(self) -> House:
        """Start and wait until it is ready. Raises RuntimeError with its log when it is not."""
        self._is_leaving = False
        with open(self.log_path, "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "portal", "serve"],
                cwd=ROOT, env=self.environ, stdout=log, stderr=log,
            )
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                break
            if self.status("/readyz") == 200 and len(self.children()) == int(self.environ["PROCESSES"]):
                return self
            time.sleep(0.05)
        raise RuntimeError(f"the house did not start:\n{self.log()}")

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command of the same house: `house.command("audit", "--full")`."""
        return subprocess.run(
            [sys.executable, "-m", "portal", *arguments], cwd=ROOT, env=self.environ, text=True,
            capture_output=True, timeout=120, check=False,
        )

    def status(self, path: str) -> int:
        """Return the status of a GET, 0 when nobody answers."""
        try:
            with urllib.request.urlopen(self.base_url + path, timeout=5) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    def children(self) -> list[int]:
        """Return the process ids of the serving children that listen already."""
        if self.process is None:
            return []
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        started = self.log().count("Running on http")
        children = [int(pid) for pid in path.read_text().split()] if path.exists() else []
        return children[:started]

    def abandoned_connections(self) -> int:
        """Return how many of its connections were closed by their clients alone."""
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        close_wait = "08"
        return sum(row[1].endswith(f":{self.port:04X}") and row[3] == close_wait for row in rows)

    def log(self) -> str:
        """Return everything the house has printed."""
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def log_lines(self) -> list[dict[str, object]]:
        """Return the lines of the log that are JSON."""
        return [json.loads(line) for line in self.log().splitlines() if line.startswith("{")]

    def signal(self, number: int) -> None:
        """Send a signal to the supervisor."""
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        """Kill every process of the house at once, as a power cut would."""
        assert self.process is not None
        for pid in [*self.children(), self.process.pid]:
            os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def leave(self) -> None:
        """Ask the house to end, and do not wait for it."""
        if self.process is not None and self.process.poll() is None and not self._is_leaving:
            self.process.terminate()
            self._is_leaving = True

    def stop(self) -> int:
        """End the house in order and return its exit code."""
        if self.process is None:
            return 0
        if self.process.poll() is None:
            self.leave()
            try:
                self.process.wait(40)
            except subprocess.TimeoutExpired:
                self.kill()
        code = self.process.returncode
        self.process = None
        return code


class Houses:
    """Keep the houses that several tests share, each under a name, until all of them are stopped."""

    def __init__(
        self, new_folder: Callable[[str], Path], new_database: Callable[[str], Awaitable[str]], twin_url: str
    ) -> None:
        self._new_folder, self._new_database, self._twin_url = new_folder, new_database, twin_url
        self._running: dict[tuple[str, str], House] = {}

    async def named(self, name: str, database_kind: str, *, processes: int = 1, **environ: str) -> House:
        """Return the house of a name before a kind of database; who asks for it first starts it."""
        if (name, database_kind) not in self._running:
            url = await self._new_database(database_kind)
            house = House(self._new_folder(name), url, self._twin_url, processes=processes, **environ)
            self._running[name, database_kind] = house.start()
        return self._running[name, database_kind]

    def stop(self) -> None:
        """End all of them, side by side."""
        for house in self._running.values():
            house.leave()
        for house in self._running.values():
            house.stop()


class PatientDatabase(Database):
    """Be a database that may take longer than a request waits for one: a busy machine is no finding of a test.

    Whoever names a time of his own gets it.
    """

    async def wait(self, task: asyncio.Future[T], deadline_s: float) -> T:
        """Wait for an owned task."""
        return await super().wait(task, PATIENCE_S if deadline_s == REQUEST_DEADLINE_S else deadline_s)


@asynccontextmanager
async def books_at(url: str) -> AsyncIterator[Database]:
    """Open a database."""
    books = PatientDatabase(url)
    await books.open()
    try:
        yield books
    finally:
        await books.close()


@asynccontextmanager
async def books_of(house: House) -> AsyncIterator[Database]:
    """Open a house's database beside it."""
    async with books_at(house.database_url) as books:
        yield books


async def until(condition: Callable[[], Awaitable[bool]], within_s: float = 30) -> None:
    """Wait until something is true."""
    deadline = time.monotonic() + within_s
    while not await condition():
        assert time.monotonic() < deadline, "it did not become true in time"
        await asyncio.sleep(0.05)


def free_port() -> int:
    """Return a port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
