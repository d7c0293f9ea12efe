from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from api.calls import ChatCall, Frame, UpstreamChat, UpstreamFault
from api.sse import EventParser
from api.upstreams import chat_relay
from api.upstreams.chat_relay import ChatRelay, parse_usage
from models.usage import Usage

USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}


def chat(*, choices: int = 1, include_usage: bool = False) -> UpstreamChat:
    call = ChatCall("public", [], {}, True, include_usage, choices, None, None, 10)
    return UpstreamChat(call, "upstream", "public", "chatcmpl-ours", 123, 100)


@dataclass
class Seen:
    """What a client and the meter saw of a stream."""

    chunks: list[dict[str, Any]] = field(default_factory=list)
    frames: list[Frame] = field(default_factory=list)
    fault: UpstreamFault | None = None
    complete: bool = False
    finished: bool = False

    @property
    def facts(self) -> tuple[Any, ...]:
        usages = [frame.usage for frame in self.frames if frame.usage]
        return (
            self.chunks,
            sum(frame.text_bytes for frame in self.frames),
            sum(frame.pieces for frame in self.frames),
            self.finished,
            self.complete,
            usages[-1:],
            self.fault and (self.fault.status, self.fault.code, self.fault.message),
        )

    def text(self, index: int = 0, key: str = "content") -> str:
        choices = [choice for chunk in self.chunks for choice in chunk["choices"]]
        return "".join(one["delta"].get(key) or "" for one in choices if one["index"] == index)

    def deltas(self, index: int = 0) -> list[dict[str, Any]]:
        choices = [choice for chunk in self.chunks for choice in chunk["choices"]]
        return [one["delta"] for one in choices if one["index"] == index]

    def reasons(self, index: int = 0) -> list[str]:
        choices = [choice for chunk in self.chunks for choice in chunk["choices"]]
        return [one["finish_reason"] for one in choices if one["index"] == index and one["finish_reason"]]


def run(*pieces: bytes, relay: ChatRelay | None = None, eof: bool = True) -> Seen:
    relay = relay or ChatRelay(chat())
    seen = Seen()
    for piece in pieces:
        seen.frames += relay.feed(piece)
    data = b"".join(frame.data for frame in seen.frames)
    parser = EventParser()
    seen.chunks = [json.loads(event.data) for event in parser.feed(data)]
    assert not parser.pending, "every frame ends with a whole event"
    seen.fault = relay.end() if eof else relay.fault
    seen.complete, seen.finished = relay.complete, relay.finished
    return seen


def careful(chat_: UpstreamChat) -> ChatRelay:
    relay = ChatRelay(chat_)
    relay._lessons_left = 0
    return relay


def chunk(*choices: dict[str, Any], **extra: Any) -> dict[str, Any]:
    return {
        "id": "theirs", "object": "chat.completion.chunk", "created": 9, "model": "theirs-2026",
        "choices": list(choices), **extra,
    }


def entry(delta: dict[str, Any], index: int = 0, reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "finish_reason": reason}


def content(text: str, index: int = 0, **extra: Any) -> dict[str, Any]:
    return chunk(entry({"content": text}, index), **extra)


def finish(index: int = 0, reason: str = "stop", **extra: Any) -> dict[str, Any]:
    return chunk(entry({}, index, reason), **extra)


def role(index: int = 0) -> dict[str, Any]:
    return chunk(entry({"role": "assistant", "content": ""}, index))


def tools(*calls: dict[str, Any]) -> dict[str, Any]:
    return chunk(entry({"tool_calls": list(calls)}))


def wire(*events: Any, ascii_only: bool = False, spaced: bool = False, prefix: str = "data: ") -> bytes:
    separators = (", ", ": ") if spaced else (",", ":")
    return b"".join(one(event, ascii_only, separators, prefix) for event in events)


def one(event: Any, ascii_only: bool, separators: tuple[str, str], prefix: str) -> bytes:
    if isinstance(event, bytes):
        return event
    text = event if isinstance(event, str) else json.dumps(
        event, ensure_ascii=ascii_only, separators=separators
    )
    return f"{prefix}{text}\n\n".encode()


