"""Chat completions."""

from __future__ import annotations

from collections.abc import AsyncIterator

from quart import Blueprint, Response, g, request

from api.chat_request import parse_chat
from api.errors import unavailable
from api.exchange import Exchange, Need, Reply
from api.limits import CHAT_BODY_BYTES_MAX, json_body
from api.v1.services import Services, gateway_request, respond
from models.errors import CallerChanged

# A key changes when its owner edits it: more often than this within one request, something is wrong.
CHANGES_MAX = 3
NEED = Need("chat", write=True, metered=True)


def register(blueprint: Blueprint, services: Services) -> None:
    """Add the chat routes."""

    @blueprint.post("/chat/completions")
    @services.need(NEED)
    async def create_chat_completion() -> Response:
        return respond(await complete(services, g.exchange, aiter(request.body)))

    @blueprint.post("/public/chat")
    @services.need(NEED)
    async def create_public_chat() -> Response:
        return respond(await complete_strictly(services, g.exchange, aiter(request.body)))


async def complete(services: Services, exchange: Exchange, body: AsyncIterator[bytes]) -> Reply:
    """Answer a chat call."""
    return await _run(services, exchange, body, extensions_refused=False)


async def complete_strictly(services: Services, exchange: Exchange, body: AsyncIterator[bytes]) -> Reply:
    """Answer a chat call in the standard format and nothing else."""
    return await _run(services, exchange, body, extensions_refused=True)


# The hottest routes, for `api.direct`.
DIRECT = {"/v1/chat/completions": (NEED, complete), "/v1/public/chat": (NEED, complete_strictly)}


async def _run(
    services: Services, exchange: Exchange, pieces: AsyncIterator[bytes], *, extensions_refused: bool
) -> Reply:
    body = await json_body(exchange, pieces, CHAT_BODY_BYTES_MAX, timeout_s=services.client_timeout_s)
    return await complete_body(services, exchange, body, extensions_refused=extensions_refused)


async def complete_body(
    services: Services, exchange: Exchange, body: bytes, *, extensions_refused: bool = False
) -> Reply:
    """Answer a chat call whose body has been read."""
    call = parse_chat(body, extensions_refused=extensions_refused)
    exchange.offer, exchange.streamed = call.model, call.stream
    asked = gateway_request(exchange, body)
    for _ in range(CHANGES_MAX):
        try:
            return await services.gateway.chat(exchange.caller, call, asked)
        except CallerChanged:
            await services.reauthorise(exchange)
    raise unavailable("The API key is being changed. Nothing was charged.")
