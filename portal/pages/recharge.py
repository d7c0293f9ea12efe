"""What a credits page offers for when credit runs low: a mail, auto-recharge; and redeeming a code."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from quart import Response, g, request
from werkzeug.exceptions import NotFound as NoPage

from models import auto_recharge, clock, low_credit, payment_card, redeem_code
from models.auto_recharge import AutoRecharge, NoCard
from models.errors import RateLimited
from models.money import MICROUSD_PER_USD
from models.payment_card import Card
from models.redeem_code import NotRedeemed, Redemption
from models.settings import TOP_UP_MIN_USD
from portal.answer import onward
from portal.forms import Form, sent_form
from portal.pages import Pages
from portal.tries import refuse

PATH = "/dashboard/billing/credits"
BELOW_USD_MAX = 100_000
CEILING_USD_MAX = 1_000_000
CODE_LENGTH_MAX = 40
# What is proposed to who turns it on for the first time.
PROPOSED_MICROUSD = (5_000_000, 20_000_000, 100_000_000)
_REDEMPTION_ID = re.compile(r"rdm_[0-9a-z]{26}")

# Shows the credits page again with forms as they were sent.
Show = Callable[..., Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class Recharge:
    """Show what happens when credit runs low. `is_proposed` while nothing was ever chosen."""

    mail_below_microusd: int
    is_sold: bool
    card: Card | None
    chosen: AutoRecharge | None
    below_microusd: int
    amount_microusd: int
    ceiling_microusd: int
    charged_microusd: int
    month_ends_at_ms: int
    is_charging: bool
    waits_for_use: bool
    redeemed: Redemption | None

    @property
    def is_on(self) -> bool:
        """Return whether auto-recharge is on."""
        return self.chosen is not None and self.chosen.is_on

    @property
    def is_at_ceiling(self) -> bool:
        """Return whether the month has no room for another charge."""
        return self.is_on and self.charged_microusd + self.amount_microusd > self.ceiling_microusd


async def of_account(pages: Pages) -> Recharge:
    """Return what the page shows of the account that is signed in."""
    database, account_id, now = pages.database, g.session.account_id, clock.now_ms()
    processor = pages.payments.processor
    chosen = await auto_recharge.find(database, account_id)
    proposed = PROPOSED_MICROUSD
    if chosen is not None:
        proposed = (chosen.below_microusd, chosen.amount_microusd, chosen.ceiling_microusd)
    redeemed = request.args.get("redeemed", "")
    return Recharge(
        mail_below_microusd=await low_credit.threshold(database, account_id),
        is_sold=processor is not None,
        card=await payment_card.find(database, account_id, processor.name) if processor else None,
        chosen=chosen,
        below_microusd=proposed[0], amount_microusd=proposed[1], ceiling_microusd=proposed[2],
        charged_microusd=await auto_recharge.charged_in(database, account_id, clock.month(now)),
        month_ends_at_ms=clock.month_end_ms(now),
        is_charging=await auto_recharge.has_open(database, account_id),
        waits_for_use=await auto_recharge.waits_for_use(database, account_id),
        redeemed=await redeem_code.of_account(database, account_id, redeemed)
        if _REDEMPTION_ID.fullmatch(redeemed) else None,
    )


def add(pages: Pages, show: Show) -> None:
    """Add what its forms do."""
    _add_mail(pages, show)
    _add_recharge(pages, show)
    _add_redeeming(pages, show)


def _add_mail(pages: Pages, show: Show) -> None:
    @pages.blueprint.post(f"{PATH}/low-credit")
    async def set_low_credit() -> Response:
        form, account_id = await sent_form(), g.session.account_id
        below = form.dollars("low_credit", 0, BELOW_USD_MAX * MICROUSD_PER_USD) or 0
        if not form.is_good:
            return await show(status=422, low_credit=form)
        await pages.database.run(lambda: low_credit.set_threshold(account_id, below))
        return await onward(f"{PATH}?said=saved")


def _add_recharge(pages: Pages, show: Show) -> None:
    payments = pages.payments

    def processor_name() -> str:
        if payments.processor is None:
            raise NoPage
        return payments.processor.name

    @pages.blueprint.post(f"{PATH}/auto-recharge")
    async def turn_on_recharge() -> Response:
        processor, form, account_id = processor_name(), await sent_form(), g.session.account_id
        most = pages.settings.top_up_max_usd
        below = _dollars(form, "recharge_below", 1, BELOW_USD_MAX)
        amount = _dollars(form, "recharge_amount", TOP_UP_MIN_USD, most)
        ceiling = _dollars(form, "recharge_ceiling", TOP_UP_MIN_USD, CEILING_USD_MAX)
        if form.is_good and ceiling < amount:
            form.refuse("recharge_ceiling", "Use at least as much as one recharge buys.")
        if not form.is_good:
            return await show(status=422, recharge=form)
        try:
            await pages.database.run(
                lambda: auto_recharge.turn_on(account_id, processor, below, amount, ceiling)
            )
        except NoCard:
            form.refuse("form", "No card is kept. Add credit once with “Keep the card” ticked, then come back.")
            return await show(status=409, recharge=form)
        return await onward(f"{PATH}?said=recharge-on")

    @pages.blueprint.post(f"{PATH}/auto-recharge/off")
    async def turn_off_recharge() -> Response:
        account_id = g.session.account_id
        await pages.database.run(lambda: auto_recharge.turn_off(account_id))
        return await onward(f"{PATH}?said=recharge-off")

    @pages.blueprint.post(f"{PATH}/card/forget")
    async def forget_card() -> Response:
        processor_name()
        await payments.forget_card(g.session.account_id)
        return await onward(f"{PATH}?said=card-forgotten")


def _add_redeeming(pages: Pages, show: Show) -> None:
    @pages.blueprint.post(f"{PATH}/redeem")
    async def redeem_typed_code() -> Response:
        form, account_id = await sent_form(), g.session.account_id
        code = form.text("code", length_max=CODE_LENGTH_MAX)
        if not form.is_good:
            return await show(status=422, redeem=form)
        try:
            # In a transaction of its own, or a wrong code would take its count back with it.
            await pages.database.run(pages.tries.redeem(account_id))
            redeemed = await pages.database.run(lambda: redeem_code.redeem(account_id, code))
        except RateLimited as error:
            return await show(status=refuse(form, error), redeem=form)
        except NotRedeemed as error:
            form.refuse("code", str(error))
            return await show(status=422, redeem=form)
        return await onward(f"{PATH}?redeemed={redeemed.id}")


def _dollars(form: Form, name: str, lowest_usd: int, highest_usd: int) -> int:
    amount = form.dollars(name, lowest_usd * MICROUSD_PER_USD, highest_usd * MICROUSD_PER_USD, required=True)
    return amount or 0
