"""The page of API keys: shown once, limited, rotated, revoked; and never anybody else's."""

from __future__ import annotations

import asyncio
import html
import json
import re

import aiohttp
import pytest

from models import api_key, credentials, ids
from models.api_key import ApiKey
from models.clock import day, now_ms
from models.database import Database
from tests.api.v1.test_chat import body
from tests.cast import Actor
from tests.house import House
from tests.portal.visitor import Answer, Visitor, visit

KEYS = "/dashboard/api-keys"
KEY = re.compile(r"sk-tg-[0-9A-Za-z]{36}")


@pytest.fixture
async def visitor(house: House, http: aiohttp.ClientSession, house_books: Database, alice: Actor) -> Visitor:
    """Be Alice's browser."""
    return await visit(house, http, house_books, alice)


def fields(**more: str) -> dict[str, str]:
    """Return the form of a new key as a browser sends it, with some fields as told."""
    return {
        "form_id": ids.new_id("form"), "name": "prod", "expires": "never", "expires_on": "", "addresses": "",
        "spend_limit": "", "spend_period": "month", "requests_per_minute": "", **more,
    }


async def create(visitor: Visitor, *, fragment: bool = False, **more: str) -> Answer:
    """Send the form for a new key."""
    return await visitor.post(KEYS, fields(**more), on=KEYS, fragment=fragment)


async def keys_of(actor: Actor) -> list[ApiKey]:
    """Return an account's keys but for the one it came with, oldest first."""
    keys = await ApiKey.filter(account_id=actor.account.id).order_by("id")
    return [key for key in keys if key.id != actor.key_id]


async def call(house: House, http: aiohttp.ClientSession, key: str, **more: object) -> int:
    """Make a call and return its status."""
    async with http.post(
        house.base_url + "/v1/chat/completions", json=body("say:hi", **more),
        headers={"Authorization": f"Bearer {key}"},
    ) as answer:
        await answer.read()
        return answer.status


@pytest.mark.parametrize("fragment", [False, True])
async def test_a_new_key_works_and_is_shown_once(
    visitor: Visitor, house: House, http: aiohttp.ClientSession, alice: Actor, fragment: bool
) -> None:
    answer = await create(visitor, fragment=fragment)
    assert answer.status == 200 and answer.headers["cache-control"] == "no-store"
    assert answer.text.lstrip().lower().startswith("<!doctype") != fragment
    (shown,) = set(KEY.findall(answer.text))
    assert answer.text.count(shown) == 1 and re.search(rf'<input [^>]*value="{shown}" readonly', answer.text)
    assert shown not in str(answer.headers) and "prod" in answer.words
    assert await call(house, http, shown) == 200
    again = await visitor.get(KEYS)
    assert not KEY.search(again.text) and f"{shown[:10]}…{shown[-4:]}" in again.text
    (key,) = await keys_of(alice)
    assert key.hash == credentials.key_hash(shown) and key.version == 1
    assert shown not in house.log() and shown[-20:] not in house.log()
    assert not KEY.search((await visitor.get(f"{KEYS}/{key.id}")).text)


async def test_a_form_makes_one_key_however_often_it_is_sent(visitor: Visitor, alice: Actor) -> None:
    sent = fields()
    answers = await asyncio.gather(*(visitor.post(KEYS, sent, on=KEYS) for _ in range(4)))
    assert sorted(answer.status for answer in answers) == [200, 303, 303, 303]
    assert len(await keys_of(alice)) == 1
    later = await visitor.get(next(a.headers["location"] for a in answers if a.status == 303))
    assert "shown only once" in later.words and not KEY.search(later.text)
    old = ids.id_with("form", now_ms() - api_key.FORM_LIFE_MS - 1000, 7)
    for form in (old, "", "form_x", "key_" + "z" * 26):
        assert (await create(visitor, form_id=form)).status == 303
    assert len(await keys_of(alice)) == 1


