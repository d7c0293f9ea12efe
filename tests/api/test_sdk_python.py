"""The official OpenAI SDK for Python, strict about every answer, against a running Tollgate."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.pagination import AsyncCursorPage
from pydantic import BaseModel

from models.database import Database
from tests.cast import Actor, enter
from tests.house import House

PIXEL = "data:image/gif;base64,R0lGODlhAQABAAAAACH5BAEKAAEALAAAAAABAAEAAAICTAEAOw=="
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tell the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}
TIME = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}}


class Weather(BaseModel):
    """What the twin makes up for this schema is text and 1."""

    city: str
    days: int


@pytest.fixture
async def sdk(house: House, alice: Actor) -> AsyncIterator[AsyncOpenAI]:
    """Give the SDK with Alice's key: strict, and without retries that would hide a failure."""
    async with client_of(house, alice.key) as client:
        yield client


def client_of(house: House, key: str) -> AsyncOpenAI:
    """Return the SDK for a key."""
    return AsyncOpenAI(
        base_url=f"{house.base_url}/v1", api_key=key, max_retries=0, timeout=30,
        _strict_response_validation=True,
    )


def asked(text: str = "say:hello_there usage:12,2", **fields: Any) -> dict[str, Any]:
    """Return the arguments of a chat call that steers the twin."""
    return {"model": "twin", "max_tokens": 100, "messages": [{"role": "user", "content": text}], **fields}


async def test_a_chat(sdk: AsyncOpenAI) -> None:
    raw = await sdk.chat.completions.with_raw_response.create(**asked())
    answer = raw.parse()
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-") and answer.model == "twin"
    [choice] = answer.choices
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "stop", None)
    message = choice.message
    assert (message.role, message.content, message.refusal) == ("assistant", "hello there", None)
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (12, 2, 14)
    assert answer.usage.model_extra == {"cost_usd": "0.000032"}
    assert raw.headers["x-tollgate-cost"] == "0.000032"
    assert answer._request_id == raw.headers["x-request-id"] and answer._request_id.startswith("req_")


def test_a_chat_without_asyncio(house: House, alice: Actor) -> None:
    with OpenAI(
        base_url=f"{house.base_url}/v1", api_key=alice.key, max_retries=0, _strict_response_validation=True
    ) as client:
        answer = client.chat.completions.create(**asked())
        assert answer.choices[0].message.content == "hello there"
        with client.chat.completions.create(**asked(), stream=True) as stream:
            chunks = list(stream)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "hello there"
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("nothing")


@pytest.mark.parametrize("fields", [{}, {"stream_options": {"include_usage": False}}])
async def test_a_stream_without_usage(sdk: AsyncOpenAI, fields: dict[str, Any]) -> None:
    stream = await sdk.chat.completions.create(**asked("tokens:5"), stream=True, **fields)
    assert stream.response.headers["x-request-id"].startswith("req_")
    chunks = [chunk async for chunk in stream]
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert not any("usage" in chunk.model_fields_set for chunk in chunks)
    assert {len(chunk.choices) for chunk in chunks} == {1}
    check_grammar(chunks)


async def test_a_stream_with_usage(sdk: AsyncOpenAI) -> None:
    stream = await sdk.chat.completions.create(
        **asked("tokens:5 usage:7,5"), stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    *before, last = chunks
    assert last.choices == [] and last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens, last.usage.total_tokens) == (7, 5, 12)
    assert last.usage.model_extra == {"cost_usd": "0.000057"}
    assert all(chunk.usage is None and "usage" in chunk.model_fields_set for chunk in before)
    check_grammar(before)
    assert last.id == before[0].id and last.model == "twin"


def check_grammar(chunks: list[Any]) -> None:
    """Assert the order of a stream of `tokens:5`: the role once, the text, the finish reason once."""
    assert len({(chunk.id, chunk.model) for chunk in chunks}) == 1
    assert [chunk.choices[0].delta.role for chunk in chunks].count("assistant") == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "w0 w1 w2 w3 w4"
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]


