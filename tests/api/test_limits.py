"""What is refused from memory: full windows, and lists far beyond the plan's rate."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from api import limits
from api.errors import ApiError
from api.limits import Limits, json_body
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
        self.content_length = int(self.headers["content-length"]) if "content-length" in self.headers else None
        self.taken = 0
        self.scope: dict[str, object] = {}
        self._pieces = pieces

    @property
    async def body(self) -> AsyncIterator[bytes]:
        for piece in self._pieces:
            if isinstance(piece, float):
                await asyncio.sleep(piece)
            else:
                self.taken += len(piece)
                yield piece


async def _body(request_: _Request, timeout_s: float = 5) -> bytes:
    return await json_body(request_, 10, timeout_s=timeout_s)


async def test_a_body_is_read_whole() -> None:
    assert await _body(_Request(b'{"a"', b":1}")) == b'{"a":1}'
    assert await _body(_Request(content_type="application/json;charset=utf-8")) == b""
    assert await _body(_Request(b"12345", b"67890", content_encoding="Identity")) == b"1234567890"


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
        await _body(request_)
    assert (caught.value.status, request_.taken) == (status, taken)


async def test_a_body_may_be_slow_but_not_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BODY_BYTES_PER_S_MIN", 10)
    slow = [piece for n in range(6) for piece in (0.04, b"%d" % n)]
    assert await _body(_Request(*slow), 0.1) == b"012345"
    with pytest.raises(ApiError) as caught:
        await _body(_Request(b"1", 0.5, b"2"), 0.1)
    assert (caught.value.status, caught.value.code) == (408, "request_timeout")


async def test_a_body_may_not_trickle_for_ever() -> None:
    trickle = _Request(*[piece for _ in range(10) for piece in (0.04, b"1")])
    with pytest.raises(ApiError) as caught:
        await _body(trickle, 0.1)
    assert caught.value.status == 408 and trickle.taken <= 3
