"""A scripted AI provider over a real socket: polite unless told otherwise. Standard library only.

In a test: `async with UpstreamTwin() as twin:` and `twin.base_url`. As a process:
`python -m tests.twins.upstream --port 0 [--key K]`, which prints its port on a line of its own.

What it does is chosen, first match wins, by `POST /script` for requests with a certain `user`, by
`twin.script(...)` (a queue, one entry a request), by the last line of the last user message if every word
of it is a directive, or by a model name such as `twin-status:500;retry-after:2`. Directives are separated
by spaces or semicolons:

what to say    `say:hello_world` (underscores are spaces), `tokens:200`, `chunk:5` (words a chunk),
               `reasoning:4` (words of reasoning first), `tool` (calls the first offered tool),
               `tools:2` (parallel), `json` (an instance of the response schema), `finish:REASON`
when           `delay:1.5` before the first token, `pace:0.05` between chunks, `burst` all in one write,
               `comments` between all events, `pings:0.1` endless comments instead of an answer,
               `hang` never answers, `stall:3` goes silent after 3 chunks, `lateusage:5`
usage          `nousage`, `usage:10,20`, `cached:4`, `usageeach` (cumulative in every chunk),
               `finishusage` (inside the finish chunk only), `badusage`
refusals       `status:429`, `retry-after:2`, `code:context_length_exceeded`, `param:messages`,
               `redirect`, `html`, `error:3` (an error after 3 chunks; plain: inside a 200)
accidents      `cut:3` closes after 3 chunks, `cleancut:3` ends the body properly but too early,
               `rst:3` resets, `close` closes before any byte, `dropnext` closes when the connection's
               next request comes, `badline` (status line), `garbage` (malformed JSON), `gzip`, `huge`
oddities       `nodone`, `nofinish`, `roles` (in every chunk), `azure` (preamble), `obfuscation`, `tail`
               (bytes after the end), `bytesplit`, `crlf`, `bom`, `early` (a 103 first), `hostile`
               (headers), `endless` (ignores limits)

`GET /requests` tells what came: `{"count", "requests", "open_connections", "aborted"}`, of one user with
`?user=NAME`; `POST /reset` forgets it; `POST /script` with `{"user", "answers"}` scripts the requests of that
user, one entry each, the last one again and again: directives, or `Raw` as `{"parts", "ending"}` with bytes
written as Latin-1. None of these counts as a request.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import socket
import ssl
import struct
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

REQUEST_BYTES_MAX = 64 << 20
HUGE_BYTES = 2 << 20
SECRET = "sk-provider-secret-0123456789"
"""Stands in every refusal, so that a test can see whether a provider's text gets through."""

_FLAGS = frozenset({
    "azure", "badline", "badusage", "bom", "burst", "bytesplit", "close", "comments", "crlf", "dropnext",
    "early", "endless", "finishusage", "garbage", "gzip", "hang", "hostile", "html", "huge", "json",
    "nodone", "nofinish", "nousage", "obfuscation", "redirect", "roles", "tail", "tool", "usageeach",
})
_NUMBERS = frozenset({
    "cached", "chunk", "cleancut", "cut", "delay", "error", "lateusage", "pace", "pings", "reasoning",
    "rst", "stall", "status", "tokens", "tools",
})
_TEXTS = frozenset({"code", "finish", "param", "retry-after", "say", "usage"})


class Script(dict[str, Any]):
    """Hold directives: flags as True, numbers as int or float, texts as they are."""

    @classmethod
    def parse(cls, text: str) -> Script | None:
        """Return the directives in `text`; None when a word of it is no directive."""
        script = cls()
        for word in re.split(r"[\s;]+", text.strip()):
            name, colon, value = word.partition(":")
            if name in _FLAGS and not colon:
                script[name] = True
            elif name in _NUMBERS and re.fullmatch(r"\d+(\.\d+)?", value):
                script[name] = float(value) if "." in value else int(value)
            elif name in _TEXTS and value:
                script[name] = value
            else:
                return None
        return script


