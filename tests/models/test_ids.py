"""Ids: typed, sorted by time, unguessable."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models import ids
from models.clock import now_ms

moments = st.integers(0, (1 << 48) - 1)


def test_an_id_says_what_and_when():
    before = now_ms()
    made = ids.new_id("req")
    assert made.startswith("req_") and len(made) == 4 + ids.BODY_LENGTH
    assert before <= ids.made_at_ms(made) <= now_ms()
    assert made == made.lower() and set(made[4:]) <= set("0123456789abcdefghjkmnpqrstvwxyz")


def test_ids_do_not_repeat():
    assert len({ids.new_id("req") for _ in range(10_000)}) == 10_000


@given(moments)
def test_a_moment_goes_in_and_comes_out(at_ms):
    assert ids.made_at_ms(ids.first_id_at("req", at_ms)) == at_ms


@given(moments, moments)
def test_ids_sort_by_time(one, other):
    assert (ids.first_id_at("x", one) < ids.first_id_at("x", other)) == (one < other)


@given(moments)
def test_every_id_of_a_moment_lies_between_its_first_and_the_next_moment_s(at_ms):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ids, "now_ms", lambda: at_ms)
        made = ids.new_id("req")
    assert ids.first_id_at("req", at_ms) <= made
    if at_ms < (1 << 48) - 1:
        assert made < ids.first_id_at("req", at_ms + 1)


def test_before_1970_is_the_beginning():
    assert ids.first_id_at("req", -5) == ids.first_id_at("req", 0) == f"req_{'0' * 26}"


@pytest.mark.parametrize("text", ["", "req", "req_", "req_123", f"req_{'u' * 26}", f"req_{'0' * 27}", "0" * 26])
def test_what_is_no_id(text):
    with pytest.raises(ValueError):
        ids.made_at_ms(text)
