"""A reader of pages without a script: follows links, fills forms, keeps cookies."""

from __future__ import annotations

import html
import re
from dataclasses import dataclass

import aiohttp

from models.database import Database
from tests.cast import Actor, sign_in
from tests.house import House

SAME_SITE = {"Sec-Fetch-Site": "same-origin"}


@dataclass(frozen=True, slots=True)
class Read:
    """Be an answer: its status, where it leads, its text as one reads it and as it came, its headers."""

    status: int
    location: str
    text: str
    raw: str
    headers: dict[str, str]


class Reader:
    """Read one house's pages as somebody who is signed in."""

    def __init__(self, house: House, http: aiohttp.ClientSession, cookies: dict[str, str]) -> None:
        self._house, self._http = house, http
        self._cookie = "; ".join(f"{name}={value}" for name, value in cookies.items())
        self._token = ""

    async def get(self, path: str, **headers: str) -> Read:
        """Follow a link; its page's form token is kept."""
        return await self._ask("GET", path, None, headers)

    async def post(self, path: str, fields: dict[str, str] | None = None, **headers: str) -> Read:
        """Send a form of the page that was read last."""
        return await self._ask("POST", path, {"csrf_token": self._token, **(fields or {})}, headers)

    async def _ask(self, method: str, path: str, fields: dict[str, str] | None, headers: dict[str, str]) -> Read:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self._http.request(
            method, self._house.base_url + path, data=fields, allow_redirects=False,
            headers={"Cookie": self._cookie, **SAME_SITE, **named},
        ) as answer:
            text = await answer.text()
            found = re.search(r'name="csrf_token" value="([0-9a-f]{64})"', text)
            if found:
                self._token = found[1]
            location = answer.headers.get("location", "")
            told = {name.lower(): value for name, value in answer.headers.items()}
            return Read(answer.status, location, html.unescape(text), text, told)


async def reader_of(house: House, http: aiohttp.ClientSession, books: Database, actor: Actor) -> Reader:
    """Sign somebody in."""
    return Reader(house, http, await sign_in(books, actor))
