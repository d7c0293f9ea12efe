"""The demonstration obeys what a provider would obey, and never pretends to be one."""

from __future__ import annotations

import asyncio
import base64
import math
from typing import Any

import jsonschema
import msgspec
import pytest

from api.calls import Answer, ChatCall, Frame, UpstreamChat, UpstreamFault
from api.pulse import Pulse
from api.upstreams import Upstream
from api.upstreams.demo import Demo

PROMPT = "Tell me about toll gates"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 14},
            },
            "required": ["city", "unit", "days"],
            "additionalProperties": False,
        },
    },
}
TIME = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object"}}}


def a_chat(
    messages: list[dict[str, Any]] | str = PROMPT,
    *,
    output_limit: int = 1_000,
    choices: int = 1,
    include_usage: bool = False,
    **fields: Any,
) -> UpstreamChat:
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    call = ChatCall(
        model="demo",
        messages=messages,
        fields={name: msgspec.Raw(msgspec.json.encode(value)) for name, value in fields.items()},
        stream=True,
        include_usage=include_usage,
        choices=choices,
        output_limit=output_limit,
        limit_field=None,
        input_bytes=1_000,
    )
    return UpstreamChat(
        call, "canned-1", "demo", "chatcmpl-0123456789abcdef01234567", 1_700_000_000, output_limit
    )


def quick() -> Demo:
    return Demo(words_per_second=0, first_token_s=0)


async def complete(chat: UpstreamChat) -> Answer:
    return await quick().chat_complete(chat, Pulse())


async def stream(chat: UpstreamChat) -> list[Frame]:
    return [frame async for frame in quick().chat_stream(chat, Pulse())]


async def content_of(chat: UpstreamChat) -> str:
    return (await complete(chat)).body["choices"][0]["message"]["content"]


def chunk_of(frame: Frame) -> dict[str, Any]:
    assert frame.data.startswith(b"data: ")
    assert frame.data.endswith(b"\n\n")
    return msgspec.json.decode(frame.data[len(b"data: ") :])


def put_together(frames: list[Frame]) -> dict[int, dict[str, Any]]:
    """Return what each choice said, as a client puts it together."""
    choices: dict[int, dict[str, Any]] = {}
    for frame in frames:
        for part in chunk_of(frame)["choices"]:
            said = choices.setdefault(
                part["index"], {"content": "", "tools": {}, "roles": 0, "finish": None}
            )
            said["roles"] += "role" in part["delta"]
            said["content"] += part["delta"].get("content") or ""
            said["finish"] = part["finish_reason"] or said["finish"]
            for use in part["delta"].get("tool_calls", ()):
                known = said["tools"].setdefault(
                    use["index"], {"id": "", "type": "", "name": "", "arguments": ""}
                )
                known["id"] += use.get("id", "")
                known["type"] += use.get("type", "")
                known["name"] += use["function"].get("name", "")
                known["arguments"] += use["function"]["arguments"]
    return choices


class TestAnswer:
    async def test_says_that_it_is_a_demonstration_and_what_to_do(self):
        content = await content_of(a_chat())
        assert content.startswith("This is Tollgate's demonstration model")
        assert PROMPT in content
        assert "OPENAI_API_KEY" in content
        assert "TOLLGATE_CONFIG" in content

    async def test_is_a_whole_chat_completion_without_usage(self):
        answer = await complete(a_chat())
        choice = answer.body["choices"][0]
        assert list(answer.body) == ["id", "object", "created", "model", "choices"]
        assert answer.body["object"] == "chat.completion"
        assert answer.body["id"] == "chatcmpl-0123456789abcdef01234567"
        assert answer.body["model"] == "demo"
        assert choice["index"] == 0
        assert choice["logprobs"] is None
        assert choice["finish_reason"] == "stop"
        assert choice["message"]["role"] == "assistant"
        assert choice["message"]["refusal"] is None
        assert answer.text_bytes == len(choice["message"]["content"].encode())

    async def test_quotes_only_a_little_of_a_long_message(self):
        content = await content_of(a_chat("word " * 10_000))
        assert len(content) < 1_000

    async def test_is_the_same_every_time(self):
        chat = a_chat(tools=[WEATHER], tool_choice="required")
        assert (await complete(chat)).body == (await complete(chat)).body

    async def test_needs_no_user_message(self):
        assert "demonstration" in await content_of(a_chat([{"role": "system", "content": "Be kind."}]))

    async def test_survives_messages_of_odd_shapes(self):
        messages = [
            {
                "role": "user",
                "content": [None, 7, {"type": "image_url"}, {"type": "text", "text": 3}, {"type": "file"}],
            },
            {"role": "assistant", "content": None, "tool_calls": [{"id": "call_1"}]},
            {"role": "user", "content": [{"type": "image_url", "image_url": "x"}, {"type": "input_audio"}]},
        ]
        assert "demonstration" in await content_of(a_chat(messages))


