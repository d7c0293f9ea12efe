"""The home page and its static files."""

from __future__ import annotations

import re

import aiohttp

from tests.house import House


async def test_the_home_page_shows_a_first_call_and_the_prices(house: House, http: aiohttp.ClientSession) -> None:
    async with http.get(house.base_url + "/") as answer:
        page = await answer.text()
        assert answer.status == 200 and answer.headers["content-type"].startswith("text/html")
        assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert f"{house.base_url}/v1/chat/completions" in page
    assert "vendor/twin by call" in page and "0.01" in page
    for banned in ("style=", "<script", "onclick", "https://"):
        assert banned not in page
    sheets = re.findall(r'href="(/static/[^"]+)"', page)
    assert len(sheets) == 2
    for sheet in sheets:
        async with http.get(house.base_url + sheet) as answer:
            assert answer.status == 200 and "immutable" in answer.headers["cache-control"]


async def test_a_static_file_has_one_address(house: House, http: aiohttp.ClientSession) -> None:
    for path in ("/static/0/css/house.css", "/static/0/../pyproject.toml", "/static/css/house.css"):
        async with http.get(house.base_url + path) as answer:
            assert answer.status == 404


async def test_an_unknown_page_is_plain(house: House, http: aiohttp.ClientSession) -> None:
    async with http.get(house.base_url + "/nothing") as answer:
        assert answer.status == 404 and answer.headers["content-type"].startswith("text/plain")
