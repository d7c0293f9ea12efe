"""Confirmation: who is signed in shows the password once more before something that cannot be undone."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar
from urllib.parse import urlencode

from quart import Response, g

from models import account as accounts
from models import password
from models import session as sessions
from models.clock import now_ms
from models.database import Script
from models.errors import RateLimited
from models.password import TooManySignIns
from portal.answer import onward
from portal.forms import Form
from portal.pages import Pages
from portal.tries import refuse

WRONG = "This is not your password."
T = TypeVar("T")


async def confirmed(pages: Pages, form: Form, name: str) -> int | None:
    """Return None when the form is good and its field holds the account's password, else the answer's status."""
    account_id = g.session.account_id
    offered = form.secret(name)
    if not form.is_good:
        return 422
    try:
        await pages.database.run(pages.tries.confirm(account_id))
        account = await accounts.of_id(pages.database, account_id)
        if await password.is_right(offered, account["password_hash"]):
            return None
    except (RateLimited, TooManySignIns) as error:
        return refuse(form, error)
    form.refuse(name, WRONG)
    return 422


async def to_confirmation(where: str) -> Response | None:
    """Return the way to the confirmation, and back from there; None when there was one a short while ago."""
    if g.session.was_proven(now_ms()):
        return None
    return await onward(f"/dashboard/settings/confirm?{urlencode({'next': where})}")


def while_in(session: sessions.Session, script: Callable[[], Script[T]]) -> Callable[[], Script[T]]:
    """Return a script that is run unless the session has ended meanwhile; then it raises SessionEnded."""

    def held() -> Script[T]:
        yield from sessions.hold(session.account_id, session.id)
        return (yield from script())

    return held
