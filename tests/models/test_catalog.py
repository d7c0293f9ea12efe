"""The catalog: what is put together, and that every mistake of an operator is named by its path."""

import dataclasses
from datetime import UTC, datetime

import pytest
from genai_prices.data_snapshot import get_snapshot

from models.catalog import Route, load_catalog, scope_of, shipped_providers
from models.errors import ConfigurationError
from models.rate_card import RateCard
from models.settings import read_settings

NOW = datetime(2026, 11, 21, 8, tzinfo=UTC)
ACME = """
[upstreams.acme]
format = "openai"
base_url = "http://127.0.0.1:9100/v1/"
api_key = "acme-secret"
"""
OFFER = """
[[offers]]
id = "gpt-5-mini"
surface = "chat"
routes = [{ upstream = "acme", model = "gpt-5-mini-2025-08-07" }]
context_tokens = 400000
max_output_tokens = 128000
price_usd = { input_per_million = "0.25", cached_input_per_million = "0.025", output_per_million = "2.00" }
"""


@pytest.fixture
def load(tmp_path):
    def load_with(toml="", **environ):
        path = tmp_path / "tollgate.toml"
        path.write_text(toml)
        return load_catalog(read_settings({"TOLLGATE_CONFIG": str(path), **environ}), NOW)

    return load_with


@pytest.fixture
def problems(load):
    def problems_with(toml="", **environ):
        with pytest.raises(ConfigurationError) as error:
            load(toml, **environ)
        return error.value.problems

    return problems_with


def offer_with(line):
    """Return OFFER with one key replaced or added."""
    key = line.partition("=")[0].strip()
    kept = [old for old in OFFER.splitlines() if old.partition("=")[0].strip() != key]
    return ACME + "\n".join([*kept, line])


# Nothing configured


def test_nothing_configured_is_the_demonstration():
    catalog = load_catalog(read_settings({}), NOW)
    offer = catalog.offers["tollgate-demo"]
    assert list(catalog.offers) == ["tollgate-demo"]
    assert catalog.is_demo
    assert catalog.upstreams[offer.routes[0].upstream].is_demo
    assert (offer.owned_by, offer.surface) == ("tollgate", "chat")
    assert "demonstration" in offer.name
    assert (offer.rates.input, offer.rates.output) == (100_000, 400_000)
    assert (catalog.service_name, catalog.markup_percent) == ("Tollgate", "0")
    assert set(catalog.plans) == {"free", "payg"}


def test_an_empty_file_is_the_demonstration_too(load):
    assert list(load().offers) == ["tollgate-demo"]


def test_production_does_not_pretend_unasked(problems):
    environ = {"PUBLIC_URL": "https://gateway.example", "SECRET_KEY": "x" * 32, "MAIL_TO_CONSOLE": "yes"}
    (problem,) = problems("", **environ)
    assert "OPENAI_API_KEY" in problem
    assert "production" in problem


def test_production_pretends_when_asked_by_name(load):
    catalog = load(
        '[upstreams.pretend]\nformat = "demo"', PUBLIC_URL="https://gateway.example", SECRET_KEY="x" * 32,
        MAIL_TO_CONSOLE="yes",
    )
    assert list(catalog.offers) == ["tollgate-demo"]
    assert catalog.offers["tollgate-demo"].routes[0].upstream == "pretend"


def test_the_demonstration_stays_away_from_what_is_real(load):
    assert "tollgate-demo" not in load(ACME + OFFER).offers
    assert not load("", OPENAI_API_KEY="sk-1").is_demo


def test_an_offer_on_the_demonstration_replaces_its_own(load):
    catalog = load(OFFER.replace('"acme"', '"demo"') + '[upstreams.demo]\nformat = "demo"')
    assert list(catalog.offers) == ["gpt-5-mini"]


# Providers


