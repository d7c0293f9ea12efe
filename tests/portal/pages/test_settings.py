"""Settings: one's own profile, address, password, sessions, mails, data; nobody else's."""

from __future__ import annotations

import json
import re

import pytest

from models import account as accounts
from models import api_key, ids, low_credit, usage_day
from models.database import Database
from tests.cast import enter, give, sign_in
from tests.house import House
from tests.portal.pages.test_login import PASSWORD, owner
from tests.visitor import Visitor, letters_to, link_in

HERE = "/dashboard/settings"
FRESH = "five other unrelated words"


async def inside(house: House, books: Database) -> tuple[accounts.Account, Visitor]:
    """Return somebody with a password who is signed in."""
    account, visitor = await owner(books), Visitor(house)
    assert (await visitor.sign_in(account.email, PASSWORD)).status == 303
    return account, visitor


async def stored(books: Database, account_id: str):
    """Return an account's row."""
    (row,) = await books.fetch("SELECT * FROM accounts WHERE id = ?", (account_id,))
    return row


async def test_a_profile_is_changed_and_nothing_beside_it(open_house: House, open_books: Database) -> None:
    account, visitor = await inside(open_house, open_books)
    before = await stored(open_books, account.id)
    done = await visitor.send(HERE, {
        "name": "Ada Lovelace <script>", "time_zone": "Europe/Berlin", "plan": "wallet", "state": "closed",
        "email": "x@y.example", "email_verified_at_ms": "", "account_id": "acc_other", "id": "acc_other",
        "mails_notices": "0", "low_credit_microusd": "5", "password_hash": "x", "totp_secret": "x", "version": "9",
    }, to=f"{HERE}/profile")
    assert done.location == f"{HERE}?said=saved"
    after = await stored(open_books, account.id)
    changed = {name for name in after.keys() if after[name] != before[name]}  # noqa: SIM118 - no mapping
    assert changed == {"name", "time_zone"} and after["time_zone"] == "Europe/Berlin"
    page = await visitor.get(done.location)
    assert "Saved." in page.text and 'value="Ada Lovelace <script>"' in page.text
    assert re.search(r'<option value="Europe/Berlin" selected>', page.text)
    for fields in ({"time_zone": "Mars/Olympus"}, {"time_zone": "UTC", "name": "x" * 81}, {"time_zone": "../etc"}):
        refused = await visitor.send(HERE, fields, to=f"{HERE}/profile")
        assert refused.status == 422 and 'class="error"' in refused.text


@pytest.mark.parametrize(
    ("typed", "kept"), [("5", 5_000_000), ("$12.50", 12_500_000), ("", 0), ("0", 0), ("0.01", 10_000)]
)
async def test_mails_are_chosen(
    open_house: House, open_books: Database, typed: str, kept: int
) -> None:
    account, visitor = await inside(open_house, open_books)
    await visitor.send(HERE, {"low_credit": typed, "notices": "yes"}, to=f"{HERE}/mails")
    assert await low_credit.threshold(open_books, account.id) == kept
    assert (await stored(open_books, account.id))["mails_notices"] == 1
    assert (await visitor.get(HERE)).status == 200
    await visitor.send(HERE, {"low_credit": ""}, to=f"{HERE}/mails")
    assert await low_credit.threshold(open_books, account.id) == 0
    assert (await stored(open_books, account.id))["mails_notices"] == 0
    for wrong in ("-1", "0.001", "much", "1e3", "999999999"):
        refused = await visitor.send(HERE, {"low_credit": wrong}, to=f"{HERE}/mails")
        assert refused.status == 422 and f'value="{wrong}"' in refused.text


async def test_a_password_is_changed_by_who_knows_it(open_house: House, open_books: Database) -> None:
    account, visitor = await inside(open_house, open_books)
    other = Visitor(open_house)
    await other.sign_in(account.email, PASSWORD)
    for current, chosen, says in (
        ("wrong", FRESH, "not your password"), (PASSWORD, "short", "10 characters"), ("", FRESH, "Fill this in"),
    ):
        refused = await visitor.send(
            HERE, {"current_password": current, "new_password": chosen}, to=f"{HERE}/password"
        )
        assert refused.status == 422 and says in refused.text and FRESH not in refused.text
    assert await other.is_signed_in()
    done = await visitor.send(HERE, {"current_password": PASSWORD, "new_password": FRESH}, to=f"{HERE}/password")
    assert "password-changed" in done.location
    assert await visitor.is_signed_in() and not await other.is_signed_in()
    assert (await other.sign_in(account.email, FRESH)).status == 303
    assert await letters_to(open_books, account.email, "password_changed")


