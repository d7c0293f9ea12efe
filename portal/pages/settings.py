"""Settings: profile, address, password, sessions and mails of the account."""

from __future__ import annotations

from functools import lru_cache
from zoneinfo import available_timezones

from quart import Response, g, request
from werkzeug.exceptions import NotFound

from models import account as accounts
from models import low_credit, one_time_link, passkey, password, second_factor
from models import session as sessions
from models.account import EmailChange, mailbox_of
from models.errors import RateLimited
from models.one_time_link import CHANGE_EMAIL, LinkUsed
from models.password import TooManySignIns
from portal import mail
from portal.answer import onward, page
from portal.confirmation import confirmed, while_in
from portal.forms import Form, sent_form
from portal.guard import for_anyone, safe_next
from portal.pages import Pages
from portal.tries import refuse

HERE = "/dashboard/settings"
NAME_LENGTH_MAX = 80
CREDIT_WARNING_MICROUSD_MAX = 100_000 * 1_000_000
# What a browser calls itself, first match first: all of them also claim to be Safari, and Edge to be Chrome.
BROWSERS = (
    ("Edg/", "Edge"), ("OPR/", "Opera"), ("Firefox/", "Firefox"), ("Chrome/", "Chrome"), ("Safari/", "Safari"),
)
SYSTEMS = (
    ("Windows", "Windows"), ("iPhone", "iPhone"), ("iPad", "iPad"), ("Android", "Android"), ("Mac OS", "macOS"),
    ("CrOS", "ChromeOS"), ("Linux", "Linux"),
)


def register(pages: Pages) -> None:
    """Add the pages."""
    time_zones()  # now, while nobody waits for it: they are read from hundreds of files
    _add_profile(pages)
    _add_password(pages)
    _add_email(pages)
    _add_sessions(pages)
    _add_confirmation(pages)


def _add_profile(pages: Pages) -> None:
    @pages.blueprint.get(HERE)
    async def settings() -> Response:
        return await _show(pages)

    @pages.blueprint.post(f"{HERE}/profile")
    async def set_profile() -> Response:
        form, account_id = await sent_form(), g.session.account_id
        name = form.text("name", required=False, length_max=NAME_LENGTH_MAX)
        zone = form.choice("time_zone", time_zones())
        if not form.is_good or zone is None:
            return await _show(pages, status=422, profile=form)
        await pages.database.run(lambda: accounts.set_profile(account_id, name, zone))
        return await onward(f"{HERE}?said=saved")

    @pages.blueprint.post(f"{HERE}/mails")
    async def set_mails() -> Response:
        form, account_id = await sent_form(), g.session.account_id
        below = form.dollars("low_credit", 0, CREDIT_WARNING_MICROUSD_MAX) or 0
        notices = form.typed("notices") == "yes"
        if not form.is_good:
            return await _show(pages, status=422, mails=form)

        def script():
            yield from low_credit.set_threshold(account_id, below)
            yield from accounts.set_notices(account_id, notices)

        await pages.database.run(script)
        return await onward(f"{HERE}?said=saved")


def _add_password(pages: Pages) -> None:
    @pages.blueprint.post(f"{HERE}/password")
    async def set_password() -> Response:
        form, session = await sent_form(), g.session
        chosen = form.new_password("new_password", session.email)
        status = await confirmed(pages, form, "current_password")
        if status is None:
            try:
                hashed = await password.hash_of(chosen)
            except TooManySignIns as error:
                status = refuse(form, error)
        if status is not None:
            return await _show(pages, status=status, passwords=form)
        notice = await mail.write("password_changed", session.email, pages.settings, link="/forgot")
        await pages.database.run(while_in(
            session, lambda: accounts.set_password(session.account_id, hashed, notice, kept_session=session.id)
        ))
        return await onward(f"{HERE}?said=password-changed")


