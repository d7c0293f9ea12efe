"""The /v1 blueprint: one file a surface, one line each here."""

from __future__ import annotations

from quart import Blueprint, Response, g

from api.v1 import balance, chat, models, usage
from api.v1.services import BLUEPRINT, Services, refused, respond

SURFACES = [chat, models, usage, balance]

# The SDKs' headers by name: `*` never covers Authorization (Fetch standard, CORS protocol).
_STAINLESS = (
    "arch", "async", "custom-poll-interval", "helper-method", "lang", "os", "package-version",
    "poll-helper", "read-timeout", "retry-count", "runtime", "runtime-version", "timeout",
)
CORS_REQUEST_HEADERS = ", ".join([
    "authorization", "content-type", "x-api-key", "api-key", "idempotency-key", "openai-organization",
    "openai-project", *(f"x-stainless-{name}" for name in _STAINLESS),
])
CORS_ANSWER_HEADERS = ", ".join([
    "x-request-id", "retry-after", "x-ratelimit-limit-requests", "x-ratelimit-remaining-requests",
    "x-ratelimit-reset-requests", "x-included-remaining", "x-tollgate-cost", "x-tollgate-max-tokens",
    "x-upstream-model", "idempotent-replayed", "x-original-request-id", "x-should-retry",
])
PREFLIGHT_KEPT_S = 7200
# On every answer of the API, whichever origin asks.
CORS_HEADERS = [
    (b"access-control-allow-origin", b"*"),
    (b"access-control-expose-headers", CORS_ANSWER_HEADERS.encode()),
]


def create_blueprint(services: Services) -> Blueprint:
    """Return the blueprint of everything under /v1."""
    blueprint = Blueprint(BLUEPRINT, __name__, url_prefix="/v1")
    blueprint.before_request(services.authorise_view)
    for surface in SURFACES:
        surface.register(blueprint, services)

    @blueprint.errorhandler(Exception)
    async def refuse(error: Exception) -> Response:
        return respond(await refused(services, g.exchange, error))

    return blueprint


def preflight() -> Response:
    """Answer a browser's question whether it may call."""
    response = Response(b"", 204)
    del response.headers["content-type"]
    response.headers["access-control-allow-methods"] = "GET, POST, PATCH, DELETE, OPTIONS"
    response.headers["access-control-allow-headers"] = CORS_REQUEST_HEADERS
    response.headers["access-control-max-age"] = str(PREFLIGHT_KEPT_S)
    return response
