"""The guard, over every route there is: no form from elsewhere, no change by a look, no page for strangers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urljoin, urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quart import Response

from models import session
from models.database import Database
from models.settings import read_settings
from portal.app import create_app
from portal.guard import ANYONE, Guard, safe_next
from portal.own_link import mark
from tests.cast import enter, sign_in
from tests.house import House
from tests.visitor import Visitor

# Written by whoever is there: what a look at a page cannot be blamed for.
HOUSEKEEPING = ("processes", "rate_windows", "tortoise_migrations")


@pytest.fixture(scope="session")
def routes(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, str, str]]:
    """Give method, path and access of every view of the portal."""
    app = create_app(read_settings({"DATA_DIR": str(tmp_path_factory.mktemp("routes"))}))
    return list(_routes(app))


def _routes(app) -> Iterator[tuple[str, str, str]]:
    for rule in app.url_map.iter_rules():
        if rule.endpoint.startswith("portal."):
            path = re.sub(r"<[^>]+>", "acc_00000000000000000000000000", rule.rule)
            access = getattr(app.view_functions[rule.endpoint], "access", "signed in")
            for method in sorted(rule.methods - {"HEAD", "OPTIONS"}):
                yield method, path, access


async def everything(books: Database) -> dict[str, list[tuple]]:
    """Return all rows of the tables that pages may change."""
    if books.dialect == "sqlite":
        names = await books.fetch("SELECT name FROM sqlite_master WHERE type = 'table'")
    else:
        names = await books.fetch("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")
    return {
        name: sorted(map(repr, (tuple(row) for row in await books.fetch(f"SELECT * FROM {name}"))))
        for (name,) in names if name not in HOUSEKEEPING and not name.startswith("sqlite_")
    }


async def test_nothing_is_changed_by_a_form_from_elsewhere(
    quiet_house: House, quiet_books: Database, routes: list[tuple[str, str, str]]
) -> None:
    alice, bob = await enter(quiet_books, "alice"), await enter(quiet_books, "bob")
    visitor = Visitor(quiet_house, cookies=await sign_in(quiet_books, alice))
    other = Visitor(quiet_house, cookies=await sign_in(quiet_books, bob))

    async def token_of(somebody: Visitor) -> str:
        return re.search(r'name="csrf_token" value="([0-9a-f]{64})"', (await somebody.get("/dashboard")).text)[1]

    own, foreign = await token_of(visitor), await token_of(other)
    before = await everything(quiet_books)
    changing = [(method, path) for method, path, _ in routes if method != "GET"]
    assert len(changing) > 15
    for method, path in changing:
        assert method == "POST", path
        for fields, headers, status in (
            ({}, {}, 403),
            ({"csrf_token": ""}, {}, 403),
            ({"csrf_token": foreign}, {}, 403),
            ({"csrf_token": own}, {"Sec-Fetch-Site": "cross-site"}, 403),
            ({"csrf_token": own}, {"Sec-Fetch-Site": "same-site"}, 403),
            ({"csrf_token": own}, {"Content-Type": "text/plain"}, 415),
            ({"csrf_token": own}, {"Content-Type": "application/json"}, 415),
        ):
            sent = fields if "Content-Type" not in headers else f"csrf_token={own}"
            answer = await visitor.post(path, sent, **headers)
            assert answer.status == status, (path, fields, headers)
        for origin in ("https://evil.example", "null", "http://[", quiet_house.base_url + ".evil.example"):
            answer = await visitor.from_origin(path, {"csrf_token": own}, origin)
            assert answer.status == 403, (path, origin)
    assert await everything(quiet_books) == before
    assert (await visitor.from_origin("/logout", {"csrf_token": own}, quiet_house.base_url)).status == 303


async def test_a_look_changes_nothing(
    quiet_house: House, quiet_books: Database, routes: list[tuple[str, str, str]]
) -> None:
    alice = await enter(quiet_books, "alice")
    visitor = Visitor(quiet_house, cookies=await sign_in(quiet_books, alice))
    before = await everything(quiet_books)
    looked = [path for method, path, _ in routes if method == "GET"]
    assert len(looked) > 15
    for path in looked:
        for part in ({}, {"HX-Request": "true", "HX-Request-Type": "partial"}):
            answer = await visitor.get(path, **part)
            assert answer.status in (200, 204, 303, 304, 400, 404), (path, answer.status)
            assert answer.headers["cache-control"] == "no-store", path
            assert "Cookie" in answer.headers["vary"] and "HX-Request" in answer.headers["vary"], path
            assert answer.headers["x-content-type-options"] == "nosniff", path
            assert "default-src 'none'" in answer.headers["content-security-policy"], path
            assert answer.headers["referrer-policy"] == "no-referrer", path
    assert await everything(quiet_books) == before


async def test_strangers_see_only_what_is_for_them(
    quiet_house: House, quiet_books: Database, routes: list[tuple[str, str, str]]
) -> None:
    opened = {path for method, path, access in routes if method == "GET" and access == ANYONE}
    assert not {path for path in opened if path.startswith("/dashboard")}
    for method, path, access in routes:
        if method == "GET" and access != ANYONE:
            answer = await Visitor(quiet_house, cookies={"session": "made-up"}).get(path)
            assert (answer.status, answer.location[:12]) == (303, "/login?next="), path
            part = await Visitor(quiet_house).get(path, **{"HX-Request": "true"})
            assert (part.status, part.text) == (204, "") and part.headers["hx-redirect"].startswith("/login?next=")


@pytest.mark.parametrize("who", ["a stranger", "half signed in", "signed out", "thrown out", "closed"])
async def test_who_is_not_signed_in_changes_nothing(
    quiet_house: House, quiet_books: Database, routes: list[tuple[str, str, str]], who: str
) -> None:
    """With a form token of their own, so that nothing but the missing session keeps them out."""
    alice = await enter(quiet_books, "alice")
    visitor = await _outside(quiet_house, quiet_books, alice.account.id, who)
    page = await visitor.get("/login")
    token = re.search(r'name="csrf_token" value="([0-9a-f]{64})"', page.text)[1]
    before = await everything(quiet_books)
    closed = [(method, path) for method, path, access in routes if access != ANYONE]
    assert len([method for method, _ in closed if method == "POST"]) > 15
    for method, path in closed:
        if who == "half signed in" and path == "/login/second":
            continue
        for part in ({}, {"HX-Request": "true"}):
            if method == "GET":
                answer = await visitor.get(path, **part)
            else:
                answer = await visitor.post(path, {"csrf_token": token}, **part)
            if part:
                assert (answer.status, answer.text) == (204, ""), (method, path)
                assert answer.headers["hx-redirect"].startswith("/login?next="), (method, path)
            else:
                assert (answer.status, answer.text) == (303, ""), (method, path)
                assert answer.location.startswith("/login?next="), (method, path)
    assert await everything(quiet_books) == before


async def _outside(house: House, books: Database, account_id: str, who: str) -> Visitor:
    """Return a browser that is not signed in, each for another reason."""
    if who == "a stranger":
        return Visitor(house)
    cookie = session.new_cookie()
    state = session.HALF if who == "half signed in" else session.WHOLE

    def begin():
        session_id = yield from session.begin(account_id, cookie, address="", agent="", state=state)
        if who == "signed out":
            yield from session.end(account_id, session_id)
        if who == "thrown out":
            yield ("UPDATE sessions SET expires_at_ms = 1 WHERE id = ?", (session_id,))
        if who == "closed":
            yield ("UPDATE accounts SET state = 'closed' WHERE id = ?", (account_id,))

    await books.run(begin)
    return Visitor(house, cookies={"session": cookie})


async def test_a_stranger_s_forms_need_their_own_token_too(
    quiet_house: House, quiet_books: Database, routes: list[tuple[str, str, str]]
) -> None:
    """Signing in is changing something as well: nobody is signed in to a stranger's account unawares."""
    alice = await enter(quiet_books, "alice")
    inside = Visitor(quiet_house, cookies=await sign_in(quiet_books, alice))
    pattern = r'name="csrf_token" value="([0-9a-f]{64})"'
    foreign = re.search(pattern, (await inside.get("/dashboard")).text)[1]
    before = await everything(quiet_books)
    for method, path, _ in routes:
        if method == "GET":
            continue
        visitor = Visitor(quiet_house)
        own = re.search(pattern, (await visitor.get("/login")).text)[1]
        for fields, headers in (
            ({}, {}), ({"csrf_token": foreign}, {}), ({}, {"X-CSRF-Token": foreign}), ({}, {"X-CSRF-Token": ""}),
            ({"csrf_token": own}, {"Sec-Fetch-Site": "cross-site"}),
            ({"csrf_token": own}, {"Sec-Fetch-Site": "", "Origin": quiet_house.base_url}),
            ({"csrf_token": own}, {"Sec-Fetch-Site": "cross-site", "Origin": quiet_house.base_url}),
        ):
            assert (await visitor.post(path, fields, **headers)).status == 403, (path, fields, headers)
        silent = await visitor._ask("POST", path, data={"csrf_token": own}, headers={})
        assert silent.status == 403, (path, "neither Sec-Fetch-Site nor Origin")
        without = Visitor(quiet_house, cookies={})
        assert (await without.post(path, {"csrf_token": own})).status == 403, (path, "no cookie")
    assert await everything(quiet_books) == before


