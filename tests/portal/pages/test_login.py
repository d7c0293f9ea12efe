"""Sign-in and sign-out: the right password, nobody else's, and not too many tries."""

from __future__ import annotations

import asyncio
import re
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import pytest

from models import account as accounts
from models import ids, password
from models.database import Database, Script
from portal.tries import SIGN_IN_MS, SIGN_INS_PER_ACCOUNT
from tests.cast import enter, sign_in
from tests.house import House
from tests.visitor import Visitor

PASSWORD = "four unrelated words"


async def owner(books: Database, name: str = "ada", **columns: object) -> accounts.Account:
    """Bring somebody on stage who has a password."""
    made = await accounts.create(books, f"{name}.{ids.new_id('x')}@example.com", plan="free", verified=True)
    await accounts.Account.filter(id=made.id).update(password_hash=await password.hash_of(PASSWORD), **columns)
    return made


async def test_a_password_opens_the_dashboard_and_signing_out_shuts_it(
    open_house: House, open_books: Database
) -> None:
    account = await owner(open_books)
    visitor = Visitor(open_house)
    there = await visitor.get("/dashboard/settings?tab=1")
    assert (there.status, there.location) == (303, "/login?next=/dashboard/settings%3Ftab%3D1")
    fields = {"email": f" {account.email.upper()} ", "password": PASSWORD, "next": "/dashboard/settings"}
    answer = await visitor.send(there.location, fields, to="/login")
    assert (answer.status, answer.location) == (303, "/dashboard/settings")
    assert await visitor.is_signed_in()
    assert (await visitor.get("/login")).location == "/dashboard"
    old = dict(visitor.cookies)
    out = await visitor.send("/dashboard/settings", {}, to="/logout")
    assert out.location == "/login?said=signed-out" and "session" not in visitor.cookies
    assert "You are signed out" in (await visitor.get(out.location)).text
    assert not await Visitor(open_house, cookies=old).is_signed_in(), "a cookie is worth nothing after signing out"


async def test_a_session_begins_under_a_new_cookie(open_house: House, open_books: Database) -> None:
    account = await owner(open_books)
    visitor = Visitor(open_house, cookies={"session": "chosen-by-somebody-else", "visit": "chosen-too"})
    first = await visitor.sign_in(account.email, PASSWORD)
    cookie = visitor.cookies["session"]
    assert cookie != "chosen-by-somebody-else" and len(cookie) >= 43
    assert {"httponly", "samesite=lax", "path=/"} <= {
        part.strip().lower() for part in first.headers["set-cookie"].split(";")
    }
    again = await visitor.send("/dashboard/settings", {"email": account.email, "password": PASSWORD}, to="/login")
    assert again.status == 303 and visitor.cookies["session"] != cookie
    assert not await Visitor(open_house, cookies={"session": cookie}).is_signed_in()
    rows = await open_books.fetch("SELECT hash FROM sessions WHERE account_id = ?", (account.id,))
    assert len(rows) == 1 and visitor.cookies["session"] not in rows[0]["hash"]


@pytest.mark.parametrize(
    "columns", [{}, {"state": "suspended"}, {"state": "closed"}, {"email_verified_at_ms": None}]
)
async def test_who_may_not_come_in_is_told_one_thing(
    open_house: House, open_books: Database, columns: dict[str, object]
) -> None:
    account = await owner(open_books, **columns)
    offered = PASSWORD if columns else "a wrong password"
    refused = await Visitor(open_house).sign_in(account.email, offered)
    unknown = await Visitor(open_house).sign_in("nobody@example.com", offered)
    assert refused.status == unknown.status == 422
    assert "The address or the password is wrong" in refused.text and offered not in refused.text
    assert "set-cookie" not in refused.headers or "session=" not in refused.headers["set-cookie"]
    cut = [answer.text.replace(account.email, "nobody@example.com") for answer in (refused, unknown)]
    assert len(cut[0]) == len(cut[1])


async def test_an_account_without_a_password_has_no_password(open_house: House, open_books: Database) -> None:
    made = await accounts.create(open_books, f"{ids.new_id('x')}@example.com", plan="free", verified=True)
    for offered in ("", " ", "None", "null"):
        assert (await Visitor(open_house).sign_in(made.email, offered)).status == 422