async def test_a_session_that_was_stolen_guesses_no_password(open_house: House, open_books: Database) -> None:
    _, visitor = await inside(open_house, open_books)
    guesses = [{"current_password": f"guess {number}", "new_password": FRESH} for number in range(12)]
    answers = [await visitor.send(HERE, guess, to=f"{HERE}/password") for guess in guesses]
    assert [answer.status for answer in answers] == [422] * 10 + [429] * 2


async def test_a_new_address_counts_once_its_link_is_used(open_house: House, open_books: Database) -> None:
    account, visitor = await inside(open_house, open_books)
    new = f"new.{ids.new_id('x')}@example.com"
    wrong = await visitor.send(HERE, {"email": new, "email_password": "wrong"}, to=f"{HERE}/email")
    assert wrong.status == 422 and f'value="{new}"' in wrong.text
    await visitor.send("/forgot", {"email": account.email})
    reset = link_in((await letters_to(open_books, account.email, "reset"))[0], open_house)
    asked = await visitor.send(HERE, {"email": new, "email_password": PASSWORD}, to=f"{HERE}/email")
    assert asked.location == f"{HERE}?said=email-asked"
    (notice,) = await letters_to(open_books, account.email, "email_changing")
    assert new in notice
    path = link_in((await letters_to(open_books, new, "email_change"))[0], open_house)
    assert (await stored(open_books, account.id))["email"] == account.email
    assert (await Visitor(open_house).get(path)).status == 200
    done = await Visitor(open_house).send(path, {})
    assert done.location == "/login?said=email-changed"
    row = await stored(open_books, account.id)
    assert (row["email"], row["mailbox"]) == (new, new)
    assert not await visitor.is_signed_in()
    assert (await Visitor(open_house).get(reset)).status == 404, "what went to the old address is void"
    assert (await Visitor(open_house).sign_in(account.email, PASSWORD)).status == 422
    assert (await Visitor(open_house).sign_in(new, PASSWORD)).status == 303
    assert (await Visitor(open_house).get(path)).status == 404
    assert await letters_to(open_books, account.email, "email_changed")


async def test_an_address_of_somebody_else_is_not_taken(open_house: House, open_books: Database) -> None:
    account, visitor = await inside(open_house, open_books)
    bob = await owner(open_books, "bob")
    tagged = bob.email.replace("@", "+tag@")
    asked = await visitor.send(HERE, {"email": tagged, "email_password": PASSWORD}, to=f"{HERE}/email")
    assert asked.location == f"{HERE}?said=email-asked", "the asker learns nothing"
    assert await letters_to(open_books, bob.email, "known")
    assert not await open_books.fetch("SELECT 1 FROM outbox WHERE recipient = ?", (tagged,))
    # Free when it was asked for, taken when the link is used.
    new = f"new.{ids.new_id('x')}@example.com"
    await visitor.send(HERE, {"email": new, "email_password": PASSWORD}, to=f"{HERE}/email")
    path = link_in((await letters_to(open_books, new, "email_change"))[0], open_house)
    await accounts.create(open_books, new, plan="free", verified=True)
    assert (await Visitor(open_house).send(path, {})).status == 404
    assert (await stored(open_books, account.id))["email"] == account.email


async def test_sessions_are_listed_and_ended(open_house: House, open_books: Database) -> None:
    account, visitor = await inside(open_house, open_books)
    phone = Visitor(open_house)
    agent = "Mozilla/5.0 (Linux; Android 15) AppleWebKit/537.36 (KHTML, like Gecko) Chrome/156.0 Safari/537.36"
    fields = {"email": account.email, "password": PASSWORD}
    await phone.send("/login", fields, **{"User-Agent": agent})
    page = (await visitor.get(HERE)).text
    assert "Chrome on Android" in page and phone.address in page and page.count("this one") == 1
    wanted = re.search(r'name="session" value="(ses_[0-9a-z]+)"', page)[1]
    bob = await enter(open_books, "bob")
    mallory = Visitor(open_house, cookies=await sign_in(open_books, bob))
    for somebodys in (wanted, "ses_unknown", ""):
        assert (await mallory.send(HERE, {"session": somebodys}, to=f"{HERE}/sessions/end")).status == 404
    assert await phone.is_signed_in()
    await visitor.send(HERE, {"session": wanted}, to=f"{HERE}/sessions/end")
    assert not await phone.is_signed_in() and await visitor.is_signed_in()
    await phone.send("/login", fields)
    await visitor.send(HERE, {}, to=f"{HERE}/sessions/end-others")
    assert not await phone.is_signed_in() and await visitor.is_signed_in() and await mallory.is_signed_in()