async def test_limits_are_kept_and_hold(
    visitor: Visitor, house: House, http: aiohttp.ClientSession, alice: Actor
) -> None:
    sent = [
        *fields(
            expires="90", addresses="127.0.0.1, 2001:DB8::/32\n::ffff:10.0.0.0/104", spend_limit="$1,000.50",
            spend_period="day", requests_per_minute="1",
        ).items(),
        ("scopes", "chat"), ("scopes", "models"), ("models", "twin"),
    ]
    answer = await visitor.post(KEYS, sent, on=KEYS)
    (shown,) = set(KEY.findall(answer.text))
    (key,) = await keys_of(alice)
    assert json.loads(key.scopes) == ["chat", "models"] and json.loads(key.models) == ["twin"]
    assert json.loads(key.addresses) == ["10.0.0.0/8", "127.0.0.1/32", "2001:db8::/32"]
    assert (key.spend_limit_microusd, key.spend_period, key.requests_per_minute) == (1_000_500_000, "day", 1)
    assert abs(key.expires_at_ms - now_ms() - 90 * api_key.DAY_MS) < 60_000
    assert await call(house, http, shown, model="unreachable") == 404
    assert await call(house, http, shown) == 200 and await call(house, http, shown) == 429
    # The page of the key shows the form as it was sent.
    page = await visitor.get(f"{KEYS}/{key.id}")
    assert 'value="1000.50"' in page.text and "2001:db8::/32" in page.text
    assert re.search(r'value="twin" checked', page.text) and re.search(r'value="chat" checked', page.text)
    assert not re.search(r'value="files" checked', page.text)


@pytest.mark.parametrize("wrong, says", [
    ({"name": " "}, "Fill this in."),
    ({"name": "x" * 101}, "at most 100 characters"),
    ({"name": "a\nb"}, "on one line"),
    ({"expires": "soon"}, "Choose one of these."),
    ({"expires": "keep"}, "Choose one of these."),
    ({"expires": "date", "expires_on": "2020-01-01"}, "Choose a day after today."),
    ({"expires": "date", "expires_on": "9999-12-31"}, "Choose a day after today."),
    ({"expires": "date", "expires_on": "tomorrow"}, "Choose a day after today."),
    ({"scopes": "everything"}, "Choose among these."),
    ({"models": "no-such-model"}, "Choose among these."),
    ({"addresses": "10.0.0.0/33"}, "is no address or network"),
    ({"addresses": "fe80::1%eth0"}, "is no address or network"),
    ({"addresses": " ".join(f"10.0.0.{n}" for n in range(51))}, "Use at most 50."),
    ({"spend_limit": "0"}, "Use an amount from $0.01"),
    ({"spend_limit": "-5"}, "Use an amount from $0.01"),
    ({"spend_limit": "0.001"}, "Use an amount from $0.01"),
    ({"spend_limit": "5", "spend_period": "year"}, "Choose one of these."),
    ({"requests_per_minute": "0"}, "Use a whole number from 1"),
    ({"requests_per_minute": "1.5"}, "Use a whole number from 1"),
])
async def test_what_will_not_do_is_said_and_kept(
    visitor: Visitor, alice: Actor, wrong: dict[str, str], says: str
) -> None:
    answer = await create(visitor, **{"name": "kept-name", **wrong})
    assert answer.status == 422 and says in answer.words and not KEY.search(answer.text)
    if "name" not in wrong:
        assert 'value="kept-name"' in answer.text
    assert await keys_of(alice) == []


async def test_no_other_column_can_be_written(visitor: Visitor, alice: Actor, bob: Actor) -> None:
    extra = {
        "id": "key_mine", "account_id": bob.account.id, "hash": "0" * 64, "hidden": "1", "version": "99",
        "created_at_ms": "1", "last_used_at_ms": "1", "rotated_from": "key_x", "revoked_at_ms": "1",
        "shown_prefix": "sk-xx", "plan": "payg", "email_verified": "1", "balance": "1",
    }
    assert (await create(visitor, **extra)).status == 200
    (key,) = await keys_of(alice)
    assert await keys_of(bob) == []

    def untouched(key: ApiKey) -> bool:
        return (key.hidden, key.rotated_from, key.revoked_at_ms, key.last_used_at_ms) == (0, None, None, None)

    assert untouched(key) and key.id != "key_mine" and key.version == 1 and key.created_at_ms > 1
    sent = {**fields(name="new name", expires="keep"), **extra}
    assert (await visitor.post(f"{KEYS}/{key.id}", sent, on=f"{KEYS}/{key.id}")).status == 303
    (changed,) = await keys_of(alice)
    assert changed.name == "new name" and changed.version == 2 and untouched(changed)
    assert (changed.id, changed.hash, changed.account_id) == (key.id, key.hash, key.account_id)


