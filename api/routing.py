"""Which upstreams to try for an offer, in which order, and how often."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from api.calls import UpstreamFault
from api.errors import ApiError
from models.catalog import Catalog, Offer, Route

ATTEMPTS_MAX = 3
BACKOFF_FIRST_S = 0.5
BACKOFF_MAX_S = 5
JITTER = (0.8, 1.2)


def offer_for(catalog: Catalog, model: str, surface: str, *, allowed: bool) -> Offer:
    """Return the offer a request names. Raises ApiError 404, also when the key may not use it."""
    offer = catalog.offers.get(model)
    if offer is None or offer.surface != surface or not allowed:
        raise ApiError(
            404, "model_not_found",
            f"The model {model[:100]!r} does not exist or is not available to this key. See GET /v1/models.",
            param="model",
        )
    return offer


@dataclass(frozen=True, slots=True)
class Try:
    """Be one attempt: a route, after a pause in seconds."""

    route: Route
    pause_s: float


class Tries:
    """Decide, after each fault, whether and where to try again: at most three attempts a call.

    A route is tried again once when its fault says that this is safe and may help; then the next
    route has its turn. A fault of the caller's own input ends it.
    """

    def __init__(self, offer: Offer) -> None:
        self._routes = _ordered(offer)
        self._made = 0
        self._again = False
        self._route: Route | None = next(self._routes, None)

    def first(self) -> Try:
        """Return the first attempt."""
        self._made = 1
        return Try(self._route, 0)

    def after(self, fault: UpstreamFault) -> Try | None:
        """Return the next attempt, or None when the call has failed."""
        if fault.answer_status != 502 or self._made >= ATTEMPTS_MAX:
            return None
        pause_s = 0.0
        if fault.retry_same and not self._again:
            self._again = True
            if fault.status is not None:
                pause_s = min(BACKOFF_FIRST_S * 2 ** (self._made - 1), BACKOFF_MAX_S) * random.uniform(*JITTER)
        else:
            self._again = False
            self._route = next(self._routes, None)
            if self._route is None:
                return None
        self._made += 1
        return Try(self._route, pause_s)


def _ordered(offer: Offer) -> Iterator[Route]:
    """Yield routes by order; among equals, by chance in proportion to their weights."""
    left = list(offer.routes)
    while left:
        lowest = min(route.order for route in left)
        equals = [route for route in left if route.order == lowest]
        chosen = equals[0] if len(equals) == 1 else random.choices(equals, [r.weight for r in equals])[0]
        left.remove(chosen)
        yield chosen
