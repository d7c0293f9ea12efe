"""A visitor of the pages: cookies, forms with their token, and what comes back."""

from __future__ import annotations

import re

import aiohttp

from models.database import Database
from tests.cast import Actor, sign_in
from tests.house import House
from tests.visitor import Answer

Fields = dict[str, str] | list[tuple[str, str]]


class Visitor:
    """Walk through a house's pages as one browser does; `cookies` are none for a stranger."""

    def __init__(self, house: House, http: aiohttp.ClientSession, cookies: dict[str, str] | None = None) -> None:
        self.house = house
        self.cookies = cookies or {}
        self._http = http

    async def get(self, path: str, *, fragment: bool = False, **headers: str) -> Answer:
        """Ask for a page, or for a part of one as htmx does."""
        return await self._ask("GET", path, headers=_headers(fragment) | headers)

    async def post(self, path: str, fields: Fields, *, on: str, fragment: bool = False) -> Answer:
        """Send a form that stands on the page `on`, with that page's token."""
        page = await self.get(on)
        token = re.search(r'name="csrf_token" value="([^"]+)"', page.text)
        assert token is not None, page.text
        pairs = [*(fields.items() if isinstance(fields, dict) else fields), ("csrf_token", token[1])]
        return await self._ask("POST", path, data=aiohttp.FormData(pairs), headers=_headers(fragment))

    async def _ask(self, method: str, path: str, **options: object) -> Answer:
        async with self._http.request(
            method, self.house.base_url + path, cookies=self.cookies, allow_redirects=False, **options
        ) as answer:
            return Answer(answer.status, await answer.text(), {k.lower(): v for k, v in answer.headers.items()})


async def visit(house: House, http: aiohttp.ClientSession, books: Database, actor: Actor) -> Visitor:
    """Return somebody's signed-in browser."""
    return Visitor(house, http, await sign_in(books, actor))


def _headers(fragment: bool) -> dict[str, str]:
    part = {"HX-Request": "true", "HX-Request-Type": "partial"} if fragment else {}
    return {"Sec-Fetch-Site": "same-origin", **part}