async def test_a_change_of_limits_holds_from_the_next_call(
    visitor: Visitor, house: House, http: aiohttp.ClientSession, alice: Actor
) -> None:
    (shown,) = set(KEY.findall((await create(visitor)).text))
    (key,) = await keys_of(alice)
    page = f"{KEYS}/{key.id}"
    assert await call(house, http, shown) == 200
    for change, status in (
        ({"models": "unreachable"}, 404), ({}, 200), ({"addresses": "192.0.2.1"}, 403), ({"scopes": "files"}, 403),
        ({"spend_limit": "5"}, 200), ({"requests_per_minute": "1"}, 200), ({"requests_per_minute": "1"}, 429),
    ):
        answer = await visitor.post(page, {**fields(name="renamed", expires="keep"), **change}, on=page)
        assert answer.status == 303 and "Saved." in (await visitor.get(answer.headers["location"])).words
        assert await call(house, http, shown) == status, change


async def test_a_key_that_may_do_nothing_is_not_widened_by_being_renamed(
    visitor: Visitor, house_books: Database, alice: Actor
) -> None:
    key, _ = await api_key.create(alice.account, "none", scopes=[], models=[], addresses=[])
    reader, _ = await api_key.create(alice.account, "reader", scopes=["chat:read"], models=["gone-model"])
    for made in (key, reader):
        page = await visitor.get(f"{KEYS}/{made.id}")
        ticked = re.findall(r'name="(scopes|models)" value="([^"]+)" checked', page.text)
        sent = [*fields(name="renamed", expires="keep").items(), *ticked]
        assert (await visitor.post(f"{KEYS}/{made.id}", sent, on=f"{KEYS}/{made.id}")).status == 303
        after = await ApiKey.get(id=made.id)
        assert (after.name, after.scopes, after.models, after.addresses) == (
            "renamed", made.scopes, made.models, made.addresses,
        )


@pytest.mark.parametrize("grace", ["0", "1", "24", "168"])
async def test_rotation(
    visitor: Visitor, house: House, http: aiohttp.ClientSession, alice: Actor, grace: str
) -> None:
    first = await create(visitor, name="rotor", spend_limit="7", requests_per_minute="50")
    (old_plain,) = set(KEY.findall(first.text))
    (old,) = await keys_of(alice)
    page = f"{KEYS}/{old.id}"
    sent = {"form_id": ids.new_id("form"), "grace": grace, "new_expires": "30", "new_expires_on": ""}
    answer = await visitor.post(f"{page}/rotate", sent, on=page)
    assert answer.status == 200 and answer.headers["cache-control"] == "no-store"
    (new_plain,) = set(KEY.findall(answer.text))
    old, new = await keys_of(alice)
    assert new_plain != old_plain and new.rotated_from == old.id and new.name == "rotor"
    assert (new.spend_limit_microusd, new.spend_period, new.requests_per_minute) == (7_000_000, "month", 50)
    assert abs(old.expires_at_ms - now_ms() - int(grace) * 3600_000) < 60_000
    assert abs(new.expires_at_ms - now_ms() - 30 * api_key.DAY_MS) < 60_000
    assert await call(house, http, new_plain) == 200
    assert await call(house, http, old_plain) == (401 if grace == "0" else 200)
    # Sent again, it shows nothing and makes nothing; and its address alone leads back to the list.
    again = await visitor.post(f"{page}/rotate", sent, on=f"{KEYS}/{new.id}")
    assert again.status == 303 and len(await keys_of(alice)) == 2
    back = await visitor.get(f"{page}/rotate")
    assert back.status == 303 and back.headers["location"] == KEYS


async def test_rotation_refuses(visitor: Visitor, alice: Actor) -> None:
    page = f"{KEYS}/{alice.key_id}"
    for wrong in ({"grace": "2"}, {"grace": ""}, {"new_expires": "soon"}):
        sent = {"form_id": ids.new_id("form"), "grace": "0", "new_expires": "never", **wrong}
        assert (await visitor.post(f"{page}/rotate", sent, on=page)).status == 422
    assert await keys_of(alice) == [] and (await ApiKey.get(id=alice.key_id)).expires_at_ms is None


async def test_a_grace_never_prolongs_a_key(visitor: Visitor, alice: Actor) -> None:
    soon = now_ms() + 60_000
    key, _ = await api_key.create(alice.account, "short", expires_at_ms=soon)
    page = f"{KEYS}/{key.id}"
    sent = {"form_id": ids.new_id("form"), "grace": "168", "new_expires": "keep"}
    assert (await visitor.post(f"{page}/rotate", sent, on=page)).status == 200
    assert (await ApiKey.get(id=key.id)).expires_at_ms == soon
    assert (await ApiKey.get(rotated_from=key.id)).expires_at_ms == soon


