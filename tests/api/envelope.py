"""What every refusal under /v1 must look like, as wire.md has it; told apart from the code's own table."""

from __future__ import annotations

import json
from typing import Any

import aiohttp

TYPES = {
    "missing_api_key": "authentication_error",
    "invalid_api_key": "authentication_error",
    "insufficient_credits": "billing_error",
    "scope_denied": "permission_error",
    "rate_limit_exceeded": "rate_limit_error",
    "upstream_error": "upstream_error",
    "model_not_found": "not_found_error",
    "not_found": "not_found_error",
    "internal_error": "server_error",
    "service_unavailable": "server_error",
}


async def refused(
    answer: aiohttp.ClientResponse, status: int, code: str, *, param: str | None = None
) -> dict[str, Any]:
    """Assert that an answer is this refusal, in the one envelope; return its inner object."""
    raw = await answer.read()
    assert answer.status == status, raw
    inner = whole(raw, answer.headers)
    assert (inner["code"], inner["param"]) == (code, param), inner
    assert inner["type"] == TYPES.get(code, "invalid_request_error")
    return inner


def whole(raw: bytes, headers: Any) -> dict[str, Any]:
    """Assert that a body is the error envelope, with one request id in three places; return its inner object."""
    assert headers["content-type"] == "application/json"
    assert "no-store" in headers["cache-control"]
    request_id = headers["x-request-id"]
    assert request_id.startswith("req_") and len(request_id) == 30
    body = json.loads(raw)
    assert set(body) == {"error", "request_id"}
    inner = body["error"]
    assert {"message", "type", "param", "code", "request_id"} <= set(inner)
    assert body["request_id"] == inner["request_id"] == request_id
    assert inner["message"] and isinstance(inner["message"], str)
    assert inner["param"] is None or inner["param"]
    return inner
