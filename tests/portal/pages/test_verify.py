"""A verification link in another browser than the one that signed up: its reader chooses the password."""

from __future__ import annotations

import re

import pytest
from playwright.async_api import expect

from models import account as accounts
from models import session
from models.database import Database
from tests.house import House
from tests.portal.pages.chromium import chromium
from tests.portal.pages.test_signup import PASSWORD, new_email
from tests.visitor import Visitor, letters_to, link_in

STRANGERS = "the password of a stranger"


async def signed_up(house: House, books: Database, email: str, password: str = STRANGERS) -> tuple[Visitor, str]:
    """Sign up; return the browser that did, and the path of the link that was mailed."""
    stranger = Visitor(house)
    assert (await stranger.sign_up(email, password)).location == "/signup/sent"
    return stranger, link_in((await letters_to(books, email, "verify"))[-1], house)


async def test_a_stranger_who_signed_up_with_an_address_does_not_get_its_account(
    open_house: House, open_books: Database
) -> None:
    email = new_email()
    stranger, path = await signed_up(open_house, open_books, email)
    owner = Visitor(open_house)
    page = await owner.get(path)
    assert page.status == 200 and 'autocomplete="new-password"' in page.text and STRANGERS not in page.text
    for fields, says in (
        ({}, "Fill this in"), ({"password": "short"}, "10 characters"), ({"password": email}, "too easy"),
    ):
        refused = await owner.send(path, fields)
        assert refused.status == 422 and says in refused.text and "session" not in owner.cookies
    (account,) = await open_books.fetch("SELECT * FROM accounts WHERE email = ?", (email,))
    assert account["email_verified_at_ms"] is None and account["password_hash"] is None

    def begun():
        yield from session.begin(account["id"], "c" * 43, address="", agent="")

    await open_books.run(begun)  # there is no way to one before, and were there one, it would end
    done = await owner.send(path, {"password": PASSWORD})
    assert (done.status, done.location) == (303, "/dashboard?said=verified") and await owner.is_signed_in()
    assert not await Visitor(open_house, cookies={"session": "c" * 43}).is_signed_in()
    assert (await Visitor(open_house).sign_in(email, STRANGERS)).status == 422
    assert (await stranger.sign_in(email, STRANGERS)).status == 422
    assert (await Visitor(open_house).sign_in(email, PASSWORD)).status == 303
    assert (await stranger.get(path)).status == 404


async def test_only_the_cookie_of_this_very_link_counts(open_house: House, open_books: Database) -> None:
    email, other = new_email(), new_email("other")
    own, path = await signed_up(open_house, open_books, email)
    away, _ = await signed_up(open_house, open_books, other)
    assert {"httponly", "samesite=lax", "path=/", "max-age=1800"} <= {
        part.strip().lower() for part in (await own.sign_up(other, PASSWORD)).headers["set-cookie"].split(";")
    }
    (row,) = await open_books.fetch(
        "SELECT hash FROM one_time_links WHERE email = ? AND used_at_ms IS NULL", (email,)
    )
    secret = path.rpartition("/")[2]
    for cookie in (away.cookies["signup"], own.cookies["signup"], row["hash"], secret, "", "0" * 64):
        visitor = Visitor(open_house, cookies={"signup": cookie} if cookie else {})
        assert (await visitor.send(path, {})).status == 422, cookie
    assert (await Visitor(open_house).get(path)).status == 200


async def test_known_and_unknown_addresses_get_a_cookie_alike(open_house: House, open_books: Database) -> None:
    known = new_email("known")
    await accounts.create(open_books, known, plan="free", verified=True)
    cookies = []
    for email in (known, new_email("unknown")):
        visitor = Visitor(open_house)
        cookies.append((await visitor.sign_up(email, PASSWORD)).headers["set-cookie"])
    alike = {re.sub(r"[0-9a-f]{64}|Expires=[^;]*", "", cookie) for cookie in cookies}
    assert len(alike) == 1 and cookies[0] != cookies[1]


@pytest.mark.parametrize("scripts", [True, False], ids=["with scripts", "without scripts"])
async def test_in_a_real_browser(open_house: House, open_books: Database, scripts: bool) -> None:
    email = new_email()
    _, path = await signed_up(open_house, open_books, email)
    async with chromium() as browser:
        context = await browser.new_context(java_script_enabled=scripts, base_url=open_house.base_url)
        page = await context.new_page()
        await page.goto(path)
        await expect(page.get_by_role("heading", name="Choose a password")).to_be_visible()
        await page.get_by_label("Password").fill("password1234")
        await page.get_by_role("button", name="Verify and sign in").click()
        await expect(page.get_by_text("too easy to guess")).to_be_visible()
        await page.get_by_label("Password").fill(PASSWORD)
        await page.get_by_role("button", name="Verify and sign in").click()
        await expect(page.get_by_text("Your address is verified")).to_be_visible()

        # The browser that signed up is asked for nothing.
        mine = new_email("mine")
        await context.clear_cookies()
        await page.goto("/signup")
        await page.get_by_label("E-mail address").fill(mine)
        await page.get_by_label("Password").fill(PASSWORD)
        await page.get_by_role("button", name="Sign up").click()
        await expect(page.get_by_role("heading", name="Check your mail")).to_be_visible()
        await page.goto(link_in((await letters_to(open_books, mine, "verify"))[-1], open_house))
        await expect(page.get_by_role("heading", name="One click left")).to_be_visible()
        await page.get_by_role("button", name="Verify and sign in").click()
        await expect(page.get_by_text("Your address is verified")).to_be_visible()
