"""The catalog: what is sold, at which price, and which upstreams answer.

It is put together from the shipped `catalog.toml`, the providers whose keys the environment holds,
and the operator's own file, which overrules both:

    [service]           name, markup_percent
    [upstreams.NAME]    format, base_url, api_key_env or api_key, limit_field, headers, strip_obfuscation
    [[offers]]          id, surface, routes, price_usd or list_price, limits, what `/v1/models` shows
    [plans.NAME]        included_calls_per_month, included_max_cost_usd, requests_per_minute,
                        concurrent_calls, surfaces

An upstream in the file that bears a provider's name takes the provider's place, its offers too; an
offer in the file takes the place of a shipped one of the same id. Where nothing at all answers, the
embedded demonstration does, but in production only when the file names an upstream of its format.
"""

from __future__ import annotations

import logging
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

from genai_prices.data_snapshot import get_snapshot
from genai_prices.types import ModelInfo

from models.errors import ConfigurationError
from models.money import microusd, picousd
from models.plan import CONCURRENT_CALLS, DEFAULT_PLANS, EVERY_SURFACE, SURFACES, Plan
from models.rate_card import RateCard
from models.settings import Settings

logger = logging.getLogger(__name__)

SHIPPED_PATH = Path(__file__).with_name("catalog.toml")
DEMO_FORMAT = "demo"
DEMO_UPSTREAM = "demo"
FORMATS = ("openai", DEMO_FORMAT)
FORMATS_TO_COME = ("azure", "anthropic", "gemini", "bedrock")
LIMIT_FIELDS = ("max_tokens", "max_completion_tokens")
# The surface of an offer → the scope that a call to it needs.
OFFER_SURFACES = {
    "chat": "chat",
    "embeddings": "embeddings",
    "images": "images",
    "speech": "audio",
    "transcription": "audio",
    "moderation": "chat",
}
SURFACES_SERVED = ("chat",)
MODALITIES = ("text", "image", "audio", "video", "file")

MAX_OUTPUT_TOKENS = 16_384
# A model that thinks may write this much; both hold only where nothing better is known.
MAX_OUTPUT_TOKENS_REASONING = 128_000
DEFAULT_OUTPUT_TOKENS = 8_192
DEFAULT_OUTPUT_TOKENS_HIDDEN = 32_768
IMAGE_TOKENS_MAX = 3_000
FIRST_TOKEN_TIMEOUT_S = 120
# A model that thinks in the dark may do so for minutes before its first token.
FIRST_TOKEN_TIMEOUT_HIDDEN_S = 300
ANSWER_TIMEOUT_S = 600
# `created` must be a whole number on the wire; where it is not known this one stands, 2025-01-01.
CREATED_UNKNOWN_S = 1_735_689_600

TOKENS_MAX = 100_000_000
TIMEOUT_S_MAX = 3_600
MARKUP_PERCENT_MAX = 1_000
FILE_BYTES_MAX = 4 * 1024 * 1024

_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,39}")
_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_HEADERS_OF_THE_CONNECTION = ("connection", "content-length", "host", "transfer-encoding")
_CHAT_PARAMETERS = (
    "max_completion_tokens",
    "max_tokens",
    "response_format",
    "stream",
    "tool_choice",
    "tools",
)
_SAMPLING_PARAMETERS = ("frequency_penalty", "presence_penalty", "stop", "temperature", "top_p")


@dataclass(frozen=True, slots=True)
class UpstreamConfig:
    """Say how to reach an upstream. `api_key` and `headers` never show in the representation.

    `base_url` has no trailing slash and is empty for the demonstration; `api_key` is None for a
    server that wants none. `limit_field` is the field in which it takes the output limit.
    """

    name: str
    format: str
    base_url: str = ""
    api_key: str | None = field(default=None, repr=False)
    limit_field: str = "max_tokens"
    headers: Mapping[str, str] = field(default_factory=dict, repr=False, hash=False)
    strip_obfuscation: bool = False

    @property
    def is_demo(self) -> bool:
        """Tell whether the embedded demonstration answers, not a model."""
        return self.format == DEMO_FORMAT


