"""The usage page: every call of the account and of nobody else, live, filtered, explained and exported."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import re
from dataclasses import replace
from decimal import Decimal
from types import SimpleNamespace

import aiohttp
import pytest
from playwright.async_api import Route

from models import api_key, call, clock, ids, usage_day
from models import export as account_file
from models.clock import now_ms
from models.database import Database
from models.money import usd
from models.rate_card import RateCard, Tier
from models.usage import Usage
from portal import export
from portal.charge import dollars, explain
from portal.export import COLUMNS, defused
from tests.api.v1.test_chat import body
from tests.cast import Actor, enter
from tests.house import House
from tests.models.test_call import admit, outcome
from tests.models.test_usage_day import made, refusal
from tests.portal.pages.chromium import at_home
from tests.portal.visitor import Visitor, visit

DAY_MS = 24 * 3600 * 1000
# A row is tinted until the next poll, which may have come by the time we look.
NOTE_TINTED = """() => {
    window.tinted = new Set()
    const note = () => document.querySelectorAll("tr.new").forEach((row) => tinted.add(row.id))
    new MutationObserver(note).observe(document.body, { subtree: true, childList: true, attributes: true })
    window.spoken = []
    const announced = document.getElementById("announce")
    new MutationObserver(() => spoken.push(announced.textContent)).observe(announced, { childList: true })
}"""
PATHS = (
    "/dashboard/usage", "/dashboard/usage/live", "/dashboard/usage/export.csv", "/dashboard/usage/export.json",
    "/dashboard/usage/req_01jd3w6k5v8zq0m2n4p6r8t0vx",
)


@pytest.fixture
async def browser(house: House, http: aiohttp.ClientSession, house_books: Database, alice: Actor) -> Visitor:
    """Be Alice's browser."""
    return await visit(house, http, house_books, alice)


async def rows_of(browser: Visitor, path: str = "/dashboard/usage") -> list[str]:
    """Return the ids of the rows a page shows."""
    status, text, _ = await browser.get(path)
    assert status == 200, text
    return re.findall(r'<tr id="(req_\w+)"', text)


async def ask(
    house: House, http: aiohttp.ClientSession, actor: Actor, text: str = "usage:10,2", **fields: object
) -> str:
    """Make a call and return its id."""
    async with http.post(
        house.base_url + "/v1/chat/completions", json=body(text, **fields), headers=actor.headers
    ) as answer:
        await answer.read()
        return answer.headers["x-request-id"]


# Rows


async def test_calls_are_rows_and_sums(house, http, house_books, alice, browser):
    served = await ask(house, http, alice, "usage:1204,318", max_tokens=1000)
    failed = await ask(house, http, alice, model="unreachable")
    status, text, headers = await browser.get("/dashboard/usage")
    assert status == 200 and headers["cache-control"] == "no-store"
    row = re.search(rf'<tr id="{served}".*?</tr>', text, re.DOTALL)[0]
    for shown in ("1,204", "318", "0.004384", "200 served", "alice", "<code>twin</code>"):
        assert shown in row
    assert "502 failed" in re.search(rf'<tr id="{failed}".*?</tr>', text, re.DOTALL)[0]
    totals = re.search(r'id="totals".*?</dl>', text, re.DOTALL)[0]
    assert "$0.004384" in totals and ">2<" in totals and ">1<" in totals
    assert len(text) < 60_000 and "style=" not in text


async def test_an_included_call_is_called_so(house, http, house_books):
    actor = await enter(house_books, plan="included")
    served = await ask(house, http, actor)
    _, text, _ = await (await visit(house, http, house_books, actor)).get("/dashboard/usage")
    row = re.search(rf'<tr id="{served}".*?</tr>', text, re.DOTALL)[0]
    assert '<td class="n">included</td>' in row and "0.000000" not in row


async def test_a_refused_call_says_why(house, http, house_books, alice, browser):
    one = refusal(alice, status=403)
    await house_books.run(lambda: call.write_refusals([(replace(one, error_code="scope_denied"), 12)]))
    assert "403 denied × 12" in (await browser.get("/dashboard/usage"))[1]
    _, text, _ = await browser.get(f"/dashboard/usage/{one.call_id}")
    assert "The key or the plan does not allow this." in text and "Refused calls cost nothing." in text


