"""What people do to an account at the same moment, in three processes: one succeeds, and nobody slips through."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Coroutine

import pytest

from models import account as accounts
from models import api_key, ids, outbox, password, session
from models.database import Database
from portal.tries import SIGN_INS_PER_ACCOUNT, _hashed
from tests.cast import give
from tests.house import House, Houses, books_of
from tests.portal.pages.test_login import PASSWORD, owner
from tests.portal.pages.test_second_factor import HERE as SECOND_FACTOR
from tests.portal.pages.test_second_factor import code_of, turn_on
from tests.portal.pages.test_settings import HERE as SETTINGS
from tests.portal.pages.test_signup import new_email
from tests.visitor import Answer, Visitor, letters_to, link_in

FRESH = "five other unrelated words"
THIEFS = "the password of a thief"
NOTICE = outbox.Letter("nobody@example.com", "password_changed", "subject", "text", "html")


@pytest.fixture
async def trio(database_kind: str, own_houses: Houses) -> House:
    """Give a Tollgate of three processes that believes a stranger's address."""
    return await own_houses.named("trio", database_kind, processes=3, CLIENT_IP_HEADER="X-From")


@pytest.fixture
async def books(trio: House) -> AsyncIterator[Database]:
    """Give its database."""
    async with books_of(trio) as books:
        yield books


async def ready(visitor: Visitor, page: str) -> str:
    """Look at a page and return its form's token."""
    shown = await visitor.get(page)
    return re.search(r'name="csrf_token" value="([0-9a-f]{64})"', shown.text)[1]


async def at_once(
    visitors: list[Visitor], page: str, fields: dict[str, object], *, to: str | None = None
) -> list[Answer]:
    """Let everybody look at a page, then send its form, all at the same moment."""
    tokens = [await ready(visitor, page) for visitor in visitors]
    return list(await asyncio.gather(*(
        visitor.post(to or page, {"csrf_token": token, **fields})
        for visitor, token in zip(visitors, tokens, strict=True)
    )))


async def test_a_link_used_often_at_once_opens_one_session(trio: House, books: Database) -> None:
    email = new_email()
    await Visitor(trio).sign_up(email, PASSWORD)
    path = link_in((await letters_to(books, email, "verify"))[-1], trio)
    answers = await at_once([Visitor(trio) for _ in range(30)], path, {"password": FRESH})
    assert sorted(answer.status for answer in answers) == [303] + [404] * 29
    (row,) = await books.fetch("SELECT id FROM accounts WHERE email = ?", (email,))
    assert len(await session.of_account(books, row["id"])) == 1


@pytest.mark.parametrize("kind", ["recovery", "totp"])
async def test_one_code_lets_one_of_many_sessions_in(trio: House, books: Database, kind: str) -> None:
    account, visitor = await owner(books), Visitor(trio)
    await visitor.sign_in(account.email, PASSWORD)
    secret, codes = await turn_on(visitor)
    halves = [Visitor(trio) for _ in range(SIGN_INS_PER_ACCOUNT - 2)]
    for half in halves:
        assert "/login/second" in (await half.sign_in(account.email, PASSWORD)).location
    code = codes[3] if kind == "recovery" else code_of(secret)
    answers = await at_once(halves, "/login/second", {"code": code})
    assert sorted(answer.status for answer in answers) == [303] + [422] * (len(halves) - 1)
    assert len(await session.of_account(books, account.id)) == 2


async def test_half_a_session_becomes_one_whole_one(trio: House, books: Database) -> None:
    account, visitor = await owner(books), Visitor(trio)
    await visitor.sign_in(account.email, PASSWORD)
    _, codes = await turn_on(visitor)
    half = Visitor(trio)
    await half.sign_in(account.email, PASSWORD)
    same = [Visitor(trio, cookies=dict(half.cookies)) for _ in range(4)]
    tokens = [await ready(each, "/login/second") for each in same]
    answers = await asyncio.gather(*(
        each.post("/login/second", {"csrf_token": token, "code": code})
        for each, token, code in zip(same, tokens, codes, strict=False)
    ))
    assert sum(answer.location == "/dashboard" for answer in answers) == 1
    assert len(await session.of_account(books, account.id)) == 2
    left = await books.fetch(
        "SELECT COUNT(*) FROM recovery_codes WHERE account_id = ? AND used_at_ms IS NULL", (account.id,)
    )
    assert left[0][0] == 9, "who came late has used no code up"


