"""Rate cards: every cost is exact, and no cost exceeds its bound."""

from decimal import Decimal
from fractions import Fraction
from math import ceil

import pytest
from genai_prices.types import ModelPrice, TieredPrices
from genai_prices.types import Tier as ListTier
from hypothesis import assume, given
from hypothesis import strategies as st

from models.errors import ConfigurationError
from models.rate_card import OUTPUT_TOKENS_UNLIMITED, RateCard, Tier
from models.usage import Usage

PRICE = st.integers(0, 200_000_000)
COUNT = st.integers(0, 2_000_000)


@st.composite
def cards(draw):
    starts = sorted(draw(st.sets(st.integers(0, 1_000_000), max_size=3)))
    tiers = tuple(Tier(start, *(draw(PRICE) for _ in range(4))) for start in starts)
    return RateCard(*(draw(PRICE) for _ in range(8)), tiers=tiers)


USAGES = st.builds(
    Usage,
    input_tokens=COUNT,
    cached_input_tokens=COUNT,
    cache_write_tokens=COUNT,
    output_tokens=COUNT,
    images=st.integers(0, 20),
    audio_ms=st.integers(0, 10_000_000),
    characters=COUNT,
)


def exact_cost(card: RateCard, usage: Usage) -> Fraction:
    """Return the cost in micro-dollars, by another road."""
    rates = card
    for tier in card.tiers:
        if usage.prompt_tokens > tier.start_tokens:
            rates = tier
    picousd = (
        Fraction(usage.input_tokens) * rates.input
        + Fraction(usage.cached_input_tokens) * rates.cached_input
        + Fraction(usage.cache_write_tokens) * rates.cache_write
        + Fraction(usage.output_tokens) * rates.output
        + Fraction(usage.images) * card.per_image
        + Fraction(usage.audio_ms, 60_000) * card.per_minute
        + Fraction(usage.characters) * card.per_character
        + card.per_call
    )
    return picousd / 1_000_000


@given(cards(), USAGES)
def test_cost_is_the_exact_sum_rounded_up_once(card, usage):
    assert card.cost_microusd(usage) == ceil(exact_cost(card, usage))


@given(cards(), USAGES, COUNT, COUNT)
def test_no_cost_exceeds_the_bound(card, usage, more_input, more_output):
    bound = card.bound_microusd(
        usage.prompt_tokens + more_input,
        usage.output_tokens + more_output,
        images=usage.images,
        audio_ms=usage.audio_ms,
        characters=usage.characters,
    )
    assert card.cost_microusd(usage) <= bound


@given(cards(), COUNT, COUNT, COUNT, COUNT)
def test_a_bound_grows_with_its_limits(card, input_tokens, output_tokens, more_input, more_output):
    smaller = card.bound_microusd(input_tokens, output_tokens)
    assert smaller <= card.bound_microusd(input_tokens + more_input, output_tokens + more_output)


@given(cards(), USAGES, COUNT)
def test_more_output_never_costs_less(card, usage, more):
    longer = Usage(input_tokens=usage.input_tokens, output_tokens=usage.output_tokens + more)
    shorter = Usage(input_tokens=usage.input_tokens, output_tokens=usage.output_tokens)
    assert card.cost_microusd(shorter) <= card.cost_microusd(longer)


@given(cards(), st.integers(0, 500_000_000), COUNT, st.integers(0, 5))
def test_the_affordable_output_is_the_largest_that_fits(card, budget, input_tokens, images):
    affordable = card.output_tokens_affordable(budget, input_tokens, images=images)
    assume(affordable < OUTPUT_TOKENS_UNLIMITED)
    if affordable:
        assert card.bound_microusd(input_tokens, affordable, images=images) <= budget
    assert card.bound_microusd(input_tokens, affordable + 1, images=images) > budget


def test_affordable_output_at_the_edges():
    card = RateCard(input=1_000_000, cached_input=1_000_000, cache_write=1_000_000, output=2_000_000)
    assert card.output_tokens_affordable(120, 100) == 10
    assert card.output_tokens_affordable(121, 100) == 10
    assert card.output_tokens_affordable(99, 100) == 0
    assert card.output_tokens_affordable(-1, 0) == 0
    assert RateCard(input=1_000_000).output_tokens_affordable(100, 100) == OUTPUT_TOKENS_UNLIMITED
    assert RateCard(input=1_000_000).output_tokens_affordable(99, 100) == 0


