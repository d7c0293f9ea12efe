"""Somebody else's: Bob walks every route there is with every id of Alice, and finds what a made-up id finds.

A route that has no case here fails. What an id of Alice gets must be word for word what an unknown one gets, in
the same status, whether a script asks or not, and no row of hers may differ afterwards.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass, field
from html import unescape
from pathlib import Path
from typing import Any

import aiohttp

from models import hidden_key, ids, one_time_link, passkey, session
from models.database import Database
from models.settings import read_settings
from portal.app import create_app
from tests.api.v1.test_chat import body
from tests.cast import Actor, enter, sign_in
from tests.house import House
from tests.portal.pages.reader import reader_of
from tests.visitor import Answer, Visitor

KEY_FORM = {"name": "bobs", "expires": "never", "spend_period": "month", "grace": "24", "new_expires": "never"}
# What a script asks with, and what a browser without one does.
HOW = ({}, {"HX-Request": "true", "HX-Request-Type": "partial"}, {"HX-Request": "true", "HX-Request-Type": "full"})
# Fields that no form has, and that would say whose something is if one had.
FOREIGN_FIELDS = ("account_id", "user_id", "owner", "id", "key_id", "hash", "rotated_from", "request_id")


@dataclass(frozen=True)
class Case:
    """Say how a route is asked: the fields of its form, and which of those, or of its address, take an id."""

    fields: dict[str, str] = field(default_factory=dict)
    ids_in: tuple[str, ...] = ()


LIST = ("key", "id", "model", "after", "before")
# Who holds the secret of a link is meant by it; an id or a hash is no secret.
CASES: dict[tuple[str, str], Case] = {
    ("GET", "/"): Case(),
    ("GET", "/change-email/<secret>"): Case(),
    ("POST", "/change-email/<secret>"): Case(),
    ("GET", "/dashboard"): Case(),
    ("GET", "/dashboard/api-keys"): Case(ids_in=("before", "ended")),
    ("POST", "/dashboard/api-keys"): Case({**KEY_FORM, "form_id": "NEW"}, ids_in=("form_id",)),
    ("GET", "/dashboard/api-keys/<key_id>"): Case(),
    ("POST", "/dashboard/api-keys/<key_id>"): Case(KEY_FORM),
    ("POST", "/dashboard/api-keys/<key_id>/revoke"): Case(),
    ("GET", "/dashboard/api-keys/<key_id>/rotate"): Case(),
    ("POST", "/dashboard/api-keys/<key_id>/rotate"): Case({**KEY_FORM, "form_id": "NEW"}, ids_in=("form_id",)),
    ("GET", "/dashboard/billing/credits"): Case(ids_in=("top_up", "before", "after", "movements")),
    ("POST", "/dashboard/billing/credits"): Case({"amount": "5"}, ids_in=("top_up",)),
    ("POST", "/dashboard/billing/credits/<top_up_id>/resume"): Case(),
    ("POST", "/dashboard/billing/credits/auto-recharge"): Case(
        {"recharge_below": "5", "recharge_amount": "10", "recharge_ceiling": "50"}
    ),
    ("POST", "/dashboard/billing/credits/auto-recharge/off"): Case(),
    ("POST", "/dashboard/billing/credits/card/forget"): Case(),
    ("POST", "/dashboard/billing/credits/low-credit"): Case({"low_credit": "7"}),
    ("POST", "/dashboard/billing/credits/redeem"): Case(ids_in=("code",)),
    ("GET", "/dashboard/billing/credits/standing"): Case(ids_in=("top_up", "before", "after", "movements")),
    ("GET", "/dashboard/latest"): Case(ids_in=LIST),
    ("GET", "/dashboard/models"): Case(ids_in=("q", "can", "plan", "from")),
    ("GET", "/dashboard/playground"): Case(ids_in=("model",)),
    ("POST", "/dashboard/playground"): Case(
        {"model": "twin", "message": "say:hi", "temperature": "", "max_tokens": "5"}, ids_in=("conversation",)
    ),
    ("GET", "/dashboard/playground/calls/<call_id>"): Case(),
    ("GET", "/dashboard/settings"): Case(),
    ("GET", "/dashboard/settings/close"): Case(),
    ("POST", "/dashboard/settings/close"): Case({"current_password": "a guess at it"}),
    ("GET", "/dashboard/settings/confirm"): Case(ids_in=("next",)),
    ("POST", "/dashboard/settings/confirm"): Case({"current_password": "a guess at it"}),
    ("POST", "/dashboard/settings/email"): Case({"email": "b@example.com", "email_password": "a guess at it"}),
    ("GET", "/dashboard/settings/export"): Case(),
    ("POST", "/dashboard/settings/mails"): Case({"low_credit": "5"}),
    ("GET", "/dashboard/settings/passkeys"): Case(),
    ("POST", "/dashboard/settings/passkeys"): Case({"name": "x", "credential": "{}"}, ids_in=("credential",)),
    ("POST", "/dashboard/settings/passkeys/options"): Case(),
    ("POST", "/dashboard/settings/passkeys/remove"): Case(ids_in=("passkey",)),
    ("POST", "/dashboard/settings/password"): Case({"current_password": "?", "new_password": "four new words"}),
    ("POST", "/dashboard/settings/profile"): Case({"name": "Bob", "time_zone": "UTC"}),
    ("GET", "/dashboard/settings/second-factor"): Case(),
    ("POST", "/dashboard/settings/second-factor"): Case({"code": "000000"}),
    ("POST", "/dashboard/settings/second-factor/codes"): Case({"codes_password": "a guess at it"}),
    ("POST", "/dashboard/settings/second-factor/off"): Case({"off_password": "a guess at it"}),
    ("GET", "/dashboard/settings/second-factor/qr.svg"): Case(),
    ("POST", "/dashboard/settings/sessions/end"): Case(ids_in=("session",)),
    ("POST", "/dashboard/settings/sessions/end-others"): Case(ids_in=("session",)),
    ("GET", "/dashboard/usage"): Case(ids_in=LIST),
    ("GET", "/dashboard/usage/<request_id>"): Case(),
    ("GET", "/dashboard/usage/export.<kind>"): Case(ids_in=LIST),
    ("GET", "/dashboard/usage/live"): Case(ids_in=LIST),
    ("GET", "/docs"): Case(),
    ("GET", "/forgot"): Case(),
    ("POST", "/forgot"): Case({"email": "nobody@example.com"}),
    ("GET", "/forgot/sent"): Case(),
    ("GET", "/login"): Case(ids_in=("next",)),
    ("POST", "/login"): Case({"email": "nobody@example.com", "password": "a guess at it"}),
    ("POST", "/login/passkey"): Case(ids_in=("credential",)),
    ("POST", "/login/passkey/options"): Case(),
    ("GET", "/login/second"): Case(ids_in=("next",)),
    ("POST", "/login/second"): Case(ids_in=("code",)),
    ("POST", "/logout"): Case(ids_in=("session",)),
    ("GET", "/reset/<secret>"): Case(),
    ("POST", "/reset/<secret>"): Case({"password": "four new words"}),
    ("GET", "/signup"): Case(),
    ("POST", "/signup"): Case({"email": "x", "password": "four new words"}),
    ("GET", "/signup/sent"): Case(),
    ("GET", "/test-checkout/<checkout_id>"): Case(),
    ("POST", "/test-checkout/<checkout_id>/decline"): Case(),
    ("POST", "/test-checkout/<checkout_id>/pay"): Case(),
    ("GET", "/test-checkout/<checkout_id>/receipt"): Case(),
    ("GET", "/verify/<secret>"): Case(),
    ("POST", "/verify/<secret>"): Case({"password": "four new words"}),
    ("GET", "/v1/balance"): Case(ids_in=("account_id", "key_id")),
    ("POST", "/v1/chat/completions"): Case(ids_in=("user", "safety_identifier", "prompt_cache_key")),
    ("GET", "/v1/models"): Case(ids_in=("after", "before")),
    ("GET", "/v1/models/<path:model_id>"): Case(),
    ("POST", "/v1/public/chat"): Case(),
    ("GET", "/v1/usage"): Case(ids_in=("after", "before", "key_id", "model")),
    ("GET", "/v1/usage/<request_id>"): Case(),
}
# The same for everybody, whoever asks, and so without anything of anybody.
NOBODYS = {
    "/dev/mail": "the letters of a development house; there is no such page in production",
    "/dev/parts": "made of examples",
    "/healthz": "ok", "/readyz": "ready or not", "/metrics": "counts of the whole house, for its operator",
    "/openapi.json": "the description of the API", "/static/<digest>/<path:name>": "files",
}


def all_routes(folder: Path) -> set[tuple[str, str]]:
    """Return method and rule of everything there is."""
    rules = create_app(read_settings({"DATA_DIR": str(folder)})).url_map.iter_rules()
    return {(method, rule.rule) for rule in rules for method in rule.methods - {"HEAD", "OPTIONS"}}


def test_every_route_has_a_case(tmp_path: Path) -> None:
    assert {route for route in all_routes(tmp_path) if route[1] not in NOBODYS} == set(CASES)


@dataclass
class Treasure:
    """Hold everything Alice has: ids by kind, and words that must be on no page of anybody else."""

    actor: Actor
    ids: dict[str, str]
    words: list[str]


async def alice_with_everything(house: House, books: Database, http: aiohttp.ClientSession) -> Treasure:
    """Bring Alice on stage with one of everything."""
    alice = await enter(books, "alice", plan="wallet", credit_microusd=10_000_000)
    account_id = alice.account.id
    headers = {**alice.headers, "Idempotency-Key": "alices-own"}
    async with http.post(house.base_url + "/v1/chat/completions", json=body("say:hi"), headers=headers) as answer:
        assert answer.status == 200
        call_id = answer.headers["x-request-id"]
    reader = await reader_of(house, http, books, alice)
    checkouts = []
    for amount in ("11", "12"):
        await reader.get("/dashboard/billing/credits")
        checkouts.append((await reader.post("/dashboard/billing/credits", {"amount": amount})).location)
    await reader.get(checkouts[0])
    await reader.post(f"{checkouts[0]}/pay")
    await hidden_key.hash_of(books, account_id, hidden_key.PLAYGROUND)
    made = passkey.NewPasskey("Y2FuYXJ5LWNyZWRlbnRpYWw", "cHVibGlj", 0)
    secret, cookie = one_time_link.new_secret(), session.new_cookie()

    def more():
        yield (
            "INSERT INTO passkeys (id, account_id, credential_id, public_key, sign_count, name, created_at_ms)"
            " VALUES (?, ?, ?, ?, 0, 'canary passkey', 1)",
            (ids.new_id("pass"), account_id, made.credential_id, made.public_key),
        )
        yield ("INSERT INTO recovery_codes (account_id, hash) VALUES (?, ?)", (account_id, "c" * 64))
        yield from passkey.offer(passkey.REGISTER, b"alices", account_id)
        yield from one_time_link.make(one_time_link.RESET, secret, account_id, alice.account.email)
        yield from session.begin(account_id, cookie, address="192.0.2.77", agent="canary agent")
        yield ("UPDATE accounts SET name = 'Alice Liddell' WHERE id = ?", (account_id,))
        yield ("UPDATE api_keys SET name = 'canary key' WHERE id = ?", (alice.key_id,))

    await books.run(more)
    one = {
        "key": ("SELECT id FROM api_keys WHERE account_id = ? AND hidden = 0", account_id),
        "hidden key": ("SELECT id FROM api_keys WHERE account_id = ? AND hidden = 1", account_id),
        "session": ("SELECT id FROM sessions WHERE account_id = ? AND agent = 'canary agent'", account_id),
        "passkey": ("SELECT id FROM passkeys WHERE account_id = ?", account_id),
        "link": ("SELECT hash FROM one_time_links WHERE account_id = ?", account_id),
        "paid": ("SELECT id FROM top_ups WHERE account_id = ? AND state = 'paid'", account_id),
        "pending": ("SELECT id FROM top_ups WHERE account_id = ? AND state = 'pending'", account_id),
    }
    found = {kind: (await books.fetch(sql, (arg,)))[0][0] for kind, (sql, arg) in one.items()}
    checkout, paid_checkout = (path.rpartition("/")[2] for path in reversed(checkouts))
    found |= {
        "account": account_id, "call": call_id, "checkout": checkout, "paid checkout": paid_checkout,
        "credential": made.credential_id, "recovery code": "c" * 64,
    }
    words = [alice.account.email, "canary ", "Liddell", "192.0.2.77", alice.key[-8:], secret, cookie]
    return Treasure(alice, found, words)


def unknown_like(some_id: str) -> str:
    """Return an id of the same look that nobody has."""
    prefix, _, rest = some_id.partition("_")
    if rest and prefix.isalpha():
        return ids.new_id(prefix) if len(rest) == ids.BODY_LENGTH else f"{prefix}_{'Z' * len(rest)}"
    return some_id[:-6] + "zzzzzz"


async def rows_of(books: Database, account_id: str) -> dict[str, list[str]]:
    """Return every row that is an account's, by table."""
    if books.dialect == "sqlite":
        tables = await books.fetch("SELECT name FROM sqlite_master WHERE type = 'table'")
    else:
        tables = await books.fetch("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")
    own = {
        "accounts": "id = ?",
        "rate_windows": "bucket LIKE '%' || ? || '%'",
        "attempts": "call_id IN (SELECT id FROM calls WHERE account_id = ?)",
        "key_spend": "key_id IN (SELECT id FROM api_keys WHERE account_id = ?)",
        "former_customers": "customer_id IN (SELECT customer_id FROM payment_cards WHERE account_id = ?)",
    }
    others = ("processes", "marks", "tortoise_migrations", "disputes", "payment_events", "redeem_codes")
    found = {}
    for (table,) in tables:
        if table not in others and not table.startswith("sqlite_"):
            condition = own.get(table, "account_id = ?")
            rows = await books.fetch(f"SELECT * FROM {table} WHERE {condition}", (account_id,))
            found[table] = sorted(repr(tuple(row)) for row in rows)
    return found


