from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
import time
from collections.abc import AsyncIterator
from email.utils import formatdate
from typing import Any

import aiohttp
import msgspec
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from api.calls import Answer, ChatCall, Frame, UpstreamChat, UpstreamFault
from api.pulse import Pulse
from api.sse import EventParser
from api.upstreams import http, openai_like
from api.upstreams.http import Session
from api.upstreams.openai_like import OpenAILike
from models.usage import Usage
from tests.twins.upstream import SECRET, Script, UpstreamTwin

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\n%b\r\n"
CHUNKED = HEAD % (b"text/event-stream", b"Transfer-Encoding: chunked\r\n")
UNFRAMED = HEAD % (b"text/event-stream", b"Connection: close\r\n")
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city", "days"],
        },
    },
}


@pytest.fixture
async def twin() -> AsyncIterator[UpstreamTwin]:
    async with UpstreamTwin(key="sk-twin") as twin:
        yield twin


@pytest.fixture
async def session() -> AsyncIterator[Session]:
    async with Session() as session:
        yield session


@pytest.fixture
def upstream(twin: UpstreamTwin, session: Session) -> OpenAILike:
    return OpenAILike("twin", twin.base_url, "sk-twin", session=session)


def chat(text: str = "hi", *, include_usage: bool = False, limit_field: str | None = None, limit: int = 1000,
         **fields: Any) -> UpstreamChat:
    messages = [{"role": "user", "content": text}]
    raw = {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in fields.items()}
    raw["messages"] = msgspec.Raw(msgspec.json.encode(messages))
    call = ChatCall("public", messages, raw, True, include_usage, fields.get("n", 1), limit, limit_field, 9)
    return UpstreamChat(call, "theirs", "public", "chatcmpl-ours", 123, limit)


async def stream(upstream: OpenAILike, asked: UpstreamChat, pulse: Pulse | None = None) -> list[Frame]:
    return [frame async for frame in upstream.chat_stream(asked, pulse or Pulse())]


async def complete(upstream: OpenAILike, asked: UpstreamChat, pulse: Pulse | None = None) -> Answer:
    return await upstream.chat_complete(asked, pulse or Pulse())


async def broken_stream(upstream: OpenAILike, asked: UpstreamChat) -> tuple[str, UpstreamFault]:
    """Return the text delivered before the fault, and the fault."""
    frames = []
    with pytest.raises(UpstreamFault) as caught:
        async for frame in upstream.chat_stream(asked, Pulse()):
            frames.append(frame)
    assert SECRET not in caught.value.message and "10.0.0.7" not in caught.value.message
    return text_of(frames), caught.value


async def broken_answer(upstream: OpenAILike, asked: UpstreamChat) -> UpstreamFault:
    with pytest.raises(UpstreamFault) as caught:
        await upstream.chat_complete(asked, Pulse())
    assert SECRET not in caught.value.message and "10.0.0.7" not in caught.value.message
    return caught.value


def chunks_of(frames: list[Frame]) -> list[dict[str, Any]]:
    parser = EventParser()
    chunks = [json.loads(event.data) for event in parser.feed(b"".join(frame.data for frame in frames))]
    assert not parser.pending
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk, strict=True)
    return chunks


def text_of(frames: list[Frame], index: int = 0, key: str = "content") -> str:
    choices = [choice for chunk in chunks_of(frames) for choice in chunk["choices"]]
    return "".join(choice["delta"].get(key) or "" for choice in choices if choice["index"] == index)


def usage_of(frames: list[Frame]) -> Usage | None:
    return next((frame.usage for frame in reversed(frames) if frame.usage), None)


@contextlib.asynccontextmanager
async def ticking(pulse: Pulse, pause_s: float = 0.02) -> AsyncIterator[None]:
    async def tick() -> None:
        while True:
            await asyncio.sleep(pause_s)
            pulse.tick()

    task = asyncio.create_task(tick())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


# The request


async def test_the_request_is_what_the_caller_sent(upstream: OpenAILike, twin: UpstreamTwin) -> None:
    tool = msgspec.Raw(b'[{"type": "function",  "function": {"name": "f", "x": 1.0}}]')
    asked = chat(temperature=0.5)
    asked.call.fields["tools"] = tool  # type: ignore[index]
    await stream(upstream, asked)
    body = twin.last.body
    assert body == {
        "model": "theirs",
        "temperature": 0.5,
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"type": "function", "function": {"name": "f", "x": 1.0}}],
        "max_tokens": 1000,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    headers = twin.last.headers
    assert headers["authorization"] == "Bearer sk-twin"
    assert headers["content-type"] == "application/json"
    assert headers["accept-encoding"] == "identity"
    assert "cookie" not in headers
    await complete(upstream, asked)
    assert not {"stream", "stream_options"} & set(twin.last.body)


