"""Passkeys: a real browser with a pretended device makes one, signs in with it, and replays nothing."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import unquote_plus

import pytest
from playwright.async_api import Browser, CDPSession, Page, expect

from models import ids, passkey
from models.clock import now_ms
from models.database import Database, Script
from models.errors import NotFound
from models.outbox import Letter
from models.passkey import CHALLENGES_MAX, REGISTER, SIGN_IN, NewPasskey, Party, PasskeyRefused
from portal.tries import ASKED_PER_NEIGHBOURHOOD, PASSKEYS_BEGUN_PER_ACCOUNT
from tests.cast import enter, sign_in
from tests.house import House, books_of
from tests.portal.pages.chromium import chromium
from tests.portal.pages.test_login import PASSWORD, owner
from tests.visitor import Visitor, letters_to

HERE = "/dashboard/settings/passkeys"
DEVICE = {
    "protocol": "ctap2", "transport": "internal", "hasResidentKey": True, "hasUserVerification": True,
    "isUserVerified": True, "automaticPresenceSimulation": True,
}


@pytest.fixture
async def named_house(database_kind: str, new_database, twin: str, tmp_path: Path) -> AsyncIterator[House]:
    """Give a Tollgate with a name: passkeys belong to a domain, and an address is none."""
    house = House(tmp_path, await new_database(database_kind), twin)
    house.environ["PUBLIC_URL"] = house.base_url = f"http://localhost:{house.port}"
    yield house.start()
    house.stop()


@pytest.fixture
async def named_books(named_house: House) -> AsyncIterator[Database]:
    """Give its database."""
    async with books_of(named_house) as books:
        yield books


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    """Give a Chromium."""
    async with chromium() as browser:
        yield browser


async def page_with_device(browser: Browser) -> tuple[Page, CDPSession, str, list[str]]:
    """Return a page whose browser has a device for passkeys, and what the page complains of."""
    page = await (await browser.new_context()).new_page()
    page.set_default_timeout(10_000)
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda said: complaints.append(said.text) if "Security" in said.text else None)
    devices = await page.context.new_cdp_session(page)
    await devices.send("WebAuthn.enable")
    made = await devices.send("WebAuthn.addVirtualAuthenticator", {"options": DEVICE})
    return page, devices, made["authenticatorId"], complaints


async def at_passkeys(page: Page, house: House, email: str) -> None:
    """Sign in and go to the page of passkeys."""
    await page.goto(house.base_url + "/login")
    await page.fill("#email", email)
    await page.fill("#password", PASSWORD)
    await page.click("form[action='/login'] button")
    await page.wait_for_url("**/dashboard")
    await page.goto(house.base_url + HERE)


async def test_a_browser_makes_a_passkey_and_signs_in_with_it(
    named_house: House, named_books: Database, browser: Browser
) -> None:
    account = await owner(named_books)
    page, devices, device, complaints = await page_with_device(browser)
    await at_passkeys(page, named_house, account.email)
    assert "No passkeys yet" in await page.content()
    await page.fill("#name", "laptop <b>")
    await page.click("button:has-text('Add a passkey')")
    await page.wait_for_url("**said=passkey-added")
    assert "laptop &lt;b&gt;" in await page.content()
    (stored,) = await named_books.fetch("SELECT * FROM passkeys")
    assert stored["account_id"] == account.id and stored["last_used_at_ms"] is None
    assert await letters_to(named_books, account.email, "passkey")
    kept = await devices.send("WebAuthn.getCredentials", {"authenticatorId": device})
    assert [credential["rpId"] for credential in kept["credentials"]] == ["localhost"]

    # The same device is not added twice.
    await page.fill("#name", "again")
    await page.click("button:has-text('Add a passkey')")
    await expect(page.locator("[data-passkey-said]")).not_to_be_empty()
    assert len(await named_books.fetch("SELECT 1 FROM passkeys")) == 1

    await page.click("button:has-text('Sign out')")
    await page.wait_for_url("**said=signed-out")
    sent: list[str] = []
    page.on("request", lambda asked: sent.append(asked.post_data) if asked.url.endswith("/login/passkey") else None)
    await page.goto(named_house.base_url + "/login?next=/dashboard/settings")
    await page.click("button:has-text('Sign in with a passkey')")
    await page.wait_for_url(f"{named_house.base_url}/dashboard/settings")
    (used,) = await named_books.fetch("SELECT * FROM passkeys")
    assert used["last_used_at_ms"] and used["sign_count"] > stored["sign_count"]
    assert not await named_books.fetch("SELECT 1 FROM challenges WHERE purpose = ?", (SIGN_IN,))

    # What was sent once is worth nothing any more.
    from_form = dict(re.findall(r"(\w+)=([^&]*)", sent[0]))
    thief = Visitor(named_house)
    credential = unquote_plus(from_form["credential"])
    replayed = await thief.send("/login", {"credential": credential}, to="/login/passkey")
    assert replayed.status == 422 and "This passkey was not taken" in replayed.text
    assert "session" not in thief.cookies

    await page.goto(named_house.base_url + HERE)
    await page.click("button:has-text('Remove')")
    await page.wait_for_url("**said=passkey-removed")
    await page.click("button:has-text('Sign out')")
    await page.wait_for_url("**said=signed-out")
    await page.goto(named_house.base_url + "/login")
    await page.click("button:has-text('Sign in with a passkey')")
    await page.wait_for_selector("text=This passkey was not taken")
    assert complaints == []


async def test_a_device_that_asks_nobody_is_not_enough(
    named_house: House, named_books: Database, browser: Browser
) -> None:
    account = await owner(named_books)
    page, devices, device, _ = await page_with_device(browser)
    await at_passkeys(page, named_house, account.email)
    await devices.send("WebAuthn.setUserVerified", {"authenticatorId": device, "isUserVerified": False})
    await page.fill("#name", "laptop")
    await page.click("button:has-text('Add a passkey')")
    await expect(page.locator("[data-passkey-said]")).not_to_be_empty()
    assert not await named_books.fetch("SELECT 1 FROM passkeys")


@pytest.mark.parametrize("credential", [
    "", "{}", "null", "[]", "[" * 10_000, '{"id": 1}', '{"response": {"clientDataJSON": "e30"}}', "?",
    '{"id":"a","rawId":"a","type":"public-key","response":{"clientDataJSON":"bnVsbA"}}',
], ids=range(9))
async def test_what_no_device_sends_is_refused(open_house: House, open_books: Database, credential: str) -> None:
    answer = await Visitor(open_house).send("/login", {"credential": credential}, to="/login/passkey")
    assert answer.status == 422 and "This passkey was not taken" in answer.text
    alice = await enter(open_books, "alice")
    visitor = Visitor(open_house, cookies=await sign_in(open_books, alice))
    answer = await visitor.send(HERE, {"credential": credential, "name": "x"})
    assert answer.status == 422 and "no passkey that we can use" in answer.text


async def test_passkeys_are_ones_own(open_house: House, open_books: Database) -> None:
    alice, bob = await enter(open_books, "alice"), await enter(open_books, "bob")
    mallory = Visitor(open_house, cookies=await sign_in(open_books, bob))
    notice = Letter("", "passkey", "x", "x", "x")
    made = NewPasskey(ids.new_id("credential"), "key", 0)
    await open_books.run(lambda: passkey.add(alice.account.id, made, "alice's", notice))
    (row,) = await passkey.of_account(open_books, alice.account.id)
    assert "alice's" not in (await mallory.get(HERE)).text
    assert (await mallory.send(HERE, {"passkey": row["id"]}, to=f"{HERE}/remove")).status == 404
    with pytest.raises(PasskeyRefused):
        await open_books.run(lambda: passkey.add(bob.account.id, made, "stolen", notice))
    with pytest.raises(NotFound):
        await open_books.run(lambda: passkey.remove(bob.account.id, row["id"], notice))
    assert len(await passkey.of_account(open_books, alice.account.id)) == 1


async def test_a_challenge_is_good_once_for_one_purpose_and_account(books: Database) -> None:
    challenge = passkey.new_challenge()
    await books.run(lambda: passkey.offer(REGISTER, challenge, "acc_1"))
    for purpose, account_id in ((SIGN_IN, None), (SIGN_IN, "acc_1"), (REGISTER, "acc_2"), (REGISTER, None)):
        with pytest.raises(PasskeyRefused):
            await books.run(lambda: passkey.take(purpose, challenge, account_id))  # noqa: B023 - run at once
    await books.run(lambda: passkey.take(REGISTER, challenge, "acc_1"))
    with pytest.raises(PasskeyRefused):
        await books.run(lambda: passkey.take(REGISTER, challenge, "acc_1"))
    await books.run(lambda: passkey.offer(SIGN_IN, challenge))

    def expire():
        yield ("UPDATE challenges SET expires_at_ms = ?", (now_ms() - 1,))

    await books.run(expire)
    with pytest.raises(PasskeyRefused):
        await books.run(lambda: passkey.take(SIGN_IN, challenge))
    assert not await books.run(lambda: passkey.prune(now_ms()))
    assert not await books.fetch("SELECT 1 FROM challenges")


async def test_of_an_account_the_newest_challenges_stay(books: Database) -> None:
    offered = [passkey.new_challenge() for _ in range(CHALLENGES_MAX + 2)]
    others = passkey.new_challenge()
    await books.run(lambda: passkey.offer(REGISTER, others, "acc_2"))

    def grow_older() -> Script[None]:
        yield ("UPDATE challenges SET expires_at_ms = expires_at_ms - 1000 WHERE account_id = ?", ("acc_1",))

    for challenge in reversed(offered):
        await books.run(grow_older)
        await books.run(lambda: passkey.offer(REGISTER, challenge, "acc_1"))  # noqa: B023 - run at once
    for old in offered[CHALLENGES_MAX:]:
        with pytest.raises(PasskeyRefused):
            await books.run(lambda: passkey.take(REGISTER, old, "acc_1"))  # noqa: B023 - run at once
    for new in offered[:CHALLENGES_MAX]:
        await books.run(lambda: passkey.take(REGISTER, new, "acc_1"))  # noqa: B023 - run at once
    await books.run(lambda: passkey.take(REGISTER, others, "acc_2"))


async def test_an_account_begins_a_few_passkeys_at_a_time(open_house: House, open_books: Database) -> None:
    """Whatever addresses it comes from, and with any of its sessions."""
    alice, bob = await enter(open_books, "alice"), await enter(open_books, "bob")
    visitors = [
        Visitor(open_house, cookies=await sign_in(open_books, alice))
        for _ in range(PASSKEYS_BEGUN_PER_ACCOUNT + 4)
    ]
    answers = await asyncio.gather(*(visitor.send(HERE, {}, to=f"{HERE}/options") for visitor in visitors))
    assert Counter(answer.status for answer in answers) == {200: PASSKEYS_BEGUN_PER_ACCOUNT, 429: 4}
    for answer in answers:
        assert answer.headers["content-type"] == "application/json"
        assert len(json.loads(answer.text).get("challenge", "")) == (86 if answer.status == 200 else 0)
    refused = next(answer for answer in answers if answer.status == 429)
    assert json.loads(refused.text) == {"said": "Too many tries. Try again in 15 minutes."}
    rows = await open_books.fetch("SELECT 1 FROM challenges WHERE account_id = ?", (alice.account.id,))
    assert len(rows) == CHALLENGES_MAX
    # Everything else is as open to her as before, and the same is to him.
    assert (await visitors[0].get(HERE)).status == 200
    mine = Visitor(open_house, cookies=await sign_in(open_books, bob))
    assert (await mine.send(HERE, {}, to=f"{HERE}/options")).status == 200
    assert len(await open_books.fetch("SELECT 1 FROM challenges WHERE account_id = ?", (bob.account.id,))) == 1


async def test_who_begins_too_often_reads_when_to_go_on(
    named_house: House, named_books: Database, browser: Browser
) -> None:
    account = await owner(named_books)
    page, _, _, complaints = await page_with_device(browser)
    await at_passkeys(page, named_house, account.email)
    await page.fill("#name", "laptop")
    (cookie,) = [cookie for cookie in await page.context.cookies() if cookie["name"] == "session"]
    visitor = Visitor(named_house, cookies={"session": cookie["value"]})
    for _ in range(PASSKEYS_BEGUN_PER_ACCOUNT):
        assert (await visitor.send(HERE, {}, to=f"{HERE}/options")).status == 200
    await page.click("button:has-text('Add a passkey')")
    await expect(page.locator("[data-passkey-said]")).to_have_text("Too many tries. Try again in 15 minutes.")
    stranger = Visitor(named_house)
    for _ in range(ASKED_PER_NEIGHBOURHOOD):
        assert (await stranger.send("/login", {}, to="/login/passkey/options")).status == 200
    await page.context.clear_cookies()
    await page.goto(named_house.base_url + "/login")
    await page.click("button:has-text('Sign in with a passkey')")
    await expect(page.locator("[data-passkey-said]")).to_have_text("Too many tries. Try again in 15 minutes.")
    assert complaints == [] and not await named_books.fetch("SELECT 1 FROM passkeys")


def test_options_ask_for_the_user() -> None:
    party = Party("gateway.example", "https://gateway.example", "Tollgate")
    asked = json.loads(passkey.registration_options(party, b"c" * 64, "acc_1", "ada@example.com", []))
    assert asked["rp"] == {"name": "Tollgate", "id": "gateway.example"}
    assert asked["authenticatorSelection"]["userVerification"] == "required"
    assert asked["authenticatorSelection"]["residentKey"] == "required"
    assert json.loads(passkey.sign_in_options(party, b"c" * 64))["userVerification"] == "required"
