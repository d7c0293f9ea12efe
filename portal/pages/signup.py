"""Sign-up: an address and a password, then a mail. Everybody is told the same, known here or not."""

from __future__ import annotations

from quart import Response

from models import account as accounts
from models import one_time_link, password
from models.account import SignUp, mailbox_of
from models.errors import RateLimited
from models.password import TooManySignIns
from models.plan import PLAN_OF_NEW_ACCOUNTS
from portal import mail, own_link
from portal.answer import onward, page
from portal.forms import Form, sent_form
from portal.guard import for_anyone
from portal.pages import Pages
from portal.tries import level, refuse


def register(pages: Pages) -> None:
    """Add the page and the one after it."""

    @pages.blueprint.get("/signup")
    @for_anyone
    async def signup() -> Response:
        return await page("signup/index.html", form=Form())

    @pages.blueprint.post("/signup")
    @for_anyone
    async def sign_up() -> Response:
        form = await sent_form()
        email = form.email("email")
        chosen = form.new_password("password", email)
        if not form.is_good:
            return await page("signup/index.html", status=422, form=form)
        try:
            async with level():
                secret = await _sign_up(pages, email, chosen)
        except (RateLimited, TooManySignIns) as error:
            return await page("signup/index.html", status=refuse(form, error), form=form)
        return own_link.mark(pages.guard, await onward("/signup/sent"), secret)

    @pages.blueprint.get("/signup/sent")
    @for_anyone
    async def signup_sent() -> Response:
        return await page("signup/sent.html", shows_mail=pages.shows_mail)


async def _sign_up(pages: Pages, email: str, chosen: str) -> str:
    """Do it and return the link's secret, which opens nothing when it was not mailed."""
    mailbox = mailbox_of(email)
    await pages.database.run(pages.tries.sign_up(mailbox))
    secret = one_time_link.new_secret()
    wanted = SignUp(
        email=email, password_hash=await password.hash_of(chosen), plan=PLAN_OF_NEW_ACCOUNTS, secret=secret,
        welcome=await mail.write("verify", email, pages.settings, link=f"/verify/{secret}"),
        known=await mail.write("known", email, pages.settings, link="/forgot"),
    )
    count = pages.tries.letter(mailbox)

    def script():
        yield from count()
        yield from accounts.sign_up(wanted)

    await pages.database.run(script, gate=accounts.gate_of(mailbox))
    return secret