class TestStream:
    async def test_says_the_same_as_the_whole_answer(self):
        frames = await stream(a_chat())
        said = put_together(frames)[0]
        assert said["content"] == await content_of(a_chat())
        assert said["finish"] == "stop"
        assert said["roles"] == 1

    async def test_begins_with_the_role_and_ends_with_the_reason(self):
        frames = await stream(a_chat())
        first, last = chunk_of(frames[0]), chunk_of(frames[-1])
        assert first["choices"][0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
        assert (frames[0].text_bytes, frames[0].pieces) == (0, 0)
        assert last["choices"][0] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}
        assert [frame.finished for frame in frames] == [False] * (len(frames) - 1) + [True]
        assert [frame.finish_reason for frame in frames if frame.finish_reason] == ["stop"]

    async def test_every_chunk_names_the_same_completion(self):
        chunks = [chunk_of(frame) for frame in await stream(a_chat())]
        assert {chunk["id"] for chunk in chunks} == {"chatcmpl-0123456789abcdef01234567"}
        assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
        assert {(chunk["model"], chunk["created"]) for chunk in chunks} == {("demo", 1_700_000_000)}

    @pytest.mark.parametrize("include_usage", [True, False])
    async def test_leaves_usage_chunk_and_done_to_the_gateway(self, include_usage: bool):
        frames = await stream(a_chat(include_usage=include_usage))
        chunks = [chunk_of(frame) for frame in frames]
        assert all(chunk["choices"] for chunk in chunks)
        assert all(("usage" in chunk) == include_usage for chunk in chunks)
        assert all(chunk.get("usage") is None for chunk in chunks)
        assert b"[DONE]" not in b"".join(frame.data for frame in frames)

    async def test_tells_the_meter_what_it_delivers(self):
        frames = await stream(a_chat())
        assert sum(frame.text_bytes for frame in frames) == len((await content_of(a_chat())).encode())
        assert [frame.usage is not None for frame in frames] == [False] * (len(frames) - 1) + [True]
        assert sum(frame.pieces for frame in frames) == frames[-1].usage.output_tokens

    async def test_takes_turns_between_choices_and_finishes_each(self):
        frames = await stream(a_chat(choices=3))
        said = put_together(frames)
        assert [said[index]["finish"] for index in range(3)] == ["stop"] * 3
        assert len({said[index]["content"] for index in range(3)}) == 3
        assert chunk_of(frames[0])["choices"][0]["index"] == 0
        assert frames[-1].usage == (await complete(a_chat(choices=3))).usage


class TestPace:
    async def test_pauses_before_every_piece(self):
        began = asyncio.get_running_loop().time()
        demo = Demo(words_per_second=200, first_token_s=0.05)
        frames = [frame async for frame in demo.chat_stream(a_chat(output_limit=10), Pulse())]
        assert asyncio.get_running_loop().time() - began >= 0.05 + 9 / 200
        assert sum(frame.pieces for frame in frames) == 10

    async def test_lets_others_run_even_without_pauses(self):
        turns = 0

        async def others() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(others())
        frames = await stream(a_chat())
        task.cancel()
        assert turns >= len(frames)

    async def test_a_whole_answer_takes_a_moment_but_not_long(self):
        demo = Demo(words_per_second=0.001, first_token_s=0)
        began = asyncio.get_running_loop().time()
        await demo.chat_complete(a_chat(output_limit=1), Pulse())
        assert 1.4 < asyncio.get_running_loop().time() - began < 10

    async def test_moves_the_pulse(self):
        pulse = Pulse()
        began = pulse.heard_at
        demo = Demo(words_per_second=0, first_token_s=0.02)
        async for frame in demo.chat_stream(a_chat(), pulse):
            if frame.pieces:
                break
            assert pulse.token_at is None
        assert pulse.token_at == pulse.heard_at
        assert pulse.token_at >= began + 0.02

    async def test_a_tick_yields_an_empty_frame_and_the_answer_goes_on(self):
        pulse = Pulse()
        asyncio.get_running_loop().call_later(0.02, pulse.tick)
        demo = Demo(words_per_second=0, first_token_s=0.06)
        frames = [frame async for frame in demo.chat_stream(a_chat(), pulse)]
        assert sum(frame == Frame() for frame in frames) == 1
        assert put_together([frame for frame in frames if frame.data])[0]["finish"] == "stop"
        assert asyncio.current_task().cancelling() == 0

    async def test_can_be_stopped_in_a_pause(self):
        pulse = Pulse()
        asyncio.get_running_loop().call_later(0.02, pulse.stop, "drain")
        with pytest.raises(asyncio.CancelledError):
            [frame async for frame in Demo(first_token_s=60).chat_stream(a_chat(), pulse)]
        assert pulse.stopped()