@pytest.mark.parametrize("offered", ["x" * 5000, "\0" * 12, "𝔭" * 300])
async def test_odd_passwords_are_wrong_ones(open_house: House, open_books: Database, offered: object) -> None:
    account = await owner(open_books)
    assert (await Visitor(open_house).sign_in(account.email, offered)).status == 422


@pytest.mark.parametrize("target", [
    "//evil.example", "/\\evil.example", "/%09/evil.example/..//", "https:evil.example", "https://evil.example",
    "javascript:alert(1)", "///evil.example", "\t//evil.example", " //evil.example", "/\t/evil.example",
    "@evil.example", "https://127.0.0.1@evil.example", "/..//evil.example", "", "dashboard", "\\\\evil.example",
])
async def test_signing_in_leads_nowhere_else(open_house: House, open_books: Database, target: str) -> None:
    account = await owner(open_books)
    answer = await Visitor(open_house).send(
        "/login", {"email": account.email, "password": PASSWORD, "next": target}
    )
    assert answer.status == 303 and answer.location.startswith("/") and answer.location[1:2] not in ("/", "\\")
    if not target.startswith(("/%09", "/..")):
        assert answer.location == "/dashboard"


async def test_strangers_guess_a_few_times_and_the_owner_still_comes_in(
    open_house: House, open_books: Database
) -> None:
    account = await owner(open_books)
    known = Visitor(open_house)
    assert (await known.sign_in(account.email, PASSWORD)).status == 303
    del known.cookies["session"]
    assert "device" in known.cookies
    answers = await asyncio.gather(*(
        Visitor(open_house).sign_in(account.email, f"wrong password {number}") for number in range(60)
    ))
    checked = [answer for answer in answers if answer.status == 422]
    # The owner's own sign-in was counted as well: nobody knew that browser yet.
    assert len(checked) == SIGN_INS_PER_ACCOUNT - 1
    assert {answer.status for answer in answers} == {422, 429}
    stranger = await Visitor(open_house).sign_in(account.email, PASSWORD)
    assert stranger.status == 429 and "Try again in 15 minutes" in stranger.text
    assert (await known.sign_in(account.email, PASSWORD)).status == 303
    other = await owner(open_books)
    stolen = Visitor(open_house, cookies={"device": known.cookies["device"]})
    for _ in range(SIGN_INS_PER_ACCOUNT):
        await Visitor(open_house).sign_in(other.email, "wrong password")
    assert (await stolen.sign_in(other.email, PASSWORD)).status == 429, "a device is known to one account"
    forged = Visitor(open_house, cookies={"device": "name." + "0" * 64})
    assert (await forged.sign_in(account.email, PASSWORD)).status == 429


async def test_a_thousand_guesses_from_fifty_addresses_are_ten(open_house: House, open_books: Database) -> None:
    account, bystander = await owner(open_books), await owner(open_books)
    known = Visitor(open_house)
    assert (await known.sign_in(account.email, PASSWORD)).status == 303
    del known.cookies["session"]
    await windows_end(open_books)
    strangers = [Visitor(open_house) for _ in range(50)]
    pages = await asyncio.gather(*(stranger.get("/login") for stranger in strangers))
    tokens = [re.search(r'name="csrf_token" value="([0-9a-f]+)"', page.text)[1] for page in pages]

    async def checked_of(offered: Sequence[str], *, at_once: int = 10) -> int:
        """Guess from all addresses and return how many passwords were looked at."""
        told: Counter[int] = Counter()
        left = iter(enumerate(offered))

        async def work() -> None:
            for number, word in left:
                at = number % len(strangers)
                fields = {"csrf_token": tokens[at], "email": account.email, "password": word}
                answer = await strangers[at].post("/login", fields)
                told[answer.status] += 1
                assert "people are signing in" not in answer.text, "a refused guess waits for no check"

        await asyncio.gather(*(work() for _ in range(at_once)))
        # A database that is asked for one row so often may be too busy to count, and then nothing is looked at.
        assert told.keys() <= {422, 429, 503}, told
        return told[422]

    # Every address guesses right at its last try, and none is told.
    guesses = [f"wrong password {number}" for number in range(950)] + [PASSWORD] * 50
    assert 0 < (checked := await checked_of(guesses[:700])) <= SIGN_INS_PER_ACCOUNT
    assert checked + await checked_of(guesses[700:], at_once=300) <= SIGN_INS_PER_ACCOUNT
    assert not any("session" in stranger.cookies for stranger in strangers)
    assert (await known.sign_in(account.email, PASSWORD)).status == 303
    neighbour = Visitor(open_house, address=strangers[0].address)
    assert (await neighbour.sign_in(bystander.email, PASSWORD)).status == 303, "nobody else is kept out"
    await windows_end(open_books)
    assert 0 < await checked_of(guesses[:100]) <= SIGN_INS_PER_ACCOUNT