async def test_raw_fields_are_sent_verbatim(upstream: OpenAILike) -> None:
    asked = chat()
    asked.call.fields["seed"] = msgspec.Raw(b"12345678901234567890123")  # type: ignore[index]
    asked.call.fields["tools"] = msgspec.Raw(b'[{"a":  1.50}]')  # type: ignore[index]
    body = upstream._request_body(asked, stream=False)
    assert b'"seed":12345678901234567890123' in body and b'"tools":[{"a":  1.50}]' in body


@pytest.mark.parametrize(
    ("configured", "named", "sent"),
    [
        ("max_tokens", None, "max_tokens"),
        ("max_completion_tokens", None, "max_completion_tokens"),
        ("max_tokens", "max_completion_tokens", "max_completion_tokens"),
        ("max_completion_tokens", "max_tokens", "max_tokens"),
    ],
)
async def test_the_limit_is_always_sent(
    twin: UpstreamTwin, session: Session, configured: str, named: str | None, sent: str
) -> None:
    upstream = OpenAILike("t", twin.base_url + "/", "sk-twin", session=session, limit_field=configured)
    answer = await complete(upstream, chat("tokens:9", limit_field=named, limit=4))
    assert {name: value for name, value in twin.last.body.items() if name.startswith("max_")} == {sent: 4}
    assert answer.body["choices"][0]["finish_reason"] == "length"
    assert answer.usage == Usage(input_tokens=1, output_tokens=4)


async def test_extra_headers_no_key_and_no_obfuscation(session: Session) -> None:
    async with UpstreamTwin() as twin:
        upstream = OpenAILike(
            "t", twin.base_url, None, session=session, headers={"api-key": "abc"}, strip_obfuscation=True
        )
        await stream(upstream, chat())
        assert twin.last.headers["api-key"] == "abc" and "authorization" not in twin.last.headers
        options = twin.last.body["stream_options"]
        assert options == {"include_usage": True, "include_obfuscation": False}
        await complete(upstream, chat())
        assert "stream_options" not in twin.last.body


async def test_the_session_trusts_nothing(session: Session) -> None:
    for client in (session.pooled, session.fresh):
        assert client.timeout == aiohttp.ClientTimeout(total=None, sock_connect=5, sock_read=None)
        assert isinstance(client.cookie_jar, aiohttp.DummyCookieJar)
        assert not client.trust_env and not client.auto_decompress
        assert client.connector and client.connector.limit == 0


# Polite answers


async def test_a_stream(upstream: OpenAILike) -> None:
    pulse = Pulse()
    before = pulse.heard_at
    frames = await stream(upstream, chat("say:hello_big_world pace:0.01"), pulse)
    assert text_of(frames) == "hello big world"
    assert chunks_of(frames)[-1]["choices"][0]["finish_reason"] == "stop"
    assert sum(frame.text_bytes for frame in frames) == 15 and sum(frame.pieces for frame in frames) == 3
    assert usage_of(frames) == Usage(input_tokens=2, output_tokens=3)
    assert frames[-1].finished
    assert pulse.token_at is not None and before < pulse.token_at <= pulse.heard_at


async def test_a_plain_answer(upstream: OpenAILike) -> None:
    pulse = Pulse()
    answer = await complete(upstream, chat("say:hello_big_world cached:1 delay:0.01 hostile"), pulse)
    body = ChatCompletion.model_validate(answer.body, strict=True)
    assert body.choices[0].message.content == "hello big world" and body.choices[0].finish_reason == "stop"
    assert answer.body["id"] == "chatcmpl-ours" and answer.body["model"] == "public"
    assert answer.body["created"] == 123 and answer.body["object"] == "chat.completion"
    assert "usage" not in answer.body
    assert answer.usage == Usage(input_tokens=3, cached_input_tokens=1, output_tokens=3)
    assert answer.usage_body["prompt_tokens_details"]["cached_tokens"] == 1
    assert answer.text_bytes == 15 and answer.upstream_request_id == "req_twin"
    assert pulse.token_at is not None


