"""Every kind of refusal over a real socket: one envelope, one request id, and the promised order of checks."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import pytest

from models import api_key
from models.database import Database
from tests.api.envelope import refused, whole
from tests.api.v1.test_chat import body
from tests.cast import Actor, enter
from tests.house import House

CHATS = ("/v1/chat/completions", "/v1/public/chat")
# Well formed, checksum and all, and nobody's.
NOBODYS_KEY = "sk-tg-0000000000000000000000000000002P0j63"


@pytest.fixture(params=CHATS)
def path(request: pytest.FixtureRequest) -> str:
    """Run a test on both chat paths."""
    return request.param


@pytest.mark.parametrize("headers", [{}, {"Authorization": ""}, {"Authorization": "Bearer"}, {"x-api-key": " "}])
async def test_no_key_is_missing(
    house: House, http: aiohttp.ClientSession, headers: dict[str, str]
) -> None:
    for path in CHATS:
        async with http.post(house.base_url + path, json=body(), headers=headers) as answer:
            await refused(answer, 401, "missing_api_key")
            assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(
    "key",
    [
        "x", "sk-tg-", NOBODYS_KEY, "sk-tg-" + "a" * 36, "sk-" + "x" * 48, "sk-tg-" + "a" * 9000,
        "' OR 1=1 --", "sk-tg-%00", "Basic dXNlcjpwYXNz", "Bearer Bearer",
    ],
)
async def test_a_wrong_key_is_invalid(house: House, http: aiohttp.ClientSession, key: str) -> None:
    async with http.post(
        house.base_url + CHATS[0], json=body(), headers={"Authorization": f"Bearer {key}"}
    ) as answer:
        await refused(answer, 401, "invalid_api_key")


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/twin", "/v1/usage", "/v1/usage/req_x", "/v1/balance"])
async def test_lists_ask_for_a_key_too(house: House, http: aiohttp.ClientSession, path: str) -> None:
    async with http.get(house.base_url + path) as answer:
        await refused(answer, 401, "missing_api_key")
    async with http.get(house.base_url + path, headers={"Authorization": f"Bearer {NOBODYS_KEY}"}) as answer:
        await refused(answer, 401, "invalid_api_key")


async def test_an_empty_wallet_is_told_what_is_needed_and_where_to_add_it(
    house: House, house_books: Database, http: aiohttp.ClientSession, path: str
) -> None:
    poor = await enter(house_books, "poor", plan="wallet", credit_microusd=3)
    async with http.post(house.base_url + path, json=body(), headers=poor.headers) as answer:
        inner = await refused(answer, 402, "insufficient_credits")
    assert float(inner["needed_usd"]) > float(inner["available_usd"]) == 0.000003
    assert f"{house.base_url}/dashboard/billing/credits" in inner["message"]


async def test_a_plan_without_the_surface_is_denied(
    house: House, house_books: Database, http: aiohttp.ClientSession, path: str
) -> None:
    mute = await enter(house_books, "mute", plan="mute")
    async with http.post(house.base_url + path, json=body(), headers=mute.headers) as answer:
        inner = await refused(answer, 403, "scope_denied")
    assert "plan" in inner["message"] and "chat" in inner["message"]


async def test_a_full_window_says_when_to_come_again(
    house: House, house_books: Database, http: aiohttp.ClientSession, path: str
) -> None:
    slow = await enter(house_books, "slow", plan="slow")
    for left in (2, 1, 0):
        async with http.post(house.base_url + path, json=body(), headers=slow.headers) as answer:
            assert answer.status == 200
            assert answer.headers["x-ratelimit-limit-requests"] == "3"
            assert answer.headers["x-ratelimit-remaining-requests"] == str(left)
            assert 0 < int(answer.headers["x-ratelimit-reset-requests"].removesuffix("s")) <= 60
    for _ in range(2):  # the first is told by the books, the second from memory
        async with http.post(house.base_url + path, json=body(), headers=slow.headers) as answer:
            await refused(answer, 429, "rate_limit_exceeded")
            assert answer.headers["retry-after"] == "60"


async def test_lists_have_a_coarse_limit(
    house: House, house_books: Database, http: aiohttp.ClientSession
) -> None:
    slow = await enter(house_books, "slow", plan="slow")
    for _ in range(30):
        async with http.get(f"{house.base_url}/v1/balance", headers=slow.headers) as answer:
            assert answer.status == 200
    async with http.get(f"{house.base_url}/v1/balance", headers=slow.headers) as answer:
        await refused(answer, 429, "rate_limit_exceeded")
        assert answer.headers["retry-after"] == "60"


async def test_a_flood_of_bad_calls_is_limited_too(
    house: House, house_books: Database, http: aiohttp.ClientSession
) -> None:
    """They are in no window of the books, but each would leave a row."""
    slow = await enter(house_books, "slow", plan="slow")
    for n in range(30):
        asked = body(n=0) if n % 2 else body(model="gone")
        async with http.post(house.base_url + CHATS[0], json=asked, headers=slow.headers) as answer:
            assert answer.status == (400 if n % 2 else 404)
    async with http.post(house.base_url + CHATS[0], json=body(n=0), headers=slow.headers) as answer:
        await refused(answer, 429, "rate_limit_exceeded")
        assert answer.headers["retry-after"] == "60"
    async with http.post(house.base_url + CHATS[0], json=body(), headers=slow.headers) as answer:
        assert answer.status == 200  # a good call is not kept out by them


async def test_an_unknown_model_is_not_found(
    house: House, alice: Actor, http: aiohttp.ClientSession, path: str
) -> None:
    async with http.post(house.base_url + path, json=body(model="gpt-1"), headers=alice.headers) as answer:
        await refused(answer, 404, "model_not_found", param="model")


async def test_a_failing_provider_is_a_502_without_its_words(
    house: House, alice: Actor, http: aiohttp.ClientSession, path: str
) -> None:
    async with http.post(
        house.base_url + path, json=body("status:403;code:billing_hard_limit"), headers=alice.headers
    ) as answer:
        inner = await refused(answer, 502, "upstream_error")
    assert inner["upstream"] == {"provider": "twin", "status": 403}
    assert "secret" not in json.dumps(inner) and "10.0.0.7" not in json.dumps(inner)
    async with http.post(
        house.base_url + path, json=body(model="unreachable"), headers=alice.headers
    ) as answer:
        inner = await refused(answer, 502, "upstream_error")
    assert inner["upstream"] == {"provider": "nobody", "status": None}


async def test_a_failure_within_a_stream_carries_the_envelope_and_no_done(
    house: House, alice: Actor, http: aiohttp.ClientSession
) -> None:
    asked = body("error:3 tokens:9", stream=True)
    async with http.post(house.base_url + CHATS[0], json=asked, headers=alice.headers) as answer:
        assert answer.status == 200
        events = [event for event in (await answer.text()).split("\n\n") if event.startswith("data: ")]
        last = json.loads(events[-1].removeprefix("data: "))
    assert last["request_id"] == last["error"]["request_id"] == answer.headers["x-request-id"]
    assert (last["error"]["code"], last["error"]["type"]) == ("upstream_error", "upstream_error")
    assert "[DONE]" not in "".join(events)


@pytest.mark.parametrize("path", ["/v1", "/v1/", "/v1/nothing", "/v1/chat", "/v1/models/../../etc", "/v1/%00%ff"])
async def test_unknown_paths_are_not_found(
    house: House, alice: Actor, http: aiohttp.ClientSession, path: str
) -> None:
    for headers in ({}, alice.headers):
        async with http.get(house.base_url + path, headers=headers) as answer:
            if "etc" in path:
                assert answer.status == 404  # the client has already left /v1
                continue
            await refused(answer, 404, "not_found")


async def test_html_is_never_reflected(house: House, alice: Actor, http: aiohttp.ClientSession) -> None:
    for path in ("/v1/<script>alert(1)</script>", "/v1/models/<b>", "/v1/usage/<b>"):
        async with http.get(
            house.base_url + path, headers={**alice.headers, "Accept": "text/html"}
        ) as answer:
            assert answer.status == 404
            whole(await answer.read(), answer.headers)
            assert answer.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    "method, path, allowed",
    [
        ("GET", "/v1/chat/completions", {"POST", "OPTIONS"}),
        ("DELETE", "/v1/public/chat", {"POST", "OPTIONS"}),
        ("POST", "/v1/models", {"GET", "HEAD", "OPTIONS"}),
        ("PUT", "/v1/models/twin", {"GET", "HEAD", "OPTIONS"}),
        ("PATCH", "/v1/balance/", {"GET", "HEAD", "OPTIONS"}),
        ("TRACE", "/v1/usage", {"GET", "HEAD", "OPTIONS"}),
    ],
)
async def test_wrong_methods_name_the_right_ones(
    house: House, http: aiohttp.ClientSession, method: str, path: str, allowed: set[str]
) -> None:
    async with http.request(method, house.base_url + path) as answer:
        await refused(answer, 405, "method_not_allowed")
        assert set(answer.headers["allow"].split(", ")) == allowed


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Type": "application/x-www-form-urlencoded"}, {"Content-Type": "text/plain"},
        {"Content-Type": "multipart/form-data"}, {"Content-Type": "nonsense"},
        {"Content-Encoding": "gzip"}, {"Content-Encoding": "br, gzip"},
    ],
)
async def test_another_media_type_is_unsupported(
    house: House, alice: Actor, http: aiohttp.ClientSession, headers: dict[str, str]
) -> None:
    for path in CHATS:
        async with http.post(
            house.base_url + path, data=json.dumps(body()).encode(),
            headers={"Content-Type": "application/json", **headers, **alice.headers},
        ) as answer:
            await refused(answer, 415, "unsupported_media_type")


@pytest.mark.parametrize(
    "kind", ["application/json; charset=utf-8", "application/problem+json", "APPLICATION/JSON"]
)
async def test_json_by_any_name_is_taken(
    house: House, alice: Actor, http: aiohttp.ClientSession, kind: str
) -> None:
    async with http.post(
        house.base_url + CHATS[0], data=json.dumps(body()).encode(), headers={"Content-Type": kind, **alice.headers}
    ) as answer:
        assert answer.status == 200


async def test_too_large_a_body_is_refused_before_it_is_read(
    house: House, alice: Actor, http: aiohttp.ClientSession, path: str
) -> None:
    async def endless():
        for _ in range(34):
            yield b" " * (1 << 20)

    for data, headers in (
        (b" " * ((32 << 20) + 1), {}),
        (endless(), {"Content-Type": "application/json"}),
    ):
        async with http.post(
            house.base_url + path, data=data,
            headers={"Content-Type": "application/json", **headers, **alice.headers},
        ) as answer:
            await refused(answer, 413, "payload_too_large")
    # The declared length alone is enough: not one byte of this body is ever sent.
    raw = await exchange(house, (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {alice.key}\r\n"
        "Content-Type: application/json\r\nContent-Length: 99999999999\r\n\r\n"
    ))
    assert raw.startswith(b"HTTP/1.1 413"), raw[:200]


async def test_a_wrong_key_is_refused_before_the_body_is_read(house: House, path: str) -> None:
    raw = await exchange(house, (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {NOBODYS_KEY}\r\n"
        "Content-Type: application/json\r\nContent-Length: 99999999999\r\nExpect: 100-continue\r\n\r\n"
    ))
    assert b"HTTP/1.1 401" in raw, raw[:200]


BAD_FIELDS = {
    "model": {"model": 5},
    "messages": {"messages": "hi"},
    "messages[0].role": {"messages": [{"role": "boss", "content": "x"}]},
    "messages[1].content": {"messages": [{"role": "user", "content": "x"}, {"role": "user", "content": 5}]},
    "messages[0].content[1].type": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "video_url"}]}]
    },
    "messages[0].tool_calls[0].id": {
        "messages": [{"role": "assistant", "content": None, "tool_calls": [{"type": "function"}]}]
    },
    "stream": {"stream": "yes"},
    "n": {"n": 0},
    "max_tokens": {"max_tokens": 0},
    "max_completion_tokens": {"max_completion_tokens": 1.5},
    "temperature": {"temperature": "warm"},
    "top_p": {"top_p": 1.5},
    "presence_penalty": {"presence_penalty": -3},
    "stop[1]": {"stop": ["a", 5]},
    "tools[0].type": {"tools": [{"function": {}}]},
    "response_format": {"response_format": "json"},
    "top_logprobs": {"top_logprobs": 21},
    "stream_options": {"stream_options": {"include_usage": True}},
}


@pytest.mark.parametrize("param", BAD_FIELDS)
async def test_a_bad_field_is_named(
    house: House, alice: Actor, http: aiohttp.ClientSession, param: str
) -> None:
    for path in CHATS:
        async with http.post(
            house.base_url + path, json=body(**BAD_FIELDS[param]), headers=alice.headers
        ) as answer:
            inner = await refused(answer, 400, "invalid_request", param=param)
        assert param in inner["message"] or param.rpartition(".")[2] in inner["message"]


@pytest.mark.parametrize("missing", ["model", "messages"])
async def test_an_absent_field_is_named(
    house: House, alice: Actor, http: aiohttp.ClientSession, missing: str
) -> None:
    asked = body()
    del asked[missing]
    for path in CHATS:
        async with http.post(house.base_url + path, json=asked, headers=alice.headers) as answer:
            inner = await refused(answer, 400, "invalid_request", param=missing)
        assert missing in inner["message"]


@pytest.mark.parametrize("raw", [b"", b"{", b"model=twin", b"\xff", b"{}x", b"{'model': 1}"])
async def test_what_is_not_json_is_said_to_be_so(
    house: House, alice: Actor, http: aiohttp.ClientSession, raw: bytes
) -> None:
    for path in CHATS:
        async with http.post(
            house.base_url + path, data=raw, headers={"Content-Type": "application/json", **alice.headers}
        ) as answer:
            await refused(answer, 400, "invalid_json")


async def test_checks_come_in_the_promised_order(
    house: House, house_books: Database, http: aiohttp.ClientSession, path: str
) -> None:
    """Key, scope, rate, body, existence, credit, upstream: each request below is wrong in all that follows too."""
    full = await enter(house_books, "full", plan="slow")
    for _ in range(4):
        async with http.post(house.base_url + path, json=body(), headers=full.headers) as answer:
            await answer.read()
    _, scopeless = await api_key.create(full.account, "of the same full window", scopes=["models"])
    poor = await enter(house_books, "poor", plan="wallet")
    rich = await enter(house_books, "rich", plan="wallet", credit_microusd=10_000_000)
    unreadable = "{nonsense"
    bad_and_unknown = json.dumps(body(model="nothing", n=0))
    unknown = json.dumps(body("status:500", model="nothing"))
    failing = json.dumps(body("status:403"))
    for headers, sent, status, code, param in (
        ({}, unreadable, 401, "missing_api_key", None),
        ({"Authorization": f"Bearer {NOBODYS_KEY}"}, unreadable, 401, "invalid_api_key", None),
        ({"Authorization": f"Bearer {scopeless}"}, unreadable, 403, "scope_denied", None),
        (full.headers, unreadable, 429, "rate_limit_exceeded", None),
        (poor.headers, unreadable, 400, "invalid_json", None),
        (poor.headers, bad_and_unknown, 400, "invalid_request", "n"),
        (poor.headers, unknown, 404, "model_not_found", "model"),
        (poor.headers, failing, 402, "insufficient_credits", None),
        (rich.headers, failing, 502, "upstream_error", None),
    ):
        async with http.post(
            house.base_url + path, data=sent, headers={"Content-Type": "application/json", **headers}
        ) as answer:
            await refused(answer, status, code, param=param)


async def test_a_long_conversation_is_refused_as_too_long(
    house: House, alice: Actor, http: aiohttp.ClientSession
) -> None:
    async with http.post(
        house.base_url + CHATS[0], json=body("x" * (128_000 * 32 + 1000)), headers=alice.headers
    ) as answer:
        await refused(answer, 400, "context_length_exceeded", param="messages")
    async with http.post(
        house.base_url + CHATS[0], json=body("status:400;code:context_length_exceeded"), headers=alice.headers
    ) as answer:
        await refused(answer, 400, "context_length_exceeded", param="messages")


@pytest.mark.parametrize("key", ["", "x" * 256, "tab\there"])
async def test_an_idempotency_key_must_be_sound(
    house: House, alice: Actor, http: aiohttp.ClientSession, key: str
) -> None:
    async with http.post(
        house.base_url + CHATS[0], json=body(), headers={"Idempotency-Key": key, **alice.headers}
    ) as answer:
        await refused(answer, 400, "invalid_request", param="Idempotency-Key")


async def test_an_idempotency_key_is_for_one_request(
    house: House, alice: Actor, http: aiohttp.ClientSession
) -> None:
    headers = {"Idempotency-Key": "order-1", **alice.headers}
    async with http.post(house.base_url + CHATS[0], json=body(), headers=headers) as answer:
        assert answer.status == 200
        first = await answer.json()
    async with http.post(house.base_url + CHATS[0] + "/", json=body(), headers=headers) as answer:
        assert answer.headers["idempotent-replayed"] == "true"
        assert await answer.json() == first
    async with http.post(house.base_url + CHATS[0], json=body(n=2), headers=headers) as answer:
        await refused(answer, 400, "idempotency_key_reused", param="Idempotency-Key")


async def test_a_request_id_is_ours_and_every_ones_own(
    house: House, alice: Actor, http: aiohttp.ClientSession
) -> None:
    seen = set()
    for path in ("/v1/models", "/v1/nothing", "/v1/usage", "/healthz"):
        async with http.get(
            house.base_url + path, headers={"X-Request-Id": "req_of_the_client", **alice.headers}
        ) as answer:
            seen.add(answer.headers["x-request-id"])
    assert len(seen) == 4 and "req_of_the_client" not in seen


async def exchange(house: House, head: str) -> bytes:
    """Send a request head by hand and return what comes back."""
    reader, writer = await asyncio.open_connection("127.0.0.1", house.port)
    writer.write(head.encode())
    async with asyncio.timeout(20):
        raw = await reader.readuntil(b"}")
    writer.close()
    return raw