@pytest.mark.parametrize("provider", shipped_providers(), ids=lambda provider: provider.name)
def test_every_shipped_model_has_a_usable_price(provider):
    (listed,) = (one for one in get_snapshot().providers if one.id == provider.list_prices)
    for model in provider.models:
        info = listed.find_model(provider.model_prefix + model)
        assert info is not None, model
        assert info.id == model
        assert not info.deprecated, model
        rates = RateCard.from_list_price(info.get_prices(NOW), "0")
        assert rates is not None, model
        assert min(rates.input, rates.output) > 0, model


@pytest.mark.parametrize("provider", shipped_providers(), ids=lambda provider: provider.name)
def test_a_key_alone_switches_a_provider_on(provider, load):
    catalog = load("", **{provider.api_key_env: " k-1 "})
    upstream = catalog.upstreams[provider.name]
    assert list(catalog.upstreams) == [provider.name]
    assert len(catalog.offers) == len(provider.models)
    assert (upstream.api_key, upstream.format, upstream.base_url) == ("k-1", "openai", provider.base_url)
    for offer in catalog.offers.values():
        assert offer.owned_by == provider.name
        assert not offer.rates.is_free
        assert offer.default_max_output_tokens <= offer.max_output_tokens
        assert offer.max_output_tokens <= (offer.context_tokens or offer.max_output_tokens)


def test_no_two_shipped_offers_share_an_id(load):
    catalog = load("", **{provider.api_key_env: "k" for provider in shipped_providers()})
    assert len(catalog.offers) == sum(len(provider.models) for provider in shipped_providers())


def test_a_blank_key_switches_nothing_on(load):
    assert list(load("", OPENAI_API_KEY="  ").upstreams) == ["demo"]


def test_a_key_no_header_can_carry_is_refused(problems):
    (problem,) = problems("", OPENAI_API_KEY="sk-1\nsk-2")
    assert problem.startswith("OPENAI_API_KEY: ")
    assert "sk-1" not in problem


def test_openai_has_its_own_ways(load):
    catalog = load("", OPENAI_API_KEY="k", GROQ_API_KEY="k")
    assert catalog.upstreams["openai"].limit_field == "max_completion_tokens"
    assert catalog.upstreams["openai"].strip_obfuscation
    assert catalog.upstreams["groq"].limit_field == "max_tokens"
    assert not catalog.upstreams["groq"].strip_obfuscation


def test_markup_is_put_on_list_prices_only(load):
    plain = load("", OPENAI_API_KEY="k").offers["gpt-4o"].rates
    catalog = load('[service]\nmarkup_percent = "10"' + ACME + OFFER, OPENAI_API_KEY="k")
    assert catalog.offers["gpt-4o"].rates.output * 10 == plain.output * 11
    assert catalog.offers["gpt-5-mini"].rates.output == 2_000_000


def test_prices_that_change_by_the_hour_are_the_dearest_of_the_day(load):
    (listed,) = (one for one in get_snapshot().providers if one.id == "deepseek")
    info = listed.find_model("deepseek-flash")
    by_hour = [
        RateCard.from_list_price(info.get_prices(NOW.replace(hour=h)), "0").output for h in range(24)
    ]
    assert len(set(by_hour)) > 1
    assert load("", DEEPSEEK_API_KEY="k").offers["deepseek-flash"].rates.output == max(by_hour)


def test_families_carry_what_no_price_list_does(load):
    offers = load("", OPENAI_API_KEY="k").offers
    assert (offers["gpt-4o-mini"].image_tokens_max, offers["gpt-4o"].image_tokens_max) == (48_169, 3_000)
    thinking, plain = offers["gpt-5-mini"], offers["gpt-4.1"]
    assert thinking.reasons_hidden and not plain.reasons_hidden
    assert (thinking.max_output_tokens, plain.max_output_tokens) == (128_000, 32_768)
    assert (thinking.default_max_output_tokens, plain.default_max_output_tokens) == (32_768, 8_192)
    assert (thinking.first_token_timeout_s, plain.first_token_timeout_s) == (300, 120)
    assert "temperature" in plain.supported_parameters
    assert "temperature" not in thinking.supported_parameters