@dataclass(frozen=True, slots=True)
class Route:
    """Lead an offer to an upstream and to its name for the model.

    Routes of the lowest `order` are tried first; among equals `weight` is the share.
    """

    upstream: str
    model: str
    weight: int = 1
    order: int = 0


@dataclass(frozen=True, slots=True)
class Offer:
    """Describe an AI model as it is sold.

    `context_tokens` is None where it is not known. `default_max_output_tokens` stands in when the
    caller names no limit. `image_tokens_max` is the most input tokens one image is billed as.
    `created` is in seconds since 1970. `modalities` are those of the input.
    """

    id: str
    name: str
    surface: str
    routes: tuple[Route, ...]
    rates: RateCard
    context_tokens: int | None
    max_output_tokens: int
    default_max_output_tokens: int
    reasons_hidden: bool = False
    image_tokens_max: int = IMAGE_TOKENS_MAX
    first_token_timeout_s: int = FIRST_TOKEN_TIMEOUT_S
    answer_timeout_s: int = ANSWER_TIMEOUT_S
    created: int = CREATED_UNKNOWN_S
    owned_by: str = ""
    modalities: tuple[str, ...] = ("text",)
    capabilities: tuple[str, ...] = ()
    supported_parameters: tuple[str, ...] = ()

    @property
    def scope(self) -> str:
        """Return the scope that a call to the offer needs."""
        return scope_of(self.surface)


@dataclass(frozen=True, slots=True)
class Catalog:
    """Hold everything that is sold. `markup_percent` is a decimal string; mappings are by name or id."""

    service_name: str
    markup_percent: str
    upstreams: Mapping[str, UpstreamConfig]
    offers: Mapping[str, Offer]
    plans: Mapping[str, Plan]

    @property
    def is_demo(self) -> bool:
        """Tell whether any upstream is the demonstration, so that pages can say so."""
        return any(upstream.is_demo for upstream in self.upstreams.values())


def scope_of(surface: str) -> str:
    """Return the scope that calls to an offer's surface need. Raises KeyError for an unknown surface."""
    return OFFER_SURFACES[surface]


def load_catalog(settings: Settings, now: datetime | None = None) -> Catalog:
    """Put the catalog together, at the list prices of `now`.

    Raises ConfigurationError with every problem of the operator's file and of the keys it needs.
    """
    problems: list[str] = []
    shipped = _read_shipped()
    file = _Table(_operator_document(settings.config_path, problems), "", problems)
    service = file.child("service")
    service_name = service.text("name", "Tollgate", longest=60)
    markup_percent = service.decimal("markup_percent", "0", MARKUP_PERCENT_MAX)
    service.finish()

    prices = _ListPrices(shipped, markup_percent, now or datetime.now(UTC))
    upstreams, refused = _operator_upstreams(file, shipped, settings)
    provided = _provided_upstreams(shipped, upstreams.keys() | refused, settings, problems)
    every_upstream = {**upstreams, **provided}
    offers = _operator_offers(file, every_upstream, refused, shipped, prices, problems)
    demo = _demo_upstream(upstreams, offers)
    if not every_upstream and not refused:
        demo = _demo_of_nothing(shipped, settings, problems)
    if demo is not None:
        every_upstream[demo.name] = demo
        offers.setdefault(shipped.demo["id"], _demo_offer(shipped, demo))
    for name in provided:
        for offer in _provided_offers(shipped.providers[name], prices):
            offers.setdefault(offer.id, offer)
    plans = _plans(file)
    file.finish()
    if not offers and not problems:
        problems.append("offers: nothing is offered; add [[offers]] or set a provider's key")
    if problems:
        raise ConfigurationError(problems)
    return Catalog(
        service_name=service_name,
        markup_percent=markup_percent,
        upstreams=MappingProxyType(every_upstream),
        offers=MappingProxyType(offers),
        plans=MappingProxyType(plans),
    )


# What is shipped.


@dataclass(frozen=True, slots=True)
class Provider:
    """Describe a provider of the shipped catalog; see the comments there."""

    name: str
    api_key_env: str
    base_url: str
    list_prices: str
    limit_field: str
    models: tuple[str, ...]
    strip_obfuscation: bool = False
    id_prefix: str = ""
    model_prefix: str = ""


