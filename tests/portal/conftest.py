"""A Tollgate that sells by Stripe, and the Stripe it sells by."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from models.database import Database
from tests.house import House
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
    database_kind: str, houses: dict[str, House], fakes: dict[str, FakeStripe], new_database, twin: str, http,
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Shop]:
    """Give a shared Tollgate of two processes that sells by a Stripe which sends nothing by itself."""
    kind = f"selling {database_kind}"
    if kind not in houses:
        fakes[kind] = FakeStripe().start()
        houses[kind] = House(
            tmp_path_factory.mktemp("selling"), await new_database(database_kind), twin, processes=2,
            STRIPE_SECRET_KEY=SECRET_KEY, STRIPE_WEBHOOK_SECRET=WEBHOOK_SECRET, STRIPE_API_BASE=fakes[kind].url,
        ).start()
        fakes[kind].webhook_url = f"{houses[kind].base_url}/webhooks/stripe"
    fake = fakes[kind]
    fake.delivers, fake.copies, fake.delay_s, fake.trouble = False, 1, 0.0, []
    books = Database(houses[kind].database_url)
    await books.open()
    yield Shop(houses[kind], fake, books, http)
    await books.close()