async def test_revoking_holds_from_the_next_call(
    visitor: Visitor, house: House, http: aiohttp.ClientSession, alice: Actor
) -> None:
    (shown,) = set(KEY.findall((await create(visitor, name="leaked")).text))
    (key,) = await keys_of(alice)
    page = f"{KEYS}/{key.id}"
    assert await call(house, http, shown) == 200
    assert "“leaked” was last used" in (await visitor.get(page)).words
    answer = await visitor.post(f"{page}/revoke", {}, on=page)
    assert answer.status == 303 and await call(house, http, shown) == 401
    listed = await visitor.get(answer.headers["location"])
    assert "The key is revoked" in listed.words and "leaked" not in listed.words
    ended = await visitor.get(f"{KEYS}?ended=1")
    assert "leaked" in ended.words and "revoked" in ended.words
    # Ended for good: neither edited nor rotated, and its page has no form for it.
    assert "Revoke key" not in (await visitor.get(page)).words
    for path, sent in ((page, fields(expires="keep")), (f"{page}/rotate", {
        "form_id": ids.new_id("form"), "grace": "0", "new_expires": "never",
    })):
        assert (await visitor.post(path, sent, on=KEYS)).status == 404
    assert await call(house, http, shown) == 401


async def test_states_in_words(visitor: Visitor, house_books: Database, alice: Actor) -> None:
    long_ago = now_ms() - api_key.IDLE_MS - 1
    idle, _ = await api_key.create(alice.account, "sleeper")
    gone, _ = await api_key.create(alice.account, "past", expires_at_ms=now_ms() - 1)
    await ApiKey.filter(id=idle.id).update(created_at_ms=long_ago)

    def spend():
        for when, amount in ((now_ms(), 1_934), (now_ms() - 40 * api_key.DAY_MS, 5_000_000)):
            yield (
                "INSERT INTO usage_days (account_id, day, offer, key_id, outcome, calls, charged_microusd)"
                " VALUES (?, ?, 'twin', ?, 'served', 1, ?)", (alice.account.id, day(when), alice.key_id, amount),
            )

    await house_books.run(spend)
    rows = {
        key_id: (await visitor.get(path)).text.partition(f'<tr id="{key_id}"')[2].partition("</tr>")[0]
        for key_id, path in ((alice.key_id, KEYS), (idle.id, KEYS), (gone.id, f"{KEYS}?ended=1"))
    }
    assert '"state good">active' in rows[alice.key_id] and "0.001934" in rows[alice.key_id]
    assert f"/dashboard/usage?key={alice.key_id}" in rows[alice.key_id]
    assert '"state ">idle' in rows[idle.id] and ">never<" in rows[idle.id]
    assert '"state warn">expired' in rows[gone.id]
    assert gone.id not in (await visitor.get(KEYS)).text


async def test_ended_keys_come_in_pages(visitor: Visitor, alice: Actor) -> None:
    made = [await api_key.create(alice.account, f"old-{n:02}", expires_at_ms=1) for n in range(51)]
    first = await visitor.get(f"{KEYS}?ended=1")
    older = re.search(r'href="([^"]+before=[^"]+)"', first.text)
    assert older is not None
    second = await visitor.get(html.unescape(older[1]))
    pages = [re.findall(r'<tr id="(key_\w+)"', page.text) for page in (first, second)]
    assert [len(page) for page in pages] == [50, 1]
    assert pages[0] + pages[1] == sorted((key.id for key, _ in made), reverse=True)
    assert (await visitor.get(f"{KEYS}?ended=1&before=nonsense")).status == 404


async def test_without_keys_the_page_teaches(
    house: House, http: aiohttp.ClientSession, house_books: Database, alice: Actor
) -> None:
    await api_key.revoke(alice.account.id, alice.key_id)
    page = await (await visit(house, http, house_books, alice)).get(KEYS)
    assert "No keys yet" in page.words and f"curl {house.base_url}/v1/chat/completions" in page.words
    assert re.search(r"<details[^>]*id=\"new-key-form\" open", page.text)
    assert "None A key that you revoke" not in page.words


async def test_without_a_verified_address_there_is_no_key(
    visitor: Visitor, house_books: Database, alice: Actor
) -> None:
    def unverify():
        yield "UPDATE accounts SET email_verified_at_ms = NULL WHERE id = ?", (alice.account.id,)

    token_page = "/dashboard"
    await house_books.run(unverify)
    page = await visitor.get(KEYS)
    assert f"Verify {alice.account.email} first" in page.words and "form_id" not in page.text
    answer = await visitor.post(KEYS, fields(), on=token_page)
    assert answer.status == 422 and not KEY.search(answer.text) and await keys_of(alice) == []