async def settled(books: Database, treasure: Treasure) -> dict[str, list[str]]:
    """Return Alice's rows once nothing of her own is still being written."""
    before: dict[str, list[str]] = {}
    for _ in range(100):
        # Asked before the rows are read: what is written between the two is seen by the next look.
        used = await books.fetch("SELECT last_used_at_ms FROM api_keys WHERE id = ?", (treasure.actor.key_id,))
        call = await books.fetch("SELECT state FROM calls WHERE id = ?", (treasure.ids["call"],))
        now = await rows_of(books, treasure.actor.account.id)
        if now == before and used[0][0] is not None and call[0][0] == "settled":
            return now
        before = now
        await asyncio.sleep(0.2)
    raise AssertionError("Alice's rows do not come to rest")


class Bob:
    """Be Bob: a browser and a key. A route that throws him out lets him in again."""

    def __init__(self, house: House, books: Database, actor: Actor) -> None:
        self._house, self._books, self._actor = house, books, actor
        self._visitor = Visitor(house)
        self._token = ""
        self.email = actor.account.email

    async def come_in(self) -> None:
        """Sign in and read a form's token."""
        self._visitor = Visitor(self._house, cookies=await sign_in(self._books, self._actor))
        page = await self._visitor.get("/dashboard/settings/confirm")
        self._token = re.search(r'name="csrf_token" value="([0-9a-f]{64})"', page.text)[1]

    async def ask(self, method: str, path: str, case: Case, sent: dict[str, str], how: dict[str, str]) -> Answer:
        """Ask a route with these ids beside what it wants."""
        if path.startswith("/v1"):
            return await self._call(method, path, sent, how)
        if "session" not in self._visitor.cookies:
            await self.come_in()
        if method == "GET":
            return await self._visitor.get(_with_query(path, sent), **how)
        fields = {**case.fields, **sent, "csrf_token": self._token}
        fields = {name: ids.new_id("form") if value == "NEW" else value for name, value in fields.items()}
        answer = await self._visitor.post(path, fields, **how)
        assert answer.status != 403, "the form's token is wrong, so nothing was shown"
        return answer

    async def _call(self, method: str, path: str, sent: dict[str, str], how: dict[str, str]) -> Answer:
        more: dict[str, Any] = {"json": body("say:hi", **sent)} if method == "POST" else {}
        async with (
            aiohttp.ClientSession() as http,
            http.request(
                method, self._house.base_url + (path if more else _with_query(path, sent)),
                headers={**self._actor.headers, **how}, **more,
            ) as answer,
        ):
            return Answer(answer.status, await answer.text(), {k.lower(): v for k, v in answer.headers.items()})