async def test_a_call_that_named_no_model_is_none_of_the_models(house, http, house_books, alice, browser):
    await ask(house, http, alice)
    refused = await ask(house, http, alice, messages="not a list")
    # Refused calls are written down together, once in a while.
    async with asyncio.timeout(20):
        while refused not in (text := (await browser.get("/dashboard/usage"))[1]):
            await asyncio.sleep(0.2)
    choices = re.search(r'<select[^>]*name="model".*?</select>', text, re.DOTALL)[0]
    assert re.findall(r'<option value="([^"]*)"[^>]*>([^<]*)', choices) == [("", "All models"), ("twin", "twin")]
    assert "none named" in re.search(r'id="by-model".*?</section>', text, re.DOTALL)[0]
    assert "<code></code>" not in text


async def test_filters(house, http, house_books, alice, browser):
    now = now_ms()
    key, _ = await api_key.create(alice.account, "second")
    second = Actor(alice.account, key.id, "")
    old = await made(house_books, alice, now - 100 * DAY_MS, offer="old/model")
    late = await made(house_books, alice, now - 3 * DAY_MS)
    bad = await made(house_books, alice, now - 2 * DAY_MS, status=502)
    other = await made(house_books, second, now - DAY_MS)
    running = await made(house_books, alice, now, ended=False)
    one = refusal(alice, at_ms=now - 1000)
    await house_books.run(lambda: call.write_refusals([(one, 1)]))
    day = clock.day(now - 3 * DAY_MS)
    for query, expected in (
        ("", {late, bad, other, running, one.call_id}),
        ("period=all", {old, late, bad, other, running, one.call_id}),
        (f"key={key.id}", {other}), ("model=old/model&period=all", {old}), ("model=old/model", set()),
        ("status=served", {late, other}), ("status=failed", {bad}), ("status=refused", {one.call_id}),
        ("status=running", {running}), (f"period=custom&from={day}&to={day}", {late}), (f"id={old}", {old}),
        (f"id=%20{late}%20&status=failed", {late}), ("id=req_nothing", set()), ("key=key_unknown", set()),
        ("model=a%00b", set()), ("model=%ff%fe", set()), ("status=nonsense&period=nonsense", {
            late, bad, other, running, one.call_id,
        }),
        ("after=nonsense&before=%00", {late, bad, other, running, one.call_id}),
    ):
        assert set(await rows_of(browser, f"/dashboard/usage?{query}")) == expected, query
        status, text, _ = await browser.get(f"/dashboard/usage/export.json?{query}")
        if "id=" not in query.replace("key_id", ""):
            assert status == 200 and {row["request_id"] for row in json.loads(text)} == expected, query
    assert "No call matches" in (await browser.get("/dashboard/usage?model=none"))[1]
    for wrong in ("from=x", "from=2026-99-01", "to=0001-01-01", "from=2026-02-02&to=2026-02-01"):
        status, text, _ = await browser.get(f"/dashboard/usage?period=custom&{wrong}")
        assert status == 200 and 'role="alert"' in text
    assert 'selected>second<' in (await browser.get(f"/dashboard/usage?key={key.id}"))[1]


async def test_pages_of_rows(house, house_books, alice, browser):
    start = now_ms() - 5000 * 1000
    refusals = [
        refusal(alice, status=400, at_ms=start + n, call_id=f"{ids.first_id_at('req', start)[:-6]}{n:06}")
        for n in range(120)
    ]
    await house_books.run(lambda: call.write_refusals([(one, 1) for one in refusals]))
    everything = [one.call_id for one in reversed(refusals)]
    for query in ("", "status=refused", f"key={alice.key_id}"):
        _, text, _ = await browser.get(f"/dashboard/usage?{query}")
        assert "data-live " in text and 'rel="prev"' not in text
        walked = []
        while True:
            walked += re.findall(r'<tr id="(req_\w+)"', text)
            older = re.search(r'rel="next" href="([^"]+)"', text)
            if older is None:
                break
            _, text, _ = await browser.get(older[1].replace("&amp;", "&"))
            assert "data-live " not in text
        assert walked == everything
        back = re.search(r'rel="prev" href="([^"]+)"', text)[1].replace("&amp;", "&")
        _, text, _ = await browser.get(back)
        assert re.findall(r'<tr id="(req_\w+)"', text) == everything[40:80]
        _, text, _ = await browser.get(re.search(r'rel="prev" href="([^"]+)"', text)[1].replace("&amp;", "&"))
        assert re.findall(r'<tr id="(req_\w+)"', text) == everything[:40] and "data-live " in text


