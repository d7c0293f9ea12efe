"""Browsers: a preflight that names every header the SDKs send, answers any origin may read, no cookies."""

from __future__ import annotations

import re

import aiohttp
import pytest

from tests.api.v1.test_chat import body
from tests.cast import Actor
from tests.conftest import missing
from tests.house import ROOT, House

ORIGIN = {"Origin": "https://app.example"}


def names(header: str) -> set[str]:
    """Return the names in a header's list."""
    return {name.strip().lower() for name in header.split(",")}


@pytest.mark.parametrize(
    "path",
    ["/v1/chat/completions", "/v1/public/chat", "/v1/models", "/v1/models/a%2Fb", "/v1/usage/", "/v1/nothing"],
)
async def test_a_preflight_lists_headers_by_name(house: House, http: aiohttp.ClientSession, path: str) -> None:
    asked = {
        **ORIGIN, "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
    }
    async with http.options(house.base_url + path, headers=asked, allow_redirects=False) as answer:
        assert answer.status == 204
        assert await answer.read() == b""
        allowed = names(answer.headers["access-control-allow-headers"])
        assert answer.headers["access-control-allow-origin"] == "*"
        assert {"get", "post", "patch", "delete"} <= names(answer.headers["access-control-allow-methods"])
        assert 0 < int(answer.headers["access-control-max-age"]) <= 86400
        assert answer.headers["x-request-id"].startswith("req_")
        assert "set-cookie" not in answer.headers
        assert "access-control-allow-credentials" not in answer.headers
    assert "*" not in allowed  # it would not cover Authorization
    assert allowed >= {
        "authorization", "content-type", "x-api-key", "api-key", "idempotency-key", "openai-organization",
        "openai-project",
    }


async def test_a_preflight_covers_what_the_node_sdk_sends(house: House, http: aiohttp.ClientSession) -> None:
    sources = ROOT / "tests/node/node_modules/openai"
    if not sources.exists():
        missing("the Node SDK in tests/node")
    sent = set()
    for file in (*sources.glob("*.mjs"), *sources.glob("internal/*.mjs"), *sources.glob("lib/*.mjs")):
        sent |= {found.lower() for found in re.findall(r"['\"](x-stainless-[a-z-]+)['\"]", file.read_text(), re.I)}
    assert "x-stainless-lang" in sent
    async with http.options(f"{house.base_url}/v1/models", headers=ORIGIN) as answer:
        assert sent <= names(answer.headers["access-control-allow-headers"])


async def test_every_answer_may_be_read_by_any_origin(
    house: House, alice: Actor, http: aiohttp.ClientSession
) -> None:
    statuses = []
    for method, path, asked, headers in (
        ("POST", "/v1/chat/completions", body(), alice.headers),
        ("POST", "/v1/chat/completions", body(stream=True), alice.headers),
        ("POST", "/v1/chat/completions", body(n=0), alice.headers),
        ("POST", "/v1/chat/completions", body("status:500"), alice.headers),
        ("POST", "/v1/chat/completions", body(), {}),
        ("GET", "/v1/models", None, alice.headers),
        ("DELETE", "/v1/models", None, alice.headers),
        ("GET", "/v1/nothing", None, {}),
        ("GET", "/openapi.json", None, {}),
    ):
        async with http.request(
            method, house.base_url + path, json=asked, headers={**ORIGIN, "Cookie": "a=b", **headers}
        ) as answer:
            await answer.read()
            statuses.append(answer.status)
            assert answer.headers["access-control-allow-origin"] == "*"
            assert "access-control-allow-credentials" not in answer.headers
            assert "set-cookie" not in answer.headers
            assert names(answer.headers["access-control-expose-headers"]) >= {
                "x-request-id", "retry-after", "x-ratelimit-limit-requests", "x-ratelimit-remaining-requests",
                "x-ratelimit-reset-requests", "x-tollgate-cost", "x-included-remaining",
            }
    assert statuses == [200, 200, 400, 502, 401, 200, 405, 404, 200]


async def test_every_header_of_ours_is_exposed(house: House, alice: Actor, http: aiohttp.ClientSession) -> None:
    for _ in range(2):  # the second is a replay
        async with http.post(
            f"{house.base_url}/v1/chat/completions", json=body(),
            headers={**ORIGIN, "Idempotency-Key": "1", **alice.headers},
        ) as answer:
            ours = {name.lower() for name in answer.headers if name.lower().startswith(("x-", "idem"))}
            hidden = ours - names(answer.headers["access-control-expose-headers"])
            assert hidden <= {"x-content-type-options", "x-accel-buffering"}
    assert answer.headers["idempotent-replayed"] == "true"
