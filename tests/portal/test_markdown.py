"""Markdown of strangers: formatted, and able to do nothing."""

from __future__ import annotations

import time
from html.parser import HTMLParser

import pytest

from portal import markdown
from portal.markdown import FORMATTED_CHARACTERS_MAX, rendered
from tests.portal.hostile_text import HOSTILE

ATTRIBUTES = {"a": {"href", "target", "rel"}, "ol": {"start"}}


class Seen(HTMLParser):
    """Note every element with its attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))


def is_harmless(text: str) -> bool:
    for tag, attributes in Seen(text).elements:
        if tag not in markdown._TAGS or not attributes.keys() <= ATTRIBUTES.get(tag, set()):
            return False
        if "href" in attributes and not attributes["href"].startswith(("https://", "mailto:")):
            return False
    return True


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("around", ["{}", "before {} after", "> {}", "- {}\n- x", "**{}**", "[{}](https://a.example)"])
def test_hostile_text_becomes_harmless(text, around):
    shown = rendered(around.format(text) if "{}" in around else text)
    assert is_harmless(shown), shown


def test_there_are_enough_of_them():
    assert len(set(HOSTILE)) == len(HOSTILE) > 110


@pytest.mark.parametrize(("text", "html"), [
    ("**a** _b_ ~~c~~ `d`", "<p><strong>a</strong> <em>b</em> <s>c</s> <code>d</code></p>\n"),
    # HTML is text already before the cleaner sees it.
    ("<b>x</b>", "<p>&lt;b&gt;x&lt;/b&gt;</p>\n"),
    ("3. x", '<ol start="3">\n<li>x</li>\n</ol>\n'),
    ("```js\n1 < 2\n```", "<pre><code>1 &lt; 2\n</code></pre>\n"),
    ("[x](https://a.example/?b=1&c=2)", '<p><a href="https://a.example/?b=1&amp;c=2" target="_blank"'
     ' rel="noopener noreferrer nofollow">x</a></p>\n'),
    ("<me@a.example>", '<p><a href="mailto:me@a.example" target="_blank" rel="noopener noreferrer nofollow">'
     "me@a.example</a></p>\n"),
    ("![a cat](https://a.example/cat.png)", '<p><a href="https://a.example/cat.png" target="_blank"'
     ' rel="noopener noreferrer nofollow">a cat</a></p>\n'),
    ("", ""),
])
def test_what_formatting_there_is(text, html):
    assert rendered(text) == html


@pytest.mark.parametrize("text", ["<b>&" * 20_000, "[" * 30_000])
def test_what_would_take_too_long_is_shown_as_it_is(text):
    shown = rendered(text)
    assert shown.startswith("<pre>") and is_harmless(shown) and len(Seen(shown).elements) == 1


@pytest.mark.parametrize("piece", [
    "[", "![", "*a ", "a**b", "> ", "`", "<", "[a](", "|a", "_a__", "- x\n", "\\", "&", "[x]: a\n", "~~a", "1. ",
    "|a|\n|-|\n",
    ("|a" * 100 + "\n" + "|-" * 100 + "\n" + "x\n" * 500), "`a``a```a", "<a@b.c", "[x][", "**[a](b)**",
])
def test_no_text_keeps_the_formatter_busy(piece):
    """The bound is ten times what is measured: a square in the length would pass it by far."""
    text = (piece * FORMATTED_CHARACTERS_MAX)[:FORMATTED_CHARACTERS_MAX]
    began = time.process_time()
    rendered(text)
    assert time.process_time() - began < 5