class TestLimits:
    @pytest.mark.parametrize("limit", [1, 2, 7])
    async def test_output_limit_is_exact(self, limit: int):
        frames = await stream(a_chat(output_limit=limit, choices=2))
        assert frames[-1].usage.output_tokens == 2 * limit
        assert {said["finish"] for said in put_together(frames).values()} == {"length"}

    async def test_an_answer_of_just_the_limit_is_whole(self):
        tokens = (await complete(a_chat())).usage.output_tokens
        answer = await complete(a_chat(output_limit=tokens))
        assert answer.body["choices"][0]["finish_reason"] == "stop"
        assert answer.usage.output_tokens == tokens

    async def test_output_limit_cuts_tool_arguments(self):
        frames = await stream(a_chat("get_weather", tools=[WEATHER], output_limit=1))
        said = put_together(frames)[0]
        assert said["finish"] == "length"
        assert said["tools"][0]["name"] == "get_weather"
        assert frames[-1].usage.output_tokens == 1

    async def test_prompt_is_counted_by_four_bytes_of_text_and_tools(self):
        messages = [
            {"role": "system", "content": "Ünder"},
            {"role": "user", "content": [{"type": "text", "text": "abc"}]},
        ]
        assert (await complete(a_chat(messages))).usage.input_tokens == math.ceil(9 / 4)
        tools = [TIME]
        answer = await complete(a_chat(messages, tools=tools, tool_choice="none"))
        assert answer.usage.input_tokens == math.ceil((9 + len(msgspec.json.encode(tools))) / 4)

    async def test_an_image_is_no_prompt_text(self):
        url = "data:image/png;base64," + "A" * 10_000
        messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]
        assert (await complete(a_chat(messages))).usage.input_tokens == 0


class TestStop:
    @pytest.mark.parametrize(
        "stop", ["demonstration", ["never said", "demonstration"], ["model", "demonstration"]]
    )
    async def test_ends_before_the_first_stop(self, stop: str | list[str]):
        answer = await complete(a_chat(stop=stop))
        assert answer.body["choices"][0]["message"]["content"] == "This is Tollgate's "
        assert answer.body["choices"][0]["finish_reason"] == "stop"
        assert put_together(await stream(a_chat(stop=stop)))[0]["content"] == "This is Tollgate's "

    @pytest.mark.parametrize("stop", [None, "", [], ["", "never said"]])
    async def test_a_stop_that_is_never_said_changes_nothing(self, stop: Any):
        assert await content_of(a_chat(stop=stop)) == await content_of(a_chat())

    @pytest.mark.parametrize("stop", [7, [7], ["a", "b", "c", "d", "e"]])
    async def test_refuses_what_is_no_stop(self, stop: Any):
        with pytest.raises(UpstreamFault) as refused:
            await complete(a_chat(stop=stop))
        assert (refused.value.answer_status, refused.value.param) == (400, "stop")


