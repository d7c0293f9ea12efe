"""Money: decimal strings in, integers out, and nothing rounded in between but a call's cost."""

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.money import AMOUNT_MICROUSD_MAX, ceil_to_microusd, microusd, picousd, usd


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("10", 10_000_000),
        ("0.02", 20_000),
        ("0.000001", 1),
        ("-1.5", -1_500_000),
        ("0", 0),
        (" 3 ", 3_000_000),
    ],
)
def test_microusd_reads_decimal_strings(text, amount):
    assert microusd(text) == amount


def test_picousd_is_a_million_times_finer():
    assert picousd("0.000000000001") == 1
    assert picousd("0.01875") == 18_750_000_000


@pytest.mark.parametrize(
    "text", ["", " ", "ten", "1e3", "1E3", "1_000", "NaN", "Infinity", "-inf", "0x10", "1,5"]
)
def test_what_is_no_plain_decimal_is_refused(text):
    with pytest.raises(ValueError):
        microusd(text)


@pytest.mark.parametrize("value", [10, 0.1, None, Decimal("1"), True, ["1"]])
def test_only_text_is_read(value):
    with pytest.raises(ValueError, match="decimal string"):
        microusd(value)


def test_what_is_too_fine_or_too_large_is_refused():
    with pytest.raises(ValueError, match="finer"):
        microusd("0.0000001")
    with pytest.raises(ValueError, match="finer"):
        picousd("0.0000000000001")
    with pytest.raises(ValueError, match="too large"):
        microusd(str(AMOUNT_MICROUSD_MAX))


@given(st.integers(-AMOUNT_MICROUSD_MAX, AMOUNT_MICROUSD_MAX))
def test_usd_and_microusd_are_inverse(amount):
    assert microusd(usd(amount)) == amount


@pytest.mark.parametrize(("amount", "text"), [(421, "0.000421"), (-1, "-0.000001"), (0, "0.000000")])
def test_usd_has_six_places(amount, text):
    assert usd(amount) == text


@pytest.mark.parametrize(("amount", "cost"), [(0, 0), (1, 1), (1_000_000, 1), (1_000_001, 2)])
def test_a_started_microdollar_is_a_whole_one(amount, cost):
    assert ceil_to_microusd(amount) == cost
