"""Who has no good key: limited by address, heard in one place only, and never known from what they wrote."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.auth import Authenticator, credential_in
from api.errors import ApiError
from models import credentials
from models.database import Database
from tests.api.envelope import refused
from tests.api.v1.test_chat import body
from tests.api.v1.test_errors import NOBODYS_KEY
from tests.cast import enter
from tests.house import House, books_of

BAD_KEYS = 20


@pytest.fixture
async def strict_house(database_kind: str, new_database, twin: str, tmp_path: Path) -> AsyncIterator[House]:
    """Give a Tollgate behind a proxy that allows few bad keys."""
    house = House(
        tmp_path, await new_database(database_kind), twin, CLIENT_IP_HEADER="Fly-Client-IP",
        BAD_KEYS_PER_MINUTE=str(BAD_KEYS), TRUSTED_PROXIES="127.0.0.0/29",
    ).start()
    yield house
    house.stop()


async def test_guessing_is_limited_by_address_and_a_good_key_still_works(
    strict_house: House, http: aiohttp.ClientSession
) -> None:
    house, chat = strict_house, f"{strict_house.base_url}/v1/chat/completions"
    async with books_of(house) as books:
        alice = await enter(books, plan="wallet", credit_microusd=1_000_000)
        bound = await enter(books, plan="wallet", credit_microusd=1_000_000, addresses=["192.0.2.1"])

    async def knock(address: str, key: str) -> int:
        headers = {"Fly-Client-IP": address, "Authorization": f"Bearer {key}"}
        async with http.post(chat, json=body(), headers=headers) as answer:
            if answer.status == 429:
                await refused(answer, 429, "rate_limit_exceeded")
                assert answer.headers["retry-after"] == "60"
            return answer.status

    guesses = [await knock("192.0.2.1", credentials.new_key() if n % 2 else "x") for n in range(BAD_KEYS + 10)]
    assert guesses == [401] * BAD_KEYS + [429] * 10
    assert await knock("192.0.2.1", alice.key) == 200, "one who knows comes in, from that address too"
    assert await knock("192.0.2.2", "x") == 401, "another address has its own count"
    assert await knock("192.0.2.1, 192.0.2.3", "x") == 401, "the last element counts"
    # A key's own list of addresses believes the same header, from the same proxy.
    assert (await knock("192.0.2.1", bound.key), await knock("192.0.2.2", bound.key)) == (200, 403)
    # Past the proxy, from an address that is not trusted, the header is worth nothing.
    connector = aiohttp.TCPConnector(local_addr=("127.0.0.9", 0))
    async with aiohttp.ClientSession(connector=connector) as direct:
        headers = {"Fly-Client-IP": "192.0.2.1", "Authorization": f"Bearer {bound.key}"}
        async with direct.post(chat, json=body(), headers=headers) as answer:
            await refused(answer, 403, "scope_denied")


@pytest.mark.parametrize("name", ["key", "api_key", "API-Key", "access_token", "after"])
async def test_a_key_in_the_address_is_refused(house: House, http: aiohttp.ClientSession, name: str) -> None:
    """With nothing else, and beside a header that would do: the one in the address has leaked already."""
    for path in ("/v1/models", "/v1/usage", "/v1/balance"):
        async with http.get(f"{house.base_url}{path}", params={name: NOBODYS_KEY}) as answer:
            inner = await refused(answer, 400, "invalid_request", param=name)
        assert "Authorization" in inner["message"] and "revoke" in inner["message"]
        assert NOBODYS_KEY not in json.dumps(inner)


class _Watched:
    """Be a database that keeps what it was asked."""

    def __init__(self, books: Database) -> None:
        self._books = books
        self.asked: list[str] = []

    async def fetch(self, sql: str, arguments: Sequence[Any]) -> Any:
        self.asked.append(sql)
        return await self._books.fetch(sql, arguments)


HOSTILE = st.sampled_from([
    "' OR '1'='1", "'; DROP TABLE api_keys;--", "\" OR 1=1 --", "1) UNION SELECT * FROM accounts --", "%' --",
    "sk-tg-' OR hash LIKE '%", "$1", "?", "\\'; SELECT pg_sleep(9);--", "sk-tg-" + "'" * 36, "\x00", "\ud800",
])
TEXTS = st.text() | HOSTILE | st.builds("sk-tg-{}".format, st.text(min_size=30, max_size=40))
# Well-formed, so that it comes as far as the database.
GUESSES = st.builds(credentials.new_key)


async def test_no_text_in_the_headers_is_ever_more_than_a_wrong_key(books: Database) -> None:
    watched = _Watched(books)
    authenticator = Authenticator(watched, lambda: None)
    loop = asyncio.get_running_loop()

    def attempt(text: str) -> None:
        future = asyncio.run_coroutine_threadsafe(authenticator.caller(credential_in(f"Bearer {text}")), loop)
        with pytest.raises(ApiError) as caught:
            future.result(10)
        assert caught.value.status == 401

    await asyncio.to_thread(given(TEXTS | GUESSES)(attempt))
    assert len(set(watched.asked)) == 1 and watched.asked[0].count("?") == 2


def test_a_million_keys_of_the_right_shape_ask_the_database_nothing() -> None:
    """The checksum tells nearly all of them: two in 2**32 texts of this shape would pass by chance."""
    alphabet = credentials._BASE62
    state, passed = 88172645463325252, 0
    for _ in range(1_000_000):
        state ^= state << 13 & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 7
        state ^= state << 17 & 0xFFFFFFFFFFFFFFFF
        tail = "".join(alphabet[(state >> shift) % 62] for shift in (0, 9, 18, 27, 36, 45))
        passed += credentials.is_well_formed("sk-tg-" + tail * 6)
    assert passed <= 1


def test_a_scanner_finds_every_key_and_nothing_else() -> None:
    keys = [credentials.new_key() for _ in range(2_000)]
    source = "".join(f'line {n}: token = "{key}"; x{n}\n' for n, key in enumerate(keys))
    found = [match.group() for match in credentials._SHAPE.finditer(source)]
    assert found == keys and all(credentials.is_well_formed(key) for key in found)
