"""The models: what is offered, at which price, with which abilities, found by words and filters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlencode

from quart import Response, g, request

from models.catalog import Catalog, Offer
from models.plan import Plan
from portal.answer import page, wants_fragment
from portal.pages import Pages

PATH = "/dashboard/models"
SHOWN_AT_ONCE = 50
WORDS_LENGTH_MAX = 100
INCLUDED, PAID, NOT_IN_PLAN = "included", "paid", "not in plan"
KINDS = {INCLUDED: "good", PAID: "", NOT_IN_PLAN: "warn"}
TERMS = [("", "Any"), (INCLUDED, "Included calls count"), (PAID, "Credit alone"), (NOT_IN_PLAN, "Not in your plan")]
# Prices in the order of a table's columns, with what each is called there.
PRICES = {
    "input_per_million": "Input", "cached_input_per_million": "Cached", "cache_write_per_million": "Cache write",
    "output_per_million": "Output", "per_call": "A call", "per_image": "An image", "per_minute": "A minute",
    "per_million_characters": "Characters",
}


@dataclass(frozen=True, slots=True)
class OfferLine:
    """Show one model. `prices` are decimal strings of dollars, one a column, None where there is none.

    `steps` are the prompt lengths in tokens beyond which it costs more.
    """

    id: str
    name: str
    owner: str
    context_tokens: int | None
    output_tokens_max: int
    prices: tuple[str | None, ...]
    steps: tuple[int, ...]
    abilities: tuple[str, ...]
    terms: str

    @property
    def kind(self) -> str:
        """Return the kind of the dot beside the terms."""
        return KINDS[self.terms]


def register(pages: Pages) -> None:
    """Add the page."""

    @pages.blueprint.get(PATH)
    async def models() -> Response:
        catalog = pages.catalog()
        asked = {
            "q": request.args.get("q", "")[:WORDS_LENGTH_MAX], "can": request.args.get("can", ""),
            "plan": request.args.get("plan", ""),
        }
        lines = offer_lines(catalog, catalog.plans.get(g.session.plan))
        found = [line for line in lines if _matches(line, **asked)]
        start = _start(request.args.get("from", ""), len(found))
        end = start + SHOWN_AT_ONCE
        abilities = sorted({ability for line in lines for ability in line.abilities})
        return await page(
            "models/_offers.html" if wants_fragment() else "models/index.html",
            offers=found[start:end], columns=price_columns(catalog), asked=asked, all_count=len(lines),
            found_count=len(found), start=start, abilities=[("", "Any"), *((name, name) for name in abilities)],
            terms=TERMS, backward=_link(asked, start - SHOWN_AT_ONCE) if start else None,
            forward=_link(asked, end) if end < len(found) else None,
        )


def price_columns(catalog: Catalog) -> list[str]:
    """Return what the columns of the prices are called: those that any offer has a price in."""
    return [PRICES[key] for key in _used_prices(catalog)]


def offer_lines(catalog: Catalog, plan: Plan | None) -> list[OfferLine]:
    """Return every offer as a line, by id, on the terms of a plan."""
    used = _used_prices(catalog)
    return [_line(catalog.offers[offer_id], used, plan) for offer_id in sorted(catalog.offers)]


def _used_prices(catalog: Catalog) -> list[str]:
    used = {key for offer in catalog.offers.values() for key in offer.rates.to_usd()}
    return [key for key in PRICES if key in used]


def _line(offer: Offer, columns: Sequence[str], plan: Plan | None) -> OfferLine:
    prices = offer.rates.to_usd()
    return OfferLine(
        id=offer.id,
        name=offer.name,
        owner=offer.owned_by,
        context_tokens=offer.context_tokens,
        output_tokens_max=offer.max_output_tokens,
        prices=tuple(prices.get(key) for key in columns),
        steps=tuple(tier.start_tokens for tier in offer.rates.tiers),
        abilities=offer.capabilities,
        terms=_terms(offer, plan),
    )


def _terms(offer: Offer, plan: Plan | None) -> str:
    if plan is None or not plan.includes(offer.scope):
        return NOT_IN_PLAN
    return INCLUDED if plan.included_calls_per_month else PAID


def _matches(line: OfferLine, q: str, can: str, plan: str) -> bool:
    text = f"{line.id} {line.name} {line.owner}".lower()
    return (
        all(word in text for word in q.lower().split())
        and (not can or can in line.abilities)
        and (not plan or plan == line.terms)
    )


def _start(text: str, count: int) -> int:
    """Return where a page starts: what the address says, on a page's edge and within what there is."""
    if not (text.isascii() and text.isdigit() and len(text) < 10) or int(text) >= count:
        return 0
    return int(text) // SHOWN_AT_ONCE * SHOWN_AT_ONCE


def _link(asked: dict[str, str], start: int) -> str:
    return f"{PATH}?{urlencode({**{name: value for name, value in asked.items() if value}, 'from': start})}"
