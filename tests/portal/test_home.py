"""The home page and its static files."""

from __future__ import annotations

import hashlib
import re

import aiohttp

from tests.house import ROOT, House


async def test_the_home_page_shows_a_first_call_and_the_prices(house: House, http: aiohttp.ClientSession) -> None:
    async with http.get(house.base_url + "/") as answer:
        page = await answer.text()
        assert answer.status == 200 and answer.headers["content-type"].startswith("text/html")
        assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert f"{house.base_url}/v1/chat/completions" in page
    assert "vendor/twin by call" in page and "0.01" in page
    for banned in ("style=", "<script>", "onclick", "https://"):
        assert banned not in page
    files = re.findall(r'(?:href|src)="(/static/[^"]+)"', page)
    assert len(files) == 10
    for sheet in files:
        async with http.get(house.base_url + sheet) as answer:
            assert answer.status == 200 and "immutable" in answer.headers["cache-control"]


async def test_a_static_file_has_one_address(house: House, http: aiohttp.ClientSession) -> None:
    for path in ("/static/0/css/tokens.css", "/static/0/../pyproject.toml", "/static/css/tokens.css"):
        async with http.get(house.base_url + path) as answer:
            assert answer.status == 404


async def test_an_unknown_page_says_so(house: House, http: aiohttp.ClientSession) -> None:
    async with http.get(house.base_url + "/nothing") as answer:
        assert answer.status == 404 and "There is nothing here" in await answer.text()
        assert answer.headers["x-request-id"] in await answer.text()


async def test_a_sheet_names_its_fonts_by_their_own_addresses(house: House, http: aiohttp.ClientSession) -> None:
    async with http.get(house.base_url + "/") as answer:
        sheet = re.search(r'href="(/static/[^"]+tokens.css)"', await answer.text())
    assert sheet is not None
    async with http.get(house.base_url + sheet[1]) as answer:
        fonts = re.findall(r'url\("([^"]+)"\)', await answer.text())
    assert len(fonts) == 2
    for font in fonts:
        async with http.get(house.base_url + font) as answer:
            assert answer.status == 200 and answer.content_type == "font/woff2"


def test_what_is_vendored_is_what_was_published() -> None:
    folder = ROOT / "static" / "vendor"
    listed = dict(reversed(line.split("  ")) for line in (folder / "SHA256SUMS").read_text().splitlines())
    assert set(listed) == {path.name for path in folder.iterdir() if path.suffix in (".js", ".woff2")}
    for name, digest in listed.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest
    assert len(list(folder.glob("*-LICENSE"))) == 3


async def test_a_static_file_is_compressed_for_who_can_read_that(house: House, http: aiohttp.ClientSession) -> None:
    async with http.get(house.base_url + "/") as answer:
        script = re.search(r'src="(/static/[^"]+htmx[^"]+)"', await answer.text())
    assert script is not None
    read = {}
    for coding in ("gzip", "identity"):
        headers = {"Accept-Encoding": coding}
        async with http.get(house.base_url + script[1], headers=headers) as answer:
            assert answer.headers.get("content-encoding") == (coding if coding == "gzip" else None)
            assert answer.headers["vary"] == "Accept-Encoding"
            read[coding] = (int(answer.headers["content-length"]), await answer.read())
    assert read["gzip"][1] == read["identity"][1] and read["gzip"][0] < read["identity"][0] / 2