def cut(stream: bytes, places: list[int]) -> list[bytes]:
    places = sorted({place % (len(stream) + 1) for place in places} | {0, len(stream)})
    return [stream[start:end] for start, end in zip(places, places[1:], strict=False)]


# What a stream may consist of

AWKWARD = ["a", " b", "\n\n", '"', "\\", "é", "😀", "", '\\"', "\r\n"]
texts = st.one_of(st.text(max_size=8), st.sampled_from(AWKWARD))
extras = st.sampled_from(
    [{}, {"usage": None}, {"system_fingerprint": None}, {"obfuscation": "xy"}, {"usage": USAGE}]
)


def arguments(text: str, **more: Any) -> dict[str, Any]:
    return {"tool_calls": [{"function": {"arguments": text}, **more}]}


deltas = st.one_of(
    texts.map(lambda text: {"content": text}),
    texts.map(lambda text: {"content": text}),
    texts.map(lambda text: {"role": "assistant", "content": text}),
    texts.map(lambda text: {"content": None, "reasoning_content": text}),
    texts.map(lambda text: {"reasoning": text}),
    texts.map(lambda text: {"refusal": text}),
    texts.map(lambda text: arguments(text, index=1)),
    texts.map(lambda text: arguments(text)),
    texts.map(lambda text: arguments(text, index=1, id="c")),
    texts.map(lambda text: {"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": text}}]}),
)
chunks = st.builds(
    lambda delta, index, extra: chunk(entry(delta, index), **extra), deltas, st.integers(0, 1), extras
)
runs = st.lists(texts, min_size=2, max_size=6).map(lambda given: [content(text) for text in given])
bodies = st.lists(st.one_of(chunks.map(lambda given: [given]), runs), max_size=6).map(
    lambda groups: [event for group in groups for event in group]
)
endings = st.sampled_from([
    [finish(), "[DONE]"],
    [finish(), chunk(usage=USAGE), "[DONE]"],
    [finish(usage=USAGE), "[DONE]", "rubbish"],
    [finish(), finish(1), chunk(usage=USAGE)],
    [finish(), content("late"), "[DONE]"],
    ["[DONE]"],
    [{"error": {"message": "no", "code": 429}}, content("never")],
    ["{bad", content("never")],
    [],
])
styles = st.builds(
    lambda ascii_only, spaced, prefix: {"ascii_only": ascii_only, "spaced": spaced, "prefix": prefix},
    st.booleans(),
    st.booleans(),
    st.sampled_from(["data: ", "data:", ": ping\n\ndata: ", "event: m\ndata: "]),
)


@settings(max_examples=400, deadline=None)
@given(
    body=bodies, ending=endings, style=styles, places=st.lists(st.integers(0, 10_000), max_size=30),
    crlf=st.booleans(), choices=st.integers(1, 2), include_usage=st.booleans(),
)
def test_neither_the_split_nor_the_fast_path_changes_what_is_seen(
    body: list[Any],
    ending: list[Any],
    style: dict[str, Any],
    places: list[int],
    crlf: bool,
    choices: int,
    include_usage: bool,
) -> None:
    stream = wire(*body, *ending, **style)
    if crlf:
        stream = stream.replace(b"\n", b"\r\n")
    asked = chat(choices=choices, include_usage=include_usage)
    plain = run(stream, relay=careful(asked))
    assert run(stream, relay=ChatRelay(asked)).facts == plain.facts
    assert run(*cut(stream, places), relay=ChatRelay(asked)).facts == plain.facts
    singly = [stream[place : place + 1] for place in range(len(stream))]
    assert run(*singly, relay=ChatRelay(asked)).facts == plain.facts
    by_event = [part + b"\n\n" for part in stream.split(b"\n\n")]
    assert run(*by_event, relay=ChatRelay(asked)).facts == run(*by_event, relay=careful(asked)).facts
    check_client_rules(plain, include_usage)


