"""Lists on the wire: paging by the ids of the first and last row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from api.errors import ApiError

LIMIT_DEFAULT = 20
LIMIT_MAX = 100
TEXT_LENGTH_MAX = 256


@dataclass(frozen=True, slots=True)
class Page:
    """Say which page of a list is wanted; `after` and `before` are ids of rows."""

    limit: int
    after: str | None
    before: str | None
    ascending: bool


def page_of(query: Mapping[str, str], *, limit_max: int = LIMIT_MAX) -> Page:
    """Return the page a query string asks for. Raises ApiError 400 naming the parameter."""
    order = query.get("order") or "desc"
    if order not in ("asc", "desc"):
        raise ApiError(400, "invalid_request", "order must be asc or desc.", param="order")
    after, before = plain(query.get("after")) or None, plain(query.get("before")) or None
    if after and before:
        raise ApiError(400, "invalid_request", "Send after or before, not both.", param="before")
    return Page(
        limit=whole_number(query, "limit", LIMIT_DEFAULT, least=1, most=limit_max),
        after=after,
        before=before,
        ascending=order == "asc",
    )


def plain(text: str | None) -> str:
    """Return a text from the address as both databases take it: no NUL, no half of a surrogate pair."""
    return (text or "")[:TEXT_LENGTH_MAX].replace("\0", "").encode("utf-8", "replace").decode()


def whole_number(query: Mapping[str, str], name: str, default: Any, *, least: int, most: int) -> Any:
    """Return an integer of a query string. Raises ApiError 400 naming the parameter."""
    text = query.get(name)
    if text is None or text == "":
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= 19 and least <= int(text) <= most):
        raise ApiError(400, "invalid_request", f"{name} must be a number from {least} to {most}.", param=name)
    return int(text)