async def test_nobody_has_called_yet(house, browser):
    _, text, _ = await browser.get("/dashboard/usage")
    assert "No calls yet" in text and f"curl {house.base_url}/v1/chat/completions" in text
    assert "$0.00" in text


async def test_strangers_are_sent_to_sign_in(house, http):
    stranger = Visitor(house, http)
    for path in PATHS:
        status, _, headers = await stranger.get(path)
        assert status == 303 and headers["location"].startswith("/login?next=/dashboard/usage")


async def test_what_is_somebody_else_s_is_not_there(house, http, house_books, alice, bob, browser):
    theirs = await made(house_books, bob, now_ms())
    mine = await made(house_books, alice, now_ms())
    unknown = "req_01jd3w6k5v8zq0m2n4p6r8t0vx"
    pages = [await browser.get(f"/dashboard/usage/{one}") for one in (theirs, unknown, "req_%00", "x" * 500)]
    assert [status for status, _, _ in pages] == [404] * 4
    plain = [re.sub(r"req_\w+", "", text) for _, text, _ in pages[:2]]
    assert plain[0] == plain[1]
    for query in ("", f"id={theirs}", f"key={bob.key_id}", f"after={theirs}", f"before={theirs}", "period=all"):
        for path in ("/dashboard/usage", "/dashboard/usage/live"):
            _, text, _ = await browser.get(f"{path}?{query}", **{"hx-request": "true"})
            assert f'id="{theirs}"' not in text and "bob" not in text
        for kind in ("csv", "json"):
            assert theirs not in (await browser.get(f"/dashboard/usage/export.{kind}?{query}"))[1]
    assert await rows_of(browser) == [mine]
    _, text, _ = await browser.get(f"/dashboard/usage?key={bob.key_id}")
    assert "$0.00" in re.search(r'id="totals".*?</dl>', text, re.DOTALL)[0]


# Live


async def test_polls_see_what_changed_and_nothing_else(house, http, house_books, alice, browser):
    live = {"hx-request": "true", "hx-request-type": "partial"}
    running = await made(house_books, alice, now_ms(), ended=False)
    _, text, _ = await browser.get("/dashboard/usage")
    tag = re.search(r'hx-ptag="([^"]+)"', text)[1]
    assert "running" in text
    status, text, headers = await browser.get("/dashboard/usage/live", **live, **{"hx-ptag": tag})
    assert (status, text, headers["hx-ptag"]) == (304, "", tag)
    await house_books.run(lambda: call.checkpoint("prc_1", [(running, 1, 77)]))
    status, text, headers = await browser.get("/dashboard/usage/live", **live, **{"hx-ptag": tag})
    assert status == 200 and headers["hx-ptag"] != tag and ">77<" in text and 'class="new"' not in text
    await house_books.run(lambda: call.settle(running, outcome(1, usage=Usage(5, 0, 0, 99))))
    newer = await made(house_books, alice, now_ms())
    status, text, headers = await browser.get("/dashboard/usage/live", **live, **{"hx-ptag": headers["hx-ptag"]})
    assert ">99<" in text and "<html" not in text and 'id="totals"' in text
    assert re.findall(r'<tr id="(\w+)" tabindex="-1" class="new"', text) == [newer]
    status, _, _ = await browser.get("/dashboard/usage/live", **live, **{"hx-ptag": headers["hx-ptag"]})
    assert status == 304
    status, _, headers = await browser.get("/dashboard/usage/live?status=served")
    assert status == 303 and headers["location"] == "/dashboard/usage?status=served"