@pytest.mark.parametrize(
    "directives",
    ["", "bytesplit", "crlf", "bom", "comments", "roles", "azure", "obfuscation", "tail", "nodone", "nofinish",
     "nodone nousage", "usageeach", "finishusage", "burst", "early", "hostile", "chunk:7", "crlf bytesplit roles"],
)
async def test_legal_oddities(upstream: OpenAILike, directives: str) -> None:
    frames = await stream(upstream, chat(f"tokens:40 {directives}"))
    assert text_of(frames) == " ".join(f"w{number}" for number in range(40))
    assert frames[-1].finished
    chunks = chunks_of(frames)
    assert [one["choices"][0]["finish_reason"] for one in chunks].count("stop") == 1
    assert sum("role" in one["choices"][0]["delta"] for one in chunks) == 1
    if "nousage" not in directives:
        assert usage_of(frames) == Usage(input_tokens=1 + len(directives.split()), output_tokens=40)


async def test_choices_reasoning_and_the_usage_key(upstream: OpenAILike) -> None:
    frames = await stream(upstream, chat("tokens:5 reasoning:2", n=3, include_usage=True))
    for index in range(3):
        assert text_of(frames, index) == "w0 w1 w2 w3 w4"
        assert text_of(frames, index, "reasoning_content") == "r0 r1"
    assert all(chunk["usage"] is None for chunk in chunks_of(frames))
    assert usage_of(frames) == Usage(input_tokens=2, output_tokens=21, reasoning_tokens=6)
    answer = await complete(upstream, chat("tokens:5 reasoning:2", n=3))
    assert [choice["index"] for choice in answer.body["choices"]] == [0, 1, 2]
    assert answer.text_bytes == sum(frame.text_bytes for frame in frames)


async def test_tools(upstream: OpenAILike) -> None:
    frames = await stream(upstream, chat("tools:2", tools=[WEATHER]))
    found: dict[int, str] = {}
    for chunk in chunks_of(frames):
        for call in chunk["choices"][0]["delta"].get("tool_calls", ()):
            found[call["index"]] = found.get(call["index"], "") + call["function"]["arguments"]
    assert [json.loads(text) for text in found.values()] == [{"city": "text", "days": 1}] * 2
    assert chunks_of(frames)[-1]["choices"][0]["finish_reason"] == "tool_calls"
    answer = await complete(upstream, chat("tool", tools=[WEATHER]))
    ChatCompletion.model_validate(answer.body, strict=True)
    choice = answer.body["choices"][0]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "weather"
    assert answer.text_bytes == len(choice["message"]["tool_calls"][0]["function"]["arguments"])


async def test_a_connection_is_used_again(upstream: OpenAILike, twin: UpstreamTwin) -> None:
    for _ in range(3):
        await stream(upstream, chat("tokens:5"))
        await complete(upstream, chat())
        await broken_answer(upstream, chat("status:500"))
    assert twin.connections == 1 and twin.aborted == 0


async def test_a_connection_is_used_again_though_its_end_comes_late(
    upstream: OpenAILike, twin: UpstreamTwin
) -> None:
    event = b'data: {"choices":[{"delta":{"content":"hi"},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
    for _ in range(2):
        twin.raw(CHUNKED + chunk(event), 0.01, b"0\r\n\r\n", ending="keep")
        assert text_of(await stream(upstream, chat())) == "hi"
    assert twin.connections == 1


# The end of a stream


@pytest.mark.parametrize("directives", ["lateusage:9", "nodone lateusage:9"])
async def test_usage_is_waited_for_but_not_long(
    upstream: OpenAILike, twin: UpstreamTwin, monkeypatch: pytest.MonkeyPatch, directives: str
) -> None:
    monkeypatch.setattr(openai_like, "USAGE_WAIT_S", 0.2)
    began, pulse = time.monotonic(), Pulse()
    async with ticking(pulse):
        frames = await stream(upstream, chat(f"say:hello {directives}"), pulse)
    assert 0.15 < time.monotonic() - began < 5
    assert text_of(frames) == "hello" and usage_of(frames) is None
    assert any(not frame.data and not frame.finished for frame in frames), "pings go on meanwhile"
    await twin.wait_aborted()


async def test_late_usage_within_the_wait_counts(upstream: OpenAILike) -> None:
    frames = await stream(upstream, chat("say:hello lateusage:0.1 nodone"))
    assert usage_of(frames) == Usage(input_tokens=3, output_tokens=1)


async def test_a_reset_after_the_finish_is_no_fault(upstream: OpenAILike, twin: UpstreamTwin) -> None:
    event = b'data: {"choices":[{"index":0,"delta":{"content":"hi"},"finish_reason":"stop"}]}\n\n'
    twin.raw(CHUNKED + chunk(event), 0.1, ending="rst")
    frames = await stream(upstream, chat())
    assert text_of(frames) == "hi" and frames[-1].finished


# Ticks and cancellation


