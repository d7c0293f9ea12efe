"""A forgotten password: a mailed link, a new password, every session ended."""

from __future__ import annotations

from quart import Response

from models import account as accounts
from models import one_time_link, password
from models.account import mailbox_of
from models.errors import RateLimited
from models.one_time_link import RESET, LinkUsed
from models.password import TooManySignIns
from portal import mail
from portal.answer import onward, page
from portal.forms import Form, sent_form
from portal.guard import for_anyone
from portal.pages import Pages
from portal.tries import level, refuse


def register(pages: Pages) -> None:
    """Add the pages."""

    @pages.blueprint.get("/forgot")
    @for_anyone
    async def forgot() -> Response:
        return await page("forgot/index.html", form=Form())

    @pages.blueprint.post("/forgot")
    @for_anyone
    async def ask_reset() -> Response:
        form = await sent_form()
        email = form.email("email")
        if not form.is_good:
            return await page("forgot/index.html", status=422, form=form)
        try:
            async with level():
                await _ask(pages, email)
        except RateLimited as error:
            return await page("forgot/index.html", status=refuse(form, error), form=form)
        return await onward("/forgot/sent")

    @pages.blueprint.get("/forgot/sent")
    @for_anyone
    async def forgot_sent() -> Response:
        return await page("forgot/sent.html", shows_mail=pages.shows_mail)

    @pages.blueprint.get("/reset/<secret>")
    @for_anyone
    async def reset_form(secret: str) -> Response:
        email = await one_time_link.email_of(pages.database, RESET, secret)
        if email is None:
            return await page("forgot/used.html", status=404)
        return await page("forgot/reset.html", form=Form(), email=email)

    @pages.blueprint.post("/reset/<secret>")
    @for_anyone
    async def reset(secret: str) -> Response:
        email = await one_time_link.email_of(pages.database, RESET, secret)
        if email is None:
            return await page("forgot/used.html", status=404)
        form = await sent_form()
        chosen = form.new_password("password", email)
        if not form.is_good:
            return await page("forgot/reset.html", status=422, form=form, email=email)
        try:
            hashed = await password.hash_of(chosen)
        except TooManySignIns as error:
            return await page("forgot/reset.html", status=refuse(form, error), form=form, email=email)
        notice = await mail.write("password_changed", email, pages.settings, link="/forgot")
        try:
            await pages.database.run(lambda: accounts.reset(secret, hashed, notice))
        except LinkUsed:
            return await page("forgot/used.html", status=404)
        return pages.guard.end_session(await onward("/login?said=password-reset"))


async def _ask(pages: Pages, email: str) -> None:
    secret = one_time_link.new_secret()
    letter = await mail.write("reset", email, pages.settings, link=f"/reset/{secret}")

    asked, letters = pages.tries.ask(), pages.tries.letter(mailbox_of(email))

    def script():
        yield from asked()
        yield from letters()
        yield from accounts.ask_reset(email, secret, letter)

    await pages.database.run(script)
