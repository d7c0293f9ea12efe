"""The life of a call when it does not go as planned: clients that leave, upstreams that break, short credit."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import pytest

from models import api_key, wallet
from models.database import Database
from tests.cast import Actor, enter
from tests.house import House, until

CREDIT = 10_000_000


def asked(text: str, **fields: object) -> dict[str, object]:
    """Return a request that steers the twin; two characters of prompt are no matter here."""
    return {"model": "twin", "max_tokens": 100, "messages": [{"role": "user", "content": text}], **fields}


async def post(http: aiohttp.ClientSession, house: House, actor: Actor, body: object, **headers: str):
    """Send a chat request and return (status, headers, body)."""
    async with http.post(
        f"{house.base_url}/v1/chat/completions", json=body, headers=actor.headers | headers
    ) as answer:
        return answer.status, answer.headers, await answer.read()


def events(body: bytes) -> list[str]:
    """Return the data of every event."""
    return [part.removeprefix("data: ") for part in body.decode().split("\n\n") if part.startswith("data: ")]


def text_of(body: bytes) -> str:
    """Return the text a stream delivered."""
    chunks = [json.loads(event) for event in events(body) if event != "[DONE]"]
    return "".join(
        choice["delta"].get("content") or "" for chunk in chunks for choice in chunk.get("choices", [])
    )


async def row_of(house: House, http: aiohttp.ClientSession, actor: Actor, request_id: str) -> dict[str, object]:
    """Return a call's row once it has ended."""
    row: dict[str, object] = {}

    async def ended() -> bool:
        async with http.get(f"{house.base_url}/v1/usage/{request_id}", headers=actor.headers) as answer:
            row.update(await answer.json())
        return row.get("state") not in ("open", None)

    await until(ended)
    return row


async def assert_nothing_happened(books: Database, actor: Actor) -> None:
    """Neither credit nor hold nor included calls have changed."""
    balance = await wallet.balance(books, actor.account.id)
    assert (balance.posted, balance.held) == (CREDIT, 0)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fault", ["status:500", "status:401", "close", "badline", "html", "error:0"])
async def test_a_failed_upstream_is_a_502_and_costs_nothing(
    house: House, house_books: Database, alice: Actor, http: aiohttp.ClientSession, fault: str, stream: bool
) -> None:
    status, headers, body = await post(http, house, alice, asked(fault, stream=stream))
    assert status == 502, body
    error = json.loads(body)
    assert error["error"]["code"] == "upstream_error"
    assert error["request_id"] == error["error"]["request_id"] == headers["x-request-id"]
    assert b"sk-provider" not in body and b"127.0.0.1" not in body
    row = await row_of(house, http, alice, headers["x-request-id"])
    assert (row["state"], row["status"], row["cost_microusd"]) == ("released", 502, 0)
    await assert_nothing_happened(house_books, alice)


async def test_an_unreachable_upstream_is_a_502(
    house: House, house_books: Database, alice: Actor, http: aiohttp.ClientSession
) -> None:
    status, _, _ = await post(http, house, alice, asked("hello", model="unreachable"))
    assert status == 502
    await assert_nothing_happened(house_books, alice)


@pytest.mark.parametrize("fault", ["cut:3", "rst:3", "error:3", "cleancut:3", "garbage"])
async def test_a_stream_that_breaks_ends_with_an_error_frame_and_a_bill_for_what_came(
    house: House, house_books: Database, alice: Actor, http: aiohttp.ClientSession, fault: str
) -> None:
    status, headers, body = await post(http, house, alice, asked(f"tokens:10 pace:0.02 {fault}", stream=True))
    assert status == 200
    *chunks, last = events(body)
    error = json.loads(last)
    assert error["error"]["code"] == "upstream_error"
    assert error["error"]["request_id"] == headers["x-request-id"]
    assert "[DONE]" not in body.decode()
    row = await row_of(house, http, alice, headers["x-request-id"])
    delivered = text_of("\n\n".join(f"data: {chunk}" for chunk in chunks).encode()).split()
    assert (row["state"], row["completion_tokens"]) == ("settled", len(delivered))
    assert (row["estimated"], row["status"], row["error_code"]) == (True, 502, "upstream_error")
    balance = await wallet.balance(house_books, alice.account.id)
    assert (balance.posted, balance.held) == (CREDIT - row["cost_microusd"], 0)
    assert row["cost_microusd"] == row["prompt_tokens"] + 10 * len(delivered)


