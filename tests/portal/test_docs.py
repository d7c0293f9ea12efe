"""The documentation: what it says is so, and each of its commands works as pasted."""

from __future__ import annotations

import html
import os
import re
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest

from api.errors import TYPES
from portal.pages.docs import ERRORS
from tests.api.test_sdk_node import FOLDER
from tests.api.test_sdk_node import node as _node  # noqa: F401 - a fixture
from tests.cast import Actor
from tests.house import ROOT, House

CODE = re.compile(r'<code id="([\w-]+)">(.*?)</code>', re.DOTALL)


async def blocks(house: House, http: aiohttp.ClientSession, path: str = "/docs") -> dict[str, str]:
    """Return the code blocks of a page, as their copy buttons copy them."""
    async with http.get(house.base_url + path) as answer:
        assert answer.status == 200
        return {name: html.unescape(text) for name, text in CODE.findall(await answer.text())}


def run(command: list[str], key: str, folder: Path = ROOT) -> str:
    """Run a command with the key in its environment and return what it printed."""
    environ = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    done = subprocess.run(
        command, env={**environ, "KEY": key}, cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


async def test_every_curl_command_works_as_pasted(house: House, http: aiohttp.ClientSession, alice: Actor) -> None:
    commands = {
        name: text for path in ("/docs", "/") for name, text in (await blocks(house, http, path)).items()
        if text.startswith("curl")
    }
    assert len(commands) == 7
    for name, text in commands.items():
        said = run(["bash", "-c", text], alice.key)
        if name == "docs-usage-one":
            assert '"code":"not_found"' in said  # the id is an example's
        else:
            assert '"error"' not in said and said, name
    assert '"charged_from":"wallet"' in run(["bash", "-c", commands["docs-usage"]], alice.key)


async def test_the_python_examples_run(house: House, http: aiohttp.ClientSession, alice: Actor) -> None:
    shown = await blocks(house, http)
    said = run([sys.executable, "-c", shown["docs-python"] + "\n" + shown["docs-python-stream"]], alice.key)
    costs = re.findall(r"^0\.\d{6}$", said, re.MULTILINE)
    assert len(costs) == 2 and all(float(cost) > 0 for cost in costs)
    assert shown["docs-python"] == (await blocks(house, http, "/"))["home-python"]


@pytest.mark.usefixtures("_node")
async def test_the_node_examples_run(
    house: House, http: aiohttp.ClientSession, alice: Actor, tmp_path: Path
) -> None:
    shown = await blocks(house, http)
    (tmp_path / "node_modules").symlink_to(FOLDER / "node_modules")
    (tmp_path / "example.mjs").write_text(shown["docs-node"] + "\n" + shown["docs-node-stream"])
    assert re.search(r"^0\.\d{6}$", run(["node", "example.mjs"], alice.key, tmp_path), re.MULTILINE)


def test_the_errors_are_the_ones_there_are() -> None:
    assert sorted(code for _, code, _ in ERRORS) == sorted(TYPES)
    assert [status for status, _, _ in ERRORS] == sorted(status for status, _, _ in ERRORS)


async def test_the_statuses_of_errors_are_so(house: House, http: aiohttp.ClientSession, alice: Actor) -> None:
    statuses = {code: status for status, code, _ in ERRORS}
    chat = house.base_url + "/v1/chat/completions"
    asked = {"model": "twin", "messages": [{"role": "user", "content": "say:hi"}]}
    for headers, sent, code in (
        ({}, asked, "missing_api_key"), ({"Authorization": "Bearer x"}, asked, "invalid_api_key"),
        (alice.headers, {**asked, "model": "none"}, "model_not_found"), (alice.headers, {}, "invalid_request"),
        (alice.headers, {**asked, "messages": [{"role": "user", "content": "status:500"}]}, "upstream_error"),
    ):
        async with http.post(chat, json=sent, headers=headers) as answer:
            assert answer.status == statuses[code] and (await answer.json())["error"]["code"] == code


async def test_every_link_within_the_page_leads_somewhere(house: House, http: aiohttp.ClientSession) -> None:
    for path in ("/docs", "/"):
        async with http.get(house.base_url + path) as answer:
            page = await answer.text()
            # A stranger who only reads is given nothing to keep.
            assert "set-cookie" not in answer.headers and "csrf" not in page.lower()
        ids = re.findall(r' id="([^"]+)"', page)
        assert len(ids) == len(set(ids))
        for anchor in re.findall(r'href="#([^"]+)"', page):
            assert anchor in ids
        for copied in re.findall(r'data-copy="([^"]+)"', page):
            assert copied in ids


@pytest.mark.parametrize("path", ["/docs", "/"])
async def test_the_pages_work_for_who_is_signed_in(
    house: House, http: aiohttp.ClientSession, path: str, alice: Actor, house_books: object
) -> None:
    async with http.get(house.base_url + path, cookies={"session": "nobody's"}) as answer:
        assert answer.status == 200 and "/login" in await answer.text()
