"""The overview: what is left, what was spent, what happened last, and the first steps."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from quart import Response, g, request

from models import api_key, call, clock, included_calls, overview, usage_day, wallet
from models.database import Row
from models.usage_day import OlderDays, Part, Sums
from portal.answer import page
from portal.chart import bars_of
from portal.format import short_time
from portal.pages import Pages
from portal.pages.api_keys import example_offer
from portal.result import words_of

DAYS = 30
LATEST = 10


@dataclass(frozen=True, slots=True)
class Standing:
    """Show what is left and what was used. Money in micro-dollars."""

    credit: int
    held: int
    disputed: bool
    included_left: int
    included_of: int
    renews_ms: int
    today: Sums
    month: Sums

    @property
    def broken(self) -> str:
        """Return the share of calls that failed or were refused, in percent."""
        failures = self.month.failed + self.month.refused
        return f"{100 * failures / self.month.calls:.1f}" if self.month.calls else "0"


@dataclass(frozen=True, slots=True)
class CallLine:
    """Show one call. `charged` None means that it was an included one."""

    id: str
    at_ms: int
    time: str
    offer: str
    key: str
    input_tokens: int
    output_tokens: int
    charged: int | None
    took_ms: int | None
    word: str
    kind: str


@dataclass(frozen=True, slots=True)
class Live:
    """Hold what changes while somebody looks."""

    standing: Standing
    steps: overview.Steps
    lines: tuple[CallLine, ...]

    def digest(self) -> str:
        """Return a digest of what is shown, by which the page asks whether anything is new."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]


def register(pages: Pages) -> None:
    """Add the page."""
    older = OlderDays()

    @pages.blueprint.get("/dashboard")
    async def dashboard() -> Response:
        now = clock.now_ms()
        days = await _days(pages, now, older)
        live = await _live(pages, now, days)
        of, bars = bars_of(days.items())
        return await page(
            "overview/index.html", live=live, of=of, bars=bars, base_url=f"{pages.settings.public_url}/v1",
            example=example_offer(pages.catalog()),
        )

    @pages.blueprint.get("/dashboard/latest")
    async def latest() -> Response:
        now = clock.now_ms()
        live = await _live(pages, now, await _days(pages, now, older))
        digest = live.digest()
        if request.headers.get("hx-ptag") == digest:
            return Response(b"", 304, headers={"hx-ptag": digest})
        answer = await page(
            "overview/_live.html", live=live, base_url=f"{pages.settings.public_url}/v1",
            example=example_offer(pages.catalog()),
        )
        answer.headers["hx-ptag"] = digest
        return answer


async def _days(pages: Pages, now_ms: int, older: OlderDays) -> dict[str, Sums]:
    """Return the sums of the last thirty UTC days, also of those without calls, the last one today."""
    today = usage_day.day_of(now_ms)
    names = [usage_day.days_before(today, back) for back in reversed(range(DAYS))]
    found = await usage_day.summary(pages.database, g.session.account_id, Part(from_day=names[0]), older)
    return {name: found.by_day.get(name, Sums()) for name in names}


async def _live(pages: Pages, now_ms: int, days: dict[str, Sums]) -> Live:
    return Live(
        standing=await _standing(pages, now_ms, days),
        steps=await overview.first_steps(pages.database, g.session.account_id),
        lines=await _lines(pages),
    )


async def _standing(pages: Pages, now_ms: int, days: dict[str, Sums]) -> Standing:
    account_id = g.session.account_id
    balance = await wallet.balance(pages.database, account_id)
    used = await included_calls.used_now(pages.database, account_id, clock.month(now_ms))
    plan = pages.catalog().plans.get(g.session.plan)
    included = plan.included_calls_per_month if plan else 0
    return Standing(
        credit=balance.posted - balance.held,
        held=balance.held,
        disputed=balance.disputed,
        included_left=max(included - used, 0),
        included_of=included,
        renews_ms=clock.month_end_ms(now_ms),
        today=days[usage_day.day_of(now_ms)],
        month=usage_day.together(days.values()),
    )


async def _lines(pages: Pages) -> tuple[CallLine, ...]:
    account_id = g.session.account_id
    rows = await call.recent(pages.database, account_id, call.Filter(), limit=LATEST)
    named = await api_key.names(pages.database, account_id, among={row["key_id"] for row in rows})
    names = {row["id"]: row["name"] for row in named}
    return tuple(_line(row, names.get(row["key_id"], ""), g.session.time_zone) for row in rows)


def _line(row: Row, key: str, zone: str) -> CallLine:
    word, kind = words_of(row)
    running = row["state"] == "open"
    return CallLine(
        id=row["id"],
        at_ms=row["created_at_ms"],
        time=short_time(row["created_at_ms"], zone),
        offer=row["offer"],
        key=key,
        input_tokens=row["input_tokens"] + row["cached_input_tokens"] + row["cache_write_tokens"],
        output_tokens=row["checkpoint_output_tokens"] if running else row["output_tokens"],
        charged=None if row["charged_from"] == "included" else row["charged_microusd"],
        took_ms=row["latency_ms"],
        word=word,
        kind=kind,
    )
