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
    """Be one attempt: a route, after a pause in seconds, over a `fresh` connection or any."""

    route: Route
    pause_s: float
    fresh: bool = False


class Tries:
    """Decide, after each fault, whether and where to try again: at most three attempts a call.

    A route is tried again once when its fault says that this is safe and may help; then the next
    route has its turn. A provider that says when to come back is waited for when that is soon, one that
    limits our rate only when there is nobody else to ask. A fault of the caller's own input ends it.
    """

    def __init__(self, offer: Offer) -> None:
        self._routes = list(_ordered(offer))
        self._made = 0
        self._again = False
        self._route = self._routes.pop(0)

    def first(self) -> Try:
        """Return the first attempt."""
        self._made = 1
        return Try(self._route, 0)

    def after(self, fault: UpstreamFault) -> Try | None:
        """Return the next attempt, or None when the call has failed."""
        if fault.answer_status != 502 or self._made >= ATTEMPTS_MAX:
            return None
        soon = (fault.retry_after_s or 0) <= BACKOFF_MAX_S
        may_again = soon and not self._again
        pause_s = 0.0
        if may_again and (fault.retry_same or (fault.retry_after_s is not None and not self._routes)):
            self._again = True
            pause_s = self._pause_s(fault)
        elif self._routes:
            self._again = False
            self._route = self._routes.pop(0)
        else:
            return None
        self._made += 1
        # Where one idle connection was closed, the others may be on their way out, too.
        return Try(self._route, pause_s, fresh=fault.status is None)

    def _pause_s(self, fault: UpstreamFault) -> float:
        if fault.status is None:
            return 0.0
        backoff_s = min(BACKOFF_FIRST_S * 2 ** (self._made - 1), BACKOFF_MAX_S) * random.uniform(*JITTER)
        return max(backoff_s, fault.retry_after_s or 0)


def _ordered(offer: Offer) -> Iterator[Route]:
    """Yield routes by order; among equals, by chance in proportion to their weights."""
    left = list(offer.routes)
    while left:
        lowest = min(route.order for route in left)
        equals = [route for route in left if route.order == lowest]
        chosen = equals[0] if len(equals) == 1 else random.choices(equals, [r.weight for r in equals])[0]
        left.remove(chosen)
        yield chosen