def test_a_family_is_known_by_the_last_part_of_a_name_in_any_case(load):
    offers = load("", TOGETHER_API_KEY="k").offers
    assert offers["together/moonshotai/Kimi-K3"].max_output_tokens == 128_000
    assert offers["together/meta-llama/Llama-3.3-70B-Instruct-Turbo"].max_output_tokens == 16_384


def test_an_operators_upstream_takes_the_place_of_a_provider(load):
    catalog = load(
        ACME.replace("acme]", "openai]") + OFFER.replace('"acme"', '"openai"'), OPENAI_API_KEY="k"
    )
    assert list(catalog.offers) == ["gpt-5-mini"]
    assert catalog.upstreams["openai"].base_url == "http://127.0.0.1:9100/v1"


def test_an_operators_offer_takes_the_place_of_a_shipped_one(load):
    catalog = load(offer_with('name = "Ours"'), OPENAI_API_KEY="k")
    assert catalog.offers["gpt-5-mini"].name == "Ours"
    assert "gpt-4o" in catalog.offers


def test_an_offer_may_lead_to_a_switched_on_provider(load):
    catalog = load(OFFER.replace('"acme"', '"openai"'), OPENAI_API_KEY="k")
    assert catalog.offers["gpt-5-mini"].routes == (Route("openai", "gpt-5-mini-2025-08-07"),)


# The operator's file


def test_the_file_of_an_operator(load):
    catalog = load(
        '[service]\nname = "Acme AI"\nmarkup_percent = "12.5"\n'
        + ACME.replace("api_key =", "api_key_env =").replace("acme-secret", "ACME_KEY")
        + 'limit_field = "max_completion_tokens"\nstrip_obfuscation = true\nheaders = { x-team = "blue" }\n'
        + OFFER
        + "default_max_output_tokens = 4096\nreasons_hidden = false\nimage_tokens_max = 10\ncreated = 5\n"
        + 'first_token_timeout_s = 60\nanswer_timeout_s = 90\nowned_by = "openai"\nmodalities = ["text"]\n'
        + 'capabilities = ["tools"]\nsupported_parameters = ["stop"]\nname = "GPT-5 mini"\n'
        + '[plans.free]\nincluded_calls_per_month = 0\nsurfaces = ["chat"]\nincluded_max_cost_usd = "0.5"\n'
        + "[plans.team]\nrequests_per_minute = 60\n",
        ACME_KEY="from-environment",
    )
    upstream, offer = catalog.upstreams["acme"], catalog.offers["gpt-5-mini"]
    assert (catalog.service_name, catalog.markup_percent) == ("Acme AI", "12.5")
    assert (upstream.base_url, upstream.api_key) == ("http://127.0.0.1:9100/v1", "from-environment")
    assert (upstream.limit_field, upstream.strip_obfuscation) == ("max_completion_tokens", True)
    assert upstream.headers == {"x-team": "blue"}
    assert offer.routes == (Route("acme", "gpt-5-mini-2025-08-07", 1, 0),)
    assert (offer.rates.input, offer.rates.cached_input, offer.rates.output) == (250_000, 25_000, 2_000_000)
    assert (offer.context_tokens, offer.max_output_tokens, offer.default_max_output_tokens) == (
        400_000,
        128_000,
        4_096,
    )
    assert (offer.reasons_hidden, offer.image_tokens_max, offer.created) == (False, 10, 5)
    assert (offer.first_token_timeout_s, offer.answer_timeout_s) == (60, 90)
    assert (offer.name, offer.owned_by, offer.scope) == ("GPT-5 mini", "openai", "chat")
    assert (offer.modalities, offer.capabilities, offer.supported_parameters) == (
        ("text",),
        ("tools",),
        ("stop",),
    )
    free, team = catalog.plans["free"], catalog.plans["team"]
    assert (free.included_calls_per_month, free.included_max_cost_microusd) == (0, 500_000)
    assert (free.requests_per_minute, free.surfaces) == (20, {"chat"})
    assert (team.requests_per_minute, team.included_calls_per_month) == (60, 500)
    assert catalog.plans["payg"].requests_per_minute == 600
    assert (free.concurrent_calls, team.concurrent_calls) == (10, 100)