@dataclass(frozen=True, slots=True)
class _Family:
    match: tuple[str, ...] = ()
    max_output_tokens: int | None = None
    reasons: str | None = None
    images: bool = False
    image_tokens_max: int = IMAGE_TOKENS_MAX

    @property
    def reasons_hidden(self) -> bool:
        return self.reasons == "hidden"

    def capabilities(self) -> tuple[str, ...]:
        extra = [name for name, held in (("vision", self.images), ("reasoning", self.reasons)) if held]
        return ("streaming", "tools", "json", *extra)

    def parameters(self) -> tuple[str, ...]:
        own = ("reasoning_effort",) if self.reasons else ()
        # Models that think in the dark refuse sampling parameters.
        sampling = () if self.reasons_hidden else _SAMPLING_PARAMETERS
        return tuple(sorted((*_CHAT_PARAMETERS, *sampling, *own)))


@dataclass(frozen=True, slots=True)
class _Shipped:
    providers: Mapping[str, Provider]
    families: tuple[_Family, ...]
    demo: Mapping[str, Any]

    def family(self, model: str) -> _Family:
        last = model.rsplit("/", 1)[-1].lower()
        for family in self.families:
            if any(fnmatchcase(last, pattern) for pattern in family.match):
                return family
        return _Family()

    def provider_at(self, base_url: str) -> Provider | None:
        return next((one for one in self.providers.values() if one.base_url == base_url), None)


def shipped_providers() -> tuple[Provider, ...]:
    """Return the providers that a key in the environment switches on."""
    return tuple(_read_shipped().providers.values())


def _read_shipped() -> _Shipped:
    document = tomllib.loads(SHIPPED_PATH.read_text("utf-8"))
    providers = {
        name: Provider(name=name, **{**values, "models": tuple(values["models"])})
        for name, values in document["providers"].items()
    }
    families = tuple(_Family(**{**one, "match": tuple(one["match"])}) for one in document["families"])
    return _Shipped(providers, families, document["demo"])


# What the operator wrote.


def _operator_document(path: Path | None, problems: list[str]) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        with path.open("rb") as file:
            body = file.read(FILE_BYTES_MAX + 1)
        if len(body) > FILE_BYTES_MAX:
            problems.append(f"TOLLGATE_CONFIG: {path} is larger than {FILE_BYTES_MAX} bytes")
            return {}
        return tomllib.loads(body.decode("utf-8"))
    except OSError as error:
        problems.append(f"TOLLGATE_CONFIG: {path} cannot be read: {error.strerror}")
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        problems.append(f"TOLLGATE_CONFIG: {path} is not TOML: {error}")
    return {}


def _operator_upstreams(
    file: _Table, shipped: _Shipped, settings: Settings
) -> tuple[dict[str, UpstreamConfig], set[str]]:
    """Return the good ones, and the names of those with problems, so that no route dangles twice."""
    upstreams: dict[str, UpstreamConfig] = {}
    refused: set[str] = set()
    for name, table in file.named_children("upstreams").items():
        problems_before = len(file.problems)
        upstream = _upstream(name, table, shipped, settings)
        if len(file.problems) == problems_before:
            upstreams[name] = upstream
        else:
            refused.add(name)
    return upstreams, refused


def _upstream(name: str, table: _Table, shipped: _Shipped, settings: Settings) -> UpstreamConfig:
    if not _NAME.fullmatch(name):
        table.refuse("", "a name is of a-z, 0-9, - and _, 40 at most")
    format_ = _format(table)
    if format_ == DEMO_FORMAT:
        table.finish()
        return UpstreamConfig(name=name, format=DEMO_FORMAT)
    base_url = table.url("base_url")
    known = shipped.provider_at(base_url)
    upstream = UpstreamConfig(
        name=name,
        format=format_,
        base_url=base_url,
        api_key=_operator_api_key(table, settings),
        limit_field=table.choice("limit_field", LIMIT_FIELDS, known.limit_field if known else "max_tokens"),
        headers=MappingProxyType(table.headers("headers")),
        strip_obfuscation=table.flag("strip_obfuscation", known.strip_obfuscation if known else False),
    )
    table.finish()
    return upstream


