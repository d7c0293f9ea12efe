"""The server's life: drain, kill, restart, reload, and two that want one port."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import aiohttp
import pytest

from models import wallet
from tests.cast import Actor, enter
from tests.chaos.test_drain import until_open
from tests.house import ROOT, House, books_of, until

CREDIT = 1_000_000


@pytest.fixture
async def own_house(database_kind: str, new_database, twin: str, tmp_path: Path) -> AsyncIterator[House]:
    """Give a Tollgate that a test may end as it likes; not started yet."""
    house = House(tmp_path, await new_database(database_kind), twin)
    yield house
    if house.process is not None and house.process.poll() is None:
        house.kill()


async def newcomer(house: House) -> Actor:
    """Enter somebody with credit into a house's books."""
    async with books_of(house) as books:
        return await enter(books, plan="wallet", credit_microusd=CREDIT)


def streamed(text: str) -> dict[str, object]:
    """Return a streamed request."""
    return {"model": "twin", "stream": True, "max_tokens": 200, "messages": [{"role": "user", "content": text}]}


async def read_stream(session: aiohttp.ClientSession, house: House, actor: Actor, text: str) -> str:
    """Return everything a stream delivered, also when it was cut."""
    collected = b""
    with suppress(aiohttp.ClientError):
        async with session.post(
            f"{house.base_url}/v1/chat/completions", json=streamed(text), headers=actor.headers
        ) as answer:
            async for piece in answer.content.iter_any():
                collected += piece
    return collected.decode()


def last_event(stream: str) -> str:
    """Return the data of a stream's last event."""
    return stream.rstrip("\n").rpartition("data: ")[2]


async def assert_nothing_is_held(house: House, actor: Actor) -> None:
    """All holds are given back, and the whole books add up."""
    async with books_of(house) as books:
        assert (await wallet.balance(books, actor.account.id)).held == 0
    audit = house.command("audit", "--full")
    assert audit.returncode == 0, audit.stdout + audit.stderr


async def test_a_drain_lets_streams_finish_and_turns_new_calls_away(
    own_house: House, http: aiohttp.ClientSession
) -> None:
    house = own_house.start()
    alice = await newcomer(house)
    streams = [
        asyncio.create_task(read_stream(http, house, alice, f"tokens:{20 + n} pace:0.15")) for n in range(10)
    ]
    async with books_of(house) as books:
        await until_open(books, 10)
    house.signal(signal.SIGTERM)

    async def drains() -> bool:
        return house.status("/readyz") == 503

    await until(drains)
    async with http.post(
        f"{house.base_url}/v1/chat/completions", json=streamed("say:late"), headers=alice.headers
    ) as answer:
        assert answer.status == 503 and "retry-after" in answer.headers
        assert (await answer.json())["error"]["code"] == "service_unavailable"
    assert house.status("/readyz") == 503 and house.status("/healthz") == 200
    house.signal(signal.SIGTERM)  # a second one does not shorten it
    assert {last_event(stream) for stream in await asyncio.gather(*streams)} == {"[DONE]"}
    assert house.stop() == 0
    await assert_nothing_is_held(house, alice)


async def test_a_drain_ends_what_takes_too_long_with_an_error_frame_and_a_bill(
    own_house: House, http: aiohttp.ClientSession
) -> None:
    own_house.environ["DRAIN_SECONDS"] = "1"
    house = own_house.start()
    alice = await newcomer(house)
    streams = [asyncio.create_task(read_stream(http, house, alice, "tokens:150 pace:0.2")) for _ in range(5)]
    async with books_of(house) as books:
        await until_open(books, 5)
    await asyncio.sleep(1)
    began = time.monotonic()
    assert house.stop() == 0
    assert time.monotonic() - began < 10
    for stream in await asyncio.gather(*streams):
        error = json.loads(last_event(stream))["error"]
        assert error["code"] == "service_unavailable" and error["request_id"].startswith("req_")
    async with books_of(house) as books:
        rows = await books.fetch(
            "SELECT state, status, output_tokens, charged_microusd FROM calls WHERE account_id = ?",
            (alice.account.id,),
        )
    assert len(rows) == 5
    for state, status, tokens, charged in rows:
        assert (state, status) == ("settled", 503) and 3 <= tokens <= 20 and charged > tokens * 10
    await assert_nothing_is_held(house, alice)


async def test_kill_nine_leaves_checkpoints_that_a_restart_settles_at_once(
    own_house: House, http: aiohttp.ClientSession
) -> None:
    house = own_house.start()
    alice = await newcomer(house)
    streams = [asyncio.create_task(read_stream(http, house, alice, "tokens:150 pace:0.1")) for _ in range(8)]
    waiting = asyncio.create_task(read_stream(http, house, alice, "delay:60"))
    await asyncio.sleep(4.5)
    house.kill()
    delivered = [stream.count('"content":"') for stream in await asyncio.gather(*streams)]
    await waiting
    async with books_of(house) as books:
        assert (await wallet.balance(books, alice.account.id)).held > 0
    house.start()
    async with books_of(house) as books:
        rows = await books.fetch(
            "SELECT state, output_tokens FROM calls WHERE account_id = ? ORDER BY output_tokens",
            (alice.account.id,),
        )
    assert [row["state"] for row in rows] == ["released"] + ["expired"] * 8
    # Charged for what was certainly delivered: never more, and short of it by no more than 2 s of stream.
    for tokens, came in zip(sorted(row["output_tokens"] for row in rows)[1:], sorted(delivered), strict=True):
        assert came - 40 <= tokens <= came
    await assert_nothing_is_held(house, alice)
    assert house.stop() == 0


