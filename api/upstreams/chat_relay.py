"""The relay of a chat stream that already is in our format: bytes in, frames out, no sockets.

Nearly every event of a stream differs from the one before it only in a few characters of text. So
the careful path decodes, repairs and encodes one such event and remembers what stands before and
after the text, in the provider's bytes and in ours; from then on a network read that consists only
of events of that shape is rewritten as a whole, without decoding one of them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import msgspec

from api.calls import Frame, UpstreamChat, UpstreamFault, plain_reason
from api.sse import Event, EventParser, EventTooLarge, encode
from api.upstreams.http import fault_of_body, holds_error, malformed
from models.usage import Usage

TOKENS_MAX = 10**9
"""A count of tokens above this is a mistake of the provider, not a usage."""

LESSONS_MAX = 64
"""How often a stream may change its shape before we stop learning it (events)."""

TEXT_KEYS = ("content", "reasoning_content", "reasoning", "refusal")
"""Where a delta or a message holds generated text; tool arguments come in addition."""

_OWN_KEYS = frozenset(
    {"id", "object", "created", "model", "choices", "usage", "obfuscation", "error", "x_groq"}
)
_TEXT_PARTS = frozenset({"text", "output_text", "thinking", "reasoning", "reference"})
_TOOL_TEXT = {"function": "arguments", "custom": "input"}
_BLANK_LINE = b"\n\n"
_PROBE = "tollgate-probe-8f3a"
_STRING_REST = re.compile(rb'(?:[^"\\]++|\\.)*+')
_decode = msgspec.json.Decoder().decode
_decode_text = msgspec.json.Decoder(str).decode


class ChatRelay:
    """Turn the events of one upstream stream into frames for the client.

    `fault` is set once the stream is beyond repair: raise it after the frames of that read.
    `finished` says that every choice has its finish reason, `complete` that nothing worth waiting
    for can follow, `delivered` that generated text was relayed.
    """

    def __init__(self, chat: UpstreamChat) -> None:
        self.fault: UpstreamFault | None = None
        self.finished = False
        self.complete = False
        self.delivered = False
        self._parser = EventParser()
        self._choices_asked = max(chat.call.choices, 1)
        self._completion_id = chat.completion_id
        self._head = {
            "id": chat.completion_id,
            "object": "chat.completion.chunk",
            "created": chat.created,
            "model": chat.public_model,
        }
        self._tail = {"usage": None} if chat.call.include_usage else {}
        self._choices: dict[int, _Choice] = {}
        self._shape: _Shape | None = None
        self._lessons_left = LESSONS_MAX

    def feed(self, data: bytes) -> list[Frame]:
        """Return the frame that `data` completes, if any; check `fault` afterwards."""
        frames: list[Frame] = []
        if self._over():
            return frames
        if self._parser.pending:
            cut = data.find(_BLANK_LINE) + len(_BLANK_LINE)
            cut = cut if cut >= len(_BLANK_LINE) else len(data)
            self._walk(data[:cut], frames)
            data = data[cut:]
        start = 0
        while start < len(data) and not self._over():
            end = self._relay_run(data, start, frames) if self._shape else start
            if end == start:
                # One event the careful way; the next may be of a shape that this one taught us.
                end = data.find(_BLANK_LINE, start) + len(_BLANK_LINE)
                end = end if end >= len(_BLANK_LINE) and not self._parser.pending else len(data)
                self._walk(data[start:end], frames)
            start = end
        self.delivered = self.delivered or any(frame.text_bytes for frame in frames)
        if self.fault and self.delivered:
            self.fault.retry_same = False
        return frames if len(frames) < 2 else [_joined(frames)]

    def end(self) -> UpstreamFault | None:
        """Take the end of the connection: return a fault unless every choice had been finished."""
        if self.fault or self.complete:
            return self.fault
        if self._all_seen_finished():
            self.finished = True
            return None
        return malformed("the stream ended without a terminal event", retry_same=not self.delivered)

    def _relay_run(self, data: bytes, start: int, frames: list[Frame]) -> int:
        """Pass on the events from `start` that are of the known shape; return where they end."""
        end = self._shape.run_end(data, start)
        frame = self._shape.rewrite(data[start:end]) if end > start else None
        if frame is None:
            return start
        frames.append(frame)
        return end

    def _walk(self, data: bytes, frames: list[Frame]) -> None:
        """Take events one by one: the careful path."""
        if self._over():
            return
        step = _Step(data)
        try:
            for event in self._parser.feed(data):
                self._take(event, step)
                if self._over():
                    break
        except EventTooLarge as error:
            self._fail(str(error))
        frame = step.frame
        frame.data = b"".join(step.out)
        frame.finished = self.finished
        first = next(iter(self._choices.values()), None)
        frame.finish_reason = first.reason if first else None
        if frame.data or frame.finished or frame.usage_body is not None:
            frames.append(frame)

    def _take(self, event: Event, step: _Step) -> None:
        body = event.data.strip()
        if not body:
            return
        if body == b"[DONE]":
            self._close(step)
            return
        try:
            chunk = _decode(body)
        except (ValueError, RecursionError) as error:
            self._fail(f"malformed JSON in an event: {error}")
            return
        if not isinstance(chunk, dict):
            self._fail("an event is no JSON object")
        elif event.name == "error" or holds_error(chunk):
            self._break_off(fault_of_body(chunk))
        else:
            self._take_chunk(event, chunk, step)

    def _take_chunk(self, event: Event, chunk: dict[str, Any], step: _Step) -> None:
        note = _Note()
        relayed = self._normalised(chunk, note)
        if relayed:
            step.out.append(encode(relayed))
        if note.texts:
            step.frame.pieces += 1
            step.frame.text_bytes += sum(len(text.encode()) for _, text in note.texts)
        told = self._settle(chunk, step.frame)
        if not note.steady:
            self._shape = None  # what we write for the same bytes may have changed
        elif len(note.texts) == 1 and event.name is None and not told:
            self._learn(event.data, note.texts[0], step.data)

    def _settle(self, chunk: dict[str, Any], frame: Frame) -> bool:
        """Note the usage, and whether this chunk was the last one of interest; return whether it told any."""
        body, usage = usage_in(chunk)
        alone = not chunk.get("choices")
        if self._all_seen_finished():
            enough = len(self._choices) >= self._choices_asked
            self.finished = self.finished or enough or (alone and body is not None)
        if body is None:
            return False
        if usage:
            frame.usage, frame.usage_body = usage, body
        self.complete = self.complete or self.finished
        return True

    def _close(self, step: _Step) -> None:
        """Take `[DONE]`, writing the finish chunks the provider forgot."""
        if not self._choices:
            self._fail("the stream was done before it began")
            return
        for choice in self._choices.values():
            if not choice.finished:
                entry = {"index": choice.index, "delta": {}, "finish_reason": choice.missing_reason()}
                choice.finish(entry)
                step.out.append(encode(self._chunk({}, [entry])))
        self.finished = self.complete = True

    def _normalised(self, chunk: dict[str, Any], note: _Note) -> dict[str, Any] | None:
        """Return the chunk as the client is to see it; None when nothing is left of it."""
        given = chunk.get("choices")
        entries = [
            entry
            for place, raw in enumerate(given if isinstance(given, list) else ())
            if isinstance(raw, dict) and (entry := self._entry(raw, place, note))
        ]
        if not entries:
            return None
        extras = {key: value for key, value in chunk.items() if key not in _OWN_KEYS}
        if extras.get("system_fingerprint", "") is None:
            del extras["system_fingerprint"]  # the specification lets it be absent, but never null
        return self._chunk(extras, entries)

    def _chunk(self, extras: dict[str, Any], entries: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head, **extras, "choices": entries, **self._tail}

    def _entry(self, raw: dict[str, Any], place: int, note: _Note) -> dict[str, Any] | None:
        """Repair one element of `choices`; choices are numbered in the order they appear."""
        key = raw.get("index")
        key = key if type(key) is int else place
        choice = self._choices.get(key)
        if choice is None:
            # A client must see choice 0 first, and samples are exchangeable.
            choice = self._choices[key] = _Choice(len(self._choices), self._completion_id)
            note.steady = False
        texts_before = len(note.texts)
        delta = choice.delta(raw.get("delta"), note)
        reason = raw.get("finish_reason") or None
        if reason is not None:
            reason = plain_reason(reason) or choice.missing_reason()
        if choice.finished:
            if len(note.texts) == texts_before:
                return None  # some repeat the finish reason beside the usage
            reason = None
        entry = {**raw, "index": choice.index, "delta": delta, "finish_reason": reason}
        entry.pop("usage", None)
        if reason:
            note.steady = False
            choice.finish(entry)
        return entry

    def _learn(self, body: bytes, text: tuple[str, str], read: bytes) -> None:
        """Remember the shape of an event that changed nothing but the text."""
        if self._lessons_left == 0 or b"\n" in body or (self._shape and self._shape.fits(body)):
            return
        self._lessons_left -= 1
        key = text[0].encode()
        found = list(re.finditer(rb'"%b"\s*+:\s*+"' % key, body))
        if len(found) != 1:
            return
        start = found[0].end()
        end = _STRING_REST.match(body, start).end()
        ours = self._probed(body[:start] + _PROBE.encode() + body[end:])
        prefix = b"data:" if b"data:" + body in read else b"data: "
        if ours:
            self._shape = _Shape(prefix, body[:start], body[end:], *ours)

    def _probed(self, body: bytes) -> tuple[bytes, bytes] | None:
        """Return what we write before and after the text of an event; None when it is not that simple."""
        note = _Note()
        relayed = self._normalised(_decode(body), note)
        parts = encode(relayed).split(_PROBE.encode())
        simple = relayed and note.steady and [text for _, text in note.texts] == [_PROBE]
        return (parts[0], parts[1]) if simple and len(parts) == 2 else None

    def _over(self) -> bool:
        return self.complete or self.fault is not None

    def _all_seen_finished(self) -> bool:
        return bool(self._choices) and all(choice.finished for choice in self._choices.values())

    def _fail(self, detail: str) -> None:
        self._break_off(malformed(detail))

    def _break_off(self, fault: UpstreamFault) -> None:
        """End the stream with a fault, unless the answer was whole already and only its usage missing."""
        if self.finished:
            self.complete = True
        else:
            self.fault = fault


def usage_in(chunk: dict[str, Any]) -> tuple[dict[str, Any] | None, Usage | None]:
    """Return what a chunk or an answer tells of its usage, as it stands there and as we read it.

    Most write it on top; Groq's streams put it in `x_groq`, Moonshot's in the choice that finishes. The
    first that makes sense counts. An empty object tells nothing.
    """
    told: dict[str, Any] | None = None
    choices = chunk.get("choices")
    for holder in (chunk, chunk.get("x_groq"), *(choices if isinstance(choices, list) else ())):
        body = holder.get("usage") if isinstance(holder, dict) else None
        if not isinstance(body, dict) or not body:
            continue
        if (usage := parse_usage(body)) is not None:
            return body, usage
        told = told or body
    return told, None


def parse_usage(body: Any) -> Usage | None:
    """Return the usage a provider reports in the chat format; None when the figures make no sense.

    Cached and cache-written tokens are part of `prompt_tokens` there. An explicit 0 is a 0. Some call the
    counts `input_tokens` and `output_tokens`; DeepSeek and Moonshot name cached tokens beside them.
    """
    if not isinstance(body, dict):
        return None
    prompt = body.get("prompt_tokens", body.get("input_tokens"))
    output = body.get("completion_tokens", body.get("output_tokens"))
    cached = (
        _detail(body, "prompt_tokens_details", "cached_tokens")
        or _detail(body, "input_tokens_details", "cached_tokens")
        or body.get("prompt_cache_hit_tokens")
        or body.get("cached_tokens")
        or 0
    )
    written = _detail(body, "prompt_tokens_details", "cache_write_tokens")
    reasoning = _detail(body, "completion_tokens_details", "reasoning_tokens")
    if not all(map(_is_count, (prompt, output, cached, written, reasoning))):
        return None
    if reasoning and body.get("total_tokens") == prompt + output + reasoning:
        output += reasoning  # xAI reports them beside the completion, not within it
    cached = min(cached, prompt)
    written = min(written, prompt - cached)
    return Usage(
        input_tokens=prompt - cached - written,
        cached_input_tokens=cached,
        cache_write_tokens=written,
        output_tokens=output,
        reasoning_tokens=min(reasoning, output),
    )


def is_text_only(parts: list[Any]) -> bool:
    """Return whether nothing but text is lost when parts are written as strings: a picture would be."""
    return all(
        isinstance(part, str) or (isinstance(part, dict) and part.get("type", "text") in _TEXT_PARTS)
        for part in parts
    )


def texts_of_parts(parts: list[Any]) -> dict[str, str]:
    """Return the texts of a content that came as a list of parts, as the strings the format asks for.

    Thinking is among the parts of some (Mistral); it becomes `reasoning_content`.
    """
    content, reasoning = [], []
    for part in parts:
        if isinstance(part, str):
            content.append(part)
        elif isinstance(part, dict):
            content.append(_part_text(part.get("text")))
            reasoning.append(_part_text(part.get("thinking")) or _part_text(part.get("reasoning")))
    thought = "".join(reasoning)
    return {"content": "".join(content), **({"reasoning_content": thought} if thought else {})}


def tool_text(part: Any) -> str:
    """Return a tool call's arguments as the JSON string the format asks for, "" when there are none."""
    if part is None or isinstance(part, str):
        return part or ""
    return msgspec.json.encode(part).decode()


