"""The parts page: every macro is on it, and in production there is none."""

from __future__ import annotations

import re
from pathlib import Path

import aiohttp

from models.settings import read_settings
from portal.app import create_app
from tests.house import ROOT, House

PATH = "/dev/parts"
# On every page already, through the layout.
ON_EVERY_PAGE = {"announce"}


async def test_every_macro_is_shown(house: House, http: aiohttp.ClientSession) -> None:
    async with http.get(house.base_url + PATH) as answer:
        assert answer.status == 200
        page = await answer.text()
    macros = set(re.findall(r"{% macro (\w+)\(", (ROOT / "templates/ui/parts.html").read_text()))
    used = set(re.findall(r"{{ (\w+)\(|{% call (\w+)\(", (ROOT / "templates/dev/parts.html").read_text()))
    assert macros - ON_EVERY_PAGE <= {name for pair in used for name in pair}
    for mark in ('class="state good"', 'aria-invalid="true"', "<rect", "data-reveal", 'role="alert"', 'rel="prev"'):
        assert mark in page
    ids = re.findall(r' id="([^"]+)"', page)
    assert len(ids) == len(set(ids))


async def test_in_production_there_is_none(tmp_path: Path) -> None:
    configuration = tmp_path / "tollgate.toml"
    configuration.write_text('[upstreams.demo]\nformat = "demo"\n')
    settings = read_settings({
        "PUBLIC_URL": "https://gateway.example", "SECRET_KEY": "s" * 32, "DATA_DIR": str(tmp_path),
        "TOLLGATE_CONFIG": str(configuration), "SMTP_URL": "smtp://mail.example",
    })
    client = create_app(settings).test_client()
    answers = {
        path: await client.get(path, headers={"Host": "gateway.example"}) for path in (PATH, "/docs", "/")
    }
    assert {path: answer.status_code for path, answer in answers.items()} == {PATH: 404, "/docs": 200, "/": 200}
    assert "https://gateway.example/v1/chat/completions" in await answers["/docs"].get_data(as_text=True)
