"""A stranger's whole way, in a real browser: from the home page to a live usage row and back."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Iterator
from email import message_from_bytes
from email.policy import default
from pathlib import Path

import openai
import pytest
from aiosmtpd.controller import Controller
from playwright.async_api import Page, expect

from tests.house import House, free_port
from tests.portal.pages.chromium import chromium

EMAIL = "new.person@example.com"
PASSWORD = "correct horse, battery"
ROW_S_MAX = 3


class Letterbox:
    """Be a mail server that keeps what it is sent."""

    def __init__(self) -> None:
        self.letters: list[str] = []

    async def handle_DATA(self, server: object, session: object, envelope: object) -> str:
        """Keep a letter."""
        message = message_from_bytes(envelope.content, policy=default)
        self.letters.append(message.get_body(("plain",)).get_content())
        return "250 kept"


@pytest.fixture
def letterbox() -> Iterator[tuple[Letterbox, int]]:
    """Give a mail server and its port."""
    box = Letterbox()
    controller = Controller(box, hostname="127.0.0.1", port=free_port())
    controller.start()
    yield box, controller.port
    controller.stop()


@pytest.fixture
async def new_house(
    database_kind: str, new_database, twin: str, tmp_path: Path, letterbox: tuple[Letterbox, int]
) -> AsyncIterator[House]:
    """Give a house that nobody has been in, with a mail server."""
    url = await new_database(database_kind)
    house = House(tmp_path, url, twin, SMTP_URL=f"smtp://127.0.0.1:{letterbox[1]}").start()
    yield house
    house.stop()


async def the_link(box: Letterbox, house: House) -> str:
    """Wait for the letter with the link."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        for letter in box.letters:
            if found := re.search(re.escape(house.base_url) + r"/verify/\S+", letter):
                return found[0]
        await asyncio.sleep(0.1)
    raise AssertionError("no letter came")


@pytest.mark.parametrize("scripts", [True, False], ids=["with scripts", "without scripts"])
async def test_from_the_home_page_to_a_live_row_and_back(
    new_house: House, letterbox: tuple[Letterbox, int], scripts: bool
) -> None:
    async with chromium() as browser:
        context = await browser.new_context(java_script_enabled=scripts, base_url=new_house.base_url)
        page = await context.new_page()
        await sign_up(page, letterbox[0], new_house)
        key = await make_key(page)
        client = openai.AsyncOpenAI(base_url=f"{new_house.base_url}/v1", api_key=key, max_retries=0)
        await page.goto("/dashboard/usage")
        await expect(page.get_by_text("No calls yet")).to_be_visible()
        answer = await client.chat.completions.create(
            model="twin", messages=[{"role": "user", "content": "say:hello"}]
        )
        began = time.monotonic()
        assert answer.choices[0].message.content
        if not scripts:
            await page.reload()
        row = page.locator("tbody tr", has_text="twin")
        await expect(row.first).to_be_visible(timeout=10_000)
        assert time.monotonic() - began < ROW_S_MAX
        await top_up(page, scripts)
        await revoke(page)
        with pytest.raises(openai.AuthenticationError):
            await client.chat.completions.create(model="twin", messages=[{"role": "user", "content": "say:hello"}])
        await page.goto("/dashboard")
        await expect(page.get_by_text("$10.00").first).to_be_visible()
        await page.get_by_role("button", name="Sign out").click()
        await page.goto("/dashboard")
        await expect(page).to_have_url(re.compile("/login"))
        await client.close()
    assert new_house.command("audit", "--full").returncode == 0


async def sign_up(page: Page, box: Letterbox, house: House) -> None:
    """Go from the home page to the dashboard."""
    await page.goto("/")
    await page.get_by_role("link", name=re.compile("Sign up|Create an account")).first.click()
    await page.get_by_label("E-mail address").fill(EMAIL)
    await page.get_by_label("Password").fill(PASSWORD)
    await page.get_by_role("button", name="Sign up").click()
    await expect(page.get_by_role("heading", name="Check your mail")).to_be_visible()
    await page.goto(await the_link(box, house))
    await page.get_by_role("button", name="Verify and sign in").click()
    await expect(page).to_have_url(re.compile("/dashboard"))


async def make_key(page: Page) -> str:
    """Make a key, see it once, and not again."""
    await page.goto("/dashboard/api-keys")
    await page.get_by_label("Name").fill("production")
    await page.locator("form button.primary", has_text="Create key").click()
    field = page.locator("#new-key")
    await expect(field).to_be_visible()
    key = await field.input_value()
    assert re.fullmatch(r"sk-tg-[0-9A-Za-z]{36}", key)
    await page.goto("/dashboard/api-keys")
    assert key not in await page.content()
    await page.go_back()
    assert key not in await page.content()
    return key


async def top_up(page: Page, scripts: bool) -> None:
    """Buy ten dollars in another tab and see them here."""
    await page.goto("/dashboard/billing/credits")
    await expect(page.get_by_text("No purchases yet")).to_be_visible()
    other = await page.context.new_page()
    await other.goto("/dashboard/billing/credits")
    await other.get_by_role("button", name="$10", exact=True).click()
    await other.get_by_role("button", name=re.compile("^Pay")).click()
    if not scripts:
        await page.reload()
    await expect(page.locator("dl.figures").get_by_text("$10.00")).to_be_visible(timeout=10_000)
    await other.close()


async def revoke(page: Page) -> None:
    """End the key."""
    await page.goto("/dashboard/api-keys")
    await page.get_by_role("link", name="production").first.click()
    await page.get_by_role("button", name="Revoke key").click()
    await expect(page.get_by_text("The key is revoked")).to_be_visible()
