"""The catalogue of what upstreams and clients do wrong, and of how such a call must end.

A case says what the upstream answers, attempt by attempt, and what the client, the books and the upstream
must have seen when the call is over. Whatever an upstream writes of itself holds `LEAK`.
"""

from __future__ import annotations

import gzip
import json
import zlib
from dataclasses import dataclass, field
from email.utils import formatdate
from typing import Any

from tests.twins.upstream import SECRET, Raw

LEAK = f"provider-says {SECRET} at http://10.0.0.7/"
"""Stands in what upstreams write of themselves; none of it may reach a client or the log."""

WORDS = "Hello from the twin."
PROMPT = "Say it."
FOREVER_S = 0.02


@dataclass(frozen=True, slots=True)
class Ending:
    """Say how a call must end.

    `billed` is "nothing"; "usage", the provider's count (`tokens` of output); or "count", our own count of
    the words that were delivered; what `exceeds` the hold is left to the house.
    `attempts` is how many requests the upstream saw, `aborted` whether the last was broken off. `text` is what the
    client got, None when that does not matter; `done` says whether a stream ended in `[DONE]`, `holds` what
    else must be in the body. `models` are the names the upstream was asked for, `noted` the statuses of the
    attempts in the books, where there were several, `waited_s` the least time between the first two.
    """

    status: int = 200
    code: str | None = None
    billed: str = "usage"
    exceeds: bool = False
    attempts: int = 1
    text: str | None = None
    tokens: int | None = None
    finish_reason: str | None = None
    retry_after: str | None = None
    done: bool = True
    holds: bytes = b""
    aborted: bool = False
    models: tuple[str, ...] | None = None
    noted: tuple[int | None, ...] | None = None
    waited_s: float = 0
    row_status: int = 200


@dataclass(frozen=True, slots=True)
class Case:
    """Be one fault in one mode. `client` says what the client does, "reads" being the polite thing."""

    name: str
    streamed: bool
    answers: tuple[str | Raw, ...]
    ending: Ending
    offer: str = "twin"
    client: str = "reads"
    request: dict[str, Any] = field(default_factory=dict)

    @property
    def id(self) -> str:
        """Return the name under which its test runs."""
        return f"{self.name}-{'streamed' if self.streamed else 'plain'}"


# How calls end.


def refused(status: int = 502, code: str = "upstream_error", *, attempts: int = 1, **more: Any) -> Ending:
    """End with an HTTP error, at no cost."""
    return Ending(status, code, "nothing", attempts=attempts, done=False, row_status=status, **more)


def broken(text: str | None = None, **more: Any) -> Ending:
    """End a stream in an error frame, charged for the words that were delivered."""
    return Ending(**{"code": "upstream_error", "billed": "count", "text": text, "done": False,
                     "row_status": 502, **more})


def whole(text: str | None = WORDS, **more: Any) -> Ending:
    """End well."""
    return Ending(text=text, **more)


# What upstreams write.


def head(kind: str, *lines: str, status: str = "HTTP/1.1 200 OK") -> bytes:
    """Return the head of an answer that ends with its connection."""
    return "\r\n".join([status, f"Content-Type: {kind}", "Connection: close", *lines, "", ""]).encode("latin-1")


def delta(_delta: dict[str, Any] | None = None, _reason: str | None = None, **more: Any) -> dict[str, Any]:
    """Return a chunk of one choice."""
    choice = {"index": 0, "delta": _delta or {}, "finish_reason": _reason, **more}
    return {"id": "chatcmpl-theirs", "model": "theirs-2026", "choices": [choice]}


def told(prompt: Any = 3, output: Any = 2, **more: Any) -> dict[str, Any]:
    """Return a usage object."""
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": 5, **more}


