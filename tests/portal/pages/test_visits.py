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

from models import api_key, one_time_link, top_up
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
# Where a form that was sent empty is refused, and which.
REFUSED = {
    "/dashboard/api-keys": "/dashboard/api-keys",
    "/dashboard/billing/credits": "/dashboard/billing/credits",
    "/dashboard/settings": "/dashboard/settings/password",
}
REFUSED_OUTSIDE = {path: path for path in ("/signup", "/login", "/forgot")}
PATHS = {
    "signed out": OPEN, "empty": SIGNED_IN, "one": SIGNED_IN, "many": SIGNED_IN,
    "refused": tuple(REFUSED), "refused outside": tuple(REFUSED_OUTSIDE),
}
# The last one is of pages that only an id or a rare moment leads to.
STATES = (*PATHS, "detail")


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
async def browse(house: House, books: Database, actor: Actor | None) -> AsyncIterator[BrowserContext]:
    """Give a browser, signed in as somebody or nobody."""
    async with chromium() as browser:
        context = await browser.new_context(reduced_motion="reduce")
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
    if state in ("signed out", "refused outside"):
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


async def detail(house: House, books: Database, http, actor: Actor) -> dict[str, str]:
    """Return where the pages are that only an id leads to, of an account that has one of each."""
    asked = {
        "served": {"model": "twin", "messages": [{"role": "user", "content": "say:hi"}]},
        "failed": {"model": "unreachable", "messages": [{"role": "user", "content": "say:hi"}]},
        "refused": {"model": "twin", "messages": "not a list"},
    }
    places = {"usage-nothing-matches": "/dashboard/usage?model=nothing"}
    for name, body in asked.items():
        async with http.post(house.base_url + "/v1/chat/completions", json=body, headers=actor.headers) as answer:
            places[f"call-{name}"] = f"/dashboard/usage/{answer.headers['x-request-id']}"
    key, _ = await api_key.create(actor.account, "ended", scopes=["chat"], requests_per_minute=5)
    await api_key.revoke(actor.account.id, key.id)
    checkouts = [await _ordered(books, actor, state) for state in ("pending", "paid", "failed", "expired")]
    secret = one_time_link.new_secret()
    for purpose in (one_time_link.VERIFY, one_time_link.RESET, one_time_link.CHANGE_EMAIL):
        await books.run(
            lambda purpose=purpose: one_time_link.make(purpose, purpose + secret, actor.account.id, "a@example.com")
        )
    return places | {
        "key": f"/dashboard/api-keys/{actor.key_id}",
        "key-rotate": f"/dashboard/api-keys/{actor.key_id}/rotate",
        "key-revoked": f"/dashboard/api-keys/{key.id}",
        "keys-ended": "/dashboard/api-keys?ended=1",
        "credits-history": "/dashboard/billing/credits",
        "checkout-pending": f"/test-checkout/{checkouts[0]}",
        "checkout-paid": f"/test-checkout/{checkouts[1]}",
        "checkout-failed": f"/test-checkout/{checkouts[2]}",
        "receipt": f"/test-checkout/{checkouts[1]}/receipt",
        "close": "/dashboard/settings/close",
        "confirm": "/dashboard/settings/confirm",
        "passkeys": "/dashboard/settings/passkeys",
        "second-factor": "/dashboard/settings/second-factor",
        "verify": f"/verify/{one_time_link.VERIFY}{secret}",
        "reset": f"/reset/{one_time_link.RESET}{secret}",
        "change-email": f"/change-email/{one_time_link.CHANGE_EMAIL}{secret}",
        "signup-sent": "/signup/sent",
        "forgot-sent": "/forgot/sent",
        "unknown-call": "/dashboard/usage/req_unknown",
    }


async def _ordered(books: Database, actor: Actor, state: str) -> str:
    """Order credit that came to a state, and return its checkout's id."""
    ordered = await books.run(lambda: top_up.order(actor.account.id, 25_000_000, "test"))
    checkout = f"tc_{ordered.id}"
    await books.run(lambda: top_up.begun(ordered.id, checkout, f"/test-checkout/{checkout}"))
    if state == "paid":
        payment = top_up.Payment(
            "test", checkout, ordered.amount_microusd, "usd", f"/test-checkout/{checkout}/receipt", ordered.id
        )
        await books.run(lambda: top_up.pay(payment))
    elif state == "failed":
        await books.run(lambda: top_up.fail(ordered.id))
    elif state == "expired":
        await books.run(lambda: top_up.expire(ordered.id))
    return checkout


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("database_kind", ["sqlite"], indirect=True)
async def test_every_page_in_every_state(
    house: House, house_books: Database, http, shots: Path, state: str
) -> None:
    if not AXE.exists():
        missing("axe-core (npm ci in tests/node)")
    actor = await populate(house, house_books, http, state)
    found: list[str] = []
    async with browse(house, house_books, actor) as context:
        places = (
            await detail(house, house_books, http, actor) if state == "detail"
            else {path.strip("/").replace("/", "-") or "home": path for path in PATHS[state]}
        )
        for shot, path in places.items():
            page = await context.new_page()
            findings = Findings([])
            findings.watch(page)
            answer = await page.goto(house.base_url + path)
            assert answer is not None
            is_refused = state.startswith("refused")
            if is_refused:
                await _post_nothing(page, (REFUSED | REFUSED_OUTSIDE)[path])
            await page.evaluate(AXE.read_text())
            for theme, width in itertools.product(THEMES, WIDTHS):
                where = f"{path} ({state}, {theme}, {width} px)"
                found += [f"{where}: {said}" for said in await look(page, theme, width)]
                name = f"{shot}-{state.replace(' ', '-')}-{theme}-{width}.png"
                await page.screenshot(path=shots / name, full_page=True)
            expected = answer.status >= 400 or is_refused
            found += [
                f"{path} ({state}): {text}" for text in findings.complaints
                if not (expected and "status of" in text)
            ]
            await page.close()
    assert found == []


async def look(page: Page, theme: str, width: int) -> list[str]:
    """Return what is wrong with a page in a theme at a width."""
    await page.emulate_media(color_scheme=theme)
    await page.set_viewport_size({"width": width, "height": 900})
    found = []
    if await page.evaluate("document.documentElement.scrollWidth > innerWidth"):
        found.append("scrolls sideways")
    report = await page.evaluate("axe.run({resultTypes: ['violations']})")
    return found + [
        f"{violation['id']}: {violation['nodes'][0]['html'][:120]}"
        for violation in report["violations"] if violation["impact"] in ("serious", "critical")
    ]


async def _post_nothing(page: Page, action: str) -> None:
    """Send a form that will be refused: every field empty, the browser's own checks off."""
    await page.evaluate(
        "document.querySelectorAll('main details').forEach(one => one.open = true);"
        "document.querySelectorAll('main form').forEach(one => one.noValidate = true)"
    )
    async with page.expect_event("response", lambda response: response.request.method == "POST"):
        form = page.locator(f"main form[action='{action}']")
        await form.locator("button.primary, button:not([name])").last.click()
    await page.wait_for_load_state("networkidle")


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