def check_client_rules(seen: Seen, include_usage: bool) -> None:
    """Check what the SDKs rely on."""
    known: dict[int, dict[str, Any]] = {}
    for given_ in seen.chunks:
        assert given_["id"] == "chatcmpl-ours" and given_["object"] == "chat.completion.chunk"
        assert given_["created"] == 123 and given_["model"] == "public"
        assert given_.get("usage", "absent") == (None if include_usage else "absent")
        assert given_["choices"] and "obfuscation" not in given_ and "error" not in given_
        assert given_.get("system_fingerprint", "") is not None
        for choice in given_["choices"]:
            index = choice["index"]
            assert index in known or index == len(known), "choices are dense and 0 comes first"
            assert ("role" in choice["delta"]) == (index not in known), "the role exactly once"
            state = known.setdefault(index, {"tools": {}})
            assert "finished" not in state or not choice["finish_reason"]
            if choice["finish_reason"]:
                state["finished"] = True
            for call in choice["delta"].get("tool_calls", ()):
                check_tool_call(call, state["tools"])
    if seen.finished:
        assert all("finished" in state for state in known.values())


def check_tool_call(call: dict[str, Any], known: dict[int, dict[str, Any]]) -> None:
    index = call["index"]
    assert index in known or index == len(known), "tool calls are dense"
    assert ("id" in call) == ("type" in call) == (index not in known), "introduced exactly once"
    state = known.setdefault(index, {})
    if "name" in call["function"]:
        assert "name" not in state
        state["name"] = call["function"]["name"]
    assert isinstance(call["function"]["arguments"], str)


NASTY = [
    b"ok", b"", b'a","refusal":"b', b"\\", b'"', b'a\\"b', b'a\\\\"b', b"\\\\", b"\xff", b"\xc3", b"\xa9",
    b"\n", b"\n\n", b"\r", b"\\u00", b"e9", b"\\ud83d", b"\\ude00", b"\\ud83d\\ude00", b"\\q", b"\x00",
    b"\ndata: ", b'"}}],"x":[{"y":{"z":"', b'x"},"finish_reason":"stop"}],"q":[{"delta":{"content":"',
    b"\\n", "é😀".encode(),
    b'"},"finish_reason":null}]}\n\ndata: {}\n\ndata: {"id":"theirs',
]


@settings(max_examples=600, deadline=None)
@given(inside=st.lists(st.sampled_from(NASTY), min_size=1, max_size=5), grouped=st.booleans())
@example(inside=[b"ok", b'a","refusal":"b'], grouped=True)
@example(inside=[b"\\", b"ok"], grouped=True)
@example(inside=[b"\\u00", b"e9"], grouped=True)
@example(inside=[b"\xc3", b"\xa9"], grouped=True)
def test_events_that_only_look_alike_take_the_careful_path(inside: list[bytes], grouped: bool) -> None:
    head, tail = wire(content("@")).split(b"@")
    events = [head + text + tail for text in inside]
    start, end = wire(role(), content("one"), content("two")), wire(finish(), "[DONE]")
    pieces = [start, *([b"".join(events)] if grouped else events), end]
    assert run(*pieces).facts == run(*pieces, relay=careful(chat())).facts