def _format(table: _Table) -> str:
    format_ = table.text("format", required=True)
    spoken = ", ".join(FORMATS)
    if format_ in FORMATS_TO_COME:
        table.refuse("format", f"this version does not speak {format_!r} yet; it speaks {spoken}")
    elif format_ and format_ not in FORMATS:
        table.refuse("format", f"{format_!r} is unknown; known are {spoken}")
    return format_


def _operator_api_key(table: _Table, settings: Settings) -> str | None:
    variable = table.text("api_key_env")
    inline = table.text("api_key", longest=4_096)
    if variable and inline:
        table.refuse("api_key", "name either api_key_env or api_key, not both")
    if inline and settings.production:
        table.refuse("api_key", "is for development; in production name its variable in api_key_env")
    if not variable:
        key = inline or None
    else:
        key = settings.environ.get(variable, "").strip() or None
        if key is None:
            table.refuse("api_key_env", f"the environment variable {variable} is not set")
    if key and not _is_header_value(key):
        where = "api_key_env" if variable else "api_key"
        table.refuse(where, "the key holds characters that no header can carry")
    return key


def _provided_upstreams(
    shipped: _Shipped, taken: set[str], settings: Settings, problems: list[str]
) -> dict[str, UpstreamConfig]:
    upstreams: dict[str, UpstreamConfig] = {}
    for provider in shipped.providers.values():
        key = settings.environ.get(provider.api_key_env, "").strip()
        if not key or provider.name in taken:
            continue
        if not _is_header_value(key):
            problems.append(f"{provider.api_key_env}: the key holds characters that no header can carry")
        upstreams[provider.name] = UpstreamConfig(
            name=provider.name,
            format="openai",
            base_url=provider.base_url,
            api_key=key,
            limit_field=provider.limit_field,
            strip_obfuscation=provider.strip_obfuscation,
        )
    return upstreams


def _operator_offers(
    file: _Table,
    upstreams: Mapping[str, UpstreamConfig],
    refused: set[str],
    shipped: _Shipped,
    prices: _ListPrices,
    problems: list[str],
) -> dict[str, Offer]:
    offers: dict[str, Offer] = {}
    seen: dict[str, str] = {}
    for table in file.children("offers"):
        problems_before = len(problems)
        offer = _offer(table, upstreams, refused, shipped, prices)
        if offer.id in seen:
            table.refuse("id", f"{offer.id!r} is the id of {seen[offer.id]} already")
        elif offer.id:
            seen[offer.id] = table.path
        if len(problems) == problems_before:
            offers[offer.id] = offer
    return offers


def _offer(
    table: _Table,
    upstreams: Mapping[str, UpstreamConfig],
    refused: set[str],
    shipped: _Shipped,
    prices: _ListPrices,
) -> Offer:
    offer_id = table.text("id", required=True)
    surface = _offer_surface(table)
    routes = _routes(table, upstreams, refused, shipped)
    listed = _listed_models(table, routes, upstreams, prices)
    family = shipped.family(routes[0].model if routes else "")
    windows = [info.context_window for info in listed or () if info.context_window]
    context_tokens = table.whole("context_tokens", min(windows, default=None), 1, TOKENS_MAX)
    reasons_hidden = table.flag("reasons_hidden", family.reasons_hidden)
    max_output_tokens = table.whole(
        "max_output_tokens", _max_output_tokens(family, context_tokens), 1, TOKENS_MAX
    )
    default_max = _default_max_output_tokens(reasons_hidden, max_output_tokens)
    offer = Offer(
        id=offer_id,
        name=table.text("name", offer_id),
        surface=surface,
        routes=routes,
        rates=_rates(table, routes, listed, prices),
        context_tokens=context_tokens,
        max_output_tokens=max_output_tokens,
        default_max_output_tokens=table.whole("default_max_output_tokens", default_max, 1, TOKENS_MAX),
        reasons_hidden=reasons_hidden,
        image_tokens_max=table.whole("image_tokens_max", family.image_tokens_max, 1, TOKENS_MAX),
        first_token_timeout_s=table.whole(
            "first_token_timeout_s", _first_token_timeout_s(reasons_hidden), 1, TIMEOUT_S_MAX
        ),
        answer_timeout_s=table.whole("answer_timeout_s", ANSWER_TIMEOUT_S, 1, TIMEOUT_S_MAX),
        created=table.whole("created", CREATED_UNKNOWN_S, 0, 2**40),
        owned_by=table.text("owned_by", routes[0].upstream if routes else ""),
        modalities=table.texts("modalities", _modalities(family), MODALITIES),
        capabilities=table.texts("capabilities", family.capabilities()),
        supported_parameters=table.texts("supported_parameters", family.parameters()),
    )
    _refuse_impossible_limits(table, offer)
    table.finish()
    return offer


