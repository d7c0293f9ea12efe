"""The parts: every macro in every state on one page, for whoever works on the looks. Not in production."""

from __future__ import annotations

from quart import Response
from werkzeug.datastructures import MultiDict
from werkzeug.exceptions import NotFound

from models.clock import now_ms
from portal.answer import page
from portal.forms import Form
from portal.guard import for_anyone
from portal.pages import Pages

BARS = [(f"2026-11-{day:02}", day * 37 % 101, f"${day * 37 % 101}.00") for day in range(1, 31)]


def register(pages: Pages) -> None:
    """Add the page."""

    @pages.blueprint.get("/dev/parts")
    @for_anyone
    async def parts() -> Response:
        if pages.settings.production:
            raise NotFound
        return await page(
            "dev/parts.html", bars=BARS, now_ms=now_ms(), empty=Form(), filled=_filled(), refused=_refused(),
        )


def _filled() -> Form:
    return Form(MultiDict({"name": "production", "mono": "203.0.113.7", "choice": "b"}))


def _refused() -> Form:
    form = Form(MultiDict({"name_bad": "x" * 120, "choice_bad": "z"}))
    form.refuse("form", "Nothing was changed: another page did this already.")
    form.refuse("name_bad", "Use at most 100 characters.")
    form.refuse("choice_bad", "Choose one of these.")
    return form
