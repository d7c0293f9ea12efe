"""The overview: what is left, what was spent, what happened last, and the first steps."""

from __future__ import annotations

from quart import Response

from portal.answer import page
from portal.pages import Pages


def register(pages: Pages) -> None:
    """Add the page."""

    @pages.blueprint.get("/dashboard")
    async def overview() -> Response:
        return await page("overview/index.html")