def _with_query(path: str, sent: dict[str, str]) -> str:
    return path + "?" * bool(sent) + "&".join(f"{name}={value}" for name, value in sent.items())


def told(answer: Answer, used: list[str]) -> tuple[int, str, str]:
    """Return what an answer tells, without the ids that were sent and what is new in every answer."""
    text, location = unescape(answer.text), answer.location
    for each in sorted(used, key=len, reverse=True):
        # Whatever the case: some answers repeat an id in lower case.
        text, location = (re.sub(re.escape(each), "ID", some, flags=re.IGNORECASE) for some in (text, location))
    text = re.sub(r"(acc|req|form|key|ses|top|tc|call|msg)_[0-9A-Za-z]{26}", "ID", text)
    text = re.sub(r"chatcmpl-\w+|sk-tg-\w+|[0-9a-f]{16,64}|[A-Z2-7]{32}|[\w-]{36,}|…\w{4}", "X", text)
    location = re.sub(r"(top|tc)_[0-9A-Za-z]{20,}", "ID", location)
    return answer.status, location, re.sub(r"[0-9][0-9.,:]*( m?s\b)?", "N", text)


def probes(rule: str, case: Case, owned: dict[str, str]) -> list[tuple[dict[str, str], dict[str, str], list[str]]]:
    """Return what a route is sent with Alice's ids, the same with unknown ones, all of these; "<" is its path."""
    places = [*(["<"] if "<" in rule else []), *case.ids_in]
    pairs = []
    for place in places:
        for one in owned.values():
            other = unknown_like(one)
            pairs.append(({place: one}, {place: other}, [one, other]))
    every = list(owned.values())
    others = [unknown_like(one) for one in every]
    bundles = [
        {name: some[n % len(some)] for n, name in enumerate(FOREIGN_FIELDS)} for some in (every, others)
    ]
    return [*pairs, (*bundles, [*every, *others])]