@pytest.mark.parametrize("database_kind", ["sqlite"], indirect=True)
async def test_rows_come_by_themselves_in_a_browser(house, http, house_books, alice):
    running = await made(house_books, alice, now_ms(), ended=False)
    async with at_home(house, house_books, alice, viewport={"width": 1280, "height": 900}) as context:
        page = await context.new_page()
        complaints: list[str] = []
        page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        await page.goto(house.base_url + "/dashboard/usage")
        assert await page.locator(f"#{running} .state").inner_text() == "running"
        await page.evaluate(NOTE_TINTED)
        await house_books.run(lambda: call.settle(running, outcome(1, first_byte_ms=5)))
        fresh = await ask(house, http, alice)
        await page.locator(f"#{fresh}").wait_for(timeout=15_000)
        # The browser tells of a new row a little later than it has it.
        async with asyncio.timeout(10):
            while not (tinted := await page.evaluate("[...tinted]")):
                await asyncio.sleep(0.1)
        assert tinted == [fresh]
        assert await page.locator(f"#{running} .state").inner_text() == "200 served"
        assert "2" in await page.locator("#totals .figure:nth-child(2) dd").inner_text()
        # Nothing moves under the pointer; what came meanwhile comes once it is gone.
        await page.locator(f"#{running}").hover()
        held = await ask(house, http, alice)
        await page.wait_for_timeout(5000)
        assert await page.locator(f"#{held}").count() == 0
        assert await page.locator("[data-live-state]").inner_text() == "paused"
        assert await page.locator("[data-live-new]").inner_text() == "1 new"
        await ask(house, http, alice)
        await page.get_by_text("2 new", exact=True).wait_for(timeout=15_000)
        await page.mouse.move(5, 5)
        await page.locator(f"#{held}").wait_for(timeout=15_000)
        assert await page.locator("[data-live-state]").inner_text() == "live"
        assert not await page.locator("[data-live-new]").is_visible()
        # A sentence a minute is spoken, not one for each row: what came since waits for the next.
        assert await page.evaluate("spoken") == ["1 new call"]
        assert complaints == []


@pytest.mark.parametrize("database_kind", ["sqlite"], indirect=True)
async def test_the_first_poll_says_what_is_shown_even_if_its_script_comes_late(house, house_books, alice):
    shown = await made(house_books, alice, now_ms())
    async with at_home(house, house_books, alice) as context:
        page = await context.new_page()

        async def late(route: Route) -> None:
            await asyncio.sleep(0.5)
            await route.continue_()

        await page.route("**/hx-ptag*", late)
        async with page.expect_event("request", lambda one: "/usage/live" in one.url, timeout=20_000) as polled:
            await page.goto(house.base_url + "/dashboard/usage")
        assert (await polled.value).headers.get("hx-ptag", "").startswith(shown)


# One call


async def test_a_charge_is_explained(house, http, house_books, alice, browser):
    served = await ask(house, http, alice, "usage:1204,318", max_tokens=1000)
    _, text, headers = await browser.get(f"/dashboard/usage/{served}")
    for shown in (served, "1,204", "0.001204", "0.003180", "0.004384", "$0.004384 was taken from your credit"):
        assert shown in text, shown
    assert headers["cache-control"] == "no-store"
    failed = await ask(house, http, alice, model="unreachable")
    _, text, _ = await browser.get(f"/dashboard/usage/{failed}")
    assert "The provider failed, or could not be reached." in text and "nothing was charged" in text


def call_row(**values):
    """Return a settled call's row."""
    return {
        "state": "settled", "rates": None, "input_tokens": 0, "cached_input_tokens": 0, "cache_write_tokens": 0,
        "output_tokens": 0, "images": 0, "characters": 0, "audio_ms": 0, "included_month": None, "estimated": 0,
        "house_loss_microusd": 0, "hold_microusd": 0, "cost_microusd": 0, "charged_microusd": 0, **values,
    }