async def test_a_tick_does_not_abort_the_request(upstream: OpenAILike, twin: UpstreamTwin) -> None:
    pulse = Pulse()
    async with ticking(pulse):
        frames = await stream(upstream, chat("tokens:4 delay:0.2 pace:0.1"), pulse)
    ticks = [place for place, frame in enumerate(frames) if not frame.data and not frame.finished]
    assert len(ticks) > 5 and ticks[0] == 0
    assert text_of(frames) == "w0 w1 w2 w3"
    assert len(twin.requests) == 1 and twin.aborted == 0


async def test_a_tick_does_not_abort_a_plain_request(upstream: OpenAILike, twin: UpstreamTwin) -> None:
    pulse = Pulse()
    async with ticking(pulse):
        answer = await complete(upstream, chat("say:hello delay:0.2"), pulse)
    assert answer.body["choices"][0]["message"]["content"] == "hello"
    assert len(twin.requests) == 1 and twin.aborted == 0


@pytest.mark.parametrize("directives", ["hang", "stall:2", "pings:0.01"])
@pytest.mark.parametrize("how", ["cancel", "stop"])
async def test_a_cancelled_stream_leaves_the_provider_at_once(
    upstream: OpenAILike, twin: UpstreamTwin, directives: str, how: str
) -> None:
    pulses = []

    async def run() -> None:
        pulses.append(Pulse())
        await stream(upstream, chat(directives), pulses[0])

    task = asyncio.create_task(run())
    await asyncio.sleep(0.1)
    await twin.wait_asked()
    task.cancel() if how == "cancel" else pulses[0].stop("deadline")
    began = time.monotonic()
    await asyncio.wait({task}, timeout=10)
    assert task.cancelled() and time.monotonic() - began < 2
    await twin.wait_aborted()
    assert twin.last.state == "aborted"
    assert asyncio.all_tasks() - twin._tasks - {asyncio.current_task()} == set()


@pytest.mark.parametrize("directives", ["hang", "stall:0"])
async def test_a_cancelled_plain_call_leaves_the_provider_at_once(
    upstream: OpenAILike, twin: UpstreamTwin, directives: str
) -> None:
    task = asyncio.create_task(complete(upstream, chat(directives)))
    await asyncio.sleep(0.1)
    await twin.wait_asked()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await twin.wait_aborted()


async def test_a_closed_generator_leaves_the_provider(upstream: OpenAILike, twin: UpstreamTwin) -> None:
    frames = upstream.chat_stream(chat("stall:2"), Pulse())
    await anext(frames)
    await frames.aclose()  # type: ignore[attr-defined]
    await twin.wait_aborted()


# Accidents on the way


@pytest.mark.parametrize("directives", ["cut:2", "rst:2", "cleancut:2", "error:2", "garbage", "huge"])
async def test_accidents_in_mid_stream(upstream: OpenAILike, directives: str) -> None:
    text, fault = await broken_stream(upstream, chat(f"tokens:9 {directives}"))
    assert text == ("w0" if directives in ("garbage", "huge") else "w0 w1")
    assert (fault.answer_status, fault.code, fault.retry_same) == (502, "upstream_error", False)


async def test_a_fault_does_not_wait_for_the_end(upstream: OpenAILike, twin: UpstreamTwin) -> None:
    twin.raw(CHUNKED + chunk(b'data: {"error":{"code":503}}\n\n'), ending="hold")
    async with asyncio.timeout(10):
        assert (await broken_stream(upstream, chat()))[1].status == 503
    await twin.wait_aborted()


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


@pytest.mark.parametrize(
    ("parts", "retry_same"),
    [
        ([], True),  # F6
        ([b"HELLO\r\n\r\n"], False),  # F8
        ([b"HTTP/1.1 200 OK\r\nX: " + b"a" * 9000 + b"\r\n\r\n"], False),
        ([b"HTTP/1.1 200 OK\r\nContent-"], True),
        ([CHUNKED], True),  # F27
        ([CHUNKED, chunk(b": ping\n\n"), b"zz\r\n"], True),
        ([CHUNKED, chunk(b": ping\n\n"), b"0\r\n\r\n"], True),  # F28
        ([UNFRAMED, b"data: {"], True),
        ([HEAD % (b"text/event-stream", b"Content-Encoding: br\r\n"), b"xx"], True),  # F40
        ([HEAD % (b"text/html", b"Content-Length: 4\r\n"), b"<p/>"], False),  # F11
        ([HEAD % (b"application/json", b"Content-Length: 2\r\n"), b"{}"], False),
        ([HEAD % (b"application/json", b"Content-Length: 9\r\n"), b"{}"], False),
        ([b"HTTP/1.1 204 No Content\r\n\r\n"], False),
    ],
)
@pytest.mark.parametrize("ending", ["fin", "rst"])
async def test_streams_that_break_before_any_text(
    upstream: OpenAILike, twin: UpstreamTwin, parts: list[bytes], retry_same: bool, ending: str
) -> None:
    paced = [piece for part in parts for piece in (part, 0.02)]
    twin.raw(*paced, ending=ending)
    text, fault = await broken_stream(upstream, chat())
    assert (text, fault.answer_status, fault.code) == ("", 502, "upstream_error")
    assert fault.retry_same == retry_same
    await asyncio.sleep(0.05)  # until the close is here; before that it would be the keep-alive race
    assert await stream(upstream, chat()), "the next call is not harmed"


