"""Whatever is sent to whatever is described under /v1: an answer in order, soon, and never a 5xx.

What is tried is read from the server's own /openapi.json, so that a new route is fuzzed without being named
here. Each example is a request over a real socket: method, path, query, headers and body, each as described,
or odd, or nonsense. `HYPOTHESIS_PROFILE=thorough` tries thousands.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from typing import Any
from urllib.parse import quote

import aiohttp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from yarl import URL

from models import wallet
from models.database import Database
from tests.api.envelope import whole
from tests.api.v1.test_fuzz_seeds import SEEDS
from tests.cast import Actor
from tests.house import House

EXAMPLES = {"suite": 200, "thorough": 3500}[os.environ.get("HYPOTHESIS_PROFILE", "suite")]
ANSWER_S = 5
METHODS = ["GET", "POST", "HEAD", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "BREW", "get"]
ODD_TEXTS = st.sampled_from([
    "", "\0", "null", "../..", "%", "%00", "a" * 300, "\u202e", "👩\u200d👧", "' OR 1=1 --", "${7*7}", "{{7*7}}",
    "-1", "9" * 40, "1e999", "NaN", "true", "[]", "say:hello", "twin", "req_0", "usage:1,1", "chat,models",
])
TEXTS = st.text(max_size=20) | ODD_TEXTS
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(-(2**70), 2**70) | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)
# What the wire allows in a header's value: no control characters, at most one byte each.
HEADER_VALUES = st.text(st.characters(min_codepoint=32, max_codepoint=255, exclude_characters="\x7f"), max_size=60)


def as_described(schema: dict[str, Any], components: dict[str, Any], depth: int = 0) -> st.SearchStrategy[Any]:
    """Return values of a schema, now and then something else in their place."""
    if "$ref" in schema:
        schema = components[schema["$ref"].rpartition("/")[2]]
    if depth > 6:
        return VALUES
    match schema:
        case {"enum": choices}:
            described = st.sampled_from(choices)
        case {"anyOf": choices}:
            described = st.one_of([as_described(choice, components, depth + 1) for choice in choices])
        case {"type": "object", "properties": fields}:
            needed = set(schema.get("required", ()))
            named = {name: as_described(field, components, depth + 1) for name, field in fields.items()}
            described = st.fixed_dictionaries(
                {name: each for name, each in named.items() if name in needed},
                optional={name: each for name, each in named.items() if name not in needed},
            )
        case {"type": "array", "items": items}:
            described = st.lists(as_described(items, components, depth + 1), max_size=3)
        case {"type": "integer"}:
            described = st.integers(schema.get("minimum", -5), schema.get("maximum", 2**40))
        case {"type": "number"}:
            described = st.floats(schema.get("minimum"), schema.get("maximum"), allow_nan=False)
        case {"type": "boolean"}:
            described = st.booleans()
        case {"type": "null"}:
            described = st.none()
        case {"type": "string"}:
            described = TEXTS
        case _:
            described = VALUES
    return st.integers(0, 19).flatmap(lambda die: VALUES if die == 0 else described)


def conversations() -> st.SearchStrategy[dict[str, Any]]:
    """Return bodies of good calls, with a field or two gone odd."""
    good = {"model": "twin", "max_tokens": 9, "messages": [{"role": "user", "content": "say:hello"}]}
    odd = st.dictionaries(
        st.sampled_from(
            ["n", "stream", "stop", "tools", "user", "seed", "metadata", "max_tokens", "messages", "unknown"]
        ),
        VALUES, max_size=2,
    )
    return odd.map(lambda extra: good | extra)


def requests(document: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Return requests to the operations of an OpenAPI document."""
    components = document["components"]["schemas"]
    operations = [
        (path, method, operation)
        for path, methods in document["paths"].items() for method, operation in methods.items()
    ]

    @st.composite
    def one(draw: st.DrawFn) -> dict[str, Any]:
        path, method, operation = draw(st.sampled_from(operations))
        parameters = operation.get("parameters", [])
        queries = [parameter["name"] for parameter in parameters if parameter["in"] == "query"]
        names = st.sampled_from(queries) | TEXTS if queries else TEXTS
        query = draw(st.lists(st.tuples(names, TEXTS | st.integers(-2, 200).map(str)), max_size=4))
        headers = draw(st.dictionaries(
            st.sampled_from([
                "Idempotency-Key", "Content-Type", "Content-Encoding", "Accept", "X-Request-Id", "Cookie", "Range",
                "X-HTTP-Method-Override", "If-None-Match", "Origin", "User-Agent", "X-Forwarded-For", "Forwarded",
            ]),
            HEADER_VALUES, max_size=2,
        ))
        body = None
        if "requestBody" in operation:
            schema = operation["requestBody"]["content"]["application/json"]["schema"]
            written = st.one_of(conversations(), as_described(schema, components)).map(
                lambda value: json.dumps(value, ensure_ascii=True).encode()
            )
            body = draw(st.one_of(written, written, st.sampled_from(list(SEEDS.values())), st.binary(max_size=60)))
            headers = {"Content-Type": "application/json", **headers}
        return {
            "method": draw(st.sampled_from([method.upper()] * 9 + METHODS)),
            "path": re.sub(r"{\w+}", lambda _: quote(draw(TEXTS), safe=""), path),
            "query": "&".join(f"{quote(name)}={quote(value)}" for name, value in query),
            "headers": headers,
            "body": body,
        }

    return one()


@pytest.fixture
async def document(house: House, http: aiohttp.ClientSession) -> dict[str, Any]:
    """Give what the server says of itself."""
    async with http.get(f"{house.base_url}/openapi.json") as answer:
        return await answer.json()


async def test_no_request_makes_a_5xx_or_hangs(
    house: House, house_books: Database, alice: Actor, http: aiohttp.ClientSession, document: dict[str, Any]
) -> None:
    seen: dict[int, int] = {}

    async def attempt(example: dict[str, Any]) -> None:
        url = URL(f"{house.base_url}{example['path']}?{example['query']}", encoded=True)
        async with asyncio.timeout(ANSWER_S), http.request(
            example["method"], url, data=example["body"], allow_redirects=False,
            headers={**example["headers"], **alice.headers}, skip_auto_headers=["Content-Type"],
        ) as answer:
            raw = await answer.read()
            seen[answer.status] = seen.get(answer.status, 0) + 1
            assert answer.status < 500, raw
            assert answer.headers["x-request-id"].startswith("req_")
            if answer.status >= 400 and example["method"] != "HEAD":
                whole(raw, answer.headers)
            elif answer.content_type == "application/json" and raw:
                json.loads(raw)
            elif answer.content_type == "text/event-stream":
                assert raw.endswith(b"data: [DONE]\n\n")

    loop = asyncio.get_running_loop()

    @settings(max_examples=EXAMPLES)
    @given(requests(document))
    def attempts(example: dict[str, Any]) -> None:
        asyncio.run_coroutine_threadsafe(attempt(example), loop).result(ANSWER_S * 4)

    await asyncio.to_thread(attempts)
    # It came through to the models and the lists, and was not stopped at the door.
    assert seen[200] > EXAMPLES / 10 and {400, 404, 405} <= set(seen)
    async with asyncio.timeout(30):
        while (await wallet.balance(house_books, alice.account.id)).held:
            await asyncio.sleep(0.1)
