"""The fuzz seeds of security.md against both chat routes and the lists: never a 5xx, always an envelope."""

from __future__ import annotations

import codecs
import json

import aiohttp
import pytest
from yarl import URL

from models.database import Database
from tests.api.envelope import whole
from tests.api.v1.test_usage import rows_of
from tests.cast import Actor
from tests.house import House

_HEAD = b'{"model":"twin","max_tokens":9,"messages":[{"role":"user","content":"say:hello"}]'
_FLOOD = "\u202e" * 500 + "👩\u200d👩\u200d👧" * 200 + "e" + "\u0301" * 2000


def _said(content: bytes, extra: bytes = b"") -> bytes:
    return b'{"model":"twin","max_tokens":9,"messages":[{"role":"user","content":' + content + extra + b"}]}"


SEEDS = {
    "an open array a hundred thousand deep": b"[" * 100_000,
    "an unknown field a hundred thousand deep": _HEAD + b',"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "an unknown field 900 deep": _HEAD + b',"x":' + b"[" * 900 + b"]" * 900 + b"}",
    "an unknown field 990 deep": _HEAD + b',"x":' + b"[" * 990 + b"]" * 990 + b"}",
    "a message field 900 deep": _said(b'"say:hi"', b',"x":' + b"[" * 900 + b"]" * 900),
    "a message field 5,000 deep": _said(b'"say:hi"', b',"x":' + b"[" * 5000 + b"]" * 5000),
    "tools 900 deep": _HEAD + b',"tools":[{"type":"function","function":{"name":"f","parameters":'
    + b'{"a":' * 900 + b"1" + b"}" * 900 + b"}}]}",
    "an integer of 5,000 digits": _HEAD + b',"seed":' + b"9" * 5000 + b"}",
    "an unknown integer of 5,000 digits": _HEAD + b',"x":' + b"9" * 5000 + b"}",
    "an integer of 5,000 digits in a message": _said(b'"say:hi"', b',"x":' + b"9" * 5000),
    "NaN": _HEAD + b',"temperature":NaN}',
    "Infinity": _HEAD + b',"x":-Infinity}',
    "1e999": _HEAD + b',"temperature":1e999}',
    "an unknown 1e999": _HEAD + b',"x":1e999,"metadata":{}}',
    "1e999 in a message": _said(b'"say:hi"', b',"x":1e999'),
    "minus zero": _HEAD + b',"n":-0}',
    "minus zero as a float": _HEAD + b',"temperature":-0.0,"presence_penalty":-0.0}',
    "half a surrogate pair": _said(rb'"\ud800"'),
    "half a surrogate pair as model": b'{"model":"\\ud800","messages":[{"role":"user","content":"x"}]}',
    "half a surrogate pair as a key": _HEAD + rb',"\udfff":1}',
    "half a surrogate pair as bytes": _said(b'"\xed\xa0\x80"'),
    "NUL": _said(rb'"\u0000"'),
    "NUL as model": b'{"model":"tw\\u0000in","messages":[{"role":"user","content":"x"}]}',
    "NUL in an identifier": _HEAD + rb',"user":"\u0000","metadata":{"a\u0000":"\u0000"}}',
    "a raw NUL": _said(b'"\x00"'),
    "duplicate keys": b'{"model":"nothing","model":"twin",' + _HEAD[1:] + b',"model":"twin"}',
    "duplicate keys in a message": _said(b'5,"content":"say:hi"'),
    "invalid UTF-8": _said(b'"\xff\xfe"'),
    "invalid UTF-8 as a key": _HEAD + b',"\xff":1}',
    "overlong UTF-8": _said(b'"\xc0\xaf"'),
    "UTF-16 with a mark": codecs.BOM_UTF16 + (_HEAD + b"}").decode().encode("utf-16-le"),
    "UTF-8 with a mark": codecs.BOM_UTF8 + _HEAD + b"}",
    "nothing": b"",
    "spaces": b" \r\n\t",
    "null": b"null",
    "true": b"true",
    "a number": b"42",
    "a text": b'"twin"',
    "an array": b"[]",
    "trailing garbage": _HEAD + b"}]",
    "two bodies": (_HEAD + b"}") * 2,
    "2 to the 63": _HEAD + b',"seed":9223372036854775808}',
    "2 to the 64": _HEAD + b',"seed":18446744073709551616}',
    "minus 2 to the 63": _HEAD + b',"seed":-9223372036854775809}',
    "2 to the 63 tokens": b'{"max_completion_tokens":9223372036854775808,' + _HEAD[1:] + b"}",
    "a million elements": _HEAD + b',"x":[' + b"0," * 1_000_000 + b"0]}",
    "a million messages": b'{"model":"twin","messages":[' + b"{}," * 1_000_000 + b"{}]}",
    "a hundred thousand empty turns": b'{"model":"twin","max_tokens":9,"messages":['
    + b'{"role":"user","content":""},' * 100_000 + b'{"role":"user","content":"say:hi"}]}',
    "a hundred thousand keys": _HEAD + b"".join(b',"k%d":0' % n for n in range(100_000)) + b"}",
    "floods of marks": _said(json.dumps(_FLOOD, ensure_ascii=False).encode()),
    "floods of marks as model": json.dumps(
        {"model": _FLOOD[:250], "messages": [{"role": "user", "content": "x"}]}
    ).encode(),
    "an endless model": b'{"model":"' + b"a" * 100_000 + b'","messages":[{"role":"user","content":"x"}]}',
    "every type wrong": b'{"model":[],"messages":{},"stream":"","n":{},"tools":0,"stop":{}}',
    "all null": b'{"model":null,"messages":null}',
    "a prototype": _HEAD + b',"__proto__":{"model":"x"},"constructor":1}',
}