def test_the_bound_takes_the_dearest_input_class_and_tier():
    card = RateCard(
        input=10,
        cached_input=1,
        cache_write=13,
        output=5,
        tiers=(Tier(100, 20, 2, 26, 4), Tier(1_000, 1, 1, 1, 1)),
    )
    million = 1_000_000
    assert card.bound_microusd(100, 0) == 1
    assert RateCard(input=10 * million, cache_write=13 * million).bound_microusd(100, 0) == 1_300
    assert card.bound_microusd(100 * million, 0) == 26 * 100


def test_a_tier_prices_all_tokens_of_a_call_beyond_its_start():
    card = RateCard(input=1_000_000, output=1_000_000, tiers=(Tier(10, 2_000_000, 0, 0, 3_000_000),))
    assert card.cost_microusd(Usage(input_tokens=10, output_tokens=1)) == 11
    assert card.cost_microusd(Usage(input_tokens=11, output_tokens=1)) == 25
    # The whole prompt decides, not its uncached part.
    assert card.cost_microusd(Usage(input_tokens=1, cached_input_tokens=10)) == 2


def test_a_call_that_used_nothing_costs_the_price_of_a_call():
    assert RateCard(input=5).cost_microusd(Usage()) == 0
    assert RateCard(per_call=2_000_001).cost_microusd(Usage()) == 3


def test_reasoning_tokens_are_not_paid_twice():
    card = RateCard(output=1_000_000)
    assert card.cost_microusd(Usage(output_tokens=10, reasoning_tokens=8)) == 10


@pytest.mark.parametrize("count", ["input_tokens", "output_tokens", "images", "audio_ms", "characters"])
def test_a_negative_count_is_no_credit(count):
    with pytest.raises(ValueError, match="negative"):
        RateCard(input=1).cost_microusd(Usage(**{count: -1}))


def test_is_free():
    assert RateCard().is_free
    assert not RateCard(per_minute=1).is_free
    assert RateCard(tiers=(Tier(5, 0, 0, 0, 0),)).is_free
    assert not RateCard(tiers=(Tier(5, 0, 0, 0, 1),)).is_free


# JSON


@given(cards())
def test_json_round_trip_and_stability(card):
    assert RateCard.from_json(card.to_json()) == card
    assert RateCard.from_json(card.to_json()).to_json() == card.to_json()


def test_json_is_compact():
    card = RateCard(input=2, output=3, tiers=(Tier(10, 1, 2, 3, 4),))
    assert card.to_json() == '{"input":2,"output":3,"tiers":[[10,1,2,3,4]]}'
    assert RateCard().to_json() == "{}"


@pytest.mark.parametrize(
    "text",
    ["", "[]", "null", '{"inputs":1}', '{"input":1.5}', '{"input":-1}', '{"input":true}', '{"tiers":[[1]]}',
     '{"tiers":[[-1,0,0,0,0]]}', '{"tiers":[5]}', '{"tiers":[[1,0,0,0,"2"]]}'],
)
def test_what_is_no_card_is_refused(text):
    with pytest.raises(ValueError, match="not a rate card"):
        RateCard.from_json(text)


# The operator's prices


def test_from_config_reads_every_key():
    card = RateCard.from_config(
        {
            "input_per_million": "0.25",
            "cached_input_per_million": "0.025",
            "cache_write_per_million": "0.3125",
            "output_per_million": "2.00",
            "per_image": "0.04",
            "per_minute": "0.006",
            "per_million_characters": "15",
            "per_call": "0.000001",
        },
        "offers[0].price_usd",
    )
    assert card == RateCard(
        input=250_000,
        cached_input=25_000,
        cache_write=312_500,
        output=2_000_000,
        per_image=40_000_000_000,
        per_minute=6_000_000_000,
        per_character=15_000_000,
        per_call=1_000_000,
    )


def test_cached_input_and_cache_writes_cost_what_input_does():
    card = RateCard.from_config({"input_per_million": "3", "output_per_million": "15"}, "price_usd")
    assert (card.cached_input, card.cache_write) == (3_000_000, 3_000_000)


def test_a_minute_of_audio_is_exact_to_the_millisecond():
    card = RateCard.from_config({"per_minute": "0.006"}, "price_usd")
    assert card.cost_microusd(Usage(audio_ms=60_000)) == 6_000
    assert card.cost_microusd(Usage(audio_ms=10)) == 1
    assert card.cost_microusd(Usage(audio_ms=11)) == 2


