"""Chat completions."""

from __future__ import annotations

from quart import Blueprint, Response, g, request

from api.chat_request import parse_chat
from api.errors import unavailable
from api.limits import CHAT_BODY_BYTES_MAX, json_body
from api.v1.services import Services, gateway_request, respond
from models.errors import CallerChanged

# A key changes when its owner edits it: more often than this within one request, something is wrong.
CHANGES_MAX = 3


def register(blueprint: Blueprint, services: Services) -> None:
    """Add the chat routes."""

    @blueprint.post("/chat/completions")
    @services.need("chat", metered=True)
    async def create_chat_completion() -> Response:
        return await _run(extensions_refused=False)

    @blueprint.post("/public/chat")
    @services.need("chat", metered=True)
    async def create_public_chat() -> Response:
        return await _run(extensions_refused=True)

    async def _run(*, extensions_refused: bool) -> Response:
        body = await json_body(request, g.presence, CHAT_BODY_BYTES_MAX, timeout_s=services.client_timeout_s)
        call = parse_chat(body, extensions_refused=extensions_refused)
        g.offer, g.streamed = call.model, call.stream
        asked = gateway_request(body)
        for _ in range(CHANGES_MAX):
            try:
                return respond(await services.gateway.chat(g.caller, call, asked))
            except CallerChanged:
                await services.reauthorise()
        raise unavailable("The API key is being changed. Nothing was charged.")
