"""Verification: the mailed link shows one button; pressing it opens the account and signs in.

A GET changes nothing: programs that look through mail follow every link before its reader does.
"""

from __future__ import annotations

from quart import Response

from models import account as accounts
from models import one_time_link
from models.one_time_link import VERIFY, LinkUsed
from portal.answer import onward, page
from portal.entrance import arrival
from portal.guard import for_anyone
from portal.pages import Pages


def register(pages: Pages) -> None:
    """Add the page."""

    @pages.blueprint.get("/verify/<secret>")
    @for_anyone
    async def verification(secret: str) -> Response:
        email = await one_time_link.email_of(pages.database, VERIFY, secret)
        if email is None:
            return await page("verify/used.html", status=404)
        return await page("verify/index.html", email=email)

    @pages.blueprint.post("/verify/<secret>")
    @for_anyone
    async def verify(secret: str) -> Response:
        arriving = arrival()

        def script():
            account_id = yield from accounts.verify(secret)
            yield from arriving.begin(account_id)
            return account_id

        try:
            account_id = await pages.database.run(script)
        except LinkUsed:
            return await page("verify/used.html", status=404)
        response = pages.guard.begin_session(await onward("/dashboard?said=verified"), arriving.cookie)
        owner = await accounts.of_id(pages.database, account_id)
        pages.tries.remember_device(response, owner["email"])
        return response
