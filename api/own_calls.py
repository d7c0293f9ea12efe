"""Calls that pages of ours make for an account: the same checks, the same gateway, the same books.

They differ from a call from outside only in how they come in and go out: under the hash of a hidden key, which
nobody has the plain text of, and as values instead of bytes on a wire.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import msgspec

from api.exchange import Exchange
from api.sse import EventParser
from api.v1.chat import NEED, complete_body
from api.v1.services import Services, refused

_DONE = b"[DONE]"
# Headers of the API that mean nothing on a page, whatever a browser was made to send.
_HEADERS_LEFT_OUT = ("idempotency-key", "authorization", "x-api-key", "api-key")


async def ask(
    services: Services, exchange: Exchange, key_hash: str, body: Mapping[str, Any]
) -> tuple[int, AsyncIterator[dict[str, Any]]]:
    """Run a chat call and return its status with the chunks of its stream, or with one whole answer or error.

    An empty dict among the chunks means that the answer still takes its time.
    """
    headers = {name: value for name, value in exchange.headers.items() if name not in _HEADERS_LEFT_OUT}
    asked = replace(exchange, headers=headers, query=b"")
    try:
        await services.authorise_by_hash(asked, NEED, key_hash)
        reply = await complete_body(services, asked, msgspec.json.encode(body))
    except Exception as error:
        reply = await refused(services, asked, error)
    if isinstance(reply.body, bytes):
        return reply.status, _whole(reply.body)
    return reply.status, _chunks(reply.body)


async def _whole(body: bytes) -> AsyncIterator[dict[str, Any]]:
    yield msgspec.json.decode(body)


async def _chunks(pieces: AsyncIterator[bytes]) -> AsyncIterator[dict[str, Any]]:
    parser = EventParser()
    async with aclosing(pieces):
        async for piece in pieces:
            events = parser.feed(piece)
            if not events:
                yield {}
            for event in events:
                if event.data != _DONE:
                    yield msgspec.json.decode(event.data)