@dataclass(slots=True)
class _Step:
    """Gather what the events of one network read come to."""

    data: bytes
    frame: Frame = field(default_factory=Frame)
    out: list[bytes] = field(default_factory=list)


@dataclass(slots=True)
class _Note:
    """Say what a chunk did: the texts in it, and whether it changed anything we must remember."""

    texts: list[tuple[str, str]] = field(default_factory=list)
    steady: bool = True


@dataclass(slots=True)
class _ToolCall:
    index: int
    id: str
    kind: str
    named: bool = False
    has_text: bool = False


class _Choice:
    """Remember of one choice what may be told to the client only once."""

    __slots__ = ("_completion_id", "_last", "_role_sent", "_tool_at", "_tools", "finished", "index", "reason")

    def __init__(self, index: int, completion_id: str) -> None:
        self.index = index
        self.finished = False
        self.reason: str | None = None
        self._completion_id = completion_id
        self._role_sent = False
        self._tools: list[_ToolCall] = []
        self._tool_at: dict[int | str, _ToolCall] = {}
        self._last: _ToolCall | None = None

    def missing_reason(self) -> str:
        """Return the finish reason to write when the provider gave none."""
        return "tool_calls" if self._tools else "stop"

    def finish(self, entry: dict[str, Any]) -> None:
        """Mark the choice as finished; arguments that never came become `{}`."""
        self.finished = True
        self.reason = entry["finish_reason"]
        empty = {tool.index for tool in self._tools if tool.kind == "function" and not tool.has_text}
        if not empty:
            return
        calls = entry["delta"].setdefault("tool_calls", [])
        for call in calls:
            if call["index"] in empty:
                empty.remove(call["index"])
                call["function"]["arguments"] = "{}"
        calls += [{"index": index, "function": {"arguments": "{}"}} for index in sorted(empty)]

    def delta(self, raw: Any, note: _Note) -> dict[str, Any]:
        """Return a repaired delta: the role once, tool calls numbered and named once."""
        raw = raw if isinstance(raw, dict) else {}
        delta: dict[str, Any] = {}
        if not self._role_sent:
            self._role_sent = True
            note.steady = False
            delta["role"] = "assistant"
        for key, value in raw.items():
            if key == "tool_calls":
                calls = value if isinstance(value, list) else []
                repaired = [self._tool_call(call, note) for call in calls if isinstance(call, dict)]
                if repaired:
                    delta[key] = repaired
            elif key in TEXT_KEYS:
                self._add_text(delta, raw, key, note)
            elif key != "role":
                delta[key] = value
        if isinstance(raw.get("function_call"), dict):
            _note_text(note, "arguments", tool_text(raw["function_call"].get("arguments")))
        return delta

    def _add_text(self, delta: dict[str, Any], raw: dict[str, Any], key: str, note: _Note) -> None:
        name = key
        if key == "reasoning":
            if isinstance(raw.get("reasoning_content"), str):
                return  # the same text twice
            name = "reasoning_content"
        if key == "content" and isinstance(raw[key], list):
            texts = texts_of_parts(raw[key])
            for name, text in texts.items():
                _note_text(note, name, text)
            delta |= texts if is_text_only(raw[key]) else {key: raw[key]}
            return
        delta[name] = raw[key]
        if isinstance(raw[key], str):
            _note_text(note, key, raw[key])

    def _tool_call(self, raw: dict[str, Any], note: _Note) -> dict[str, Any]:
        tool, new = self._find_tool(raw)
        body = _tool_body(raw, tool.kind)
        text_key = _TOOL_TEXT[tool.kind]
        text = tool_text(body.get(text_key))
        part = {text_key: text}
        if isinstance(body.get("name"), str) and body["name"] and not tool.named:
            tool.named = True
            note.steady = False
            part = {"name": body["name"], **part}
        if new or tool is not self._last:
            note.steady = False
        self._last = tool
        tool.has_text = tool.has_text or bool(text)
        _note_text(note, text_key, text)
        once = {"id": tool.id, "type": tool.kind} if new else {}
        return {"index": tool.index, **once, tool.kind: part}

    def _find_tool(self, raw: dict[str, Any]) -> tuple[_ToolCall, bool]:
        """Find the call a fragment belongs to, by index, by id, or the one before it; else begin one."""
        index, call_id = raw.get("index"), raw.get("id")
        call_id = call_id if isinstance(call_id, str) and call_id else None
        kind = "custom" if isinstance(raw.get("custom"), dict) else "function"
        name = _tool_body(raw, kind).get("name")
        if type(index) is int:
            known = self._tool_at.get(index)
            # Some send parallel calls all under index 0, each with an id and a name of its own.
            if known and known.named and name and call_id and call_id != known.id:
                known = self._tool_at.get(call_id)
        elif call_id:
            known = self._tool_at.get(call_id)
        else:
            known = None if name else self._last
        if known:
            return known, False
        return self._new_tool(index, call_id, kind), True

    def _new_tool(self, index: Any, call_id: str | None, kind: str) -> _ToolCall:
        number = len(self._tools)
        made_up = f"call_{self._completion_id.rpartition('-')[2]}_{self.index}_{number}"
        tool = _ToolCall(number, call_id or made_up, kind)
        self._tools.append(tool)
        self._tool_at.setdefault(tool.id, tool)
        if type(index) is int:
            self._tool_at[index] = tool
        return tool


