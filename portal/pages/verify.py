"""Verification: the mailed link shows one button; pressing it opens the account and signs in.

A GET changes nothing: programs that look through mail follow every link before its reader does. In another
browser than the one that signed up a new password is asked for: whoever reads the mail need not be whoever
chose the first one.
"""

from __future__ import annotations

from quart import Response

from models import account as accounts
from models import one_time_link, password
from models.account import mailbox_of
from models.one_time_link import VERIFY, LinkUsed
from models.password import TooManySignIns
from portal import own_link
from portal.answer import onward, page
from portal.entrance import arrival
from portal.forms import Form, sent_form
from portal.guard import for_anyone
from portal.pages import Pages
from portal.tries import refuse


def register(pages: Pages) -> None:
    """Add the page."""

    @pages.blueprint.get("/verify/<secret>")
    @for_anyone
    async def verification(secret: str) -> Response:
        email = await one_time_link.email_of(pages.database, VERIFY, secret)
        if email is None:
            return await page("verify/used.html", status=404)
        is_ours = own_link.is_ours(pages.guard, secret)
        return await page("verify/index.html", form=Form(), email=email, is_ours=is_ours)

    @pages.blueprint.post("/verify/<secret>")
    @for_anyone
    async def verify(secret: str) -> Response:
        email = await one_time_link.email_of(pages.database, VERIFY, secret)
        if email is None:
            return await page("verify/used.html", status=404)
        chosen = None
        if not own_link.is_ours(pages.guard, secret):
            form = await sent_form()
            chosen, status = await _chosen(form, email)
            if chosen is None:
                return await page("verify/index.html", status=status, form=form, email=email, is_ours=False)
        arriving = arrival()

        def script():
            account_id = yield from accounts.verify(secret, chosen)
            yield from arriving.begin(account_id)
            return account_id

        try:
            account_id = await pages.database.run(script, gate=accounts.gate_of(mailbox_of(email)))
        except LinkUsed:
            return await page("verify/used.html", status=404)
        response = pages.guard.begin_session(await onward("/dashboard?said=verified"), arriving.cookie)
        owner = await accounts.of_id(pages.database, account_id)
        pages.tries.remember_device(response, owner["email"])
        return response


async def _chosen(form: Form, email: str) -> tuple[str | None, int]:
    """Return the hash of the password that was chosen, or None and the answer's status."""
    offered = form.new_password("password", email)
    if not form.is_good:
        return None, 422
    try:
        return await password.hash_of(offered), 200
    except TooManySignIns as error:
        return None, refuse(form, error)