async def test_broken_framing_in_mid_body_does_not_hang(upstream: OpenAILike, twin: UpstreamTwin) -> None:
    parts = (0.02, chunk(b'{"choices": '), 0.02, b"zz\r\n")
    twin.raw(HEAD % (b"application/json", b"Transfer-Encoding: chunked\r\n"), *parts, ending="hold")
    async with asyncio.timeout(10):
        assert (await broken_answer(upstream, chat())).retry_same


async def test_a_reused_connection_gathers_nothing(upstream: OpenAILike, twin: UpstreamTwin) -> None:
    for _ in range(5):
        await complete(upstream, chat())
        await stream(upstream, chat())
    (pooled,) = upstream._session.pooled.connector._conns.values()  # type: ignore[union-attr]
    assert len(pooled) == 1 and len(pooled[0][0].closed._callbacks) <= 1


async def test_an_unframed_answer_over_http_1_0_works(upstream: OpenAILike, twin: UpstreamTwin) -> None:
    event = b'data: {"choices":[{"delta":{"content":"hi"},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
    twin.raw(b"HTTP/1.0 200 OK\r\n\r\n" + event)
    assert text_of(await stream(upstream, chat())) == "hi"
    twin.raw(UNFRAMED, event[:30], 0.05, event[30:])
    assert text_of(await stream(upstream, chat())) == "hi"


async def test_the_keep_alive_race(upstream: OpenAILike, twin: UpstreamTwin) -> None:
    for attempt in (broken_stream, broken_answer):
        twin.script("dropnext")
        await complete(upstream, chat())
        found: Any = await attempt(upstream, chat())
        fault = found[1] if isinstance(found, tuple) else found
        assert fault.retry_same and fault.status is None
    assert text_of(await stream(upstream, chat("say:again"))) == "again"


async def test_nobody_listens(session: Session) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        upstream = OpenAILike("t", f"http://127.0.0.1:{free.getsockname()[1]}", "k", session=session)
        _, fault = await broken_stream(upstream, chat())
        assert (fault.status, fault.retry_same) == (None, False)
        assert not (await broken_answer(upstream, chat())).retry_same