def _add_email(pages: Pages) -> None:
    @pages.blueprint.post(f"{HERE}/email")
    async def ask_email_change() -> Response:
        form, session = await sent_form(), g.session
        email = form.email("email")
        if email == session.email:
            form.refuse("email", "This is your address already.")
        status = await confirmed(pages, form, "email_password")
        if status is None:
            try:
                await _ask_email_change(pages, session, email)
            except RateLimited as error:
                status = refuse(form, error)
        if status is not None:
            return await _show(pages, status=status, emails=form)
        return await onward(f"{HERE}?said=email-asked")

    @pages.blueprint.get("/change-email/<secret>")
    @for_anyone
    async def email_change(secret: str) -> Response:
        email = await one_time_link.email_of(pages.database, CHANGE_EMAIL, secret)
        if email is None:
            return await page("settings/email_used.html", status=404)
        return await page("settings/email.html", email=email)

    @pages.blueprint.post("/change-email/<secret>")
    @for_anyone
    async def change_email(secret: str) -> Response:
        email = await one_time_link.email_of(pages.database, CHANGE_EMAIL, secret)
        if email is None:
            return await page("settings/email_used.html", status=404)
        notice = await mail.write("email_changed", email, pages.settings, link="/", email=email)
        try:
            await pages.database.run(
                lambda: accounts.change_email(secret, notice), gate=accounts.gate_of(mailbox_of(email))
            )
        except LinkUsed:
            return await page("settings/email_used.html", status=404)
        return pages.guard.end_session(await onward("/login?said=email-changed"))


def _add_sessions(pages: Pages) -> None:
    @pages.blueprint.post(f"{HERE}/sessions/end")
    async def end_session() -> Response:
        wanted, session = (await sent_form()).typed("session"), g.session
        if not await pages.database.run(lambda: sessions.end(session.account_id, wanted)):
            raise NotFound
        if wanted == session.id:
            return pages.guard.end_session(await onward("/login?said=signed-out"))
        return await onward(f"{HERE}?said=session-ended")

    @pages.blueprint.post(f"{HERE}/sessions/end-others")
    async def end_other_sessions() -> Response:
        session = g.session
        await pages.database.run(lambda: sessions.end_all(session.account_id, but=session.id))
        return await onward(f"{HERE}?said=sessions-ended")


def _add_confirmation(pages: Pages) -> None:
    @pages.blueprint.get(f"{HERE}/confirm")
    async def confirmation() -> Response:
        return await page("settings/confirm.html", form=Form(), next=safe_next(request.args.get("next"), HERE))

    @pages.blueprint.post(f"{HERE}/confirm")
    async def confirm() -> Response:
        form, session = await sent_form(), g.session
        where = safe_next(form.typed("next"), HERE)
        status = await confirmed(pages, form, "current_password")
        if status is not None:
            return await page("settings/confirm.html", status=status, form=form, next=where)
        await pages.database.run(while_in(session, lambda: sessions.prove(session.id)))
        return await onward(where)


async def _ask_email_change(pages: Pages, session: sessions.Session, email: str) -> None:
    secret = one_time_link.new_secret()
    settings = pages.settings
    wanted = EmailChange(
        email=email, secret=secret,
        confirm=await mail.write("email_change", email, settings, link=f"/change-email/{secret}"),
        notice=await mail.write("email_changing", session.email, settings, link="/forgot", email=email),
        known=await mail.write("known", email, settings, link="/forgot"),
    )
    count = pages.tries.letter(mailbox_of(email))

    def script():
        yield from count()
        yield from sessions.hold(session.account_id, session.id)
        yield from accounts.ask_email_change(session.account_id, wanted)

    await pages.database.run(script)


async def _show(pages: Pages, *, status: int = 200, **forms: Form) -> Response:
    """Show the page; of its forms, the one that was sent with what was typed."""
    session = g.session
    account = await accounts.of_id(pages.database, session.account_id)
    return await page(
        "settings/index.html", status=status, account=account, forms=forms,
        time_zones=[(name, name.replace("_", " ")) for name in time_zones()],
        sessions=[
            (row, described(row["agent"])) for row in await sessions.of_account(pages.database, account["id"])
        ],
        codes_left=await second_factor.codes_left(pages.database, account["id"]),
        low_credit_microusd=await low_credit.threshold(pages.database, account["id"]),
        passkeys=len(await passkey.of_account(pages.database, account["id"])),
    )


@lru_cache(maxsize=1)
def time_zones() -> list[str]:
    """Return the names of all time zones, UTC first."""
    places = (name for name in available_timezones() if "/" in name)
    return ["UTC", *sorted(name for name in places if not name.startswith(("Etc/", "posix/", "right/")))]


def described(agent: str) -> str:
    """Return a browser and its system in a few words."""
    browser = next((name for mark, name in BROWSERS if mark in agent), None)
    system = next((name for mark, name in SYSTEMS if mark in agent), None)
    if browser and system:
        return f"{browser} on {system}"
    return browser or agent.partition(" ")[0][:40] or "Unknown"