@pytest.mark.parametrize("style", [{}, {"spaced": True}, {"prefix": "data:"}, {"ascii_only": True}])
@pytest.mark.parametrize("delta", [
    {"content": "@"},
    {"role": "assistant", "content": "@"},
    {"content": "@", "reasoning_content": None},
    {"reasoning_content": "@", "content": None},
    {"reasoning": "@"},
    {"tool_calls": [{"index": 0, "function": {"arguments": "@"}}]},
    {"tool_calls": [{"index": 0, "id": "c", "function": {"name": "f", "arguments": "@"}}]},
])
def test_the_fast_path_is_taken(delta: dict[str, Any], style: dict[str, Any], monkeypatch: Any) -> None:
    def event(text: str) -> Any:
        pattern = json.dumps(chunk(entry(delta), usage=None, x={"y": [1]}))
        return json.loads(pattern.replace('"@"', json.dumps(text)))

    relay = ChatRelay(chat(include_usage=True))
    opening = {"tool_calls": [{"index": 0, "id": "c", "function": {"name": "f", "arguments": "{"}}]}
    first = [chunk(entry(opening))] if "tool_calls" in delta else [role()]
    before = run(wire(*first, event("a"), event("b"), **style), relay=relay, eof=False)
    assert not before.fault
    monkeypatch.setattr(chat_relay, "_decode", None)  # the careful path cannot work any more
    given_ = ["c", "é", "\n", '"q"', "😀", "\\", " d"]
    seen = run(wire(*map(event, given_), **style), relay=relay, eof=False)
    assert len(seen.frames) == 1
    assert seen.frames[0].pieces == len(given_)
    assert seen.frames[0].text_bytes == len("".join(given_).encode())
    assert all(one_["usage"] is None and one_["x"] == {"y": [1]} for one_ in seen.chunks)
    assert "".join(json.dumps(one_) for one_ in seen.chunks).count('"role"') == 0


def test_a_cut_event_waits_for_its_rest_and_the_others_go_fast() -> None:
    relay = ChatRelay(chat())
    run(wire(role(), content("a"), content("b")), relay=relay, eof=False)
    data = wire(content("c"), content("d"), content("e"))
    first = run(data[:-10], relay=relay, eof=False)
    assert first.text() == "cd" and first.frames[0].pieces == 2
    second = run(data[-10:] + wire(content("f"), content("g")), relay=relay, eof=False)
    assert second.text() == "efg" and [frame.pieces for frame in second.frames] == [3]


# The order of a stream and its end


def test_a_polite_stream() -> None:
    seen = run(wire(role(), content("Hel"), content("lo"), finish(), chunk(usage=USAGE), "[DONE]"))
    assert seen.text() == "Hello"
    assert [delta.get("role") for delta in seen.deltas()] == ["assistant", None, None, None]
    assert seen.reasons() == ["stop"]
    assert len(seen.chunks) == 4, "the usage chunk is not relayed"
    assert seen.facts[1:] == (5, 2, True, True, [Usage(input_tokens=7, output_tokens=3)], None)
    usage_bodies = [frame.usage_body for frame in seen.frames if frame.usage_body]
    assert usage_bodies == [USAGE]


def test_text_is_zero_in_the_preamble() -> None:
    relay = ChatRelay(chat())
    frames = relay.feed(wire(role()))
    assert [(frame.text_bytes, frame.pieces, bool(frame.data)) for frame in frames] == [(0, 0, True)]
    assert not relay.delivered
    assert relay.feed(b": ping\n\n") == []
    relay.feed(wire(content("x")))
    assert relay.delivered


def test_a_forgotten_role_is_added_and_repeated_ones_are_taken_away() -> None:
    again = chunk(entry({"role": "assistant", "content": "b"}))
    seen = run(wire(content("a"), again, again, finish(), "[DONE]"))
    assert seen.deltas()[0] == {"role": "assistant", "content": "a"}
    assert seen.deltas()[1] == {"content": "b"}


def test_two_choices_begin_with_index_0_whatever_the_provider_does() -> None:
    seen = run(
        wire(content("x", 1), content("a", 0), content("y", 1), finish(1), finish(0), chunk(usage=USAGE)),
        relay=ChatRelay(chat(choices=2)),
    )
    assert [one_["choices"][0]["index"] for one_ in seen.chunks] == [0, 1, 0, 0, 1]
    assert (seen.text(0), seen.text(1)) == ("xy", "a")
    assert seen.complete and seen.finished


def test_one_finished_choice_of_two_is_not_the_end() -> None:
    relay = ChatRelay(chat(choices=2))
    seen = run(wire(content("a"), finish(0, usage=USAGE)), relay=relay, eof=False)
    assert not seen.finished and not seen.complete
    seen = run(wire(content("b", 1), finish(1)), relay=relay, eof=False)
    assert seen.finished and not seen.complete and seen.frames[-1].finished