@pytest.mark.parametrize("reply", [b"", b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n"])
async def test_tls_is_never_downgraded(reply: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    heard = []

    async def no_tls(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.read(1000))
        writer.write(reply)
        await reader.read()
        writer.close()

    monkeypatch.setattr(http, "CONNECT_S", 0.2)
    server = await asyncio.start_server(no_tls, "127.0.0.1", 0)
    address = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    async with server, Session() as session:
        _, fault = await broken_stream(OpenAILike("t", address, "sk-secret", session=session), chat())
    assert (fault.answer_status, fault.status, fault.retry_same) == (502, None, False)
    assert heard and b"sk-secret" not in b"".join(heard)


@pytest.mark.parametrize("url", ["http://nowhere.invalid/v1", "http://[::1/v1", "ftp://x/", "", "http://a b/"])
async def test_an_address_that_cannot_be(session: Session, url: str) -> None:
    _, fault = await broken_stream(OpenAILike("t", url, "k", session=session), chat())
    assert (fault.answer_status, fault.retry_same) == (502, False)


async def test_a_key_that_is_no_header(twin: UpstreamTwin, session: Session) -> None:
    _, fault = await broken_stream(OpenAILike("t", twin.base_url, "k\r\nX: y", session=session), chat())
    assert fault.answer_status == 502 and not twin.requests


async def test_dns_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    async def silence(*_: Any, **__: Any) -> Any:
        await asyncio.sleep(60)

    monkeypatch.setattr(http, "DNS_S", 0.05)
    monkeypatch.setattr(aiohttp.ThreadedResolver, "resolve", silence)
    async with Session() as session:
        began = time.monotonic()
        _, fault = await broken_stream(OpenAILike("t", "http://slow.test", "k", session=session), chat())
        assert not fault.retry_same and time.monotonic() - began < 10


# Refusals


@pytest.mark.parametrize(
    ("directives", "answer_status", "code", "retry_same"),
    [
        ("status:400", 400, "invalid_request", False),
        ("status:422", 400, "invalid_request", False),
        ("status:400 code:context_length_exceeded", 400, "context_length_exceeded", False),
        ("status:400 code:content_filter", 400, "content_policy_violation", False),
        ("status:400 code:content_policy_violation", 400, "content_policy_violation", False),
        ("status:400 code:model_not_found", 502, "upstream_error", False),
        ("status:400 code:invalid_api_key", 502, "upstream_error", False),
        ("status:413", 413, "payload_too_large", False),
        ("status:401", 502, "upstream_error", False),
        ("status:402", 502, "upstream_error", False),
        ("status:403", 502, "upstream_error", False),
        ("status:404", 502, "upstream_error", False),
        ("status:408", 502, "upstream_error", True),
        ("status:409", 502, "upstream_error", True),
        ("status:425", 502, "upstream_error", True),
        ("status:429", 502, "upstream_error", False),
        ("status:500", 502, "upstream_error", True),
        ("status:502", 502, "upstream_error", True),
        ("status:503", 502, "upstream_error", True),
        ("status:504", 502, "upstream_error", True),
        ("status:529", 502, "upstream_error", True),
        ("status:418", 502, "upstream_error", False),
        ("status:201", 502, "upstream_error", False),
        ("status:500 html", 502, "upstream_error", True),
        ("redirect", 502, "upstream_error", False),
    ],
)
async def test_refusals(
    upstream: OpenAILike, twin: UpstreamTwin, directives: str, answer_status: int, code: str, retry_same: bool
) -> None:
    _, streamed = await broken_stream(upstream, chat(directives))
    for fault in (streamed, await broken_answer(upstream, chat(directives))):
        assert (fault.answer_status, fault.code, fault.retry_same) == (answer_status, code, retry_same)
        assert fault.status == Script.parse(directives).get("status", 302)  # type: ignore[union-attr]
        assert fault.retry_after_s is None and fault.upstream_request_id == "req_twin"
        assert len(fault.said) <= http.DETAIL_CHARS_MAX and SECRET not in fault.detail
    assert len(twin.requests) == 2, "not followed, not retried here"


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ("This model's maximum context length is 8192 tokens.", "context_length_exceeded"),
        ("prompt is too long: 210000 tokens > 200000 maximum", "context_length_exceeded"),
        ("Please reduce the length of the messages", "context_length_exceeded"),
        ("The response was filtered due to Azure's content management policy", "content_policy_violation"),
        ("Invalid schema for function 'f'", "invalid_request"),
    ],
)
def test_refusals_by_their_words(message: str, code: str) -> None:
    for body in ({"error": {"message": message}}, {"error": message}, [{"error": {"message": message}}]):
        fault = http.refusal(400, body)
        assert fault.code == code and message not in fault.message + fault.detail and message in fault.said
    fault = http.refusal(400, {"error": {"innererror": {"code": "ResponsibleAIPolicyViolation"}}})
    assert fault.code == "content_policy_violation"


@pytest.mark.parametrize("body", [None, 3, "x", [], {}, {"error": None}, {"error": []}, {"error": {"code": []}}])
def test_refusals_of_any_shape(body: Any) -> None:
    assert http.refusal(400, body).code == "invalid_request"
    assert http.refusal(503, body).retry_same
    assert http.fault_of_body(body).status == 500


@pytest.mark.parametrize(
    ("param", "forwarded"),
    [
        ("messages[0].content", "messages[0].content"),
        ("tools", "tools"),
        ("http://10.0.0.7/", None),
        ("a" * 65, None),
        ("a b", None),
        ("tools\n", None),
        ("", None),
        (None, None),
        (["x"], None),
    ],
)
def test_a_param_is_forwarded_only_if_it_is_a_plain_path(param: Any, forwarded: str | None) -> None:
    assert http.refusal(400, {"error": {"message": "no", "param": param}}).param == forwarded


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("2", 2), ("0", 0), ("1.2", 2), ("3600", 60), (" 5 ", 5), ("-1", None), ("soon", None), ("", None),
        ("nan", None), ("inf", None), ("1e400", None), ("9" * 400, None), ("Mon, 99 Foo", None), (None, None),
    ],
)
async def test_retry_after(
    upstream: OpenAILike, twin: UpstreamTwin, header: str | None, seconds: int | None
) -> None:
    script = Script(status=429) if header is None else Script({"status": 429, "retry-after": header})
    twin.script(script)
    fault = await broken_answer(upstream, chat())
    assert fault.retry_after_s == seconds