def test_a_server_without_a_key_is_fine(load):
    catalog = load(ACME.replace('api_key = "acme-secret"', "") + OFFER)
    assert catalog.upstreams["acme"].api_key is None


def test_an_upstream_at_a_known_address_has_the_providers_ways(load):
    toml = ACME.replace("http://127.0.0.1:9100/v1/", "https://api.openai.com/v1/") + OFFER
    upstream = load(toml).upstreams["acme"]
    assert (upstream.limit_field, upstream.strip_obfuscation) == ("max_completion_tokens", True)


def test_a_default_output_limit_never_exceeds_the_limit(load):
    assert load(offer_with("max_output_tokens = 100")).offers["gpt-5-mini"].default_max_output_tokens == 100


def test_an_unknown_model_has_the_documented_limits(load):
    offer = load(
        ACME + '[[offers]]\nid = "m"\nsurface = "chat"\nroutes = [{ upstream = "acme", model = "m" }]\n'
        'price_usd = { input_per_million = "0", output_per_million = "0" }'
    ).offers["m"]
    assert (offer.context_tokens, offer.max_output_tokens, offer.default_max_output_tokens) == (
        None,
        16_384,
        8_192,
    )
    assert (offer.first_token_timeout_s, offer.answer_timeout_s, offer.image_tokens_max) == (
        120,
        600,
        3_000,
    )
    assert (offer.name, offer.owned_by, offer.reasons_hidden) == ("m", "acme", False)
    assert offer.rates.is_free


# List prices of the operator's offers


def test_an_offer_without_a_price_has_the_list_price_of_its_upstream(load):
    toml = ACME.replace("http://127.0.0.1:9100/v1/", "https://api.groq.com/openai/v1")
    toml += '[[offers]]\nid = "oss"\nsurface = "chat"\n'
    toml += 'routes = [{ upstream = "acme", model = "openai/gpt-oss-20b" }]'
    offer = load('[service]\nmarkup_percent = "100"' + toml).offers["oss"]
    assert (offer.rates.input, offer.rates.output) == (150_000, 600_000)
    assert offer.context_tokens == 131_072


def test_the_dearest_route_makes_the_price(load):
    catalog = load(
        '[[offers]]\nid = "oss"\nsurface = "chat"\n'
        'routes = [{ upstream = "groq", model = "openai/gpt-oss-120b" }, '
        '{ upstream = "cerebras", model = "gpt-oss-120b" }]',
        GROQ_API_KEY="k",
        CEREBRAS_API_KEY="k",
    )
    assert (catalog.offers["oss"].rates.input, catalog.offers["oss"].rates.output) == (350_000, 750_000)


def test_a_list_price_can_be_named(load):
    toml = "\n".join(line for line in OFFER.splitlines() if not line.startswith("price_usd"))
    offer = load(ACME + toml + '\nlist_price = "openai/gpt-4o"').offers["gpt-5-mini"]
    assert offer.rates.output == 10_000_000


def test_an_offer_without_any_price_is_refused(problems):
    toml = "\n".join(line for line in OFFER.splitlines() if not line.startswith("price_usd"))
    (problem,) = problems(ACME + toml)
    assert problem.startswith("offers[0].price_usd: ")
    assert "'gpt-5-mini'" in problem


# Refusals


