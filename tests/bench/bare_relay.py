"""The yardstick: a relay of the same stack with nothing on: Quart, Hypercorn, aiohttp; no key, no bill.

Run as `python -m tests.bench.bare_relay PORT UPSTREAM_BASE_URL`.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator

import aiohttp
from hypercorn.asyncio import serve
from hypercorn.config import Config
from quart import Quart, Response, request


def create_app(upstream: str) -> Quart:
    """Return the relay."""
    app = Quart("bare_relay", static_folder=None)
    app.config.update(RESPONSE_TIMEOUT=None, BODY_TIMEOUT=None)
    session: aiohttp.ClientSession | None = None

    @app.before_serving
    async def open_session() -> None:
        nonlocal session
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None),
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    @app.after_serving
    async def close_session() -> None:
        await session.close()

    @app.post("/v1/chat/completions")
    async def relay() -> Response:
        body = await request.get_data()
        if b'"stream":true' not in body and b'"stream": true' not in body:
            async with session.post(
                f"{upstream}/chat/completions", data=body, headers={"content-type": "application/json"}
            ) as answer:
                return Response(await answer.read(), answer.status, content_type="application/json")

        async def pieces() -> AsyncIterator[bytes]:
            async with session.post(
                f"{upstream}/chat/completions", data=body, headers={"content-type": "application/json"}
            ) as answer:
                async for piece in answer.content.iter_any():
                    yield piece

        return Response(pieces(), 200, content_type="text/event-stream")

    return app


async def main(port: int, upstream: str) -> None:
    """Serve until killed."""
    config = Config()
    config.bind = [f"127.0.0.1:{port}"]
    config.backlog = 2048
    config.keep_alive_timeout = 75
    config.accesslog = None
    config.errorlog = None
    config.include_server_header = False
    await serve(create_app(upstream), config)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), sys.argv[2]))
