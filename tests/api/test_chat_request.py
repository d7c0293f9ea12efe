"""From bytes to a `ChatCall`: what is sent on, what is measured for the hold, and how a mistake is named."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.chat_request import EXTENSIONS, parse_chat, refuse_unpriced
from api.errors import ApiError


def raw(content: Any = "hi", **fields: Any) -> bytes:
    """Return the bytes of a chat request."""
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": content}], **fields}).encode()


def refusal(body: bytes, **options: bool) -> tuple[int, str, str | None]:
    """Return how a body is refused."""
    with pytest.raises(ApiError) as caught:
        parse_chat(body, **options)
    assert caught.value.message.endswith(".") and "`" not in caught.value.message
    return caught.value.status, caught.value.code, caught.value.param


def sent_on(body: bytes) -> dict[str, Any]:
    """Return the fields that are sent on, decoded."""
    return {name: json.loads(bytes(value)) for name, value in parse_chat(body).fields.items()}


def test_the_smallest_request() -> None:
    call = parse_chat(raw())
    assert (call.model, call.stream, call.include_usage, call.choices) == ("m", False, False, 1)
    assert (call.output_limit, call.limit_field) == (None, None)
    assert (call.images, call.audio_bytes, call.file_bytes) == (0, 0, 0)
    assert call.input_bytes == len(raw())
    assert call.messages == [{"role": "user", "content": "hi"}]
    assert sent_on(raw()) == {"messages": call.messages}


def test_standard_fields_are_sent_on_as_they_were_written_and_unknown_ones_are_not() -> None:
    body = (
        b'{"model":"m","messages":[{"role":"user","content":"hi","x_ray":{"a":[1]}}],"temperature":0.10,'
        b'"seed":9223372036854775807,"logit_bias":{"50256":-100},"stop":null,"made_up":1,"stream":false}'
    )
    fields = parse_chat(body).fields
    assert set(fields) == {"messages", "temperature", "seed", "logit_bias"}
    assert bytes(fields["temperature"]) == b"0.10"
    assert bytes(fields["seed"]) == b"9223372036854775807"
    assert sent_on(body)["messages"] == [{"role": "user", "content": "hi", "x_ray": {"a": [1]}}]


def test_what_the_gateway_decides_is_not_sent_on() -> None:
    call = parse_chat(raw(max_tokens=5, stream=True, stream_options={"include_usage": True}, n=3))
    assert set(call.fields) == {"messages", "n"}
    assert (call.stream, call.include_usage, call.choices, call.output_limit, call.limit_field) == (
        True, True, 3, 5, "max_tokens"
    )


@pytest.mark.parametrize(
    "limits, expected",
    [
        ({}, (None, None)),
        ({"max_tokens": None, "max_completion_tokens": None}, (None, None)),
        ({"max_tokens": 7}, (7, "max_tokens")),
        ({"max_completion_tokens": 7}, (7, "max_completion_tokens")),
        ({"max_tokens": 3, "max_completion_tokens": 7}, (3, "max_completion_tokens")),
        ({"max_tokens": 9, "max_completion_tokens": 7}, (7, "max_completion_tokens")),
        ({"max_tokens": None, "max_completion_tokens": 7}, (7, "max_completion_tokens")),
    ],
)
def test_the_smaller_limit_binds(limits: dict[str, Any], expected: tuple[int | None, str | None]) -> None:
    call = parse_chat(raw(**limits))
    assert (call.output_limit, call.limit_field) == expected


def test_media_is_measured_apart_from_text() -> None:
    data = "data:image/png;base64," + "A" * 1000
    parts = [
        {"type": "text", "text": "what is this?"},
        {"type": "image_url", "image_url": {"url": data, "detail": "high"}},
        {"type": "image_url", "image_url": "https://example.com/cat.png"},
        {"type": "input_audio", "input_audio": {"data": "B" * 400, "format": "wav"}},
        {"type": "file", "file": {"filename": "a.pdf", "file_data": "data:application/pdf;base64," + "C" * 372}},
    ]
    body = raw(parts)
    call = parse_chat(body)
    assert (call.images, call.audio_bytes, call.file_bytes) == (2, 300, 300)
    assert call.input_bytes == len(body) - len(data) - len("https://example.com/cat.png") - 400 - 400
    assert sent_on(body)["messages"][0]["content"] == parts


def test_every_byte_of_text_counts_towards_the_hold_wherever_it_stands() -> None:
    for fields in (
        {"tools": [{"type": "function", "function": {"name": "f", "description": "x" * 5000}}]},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x" * 5000}}},
        {"messages": [{"role": "tool", "tool_call_id": "1", "content": "x" * 5000}]},
        {"prediction": {"type": "content", "content": "x" * 5000}},
        {"made_up": "x" * 5000},
    ):
        assert parse_chat(raw(**fields)).input_bytes >= 5000


@pytest.mark.parametrize(
    "part, code, param",
    [
        ({"type": "video_url", "video_url": {"url": "https://x"}}, "invalid_request", "type"),
        ({"type": "file", "file": {"file_id": "file-1"}}, "unsupported_parameter", "file.file_id"),
        ({"type": "file", "file": {"file_data": "https://x/long.pdf"}}, "invalid_request", "file.file_data"),
        ({"type": "input_audio", "input_audio": {"data": "https://x", "format": "wav"}}, "invalid_request",
         "input_audio.data"),
        ({"text": "hi"}, "invalid_request", "type"),
        ({"type": "image_url", "image_url": {"detail": "low"}}, "invalid_request", "image_url.url"),
    ],
)
def test_parts_whose_cost_nothing_bounds_are_refused(part: dict[str, Any], code: str, param: str) -> None:
    body = raw([{"type": "text", "text": "see"}, part])
    assert refusal(body) == (400, code, f"messages[0].content[1].{param}")


@pytest.mark.parametrize(
    "body, expected",
    [
        (b"", ("invalid_json", None)),
        (b"{", ("invalid_json", None)),
        (b"{}garbage", ("invalid_json", None)),
        (b"\xff", ("invalid_json", None)),
        (raw() + b"]", ("invalid_json", None)),
        (raw()[:-1] + b',"temperature":NaN}', ("invalid_json", None)),
        (raw()[:-1] + b',"x":' + b"[" * 100_000 + b"}", ("invalid_json", None)),
        (b"[]", ("invalid_request", None)),
        (b"null", ("invalid_request", None)),
        (b"{}", ("invalid_request", "model")),
        (raw(model=5), ("invalid_request", "model")),
        (raw(model="m" * 257), ("invalid_request", "model")),
        (raw(n=129), ("invalid_request", "n")),
        (raw(max_tokens=2**31), ("invalid_request", "max_tokens")),
        (raw(max_tokens=True), ("invalid_request", "max_tokens")),
        (raw(temperature=-0.1), ("invalid_request", "temperature")),
        (raw(stop=["a", 1]), ("invalid_request", "stop[1]")),
        (raw(metadata={"a": 1}), ("invalid_request", "metadata[...]")),
        (
            raw(stream_options={"include_usage": "yes"}, stream=True),
            ("invalid_request", "stream_options.include_usage"),
        ),
        (raw(stream_options={"include_usage": True}), ("invalid_request", "stream_options")),
        (raw(stream_options={}, stream=False), ("invalid_request", "stream_options")),
        (raw(messages=[]), ("invalid_request", "messages")),
        (raw(messages=["hi"]), ("invalid_request", "messages[0]")),
        (raw(messages=[{"content": "hi"}]), ("invalid_request", "messages[0].role")),
        (raw(tools=[{"type": "function"}, {}]), ("invalid_request", "tools[1].type")),
    ],
)
def test_a_mistake_is_named(body: bytes, expected: tuple[str, str | None]) -> None:
    assert refusal(body) == (400, *expected)


@pytest.mark.parametrize("name", sorted(EXTENSIONS))
def test_an_extension_that_asks_for_something_is_refused(name: str) -> None:
    for value in (None, False, [], {}, ""):
        assert parse_chat(raw(**{name: value})).fields.keys() == {"messages"}
        assert refusal(raw(**{name: value}), extensions_refused=True) == (400, "unsupported_parameter", name)
    for value in (True, ["x"], {"id": "x"}, "x"):
        assert refusal(raw(**{name: value})) == (400, "unsupported_parameter", name)


def test_no_stream_where_extensions_are_refused() -> None:
    assert refusal(raw(stream=True), extensions_refused=True) == (400, "unsupported_parameter", "stream")
    for stream in (False, None):
        assert parse_chat(raw(stream=stream), extensions_refused=True).stream is False


@pytest.mark.parametrize(
    "fields, capability",
    [
        ({"web_search_options": {}}, "web_search"),
        ({"audio": {"format": "wav", "voice": "alloy"}, "modalities": ["text", "audio"]}, "audio"),
        ({"moderation": {"model": "m"}}, "moderation"),
        ({"service_tier": "priority"}, "service_tier"),
        ({"service_tier": "flex"}, "service_tier"),
    ],
)
def test_what_the_prices_do_not_cover_is_refused_unless_the_offer_says_so(
    fields: dict[str, Any], capability: str
) -> None:
    call = parse_chat(raw(**fields))
    with pytest.raises(ApiError) as caught:
        refuse_unpriced(call, ("tools",))
    assert (caught.value.status, caught.value.code) == (400, "unsupported_parameter")
    assert caught.value.param == next(iter(fields))
    refuse_unpriced(call, (capability,))


@pytest.mark.parametrize("tier", [None, "auto", "default", "standard"])
def test_an_ordinary_tier_is_covered(tier: str | None) -> None:
    refuse_unpriced(parse_chat(raw(service_tier=tier)), ())


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=20,
)
_names = st.sampled_from(
    [*sorted(EXTENSIONS), "model", "messages", "stream", "n", "tools", "stop", "max_tokens", "x"]
)


@given(st.dictionaries(_names, _json, max_size=6), st.booleans())
def test_any_json_is_a_call_or_a_named_refusal(fields: dict[str, Any], strict: bool) -> None:
    for body in (json.dumps(fields).encode(), raw(**fields)):
        try:
            call = parse_chat(body, extensions_refused=strict)
        except ApiError as error:
            assert error.status == 400
            assert error.code in ("invalid_json", "invalid_request", "unsupported_parameter")
        else:
            assert call.input_bytes >= 1 and call.choices >= 1


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_in_order(body: bytes) -> None:
    assert refusal(body)[0] == 400


OPENING = b'{"model":"m","messages":[{"role":"user","content":"x"}]'


def deep(levels: int) -> bytes:
    """Return a request whose metadata-like field makes it so many levels deep."""
    return OPENING + b',"x":' + b"[" * (levels - 1) + b"]" * (levels - 1) + b"}"


@pytest.mark.parametrize("body", [
    deep(64),
    OPENING + b',"x":"' + b"[" * 1000 + b'"}',
    OPENING + rb',"x":"\"[{\\"' + b',"y":[' + b"[]," * 70 + b"[]]}",
    OPENING + rb',"x":"a \\u0000 that is none","y":"\\\\u0000"}',
    OPENING + rb',"user":"\"model\":","seed":9223372036854775807}',
    OPENING + b',"tools":[{"type":"function","function":{"name":"model","parameters":{"model":{"user":1}}}}]}',
    OPENING + b',"x":[' + b"0," * 299_000 + b"0]}",
])
def test_what_only_looks_odd_is_taken(body: bytes) -> None:
    assert parse_chat(body).model == "m"


@pytest.mark.parametrize("body, says", [
    (deep(65), "levels"),
    (deep(900), "levels"),
    (OPENING + b',"x":' + b'{"a":[' * 50 + b"]}" * 50 + b"}", "levels"),
    (OPENING + rb',"user":"\u0000"}', "U+0000"),
    (OPENING + rb',"user":"\\\u0000"}', "U+0000"),
    (OPENING + rb',"x":{"\u0000":1}}', "U+0000"),
    (OPENING + b',"x":"\xff"}', "utf-8"),
    (OPENING + b',"x":"\xed\xa0\x80"}', "utf-8"),
    (OPENING + rb',"x":"\ud800"}', "JSON"),
    (OPENING + b',"seed":9223372036854775808}', "seed"),
    (OPENING + b',"max_tokens":9007199254740993}', "max_tokens"),
    (OPENING + b',"model":"m"}', "model stands twice"),
    (OPENING + rb',"m\u006fdel":"m"}', "model stands twice"),
    (OPENING + b',"x":1,"x":2}', "x stands twice"),
    (OPENING + b',"messages":[{"role":"user","content":"y"}]}', "messages stands twice"),
    (OPENING + b',"tools":[],"tools":[{"type":"function","function":{"name":"f"}}]}', "tools stands twice"),
    (OPENING[:-2] + b',"role":"system"}]}', "role stands twice"),
    (OPENING[:-2] + b',"content":[{"type":"text","text":"a","text":"b"}]}],"tools":[]}', "stands twice"),
    (OPENING + b',"x":[' + b"{}," * 300_001 + b"{}]}", "values"),
    (OPENING[:-2] + b',"x":[' + b"{}," * 300_001 + b"{}]}]}", "values"),
])
def test_what_two_readers_would_read_differently_is_refused(body: bytes, says: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_chat(body)
    assert caught.value.status == 400 and says in caught.value.message, caught.value.message
    assert len(caught.value.message) < 200