def test_retry_after_as_a_date() -> None:
    assert http.retry_after_s({"Retry-After": formatdate(time.time() + 20, usegmt=True)}) in (19, 20, 21)
    assert http.retry_after_s({"Retry-After": formatdate(time.time() + 9000, usegmt=True)}) == 60
    assert http.retry_after_s({"Retry-After": formatdate(time.time() - 9000, usegmt=True)}) is None


@pytest.mark.parametrize(
    ("directives", "status", "answer_status"),
    [
        ("error:0 code:rate_limit_exceeded", 429, 502),
        ("error:0 code:context_length_exceeded", 400, 400),
        ("error:0 code:overloaded_error", 529, 502),
        ("error:0 code:503", 503, 502),
        ("error:0 code:413", 413, 413),
        ("error:0", 500, 502),
    ],
)
async def test_an_error_inside_a_200(
    upstream: OpenAILike, twin: UpstreamTwin, directives: str, status: int, answer_status: int
) -> None:
    _, streamed = await broken_stream(upstream, chat(directives))
    plain = await broken_answer(upstream, chat(directives))
    raw = json.dumps({"error": {"message": SECRET, "code": Script.parse(directives).get("code")}})  # type: ignore[union-attr]
    twin.raw((HEAD % (b"application/json", b"Content-Length: %d\r\n" % len(raw))) + raw.encode())
    _, json_for_a_stream = await broken_stream(upstream, chat())
    for fault in (streamed, plain, json_for_a_stream):
        assert (fault.status, fault.answer_status) == (status, answer_status)


async def test_an_error_body_is_read_only_so_far(upstream: OpenAILike, twin: UpstreamTwin) -> None:
    twin.raw(b"HTTP/1.1 500 No\r\nContent-Length: 999999999\r\n\r\n", b"x" * 200_000, ending="hold")
    _, fault = await broken_stream(upstream, chat())
    assert fault.status == 500 and len(fault.said) == http.DETAIL_CHARS_MAX


async def test_an_error_body_that_stalls(
    upstream: OpenAILike, twin: UpstreamTwin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "ERROR_BODY_S", 0.05)
    twin.raw(b"HTTP/1.1 429 No\r\nContent-Length: 99\r\nRetry-After: 7\r\n\r\n", ending="hold")
    _, fault = await broken_stream(upstream, chat())
    assert (fault.status, fault.retry_after_s) == (429, 7)


# Plain answers of the wrong shape


def plain_raw(body: Any, kind: bytes = b"application/json") -> bytes:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return HEAD % (kind, b"Content-Length: %d\r\n" % len(raw)) + raw


@pytest.mark.parametrize(
    ("body", "retry_same"),
    [
        (b'{"id":', True), (b"", True), (b"[]", True), (b"3", True), ({}, True), ({"choices": None}, True),
        ({"choices": []}, True), ({"choices": [None]}, True), ({"choices": [{}]}, True), (b"[" * 90_000, True),
        ({"choices": [{"message": None}]}, True), ({"choices": [{"message": {}}, 1]}, True), (b"\xff", True),
    ],
)
async def test_plain_answers_of_the_wrong_shape(
    upstream: OpenAILike, twin: UpstreamTwin, body: Any, retry_same: bool
) -> None:
    twin.raw(plain_raw(body))
    fault = await broken_answer(upstream, chat())
    assert (fault.answer_status, fault.code, fault.retry_same) == (502, "upstream_error", retry_same)


@pytest.mark.parametrize(
    ("directives", "retry_same"),
    [("html", False), ("gzip", True), ("cut:0", True), ("rst:0", True), ("garbage", True), ("huge", False),
     ("close", True), ("badline", False)],
)
async def test_plain_accidents(upstream: OpenAILike, directives: str, retry_same: bool) -> None:
    fault = await broken_answer(upstream, chat(directives))
    assert (fault.answer_status, fault.code, fault.retry_same) == (502, "upstream_error", retry_same)


@pytest.mark.parametrize(("encoding", "fine"), [(b"br", False), (b"gzip, br", False), (b"Identity", True)])
async def test_an_encoding_nobody_asked_for(
    upstream: OpenAILike, twin: UpstreamTwin, encoding: bytes, fine: bool
) -> None:
    raw = plain_raw({"choices": [{"message": {"content": "x"}}]})
    twin.raw(raw.replace(b"\r\n", b"\r\nContent-Encoding: %b\r\n" % encoding, 1))
    if fine:
        assert (await complete(upstream, chat())).text_bytes == 1
    else:
        assert "compressed" in (await broken_answer(upstream, chat())).detail


