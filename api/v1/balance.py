"""Balance: what the wallet holds and how many included calls are left."""

from __future__ import annotations

from quart import Blueprint, Response, g

from api.v1.services import ANY_KEY, Services, answer
from api.wire import BalanceReport, IncludedCalls
from models import clock, included_calls, wallet
from models.money import usd


def register(blueprint: Blueprint, services: Services) -> None:
    """Add the balance route."""

    @blueprint.get("/balance")
    @services.need(ANY_KEY)
    async def retrieve_balance() -> Response:
        caller = g.exchange.caller
        now = clock.now_ms()
        balance = await wallet.balance(services.database, caller.account_id)
        used = await included_calls.used_now(services.database, caller.account_id, clock.month(now))
        limit = caller.plan.included_calls_per_month
        return answer(BalanceReport(
            object="balance",
            currency="usd",
            available_usd=usd(balance.available),
            posted_usd=usd(balance.posted),
            held_usd=usd(balance.held),
            available_microusd=balance.available,
            posted_microusd=balance.posted,
            held_microusd=balance.held,
            plan=caller.plan.name,
            included_calls=IncludedCalls(
                limit=limit,
                used=used,
                remaining=max(limit - used, 0),
                renews_at=clock.month_end_ms(now) // 1000,
            ),
        ))