@pytest.mark.parametrize(
    ("line", "path"),
    [
        ('id = ""', "offers[0].id"),
        ("id = 5", "offers[0].id"),
        ('surface = "chats"', "offers[0].surface"),
        ('surface = "embeddings"', "offers[0].surface"),
        ("surface = 1", "offers[0].surface"),
        ("routes = []", "offers[0].routes"),
        ('routes = "acme"', "offers[0].routes"),
        ('routes = [{ upstream = "acne", model = "m" }]', "offers[0].routes[0].upstream"),
        ('routes = [{ upstream = "groq", model = "m" }]', "offers[0].routes[0].upstream"),
        ('routes = [{ upstream = "acme" }]', "offers[0].routes[0].model"),
        ('routes = [{ upstream = "acme", model = "m", weight = 0 }]', "offers[0].routes[0].weight"),
        ('routes = [{ upstream = "acme", model = "m", order = -1 }]', "offers[0].routes[0].order"),
        ('routes = [{ upstream = "acme", model = "m", cost = 1 }]', "offers[0].routes[0].cost"),
        (
            'routes = [{ upstream = "acme", model = "m" }, { upstream = "acme", model = "m" }]',
            "offers[0].routes[1]",
        ),
        ("context_tokens = 0", "offers[0].context_tokens"),
        ("context_tokens = 1000", "offers[0].max_output_tokens"),
        ("max_output_tokens = 0", "offers[0].max_output_tokens"),
        ("max_output_tokens = 1.5", "offers[0].max_output_tokens"),
        ("max_output_tokens = true", "offers[0].max_output_tokens"),
        ("max_output_tokens = 400001", "offers[0].max_output_tokens"),
        ("default_max_output_tokens = -5", "offers[0].default_max_output_tokens"),
        ("default_max_output_tokens = 128001", "offers[0].default_max_output_tokens"),
        ('reasons_hidden = "yes"', "offers[0].reasons_hidden"),
        ("image_tokens_max = 0", "offers[0].image_tokens_max"),
        ("first_token_timeout_s = 0", "offers[0].first_token_timeout_s"),
        ("answer_timeout_s = 3601", "offers[0].answer_timeout_s"),
        ("created = 2026-11-21", "offers[0].created"),
        ('owned_by = ""', "offers[0].owned_by"),
        ('modalities = ["smell"]', "offers[0].modalities"),
        ('capabilities = "tools"', "offers[0].capabilities"),
        ('supported_parameters = ["stop", "stop"]', "offers[0].supported_parameters"),
        ('list_price = "openai/gpt-4o"', "offers[0].list_price"),
        ("price_usd = 5", "offers[0].price_usd"),
        ("price_usd = {}", "offers[0].price_usd"),
        (
            'price_usd = { input_per_million = "-1", output_per_million = "1" }',
            "offers[0].price_usd.input_per_million",
        ),
        ('price_usd = { input_per_million = "1" }', "offers[0].price_usd.output_per_million"),
        (
            'price_usd = { input_per_million = "1", output_per_million = 2.0 }',
            "offers[0].price_usd.output_per_million",
        ),
        ("colour = 1", "offers[0].colour"),
    ],
)
def test_a_wrong_offer_is_refused_by_path(line, path, problems):
    (problem,) = problems(offer_with(line))
    assert problem.startswith(f"{path}: ")


@pytest.mark.parametrize("key", ["id", "surface", "routes"])
def test_a_missing_key_of_an_offer_is_named(key, problems):
    toml = "\n".join(line for line in OFFER.splitlines() if line.partition("=")[0].strip() != key)
    (problem,) = problems(ACME + toml)
    assert problem.startswith(f"offers[0].{key}: ")


def test_a_list_price_that_does_not_exist_is_refused_once(problems):
    toml = "\n".join(line for line in OFFER.splitlines() if not line.startswith("price_usd"))
    (problem,) = problems(ACME + toml + '\nlist_price = "openai/gpt-nonsense"')
    assert problem.startswith("offers[0].list_price: ")


def test_two_offers_of_one_id_are_refused(problems):
    (problem,) = problems(ACME + OFFER + OFFER)
    assert problem.startswith("offers[1].id: ")
    assert "offers[0]" in problem