def _offer_surface(table: _Table) -> str:
    surface = table.text("surface", required=True)
    if surface and surface not in OFFER_SURFACES:
        table.refuse("surface", f"{surface!r} is unknown; known are {', '.join(OFFER_SURFACES)}")
    elif surface and surface not in SURFACES_SERVED:
        served = ", ".join(SURFACES_SERVED)
        table.refuse("surface", f"this version does not serve {surface!r} yet; it serves {served}")
    return surface


def _routes(
    table: _Table, upstreams: Mapping[str, UpstreamConfig], refused: set[str], shipped: _Shipped
) -> tuple[Route, ...]:
    routes: list[Route] = []
    tables = table.children("routes")
    if not tables and not table.was_refused("routes"):
        table.refuse("routes", 'name at least one, such as [{ upstream = "…", model = "…" }]')
    for one in tables:
        route = Route(
            upstream=one.text("upstream", required=True),
            model=one.text("model", required=True),
            weight=one.whole("weight", 1, 1, 1_000),
            order=one.whole("order", 0, 0, 100),
        )
        one.finish()
        if route.upstream and route.upstream not in upstreams.keys() | refused:
            one.refuse("upstream", _dangling(route.upstream, shipped))
        if any((route.upstream, route.model) == (other.upstream, other.model) for other in routes):
            one.refuse("", f"leads to {route.model!r} at {route.upstream!r}, as one before it does")
        routes.append(route)
    return tuple(routes)


def _dangling(upstream: str, shipped: _Shipped) -> str:
    if upstream in shipped.providers:
        return f"{upstream!r} is a known provider, but {shipped.providers[upstream].api_key_env} is not set"
    return f"there is no upstream {upstream!r}"


def _listed_models(
    table: _Table,
    routes: Sequence[Route],
    upstreams: Mapping[str, UpstreamConfig],
    prices: _ListPrices,
) -> list[ModelInfo] | None:
    """Return the price list's entry of every route, or of `list_price`; None where one is missing."""
    named = table.text("list_price")
    if named:
        provider_id, _, model = named.partition("/")
        found = prices.model(provider_id, model)
        if found is None:
            table.refuse("list_price", f'no list price is known for {named!r}; write "provider/model"')
        return [found] if found else None
    found_all = [
        prices.model_at(upstreams[route.upstream].base_url, route.model)
        for route in routes
        if route.upstream in upstreams
    ]
    return None if None in found_all or not found_all else found_all


def _rates(
    table: _Table, routes: Sequence[Route], listed: Sequence[ModelInfo] | None, prices: _ListPrices
) -> RateCard:
    price_usd = table.raw("price_usd")
    if price_usd is not None:
        return _operator_rates(table, price_usd)
    cards = [prices.rates(info) for info in listed or ()]
    if cards and None not in cards:
        return RateCard.dearest_of(cards)
    if routes and not table.was_refused("list_price"):
        table.refuse(
            "price_usd",
            f"offer {table.text('id')!r} has no price: no list price is known for its routes; "
            'name price_usd, or list_price = "provider/model"',
        )
    return RateCard()


def _operator_rates(table: _Table, price_usd: object) -> RateCard:
    where = table.where("price_usd")
    if not isinstance(price_usd, dict):
        table.refuse("price_usd", 'is not a table such as { input_per_million = "0.25", … }')
        return RateCard()
    if table.raw("list_price") is not None:
        table.refuse("list_price", "name either price_usd or list_price, not both")
    try:
        rates = RateCard.from_config(price_usd, where)
    except ConfigurationError as error:
        table.problems.extend(error.problems)
        return RateCard()
    # A chat without one of these would be sold at nothing by oversight; "0" says it on purpose.
    for key in ("input_per_million", "output_per_million"):
        if key not in price_usd:
            table.problems.append(f'{where}.{key}: missing; write "0" if it is meant to be free')
    return rates