async def test_a_dead_process_is_replaced_and_its_neighbours_settle_for_it(
    own_house: House, http: aiohttp.ClientSession
) -> None:
    own_house.environ["PROCESSES"] = "2"
    house = own_house.start()
    alice = await newcomer(house)
    before = house.children()
    streams = [asyncio.create_task(read_stream(http, house, alice, "tokens:100 pace:0.1")) for _ in range(12)]
    await asyncio.sleep(3)
    os.kill(before[0], signal.SIGKILL)
    endings = [last_event(stream) for stream in await asyncio.gather(*streams)]
    assert "[DONE]" in endings, "the other process goes on"
    deadline = time.monotonic() + 40
    async with books_of(house) as books:
        while (await wallet.balance(books, alice.account.id)).held:
            assert time.monotonic() < deadline, "the hold of a dead process was not freed"
            await asyncio.sleep(0.5)
    assert len(house.children()) == 2 and house.children() != before
    async with http.get(f"{house.base_url}/metrics") as answer:
        assert "\ntollgate_calls_running 0.0\n" in await answer.text(), "nothing that died is counted as running"
    assert house.stop() == 0
    await assert_nothing_is_held(house, alice)


async def test_children_end_in_order_when_their_supervisor_is_killed(own_house: House) -> None:
    house = own_house.start()
    child = house.children()[0]
    os.kill(house.process.pid, signal.SIGKILL)
    house.process.wait()
    deadline = time.monotonic() + 10
    while Path(f"/proc/{child}").exists():
        assert time.monotonic() < deadline, "the child outlived its supervisor"
        await asyncio.sleep(0.1)
    async with books_of(house) as books:
        assert not await books.fetch("SELECT id FROM processes"), "it signed off"


async def test_a_second_server_on_the_port_says_so(house: House) -> None:
    other = subprocess.run(
        [sys.executable, "-m", "portal", "serve"], cwd=ROOT, env=house.environ, capture_output=True, text=True,
        timeout=20, check=False,
    )
    assert other.returncode == 2
    assert f"cannot listen on 127.0.0.1:{house.port}" in other.stderr


async def test_a_hangup_reloads_the_configuration_and_keeps_it_when_it_is_wrong(
    own_house: House, http: aiohttp.ClientSession
) -> None:
    house = own_house.start()
    alice = await newcomer(house)
    path = Path(house.environ["TOLLGATE_CONFIG"])
    good = path.read_text()

    async def offered() -> set[str]:
        async with http.get(f"{house.base_url}/v1/models", headers=alice.headers) as answer:
            return {model["id"] for model in (await answer.json())["data"]}

    before = await offered()
    path.write_text(good.replace('id = "twin"', 'id = "twin-renamed"'))
    house.signal(signal.SIGHUP)

    async def changed() -> bool:
        return await offered() != before

    await until(changed)
    after = await offered()
    assert after == before - {"twin"} | {"twin-renamed"}
    path.write_text(good.replace('surface = "chat"', 'surface = "smoke signals"'))
    house.signal(signal.SIGHUP)

    async def refused() -> bool:
        return "smoke signals" in house.log()

    await until(refused)
    assert await offered() == after


def test_a_child_that_is_stopped_before_it_minds_signals_ended_in_order(tmp_path: Path) -> None:
    program = (
        "import signal, subprocess, sys\n"
        "from models.settings import read_settings\n"
        "from portal import supervisor\n"
        "deaf = [sys.executable, '-c', 'import time; print(1, flush=True); time.sleep(60)']\n"
        "sys.exit(supervisor.supervise(read_settings({'PORT': sys.argv[2], 'DATA_DIR': sys.argv[1]}), deaf))\n"
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    supervisor = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path), str(port)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert supervisor.stdout.readline() == "1\n"
    supervisor.terminate()
    assert supervisor.wait(20) == 0


def test_a_wedged_event_loop_ends_its_process() -> None:
    program = (
        "import time\n"
        "from portal import server\n"
        "server.WATCHDOG_S = 0.6\n"
        "beaten = time.monotonic()\n"
        "server._start_watchdog(lambda: beaten)\n"
        "time.sleep(20)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=15)
    assert ended.returncode == 70
    assert "has not moved" in ended.stderr and "File" in ended.stderr


async def test_every_request_has_its_line_in_the_log_and_no_secret_is_in_it(
    house: House, alice: Actor, http: aiohttp.ClientSession
) -> None:
    async with http.get(f"{house.base_url}/v1/balance?key={alice.key}", headers=alice.headers) as answer:
        request_id = answer.headers["x-request-id"]
    asked = {"model": "twin", "messages": [{"role": "user", "content": "status:500"}]}
    async with http.post(f"{house.base_url}/v1/chat/completions", json=asked, headers=alice.headers) as answer:
        failed_id = answer.headers["x-request-id"]
    lines = house.log_lines()
    line = next(line for line in lines if line.get("request_id") == request_id)
    assert (line["method"], line["path"], line["status"]) == ("GET", "/v1/balance", 400)
    assert any(line.get("request_id") == failed_id and "upstream" in line["message"] for line in lines)
    assert alice.key not in house.log()
    assert "twin-upstream-key" not in house.log() and "sk-provider-secret" not in house.log()


def test_metrics_are_for_this_machine(house: House) -> None:
    assert house.status("/metrics") == 200
