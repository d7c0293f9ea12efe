"""The home page: what this is, a first call with the reader's own address, the models and their prices."""

from __future__ import annotations

from dataclasses import dataclass

from quart import Response

from models.catalog import Catalog, Offer
from portal.answer import page
from portal.guard import for_anyone
from portal.pages import Pages

ABSENT = "–"


@dataclass(frozen=True, slots=True)
class OfferLine:
    """Show one model; prices are decimal strings of dollars."""

    id: str
    context: str
    input: str
    cached: str
    output: str
    a_call: str


@dataclass(frozen=True, slots=True)
class Home:
    """Hold what the page shows."""

    base_url: str
    is_demo: bool
    example: str
    offers: list[OfferLine]


def register(pages: Pages) -> None:
    """Add the page."""

    @pages.blueprint.get("/")
    @for_anyone
    async def home() -> Response:
        return await page("home/index.html", home=_home(pages.catalog(), pages.settings.public_url))


def _home(catalog: Catalog, public_url: str) -> Home:
    offers = sorted(catalog.offers.values(), key=lambda offer: offer.id)
    return Home(
        base_url=f"{public_url}/v1",
        is_demo=catalog.is_demo,
        example=offers[0].id,
        offers=[_line(offer) for offer in offers],
    )


def _line(offer: Offer) -> OfferLine:
    prices = offer.rates.to_usd()
    return OfferLine(
        id=offer.id,
        context=f"{offer.context_tokens:,}" if offer.context_tokens else ABSENT,
        input=prices.get("input_per_million", ABSENT),
        cached=prices.get("cached_input_per_million", ABSENT),
        output=prices.get("output_per_million", ABSENT),
        a_call=prices.get("per_call", ABSENT),
    )