def _refuse_impossible_limits(table: _Table, offer: Offer) -> None:
    # Only what the operator wrote is refused; defaults are kept within bounds where they are made.
    if offer.context_tokens and offer.max_output_tokens > offer.context_tokens:
        table.refuse("max_output_tokens", f"more than the context, {offer.context_tokens} tokens")
    if offer.default_max_output_tokens > offer.max_output_tokens:
        table.refuse("default_max_output_tokens", f"more than max_output_tokens, {offer.max_output_tokens}")


def _max_output_tokens(family: _Family, context_tokens: int | None) -> int:
    fallback = MAX_OUTPUT_TOKENS_REASONING if family.reasons else MAX_OUTPUT_TOKENS
    return min(family.max_output_tokens or fallback, context_tokens or TOKENS_MAX)


def _default_max_output_tokens(reasons_hidden: bool, max_output_tokens: int) -> int:
    return min(DEFAULT_OUTPUT_TOKENS_HIDDEN if reasons_hidden else DEFAULT_OUTPUT_TOKENS, max_output_tokens)


def _first_token_timeout_s(reasons_hidden: bool) -> int:
    return FIRST_TOKEN_TIMEOUT_HIDDEN_S if reasons_hidden else FIRST_TOKEN_TIMEOUT_S


def _modalities(family: _Family) -> tuple[str, ...]:
    return ("text", "image") if family.images else ("text",)


def _plans(file: _Table) -> dict[str, Plan]:
    plans = {plan.name: plan for plan in DEFAULT_PLANS}
    for name, table in file.named_children("plans").items():
        if not _NAME.fullmatch(name):
            table.refuse("", "a name is of a-z, 0-9, - and _, 40 at most")
        plans[name] = _plan(name, table, plans.get(name, DEFAULT_PLANS[0]))
    return plans


def _plan(name: str, table: _Table, default: Plan) -> Plan:
    surfaces = table.texts("surfaces", tuple(default.surfaces), (*SURFACES, EVERY_SURFACE))
    plan = Plan(
        name=name,
        included_calls_per_month=table.whole(
            "included_calls_per_month", default.included_calls_per_month, 0, 10**9
        ),
        included_max_cost_microusd=table.amount_microusd(
            "included_max_cost_usd", default.included_max_cost_microusd
        ),
        requests_per_minute=table.whole("requests_per_minute", default.requests_per_minute, 1, 10**6),
        concurrent_calls=table.whole(
            "concurrent_calls", default.concurrent_calls if default.name == name else CONCURRENT_CALLS, 1, 10**6
        ),
        surfaces=frozenset(surfaces),
    )
    table.finish()
    return plan


# What a provider's key, or nothing at all, switches on.


class _ListPrices:
    """Look up what genai-prices knows of a model, and sell it with the markup."""

    def __init__(self, shipped: _Shipped, markup_percent: str, now: datetime) -> None:
        self.shipped = shipped
        self.markup_percent = markup_percent
        self.providers = get_snapshot().providers
        midnight = now.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
        self.moments = [midnight + timedelta(minutes=minute) for minute in range(0, 24 * 60, 15)]

    def model(self, provider_id: str, model: str) -> ModelInfo | None:
        for provider in self.providers:
            if provider.id == provider_id and model:
                return provider.find_model(model, all_providers=self.providers)
        return None

    def model_at(self, base_url: str, model: str) -> ModelInfo | None:
        for provider in self.providers:
            if base_url and re.match(provider.api_pattern, base_url):
                info = provider.find_model(model, all_providers=self.providers)
                if info is not None:
                    return info
        return None

    def rates(self, info: ModelInfo) -> RateCard | None:
        """Return the day's price: where it changes by the hour, the dearest, for it is read at start."""
        by_identity = {id(price): price for price in map(info.get_prices, self.moments)}
        cards = [RateCard.from_list_price(price, self.markup_percent) for price in by_identity.values()]
        return None if None in cards else RateCard.dearest_of(cards)