@pytest.mark.parametrize(
    ("old", "new", "path"),
    [
        ('"openai"', '"anthropic"', "format"),
        ('"openai"', '"smtp"', "format"),
        ('format = "openai"', "", "format"),
        ("http://127.0.0.1:9100/v1/", "127.0.0.1:9100", "base_url"),
        ("http://127.0.0.1:9100/v1/", "ftp://a/", "base_url"),
        ("http://127.0.0.1:9100/v1/", "https://a/v1?key=1", "base_url"),
        ("http://127.0.0.1:9100/v1/", "https://me:pw@a/v1", "base_url"),
        ("http://127.0.0.1:9100/v1/", "https://a:99999/v1", "base_url"),
        ("http://127.0.0.1:9100/v1/", "", "base_url"),
        ("api_key =", "api_key_env =", "api_key_env"),
        ("api_key =", 'api_key_env = "HOME"\napi_key =', "api_key"),
        ("api_key =", 'limit_field = "limit"\napi_key =', "limit_field"),
        ("api_key =", "strip_obfuscation = 1\napi_key =", "strip_obfuscation"),
        ("api_key =", "headers = 5\napi_key =", "headers"),
        ("api_key =", 'headers = { host = "x" }\napi_key =', "headers.host"),
        ("api_key =", 'headers = { "a b" = "x" }\napi_key =', "headers.a b"),
        ("api_key =", "headers = { x-a = 5 }\napi_key =", "headers.x-a"),
        ("api_key =", 'headers = { x-a = "a\\nb" }\napi_key =', "headers.x-a"),
        ("api_key =", "key =", "key"),
        ("acme-secret", "schlüssel", "api_key"),
    ],
)
def test_a_wrong_upstream_is_refused_by_path(old, new, path, problems):
    (problem,) = problems(ACME.replace(old, new) + OFFER, HOME="/root")
    assert problem.startswith(f"upstreams.acme.{path}: ")


def test_a_format_to_come_says_so(problems):
    (problem,) = problems(ACME.replace('"openai"', '"gemini"'))
    assert "does not speak 'gemini' yet" in problem


def test_a_surface_to_come_says_so(problems):
    (problem,) = problems(offer_with('surface = "images"'))
    assert "does not serve 'images' yet" in problem


def test_a_missing_key_in_the_environment_is_named(problems):
    (problem,) = problems(ACME.replace('api_key = "acme-secret"', 'api_key_env = "ACME_KEY"') + OFFER)
    assert problem == "upstreams.acme.api_key_env: the environment variable ACME_KEY is not set"


def test_a_known_provider_without_its_key_is_named(problems):
    (problem,) = problems(OFFER.replace('"acme"', '"groq"'))
    assert "GROQ_API_KEY is not set" in problem


def test_a_key_in_the_file_is_for_development(problems):
    secured = {"PUBLIC_URL": "https://gateway.example", "SECRET_KEY": "x" * 32, "MAIL_TO_CONSOLE": "yes"}
    (problem,) = problems(ACME + OFFER, **secured)
    assert problem.startswith("upstreams.acme.api_key: ")
    assert "acme-secret" not in problem


def test_a_wrong_name_of_an_upstream_is_refused(problems):
    assert problems(ACME.replace("[upstreams.acme]", '[upstreams."A B"]'))[0].startswith("upstreams.A B: ")


def test_the_demonstration_takes_no_address(problems):
    (problem,) = problems('[upstreams.demo]\nformat = "demo"\nbase_url = "http://a"')
    assert problem.startswith("upstreams.demo.base_url: unknown key")


