"""From the bytes of a chat request to a `ChatCall`, or to an error that names the field."""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

import msgspec

from api.calls import ChatCall
from api.errors import ApiError
from api.wire import ChatMessage, ChatRequest, ContentPart

# Decided by the gateway, so never sent on as they came.
_DECIDED = frozenset({"model", "messages", "stream", "stream_options", "max_tokens", "max_completion_tokens"})
_STANDARD = frozenset(ChatRequest.__struct_fields__)
# Fields of the gateway's own that this version has no room for yet: refusing them is honest, ignoring
# them would answer without the knowledge, memory or tools that were asked for.
EXTENSIONS = frozenset(
    {"files", "knowledge_ids", "retrieval", "memory", "features", "tool_ids", "prompt", "chat_id", "variables"}
)
# What costs the operator money that no price class covers, unless the offer says it is covered.
_NEED_CAPABILITY = {
    "web_search_options": "web_search",
    "audio": "audio",
    "moderation": "moderation",
}
MESSAGES_MAX = 10_000
PARTS_MAX = 30_000
# A value decoded takes up to sixty times its bytes: `{},` is three.
VALUES_MAX = 300_000
DEPTH_MAX = 64
_ORDINARY_TIERS = (None, "auto", "default", "standard")

_request = msgspec.json.Decoder(ChatRequest)
_raw = msgspec.json.Decoder(dict[str, msgspec.Raw])
_messages = msgspec.json.Decoder(list[dict[str, Any]])
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_ONE_KIND = bytes.maketrans(b"{}", b"[]")
_CONTAINERS = (dict, list)
_nul = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")
_path = re.compile(r" - at `\$\.?(?:\[\.\.\.\])?([^`]*)`")
_field = re.compile(r"field `([^`]+)`")


def parse_chat(body: bytes, *, extensions_refused: bool = False) -> ChatCall:
    """Return the call in a request body.

    Raises ApiError 400: `invalid_json`, `invalid_request` or `unsupported_parameter`, naming the field.
    `extensions_refused` is the strictness of /v1/public/chat: no stream, no field of the gateway's own.
    """
    _refuse_crowd(body)
    request, raw, messages = _decoded(body)
    for name in sorted(raw.keys() & EXTENSIONS):
        if extensions_refused or _says_something(raw[name]):
            raise ApiError(400, "unsupported_parameter", f"{name} is not supported here.", param=name)
    if extensions_refused and request.stream:
        raise ApiError(
            400, "unsupported_parameter",
            "This path answers whole; for a stream use /v1/chat/completions.", param="stream",
        )
    if request.stream_options is not None and not request.stream:
        raise ApiError(
            400, "invalid_request", "stream_options is only allowed when stream is true.", param="stream_options"
        )
    fields = {name: raw[name] for name in raw.keys() & _STANDARD - _DECIDED if bytes(raw[name]) != b"null"}
    # Written anew, so that the upstream reads what was measured here: of a key that stands twice, the last.
    fields["messages"] = msgspec.Raw(msgspec.json.encode(messages))
    limit_field = next(
        (name for name in ("max_completion_tokens", "max_tokens") if getattr(request, name) is not None), None
    )
    limits = [limit for limit in (request.max_completion_tokens, request.max_tokens) if limit is not None]
    sizes = _Sizes(request.messages)
    return ChatCall(
        model=request.model,
        messages=messages,
        fields=fields,
        stream=bool(request.stream),
        include_usage=bool(request.stream_options and request.stream_options.include_usage),
        choices=request.n or 1,
        output_limit=min(limits) if limits else None,
        limit_field=limit_field,
        input_bytes=max(len(body) - sizes.media_bytes, 1),
        images=sizes.images,
        audio_bytes=sizes.audio_bytes,
        file_bytes=sizes.file_bytes,
    )


def refuse_unpriced(call: ChatCall, capabilities: tuple[str, ...]) -> None:
    """Raise ApiError 400 for a field whose cost the offer's prices do not cover.

    A priority tier, a web search or spoken output costs the operator more than tokens; an offer that
    lists the capability ("service_tier", "web_search", "audio", "moderation") has it priced in.
    """
    for name, capability in _NEED_CAPABILITY.items():
        if name in call.fields and capability not in capabilities:
            raise _unsupported(name, call.model)
    if "service_tier" in call.fields and "service_tier" not in capabilities:
        tier = msgspec.json.decode(call.fields["service_tier"])
        if tier not in _ORDINARY_TIERS:
            raise _unsupported("service_tier", call.model)


class _Sizes:
    """Measure the parts of a conversation whose tokens are not bounded by their bytes."""

    def __init__(self, messages: list[ChatMessage]) -> None:
        self.images = self.audio_bytes = self.file_bytes = self.media_bytes = 0
        for place, message in enumerate(messages):
            if isinstance(message.content, list):
                for number, part in enumerate(message.content):
                    self._add(part, f"messages[{place}].content[{number}]")

    def _add(self, part: ContentPart, param: str) -> None:
        if part.image_url is not None:
            url = part.image_url if isinstance(part.image_url, str) else part.image_url.url
            self.images += 1
            self.media_bytes += len(url)
        if part.input_audio is not None:
            _refuse_address(part.input_audio.data, f"{param}.input_audio.data")
            self.audio_bytes += len(part.input_audio.data) * 3 // 4
            self.media_bytes += len(part.input_audio.data)
        if part.file is not None and part.file.file_id is not None:
            # It would be looked up among the operator's own files at the provider, whosoever they are.
            raise ApiError(
                400, "unsupported_parameter", "Files by id are not supported here; send file_data.",
                param=f"{param}.file.file_id",
            )
        if part.file is not None and part.file.file_data is not None:
            _refuse_address(part.file.file_data, f"{param}.file.file_data")
            self.file_bytes += len(part.file.file_data) * 3 // 4
            self.media_bytes += len(part.file.file_data)


