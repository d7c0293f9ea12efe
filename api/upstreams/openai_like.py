"""Any server that speaks the OpenAI chat format: OpenAI, vLLM, Ollama, and most of the others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from types import MappingProxyType
from typing import Any

import aiohttp
import msgspec

from api.calls import Answer, Frame, UpstreamChat, UpstreamFault, plain_reason
from api.pulse import Pulse
from api.upstreams import http
from api.upstreams.chat_relay import TEXT_KEYS, ChatRelay, is_text_only, texts_of_parts, tool_text, usage_in

# What is read at once waits whole for a client that does not read.
READ_BYTES_MAX = 64 << 10
USAGE_WAIT_S = 2
"""How long a finished stream is kept open for a usage chunk that has not come yet."""


class OpenAILike:
    """Answer chat calls from `{base_url}/chat/completions`.

    `limit_field` is how this server names the output limit when the caller named none; `headers` go
    with every request; `strip_obfuscation` asks OpenAI to leave out the random padding of each chunk,
    which would make every chunk a different shape. The session is shared and stays open. Deadlines
    are the gateway's: it stops what takes too long.
    """

    def __init__(
        self,
        name: str,
        base_url: str,
        api_key: str | None,
        *,
        session: http.Session,
        limit_field: str = "max_tokens",
        headers: Mapping[str, str] = MappingProxyType({}),
        strip_obfuscation: bool = False,
    ) -> None:
        self.name = name
        self._url = f"{base_url.rstrip('/')}/chat/completions"
        self._session = session
        self._limit_field = limit_field
        self._headers = {**({"Authorization": f"Bearer {api_key}"} if api_key else {}), **headers}
        self._strip_obfuscation = strip_obfuscation

    async def chat_stream(self, chat: UpstreamChat, pulse: Pulse) -> AsyncIterator[Frame]:
        """Yield the frames of a streamed answer; see `Upstream.chat_stream`."""
        clock = asyncio.get_running_loop().time
        # The answer's headers come only with the first token, and a tick must not abort the request.
        request = asyncio.create_task(self._post(chat, stream=True))
        try:
            while not request.done():
                if await pulse.read(asyncio.wait({request})) is None:
                    yield Frame()
            response = request.result()
            pulse.heard_at = clock()
            yield Frame(upstream_request_id=http.request_id_of(response.headers))
            relay = ChatRelay(chat)
            give_up_at: float | None = None
            while not relay.complete:
                data = await pulse.read(_next_bytes(response, give_up_at, delivered=relay.delivered))
                if data is None:
                    yield Frame()
                    continue
                if not data:
                    break
                pulse.heard_at = clock()
                for frame in relay.feed(data):
                    if frame.text_bytes:
                        pulse.token_at = pulse.heard_at
                    yield frame
                if relay.fault:
                    raise relay.fault
                if relay.finished and give_up_at is None:
                    give_up_at = clock() + USAGE_WAIT_S
            if fault := relay.end():
                raise fault
            await http.finish_reading(response)
        finally:
            await http.abandon(request)

    async def chat_complete(self, chat: UpstreamChat, pulse: Pulse) -> Answer:
        """Return a whole answer."""
        # In the caller's task: only a stream is woken for a ping, and a request that is cancelled is closed.
        response = await self._post(chat, stream=False)
        try:
            pulse.heard_at = asyncio.get_running_loop().time()
            raw, whole = await http.read_capped(response, http.ANSWER_BYTES_MAX)
        except http.CONNECTION_ERRORS as error:
            raise http.connection_fault(error, retry_same=True) from error
        finally:
            response.close()
        pulse.token_at = asyncio.get_running_loop().time()
        if not whole:
            raise http.malformed(f"the answer is above {http.ANSWER_BYTES_MAX} bytes", retry_same=False)
        return _answer(raw, response, chat)

    async def close(self) -> None:
        """Do nothing: the session belongs to whoever made it."""

    async def _post(self, chat: UpstreamChat, *, stream: bool) -> aiohttp.ClientResponse:
        accept = "text/event-stream" if stream else "application/json"
        response = await http.post(
            self._session,
            self._url,
            body=self._request_body(chat, stream=stream),
            headers={"Accept": accept, **self._headers},
            fresh=chat.fresh,
        )
        if stream and response.content_type in ("application/json", "text/html"):
            try:
                raise await _no_stream(response)
            finally:
                response.close()
        return response

    def _request_body(self, chat: UpstreamChat, *, stream: bool) -> bytes:
        call = chat.call
        body: dict[str, Any] = {"model": chat.model, **call.fields}
        body[call.limit_field or self._limit_field] = chat.output_limit
        if stream:
            body["stream"] = True
            body["stream_options"] = {"include_usage": True}
            if self._strip_obfuscation:
                body["stream_options"]["include_obfuscation"] = False
        return msgspec.json.encode(body)


async def _next_bytes(
    response: aiohttp.ClientResponse, give_up_at: float | None, *, delivered: bool
) -> bytes:
    """Return what has come of the body; b"" at its end, or when `give_up_at` (loop time) has passed."""
    try:
        if give_up_at is None:
            return await response.content.read(READ_BYTES_MAX)
        async with asyncio.timeout_at(give_up_at):
            return await response.content.read(READ_BYTES_MAX)
    except http.CONNECTION_ERRORS as error:
        if give_up_at is not None:
            return b""  # the answer was whole; only the usage is missing
        raise http.connection_fault(error, retry_same=not delivered) from error


async def _no_stream(response: aiohttp.ClientResponse) -> UpstreamFault:
    """Name what came instead of a stream: an error inside a 200, or something else altogether."""
    try:
        async with asyncio.timeout(http.ERROR_BODY_S):
            raw, _ = await http.read_capped(response, http.ERROR_BODY_BYTES_MAX)
        body = msgspec.json.decode(raw)
    except (*http.CONNECTION_ERRORS, RecursionError):
        body = None
    if http.holds_error(body):
        return http.fault_of_body(body, headers=response.headers)
    return http.malformed(
        "a web page or a plain answer instead of a stream",
        retry_same=False,
        request_id=http.request_id_of(response.headers),
    )


def _answer(raw: bytes, response: aiohttp.ClientResponse, chat: UpstreamChat) -> Answer:
    """Check and repair a plain answer."""
    request_id = http.request_id_of(response.headers)
    try:
        body = msgspec.json.decode(raw)
    except (ValueError, RecursionError) as error:
        html = response.content_type == "text/html"
        detail = "a web page" if html else str(error)
        raise http.malformed(detail, retry_same=not html, request_id=request_id) from error
    if http.holds_error(body):
        raise http.fault_of_body(body, headers=response.headers)
    choices = body.get("choices") if isinstance(body, dict) else None
    if not _are_choices(choices):
        raise http.malformed("the answer has no choices with a message", request_id=request_id)
    usage_body, usage = usage_in(body)
    for key in ("usage", "error", "x_groq"):
        body.pop(key, None)
    body |= {
        "id": chat.completion_id,
        "object": "chat.completion",
        "created": chat.created,
        "model": chat.public_model,
        "choices": [_choice(choice, place) for place, choice in enumerate(choices)],
    }
    if body.get("system_fingerprint", "") is None:
        del body["system_fingerprint"]  # the specification lets it be absent, but never null
    return Answer(
        body=body,
        usage=usage,
        text_bytes=sum(_text_bytes(choice["message"]) for choice in body["choices"]),
        upstream_request_id=request_id,
        usage_body=usage_body or {},
    )


def _are_choices(choices: Any) -> bool:
    return (
        isinstance(choices, list)
        and bool(choices)
        and all(isinstance(choice, dict) and isinstance(choice.get("message"), dict) for choice in choices)
    )


def _choice(raw: dict[str, Any], place: int) -> dict[str, Any]:
    message = {**raw["message"], "role": "assistant"}
    if isinstance(message.get("content"), list) and is_text_only(message["content"]):
        message |= texts_of_parts(message["content"])
    message.setdefault("content", None)
    message.setdefault("refusal", None)
    reasoning = message.pop("reasoning", None)
    if isinstance(reasoning, str):
        message.setdefault("reasoning_content", reasoning)
    calls = message.pop("tool_calls", None)
    if isinstance(calls, list) and calls:
        message["tool_calls"] = [
            _tool_call(call, number) for number, call in enumerate(calls) if isinstance(call, dict)
        ]
    missing_reason = "tool_calls" if message.get("tool_calls") else "stop"
    index = raw.get("index")
    return {
        **{key: value for key, value in raw.items() if key != "usage"},
        "index": index if type(index) is int else place,
        "message": message,
        "logprobs": raw.get("logprobs"),
        "finish_reason": plain_reason(raw.get("finish_reason")) or missing_reason,
    }


def _tool_call(raw: dict[str, Any], number: int) -> dict[str, Any]:
    if isinstance(raw.get("custom"), dict):
        return {**raw, "id": raw.get("id") or f"call_{number}", "type": "custom"}
    function = raw.get("function") if isinstance(raw.get("function"), dict) else {}
    arguments = tool_text(function.get("arguments")) or "{}"
    return {
        "id": raw.get("id") or f"call_{number}",
        "type": "function",
        "function": {**function, "arguments": arguments},
    }


def _text_bytes(message: dict[str, Any]) -> int:
    """Count the generated text of a message (bytes)."""
    texts = [message.get(key) for key in TEXT_KEYS]
    if isinstance(message.get("content"), list):
        texts += texts_of_parts(message["content"]).values()
    for call in message.get("tool_calls", ()):
        texts += [part.get(key) for part, key in _text_holders(call)]
    if isinstance(message.get("function_call"), dict):
        texts.append(message["function_call"].get("arguments"))
    return sum(len(text.encode()) for text in texts if isinstance(text, str))


def _text_holders(call: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    pairs = ((call.get("function"), "arguments"), (call.get("custom"), "input"))
    return [(part, key) for part, key in pairs if isinstance(part, dict)]
