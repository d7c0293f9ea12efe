"""The short way to the hottest routes: from the server to the gateway without a web framework between.

What a framework does for every request (contexts, signals, matching, request and response objects) takes
longer than the gateway itself needs to admit and settle a call. So these routes are served here, by the
same functions that serve them in the blueprint, with the same refusals; everything else goes the long way.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any

from api.exchange import Exchange, Need, Reply, begin
from api.v1.services import Services, refused

Receive = Callable[[], Awaitable[dict[str, Any]]]
View = Callable[[Services, Exchange, AsyncIterator[bytes]], Awaitable[Reply]]
Asgi = Callable[[dict[str, Any], Any, Any], Awaitable[None]]


class ClientLeft(Exception):
    """Report that the client has gone before its request was whole: there is nobody to answer."""


def shortened(
    serve: Asgi, services: Services, routes: Mapping[str, tuple[Need, View]], log: Callable[[Exchange, int], None]
) -> Asgi:
    """Return the application with the short way before it. `routes` are exact paths, for POST alone."""

    async def asgi(scope: dict[str, Any], receive: Any, send: Any) -> None:
        route = routes.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if route is None:
            await serve(scope, receive, send)
            return
        # Not the end of the task: the server's own may wait for a client that does not read.
        endings: list[Callable[[], object]] = []
        exchange, client = begin(scope, endings.append), _Client(scope, receive, send)
        try:
            reply = await _answer(services, exchange, *route, client)
            log(exchange, reply.status)
            await client.take(exchange, reply)
        except ClientLeft:
            pass
        finally:
            client.let_go()
            for end in endings:
                end()

    return asgi


@asynccontextmanager
async def dropping(receive: Receive) -> AsyncIterator[None]:
    """Take whatever still comes from a client that is answered before its request was read to its end.

    The server hands on a few pieces and then waits until somebody takes one: even the end of the
    connection would wait behind them.
    """
    taker = asyncio.create_task(_take_all(receive))
    try:
        yield
    finally:
        taker.cancel()


async def _take_all(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _answer(services: Services, exchange: Exchange, need: Need, view: View, client: _Client) -> Reply:
    try:
        await services.authorise(exchange, need)
        return await view(services, exchange, client.body())
    except ClientLeft:
        raise
    except Exception as error:
        return await refused(services, exchange, error)


class _Client:
    """Be the client at the other end: its body, its leaving, and what is sent to it."""

    def __init__(self, scope: dict[str, Any], receive: Receive, send: Any) -> None:
        self._receive = receive
        self._send = send
        # Our server tells of a leaving by itself; for another one somebody has to wait for it.
        self._tell_leaving = scope.get("extensions", {}).get("tollgate.leaving")
        self._watch: asyncio.Task[None] | None = None
        self._was_read = False

    async def body(self) -> AsyncIterator[bytes]:
        """Yield the body. From its end on, the client's leaving cancels the task that read it."""
        more = True
        while more:
            message = await self._receive()
            if message["type"] != "http.request":
                raise ClientLeft
            more = message.get("more_body", False)
            if message["body"]:
                yield message["body"]
        self._was_read = True
        task = asyncio.current_task()
        assert task is not None
        if self._tell_leaving is not None:
            self._tell_leaving(task.cancel)
            return
        self._watch = asyncio.create_task(self._cancel_when_it_leaves(task))

    async def take(self, exchange: Exchange, reply: Reply) -> None:
        """Send an answer."""
        if self._was_read:
            await self._send_answer(exchange, reply)
            return
        async with dropping(self._receive):
            await self._send_answer(exchange, reply)

    async def _send_answer(self, exchange: Exchange, reply: Reply) -> None:
        headers = [
            (b"content-type", reply.content_type.encode()), (b"x-request-id", exchange.id.encode()),
            # As the framework has it: a provider's name for its model may be in any script.
            *((name.encode(), value.encode()) for name, value in reply.headers.items()),
        ]
        whole = isinstance(reply.body, bytes)
        if whole:
            headers.append((b"content-length", b"%d" % len(reply.body)))
            # Nothing is left to be cancelled, and the end of the answer looks like a leaving.
            self.let_go()
        start = {"type": "http.response.start", "status": reply.status, "headers": headers}
        if whole:
            await self._send(start)
            await self._send({"type": "http.response.body", "body": reply.body, "more_body": False})
            return
        async with aclosing(reply.body) as pieces:
            await self._send(start)
            async for piece in pieces:
                await self._send({"type": "http.response.body", "body": piece, "more_body": True})
        self.let_go()
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    def let_go(self) -> None:
        """Stop watching the client."""
        if self._tell_leaving is not None:
            self._tell_leaving(None)
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None

    async def _cancel_when_it_leaves(self, task: asyncio.Task[None]) -> None:
        await _take_all(self._receive)
        task.cancel()