async def test_the_stream_helper(sdk: AsyncOpenAI) -> None:
    async with sdk.chat.completions.stream(
        **asked("tokens:5 usage:7,5"), stream_options={"include_usage": True}
    ) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_completion()
    assert final.choices[0].message.content == "w0 w1 w2 w3 w4"
    assert (final.choices[0].message.role, final.choices[0].finish_reason) == ("assistant", "stop")
    assert final.usage is not None and final.usage.completion_tokens == 5
    assert final.usage.model_extra == {"cost_usd": "0.000057"}
    assert "".join(event.delta for event in events if event.type == "content.delta") == "w0 w1 w2 w3 w4"
    assert [event.content for event in events if event.type == "content.done"] == ["w0 w1 w2 w3 w4"]


async def test_a_tool(sdk: AsyncOpenAI) -> None:
    first = await sdk.chat.completions.create(**asked("tool", tools=[WEATHER]))
    assert first.choices[0].finish_reason == "tool_calls"
    message = first.choices[0].message
    assert message.content is None and message.tool_calls is not None
    [call] = message.tool_calls
    assert (call.type, call.id, call.function.name) == ("function", "call_twin0", "get_weather")
    assert json.loads(call.function.arguments) == {"city": "text", "days": 1}
    second = await sdk.chat.completions.create(
        model="twin",
        messages=[
            {"role": "user", "content": "And the weather?"},
            message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": call.id, "content": "rain"},
        ],
        tools=[WEATHER],
    )
    assert second.choices[0].message.content == "The tool said: rain"


async def test_parallel_tools(sdk: AsyncOpenAI) -> None:
    answer = await sdk.chat.completions.create(**asked("tools:3", tools=[WEATHER, TIME], parallel_tool_calls=True))
    calls = answer.choices[0].message.tool_calls
    assert [call.function.name for call in calls] == ["get_weather", "get_time", "get_weather"]
    assert [call.id for call in calls] == ["call_twin0", "call_twin1", "call_twin2"]


async def test_streamed_tools(sdk: AsyncOpenAI) -> None:
    stream = await sdk.chat.completions.create(**asked("tools:3", tools=[WEATHER, TIME]), stream=True)
    pieces: dict[int, list[Any]] = {}
    reason = None
    async for chunk in stream:
        reason = reason or chunk.choices[0].finish_reason
        for piece in chunk.choices[0].delta.tool_calls or ():
            pieces.setdefault(piece.index, []).append(piece)
    assert reason == "tool_calls" and list(pieces) == [0, 1, 2]
    weather = ("get_weather", {"city": "text", "days": 1})
    for index, (name, arguments) in enumerate([weather, ("get_time", {}), weather]):
        assert [piece.id for piece in pieces[index] if piece.id] == [f"call_twin{index}"]
        assert [piece.function.name for piece in pieces[index] if piece.function.name] == [name]
        assert all(isinstance(piece.function.arguments, str) for piece in pieces[index])
        assert json.loads("".join(piece.function.arguments for piece in pieces[index])) == arguments


async def test_streamed_tools_through_the_helper(sdk: AsyncOpenAI) -> None:
    async with sdk.chat.completions.stream(
        **asked("tools:2"), tools=[openai.pydantic_function_tool(Weather, name="get_weather"), TIME]
    ) as stream:
        done = [event async for event in stream if event.type == "tool_calls.function.arguments.done"]
        final = await stream.get_final_completion()
    calls = final.choices[0].message.tool_calls
    assert [(call.id, call.type, call.function.name) for call in calls] == [
        ("call_twin0", "function", "get_weather"), ("call_twin1", "function", "get_time")
    ]
    assert calls[0].function.parsed_arguments == Weather(city="text", days=1)
    assert [json.loads(event.arguments) for event in done] == [{"city": "text", "days": 1}, {}]
    assert final.choices[0].finish_reason == "tool_calls"


async def test_a_json_schema(sdk: AsyncOpenAI) -> None:
    schema = {"name": "weather", "strict": True, "schema": WEATHER["function"]["parameters"]}
    answer = await sdk.chat.completions.create(
        **asked("json", response_format={"type": "json_schema", "json_schema": schema})
    )
    assert json.loads(answer.choices[0].message.content) == {"city": "text", "days": 1}


