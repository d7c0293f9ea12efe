"""The embedded upstream: answers without a network, a key or a model, and says so.

It lets a fresh installation be tried end to end, and gives tests an upstream that always does the
same. What it counts is simple and exact: a prompt token is four bytes of text begun, an output
token is one piece of the stream, so an output limit cuts where it says.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, get_type_hints

import msgspec

from api.calls import Answer, Frame, UpstreamChat, UpstreamFault
from api.pulse import Pulse
from api.sse import encode
from api.upstreams.schema_instance import instance_of
from models.usage import Usage

COMPLETE_PAUSE_S_MAX = 1.5
QUOTE_CHARS_MAX = 160
RESULT_CHARS_MAX = 1_000
STOPS_MAX = 4
TOOL_USES_MAX = 8
JSON_PIECE_CHARS = 12
PROMPT_BYTES_PER_TOKEN = 4

NOTE = "This is Tollgate's demonstration model: no AI provider is configured yet"
OPENING = f"{NOTE}, so this is a canned demonstration answer."
ADVICE = (
    "To connect a real provider, set its key in the environment, such as OPENAI_API_KEY, or name a "
    "TOML file in TOLLGATE_CONFIG, and start Tollgate again."
)
ASKS_FOR_TOOL = re.compile(
    r"\b(?:use|call|run|invoke)\s+(?:(?:the|a|an|my|your|this|that)\s+(?:[\w-]+\s+){0,2})?"
    r"(?:tool|function)s?\b",
    re.IGNORECASE,
)


class Demo:
    """Answer chat calls with canned text at a reading pace. Needs nothing from outside.

    `words_per_second` is the pace of a stream over all its choices, `first_token_s` the silence
    before it; 0 for either means no pause. A whole answer takes as long, but 1.5 seconds at most.
    """

    def __init__(
        self, name: str = "demo", *, words_per_second: float = 25.0, first_token_s: float = 0.25
    ) -> None:
        self.name = name
        self._pause_s = 1 / words_per_second if words_per_second > 0 else 0.0
        self._first_token_s = first_token_s

    async def chat_stream(self, chat: UpstreamChat, pulse: Pulse) -> AsyncIterator[Frame]:
        """Yield a canned answer piece by piece, the choices in turn.

        Raises UpstreamFault with answer_status 400 for a request that this model cannot serve.
        """
        replies = _replies(chat)
        pause_s = self._first_token_s
        for frame in _frames(chat, replies):
            until = _now() + (pause_s if frame.pieces else 0.0)
            while await _woken(pulse, until):
                yield Frame()
            pulse.heard_at = _now()
            if frame.pieces:
                pulse.token_at = pulse.heard_at
                pause_s = self._pause_s
            yield frame

    async def chat_complete(self, chat: UpstreamChat, pulse: Pulse) -> Answer:
        """Return a canned answer. Raises as `chat_stream` does."""
        replies = _replies(chat)
        usage = _usage(chat, replies)
        await asyncio.sleep(
            min(self._first_token_s + usage.output_tokens * self._pause_s, COMPLETE_PAUSE_S_MAX)
        )
        pulse.heard_at = pulse.token_at = _now()
        choices = [_choice(index, reply) for index, reply in enumerate(replies)]
        return Answer(
            body=_envelope(chat, "chat.completion", choices),
            usage=usage,
            text_bytes=sum(_bytes_of(piece) for reply in replies for piece in reply.all_pieces()),
        )

    async def close(self) -> None:
        """Do nothing: no connection was opened."""


@dataclass(frozen=True, slots=True)
class _ToolUse:
    """Hold one tool call of an answer; `pieces` are its arguments, or the input of a custom tool."""

    kind: str
    name: str
    pieces: list[str]
    id: str = ""

    def head(self) -> dict[str, Any]:
        return {"id": self.id, "type": self.kind, self.kind: {"name": self.name, self._text_key: ""}}

    def part(self, text: str) -> dict[str, Any]:
        return {self.kind: {self._text_key: text}}

    def whole(self) -> dict[str, Any]:
        text = "".join(self.pieces)
        return {"id": self.id, "type": self.kind, self.kind: {"name": self.name, self._text_key: text}}

    @property
    def _text_key(self) -> str:
        return "input" if self.kind == "custom" else "arguments"


@dataclass(frozen=True, slots=True)
class _Reply:
    """Hold what one choice says, already cut to its limits: pieces of text, or uses of tools."""

    pieces: list[str]
    tool_uses: list[_ToolUse]
    finish_reason: str

    def all_pieces(self) -> Iterator[str]:
        yield from self.pieces
        for use in self.tool_uses:
            yield from use.pieces


# What was asked.


class _Fields(msgspec.Struct):
    """Hold the request fields that this model obeys; the others change nothing."""

    stop: str | list[str] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None


_FIELD_TYPES = get_type_hints(_Fields)


@dataclass(frozen=True, slots=True)
class _Tools:
    """Hold the tools that may be used, by name. `required` means that one must be."""

    offered: dict[str, dict[str, Any]] = field(default_factory=dict)
    required: bool = False
    parallel: bool = True


def _replies(chat: UpstreamChat) -> list[_Reply]:
    """Return one reply for each choice."""
    fields = _fields(chat)
    choices = range(chat.call.choices)
    uses = [] if _tool_results(chat) else _tool_uses(_tools(fields), _asked(chat))
    if uses:
        return [_tool_reply(chat, uses, choice) for choice in choices]
    return [_text_reply(chat, fields, choice) for choice in choices]


def _fields(chat: UpstreamChat) -> _Fields:
    fields = _Fields()
    for name, kind in _FIELD_TYPES.items():
        raw = chat.call.fields.get(name)
        if raw is None:
            continue
        try:
            setattr(fields, name, msgspec.json.decode(raw, type=kind))
        except msgspec.MsgspecError:
            raise _refusal(f"`{name}` is not of a type that this model understands.", name) from None
    if isinstance(fields.stop, list) and len(fields.stop) > STOPS_MAX:
        raise _refusal(f"`stop` may list at most {STOPS_MAX} texts.", "stop")
    return fields


def _tools(fields: _Fields) -> _Tools:
    """Return the tools that `tools`, `tool_choice` and `parallel_tool_calls` leave in play."""
    offered = {name: tool for tool in fields.tools or () if (name := _tool_name(tool))}
    parallel = fields.parallel_tool_calls is not False
    mode, names = _tool_choice(fields.tool_choice)
    if mode == "none":
        return _Tools()
    if names is not None:
        for name in names:
            if name not in offered:
                raise _refusal(f"`tool_choice` names {name!r}, which is not among `tools`.", "tool_choice")
        offered = {name: offered[name] for name in names}
    if mode == "required" and not offered:
        raise _refusal("`tool_choice` asks for a tool, but no tool is offered.", "tool_choice")
    return _Tools(offered, mode == "required", parallel)


def _tool_choice(choice: str | dict[str, Any] | None) -> tuple[str, list[str] | None]:
    """Return the mode (none, auto or required) and the names it narrows the tools to, if it does."""
    if choice is None or isinstance(choice, str):
        if choice not in (None, "none", "auto", "required"):
            raise _refusal("`tool_choice` must be none, auto, required or an object.", "tool_choice")
        return choice or "auto", None
    if choice.get("type") == "allowed_tools":
        allowed = _dict(choice.get("allowed_tools"))
        return _tool_choice(allowed.get("mode", "auto"))[0], [
            _tool_name(_dict(tool)) for tool in _list(allowed.get("tools"))
        ]
    return "required", [_tool_name(choice)]


def _tool_name(tool: dict[str, Any]) -> str:
    return _text(_dict(tool.get(_tool_kind(tool))).get("name"))


def _tool_kind(tool: dict[str, Any]) -> str:
    return "custom" if tool.get("type") == "custom" else "function"


def _tool_uses(tools: _Tools, asked: str) -> list[_ToolUse]:
    """Return the uses of tools that the caller insists on or that the last user message asks for."""
    names = [name for name in tools.offered if _mentions(asked, name)]
    if not names and tools.offered and (tools.required or ASKS_FOR_TOOL.search(asked)):
        names = list(tools.offered)[:1]
    names = names[: TOOL_USES_MAX if tools.parallel else 1]
    return [_tool_use(tools.offered[name], name, asked) for name in names]


def _mentions(asked: str, name: str) -> bool:
    words = re.split(r"[_\s.-]+", name)
    spelled = r"[_\s.-]".join(re.escape(word) for word in words if word)
    return bool(spelled) and re.search(rf"(?<!\w){spelled}(?!\w)", asked, re.IGNORECASE) is not None


def _tool_use(tool: dict[str, Any], name: str, asked: str) -> _ToolUse:
    kind = _tool_kind(tool)
    details = _dict(tool[kind])
    if kind == "custom":
        if _dict(details.get("format")).get("type") == "grammar":
            raise _refusal("The demonstration model cannot write text to a grammar.", "tools")
        return _ToolUse(kind, name, _words(_shortened(asked, QUOTE_CHARS_MAX)) or [""])
    try:
        arguments = instance_of(details.get("parameters") or {"type": "object"}, asked)
    except ValueError as error:
        message = f"The demonstration model cannot make up arguments for {name!r}: {error}."
        raise _refusal(message, "tools") from None
    return _ToolUse(kind, name, _json_pieces(_json(arguments)))


def _asked(chat: UpstreamChat) -> str:
    """Return the text of the last message of the user's."""
    return " ".join(_texts_of(_last_user_message(chat).get("content"))).strip()


