"""Our own defects: an error at any call to the database, seen from outside as one fixed sentence."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from quart import Quart

from models.database import Database, migrate
from models.settings import read_settings
from portal.app import create_app
from tests.api.envelope import whole
from tests.api.v1.test_chat import body
from tests.cast import Actor, enter, sign_in
from tests.house import CONFIGURATION

SECRETS = ("SELECT", "api_keys", "/srv/tollgate", "Traceback", "canary", "RuntimeError", ".py", "sqlite")
CALLS_MAX = 12


class _Defect(RuntimeError):
    """Be an error that nobody foresaw, with all in it that must not be told."""

    def __init__(self) -> None:
        super().__init__("canary: SELECT hash FROM api_keys failed in /srv/tollgate/models/api_key.py")


class _Breaker:
    """Let the n-th call to the database fail; count them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fail_at: int | None = None
        self.calls = 0
        for name in ("_run_group_once", "_read_now", "_in_transaction"):
            monkeypatch.setattr(Database, name, self._broken(getattr(Database, name)))

    def _broken(self, original: Any) -> Any:
        async def call(*arguments: Any, **named: Any) -> Any:
            self.calls += 1
            if self.fail_at is not None and self.calls >= self.fail_at:
                raise _Defect
            return await original(*arguments, **named)

        return call


@pytest.fixture
async def breaker(monkeypatch: pytest.MonkeyPatch) -> _Breaker:
    """Give the switch that makes the database fail."""
    return _Breaker(monkeypatch)


@pytest.fixture
async def app(
    breaker: _Breaker, database_kind: str, new_database, twin: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Quart]:
    """Give the application in this very process, started, with its loops at rest."""
    monkeypatch.setattr("portal.loops.Loops.start", _nothing)
    url = await new_database(database_kind)
    await migrate(url)
    configuration = tmp_path / "tollgate.toml"
    configuration.write_text(CONFIGURATION.format(twin=twin))
    app = create_app(read_settings({
        "DATABASE_URL": url, "DATA_DIR": str(tmp_path), "TOLLGATE_CONFIG": str(configuration),
    }))
    async with app.test_app():
        yield app


async def _nothing(*_: Any) -> None:
    """Do nothing."""


ASKED: list[tuple[str, str, dict[str, Any]]] = [
    ("POST", "/v1/chat/completions", {"json": body()}),
    ("POST", "/v1/chat/completions", {"json": body(stream=True)}),
    ("POST", "/v1/chat/completions", {"json": body(model="nothing")}),
    ("POST", "/v1/chat/completions", {"json": body(), "headers": {"Idempotency-Key": "1"}}),
    ("GET", "/v1/models", {}),
    ("GET", "/v1/models/twin", {}),
    ("GET", "/v1/usage", {}),
    ("GET", "/v1/usage/req_x", {}),
    ("GET", "/v1/balance", {}),
    ("GET", "/readyz", {}),
]


@pytest.mark.parametrize("which", range(len(ASKED)), ids=lambda n: f"{ASKED[n][0]} {ASKED[n][1]} {n}")
async def test_an_error_at_any_call_to_the_database_tells_nothing(
    app: Quart, breaker: _Breaker, which: int
) -> None:
    method, path, options = ASKED[which]
    actor = await enter(app.extensions["tollgate"].database, plan="wallet", credit_microusd=1_000_000)
    good, _ = await ask(app, method, path, actor, options)
    reached = []
    for fail_at in range(1, CALLS_MAX):
        app.extensions["tollgate"].authenticator.forget_all()
        app.extensions["tollgate"]._probe = None
        breaker.calls, breaker.fail_at = 0, fail_at
        status, raw = await ask(app, method, path, actor, options)
        reached.append(breaker.calls)
        breaker.fail_at = None
        for secret in SECRETS:
            assert secret.encode() not in raw, raw
        if breaker.calls < fail_at:
            assert status == good
            break
    else:
        pytest.fail(f"more than {CALLS_MAX} calls to the database for one request")
    assert len(reached) > 1, "nothing was broken"


async def ask(
    app: Quart, method: str, path: str, actor: Actor, options: dict[str, Any]
) -> tuple[int, bytes]:
    """Ask the application, check what every failure must look like, and return status and body."""
    headers = {**options.get("headers", {}), **actor.headers}
    async with asyncio.timeout(30):
        answer = await app.test_client().open(path, method=method, headers=headers, json=options.get("json"))
        raw = await answer.get_data(as_text=False)
    assert answer.headers["x-content-type-options"] == "nosniff"
    if answer.status_code >= 400 and path.startswith("/v1"):
        whole(raw, answer.headers)
    elif answer.content_type.startswith("text/event-stream") and b"[DONE]" not in raw:
        error = json.loads(raw.strip().rpartition(b"data: ")[2])["error"]
        assert error["code"] in ("internal_error", "service_unavailable")
    return answer.status_code, raw


async def test_the_edge_answers_when_nothing_else_does(app: Quart, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: Any) -> None:
        raise _Defect

    monkeypatch.setattr(app, "handle_request", broken)
    answer = await app.test_client().get("/v1/models")
    raw = await answer.get_data(as_text=False)
    assert answer.status_code == 500 and whole(raw, answer.headers)["code"] == "internal_error"
    assert not [secret for secret in SECRETS if secret.encode() in raw]


PAGES = (
    "/dashboard", "/dashboard/latest", "/dashboard/api-keys", "/dashboard/usage", "/dashboard/usage/live",
    "/dashboard/billing/credits", "/dashboard/models", "/dashboard/playground", "/dashboard/settings",
    "/dashboard/settings/passkeys", "/dashboard/settings/second-factor", "/verify/x", "/reset/x", "/login",
)
PAGE_CALLS_MAX = 25


@pytest.mark.parametrize("path", PAGES)
async def test_a_page_that_fails_at_any_call_to_the_database_tells_nothing(
    app: Quart, breaker: _Breaker, path: str
) -> None:
    books = app.extensions["tollgate"].database
    cookies = await sign_in(books, await enter(books, plan="wallet", credit_microusd=1_000_000))
    headers = {"Cookie": "; ".join(f"{name}={value}" for name, value in cookies.items()), "Host": "localhost"}
    broken = 0
    for fail_at in range(1, PAGE_CALLS_MAX):
        breaker.calls, breaker.fail_at = 0, fail_at
        answer = await app.test_client().get(path, headers=headers)
        raw = await answer.get_data(as_text=False)
        breaker.fail_at = None
        for name in ("x-content-type-options", "content-security-policy", "referrer-policy", "x-request-id"):
            assert name in answer.headers, (path, fail_at, name)
        assert answer.headers["cache-control"] == "no-store"
        # Of a page that stands, its own words are no news.
        for secret in SECRETS if answer.status_code == 500 else ("canary", "Traceback", "RuntimeError"):
            assert secret.encode() not in raw, (path, fail_at, secret)
        broken += answer.status_code == 500
        if breaker.calls < fail_at:
            assert answer.status_code < 500
            break
    else:
        pytest.fail(f"more than {PAGE_CALLS_MAX} calls to the database for one page")
    assert broken, "nothing was broken"
