"""Markdown that somebody else wrote, as HTML that can do nothing: no script, no image, no form, no request.

Two walls, each of which would do: a parser that takes HTML for text, and a cleaner that lets through only
the few elements on its list and no attribute but the address of a link.
"""

from __future__ import annotations

import html

import nh3
from markdown_it import MarkdownIt
from markdown_it.token import Token
from markupsafe import Markup

# Above this much text there is no formatting: it would keep a processor busy for too long.
FORMATTED_CHARACTERS_MAX = 60_000
# The parser's work grows with the square of open brackets, and of a table's empty cells.
BRACKET_WORK_MAX = 100_000_000
CELLS_MAX = 10_000
_TAGS = {
    "a", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "li", "ol", "p", "pre",
    "s", "strong", "table", "tbody", "td", "th", "thead", "tr", "ul",
}
_SCHEMES = {"https", "mailto"}


def rendered(text: str) -> Markup:
    """Return a text as harmless HTML. It takes milliseconds: for much text, call it on a thread."""
    if len(text) > FORMATTED_CHARACTERS_MAX or _is_laborious(text):
        return Markup(f"<pre>{html.escape(text)}</pre>")
    return Markup(_cleaner.clean(_parser.render(text)))


def _is_laborious(text: str) -> bool:
    """Return whether a text was made to keep its formatter busy: no prose is like that."""
    lines = text.split("\n")
    cells = max(line.count("|") for line in lines) * len(lines)
    return text.count("[") * len(text) > BRACKET_WORK_MAX or cells > CELLS_MAX


def _image_as_link(self: object, tokens: list[Token], index: int, options: object, env: object) -> str:
    """Show where an image lies instead of loading it: its address may carry away what was said."""
    token = tokens[index]
    address = html.escape(str(token.attrGet("src") or ""))
    words = html.escape(token.content or "image")
    return f'<a href="{address}">{words}</a>'


_parser = MarkdownIt("js-default")
_parser.add_render_rule("image", _image_as_link)
_cleaner = nh3.Cleaner(
    tags=_TAGS,
    # The star, because the cleaner has attributes of its own for every element unless told otherwise.
    attributes={"*": set(), "a": {"href"}, "ol": {"start"}},
    url_schemes=_SCHEMES,
    # A link into this very house could do something in its reader's name.
    url_relative="deny",
    link_rel="noopener noreferrer nofollow",
    # Elsewhere than here, where the conversation is.
    set_tag_attribute_values={"a": {"target": "_blank"}},
)