async def test_everything_owned_can_be_taken_along(open_house: House, open_books: Database) -> None:
    account, visitor = await inside(open_house, open_books)
    await give(open_books, account.id, 5_000_000)
    _, plain = await api_key.create(account, "laptop")
    bob = await enter(open_books, "bob", credit_microusd=1)

    def calls():
        for number in range(2100):
            yield (
                "INSERT INTO calls (id, account_id, key_id, surface, path, offer, state, created_at_ms)"
                " VALUES (?, ?, 'key_1', 'chat', '/v1/chat/completions', 'twin', 'settled', ?)",
                (ids.new_id("req"), account.id, number),
            )
        yield from usage_day.add(account.id, None, 0, "twin", "key_1", usage_day.SERVED, usage_day.Sums(calls=2100))

    await open_books.run(calls, deadline_s=30)
    answer = await visitor.get(f"{HERE}/export")
    assert answer.status == 200 and "attachment" in answer.headers["content-disposition"]
    taken = json.loads(answer.text)
    assert taken["accounts"][0]["email"] == account.email and len(taken["calls"]) == 2100
    assert len({call["id"] for call in taken["calls"]}) == 2100
    assert taken["wallets"][0]["posted_microusd"] == taken["ledger"][0]["amount_microusd"] == 5_000_000
    assert taken["api_keys"][0]["name"] == "laptop" and len(taken["sessions"]) == 1
    # What is secret stands in columns of these names; an id of the many calls may well have one of the words in it.
    columns = " ".join(name for rows in taken.values() for row in rows[:1] for name in row)
    assert not [word for word in ("hash", "secret", "public_key") if word in columns]
    for secret in (plain, "$argon2", bob.account.email, bob.account.id):
        assert secret not in answer.text
    empty = await Visitor(open_house, cookies=await sign_in(open_books, bob)).get(f"{HERE}/export")
    assert json.loads(empty.text)["calls"] == []


async def test_an_account_is_closed_for_good_and_its_books_stay(open_house: House, open_books: Database) -> None:
    account, visitor = await inside(open_house, open_books)
    await give(open_books, account.id, 5_000_000)
    key, plain = await api_key.create(account, "laptop")
    here = f"{HERE}/close"
    assert "$5.00" in (await visitor.get(here)).text
    refused = await visitor.send(here, {"current_password": "wrong"})
    assert refused.status == 422 and (await stored(open_books, account.id))["state"] == "active"
    done = await visitor.send(here, {"current_password": PASSWORD})
    assert done.location == "/login?said=closed" and not await visitor.is_signed_in()
    row = await stored(open_books, account.id)
    assert row["state"] == "closed" and row["email"] == f"{account.id}@closed.invalid"
    assert row["mailbox"] is row["password_hash"] is row["totp_secret"] is None and row["name"] == ""
    (wallet,) = await open_books.fetch("SELECT * FROM wallets WHERE account_id = ?", (account.id,))
    assert wallet["posted_microusd"] == 5_000_000
    assert len(await open_books.fetch("SELECT 1 FROM ledger WHERE account_id = ?", (account.id,))) == 1
    (key_row,) = await open_books.fetch("SELECT revoked_at_ms FROM api_keys WHERE id = ?", (key.id,))
    assert key_row["revoked_at_ms"]
    refused = await Visitor(open_house).get("/v1/models", Authorization=f"Bearer {plain}")
    assert refused.status == 401
    for table in ("sessions", "one_time_links", "recovery_codes", "passkeys"):
        assert not await open_books.fetch(f"SELECT 1 FROM {table} WHERE account_id = ?", (account.id,))
    assert (await Visitor(open_house).sign_in(account.email, PASSWORD)).status == 422
    assert await letters_to(open_books, account.email, "closed")
    # The address is free again.
    await Visitor(open_house).sign_up(account.email, PASSWORD)
    assert await letters_to(open_books, account.email, "verify")
    assert open_house.command("audit", "--full").returncode == 0