class _Shape:
    """Rewrite a run of events that differ only in their text, without decoding them."""

    __slots__ = (
        "_body_head", "_body_tail", "_head", "_our_head", "_our_seam", "_our_tail", "_seam", "_tail",
    )

    def __init__(self, prefix: bytes, head: bytes, tail: bytes, our_head: bytes, our_tail: bytes) -> None:
        self._body_head, self._body_tail = head, tail
        self._head, self._tail = prefix + head, tail + _BLANK_LINE
        self._our_head, self._our_tail = our_head, our_tail
        self._seam = self._tail + self._head
        self._our_seam = our_tail + our_head

    def fits(self, body: bytes) -> bool:
        """Return whether an event's data is of this shape already."""
        return body.startswith(self._body_head) and body.endswith(self._body_tail)

    def run_end(self, data: bytes, start: int) -> int:
        """Return where the whole events of this shape end that begin at `start`."""
        head, tail = self._head, self._tail
        last = data.rfind(_BLANK_LINE) + len(_BLANK_LINE)
        # Mostly all of a read is of one shape, which takes three looks instead of three an event.
        if data.endswith(tail, start, last) and data.count(_BLANK_LINE, start, last) == 1 + data.count(
            self._seam, start, last
        ):
            return last if data.startswith(head, start) else start
        end = start
        while data.startswith(head, end):
            blank = data.find(_BLANK_LINE, end) + len(_BLANK_LINE)
            if blank < len(_BLANK_LINE) or not data.endswith(tail, end, blank):
                break
            end = blank
        return end

    def rewrite(self, data: bytes) -> Frame | None:
        """Return the one frame for these whole events; None when they need the careful path.

        Every text must be the inside of a JSON string: a quote that is not escaped, or a line end,
        would mean an event of another structure that only begins and ends like ours.
        """
        head, tail = self._head, self._tail
        if len(data) < len(head) + len(tail) or not (data.startswith(head) and data.endswith(tail)):
            return None
        texts = data[len(head) : -len(tail)].split(self._seam)
        if b"" in texts:
            return None  # an empty text is no piece
        try:
            # The spaces keep an escape or a character that is cut short from reaching into the next.
            text = _decode_text(b'"%b "' % b" ".join(texts))
        except ValueError:
            return None
        size = len(text) if text.isascii() else len(text.encode())
        relayed = self._our_head + self._our_seam.join(texts) + self._our_tail
        return Frame(relayed, size - len(texts), len(texts))


