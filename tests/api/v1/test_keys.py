"""What a key may do: the headers it comes in, its scopes, models, addresses, expiry, rate, and its end."""

from __future__ import annotations

import aiohttp
import pytest

from models import api_key
from models.clock import now_ms
from models.database import Database
from tests.api.envelope import refused
from tests.api.v1.test_chat import body
from tests.api.v1.test_errors import NOBODYS_KEY
from tests.cast import Actor, enter
from tests.house import House

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    "shape",
    [
        {"Authorization": "Bearer {}"}, {"Authorization": "bearer {}"}, {"authorization": "BEARER   {}  "},
        {"Authorization": "{}"}, {"x-api-key": "{}"}, {"X-API-Key": " {} "}, {"api-key": "{}"},
        {"Authorization": "Bearer", "x-api-key": "{}"}, {"Authorization": "", "api-key": "{}"},
        {"Authorization": "Bearer {}", "x-api-key": NOBODYS_KEY},
    ],
)
async def test_comes_in_any_of_the_usual_headers(
    house: House, alice: Actor, http: aiohttp.ClientSession, shape: dict[str, str]
) -> None:
    headers = {name: value.format(alice.key) for name, value in shape.items()}
    async with http.post(house.base_url + CHAT, json=body(), headers=headers) as answer:
        assert answer.status == 200
    async with http.get(f"{house.base_url}/v1/models", headers=headers) as answer:
        assert answer.status == 200


@pytest.mark.parametrize(
    "shape", [{"Authorization": "Basic {}"}, {"Authorization": f"Bearer {NOBODYS_KEY}", "x-api-key": "{}"}]
)
async def test_authorization_comes_first(
    house: House, alice: Actor, http: aiohttp.ClientSession, shape: dict[str, str]
) -> None:
    headers = {name: value.format(alice.key) for name, value in shape.items()}
    async with http.post(house.base_url + CHAT, json=body(), headers=headers) as answer:
        await refused(answer, 401, "invalid_api_key")


async def test_never_comes_in_the_address(house: House, alice: Actor, http: aiohttp.ClientSession) -> None:
    for name in ("api_key", "key", "access_token"):
        async with http.get(f"{house.base_url}/v1/models", params={name: alice.key}) as answer:
            await refused(answer, 400, "invalid_request", param=name)
    assert alice.key not in house.log()


@pytest.mark.parametrize(
    "scopes, chats, lists",
    [
        (None, 200, 200), (["chat"], 200, 403), (["chat", "models"], 200, 200), (["models"], 403, 200),
        (["chat:read", "models:read"], 403, 200), (["images"], 403, 403), ([], 403, 403),
    ],
)
async def test_scopes_narrow_it(
    house: House, house_books: Database, http: aiohttp.ClientSession, scopes: list[str] | None, chats: int,
    lists: int,
) -> None:
    actor = await enter(house_books, "scoped", plan="wallet", credit_microusd=1_000_000, scopes=scopes)
    for path in (CHAT, "/v1/public/chat"):
        async with http.post(house.base_url + path, json=body(), headers=actor.headers) as answer:
            if chats == 403:
                assert "API key" in (await refused(answer, 403, "scope_denied"))["message"]
            assert answer.status == chats
    async with http.get(f"{house.base_url}/v1/models", headers=actor.headers) as answer:
        if lists == 403:
            await refused(answer, 403, "scope_denied")
        assert answer.status == lists


async def test_a_scope_adds_nothing_to_the_plan(
    house: House, house_books: Database, http: aiohttp.ClientSession
) -> None:
    actor = await enter(house_books, "mute", plan="mute", scopes=["chat", "models"])
    async with http.post(house.base_url + CHAT, json=body(), headers=actor.headers) as answer:
        assert "plan" in (await refused(answer, 403, "scope_denied"))["message"]


async def test_models_narrow_it(house: House, house_books: Database, http: aiohttp.ClientSession) -> None:
    actor = await enter(
        house_books, "narrow", plan="wallet", credit_microusd=1_000_000, models=["vendor/twin by call"]
    )
    asked = body(model="vendor/twin by call")
    async with http.post(house.base_url + CHAT, json=asked, headers=actor.headers) as answer:
        assert answer.status == 200
    told = []
    for name in ("twin", "never-was"):
        async with http.post(house.base_url + CHAT, json=body(model=name), headers=actor.headers) as answer:
            inner = await refused(answer, 404, "model_not_found", param="model")
            told.append(inner["message"].replace(name, "X"))
    assert told[0] == told[1]


@pytest.mark.parametrize(
    "addresses, status",
    [
        (["127.0.0.1"], 200), (["127.0.0.0/8", "192.0.2.1"], 200), (["0.0.0.0/0"], 200),
        (["192.0.2.0/24"], 403), (["::1"], 403), ([], 403), (["nonsense"], 403), (["nonsense", "127.0.0.1"], 200),
    ],
)
async def test_addresses_narrow_it(
    house: House, house_books: Database, http: aiohttp.ClientSession, addresses: list[str], status: int
) -> None:
    actor = await enter(
        house_books, "placed", plan="wallet", credit_microusd=1_000_000, addresses=addresses
    )
    forgery = dict.fromkeys(("X-Forwarded-For", "X-Real-IP", "Fly-Client-IP", "Forwarded"), "192.0.2.1")
    for method, path, asked in (("POST", CHAT, body()), ("GET", "/v1/models", None)):
        for forged in ({}, forgery):
            async with http.request(
                method, house.base_url + path, json=asked, headers={**forged, **actor.headers}
            ) as answer:
                if status == 403:
                    assert "address" in (await refused(answer, 403, "scope_denied"))["message"]
                assert answer.status == status


