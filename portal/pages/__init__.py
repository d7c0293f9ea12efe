"""The pages, one file each: `register(pages)` adds a page's views to the portal's blueprint."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from quart import Blueprint

from models.catalog import Catalog
from models.database import Database
from models.settings import Settings
from portal.guard import Guard
from portal.payments import Payments
from portal.tries import Tries

# Runs a chat call under a key, by its hash, and gives its status and what the API would have sent: the
# decoded chunks of a stream, or one whole answer, or one error.
Ask = Callable[[str, Mapping[str, Any]], Awaitable[tuple[int, AsyncIterator[dict[str, Any]]]]]


@dataclass(frozen=True, slots=True)
class Pages:
    """Hold what pages are made of."""

    blueprint: Blueprint
    guard: Guard
    database: Database
    catalog: Callable[[], Catalog]
    settings: Settings
    tries: Tries
    payments: Payments
    ask: Ask

    @property
    def shows_mail(self) -> bool:
        """Return whether mail is shown on a page instead of being sent."""
        return not self.settings.production and self.settings.mail_server is None


@dataclass(frozen=True, slots=True)
class Place:
    """Be one entry of the navigation; `letter` is its shortcut."""

    path: str
    name: str
    letter: str


NAVIGATION = (
    Place("/dashboard", "Overview", "o"),
    Place("/dashboard/api-keys", "API keys", "k"),
    Place("/dashboard/usage", "Usage", "u"),
    Place("/dashboard/billing/credits", "Credits", "c"),
    Place("/dashboard/models", "Models", "m"),
    Place("/dashboard/playground", "Playground", "p"),
    Place("/dashboard/settings", "Settings", "s"),
)