@pytest.mark.parametrize(
    ("key", "text", "why"),
    [
        ("input_per_milion", "1", "unknown key"),
        ("input_per_million", "-1", "negative"),
        ("output_per_million", "0.0000001", "finer"),
        ("per_call", "0.0000000000001", "finer"),
        ("per_image", "four", "decimal"),
        ("per_minute", 0.006, "decimal string"),
        ("per_million_characters", "99999999999999999", "too large"),
    ],
)
def test_from_config_names_what_is_wrong(key, text, why):
    with pytest.raises(ConfigurationError) as error:
        RateCard.from_config({key: text}, "offers[2].price_usd")
    assert error.value.problems[0].startswith(f"offers[2].price_usd.{key}: ")
    assert why in error.value.problems[0]


def test_from_config_collects_all_problems():
    with pytest.raises(ConfigurationError) as error:
        RateCard.from_config({"input_per_million": "-1", "per_image": "x", "color": "red"}, "p")
    assert len(error.value.problems) == 3


@pytest.mark.parametrize("empty", [{}, None, []])
def test_an_empty_price_is_refused(empty):
    with pytest.raises(ConfigurationError, match="p: name at least one price"):
        RateCard.from_config(empty, "p")


# List prices


def listed(**prices):
    exact = {key: Decimal(price) if isinstance(price, str) else price for key, price in prices.items()}
    return ModelPrice(**exact)


def test_a_list_price_without_markup_is_itself():
    card = RateCard.from_list_price(
        listed(input_mtok="1.25", cache_read_mtok="0.125", cache_write_mtok="1.5", output_mtok="10"), "0"
    )
    assert card == RateCard(input=1_250_000, cached_input=125_000, cache_write=1_500_000, output=10_000_000)


def test_markup_is_exact_and_rounds_up_to_a_picodollar():
    card = RateCard.from_list_price(listed(input_mtok="0.000001", output_mtok="0.000010"), "10")
    assert (card.input, card.output) == (2, 11)
    assert RateCard.from_list_price(listed(input_mtok="2", output_mtok="8"), "12.5").output == 9_000_000


def test_list_prices_per_class_become_tiers_of_all_classes():
    card = RateCard.from_list_price(
        listed(
            input_mtok=TieredPrices(
                base=Decimal(1), tiers=[ListTier(200, Decimal(2)), ListTier(500, Decimal(4))]
            ),
            output_mtok=TieredPrices(base=Decimal(5), tiers=[ListTier(300, Decimal(6))]),
            cache_read_mtok="0.5",
        ),
        "0",
    )
    million = 1_000_000
    assert (card.input, card.cached_input, card.cache_write, card.output) == (
        million,
        500_000,
        million,
        5 * million,
    )
    assert card.tiers == (
        Tier(200, 2 * million, 500_000, 2 * million, 5 * million),
        Tier(300, 2 * million, 500_000, 2 * million, 6 * million),
        Tier(500, 4 * million, 500_000, 4 * million, 6 * million),
    )


def test_a_cache_write_listed_below_the_input_price_is_a_surcharge():
    card = RateCard.from_list_price(
        listed(input_mtok="0.3", cache_write_mtok="0.08", output_mtok="2.5"), "0"
    )
    assert card.cache_write == 380_000


def test_a_price_per_request_is_metered():
    card = RateCard.from_list_price(listed(input_mtok="1", output_mtok="1", requests_kcount="5"), "10")
    assert card.per_call == 5_500_000_000


@pytest.mark.parametrize(
    "prices",
    [
        {},
        {"input_mtok": "1"},
        {"output_mtok": "1"},
        {"input_mtok": "1", "output_mtok": "1", "input_audio_mtok": "10"},
        {"input_mtok": "1", "output_mtok": "1", "output_image_mtok": "10"},
        {"input_mtok": "1", "output_mtok": "1", "audio_hours": "1"},
    ],
)
def test_what_cannot_be_metered_has_no_card(prices):
    assert RateCard.from_list_price(listed(**prices), "0") is None


def test_prices_of_features_a_chat_call_cannot_ask_for_do_not_hinder():
    price = listed(input_mtok="1", output_mtok="1", web_searches_kcount="10", cache_write_1h_mtok="2")
    assert RateCard.from_list_price(price, "0") == RateCard.from_list_price(
        listed(input_mtok="1", output_mtok="1"), "0"
    )


@given(st.lists(cards(), min_size=1, max_size=3), USAGES)
def test_nothing_is_cheaper_on_the_dearest_card(some, usage):
    dearest = RateCard.dearest_of(some)
    assert all(dearest.cost_microusd(usage) >= card.cost_microusd(usage) for card in some)


def test_the_dearest_of_equals_is_itself():
    card = RateCard(input=3, tiers=(Tier(5, 1, 1, 1, 1),))
    assert RateCard.dearest_of([card, card]) is card
