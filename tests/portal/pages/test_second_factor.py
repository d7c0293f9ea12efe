"""The second factor: on with a code, asked for at every sign-in, a code good once, a way in without the device."""

from __future__ import annotations

import asyncio
import re

import pyotp

from models import second_factor
from models.clock import now_ms
from models.database import Database
from tests.cast import enter, sign_in
from tests.house import House
from tests.portal.pages.test_login import PASSWORD
from tests.portal.pages.test_settings import inside
from tests.visitor import Answer, Visitor, letters_to

HERE = "/dashboard/settings/second-factor"
STEP_MS = second_factor.STEP_MS


def code_of(secret: str, around: int = 0) -> str:
    """Return the code of this step, or of one near it."""
    return pyotp.TOTP(secret).generate_otp(now_ms() // STEP_MS + around)


async def turn_on(visitor: Visitor) -> tuple[str, list[str]]:
    """Turn the second factor on with the code of the last step; return its secret and the recovery codes."""
    secret = re.search(r'id="totp-secret">([A-Z2-7]{32})<', (await visitor.get(HERE)).text)[1]
    done = await visitor.send(HERE, {"code": code_of(secret, -1)})
    assert done.status == 200, done.text
    return secret, re.findall(r"\b[a-z2-7]{4}(?:-[a-z2-7]{4}){3}\b", done.text)


async def password_shown(house: House, email: str) -> Visitor:
    """Return a browser that has shown the password and owes the code."""
    visitor = Visitor(house)
    answer = await visitor.send("/login", {"email": email, "password": PASSWORD, "next": "/dashboard/settings"})
    assert answer.location == "/login/second?next=%2Fdashboard%2Fsettings"
    return visitor


async def show(visitor: Visitor, code: str) -> Answer:
    """Show a code."""
    return await visitor.send("/login/second", {"code": code, "next": "/dashboard/settings"})


async def test_it_is_turned_on_and_asked_for(open_house: House, open_books: Database) -> None:
    account, visitor = await inside(open_house, open_books)
    other = Visitor(open_house)
    await other.sign_in(account.email, PASSWORD)
    page = await visitor.get(HERE)
    drawn = await visitor.get(f"{HERE}/qr.svg")
    assert "<svg" in drawn.text and drawn.headers["content-type"] == "image/svg+xml"
    assert drawn.headers["cache-control"] == "no-store" and "data:image" not in page.text
    for wrong in ("000000", "", "12345", "١٢٣٤٥٦", "\ud83d"):
        assert (await visitor.send(HERE, {"code": wrong.encode("utf-8", "replace").decode()})).status == 422
    secret, codes = await turn_on(visitor)
    assert len(set(codes)) == 10
    assert not await other.is_signed_in() and await visitor.is_signed_in()
    assert await letters_to(open_books, account.email, "second_factor")
    (row,) = await open_books.fetch("SELECT * FROM accounts WHERE id = ?", (account.id,))
    assert row["totp_secret"] == secret
    hashes = {row["hash"] for row in await open_books.fetch(
        "SELECT hash FROM recovery_codes WHERE account_id = ?", (account.id,)
    )}
    assert len(hashes) == 10 and not hashes & set(codes)
    assert codes[0] not in (await visitor.get(HERE)).text, "shown once"

    half = await password_shown(open_house, account.email)
    for path in ("/dashboard", "/dashboard/settings", HERE, "/dashboard/settings/export", f"{HERE}/qr.svg"):
        assert (await half.get(path)).location.startswith("/login?next="), "half a session shows nothing"
    cookie = half.cookies["session"]
    assert (await show(half, "000000")).status == 422
    done = await show(half, code_of(secret))
    assert (done.status, done.location) == (303, "/dashboard/settings") and half.cookies["session"] != cookie
    assert await half.is_signed_in()
    assert not await Visitor(open_house, cookies={"session": cookie}).is_signed_in()


async def test_a_code_is_good_once(open_house: House, open_books: Database) -> None:
    account, visitor = await inside(open_house, open_books)
    secret, codes = await turn_on(visitor)
    halves = [await password_shown(open_house, account.email) for _ in range(5)]
    code = code_of(secret)
    answers = await asyncio.gather(*(show(half, code) for half in halves))
    assert sorted(answer.status for answer in answers) == [303, 422, 422, 422, 422]
    late = next(half for half, answer in zip(halves, answers, strict=True) if answer.status == 422)
    assert (await show(late, code_of(secret, -1))).status == 422, "nor is one from before it"
    spaced = codes[0].upper().replace("-", " ")
    assert (await show(late, spaced)).status == 303
    again = await password_shown(open_house, account.email)
    assert (await show(again, codes[0])).status == 422
    assert (await show(again, codes[1])).status == 303
    assert "8 of ten recovery codes" in (await visitor.get(HERE)).text


async def test_codes_are_not_guessed(open_house: House, open_books: Database) -> None:
    account, visitor = await inside(open_house, open_books)
    secret, _ = await turn_on(visitor)
    half = await password_shown(open_house, account.email)
    statuses = [(await show(half, f"{number:06}")).status for number in range(12)]
    # One try went into turning it on.
    assert statuses[:9] == [422] * 9 and statuses[9:] == [429] * 3
    assert (await show(half, code_of(secret))).status == 429


async def test_it_is_turned_off_with_the_password(open_house: House, open_books: Database) -> None:
    account, visitor = await inside(open_house, open_books)
    first, codes = await turn_on(visitor)
    assert (await visitor.send(HERE, {"off_password": "wrong"}, to=f"{HERE}/off")).status == 422
    assert (await visitor.send(HERE, {"codes_password": "wrong"}, to=f"{HERE}/codes")).status == 422
    renewed = await visitor.send(HERE, {"codes_password": PASSWORD}, to=f"{HERE}/codes")
    fresh = re.findall(r"\b[a-z2-7]{4}(?:-[a-z2-7]{4}){3}\b", renewed.text)
    assert len(fresh) == 10 and not set(fresh) & set(codes)
    half = await password_shown(open_house, account.email)
    assert (await show(half, codes[0])).status == 422
    done = await visitor.send(HERE, {"off_password": PASSWORD}, to=f"{HERE}/off")
    assert done.location == "/dashboard/settings?said=totp-off"
    assert (await Visitor(open_house).sign_in(account.email, PASSWORD)).location == "/dashboard"
    assert not await open_books.fetch("SELECT 1 FROM recovery_codes WHERE account_id = ?", (account.id,))
    assert len(await letters_to(open_books, account.email, "second_factor", count_min=2)) == 2
    second = re.search(r'id="totp-secret">([A-Z2-7]{32})<', (await visitor.get(HERE)).text)[1]
    assert second != first


async def test_an_old_session_must_show_the_password_first(open_house: House, open_books: Database) -> None:
    account, visitor = await inside(open_house, open_books)

    def age():
        yield ("UPDATE sessions SET proven_at_ms = 1 WHERE account_id = ?", (account.id,))

    await open_books.run(age)
    there = await visitor.get(HERE)
    assert there.location == "/dashboard/settings/confirm?next=%2Fdashboard%2Fsettings%2Fsecond-factor"
    assert (await visitor.send(there.location, {"code": "000000"}, to=HERE)).location == there.location
    confirm = "/dashboard/settings/confirm"
    assert (await visitor.send(there.location, {"current_password": "wrong"}, to=confirm)).status == 422
    back = await visitor.send(there.location, {"current_password": PASSWORD, "next": HERE}, to=confirm)
    assert back.location == HERE and (await visitor.get(HERE)).status == 200
    away = await visitor.send(confirm, {"current_password": PASSWORD, "next": "//evil.example"})
    assert away.location == "/dashboard/settings"


async def test_the_offered_secret_is_each_browsers_own(open_house: House, open_books: Database) -> None:
    alice = await enter(open_books, "alice")
    visitors = [Visitor(open_house, cookies=await sign_in(open_books, alice)) for _ in range(2)]
    pages = [await visitor.get(HERE) for visitor in visitors]
    one, other = (re.search(r'id="totp-secret">([A-Z2-7]{32})<', page.text)[1] for page in pages)
    assert one != other
    assert (await visitors[0].send(HERE, {"code": code_of(other)})).status == 422


def test_steps_around_now_are_taken() -> None:
    secret, at_ms = second_factor.secret_from("seed"), 1_700_000_000_000
    step = at_ms // STEP_MS
    for around, taken in ((0, step), (-1, step - 1), (1, step + 1), (-2, None), (2, None)):
        code = pyotp.TOTP(secret).generate_otp(step + around)
        assert second_factor.step_of(secret, f" {code[:3]} {code[3:]} ", at_ms) == taken
    assert second_factor.step_of(secret, "\ud800", at_ms) is None