def _last_user_message(chat: UpstreamChat) -> dict[str, Any]:
    return next((message for message in reversed(chat.call.messages) if message.get("role") == "user"), {})


def _tool_results(chat: UpstreamChat) -> list[str]:
    """Return the tool results that stand at the end of the conversation, if it ends with any."""
    results: list[str] = []
    for message in reversed(chat.call.messages):
        if message.get("role") not in ("tool", "function"):
            break
        results.insert(0, " ".join(_texts_of(message.get("content"))).strip())
    return results


def _texts_of(content: Any) -> Iterator[str]:
    if isinstance(content, str):
        yield content
    for part in _list(content):
        if isinstance(part, dict) and part.get("type") in ("text", "refusal"):
            yield _text(part.get(part["type"]))


# What to say.


def _text_reply(chat: UpstreamChat, fields: _Fields, choice: int) -> _Reply:
    content = _until_stop(_content(chat, fields, choice), fields.stop)
    pieces = _json_pieces(content) if _json_form(fields) else _words(content)
    if len(pieces) > chat.output_limit:
        return _Reply(pieces[: chat.output_limit], [], "length")
    return _Reply(pieces, [], "stop")


def _tool_reply(chat: UpstreamChat, uses: list[_ToolUse], choice: int) -> _Reply:
    """Return the reply that makes these uses, of which the output limit may cut the last one."""
    left = chat.output_limit
    kept: list[_ToolUse] = []
    for number, use in enumerate(uses):
        if left <= 0:
            break
        # Nothing but the completion's own id makes ids differ, so that the same call answers the same.
        use_id = f"call_{chat.completion_id[-24:]}_{choice}_{number}"
        kept.append(replace(use, id=use_id, pieces=use.pieces[:left]))
        left -= len(use.pieces)
    cut = left < 0 or len(kept) < len(uses)
    return _Reply([], kept, "length" if cut else "tool_calls")


