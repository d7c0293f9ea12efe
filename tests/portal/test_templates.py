"""The templates: nothing in them runs but our own files, and nothing that somebody wrote is taken for markup."""

from __future__ import annotations

import asyncio
import re

import pytest
from jinja2 import DictLoader
from quart import Quart

from portal import rendering
from tests.house import ROOT

TEMPLATES = sorted((ROOT / "templates").rglob("*.*"))
PAGES = [path for path in TEMPLATES if path.suffix == ".html" and "mail" not in path.parts[-3:-1]]
# Mail is read by programs that know no style sheet; nothing of the portal's policy holds there.
FORBIDDEN_ON_PAGES = re.compile(
    r"\sstyle\s*=|<style|\son[a-z]+\s*=|hx-on|\bjs:|=.?javascript:|srcdoc|<base\b|<iframe|<object", re.I
)
UNESCAPED = re.compile(r"\|\s*(safe|forceescape)\b|autoescape|Markup|\{%-?\s*raw")


def test_there_are_templates_of_two_kinds_alone() -> None:
    assert len(PAGES) > 40
    for path in TEMPLATES:
        # By its suffix a template is escaped or not: `.txt` is for mail that is read as text.
        assert path.suffix == ".html" or (path.suffix == ".txt" and "mail" in path.parts), path


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: str(path.relative_to(ROOT / "templates")))
def test_nothing_is_marked_as_markup(path) -> None:
    assert not UNESCAPED.search(path.read_text()), path


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT / "templates")))
def test_nothing_on_a_page_needs_what_the_policy_forbids(path) -> None:
    text = path.read_text()
    assert not FORBIDDEN_ON_PAGES.search(text), FORBIDDEN_ON_PAGES.search(text)
    for script in re.findall(r"<script\b[^>]*>.*?</script>", text, re.S | re.I):
        assert re.fullmatch(r"""<script src="\{\{ static\('[\w./-]+'\) \}\}"( defer)?></script>""", script), script
    for trigger in re.findall(r'hx-trigger="([^"]*)"', text):
        assert "[" not in trigger, "a filter is code"


def test_only_the_cleaner_makes_markup() -> None:
    makers = [
        path.relative_to(ROOT).as_posix() for folder in ("portal", "api", "models")
        for path in (ROOT / folder).rglob("*.py") if re.search(r"Markup\(|autoescape|render_template_string",
                                                                path.read_text())
    ]
    assert makers == ["portal/markdown.py"]


async def test_a_page_lets_others_run_while_it_is_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "TURN_S", 0)
    app, turns = Quart(__name__), [0]
    app.jinja_environment = rendering.Environment
    app.jinja_loader = DictLoader({"long.html": "{% for n in range(100) %}{{ n }};{% endfor %}{{ text }}"})

    async def others() -> None:
        while True:
            turns[0] += 1
            await asyncio.sleep(0)

    async with app.app_context():
        running = asyncio.create_task(others())
        text = await rendering.render("long.html", text="<b>")
        running.cancel()
    assert text == "".join(f"{n};" for n in range(100)) + "&lt;b&gt;" and turns[0] > 50