async def a_bob(house: House, books: Database) -> Bob:
    """Bring a Bob on stage."""
    return Bob(house, books, await enter(books, "bob", plan="wallet", credit_microusd=10_000_000))


def first_difference(one: str, other: str) -> str:
    """Return where two texts part."""
    at = next((n for n, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), 0)
    return f"{one[max(at - 40, 0) : at + 40]!r} and {other[max(at - 40, 0) : at + 40]!r}"


def path_of(rule: str, sent: dict[str, str]) -> tuple[str, dict[str, str]]:
    """Return a path with what belongs into it, and what is left to be sent."""
    sent = dict(sent)
    inside = sent.pop("<", "nothing_at_all")
    return re.sub(r"<[^>]+>", "csv" if "<kind>" in rule and inside == "nothing_at_all" else inside, rule), sent


async def test_bob_finds_nothing_of_alice_by_any_id(
    quiet_house: House, quiet_books: Database, http: aiohttp.ClientSession
) -> None:
    treasure = await alice_with_everything(quiet_house, quiet_books, http)
    before = await settled(quiet_books, treasure)
    assert all(before[table] for table in (
        "accounts", "api_keys", "wallets", "ledger", "calls", "sessions", "one_time_links", "recovery_codes",
        "passkeys", "challenges", "top_ups", "usage_days", "idempotency_keys",
    ))
    complaints: list[str] = []
    for (method, rule), case in CASES.items():
        bobs = [await a_bob(quiet_house, quiet_books)] * 2
        for number, (ours, unknown, used) in enumerate(probes(rule, case, treasure.ids)):
            for how in HOW if "<" in ours and method == "GET" else HOW[number % 3 :][:1]:
                if method != "GET":
                    # What a form changes is Bob's own, so each of the two is sent by a Bob of its own.
                    bobs = [await a_bob(quiet_house, quiet_books), await a_bob(quiet_house, quiet_books)]
                answers = []
                for bob, sent in zip(bobs, (unknown, ours), strict=True):
                    path, rest = path_of(rule, sent)
                    answers.append(await bob.ask(method, path, case, rest, how))
                same = [told(answer, [*used, bob.email]) for answer, bob in zip(answers, bobs, strict=True)]
                where = f"{method} {rule} {ours} {how}"
                if same[0] != same[1]:
                    complaints.append(f"{first_difference(*map(repr, same))}: {where}")
                if "<" in ours and "<kind>" not in rule and answers[1].status != 404:
                    complaints.append(f"{where}: {answers[1].status}, not 404")
                complaints += [f"{where}: shows {word}" for word in treasure.words if word in answers[1].text]
    assert not complaints, "\n".join(complaints[:40])
    assert await rows_of(quiet_books, treasure.actor.account.id) == before