def events(*chunks: Any) -> bytes:
    """Return events; the last one is `[DONE]`, unless None stands in its place."""
    framed = [f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n" for chunk in chunks if chunk is not None]
    return "".join(framed + ([] if chunks[-1] is None else ["data: [DONE]\n\n"])).encode()


def stream(*chunks: Any, ending: str = "fin", lines: tuple[str, ...] = (), status: str = "HTTP/1.1 200 OK") -> Raw:
    """Return a streamed answer without any framing: only its terminal event says that it is whole."""
    return Raw((head("text/event-stream", *lines, status=status), events(*chunks)), ending)


def page(body: Any, kind: str = "application/json", *lines: str, status: str = "HTTP/1.1 200 OK") -> Raw:
    """Return a plain answer."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return Raw((head(kind, f"Content-Length: {len(raw)}", *lines, status=status), raw))


def completion(
    _content: Any = "Hello there", *, usage: Any = None, reason: Any = "stop", **more: Any
) -> dict[str, Any]:
    """Return a plain answer's body."""
    message = {"role": "assistant", "content": _content}
    choice = {"index": 0, "message": message, "finish_reason": reason, **more}
    return {"id": "chatcmpl-theirs", "object": "chat.completion", "model": "theirs-2026", "choices": [choice],
            "usage": told() if usage is None else usage}


def chunked(*pieces: bytes, end: bool = True) -> bytes:
    """Return a body in the chunked framing."""
    framed = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    return framed + (b"0\r\n\r\n" if end else b"")


HI = delta({"role": "assistant", "content": "Hello"})
THERE = delta({"content": " there"})
STOP = delta(None, "stop")
ALONE = {"choices": [], "usage": told()}
BOTH = (HI, THERE, STOP, ALONE)
CHUNKED_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
ERROR_EVENT = {"error": {"message": LEAK, "type": "server_error", "code": None}}
BOMB = gzip.compress(b" " * (40 << 20))
DEFLATE_BOMB = zlib.compress(b" " * (40 << 20))
HTTP2_ONLY = b"\x00\x00\x12\x04\x00\x00\x00\x00\x00\x00\x03\x00\x00\x00d" + b"\x00" * 12
LIMIT = {"max_tokens": 20}


def both(name: str, answer: Any, ending: Ending, **more: Any) -> list[Case]:
    """Return a fault that shows the same way in either mode."""
    return [*plain(name, answer, ending, **more), *streamed(name, answer, ending, **more)]


def plain(name: str, answer: Any, ending: Ending, **more: Any) -> list[Case]:
    """Return a fault of a plain answer."""
    return [_case(name, False, answer, ending, more)]


def streamed(name: str, answer: Any, ending: Ending, **more: Any) -> list[Case]:
    """Return a fault of a streamed answer."""
    return [_case(name, True, answer, ending, more)]


def _case(name: str, is_streamed: bool, answer: Any, ending: Ending, more: dict[str, Any]) -> Case:
    answers = answer if isinstance(answer, tuple) else (answer,)
    return Case(name, is_streamed, answers, ending, **more)


# Before anything comes: the connection.

UNREACHABLE = [
    *both("f01-connection-refused", "hang", refused(attempts=0), offer="closed"),
    *both("f02-black-hole", "hang", refused(attempts=0), offer="black-hole"),
    *both("f03-no-such-name", "hang", refused(attempts=0), offer="no-such-name"),
    *both("f04-tls-expired", "hang", refused(attempts=0), offer="tls-expired"),
    *both("f04-tls-of-another-host", "hang", refused(attempts=0), offer="tls-elsewhere"),
    *both("f04-tls-self-signed", "hang", refused(attempts=0), offer="tls-self-signed"),
    *both("f04-tls-1.0-only", "hang", refused(attempts=0), offer="tls-old"),
    *both("f04-tls-handshake-stalls", "hang", refused(attempts=0), offer="tls-stall"),
    *both("f04-tls-as-it-should-be", "chunk:1", whole(attempts=0), offer="tls-good"),
    *both("f01-next-route-when-refused", "chunk:1", whole(models=("second",), noted=(None, 200)),
          offer="closed-then-twin"),
    *both("f05-never-answers", "hang", refused(aborted=True), offer="hasty"),
    *plain("f05-head-but-no-body", "stall:1", refused(aborted=True), offer="hasty"),
    *both("f06-closes-before-any-byte", "close", refused(attempts=2)),
    *both("f06-closes-once", ("close", "chunk:1"), whole(attempts=2)),
    *both("f08-garbage-for-a-status-line", Raw((f"{LEAK}\r\n\r\n".encode(),)), refused()),
    *both("f08-header-of-9-kb", page(completion(), "application/json", f"X-Long: {LEAK}{'x' * 9000}"), refused()),
    *both("f09-early-hints-before-a-500", Raw((
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n", 0.02,
        b"HTTP/1.1 500 X\r\nContent-Length: 0\r\n\r\n",
    ), "keep"), refused(attempts=2)),
    *both("f09-early-hints", "early", whole()),
    *both("f10-endless-early-hints", Raw((
        f"HTTP/1.1 103 Early Hints\r\nLink: {LEAK}\r\n\r\n".encode(), FOREVER_S), "loop",
    ), refused(aborted=True), offer="hasty"),
    *both("f10-switching-protocols", page(b"", "text/plain", "Upgrade: x", status="HTTP/1.1 101 X"), refused()),
    *both("f43-http-2-only", Raw((HTTP2_ONLY,)), refused()),
]

# An answer comes, and is no answer.

NO_ANSWER = [
    *both("f11-web-page", "html", refused()),
    *both("f11-web-page-then-the-next-route", ("html", "chunk:1"),
          whole(attempts=2, models=("first", "second")), offer="pair"),
    *plain("f12-malformed-json", page(f'{{"id": "{LEAK}'.encode()), refused(attempts=2)),
    *plain("f12-malformed-once", (page(b'{"id":'), "chunk:1"), whole(attempts=2)),
    *plain("f12-not-utf-8", page(b'{"id": "\xff\xfe"}'), refused(attempts=2)),
    *plain("f12-nested-too-deep", page(b"[" * 100_000), refused(attempts=2)),
    *plain("f13-no-choices", page({"id": LEAK}), refused(attempts=2)),
    *plain("f13-empty-choices", page({"choices": []}), refused(attempts=2)),
    *plain("f13-choices-of-strings", page({"choices": [LEAK]}), refused(attempts=2)),
    *plain("f13-no-object", page([LEAK]), refused(attempts=2)),
    *plain("f13-null-content", page(completion(None)), whole("", tokens=2)),
    *plain("f13-unknown-finish-reason", page(completion(reason="eos")),
           whole("Hello there", tokens=2, finish_reason="eos")),
    *plain("f13-unknown-field", page(completion(novel={"a": [1]})), whole("Hello there", tokens=2)),
    *streamed("f13-no-object", stream(LEAK), refused(attempts=2)),
    *streamed("f13-choices-of-strings", stream({"choices": [LEAK]}), refused(attempts=2)),
    *streamed("f13-unknown-finish-reason", stream(HI, delta(None, "eos"), ALONE),
              whole("Hello", tokens=2, finish_reason="eos")),
    *both("f14-error-inside-a-200", page(ERROR_EVENT), refused(attempts=2)),
    *both("f14-bad-key-inside-a-200", page({"error": {"message": LEAK, "code": "invalid_api_key"}}), refused()),
    *both("f14-too-long-inside-a-200", page({"error": {"message": LEAK, "code": "context_length_exceeded"}}),
          refused(400, "context_length_exceeded")),
    *both("f15-bad-parameters", "status:400", refused(400, "invalid_request")),
    *both("f15-context-too-long", "status:400 code:context_length_exceeded",
          refused(400, "context_length_exceeded")),
    *both("f15-content-policy", "status:400 code:content_filter", refused(400, "content_policy_violation")),
    *both("f16-401", "status:401", refused()),
    *both("f16-402", "status:402", refused()),
    *both("f16-403", "status:403", refused()),
    *both("f16-bad-key-as-a-400", "status:400 code:invalid_api_key", refused()),
    *both("f17-404", "status:404", refused()),
    *both("f17-404-then-the-next-route", ("status:404", "chunk:1"),
          whole(attempts=2, models=("first", "second"), noted=(404, 200)), offer="pair"),
    *both("f18-408", "status:408", refused(attempts=2)),
    *both("f18-409", "status:409", refused(attempts=2)),
    *both("f18-425", "status:425", refused(attempts=2)),
    *both("f19-413", "status:413", refused(413, "payload_too_large")),
    *both("f19-422", "status:422", refused(400, "invalid_request")),
    *both("f19-not-tried-at-the-next-route", "status:422",
          refused(400, "invalid_request", models=("first",)), offer="pair"),
    *both("f20-come-back-in-2-s", "status:429 retry-after:2",
          refused(attempts=2, retry_after="2", waited_s=1.9)),
    *both("f20-come-back-in-1-s-and-it-works", ("status:429 retry-after:1", "chunk:1"), whole(attempts=2)),
    *both("f20-come-back-in-an-hour", "status:429 retry-after:3600", refused(retry_after="60")),
    *both("f20-come-back-at-a-date", page(
        {"error": {"message": LEAK}}, "application/json", f"Retry-After: {formatdate(4e9, usegmt=True)}",
        status="HTTP/1.1 429 X",
    ), refused(retry_after="60")),
    *both("f20-come-back-yesterday", "status:429 retry-after:-1", refused()),
    *both("f20-come-back-whenever", f"status:429 retry-after:{SECRET}", refused()),
    *both("f20-next-route-at-once", ("status:429 retry-after:2", "chunk:1"),
          whole(attempts=2, models=("first", "second"), noted=(429, 200)), offer="pair"),
    *both("f21-spend-cap", "status:429", refused()),
    *both("f22-500", "status:500", refused(attempts=2, waited_s=0.3)),
    *both("f22-502", "status:502 html", refused(attempts=2)),
    *both("f22-503-in-2-s", "status:503 retry-after:2", refused(attempts=2, retry_after="2", waited_s=1.9)),
    *both("f22-503-in-an-hour", "status:503 retry-after:3600", refused(retry_after="60")),
    *both("f22-504", "status:504", refused(attempts=2)),
    *both("f22-500-once", ("status:500", "chunk:1"), whole(attempts=2, noted=(500, 200))),
    *both("f22-three-attempts-in-all", "status:500",
          refused(attempts=3, models=("first", "first", "second")), offer="pair"),
    *both("f23-overloaded", "status:529", refused(attempts=2)),
    *streamed("f24-error-is-the-first-event", stream(ERROR_EVENT), refused(attempts=2)),
    *streamed("f24-error-after-the-preamble", stream(delta({"role": "assistant", "content": ""}), ERROR_EVENT),
              refused(attempts=2)),
    *streamed("f24-named-error-event", Raw((
        head("text/event-stream"), b"event: error\ndata: {\"type\":\"overloaded_error\"}\n\n",
    )), refused(attempts=2)),
    *streamed("f24-error-first-then-well", (stream(ERROR_EVENT), "chunk:1"), whole(attempts=2)),
    *both("f40-compressed-unasked", "gzip", refused(attempts=2)),
    *both("f40-bomb", Raw((head("application/json", "Content-Encoding: gzip"), BOMB)), refused(attempts=2)),
    *both("f40-deflate-bomb", Raw((head("text/event-stream", "Content-Encoding: deflate"), DEFLATE_BOMB)),
          refused(attempts=2)),
    *both("f40-compressed-by-an-unknown-name", Raw((
        head("text/event-stream", f"Content-Encoding: {SECRET}"), b"x",
    )), refused(attempts=2)),
    *plain("f40-compressed-framing", Raw((
        head("application/json", "Transfer-Encoding: gzip, chunked"), chunked(gzip.compress(b"{}")),
    )), refused(attempts=2)),
    *streamed("f40-compressed-framing", Raw((
        head("text/event-stream", "Transfer-Encoding: gzip, chunked"), chunked(gzip.compress(events(*BOTH))),
    )), refused(attempts=2)),
    *both("f41-redirect", "redirect", refused()),
    *both("f41-redirect-of-the-whole-request", (
        page(b"", "text/plain", "Location: /v1/chat/completions", status="HTTP/1.1 307 X"), "chunk:1",
    ), refused()),
]

# The answer breaks off.

BROKEN = [
    *streamed("f25-error-mid-stream", "error:3 tokens:9", broken("w0 w1 w2")),
    *streamed("f25-no-other-route-mid-stream", ("error:3 tokens:9", "chunk:1"),
              broken("w0 w1 w2", models=("first",)), offer="pair"),
    *streamed("f26-falls-silent", "stall:3 tokens:9", broken("w0 w1 w2", aborted=True)),
    *streamed("f27-cut-in-the-framing", "cut:3 tokens:9", broken("w0 w1 w2")),
    *plain("f27-cut-in-the-framing", "cut:1", refused(attempts=2)),
    *plain("f27-cut-once", ("cut:1", "chunk:1"), whole(attempts=2)),
    *streamed("f27-framing-is-garbage", Raw((CHUNKED_HEAD, chunked(events(HI, None), end=False), 0.05, b"zz\r\n")),
              broken("Hello")),
    *streamed("f28-ends-cleanly-but-too-early", "cleancut:3 tokens:9", broken("w0 w1 w2")),
    *streamed("f28-unframed-and-too-early", stream(HI, THERE, None), broken("Hello there")),
    *streamed("f28-nothing-but-a-preamble", stream(delta({"role": "assistant"}), None), refused(attempts=2)),
    *streamed("f28-empty-body", stream(None), refused(attempts=2)),
    *plain("f28-unframed-and-too-early", Raw((head("application/json"), b'{"choices": [{"message"')),
           refused(attempts=2)),
    *streamed("f29-reset", "rst:3 tokens:9", broken("w0 w1 w2")),
    *plain("f29-reset", "rst:1", refused(attempts=2)),
    *streamed("f30-malformed-event", "garbage tokens:9", broken("w0")),
    *streamed("f37-line-of-2-mb", "huge tokens:9", broken("w0")),
    *streamed("f37-event-of-5-mb", Raw((
        head("text/event-stream"), events(HI, None), b"".join(b"data: %b\n" % (b"x" * 1_000_000) for _ in range(5)),
    )), broken("Hello")),
    *plain("f37-answer-of-33-mb", "huge", refused()),
    *streamed("f39-endless-comments", "pings:0.05", refused(aborted=True), offer="hasty"),
    *streamed("f39-endless-preamble", Raw((
        head("text/event-stream"), events(delta({"role": "assistant", "content": ""}), None), FOREVER_S), "loop",
    ), refused(aborted=True), offer="hasty"),
]

# Odd, and all the same an answer.

HELLO = whole("Hello there", tokens=2)
OWN_COUNT = whole("Hello there", billed="count")
CUT_SHORT = whole(None, billed="count", finish_reason="length", aborted=True)
CUT_LATE = whole(None, billed="count", finish_reason="length", aborted=True, exceeds=True)
SPLIT = events(delta({"content": "Hëllo "}), delta({"content": "wörld 🎈"}), STOP, ALONE)
MANY_LINES = (
    b"\xef\xbb\xbf: a comment\r\nretry: 10\r\nid: 7\r\n\r\n"
    b'data:{"choices":[{"index":0,\r\ndata: "delta":{"content":"Hello there"},\r\n'
    b'data:"finish_reason":"stop"}]}\r\n\r\n'
    + events(ALONE).replace(b"\n", b"\r\n")
)
HOSTILE_LINES = (
    "Keep-Alive: timeout=1", "Set-Cookie: a=b", f"X-Tollgate-Cost: {LEAK}", f"x-request-id: {LEAK}",
    f"WWW-Authenticate: {LEAK}", f"Retry-After: {LEAK}",
)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
TOOLS = {"tools": [TOOL]}
THOUGHT = {"type": "thinking", "thinking": [{"type": "text", "text": "Hm. "}]}


def tool(index: Any, arguments: str, **more: Any) -> dict[str, Any]:
    """Return a chunk with a fragment of a tool call."""
    return delta({"tool_calls": [{"index": index, **more, "function": {"name": "f", "arguments": arguments}}]})


ODD = [
    *streamed("f31-crlf-comments-bom", "crlf comments bom", whole()),
    *streamed("f31-every-byte-alone", "bytesplit", whole()),
    *streamed("f31-characters-split", Raw(
        (head("text/event-stream"), *(SPLIT[place : place + 1] for place in range(len(SPLIT)))),
    ), whole("Hëllo wörld 🎈", tokens=2)),
    *streamed("f31-data-over-many-lines", Raw((head("text/event-stream"), MANY_LINES)), HELLO),
    *streamed("f31-all-in-one-write", "burst", whole()),
    *streamed("f31-carriage-returns-only", Raw((
        head("text/event-stream"), events(*BOTH).replace(b"\n", b"\r"),
    )), HELLO),
    *streamed("f32-done-without-finish", "nofinish", whole(finish_reason="stop")),
    *streamed("f32-finish-without-done", "nodone", whole()),
    *streamed("f32-neither-usage-nor-done", stream(HI, THERE, STOP, None), OWN_COUNT),
    *streamed("f32-bytes-after-the-end", "tail", whole()),
    *streamed("f32-garbage-after-the-finish", Raw((
        head("text/event-stream"), events(HI, THERE, STOP, None), 0.05, f"data: {{{LEAK}\n\n".encode(),
    )), OWN_COUNT),
    *streamed("f32-error-after-the-finish", stream(HI, THERE, STOP, ERROR_EVENT), OWN_COUNT),
    *both("f33-no-usage", "nousage", whole(billed="count")),
    *both("f34-usage-of-nothing", "usage:0,0", whole(tokens=0)),
    *both("f34-negative-and-absurd-usage", "badusage", whole(billed="count")),
    *plain("f34-usage-in-strings", page(completion(usage=told("3", "2"))), OWN_COUNT),
    *streamed("f34-usage-in-strings", stream(HI, THERE, STOP, {"choices": [], "usage": told("3", "2")}), OWN_COUNT),
    *plain("f34-usage-is-no-object", page(completion(usage=LEAK)), OWN_COUNT),
    *both("f34-usage-above-the-limit", "usage:5,5000", whole(exceeds=True, tokens=5000)),
    *streamed("f35-usage-in-every-chunk", "usageeach", whole()),
    *streamed("f35-usage-twice", stream(
        HI, {**THERE, "usage": told(9, 9)}, STOP, {**STOP, "usage": told(3, 2)}, ALONE), HELLO),
    *streamed("f35-empty-usage-and-then-the-real-one", stream(HI, THERE, {**STOP, "usage": {}}, ALONE), HELLO),
    *streamed("f36-usage-inside-the-finish", "finishusage", whole()),
    *streamed("f36-usage-a-second-late", "lateusage:1", whole()),
    *streamed("f36-usage-five-seconds-late", "lateusage:5", whole(billed="count", aborted=True)),
    *streamed("f36-usage-in-the-choice", stream(HI, THERE, delta(None, "stop", usage=told()), None), HELLO),
    *streamed("f36-usage-in-an-extension", stream(HI, THERE, {**STOP, "x_groq": {"usage": told()}}, None), HELLO),
    *plain("f36-usage-in-the-choice", page(completion(usage={}) | {"choices": [
        {"message": {"content": "Hello there"}, "finish_reason": "stop", "usage": told()}]}), HELLO),
    *plain("f36-usage-by-other-names", page(completion(usage={"input_tokens": 3, "output_tokens": 2})), HELLO),
    *streamed("f36-usage-by-other-names", stream(
        HI, THERE, STOP, {"choices": [], "usage": {"input_tokens": 3, "output_tokens": 2}}), HELLO),
    *streamed("f38-ignores-the-limit", "endless tokens:9000 pace:0.002 nousage", CUT_LATE, request=LIMIT),
    *plain("f38-ignores-the-limit", "endless tokens:2000",
           whole(None, exceeds=True, tokens=2000), request=LIMIT),
    *streamed("f38-never-ends", Raw((
        head("text/event-stream"), events(delta({"content": "word "}), None), 0.0005), "loop",
    ), CUT_LATE, request=LIMIT),
    *streamed("f38-until-the-credit-is-gone", Raw((
        head("text/event-stream"), events(*[delta({"content": "word "})] * 64, None), 0.001), "loop",
    ), CUT_SHORT, offer="dear", request={"max_tokens": None}),
    *both("f42-hostile-headers", "hostile", whole()),
    *streamed("f42-headers-that-are-ours-to-write", stream(*BOTH, lines=HOSTILE_LINES), HELLO),
    *plain("f42-headers-that-are-ours-to-write", page(completion(), "application/json", *HOSTILE_LINES), HELLO),
    *streamed("f42-control-character-in-a-header", stream(*BOTH, lines=("X-Odd: a\x00b",)), refused()),
    *plain("f42-control-character-in-a-header", page(completion(), "application/json", "X-Odd: a\x00b"), refused()),
    *streamed("f43-http-1.0", stream(*BOTH, status="HTTP/1.0 200 OK"), HELLO),
    *plain("f43-http-1.0", page(completion(), status="HTTP/1.0 200 OK"), HELLO),
    *plain("f44-id-and-model-of-another-call", page(
        completion() | {"id": "chatcmpl-of-another", "model": "other", "created": 1}), HELLO),
    *streamed("f44-id-and-model-of-another-call", stream(
        {**HI, "id": "chatcmpl-of-another"}, {**THERE, "model": "other"}, STOP, ALONE), HELLO),
    *streamed("f45-tool-calls-with-gaps", stream(
        tool(4, "{", id="a"), tool(4, "never json"), tool(9, '{"x":', id="a"), tool(9, "1}"),
        delta(None, "tool_calls"), ALONE), whole("", tokens=2, finish_reason="tool_calls"), request=TOOLS),
    *plain("f45-tool-arguments-that-are-no-json", page(completion(None) | {"choices": [{"message": {"tool_calls": [
        {"id": "a", "function": {"name": "f", "arguments": "{nope"}}, {"id": "a", "function": {"name": "f"}},
    ]}}]}), whole("", tokens=2, finish_reason="tool_calls"), request=TOOLS),
    *plain("f45-content-in-parts", page(completion([
        THOUGHT, {"type": "text", "text": "Hello there"},
    ], usage={})), OWN_COUNT),
    *streamed("f45-content-in-parts", stream(
        delta({"content": [THOUGHT]}),
        delta({"content": [{"type": "text", "text": "Hello"}]}), delta({"content": [" there"]}), STOP, None,
    ), OWN_COUNT),
    *streamed("f46-slow-drip", "tokens:3 pace:10", whole("w0 w1 w2")),
    *streamed("f46-pings-bridge-the-wait", "hang", broken(
        "", billed="nothing", aborted=True, holds=b": ping\n\n"), offer="unhurried"),
]

# The client misbehaves.

CLIENTS = [
    *both("f47-client-leaves-before-anything-came", "hang", refused(
        499, "client_closed", aborted=True), client="leaves at once"),
    *streamed("f48-client-leaves-mid-stream", "tokens:500 pace:0.05", Ending(
        code="client_closed", billed="count", aborted=True, done=False, row_status=499), client="leaves midway",
        request={"max_tokens": 1000}),
    *streamed("f49-client-never-reads", Raw((
        CHUNKED_HEAD, chunked(events(*[delta({"content": "word " * 200})] * 16, None), end=False), 0), "loop",
    ), Ending(code="client_closed", billed="count", aborted=True, done=False, row_status=499), client="never reads",
        offer="roomy", request={"max_tokens": 900_000}),
    *both("f51-client-leaves-the-second-attempt", ("status:500", "hang"), refused(
        499, "client_closed", attempts=2, aborted=True, noted=(500, None)), client="leaves at once"),
]

CATALOGUE = [*UNREACHABLE, *NO_ANSWER, *BROKEN, *ODD, *CLIENTS]
