"""A shop: a house that sells by Stripe, its books, and a hand on what Stripe sends."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

import aiohttp

from models import ledger, top_up, wallet
from models.database import Database
from models.settings import read_settings
from models.top_up import TopUp
from portal.payments import Payments, processor_of
from tests.cast import Actor
from tests.house import House
from tests.twins.stripe import FakeStripe, Thing, deliver

PRICE = 20_000_000
SENT_AGAIN_S = 90


@dataclass(frozen=True, slots=True)
class Shop:
    """Hold a house, its Stripe and its books."""

    house: House
    stripe: FakeStripe
    books: Database
    http: aiohttp.ClientSession

    @property
    def url(self) -> str:
        """Return where events go."""
        return f"{self.house.base_url}/webhooks/stripe"

    async def order(self, actor: Actor, amount_microusd: int = PRICE) -> TopUp:
        """Order credit, up to the checkout, in a process beside the house."""
        settings = read_settings(self.house.environ)
        selling = Payments(self.books, settings, processor_of(settings))
        try:
            return await selling.begin(actor.account.id, amount_microusd)
        finally:
            await selling.close()

    async def send(self, event: Thing | bytes, **how: Any) -> int:
        """Send an event once and return the status of the answer."""
        return await deliver(self.http, self.url, event, **how)

    async def insist(self, event: Thing) -> None:
        """Send an event until it is taken, as Stripe does."""
        until = time.monotonic() + SENT_AGAIN_S
        while time.monotonic() < until:
            status = await self.send(event)
            if status == 200:
                return
            assert status in (0, 503), status
            await asyncio.sleep(0.1)
        raise AssertionError("the event was never taken")

    async def state(self, ordered: TopUp) -> TopUp:
        """Return an order as it stands."""
        return await top_up.find(self.books, ordered.account_id, ordered.id)

    async def posted(self, actor: Actor) -> int:
        """Return somebody's balance."""
        return (await wallet.balance(self.books, actor.account.id)).posted

    async def is_sound(self) -> bool:
        """Return whether the books add up."""
        return not (await ledger.audit(self.books, full=True)).violations
