"""The OpenAPI document, generated from the very types the code parses and answers with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from api import wire

OPENAPI_VERSION = "3.1.0"


@dataclass(frozen=True, slots=True)
class Operation:
    """Describe one operation: what it takes, what it answers, and the errors of its own."""

    method: str
    path: str
    id: str
    tag: str
    summary: str
    answer: type
    body: type | None = None
    stream: type | None = None
    query: tuple[tuple[str, str, str], ...] = ()
    path_parameter: tuple[str, str] | None = None
    metered: bool = False


_PAGE = (
    ("limit", "integer", "Rows a page, 1 to 100; 20 when absent."),
    ("after", "string", "The id of the row the page follows."),
    ("before", "string", "The id of the row the page precedes."),
    ("order", "string", "desc (newest first) or asc."),
)

OPERATIONS = (
    Operation(
        "post", "/v1/chat/completions", "createChatCompletion", "Chat",
        "Answer a conversation, whole or as a stream of server-sent events.",
        wire.ChatCompletion, body=wire.ChatRequest, stream=wire.ChatCompletionChunk, metered=True,
    ),
    Operation(
        "post", "/v1/public/chat", "createPublicChat", "Chat",
        "Answer a conversation whole: the smallest contract, which never changes.",
        wire.ChatCompletion, body=wire.ChatRequest, metered=True,
    ),
    Operation(
        "get", "/v1/models", "listModels", "Models", "List the models this key may use, with their prices.",
        wire.ModelList,
    ),
    Operation(
        "get", "/v1/models/{model}", "retrieveModel", "Models", "Return one model; its id may hold slashes.",
        wire.Model, path_parameter=("model", "The model's id, percent-encoded or as it is."),
    ),
    Operation(
        "get", "/v1/usage", "listUsage", "Usage", "List calls with latency, status and cost, newest first.",
        wire.UsageList,
        query=(
            *_PAGE,
            ("key_id", "string", "Only calls made with this key."),
            ("model", "string", "Only calls of this model."),
            ("status", "integer", "Only calls that ended with this HTTP status."),
            ("state", "string", "open, settled, released, expired or refused."),
            ("from", "integer", "Only calls since this time, in seconds since 1970."),
            ("until", "integer", "Only calls before this time, in seconds since 1970."),
        ),
    ),
    Operation(
        "get", "/v1/usage/{request_id}", "retrieveUsage", "Usage",
        "Return one call: the final figure, also of a stream that was cut.",
        wire.UsageRow, path_parameter=("request_id", "The x-request-id of the call."),
    ),
    Operation(
        "get", "/v1/balance", "retrieveBalance", "Usage",
        "Return the credit of the account and its included calls.", wire.BalanceReport,
    ),
)

_ERRORS = {
    "400": "The request is not valid; param names the field.",
    "401": "missing_api_key or invalid_api_key.",
    "402": "insufficient_credits: the wallet does not cover the call.",
    "403": "scope_denied: the plan or the key does not include this surface.",
    "404": "There is no such thing for this account.",
    "413": "The body is too large.",
    "415": "The body is not sent as plain JSON.",
    "429": "rate_limit_exceeded: retry after 60 seconds.",
    "502": "upstream_error: the AI provider failed; retry.",
    "503": "service_unavailable: retry shortly.",
}
_METERED_ONLY = {"402", "413", "415", "502"}
_RETRY_LATER = {"429", "503"}


def document(*, title: str, version: str, public_url: str) -> bytes:
    """Return the document as JSON."""
    types = {operation.answer for operation in OPERATIONS} | {wire.ErrorBody}
    types |= {operation.body for operation in OPERATIONS if operation.body}
    types |= {operation.stream for operation in OPERATIONS if operation.stream}
    ordered = sorted(types, key=lambda each: each.__name__)
    schemas, components = msgspec.json.schema_components(ordered, ref_template="#/components/schemas/{name}")
    references = dict(zip(ordered, schemas, strict=True))
    paths: dict[str, Any] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation, references)
    return msgspec.json.encode({
        "openapi": OPENAPI_VERSION,
        "info": {"title": f"{title} API", "version": version},
        "servers": [{"url": public_url}],
        "security": [{"bearer": []}],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
            "headers": {
                "x-request-id": {
                    "description": "The id of the request; quote it in questions.",
                    "schema": {"type": "string"},
                },
                "Retry-After": {
                    "description": "After how many seconds to come again.", "schema": {"type": "integer"}
                },
            },
        },
    })


def _operation(operation: Operation, references: dict[type, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": references[operation.answer]}}
    if operation.stream:
        content["text/event-stream"] = {"schema": references[operation.stream]}
    described: dict[str, Any] = {
        "operationId": operation.id,
        "tags": [operation.tag],
        "summary": operation.summary,
        "responses": {"200": _response("The answer.", content), **_refusals(operation, references)},
    }
    parameters = [
        {"name": name, "in": "query", "description": text, "schema": {"type": kind}}
        for name, kind, text in operation.query
    ]
    if operation.path_parameter:
        name, text = operation.path_parameter
        parameters.append(
            {"name": name, "in": "path", "required": True, "description": text, "schema": {"type": "string"}}
        )
    if operation.metered:
        parameters.append({
            "name": "Idempotency-Key", "in": "header", "schema": {"type": "string", "maxLength": 255},
            "description": "Makes a retry safe: the same key and body get the same answer, charged once.",
        })
    if parameters:
        described["parameters"] = parameters
    if operation.body:
        described["requestBody"] = {
            "required": True, "content": {"application/json": {"schema": references[operation.body]}}
        }
    return described


def _refusals(operation: Operation, references: dict[type, Any]) -> dict[str, Any]:
    content = {"application/json": {"schema": references[wire.ErrorBody]}}
    return {
        status: _response(text, content, *(["Retry-After"] if status in _RETRY_LATER else []))
        for status, text in _ERRORS.items()
        if operation.metered or status not in _METERED_ONLY
    }


def _response(description: str, content: dict[str, Any], *headers: str) -> dict[str, Any]:
    return {
        "description": description,
        "headers": {name: {"$ref": f"#/components/headers/{name}"} for name in ("x-request-id", *headers)},
        "content": content,
    }
