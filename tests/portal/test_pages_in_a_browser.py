"""Keys, overview, models, home and docs in a real browser, with and without its scripts."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable

import aiohttp
import pytest
from playwright.async_api import Browser, BrowserContext, Page, Request, expect

from models.api_key import ApiKey
from models.database import Database
from tests.api.v1.test_chat import body
from tests.cast import Actor, enter
from tests.house import House
from tests.portal.pages.chromium import chromium, signed_in

KEYS = "/dashboard/api-keys"
KEY = re.compile(r"sk-tg-[0-9A-Za-z]{36}")
PAGE_BYTES_MAX = 60_000
OPEN_PATHS = ["/", "/docs", "/dev/parts"]
OWN_PATHS = ["/dashboard", KEYS, f"{KEYS}?ended=1", "/dashboard/models"]

Opened = Callable[..., Awaitable[Page]]
# What a page says is the same whatever the books are kept in.
pytestmark = pytest.mark.parametrize("database_kind", ["sqlite"], indirect=True)


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    """Give a browser."""
    async with chromium() as browser:
        yield browser


@pytest.fixture
async def opened(
    browser: Browser, house: House, house_books: Database, alice: Actor
) -> AsyncIterator[Opened]:
    """Give a function that opens a page as Alice, or as another; no console may complain of anything."""
    complaints: list[str] = []
    contexts: list[BrowserContext] = []

    async def open_page(path: str, actor: Actor | None = alice, **options: object) -> Page:
        options["base_url"] = house.base_url
        if actor is None:
            context = await browser.new_context(**options)
        else:
            context = await signed_in(browser, house, house_books, actor, **options)
        contexts.append(context)
        page = await context.new_page()
        page.on("console", lambda said: said.type in ("error", "warning") and complaints.append(said.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        answer = await page.goto(path)
        assert answer is not None and answer.status == 200
        return page

    yield open_page
    for context in contexts:
        await context.close()
    # A form that is refused is a 422, which the console notes as it does every such answer.
    assert [said for said in complaints if "status of 422" not in said] == []


async def fill_in(page: Page, name: str) -> None:
    """Open the form for a key and send it."""
    if await page.locator("#new-key-form[open]").count() == 0:
        await page.click("#new-key-form > summary")
    await page.fill("#name", name)
    await page.click("#new-key-form button.primary")
    await expect(page.locator("[data-reveal]")).to_be_visible()


async def test_a_key_is_made_copied_and_seen_no_more(opened: Opened, house: House) -> None:
    page = await opened(KEYS, permissions=["clipboard-read", "clipboard-write"])
    await fill_in(page, "prod")
    key = await page.input_value("#new-key")
    assert KEY.fullmatch(key) and page.url == house.base_url + KEYS and key not in await page.title()
    assert await page.evaluate("document.activeElement.id") == "new-key"
    assert await page.evaluate("getSelection().toString()") == key
    await page.click("button:has-text('Copy key')")
    await expect(page.locator("[data-copy=new-key]")).to_have_text("Copied")
    await expect(page.locator("#announce")).to_have_text("Copied")
    assert await page.evaluate("navigator.clipboard.readText()") == key
    stored = await page.evaluate("JSON.stringify([localStorage, sessionStorage, history.state, location.href])")
    assert key not in stored
    await page.click("[data-stored]")
    await expect(page.locator("[data-reveal]")).to_have_count(0)
    assert key not in await page.content()
    await expect(page.locator("tbody tr")).to_have_count(2)
    await fill_in(page, "second")
    second = await page.input_value("#new-key")
    # A browser may keep the page as it was when it was left, so nothing of the key may be in it by then.
    await page.evaluate("dispatchEvent(new PageTransitionEvent('pagehide', { persisted: true }))")
    await expect(page.locator("[data-reveal]")).to_have_count(0)
    for leave in ("back", "reload"):
        if leave == "back":
            await page.click("a[data-go=o]")
            await page.wait_for_url("**/dashboard")
            await page.go_back()
        else:
            await page.reload()
        await expect(page.locator("tbody tr")).to_have_count(3)
        assert second not in await page.content() and not KEY.search(await page.content())


async def test_a_key_is_made_without_scripts(opened: Opened, alice: Actor) -> None:
    page = await opened(KEYS, java_script_enabled=False)
    await fill_in(page, "plain")
    key = await page.input_value("#new-key")
    await page.check("[data-stored]")
    await expect(page.locator("[data-reveal]")).to_be_hidden()
    await page.reload()  # which sends the form again
    assert key not in await page.content() and not KEY.search(await page.content())
    assert await ApiKey.filter(account_id=alice.account.id).count() == 2
    await page.goto(KEYS)
    await page.click("a:has-text('plain')")
    await page.select_option("#grace", "0")
    await page.click("button:has-text('Rotate key')")
    rotated = await page.input_value("#new-key")
    assert KEY.fullmatch(rotated) and rotated != key
    await page.goto(KEYS)
    await page.click("a:has-text('plain')")
    await page.click("button:has-text('Revoke key')")
    await expect(page.locator(".note.good")).to_contain_text("The key is revoked.")
    await expect(page.locator("tbody tr")).to_have_count(1)


async def test_a_refused_form_is_shown_where_it_stands(opened: Opened) -> None:
    page = await opened(KEYS)
    await page.click("#new-key-form > summary")
    await page.fill("#name", "prod")
    await page.click("#new-key-form summary:has-text('Limits')")
    await page.fill("#addresses", "10.0.0.0/99")
    await page.click("#new-key-form button.primary")
    await expect(page.locator("#addresses-said")).to_contain_text("is no address or network")
    assert await page.input_value("#name") == "prod" and await page.input_value("#addresses") == "10.0.0.0/99"
    await page.fill("#addresses", "10.0.0.0/9")
    await page.click("#new-key-form button.primary")
    await expect(page.locator("[data-reveal]")).to_be_visible()


async def test_a_call_appears_and_the_step_ticks_itself(
    opened: Opened, house: House, http: aiohttp.ClientSession, house_books: Database
) -> None:
    fresh = await enter(house_books, "fresh", plan="included")
    page = await opened("/dashboard", fresh)
    await expect(page.locator("#steps li.done")).to_have_count(2)
    async with http.post(
        house.base_url + "/v1/chat/completions", json=body("say:hi"), headers=fresh.headers
    ) as answer:
        assert answer.status == 200
    await expect(page.locator("#latest-rows tr")).to_have_count(1)
    await expect(page.locator("#latest-rows tr")).to_contain_text("200 served")
    await expect(page.locator("#steps")).to_have_count(0)
    await expect(page.locator("#figures")).to_contain_text("499")


async def test_models_are_found_while_typing(opened: Opened) -> None:
    page = await opened("/dashboard/models")
    await page.keyboard.press("/")
    await page.keyboard.type("unr")
    await expect(page.locator("#offers tbody tr")).to_have_count(1)
    assert "q=unr" in page.url and await page.evaluate("document.activeElement.id") == "q"
    plain = await opened("/dashboard/models", java_script_enabled=False)
    await plain.fill("#q", "unr")
    await plain.click("button:has-text('Search')")
    await expect(plain.locator("#offers tbody tr")).to_have_count(1)


@pytest.mark.parametrize("path", [*OPEN_PATHS, *OWN_PATHS])
async def test_pages_fit_and_are_light(opened: Opened, alice: Actor, path: str) -> None:
    actor = None if path in OPEN_PATHS else alice
    for width, scheme in ((320, "dark"), (390, "light"), (1280, "dark")):
        page = await opened(path, actor, viewport={"width": width, "height": 800}, color_scheme=scheme)
        too_wide = await page.evaluate("document.documentElement.scrollWidth > innerWidth")
        assert not too_wide, f"{path} at {width}"
        small = await page.evaluate(
            "[...document.querySelectorAll('button, .button, summary, input, select')].filter(e => {"
            " const r = e.getBoundingClientRect(); return r.width && r.height && r.height < 13 }).length"
        )
        assert small == 0
        if path not in ("/dev/parts",):
            assert await page.locator("h1").count() == 1
            assert await page.locator(".button.primary:visible").count() <= 1


@pytest.mark.parametrize("path", ["/", "/docs", "/dashboard", KEYS, "/dashboard/models"])
async def test_pages_are_small_on_the_wire(
    browser: Browser, house: House, house_books: Database, alice: Actor, path: str
) -> None:
    context = await signed_in(browser, house, house_books, alice, base_url=house.base_url)
    page = await context.new_page()
    finished: list[Request] = []
    page.on("requestfinished", lambda one: finished.append(one))
    await page.goto(path, wait_until="networkidle" if path != "/dashboard" else "load")
    await page.wait_for_timeout(200)
    sizes = {one.url: (await one.sizes())["responseBodySize"] for one in tuple(finished)}
    await context.close()
    weighed = {url: size for url, size in sizes.items() if not url.endswith(".woff2")}
    assert len(weighed) >= 9 and all(url.startswith(house.base_url) for url in sizes)
    assert sum(weighed.values()) < PAGE_BYTES_MAX, weighed
