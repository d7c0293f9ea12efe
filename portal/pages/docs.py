"""The documentation: the first call, streaming, errors, limits, what is billed, all with the reader's address."""

from __future__ import annotations

from quart import Response

from portal.answer import page
from portal.guard import for_anyone
from portal.pages import Pages
from portal.pages.api_keys import example_offer

# Status, code, what it means and what to do. Where money could have moved, the text says whether it did.
ERRORS = (
    (400, "invalid_request", "A field is missing, unknown or out of range; param names it. Correct the request."),
    (400, "invalid_json", "The body is not JSON, or could be read in two ways."),
    (400, "context_length_exceeded", "The prompt is longer than the model's context. Shorten it."),
    (400, "unsupported_parameter", "The model, or this service, does not have that parameter. Leave it out."),
    (400, "content_policy_violation", "The provider refused what the prompt asks for. Nothing was charged."),
    (400, "idempotency_key_reused", "This Idempotency-Key came with another request before. Use a new one."),
    (400, "idempotency_not_replayable", "The first answer was charged, but was too large to keep."),
    (401, "missing_api_key", "Send the header Authorization: Bearer and your key."),
    (401, "invalid_api_key", "The key is unknown, revoked or expired. Create another."),
    (402, "insufficient_credits", "Add credit, raise the key's limit, or want fewer tokens. Nothing was charged."),
    (403, "scope_denied", "The key or the plan does not have this, or the key may not be used from here."),
    (404, "model_not_found", "There is no such model for this key. GET /v1/models lists them."),
    (404, "not_found", "You have nothing of that id, or the path is wrong."),
    (405, "method_not_allowed", "The path exists, the method does not."),
    (408, "request_timeout", "The body came too slowly. Send it again."),
    (409, "already_exists", "There is one of that name already."),
    (413, "payload_too_large", "The body is too large."),
    (415, "unsupported_media_type", "Send application/json."),
    (429, "rate_limit_exceeded", "Wait as many seconds as Retry-After says. Nothing was charged."),
    (500, "internal_error", "Our fault, written down under the request id. Nothing was charged."),
    (502, "upstream_error", "The provider failed, after retries. Only what was delivered before is charged."),
    (503, "service_unavailable", "Busy or restarting. Retry after Retry-After. Nothing was charged."),
)


def register(pages: Pages) -> None:
    """Add the page."""

    @pages.blueprint.get("/docs")
    @for_anyone
    async def docs() -> Response:
        catalog = pages.catalog()
        return await page(
            "docs/index.html", base_url=f"{pages.settings.public_url}/v1", example=example_offer(catalog),
            is_demo=catalog.is_demo, errors=ERRORS, plans=list(catalog.plans.values()),
        )
