"""A load of calls of every kind: plain and streamed, with and without an idempotency key, paid and included."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Callable
from decimal import Decimal

import aiohttp

from models.database import Database
from models.ids import new_id
from tests.cast import Actor, enter
from tests.chaos.history import Ending, History, Told
from tests.house import House

CREDIT_MICROUSD = 1_000_000_000
DONE = b"data: [DONE]\n\n"
_COST = re.compile(rb'"cost_usd":"([0-9.]+)"')
_TOKEN = re.compile(rb'"content":" ?w\d')


class Load:
    """Drive a house with clients that call one after the other until they are told to stop.

    `on_whole` is called at once when a client holds the end of a whole answer.
    """

    def __init__(
        self, house: House, history: History, *, chance: random.Random, moment: str,
        on_whole: Callable[[Told], None] | None = None,
    ) -> None:
        self.house = house
        self.history = history
        self.moment = moment
        self._chance = chance
        self._on_whole = on_whole
        self.payer: Actor
        self.member: Actor
        self._session: aiohttp.ClientSession
        self._clients: list[asyncio.Task[None]] = []
        self._stopping = False

    async def prepare(self, books: Database) -> Load:
        """Bring two accounts on stage: one that pays for every call, one whose calls are included."""
        self.payer = await enter(books, "payer", plan="wallet", credit_microusd=CREDIT_MICROUSD)
        self.member = await enter(books, "member", plan="included")
        # Each call on a connection of its own, so that every process gets its share.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=300))
        return self

    def start(self, clients: int) -> None:
        """Let the clients begin."""
        self._clients = [asyncio.create_task(self._keep_calling()) for _ in range(clients)]

    async def stop_calling(self) -> None:
        """Let every client finish its call, however that ends."""
        self._stopping = True
        await asyncio.gather(*self._clients)

    async def close(self) -> None:
        """Close the connections."""
        await self._session.close()

    async def retry_keyed(self) -> None:
        """Repeat each call with an idempotency key whose client has no whole answer, as a client would."""
        again = [told for told in self.history.told if told.moment == self.moment and told.idempotency_key]
        missing = {told.idempotency_key for told in again} - {
            told.idempotency_key for told in again if told.ending is Ending.WHOLE
        }
        asked = {told.idempotency_key: told for told in again if told.idempotency_key in missing}
        await asyncio.gather(*(
            self.call(told.actor, told.asked, told.idempotency_key) for told in asked.values()
        ))

    async def call(self, actor: Actor, body: dict[str, object], key: str | None = None) -> Told:
        """Make one call and note what its client is told."""
        told = Told(actor, self.moment, body, idempotency_key=key)
        headers = actor.headers | ({"Idempotency-Key": key} if key else {})
        try:
            async with self._session.post(
                f"{self.house.base_url}/v1/chat/completions", json=body, headers=headers
            ) as answer:
                told.status = answer.status
                told.call_id = answer.headers.get("x-original-request-id") or answer.headers["x-request-id"]
                told.ending = Ending.CUT if answer.status < 400 else Ending.REFUSED
                await self._read(answer, told)
        except aiohttp.ClientConnectorError:
            told.ending = Ending.UNREACHED
            return told
        except (aiohttp.ClientError, ConnectionError):
            pass  # the ending noted so far stands
        self.history.told.append(told)
        return told

    async def _read(self, answer: aiohttp.ClientResponse, told: Told) -> None:
        heard = b""
        try:
            async for piece in answer.content.iter_any():
                heard += piece
                if told.asked.get("stream") and told.status == 200 and heard.endswith(DONE):
                    self._note_whole(told, heard)
        finally:
            told.tokens = len(_TOKEN.findall(heard))
            if told.status == 200 and told.asked.get("stream") and told.ending is Ending.CUT:
                _note_failure(told, heard)
        if told.status == 200 and not told.asked.get("stream"):
            self._note_whole(told, heard)
        elif told.status != 200:
            told.error_code = json.loads(heard)["error"]["code"]

    def _note_whole(self, told: Told, heard: bytes) -> None:
        told.ending = Ending.WHOLE
        told.cost = int(Decimal(_COST.findall(heard)[-1].decode()) * 1_000_000)
        if self._on_whole is not None:
            self._on_whole(told)

    async def _keep_calling(self) -> None:
        while not self._stopping:
            told = await self.call_any()
            if told.ending is Ending.UNREACHED:
                await asyncio.sleep(0.05)

    async def call_any(self) -> Told:
        """Make a call of a random kind."""
        chance = self._chance
        actor = self.member if chance.random() < 0.2 else self.payer
        key = new_id("try") if chance.random() < 0.3 else None
        streamed = chance.random() < 0.6
        words = f"tokens:{chance.randint(1, 40)} pace:{chance.uniform(0, 0.05):.3f}"
        if not streamed or chance.random() < 0.3:
            words += f" delay:{chance.uniform(0, 0.4):.3f}"
        offer = "vendor/twin by call" if chance.random() < 0.2 else "twin"
        return await self.call(actor, asking(streamed, words, offer), key)


def asking(streamed: bool, words: str, offer: str = "twin") -> dict[str, object]:
    """Return a request whose answer the words direct."""
    body = {"model": offer, "max_tokens": 100, "messages": [{"role": "user", "content": words}]}
    return body | ({"stream": True, "stream_options": {"include_usage": True}} if streamed else {})


def _note_failure(told: Told, heard: bytes) -> None:
    """Recognise a stream that ended in an error frame, which must be well-formed and whole."""
    last = heard.rpartition(b"\n\ndata: ")[2] if b"\n\ndata: " in heard else heard.removeprefix(b"data: ")
    if not last.startswith(b'{"error"'):
        return
    assert last.endswith(b"\n\n"), f"half an error frame: {last!r}"
    error = json.loads(last)["error"]
    assert error["request_id"] == told.call_id
    told.ending, told.error_code = Ending.FAILED, error["code"]
