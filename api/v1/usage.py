"""Usage: the account's calls as rows, and the final figure of one call."""

from __future__ import annotations

from collections.abc import Mapping

from quart import Blueprint, Response, g, request

from api import listing
from api.errors import ApiError
from api.v1.services import ANY_KEY, Services, answer
from api.wire import UsageList, UsageRow
from models import call as calls
from models.database import Row
from models.money import usd

STATES = ("open", "settled", "released", "expired", "refused")
TIME_MAX_S = 10**11


def register(blueprint: Blueprint, services: Services) -> None:
    """Add the usage routes."""

    @blueprint.get("/usage")
    @services.need(ANY_KEY)
    async def list_usage() -> Response:
        page = listing.page_of(request.args)
        rows = await calls.recent(
            services.database, g.exchange.caller.account_id, _filter(request.args), limit=page.limit + 1,
            after=page.after, before=page.before, ascending=page.ascending,
        )
        has_more = len(rows) > page.limit
        # A page before a row is cut at its far end, which is its beginning.
        kept = rows[-page.limit :] if page.before else rows[: page.limit]
        data = [usage_row(row) for row in kept]
        first, last = (data[0].id, data[-1].id) if data else ("", "")
        return answer(UsageList("list", data, first, last, has_more))

    @blueprint.get("/usage/<request_id>")
    @services.need(ANY_KEY)
    async def retrieve_usage(request_id: str) -> Response:
        row = await calls.find(services.database, g.exchange.caller.account_id, listing.plain(request_id))
        return answer(usage_row(row))


def usage_row(row: Row) -> UsageRow:
    """Return a call's row as the wire shows it."""
    prompt = row["input_tokens"] + row["cached_input_tokens"] + row["cache_write_tokens"]
    running = row["state"] == "open"
    completion = row["checkpoint_output_tokens"] if running else row["output_tokens"]
    return UsageRow(
        id=row["id"],
        object="usage",
        request_id=row["id"],
        created_at=row["created_at_ms"] // 1000,
        finished_at=None if row["finished_at_ms"] is None else row["finished_at_ms"] // 1000,
        state=row["state"],
        status=row["status"],
        error_code=row["error_code"],
        surface=row["surface"],
        path=row["path"],
        model=row["offer"],
        key_id=row["key_id"],
        stream=bool(row["streamed"]),
        prompt_tokens=prompt,
        cached_tokens=row["cached_input_tokens"],
        cache_write_tokens=row["cache_write_tokens"],
        completion_tokens=completion,
        reasoning_tokens=row["reasoning_tokens"],
        total_tokens=prompt + completion,
        latency_ms=row["latency_ms"],
        first_byte_ms=row["first_byte_ms"],
        finish_reason=row["finish_reason"],
        cost_usd=usd(row["charged_microusd"]),
        cost_microusd=row["charged_microusd"],
        charged_from=row["charged_from"],
        held_usd=usd(row["hold_microusd"] if running else 0),
        estimated=bool(row["estimated"]),
        repeated=row["repeated"],
    )


def _filter(query: Mapping[str, str]) -> calls.Filter:
    state = query.get("state") or None
    if state is not None and state not in STATES:
        raise ApiError(400, "invalid_request", f"state must be one of {', '.join(STATES)}.", param="state")
    start = listing.whole_number(query, "from", None, least=0, most=TIME_MAX_S)
    end = listing.whole_number(query, "until", None, least=0, most=TIME_MAX_S)
    return calls.Filter(
        key_id=listing.plain(query.get("key_id")) or None,
        offer=listing.plain(query.get("model")) or None,
        status=listing.whole_number(query, "status", None, least=100, most=599),
        state=state,
        from_ms=None if start is None else start * 1000,
        until_ms=None if end is None else end * 1000,
    )