def _content(chat: UpstreamChat, fields: _Fields, choice: int) -> str:
    form = _json_form(fields)
    quoted = _shortened(_asked(chat), QUOTE_CHARS_MAX)
    if form == "json_schema":
        return _schema_content(fields.response_format or {}, _asked(chat))
    if form == "json_object":
        return _json({"demonstration": True, "note": f"{NOTE}.", "you_said": quoted})
    sentences = [OPENING, *_result_sentences(chat), *_media_sentences(chat)]
    if quoted:
        sentences.append(f"You said: “{quoted}”.")
    sentences.append(ADVICE)
    if chat.call.choices > 1:
        sentences.append(f"(Choice {choice + 1} of {chat.call.choices}.)")
    return " ".join(sentences)


def _json_form(fields: _Fields) -> str:
    """Return "json_schema" or "json_object" when the answer must be JSON, else ""."""
    form = _text((fields.response_format or {}).get("type"))
    return form if form in ("json_schema", "json_object") else ""


def _schema_content(form: dict[str, Any], asked: str) -> str:
    try:
        return _json(instance_of(_dict(form.get("json_schema")).get("schema", True), asked))
    except ValueError as error:
        message = f"The demonstration model cannot make up an answer for this schema: {error}."
        raise _refusal(message, "response_format") from None


