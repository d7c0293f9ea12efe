"""Low credit: telling its owner, and buying more with the card that was kept for that.

Both are loops that any process may run beside the others; nothing that a call waits for is done here. What there is
to do stands in small tables of its own, so looking costs the same however many accounts there are.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace

from models import account as accounts
from models import auto_recharge, low_credit, top_up
from models.auto_recharge import AUTHENTICATION, DECLINED, UNCLEAR, AtCeiling, Charge
from models.clock import now_ms
from models.database import Database
from models.errors import RateLimited
from models.outbox import Letter
from models.top_up import EXPIRED, FAILED, PENDING, TopUp
from portal.payments import AuthenticationRequired, CardDeclined, Payments, ProcessorUnavailable

CREDITS = "/dashboard/billing/credits"
# Shorter than a charge is claimed for.
CHARGE_S = 40
WAITS_MS = (5_000, 15_000, 60_000, 300_000, 900_000)
HOUR_MS = 3600 * 1000
# What processors call it when a card's owner has to be there.
AUTHENTICATION_FAILURE = "authentication_required"
# A processor knows a repetition by the order's id for a day. Well before its end it is only asked what it knows.
REPEATED_MS = 20 * HOUR_MS
GIVEN_UP_MS = 24 * HOUR_MS

# Writes a letter: its kind, whom to, and what its templates show.
Write = Callable[..., Awaitable[Letter]]

_log = logging.getLogger("tollgate.low_credit")


class LowCredit:
    """Look after accounts whose credit runs low."""

    def __init__(self, database: Database, payments: Payments, write: Write) -> None:
        self._database = database
        self._payments = payments
        self._write = write

    async def tell(self) -> None:
        """Mail those whose balance has fallen below their threshold."""
        for crossing in await low_credit.waiting(self._database):
            letter = None
            if crossing.email is not None:
                letter = await self._write(
                    "low_credit", crossing.email, link=CREDITS,
                    below_microusd=crossing.below_microusd, balance_microusd=crossing.balance_microusd,
                )
                letter = replace(letter, account_id=crossing.account_id)
            await self._database.run(lambda one=crossing, text=letter: low_credit.tell(one, text), deadline_s=10)

    async def recharge(self) -> None:
        """Order a top-up for each account that is due, and charge what is ordered."""
        processor = self._payments.processor
        if processor is None:
            return
        for account_id in await auto_recharge.due(self._database):
            await self._begin(account_id, processor.name)
        waiting = await auto_recharge.waiting(self._database)
        outcomes = await asyncio.gather(*(self._charge(one) for one in waiting), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    async def _begin(self, account_id: str, processor: str) -> None:
        try:
            begun = await self._database.run(lambda: auto_recharge.begin(account_id, processor), deadline_s=10)
        except RateLimited as error:
            until_ms = error.until_ms
            await self._database.run(lambda: auto_recharge.put_off(account_id, until_ms), deadline_s=10)
        except auto_recharge.ChargeOpen as error:
            _log.error("%s, though its row was ours", error)
        else:
            if isinstance(begun, AtCeiling):
                await self._tell_ceiling(account_id, begun)

    async def _tell_ceiling(self, account_id: str, reached: AtCeiling) -> None:
        letter = await self._letter(account_id, "recharge_waits", reached=reached)
        await self._database.run(
            lambda: auto_recharge.tell_ceiling(account_id, reached, letter), deadline_s=10
        )

    async def _charge(self, top_up_id: str) -> None:
        charge = await self._database.run(lambda: auto_recharge.claim(top_up_id), deadline_s=10)
        if charge is None:
            return
        ordered = await top_up.find(self._database, charge.account_id, top_up_id)
        try:
            async with asyncio.timeout(CHARGE_S):
                reason = await self._settled(charge, ordered)
        except CardDeclined as error:
            _log.info("a kept card was declined: %s", error.code, extra={"top_up": top_up_id})
            reason = DECLINED
        except AuthenticationRequired:
            reason = AUTHENTICATION
        except Exception as error:
            # It may have been charged. Only the same order again, or time, can tell.
            why = f": {error}" if isinstance(error, ProcessorUnavailable) else ""
            _log.warning("a charge is unclear: %s%s", type(error).__name__, why, extra={"top_up": top_up_id})
            wait_ms = WAITS_MS[min(charge.tries, len(WAITS_MS)) - 1]
            await self._database.run(lambda: auto_recharge.try_later(top_up_id, wait_ms), deadline_s=10)
            return
        await self._end(charge, ordered, reason)

    async def _settled(self, charge: Charge, ordered: TopUp) -> str | None:
        """Have an order paid and credited, or return why it is not."""
        if ordered.state != PENDING:
            # Somebody else has learned what became of it.
            return {FAILED: _reason_of(ordered.failure), EXPIRED: UNCLEAR}.get(ordered.state)
        processor = self._payments.processor
        if processor is None or processor.name != ordered.processor:
            raise LookupError("the order's processor is not in use")
        if not charge.is_wanted and charge.tries == 1:
            return UNCLEAR  # turned off before anybody was asked
        age_ms = now_ms() - charge.created_at_ms
        if charge.is_wanted and age_ms < REPEATED_MS:
            await self._payments.paid(await processor.charge(ordered, charge.card))
            return None
        known = await self._payments.learn(ordered)
        if known.payment is not None:
            return None
        if known.state == FAILED:
            return _reason_of(known.failure)
        if age_ms > (GIVEN_UP_MS if charge.is_wanted else HOUR_MS):
            return UNCLEAR
        raise LookupError("nothing is known of it yet")

    async def _end(self, charge: Charge, ordered: TopUp, reason: str | None) -> None:
        letter = await self._letter(
            charge.account_id, "recharged" if reason is None else "recharge_off",
            amount_microusd=ordered.amount_microusd, card=charge.card, reason=reason,
        )
        if reason is None:
            await self._database.run(lambda: auto_recharge.paid(charge.top_up_id, letter), deadline_s=10)
        else:
            await self._database.run(
                lambda: auto_recharge.failed(charge.top_up_id, reason, letter), deadline_s=10
            )

    async def _letter(self, account_id: str, kind: str, **view: object) -> Letter:
        email = (await accounts.of_id(self._database, account_id))["email"]
        return replace(await self._write(kind, email, link=CREDITS, **view), account_id=account_id)


def _reason_of(failure: str | None) -> str:
    return AUTHENTICATION if failure == AUTHENTICATION_FAILURE else DECLINED