async def test_a_client_that_leaves_mid_stream_pays_for_what_came(
    house: House, house_books: Database, alice: Actor, http: aiohttp.ClientSession, twin: str
) -> None:
    async with http.post(
        f"{house.base_url}/v1/chat/completions", headers=alice.headers,
        json=asked("tokens:90 pace:0.1", stream=True),
    ) as answer:
        request_id = answer.headers["x-request-id"]
        for _ in range(5):
            await answer.content.readuntil(b"\n\n")
        answer.close()
    row = await row_of(house, http, alice, request_id)
    assert (row["state"], row["status"], row["error_code"]) == ("settled", 499, "client_closed")
    assert 2 <= row["completion_tokens"] <= 10
    balance = await wallet.balance(house_books, alice.account.id)
    assert (balance.posted, balance.held) == (CREDIT - row["cost_microusd"], 0)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_before_the_first_token_pays_nothing_and_the_upstream_is_cut(
    house: House, house_books: Database, alice: Actor, http: aiohttp.ClientSession, twin: str, stream: bool
) -> None:
    control = twin.removesuffix("/v1")
    async with http.get(f"{control}/requests") as answer:
        aborted = (await answer.json())["aborted"]
    with pytest.raises(asyncio.TimeoutError):
        await http.post(
            f"{house.base_url}/v1/chat/completions", json=asked("delay:20", stream=stream), headers=alice.headers,
            timeout=aiohttp.ClientTimeout(total=0.5),
        )

    async def cut() -> bool:
        async with http.get(f"{control}/requests") as answer:
            return (await answer.json())["aborted"] > aborted

    async def given_back() -> bool:
        return (await wallet.balance(house_books, alice.account.id)).held == 0

    await until(cut)
    await until(given_back)
    await assert_nothing_happened(house_books, alice)


async def test_who_hangs_up_all_the_time_pays_the_input_from_then_on(
    house: House, house_books: Database, alice: Actor, http: aiohttp.ClientSession
) -> None:
    async def open_calls() -> int:
        rows = await house_books.fetch(
            "SELECT COUNT(*) FROM calls WHERE account_id = ? AND state = 'open'", (alice.account.id,)
        )
        return rows[0][0]

    async def all_open() -> bool:
        return await open_calls() == len(running)

    async def none_open() -> bool:
        return await open_calls() == 0

    for times in (20, 1):
        running = [
            asyncio.create_task(http.post(
                f"{house.base_url}/v1/chat/completions", json=asked("delay:20"), headers=alice.headers
            ))
            for _ in range(times)
        ]
        await until(all_open)
        await asyncio.sleep(0.3)
        for one in running:
            one.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await until(none_open)
        if times == 20:
            await assert_nothing_happened(house_books, alice)
    assert (await wallet.balance(house_books, alice.account.id)).posted < CREDIT


async def test_a_keyed_call_runs_to_its_end_when_its_client_leaves(
    house: House, house_books: Database, alice: Actor, http: aiohttp.ClientSession
) -> None:
    body = asked("tokens:10 pace:0.1", stream=True)
    headers = {"Idempotency-Key": "left"}
    async with http.post(
        f"{house.base_url}/v1/chat/completions", json=body, headers=alice.headers | headers
    ) as answer:
        request_id = answer.headers["x-request-id"]
        await answer.content.readuntil(b"\n\n")
        answer.close()
    row = await row_of(house, http, alice, request_id)
    assert (row["state"], row["status"], row["completion_tokens"]) == ("settled", 200, 10)
    status, replayed, text = await post(http, house, alice, body, **headers)
    assert (status, replayed["idempotent-replayed"]) == (200, "true")
    assert events(text)[-1] == "[DONE]" and len(text_of(text).split()) == 10
    balance = await wallet.balance(house_books, alice.account.id)
    assert balance.posted == CREDIT - row["cost_microusd"]


