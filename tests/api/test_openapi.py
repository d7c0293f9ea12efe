"""The OpenAPI document: every route and no other, references that lead somewhere, schemas that answers fit."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import jsonschema
import pytest

from models.database import Database
from models.settings import read_settings
from portal.app import create_app
from tests.api.v1.test_chat import body, events_of
from tests.cast import Actor, enter
from tests.house import House

METHODS = {"get", "post", "put", "patch", "delete"}


@pytest.fixture
async def document(house: House, http: aiohttp.ClientSession) -> dict[str, Any]:
    """Give the document as the house serves it, to anybody."""
    async with http.get(f"{house.base_url}/openapi.json") as answer:
        assert answer.status == 200
        assert answer.headers["content-type"] == "application/json"
        return await answer.json()


def operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield (path, method, operation)."""
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield path, method, operation


def fit(document: dict[str, Any], schema: dict[str, Any], value: Any) -> None:
    """Assert that a value is valid for a schema of the document."""
    whole = {**schema, "components": document["components"]}
    jsonschema.Draft202012Validator.check_schema(whole)
    jsonschema.validate(value, whole, cls=jsonschema.Draft202012Validator)


def answer_schema(
    document: dict[str, Any], path: str, method: str, status: str = "200", kind: str = "application/json"
) -> dict[str, Any]:
    """Return the schema of an operation's answer."""
    return document["paths"][path][method]["responses"][status]["content"][kind]["schema"]


async def test_describes_every_route_and_no_other(document: dict[str, Any], tmp_path: Path) -> None:
    app = create_app(read_settings({"DATA_DIR": str(tmp_path)}))
    served = {
        (re.sub(r"<(?:\w+:)?\w+>", "{}", rule.rule), method.lower())
        for rule in app.url_map.iter_rules()
        if rule.rule.startswith("/v1")
        for method in rule.methods
        if method.lower() in METHODS
    }
    described = {(re.sub(r"\{\w+\}", "{}", path), method) for path, method, _ in operations(document)}
    assert described == served
    assert len(served) >= 7


async def test_has_the_parts_a_reader_of_it_needs(document: dict[str, Any], house: House) -> None:
    assert re.fullmatch(r"3\.1\.\d", document["openapi"])
    assert document["info"]["title"] and re.match(r"\d+\.\d+", document["info"]["version"])
    assert document["servers"] == [{"url": house.base_url}]
    assert document["components"]["securitySchemes"]["bearer"] == {"type": "http", "scheme": "bearer"}
    names = [operation["operationId"] for _, _, operation in operations(document)]
    assert len(names) == len(set(names))
    for path, method, operation in operations(document):
        assert operation["summary"] and operation["tags"]
        declared = {each["name"] for each in operation.get("parameters", ()) if each["in"] == "path"}
        assert declared == set(re.findall(r"\{(\w+)\}", path))
        assert all(each["required"] for each in operation.get("parameters", ()) if each["in"] == "path")
        assert ("requestBody" in operation) == (method == "post")
        responses = operation["responses"]
        assert {"200", "400", "401", "403", "429", "503"} <= set(responses)
        assert ({"402", "413", "415", "502"} <= set(responses)) == (method == "post")
        for response in responses.values():
            assert response["description"] and "x-request-id" in response["headers"]
        assert "Retry-After" in responses["429"]["headers"]