@pytest.mark.parametrize("seed", SEEDS)
async def test_a_seed_is_refused_in_order_or_answered(
    house: House, alice: Actor, http: aiohttp.ClientSession, seed: str
) -> None:
    for path, headers in (
        ("/v1/chat/completions", {}),
        ("/v1/public/chat", {}),
        ("/v1/public/chat", {"Idempotency-Key": "once"}),
    ):
        async with http.post(
            house.base_url + path, data=SEEDS[seed],
            headers={"Content-Type": "application/json", **headers, **alice.headers},
        ) as answer:
            raw = await answer.read()
            if answer.status == 200:
                assert json.loads(raw)["object"] == "chat.completion"
            else:
                assert answer.status in (400, 404), raw
                whole(raw, answer.headers)


QUERIES = [
    "limit=%00", "limit=-1", "limit=1e3", "limit=0", "limit=101", "limit=" + "9" * 5000, "limit=%D9%A1",
    "after=%00", "after=%ED%A0%80", "after=%FF", "after=" + "x" * 5000, "before=%27%20OR%201=1", "order=up",
    "order=asc&order=desc", "status=abc", "status=9223372036854775808", "state=%00", "from=-1",
    "from=99999999999999", "until=9223372036854775807", "model=%00", "model=%ED%A0%80", "key_id=%00%00",
    "after=a&before=b", "&".join(f"k{n}=1" for n in range(5000)), "limit", "=", "&&&", "%", "%zz=%zz",
    "limit=5;after=6",
]


@pytest.mark.parametrize("query", QUERIES)
async def test_a_query_is_refused_in_order_or_answered(
    house: House, alice: Actor, http: aiohttp.ClientSession, query: str
) -> None:
    for path in ("/v1/usage", "/v1/models"):
        url = URL(f"{house.base_url}{path}?{query}", encoded=True)
        async with http.get(url, headers=alice.headers) as answer:
            raw = await answer.read()
            if answer.status == 200:
                assert json.loads(raw)["object"] == "list"
            else:
                assert answer.status == 400, raw
                assert whole(raw, answer.headers)["param"]


@pytest.mark.parametrize(
    "name", ["%00", "%ED%A0%80", "%FF", "%2F", "..%2f..%2f", "x" * 5000, "%F0%9F%91%A9", "req_%00"]
)
async def test_a_path_is_refused_in_order(
    house: House, alice: Actor, http: aiohttp.ClientSession, name: str
) -> None:
    for path in ("/v1/usage/", "/v1/models/", "/v1/"):
        url = URL(f"{house.base_url}{path}{name}", encoded=True)
        async with http.get(url, headers=alice.headers) as answer:
            raw = await answer.read()
            assert answer.status == 404, raw
            whole(raw, answer.headers)


async def test_what_was_refused_can_be_read_again(
    house: House, house_books: Database, alice: Actor, http: aiohttp.ClientSession
) -> None:
    """Rows of refused calls hold what the request named, in a form that both databases and JSON can carry."""
    for seed in ("NUL as model", "floods of marks as model", "trailing garbage"):
        streamed = SEEDS[seed].replace(b'"messages"', b'"stream":true,"messages"')
        async with http.post(
            house.base_url + "/v1/public/chat", data=streamed,
            headers={"Content-Type": "application/json", **alice.headers},
        ) as answer:
            assert answer.status in (400, 404)
    await rows_of(house, http, alice, least=1)
