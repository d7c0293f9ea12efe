"""Processes: who is alive, told by a lock at once or by silence in time."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from models import process
from models.clock import now_ms
from models.process import Process, host_of

ROOT = Path(__file__).resolve().parents[2]
NEIGHBOUR = textwrap.dedent("""
    import sys
    from pathlib import Path
    from models.process import Process
    own = Process(Path(sys.argv[1]))
    own.start()
    print(own.id, own.host, flush=True)
    sys.stdin.read()
    own.stop()
""")


def neighbour(folder):
    running = subprocess.Popen(
        [sys.executable, "-c", NEIGHBOUR, folder], cwd=ROOT, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )
    name, host = running.stdout.readline().split()
    return running, name, host


def test_a_killed_neighbour_is_known_to_be_gone_at_once(tmp_path):
    own = Process(tmp_path)
    own.start()
    running, name, host = neighbour(tmp_path)
    assert host == own.host
    assert own.dead_neighbours({name, own.id}) == []
    running.kill()
    running.wait()
    assert own.dead_neighbours({name, own.id}) == [name]
    assert not (tmp_path / "processes" / name).exists()
    assert own.dead_neighbours({name}) == [name]  # also when somebody else has cleared it away
    own.stop()


def test_a_neighbour_that_left_in_order_leaves_no_lock(tmp_path):
    own = Process(tmp_path)
    own.start()
    running, name, _ = neighbour(tmp_path)
    running.communicate("")
    assert running.returncode == 0
    assert {path.name for path in (tmp_path / "processes").iterdir()} == {own.id}
    own.stop()
    own.stop()
    assert list((tmp_path / "processes").iterdir()) == []


def test_a_process_never_takes_itself_for_dead(tmp_path):
    own = Process(tmp_path)
    assert own.dead_neighbours({own.id}) == []


def test_hosts_are_told_apart_by_machine_and_folder(tmp_path):
    assert host_of(tmp_path / "a") == host_of(tmp_path / "a") != host_of(tmp_path / "b")


def test_processes_that_start_together_agree_on_their_host(tmp_path):
    for n in range(50):
        with ThreadPoolExecutor(8) as threads:
            names = set(threads.map(lambda _, n=n: host_of(tmp_path / str(n)), range(8)))
        assert len(names) == 1
        assert names.pop().rpartition("/")[2].startswith("hst_")
        assert [path.name for path in (tmp_path / str(n)).iterdir()] == ["host"]


async def test_a_beat_is_by_the_database_s_clock(books, tmp_path):
    own = Process(tmp_path)
    await books.run(lambda: process.beat(books, own))
    (row,) = await books.fetch("SELECT * FROM processes")
    assert (row["id"], row["host"]) == (own.id, own.host)
    assert abs(row["heartbeat_at_ms"] - now_ms()) < 2000

    def long_ago():
        yield "UPDATE processes SET heartbeat_at_ms = 5, started_at_ms = 5", ()

    await books.run(long_ago)
    await books.run(lambda: process.beat(books, own))
    (row,) = await books.fetch("SELECT * FROM processes")
    assert row["started_at_ms"] == 5
    assert abs(row["heartbeat_at_ms"] - now_ms()) < 2000


async def test_processes_of_a_host(books, tmp_path):
    here, there = Process(tmp_path / "here"), Process(tmp_path / "there")
    for one in (here, there):
        await books.run(lambda one=one: process.beat(books, one))
    assert await process.of_host(books, here.host) == {here.id}
    await books.run(lambda: process.leave(here.id))
    assert await process.of_host(books, here.host) == set()
    assert await process.of_host(books, there.host) == {there.id}


async def test_only_processes_long_silent_that_own_nothing_are_forgotten(books):
    def fill():
        for name, age_ms in (("old", 2), ("old owner", 2), ("young", 0)):
            at = f"{books.now_ms_sql} - {age_ms * process.FORGOTTEN_MS}"
            yield (
                f"INSERT INTO processes (id, host, heartbeat_at_ms, started_at_ms) VALUES (?, 'h', {at}, {at})",
                (name,),
            )
        yield (
            "INSERT INTO calls (id, account_id, key_id, surface, path, offer, state, owner, created_at_ms)"
            " VALUES ('req_1', 'a', 'k', 's', 'p', 'o', 'open', 'old owner', 0)",
            (),
        )

    await books.run(fill)
    await books.run(lambda: process.prune(books))
    assert {row[0] for row in await books.fetch("SELECT id FROM processes")} == {"old owner", "young"}
