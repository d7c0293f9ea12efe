"""The public chat call: the smallest contract, whole answers only, no field of the gateway's own."""

from __future__ import annotations

import aiohttp
import pytest

from tests.api.envelope import refused
from tests.api.v1.test_chat import body
from tests.cast import Actor
from tests.house import House

EXTENSIONS = {
    "files": [], "knowledge_ids": ["kb_1"], "retrieval": {}, "memory": False, "features": {"memory": True},
    "tool_ids": [], "prompt": {"id": "x"}, "chat_id": None, "variables": {},
}


async def test_answers_as_the_specification_shows_it(
    house: House, alice: Actor, http: aiohttp.ClientSession
) -> None:
    asked = {"model": "twin", "messages": [{"role": "user", "content": "say:hello_there usage:12,2"}]}
    for path in ("/v1/public/chat", "/v1/public/chat/"):
        async with http.post(
            house.base_url + path, json=asked, headers=alice.headers, allow_redirects=False
        ) as answer:
            assert answer.status == 200
            reply = await answer.json()
            request_id = answer.headers["x-request-id"]
        assert reply["id"] == "chatcmpl-" + request_id.removeprefix("req_")
        assert reply["object"] == "chat.completion" and reply["model"] == "twin"
        [choice] = reply["choices"]
        assert choice["index"] == 0 and choice["finish_reason"] == "stop"
        assert choice["message"].items() >= {"role": "assistant", "content": "hello there"}.items()
        usage = reply["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (12, 2, 14)
        async with http.get(f"{house.base_url}/v1/usage/{request_id}", headers=alice.headers) as answer:
            row = await answer.json()
        assert (row["path"], row["cost_usd"]) == ("/v1/public/chat", usage["cost_usd"])


@pytest.mark.parametrize(
    "fields", [{"stream": False}, {"stream": None}, {"temperature": 0.5, "n": 2, "made_up": 1}]
)
async def test_takes_the_standard_fields(
    house: House, alice: Actor, http: aiohttp.ClientSession, fields: dict[str, object]
) -> None:
    async with http.post(
        f"{house.base_url}/v1/public/chat", json=body(**fields), headers=alice.headers
    ) as answer:
        assert answer.status == 200
        assert len((await answer.json())["choices"]) == fields.get("n", 1)


async def test_does_not_stream(house: House, alice: Actor, http: aiohttp.ClientSession) -> None:
    for fields in ({"stream": True}, {"stream": True, "stream_options": {"include_usage": True}}):
        async with http.post(
            f"{house.base_url}/v1/public/chat", json=body(**fields), headers=alice.headers
        ) as answer:
            await refused(answer, 400, "unsupported_parameter", param="stream")


@pytest.mark.parametrize("name", EXTENSIONS)
async def test_takes_no_extension_not_even_an_empty_one(
    house: House, alice: Actor, http: aiohttp.ClientSession, name: str
) -> None:
    async with http.post(
        f"{house.base_url}/v1/public/chat", json=body(**{name: EXTENSIONS[name]}), headers=alice.headers
    ) as answer:
        await refused(answer, 400, "unsupported_parameter", param=name)


@pytest.mark.parametrize("name", EXTENSIONS)
async def test_chat_completions_answers_unless_an_extension_asks_for_something(
    house: House, alice: Actor, http: aiohttp.ClientSession, name: str
) -> None:
    async with http.post(
        f"{house.base_url}/v1/chat/completions", json=body(**{name: EXTENSIONS[name]}), headers=alice.headers
    ) as answer:
        if EXTENSIONS[name]:
            await refused(answer, 400, "unsupported_parameter", param=name)
        assert answer.status == (400 if EXTENSIONS[name] else 200)
