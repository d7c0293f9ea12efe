"""SIGTERM under thirty open answers: each ends well-formed and billed, and nothing new is taken."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter

import aiohttp
import pytest

from models.database import Database
from models.ids import new_id
from tests.chaos.history import Ending, History, Told, assert_books_agree, until_nothing_is_held
from tests.chaos.load import Load, asking
from tests.chaos.sizes import DRAIN_S, DRAINED_STREAMS
from tests.house import House

# What may come on top of the drain: writing the last outcomes, closing what is idle, ending the processes.
EXIT_EXTRA_S = 15
TOKENS = 40


@pytest.fixture
async def started(trio: House) -> House:
    """Give the trio, serving, with a limit to its drain that some streams keep and some do not."""
    trio.environ["DRAIN_SECONDS"] = str(DRAIN_S)
    return trio.start()


async def test_a_drain_ends_thirty_streams_in_order(
    started: House, trio_books: Database, chance: random.Random, figure
) -> None:
    history = History()
    load = await Load(started, history, chance=chance, moment="drained").prepare(trio_books)
    # From those that end soon to those that the drain's limit must cut, and one that has not said a word by then.
    lengths_s = [DRAIN_S * (0.3 + 1.3 * n / DRAINED_STREAMS) for n in range(DRAINED_STREAMS - 1)]
    words = [f"tokens:{TOKENS} pace:{length_s / TOKENS:.3f}" for length_s in lengths_s] + [f"delay:{DRAIN_S + 20}"]
    calls = [
        asyncio.create_task(load.call(load.payer, asking(True, text), new_id("try") if n % 5 == 0 else None))
        for n, text in enumerate(words)
    ]
    await until_open(trio_books, DRAINED_STREAMS)
    assert started.process is not None
    started.signal(signal.SIGTERM)
    began = time.monotonic()
    turned_away = asyncio.create_task(knock(started, load))
    await asyncio.sleep(DRAIN_S / 3)
    # A second one does not shorten it; a terminal sends it to every process itself.
    for pid in [started.process.pid, *started.children()]:
        os.kill(pid, signal.SIGTERM)
    told = await asyncio.gather(*calls)
    code = await asyncio.to_thread(started.process.wait, DRAIN_S + EXIT_EXTRA_S)
    took_s = time.monotonic() - began
    answers = await turned_away
    await load.close()

    figure("exit after (s)", took_s)
    figure("endings", dict(history.endings()))
    figure("calls during the drain", dict(answers))
    assert code == 0
    assert took_s + 0.5 >= DRAIN_S and took_s < DRAIN_S + EXIT_EXTRA_S
    *streams, silent = told
    assert_each_ended_in_order(streams, lengths_s)
    # A stream that has not begun is refused; one that was kept alive by pings meanwhile ends in a frame.
    assert silent.ending in (Ending.REFUSED, Ending.FAILED) and silent.error_code == "service_unavailable"
    assert set(answers) <= {"503 with Retry-After", "nobody there"}, answers
    assert answers["503 with Retry-After"] > 0
    await until_nothing_is_held(trio_books, 1)
    await assert_cut_streams_are_billed(trio_books, streams)
    [call] = await trio_books.fetch("SELECT state, status FROM calls WHERE id = ?", (silent.call_id,))
    assert tuple(call) == ("released", 503)
    await assert_books_agree(started, trio_books, history)


def assert_each_ended_in_order(streams: list[Told], lengths_s: list[float]) -> None:
    """Streams that had the time are whole; the others end in an error frame, none is merely cut."""
    for told, length_s in zip(streams, lengths_s, strict=True):
        assert told.ending in (Ending.WHOLE, Ending.FAILED), str(told)
        if told.ending is Ending.FAILED:
            assert told.error_code == "service_unavailable" and length_s > DRAIN_S * 0.8, str(told)
        else:
            assert told.tokens == TOKENS and length_s < DRAIN_S * 1.3, str(told)
    assert {told.ending for told in streams} == {Ending.WHOLE, Ending.FAILED}


async def assert_cut_streams_are_billed(books: Database, streams: list[Told]) -> None:
    """What the drain cut is charged for the tokens that were delivered, to one."""
    for told in streams:
        if told.ending is Ending.FAILED:
            [call] = await books.fetch("SELECT * FROM calls WHERE id = ?", (told.call_id,))
            assert (call["state"], call["status"]) == ("settled", 503), str(told)
            assert call["output_tokens"] == told.tokens > 0, str(told)
            assert call["charged_microusd"] >= told.tokens * 10, str(told)


async def knock(house: House, load: Load) -> Counter[str]:
    """Make new calls while the house drains, until nobody is there; return what they were told."""
    answers: Counter[str] = Counter()
    connector = aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=10)) as session:
        # The signal goes through the supervisor: a moment later the children have it.
        await asyncio.sleep(0.5)
        while house.process is not None and house.process.poll() is None:
            try:
                async with session.post(
                    f"{house.base_url}/v1/chat/completions", json=asking(False, "tokens:1"),
                    headers=load.payer.headers,
                ) as answer:
                    with_retry = " with Retry-After" if "retry-after" in answer.headers else ""
                    answers[f"{answer.status}{with_retry}"] += 1
            except (aiohttp.ClientError, ConnectionError):
                answers["nobody there"] += 1
            await asyncio.sleep(0.1)
    return answers


async def until_open(books: Database, count: int) -> None:
    """Wait until so many calls are open."""
    async with asyncio.timeout(20):
        while (await books.fetch("SELECT COUNT(*) FROM calls WHERE state = 'open'"))[0][0] < count:
            await asyncio.sleep(0.05)
