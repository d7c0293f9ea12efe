"""HTTP/1.1 by hand, over raw sockets: what can be read in two ways is refused, and nothing behind it is run."""

from __future__ import annotations

import asyncio
import json
import re
import time

import pytest

from tests.api.envelope import whole
from tests.cast import Actor
from tests.house import House

END_S = 20
# Follows every probe on the same connection: whether it was answered says whether it was read as a request.
LAST = b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
GET = b"GET /healthz HTTP/1.1\r\nHost: x\r\n"
_STATUS = re.compile(rb"HTTP/1\.1 (\d{3})")


async def answers_to(house: House, raw: bytes) -> bytes:
    """Send bytes and return all that comes back until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", house.port)
    try:
        writer.write(raw)
        async with asyncio.timeout(END_S):
            return await reader.read()
    finally:
        writer.close()


def statuses(raw: bytes) -> list[int]:
    """Return the status of each answer."""
    return [int(found) for found in _STATUS.findall(raw)]


REFUSED = {
    "length and chunks": (POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    "chunks and length": (POST + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n", 400),
    "length and chunks, odd case": (POST + b"CONTENT-LENGTH: 0\r\ntransfer-ENCODING: Chunked\r\n\r\n", 400),
    "no length and chunks": (POST + b"Content-Length: 0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    "chunks in HTTP/1.0": (
        b"POST /v1/models HTTP/1.0\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400
    ),
    "two lengths": (POST + b"Content-Length: 0\r\nContent-Length: 44\r\n\r\n", 400),
    "a list of lengths": (POST + b"Content-Length: 0, 44\r\n\r\n", 400),
    "a negative length": (POST + b"Content-Length: -1\r\n\r\n", 400),
    "a signed length": (POST + b"Content-Length: +0\r\n\r\n", 400),
    "a hexadecimal length": (POST + b"Content-Length: 0x2\r\n\r\n", 400),
    "an endless length": (POST + b"Content-Length: " + b"9" * 30 + b"\r\n\r\n", 400),
    "two transfer codings": (POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n", 501),
    "a list of codings": (POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n", 501),
    "an unknown coding": (POST + b"Transfer-Encoding: xchunked\r\n\r\n", 501),
    "a coding after a tab": (POST + b"Transfer-Encoding: \x0bchunked\r\n\r\n", 400),
    "a space before the colon": (POST + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n", 400),
    "a folded first line": (b"GET /healthz HTTP/1.1\r\n Host: x\r\n\r\n", 400),
    "two hosts": (GET + b"Host: y\r\n\r\n", 400),
    "no host": (b"GET /healthz HTTP/1.1\r\n\r\n", 400),
    "NUL in a value": (GET + b"X: a\x00b\r\n\r\n", 400),
    "a bare CR in a value": (GET + b"X: a\rY: b\r\n\r\n", 400),
    "no version": (b"GET /healthz\r\nHost: x\r\n\r\n", 400),
    "a space in the target": (b"GET /healthz x HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "a raw byte in the target": (b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "HTTP/3.7": (b"GET /healthz HTTP/3.7\r\nHost: x\r\n\r\n", 400),
    "the preface of HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00", 400),
    "the preface of TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 64 + b"\r\n\r\n", 400),
    "too large a head": (GET + b"X: " + b"a" * 100_000 + b"\r\n\r\n", 431),
}


@pytest.mark.parametrize("probe", REFUSED)
async def test_what_is_ambiguous_is_refused_and_nothing_after_it_is_read(house: House, probe: str) -> None:
    sent, status = REFUSED[probe]
    raw = await answers_to(house, sent + LAST)
    assert statuses(raw) == [status], raw
    assert b"ok\n" not in raw
    head, _, body = raw.partition(b"\r\n\r\n")
    headers = dict(line.lower().split(": ", 1) for line in head.decode().splitlines()[1:])
    assert headers["connection"] == "close"
    assert headers["x-content-type-options"] == "nosniff"
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert whole(body, headers)["code"] == "invalid_request"


CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize("body", [
    b"5\r\nhello", b"-5\r\nhello\r\n0\r\n\r\n", b"zz\r\n", b"5\r\nhelloGET / HTTP/1.1\r\n",
    b"5 5\r\nhello\r\n0\r\n\r\n", b"2;ext=\"0\r\n\"\r\n{}\r\n0\r\n\r\n", b"5\nhello\n0\n\n",
    b"f" * 30 + b"\r\n", b"2\r\nhello\r\n0\r\n\r\n",
])
async def test_a_broken_chunk_ends_the_connection(house: House, body: bytes) -> None:
    """The answer may be the 401 that was due anyway; what follows is in no case read as a request."""
    raw = await answers_to(house, CHUNKED + body + LAST)
    assert statuses(raw) in ([400], [401], [401, 400]), raw
    assert b"ok\n" not in raw


TAKEN = {
    "a length": (POST + b"Content-Length: 2\r\n\r\n{}", 401),
    "no body at all": (POST + b"\r\n", 401),
    "chunks": (CHUNKED + b"2;ext=\"0\"\r\n{}\r\n0\r\nTrailer: x\r\n\r\n", 401),
    "an upgrade to h2c": (
        GET + b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
        b"HTTP2-Settings: AAMAAABkAAQAAP__\r\n\r\n", 200
    ),
    "an upgrade to a websocket": (
        GET + b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
        b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n", 200
    ),
    "an absolute target": (b"GET http://evil.example/healthz HTTP/1.1\r\nHost: x\r\n\r\n", 200),
    "a target without a path": (b"GET http://evil.example HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "a target that is only a query": (b"GET ?x HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "a target that is no address": (b"GET http://[x/ HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "an asterisk": (b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "another authority": (b"CONNECT evil.example:443 HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "a trace": (b"TRACE / HTTP/1.1\r\nHost: x\r\n\r\n", 405),
    "an unknown method": (b"BREW /healthz HTTP/1.1\r\nHost: x\r\n\r\n", 405),
    "a method in a header": (GET + b"X-HTTP-Method-Override: DELETE\r\nX-Method-Override: DELETE\r\n\r\n", 200),
    "a host of another's": (b"GET /v1/balance HTTP/1.1\r\nHost: x/?\r\n\r\n", 401),
    "a CRLF in the path": (b"GET /%0d%0aSet-Cookie:%20a=b HTTP/1.1\r\nHost: x\r\n\r\n", 404),
    "a CRLF in the query": (b"GET /v1/usage?limit=%0d%0aSet-Cookie:%20a=b HTTP/1.1\r\nHost: x\r\n\r\n", 401),
}


@pytest.mark.parametrize("probe", TAKEN)
async def test_what_is_plain_is_answered_once(house: House, probe: str) -> None:
    sent, status = TAKEN[probe]
    raw = await answers_to(house, sent + LAST)
    assert statuses(raw) == [status, 200], raw
    assert raw.endswith(b"ok\n") and b"\r\nset-cookie" not in raw.lower()


async def test_a_body_nobody_wants_is_not_asked_for(house: House) -> None:
    """Whoever waits for "100 Continue" with 99 GB and no good key learns so, and has sent nothing."""
    began = time.monotonic()
    raw = await answers_to(house, (
        POST + b"Authorization: Bearer sk-tg-0000000000000000000000000000002P0j63\r\n"
        b"Content-Type: application/json\r\nContent-Length: 99000000000\r\nExpect: 100-continue\r\n\r\n"
    ))
    assert statuses(raw) == [401] and b"connection: close" in raw.lower()
    assert time.monotonic() - began < 10


async def test_a_body_that_is_wanted_is_asked_for(house: House, alice: Actor) -> None:
    asked = json.dumps({"model": "twin", "max_tokens": 5, "messages": [{"role": "user", "content": "say:hi"}]})
    reader, writer = await asyncio.open_connection("127.0.0.1", house.port)
    writer.write(POST + (
        f"Authorization: Bearer {alice.key}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(asked)}\r\nExpect: 100-continue\r\n\r\n"
    ).encode())
    async with asyncio.timeout(END_S):
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100")
        writer.write(asked.encode() + LAST)
        raw = await reader.read()
    assert statuses(raw) == [200, 200]
    writer.close()


async def test_who_still_sends_gets_the_answer_whole(house: House) -> None:
    """Answered before its body has arrived, a client that goes on sending must still be able to read it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", house.port)
    writer.write(POST + b"Content-Type: application/json\r\nContent-Length: 20000000\r\n\r\n")
    for _ in range(200):
        writer.write(b" " * 100_000)
        await writer.drain()
    async with asyncio.timeout(END_S):
        raw = await reader.read()
    assert statuses(raw) == [401] and raw.endswith(b"}")
    writer.close()


async def test_an_answer_reads_the_same_whoever_wrote_it(house: House, alice: Actor) -> None:
    # To a client that keeps its connection a whole answer is written by us, to one that closes it by h11.
    body = json.dumps({"model": "nothing", "messages": [{"role": "user", "content": "x"}]}).encode()
    key = alice.headers["Authorization"].encode()
    asked = POST + b"Authorization: " + key + b"\r\nContent-Type: application/json\r\n"
    asked += b"Content-Length: %d\r\n" % len(body)
    kept = await answers_to(house, (asked + b"\r\n" + body) * 2 + LAST)
    closed = await answers_to(house, asked + b"Connection: close\r\n\r\n" + body)
    assert statuses(kept) == [404, 404, 200] and statuses(closed) == [404]
    own = re.compile(rb"req_[0-9a-z]+|date: [^\r]+|[Cc]onnection: close\r\n")
    first, second, _ = re.split(rb"(?=HTTP/1\.1 )", own.sub(b"", kept))[1:]
    assert first == second == own.sub(b"", closed)
    assert kept.count(b"\r\ncontent-length: ") == 3 and b"onnection: close" in closed