async def test_a_sparse_plain_answer_is_completed(upstream: OpenAILike, twin: UpstreamTwin) -> None:
    call = {"function": {"name": "f", "arguments": {"x": 1}}}
    choices = [
        {"message": {"content": "é", "reasoning": "ab"}},
        {"message": {"tool_calls": [call, {"function": {"name": "g"}}]}},
        {"message": {"content": None, "refusal": "no", "tool_calls": []}, "finish_reason": "odd", "index": 2},
    ]
    body = {"id": "x", "choices": choices, "system_fingerprint": None, "usage": None, "error": None, "extra": 1}
    twin.raw(plain_raw(body, b"text/plain"))
    answer = await complete(upstream, chat())
    assert "system_fingerprint" not in answer.body and "error" not in answer.body
    assert answer.body["extra"] == 1
    assert answer.usage is None and answer.usage_body == {}
    first, second, third = answer.body["choices"]
    assert first == {
        "message": {"content": "é", "role": "assistant", "refusal": None, "reasoning_content": "ab"},
        "index": 0, "logprobs": None, "finish_reason": "stop",
    }
    assert second["message"]["tool_calls"] == [
        {"id": "call_0", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}},
        {"id": "call_1", "type": "function", "function": {"name": "g", "arguments": "{}"}},
    ]
    assert (second["index"], second["finish_reason"]) == (1, "tool_calls")
    assert (third["index"], third["finish_reason"], third["message"]["refusal"]) == (2, "odd", "no")
    assert "tool_calls" not in third["message"]
    assert answer.text_bytes == 2 + 2 + 7 + 2 + 2


async def test_bad_usage_is_no_usage(upstream: OpenAILike) -> None:
    answer = await complete(upstream, chat("badusage"))
    assert answer.usage is None and answer.usage_body["prompt_tokens"] == -1
    assert usage_of(await stream(upstream, chat("badusage"))) is None
    zero = await complete(upstream, chat("usage:0,0"))
    assert zero.usage == Usage()


# The twin itself, as a process


async def test_the_twin_runs_as_a_process_and_tells_what_it_saw(session: Session) -> None:
    command = ("-m", "tests.twins.upstream", "--port", "0", "--key", "k")
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout
        port = int(await asyncio.wait_for(process.stdout.readline(), 10))
        upstream = OpenAILike("t", f"http://127.0.0.1:{port}/v1", "k", session=session)
        assert text_of(await stream(upstream, chat("say:over_there"))) == "over there"
        wrong = OpenAILike("t", f"http://127.0.0.1:{port}/v1", "other", session=session)
        assert (await broken_answer(wrong, chat())).status == 401
        async with session.pooled.get(f"http://127.0.0.1:{port}/requests") as response:
            report = await response.json()
        assert report["count"] == 2 and report["aborted"] == 0 and report["open_connections"] >= 1
        assert report["requests"][0]["body"]["model"] == "theirs"
        models = f"http://127.0.0.1:{port}/v1/models"
        async with session.pooled.get(models, headers={"Authorization": "Bearer k"}) as r:
            assert [model["id"] for model in (await r.json())["data"]] == ["twin", "twin-mini"]
    finally:
        process.terminate()
        await process.wait()


async def test_the_twin_is_steered_by_model_name_stop_and_schema(
    session: Session,
) -> None:
    async def ask(twin: UpstreamTwin, **body: Any) -> tuple[int, Any]:
        body = {"messages": [{"role": "user", "content": "one two"}], "model": "twin", **body}
        async with session.pooled.post(f"{twin.base_url}/chat/completions", json=body) as response:
            return response.status, await response.json()

    async with UpstreamTwin() as twin:
        assert (await ask(twin, model="twin-status:503;retry-after:1"))[0] == 503
        _, answer = await ask(twin, model="twin-tokens:8", stop=["w5"])
        assert answer["choices"][0]["message"]["content"] == "w0 w1 w2 w3 w4"
        assert answer["usage"]["prompt_tokens"] == 2 and answer["usage"]["completion_tokens"] == 5
        schema = {"type": "object", "properties": {"a": {"enum": ["x"]}, "b": {"type": "array"}}}
        asked = {"type": "json_schema", "json_schema": {"schema": schema}}
        _, answer = await ask(twin, model="twin-json", response_format=asked)
        assert json.loads(answer["choices"][0]["message"]["content"]) == {"a": "x", "b": ["text"]}
        image = {"type": "image_url", "image_url": {"url": "data:"}}
        _, answer = await ask(twin, messages=[{"role": "user", "content": [image, image]}])
        assert answer["choices"][0]["message"]["content"] == "I see 2 image(s)."
        with pytest.raises(ValueError):
            twin.script("no such thing")
