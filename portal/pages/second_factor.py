"""The second factor: turned on with an app, ten recovery codes shown once, turned off with the password."""

from __future__ import annotations

import io

import segno
from quart import Response, g, request

from models import account as accounts
from models import second_factor
from models.clock import now_ms
from models.errors import RateLimited
from portal import mail
from portal.answer import onward, page
from portal.confirmation import confirmed, to_confirmation, while_in
from portal.forms import Form, sent_form
from portal.pages import Pages
from portal.tries import refuse

HERE = "/dashboard/settings/second-factor"
QR_SCALE, QR_BORDER = 5, 4


def register(pages: Pages) -> None:
    """Add the pages."""

    @pages.blueprint.get(HERE)
    async def second_factor_settings() -> Response:
        return await to_confirmation(HERE) or await _show(pages)

    @pages.blueprint.get(f"{HERE}/qr.svg")
    async def second_factor_qr() -> Response:
        secret = await _secret_to_be(pages)
        # The one address that an app's camera reads: drawn dark on light whatever the theme.
        drawn = segno.make(second_factor.address(secret, g.session.email, pages.catalog().service_name), error="m")
        out = io.BytesIO()
        drawn.save(out, kind="svg", scale=QR_SCALE, border=QR_BORDER, light="#fff", dark="#000")
        return Response(out.getvalue(), 200, content_type="image/svg+xml")

    @pages.blueprint.post(HERE)
    async def turn_on() -> Response:
        if (elsewhere := await to_confirmation(HERE)) is not None:
            return elsewhere
        form, session = await sent_form(), g.session
        code, status = form.secret("code"), 422
        secret = await _secret_to_be(pages)
        if form.is_good:
            try:
                await pages.database.run(pages.tries.second(session.account_id))
            except RateLimited as error:
                status = refuse(form, error)
            else:
                step = second_factor.step_of(secret, code, now_ms())
                if step is None:
                    form.refuse("code", "This code is wrong. Is the clock of your device right?")
        if not form.is_good:
            return await _show(pages, status=status, form=form)
        codes = second_factor.new_codes()
        notice = await mail.write("second_factor", session.email, pages.settings, link="/forgot", is_on=True)
        if not await pages.database.run(while_in(session, lambda: second_factor.turn_on(
            session.account_id, secret, step, codes, notice, kept_session=session.id
        ))):
            return await onward(HERE)
        return await page("second_factor/codes.html", codes=codes, is_new=True)

    @pages.blueprint.post(f"{HERE}/codes")
    async def renew_codes() -> Response:
        form, session = await sent_form(), g.session
        status = await confirmed(pages, form, "codes_password")
        if status is not None or not session.has_totp:
            return await _show(pages, status=status or 422, codes_form=form)
        codes = second_factor.new_codes()
        await pages.database.run(while_in(session, lambda: second_factor.set_codes(session.account_id, codes)))
        return await page("second_factor/codes.html", codes=codes, is_new=False)

    @pages.blueprint.post(f"{HERE}/off")
    async def turn_off() -> Response:
        form, session = await sent_form(), g.session
        status = await confirmed(pages, form, "off_password")
        if status is not None:
            return await _show(pages, status=status, off_form=form)
        notice = await mail.write("second_factor", session.email, pages.settings, link="/forgot", is_on=False)
        await pages.database.run(while_in(session, lambda: second_factor.turn_off(session.account_id, notice)))
        return await onward("/dashboard/settings?said=totp-off")


async def _show(pages: Pages, *, status: int = 200, **forms: Form) -> Response:
    account = await accounts.of_id(pages.database, g.session.account_id)
    is_on = account["totp_secret"] is not None
    return await page(
        "second_factor/index.html", status=status, is_on=is_on,
        secret=None if is_on else await _secret_to_be(pages),
        codes_left=await second_factor.codes_left(pages.database, account["id"]),
        **{"form": None, "codes_form": None, "off_form": None, **forms},
    )


async def _secret_to_be(pages: Pages) -> str:
    """Return the secret that this browser is offered until it is turned on.

    It comes from the session's cookie, which is stored nowhere, and so need not be stored before it counts;
    a second one in the same session differs by the last step that the first one was used in.
    """
    account = await accounts.of_id(pages.database, g.session.account_id)
    cookie = request.cookies[pages.guard.session_cookie]
    return second_factor.secret_from(f"{cookie}:{account['totp_last_step']}")
