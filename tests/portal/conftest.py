"""A Tollgate that sells by Stripe, and the Stripe it sells by."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import aiohttp
import pytest

from tests.house import Houses, books_of
from tests.portal.shop import Shop
from tests.twins.stripe import SECRET_KEY, WEBHOOK_SECRET, FakeStripe


@pytest.fixture(scope="session")
def fakes() -> Iterator[dict[str, FakeStripe]]:
    """Keep a Stripe for each shared house."""
    running: dict[str, FakeStripe] = {}
    yield running
    for fake in running.values():
        fake.stop()


@pytest.fixture
async def shop(
    database_kind: str, houses: Houses, fakes: dict[str, FakeStripe], http: aiohttp.ClientSession,
) -> AsyncIterator[Shop]:
    """Give a shared Tollgate of two processes that sells by a Stripe which sends nothing by itself."""
    if database_kind not in fakes:
        fakes[database_kind] = FakeStripe().start()
    fake = fakes[database_kind]
    house = await houses.named(
        "selling", database_kind, processes=2, STRIPE_SECRET_KEY=SECRET_KEY, STRIPE_WEBHOOK_SECRET=WEBHOOK_SECRET,
        STRIPE_API_BASE=fake.url,
    )
    fake.webhook_url = f"{house.base_url}/webhooks/stripe"
    fake.delivers, fake.copies, fake.delay_s, fake.trouble = False, 1, 0.0, []
    async with books_of(house) as books:
        yield Shop(house, fake, books, http)