async def test_an_idempotency_key_is_bound_to_its_request_and_its_account(
    house: House, alice: Actor, bob: Actor, http: aiohttp.ClientSession
) -> None:
    key = {"Idempotency-Key": "shared"}
    status, _, first = await post(http, house, alice, asked("say:hello"), **key)
    assert status == 200
    status, _, other = await post(http, house, alice, asked("say:other"), **key)
    assert (status, json.loads(other)["error"]["code"]) == (400, "idempotency_key_reused")
    status, headers, bobs = await post(http, house, bob, asked("say:hello"), **key)
    assert status == 200 and "idempotent-replayed" not in headers
    assert json.loads(bobs)["id"] != json.loads(first)["id"]
    reordered = dict(reversed(list(asked("say:hello").items())))
    status, headers, again = await post(http, house, alice, reordered, **key)
    assert (status, headers["idempotent-replayed"], again) == (200, "true", first)


async def test_a_failure_frees_its_idempotency_key(
    house: House, alice: Actor, http: aiohttp.ClientSession
) -> None:
    key = {"Idempotency-Key": "retry"}
    for _ in range(2):
        status, headers, _ = await post(http, house, alice, asked("status:500"), **key)
        assert status == 502 and "idempotent-replayed" not in headers


async def test_the_output_limit_is_lowered_to_what_the_credit_covers(
    house: House, house_books: Database, http: aiohttp.ClientSession
) -> None:
    # At a dollar and ten dollars per million: some 60 for the input's bound, the rest for the output.
    alice = await enter(house_books, plan="wallet", credit_microusd=600)
    status, headers, body = await post(http, house, alice, asked("tokens:90"))
    assert status == 200, body
    lowered = int(headers["x-tollgate-max-tokens"])
    reply = json.loads(body)
    assert 16 <= lowered < 90
    assert reply["usage"]["completion_tokens"] == lowered
    assert reply["choices"][0]["finish_reason"] == "length"


async def test_no_credit_is_a_402_that_says_what_is_missing(
    house: House, house_books: Database, http: aiohttp.ClientSession
) -> None:
    alice = await enter(house_books, plan="wallet", credit_microusd=100)
    status, _, body = await post(http, house, alice, asked("tokens:90"))
    error = json.loads(body)["error"]
    assert (status, error["code"]) == (402, "insufficient_credits")
    assert error["available_usd"] == "0.000100" and float(error["needed_usd"]) > 0.0001
    assert "/dashboard/billing/credits" in error["message"]


async def test_an_included_call_cannot_cost_more_than_its_plan_says(
    house: House, house_books: Database, http: aiohttp.ClientSession
) -> None:
    alice = await enter(house_books, plan="included")
    status, headers, body = await post(http, house, alice, asked("tokens:3000", max_tokens=9000))
    assert status == 200, body
    # $0.02 at $10 a million is 2,000 tokens, less what the input's bound takes.
    assert 1900 < int(headers["x-tollgate-max-tokens"]) < 2000
    assert headers["x-included-remaining"] == "499" and headers["x-tollgate-cost"] == "0.000000"
    long = "x" * 30_000
    status, _, body = await post(http, house, alice, asked(long))
    error = json.loads(body)["error"]
    assert status == 402 and "included" in error["message"]


