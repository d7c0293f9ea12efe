"""Chat completions over a real socket, before a scripted upstream, on both databases."""

from __future__ import annotations

import json

import aiohttp

from models import wallet
from models.database import Database
from tests.cast import Actor
from tests.house import House


def body(text: str = "say:hello", **fields: object) -> dict[str, object]:
    """Return a chat request whose last line steers the twin."""
    return {"model": "twin", "max_tokens": 50, "messages": [{"role": "user", "content": text}], **fields}


async def events_of(answer: aiohttp.ClientResponse) -> list[str]:
    """Return the data of every event of a stream."""
    text = (await answer.read()).decode()
    return [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")]


async def test_answers_whole_and_charges_what_it_says(
    house: House, house_books: Database, alice: Actor, http: aiohttp.ClientSession
) -> None:
    async with http.post(
        f"{house.base_url}/v1/chat/completions", json=body("usage:100,20"), headers=alice.headers
    ) as answer:
        assert answer.status == 200
        reply = await answer.json()
        request_id = answer.headers["x-request-id"]
        assert answer.headers["x-tollgate-cost"] == "0.000300"
    assert reply["id"] == "chatcmpl-" + request_id.removeprefix("req_")
    assert reply["model"] == "twin"
    assert reply["usage"]["cost_usd"] == "0.000300"
    balance = await wallet.balance(house_books, alice.account.id)
    assert (balance.posted, balance.held) == (10_000_000 - 300, 0)
    async with http.get(f"{house.base_url}/v1/usage/{request_id}", headers=alice.headers) as answer:
        row = await answer.json()
    assert (row["state"], row["cost_microusd"], row["prompt_tokens"], row["completion_tokens"]) == (
        "settled", 300, 100, 20
    )
    assert row["latency_ms"] >= 0 and row["charged_from"] == "wallet"


async def test_streams_with_one_id_and_charges_before_done(
    house: House, house_books: Database, alice: Actor, http: aiohttp.ClientSession
) -> None:
    asked = body("tokens:30", stream=True, stream_options={"include_usage": True})
    async with http.post(f"{house.base_url}/v1/chat/completions", json=asked, headers=alice.headers) as answer:
        assert answer.status == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = await events_of(answer)
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert {chunk["model"] for chunk in chunks} == {"twin"}
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 30
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    cost = int(float(chunks[-1]["usage"]["cost_usd"]) * 1e6 + 0.5)
    balance = await wallet.balance(house_books, alice.account.id)
    assert (balance.posted, balance.held) == (10_000_000 - cost, 0)
