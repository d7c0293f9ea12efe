"""The overview: what is left and was used, the latest calls as they come, the first steps."""

from __future__ import annotations

import re

import aiohttp

from models import api_key, call, included_calls, wallet
from models.api_key import ApiKey
from models.clock import day, month, now_ms
from models.database import Database
from tests.api.v1.test_chat import body
from tests.cast import Actor, enter
from tests.house import House
from tests.portal.visitor import Visitor, visit

PATH, LATEST = "/dashboard", "/dashboard/latest"
CURL = "/v1/chat/completions"


async def chat(house: House, http: aiohttp.ClientSession, actor: Actor, said: str = "say:hi") -> str:
    """Make a call and return its id."""
    async with http.post(house.base_url + CURL, json=body(said), headers=actor.headers) as answer:
        await answer.read()
        return answer.headers["x-request-id"]


async def sums(books: Database, actor: Actor, *rows: tuple[int, str, int, int]) -> None:
    """Write daily sums as the books would: (days ago, outcome, calls, charged)."""

    def script():
        for ago, outcome, calls, charged in rows:
            yield (
                "INSERT INTO usage_days (account_id, day, offer, key_id, outcome, calls, charged_microusd)"
                " VALUES (?, ?, 'twin-sum', ?, ?, ?, ?)",
                (actor.account.id, day(now_ms() - ago * api_key.DAY_MS), actor.key_id, outcome, calls, charged),
            )

    await books.run(script)


async def test_figures(
    house: House, http: aiohttp.ClientSession, house_books: Database
) -> None:
    actor = await enter(house_books, plan="included", credit_microusd=41_270_000)
    now = now_ms()
    await house_books.run(lambda: wallet.reserve(actor.account.id, 90_000))
    for _ in range(3):
        await house_books.run(lambda: included_calls.take(actor.account.id, month(now), 500))
    await sums(
        house_books, actor, (0, "served", 1_900, 2_810_000), (0, "failed", 4, 0), (29, "refused", 4, 0),
        (29, "served", 92, 5_000_000), (30, "served", 1_000_000, 999_000_000),
    )
    page = await (await visit(house, http, house_books, actor)).get(PATH)
    assert page.status == 200 and page.headers["cache-control"] == "no-store"
    for shown in (
        "Credit left $41.18 $0.09 held", "Included calls left 497 of 500", "Spent today $2.81 $7.81 in 30 days",
        "Calls today 1,904 2,000 in 30 days", "Failed, 30 days 0.4 % 4 failed, 4 refused", "$7.81 total",
    ):
        assert shown in page.words, shown
    assert page.text.count("<rect") == 30 and "$999" not in page.words


async def test_who_spends_nothing_sees_a_chart_of_calls(
    house: House, http: aiohttp.ClientSession, house_books: Database
) -> None:
    actor = await enter(house_books, plan="included")
    await sums(house_books, actor, (0, "served", 6, 0), (3, "served", 3, 0))
    page = await (await visit(house, http, house_books, actor)).get(PATH)
    assert "Calls, last 30 days 9 total" in page.words and "Spend, last" not in page.words
    heights = re.findall(r'<rect x="\d+" y="\d+" width="20" height="(\d+)"', page.text)
    assert heights[-1] == "96" and heights[-4] == "48" and heights.count("0") == 28


async def test_the_latest_calls_come_by_themselves(
    house: House, http: aiohttp.ClientSession, house_books: Database, alice: Actor
) -> None:
    visitor = await visit(house, http, house_books, alice)
    shown = re.search(r'hx-ptag="([^"]+)"', (await visitor.get(PATH)).text)
    assert shown is not None
    same = await visitor.get(LATEST, fragment=True, **{"HX-PTag": shown[1]})
    assert same.status == 304 and not same.text
    served = await chat(house, http, alice)
    fresh = await visitor.get(LATEST, fragment=True, **{"HX-PTag": shown[1]})
    assert fresh.status == 200 and fresh.headers["hx-ptag"] != shown[1] and "<html" not in fresh.text
    assert f'<tr id="{served}"' in fresh.text and "200 served" in fresh.words
    row = await call.find(house_books, alice.account.id, served)
    assert f"0.{row['charged_microusd']:06}" in fresh.words and row["charged_microusd"] > 0
    # The figures come along, to their own place.
    assert '<hx-partial hx-target="#standing"' in fresh.text and "Credit left" in fresh.words
    failed = await chat(house, http, alice, "status:500")
    again = await visitor.get(LATEST, fragment=True, **{"HX-PTag": fresh.headers["hx-ptag"]})
    assert again.status == 200 and "502 failed" in again.words
    assert again.text.index(failed) < again.text.index(served)
    assert (await visitor.get(LATEST, **{"HX-PTag": again.headers["hx-ptag"]})).status == 304


async def test_only_the_last_ten_are_shown(
    house: House, http: aiohttp.ClientSession, house_books: Database, alice: Actor
) -> None:
    made = [await chat(house, http, alice) for _ in range(11)]
    page = await (await visit(house, http, house_books, alice)).get(PATH)
    assert re.findall(r'<tr id="(req_\w+)"', page.text) == made[:0:-1]


async def test_first_steps_tick_and_go(house: House, http: aiohttp.ClientSession, house_books: Database) -> None:
    actor = await enter(house_books, plan="included")
    await ApiKey.filter(id=actor.key_id).update(hidden=1)
    visitor = await visit(house, http, house_books, actor)

    async def ticked() -> list[bool] | None:
        page = await visitor.get(PATH)
        steps = page.text.partition('<ol class="steps">')[2].partition("</ol>")[0]
        return ["done" in mark for mark in re.findall(r"<li([^>]*)>", steps)] or None

    def unverify(at_ms: int | None):
        yield "UPDATE accounts SET email_verified_at_ms = ? WHERE id = ?", (at_ms, actor.account.id)

    await house_books.run(lambda: unverify(None))
    assert await ticked() == [False, False, False, False]
    await house_books.run(lambda: unverify(1))
    assert await ticked() == [True, False, False, False]
    await ApiKey.filter(id=actor.key_id).update(hidden=0)
    assert await ticked() == [True, True, False, False]
    await chat(house, http, actor)
    assert await ticked() is None
    fragment = await visitor.get(LATEST, fragment=True)
    assert "First steps" not in fragment.words


async def test_without_calls_the_page_teaches(
    house: House, http: aiohttp.ClientSession, house_books: Database
) -> None:
    actor = await enter(house_books, plan="wallet")
    page = await (await visit(house, http, house_books, actor)).get(PATH)
    assert "No calls yet" in page.words and f"curl {house.base_url}{CURL}" in page.words
    assert "none in your plan" in page.words and "Credit left $0.00" in page.words and "<svg" not in page.text


async def test_somebody_elses_calls_are_not_there(
    house: House, http: aiohttp.ClientSession, house_books: Database, alice: Actor, bob: Actor
) -> None:
    theirs = await chat(house, http, bob)
    await sums(house_books, bob, (0, "served", 77_777, 77_000_000))
    visitor = await visit(house, http, house_books, alice)
    for path in (PATH, LATEST):
        page = await visitor.get(path)
        assert theirs not in page.text and "No calls yet" in page.words
        assert not {"77,777", "$77.00"} & set(page.words.split())
        assert (await Visitor(house, http).get(path)).headers["location"].startswith("/login")
    lost = await Visitor(house, http).get(LATEST, fragment=True)
    assert lost.status == 204 and lost.headers["hx-redirect"].startswith("/login")
