"""A forgotten password: one link, one new password, every session ended."""

from __future__ import annotations

import asyncio
import re

from models import ids
from models.database import Database
from tests.house import House
from tests.portal.pages.test_login import PASSWORD, owner
from tests.visitor import Visitor, letters_to, link_in

FRESH = "five other unrelated words"


async def test_a_new_password_ends_all_sessions(open_house: House, open_books: Database) -> None:
    account = await owner(open_books)
    thief, visitor = Visitor(open_house), Visitor(open_house)
    await thief.sign_in(account.email, PASSWORD)
    asked = await visitor.send("/forgot", {"email": account.email})
    assert asked.location == "/forgot/sent" and "Check your mail" in (await visitor.get("/forgot/sent")).text
    path = link_in((await letters_to(open_books, account.email, "reset"))[0], open_house)
    for _ in range(2):
        assert (await visitor.get(path)).status == 200
    weak = await visitor.send(path, {"password": "short"})
    assert weak.status == 422 and "10 characters" in weak.text
    done = await visitor.send(path, {"password": FRESH})
    assert done.location == "/login?said=password-reset"
    assert not await thief.is_signed_in() and not await visitor.is_signed_in()
    assert (await visitor.sign_in(account.email, PASSWORD)).status == 422
    assert (await visitor.sign_in(account.email, FRESH)).status == 303
    assert (await Visitor(open_house).get(path)).status == 404
    assert await letters_to(open_books, account.email, "password_changed")


async def test_of_many_uses_one_counts(open_house: House, open_books: Database) -> None:
    account = await owner(open_books)
    await Visitor(open_house).send("/forgot", {"email": account.email})
    path = link_in((await letters_to(open_books, account.email, "reset"))[0], open_house)
    visitors = [Visitor(open_house) for _ in range(12)]
    pages = [await visitor.get(path) for visitor in visitors]
    tokens = [re.search(r'value="([0-9a-f]{64})"', page.text)[1] for page in pages]
    answers = await asyncio.gather(*(
        visitor.post(path, {"csrf_token": token, "password": f"{FRESH} {number}"})
        for number, (visitor, token) in enumerate(zip(visitors, tokens, strict=True))
    ))
    assert sorted(answer.status for answer in answers) == [303] + [404] * 11
    winner = next(number for number, answer in enumerate(answers) if answer.status == 303)
    assert (await Visitor(open_house).sign_in(account.email, f"{FRESH} {winner}")).status == 303


async def test_nobody_learns_whether_an_address_is_known(open_house: House, open_books: Database) -> None:
    account, nobody = await owner(open_books), f"{ids.new_id('x')}@example.com"
    unverified = await owner(open_books, email_verified_at_ms=None)
    answers = [
        await Visitor(open_house).send("/forgot", {"email": email})
        for email in (account.email, nobody, unverified.email)
    ]
    assert len({(answer.status, answer.location, answer.text) for answer in answers}) == 1
    assert await letters_to(open_books, account.email, "reset")
    assert not await open_books.fetch("SELECT 1 FROM outbox WHERE recipient IN (?, ?)", (nobody, unverified.email))


async def test_a_link_is_void_after_a_newer_one_and_after_a_change_of_password(
    open_house: House, open_books: Database
) -> None:
    account = await owner(open_books)
    for _ in range(2):
        await Visitor(open_house).send("/forgot", {"email": account.email})
    letters = await letters_to(open_books, account.email, "reset", count_min=2)
    older, newer = (link_in(letter, open_house) for letter in letters)
    assert (await Visitor(open_house).get(older)).status == 404
    assert (await Visitor(open_house).get(newer)).status == 200
    assert (await Visitor(open_house).get(newer.replace("/reset/", "/verify/"))).status == 404
    visitor = Visitor(open_house)
    await visitor.sign_in(account.email, PASSWORD)
    fields = {"current_password": PASSWORD, "new_password": FRESH}
    changed = await visitor.send("/dashboard/settings", fields, to="/dashboard/settings/password")
    assert changed.location.endswith("password-changed")
    assert (await Visitor(open_house).get(newer)).status == 404
