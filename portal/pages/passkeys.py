"""Passkeys: added and removed in the settings, used to sign in. A script talks to the browser, forms to us."""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import urlsplit

import msgspec
from quart import Response, g

from models import passkey
from models.database import Script
from models.errors import RateLimited
from models.passkey import REGISTER, SIGN_IN, Party, PasskeyRefused
from portal import mail
from portal.answer import onward, page
from portal.confirmation import to_confirmation, while_in
from portal.entrance import enter
from portal.forms import Form, sent_form
from portal.guard import for_anyone, safe_next
from portal.pages import Pages
from portal.tries import refuse, sentence_of

HERE = "/dashboard/settings/passkeys"
REFUSED = "This passkey was not taken. Try again, or sign in with your password."
NOT_ADDED = "Your device made no passkey that we can use. Try again."


def register(pages: Pages) -> None:
    """Add the pages."""
    _add_settings(pages)
    _add_sign_in(pages)


def _add_settings(pages: Pages) -> None:
    @pages.blueprint.get(HERE)
    async def passkey_settings() -> Response:
        return await to_confirmation(HERE) or await _show(pages)

    @pages.blueprint.post(f"{HERE}/options")
    async def passkey_options() -> Response:
        session, challenge = g.session, passkey.new_challenge()
        count = pages.tries.passkey(session.account_id)

        def script() -> Script[None]:
            yield from count()
            yield from passkey.offer(REGISTER, challenge, session.account_id)

        try:
            await pages.database.run(script)
        except RateLimited as error:
            return _too_often(error)
        known = await passkey.of_account(pages.database, session.account_id)
        return _json(passkey.registration_options(
            _party(pages), challenge, session.account_id, session.email, known
        ))

    @pages.blueprint.post(HERE)
    async def add_passkey() -> Response:
        if (elsewhere := await to_confirmation(HERE)) is not None:
            return elsewhere
        form, session = await sent_form(), g.session
        name = form.text("name", length_max=passkey.NAME_LENGTH_MAX)
        if form.is_good:
            try:
                await _add(pages, session, form.typed("credential"), name)
            except PasskeyRefused:
                form.refuse("form", NOT_ADDED)
        if not form.is_good:
            return await _show(pages, status=422, form=form)
        return await onward(f"{HERE}?said=passkey-added")

    @pages.blueprint.post(f"{HERE}/remove")
    async def remove_passkey() -> Response:
        if (elsewhere := await to_confirmation(HERE)) is not None:
            return elsewhere
        wanted, session = (await sent_form()).typed("passkey"), g.session
        notice = await mail.write("passkey", session.email, pages.settings, link="/forgot", is_added=False)
        await pages.database.run(while_in(session, lambda: passkey.remove(session.account_id, wanted, notice)))
        return await onward(f"{HERE}?said=passkey-removed")


def _add_sign_in(pages: Pages) -> None:
    @pages.blueprint.post("/login/passkey/options")
    @for_anyone
    async def sign_in_options() -> Response:
        challenge, count = passkey.new_challenge(), pages.tries.ask()

        def script() -> Script[None]:
            yield from count()
            yield from passkey.offer(SIGN_IN, challenge)

        try:
            await pages.database.run(script)
        except RateLimited as error:
            return _too_often(error)
        return _json(passkey.sign_in_options(_party(pages), challenge))

    @pages.blueprint.post("/login/passkey")
    @for_anyone
    async def sign_in_with_passkey() -> Response:
        form = await sent_form()
        where, status = safe_next(form.typed("next")), 422
        try:
            owner, used = await _check(pages, form.typed("credential"))
            response = await enter(pages, owner["account_id"], where, provided=used)
        except PasskeyRefused:
            form.refuse("form", REFUSED)
        except RateLimited as error:
            status = refuse(form, error)
        else:
            pages.tries.remember_device(response, owner["email"])
            return response
        return await page("login/index.html", status=status, form=form, next=where)


async def _add(pages: Pages, session, credential: str, name: str) -> None:
    challenge = passkey.answered_challenge(credential)
    await pages.database.run(lambda: passkey.take(REGISTER, challenge, session.account_id))
    made = passkey.read_registration(_party(pages), credential, challenge)
    notice = await mail.write("passkey", session.email, pages.settings, link="/forgot", is_added=True)
    await pages.database.run(while_in(session, lambda: passkey.add(session.account_id, made, name, notice)))


async def _check(pages: Pages, credential: str) -> tuple[passkey.Row, Callable[[], Script[None]]]:
    """Return the passkey that has signed our challenge, and the script of its use. Raises PasskeyRefused."""
    challenge = passkey.answered_challenge(credential)
    await pages.database.run(lambda: passkey.take(SIGN_IN, challenge))
    stored = await passkey.of_credential(pages.database, passkey.credential_of(credential))
    count = passkey.read_sign_in(_party(pages), credential, challenge, stored)
    return stored, lambda: passkey.note_used(stored["id"], count)


async def _show(pages: Pages, *, status: int = 200, form: Form | None = None) -> Response:
    listed = await passkey.of_account(pages.database, g.session.account_id)
    return await page("passkeys/index.html", status=status, form=form, passkeys=listed)


def _party(pages: Pages) -> Party:
    public_url = pages.settings.public_url
    return Party(urlsplit(public_url).hostname or "", public_url, pages.catalog().service_name)


def _too_often(error: RateLimited) -> Response:
    """Return what the script shows instead of asking a device."""
    return _json(msgspec.json.encode({"said": sentence_of(error)}).decode(), 429)


def _json(text: str, status: int = 200) -> Response:
    return Response(text, status, content_type="application/json")
