"""HTTP/1.1 as we speak it: Hypercorn's own protocol, with what is ambiguous or hostile refused.

Hypercorn would change to HTTP/2 on a plain connection whenever a client asks for it, would let a request
through that states its length twice, would say "100 Continue" before anybody has looked at the key, and
would cut off a client that is still sending when it has its answer. There are no switches for these, so
this class stands in the place of Hypercorn's choice between protocols.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from email.utils import formatdate
from typing import Any

import h11
from hypercorn.asyncio import tcp_server
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData
from hypercorn.protocol.events import Body, Request, Response
from hypercorn.protocol.events import Event as StreamEvent
from hypercorn.protocol.h11 import STREAM_ID, H11Protocol
from hypercorn.protocol.http_stream import HTTPStream

# How long, and for how much, a client that was answered early may go on sending before it is cut off:
# what arrives at a closed socket makes the system discard the answer on its way.
LINGER_S = 3
LINGER_BYTES_MAX = 32 << 20

RefusalAnswer = Callable[[int], tuple[list[tuple[bytes, bytes]], bytes]]


def install(refusal: RefusalAnswer) -> None:
    """Let Hypercorn speak by this module; `refusal` gives headers and body for a status."""

    def make(*arguments: Any) -> Http1:
        *ours, _alpn_protocol = arguments
        return Http1(*ours, refusal=refusal)

    tcp_server.ProtocolWrapper = make


class DatedConfig(Config):
    """Be Hypercorn's configuration, with the date of its answers made once a second."""

    _dated: tuple[int, list[tuple[bytes, bytes]]] = (0, [])

    def response_headers(self, protocol: str) -> list[tuple[bytes, bytes]]:
        """Return the headers of every answer."""
        now = int(time.time())
        if self._dated[0] != now:
            self._dated = (now, [(b"date", formatdate(now, usegmt=True).encode())])
        return self._dated[1]


class Http1(H11Protocol):
    """Speak HTTP/1.1 on one connection."""

    def __init__(self, *arguments: Any, refusal: RefusalAnswer) -> None:
        super().__init__(*arguments)
        self.connection = _Connection(h11.SERVER, max_incomplete_event_size=self.config.h11_max_incomplete_size)
        self._refusal = refusal
        self._unsent = b""

    async def stream_send(self, event: StreamEvent) -> None:
        """Send a piece of an answer. One given before its request has wholly arrived ends the connection."""
        if isinstance(event, Body):
            await self._send_h11_event(h11.Data(data=event.data))
            return
        if not isinstance(event, Response) or event.status_code < 200:
            await super().stream_send(event)
            return
        headers = [*event.headers, *self.config.response_headers("h11")]
        is_last = self.keep_alive_requests >= self.config.keep_alive_max_requests
        if is_last or self.connection.their_state is h11.SEND_BODY:
            headers.append((b"connection", b"close"))
        await self._send_h11_event(h11.Response(headers=_checked(headers), status_code=event.status_code))

    async def _send_h11_event(self, event: h11.Event) -> None:
        try:
            data = self._unsent + self.connection.send(event)
        except h11.LocalProtocolError:
            if self.connection.their_state is not h11.ERROR:
                raise
            return
        # An answer's head waits for the first of its body, as the standard of ASGI has it: one write less.
        self._unsent = data if isinstance(event, h11.Response) else b""
        if data and not self._unsent:
            await self.send(RawData(data=data))

    async def _check_protocol(self, event: h11.Request) -> None:
        """Never change the protocol: a wish for another one is ignored, as the standard allows."""

    async def _create_stream(self, request: h11.Request) -> None:
        if _is_ambiguous(request):
            # Somebody in front of us may see other requests in these bytes than we do: not one more is read.
            await self._send_error_response(400)
            self.connection = _Deaf()
            await self.send(Closed())
            return
        self.stream = HTTPStream(
            self.app, self.config, self.context, self.task_group, self.ssl, self.client, self.server,
            self.stream_send, STREAM_ID,
        )
        await self.stream.handle(Request(
            stream_id=STREAM_ID,
            headers=list(request.headers),
            http_version=request.http_version.decode(),
            method=request.method.decode().upper(),
            raw_path=request.target,
            state=self.connection_state,
        ))
        if self.connection.awaits_continue:
            self.stream.scope["extensions"]["tollgate.continue"] = self._continue
        self.keep_alive_requests += 1
        await self.context.mark_request()

    async def _continue(self) -> None:
        """Tell a client that asked whether it may send its body that it may."""
        if self.connection.awaits_continue:
            await self._send_h11_event(h11.InformationalResponse(status_code=100, headers=[]))

    async def _send_error_response(self, status_code: int) -> None:
        headers, body = self._refusal(status_code)
        await self._send_h11_event(h11.Response(
            status_code=status_code,
            headers=[
                *headers, *self.config.response_headers("h11"),
                (b"content-length", b"%d" % len(body)), (b"connection", b"close"),
            ],
        ))
        await self._send_h11_event(h11.Data(data=body))
        await self._send_h11_event(h11.EndOfMessage())

    async def _maybe_recycle(self) -> None:
        if self.connection.their_state is not h11.SEND_BODY or self.context.terminated.is_set():
            await super()._maybe_recycle()
            return
        await self._close_stream()
        deaf = self.connection = _Deaf()
        await self.can_read.set()
        self.task_group.spawn(self._close_when_quiet, deaf)

    async def _close_when_quiet(self, deaf: _Deaf) -> None:
        try:
            async with asyncio.timeout(LINGER_S):
                await deaf.had_enough.wait()
        except TimeoutError:
            pass
        await self.send(Closed())

    async def handle(self, event: Event) -> None:
        """Take what the connection brings."""
        if isinstance(self.connection, _Deaf):
            self.connection.drop(event.data if isinstance(event, RawData) else None)
            return
        await super().handle(event)


