"""A visitor: a browser without its window. It keeps cookies and fills in the forms it was shown."""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import dataclass, field
from html import unescape
from itertools import count
from typing import NamedTuple

import aiohttp

from models.database import Database
from tests.house import House

_addresses = count(1)


class Answer(NamedTuple):
    """Be what a page answered."""

    status: int
    text: str
    headers: dict[str, str]

    @property
    def location(self) -> str:
        """Return where it sends the browser."""
        return self.headers.get("location", "")

    @property
    def words(self) -> str:
        """Return the page's text, without its marks and with one space between words."""
        return " ".join(unescape(re.sub(r"<[^>]+>", " ", self.text)).split())


@dataclass
class Visitor:
    """Visit a house from an address of one's own."""

    house: House
    cookies: dict[str, str] = field(default_factory=dict)
    address: str = ""

    def __post_init__(self) -> None:
        """Take an address that nobody else has."""
        number = next(_addresses)
        self.address = self.address or f"10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}"

    async def get(self, path: str, **headers: str) -> Answer:
        """Look at a page."""
        return await self._ask("GET", path, headers=headers)

    async def from_origin(self, path: str, fields: dict[str, object], origin: str) -> Answer:
        """Send fields as an older browser does, which names the page's origin and nothing else."""
        return await self._ask("POST", path, data=fields, headers={"Origin": origin})

    async def post(self, path: str, fields: dict[str, object] | str | None = None, **headers: str) -> Answer:
        """Send fields as a browser sends a form of ours, without having looked at one."""
        headers = {"Sec-Fetch-Site": "same-origin", **headers}
        return await self._ask("POST", path, data=fields or {}, headers=headers)

    async def send(self, page: str, fields: dict[str, object], *, to: str | None = None, **headers: str) -> Answer:
        """Look at a page and send its form."""
        shown = await self.get(page, **headers)
        token = re.search(r'name="csrf_token" value="([0-9a-f]+)"', shown.text)
        assert token is not None, (shown.status, shown.location, shown.text[:500])
        return await self.post(to or page, {"csrf_token": token[1], **fields}, **headers)

    async def _ask(self, method: str, path: str, *, headers: dict[str, str], **more: object) -> Answer:
        sent = {"X-From": self.address, **headers}
        if self.cookies:
            sent["Cookie"] = "; ".join(f"{name}={value}" for name, value in self.cookies.items())
        async with (
            aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as http,
            http.request(method, self.house.base_url + path, headers=sent, allow_redirects=False, **more) as answer,
        ):
            for name, morsel in answer.cookies.items():
                if morsel.value:
                    self.cookies[name] = morsel.value
                else:
                    self.cookies.pop(name, None)
            kept = {name.lower(): value for name, value in answer.headers.items()}
            return Answer(answer.status, unescape(await answer.text()), kept)

    async def sign_up(self, email: str, password: str) -> Answer:
        """Ask for an account."""
        return await self.send("/signup", {"email": email, "password": password})

    async def sign_in(self, email: str, password: str) -> Answer:
        """Show a password."""
        return await self.send("/login", {"email": email, "password": password})

    async def is_signed_in(self) -> bool:
        """Tell whether the dashboard opens."""
        return (await self.get("/dashboard/settings")).status == 200


async def letters_to(books: Database, recipient: str, kind: str | None = None, *, count_min: int = 1) -> list[str]:
    """Return the texts of the letters to somebody, oldest first, once there are as many."""
    deadline = time.monotonic() + 10
    while True:
        rows = await books.fetch(
            "SELECT letter, body_text FROM outbox WHERE recipient = ? ORDER BY id", (recipient,)
        )
        found = [row["body_text"] for row in rows if kind in (None, row["letter"])]
        if len(found) >= count_min or time.monotonic() > deadline:
            return found
        await asyncio.sleep(0.05)


def link_in(letter: str, house: House) -> str:
    """Return the path of the link in a letter."""
    found = re.search(re.escape(house.environ["PUBLIC_URL"]) + r"(/[a-z-]+/[A-Za-z0-9_-]{43})", letter)
    assert found is not None, letter
    return found[1]