async def windows_end(books: Database) -> None:
    """Let a quarter of an hour pass for what was counted."""

    def script() -> Script[None]:
        yield ("UPDATE rate_windows SET window_start_ms = window_start_ms - ?", (SIGN_IN_MS,))

    await books.run(script)


async def test_sessions_end_by_themselves(open_house: House, open_books: Database) -> None:
    alice = await enter(open_books, "alice")
    visitor = Visitor(open_house, cookies=await sign_in(open_books, alice))
    assert await visitor.is_signed_in()
    for column, age in (("expires_at_ms", timedelta(0)), ("seen_at_ms", timedelta(days=14, seconds=1))):
        visitor.cookies = await sign_in(open_books, alice)
        at_ms = int((time.time() - age.total_seconds()) * 1000)

        def age_it(column=column, at_ms=at_ms):
            yield (f"UPDATE sessions SET {column} = ? WHERE account_id = ?", (at_ms, alice.account.id))

        await open_books.run(age_it)
        assert not await visitor.is_signed_in()


async def test_passwords_are_not_checked_on_the_event_loop(open_house: House, open_books: Database) -> None:
    """Forty sign-ins take a second of both threads; meanwhile pages answer as they always do."""
    account = await owner(open_books)
    visitors = [Visitor(open_house) for _ in range(40)]
    taken: list[float] = []
    done = asyncio.Event()

    async def look() -> None:
        while not done.is_set():
            started_s = time.perf_counter()
            assert open_house.base_url and (await Visitor(open_house).get("/healthz")).status == 200
            taken.append(time.perf_counter() - started_s)

    looking = asyncio.create_task(look())
    await asyncio.gather(*(
        visitor.sign_in(f"{number}.{account.email}", PASSWORD) for number, visitor in enumerate(visitors)
    ))
    done.set()
    await looking
    assert statistics.median(taken) < 0.1 and len(taken) > 5


async def test_the_demo_account_signs_in_with_the_printed_password(open_house: House) -> None:
    printed = re.search(r"/login {3}password (\S+)", open_house.log())
    assert printed is not None
    visitor = Visitor(open_house)
    assert (await visitor.sign_in("demo@tollgate.local", printed[1])).location == "/dashboard"
    assert await visitor.is_signed_in()


async def test_a_hundred_sign_ins_at_once_stay_small(new_database, twin: str, tmp_path: Path) -> None:
    """By the memory of a process of its own, at its highest: two passwords are checked at once, 19 MiB each."""
    house = House(tmp_path, await new_database("sqlite"), twin, CLIENT_IP_HEADER="X-From").start()
    try:
        (pid,) = house.children()
        visitors = [Visitor(house) for _ in range(100)]
        pages = [await visitor.get("/login") for visitor in visitors]
        tokens = [re.search(r'value="([0-9a-f]{64})"', page.text)[1] for page in pages]
        before = _peak_bytes(pid)
        emails = [f"{ids.new_id('x')}@example.com" for _ in visitors]
        fields = [
            {"csrf_token": token, "email": email, "password": PASSWORD}
            for token, email in zip(tokens, emails, strict=True)
        ]
        answers = await asyncio.gather(*(
            visitor.post("/login", field) for visitor, field in zip(visitors, fields, strict=True)
        ))
        assert {answer.status for answer in answers} <= {422, 503}
        assert sum(answer.status == 422 for answer in answers) > 50
        assert _peak_bytes(pid) < 512 << 20 and _peak_bytes(pid) - before < 100 << 20
    finally:
        house.stop()


def _peak_bytes(pid: int) -> int:
    """Return the most memory that a process has ever had."""
    return int(re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())[1]) << 10
