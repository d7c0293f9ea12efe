from __future__ import annotations

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api import sse
from api.sse import Event, EventParser, EventTooLarge, encode


def parse(*pieces: bytes) -> list[Event]:
    parser = EventParser()
    return [event for piece in pieces for event in parser.feed(piece)]


@pytest.mark.parametrize(
    ("stream", "events"),
    [
        (b"data: a\n\n", [Event(b"a")]),
        (b"data:a\n\n", [Event(b"a")]),
        (b"data:  a\n\n", [Event(b" a")]),
        (b"data: a\r\n\r\n", [Event(b"a")]),
        (b"data: a\r\r", [Event(b"a")]),
        (b"data: a\r\n\ndata: b\n\r\n", [Event(b"a"), Event(b"b")]),
        (b"\xef\xbb\xbfdata: a\n\n", [Event(b"a")]),
        (b"data: a\ndata: b\n\n", [Event(b"a\nb")]),
        (b"data\n\n", [Event(b"")]),
        (b"data:\ndata:\n\n", [Event(b"\n")]),
        (b": comment\n\n:\n\ndata: a\n\n", [Event(b"a")]),
        (b"event: ping\n\ndata: a\n\n", [Event(b"a")]),
        (b"event: error\ndata: a\n\ndata: b\n\n", [Event(b"a", "error"), Event(b"b")]),
        (b"event:\ndata: a\n\n", [Event(b"a")]),
        (b"id: 7\nretry: 10\nunknown: x\ndata: a\n\n", [Event(b"a")]),
        (b"data: a\n", []),
        (b"data: a", []),
        (b"\n\n\n", []),
        (b"data: \xc3\xa9\n\n", [Event("é".encode())]),
        (b"data: a:b: c\n\n", [Event(b"a:b: c")]),
        (b"xdata: a\n\n", []),
        (b"", []),
    ],
)
def test_parses_every_legal_form_at_every_split(stream: bytes, events: list[Event]) -> None:
    assert parse(stream) == events
    for cut in range(len(stream) + 1):
        assert parse(stream[:cut], stream[cut:]) == events
    assert parse(*(stream[place : place + 1] for place in range(len(stream)))) == events


lines = st.sampled_from(
    [b"data: a", b"data:\xc3\xa9", b"data", b"event: e", b": c", b"id: 1", b"", b"", b"x:y"]
    + [b"\xef\xbb\xbfdata: z"]
)
streams = st.lists(st.tuples(lines, st.sampled_from([b"\n", b"\r\n", b"\r"]))).map(
    lambda pairs: b"".join(line + end for line, end in pairs)
)


@given(stream=streams, cuts=st.lists(st.integers(0, 200)))
def test_the_split_never_matters(stream: bytes, cuts: list[int]) -> None:
    places = sorted({min(cut, len(stream)) for cut in cuts} | {0, len(stream)})
    pieces = [stream[start:end] for start, end in zip(places, places[1:], strict=False)]
    assert parse(*pieces) == parse(stream)


def test_pending_counts_what_is_held() -> None:
    parser = EventParser()
    assert parser.pending == 0
    parser.feed(b"dat")
    assert parser.pending == 3
    parser.feed(b"a: xy\n")
    assert parser.pending > 0
    parser.feed(b"event: e\n")
    assert parser.feed(b"\n") == [Event(b"xy", "e")]
    assert parser.pending == 0
    parser.feed(b": ping\n\n")
    assert parser.pending == 0
    parser.feed(b"event: e\n")
    assert parser.pending > 0


def test_a_line_may_be_a_megabyte_and_no_more() -> None:
    longest = b"data: " + b"x" * (sse.LINE_BYTES_MAX - 6)
    assert len(parse(longest + b"\n\n")) == 1
    with pytest.raises(EventTooLarge):
        parse(longest + b"x\n\n")
    with pytest.raises(EventTooLarge):
        parse(b": " + b"x" * sse.LINE_BYTES_MAX)
    half = b"x" * (sse.LINE_BYTES_MAX // 2)
    with pytest.raises(EventTooLarge):
        parse(b"data: ", half, half)


def test_an_event_may_be_four_megabytes_and_no_more() -> None:
    line = b"data: " + b"x" * (sse.LINE_BYTES_MAX - 7) + b"\n"
    assert len(parse(line * 4, b"\n")) == 1
    with pytest.raises(EventTooLarge):
        parse(*[line] * 5)
    with pytest.raises(ValueError):
        parse(b"data\n" * (sse.EVENT_BYTES_MAX + 1))


def test_byte_by_byte_is_linear() -> None:
    def seconds(size: int) -> float:
        parser, began = EventParser(), time.perf_counter()
        for _ in range(size):
            parser.feed(b"x")
        return time.perf_counter() - began

    seconds(1000)
    small, large = seconds(25_000), seconds(200_000)
    assert large < small * 8 * 4 + 0.2  # eight times the bytes; quadratic would be 64 times


def test_frames_we_write() -> None:
    assert encode({"a": [1, None], "é": "\n"}) == 'data: {"a":[1,null],"é":"\\n"}\n\n'.encode()
    assert parse(sse.PING) == []
    assert parse(sse.DONE) == [Event(b"[DONE]")]
    assert json.loads(parse(encode({"text": "a\r\nb "}))[0].data) == {"text": "a\r\nb "}