class TestTools:
    @pytest.mark.parametrize(
        ("asked", "choice"),
        [
            ("Hello", "required"),
            ("Hello", {"type": "function", "function": {"name": "get_weather"}}),
            ("Please get weather for Oslo", None),
            ("Please GET_WEATHER", "auto"),
            ("Could you use the tool?", None),
            ("Call the weather tool", "auto"),
        ],
    )
    async def test_calls_a_tool_when_asked_for(self, asked: str, choice: Any):
        answer = await complete(a_chat(asked, tools=[WEATHER, TIME], tool_choice=choice))
        chosen = answer.body["choices"][0]
        assert chosen["finish_reason"] == "tool_calls"
        assert chosen["message"]["content"] is None
        [use] = chosen["message"]["tool_calls"]
        assert (use["type"], use["function"]["name"]) == ("function", "get_weather")
        arguments = msgspec.json.decode(use["function"]["arguments"])
        jsonschema.validate(arguments, WEATHER["function"]["parameters"])

    @pytest.mark.parametrize(
        ("asked", "choice"), [("Hello", None), ("Hello", "auto"), ("Use the tool get_weather", "none")]
    )
    async def test_calls_none_when_not_asked_for(self, asked: str, choice: Any):
        assert "demonstration" in await content_of(a_chat(asked, tools=[WEATHER], tool_choice=choice))

    async def test_fills_arguments_from_the_message(self):
        chat = a_chat("get_weather in New York for 3 days, in Fahrenheit", tools=[WEATHER])
        [use] = (await complete(chat)).body["choices"][0]["message"]["tool_calls"]
        assert msgspec.json.decode(use["function"]["arguments"]) == {
            "city": "New York",
            "unit": "fahrenheit",
            "days": 3,
        }

    async def test_streams_a_call_in_pieces(self):
        frames = await stream(a_chat("get_weather in Oslo", tools=[WEATHER]))
        uses = [
            use for frame in frames for use in chunk_of(frame)["choices"][0]["delta"].get("tool_calls", ())
        ]
        assert set(uses[0]) == {"index", "id", "type", "function"}
        assert uses[0]["function"] == {"name": "get_weather", "arguments": ""}
        assert len(uses) > 2
        assert all(set(use) == {"index", "function"} for use in uses[1:])
        assert all(list(use["function"]) == ["arguments"] for use in uses[1:])
        said = put_together(frames)[0]
        assert (said["finish"], said["content"]) == ("tool_calls", "")
        assert msgspec.json.decode(said["tools"][0]["arguments"])["city"] == "Oslo"
        assert sum(frame.text_bytes for frame in frames) == len(said["tools"][0]["arguments"])

    async def test_calls_several_when_several_are_named(self):
        chat = a_chat("get_weather and get_time please", tools=[WEATHER, TIME])
        said = put_together(await stream(chat))[0]
        assert [said["tools"][index]["name"] for index in (0, 1)] == ["get_weather", "get_time"]
        assert said["tools"][1]["arguments"] == "{}"
        assert len({use["id"] for use in said["tools"].values()}) == 2

    async def test_calls_one_when_parallel_calls_are_off(self):
        chat = a_chat("get_weather and get_time", tools=[WEATHER, TIME], parallel_tool_calls=False)
        assert len((await complete(chat)).body["choices"][0]["message"]["tool_calls"]) == 1

    async def test_every_choice_has_ids_of_its_own(self):
        answer = await complete(a_chat("get_weather", tools=[WEATHER], choices=3))
        ids = [choice["message"]["tool_calls"][0]["id"] for choice in answer.body["choices"]]
        assert len(set(ids)) == 3
        assert all(len(use_id) <= 40 for use_id in ids)

    async def test_allowed_tools_narrow_the_choice(self):
        choice = {
            "type": "allowed_tools",
            "allowed_tools": {
                "mode": "required",
                "tools": [{"type": "function", "function": {"name": "get_time"}}],
            },
        }
        answer = await complete(a_chat("get_weather", tools=[WEATHER, TIME], tool_choice=choice))
        [use] = answer.body["choices"][0]["message"]["tool_calls"]
        assert use["function"]["name"] == "get_time"

    async def test_calls_a_custom_tool_with_text(self):
        tool = {"type": "custom", "custom": {"name": "note"}}
        answer = await complete(a_chat("Please note milk", tools=[tool]))
        [use] = answer.body["choices"][0]["message"]["tool_calls"]
        assert (use["type"], use["custom"]) == ("custom", {"name": "note", "input": "Please note milk"})

    async def test_answers_in_text_once_there_is_a_result(self):
        messages = [
            {"role": "user", "content": "get_weather in Oslo"},
            {"role": "assistant", "content": None, "tool_calls": [{"id": "call_1", "type": "function"}]},
            {"role": "tool", "tool_call_id": "call_1", "content": '{"degrees": 4}'},
        ]
        content = await content_of(a_chat(messages, tools=[WEATHER], tool_choice="required"))
        assert '{"degrees": 4}' in content
        assert "demonstration" in content

    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"tool_choice": "required"}, "tool_choice"),
            ({"tools": [WEATHER], "tool_choice": "sometimes"}, "tool_choice"),
            (
                {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "fly"}}},
                "tool_choice",
            ),
            ({"tools": "get_weather"}, "tools"),
            (
                {
                    "tools": [
                        {"type": "function", "function": {"name": "odd", "parameters": {"type": "odd"}}}
                    ],
                    "tool_choice": "required",
                },
                "tools",
            ),
        ],
    )
    async def test_refuses_what_cannot_be_called(self, fields: dict[str, Any], param: str):
        for answering in (complete, stream):
            with pytest.raises(UpstreamFault) as refused:
                await answering(a_chat("Hello", **fields))
            assert (refused.value.answer_status, refused.value.param) == (400, param)
            assert refused.value.code == "invalid_request"


