"""API keys as text: recognisable, checked offline, hashed."""

from __future__ import annotations

import re
import string

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from models.credentials import is_well_formed, key_hash, new_key

# Always the same one: it is in the names of tests, which every process of a run must find alike.
KEY = "sk-tg-0000000000000000000000000000002P0j63"
places = st.integers(0, len(KEY) - 1)
characters = st.one_of(st.sampled_from(string.ascii_letters + string.digits), st.characters())


def test_the_shape_of_a_key():
    assert re.fullmatch(r"sk-tg-[0-9A-Za-z]{36}", KEY)
    assert is_well_formed(KEY)
    made = {new_key() for _ in range(1000)}
    assert len(made) == 1000 and all(is_well_formed(key) for key in made)


def test_a_key_made_long_ago_stays_valid():
    assert is_well_formed("sk-tg-0000000000000000000000000000002P0j63")


@given(places, characters)
def test_one_mistyped_character_is_always_noticed(place, character):
    assume(KEY[place] != character)
    assert not is_well_formed(KEY[:place] + character + KEY[place + 1 :])


@given(places)
def test_two_characters_swapped_are_always_noticed(place):
    assume(place + 1 < len(KEY) and KEY[place] != KEY[place + 1])
    assert not is_well_formed(KEY[:place] + KEY[place + 1] + KEY[place] + KEY[place + 2 :])


@given(places, characters)
def test_a_character_lost_or_added_is_always_noticed(place, character):
    assert not is_well_formed(KEY[:place] + KEY[place + 1 :])
    assert not is_well_formed(KEY[:place] + character + KEY[place:])


@pytest.mark.parametrize(
    "text", ["", "sk-tg-", f"{KEY}\n", f" {KEY}", KEY.upper(), KEY.replace("sk-tg-", "sk-"), "ſ" * 42]
)
def test_what_is_no_key(text):
    assert not is_well_formed(text)


@given(st.text())
def test_any_text_is_judged_without_an_error(text):
    assert not is_well_formed(text)


def test_the_hash():
    assert key_hash("abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert key_hash(KEY) != key_hash(new_key())
