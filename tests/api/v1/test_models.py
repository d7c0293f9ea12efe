"""Models: what a key may use, one by one by ids that hold slashes and spaces, and nothing else."""

from __future__ import annotations

import json

import aiohttp
import pytest
from yarl import URL

from models.database import Database
from tests.api.envelope import refused
from tests.cast import Actor, enter
from tests.house import House

NAMES = ["twin", "unreachable", "vendor/twin by call"]


async def test_lists_the_offers_with_their_prices(
    house: House, alice: Actor, http: aiohttp.ClientSession
) -> None:
    for path in ("/v1/models", "/v1/models/"):
        async with http.get(house.base_url + path, headers=alice.headers, allow_redirects=False) as answer:
            assert answer.status == 200
            assert answer.headers["cache-control"] == "private, no-store"
            listed = await answer.json()
        assert listed["object"] == "list" and listed["has_more"] is False
        names = [model["id"] for model in listed["data"]]
        assert names == sorted(names) and set(NAMES) <= set(names)
        assert (listed["first_id"], listed["last_id"]) == (names[0], names[-1])
    twin = next(model for model in listed["data"] if model["id"] == "twin")
    assert twin["object"] == "model" and type(twin["created"]) is int and twin["owned_by"]
    assert (twin["context_length"], twin["max_output_tokens"]) == (128_000, 16_000)
    assert twin["pricing"]["input_per_million"] == "1" and twin["pricing"]["output_per_million"] == "10"
    for name in ("modalities", "capabilities", "supported_parameters"):
        assert isinstance(twin[name], list)


@pytest.mark.parametrize(
    "encoded", ["vendor%2Ftwin%20by%20call", "vendor/twin%20by%20call", "vendor%2ftwin+by+call", "twin"]
)
async def test_one_model_by_its_id(
    house: House, alice: Actor, http: aiohttp.ClientSession, encoded: str
) -> None:
    for end in ("", "/"):
        url = URL(f"{house.base_url}/v1/models/{encoded}{end}", encoded=True)
        async with http.get(url, headers=alice.headers, allow_redirects=False) as answer:
            if "+" in encoded:
                await refused(answer, 404, "model_not_found", param="model")  # a plus in a path is a plus
                continue
            assert answer.status == 200
            model = await answer.json()
            assert model["id"] == ("twin" if encoded == "twin" else "vendor/twin by call")
            async with http.get(f"{house.base_url}/v1/models", headers=alice.headers) as listed:
                assert model in (await listed.json())["data"]


@pytest.mark.parametrize(
    "name", ["nothing", "TWIN", "vendor", "twin%00", "vendor%2F%2Ftwin%20by%20call"]
)
async def test_an_unknown_model_is_not_found(
    house: House, alice: Actor, http: aiohttp.ClientSession, name: str
) -> None:
    async with http.get(URL(f"{house.base_url}/v1/models/{name}", encoded=True), headers=alice.headers) as answer:
        await refused(answer, 404, "model_not_found", param="model")


async def test_a_key_sees_only_its_models(
    house: House, house_books: Database, http: aiohttp.ClientSession
) -> None:
    narrow = await enter(house_books, "narrow", plan="wallet", models=["twin", "not-offered"])
    none = await enter(house_books, "none", plan="wallet", models=[])
    async with http.get(f"{house.base_url}/v1/models", headers=narrow.headers) as answer:
        assert [model["id"] for model in (await answer.json())["data"]] == ["twin"]
    async with http.get(f"{house.base_url}/v1/models", headers=none.headers) as answer:
        assert await answer.json() == {
            "object": "list", "data": [], "first_id": "", "last_id": "", "has_more": False
        }
    told = []
    for name in ("unreachable", "never-was"):
        async with http.get(f"{house.base_url}/v1/models/{name}", headers=narrow.headers) as answer:
            inner = await refused(answer, 404, "model_not_found", param="model")
            told.append(inner["message"].replace(name, "X"))
    assert told[0] == told[1]


async def test_a_plan_shows_what_it_includes(
    house: House, house_books: Database, http: aiohttp.ClientSession
) -> None:
    """The plan `mute` includes the list, but no surface on which a model could be called."""
    mute = await enter(house_books, "mute", plan="mute")
    async with http.get(f"{house.base_url}/v1/models", headers=mute.headers) as answer:
        assert answer.status == 200
        assert (await answer.json())["data"] == []


@pytest.mark.parametrize("scopes, status", [(["models"], 200), (["models:read"], 200), (["chat"], 403), ([], 403)])
async def test_needs_its_scope(
    house: House, house_books: Database, http: aiohttp.ClientSession, scopes: list[str], status: int
) -> None:
    actor = await enter(house_books, "scoped", plan="wallet", scopes=scopes)
    for path in ("/v1/models", "/v1/models/twin"):
        async with http.get(house.base_url + path, headers=actor.headers) as answer:
            if status == 403:
                await refused(answer, 403, "scope_denied")
            assert answer.status == status


async def test_says_nothing_of_routes_and_upstreams(
    house: House, alice: Actor, http: aiohttp.ClientSession
) -> None:
    async with http.get(f"{house.base_url}/v1/models", headers=alice.headers) as answer:
        text = json.dumps(await answer.json())
    for secret in ("twin-1", "twin-2", "127.0.0.1", "upstream-key"):
        assert secret not in text
