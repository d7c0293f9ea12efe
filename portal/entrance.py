"""The entrance: a session begins under a new cookie, and the one that the browser had before ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quart import Response, g, request

from models import session as sessions
from models.database import Script
from portal.answer import onward
from portal.pages import Pages


@dataclass(frozen=True, slots=True)
class Arrival:
    """Hold a session that is to begin: its cookie, and where the browser is."""

    cookie: str
    address: str
    agent: str
    old: sessions.Session | None

    def begin(self, account_id: str, *, state: str = sessions.WHOLE) -> Script[None]:
        """Begin the session, in the transaction that gives cause for it."""
        if self.old is not None:
            yield from sessions.end(self.old.account_id, self.old.id)
        yield from sessions.begin(account_id, self.cookie, address=self.address, agent=self.agent, state=state)


def arrival() -> Arrival:
    """Return a session to begin for this request's browser."""
    return Arrival(sessions.new_cookie(), g.address, request.headers.get("user-agent", ""), g.session)


async def enter(
    pages: Pages, account_id: str, where: str, *, provided: Callable[[], Script[None]],
    state: str = sessions.WHOLE,
) -> Response:
    """Begin a session and go somewhere with it, provided that a script raises nothing."""
    arriving = arrival()

    def script() -> Script[None]:
        yield from provided()
        yield from arriving.begin(account_id, state=state)

    await pages.database.run(script)
    return pages.guard.begin_session(await onward(where), arriving.cookie)
