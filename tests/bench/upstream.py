"""An upstream too fast to be the bottleneck: canned answers by a bare asyncio protocol.

The path says what it answers: `/plain/v1/chat/completions` a whole answer, `/burst-200/v1/...` a stream of
200 chunks in one write, `/paced-20-100/v1/...` a stream of 100 chunks at 20 a second. Each paced chunk carries
the sender's monotonic clock, so that a reader on the same machine can tell how long it was on its way.

Run as `python -m tests.bench.upstream PORT`; prints the port once it listens.
"""

from __future__ import annotations

import asyncio
import re
import sys
import time

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\n%s\r\n\r\n"
BODY = (
    b'{"id":"chatcmpl-bench","object":"chat.completion","created":1,"model":"bench","choices":[{"index":0,'
    b'"message":{"role":"assistant","content":"' + b"An answer of some length. " * 20 + b'","refusal":null},'
    b'"logprobs":null,"finish_reason":"stop"}],"usage":{"prompt_tokens":20,"completion_tokens":120,"total_tokens":140}}'
)
CHUNK = (
    b'data: {"id":"chatcmpl-bench","object":"chat.completion.chunk","created":1,"model":"bench",'
    b'"system_fingerprint":"fp_bench","choices":[{"index":0,"delta":%s,"logprobs":null,"finish_reason":%s}],'
    b'"usage":null}\n\n'
)
USAGE = (
    b'data: {"id":"chatcmpl-bench","object":"chat.completion.chunk","created":1,"model":"bench","choices":[],'
    b'"usage":{"prompt_tokens":20,"completion_tokens":120,"total_tokens":140}}\n\n'
)
_PATH = re.compile(rb"POST /(plain|burst|paced)(?:-(\d+))?(?:-(\d+))?/")


def text_chunk(text: bytes) -> bytes:
    """Return a content chunk."""
    return CHUNK % (b'{"content":"' + text + b'"}', b"null")


ROLE = CHUNK % (b'{"role":"assistant","content":""}', b"null")
END = CHUNK % (b"{}", b'"stop"') + USAGE + b"data: [DONE]\n\n"


class Server(asyncio.Protocol):
    """Answer one connection's requests, one after the other."""

    def __init__(self) -> None:
        self._received = bytearray()
        self._transport: asyncio.Transport | None = None
        self._pacing: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop pacing."""
        if self._pacing is not None:
            self._pacing.cancel()

    def data_received(self, data: bytes) -> None:
        """Answer every request that is complete."""
        self._received += data
        while (end := self._received.find(b"\r\n\r\n")) >= 0:
            head = bytes(self._received[:end])
            length = re.search(rb"(?i)content-length: *(\d+)", head)
            total = end + 4 + (int(length.group(1)) if length else 0)
            if len(self._received) < total:
                return
            del self._received[:total]
            self._answer(head)

    def _answer(self, head: bytes) -> None:
        found = _PATH.match(head)
        kind, first, second = found.groups() if found else (b"plain", None, None)
        if kind == b"plain":
            self._transport.write(HEAD % (b"application/json", b"content-length: %d" % len(BODY)) + BODY)
            return
        start = HEAD % (b"text/event-stream", b"transfer-encoding: chunked")
        if kind == b"burst":
            body = ROLE + text_chunk(b" word") * int(first) + END
            self._transport.write(start + _framed(body) + b"0\r\n\r\n")
            return
        self._transport.write(start + _framed(ROLE))
        self._pacing = asyncio.get_running_loop().create_task(self._pace(int(first), int(second)))

    async def _pace(self, per_second: int, count: int) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        for _ in range(count):
            due += 1 / per_second
            await asyncio.sleep(due - loop.time())
            self._transport.write(_framed(text_chunk(b"@%.6f@" % time.monotonic())))
        self._transport.write(_framed(END) + b"0\r\n\r\n")


def _framed(body: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(body), body)


async def main(port: int) -> None:
    """Serve until killed."""
    server = await asyncio.get_running_loop().create_server(Server, "127.0.0.1", port, backlog=2048)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
