"""The templates: nothing in them runs but our own files, and nothing that somebody wrote is taken for markup."""

from __future__ import annotations

import re

import pytest

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