async def test_there_are_a_hundred_at_most(visitor: Visitor, alice: Actor, house_books: Database) -> None:
    for n in range(api_key.LIVE_KEYS_MAX - 3):
        await api_key.create(alice.account, f"k{n}")
    # Of those that have ended, and the hidden one, none counts.
    await api_key.create(alice.account, "ended", expires_at_ms=1)
    hidden, _ = await api_key.create(alice.account, "playground")
    await ApiKey.filter(id=hidden.id).update(hidden=1)
    answers = await asyncio.gather(*(create(visitor, name=f"last{n}") for n in range(6)))
    assert sorted(answer.status for answer in answers) == [200, 200, 422, 422, 422, 422]
    refused = next(answer for answer in answers if answer.status == 422)
    assert "You have 100 live keys, which is the most." in refused.words
    page = f"{KEYS}/{alice.key_id}"
    sent = {"form_id": ids.new_id("form"), "grace": "24", "new_expires": "never"}
    assert (await visitor.post(f"{page}/rotate", sent, on=page)).status == 422
    # At once frees its own place.
    assert (await visitor.post(f"{page}/rotate", {**sent, "grace": "0"}, on=page)).status == 200


async def test_another_accounts_keys_are_not_there(
    visitor: Visitor, house: House, http: aiohttp.ClientSession, alice: Actor, bob: Actor
) -> None:
    hidden, _ = await api_key.create(alice.account, "playground-key")
    await ApiKey.filter(id=hidden.id).update(hidden=1)
    before = {row.id: dict(row) for row in await ApiKey.filter(id__in=[bob.key_id, hidden.id])}
    listed = await visitor.get(KEYS)
    assert bob.key_id not in listed.text and "playground-key" not in listed.text
    sent = {**fields(expires="never"), "grace": "0", "new_expires": "never"}
    for key_id in (bob.key_id, hidden.id, ids.new_id("key"), "key_%00", "nothing", "é" * 26):
        page = await visitor.get(f"{KEYS}/{key_id}")
        assert page.status == 404
        for path in ("", "/rotate", "/revoke"):
            assert (await visitor.post(f"{KEYS}/{key_id}{path}", sent, on=KEYS)).status == 404
        assert (await visitor.get(f"{KEYS}/{key_id}/rotate")).status == 404
    assert {row.id: dict(row) for row in await ApiKey.filter(id__in=[bob.key_id, hidden.id])} == before
    assert await call(house, http, bob.key) == 200


async def test_strangers_are_sent_to_sign_in(house: House, http: aiohttp.ClientSession, alice: Actor) -> None:
    stranger = Visitor(house, http)
    for path in (KEYS, f"{KEYS}/{alice.key_id}", f"{KEYS}/{alice.key_id}/rotate"):
        answer = await stranger.get(path)
        assert answer.status == 303 and answer.headers["location"].startswith("/login?next=")


async def test_a_name_is_text(visitor: Visitor, alice: Actor) -> None:
    canary = "<i id=x>\"'{{7*7}}"
    answer = await create(visitor, name=canary)
    (key,) = await keys_of(alice)
    assert key.name == canary
    for page in (answer, await visitor.get(KEYS), await visitor.get(f"{KEYS}/{key.id}")):
        assert "<i id" not in page.text and "&lt;i id=x&gt;" in page.text and "49" not in page.words.split()


async def test_a_raised_rate_counts_at_the_very_next_call(house, http, house_books, alice, visitor):
    answer = await visitor.post(KEYS, fields(requests_per_minute="1"), on=KEYS)
    (shown,) = set(KEY.findall(answer.text))
    (key,) = await keys_of(alice)
    # The second refusal comes from memory, where the key is still the one of before.
    assert [await call(house, http, shown) for _ in range(3)] == [200, 429, 429]
    await visitor.post(f"{KEYS}/{key.id}", fields(requests_per_minute="3", expires="keep"), on=f"{KEYS}/{key.id}")
    assert [await call(house, http, shown) for _ in range(4)] == [200, 200, 429, 429]
    await visitor.post(f"{KEYS}/{key.id}", fields(expires="keep"), on=f"{KEYS}/{key.id}")
    assert [await call(house, http, shown) for _ in range(3)] == [200, 200, 200]
