"""Rate cards: the integer prices of an offer, and the only arithmetic that turns usage into money."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from typing import Any

import msgspec
from genai_prices.types import ModelPrice, TieredPrices

from models.errors import ConfigurationError
from models.money import PICOUSD_PER_MICROUSD, PICOUSD_PER_USD, picousd
from models.usage import Usage

MS_PER_MINUTE = 60_000
# What `output_tokens_affordable` answers when output costs nothing.
OUTPUT_TOKENS_UNLIMITED = 2**31 - 1
# A price of 1 USD per million tokens, in pico-dollars a token.
PICOUSD_PER_USD_PER_MILLION = PICOUSD_PER_USD // 1_000_000

# Key in the configuration → field of the card, and how many pieces the price is for.
CONFIG_PRICES = {
    "input_per_million": ("input", 1_000_000),
    "cached_input_per_million": ("cached_input", 1_000_000),
    "cache_write_per_million": ("cache_write", 1_000_000),
    "output_per_million": ("output", 1_000_000),
    "per_image": ("per_image", 1),
    "per_minute": ("per_minute", 1),
    "per_million_characters": ("per_character", 1_000_000),
    "per_call": ("per_call", 1),
}
# Class in genai-prices → field of the card; all are USD per million tokens.
LIST_TOKEN_PRICES = {
    "input_mtok": "input",
    "cache_read_mtok": "cached_input",
    "cache_write_mtok": "cache_write",
    "output_mtok": "output",
}
LIST_CALL_PRICE = "requests_kcount"
# Paid only for features that a chat call through the gateway cannot ask for: hosted searches, and
# caches that live an hour.
LIST_PRICES_OF_ABSENT_FEATURES = {"web_searches_kcount", "storage_searches_kcount", "cache_write_1h_mtok"}


@dataclass(frozen=True, slots=True)
class Tier:
    """Price every token of a call whose prompt is longer than `start_tokens`; pico-dollars a token."""

    start_tokens: int
    input: int
    cached_input: int
    cache_write: int
    output: int


@dataclass(frozen=True, slots=True)
class RateCard:
    """Price one call. Every price is in whole pico-dollars per piece, and never negative.

    Tokens by class, `per_image`, `per_character` and `per_call` are per piece; `per_minute` is for
    a minute of audio, which is counted in milliseconds. `tiers` ascend by `start_tokens`; they are
    cliffs as providers have them: the last one whose start the prompt exceeds prices all tokens
    of the call, and the card's own token prices hold below the first.
    """

    input: int = 0
    cached_input: int = 0
    cache_write: int = 0
    output: int = 0
    per_image: int = 0
    per_minute: int = 0
    per_character: int = 0
    per_call: int = 0
    tiers: tuple[Tier, ...] = ()

    @classmethod
    def from_config(cls, price_usd: Mapping[str, str], where: str) -> RateCard:
        """Read the prices an operator wrote, decimal strings of dollars.

        Cached input and cache writes cost what input does unless said otherwise. `where` is the
        table's path. Raises ConfigurationError, naming every key that is unknown, negative, no
        plain decimal string or finer than a pico-dollar a piece, or that the table is empty.
        """
        if not isinstance(price_usd, Mapping) or not price_usd:
            raise ConfigurationError([f"{where}: name at least one price, such as input_per_million"])
        prices: dict[str, int] = {}
        problems: list[str] = []
        for key, text in price_usd.items():
            if key not in CONFIG_PRICES:
                problems.append(f"{where}.{key}: unknown key; known are {', '.join(CONFIG_PRICES)}")
                continue
            field, pieces = CONFIG_PRICES[key]
            try:
                prices[field] = _price_of_one(text, pieces)
            except ValueError as error:
                problems.append(f"{where}.{key}: {error}")
        if problems:
            raise ConfigurationError(problems)
        return cls(**_with_cache_defaults(prices))

    @classmethod
    def from_list_price(cls, model_price: ModelPrice, markup_percent: str) -> RateCard | None:
        """Return a provider's list price plus a markup, each price rounded up to a pico-dollar.

        `markup_percent` is a decimal string such as "10". Returns None for a model without both an
        input and an output price per token, and for one that also charges in classes that are not
        metered here (tokens of audio, image or video, pages, hours): it would be sold below cost.
        """
        listed = {key: price for key, price in vars(model_price).items() if price is not None}
        metered = {*LIST_TOKEN_PRICES, LIST_CALL_PRICE}
        if not {"input_mtok", "output_mtok"} <= listed.keys():
            return None
        if listed.keys() - metered - LIST_PRICES_OF_ABSENT_FEATURES:
            return None
        factor = 1 + Fraction(markup_percent) / 100
        starts = sorted({start for key in metered & listed.keys() for start in _starts(listed[key])})
        base = _list_rates(listed, 0, factor)
        tiers = tuple(Tier(start, **_list_rates(listed, start + 1, factor)) for start in starts)
        call_price = _list_price_at(listed.get(LIST_CALL_PRICE, Decimal(0)), 0)
        per_call = _ceil(Fraction(call_price) * PICOUSD_PER_USD / 1000 * factor)
        return cls(**base, per_call=per_call, tiers=tiers)

    @classmethod
    def dearest_of(cls, cards: Iterable[RateCard]) -> RateCard:
        """Return a card no call is cheaper on than on any of the given ones; at least one is needed."""
        distinct = list(dict.fromkeys(cards))
        if len(distinct) == 1:
            return distinct[0]
        starts = sorted({tier.start_tokens for card in distinct for tier in card.tiers})
        pieces = {
            field.name: max(getattr(card, field.name) for card in distinct)
            for field in fields(cls)
            if field.name != "tiers"
        }
        tiers = tuple(Tier(start, **_dearest_rates(distinct, start + 1)) for start in starts)
        return cls(**pieces, tiers=tiers)

    @classmethod
    def from_json(cls, text: str) -> RateCard:
        """Return the card that `to_json` wrote. Raises ValueError for anything else."""
        try:
            document = msgspec.json.decode(text, type=dict[str, Any])
            tiers = tuple(Tier(*tier) for tier in document.pop("tiers", ()))
            card = cls(**document, tiers=tiers)
        except (msgspec.DecodeError, TypeError) as error:
            raise ValueError(f"not a rate card: {error}") from None
        numbers = [*_prices(card), *(tier.start_tokens for tier in tiers)]
        if any(type(number) is not int or number < 0 for number in numbers):
            raise ValueError("not a rate card: a price is no whole number, or negative")
        return card

    @lru_cache(maxsize=10_000)  # noqa: B019 - a card is a value, and there are as many as offers
    def to_json(self) -> str:
        """Return the card as compact JSON, the same text for equal cards.

        It is kept with every call, so that each charge can be recomputed: prices of zero are left
        out, and a tier is the list [start_tokens, input, cached_input, cache_write, output].
        """
        document: dict[str, Any] = {
            field.name: value
            for field in fields(self)
            if field.name != "tiers" and (value := getattr(self, field.name))
        }
        if self.tiers:
            document["tiers"] = [
                [tier.start_tokens, tier.input, tier.cached_input, tier.cache_write, tier.output]
                for tier in self.tiers
            ]
        return msgspec.json.encode(document).decode()

    @property
    def is_free(self) -> bool:
        """Tell whether no usage whatever costs anything."""
        return not any(_prices(self))

    def cost_microusd(self, usage: Usage) -> int:
        """Return what a call costs in micro-dollars: the exact sum, rounded up once.

        Raises ValueError for a negative count, which would be a credit.
        """
        _refuse_negative(usage)
        rates = self._rates_at(usage.prompt_tokens)
        tokens_picousd = (
            usage.input_tokens * rates.input
            + usage.cached_input_tokens * rates.cached_input
            + usage.cache_write_tokens * rates.cache_write
            + usage.output_tokens * rates.output
        )
        scaled = tokens_picousd * MS_PER_MINUTE + self._pieces_scaled(
            usage.images, usage.audio_ms, usage.characters
        )
        return _scaled_to_microusd(scaled)

    def to_usd(self) -> dict[str, str]:
        """Return the prices as decimal strings of dollars under their names in the configuration.

        Prices of zero are left out, but for input and output of a card priced by tokens or not at all.
        """
        shown = {}
        by_token = self.is_free or self.input or self.output
        for key, (name, pieces) in CONFIG_PRICES.items():
            price = getattr(self, name)
            if price or (by_token and name in ("input", "output")):
                shown[key] = format((Decimal(price * pieces) / PICOUSD_PER_USD).normalize(), "f")
        return shown

    def bound_microusd(
        self,
        input_tokens_max: int,
        output_tokens_max: int,
        images: int = 0,
        audio_ms: int = 0,
        characters: int = 0,
    ) -> int:
        """Return the most, in micro-dollars, that a call within these limits can cost.

        The whole prompt is taken at the dearest input class of the dearest tier it may reach.
        """
        pieces = self._pieces_scaled(images, audio_ms, characters)
        tokens_picousd = max(
            input_tokens_max * _dearest_input(rates) + output_tokens_max * rates.output
            for rates in self._rates_up_to(input_tokens_max)
        )
        return _scaled_to_microusd(tokens_picousd * MS_PER_MINUTE + pieces)

    def output_tokens_affordable(
        self,
        budget_microusd: int,
        input_tokens_max: int,
        images: int = 0,
        audio_ms: int = 0,
        characters: int = 0,
    ) -> int:
        """Return the largest output limit whose bound is within the budget; 0 when there is none.

        OUTPUT_TOKENS_UNLIMITED when output costs nothing and the rest fits.
        """
        pieces = self._pieces_scaled(images, audio_ms, characters)
        budget_scaled = budget_microusd * PICOUSD_PER_MICROUSD * MS_PER_MINUTE - pieces
        return min(
            _output_tokens_within(budget_scaled, input_tokens_max, rates)
            for rates in self._rates_up_to(input_tokens_max)
        )

    def _rates_at(self, prompt_tokens: int) -> RateCard | Tier:
        for tier in reversed(self.tiers):
            if prompt_tokens > tier.start_tokens:
                return tier
        return self

    def _rates_up_to(self, prompt_tokens: int) -> Sequence[RateCard | Tier]:
        if not self.tiers:
            return (self,)
        return [self, *(tier for tier in self.tiers if prompt_tokens > tier.start_tokens)]

    def _pieces_scaled(self, images: int, audio_ms: int, characters: int) -> int:
        """Return the price of all but the tokens, times MS_PER_MINUTE so that milliseconds are exact."""
        whole = images * self.per_image + characters * self.per_character + self.per_call
        return whole * MS_PER_MINUTE + audio_ms * self.per_minute


def _price_of_one(text: str, pieces: int) -> int:
    """Return the pico-dollars a piece of a price in dollars for so many. Raises ValueError."""
    amount = picousd(text)
    if amount < 0:
        raise ValueError(f"{text!r} is negative")
    price, finer = divmod(amount, pieces)
    if finer:
        raise ValueError(f"{text!r} is finer than a trillionth of a dollar a piece")
    return price


def _with_cache_defaults(prices: dict[str, int]) -> dict[str, int]:
    price = prices.get("input", 0)
    return {"cached_input": price, "cache_write": price, **prices}


def _starts(price: Decimal | TieredPrices) -> list[int]:
    return [tier.start for tier in price.tiers] if isinstance(price, TieredPrices) else []


def _list_rates(
    listed: Mapping[str, Decimal | TieredPrices], prompt_tokens: int, factor: Fraction
) -> dict[str, int]:
    prices = {
        field: _ceil(
            Fraction(_list_price_at(listed[key], prompt_tokens)) * PICOUSD_PER_USD_PER_MILLION * factor
        )
        for key, field in LIST_TOKEN_PRICES.items()
        if key in listed
    }
    prices = _with_cache_defaults(prices)
    if prices["cache_write"] < prices["input"]:
        # Lists give Google's cache writes as what storing adds to the input price.
        prices["cache_write"] += prices["input"]
    return prices


def _list_price_at(price: Decimal | TieredPrices, prompt_tokens: int) -> Decimal:
    if not isinstance(price, TieredPrices):
        return price
    for tier in reversed(price.tiers):
        if prompt_tokens > tier.start:
            return tier.price
    return price.base


def _ceil(price: Fraction) -> int:
    return -(-price.numerator // price.denominator)


def _dearest_rates(cards: Iterable[RateCard], prompt_tokens: int) -> dict[str, int]:
    rates = [card._rates_at(prompt_tokens) for card in cards]
    return {field: max(getattr(rate, field) for rate in rates) for field in LIST_TOKEN_PRICES.values()}


def _prices(card: RateCard) -> list[int]:
    own = [getattr(card, field.name) for field in fields(card) if field.name != "tiers"]
    names = LIST_TOKEN_PRICES.values()
    return own + [getattr(tier, name) for tier in card.tiers for name in names]


def _refuse_negative(usage: Usage) -> None:
    # Spelled out, not looped: this runs for every checkpoint of every stream.
    if (
        min(
            usage.input_tokens,
            usage.cached_input_tokens,
            usage.cache_write_tokens,
            usage.output_tokens,
            usage.images,
            usage.audio_ms,
            usage.characters,
        )
        < 0
    ):
        raise ValueError(f"a count is negative: {usage}")


def _scaled_to_microusd(scaled: int) -> int:
    return -(-scaled // (PICOUSD_PER_MICROUSD * MS_PER_MINUTE))


def _dearest_input(rates: RateCard | Tier) -> int:
    return max(rates.input, rates.cached_input, rates.cache_write)


def _output_tokens_within(budget_scaled: int, input_tokens: int, rates: RateCard | Tier) -> int:
    left = budget_scaled - input_tokens * _dearest_input(rates) * MS_PER_MINUTE
    if left < 0:
        return 0
    if rates.output == 0:
        return OUTPUT_TOKENS_UNLIMITED
    return min(left // (rates.output * MS_PER_MINUTE), OUTPUT_TOKENS_UNLIMITED)
