"""The home page: what this is, a first call with the reader's own address, the models and their prices."""

from __future__ import annotations

from quart import Response

from models.plan import PLAN_OF_NEW_ACCOUNTS
from portal.answer import page
from portal.format import usd
from portal.guard import for_anyone
from portal.pages import Pages
from portal.pages.api_keys import example_offer
from portal.pages.models import offer_lines, price_columns

OFFERS_SHOWN = 24
# The sample of the dashboard: one account's thirty days, in cents, and its last calls.
SAMPLE_CENTS = (
    61, 38, 112, 27, 99, 74, 29, 104, 25, 97, 31, 36, 103, 185, 44, 66, 156, 229, 148, 113, 247, 32, 228, 96, 61,
    54, 106, 243, 73, 186,
)
SAMPLE_CALLS = (
    ("10:42:07", "prod", 1_204, 318, "0.001934", "0.8 s", "200 served", "good"),
    ("10:42:05", "prod", 18_440, 1_022, "0.070650", "6.1 s", "200 served", "good"),
    ("10:41:58", "staging", 96, 0, "0.000000", "0.2 s", "429 limited", "warn"),
    ("10:41:51", "prod", 2_880, 611, "0.004131", "1.3 s", "200 served", "good"),
)


def register(pages: Pages) -> None:
    """Add the page."""

    @pages.blueprint.get("/")
    @for_anyone
    async def home() -> Response:
        catalog = pages.catalog()
        lines = offer_lines(catalog, None)
        free = catalog.plans.get(PLAN_OF_NEW_ACCOUNTS)
        bars = [(f"Day {n}", cents, usd(cents * 10_000)) for n, cents in enumerate(SAMPLE_CENTS, 1)]
        return await page(
            "home/index.html", base_url=f"{pages.settings.public_url}/v1", is_demo=catalog.is_demo,
            example=example_offer(catalog), offers=lines[:OFFERS_SHOWN], more=max(len(lines) - OFFERS_SHOWN, 0),
            columns=price_columns(catalog), free_calls=free.included_calls_per_month if free else 0, bars=bars,
            sample=SAMPLE_CALLS, sample_offers=[line.id for line in lines[:2]],
        )
