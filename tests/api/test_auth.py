"""Who calls: the headers a key comes in, the addresses it may come from, the scopes and models it may use."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.auth import Authenticator, Caller, credential_in
from api.errors import ApiError
from api.limits import limits_of, require_address, require_scope
from models import api_key, credentials
from models.catalog import Catalog
from models.database import Database
from models.plan import Plan
from tests.cast import enter

KEY = "sk-tg-" + "a" * 36


def caller_with(*, surfaces: set[str] = frozenset({"*"}), **limits: object) -> Caller:
    """Return a caller whose key is narrowed."""
    key = api_key.LiveKey(**{
        "id": "key_1", "version": 1, "account_id": "acc_1", "account_version": 1, "plan": "p", "scopes": None,
        "models": None, "addresses": None, "spend_limit_microusd": None, "spend_period": None,
        "requests_per_minute": None, "expires_at_ms": None, **limits,
    })
    return Caller(key, Plan("p", 0, 0, 60, frozenset(surfaces)), "hash")


@pytest.mark.parametrize(
    "headers, key",
    [
        ((None, None, None), None),
        (("", "", ""), None),
        (("  ", None, " "), None),
        (("Bearer", None, None), None),
        (("Bearer ", None, None), None),
        ((f"Bearer {KEY}", None, None), KEY),
        ((f"bearer {KEY}", None, None), KEY),
        ((f"BEARER \t {KEY} ", None, None), KEY),
        ((KEY, None, None), KEY),
        ((f"Basic {KEY}", None, None), f"Basic {KEY}"),
        ((f"Bearer {KEY} more", None, None), f"{KEY} more"),
        ((f"Bearer Bearer {KEY}", None, None), f"Bearer {KEY}"),
        ((None, KEY, None), KEY),
        ((None, None, KEY), KEY),
        ((None, "", KEY), KEY),
        ((None, f" {KEY} ", "other"), KEY),
        (("Bearer first", KEY, KEY), "first"),
        (("Bearer", KEY, None), KEY),
        (("", None, KEY), KEY),
    ],
)
def test_the_key_in_the_headers(headers: tuple[str | None, ...], key: str | None) -> None:
    assert credential_in(*headers) == key


@given(st.lists(st.none() | st.text(), min_size=1, max_size=3))
def test_any_headers_give_a_key_or_none(headers: list[str | None]) -> None:
    found = credential_in(*headers)
    assert found is None or (found and found == found.strip())


@pytest.mark.parametrize(
    "address, networks, allowed",
    [
        ("192.0.2.7", None, True),
        ("192.0.2.7", (), False),
        ("192.0.2.7", ("192.0.2.7",), True),
        ("192.0.2.7", ("192.0.2.0/24",), True),
        ("192.0.2.7", ("192.0.2.9/24",), True),
        ("192.0.3.7", ("192.0.2.0/24",), False),
        ("192.0.2.7", ("198.51.100.0/24", "192.0.2.7/32"), True),
        ("::ffff:192.0.2.7", ("192.0.2.0/24",), True),
        ("2001:db8::1", ("2001:db8::/32",), True),
        ("fe80::1%eth0", ("fe80::/10",), True),
        ("2001:db9::1", ("2001:db8::/32",), False),
        ("192.0.2.7", ("::/0",), False),
        ("2001:db8::1", ("0.0.0.0/0",), False),
        ("", ("0.0.0.0/0",), False),
        ("unix:", ("0.0.0.0/0", "::/0"), False),
        ("192.0.2.7, 10.0.0.1", ("0.0.0.0/0",), False),
        ("192.0.2.7", ("nonsense",), False),
        ("192.0.2.7", ("nonsense", "192.0.2.7"), True),
    ],
)
def test_addresses(address: str, networks: tuple[str, ...] | None, allowed: bool) -> None:
    caller = caller_with(addresses=networks)
    assert caller.may_come_from(address) is allowed
    if not allowed:
        with pytest.raises(ApiError) as caught:
            require_address(caller, address)
        assert (caught.value.status, caught.value.code) == (403, "scope_denied")


@pytest.mark.parametrize(
    "surfaces, scopes, scope, read, write",
    [
        ({"*"}, None, "chat", True, True),
        ({"chat"}, None, "chat", True, True),
        ({"chat"}, None, "images", False, False),
        ({"*"}, {"chat"}, "chat", True, True),
        ({"*"}, {"chat"}, "files", False, False),
        ({"*"}, {"files:read"}, "files", True, False),
        ({"*"}, {"files:read", "files"}, "files", True, True),
        ({"chat"}, {"files"}, "files", False, False),
        ({"*"}, set(), "chat", False, False),
        ({"*"}, {"*"}, "chat", False, False),
        ({"*"}, None, "nothing", False, False),
    ],
)
def test_scopes(surfaces: set[str], scopes: set[str] | None, scope: str, read: bool, write: bool) -> None:
    caller = caller_with(surfaces=surfaces, scopes=None if scopes is None else frozenset(scopes))
    assert (caller.may(scope), caller.may(scope, write=True)) == (read, write)
    for wanted, allowed in ((False, read), (True, write)):
        if allowed:
            require_scope(caller, scope, write=wanted)
            continue
        with pytest.raises(ApiError) as caught:
            require_scope(caller, scope, write=wanted)
        assert (caught.value.status, caught.value.code) == (403, "scope_denied")


def test_models() -> None:
    assert caller_with().may_use("anything")
    assert caller_with(models=frozenset({"a"})).may_use("a")
    assert not caller_with(models=frozenset({"a"})).may_use("A")
    assert not caller_with(models=frozenset()).may_use("a")


def test_rate_windows() -> None:
    [account] = limits_of(caller_with())
    assert (account.bucket, account.per_window) == ("account:acc_1", 60)
    account, key = limits_of(caller_with(requests_per_minute=5))
    assert (account.per_window, key.bucket, key.per_window) == (60, "key:key_1", 5)


class _Books:
    """Be a database that must not be asked."""

    def __getattr__(self, name: str) -> None:
        raise AssertionError(f"the database was asked: {name}")


@pytest.mark.parametrize(
    "text", ["x", "sk-tg-", KEY, "sk-" + "a" * 40, "sk-tg-" + "é" * 36, "\0", "sk-tg-" + "a" * 10**6]
)
async def test_a_malformed_key_is_refused_without_the_database(text: str) -> None:
    authenticator = Authenticator(_Books(), lambda: None)
    with pytest.raises(ApiError) as caught:
        await authenticator.caller(text)
    assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")
    for nothing in (None, ""):
        with pytest.raises(ApiError) as caught:
            await authenticator.caller(nothing)
        assert (caught.value.status, caught.value.code) == (401, "missing_api_key")


async def test_a_known_caller_is_kept_but_a_fresh_one_is_read(books: Database) -> None:
    plan = Plan("payg", 0, 0, 60, frozenset({"*"}))
    catalog = Catalog(service_name="t", markup_percent=0, upstreams={}, offers={}, plans={"payg": plan})
    authenticator = Authenticator(books, lambda: catalog)
    alice = await enter(books, "alice")
    caller = await authenticator.caller(alice.key)
    assert (caller.account_id, caller.plan, caller.key_hash) == (
        alice.account.id, plan, credentials.key_hash(alice.key)
    )
    assert await authenticator.caller(alice.key) is caller
    assert await authenticator.caller(alice.key, fresh=True) is not caller
    await api_key.revoke(alice.account.id, alice.key_id)
    # What is kept may be stale: the admission notices. What is read is not, and the kept one is dropped with it.
    assert await authenticator.caller(alice.key) is not None
    for attempt in (authenticator.confirm(caller), authenticator.caller(alice.key)):
        with pytest.raises(ApiError) as caught:
            await attempt
        assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")


async def test_callers_can_be_forgotten(books: Database) -> None:
    catalog = Catalog(
        service_name="t", markup_percent=0, upstreams={}, offers={},
        plans={"payg": Plan("payg", 0, 0, 60, frozenset({"*"}))},
    )
    authenticator = Authenticator(books, lambda: catalog)
    alice, bob = await enter(books, "alice"), await enter(books, "bob")
    a, b = await authenticator.caller(alice.key), await authenticator.caller(bob.key)
    authenticator.forget(a)
    assert await authenticator.caller(alice.key) is not a
    assert await authenticator.caller(bob.key) is b
    authenticator.forget_all()
    assert await authenticator.caller(bob.key) is not b


async def test_an_account_on_a_plan_that_is_gone_is_denied(books: Database) -> None:
    catalog = Catalog(service_name="t", markup_percent=0, upstreams={}, offers={}, plans={})
    alice = await enter(books, "alice")
    with pytest.raises(ApiError) as caught:
        await Authenticator(books, lambda: catalog).caller(alice.key)
    assert (caught.value.status, caught.value.code) == (403, "scope_denied")
