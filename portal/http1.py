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
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol.events import Event as StreamEvent
from hypercorn.protocol.events import Request, Response, StreamClosed
from hypercorn.protocol.h11 import STREAM_ID, H11Protocol
from hypercorn.protocol.http_stream import ASGIHTTPState, HTTPStream
from hypercorn.utils import suppress_body

# How long, and for how much, a client that was answered early may go on sending before it is cut off:
# what arrives at a closed socket makes the system discard the answer on its way.
LINGER_S = 3
LINGER_BYTES_MAX = 32 << 20

# Where an answer ends, or its connection: of these a plain one has its length alone.
_FRAMING = (b"content-length", b"transfer-encoding", b"connection", b"upgrade")

Head = tuple[int, list[tuple[bytes, bytes]]]
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
        self._head: Head | None = None

    async def stream_send(self, event: StreamEvent) -> None:
        """Send what Hypercorn says by itself."""
        if isinstance(event, Response) and event.status_code >= 200:
            self.begin_answer(event.status_code, event.headers)
            return
        await super().stream_send(event)

    def begin_answer(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Take an answer's head. One given before its request has wholly arrived ends the connection."""
        headers = [*headers, *self.config.response_headers("h11")]
        is_last = self.keep_alive_requests >= self.config.keep_alive_max_requests
        if is_last or self.connection.their_state is h11.SEND_BODY:
            headers.append((b"connection", b"close"))
        _refuse_line_ends(headers)
        # It waits for the first of the body, as the standard of ASGI has it: one write less.
        self._head = status, headers

    async def answer(self, piece: bytes, *, more: bool) -> None:
        """Send a piece of an answer's body; after the last one the connection is ready for the next request."""
        head, self._head = self._head, None
        data = b""
        if head is not None:
            if not more and self._is_plain(head, len(piece)):
                await self.send(self._whole(head, piece))
                return
            data = self._written(_response(head))
        if piece:
            data += self._packed(piece)
        if not more:
            data += self._written(h11.EndOfMessage())
        if data:
            await self.send(data)

    def _is_plain(self, head: Head, length: int) -> bool:
        """Return whether an answer needs none of h11's care: it is whole, of the length that its head says, to a
        request that has wholly come and was no HEAD, and the connection is kept.
        """
        status, headers = head
        told = [value for name, value in headers if name in _FRAMING]
        connection = self.connection
        return (
            told == [b"%d" % length] and 200 <= status < 600 and status not in (204, 304)
            and connection.our_state is h11.SEND_RESPONSE and connection.their_state is h11.DONE
            and connection._cstate.keep_alive and not connection._cstate.pending_switch_proposals
            and connection._request_method not in (b"HEAD", b"CONNECT")
        )

    def _whole(self, head: Head, body: bytes) -> bytes:
        status, headers = head
        lines = [b"%b: %b\r\n" % (name, value.strip()) for name, value in headers]
        # h11 is told alone that it is answered, so that it takes the next request.
        state = self.connection._cstate
        state.process_event(h11.SERVER, h11.Response)
        state.process_event(h11.SERVER, h11.EndOfMessage)
        return b"HTTP/1.1 %d \r\n%b\r\n%b" % (status, b"".join(lines), body)

    def _packed(self, piece: bytes) -> bytes:
        if self.connection.our_state is not h11.SEND_BODY:
            return self._written(h11.Data(data=piece))
        # A piece changes nothing in h11's state, so only its writer is asked, which frames and counts it.
        parts: list[bytes] = []
        try:
            self.connection._writer.send_data(piece, parts.append)
        except h11.LocalProtocolError:
            self.connection.send_failed()
            raise
        return b"".join(parts)

    def _written(self, event: h11.Event) -> bytes:
        try:
            return self.connection.send(event)
        except h11.LocalProtocolError:
            if self.connection.their_state is not h11.ERROR:
                raise
            return b""

    async def _send_h11_event(self, event: h11.Event) -> None:
        head, self._head = self._head, None
        data = self._written(_response(head)) if head is not None else b""
        data += self._written(event)
        if data:
            await self.send(data)

    async def _handle_events(self) -> None:
        # As Hypercorn does it, but that the last piece of a body and its end are one message.
        piece: bytes | None = None
        while True:
            try:
                event = self.connection.next_event()
            except h11.RemoteProtocolError as error:
                if self.connection.our_state in {h11.IDLE, h11.SEND_RESPONSE}:
                    await self._send_error_response(error.error_status_hint)
                await self.send(Closed())
                return
            kind = type(event)
            if kind is h11.EndOfMessage and self.stream is not None:
                await self.stream.take_body(piece or b"", more=False)
                piece = None
                continue
            if piece is not None:
                await self.stream.take_body(piece, more=True)
                piece = None
            if kind is h11.Request:
                await self.send(Updated(idle=False))
                await self._create_stream(event)
            elif event is h11.PAUSED:
                await self.can_read.clear()
                await self.can_read.wait()
            elif kind is h11.ConnectionClosed or event is h11.NEED_DATA or self.stream is None:
                return
            elif kind is h11.Data:
                piece = bytes(event.data)

    async def _create_stream(self, request: h11.Request) -> None:
        if _is_ambiguous(request):
            # Somebody in front of us may see other requests in these bytes than we do: not one more is read.
            await self._send_error_response(400)
            self.connection = _Deaf()
            await self.send(Closed())
            return
        self.stream = _Stream(self)
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
        self._head = status_code, [
            *headers, *self.config.response_headers("h11"),
            (b"content-length", b"%d" % len(body)), (b"connection", b"close"),
        ]
        await self.answer(body, more=False)

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


class _Stream(HTTPStream):
    """Be one request and its answer, in fewer steps than Hypercorn's own.

    `tollgate.leaving` in the scope's extensions registers what is to be called when the client leaves; it is
    called at once when it has left. `tollgate.whole` is there when all of the body came with its head.
    """

    def __init__(self, protocol: Http1) -> None:
        super().__init__(
            protocol.app, protocol.config, protocol.context, protocol.task_group, protocol.ssl, protocol.client,
            protocol.server, protocol.stream_send, STREAM_ID,
        )
        self._protocol = protocol
        self._when_left: Callable[[], object] | None = None
        self._has_body = False

    async def handle(self, event: StreamEvent) -> None:
        """Take the head of a request, or the end of its connection."""
        if not isinstance(event, StreamClosed):
            await super().handle(event)
            self.scope["extensions"]["tollgate.leaving"] = self._note_leaving
            return
        if self.closed:
            return
        self.closed = True
        if self._when_left is not None:
            self._when_left()
        await self.app_put({"type": "http.disconnect"})

    async def take_body(self, piece: bytes, *, more: bool) -> None:
        """Take a piece of the request's body."""
        if self.closed:
            return
        if not more and not self._has_body:
            # The application's task begins only when all that has been read is taken.
            self.scope["extensions"]["tollgate.whole"] = True
        self._has_body = True
        await self.app_put({"type": "http.request", "body": piece, "more_body": more})

    async def app_send(self, message: dict[str, Any] | None) -> None:
        """Take what the application says; None when it is done."""
        if message is None:
            await super().app_send(None)
        elif message["type"] == "http.response.start" and self.state is ASGIHTTPState.REQUEST:
            self.response = message
            self._protocol.begin_answer(message["status"], message["headers"])
            self.state = ASGIHTTPState.RESPONSE
        elif message["type"] == "http.response.body" and self.state is ASGIHTTPState.RESPONSE:
            more = message.get("more_body", False)
            piece = message.get("body", b"")
            if piece and suppress_body(self.scope["method"], self.response["status"]):
                piece = b""
            await self._protocol.answer(bytes(piece), more=more)
            if not more:
                self.state = ASGIHTTPState.CLOSED
                await self.send(StreamClosed(stream_id=STREAM_ID))
        else:
            await super().app_send(message)

    def _note_leaving(self, action: Callable[[], object] | None) -> None:
        self._when_left = action
        if action is not None and self.closed:
            action()


def _refuse_line_ends(headers: list[tuple[bytes, bytes]]) -> None:
    """Raise LocalProtocolError for a header of an answer that could end a line.

    h11 would match every name and value against a pattern; names are ours here, and a value can do harm
    by three characters alone (RFC 9110, 5.5).
    """
    joined = b"".join([value for _, value in headers])
    if b"\r" in joined or b"\n" in joined or b"\0" in joined:
        raise h11.LocalProtocolError("a header of the answer holds the end of a line")


def _response(head: Head) -> h11.Response:
    status, headers = head
    kept = h11._headers.Headers([(name, name, value.strip()) for name, value in headers])
    return h11.Response(headers=kept, status_code=status)


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