async def test_a_long_stream_without_a_limit_holds_more_as_it_goes(
    house: House, house_books: Database, http: aiohttp.ClientSession
) -> None:
    alice = await enter(house_books, plan="wallet", credit_microusd=200_000)
    body = asked("tokens:9000 chunk:50", stream=True)
    del body["max_tokens"]
    status, headers, text = await post(http, house, alice, body)
    assert status == 200 and events(text)[-1] == "[DONE]"
    assert len(text_of(text).split()) == 9000
    row = await row_of(house, http, alice, headers["x-request-id"])
    assert row["completion_tokens"] == 9000
    balance = await wallet.balance(house_books, alice.account.id)
    assert (balance.posted, balance.held) == (200_000 - row["cost_microusd"], 0)


async def test_a_long_stream_ends_with_length_when_the_credit_does(
    house: House, house_books: Database, http: aiohttp.ClientSession
) -> None:
    alice = await enter(house_books, plan="wallet", credit_microusd=50_000)
    body = asked("tokens:9000 pace:0.002 chunk:20", stream=True)
    del body["max_tokens"]
    status, headers, text = await post(http, house, alice, body)
    assert status == 200
    *_, finish, done = events(text)
    assert done == "[DONE]" and json.loads(finish)["choices"][0]["finish_reason"] == "length"
    row = await row_of(house, http, alice, headers["x-request-id"])
    assert row["state"] == "settled" and row["finish_reason"] == "length"
    balance = await wallet.balance(house_books, alice.account.id)
    assert 0 <= balance.posted == 50_000 - row["cost_microusd"] and balance.held == 0


async def test_a_missing_usage_is_counted_by_us(
    house: House, alice: Actor, http: aiohttp.ClientSession
) -> None:
    status, headers, body = await post(http, house, alice, asked("tokens:20 nousage", stream=True))
    assert status == 200 and events(body)[-1] == "[DONE]"
    row = await row_of(house, http, alice, headers["x-request-id"])
    assert row["estimated"] is True and row["completion_tokens"] == 20


async def test_a_usage_above_the_hold_is_the_houses_loss(
    house: House, house_books: Database, alice: Actor, http: aiohttp.ClientSession
) -> None:
    status, headers, body = await post(http, house, alice, asked("usage:10,100000"))
    assert status == 200
    charged = json.loads(body)["usage"]["cost_usd"]
    assert charged == headers["x-tollgate-cost"] and float(charged) < 0.01
    rows = await house_books.fetch(
        "SELECT house_loss_microusd, charged_microusd FROM calls WHERE id = ?", (headers["x-request-id"],)
    )
    assert rows[0][0] + rows[0][1] == 10 + 1_000_000


async def test_a_revoked_key_ends_its_running_stream(
    house: House, house_books: Database, alice: Actor, http: aiohttp.ClientSession
) -> None:
    async with http.post(
        f"{house.base_url}/v1/chat/completions", headers=alice.headers,
        json=asked("tokens:90 pace:0.3", stream=True),
    ) as answer:
        await answer.content.readuntil(b"\n\n")
        await api_key.revoke(alice.account.id, alice.key_id)
        rest = await asyncio.wait_for(answer.read(), 30)
    assert json.loads(events(rest)[-1])["error"]["code"] == "invalid_api_key"


async def test_a_slow_first_token_is_bridged_by_pings(
    house: House, alice: Actor, http: aiohttp.ClientSession
) -> None:
    status, _, body = await post(http, house, alice, asked("delay:17 say:late", stream=True))
    assert status == 200
    assert body.startswith(b": ping\n\n") and events(body)[-1] == "[DONE]" and text_of(body) == "late"


async def test_a_replay_is_refused_to_a_revoked_key(
    house: House, alice: Actor, http: aiohttp.ClientSession
) -> None:
    key = {"Idempotency-Key": "again"}
    assert (await post(http, house, alice, asked("say:hello"), **key))[0] == 200
    await api_key.revoke(alice.account.id, alice.key_id)
    status, headers, body = await post(http, house, alice, asked("say:hello"), **key)
    assert (status, json.loads(body)["error"]["code"]) == (401, "invalid_api_key")


