"""The end of an account, and everything it owns as one file before that."""

from __future__ import annotations

from quart import Response, g

from models import account as accounts
from models import export, wallet
from portal import mail
from portal.answer import onward, page
from portal.confirmation import confirmed, while_in
from portal.export import gently
from portal.forms import Form, sent_form
from portal.pages import Pages

HERE = "/dashboard/settings/close"


def register(pages: Pages) -> None:
    """Add the pages."""

    @pages.blueprint.get("/dashboard/settings/export")
    async def export_account() -> Response:
        written = export.of_account(pages.database, g.session.account_id)
        response = Response(gently(written), 200, content_type="application/json")
        response.headers["content-disposition"] = 'attachment; filename="account.json"'
        return response

    @pages.blueprint.get(HERE)
    async def closing() -> Response:
        return await _show(pages, Form())

    @pages.blueprint.post(HERE)
    async def close() -> Response:
        form, session = await sent_form(), g.session
        status = await confirmed(pages, form, "current_password")
        if status is not None:
            return await _show(pages, form, status=status)
        notice = await mail.write("closed", session.email, pages.settings, link="/signup")
        await pages.payments.forget_card(session.account_id)
        await pages.database.run(while_in(session, lambda: accounts.close(session.account_id, notice)))
        return pages.guard.end_session(await onward("/login?said=closed"))


async def _show(pages: Pages, form: Form, *, status: int = 200) -> Response:
    balance = await wallet.balance(pages.database, g.session.account_id)
    return await page("close/index.html", status=status, form=form, balance=balance)