async def test_parse(sdk: AsyncOpenAI) -> None:
    answer = await sdk.chat.completions.parse(**asked("json"), response_format=Weather)
    assert answer.choices[0].message.parsed == Weather(city="text", days=1)
    with pytest.raises(openai.LengthFinishReasonError):
        await sdk.chat.completions.parse(**asked("json", max_tokens=1), response_format=Weather)


async def test_parse_through_the_helper(sdk: AsyncOpenAI) -> None:
    async with sdk.chat.completions.stream(**asked("json"), response_format=Weather) as stream:
        final = await stream.get_final_completion()
    assert final.choices[0].message.parsed == Weather(city="text", days=1)


async def test_image_parts(sdk: AsyncOpenAI) -> None:
    parts = [
        {"type": "text", "text": "What is this?"},
        {"type": "image_url", "image_url": {"url": PIXEL, "detail": "low"}},
        {"type": "image_url", "image_url": {"url": "https://example.com/cat.png"}},
    ]
    answer = await sdk.chat.completions.create(
        model="twin", messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": parts}]
    )
    assert answer.choices[0].message.content == "I see 2 image(s)."


async def test_several_choices(sdk: AsyncOpenAI) -> None:
    answer = await sdk.chat.completions.create(**asked(n=2))
    assert [(choice.index, choice.message.content) for choice in answer.choices] == [
        (0, "hello there"), (1, "hello there")
    ]
    stream = await sdk.chat.completions.create(**asked(n=2), stream=True)
    texts, reasons = ["", ""], [None, None]
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert (texts, reasons) == (["hello there"] * 2, ["stop"] * 2)
    async with sdk.chat.completions.stream(**asked(n=2)) as helper:
        final = await helper.get_final_completion()
    assert [choice.message.content for choice in final.choices] == ["hello there"] * 2


@pytest.mark.parametrize("stop", ["four", ["never", "four"]])
async def test_stop(sdk: AsyncOpenAI, stop: object) -> None:
    answer = await sdk.chat.completions.create(**asked("say:two_three_four_five", stop=stop))
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("two three", "stop")


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_a_limit_ends_with_length(sdk: AsyncOpenAI, name: str) -> None:
    arguments = asked("tokens:9")
    del arguments["max_tokens"]
    answer = await sdk.chat.completions.create(**arguments, **{name: 3})
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("w0 w1 w2", "length")
    stream = await sdk.chat.completions.create(**arguments, **{name: 3}, stream=True)
    chunks = [chunk async for chunk in stream]
    assert chunks[-1].choices[0].finish_reason == "length"


async def test_reasoning_is_shown(sdk: AsyncOpenAI) -> None:
    answer = await sdk.chat.completions.create(**asked("say:done reasoning:3"))
    assert answer.choices[0].message.model_extra == {"reasoning_content": "r0 r1 r2"}
    assert answer.usage.completion_tokens_details.reasoning_tokens == 3


async def test_unknown_fields_are_ignored(sdk: AsyncOpenAI) -> None:
    answer = await sdk.chat.completions.create(
        **asked(), extra_body={"made_up": {"deep": [1]}, "user_id": 5}, extra_query={"api-version": "1"},
        extra_headers={"OpenAI-Organization": "org", "OpenAI-Project": "proj"},
    )
    assert answer.choices[0].message.content == "hello there"


async def test_models(sdk: AsyncOpenAI) -> None:
    listed = await sdk.models.list()
    names = [model.id for model in listed.data]
    assert {"twin", "vendor/twin by call"} <= set(names)
    assert [model.id async for model in sdk.models.list()] == names  # the pager comes to an end
    assert listed.has_next_page() is False
    for name in names:
        model = await sdk.models.retrieve(name)
        assert (model.id, model.object) == (name, "model") and type(model.created) is int
        assert model._request_id.startswith("req_")
    assert model.model_extra["pricing"]["per_call"] == "0.01"


async def test_no_key_and_a_wrong_key(house: House, sdk: AsyncOpenAI) -> None:
    with pytest.raises(openai.AuthenticationError) as caught:
        await sdk.chat.completions.create(**asked(), extra_headers={"Authorization": openai.Omit()})
    check_error(caught.value, 401, "missing_api_key", "authentication_error")
    async with client_of(house, "sk-wrong") as stranger:
        with pytest.raises(openai.AuthenticationError) as caught:
            await stranger.models.list()
        check_error(caught.value, 401, "invalid_api_key", "authentication_error")