def _result_sentences(chat: UpstreamChat) -> Iterator[str]:
    for result in _tool_results(chat):
        yield f"The tool answered: “{_shortened(result, RESULT_CHARS_MAX)}”."


def _media_sentences(chat: UpstreamChat) -> Iterator[str]:
    """Yield what came along with the last user message: how many of each kind, and how large."""
    for kind, (one, many) in _MEDIA_NAMES.items():
        content = _list(_last_user_message(chat).get("content"))
        parts = [_dict(part) for part in content if _dict(part).get("type") == kind]
        if parts:
            described = ", ".join(_described(kind, _dict(part.get(kind))) for part in parts)
            yield f"I saw {len(parts)} {one if len(parts) == 1 else many} ({described})."


_MEDIA_NAMES = {
    "image_url": ("image", "images"),
    "input_audio": ("audio recording", "audio recordings"),
    "file": ("file", "files"),
}


def _described(kind: str, part: dict[str, Any]) -> str:
    if kind == "image_url":
        return _described_data(_text(part.get("url"))) or "by address"
    if kind == "input_audio":
        return f"{_text(part.get('format')) or 'audio'}, {_base64_bytes(_text(part.get('data'))):,} bytes"
    name = _shortened(_text(part.get("filename")), QUOTE_CHARS_MAX) or "unnamed"
    data = _text(part.get("file_data"))
    if not data:
        return f"{name}, by id"
    return f"{name}, {_described_data(data) or f'{_base64_bytes(data):,} bytes'}"


def _described_data(url: str) -> str:
    """Return media type and size of what a `data:` address holds; "" for another address."""
    head, comma, data = url.partition(",")
    if not comma or not head.startswith("data:"):
        return ""
    return f"{head[5:].partition(';')[0][:60] or 'text/plain'}, {_base64_bytes(data):,} bytes"


def _base64_bytes(data: str) -> int:
    """Return how many bytes base64 text stands for, without decoding what may be megabytes."""
    return len(data) * 3 // 4 - data[-2:].count("=")


def _shortened(text: str, chars_max: int) -> str:
    text = " ".join(text.split())
    return text if len(text) <= chars_max else text[: chars_max - 1].rstrip() + "…"


def _until_stop(content: str, stop: str | list[str] | None) -> str:
    stops = [stop] if isinstance(stop, str) else stop or []
    found = [at for text in stops if text and (at := content.find(text)) >= 0]
    return content[: min(found)] if found else content


def _words(text: str) -> list[str]:
    """Return the text in pieces of a word each, with the space before it; nothing is lost."""
    return re.findall(r"\s*\S+|\s+", text)


def _json_pieces(text: str) -> list[str]:
    return [text[at : at + JSON_PIECE_CHARS] for at in range(0, len(text), JSON_PIECE_CHARS)]


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


