"""The mailbox of a development house: the letters that would have been sent."""

from __future__ import annotations

from quart import Response
from werkzeug.exceptions import NotFound

from models import outbox
from portal.answer import page
from portal.guard import for_anyone
from portal.pages import Pages

SHOWN = 50


def register(pages: Pages) -> None:
    """Add the page."""

    @pages.blueprint.get("/dev/mail")
    @for_anyone
    async def mailbox() -> Response:
        if not pages.shows_mail:
            raise NotFound
        return await page("mailbox/index.html", letters=await outbox.latest(pages.database, SHOWN))
