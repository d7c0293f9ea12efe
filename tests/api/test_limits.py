"""What is refused from memory: full windows, and lists far beyond the plan's rate."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from api import limits
from api.auth import Caller
from api.errors import ApiError
from api.exchange import Exchange, end_of
from api.limits import Limits, Presence, json_body
from models.clock import now_ms
from models.errors import RateLimited
from models.rate_limit import WINDOW_MS
from tests.api.test_auth import caller_with


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Give the time as a cell that a test may move."""
    cell = [now_ms()]
    monkeypatch.setattr(limits, "now_ms", lambda: cell[0])
    return cell


def test_a_full_window_is_refused_until_it_ends(clock: list[int]) -> None:
    known, caller = Limits(), caller_with()
    known.check_rate(caller)
    known.note_full(RateLimited("account:acc_1", 60, clock[0] + 1000))
    with pytest.raises(RateLimited):
        known.check_rate(caller)
    clock[0] += 1000
    known.check_rate(caller)


def test_a_larger_plan_opens_the_window_at_once(clock: list[int]) -> None:
    known = Limits()
    known.note_full(RateLimited("account:acc_1", 20, clock[0] + 1000))
    known.check_rate(caller_with())  # 60 a minute now


def test_windows_are_each_ones_own(clock: list[int]) -> None:
    known = Limits()
    known.note_full(RateLimited("account:acc_2", 60, clock[0] + 1000))
    known.note_full(RateLimited("key:key_1", 5, clock[0] + 1000))
    known.check_rate(caller_with())
    with pytest.raises(RateLimited):
        known.check_rate(caller_with(requests_per_minute=5))


def test_lists_are_refused_at_ten_times_the_rate(clock: list[int]) -> None:
    known, caller = Limits(), caller_with()
    for _ in range(600):  # ten times sixty
        known.count_unmetered(caller)
    with pytest.raises(RateLimited) as caught:
        known.count_unmetered(caller)
    assert caught.value.limit == 600
    known.count_unmetered(caller_with(account_id="acc_2"))
    clock[0] += WINDOW_MS
    known.count_unmetered(caller)


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch, clock: list[int]) -> None:
    monkeypatch.setattr(limits, "BUCKETS_MAX", 10)
    known = Limits()
    for n in range(50):
        known.note_full(RateLimited(f"account:{n}", 1, clock[0] + 1000))
        known.count_unmetered(caller_with(account_id=f"acc_{n}"))
    assert len(known._full) <= 10 and len(known._unmetered) <= 10


class _Request:
    """Be a request whose body comes in pieces; a number is a pause in seconds."""

    def __init__(self, *pieces: bytes | float, **headers: str) -> None:
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}
        self.taken = 0
        self._pieces = pieces

    async def body(self) -> AsyncIterator[bytes]:
        for piece in self._pieces:
            if isinstance(piece, float):
                await asyncio.sleep(piece)
            else:
                self.taken += len(piece)
                yield piece


async def body_of(request: _Request, timeout_s: float = 5) -> bytes:
    """Read a body of ten bytes at most."""
    asked = Exchange("req_1", "POST", "/v1/x", b"", request.headers, "127.0.0.1", 0, [].append)
    asked.presence = Limits().enter(caller_with(), asked.at_end)
    return await json_body(asked, request.body(), 10, timeout_s=timeout_s)


async def test_a_body_is_read_whole() -> None:
    assert await body_of(_Request(b'{"a"', b":1}")) == b'{"a":1}'
    assert await body_of(_Request(content_type="application/json;charset=utf-8")) == b""
    assert await body_of(_Request(b"12345", b"67890", content_encoding="Identity")) == b"1234567890"


@pytest.mark.parametrize(
    "request_, status, taken",
    [
        (_Request(b"12345", b"678901", b"more"), 413, 11),
        (_Request(b"12345", content_length="11"), 413, 0),
        (_Request(b"{}", content_type="text/html"), 415, 0),
        (_Request(b"{}", content_type="application/jsonp"), 415, 0),
        (_Request(b"{}", content_encoding="gzip"), 415, 0),
        (_Request(b"{}", content_encoding="identity, gzip"), 415, 0),
    ],
)
async def test_a_body_is_refused_as_early_as_can_be(request_: _Request, status: int, taken: int) -> None:
    with pytest.raises(ApiError) as caught:
        await body_of(request_)
    assert (caught.value.status, request_.taken) == (status, taken)


async def test_a_body_may_be_slow_but_not_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BODY_BYTES_PER_S_MIN", 10)
    slow = [piece for n in range(6) for piece in (0.04, b"%d" % n)]
    assert await body_of(_Request(*slow), 0.1) == b"012345"
    with pytest.raises(ApiError) as caught:
        await body_of(_Request(b"1", 0.5, b"2"), 0.1)
    assert (caught.value.status, caught.value.code) == (408, "request_timeout")


async def test_a_body_may_not_trickle_for_ever() -> None:
    trickle = _Request(*[piece for _ in range(10) for piece in (0.04, b"1")])
    with pytest.raises(ApiError) as caught:
        await body_of(trickle, 0.1)
    assert caught.value.status == 408 and trickle.taken <= 3


