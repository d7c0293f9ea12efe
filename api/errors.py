"""Errors on the wire: the one table from what went wrong to status, type and code, and the one place
where an error body is made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from api.calls import UpstreamFault
from models.errors import (
    DatabaseUnavailable,
    IdempotencyKeyReused,
    InsufficientCredits,
    NotFound,
    RateLimited,
    UnknownKey,
)
from models.money import usd

TYPES = {
    "missing_api_key": "authentication_error",
    "invalid_api_key": "authentication_error",
    "insufficient_credits": "billing_error",
    "scope_denied": "permission_error",
    "rate_limit_exceeded": "rate_limit_error",
    "upstream_error": "upstream_error",
    "invalid_request": "invalid_request_error",
    "invalid_json": "invalid_request_error",
    "context_length_exceeded": "invalid_request_error",
    "unsupported_parameter": "invalid_request_error",
    "content_policy_violation": "invalid_request_error",
    "idempotency_key_reused": "invalid_request_error",
    "idempotency_not_replayable": "invalid_request_error",
    "method_not_allowed": "invalid_request_error",
    "payload_too_large": "invalid_request_error",
    "request_timeout": "invalid_request_error",
    "unsupported_media_type": "invalid_request_error",
    "model_not_found": "not_found_error",
    "not_found": "not_found_error",
    "already_exists": "conflict_error",
    "internal_error": "server_error",
    "service_unavailable": "server_error",
}

RATE_LIMIT_RETRY_AFTER_S = 60
UNAVAILABLE_RETRY_AFTER_S = 2
# RFC 9110, 15.5.2: a 401 says by which scheme it would be satisfied.
_CHALLENGE = {"WWW-Authenticate": "Bearer"}


class ApiError(Exception):
    """Be an error as the client sees it. `code` decides the type by the table above."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.headers = dict(headers or {})
        self.extra = dict(extra or {})

    def body(self, request_id: str) -> dict[str, Any]:
        """Return the error envelope.

        `request_id` stands in both places because the official SDKs show their users only the inner
        object, while the specification asks for it in the body.
        """
        return {
            "error": {
                "message": self.message,
                "type": TYPES[self.code],
                "param": self.param,
                "code": self.code,
                "request_id": request_id,
                **self.extra,
            },
            "request_id": request_id,
        }


def from_error(error: Exception, *, public_url: str) -> ApiError:
    """Return what the client is told of a domain error or an upstream's fault; 500 for a defect of ours."""
    match error:
        case ApiError():
            return error
        case UnknownKey():
            return invalid_key()
        case RateLimited():
            return too_many(f"Rate limit of {error.limit} requests a minute reached.")
        case InsufficientCredits():
            return _insufficient(error, public_url)
        case IdempotencyKeyReused():
            return ApiError(
                400, "idempotency_key_reused",
                "This Idempotency-Key was used before with a different request. Use a new key for a new request.",
                param="Idempotency-Key",
            )
        case NotFound():
            return ApiError(404, "not_found", str(error).capitalize() + ".")
        case DatabaseUnavailable():
            return unavailable("The service cannot reach its database at the moment. Nothing was charged.")
        case UpstreamFault():
            return _upstream(error)
        case _:
            return ApiError(
                500, "internal_error", "Something went wrong on our side. Nothing was charged for this request.",
            )


def missing_key() -> ApiError:
    """Return the 401 of a request without a key."""
    return ApiError(
        401, "missing_api_key",
        "No API key was sent. Send it in the header: Authorization: Bearer <API key>.", headers=_CHALLENGE,
    )


def invalid_key() -> ApiError:
    """Return the 401 of a key that is malformed, unknown, revoked or expired."""
    return ApiError(
        401, "invalid_api_key", "The API key is not valid: it is unknown, revoked or expired.", headers=_CHALLENGE
    )


def too_many(message: str) -> ApiError:
    """Return a 429."""
    return ApiError(
        429, "rate_limit_exceeded", f"{message} Retry after {RATE_LIMIT_RETRY_AFTER_S} seconds.",
        headers={"Retry-After": str(RATE_LIMIT_RETRY_AFTER_S)},
    )


def unavailable(message: str) -> ApiError:
    """Return a 503 that asks to come again shortly."""
    return ApiError(
        503, "service_unavailable", message, headers={"Retry-After": str(UNAVAILABLE_RETRY_AFTER_S)}
    )


def _insufficient(error: InsufficientCredits, public_url: str) -> ApiError:
    needed, there = f"${usd(error.needed)}", f"${usd(error.available)}"
    if error.reason == "key_limit":
        message = f"This API key's own spending limit leaves {there}, and this call may cost up to {needed}."
    elif error.reason == "disputed":
        message = "A payment of this account is disputed, so its credit is frozen until that is settled."
    elif error.reason == "debt":
        message = "A refund or a disputed payment took this account below zero, so nothing can be spent."
    else:
        message = f"This call may cost up to {needed}, and {there} of credit is available."
        if error.included_too_small:
            message += " Its input alone costs more than an included call may."
    message += f" Add credit at {public_url}/dashboard/billing/credits, or ask for fewer tokens (max_tokens)."
    return ApiError(
        402, "insufficient_credits", message,
        extra={"needed_usd": usd(error.needed), "available_usd": usd(error.available)},
    )


def _upstream(fault: UpstreamFault) -> ApiError:
    headers = {}
    extra: dict[str, Any] = {}
    if fault.answer_status == 502:
        extra["upstream"] = {"provider": fault.upstream, "status": fault.status}
        if fault.retry_after_s is not None:
            headers["Retry-After"] = str(fault.retry_after_s)
    return ApiError(
        fault.answer_status, fault.code, fault.message, param=fault.param, headers=headers, extra=extra
    )