async def test_a_host_that_is_not_ours_is_not_served(quiet_house: House) -> None:
    for host in (
        "evil.example", "localhost.evil.example", "x/?", "x#", "x/v1/models?", "127.0.0.1/..", "", "[::",
        "127.0.0.1:x", "me@localhost",
    ):
        assert (await Visitor(quiet_house).get("/login", Host=host)).status == 400, host
    assert (await Visitor(quiet_house).get("/login", Host="localhost:1")).status == 200, "in development alone"


async def test_no_route_of_ours_is_had_by_another_host_s_name(
    quiet_house: House, quiet_books: Database, routes: list[tuple[str, str, str]]
) -> None:
    """A name with a path, a query or a fragment in it is read as one by some servers."""
    alice = await enter(quiet_books, "alice")
    visitor = Visitor(quiet_house, cookies=await sign_in(quiet_books, alice))
    for method, path, _ in routes:
        for host in ("x/?", "x#", "x/v1/models?"):
            asked = visitor.get(path, Host=host) if method == "GET" else visitor.post(path, {}, Host=host)
            assert (await asked).status == 400, (method, path, host)


@given(st.one_of(
    st.text(), st.text().map("/{}".format), st.text(alphabet="/\\.@:?#%\t\n ehlpst").map("/{}".format),
    st.builds(
        "{}{}evil.example{}".format,
        st.sampled_from(["/", "//", "/\\", "/%2f", "/%5c", "https:", "/..//", "/.//"]),
        st.sampled_from(["", "/", "\\", "@", "\t", "%09"]), st.text(max_size=4),
    ),
))
def test_no_text_leads_to_another_host(target: str) -> None:
    """As a browser reads it: a backslash is a slash there, and tabs and line ends are nothing."""
    where = safe_next(target)
    read = re.sub(r"[\t\r\n]", "", where).replace("\\", "/")
    joined = urlsplit(urljoin("https://gateway.example/login", read))
    assert (joined.scheme, joined.netloc) == ("https", "gateway.example")
    assert where.startswith("/") and not read.startswith("//")


