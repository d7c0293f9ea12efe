"""The page of models: found by words and filters, each with price, abilities and terms."""

from __future__ import annotations

import re

import aiohttp
import pytest

from models.database import Database
from models.plan import Plan
from portal.pages import models as page_of_models
from tests.cast import Actor, enter
from tests.house import House
from tests.portal.visitor import Visitor, visit

PATH = "/dashboard/models"


@pytest.fixture
async def visitor(house: House, http: aiohttp.ClientSession, house_books: Database, alice: Actor) -> Visitor:
    """Be Alice's browser."""
    return await visit(house, http, house_books, alice)


async def shown(visitor: Visitor, query: str = "", *, fragment: bool = False) -> list[str]:
    """Return the models that a search shows, in order."""
    answer = await visitor.get(f"{PATH}{query}", fragment=fragment)
    assert answer.status == 200 and ("<html" in answer.text) != fragment
    return re.findall(r'id="offer-id-\d+">([^<]+)<', answer.text)


async def test_every_offer_is_there_with_its_price(visitor: Visitor) -> None:
    page = await visitor.get(PATH)
    assert await shown(visitor) == ["tollgate-demo", "twin", "unreachable", "vendor/twin by call"]
    row = page.text.partition(">twin</code>")[2].partition("</tr>")[0]
    words = " ".join(re.sub(r"<[^>]+>", " ", row).split())
    assert words == "Copy 128,000 16,000 1 1 1 10 – paid streaming, tools, json"
    assert 'data-copy="offer-id-2"' in page.text and "included" not in page.words.partition("Abilities")[2]


@pytest.mark.parametrize("query, found", [
    ("?q=TWIN", ["twin", "vendor/twin by call"]),
    ("?q=twin+call", ["vendor/twin by call"]),
    ("?q=demonstration", ["tollgate-demo"]),
    ("?q=nobody", ["unreachable"]),
    ("?can=json&q=unr", ["unreachable"]),
    ("?can=vision", []),
    ("?plan=paid&q=unr", ["unreachable"]),
    ("?plan=included", []),
    ("?q=%3Ci+id%3Dx%3E", []),
    ("?from=999999999999", ["tollgate-demo", "twin", "unreachable", "vendor/twin by call"]),
    ("?from=-1&q=unr", ["unreachable"]),
    ("?from=%D9%A3&q=unr", ["unreachable"]),
])
async def test_searching(visitor: Visitor, query: str, found: list[str]) -> None:
    assert await shown(visitor, query) == await shown(visitor, query, fragment=True) == found
    answer = await visitor.get(PATH + query)
    assert "<i id=x>" not in answer.text
    assert ("No model matches" in answer.words) == (not found)


async def test_the_terms_are_those_of_the_readers_plan(
    house: House, http: aiohttp.ClientSession, house_books: Database
) -> None:
    said = {"included": "included", "wallet": "paid", "mute": "not in plan", "gone": "not in plan"}
    for plan, word in said.items():
        reader = await visit(house, http, house_books, await enter(house_books, plan=plan))
        table = (await reader.get(PATH)).words.partition("Abilities")[2]
        counts = {name: table.count(f" {name} streaming") for name in page_of_models.KINDS}
        assert counts == {**dict.fromkeys(page_of_models.KINDS, 0), word: 4}, plan


async def test_strangers_are_sent_to_sign_in(house: House, http: aiohttp.ClientSession) -> None:
    answer = await Visitor(house, http).get(f"{PATH}?q=twin")
    assert answer.status == 303 and answer.headers["location"] == "/login?next=/dashboard/models%3Fq%3Dtwin"


def test_pages_of_a_long_list_meet() -> None:
    starts = [page_of_models._start(text, 120) for text in ("", "50", "77", "119", "120", "x")]
    assert starts == [0, 50, 50, 100, 0, 0]
    assert page_of_models._link({"q": "a b", "can": "", "plan": "paid"}, 50) == f"{PATH}?q=a+b&plan=paid&from=50"


def test_an_offer_outside_the_plan_is_said_to_be() -> None:
    class Offer:
        scope = "images"

    def plan(calls: int, *surfaces: str) -> Plan:
        return Plan("p", calls, 0, 1, frozenset(surfaces))

    terms = page_of_models._terms
    assert terms(Offer, plan(5, "chat")) == terms(Offer, None) == page_of_models.NOT_IN_PLAN
    assert terms(Offer, plan(5, "images")) == page_of_models.INCLUDED
    assert terms(Offer, plan(0, "*")) == page_of_models.PAID
