"""Every page in every state, at every width, light and dark: as a browser and a screen reader find it.

Screenshots are left in tests/.artifacts/pages, to be looked at.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from playwright.async_api import BrowserContext, Page

from models.database import Database
from tests.cast import Actor, enter, sign_in
from tests.conftest import missing
from tests.house import ROOT, House
from tests.portal.pages.chromium import chromium

WIDTHS = (320, 768, 1440)
THEMES = ("light", "dark")
WIRE_BYTES_MAX = 60_000
AXE = ROOT / "tests" / "node" / "node_modules" / "axe-core" / "axe.min.js"
SHOTS = ROOT / "tests" / ".artifacts" / "pages"

OPEN = ("/", "/docs", "/signup", "/login", "/forgot", "/nowhere", "/verify/wrong", "/reset/wrong")
SIGNED_IN = (
    "/dashboard", "/dashboard/api-keys", "/dashboard/usage", "/dashboard/billing/credits", "/dashboard/models",
    "/dashboard/playground", "/dashboard/settings", "/dev/parts", "/dev/mail",
)
STATES = ("signed out", "empty", "one", "many", "refused")


@dataclass
class Findings:
    """Gather what a page complained about."""

    complaints: list[str]

    def watch(self, page: Page) -> None:
        """Listen to a page."""
        page.on("pageerror", lambda error: self.complaints.append(f"error: {error}"))
        page.on("console", lambda said: said.type == "error" and self.complaints.append(f"console: {said.text}"))
        page.on("requestfailed", lambda asked: self.complaints.append(f"failed: {asked.url}"))


@pytest.fixture(scope="module")
def shots() -> Path:
    """Give the folder of screenshots."""
    SHOTS.mkdir(parents=True, exist_ok=True)
    return SHOTS


@asynccontextmanager
async def browse(house: House, books: Database, actor: Actor | None, theme: str) -> AsyncIterator[BrowserContext]:
    """Give a browser in a theme, signed in as somebody or nobody."""
    async with chromium() as browser:
        context = await browser.new_context(color_scheme=theme, reduced_motion="reduce")
        await context.add_init_script(
            "addEventListener('securitypolicyviolation',"
            " event => console.error('CSP', event.violatedDirective, event.blockedURI))"
        )
        if actor is not None:
            cookies = await sign_in(books, actor)
            await context.add_cookies([
                {"name": name, "value": value, "url": house.base_url} for name, value in cookies.items()
            ])
        yield context


async def populate(house: House, books: Database, http, state: str) -> Actor | None:
    """Bring an account into a state."""
    if state == "signed out":
        return None
    plan = "payg" if state == "one" else "wallet"
    actor = await enter(books, "visitor", plan=plan, credit_microusd=0 if state == "empty" else 41_270_000)
    calls = {"one": 1, "many": 60}.get(state, 0)
    for n in range(calls):
        body = {"model": "twin", "messages": [{"role": "user", "content": "say:hi"}]}
        if n % 7 == 6:
            body["model"] = "unreachable"
        if n % 11 == 10:
            body["messages"] = "not a list"
        async with http.post(house.base_url + "/v1/chat/completions", json=body, headers=actor.headers) as answer:
            await answer.read()
    return actor


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("database_kind", ["sqlite"], indirect=True)
async def test_every_page_in_every_state(
    house: House, house_books: Database, http, shots: Path, state: str, theme: str
) -> None:
    if not AXE.exists():
        missing("axe-core (npm ci in tests/node)")
    actor = await populate(house, house_books, http, state)
    found: list[str] = []
    async with browse(house, house_books, actor, theme) as context:
        for path, width in itertools.product(OPEN if actor is None else SIGNED_IN, WIDTHS):
            page = await context.new_page()
            findings = Findings([])
            findings.watch(page)
            await page.set_viewport_size({"width": width, "height": 900})
            answer = await page.goto(house.base_url + path)
            assert answer is not None
            if state == "refused" and path in FORMS_THAT_REFUSE:
                await FORMS_THAT_REFUSE[path](page)
            where = f"{path} ({state}, {theme}, {width} px)"
            expected = answer.status >= 400
            found += [f"{where}: {text}" for text in findings.complaints if not (expected and "status of" in text)]
            if await page.evaluate("document.documentElement.scrollWidth > innerWidth"):
                found.append(f"{where}: scrolls sideways")
            await page.evaluate(AXE.read_text())
            report = await page.evaluate("axe.run({resultTypes: ['violations']})")
            found += [
                f"{where}: {violation['id']}: {violation['nodes'][0]['html'][:120]}"
                for violation in report["violations"] if violation["impact"] in ("serious", "critical")
            ]
            name = f"{path.strip('/').replace('/', '-') or 'home'}-{state.replace(' ', '-')}-{theme}-{width}.png"
            await page.screenshot(path=shots / name, full_page=True)
            await page.close()
    assert found == []


async def _post_nothing(page: Page) -> None:
    """Send a form that will be refused: every field empty, the browser's own checks off."""
    await page.evaluate("document.querySelectorAll('main form').forEach(form => form.noValidate = true)")
    async with page.expect_event("response", lambda response: response.request.method == "POST"):
        await page.locator("main form button.primary").first.click()
    await page.wait_for_load_state("networkidle")


FORMS_THAT_REFUSE = dict.fromkeys(("/dashboard/api-keys", "/dashboard/billing/credits"), _post_nothing)


@pytest.mark.parametrize("database_kind", ["sqlite"], indirect=True)
async def test_a_page_is_light_on_the_wire(house: House, house_books: Database, http, alice: Actor) -> None:
    cookies = await sign_in(house_books, alice)
    heavy = []
    async with chromium() as browser:
        context = await browser.new_context()
        await context.add_cookies([{"name": n, "value": v, "url": house.base_url} for n, v in cookies.items()])
        for path in (*OPEN, *SIGNED_IN):
            page = await context.new_page()
            sizes: list[int] = []
            tasks = []
            page.on("requestfinished", lambda asked, tasks=tasks: tasks.append(asked))
            await page.goto(house.base_url + path)
            for asked in tasks:
                if not asked.url.endswith(".woff2"):
                    sizes.append((await asked.sizes())["responseBodySize"])
            if sum(sizes) > WIRE_BYTES_MAX:
                heavy.append((path, sum(sizes)))
            await page.close()
            await context.clear_cookies()
            await context.add_cookies([{"name": n, "value": v, "url": house.base_url} for n, v in cookies.items()])
    assert heavy == []