def test_over_https_cookies_are_bound_to_this_very_host(tmp_path: Path) -> None:
    settings = read_settings({
        "DATA_DIR": str(tmp_path), "PUBLIC_URL": "https://gateway.example", "SECRET_KEY": "s" * 32,
        "MAIL_TO_CONSOLE": "yes",
    })
    guard = Guard(None, settings, lambda: "")
    cookies = [
        *guard.begin_session(Response(), "secret").headers.getlist("set-cookie"),
        *guard.end_session(Response()).headers.getlist("set-cookie"),
        *mark(guard, Response(), "secret").headers.getlist("set-cookie"),
    ]
    assert [cookie.partition("=")[0] for cookie in cookies] == ["__Host-session", "__Host-session", "__Host-signup"]
    for cookie in cookies:
        parts = {part.strip().lower() for part in cookie.split(";")}
        assert {"secure", "httponly", "samesite=lax", "path=/"} <= parts and "domain" not in cookie.lower()
    assert f"Max-Age={session.LIFE_MS // 1000}" in cookies[0]


@pytest.mark.parametrize("target", [
    "//e.example", "/\\e.example", "/\\/e.example", "https:e.example", "https://e.example", "javascript:alert(1)",
    "/\te.example", "\n//e.example", "", None, "dashboard", "///e", "/a\\b", "/ü", "/a b", "//@e.example", "/\x00",
])
def test_where_to_go_next_stays_here(target: str | None) -> None:
    assert safe_next(target) == "/dashboard"
    assert safe_next(target, "/there") == "/there"


@pytest.mark.parametrize(
    "target", ["/", "/dashboard/usage?key=key_1&from=2026-01-01#top", "/a/b%2F", "/login?next=//x"]
)
def test_a_path_of_ours_is_kept(target: str) -> None:
    assert safe_next(target) == target