def test_the_pieces_of_a_charge_add_up():
    tier = Tier(1000, 4, 2, 5, 20)
    card = RateCard(
        input=18_750, cached_input=1, cache_write=3, output=10, per_image=7_000_000, per_minute=60, per_character=9,
        per_call=11, tiers=(tier,),
    )
    for used in (
        Usage(7, 5, 3, 2), Usage(999, 1, 1, 8, images=2, audio_ms=61_001, characters=5), Usage(0, 0, 0, 1),
    ):
        cost = card.cost_microusd(used)
        fields = ("cached_input_tokens", "cache_write_tokens", "output_tokens", "images", "audio_ms")
        row = call_row(
            rates=card.to_json(), cost_microusd=cost, charged_microusd=cost, characters=used.characters,
            input_tokens=used.input_tokens,
            **{name: getattr(used, name) for name in fields},
        )
        explained = explain(row)
        assert explained.pieces and explained.cost == cost
        total = int(sum(Decimal(piece.amount) for piece in explained.pieces).scaleb(12))
        assert -(-total // 1_000_000) == cost
        assert explained.sum is None or explained.sum == dollars(total)
    # A price of before the call broke off is not made up from its pieces.
    assert explain(call_row(rates=card.to_json(), cost_microusd=5, output_tokens=9**9)).pieces == ()
    assert explain(call_row(rates='{"unknown": 1}', cost_microusd=5, output_tokens=1)).pieces == ()


def test_every_end_has_its_sentence():
    def said(**values):
        return " ".join(explain(call_row(**values)).sentences)

    assert "nothing was charged. What was held" in said(state="released")
    assert "went back to 2026-11" in said(state="released", included_month="2026-11")
    assert "$0.000042 was not charged" in said(included_month="2026-11", cost_microusd=42)
    assert "other $0.000010 are our loss" in said(house_loss_microusd=10, hold_microusd=5)
    assert "died" in said(state="expired", estimated=1, charged_microusd=3)
    assert "$0.000007 is held" in said(state="open", hold_microusd=7)
    assert "nothing is held" in said(state="open", included_month="2026-11")
    assert "It cost nothing." in said()


# Exports


async def test_exports_of_many_calls(house, house_books, alice, bob, browser):
    start = now_ms() - 3 * 3600 * 1000
    refusals = [
        refusal(alice, status=400, at_ms=start + n, call_id=f"{ids.first_id_at('req', start)[:-6]}{n:06}")
        for n in range(2300)
    ]
    await house_books.run(lambda: call.write_refusals([(one, 1) for one in refusals]), deadline_s=60)
    admitted = await admit(house_books, alice, hold=5000)
    await house_books.run(lambda: call.settle(admitted.call_id, outcome(1234, usage=Usage(70, 20, 5, 9))))
    await made(house_books, bob, now_ms())
    expected = [admitted.call_id, *(one.call_id for one in reversed(refusals))]
    status, text, headers = await browser.get("/dashboard/usage/export.csv")
    assert status == 200 and headers["content-type"] == "text/csv; charset=utf-8"
    assert headers["cache-control"] == "no-store"
    today = clock.day(now_ms())
    name = rf'attachment; filename="usage-\d{{4}}-\d\d-\d\d-to-{today}\.csv"'
    assert re.fullmatch(name, headers["content-disposition"])
    rows = list(csv.DictReader(io.StringIO(text, newline="")))
    assert [row["request_id"] for row in rows] == expected and tuple(rows[0]) == COLUMNS
    assert (rows[0]["input_tokens"], rows[0]["cached_input_tokens"]) == ("70", "20")
    assert rows[0]["charged_usd"] == "0.001234"
    status, text, headers = await browser.get("/dashboard/usage/export.json")
    records = json.loads(text)
    assert headers["content-type"] == "application/json" and [one["request_id"] for one in records] == expected
    assert set(records[0]) == set(COLUMNS)
    # To the micro-dollar the same as the sums and the ledger.
    sums = (await usage_day.summary(house_books, alice.account.id, usage_day.Part())).all
    assert sums.calls == len(rows) == len(records)
    assert usd(sums.charged) == rows[0]["charged_usd"] == records[0]["charged_usd"]
    assert (await browser.get("/dashboard/usage/export.xml"))[0] == 404


async def test_an_export_rests_for_longer_than_it_works(house_books, alice, monkeypatch):
    for n in range(250):
        await made(house_books, alice, now_ms() - n)
    ticks, rests = iter(n / 100 for n in range(10**6)), []

    async def rest(seconds: float) -> None:
        rests.append(round(seconds, 6))

    monkeypatch.setattr(export, "time", SimpleNamespace(monotonic=lambda: next(ticks)))
    monkeypatch.setattr(export, "asyncio", SimpleNamespace(sleep=rest))

    async def names(_: set[str]) -> dict[str, str]:
        return {}

    pieces = [one async for one in export.pieces(house_books, alice.account.id, call.Filter(), "csv", names)]
    assert len(b"".join(pieces).splitlines()) == 251
    # One page was read and three pieces were written; each took a tick of the clock.
    assert rests == [0.02] * 4


async def test_the_file_of_an_account_rests_as_well(house, http, house_books, alice, browser, monkeypatch):
    for n in range(250):
        await made(house_books, alice, now_ms() - n)
    ticks, rests = iter(n / 100 for n in range(10**6)), []

    async def rest(seconds: float) -> None:
        rests.append(round(seconds, 6))

    whole = b"".join([one async for one in account_file.of_account(house_books, alice.account.id)])
    with monkeypatch.context() as patched:
        patched.setattr(export, "time", SimpleNamespace(monotonic=lambda: next(ticks)))
        patched.setattr(export, "asyncio", SimpleNamespace(sleep=rest))
        written = account_file.of_account(house_books, alice.account.id)
        pieces = [one async for one in export.gently(written)]
    assert b"".join(pieces) == whole and len(json.loads(whole)["calls"]) == 250
    assert len(pieces) > 2 and rests == [0.02] * (len(pieces) - 1)
    # This is how a browser gets it: hundreds of rows in a few chunks.
    async with http.get(house.base_url + "/dashboard/settings/export", cookies=browser.cookies) as answer:
        ends = [is_end async for _, is_end in answer.content.iter_chunks()]
        assert answer.status == 200 and 0 < sum(ends) <= len(pieces) + 1


async def test_exports_of_nothing(house, browser):
    assert (await browser.get("/dashboard/usage/export.csv"))[1] == ",".join(COLUMNS) + "\r\n"
    assert json.loads((await browser.get("/dashboard/usage/export.json"))[1]) == []


async def test_no_cell_is_a_formula(house, house_books, alice, browser):
    names = (
        '=HYPERLINK("http://evil.example")', "+1", "-1", "@SUM(A1)", "\t=1", " =1", "＝1", 'plain "quoted", name',
    )
    actors = [Actor(alice.account, (await api_key.create(alice.account, "x"))[0].id, "") for _ in names]

    def rename(key_id, name):
        yield "UPDATE api_keys SET name = ? WHERE id = ?", (name, key_id)

    for actor, name in zip(actors, names, strict=True):
        await house_books.run(lambda actor=actor, name=name: rename(actor.key_id, name))
        one = refusal(actor, status=404, offer=name)
        await house_books.run(lambda one=one: call.write_refusals([(one, 1)]))
    rows = list(csv.DictReader(io.StringIO((await browser.get("/dashboard/usage/export.csv"))[1], newline="")))
    for column in ("key", "model"):
        assert {row[column] for row in rows} == {defused(name) for name in names}
        assert all(row[column].startswith("'") or row[column].startswith("plain") for row in rows)
    _, text, _ = await browser.get("/dashboard/usage")
    assert '=HYPERLINK("http' not in text and "=HYPERLINK(&#34;http" in text


async def test_an_export_does_not_fail_because_others_wait(house, house_books, alice, browser):
    await made(house_books, alice, now_ms())
    answers = await asyncio.gather(*(browser.get("/dashboard/usage/export.csv") for _ in range(12)))
    assert {len(text.splitlines()) for _, text, _ in answers} == {2}


async def test_times_are_the_reader_s(house, house_books, alice, browser):
    def move():
        yield "UPDATE accounts SET time_zone = 'Asia/Kathmandu' WHERE id = ?", (alice.account.id,)

    await house_books.run(move)
    at_ms = usage_day.start_of("2026-01-02")
    one = await made(house_books, alice, at_ms)
    status, text, _ = await browser.get(f"/dashboard/usage/{one}")
    assert status == 200 and "2026-01-02 05:45:00 +0545" in text, text[2000:]
    assert "UTC days" in (await browser.get("/dashboard/usage?period=all"))[1]


async def test_charts_are_of_calls_where_nothing_is_spent(house_books, house, http, alice, browser):
    now = now_ms()
    for n in range(3):
        await house_books.run(lambda n=n: call.write_refusals([(refusal(alice, at_ms=now - n), 2)]))
    _, text, _ = await browser.get("/dashboard/usage")
    assert "Calls by day" in text and "Calls by model" in text and "Spend by" not in text
    bars = re.findall(r'<rect x="\d+" y="(\d+)" width="20" height="(\d+)"', text)
    assert bars[-1] == ("4", "96") and set(bars[:-1]) == {("100", "0")}
    assert re.search(r'class="share".*?width="100"', text)
    await made(house_books, alice, now)
    _, text, _ = await browser.get("/dashboard/usage")
    assert "Spend by day" in text and "Spend by model" in text


async def test_a_call_s_result_has_the_same_words_everywhere(house_books, house, alice, browser):
    now = now_ms()
    for n, status in enumerate((404, 401, 413)):
        one = refusal(alice, status=status, at_ms=now - n)
        await house_books.run(lambda one=one, times=1000 + status: call.write_refusals([(one, times)]))
    await made(house_books, alice, now, status=499)
    lost = await made(house_books, alice, now, ended=False)
    await house_books.run(lambda: call.checkpoint("prc_1", [(lost, 1, 1)]))
    await house_books.run(lambda: call.expire(house_books, lost, dead_owner="prc_1"))
    for path in ("/dashboard", "/dashboard/usage"):
        _, text, _ = await browser.get(path)
        for words in ("404 unknown × 1,404", "401 bad key × 1,401", "413 too large", "499 left", "502 cut off"):
            assert words in text, (path, words)


async def test_a_page_that_looked_through_many_calls_says_so(house_books, house, alice, browser):
    """More calls than a page looks through: it says so, and its link goes on until what is rare is found."""
    start = now_ms() - 20 * 3600 * 1000
    rare, key = await made(house_books, alice, start - 1000), alice.key_id
    columns = "id, account_id, key_id, surface, path, offer, state, status, created_at_ms, finished_at_ms"

    def many():
        for first in range(0, 24_000, 1000):
            rows = [
                (f"{ids.first_id_at('req', start + n)[:-6]}{n:06}", alice.account.id, key, start + n, start + n)
                for n in range(first, first + 1000)
            ]
            yield (
                f"INSERT INTO calls ({columns}) VALUES "
                + ", ".join(["(?, ?, ?, 'chat', '/v1/x', 'm', 'refused', 429, ?, ?)"] * len(rows)),
                tuple(value for row in rows for value in row),
            )
        yield from usage_day.add(
            alice.account.id, None, start, "m", key, usage_day.REFUSED, usage_day.Sums(calls=24_000)
        )
        # It is not known either where the day's served call lies, else it would be read at once.
        yield "UPDATE usage_days SET last_id = '~' WHERE account_id = ?", (alice.account.id,)

    await house_books.run(many, deadline_s=120)
    path, goes = "/dashboard/usage?status=served", 0
    while True:
        _, text, _ = await browser.get(path)
        goes += 1
        found = re.findall(r'<tr id="(req_\w+)"', text)
        older = re.search(r'rel="next" href="([^"]+)"', text)
        if found or older is None:
            break
        assert "No call matches so far" in text and "Go on with the older ones" in text
        path = older[1].replace("&amp;", "&")
    assert found == [rare] and goes == 3
    _, text, _ = await browser.get(re.search(r'rel="prev" href="([^"]+)"', text)[1].replace("&amp;", "&"))
    assert "No call matches so far" in text and "Go on with the newer ones" in text
    assert [row["request_id"] for row in json.loads(
        (await browser.get("/dashboard/usage/export.json?status=served"))[1]
    )] == [rare]


async def test_an_account_may_hold_history_of_years(house_books, house, http):
    actor = await enter(house_books, "old", plan="wallet", credit_microusd=1_000_000)
    browser = await visit(house, http, house_books, actor)
    for back in (1500, 800, 3):
        await made(house_books, actor, now_ms() - back * DAY_MS)
    _, text, _ = await browser.get("/dashboard/usage?period=all")
    assert "Spend by month" in text and text.count("<rect x=") >= 49
    assert len(re.findall(r'<tr id="(req_\w+)"', text)) == 3


async def test_a_full_page_is_small_on_the_wire(house_books, house, http, alice, browser):
    """With every sheet and script of a first visit, as they are sent; fonts come later and are kept."""
    now = now_ms()
    for n in range(62):
        at_ms = now - n % 30 * DAY_MS
        one = refusal(alice, at_ms=at_ms, offer=f"vendor/a-rather-long-name-of-a-model-{n % 14}")
        await house_books.run(lambda one=one: call.write_refusals([(one, 1)]))
    _, text, _ = await browser.get("/dashboard/usage")
    assert text.count('<tr id="req_') == 40 and 'rel="next"' in text
    sent, parts = len(text.encode()), re.findall(r'(?:href|src)="(/static/[^"]+\.(?:css|js|svg))"', text)
    assert len(parts) > 8
    async with aiohttp.ClientSession(auto_decompress=False) as raw:
        for part in parts:
            async with raw.get(house.base_url + part, headers={"Accept-Encoding": "gzip"}) as answer:
                sent += len(await answer.read())
    assert sent < 60_000, sent
