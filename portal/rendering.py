"""Rendering: templates to text, between the calls.

Quart's own environment compiles templates to asynchronous generators. No template of ours waits for anything, so
that bought nothing, and it cost a page of forty calls two thirds of its rendering.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from quart import Quart, current_app
from quart.templating import Environment as QuartEnvironment

TURN_S = 0.001


class Environment(QuartEnvironment):
    """Compile templates to plain functions. Quart's `render_template` does not work with it; `render` does."""

    def __init__(self, app: Quart, **options: Any) -> None:
        """Take what Quart's environment takes."""
        super().__init__(app, **options)
        self.is_async = False


async def render(template: str, **view: Any) -> str:
    """Return a template's text, with what the app's context processors add to the view.

    A page may take some milliseconds: after each, the calls that run meanwhile have the processor again.
    """
    await current_app.update_template_context(view)
    pieces, until_s = [], time.perf_counter() + TURN_S
    for piece in current_app.jinja_env.get_template(template).generate(view):
        pieces.append(piece)
        if time.perf_counter() > until_s:
            await asyncio.sleep(0)
            until_s = time.perf_counter() + TURN_S
    return "".join(pieces)
