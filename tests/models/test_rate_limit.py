"""Rate windows: exact, to the millisecond and under any concurrency."""

from __future__ import annotations

import asyncio

import pytest

from models import rate_limit
from models.database import Database, Lane
from models.errors import RateLimited
from models.rate_limit import CLOCK_SKEW_MS, WINDOW_MS, Limit, Standing, account_bucket, count, key_bucket, prune

START = 1_800_000_000_000


def counting(books, at_ms, *, limit=2, bucket="b", **more):
    return books.run(lambda: count(Limit(bucket, limit), at_ms, **more))


async def test_a_window_counts_down_and_names_its_end(books):
    assert await counting(books, START) == Standing(2, 1, START + WINDOW_MS)
    assert await counting(books, START + 59_999) == Standing(2, 0, START + WINDOW_MS)
    with pytest.raises(RateLimited) as refusal:
        await counting(books, START + 59_999)
    assert (refusal.value.bucket, refusal.value.limit, refusal.value.until_ms) == ("b", 2, START + WINDOW_MS)


async def test_a_window_ends_to_the_millisecond_and_begins_with_the_next_call(books):
    await counting(books, START)
    await counting(books, START)
    with pytest.raises(RateLimited):
        await counting(books, START + WINDOW_MS - 1)
    assert await counting(books, START + WINDOW_MS) == Standing(2, 1, START + 2 * WINDOW_MS)
    assert await counting(books, START + 5 * WINDOW_MS) == Standing(2, 1, START + 6 * WINDOW_MS)


async def test_refused_calls_do_not_prolong_a_window(books):
    await counting(books, START, limit=1)
    for at_ms in (1, 30_000, 59_999):
        with pytest.raises(RateLimited):
            await counting(books, START + at_ms, limit=1)
    assert (await counting(books, START + WINDOW_MS, limit=1)).remaining == 0


async def test_buckets_are_apart(books):
    for bucket in (account_bucket("a"), key_bucket("a"), account_bucket("b")):
        assert (await counting(books, START, limit=1, bucket=bucket)).remaining == 0
    with pytest.raises(RateLimited):
        await counting(books, START, limit=1, bucket="account:a")


async def test_a_limit_that_changes_applies_at_once(books):
    for _ in range(3):
        await counting(books, START, limit=3)
    assert await counting(books, START, limit=5) == Standing(5, 1, START + WINDOW_MS)
    with pytest.raises(RateLimited):
        await counting(books, START, limit=2)


async def test_windows_of_another_length(books):
    await counting(books, START, limit=1, window_ms=1000)
    with pytest.raises(RateLimited) as refusal:
        await counting(books, START + 999, limit=1, window_ms=1000)
    assert refusal.value.until_ms == START + 1000
    assert (await counting(books, START + 1000, limit=1, window_ms=1000)).resets_at_ms == START + 2000


async def test_a_clock_a_little_behind_another_machine_s_opens_nothing(books):
    await counting(books, START, limit=1)
    with pytest.raises(RateLimited):
        await counting(books, START - CLOCK_SKEW_MS, limit=1)
    assert (await counting(books, START - CLOCK_SKEW_MS - 1, limit=1)).remaining == 0


async def test_hundreds_at_once_are_counted_exactly(books):
    """P25: three processes, two hundred calls, a limit of sixty."""
    lanes = [Lane(books) for _ in range(3)]
    outcomes = await asyncio.gather(
        *(lanes[n % 3].run(("b", n), lambda: count(Limit("b", 60), START), deadline_s=30) for n in range(200)),
        return_exceptions=True,
    )
    assert sorted(one.remaining for one in outcomes if isinstance(one, Standing)) == list(range(60))
    assert sum(isinstance(one, RateLimited) for one in outcomes) == 140


async def test_old_windows_are_forgotten(books):
    await counting(books, START, bucket="old")
    await counting(books, START + 1, bucket="new")
    await books.run(lambda: prune(START + 1))
    assert [row[0] for row in await books.fetch("SELECT bucket FROM rate_windows")] == ["new"]


async def test_old_windows_go_in_batches(books: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rate_limit, "PRUNED_AT_ONCE", 2)
    for n in range(5):
        await books.run(lambda n=n: count(Limit(f"account:{n}", 1), START + n))
    left = []
    while await books.run(lambda: prune(START + 4)):
        left.append(len(await books.fetch("SELECT bucket FROM rate_windows")))
    assert left == [3, 1]
    assert [row[0] for row in await books.fetch("SELECT bucket FROM rate_windows")] == ["account:4"]
