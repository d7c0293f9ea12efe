"""Neutral values that travel between the wire, the gateway and the upstreams.

The neutral format is the chat-completion format itself; these are only the few facts beside it
that the gateway and the meter need.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from models.usage import Usage


@dataclass(frozen=True, slots=True)
class ChatCall:
    """Hold one parsed chat request, as the caller sent it.

    `fields` are the standard request fields as raw JSON, ready to be sent on: neither `model`,
    `stream`, `stream_options`, `max_tokens` nor `max_completion_tokens` is among them, because the
    gateway decides those. `messages` is the decoded conversation (plain dicts), for adapters that
    translate and for the demonstration. `input_bytes` is the upper bound of input tokens from text
    (a token is never shorter than a byte); `images`, `audio_bytes` and `file_bytes` are the parts
    whose tokens are bounded otherwise.
    """

    model: str
    messages: list[dict[str, Any]]
    fields: Mapping[str, msgspec.Raw]
    stream: bool
    include_usage: bool
    choices: int
    output_limit: int | None
    limit_field: str | None
    input_bytes: int
    images: int = 0
    audio_bytes: int = 0
    file_bytes: int = 0


@dataclass(frozen=True, slots=True)
class UpstreamChat:
    """Hold what an adapter needs to run one chat call once.

    `model` is the upstream's own name; `public_model` and `completion_id` are what the client
    sees in every chunk. `output_limit` (tokens per choice) is binding: it is what the hold covers.
    `fresh` asks for a connection of its own: the one before was closed under our hands.
    """

    call: ChatCall
    model: str
    public_model: str
    completion_id: str
    created: int
    output_limit: int
    fresh: bool = False


@dataclass(slots=True)
class Frame:
    """Carry a piece of a stream on its way to the client, with the facts the meter needs.

    `data` is whole server-sent events, already encoded (b"" when nothing is to be relayed); never
    the upstream's usage chunk, comments or `[DONE]`, which the gateway writes itself.
    `text_bytes` is how many bytes of generated text (content, reasoning, refusal, tool arguments)
    it delivers and `pieces` in how many chunks; both 0 for a preamble such as the role chunk.
    `finished` is true once every choice has its `finish_reason`, and `finish_reason` is the first
    choice's. `usage` is the provider's count so far (last one wins), `upstream_request_id` its own id
    of the request.
    """

    data: bytes = b""
    text_bytes: int = 0
    pieces: int = 0
    finished: bool = False
    finish_reason: str | None = None
    usage: Usage | None = None
    usage_body: dict[str, Any] | None = None
    upstream_request_id: str | None = None


@dataclass(slots=True)
class Answer:
    """Carry one whole chat answer: a `chat.completion` object as decoded JSON, and its usage.

    `usage` is None when the upstream reported none that makes sense; `text_bytes` is the
    generated text (content, reasoning, refusal, tool arguments) for an estimate in that case.
    """

    body: dict[str, Any]
    usage: Usage | None
    text_bytes: int
    upstream_request_id: str | None = None
    usage_body: dict[str, Any] = field(default_factory=dict)


FINISH_REASON_LENGTH_MAX = 64


def plain_reason(reason: object) -> str | None:
    """Return a finish reason when it is one: an upstream may send anything in its place."""
    if isinstance(reason, str) and 0 < len(reason) <= FINISH_REASON_LENGTH_MAX and reason.isprintable():
        return reason
    return None


class UpstreamFault(Exception):
    """Report that an upstream did not do its part. Never shown to a client as it is.

    `status` is the upstream's HTTP status, None when there was none. `answer_status` is what the
    client gets: 502 for every fault of the provider, 400 or 413 when the caller's own input was
    refused. `code` is our error code, `message` our own wording (the provider's text is never
    forwarded: it may hold addresses and keys). `retry_same` says that one more try on the same
    route is safe and may help. `retry_after_s` is the provider's wish, capped at 60.
    `detail` is for the log, and of our own making too; `said` is what the provider wrote, for whoever
    debugs. `upstream` is the upstream's name, set by the gateway.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        answer_status: int = 502,
        code: str = "upstream_error",
        param: str | None = None,
        retry_same: bool = False,
        retry_after_s: int | None = None,
        detail: str = "",
        said: str = "",
        upstream_request_id: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.answer_status = answer_status
        self.code = code
        self.param = param
        self.retry_same = retry_same
        self.retry_after_s = retry_after_s
        self.detail = detail
        self.said = said
        self.upstream_request_id = upstream_request_id
        self.upstream: str | None = None