@dataclass(slots=True)
class Raw:
    """Hold an answer given byte by byte: bytes are written, numbers are pauses in seconds.

    `ending` is "fin" (close), "rst" (reset), "hold" (stay silent), "keep" (next request) or "loop" (the
    last two parts for ever).
    """

    parts: tuple[bytes | float, ...]
    ending: str = "fin"

    def to_json(self) -> dict[str, Any]:
        """Return it as `POST /script` takes it."""
        parts = [part.decode("latin-1") if isinstance(part, bytes) else part for part in self.parts]
        return {"parts": parts, "ending": self.ending}

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> Raw:
        """Read what `to_json` wrote."""
        parts = (part.encode("latin-1") if isinstance(part, str) else part for part in body["parts"])
        return cls(tuple(parts), body["ending"])


@dataclass(slots=True)
class Seen:
    """Hold one request that came, and how it ended: `state` is open, done, aborted or scripted.

    `sent_bytes` is how much of the answer the network took, `at_s` when it came by the monotonic clock.
    """

    method: str
    path: str
    headers: dict[str, str]
    body: Any
    connection: int
    state: str = "open"
    sent_bytes: int = 0
    at_s: float = field(default_factory=time.monotonic)

    @property
    def user(self) -> str | None:
        """Return the `user` the request names."""
        return self.body.get("user") if isinstance(self.body, dict) else None


class UpstreamTwin:
    """Serve scripted answers on 127.0.0.1 while the context is open.

    `requests` are those that came; `aborted` counts the clients that left before the end.
    """

    def __init__(
        self, *, key: str | None = None, port: int = 0, tls: ssl.SSLContext | None = None
    ) -> None:
        self.key = key
        self.port = port
        self._tls = tls
        self.requests: list[Seen] = []
        self.aborted = 0
        self.open_connections = 0
        self.connections = 0
        self._queue: deque[Script | Raw] = deque()
        self._users: dict[str, deque[Script | Raw]] = {}
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> UpstreamTwin:
        self._server = await asyncio.start_server(
            self._connected, "127.0.0.1", self.port, limit=1 << 20, ssl=self._tls
        )
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def base_url(self) -> str:
        """Return the address to configure as an upstream, with `/v1`."""
        return f"http://127.0.0.1:{self.port}/v1"

    @property
    def last(self) -> Seen:
        """Return the latest request."""
        return self.requests[-1]

    def script(self, *directives: str | Script | Raw) -> None:
        """Queue one answer for each of the next requests; raises ValueError for an unknown directive."""
        self._queue.extend(map(_parsed, directives))

    def script_user(self, user: str, answers: list[Any]) -> None:
        """Script the requests of one user, as `POST /script` does; raises ValueError."""
        self._users[user] = deque(
            Raw.from_json(entry) if isinstance(entry, dict) else _parsed(entry) for entry in answers
        )

    def raw(self, *parts: bytes | float, ending: str = "fin") -> None:
        """Queue one answer given byte by byte, see `Raw`."""
        self._queue.append(Raw(parts, ending))

    def reset(self) -> None:
        """Forget what came and what was queued."""
        self.requests.clear()
        self._queue.clear()
        self._users.clear()
        self.aborted = 0

    async def wait_asked(self) -> None:
        """Wait until the first request has come."""
        async with asyncio.timeout(20):
            while not self.requests:
                await asyncio.sleep(0.005)

    async def wait_aborted(self, count: int = 1, timeout_s: float = 20) -> None:
        """Wait until this many clients have left before the end of their answer."""
        async with asyncio.timeout(timeout_s):
            while self.aborted < count:
                await asyncio.sleep(0.005)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task
        self._tasks.add(task)
        self.open_connections += 1
        self.connections += 1
        try:
            await _Connection(self, reader, writer, self.connections).serve()
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the peer left, or the twin is closing
        finally:
            self.open_connections -= 1
            self._tasks.discard(task)
            writer.close()

    def choose(self, body: Any) -> Script | Raw:
        """Return what to do with a chat request."""
        if queue := self._users.get(str(body.get("user"))):
            return queue.popleft() if len(queue) > 1 else queue[0]
        if self._queue:
            return self._queue.popleft()
        model = body.get("model") if isinstance(body, dict) else ""
        in_name = Script.parse(model.removeprefix("twin-")) if isinstance(model, str) else None
        lines = _text_of(_last_user(body)).strip().splitlines()
        return (Script.parse(lines[-1]) if lines else None) or in_name or Script()

    def report(self, user: str | None = None) -> dict[str, Any]:
        """Return what `GET /requests` tells."""
        requests = [seen for seen in self.requests if user is None or seen.user == user]
        return {
            "count": len(requests),
            "open_connections": self.open_connections,
            "aborted": self.aborted,
            "requests": [
                {"method": seen.method, "path": seen.path, "headers": seen.headers, "body": seen.body,
                 "connection": seen.connection, "state": seen.state, "sent_bytes": seen.sent_bytes,
                 "at_s": seen.at_s}
                for seen in requests
            ],
        }