async def test_of_two_accounts_that_move_to_one_mailbox_one_does(trio: House, books: Database) -> None:
    name = ids.new_id("x")
    targets = [f"{name}@example.com", f"{name}+a@example.com", f"{name}@example.com", f"{name}+b@example.com"]
    people = [await owner(books, f"p{number}") for number in range(4)]
    paths = []
    for person, target in zip(people, targets, strict=True):
        visitor = Visitor(trio)
        await visitor.sign_in(person.email, PASSWORD)
        fields = {"email": target, "email_password": PASSWORD}
        assert (await visitor.send(SETTINGS, fields, to=f"{SETTINGS}/email")).status == 303
        paths.append(link_in((await letters_to(books, target, "email_change"))[-1], trio))
    visitors = [Visitor(trio) for _ in paths]
    tokens = [await ready(visitor, path) for visitor, path in zip(visitors, paths, strict=True)]
    answers = await asyncio.gather(*(
        visitor.post(path, {"csrf_token": token})
        for visitor, path, token in zip(visitors, paths, tokens, strict=True)
    ))
    assert sorted(answer.status for answer in answers) == [303, 404, 404, 404]
    assert len(await books.fetch("SELECT 1 FROM accounts WHERE mailbox = ?", (f"{name}@example.com",))) == 1


async def test_a_mailbox_that_moved_in_meanwhile_is_not_verified_again(trio: House, books: Database) -> None:
    new, person = new_email(), await owner(books)
    visitor = Visitor(trio)
    await visitor.sign_in(person.email, PASSWORD)
    await visitor.send(SETTINGS, {"email": new, "email_password": PASSWORD}, to=f"{SETTINGS}/email")
    change = link_in((await letters_to(books, new, "email_change"))[-1], trio)
    stranger = Visitor(trio)
    await stranger.sign_up(new.replace("@", "+tag@"), THIEFS)
    tagged = new.replace("@", "+tag@")
    verify = link_in((await letters_to(books, tagged, "verify"))[-1], trio)
    assert (await Visitor(trio).send(change, {})).location == "/login?said=email-changed", (
        "a sign-up that nobody verified keeps no owner from the address"
    )
    assert (await stranger.get(verify)).status == 404
    rows = await books.fetch("SELECT id FROM accounts WHERE mailbox = ?", (new,))
    assert [row["id"] for row in rows] == [person.id]
    assert (await Visitor(trio).sign_in(new, PASSWORD)).status == 303
    assert trio.command("audit", "--full").returncode == 0


async def test_an_unverified_account_with_money_or_keys_is_not_moved_away(trio: House, books: Database) -> None:
    new, person = new_email(), await owner(books)
    made = await accounts.create(books, new, plan="free")
    await give(books, made.id, 5_000_000)
    visitor = Visitor(trio)
    await visitor.sign_in(person.email, PASSWORD)
    await visitor.send(SETTINGS, {"email": new, "email_password": PASSWORD}, to=f"{SETTINGS}/email")
    assert not await letters_to(books, new, "email_change", count_min=0)
    (row,) = await books.fetch("SELECT state, email FROM accounts WHERE id = ?", (made.id,))
    assert (row["state"], row["email"]) == ("active", new)


async def busy(house: House, checks: int = 45) -> list[asyncio.Task[Answer]]:
    """Give every process passwords to check for a while."""
    strangers = [Visitor(house) for _ in range(checks)]
    tokens = await asyncio.gather(*(ready(stranger, "/login") for stranger in strangers))
    fields = [
        {"csrf_token": token, "email": f"{ids.new_id('x')}@example.com", "password": PASSWORD} for token in tokens
    ]
    return [
        asyncio.ensure_future(stranger.post("/login", field))
        for stranger, field in zip(strangers, fields, strict=True)
    ]


async def reset_during(
    books: Database, account: accounts.Account, bucket: str, count: int, make: Callable[[], list[Coroutine]]
) -> tuple[str, list[Answer]]:
    """Change a password as its owner does, while as many tries wait for it to be checked as count in a bucket."""
    hashed = await password.hash_of(FRESH)
    trying = [asyncio.ensure_future(each) for each in make()]
    for _ in range(1000):
        rows = await books.fetch("SELECT count FROM rate_windows WHERE bucket = ?", (bucket,))
        if rows and rows[0][0] >= count:
            break
        await asyncio.sleep(0.005)
    await asyncio.sleep(0.03)
    await books.run(lambda: accounts.set_password(account.id, hashed, NOTICE))
    return hashed, list(await asyncio.gather(*trying))


async def test_a_sign_in_with_the_old_password_does_not_outlive_a_new_one(trio: House, books: Database) -> None:
    account = await owner(books)
    thieves = [Visitor(trio) for _ in range(8)]
    tokens = [await ready(thief, "/login") for thief in thieves]
    noise = await busy(trio)
    fields = {"email": account.email, "password": PASSWORD}
    _, answers = await reset_during(books, account, f"sign-in:{_hashed(account.email)}", len(thieves), lambda: [
        thief.post("/login", {"csrf_token": token, **fields}) for thief, token in zip(thieves, tokens, strict=True)
    ])
    await asyncio.gather(*noise)
    assert not await session.of_account(books, account.id), [answer.status for answer in answers]
    assert {answer.status for answer in answers} <= {303, 422, 503}
    for thief in thieves:
        assert not await thief.is_signed_in()