def test_a_provider_that_ignores_n_still_ends() -> None:
    events = (content("a"), finish())
    assert run(wire(*events, "[DONE]"), relay=ChatRelay(chat(choices=2))).complete
    assert run(wire(*events, chunk(usage=USAGE)), relay=ChatRelay(chat(choices=2))).complete
    assert run(wire(*events), relay=ChatRelay(chat(choices=2))).fault is None


@pytest.mark.parametrize(("tail", "reason"), [(content("x"), "stop"), (None, "tool_calls")])
def test_done_without_a_finish_reason_writes_one(tail: Any, reason: str) -> None:
    call = {"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    seen = run(wire(tail or tools(call), "[DONE]", content("ignored"), "{bad"))
    assert seen.reasons() == [reason]
    assert seen.finished and seen.complete and seen.fault is None and seen.frames[-1].finished
    assert "ignored" not in seen.text()


@pytest.mark.parametrize("events", [(), (role(),), (content("a"),), (b"data: [DONE]\n",)])
def test_an_end_without_a_terminal_event_is_a_fault(events: tuple[Any, ...]) -> None:
    seen = run(wire(*events))
    assert seen.fault and seen.fault.answer_status == 502
    assert seen.fault.retry_same == ("a" not in seen.text())


def test_done_before_anything_is_a_fault() -> None:
    assert run(wire("[DONE]")).fault
    assert run(wire(chunk(usage=USAGE), "[DONE]")).fault


def test_an_end_after_the_finish_reason_is_a_normal_one() -> None:
    seen = run(wire(content("a"), finish()))
    assert seen.fault is None and seen.finished and not seen.complete


def test_the_finish_is_told_once() -> None:
    again = chunk(entry({"content": ""}, reason="stop"), usage=USAGE)
    seen = run(wire(content("a"), finish(reason="length"), again))
    assert seen.reasons() == ["length"] and len(seen.chunks) == 2 and seen.complete
    assert seen.facts[5] == [Usage(input_tokens=7, output_tokens=3)]


# Usage


@pytest.mark.parametrize("include_usage", [True, False])
def test_usage_is_reported_wherever_it_stands_and_relayed_nowhere(include_usage: bool) -> None:
    early = {**USAGE, "completion_tokens": 1}
    for events in (
        [content("a", usage=early), content("b"), finish(), chunk(usage=USAGE)],
        [content("a", usage=None), finish(usage=USAGE)],
        [content("a", usage=early), content("b", usage=early), finish(usage=USAGE)],
    ):
        seen = run(wire(*events), relay=ChatRelay(chat(include_usage=include_usage)))
        assert seen.complete
        assert seen.facts[5] == [Usage(input_tokens=7, output_tokens=3)]
        check_client_rules(seen, include_usage)


def test_usage_in_every_chunk_is_reported_every_time() -> None:
    relay = ChatRelay(chat())
    for _ in range(5):
        seen = run(wire(content("a", usage=USAGE)), relay=relay, eof=False)
        assert seen.facts[5] == [Usage(input_tokens=7, output_tokens=3)]


def test_usage_that_makes_no_sense_ends_the_stream_but_is_not_reported() -> None:
    seen = run(wire(content("a"), finish(), chunk(usage={"prompt_tokens": -1, "completion_tokens": 1})))
    assert seen.complete and seen.facts[5] == []
    assert all(frame.usage_body is None for frame in seen.frames)


@pytest.mark.parametrize(
    ("body", "usage"),
    [
        ({"prompt_tokens": 10, "completion_tokens": 5}, Usage(input_tokens=10, output_tokens=5)),
        ({"prompt_tokens": 0, "completion_tokens": 0}, Usage()),
        (
            {"prompt_tokens": 10, "completion_tokens": 5,
             "prompt_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 3},
             "completion_tokens_details": {"reasoning_tokens": 2}},
            Usage(3, 4, 3, 5, 2),
        ),
        (
            {"prompt_tokens": 5, "completion_tokens": 5,
             "prompt_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 9}},
            Usage(0, 4, 1, 5),
        ),
        (
            {"prompt_tokens": 5, "completion_tokens": 5, "prompt_tokens_details": None,
             "completion_tokens_details": {"reasoning_tokens": None}},
            Usage(5, 0, 0, 5),
        ),
        (
            {"prompt_tokens": 32, "completion_tokens": 9, "total_tokens": 135,
             "completion_tokens_details": {"reasoning_tokens": 94}},
            Usage(32, 0, 0, 103, 94),
        ),
        ({"input_tokens": 10, "output_tokens": 5, "input_tokens_details": {"cached_tokens": 4}}, Usage(6, 4, 0, 5)),
        ({"prompt_tokens": 10, "completion_tokens": 5, "prompt_cache_hit_tokens": 4}, Usage(6, 4, 0, 5)),
        ({"prompt_tokens": 10, "completion_tokens": 5, "cached_tokens": 4}, Usage(6, 4, 0, 5)),
        ({"prompt_tokens": 10}, None),
        ({"completion_tokens": 10}, None),
        ({"prompt_tokens": -1, "completion_tokens": 5}, None),
        ({"prompt_tokens": 1, "completion_tokens": -5}, None),
        ({"prompt_tokens": True, "completion_tokens": 5}, None),
        ({"prompt_tokens": "10", "completion_tokens": 5}, None),
        ({"prompt_tokens": 10.0, "completion_tokens": 5}, None),
        ({"prompt_tokens": 10, "completion_tokens": 10**9 + 1}, None),
        ({"prompt_tokens": 10, "completion_tokens": 10**9}, Usage(10, 0, 0, 10**9)),
        (
            {"prompt_tokens": 9, "completion_tokens": 9, "prompt_tokens_details": {"cached_tokens": -1}},
            None,
        ),
        ({}, None),
        (None, None),
        ([], None),
        ("usage", None),
    ],
)
def test_parse_usage(body: Any, usage: Usage | None) -> None:
    assert parse_usage(body) == usage


# Tool calls


def test_tool_calls_are_introduced_once_and_numbered_densely() -> None:
    def call(index: int, text: str) -> dict[str, Any]:
        function = {"name": "f", "arguments": text}
        return {"index": index, "id": f"c{index}", "type": "function", "function": function}

    calls = [tools(call(3, "{")), tools(call(3, "}")), tools(call(7, ""))]
    seen = run(wire(*calls, finish(reason="tool_calls")))
    calls = [one_ for delta in seen.deltas() for one_ in delta.get("tool_calls", ())]
    assert calls == [
        {"index": 0, "id": "c3", "type": "function", "function": {"name": "f", "arguments": "{"}},
        {"index": 0, "function": {"arguments": "}"}},
        {"index": 1, "id": "c7", "type": "function", "function": {"name": "f", "arguments": ""}},
        {"index": 1, "function": {"arguments": "{}"}},
    ]
    assert seen.reasons() == ["tool_calls"]


def collect(seen: Seen) -> dict[int, tuple[str, str, str]]:
    """Put tool calls together as an SDK does."""
    found: dict[int, list[str]] = {}
    for delta in seen.deltas():
        for call in delta.get("tool_calls", ()):
            parts = found.setdefault(call["index"], ["", "", ""])
            parts[0] += call.get("id", "")
            parts[1] += call["function"].get("name", "")
            parts[2] += call["function"]["arguments"]
    return {index: (parts[0], parts[1], parts[2]) for index, parts in found.items()}


@pytest.mark.parametrize("fragments", [
    [{"id": "a", "function": {"name": "f", "arguments": "1"}}, {"function": {"arguments": "2"}},
     {"id": "b", "function": {"name": "g", "arguments": "3"}}, {"function": {"arguments": "4"}}],
    [{"index": 0, "id": "a", "function": {"name": "f", "arguments": "12"}},
     {"index": 0, "id": "b", "function": {"name": "g", "arguments": "3"}},
     {"index": 0, "function": {"arguments": "4"}}],
    [{"index": 0, "id": "a", "function": {"name": "f", "arguments": None}},
     {"index": 0, "id": "a", "function": {"name": "f", "arguments": "12"}},
     {"index": 1, "id": "b", "function": {"name": "g", "arguments": "34"}}],
    [{"index": 0, "id": "a"}, {"index": 0, "function": {"name": "f"}},
     {"index": 0, "id": "other", "function": {"name": None, "arguments": "12"}},
     {"index": "x", "id": "b", "function": {"name": "g", "arguments": 34}}],
])
def test_tool_calls_of_sloppy_providers(fragments: list[dict[str, Any]]) -> None:
    expected = {0: ("a", "f", "12"), 1: ("b", "g", "34")}
    events = [*map(tools, fragments), finish(reason="tool_calls")]
    assert collect(run(wire(*events))) == expected
    assert collect(run(*(wire(event) for event in events))) == expected


@pytest.mark.parametrize("fragments", [
    ["A", "", "", "", "B", "", "", "A", "", ""],
    ["A0", "B1", "", "", "", "0", "", "", "", "1", "", ""],
    ["A0", "0", "0", "0", "B0", "0", "0", "0"],
])
def test_what_was_learned_is_forgotten_when_it_would_mean_another_call(fragments: list[str]) -> None:
    def event(kind: str, number: int) -> dict[str, Any]:
        call: dict[str, Any] = {"function": {"arguments": f"<{number}>"}}
        if kind[:1] in ("A", "B"):
            call |= {"id": kind[0] + str(number), "function": {"name": "f", "arguments": ""}}
        if kind[-1:].isdigit():
            call["index"] = int(kind[-1])
        return tools(call)

    pieces = [wire(event(kind, number)) for number, kind in enumerate(fragments)]
    fast, slow = run(*pieces, eof=False), run(*pieces, relay=careful(chat()), eof=False)
    assert collect(fast) == collect(slow)
    assert len(collect(fast)) == sum(kind[:1] in ("A", "B") for kind in fragments)


def test_a_missing_tool_id_is_made_up_and_stays() -> None:
    calls = [{"function": {"name": "f", "arguments": {"x": 1}}}, {"function": {"name": "g"}}]
    found = collect(run(wire(tools(*calls), finish())))
    assert found == {0: ("call_ours_0_0", "f", '{"x":1}'), 1: ("call_ours_0_1", "g", "{}")}


def test_an_empty_call_beside_its_finish_is_repaired_in_place() -> None:
    delta = {"tool_calls": [{"index": 0, "id": "c", "function": {"name": "f", "arguments": ""}}]}
    seen = run(wire(chunk(entry(delta, reason="tool_calls"))))
    assert [call["function"]["arguments"] for call in seen.deltas()[0]["tool_calls"]] == ["{}"]


def test_custom_tools_keep_their_input() -> None:
    start = {"index": 0, "id": "c", "type": "custom", "custom": {"name": "f", "input": "a"}}
    more = {"index": 0, "custom": {"input": "b"}}
    seen = run(wire(tools(start), tools(more), tools(more), finish()))
    assert [delta["tool_calls"][0]["custom"] for delta in seen.deltas()[:3]] == [
        {"name": "f", "input": "a"}, {"input": "b"}, {"input": "b"},
    ]
    assert seen.facts[1] == 3


# What is dropped, and what is a fault


def test_preambles_and_strange_objects_are_dropped() -> None:
    seen = run(wire(
        {"id": "", "object": "", "choices": [], "prompt_filter_results": [{}]}, {"object": "x"},
        {"choices": None}, b": ping\n\n", b"data:\n\n", b"event: ping\ndata: {}\n\n",
        {"choices": [None, 3]}, content("a"), finish(),
    ))
    assert len(seen.chunks) == 2 and seen.text() == "a"


def test_reasoning_has_one_name_and_counts_once() -> None:
    both = chunk(entry({"reasoning_content": "ab", "reasoning": "ab"}))
    seen = run(wire(chunk(entry({"reasoning": "x"})), both, finish()))
    assert seen.text(key="reasoning_content") == "xab" and seen.text(key="reasoning") == ""
    assert seen.facts[1] == 3


@pytest.mark.parametrize(
    ("part", "kept"), [({"type": "reference", "ids": [1]}, False), ({"type": "image_url", "image_url": {}}, True)]
)
def test_parts_become_text_unless_something_would_be_lost(part: dict[str, Any], kept: bool) -> None:
    parts = [{"type": "thinking", "thinking": "Hm"}, {"type": "text", "text": "Hé"}, part, "!"]
    seen = run(wire(chunk(entry({"content": parts})), finish()))
    first = seen.deltas()[0]
    assert first["content"] == (parts if kept else "Hé!")
    assert first.get("reasoning_content") == (None if kept else "Hm")
    assert seen.facts[1:3] == (6, 1)


def test_unknown_fields_pass() -> None:
    seen = run(wire(content("a", citations=["u"], system_fingerprint="fp", error=None), finish()))
    assert seen.chunks[0]["citations"] == ["u"] and seen.chunks[0]["system_fingerprint"] == "fp"


@pytest.mark.parametrize(
    ("event", "status"),
    [
        ({"error": {"message": "secret", "code": 429}}, 429),
        ({"error": {"message": "secret", "code": "429"}}, 429),
        ({"error": {"message": "secret", "type": "overloaded_error"}}, 529),
        ({"error": {"message": "secret", "type": "tokens", "code": "rate_limit_exceeded"}}, 429),
        ({"error": {"message": "secret", "code": "context_length_exceeded"}}, 400),
        ({"error": {"message": "secret", "type": "invalid_request_error"}}, 400),
        ({"error": {"message": "secret", "code": True}}, 500),
        ({"error": "secret"}, 500),
        ({"object": "error", "message": "secret", "type": "BadRequestError", "code": 400}, 400),
        (b'event: error\ndata: {"message":"secret","code":"server_error"}\n\n', 500),
        ({**content("b"), "error": {"message": "secret", "code": 502}}, 502),
    ],
)
def test_error_events_are_faults_by_their_inner_status(event: Any, status: int) -> None:
    seen = run(wire(content("a"), event, content("b"), "[DONE]"))
    assert seen.fault and seen.fault.status == status
    assert seen.fault.answer_status == (400 if status == 400 else 502)
    assert seen.text() == "a", "what came before is delivered, what comes after is not"
    assert "secret" not in seen.fault.message and not seen.fault.retry_same
    assert run(wire(role(), event)).fault.retry_same == (status >= 500)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "event", ["{bad", "[1]", "3", '"x"', "null", b"data: \xff\n\n", "[" * 100_000, "NaN"]
)
def test_what_cannot_be_read_is_never_forwarded(event: Any) -> None:
    seen = run(wire(content("a"), event, content("b"), "[DONE]"))
    assert seen.fault and seen.fault.code == "upstream_error" and seen.text() == "a"


def test_a_huge_line_is_a_fault() -> None:
    relay = ChatRelay(chat())
    run(wire(content("a")), relay=relay, eof=False)
    seen = run(*[b"data: " + b"x" * 100_000] + [b"x" * 100_000] * 20, relay=relay, eof=False)
    assert seen.fault and not seen.fault.retry_same
    assert relay.feed(wire(content("b"))) == []


def test_nothing_is_learned_for_ever_from_a_stream_that_keeps_changing() -> None:
    relay = ChatRelay(chat())
    for number in range(chat_relay.LESSONS_MAX * 3):
        assert run(wire(content("a", number=number)), relay=relay, eof=False).text() == "a"
    assert relay._lessons_left == 0