@pytest.mark.parametrize("narrowed", [
    {"scopes": '["models"]'}, {"models": '["other"]'}, {"addresses": '["10.9.9.9"]'}
])
async def test_a_key_that_was_narrowed_is_refused_on_its_next_call(
    house: House, alice: Actor, http: aiohttp.ClientSession, narrowed: dict[str, str]
) -> None:
    assert (await post(http, house, alice, asked("say:hello")))[0] == 200
    key = await api_key.ApiKey.get(id=alice.key_id)
    await api_key.ApiKey.filter(id=alice.key_id).update(version=key.version + 1, **narrowed)
    status, _, _ = await post(http, house, alice, asked("say:hello"))
    assert status in (403, 404)


async def test_one_huge_chunk_is_charged_in_full(
    house: House, alice: Actor, http: aiohttp.ClientSession
) -> None:
    body = asked("tokens:15000 burst chunk:15000", stream=True)
    del body["max_tokens"]
    status, headers, text = await post(http, house, alice, body)
    assert status == 200 and events(text)[-1] == "[DONE]"
    assert text.count(b'"finish_reason":"') == 1
    row = await row_of(house, http, alice, headers["x-request-id"])
    assert row["completion_tokens"] == 15000 and row["finish_reason"] == "stop"
    assert row["cost_microusd"] == row["prompt_tokens"] + 150_000


@pytest.mark.parametrize("keyed", [False, True])
async def test_a_client_that_stops_reading_is_let_go_when_its_call_is_stopped(
    house: House, house_books: Database, alice: Actor, keyed: bool
) -> None:
    text = json.dumps(asked("tokens:15000 burst chunk:1", stream=True, max_tokens=15000)).encode()
    extra = b"Idempotency-Key: unread\r\n" if keyed else b""
    reader, writer = await asyncio.open_connection("127.0.0.1", house.port, limit=1024)
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n" + extra
        + f"Authorization: Bearer {alice.key}\r\nContent-Length: {len(text)}\r\n\r\n".encode() + text
    )

    async def held() -> bool:
        return (await wallet.balance(house_books, alice.account.id)).held > 0

    async def given_back() -> bool:
        return not await held()

    await until(held)
    await asyncio.sleep(1)
    await api_key.revoke(alice.account.id, alice.key_id)
    await until(given_back, within_s=15)
    writer.close()


async def test_what_a_failed_attempt_said_of_itself_is_not_billed(
    house: House, alice: Actor, http: aiohttp.ClientSession, twin: str
) -> None:
    status, headers, body = await post(http, house, alice, asked("tokens:20 finish:5", stream=False))
    assert status == 200
    row = await row_of(house, http, alice, headers["x-request-id"])
    assert row["finish_reason"] is not None and row["completion_tokens"] == 20


async def test_a_document_is_bounded_by_the_context_not_by_its_bytes(
    house: House, house_books: Database, http: aiohttp.ClientSession
) -> None:
    alice = await enter(house_books, plan="included")
    part = {"type": "file", "file": {"filename": "a.pdf", "file_data": "data:application/pdf;base64," + "A" * 400}}
    body = asked("") | {"messages": [{"role": "user", "content": [part, {"type": "text", "text": "say:hello"}]}]}
    status, _, answer = await post(http, house, alice, body)
    # 128,000 tokens of context at a dollar a million: more than an included call may cost.
    assert status == 402 and "included" in json.loads(answer)["error"]["message"]


async def test_a_crowd_of_messages_is_refused_before_it_is_decoded(
    house: House, alice: Actor, http: aiohttp.ClientSession
) -> None:
    body = asked("") | {"messages": [{"role": "user"}] * 10_001}
    status, _, answer = await post(http, house, alice, body)
    assert status == 400 and json.loads(answer)["error"]["param"] == "messages"


async def test_a_websocket_is_turned_away(house: House, http: aiohttp.ClientSession) -> None:
    with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
        await http.ws_connect(house.base_url + "/v1/chat/completions")
    assert refused.value.status == 405