async def test_an_expired_key_is_invalid(
    house: House, house_books: Database, http: aiohttp.ClientSession
) -> None:
    past = await enter(house_books, "past", plan="wallet", expires_at_ms=now_ms() - 1)
    later = await enter(
        house_books, "later", plan="wallet", credit_microusd=1_000_000, expires_at_ms=now_ms() + 60_000
    )
    async with http.post(house.base_url + CHAT, json=body(), headers=past.headers) as answer:
        await refused(answer, 401, "invalid_api_key")
    async with http.post(house.base_url + CHAT, json=body(), headers=later.headers) as answer:
        assert answer.status == 200
    # The server knows this key by now, and must notice all the same that its time has come.
    await api_key.ApiKey.filter(id=later.key_id).update(expires_at_ms=now_ms() - 1)
    async with http.post(house.base_url + CHAT, json=body(), headers=later.headers) as answer:
        await refused(answer, 401, "invalid_api_key")


@pytest.mark.parametrize(
    "method, path, asked",
    [
        ("POST", CHAT, body()),
        ("POST", CHAT, body(stream=True)),
        ("POST", CHAT, body(n=0)),
        ("POST", CHAT, body(model="nothing")),
        ("POST", CHAT, {}),
        ("GET", "/v1/models", None),
        ("GET", "/v1/models/nothing", None),
        ("GET", "/v1/usage", None),
        ("GET", "/v1/balance", None),
    ],
)
async def test_a_revoked_key_is_invalid_at_once(
    house: House, house_books: Database, alice: Actor, http: aiohttp.ClientSession, method: str, path: str,
    asked: dict[str, object] | None,
) -> None:
    """Whatever else is wrong with the request, and though the server has the caller in its memory."""
    async with http.post(house.base_url + CHAT, json=body(), headers=alice.headers) as answer:
        assert answer.status == 200
    await api_key.revoke(alice.account.id, alice.key_id)
    for _ in range(2):
        async with http.request(method, house.base_url + path, json=asked, headers=alice.headers) as answer:
            await refused(answer, 401, "invalid_api_key")


async def test_another_key_of_the_account_goes_on(
    house: House, house_books: Database, alice: Actor, http: aiohttp.ClientSession
) -> None:
    second, plain = await api_key.create(alice.account, "second")
    await api_key.revoke(alice.account.id, alice.key_id)
    async with http.post(
        house.base_url + CHAT, json=body(), headers={"Authorization": f"Bearer {plain}"}
    ) as answer:
        assert answer.status == 200
    async with http.get(
        f"{house.base_url}/v1/usage", headers={"Authorization": f"Bearer {plain}"}
    ) as answer:
        assert [row["key_id"] for row in (await answer.json())["data"]] == [second.id]


async def test_its_own_rate_is_counted_beside_the_plans(
    house: House, house_books: Database, http: aiohttp.ClientSession
) -> None:
    actor = await enter(
        house_books, "paced", plan="wallet", credit_microusd=1_000_000, requests_per_minute=2
    )
    _, other = await api_key.create(actor.account, "unpaced")
    for left in ("1", "0"):
        async with http.post(house.base_url + CHAT, json=body(), headers=actor.headers) as answer:
            assert answer.status == 200
            assert answer.headers["x-ratelimit-limit-requests"] == "2"
            assert answer.headers["x-ratelimit-remaining-requests"] == left
    for _ in range(2):
        async with http.post(house.base_url + CHAT, json=body(), headers=actor.headers) as answer:
            assert "2 requests a minute" in (await refused(answer, 429, "rate_limit_exceeded"))["message"]
            assert answer.headers["retry-after"] == "60"
    async with http.post(
        house.base_url + CHAT, json=body(), headers={"Authorization": f"Bearer {other}"}
    ) as answer:
        assert answer.status == 200


async def test_its_own_spending_limit_is_a_402_that_says_so(
    house: House, house_books: Database, http: aiohttp.ClientSession
) -> None:
    actor = await enter(
        house_books, "thrifty", plan="wallet", credit_microusd=10_000_000, spend_limit_microusd=15_000,
        spend_period="day",
    )
    asked = body(model="vendor/twin by call")
    async with http.post(house.base_url + CHAT, json=asked, headers=actor.headers) as answer:
        assert answer.status == 200
    async with http.post(house.base_url + CHAT, json=asked, headers=actor.headers) as answer:
        inner = await refused(answer, 402, "insufficient_credits")
    assert "spending limit" in inner["message"]
    assert (inner["needed_usd"], inner["available_usd"]) == ("0.010000", "0.005000")
