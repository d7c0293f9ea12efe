"""Time: integer milliseconds, UTC, months by the calendar."""

from __future__ import annotations

import time
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models import clock

moments = st.integers(0, 4_000_000_000_000)


def ms(*moment):
    return int(datetime(*moment, tzinfo=UTC).timestamp() * 1000)


def test_now():
    before = time.time()
    assert before - 0.002 <= clock.now_ms() / 1000 <= time.time() + 0.002
    assert isinstance(clock.now_ms(), int)


@pytest.mark.parametrize(
    ("at_ms", "day", "month", "end"),
    [
        (ms(2026, 11, 30, 23, 59, 59), "2026-11-30", "2026-11", ms(2026, 12, 1)),
        (ms(2026, 12, 1), "2026-12-01", "2026-12", ms(2027, 1, 1)),
        (ms(2026, 12, 31, 23, 59, 59), "2026-12-31", "2026-12", ms(2027, 1, 1)),
        (ms(2028, 2, 29), "2028-02-29", "2028-02", ms(2028, 3, 1)),
        (0, "1970-01-01", "1970-01", ms(1970, 2, 1)),
    ],
)
def test_days_and_months_are_utc(at_ms, day, month, end, monkeypatch):
    for zone in ("UTC", "America/Los_Angeles", "Pacific/Kiritimati"):
        monkeypatch.setenv("TZ", zone)
        time.tzset()
        assert (clock.day(at_ms), clock.month(at_ms), clock.month_end_ms(at_ms)) == (day, month, end)
    monkeypatch.delenv("TZ")
    time.tzset()


@given(moments)
def test_a_month_ends_where_the_next_begins(at_ms):
    end = clock.month_end_ms(at_ms)
    assert at_ms < end
    assert clock.month(end - 1) == clock.month(at_ms) != clock.month(end)


@given(moments, moments)
def test_names_sort_by_time(one, other):
    early, late = sorted((one, other))
    assert clock.month(early) <= clock.month(late)
    assert clock.day(early) <= clock.day(late)
    assert clock.moment(early).tzinfo is UTC
