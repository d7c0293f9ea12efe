"""The headers of every answer: every route there is, in every state it can answer in."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp

from api.direct import dropping
from models.settings import read_settings
from portal.app import create_app
from portal.edge import HSTS_KEPT_S, Policy, guarded
from tests.api.v1.test_chat import body
from tests.cast import Actor
from tests.house import House

SECURE = {"PUBLIC_URL": "https://gateway.example", "SECRET_KEY": "s" * 32, "MAIL_TO_CONSOLE": "yes"}
NO_SCRIPT = "default-src 'none'"


def routes(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield method and path of every route of the application, a new one without being named here."""
    for rule in create_app(read_settings({"DATA_DIR": str(folder)})).url_map.iter_rules():
        path = re.sub(r"<[^>]+>", "x", rule.rule)
        yield from ((method, path) for method in sorted(rule.methods | {"OPTIONS", "DELETE"}))


def is_api(path: str) -> bool:
    """Return whether a path belongs to the API."""
    return path.startswith("/v1")


def assert_dressed(answer: aiohttp.ClientResponse, *, secure: bool = False) -> None:
    """Assert that an answer has what every answer has."""
    path, headers = answer.url.path, answer.headers
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cross-origin-opener-policy"] == "same-origin"
    assert NO_SCRIPT in headers["content-security-policy"]
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert "unsafe" not in headers["content-security-policy"]
    open_to_all = is_api(path) or path == "/openapi.json"
    assert headers["cross-origin-resource-policy"] == ("cross-origin" if open_to_all else "same-origin")
    assert headers.get("access-control-allow-origin") == ("*" if open_to_all else None)
    assert "access-control-allow-credentials" not in headers
    cookies = headers.getall("set-cookie", [])
    assert all("httponly" in cookie.lower() and "samesite=lax" in cookie.lower() for cookie in cookies)
    assert not (cookies and is_api(path))
    assert headers["x-request-id"].startswith("req_")
    assert "server" not in headers and "x-powered-by" not in headers
    if is_api(path):
        assert headers.getall("cache-control") == ["private, no-store"]
        assert {"authorization", "x-api-key", "api-key"} <= set(re.split(r",\s*", headers["vary"].lower()))
    assert headers.get("strict-transport-security") == (f"max-age={HSTS_KEPT_S}" if secure else None)
    # No header twice: two that disagree are read in two ways.
    assert len({name.lower() for name in headers}) == len(headers)


async def test_every_route_answers_with_every_header(
    house: House, alice: Actor, http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    """With a key and without: 2xx, 4xx and, of unreadable bodies, 400 and 415."""
    walked = list(routes(tmp_path))
    assert len(walked) > 30
    for method, path in walked:
        for headers in ({}, alice.headers):
            async with http.request(method, house.base_url + path, data=b"{", headers=headers) as answer:
                await answer.read()
                assert answer.status < 500, (method, path)
                assert_dressed(answer)
                if answer.status == 204:
                    assert "content-type" not in answer.headers


async def test_answers_of_every_other_kind_have_every_header(
    house: House, alice: Actor, http: aiohttp.ClientSession
) -> None:
    chat, seen = "/v1/chat/completions", []
    async with http.get(house.base_url + "/") as answer:
        [sheet, *_] = re.findall(r'href="(/static/[^"]+)"', await answer.text())
    for method, path, asked, key in (
        ("POST", chat, body(), {}),
        ("POST", chat, body(), alice.headers),
        ("POST", chat, body(stream=True), alice.headers),
        ("POST", chat, body(), {"Idempotency-Key": "1", **alice.headers}),
        ("POST", chat, body(), {"Idempotency-Key": "1", **alice.headers}),
        ("POST", chat, body(model="nothing"), alice.headers),
        ("POST", chat, body("status:500"), alice.headers),
        ("GET", sheet, None, {}),
        ("GET", "/nothing", None, {}),
        ("GET", "/v1/nothing", None, {}),
        ("GET", "/v1", None, {}),
    ):
        async with http.request(method, house.base_url + path, json=asked, headers=key) as answer:
            await answer.read()
            seen.append(answer.status)
            assert_dressed(answer)
    assert seen == [401, 200, 200, 200, 200, 404, 502, 200, 404, 404, 404]


async def test_behind_https_every_answer_says_to_stay_there(
    house: House, new_database, twin: str, tmp_path: Path, http: aiohttp.ClientSession, database_kind: str
) -> None:
    secure = House(tmp_path, await new_database(database_kind), twin, **SECURE)
    configuration = Path(secure.environ["TOLLGATE_CONFIG"])
    configuration.write_text(
        configuration.read_text().replace('api_key = "twin-upstream-key-000111222333"', 'api_key_env = "TWIN"')
    )
    secure.environ["TWIN"] = "twin-upstream-key-000111222333"
    secure.start()
    try:
        for path in ("/", "/v1/models", "/healthz", "/openapi.json", "/nothing", "/v1/nothing"):
            async with http.get(secure.base_url + path) as answer:
                assert_dressed(answer, secure=True)
    finally:
        secure.stop()


async def test_no_header_is_ever_made_of_what_a_caller_wrote(
    house: House, alice: Actor, http: aiohttp.ClientSession
) -> None:
    """CR and LF in every text of a request that could find its way into a header."""
    evil = "twin\r\nSet-Cookie: a=b"
    for path, asked in (
        ("/v1/chat/completions", body(model=evil)),
        ("/v1/chat/completions", body("say:a\r\nSet-Cookie:_a=b", user=evil)),
        ("/v1/chat/completions", body("say:a", stream=True, user=evil, metadata={evil: evil})),
    ):
        async with http.post(house.base_url + path, json=asked, headers=alice.headers) as answer:
            raw = await answer.read()
            assert answer.status in (200, 404), raw
            assert_dressed(answer)
            assert not any("set-cookie" in value.lower() for value in answer.headers.values())


async def test_a_body_waits_until_somebody_wants_it() -> None:
    """Behind the edge nothing is taken from the client before `open`, nor kept after the answer has begun."""
    taken: list[int] = []
    seen: list[str] = []

    async def receive() -> dict[str, object]:
        taken.append(len(taken))
        if len(taken) < 5:
            return {"type": "http.request", "body": b"x", "more_body": True}
        return {"type": "http.disconnect"}

    async def serve(scope: dict[str, Any], receive: Any, send: Any) -> None:
        reader = asyncio.create_task(receive())
        await asyncio.sleep(0.05)
        assert not taken and not reader.done()
        await scope["tollgate.body"].open()
        seen.append((await reader)["type"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        seen.append((await receive())["type"])

    async def send(message: dict[str, object]) -> None:
        seen.append(str(message["type"]))

    scope = {
        "type": "http", "path": "/v1/x", "headers": [(b"content-length", b"99")],
        "extensions": {"tollgate.continue": lambda: asyncio.sleep(0, seen.append("continue"))},
    }
    await guarded(serve, Policy(read_settings({}), []), dropping)(scope, receive, send)
    assert seen == ["continue", "http.request", "http.response.start", "http.disconnect"]