def _checked(headers: list[tuple[bytes, bytes]]) -> h11._headers.Headers:
    """Return an answer's headers as h11 keeps them. Raises LocalProtocolError for what could end a line.

    h11 would match every name and value against a pattern; names are ours here, and a value can do harm
    by three characters alone (RFC 9110, 5.5).
    """
    joined = b"".join([value for _, value in headers])
    if b"\r" in joined or b"\n" in joined or b"\0" in joined:
        raise h11.LocalProtocolError("a header of the answer holds the end of a line")
    return h11._headers.Headers([(name, name, value) for name, value in headers])


class _Connection(h11.Connection):
    """Be h11's connection, which keeps from Hypercorn that a client awaits "100 Continue"."""

    they_are_waiting_for_100_continue = False

    @property
    def awaits_continue(self) -> bool:
        return self.client_is_waiting_for_100_continue


class _Deaf:
    """Be a connection on which nothing is heard any more; what still comes is counted and dropped."""

    our_state = their_state = h11.MUST_CLOSE
    they_are_waiting_for_100_continue = awaits_continue = False

    def __init__(self) -> None:
        self.had_enough = asyncio.Event()
        self._left_bytes = LINGER_BYTES_MAX

    def drop(self, data: bytes | None) -> None:
        """Take what came; None for the end."""
        self._left_bytes -= len(data or b"")
        if data is None or self._left_bytes <= 0:
            self.had_enough.set()

    def next_event(self) -> type[h11.NEED_DATA]:
        """Return that there is nothing."""
        return h11.NEED_DATA


def _is_ambiguous(request: h11.Request) -> bool:
    """Return whether a request states its length in two ways, or is the preface of another protocol."""
    lengths = [name for name, _ in request.headers if name in (b"content-length", b"transfer-encoding")]
    # HTTP/1.0 knows no transfer codings: who speaks only that reads another length out of it.
    is_old = request.http_version == b"1.0" and b"transfer-encoding" not in lengths
    return len(lengths) > 1 or not (request.http_version == b"1.1" or is_old)