def _refuse_address(data: str, param: str) -> None:
    """Refuse an address in place of the data: what lies there has no size we could cover by a hold."""
    if "://" in data[:32]:
        raise ApiError(400, "invalid_request", f"{param}: send the data itself, not its address.", param=param)


def _refuse_crowd(body: bytes) -> None:
    """Refuse a body of very many small objects before it is decoded: they take fifty times their bytes."""
    for name, most in (("role", MESSAGES_MAX), ("type", PARTS_MAX)):
        # Within a JSON string the quotes would be escaped, so this counts fields, not words.
        if body.count(b'"%b"' % name.encode()) > most:
            raise ApiError(
                400, "invalid_request", f"The messages hold more than {most} fields named {name}.", param="messages"
            )


def _decoded(body: bytes) -> tuple[ChatRequest, dict[str, msgspec.Raw], list[dict[str, Any]]]:
    """Return a body as the types say it, as it was written, and its messages with all that is in them."""
    try:
        # Loosely first, so that what is no JSON at all is not said to lack a field.
        raw = _raw.decode(body)
        frame = _frame(body)
        _refuse_excess(body, frame)
        request, messages = _request.decode(body), _messages.decode(raw["messages"])
    except msgspec.ValidationError as error:
        _refuse(error)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ApiError(400, "invalid_json", f"The body is not valid JSON: {reason}.") from None
    _refuse_repetition(body, frame, raw, messages)
    return request, raw, messages


def _frame(text: bytes) -> bytes:
    """Return what of valid JSON stands outside of its strings."""
    if b"\\" in text:
        text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    return b"".join(text.split(b'"')[::2])


def _refuse_excess(body: bytes, frame: bytes) -> None:
    """Refuse what is valid JSON, but deeper, larger or odder than any conversation."""
    if frame.count(b",") > VALUES_MAX:
        raise ApiError(400, "invalid_request", f"The body holds more than {VALUES_MAX} values.")
    # Fewer brackets than levels need no closer look.
    if frame.count(b"[") + frame.count(b"{") > DEPTH_MAX:
        brackets = frame.translate(_ONE_KIND, _NO_BRACKETS)
        for _ in range(DEPTH_MAX):
            brackets = brackets.replace(b"[]", b"")
        if brackets:
            raise ApiError(400, "invalid_json", f"The body is nested more than {DEPTH_MAX} levels deep.")
    if b"\\u0000" in body and _nul.search(body):
        raise ApiError(400, "invalid_json", "The body holds the character U+0000, which no text has.")
    if not body.isascii():
        body.decode()  # the types look only at what they know


def _refuse_repetition(
    body: bytes, frame: bytes, raw: dict[str, msgspec.Raw], messages: list[dict[str, Any]]
) -> None:
    """Refuse a field that stands twice in the body or in a message: its readers would differ on which counts.

    The colons outside of strings are the fields that were written; those that were decoded are fewer
    when one took another's place.
    """
    written = frame.count(b":")
    in_messages = sum(map(_fields, messages))
    if written == len(raw) + in_messages:
        return
    # Tools have many fields: whether the body's own names stand in it once is the quicker question.
    unescaped = b"\\u" not in body
    if unescaped and _colons(raw["messages"]) == in_messages and all(
        body.count(b'"%b"' % name.encode()) == 1 for name in raw
    ):
        return
    if written == len(raw) + in_messages + sum(_colons(raw[name]) for name in raw if name != "messages"):
        return
    name = _repeated(body) or "a field"
    raise ApiError(400, "invalid_request", f"{name} stands twice in one object.", param=name)


def _colons(value: msgspec.Raw) -> int:
    return _frame(bytes(value)).count(b":")


def _fields(value: Any) -> int:
    """Return how many fields a value has, at all depths."""
    if type(value) is dict:
        return len(value) + sum([_fields(each) for each in value.values() if type(each) in _CONTAINERS])
    return sum([_fields(each) for each in value if type(each) in _CONTAINERS])


def _repeated(body: bytes) -> str | None:
    """Return the first name that stands twice in one object of a body."""
    found: list[str] = []

    def note(pairs: list[tuple[str, Any]]) -> None:
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                found.append(name[:60])
            seen.add(name)

    # Our decoder keeps the last without a word; this one is slow, but its bad news is rare.
    json.loads(body, object_pairs_hook=note)
    return found[0] if found else None


def _refuse(error: msgspec.ValidationError) -> NoReturn:
    text = str(error)
    place = _path.search(text)
    param = place.group(1) if place else ""
    if named := _field.search(text):
        param = f"{param}.{named.group(1)}" if param else named.group(1)
    what = _path.sub("", text).replace("`", "'")
    message = f"{param}: {what}." if param and not named else f"{what}."
    raise ApiError(400, "invalid_request", message, param=param or None) from None


def _says_something(raw: msgspec.Raw) -> bool:
    return bytes(raw).strip() not in (b"null", b"false", b"[]", b"{}", b'""')


def _unsupported(name: str, model: str) -> ApiError:
    return ApiError(400, "unsupported_parameter", f"{name} is not supported for {model}.", param=name)