def _provided_offers(provider: Provider, prices: _ListPrices) -> list[Offer]:
    offers = []
    for listed_name in provider.models:
        model = provider.model_prefix + listed_name
        info = prices.model(provider.list_prices, model)
        rates = prices.rates(info) if info else None
        if rates is None:
            # A newer price list may have dropped it: what has no price is not sold.
            logger.warning("%s of %s is not offered: it has no list price", model, provider.name)
            continue
        offers.append(_provided_offer(provider, listed_name, info, rates, prices.shipped.family(model)))
    return offers


def _provided_offer(
    provider: Provider, listed_name: str, info: ModelInfo, rates: RateCard, family: _Family
) -> Offer:
    max_output_tokens = _max_output_tokens(family, info.context_window)
    return Offer(
        id=provider.id_prefix + listed_name,
        name=info.name or listed_name,
        surface="chat",
        routes=(Route(provider.name, provider.model_prefix + listed_name),),
        rates=rates,
        context_tokens=info.context_window,
        max_output_tokens=max_output_tokens,
        default_max_output_tokens=_default_max_output_tokens(family.reasons_hidden, max_output_tokens),
        reasons_hidden=family.reasons_hidden,
        image_tokens_max=family.image_tokens_max,
        first_token_timeout_s=_first_token_timeout_s(family.reasons_hidden),
        owned_by=provider.name,
        modalities=_modalities(family),
        capabilities=family.capabilities(),
        supported_parameters=family.parameters(),
    )


def _demo_upstream(
    upstreams: Mapping[str, UpstreamConfig], offers: Mapping[str, Offer]
) -> UpstreamConfig | None:
    """Return the demonstration that the operator named, unless an offer leads to it already."""
    routed = {route.upstream for offer in offers.values() for route in offer.routes}
    return next((one for one in upstreams.values() if one.is_demo and one.name not in routed), None)


def _demo_of_nothing(shipped: _Shipped, settings: Settings, problems: list[str]) -> UpstreamConfig | None:
    if not settings.production:
        return UpstreamConfig(name=DEMO_UPSTREAM, format=DEMO_FORMAT)
    variables = ", ".join(provider.api_key_env for provider in shipped.providers.values())
    problems.append(
        "upstreams: nothing answers calls, and the demonstration does not run in production unasked: "
        f"set a provider's key ({variables}), or name an upstream in TOLLGATE_CONFIG"
    )
    return None


def _demo_offer(shipped: _Shipped, upstream: UpstreamConfig) -> Offer:
    values = shipped.demo
    family = _Family()
    return Offer(
        id=values["id"],
        name=values["name"],
        surface="chat",
        routes=(Route(upstream.name, values["id"]),),
        rates=RateCard.from_config(values["price_usd"], "demo.price_usd"),
        context_tokens=values["context_tokens"],
        max_output_tokens=values["max_output_tokens"],
        default_max_output_tokens=_default_max_output_tokens(False, values["max_output_tokens"]),
        owned_by=values["owned_by"],
        capabilities=family.capabilities(),
        supported_parameters=family.parameters(),
    )


# Reading tables.