async def test_a_bad_field(sdk: AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await sdk.chat.completions.create(**asked(temperature="warm"))
    check_error(caught.value, 400, "invalid_request", "invalid_request_error", param="temperature")
    assert "temperature" in str(caught.value)


async def test_no_credit(house: House, house_books: Database) -> None:
    poor = await enter(house_books, "poor", plan="wallet")
    async with client_of(house, poor.key) as sdk:
        for stream in (False, True):
            with pytest.raises(openai.APIStatusError) as caught:
                await sdk.chat.completions.create(**asked(), stream=stream)
            assert type(caught.value) is openai.APIStatusError
            check_error(caught.value, 402, "insufficient_credits", "billing_error")


async def test_a_surface_that_is_not_included(house: House, house_books: Database) -> None:
    mute = await enter(house_books, "mute", plan="mute")
    async with client_of(house, mute.key) as sdk:
        with pytest.raises(openai.PermissionDeniedError) as caught:
            await sdk.chat.completions.create(**asked())
        check_error(caught.value, 403, "scope_denied", "permission_error")


async def test_an_unknown_model(sdk: AsyncOpenAI) -> None:
    for call in (sdk.chat.completions.create(**asked(model="gone")), sdk.models.retrieve("gone/with space")):
        with pytest.raises(openai.NotFoundError) as caught:
            await call
        check_error(caught.value, 404, "model_not_found", "not_found_error", param="model")


async def test_too_many_calls(house: House, house_books: Database) -> None:
    slow = await enter(house_books, "slow", plan="slow")
    async with client_of(house, slow.key) as sdk:
        for _ in range(3):
            await sdk.chat.completions.create(**asked())
        for stream in (False, True):
            with pytest.raises(openai.RateLimitError) as caught:
                await sdk.chat.completions.create(**asked(), stream=stream)
            check_error(caught.value, 429, "rate_limit_exceeded", "rate_limit_error")
            assert caught.value.response.headers["retry-after"] == "60"


async def test_a_failing_provider(sdk: AsyncOpenAI) -> None:
    for arguments in (asked("status:403"), asked("status:403", stream=True), asked("error:0", stream=True)):
        with pytest.raises(openai.InternalServerError) as caught:
            await sdk.chat.completions.create(**arguments)
        check_error(caught.value, 502, "upstream_error", "upstream_error")


async def test_a_failure_in_the_middle_of_a_stream(sdk: AsyncOpenAI) -> None:
    stream = await sdk.chat.completions.create(**asked("tokens:9 error:3"), stream=True)
    texts = []
    with pytest.raises(openai.APIError) as caught:
        async for chunk in stream:
            texts.append(chunk.choices[0].delta.content or "")
    assert "".join(texts) == "w0 w1 w2"
    error = caught.value
    assert type(error) is openai.APIError and error.code == error.type == "upstream_error"
    assert error.body["request_id"] == stream.response.headers["x-request-id"]
    with pytest.raises(openai.APIError):
        async with sdk.chat.completions.stream(**asked("tokens:9 cut:3")) as helper:
            await helper.until_done()


async def test_the_list_of_calls_by_the_sdks_own_pager(sdk: AsyncOpenAI) -> None:
    """Its page class follows `after` by the last id until `has_more` is false."""
    made = [(await sdk.chat.completions.create(**asked()))._request_id for _ in range(5)]

    class Row(openai.BaseModel):
        id: str
        cost_usd: str

    rows = sdk.get_api_list("/usage", model=Row, page=AsyncCursorPage[Row], options={"params": {"limit": 2}})
    assert [row.id async for row in rows] == made[::-1]


def check_error(
    error: openai.APIStatusError, status: int, code: str, kind: str, *, param: str | None = None
) -> None:
    """Assert what a user of the SDK sees of an error."""
    assert (error.status_code, error.code, error.type, error.param) == (status, code, kind, param)
    assert error.request_id == error.body["request_id"] == error.response.headers["x-request-id"]
    assert error.response.json()["request_id"] == error.request_id
    assert error.body["message"] in str(error)