async def test_alice_finds_it_all_herself(
    quiet_house: House, quiet_books: Database, http: aiohttp.ClientSession
) -> None:
    """Or the walk would have looked for what nobody finds."""
    treasure = await alice_with_everything(quiet_house, quiet_books, http)
    await settled(quiet_books, treasure)
    own = Bob(quiet_house, quiet_books, treasure.actor)
    for kind, path in (
        ("key", "/dashboard/api-keys/{}"), ("call", "/dashboard/usage/{}"), ("call", "/v1/usage/{}"),
        ("call", "/dashboard/playground/calls/{}"), ("checkout", "/test-checkout/{}"),
        ("paid checkout", "/test-checkout/{}/receipt"),
    ):
        answer = await own.ask("GET", path.format(treasure.ids[kind]), Case(), {}, {})
        assert answer.status == 200, (path, answer.status)
    hidden = await own.ask("GET", f"/dashboard/api-keys/{treasure.ids['hidden key']}", Case(), {}, {})
    assert hidden.status == 404, "a hidden key is nobody's, not even its own account's"
    for path, fields in (
        ("/dashboard/settings/sessions/end", {"session": treasure.ids["session"]}),
        ("/dashboard/settings/passkeys/remove", {"passkey": treasure.ids["passkey"]}),
    ):
        assert (await own.ask("POST", path, Case(fields), {}, {})).status == 303, path