async def test_every_reference_leads_somewhere(document: dict[str, Any]) -> None:
    references = re.findall(r'"\$ref":\s*"([^"]+)"', json.dumps(document))
    assert len(references) > 20
    for reference in references:
        place: Any = document
        for step in reference.removeprefix("#/").split("/"):
            place = place[step.replace("~1", "/").replace("~0", "~")]
        assert isinstance(place, dict) and place
    used = {reference.rpartition("/")[2] for reference in references if "/schemas/" in reference}
    assert used == set(document["components"]["schemas"])
    for schema in document["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)


async def test_every_path_takes_a_trailing_slash(
    document: dict[str, Any], house: House, http: aiohttp.ClientSession
) -> None:
    """Without a redirect, on which clients lose the body or the key."""
    for path, method, _ in operations(document):
        address = house.base_url + re.sub(r"\{\w+\}", "x", path)
        for ending in ("", "/", "/?limit=1"):
            async with http.request(method, address + ending, allow_redirects=False) as answer:
                assert answer.status == 401, address + ending
                assert (await answer.json())["error"]["code"] == "missing_api_key"


async def test_real_answers_fit_their_schemas(
    document: dict[str, Any], house: House, alice: Actor, http: aiohttp.ClientSession
) -> None:
    asked_schema = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"][
        "schema"
    ]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    request_id = ""
    requests = (body(), body("tool", tools=[tool]), body("cached:3 reasoning:2 usage:9,9", n=2), body("nousage"))
    for path in ("/v1/chat/completions", "/v1/public/chat"):
        for asked in requests:
            fit(document, asked_schema, asked)
            async with http.post(house.base_url + path, json=asked, headers=alice.headers) as answer:
                assert answer.status == 200 and answer.headers["cache-control"] == "private, no-store"
                fit(document, answer_schema(document, path, "post"), await answer.json())
                request_id = answer.headers["x-request-id"]
    for path, template in (
        ("/v1/models", None), ("/v1/models/twin", "/v1/models/{model}"), ("/v1/usage", None),
        (f"/v1/usage/{request_id}", "/v1/usage/{request_id}"), ("/v1/balance", None),
    ):
        async with http.get(house.base_url + path, headers=alice.headers) as answer:
            assert answer.status == 200 and answer.headers["cache-control"] == "private, no-store"
            fit(document, answer_schema(document, template or path, "get"), await answer.json())


async def test_real_streams_fit_their_schema(
    document: dict[str, Any], house: House, alice: Actor, http: aiohttp.ClientSession
) -> None:
    path = "/v1/chat/completions"
    schema = answer_schema(document, path, "post", kind="text/event-stream")
    for options in ({}, {"stream_options": {"include_usage": True}}):
        asked = body("tokens:4 reasoning:2", stream=True, **options)
        async with http.post(house.base_url + path, json=asked, headers=alice.headers) as answer:
            assert answer.headers["cache-control"] == "private, no-store"
            assert answer.headers["x-accel-buffering"] == "no"
            *events, done = await events_of(answer)
        assert done == "[DONE]" and len(events) > 5
        for event in events:
            fit(document, schema, json.loads(event))


async def test_real_refusals_fit_their_schema(
    document: dict[str, Any], house: House, house_books: Database, alice: Actor, http: aiohttp.ClientSession
) -> None:
    poor = await enter(house_books, "poor", plan="wallet")
    mute = await enter(house_books, "mute", plan="mute")
    path = "/v1/chat/completions"
    seen = set()
    for actor, asked in (
        (alice, body(n=0)), (poor, body()), (mute, body()), (alice, body(model="gone")),
        (alice, body("status:403")),
    ):
        async with http.post(house.base_url + path, json=asked, headers=actor.headers) as answer:
            refusal = await answer.json()
            fit(document, answer_schema(document, path, "post", str(answer.status)), refusal)
            # Nothing in an error is left undescribed.
            described = document["components"]["schemas"]["ErrorDetail"]["properties"]
            assert set(refusal["error"]) <= set(described)
            seen.add(answer.status)
    assert seen == {400, 402, 403, 404, 502}


async def test_the_schema_refuses_what_the_parser_refuses(document: dict[str, Any]) -> None:
    schema = document["paths"]["/v1/public/chat"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    for fields in ({"n": 0}, {"messages": []}, {"model": ""}, {"stream": "yes"}, {"top_p": 2}, {"stop": 5}):
        with pytest.raises(jsonschema.ValidationError):
            fit(document, schema, body(**fields))
