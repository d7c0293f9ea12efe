"""A real browser, signed in."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from playwright.async_api import Browser, BrowserContext, async_playwright, expect

from models.database import Database
from tests.cast import Actor, sign_in
from tests.conftest import missing
from tests.house import House

ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]

# A busy machine takes longer than the five seconds that Playwright waits by itself.
expect.set_options(timeout=15_000)


@asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    """Give a browser."""
    path = shutil.which("chromium")
    if path is None:
        missing("chromium")
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        yield browser
        await browser.close()


@asynccontextmanager
async def at_home(house: House, books: Database, actor: Actor, **options: object) -> AsyncIterator[BrowserContext]:
    """Give a browser in which somebody is signed in."""
    async with chromium() as browser:
        yield await signed_in(browser, house, books, actor, **options)


async def signed_in(
    browser: Browser, house: House, books: Database, actor: Actor, **options: object
) -> BrowserContext:
    """Return a window of a browser in which somebody is signed in."""
    context = await browser.new_context(**options)
    cookies = await sign_in(books, actor)
    await context.add_cookies([
        {"name": name, "value": value, "url": house.base_url} for name, value in cookies.items()
    ])
    return context