# What would be worth writing, were a form to take it.
WORTHWHILE = {
    "is_admin": "1", "role": "admin", "balance": "1000000", "posted_microusd": "1000000", "held_microusd": "0",
    "credits": "1000000", "plan": "wallet", "state": "active", "version": "7", "email_verified_at_ms": "1",
    "used": "0", "free_used": "0", "price": "0", "created_at_ms": "1", "hidden": "1", "password_hash": "x",
    "totp_secret": "x", "totp_last_step": "0", "mailbox": "x@example.com", "disputed": "0", "proven_at_ms": "9",
    "expires_at_ms": "9", "revoked_at_ms": "", "spent_microusd": "0", "amount_microusd": "1", "paid_at_ms": "1",
}
# What a route may change of whoever sends its form; of anything not named here, nothing.
MAY_CHANGE = {
    "/dashboard/settings/profile": {"name", "time_zone"},
    "/dashboard/settings/mails": {"low_credit_microusd", "mails_notices"},
    "/dashboard/billing/credits/low-credit": {"low_credit_microusd"},
}


async def test_fields_that_no_form_has_change_nothing(quiet_house: House, quiet_books: Database) -> None:
    for (method, rule), case in CASES.items():
        if method != "POST" or "<" in rule or rule.startswith("/v1"):
            continue
        actor = await enter(quiet_books, "carol", plan="free")
        carol, account_id = Bob(quiet_house, quiet_books, actor), actor.account.id
        await carol.come_in()
        before = await columns_of(quiet_books, account_id)
        await carol.ask(method, rule, Case({**WORTHWHILE, **case.fields}), {}, {})
        after = await columns_of(quiet_books, account_id)
        changed = {name for name in after if after[name] != before[name]}
        assert changed <= MAY_CHANGE.get(rule, set()), (rule, changed)
        for table, wanted in (
            ("api_keys", "hidden = 1 AND name <> 'playground' OR created_at_ms < 1000 OR version > 6"),
            ("top_ups", "state <> 'pending' OR amount_microusd <> 5000000 OR paid_at_ms IS NOT NULL"),
            ("sessions", "proven_at_ms < 1000 OR expires_at_ms < 1000 OR state <> 'whole'"),
            ("ledger", "1 = 1"),
        ):
            asked = f"SELECT * FROM {table} WHERE account_id = ? AND ({wanted})"
            rows = await quiet_books.fetch(asked, (account_id,))
            assert not rows, (rule, table, [dict(row) for row in rows])


async def columns_of(books: Database, account_id: str) -> dict[str, Any]:
    """Return what an account and its wallet hold."""
    found: dict[str, Any] = {}
    for table, name in (("wallets", "account_id"), ("accounts", "id")):
        (row,) = await books.fetch(f"SELECT * FROM {table} WHERE {name} = ?", (account_id,))
        found |= {column: row[column] for column in row.keys()}  # noqa: SIM118 - no mapping
    return found
