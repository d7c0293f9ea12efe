"""Sign-in and sign-out: password, then the second factor where there is one."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlencode

from quart import Response, g, request

from models import account as accounts
from models import password, second_factor
from models import session as sessions
from models.database import Script
from models.errors import RateLimited
from models.password import TooManySignIns
from portal.answer import onward, page
from portal.entrance import enter
from portal.forms import Form, sent_form
from portal.guard import for_anyone, for_half_signed_in, safe_next
from portal.pages import Pages
from portal.tries import refuse

WRONG = "The address or the password is wrong."
WRONG_CODE = "This code is wrong, or it was used already."


def register(pages: Pages) -> None:
    """Add the pages."""

    @pages.blueprint.get("/login")
    @for_anyone
    async def login() -> Response:
        where = safe_next(request.args.get("next"))
        if g.session is not None and g.session.state == sessions.WHOLE:
            return await onward(where)
        return await page("login/index.html", form=Form(), next=where)

    @pages.blueprint.post("/login")
    @for_anyone
    async def sign_in() -> Response:
        form = await sent_form()
        where = safe_next(form.typed("next"))
        email, offered = form.email("email"), form.secret("password")
        status = 422
        if form.is_good:
            try:
                found = await _check(pages, email, offered)
            except (RateLimited, TooManySignIns) as error:
                status = refuse(form, error)
            else:
                try:
                    if found is not None:
                        return await _enter(pages, found, where)
                except accounts.PasswordChanged:
                    pass
                form.refuse("form", WRONG)
        return await page("login/index.html", status=status, form=form, next=where)

    @pages.blueprint.get("/login/second")
    @for_half_signed_in
    async def login_second() -> Response:
        return await page("login/second.html", form=Form(), next=safe_next(request.args.get("next")))

    @pages.blueprint.post("/login/second")
    @for_half_signed_in
    async def sign_in_second() -> Response:
        form = await sent_form()
        where = safe_next(form.typed("next"))
        code = form.secret("code")
        status, account_id, email = 422, g.session.account_id, g.session.email
        if form.is_good:
            try:
                await pages.database.run(pages.tries.second(account_id))
            except RateLimited as error:
                status = refuse(form, error)
            else:
                half = g.session.id

                def proved() -> Script[None]:
                    yield from sessions.hold(account_id, half)
                    yield from second_factor.use(account_id, code)

                try:
                    response = await enter(pages, account_id, where, provided=proved)
                except second_factor.WrongCode:
                    form.refuse("code", WRONG_CODE)
                else:
                    pages.tries.remember_device(response, email)
                    return response
        return await page("login/second.html", status=status, form=form, next=where)

    @pages.blueprint.post("/logout")
    @for_anyone
    async def logout() -> Response:
        session = g.session
        if session is not None:
            await pages.database.run(lambda: sessions.end(session.account_id, session.id))
        return pages.guard.end_session(await onward("/login?said=signed-out"))


@dataclass(frozen=True, slots=True)
class Checked:
    """Be an account whose password was offered. `password_hash` is what is stored of it."""

    id: str
    email: str
    has_totp: bool
    password_hash: str


async def _check(pages: Pages, email: str, offered: str) -> Checked | None:
    """Return the account when its password was offered; as slow when there is none."""
    await pages.database.run(pages.tries.sign_in(email))
    found = await accounts.for_sign_in(pages.database, email)
    stored = found["password_hash"] if found else None
    if not await password.is_right(offered, stored):
        return None
    if password.is_outdated(stored):
        fresh = await password.hash_of(offered)
        await pages.database.run(lambda: accounts.keep_rehashed(found["id"], stored, fresh))
        stored = fresh
    return Checked(found["id"], found["email"], found["totp_secret"] is not None, stored)


async def _enter(pages: Pages, found: Checked, where: str) -> Response:
    """Begin the session. Raises PasswordChanged when the password was changed while it was checked."""

    def unchanged() -> Script[None]:
        return accounts.hold(found.id, found.password_hash)

    if found.has_totp:
        there = f"/login/second?{urlencode({'next': where})}"
        return await enter(pages, found.id, there, provided=unchanged, state=sessions.HALF)
    response = await enter(pages, found.id, where, provided=unchanged)
    pages.tries.remember_device(response, found.email)
    return response
