"""Scopes: each one against each route there is. A route that is not in this table fails, and is closed."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import pytest
from quart import Quart

from models.database import Database
from models.plan import SURFACES
from models.settings import read_settings
from portal.app import create_app
from tests.api.envelope import refused
from tests.api.v1.test_chat import body
from tests.cast import enter
from tests.house import House

ANY_KEY = "any live key"
# What lets a key in: the scopes by which it may. A POST writes, so `chat:read` does not do for it.
ALLOWED: dict[tuple[str, str], set[str] | str] = {
    ("POST", "/v1/chat/completions"): {"chat"},
    ("POST", "/v1/public/chat"): {"chat"},
    ("GET", "/v1/models"): {"models", "models:read"},
    ("GET", "/v1/models/<path:model_id>"): {"models", "models:read"},
    ("GET", "/v1/usage"): ANY_KEY,
    ("GET", "/v1/usage/<request_id>"): ANY_KEY,
    ("GET", "/v1/balance"): ANY_KEY,
}


@pytest.fixture
def app(tmp_path: Path) -> Quart:
    """Give the application, for its routes alone."""
    return create_app(read_settings({"DATA_DIR": str(tmp_path)}))


def routes(app: Quart) -> set[tuple[str, str]]:
    """Return method and rule of everything under /v1."""
    return {
        (method, rule.rule) for rule in app.url_map.iter_rules() if rule.rule.startswith("/v1")
        for method in rule.methods - {"HEAD", "OPTIONS"}
    }


def test_every_route_stands_in_the_table(app: Quart) -> None:
    assert routes(app) == set(ALLOWED)


async def test_a_route_that_declares_nothing_is_closed(app: Quart) -> None:
    """Shown on a route that was forgotten: nothing is asked of its caller, and so nobody is let in."""

    async def forgotten() -> str:
        return "open to the world"

    app.add_url_rule("/v1/forgotten", "v1.forgotten", forgotten)
    answer = await app.test_client().get("/v1/forgotten", headers={"Authorization": "Bearer x"})
    raw = await answer.get_data(as_text=True)
    assert answer.status_code == 403 and "scope_denied" in raw and "open to the world" not in raw


async def test_each_scope_opens_its_routes_and_no_other(
    house: House, house_books: Database, http: aiohttp.ClientSession
) -> None:
    for scope in [*SURFACES, *(f"{surface}:read" for surface in SURFACES), "*", "nonsense"]:
        actor = await enter(house_books, "scoped", plan="wallet", credit_microusd=1_000_000, scopes=[scope])
        for (method, rule), allowed in ALLOWED.items():
            path = rule.replace("<path:model_id>", "twin").replace("<request_id>", "req_x")
            asked = {"json": body()} if method == "POST" else {}
            async with http.request(method, house.base_url + path, headers=actor.headers, **asked) as answer:
                if allowed == ANY_KEY or scope in allowed:
                    assert answer.status in (200, 404), (scope, method, path)
                else:
                    await refused(answer, 403, "scope_denied")
            async with http.request(method, house.base_url + path, **asked) as answer:
                await refused(answer, 401, "missing_api_key")
