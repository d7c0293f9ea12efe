"""The table from what went wrong to what the client is told, against wire.md C1."""

from __future__ import annotations

import pytest

from api import errors
from api.calls import UpstreamFault
from api.errors import ApiError, from_error
from models.errors import (
    ConfigurationError,
    DatabaseUnavailable,
    IdempotencyKeyReused,
    InsufficientCredits,
    NotFound,
    RateLimited,
    UnknownKey,
)
from tests.api.envelope import TYPES

URL = "https://gateway.example"
SECRET = "sk-provider-secret http://10.0.0.7/"


@pytest.mark.parametrize(
    "error, status, code, kind, headers",
    [
        (UnknownKey("k"), 401, "invalid_api_key", "authentication_error", {"WWW-Authenticate": "Bearer"}),
        (errors.missing_key(), 401, "missing_api_key", "authentication_error", {"WWW-Authenticate": "Bearer"}),
        (InsufficientCredits(needed=5, available=3), 402, "insufficient_credits", "billing_error", {}),
        (NotFound("there is no call x"), 404, "not_found", "not_found_error", {}),
        (RateLimited("b", 20, 0), 429, "rate_limit_exceeded", "rate_limit_error", {"Retry-After": "60"}),
        (IdempotencyKeyReused("k"), 400, "idempotency_key_reused", "invalid_request_error", {}),
        (DatabaseUnavailable("down"), 503, "service_unavailable", "server_error", {"Retry-After": "2"}),
        (UpstreamFault("It failed.", status=500, detail=SECRET), 502, "upstream_error", "upstream_error", {}),
        (
            UpstreamFault("Busy.", status=429, retry_after_s=7),
            502, "upstream_error", "upstream_error", {"Retry-After": "7"},
        ),
        (
            UpstreamFault("Long.", status=400, answer_status=400, code="context_length_exceeded", param="messages"),
            400, "context_length_exceeded", "invalid_request_error", {},
        ),
        (ValueError(SECRET), 500, "internal_error", "server_error", {}),
        (ConfigurationError([SECRET]), 500, "internal_error", "server_error", {}),
        (RecursionError(SECRET), 500, "internal_error", "server_error", {}),
    ],
)
def test_what_the_client_is_told(
    error: Exception, status: int, code: str, kind: str, headers: dict[str, str]
) -> None:
    told = from_error(error, public_url=URL)
    assert (told.status, told.code, told.headers) == (status, code, headers)
    body = told.body("req_1")
    assert set(body) == {"error", "request_id"}
    assert {"message", "type", "param", "code", "request_id"} <= set(body["error"])
    assert body["request_id"] == body["error"]["request_id"] == "req_1"
    assert (body["error"]["type"], body["error"]["code"], body["error"]["param"]) == (kind, code, told.param)
    assert SECRET not in str(body)


def test_an_error_of_the_api_stays_what_it_is() -> None:
    error = ApiError(404, "model_not_found", "No.", param="model", headers={"a": "b"}, extra={"c": "d"})
    assert from_error(error, public_url=URL) is error
    assert error.body("req_1")["error"].items() >= {"param": "model", "c": "d", "message": "No."}.items()


@pytest.mark.parametrize(
    "reason, words",
    [("balance", "of credit is available"), ("key_limit", "own spending limit"), ("disputed", "frozen")],
)
def test_a_402_says_what_is_needed_what_is_there_and_where_to_add_it(reason: str, words: str) -> None:
    told = from_error(InsufficientCredits(needed=1_500_000, available=20, reason=reason), public_url=URL)
    assert words in told.message and f"{URL}/dashboard/billing/credits" in told.message
    assert told.extra == {"needed_usd": "1.500000", "available_usd": "0.000020"}


def test_a_402_says_when_an_included_call_was_too_small() -> None:
    told = from_error(InsufficientCredits(needed=9, available=0, included_too_small=True), public_url=URL)
    assert "included call" in told.message


def test_a_failed_provider_is_told_by_its_status_and_a_callers_mistake_is_not_blamed_on_it() -> None:
    told = from_error(UpstreamFault("It failed.", status=401), public_url=URL)
    assert told.extra == {"upstream": {"provider": None, "status": 401}}
    told = from_error(UpstreamFault("No.", status=400, answer_status=400, code="invalid_request"), public_url=URL)
    assert told.extra == {} and told.headers == {}


def test_every_code_has_its_type() -> None:
    for code, kind in errors.TYPES.items():
        if code == "already_exists":
            assert kind == "conflict_error"
        else:
            assert kind == TYPES.get(code, "invalid_request_error")
    assert set(TYPES) <= set(errors.TYPES)
