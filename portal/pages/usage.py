"""Usage: every call as a row, live; what they add up to, by day and by model; one call explained; exports."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from urllib.parse import urlencode

from quart import Response, g, request

from models import api_key, usage_day
from models import call as calls
from models.clock import now_ms
from models.database import Database, Row
from models.errors import NotFound
from models.usage_day import OlderDays, Part, Summary, Sums
from portal import charge, export
from portal.answer import onward, page
from portal.chart import bars_of
from portal.format import exact_usd
from portal.pages import Pages
from portal.result import words_of

PAGE_CALLS = 40
CHOICES_MAX = 200
CHOICES_DAYS = 30
BARS_MAX = 62
MODELS_MAX = 12
TEXT_LENGTH_MAX = 200
# More than a table of any length has, and never a name.
UNKNOWN = "\ufffd"
PERIODS = (
    ("today", "Today"), ("7d", "Last 7 days"), ("30d", "Last 30 days"), ("month", "This month"),
    ("all", "All time"), ("custom", "From … to …"),
)
USUAL_PERIOD = "30d"
STATUSES = (("served", "Served"), ("failed", "Failed"), ("refused", "Refused"), ("running", "Running"))
ID = re.compile(r"req_[0-9a-z]{26}")


@dataclass(frozen=True, slots=True)
class Asked:
    """Hold what a reader wants to see: as it was typed, and the days it means, included at both ends."""

    key: str
    model: str
    status: str
    period: str
    typed_from: str
    typed_to: str
    id: str
    first_day: str | None
    last_day: str | None
    error: str | None

    @property
    def is_narrowed(self) -> bool:
        """Return whether anything but the usual is asked for."""
        return bool(self.key or self.model or self.status or self.id) or self.period != USUAL_PERIOD

    @property
    def has_sums(self) -> bool:
        """Return whether what is asked for has ended and so has been added up."""
        return not self.id and self.status != calls.RUNNING

    def query(self, **more: str) -> str:
        """Return the query string that asks for the same, and more."""
        dates = {"from": self.typed_from, "to": self.typed_to} if self.period == "custom" else {}
        fields = {
            "key": self.key, "model": self.model, "status": self.status,
            "period": "" if self.period == USUAL_PERIOD else self.period, **dates, "id": self.id, **more,
        }
        return urlencode({name: value for name, value in fields.items() if value})

    def filter(self) -> calls.Filter:
        """Return what calls match."""
        return calls.Filter(
            key_id=_known(self.key), offer=_known(self.model), outcome=self.status or None,
            from_ms=None if self.first_day is None else usage_day.start_of(self.first_day),
            until_ms=None if self.last_day is None else usage_day.start_of(self.last_day) + usage_day.DAY_MS,
        )

    def part(self) -> Part:
        """Return what sums match."""
        return Part(
            self.first_day, self.last_day, _known(self.key), _known(self.model),
            (self.status,) if self.status else None,
        )


@dataclass(frozen=True, slots=True)
class Line:
    """Show one call."""

    id: str
    at_ms: int
    key: str
    model: str
    input: str
    cached: int
    output: str
    cost: str
    latency_ms: int | None
    first_byte_ms: int | None
    word: str
    kind: str
    is_new: bool = False


@dataclass(frozen=True, slots=True)
class Stretch:
    """Hold the rows of a page, and next to which ids the newer and older ones lie, None where there are none.

    `cut` says on which side it ended before it was full, so many calls were looked through: "newer" or "older".
    """

    rows: Sequence[Row]
    newer: str | None = None
    older: str | None = None
    cut: str | None = None


@dataclass(frozen=True, slots=True)
class Calls:
    """Show a page of calls. It is live unless there are newer ones."""

    lines: list[Line]
    newer: str | None
    older: str | None
    cut: str | None
    is_live: bool
    has_any: bool


@dataclass(frozen=True, slots=True)
class Choices:
    """Hold what there is to choose among in the filters: (value, label)."""

    keys: list[tuple[str, str]]
    models: list[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Charts:
    """Show what was spent by day (or by month) and by model, or how many calls there were if nothing was."""

    of: str
    bars: list[tuple[str, int, str]]
    unit: str
    is_unfinished: bool
    models: list[tuple[str, Sums]]


def register(pages: Pages) -> None:
    """Add the pages."""
    database, older = pages.database, OlderDays()

    @pages.blueprint.get("/dashboard/usage")
    async def usage() -> Response:
        asked = _asked(request.args)
        # Each look waits for the loop several times, which is busy with calls: side by side they wait less.
        summary, shown, choices = await asyncio.gather(
            _summary(database, asked, older), _calls(database, asked, seen=None), _choices(database, asked)
        )
        totals = None if summary is None else summary.all
        return await page(
            "usage/index.html", asked=asked, calls=shown, totals=totals, tag=_tag(shown, totals),
            charts=_charts(asked, summary), choices=choices, periods=PERIODS, statuses=STATUSES,
            base_url=f"{pages.settings.public_url}/v1", example=_example(pages),
        )

    @pages.blueprint.get("/dashboard/usage/live")
    async def usage_live() -> Response:
        asked = _asked(request.args)
        if "hx-request" not in request.headers:
            return await onward(f"/dashboard/usage?{asked.query()}")
        seen = request.headers.get("hx-ptag", "")
        summary, shown = await asyncio.gather(_summary(database, asked, older), _calls(database, asked, seen=seen))
        totals = None if summary is None else summary.all
        tag = _tag(shown, totals)
        if tag == seen:
            return Response(b"", 304, headers={"hx-ptag": tag})
        answer = await page(
            "usage/_live.html", asked=asked, calls=shown, totals=totals,
            base_url=f"{pages.settings.public_url}/v1", example=_example(pages),
        )
        answer.headers["hx-ptag"] = tag
        return answer

    @pages.blueprint.get("/dashboard/usage/export.<kind>")
    async def usage_export(kind: str) -> Response:
        if kind not in export.TYPES:
            raise NotFound("there is no such export")
        asked, account_id = _asked(request.args), g.session.account_id
        written = export.pieces(
            database, account_id, asked.filter(), kind, lambda wanted: _names(database, account_id, wanted)
        )
        response = Response(written, 200, content_type=export.TYPES[kind])
        response.timeout = None
        response.headers["content-disposition"] = f'attachment; filename="{_file_name(asked)}.{kind}"'
        return response

    @pages.blueprint.get("/dashboard/usage/<request_id>")
    async def usage_call(request_id: str) -> Response:
        row = await calls.find(database, g.session.account_id, _plain(request_id))
        names = await _names(database, g.session.account_id, {row["key_id"]})
        return await page(
            "usage/call.html", call=row, line=_line(row, names), charge=charge.explain(row),
            error=charge.error_sentence(row["error_code"]), attempts=await calls.attempts_of(database, row["id"]),
        )


def _asked(query: Mapping[str, str]) -> Asked:
    period = query.get("period", "") or USUAL_PERIOD
    if period not in dict(PERIODS):
        period = USUAL_PERIOD
    status = query.get("status", "")
    typed_from, typed_to = _plain(query.get("from", "")), _plain(query.get("to", ""))
    today = usage_day.day_of(now_ms())
    first, last, error = today, None, None
    match period:
        case "7d":
            first = usage_day.days_before(today, 6)
        case "30d":
            first = usage_day.days_before(today, 29)
        case "month":
            first = f"{today[:7]}-01"
        case "all":
            first = None
        case "custom":
            first, last, error = _days(typed_from, typed_to)
    return Asked(
        key=_plain(query.get("key", "")), model=_plain(query.get("model", "")),
        status=status if status in dict(STATUSES) else "", period=period, typed_from=typed_from, typed_to=typed_to,
        id=_plain(query.get("id", "")), first_day=first, last_day=last, error=error,
    )


def _days(typed_from: str, typed_to: str) -> tuple[str | None, str | None, str | None]:
    """Return the days that were typed, and what is wrong with them."""
    try:
        first = date.fromisoformat(typed_from).isoformat() if typed_from else None
        last = date.fromisoformat(typed_to).isoformat() if typed_to else None
    except ValueError:
        return None, None, "Write days like 2026-11-21."
    # Years in which a moment is a positive number of few digits.
    if any(day is not None and not "1970" < day < "2200" for day in (first, last)):
        return None, None, "Choose days between 1971 and 2199."
    if first is not None and last is not None and first > last:
        return first, last, "The first day is after the last."
    return first, last, None


async def _calls(database: Database, asked: Asked, *, seen: str | None) -> Calls:
    account_id = g.session.account_id
    after, before = _cursor("after"), _cursor("before")
    found = await _page(database, account_id, asked, after, before)
    names = await _names(database, account_id, {row["key_id"] for row in found.rows})
    known = None if not seen else seen.partition(".")[0]
    lines = [_line(row, names, is_new=known is not None and row["id"] > known) for row in found.rows]
    has_any = bool(lines) or bool(
        await database.fetch("SELECT 1 FROM calls WHERE account_id = ? LIMIT 1", (account_id,))
    )
    return Calls(
        lines=lines,
        newer=None if found.newer is None else f"/dashboard/usage?{asked.query(before=found.newer)}",
        older=None if found.older is None else f"/dashboard/usage?{asked.query(after=found.older)}",
        cut=found.cut,
        is_live=found.newer is None and not asked.id,
        has_any=has_any,
    )


async def _page(
    database: Database, account_id: str, asked: Asked, after: str | None, before: str | None
) -> Stretch:
    """Return a page of calls."""
    if asked.id:
        try:
            return Stretch([await calls.find(database, account_id, asked.id)])
        except NotFound:
            return Stretch([])
    if before is not None:
        found = await calls.page(database, account_id, asked.filter(), limit=PAGE_CALLS + 1, before=before)
        if found.reached is not None:
            return Stretch(found.rows, found.reached, found.rows[-1]["id"] if found.rows else before, "newer")
        if len(found.rows) > PAGE_CALLS:
            return Stretch(found.rows[1:], found.rows[1]["id"], found.rows[-1]["id"])
        after = None  # the first page is whole, and live
    found = await calls.page(database, account_id, asked.filter(), limit=PAGE_CALLS + 1, after=after)
    rows, is_cut = found.rows[:PAGE_CALLS], found.reached is not None
    newer = None if after is None else rows[0]["id"] if rows else after if is_cut else None
    older = found.reached if is_cut else rows[-1]["id"] if len(found.rows) > PAGE_CALLS else None
    return Stretch(rows, newer, older, "older" if is_cut else None)


async def _summary(database: Database, asked: Asked, older: OlderDays) -> Summary | None:
    if not asked.has_sums:
        return None
    return await usage_day.summary(database, g.session.account_id, asked.part(), older)


def _charts(asked: Asked, summary: Summary | None) -> Charts | None:
    if summary is None or not summary.by_day:
        return None
    days, today = summary.by_day, usage_day.day_of(now_ms())
    first, last = asked.first_day or min(days), min(asked.last_day or today, today)
    bars = _bars(days, first, max(last, max(days)))
    of, shown = bars_of(bars)
    return Charts(
        of=of,
        bars=shown,
        unit="Day" if len(bars[0][0]) == len(today) else "Month",
        is_unfinished=today.startswith(bars[-1][0]),
        models=summary.offers[:MODELS_MAX],
    )


def _bars(days: dict[str, Sums], first: str, last: str) -> list[tuple[str, Sums]]:
    """Return every day of a span, also those without calls; its months when it is long."""
    count = (date.fromisoformat(last) - date.fromisoformat(first)).days + 1
    if count <= BARS_MAX:
        span = [usage_day.days_before(last, back) for back in reversed(range(count))]
        return [(day, days.get(day, Sums())) for day in span]
    months: dict[str, Sums] = {}
    year, month = int(max(first, min(days))[:4]), int(max(first, min(days))[5:7])
    while f"{year}-{month:02}" <= last[:7]:
        months[f"{year}-{month:02}"] = Sums()
        year, month = (year + 1, 1) if month == 12 else (year, month + 1)
    for day, sums in days.items():
        months[day[:7]] = usage_day.together([months[day[:7]], sums])
    return list(months.items())[-BARS_MAX:]


async def _choices(database: Database, asked: Asked) -> Choices:
    account_id = g.session.account_id
    keys = [(row["id"], row["name"]) for row in await api_key.names(database, account_id, limit=CHOICES_MAX)]
    models = [(offer, offer) for offer in await _offers(database, account_id)]
    # What is asked for stands in its list, even if it is nothing.
    if asked.key and asked.key not in dict(keys):
        keys.append((asked.key, "Unknown key"))
    if asked.model and asked.model not in dict(models):
        models.append((asked.model, asked.model))
    return Choices([("", "All keys"), *keys], [("", "All models"), *models])


async def _offers(database: Database, account_id: str) -> list[str]:
    since = usage_day.days_before(usage_day.day_of(now_ms()), CHOICES_DAYS)
    return await usage_day.offers_of(database, account_id, since, limit=CHOICES_MAX)


async def _names(database: Database, account_id: str, key_ids: set[str]) -> dict[str, str]:
    return {row["id"]: row["name"] for row in await api_key.names(database, account_id, among=key_ids)}


def _line(row: Row, names: Mapping[str, str], *, is_new: bool = False) -> Line:
    running = row["state"] == "open"
    prompt = row["input_tokens"] + row["cached_input_tokens"] + row["cache_write_tokens"]
    output = row["checkpoint_output_tokens"] if running else row["output_tokens"]
    word, kind = words_of(row)
    return Line(
        id=row["id"], at_ms=row["created_at_ms"], key=names.get(row["key_id"], ""), model=row["offer"],
        input=f"{prompt:,}", cached=row["cached_input_tokens"], output=f"{output:,}",
        cost=_cost(row), latency_ms=row["latency_ms"],
        first_byte_ms=row["first_byte_ms"], word=word, kind=kind, is_new=is_new,
    )


def _cost(row: Row) -> str:
    if row["state"] == "open":
        return ""
    return "included" if row["charged_from"] == "included" else exact_usd(row["charged_microusd"])


def _tag(calls: Calls, totals: Sums | None) -> str:
    """Return what stands for all that is shown: equal for equal pages, the newest call's id in front."""
    shown = [
        (line.id, line.key, line.input, line.output, line.cost, line.latency_ms, line.first_byte_ms, line.word)
        for line in calls.lines
    ]
    digest = hashlib.sha256(repr((shown, totals)).encode(errors="replace")).hexdigest()[:16]
    return f"{calls.lines[0].id if calls.lines else ''}.{digest}"


def _cursor(name: str) -> str | None:
    text = request.args.get(name, "")
    return text if ID.fullmatch(text) else None


def _plain(text: str) -> str:
    """Return a text from the address as both databases take it; what is no plain text matches nothing."""
    text = text.strip()
    if len(text) > TEXT_LENGTH_MAX or not text.isprintable():
        return UNKNOWN
    return text.encode("utf-8", "replace").decode()


def _known(text: str) -> str | None:
    return text or None


def _file_name(asked: Asked) -> str:
    first, last = asked.first_day, asked.last_day or usage_day.day_of(now_ms())
    return f"usage-{first}-to-{last}" if first else f"usage-to-{last}"


def _example(pages: Pages) -> str:
    return min(pages.catalog().offers)

