"""Sign-up and verification: from an address to a dashboard, and nothing told to anybody else."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections import Counter

import pytest

from models import account as accounts
from models import ids, password
from models.database import Database
from portal.tries import LETTERS_PER_MAILBOX, LEVEL_S, SIGN_UPS_PER_NEIGHBOURHOOD
from tests.house import House, Houses
from tests.visitor import Answer, Visitor, letters_to, link_in

PASSWORD = "four unrelated words"
VARYING = ("date", "x-request-id")


def new_email(name: str = "ada") -> str:
    """Return an address that nobody has."""
    return f"{name}.{ids.new_id('x')}@example.com"


async def verified(house: House, books: Database, email: str, password: str = PASSWORD) -> Visitor:
    """Sign up and verify; return the browser that is signed in."""
    visitor = Visitor(house)
    assert (await visitor.sign_up(email, password)).location == "/signup/sent"
    letter = (await letters_to(books, email, "verify"))[-1]
    done = await visitor.send(link_in(letter, house), {})
    assert (done.status, done.location) == (303, "/dashboard?said=verified")
    return visitor


async def test_from_an_address_to_the_dashboard(open_house: House, open_books: Database) -> None:
    email, visitor = new_email(), Visitor(open_house)
    page = await visitor.get("/signup")
    assert page.status == 200 and 'autocomplete="new-password"' in page.text
    assert page.headers["cache-control"] == "no-store"
    asked = await visitor.sign_up(email.upper(), PASSWORD)
    assert (asked.status, asked.location) == (303, "/signup/sent")
    assert "Check your mail" in (await visitor.get("/signup/sent")).text
    (letter,) = await letters_to(open_books, email)
    path = link_in(letter, open_house)
    assert not await visitor.is_signed_in()
    assert (await visitor.sign_in(email, PASSWORD)).status == 422

    shown = await visitor.get(path)
    assert shown.status == 200 and email in shown.text and shown.text.count("<button") == 1
    assert (await visitor.get(path)).status == 200, "looking at a link must not use it"
    before = dict(visitor.cookies)
    done = await visitor.send(path, {})
    assert done.location == "/dashboard?said=verified" and "session" in visitor.cookies
    assert "session" not in before
    assert "Your address is verified" in (await visitor.get(done.location)).text
    (account,) = await open_books.fetch("SELECT * FROM accounts WHERE email = ?", (email,))
    assert (account["plan"], account["state"], account["mailbox"]) == ("free", "active", email)
    assert account["email_verified_at_ms"] and account["password_hash"].startswith("$argon2id$")
    wallet = await open_books.fetch("SELECT 1 FROM wallets WHERE account_id = ?", (account["id"],))
    assert len(wallet) == 1
    assert (await Visitor(open_house).sign_in(email, PASSWORD)).location == "/dashboard"


async def test_a_link_is_good_once_and_not_for_anything_else(open_house: House, open_books: Database) -> None:
    email = new_email()
    for _ in range(2):
        await Visitor(open_house).sign_up(email, PASSWORD)
    older, newer = (link_in(text, open_house) for text in await letters_to(open_books, email, count_min=2))
    assert older != newer
    assert (await Visitor(open_house).get(older)).status == 404, "a newer link voids an older one"
    assert (await Visitor(open_house).get(newer.replace("verify", "reset"))).status == 404
    visitors = [Visitor(open_house) for _ in range(20)]
    tokens = [await visitor.get(newer) for visitor in visitors]
    fields = [
        {"csrf_token": re.search(r'value="([0-9a-f]{64})"', page.text)[1], "password": PASSWORD} for page in tokens
    ]
    done = await asyncio.gather(
        *(visitor.post(newer, field) for visitor, field in zip(visitors, fields, strict=True))
    )
    assert sorted(answer.status for answer in done) == [303] + [404] * 19
    assert sum("session" in visitor.cookies for visitor in visitors) == 1
    assert (await Visitor(open_house).get(newer)).status == 404
    assert (await Visitor(open_house).get("/verify/" + "x" * 43)).status == 404


async def test_the_password_is_the_one_of_the_link_that_was_used(open_house: House, open_books: Database) -> None:
    email = new_email()
    visitor = Visitor(open_house)
    await visitor.sign_up(email, "the first password")
    await visitor.sign_up(email, "the second password")
    letter = (await letters_to(open_books, email, count_min=2))[-1]
    await visitor.send(link_in(letter, open_house), {})
    assert (await Visitor(open_house).sign_in(email, "the first password")).status == 422
    assert (await Visitor(open_house).sign_in(email, "the second password")).status == 303


async def test_expired_links_are_used_up(open_house: House, open_books: Database) -> None:
    email = new_email()
    await Visitor(open_house).sign_up(email, PASSWORD)
    path = link_in((await letters_to(open_books, email))[0], open_house)

    def expire():
        yield ("UPDATE one_time_links SET expires_at_ms = 1 WHERE email = ?", (email,))

    page = await (visitor := Visitor(open_house)).get(path)
    assert page.status == 200
    token = re.search(r'value="([0-9a-f]{64})"', page.text)[1]
    await open_books.run(expire)
    assert (await visitor.get(path)).status == 404
    assert (await visitor.post(path, {"csrf_token": token})).status == 404
    assert "session" not in visitor.cookies


@pytest.mark.parametrize(("email", "password", "says"), [
    ("nobody", PASSWORD, "not an e-mail address"), ("", PASSWORD, "Fill this in"),
    ("a@b.example\r\nBcc: x@y.example", PASSWORD, "ordinary characters"),
    ("<b>@example.com", PASSWORD, "not an e-mail address"),
    ("ada@example.com", "short", "10 characters"), ("ada@example.com", "", "Fill this in"),
    ("ada@example.com", "password1234", "too easy"), ("ada@example.com", "aaaaaaaaaaaaaaa", "too easy"),
    ("ada@example.com", "ada@example.com", "too easy"), ("ada@example.com", "x7k2 " * 300, "1024 bytes"),
])
async def test_a_form_that_will_not_do(open_house: House, email: str, password: str, says: str) -> None:
    answer = await Visitor(open_house).send("/signup", {"email": email, "password": password})
    assert answer.status == 422 and says in answer.text and 'aria-invalid="true"' in answer.text
    assert not password or answer.text.count(f'value="{password}"') == (password == email)


async def test_who_is_known_here_is_told_by_mail_alone(open_house: House, open_books: Database) -> None:
    known, unknown = new_email("known"), new_email("unknown")
    await verified(open_house, open_books, known)
    answers = [await Visitor(open_house).sign_up(email, PASSWORD) for email in (known, unknown)]
    for name in ("status", "text", "location"):
        assert getattr(answers[0], name) == getattr(answers[1], name)
    assert [answer.headers.keys() for answer in answers[:1]] == [answer.headers.keys() for answer in answers[1:]]
    (letter,) = await letters_to(open_books, known, "known")
    assert "You have an account there already" in letter and "/forgot" in letter and "/verify/" not in letter
    assert (await Visitor(open_house).sign_in(known, PASSWORD)).status == 303


@pytest.mark.parametrize("path", ["/signup", "/forgot", "/login"])
async def test_an_answer_tells_nothing_and_none_comes_early(
    open_house: House, open_books: Database, path: str
) -> None:
    """How long answers take is compared by `python -m tests.bench.enumeration`, where nothing else is running."""
    samples = 10
    hashed = await password.hash_of(PASSWORD)
    emails = {kind: [new_email(kind) for _ in range(samples)] for kind in ("known.", "nobody")}
    for email in emails["known."]:
        made = await accounts.create(open_books, email, plan="free", verified=True)
        await accounts.Account.filter(id=made.id).update(password_hash=hashed)
    taken: dict[str, list[float]] = {kind: [] for kind in emails}
    told: dict[str, set[tuple[object, ...]]] = {kind: set() for kind in emails}

    async def ask(kind: str, email: str) -> None:
        visitor = Visitor(open_house)
        token = re.search(r'value="([0-9a-f]{64})"', (await visitor.get(path)).text)[1]
        # At the sign-in the password is a wrong one, for a right one is what tells.
        fields = {"csrf_token": token, "email": email, "password": f"{PASSWORD}!"}
        started_s = time.perf_counter()
        answer = await visitor.post(path, fields)
        taken[kind].append(time.perf_counter() - started_s)
        assert answer.status == (422 if path == "/login" else 303)
        headers = " ".join(f"{name}={value}" for name, value in answer.headers.items() if name not in VARYING)
        text = answer.text.replace(email, "EMAIL").replace(token, "TOKEN")
        headers = re.sub(r"[0-9a-f]{64}|[Ee]xpires=[^;]*", "", headers)
        told[kind].add((answer.status, answer.location, headers, text))

    for pair in zip(*emails.values(), strict=True):
        await asyncio.gather(*(ask(*each) for each in zip(emails, pair, strict=True)))
    assert told["known."] == told["nobody"] and len(told["nobody"]) == 1
    if path != "/login":
        assert min(min(times) for times in taken.values()) >= LEVEL_S, "an answer came before its time"


@pytest.mark.parametrize(("first", "second"), [
    ("Ada.{}@Example.com", "ada.{}+more@example.com"), ("a.d.a{}@gmail.com", "ada{}+x@googlemail.com"),
])
async def test_one_mailbox_has_one_account(
    open_house: House, open_books: Database, first: str, second: str
) -> None:
    number = ids.new_id("x").replace("_", "")
    first, second = first.format(number), second.format(number)
    await verified(open_house, open_books, first.lower())
    await Visitor(open_house).sign_up(second, PASSWORD)
    assert await letters_to(open_books, first.lower(), "known"), "the letter goes to the account's own address"
    rows = await open_books.fetch(
        "SELECT id FROM accounts WHERE mailbox = ?", (accounts.mailbox_of(accounts.normal_email(first)),)
    )
    assert len(rows) == 1


async def test_sign_ups_at_the_same_moment_make_one_account(open_house: House, open_books: Database) -> None:
    name = ids.new_id("x")
    emails = [f"{name}+{number}@example.com" for number in range(LETTERS_PER_MAILBOX)]
    await asyncio.gather(*(Visitor(open_house).sign_up(email, PASSWORD) for email in emails))
    rows = await open_books.fetch("SELECT id FROM accounts WHERE mailbox = ?", (f"{name}@example.com",))
    assert len(rows) == 1


async def test_a_hundred_sign_ups_from_one_address_make_ten_accounts(
    open_house: House, open_books: Database
) -> None:
    name, address = ids.new_id("x"), Visitor(open_house).address
    emails = [f"{number}@{name}.example" for number in range(100)]
    answers: list[Answer] = []
    for start in range(0, len(emails), 20):
        # In browsers of their own, many at once: neither a cookie nor the order decides.
        answers += await asyncio.gather(*(
            Visitor(open_house, address=address).sign_up(email, PASSWORD) for email in emails[start : start + 20]
        ))
    assert Counter(answer.status for answer in answers) == {303: SIGN_UPS_PER_NEIGHBOURHOOD, 429: 90}
    made = await open_books.fetch("SELECT email FROM accounts WHERE email LIKE ?", (f"%{name}.example",))
    mailed = await open_books.fetch("SELECT recipient FROM outbox WHERE recipient LIKE ?", (f"%{name}.example",))
    let_in = {email for email, answer in zip(emails, answers, strict=True) if answer.status == 303}
    assert {row["email"] for row in made} == {row["recipient"] for row in mailed} == let_in
    refused = (set(emails) - let_in).pop()
    assert (await Visitor(open_house).sign_up(refused, PASSWORD)).status == 303, "nobody else is kept out"


@pytest.mark.parametrize("spellings", [
    ("{1}@example.com", "{1}+{0}@example.com", "{1}+{0}+x@EXAMPLE.COM", "{2}@example.com", "{2}+{0}@Example.com"),
    ("{1}@gmail.com", "{3}@gmail.com", "{3}+{0}@googlemail.com", "{2}@gmail.com", "{1}.+{0}@googlemail.com"),
], ids=["tags and capitals", "dots"])
async def test_the_spellings_of_a_mailbox_count_as_one(
    open_house: House, open_books: Database, spellings: tuple[str, ...]
) -> None:
    """From as many addresses; so the mailbox is what is counted."""
    name = f"ada{secrets.token_hex(6)}"
    forms = name, name.upper(), ".".join(name)
    emails = [spellings[number % len(spellings)].format(number, *forms) for number in range(25)]
    assert len({accounts.mailbox_of(accounts.normal_email(email)) for email in emails}) == 1
    answers = await asyncio.gather(*(Visitor(open_house).sign_up(email, PASSWORD) for email in emails))
    assert Counter(answer.status for answer in answers) == {303: LETTERS_PER_MAILBOX, 429: 25 - LETTERS_PER_MAILBOX}
    mailbox = accounts.mailbox_of(emails[0])
    (account,) = await open_books.fetch("SELECT id FROM accounts WHERE mailbox = ?", (mailbox,))
    letters = await open_books.fetch("SELECT 1 FROM outbox WHERE account_id = ?", (account["id"],))
    assert len(letters) == LETTERS_PER_MAILBOX
    for email in emails[:5]:
        assert (await Visitor(open_house).send("/forgot", {"email": email})).status == 429


async def test_a_neighbourhood_signs_up_a_few_times_an_hour(open_house: House, open_books: Database) -> None:
    digits = secrets.token_hex(8)
    network = ":".join(digits[at : at + 4] for at in range(0, 16, 4))
    answers = [
        await Visitor(open_house, address=f"{network}::{number + 1}").sign_up(new_email(), PASSWORD)
        for number in range(SIGN_UPS_PER_NEIGHBOURHOOD + 3)
    ]
    assert [answer.status for answer in answers] == [303] * SIGN_UPS_PER_NEIGHBOURHOOD + [429] * 3
    assert "Try again in" in answers[-1].text
    assert (await Visitor(open_house).sign_up(new_email(), PASSWORD)).status == 303


async def test_a_domain_signs_up_a_few_times_an_hour(
    database_kind: str, own_houses: Houses
) -> None:
    house = await own_houses.named("few", database_kind, CLIENT_IP_HEADER="X-From", SIGN_UPS_PER_DOMAIN="3")
    domain = f"{secrets.token_hex(6)}.example"
    emails = [
        f"{name}@{place}" for name, place in
        (("a", domain), ("b", f"mail.{domain}"), ("c", domain.upper()), ("d", domain), ("e", f"mx.{domain}"))
    ]
    # From as many addresses.
    statuses = [(await Visitor(house).sign_up(email, PASSWORD)).status for email in emails]
    assert statuses == [303, 303, 303, 429, 429]
    for number in range(5):
        ada = f"ada{secrets.token_hex(6)}{number}@gmail.com"
        assert (await Visitor(house).sign_up(ada, PASSWORD)).status == 303, "the domain is everybody's"
    assert (await Visitor(house).sign_up(f"bob@{secrets.token_hex(6)}.example", PASSWORD)).status == 303


@pytest.mark.parametrize(("mailbox", "domain"), [
    ("a@example.com", "example.com"), ("a@b.c.example.com", "example.com"), ("a@b.example.co.uk", "example.co.uk"),
    ("a@example.org.au", "example.org.au"), ("a@example.de", "example.de"), ("a@x.example.de", "example.de"),
    ("a@gmail.com", None), ("a@localhost", "localhost"), ("a@co.uk", "co.uk"),
])
def test_whose_domain_a_mailbox_belongs_to(mailbox: str, domain: str | None) -> None:
    assert accounts.owner_domain_of(mailbox) == domain


async def test_a_mailbox_gets_a_few_letters_an_hour(open_house: House, open_books: Database) -> None:
    email = new_email()
    statuses = [(await Visitor(open_house).sign_up(email, PASSWORD)).status for _ in range(LETTERS_PER_MAILBOX + 2)]
    assert statuses == [303] * LETTERS_PER_MAILBOX + [429] * 2
    assert (await Visitor(open_house).send("/forgot", {"email": email})).status == 429
    assert len(await letters_to(open_books, email)) == LETTERS_PER_MAILBOX


async def test_links_begin_with_the_public_address_whatever_a_request_says(
    open_house: House, open_books: Database
) -> None:
    email = new_email()
    forged = dict.fromkeys(("X-Forwarded-Host", "X-Original-Host", "X-Forwarded-Server"), "evil.example")
    answer = await Visitor(open_house).send("/signup", {"email": email, "password": PASSWORD}, **forged)
    assert answer.status == 303
    (letter,) = await letters_to(open_books, email)
    assert link_in(letter, open_house) and "evil" not in letter
    wrong_host = await Visitor(open_house).get("/signup", Host="evil.example")
    assert wrong_host.status == 400


async def test_more_fields_than_a_form_has_change_nothing(open_house: House, open_books: Database) -> None:
    email = new_email()
    await Visitor(open_house).send("/signup", {
        "email": email, "password": PASSWORD, "plan": "wallet", "state": "active", "email_verified_at_ms": "1",
        "is_admin": "1", "id": "acc_mine", "balance": "100", "version": "7",
    })
    (account,) = await open_books.fetch("SELECT * FROM accounts WHERE email = ?", (email,))
    assert account["plan"] == "free" and account["email_verified_at_ms"] is None and account["version"] == 1
    assert account["id"] != "acc_mine"
    (wallet,) = await open_books.fetch("SELECT * FROM wallets WHERE account_id = ?", (account["id"],))
    assert wallet["posted_microusd"] == 0


async def test_links_stand_in_no_log(open_house: House, open_books: Database) -> None:
    email = new_email()
    visitor = await verified(open_house, open_books, email)
    assert await visitor.is_signed_in()
    path = link_in((await letters_to(open_books, email))[0], open_house)
    logged = "\n".join(line for line in open_house.log().splitlines() if line.startswith("{"))
    assert "/verify/" in logged and path.rpartition("/")[2] not in logged
    assert visitor.cookies["session"] not in logged