class _Connection:
    """Serve the requests of one connection, one after the other."""

    def __init__(
        self, twin: UpstreamTwin, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int
    ) -> None:
        self.twin = twin
        self.number = number
        self._reader = reader
        self._writer = writer
        self._early = b""
        self._drop_next = False
        self._current: Seen | None = None

    async def serve(self) -> None:
        while seen := await self._next_request():
            if self._drop_next:
                self.twin.requests.append(seen)
                seen.state = "scripted"
                return
            if not await self._answer_or_leave(seen):
                return

    async def _next_request(self) -> Seen | None:
        try:
            head = self._early + await self._reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return None
        self._early = b""
        first, *lines = head.decode("latin-1").rstrip().split("\r\n")
        pairs = (line.partition(":") for line in lines)
        headers = {name.lower(): value.strip() for name, _, value in pairs}
        raw = await self._request_body(headers)
        method, path, _ = first.split(" ", 2)
        try:
            body = json.loads(raw) if raw else None
        except ValueError:
            body = raw.decode("utf-8", "replace")
        return Seen(method, path, headers, body, self.number)

    async def _request_body(self, headers: dict[str, str]) -> bytes:
        if headers.get("transfer-encoding", "").lower() != "chunked":
            length = int(headers.get("content-length", 0))
            return await self._reader.readexactly(min(length, REQUEST_BYTES_MAX))
        pieces = []
        while size := int((await self._reader.readline()).split(b";")[0], 16):
            pieces.append(await self._reader.readexactly(size))
            await self._reader.readline()
        await self._reader.readline()
        return b"".join(pieces)

    async def _answer_or_leave(self, seen: Seen) -> bool:
        """Answer while watching whether the client leaves; return whether the connection lives on."""
        answer = asyncio.create_task(self._answer(seen))
        leaving = asyncio.create_task(self._reader.read(1))
        try:
            await asyncio.wait({answer, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done() and not leaving.exception() and (early := leaving.result()):
                self._early = early
                await asyncio.wait({answer})
            if not answer.done() or isinstance(answer.exception(), ConnectionError):
                self._abort(seen)
                return False
            alive = answer.result()
            if seen.state == "open":
                seen.state = "done"
            return alive
        finally:
            for task in (answer, leaving):
                task.cancel()
            await asyncio.wait({answer, leaving})
            for task in (answer, leaving):
                if not task.cancelled():
                    task.exception()
            if leaving.done() and not leaving.cancelled() and not leaving.exception():
                self._early = self._early or leaving.result()

    def _abort(self, seen: Seen) -> None:
        if seen.state == "scripted":
            return
        seen.state = "aborted"
        self.twin.aborted += 1

    async def _answer(self, seen: Seen) -> bool:
        route = (seen.method, seen.path.partition("?")[0])
        if route == ("GET", "/requests"):
            user = seen.path.partition("?user=")[2]
            return await self._send_json(200, self.twin.report(unquote(user) or None))
        if route == ("POST", "/reset"):
            self.twin.reset()
            return await self._send_json(200, {})
        if route == ("POST", "/script"):
            self.twin.script_user(seen.body["user"], seen.body["answers"])
            return await self._send_json(200, {})
        self.twin.requests.append(seen)
        self._current = seen
        if self.twin.key and seen.headers.get("authorization") != f"Bearer {self.twin.key}":
            return await self._send_json(401, _error(401, "invalid_api_key", None))
        if route == ("GET", "/v1/models"):
            names = [{"id": name, "object": "model", "owned_by": "twin"} for name in ("twin", "twin-mini")]
            return await self._send_json(200, {"object": "list", "data": names})
        if route != ("POST", "/v1/chat/completions") or not isinstance(seen.body, dict):
            return await self._send_json(404, _error(404, "not_found", None))
        script = self.twin.choose(seen.body)
        if isinstance(script, Raw):
            return await self._play(script, seen)
        return await self._chat(script, seen)

    async def _play(self, raw: Raw, seen: Seen) -> bool:
        for part in raw.parts:
            if isinstance(part, bytes):
                await self._send(part)
            else:
                await asyncio.sleep(part)
        while raw.ending == "loop":
            piece, pause_s = raw.parts[-2:]
            await self._send(piece)
            await asyncio.sleep(pause_s)
        if raw.ending == "keep":
            return True
        if raw.ending == "hold":
            await asyncio.Event().wait()
        if raw.ending == "rst":
            self._reset()
        seen.state = "scripted"
        return False

    async def _chat(self, script: Script, seen: Seen) -> bool:
        self._drop_next = bool(script.get("dropnext"))
        if script.get("hang"):
            await asyncio.Event().wait()
        if script.get("close"):
            seen.state = "scripted"
            return False
        if script.get("badline"):
            await self._send(b"HELLO THERE\r\n\r\n")
            return False
        if script.get("early"):
            await self._send(b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n")
        if script.get("status") or script.get("redirect") or script.get("html") or script.get("gzip"):
            return await self._refuse(script)
        if seen.body.get("stream"):
            return await self._stream(script, seen)
        return await self._plain(script, seen)

    async def _refuse(self, script: Script) -> bool:
        headers = {"Retry-After": str(script["retry-after"])} if "retry-after" in script else {}
        if script.get("redirect"):
            return await self._send_body(302, b"", "text/plain", {"Location": f"http://127.0.0.1:{self.twin.port}/"})
        if script.get("html"):
            page = f"<html>Please log in. {SECRET}</html>".encode()
            return await self._send_body(script.get("status", 200), page, "text/html", headers)
        if script.get("gzip"):
            headers = {"Content-Encoding": "gzip"}
            return await self._send_body(200, b"\x1f\x8b", "application/json", headers)
        error = _error(script["status"], script.get("code"), script.get("param"))
        return await self._send_json(script["status"], error, headers)

    async def _plain(self, script: Script, seen: Seen) -> bool:
        reply = _Reply(script, seen.body)
        await asyncio.sleep(script.get("delay", 0) + script.get("pace", 0) * reply.tokens)
        if "error" in script:
            return await self._send_json(200, _error(500, script.get("code"), script.get("param")))
        raw = json.dumps(reply.completion()).encode()
        if script.get("garbage"):
            raw = raw[: len(raw) // 2]
        if script.get("huge"):
            raw = raw[:-1] + b" " * (33 << 20) + b"}"
        if "cut" in script or "rst" in script or "stall" in script:
            await self._send(_head(200, "application/json", {"Content-Length": str(len(raw))}) + raw[:20])
            return await self._accident(script, seen)
        return await self._send_body(200, raw, "application/json", _headers(script))

    async def _stream(self, script: Script, seen: Seen) -> bool:
        await asyncio.sleep(script.get("delay", 0))
        await self._send(
            _head(200, "text/event-stream", {"Transfer-Encoding": "chunked", **_headers(script)})
        )
        while "pings" in script:
            await self._send(_chunk(b": ping\n\n"))
            await asyncio.sleep(script["pings"])
        if "error" in script and not script["error"]:
            await self._send_event(_error(500, script.get("code"), script.get("param")), script)
            return await self._end_body()
        reply = _Reply(script, seen.body)
        if script.get("burst"):
            events = b"".join(_framed(event, script) for _, event in reply.events())
            await self._send(_chunk(events))
            return await self._end_body()
        return await self._paced(reply, script, seen)

    async def _paced(self, reply: _Reply, script: Script, seen: Seen) -> bool:
        texts = 0
        if script.get("bom"):
            await self._send(_chunk(b"\xef\xbb\xbf"))
        for kind, event in reply.events():
            if kind == "usage":
                await asyncio.sleep(script.get("lateusage", 0))
            if kind == "text" and texts:
                await asyncio.sleep(script.get("pace", 0))
            await self._send_event(event, script)
            if kind != "text":
                continue
            texts += 1
            if script.get("garbage"):
                await self._send(_chunk(b'data: {"id":"x","choices":[{"ind\n\n'))
            if script.get("huge"):
                await self._send(_chunk(b"data: " + b"x" * HUGE_BYTES))
            if texts == script.get("error"):
                await self._send_event(_error(500, script.get("code"), script.get("param")), script)
                return await self._end_body()
            if texts == script.get("cleancut"):
                return await self._end_body()
            if texts in (script.get("cut"), script.get("rst"), script.get("stall")):
                return await self._accident(script, seen)
        if script.get("tail"):
            await self._send(_chunk(b"data: {nonsense\n\n" * 3))
        return await self._end_body()

    async def _accident(self, script: Script, seen: Seen) -> bool:
        if "stall" in script:
            await asyncio.Event().wait()
        await asyncio.sleep(0.05)  # so that what was sent is read first
        if "rst" in script:
            self._reset()
        seen.state = "scripted"
        return False

    def _reset(self) -> None:
        sock = self._writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()

    async def _send_event(self, event: Any, script: Script) -> None:
        framed = _framed(event, script)
        if not script.get("bytesplit"):
            await self._send(_chunk(framed))
            return
        for place in range(len(framed)):
            await self._send(_chunk(framed[place : place + 1]))
            await asyncio.sleep(0)

    async def _end_body(self) -> bool:
        await self._send(b"0\r\n\r\n")
        return True

    async def _send_json(self, status: int, body: Any, headers: dict[str, str] | None = None) -> bool:
        return await self._send_body(status, json.dumps(body).encode(), "application/json", headers or {})

    async def _send_body(self, status: int, raw: bytes, kind: str, headers: dict[str, str]) -> bool:
        await self._send(_head(status, kind, {"Content-Length": str(len(raw)), **headers}) + raw)
        return True

    async def _send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()
        if self._current is not None:
            self._current.sent_bytes += len(data)


@dataclass(slots=True)
class _Choice:
    words: list[str]
    reason: str
    tool_calls: list[dict[str, Any]] = field(default_factory=list)


class _Reply:
    """Work out the answer to one chat request, and write it as a whole or as events."""

    def __init__(self, script: Script, body: dict[str, Any]) -> None:
        self._script = script
        self._body = body
        self._limit = None if script.get("endless") else _limit(body)
        self._choices = [self._choice() for _ in range(body.get("n") or 1)]

    @property
    def tokens(self) -> int:
        return sum(_words_in(choice) for choice in self._choices) + self._reasoning

    @property
    def _reasoning(self) -> int:
        return self._script.get("reasoning", 0) * len(self._choices)

    def completion(self) -> dict[str, Any]:
        choices = []
        for index, choice in enumerate(self._choices):
            message = {"role": "assistant", "content": "".join(choice.words), "refusal": None}
            if choice.tool_calls:
                message |= {"content": None, "tool_calls": choice.tool_calls}
            if self._reasoning:
                message["reasoning_content"] = "".join(_numbered(self._script["reasoning"], "r"))
            choices.append(
                {"index": index, "message": message, "logprobs": None, "finish_reason": choice.reason}
            )
        body = {**self._head("chat.completion"), "choices": choices}
        return body if self._script.get("nousage") else {**body, "usage": self._usage(self.tokens)}

    def events(self) -> Iterator[tuple[str, Any]]:
        """Yield each event with its kind: role, text, finish, usage or done."""
        script = self._script
        if script.get("azure"):
            yield "azure", {**self._head(""), "choices": [], "prompt_filter_results": [{"prompt_index": 0}]}
        yield from self._deltas()
        for index, choice in enumerate(self._choices):
            if not script.get("nofinish"):
                yield "finish", self._event(index, {}, choice.reason)
        if self._wants_usage() and not script.get("finishusage"):
            yield "usage", {**self._head(), "choices": [], "usage": self._usage(self.tokens)}
        if not script.get("nodone"):
            yield "done", "[DONE]"

    def _deltas(self) -> Iterator[tuple[str, Any]]:
        count = len(self._choices)
        for index in range(count):
            yield "role", self._event(index, {"role": "assistant", "content": "", "refusal": None})
        for word in _numbered(self._script.get("reasoning", 0), "r"):
            for index in range(count):
                yield "text", self._event(index, {"reasoning_content": word})
        for index, choice in enumerate(self._choices):
            for delta in _tool_deltas(choice.tool_calls):
                yield "text", self._event(index, delta)
        size = self._script.get("chunk", 1)
        longest = max(len(choice.words) for choice in self._choices)
        sent = 0
        for start in range(0, longest, size):
            for index, choice in enumerate(self._choices):
                if piece := choice.words[start : start + size]:
                    sent += len(piece)
                    yield "text", self._event(index, {"content": "".join(piece)}, sent=sent)

    def _event(self, index: int, delta: dict[str, Any], reason: str | None = None, sent: int = 0) -> Any:
        script = self._script
        if script.get("roles"):
            delta = {"role": "assistant", **delta}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}
        event = {**self._head(), "choices": [choice]}
        if self._wants_usage():
            inside = script.get("usageeach") or (script.get("finishusage") and reason)
            event["usage"] = self._usage(self.tokens if reason else sent) if inside else None
        if script.get("obfuscation"):
            event["obfuscation"] = f"{id(event) % 100_000_000}"
        return event

    def _head(self, kind: str = "chat.completion.chunk") -> dict[str, Any]:
        return {
            "id": "chatcmpl-twin", "object": kind, "created": 1_700_000_000,
            "model": f"{self._body.get('model')}-2026-01-01", "service_tier": "default",
            "system_fingerprint": "fp_twin",
        }

    def _wants_usage(self) -> bool:
        asked = (self._body.get("stream_options") or {}).get("include_usage")
        return bool(asked) and not self._script.get("nousage")

    def _usage(self, output: int) -> dict[str, Any]:
        prompt = sum(len(_text_of(message).split()) for message in self._body.get("messages", ()))
        if forced := self._script.get("usage"):
            prompt, output = (int(number) for number in forced.split(","))
        if self._script.get("badusage"):
            prompt, output = -1, 10**18
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": self._script.get("cached", 0), "audio_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": self._reasoning, "audio_tokens": 0},
        }

    def _choice(self) -> _Choice:
        script, tools = self._script, self._offered_tools()
        last = (self._body.get("messages") or [{}])[-1]
        asked = script.get("tools", 1 if script.get("tool") else 0)
        if asked and tools and last.get("role") != "tool":
            calls = [_tool_call(tools[number % len(tools)], number) for number in range(asked)]
            return _Choice([], script.get("finish", "tool_calls"), calls)
        words, reason = self._words(last), "stop"
        text = "".join(words)
        stops = self._body.get("stop") or []
        ends = [text.find(stop) for stop in ([stops] if isinstance(stops, str) else stops) if stop in text]
        if ends:
            words = _words(text[: min(ends)])
        if self._limit is not None and len(words) > self._limit:
            words, reason = words[: self._limit], "length"
        return _Choice(words, script.get("finish", reason))

    def _words(self, last: dict[str, Any]) -> list[str]:
        script = self._script
        if "tokens" in script:
            return _numbered(script["tokens"], "w")
        if script.get("json"):
            given = self._body.get("response_format") or {}
            return _words(json.dumps(_instance(given.get("json_schema", {}).get("schema", {}))))
        if "say" in script:
            return _words(script["say"].replace("_", " "))
        if last.get("role") == "tool":
            return _words(f"The tool said: {_text_of(last)}")
        images = _images(_last_user(self._body))
        return _words(f"I see {images} image(s)." if images else "Hello from the twin.")

    def _offered_tools(self) -> list[dict[str, Any]]:
        tools = self._body.get("tools") or []
        return [tool["function"] for tool in tools if isinstance(tool, dict) and "function" in tool]


def _parsed(entry: str | Script | Raw) -> Script | Raw:
    script = Script.parse(entry) if isinstance(entry, str) else entry
    if script is None:
        raise ValueError(f"not a directive: {entry}")
    return script


def _tool_call(function: dict[str, Any], number: int) -> dict[str, Any]:
    arguments = json.dumps(_instance(function.get("parameters") or {"type": "object"}))
    return {
        "id": f"call_twin{number}", "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def _tool_deltas(calls: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for index, call in enumerate(calls):
        function = call["function"]
        start = {**function, "arguments": ""}
        yield {"tool_calls": [{"index": index, "id": call["id"], "type": "function", "function": start}]}
        for place in range(0, len(function["arguments"]), 8):
            piece = function["arguments"][place : place + 8]
            yield {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}


def _instance(schema: dict[str, Any]) -> Any:
    """Return something valid for a simple schema."""
    if "const" in schema:
        return schema["const"]
    if schema.get("enum"):
        return schema["enum"][0]
    kind = schema.get("type", "object")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "object":
        return {name: _instance(inner) for name, inner in schema.get("properties", {}).items()}
    if kind == "array":
        return [_instance(schema.get("items", {"type": "string"}))] * max(schema.get("minItems", 1), 1)
    simple = {"string": "text", "integer": schema.get("minimum", 1), "number": 1.5, "boolean": True}
    return simple.get(kind)


def _last_user(body: Any) -> dict[str, Any]:
    messages = body.get("messages") if isinstance(body, dict) else None
    users = (one for one in reversed(messages or ()) if isinstance(one, dict) and one.get("role") == "user")
    return next(users, {})


def _text_of(message: dict[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        return " ".join(part.get("text", "") for part in content if isinstance(part, dict))
    return content or ""


def _images(message: dict[str, Any]) -> int:
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    return sum(isinstance(part, dict) and part.get("type") == "image_url" for part in parts)


def _limit(body: dict[str, Any]) -> int | None:
    return body.get("max_completion_tokens") or body.get("max_tokens")


def _words(text: str) -> list[str]:
    """Cut a text into one-token words, each but the first with the space before it."""
    return re.findall(r"\s*\S+", text)


def _numbered(count: int, letter: str) -> list[str]:
    return [f"{' ' if number else ''}{letter}{number}" for number in range(count)]


def _words_in(choice: _Choice) -> int:
    return len(choice.words) + sum(len(call["function"]["arguments"].split()) for call in choice.tool_calls)


def _framed(event: Any, script: Script) -> bytes:
    text = event if isinstance(event, str) else json.dumps(event, separators=(",", ":"), ensure_ascii=False)
    framed = f"data: {text}\n\n".encode()
    if script.get("comments"):
        framed = b": still here\n\n" + framed
    return framed.replace(b"\n", b"\r\n") if script.get("crlf") else framed


def _error(status: int, code: str | None, param: str | None) -> dict[str, Any]:
    kind = "invalid_request_error" if status < 429 else "server_error"
    message = f"Scripted refusal, key {SECRET}, host http://10.0.0.7/"
    return {"error": {"message": message, "type": kind, "code": code, "param": param}}


def _headers(script: Script) -> dict[str, str]:
    if not script.get("hostile"):
        return {}
    return {"Set-Cookie": f"session={SECRET}", "X-Secret": SECRET, "Access-Control-Allow-Origin": "*"}


def _head(status: int, kind: str, headers: dict[str, str]) -> bytes:
    lines = [f"HTTP/1.1 {status} Scripted", f"Content-Type: {kind}", "x-request-id: req_twin"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode()


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def main() -> None:
    """Serve until the process is ended."""
    parser = argparse.ArgumentParser(description="A scripted AI provider.")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--key")
    options = parser.parse_args()
    async with UpstreamTwin(key=options.key, port=options.port) as twin:
        print(twin.port, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main())