def test_a_large_body_is_not_read_after_many_bad_calls(clock: list[int]) -> None:
    known, caller = Limits(), caller_with()
    for _ in range(600):
        known.count_refused(caller)
    with pytest.raises(RateLimited):
        known.count_refused(caller)
    known.check_rate(caller)
    presence = Presence(known, caller)
    presence.announce_body(limits.SMALL_BODY_BYTES)
    presence.take_body(limits.SMALL_BODY_BYTES)
    for attempt in (presence.announce_body, presence.take_body):
        with pytest.raises(RateLimited):
            attempt(limits.SMALL_BODY_BYTES + 1)
    clock[0] += WINDOW_MS
    presence.announce_body(limits.SMALL_BODY_BYTES + 1)


def test_strangers_are_limited_by_their_address_and_by_nobody_elses(clock: list[int]) -> None:
    known = Limits()

    def is_turned_away(address: str) -> bool:
        try:
            known.count_unauthorised(address)
        except ApiError as refusal:
            assert (refusal.status, refusal.code) == (429, "rate_limit_exceeded")
            assert refusal.headers["Retry-After"] == "60"
            return True
        return False

    assert not any(is_turned_away("192.0.2.1") for _ in range(60))
    assert is_turned_away("192.0.2.1") and is_turned_away("::ffff:192.0.2.1")
    assert not is_turned_away("192.0.2.2")
    # One subscriber has a whole /64 of IPv6, and may take a new address for every request.
    assert not any(is_turned_away(f"2001:db8::{n:x}") for n in range(60))
    assert is_turned_away("2001:db8::ffff") and not is_turned_away("2001:db8:0:1::1")
    clock[0] -= 3_600_000  # a window of the future is none
    assert not is_turned_away("192.0.2.1")
    clock[0] += WINDOW_MS
    assert not is_turned_away("192.0.2.1")


def test_strangers_take_bounded_memory(monkeypatch: pytest.MonkeyPatch, clock: list[int]) -> None:
    monkeypatch.setattr(limits, "BUCKETS_MAX", 10)
    known = Limits()
    for n in range(1000):
        known.count_unauthorised(f"192.0.{n % 250}.{n // 250}")
        known.count_unauthorised(f"2001:db8:{n:x}::1")
    assert len(known._unauthorised) <= 10


async def test_an_account_runs_so_many_calls_at_once_and_no_more() -> None:
    known, caller, other = Limits(), caller_with(), caller_with(account_id="acc_2")
    let_go = asyncio.Event()

    async def call(who: Caller) -> Presence:
        presence = known.enter(who, end_of(asyncio.current_task()))
        await let_go.wait()
        return presence

    running = [asyncio.create_task(call(caller)) for _ in range(caller.plan.concurrent_calls)]
    await asyncio.sleep(0)
    with pytest.raises(ApiError) as caught:
        known.enter(caller, end_of(asyncio.current_task()))
    assert (caught.value.status, caught.value.code) == (429, "rate_limit_exceeded")
    running.append(asyncio.create_task(call(other)))
    await asyncio.sleep(0)
    running.pop(0).cancel()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    running.append(asyncio.create_task(call(caller)))
    let_go.set()
    await asyncio.gather(*running)
    await asyncio.sleep(0)
    assert not known._running


@pytest.mark.parametrize("announced", [True, False])
async def test_bodies_together_have_a_bound_and_small_ones_always_pass(
    monkeypatch: pytest.MonkeyPatch, announced: bool
) -> None:
    monkeypatch.setattr(limits, "BODIES_BYTES_MAX", 1_000_000)
    known, still = Limits(), asyncio.Event()

    async def call(name: str, length: int, *, and_on: bool = False) -> None:
        presence = known.enter(caller_with(account_id=name), end_of(asyncio.current_task()))
        presence.announce_body(length if announced else 0)
        for _ in range(10):
            presence.take_body(length // 10)
        if and_on:
            # An answer under an idempotency key is worked on when its request has gone.
            presence.last_until(end_of(asyncio.create_task(still.wait())))

    async def finds_room(name: str, length: int, *, and_on: bool = False) -> bool:
        try:
            await asyncio.create_task(call(name, length, and_on=and_on))
        except ApiError as refusal:
            assert (refusal.status, refusal.code) == (503, "service_unavailable")
            assert "Retry-After" in refusal.headers
            return False
        return True

    assert not await finds_room("a", 600_000), "more than half for one account"
    assert await finds_room("a", 400_000, and_on=True)
    assert not await finds_room("a", 400_000), "more than half again"
    assert await finds_room("b", 400_000, and_on=True)
    assert not await finds_room("c", 400_000), "more than there is"
    assert await finds_room("c", 200_000) and await finds_room("a", limits.SMALL_BODY_BYTES)
    still.set()
    for _ in range(5):
        await asyncio.sleep(0)
    assert await finds_room("c", 400_000)
    await asyncio.sleep(0)
    assert known._bodies_bytes == 0 and not known._bodies_bytes_of and not known._running