# How to say it.


def _frames(chat: UpstreamChat, replies: list[_Reply]) -> Iterator[Frame]:
    """Yield every frame of a stream: the roles, the pieces in turn, the ends."""
    for index, reply in enumerate(replies):
        content = None if reply.tool_uses else ""
        yield _frame(chat, index, {"role": "assistant", "content": content, "refusal": None})
    streams = [(index, _deltas(reply)) for index, reply in enumerate(replies)]
    while streams:
        for stream in list(streams):
            index, deltas = stream
            if (step := next(deltas, None)) is None:
                streams.remove(stream)
            else:
                delta, text = step
                yield _frame(chat, index, delta, text)
    for index, reply in enumerate(replies):
        last = index == len(replies) - 1
        frame = _frame(chat, index, {}, finish_reason=reply.finish_reason)
        frame.finished = last
        frame.usage = _usage(chat, replies) if last else None
        yield frame


def _deltas(reply: _Reply) -> Iterator[tuple[dict[str, Any], str | None]]:
    """Yield each delta with the generated text it delivers; the head of a tool call delivers none."""
    for piece in reply.pieces:
        yield {"content": piece}, piece
    for index, use in enumerate(reply.tool_uses):
        yield {"tool_calls": [{"index": index, **use.head()}]}, None
        for piece in use.pieces:
            yield {"tool_calls": [{"index": index, **use.part(piece)}]}, piece


def _frame(
    chat: UpstreamChat,
    index: int,
    delta: dict[str, Any],
    text: str | None = None,
    finish_reason: str | None = None,
) -> Frame:
    choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
    chunk = _envelope(chat, "chat.completion.chunk", [choice])
    if chat.call.include_usage:
        chunk["usage"] = None
    return Frame(
        encode(chunk),
        text_bytes=_bytes_of(text or ""),
        pieces=int(text is not None),
        finish_reason=finish_reason if index == 0 else None,
    )


def _choice(index: int, reply: _Reply) -> dict[str, Any]:
    content = None if reply.tool_uses else "".join(reply.pieces)
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if reply.tool_uses:
        message["tool_calls"] = [use.whole() for use in reply.tool_uses]
    return {"index": index, "message": message, "logprobs": None, "finish_reason": reply.finish_reason}


def _envelope(chat: UpstreamChat, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": chat.completion_id,
        "object": kind,
        "created": chat.created,
        "model": chat.public_model,
        "choices": choices,
    }


def _usage(chat: UpstreamChat, replies: list[_Reply]) -> Usage:
    """Count four bytes of prompt text as a token, and a piece of output as one."""
    prompt_bytes = sum(_prompt_bytes(message) for message in chat.call.messages)
    prompt_bytes += len(bytes(chat.call.fields.get("tools", b"")))
    return Usage(
        input_tokens=-(-prompt_bytes // PROMPT_BYTES_PER_TOKEN),
        output_tokens=sum(1 for reply in replies for _ in reply.all_pieces()),
    )


def _prompt_bytes(message: dict[str, Any]) -> int:
    """Return the bytes of text in a message; images, recordings and files count nothing here."""
    tool_calls = _list(message.get("tool_calls"))
    written = len(msgspec.json.encode(tool_calls)) if tool_calls else 0
    return written + sum(_bytes_of(text) for text in _texts_of(message.get("content")))


def _bytes_of(text: str) -> int:
    return len(text.encode())


async def _woken(pulse: Pulse, until: float) -> bool:
    """Sleep until then, at least for one turn of the loop; return True when a tick came before."""
    return await pulse.read(asyncio.sleep(max(0.0, until - _now()), True)) is None


def _now() -> float:
    return asyncio.get_running_loop().time()


def _refusal(message: str, param: str) -> UpstreamFault:
    return UpstreamFault(message, answer_status=400, code="invalid_request", param=param)


# A message is decoded JSON that nobody has looked into as deeply as this file does.


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