@pytest.mark.parametrize(("to", "fields"), [
    (f"{SETTINGS}/password", {"current_password": PASSWORD, "new_password": THIEFS}),
    (f"{SETTINGS}/email", {"email_password": PASSWORD, "email": "thief.{}@example.com"}),
    (f"{SETTINGS}/close", {"current_password": PASSWORD}),
    (f"{SECOND_FACTOR}/off", {"off_password": PASSWORD}),
    (f"{SECOND_FACTOR}/codes", {"codes_password": PASSWORD}),
])
async def test_who_is_thrown_out_meanwhile_changes_nothing(
    trio: House, books: Database, to: str, fields: dict[str, str]
) -> None:
    account, thief = await owner(books), Visitor(trio)
    await thief.sign_in(account.email, PASSWORD)
    await turn_on(thief)
    fields = {name: value.format(ids.new_id("x")) for name, value in fields.items()}
    token = await ready(thief, SETTINGS)
    noise = await busy(trio)
    all_codes = "SELECT hash FROM recovery_codes WHERE account_id = ? ORDER BY 1"
    codes = await books.fetch(all_codes, (account.id,))
    hashed, (answer,) = await reset_during(
        books, account, f"confirm:{account.id}", 1, lambda: [thief.post(to, {"csrf_token": token, **fields})]
    )
    await asyncio.gather(*noise)
    # As a rule it is thrown out while its password waits to be checked; all else is refused as well.
    assert (answer.status, answer.location[:6]) in ((303, "/login"), (403, ""), (422, ""))
    assert not await thief.is_signed_in()
    (row,) = await books.fetch("SELECT * FROM accounts WHERE id = ?", (account.id,))
    assert (row["state"], row["password_hash"]) == ("active", hashed) and row["totp_secret"]
    assert not await books.fetch("SELECT 1 FROM one_time_links WHERE account_id = ?", (account.id,))
    assert [row["hash"] for row in codes] == [row["hash"] for row in await books.fetch(all_codes, (account.id,))]


async def test_a_new_password_voids_a_change_of_address_that_was_asked_for(trio: House, books: Database) -> None:
    account, thief, new = await owner(books), Visitor(trio), new_email("thief")
    await thief.sign_in(account.email, PASSWORD)
    await thief.send(SETTINGS, {"email": new, "email_password": PASSWORD}, to=f"{SETTINGS}/email")
    path = link_in((await letters_to(books, new, "email_change"))[-1], trio)
    # What the mail to the old address tells its owner to do.
    assert "/forgot" in (await letters_to(books, account.email, "email_changing"))[0]
    visitor = Visitor(trio)
    await visitor.send("/forgot", {"email": account.email})
    there = link_in((await letters_to(books, account.email, "reset"))[-1], trio)
    assert (await visitor.send(there, {"password": FRESH})).status == 303
    assert (await Visitor(trio).get(path)).status == 404
    token = await ready(stranger := Visitor(trio), "/login")
    assert (await stranger.post(path, {"csrf_token": token})).status == 404
    assert (await Visitor(trio).sign_in(account.email, FRESH)).status == 303


async def test_of_many_that_close_an_account_one_does_and_its_calls_are_ended(
    trio: House, books: Database, http
) -> None:
    account = await owner(books, plan="wallet")
    await give(books, account.id, 5_000_000)
    _, plain = await api_key.create(account, "running")
    visitors = [Visitor(trio) for _ in range(4)]
    for visitor in visitors:
        await visitor.sign_in(account.email, PASSWORD)
    asked = {
        "model": "twin", "stream": True, "max_tokens": 2000,
        "messages": [{"role": "user", "content": "tokens:400 delay:0.05"}],
    }
    headers = {"Authorization": f"Bearer {plain}"}
    async with http.post(trio.base_url + "/v1/chat/completions", json=asked, headers=headers) as running:
        assert running.status == 200
        await running.content.readany()
        answers = await at_once(visitors, f"{SETTINGS}/close", {"current_password": PASSWORD})
        # A database that is asked for one row so often at once may be too busy for some.
        done = {answer.location or answer.status for answer in answers}
        assert done <= {"/login?said=closed", "/login?next=/dashboard", 503}
        async with asyncio.timeout(20):
            await running.read()
    assert sum(answer.location == "/login?said=closed" for answer in answers) <= 1
    assert len(await letters_to(books, account.email, "closed")) == 1
    for _ in range(100):
        rows = await books.fetch("SELECT state FROM calls WHERE account_id = ?", (account.id,))
        if [row["state"] for row in rows] != ["open"]:
            break
        await asyncio.sleep(0.1)
    (wallet,) = await books.fetch("SELECT * FROM wallets WHERE account_id = ?", (account.id,))
    assert wallet["held_microusd"] == 0 and 0 < wallet["posted_microusd"] <= 5_000_000
    assert trio.command("audit", "--full").returncode == 0