class _Table:
    """Hand out the checked values of one table, keeping what is wrong and which keys were asked for.

    A wrong value is noted under its path and reads as the default, so that reading goes on.
    """

    def __init__(self, values: Mapping[str, Any], path: str, problems: list[str]) -> None:
        self.values = values
        self.path = path
        self.problems = problems
        self.asked: set[str] = set()
        self.refused: set[str] = set()

    def where(self, key: str) -> str:
        return ".".join(part for part in (self.path, key) if part)

    def refuse(self, key: str, sentence: str) -> None:
        self.refused.add(key)
        self.problems.append(f"{self.where(key)}: {sentence}")

    def was_refused(self, key: str) -> bool:
        return key in self.refused

    def finish(self) -> None:
        for key in self.values.keys() - self.asked:
            self.refuse(key, f"unknown key; known are {', '.join(sorted(self.asked))}")

    def raw(self, key: str) -> Any:
        self.asked.add(key)
        return self.values.get(key)

    def text(self, key: str, default: str = "", *, required: bool = False, longest: int = 200) -> str:
        value = self.raw(key)
        if value is None:
            if required and not self.was_refused(key):
                self.refuse(key, "missing")
            return default
        if isinstance(value, str) and 0 < len(value) <= longest and _is_printable(value):
            return value
        if not self.was_refused(key):
            self.refuse(key, f"{value!r} is not a text of 1 to {longest} characters")
        return default

    def whole(self, key: str, default: int | None, lowest: int, highest: int) -> int | None:
        value = self.raw(key)
        if value is None:
            return default
        if type(value) is int and lowest <= value <= highest:
            return value
        self.refuse(key, f"{value!r} is not a whole number from {lowest} to {highest}")
        return default

    def flag(self, key: str, default: bool) -> bool:
        value = self.raw(key)
        if value is None or isinstance(value, bool):
            return default if value is None else value
        self.refuse(key, f"{value!r} is neither true nor false")
        return default

    def choice(self, key: str, choices: Sequence[str], default: str) -> str:
        value = self.text(key, default)
        if value in choices:
            return value
        self.refuse(key, f"{value!r} is none of {', '.join(choices)}")
        return default

    def texts(self, key: str, default: tuple[str, ...], choices: Sequence[str] = ()) -> tuple[str, ...]:
        value = self.raw(key)
        if value is None:
            return default
        if not isinstance(value, list) or not all(isinstance(one, str) and one for one in value):
            self.refuse(key, f"{value!r} is not a list of texts")
            return default
        unknown = [one for one in value if choices and one not in choices]
        if unknown:
            self.refuse(key, f"{', '.join(map(repr, unknown))} unknown; known are {', '.join(choices)}")
        if len(set(value)) < len(value):
            self.refuse(key, "names something twice")
        return tuple(value)

    def decimal(self, key: str, default: str, highest: int) -> str:
        value = self.raw(key)
        if value is None:
            return default
        try:
            # A pico-dollar's twelve places bound the digits of a percentage too.
            if 0 <= picousd(value) <= picousd(str(highest)):
                return value.strip()
            self.refuse(key, f"{value!r} is not from 0 to {highest}")
        except ValueError:
            self.refuse(key, f'{value!r} is not a decimal string such as "10"')
        return default

    def amount_microusd(self, key: str, default: int) -> int:
        value = self.raw(key)
        if value is None:
            return default
        try:
            amount = microusd(value)
        except ValueError as error:
            self.refuse(key, str(error))
            return default
        if amount < 0:
            self.refuse(key, f"{value!r} is negative")
        return amount

    def url(self, key: str) -> str:
        value = self.text(key, required=True, longest=2_000)
        if value and not _is_base_url(value):
            self.refuse(key, f"{value!r} is not an address such as https://api.example/v1")
        return value.rstrip("/")

    def headers(self, key: str) -> dict[str, str]:
        # The values are not repeated in a problem: they may be secrets.
        table = self.child(key)
        for name, value in table.values.items():
            if not _HEADER_NAME.fullmatch(name) or name.lower() in _HEADERS_OF_THE_CONNECTION:
                table.refuse(name, "is not a header that can be set")
            elif not isinstance(value, str) or not _is_header_value(value):
                table.refuse(name, "its value is not a text that a header can carry")
        return dict(table.values)

    def child(self, key: str) -> _Table:
        value = self.raw(key)
        if value is not None and not isinstance(value, dict):
            self.refuse(key, "is not a table")
            value = None
        return _Table(value or {}, self.where(key), self.problems)

    def named_children(self, key: str) -> dict[str, _Table]:
        table = self.child(key)
        return {name: table.child(name) for name in table.values}

    def children(self, key: str) -> list[_Table]:
        value = self.raw(key)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
            self.refuse(key, "is not a list of tables")
            return []
        return [_Table(one, f"{self.where(key)}[{n}]", self.problems) for n, one in enumerate(value)]


def _is_base_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        port_is_good = parts.port != 0
    except ValueError:
        return False
    return (
        parts.scheme in ("http", "https")
        and bool(parts.hostname)
        and port_is_good
        and not re.search(r"[\s?#@]", text)
    )


def _is_header_value(text: str) -> bool:
    return text.isascii() and _is_printable(text)


def _is_printable(text: str) -> bool:
    return text.isprintable() and text == text.strip()