@pytest.mark.parametrize(
    ("line", "path"),
    [
        ("included_calls_per_month = -1", "included_calls_per_month"),
        ('included_calls_per_month = "500"', "included_calls_per_month"),
        ("included_max_cost_usd = 0.02", "included_max_cost_usd"),
        ('included_max_cost_usd = "-1"', "included_max_cost_usd"),
        ('included_max_cost_usd = "0.0000001"', "included_max_cost_usd"),
        ("requests_per_minute = 0", "requests_per_minute"),
        ('surfaces = ["chat", "telepathy"]', "surfaces"),
        ('surfaces = ["chat", "chat"]', "surfaces"),
        ('surfaces = "chat"', "surfaces"),
        ("price = 1", "price"),
    ],
)
def test_a_wrong_plan_is_refused_by_path(line, path, problems):
    (problem,) = problems(f"[plans.free]\n{line}")
    assert problem.startswith(f"plans.free.{path}: ")


@pytest.mark.parametrize(
    ("toml", "path"),
    [
        ("[service]\nname = 5", "service.name"),
        ('[service]\nname = ""', "service.name"),
        ("[service]\nmarkup_percent = 10", "service.markup_percent"),
        ('[service]\nmarkup_percent = "-1"', "service.markup_percent"),
        ('[service]\nmarkup_percent = "1001"', "service.markup_percent"),
        ('[service]\ncolour = "red"', "service.colour"),
        ("service = 5", "service"),
        ("upstreams = 5", "upstreams"),
        ("offers = 5", "offers"),
        ("plans = 5", "plans"),
        ("[prices]", "prices"),
        ("= 5", "TOLLGATE_CONFIG"),
    ],
)
def test_a_wrong_file_is_refused_by_path(toml, path, problems):
    (problem,) = problems(toml)
    assert problem.startswith(f"{path}: ")


def test_an_upstream_without_offers_sells_nothing(problems):
    (problem,) = problems(ACME)
    assert problem.startswith("offers: nothing is offered")


def test_a_file_that_is_no_text_is_refused(tmp_path):
    path = tmp_path / "tollgate.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigurationError, match="is not TOML"):
        load_catalog(read_settings({"TOLLGATE_CONFIG": str(path)}))


def test_a_file_that_went_away_is_refused(tmp_path):
    path = tmp_path / "tollgate.toml"
    path.write_text("")
    settings = read_settings({"TOLLGATE_CONFIG": str(path)})
    path.unlink()
    with pytest.raises(ConfigurationError, match="cannot be read"):
        load_catalog(settings)


def test_all_problems_come_at_once(problems):
    found = problems(
        "[service]\nname = 5\n[plans.free]\nprice = 1\n"
        '[upstreams.acme]\nformat = "openai"\nbase_url = "x"\n'
        + OFFER.replace('"0.25"', '"-1"')
        + OFFER.replace('"gpt-5-mini"', '"two"').replace("400000", "0")
    )
    assert [problem.split(": ")[0] for problem in found] == [
        "service.name",
        "upstreams.acme.base_url",
        "offers[0].price_usd.input_per_million",
        "offers[1].context_tokens",
        "plans.free.price",
    ]


# The values


def test_no_secret_shows(load):
    toml = ACME + 'headers = { authorization-two = "header-secret" }' + OFFER
    catalog = load(toml, OPENAI_API_KEY="environment-secret")
    assert "secret" not in repr(catalog)
    assert catalog.upstreams["openai"].api_key == "environment-secret"


def test_a_catalog_cannot_be_changed(load):
    catalog = load(ACME + OFFER)
    with pytest.raises(dataclasses.FrozenInstanceError):
        catalog.service_name = "x"
    with pytest.raises(TypeError):
        catalog.offers["x"] = None
    assert hash(catalog.offers["gpt-5-mini"])
    assert hash(catalog.upstreams["acme"])


@pytest.mark.parametrize(
    ("surface", "scope"),
    [
        ("chat", "chat"),
        ("embeddings", "embeddings"),
        ("images", "images"),
        ("speech", "audio"),
        ("transcription", "audio"),
        ("moderation", "chat"),
    ],
)
def test_scopes(surface, scope):
    assert scope_of(surface) == scope


def test_an_unknown_surface_has_no_scope():
    with pytest.raises(KeyError):
        scope_of("telepathy")