def _joined(frames: list[Frame]) -> Frame:
    """Return the frames of one read as one: each costs a write to the client."""
    told = [frame for frame in frames if frame.usage_body is not None]
    return Frame(
        data=b"".join(frame.data for frame in frames),
        text_bytes=sum(frame.text_bytes for frame in frames),
        pieces=sum(frame.pieces for frame in frames),
        finished=any(frame.finished for frame in frames),
        finish_reason=next((frame.finish_reason for frame in frames if frame.finish_reason), None),
        usage=told[-1].usage if told else None,
        usage_body=told[-1].usage_body if told else None,
    )


def _tool_body(raw: dict[str, Any], kind: str) -> dict[str, Any]:
    body = raw.get(kind)
    return body if isinstance(body, dict) else {}


def _note_text(note: _Note, key: str, text: str) -> None:
    if text:
        note.texts.append((key, text))


def _detail(body: dict[str, Any], group: str, key: str) -> Any:
    details = body.get(group)
    value = details.get(key) if isinstance(details, dict) else None
    return 0 if value is None else value


def _part_text(value: Any) -> str:
    """Return the text of a part, which may be a list of parts itself."""
    if isinstance(value, list):
        return "".join(_part_text(inner.get("text")) for inner in value if isinstance(inner, dict))
    return value if isinstance(value, str) else ""


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= TOKENS_MAX
