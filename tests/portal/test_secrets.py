"""Secrets: one canary of every kind, a server that logs all it can, and a search of everything it leaves behind."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from models.settings import read_settings
from tests.api.v1.test_chat import body
from tests.cast import Actor, enter
from tests.house import House, books_of

PROVIDER_KEY = "sk-canary-provider-0123456789abcdef"
PLAIN_PROVIDER_KEY = "canaryplainprovider0123456789"
METRICS_TOKEN = "canary-metrics-token-0123456789"
SECRET_KEY = "canary-secret-key-0123456789-0123456789"
WRONG_KEYS = [
    "sk-tg-CanaryWrong000000000000000000000000000", "sk-ant-canary-wrong-0123456789", "whsec_canarywrong0123456",
]
PROMPT, IDEMPOTENCY_KEY = "say:canary-in-a-prompt", "canary-idempotency-key"
CHAT = "/v1/chat/completions"


@pytest.fixture
async def telling_house(database_kind: str, new_database, twin: str, tmp_path: Path) -> AsyncIterator[House]:
    """Give a Tollgate of its own that logs whatever it can and holds canaries; not started yet."""
    house = House(
        tmp_path, await new_database(database_kind), twin, LOG_LEVEL="debug", METRICS_TOKEN=METRICS_TOKEN,
        SECRET_KEY=SECRET_KEY, TWIN_KEY=PROVIDER_KEY, NOBODY_KEY=PLAIN_PROVIDER_KEY,
    )
    configuration = Path(house.environ["TOLLGATE_CONFIG"])
    text = configuration.read_text()
    text = text.replace('api_key = "twin-upstream-key-000111222333"', 'api_key_env = "TWIN_KEY"')
    configuration.write_text(text.replace(
        'base_url = "http://127.0.0.1:9/v1"', 'base_url = "http://127.0.0.1:9/v1"\napi_key_env = "NOBODY_KEY"'
    ))
    yield house
    if house.process is not None:
        house.stop()


async def everything_stored(house: House) -> bytes:
    """Return all bytes the house keeps on disk, or all rows of its PostgreSQL as text."""
    if house.database_url.startswith("sqlite"):
        folder = Path(house.database_url.removeprefix("sqlite:///")).parent
        return b"".join(path.read_bytes() for path in folder.glob("*") if path.is_file())
    async with books_of(house) as books:
        tables = await books.fetch("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")
        rows = [row for table in tables for row in await books.fetch(f"SELECT t::text FROM {table[0]} t")]
    assert len(rows) > 5
    return "\n".join(row[0] for row in rows).encode()


async def live(house: House, http: aiohttp.ClientSession, alice: Actor) -> bytes:
    """Do everything with canaries that can go well or wrong; return all that was answered."""
    answered = []

    async def ask(method: str, path: str, key: str | None = alice.key, **options: object) -> None:
        headers = {"Authorization": f"Bearer {key}", "User-Agent": f"agent {key}", **options.pop("headers", {})}
        async with http.request(method, house.base_url + path, headers=headers, **options) as answer:
            answered.append(f"{answer.status} {answer.headers}".encode() + await answer.read())

    for directive in ("", "status:500", "status:401", "status:429", "nousage"):
        text = f"{PROMPT} {directive}"
        for stream in (False, True):
            await ask("POST", CHAT, json=body(text, stream=stream, user=PROVIDER_KEY))
    for extra in ({"model": "unreachable"}, {"model": alice.key}, {"n": 0}, {"messages": PROVIDER_KEY}):
        await ask("POST", CHAT, json=body(**extra))
    for key in WRONG_KEYS:
        await ask("POST", CHAT, key, json=body(PROMPT))
        await ask("GET", f"/v1/models?api_key={key}", None)
        await ask("GET", f"/v1/{key}", None)
        await ask("GET", f"/{key}?key={key}", None, headers={"x-api-key": key, "Referer": f"http://x/?token={key}"})
    await ask("POST", CHAT, headers={"Idempotency-Key": IDEMPOTENCY_KEY}, json=body("say:hello"))
    await ask("POST", CHAT, data=b"{" + PROMPT.encode(), headers={"Content-Type": "application/json"})
    await ask("GET", "/metrics", "wrong-token")
    await ask("GET", "/metrics", METRICS_TOKEN)
    return b"\n".join(answered)


async def test_no_secret_is_left_anywhere(telling_house: House, http: aiohttp.ClientSession) -> None:
    house = telling_house.start()
    async with books_of(house) as books:
        alice = await enter(books, plan="wallet", credit_microusd=10_000_000)
    answered = await live(house, http, alice)
    assert b'"object":"chat.completion"' in answered and b"tollgate_calls_total" in answered
    # A configuration that is refused, a client that vanishes, a process that is killed under a stream.
    configuration = Path(house.environ["TOLLGATE_CONFIG"])
    good = configuration.read_text()
    configuration.write_text(good + f'\n[upstreams.bad]\nformat = "{PROVIDER_KEY}"\napi_key = "{PROVIDER_KEY}"\n')
    house.signal(signal.SIGHUP)
    async with asyncio.timeout(30):
        while "was not reloaded" not in house.log():
            await asyncio.sleep(0.1)
    configuration.write_text(good)
    stream = await http.post(
        house.base_url + CHAT, json=body(f"{PROMPT} tokens:50 pace:0.2", stream=True), headers=alice.headers
    )
    await stream.content.readany()
    os.kill(house.children()[0], signal.SIGABRT)  # what Python can say of a crash, it says
    stream.close()
    async with asyncio.timeout(30):
        while house.status("/readyz") != 200:
            await asyncio.sleep(0.2)
    house.stop()
    log, stored = house.log().encode(), await everything_stored(house)
    assert b"was not reloaded" in log and b"upstream fault" in log and b'"level":"debug"' in log
    for secret in (PROVIDER_KEY, PLAIN_PROVIDER_KEY, METRICS_TOKEN, SECRET_KEY, *WRONG_KEYS):
        assert secret.encode() not in log, f"{secret} in the log"
        assert secret.encode() not in stored, f"{secret} in the database"
    for secret in (PROVIDER_KEY, PLAIN_PROVIDER_KEY, METRICS_TOKEN, SECRET_KEY):
        assert secret.encode() not in answered, f"{secret} in an answer"
    assert alice.key.encode() not in log and alice.key[-20:].encode() not in log
    assert b"canary-in-a-prompt" not in log and b"canary-in-a-prompt" not in stored
    assert IDEMPOTENCY_KEY.encode() not in log
    if house.database_url.startswith("postgres"):
        assert house.database_url.encode() not in log
    # Nor does the address of any request carry its query into the log.
    assert b"?api_key" not in log and b"?key" not in log and b"token=" not in log


async def test_what_a_caller_writes_is_one_line_in_the_log(
    telling_house: House, http: aiohttp.ClientSession
) -> None:
    house = telling_house.start()
    async with books_of(house) as books:
        alice = await enter(books, plan="wallet", credit_microusd=10_000_000)
    forged = '\r\n{"level":"error","message":"forged"}\r\n\x1b[31m\x07\u2028\u202e'
    for path in ("/v1/%0d%0a%1b%5b31m%7b%22level%22%3a%22error%22%7d", "/%0a%0d%1b%5b2J%7f%e2%80%a8%e2%80%ae"):
        await (await http.get(house.base_url + path, headers={"User-Agent": "x\x9b31m"})).read()
    for asked in (body(model=forged), body("status:500", user=forged), body(f"say:{forged}")):
        await (await http.post(house.base_url + CHAT, json=asked, headers=alice.headers)).read()
    house.stop()
    raw = house.log_path.read_bytes()
    lines = raw.decode().splitlines()
    assert not re.search(rb"[\x00-\x09\x0b-\x1f\x7f]", raw), "a control character in the log"
    assert "\u202e" not in raw.decode() and "\u2028" not in raw.decode()
    assert not [line for line in lines if line.startswith('{"level"')]
    assert len([line for line in lines if line.startswith("{")]) == len(house.log_lines())


def test_settings_show_no_secret() -> None:
    settings = read_settings({
        "SECRET_KEY": SECRET_KEY, "METRICS_TOKEN": METRICS_TOKEN, "OPENAI_API_KEY": PROVIDER_KEY,
        "DATABASE_URL": f"postgres://user:{PLAIN_PROVIDER_KEY}@host/db",
    })
    for shown in (repr(settings), str(settings), f"{settings}"):
        for secret in (SECRET_KEY, METRICS_TOKEN, PROVIDER_KEY, PLAIN_PROVIDER_KEY):
            assert secret not in shown


@pytest.mark.parametrize("environ, says", [
    ({"PUBLIC_URL": "https://gateway.example", "SECRET_KEY": ""}, "SECRET_KEY: missing"),
    ({"PUBLIC_URL": "https://gateway.example", "SECRET_KEY": "canary-short"}, "SECRET_KEY: shorter than 32"),
    ({"SECRET_KEY": "canary-short"}, "SECRET_KEY: shorter than 32"),
    ({"TWIN_KEY": ""}, "TWIN_KEY is not set"),
    ({"NOBODY_KEY": " "}, "NOBODY_KEY is not set"),
    ({"OPENAI_API_KEY": "canary\x01key"}, "OPENAI_API_KEY: the key holds characters"),
    ({"DATABASE_URL": "mysql://user:canary@host/db"}, "DATABASE_URL: write"),
    ({"TRUSTED_PROXIES": "10.0.0.0/8,proxy.example"}, "TRUSTED_PROXIES: 'proxy.example'"),
])
def test_a_missing_secret_stops_the_start_by_name(
    telling_house: House, environ: dict[str, str], says: str
) -> None:
    telling_house.environ |= environ
    for command in ("check", "serve"):
        refused = telling_house.command(command)
        assert refused.returncode == 2 and says in refused.stderr, refused.stderr
        assert "Traceback" not in refused.stderr and "canary" not in refused.stderr.lower()