class TestResponseFormat:
    SCHEMA = {
        "type": "object",
        "properties": {"city": {"type": "string"}, "tags": {"type": "array", "items": {"type": "string"}}},
        "required": ["city", "tags"],
        "additionalProperties": False,
    }

    async def test_json_schema_gives_an_instance(self):
        form = {
            "type": "json_schema",
            "json_schema": {"name": "place", "schema": self.SCHEMA, "strict": True},
        }
        chat = a_chat("Is it nice in Rome?", response_format=form)
        value = msgspec.json.decode(await content_of(chat))
        jsonschema.validate(value, self.SCHEMA)
        assert value["city"] == "Rome"
        frames = await stream(chat)
        assert put_together(frames)[0]["content"] == await content_of(chat)
        assert frames[-1].usage.output_tokens > 1

    async def test_json_object_gives_an_object_that_says_what_it_is(self):
        value = msgspec.json.decode(await content_of(a_chat(response_format={"type": "json_object"})))
        assert value["demonstration"] is True
        assert value["you_said"] == PROMPT

    async def test_text_gives_text(self):
        assert await content_of(a_chat(response_format={"type": "text"})) == await content_of(a_chat())

    async def test_an_impossible_schema_is_refused(self):
        form = {"type": "json_schema", "json_schema": {"name": "none", "schema": {"enum": []}}}
        with pytest.raises(UpstreamFault) as refused:
            await complete(a_chat(response_format=form))
        assert (refused.value.answer_status, refused.value.param) == (400, "response_format")


class TestMedia:
    @pytest.mark.parametrize("size", [0, 1, 2, 3, 1_234])
    async def test_tells_type_and_size_of_an_image(self, size: int):
        data = base64.b64encode(bytes(size)).decode()
        part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
        content = await content_of(a_chat([{"role": "user", "content": [part]}]))
        assert f"I saw 1 image (image/png, {size:,} bytes)" in content

    async def test_counts_images_recordings_and_files(self):
        parts = [
            {"type": "text", "text": "What is this?"},
            {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}},
            {"type": "image_url", "image_url": {"url": "data:image/jpeg;base64,AAAA"}},
            {"type": "input_audio", "input_audio": {"data": "AAAAAA==", "format": "wav"}},
            {
                "type": "file",
                "file": {"filename": "a.pdf", "file_data": "data:application/pdf;base64,AAA="},
            },
            {"type": "file", "file": {"file_id": "file-1"}},
        ]
        content = await content_of(a_chat([{"role": "user", "content": parts}]))
        assert "I saw 2 images (by address, image/jpeg, 3 bytes)" in content
        assert "I saw 1 audio recording (wav, 4 bytes)" in content
        assert "I saw 2 files (a.pdf, application/pdf, 2 bytes, unnamed, by id)" in content
        assert "What is this?" in content


async def test_is_an_upstream():
    demo: Upstream = Demo()
    assert demo.name == "demo"
    assert Demo("other").name == "other"
    await demo.close()
