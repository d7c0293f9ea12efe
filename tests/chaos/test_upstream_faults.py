"""Every fault of the catalogue over real sockets, streamed and plain, on both databases.

All cases of a run go at once through one Tollgate per database, each with an account of its own, before a
single one is judged: some take half a minute of silence to show. What costs nothing must not cost an included
call either, so those cases run on included calls, too.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from api import gateway
from api.pulse import Pulse
from models import call as calls
from models import wallet
from models.database import Database
from tests.cast import Actor, enter
from tests.chaos.upstream_faults import CATALOGUE, LEAK, PROMPT, Case, Ending, whole
from tests.conftest import missing
from tests.house import CONFIGURATION, House, books_of
from tests.twins.broken_hosts import BrokenHosts
from tests.twins.upstream import SECRET, Raw

CREDIT = 10_000_000
AT_ONCE_MAX = 24
CALL_S = 75
ENDED_S = 60
PROVIDER_KEY = "twin-upstream-key-000111222333"
PRICES = defaultdict(lambda: (1, 10), dear=(1, 1000))
"""Micro-dollars per token of input and output."""

OFFER = """
[[offers]]
id = "{id}"
surface = "chat"
routes = [{routes}]
context_tokens = 1000000
max_output_tokens = {most}
price_usd = {{ input_per_million = "1", output_per_million = "{price}" }}
{settings}
"""
UPSTREAM = '[upstreams.{id}]\nformat = "openai"\nbase_url = "{url}"\napi_key = "{key}"\n'


@dataclass(slots=True)
class Seen:
    """Hold all that there is to see of one call when it is over."""

    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    row: Mapping[str, Any] = field(default_factory=dict)
    usage: dict[str, Any] = field(default_factory=dict)
    noted: list[Mapping[str, Any]] = field(default_factory=list)
    ledger: list[int] = field(default_factory=list)
    posted: int = 0
    held: int = 0
    included_used: int = 0
    requests: list[dict[str, Any]] = field(default_factory=list)

    def events(self) -> list[str]:
        """Return the data of every event of a streamed answer."""
        parts = self.body.decode().split("\n\n")
        return [part.removeprefix("data: ") for part in parts if part.startswith("data: ")]

    def parts(self) -> list[dict[str, Any]]:
        """Return the messages of a plain answer, or the deltas of a streamed one."""
        bodies = [json.loads(event) for event in self.events() if event != "[DONE]"]
        bodies = bodies or [json.loads(self.body or "{}")]
        choices = [choice for body in bodies for choice in body.get("choices", ())]
        return [choice.get("delta") or choice.get("message") or {} for choice in choices]

    def pieces(self) -> list[str]:
        """Return the generated texts the client got, reasoning included."""
        keys = ("reasoning_content", "content")
        return [text for part in self.parts() for key in keys if (text := part.get(key))]

    def content(self) -> str:
        """Return the text of the answer, without its reasoning."""
        return "".join(part.get("content") or "" for part in self.parts())


@dataclass(slots=True)
class Run:
    """Be one case on its way, with an account of its own."""

    case: Case
    plan: str
    actor: Actor
    seen: Seen = field(default_factory=Seen)
    failure: BaseException | None = None

    @property
    def user(self) -> str:
        """Return the name by which the twin knows its requests."""
        return f"{self.case.id}/{self.actor.account.id}"


@dataclass(slots=True)
class Stage:
    """Be one Tollgate before its upstreams. Its books are opened before and after the calls, not beside them."""

    house: House
    twin: str
    http: aiohttp.ClientSession
    slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(AT_ONCE_MAX))

    async def run_all(self, cases: list[tuple[Case, str]]) -> list[Run]:
        """Run cases, each on its plan, all at once, and return them with all that there was to see."""
        runs = await self.cast(cases)
        await asyncio.gather(*map(self.play, runs))
        await self.look(runs)
        return runs

    async def cast(self, cases: list[tuple[Case, str]]) -> list[Run]:
        """Give every case an account."""
        async with books_of(self.house) as books:
            return [
                Run(case, plan, await enter(books, "client", plan=plan, credit_microusd=CREDIT))
                for case, plan in cases
            ]

    async def play(self, run: Run) -> None:
        """Make a call and wait until it is over; what goes wrong here is kept for its test."""
        case, seen = run.case, run.seen
        try:
            answers = [answer.to_json() if isinstance(answer, Raw) else answer for answer in case.answers]
            async with self.http.post(f"{self.twin}/script", json={"user": run.user, "answers": answers}) as answer:
                assert answer.status == 200, f"the twin does not know {case.answers}"
            body = {
                "model": case.offer, "messages": [{"role": "user", "content": PROMPT}], "user": run.user,
                "max_tokens": 100, "stream": case.streamed, **case.request,
            }
            body = {name: value for name, value in body.items() if value is not None}
            async with self.slots, asyncio.timeout(CALL_S):
                await getattr(self, "_" + case.client.replace(" ", "_"))(run, body)
            seen.usage = await self._ended(run.actor)
            seen.requests = await self._requests(run.user, case.ending.aborted)
        except Exception as failure:
            run.failure = failure

    async def look(self, runs: list[Run]) -> None:
        """Read what stands in the books of calls that are over."""
        async with books_of(self.house) as books:
            for run in runs:
                if run.failure is None:
                    await _read_books(books, run.seen, run.actor.account.id)

    async def _reads(self, run: Run, body: dict[str, Any]) -> None:
        seen, url = run.seen, f"{self.house.base_url}/v1/chat/completions"
        async with self.http.post(url, json=body, headers=run.actor.headers) as answer:
            seen.status, seen.headers, seen.body = answer.status, answer.headers, await answer.read()

    async def _leaves_at_once(self, run: Run, body: dict[str, Any]) -> None:
        request = asyncio.create_task(self._reads(run, body))
        while len(await self._requests(run.user)) < run.case.ending.attempts:
            assert not request.done(), "answered before the client could leave"
            await asyncio.sleep(0.05)
        request.cancel()
        await asyncio.wait({request})

    async def _leaves_midway(self, run: Run, body: dict[str, Any]) -> None:
        seen, url = run.seen, f"{self.house.base_url}/v1/chat/completions"
        answer = await self.http.post(url, json=body, headers=run.actor.headers)
        seen.status, seen.headers = answer.status, answer.headers
        while seen.body.count(b'"content":"') < 4:
            seen.body += await answer.content.readany()
        seen.body = seen.body[: seen.body.rindex(b"\n\n") + 2]
        answer.close()

    async def _never_reads(self, run: Run, body: dict[str, Any]) -> None:
        """Send a request, leave the answer in a small buffer, and go once nothing moves any more."""
        raw = json.dumps(body).encode()
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        try:
            await loop.sock_connect(sock, ("127.0.0.1", self.house.port))
            await loop.sock_sendall(sock, (
                f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {run.actor.key}\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
            ).encode() + raw)
            sent, still = 0, 0
            while still < 15:
                await asyncio.sleep(0.1)
                now = sum(request["sent_bytes"] for request in await self._requests(run.user))
                still = still + 1 if now == sent and now else 0
                sent = now
        finally:
            sock.close()
        run.seen.status = 200

    async def _ended(self, actor: Actor) -> dict[str, Any]:
        """Return the account's one call as the usage list shows it, once it is over."""
        async with asyncio.timeout(ENDED_S):
            while True:
                async with self.http.get(f"{self.house.base_url}/v1/usage", headers=actor.headers) as answer:
                    calls_made = (await answer.json())["data"]
                if calls_made and calls_made[0]["state"] != "open":
                    (usage,) = calls_made
                    return usage
                await asyncio.sleep(0.1)

    async def _requests(self, user: str, aborted: bool = False) -> list[dict[str, Any]]:
        """Return what the twin saw of a user, the last request as aborted if it is to be."""
        async with asyncio.timeout(ENDED_S):
            while True:
                async with self.http.get(f"{self.twin}/requests", params={"user": user}) as answer:
                    requests = (await answer.json())["requests"]
                if not aborted or (requests and requests[-1]["state"] == "aborted"):
                    return requests
                await asyncio.sleep(0.05)


async def _read_books(books: Database, seen: Seen, account_id: str) -> None:
    (seen.row,) = await books.fetch("SELECT * FROM calls WHERE account_id = ?", (account_id,))
    seen.noted = list(await calls.attempts_of(books, seen.row["id"]))
    balance = await wallet.balance(books, account_id)
    seen.posted, seen.held = balance.posted, balance.held
    entries = "SELECT amount_microusd FROM ledger WHERE account_id = ? ORDER BY seq"
    seen.ledger = [entry["amount_microusd"] for entry in await books.fetch(entries, (account_id,))][1:]
    used = await books.fetch("SELECT used FROM included_calls WHERE account_id = ?", (account_id,))
    seen.included_used = sum(row["used"] for row in used)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokenHosts]:
    """Serve the hosts at which no provider can be talked to."""
    if shutil.which("openssl") is None:
        missing("the openssl command")
    with BrokenHosts(tmp_path_factory.mktemp("hosts")) as hosts:
        yield hosts


@pytest.fixture(scope="module")
def selected(request: pytest.FixtureRequest) -> dict[str, list[Case]]:
    """Give the cases that this run is about, by database."""
    chosen: dict[str, list[Case]] = defaultdict(list)
    for item in request.session.items:
        if item.module is request.module and "case" in getattr(item, "callspec", SimpleNamespace(params=())).params:
            chosen[item.callspec.params["database_kind"]].append(item.callspec.params["case"])
    return chosen


@pytest.fixture(scope="module")
def fault_houses(
    request: pytest.FixtureRequest, hosts: BrokenHosts, new_database, twin: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[str, House]]:
    """Run a Tollgate per database in front of every upstream of the catalogue."""
    kinds = {
        item.callspec.params["database_kind"] for item in request.session.items
        if item.module is request.module and "database_kind" in getattr(item, "fixturenames", ())
    }
    houses = {}
    try:
        for kind in sorted(kinds):
            folder = tmp_path_factory.mktemp(f"faults-{kind}")
            (folder / "tollgate.toml").write_text(_configuration(twin, hosts))
            url = asyncio.run(new_database(kind))
            houses[kind] = House(folder, url, twin, SSL_CERT_FILE=str(hosts.ca_path)).start()
        yield houses
    finally:
        for house in houses.values():
            house.stop()


@pytest.fixture(scope="module")
def observed(
    fault_houses: dict[str, House], selected: dict[str, list[Case]], twin: str
) -> dict[tuple[str, str], list[Run]]:
    """Run every chosen case on every database at once; give the runs of each case by (database, case)."""
    return asyncio.run(_observe_all(fault_houses, selected, twin.removesuffix("/v1")))


@pytest.mark.parametrize("case", CATALOGUE, ids=lambda case: case.id)
def test_a_fault_ends_as_the_catalogue_says(
    case: Case, database_kind: str, observed, fault_houses: dict[str, House], hosts: BrokenHosts, twin: str
) -> None:
    for run in observed[database_kind, case.id]:
        seen = _judged(run)
        _judge_discretion(case, seen, fault_houses[database_kind], _secrets(hosts, twin))


def test_afterwards_the_books_add_up_and_the_log_keeps_the_providers_secrets(
    database_kind: str, observed, fault_houses: dict[str, House], hosts: BrokenHosts, twin: str
) -> None:
    house = fault_houses[database_kind]
    audit = house.command("audit", "--full")
    assert audit.returncode == 0, audit.stdout + audit.stderr
    log = house.log()
    for secret in _secrets(hosts, twin):
        assert secret not in log, secret
    errors = [line["message"] for line in house.log_lines() if line["level"] in ("error", "critical")]
    assert not [error for error in errors if not str(error).startswith("a call cost more than was held for it")]
    for name, host in hosts.twins.items():
        assert not host.requests or name == "tls-good", "a key was sent to a host that is not the provider's"


async def test_a_retry_never_goes_over_another_connection_that_was_idle(
    database_kind: str, fault_houses: dict[str, House], twin: str, http: aiohttp.ClientSession
) -> None:
    """After a pause every idle connection is about to be closed, not just the one that was tried."""
    stage = Stage(fault_houses[database_kind], twin.removesuffix("/v1"), http)
    delayed = Case("primer", False, ("dropnext delay:0.5",), Ending(), offer="race")
    primed = await stage.run_all([(delayed, "wallet")] * 3)
    idle = {request["connection"] for run in primed for request in run.seen.requests}
    assert len(idle) == 3
    for streamed in (False, True):
        ending = whole(attempts=2, noted=(None, 200))
        (run,) = await stage.run_all(
            [(Case("f07-keep-alive-race", streamed, ("chunk:1",), ending, offer="race"), "wallet")]
        )
        first, second = (request["connection"] for request in _judged(run).requests)
        assert first in idle and second not in idle


@pytest.mark.parametrize(
    "waited_s, heard_s_ago, reading, reason",
    [
        (29, 29, True, None), (31, 31, True, "stalled"), (119, 1, True, None), (121, 1, True, "no_token"),
        (899, 899, False, None), (901, 0, False, "too_long"),
    ],
)
async def test_a_stream_is_given_up_when_the_upstream_is_silent_but_not_when_the_client_is(
    waited_s: int, heard_s_ago: int, reading: bool, reason: str | None
) -> None:
    """Two minutes of comments, and a quarter of an hour: told by the rule, for nobody waits so long."""
    pulse = Pulse()
    pulse.token_at = start = pulse.started_at
    read = asyncio.create_task(pulse.read(asyncio.Event().wait())) if reading else None
    await asyncio.sleep(0)
    pulse.heard_at = start + waited_s - heard_s_ago
    offer = SimpleNamespace(first_token_timeout_s=1, answer_timeout_s=1)
    meter = SimpleNamespace(pulse=pulse, offer=offer, call=SimpleNamespace(stream=True))
    assert gateway._overdue(meter, start + waited_s) == reason
    if read is not None:
        read.cancel()


# What is judged.


def _judged(run: Run) -> Seen:
    """Assert that a run went as its case says, and return what was seen."""
    if run.failure is not None:
        raise run.failure
    _judge_answer(run.case, run.seen)
    _judge_attempts(run.case, run.seen)
    _judge_books(run.case, run.seen)
    return run.seen


def _judge_answer(case: Case, seen: Seen) -> None:
    ending = case.ending
    if case.client != "reads":
        return
    assert seen.status == ending.status, seen.body[:500]
    assert seen.headers["x-request-id"] == seen.row["id"]
    assert seen.headers.get("Retry-After") == ending.retry_after
    assert ending.holds in seen.body
    if ending.status == 200 and ending.text is not None:
        assert seen.content() == ending.text
    if case.streamed and ending.status == 200:
        assert seen.headers["content-type"].startswith("text/event-stream")
        assert (seen.events()[-1] == "[DONE]") is ending.done
    error = json.loads(seen.body) if not case.streamed or ending.status != 200 else json.loads(
        seen.events()[-1 if not ending.done else 0]
    )
    if ending.code is None:
        assert "error" not in error
        assert error["id"] == "chatcmpl-" + seen.row["id"].removeprefix("req_") and error["model"] == case.offer
    else:
        assert (error["error"]["code"], error["error"]["request_id"]) == (ending.code, seen.row["id"])
        assert error["request_id"] == seen.row["id"]
    if ending.code == "upstream_error":
        assert error["error"]["upstream"]["provider"] == seen.row["upstream"]


def _judge_attempts(case: Case, seen: Seen) -> None:
    ending = case.ending
    assert len(seen.requests) == ending.attempts
    if ending.aborted:
        assert seen.requests[-1]["state"] == "aborted"
    if ending.models is not None:
        assert tuple(request["body"]["model"] for request in seen.requests) == ending.models
    if ending.waited_s:
        first, second, *_ = (request["at_s"] for request in seen.requests)
        assert second - first >= ending.waited_s
    noted = tuple(attempt["status"] for attempt in seen.noted)
    if ending.noted is not None:
        assert noted == ending.noted
    else:
        assert len(noted) == (ending.attempts if ending.attempts > 1 else 0)
    assert seen.row["upstream"]


def _judge_books(case: Case, seen: Seen) -> None:
    ending, row = case.ending, seen.row
    state = "released" if ending.billed == "nothing" else "settled"
    assert (row["state"], row["status"], row["error_code"]) == (state, ending.row_status, ending.code)
    assert bool(row["estimated"]) is (ending.billed == "count")
    if ending.billed != "nothing" and isinstance(case.answers[-1], str):
        assert row["upstream_request_id"] == "req_twin", "it cannot be found again at the provider"
    assert seen.held == 0
    charged, loss = row["charged_microusd"], row["house_loss_microusd"]
    assert seen.posted == CREDIT - charged and seen.ledger == ([-charged] if charged else [])
    assert seen.included_used == 0
    usage = seen.usage
    assert (usage["state"], usage["status"], usage["error_code"], usage["estimated"], usage["cost_microusd"]) == (
        state, ending.row_status, ending.code, bool(row["estimated"]), charged
    )
    if ending.billed == "nothing":
        assert (charged, usage["completion_tokens"], usage["prompt_tokens"]) == (0, 0, 0)
        return
    if ending.finish_reason is not None:
        assert row["finish_reason"] == ending.finish_reason
    tokens = _tokens(case, seen)
    if case.client == "reads":
        assert usage["completion_tokens"] == tokens
    else:
        assert usage["completion_tokens"] >= tokens
    input_price, output_price = PRICES[case.offer]
    assert charged + loss == usage["prompt_tokens"] * input_price + usage["completion_tokens"] * output_price
    assert (loss > 0) is ending.exceeds
    if case.ending.status == 200 and case.client == "reads" and ending.done and not case.streamed:
        told = json.loads(seen.body)["usage"]
        assert told["completion_tokens"] == tokens and told.get("estimated", False) is (ending.billed == "count")
        assert seen.headers["x-tollgate-cost"] == told["cost_usd"]


def _tokens(case: Case, seen: Seen) -> int:
    """Return the output tokens that must be charged: the provider's count, or ours of what was delivered."""
    if case.ending.tokens is not None:
        return case.ending.tokens
    pieces = seen.pieces()
    if case.ending.billed == "usage":
        return len(" ".join(pieces).split()) if not case.streamed else len(pieces)
    text_bytes = len("".join(pieces).encode())
    if case.streamed and pieces and 1.5 <= text_bytes / len(pieces) <= 8:
        return len(pieces)
    return -(-text_bytes // 4)


def _judge_discretion(case: Case, seen: Seen, house: House, secrets: list[str]) -> None:
    """See that nothing the provider wrote, and nothing of how it is reached, got out."""
    lines = "\n".join(line for line in house.log().splitlines() if seen.row["id"] in line)
    if case.ending.billed == "nothing" and case.ending.status != 499:
        assert lines, "the operator must find the fault in the log"
    headers = " ".join(f"{name}: {value}" for name, value in seen.headers.items())
    assert "set-cookie" not in headers.lower() and "x-secret" not in headers.lower()
    for secret in secrets:
        for place in (seen.body.decode("utf-8", "replace"), headers, lines):
            assert secret not in place, secret


def _secrets(hosts: BrokenHosts, twin: str) -> list[str]:
    addresses = [url.split("/")[2] for url in (*hosts.urls.values(), twin)]
    words = (SECRET, SECRET[3:], LEAK, "provider-says", "Scripted refusal", "Please log in", PROVIDER_KEY)
    return [*addresses, *words, "10.0.0.7", "provider.invalid", "x.test"]


# How it is run.


def _configuration(twin: str, hosts: BrokenHosts) -> str:
    """Return the tests' configuration with an offer for each host, and the offers that are in a hurry."""
    routes = {name: f'{{ upstream = "{name}", model = "m" }}' for name in hosts.urls}
    first, second = (
        f'{{ upstream = "twin", model = "{name}", order = {n} }}' for n, name in enumerate(("first", "second"))
    )
    routes |= dict.fromkeys(("hasty", "unhurried", "dear", "roomy"), '{ upstream = "twin", model = "m" }')
    routes |= {"pair": f"{first}, {second}", "race": '{ upstream = "by-name", model = "m" }'}
    routes["closed-then-twin"] = f'{{ upstream = "closed", model = "first" }}, {second}'
    settings = {
        "hasty": "first_token_timeout_s = 1\nanswer_timeout_s = 1", "unhurried": "first_token_timeout_s = 17",
    }
    urls = {**hosts.urls, "by-name": twin.replace("127.0.0.1", "localhost")}
    return CONFIGURATION.format(twin=twin) + "\n".join((
        *(UPSTREAM.format(id=name, url=url, key=PROVIDER_KEY) for name, url in urls.items()),
        *(
            OFFER.format(
                id=name, routes=to, settings=settings.get(name, ""), price=PRICES[name][1],
                most=900_000 if name == "roomy" else 16_000,
            )
            for name, to in routes.items()
        ),
    ))


async def _observe_all(
    houses: dict[str, House], selected: dict[str, list[Case]], twin: str
) -> dict[tuple[str, str], list[Run]]:
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as http:
        stages = {kind: Stage(houses[kind], twin, http) for kind in selected}
        runs = {kind: await stage.cast(_on_plans(selected[kind])) for kind, stage in stages.items()}
        await asyncio.gather(*(stages[kind].play(run) for kind, some in runs.items() for run in some))
        for kind, stage in stages.items():
            await stage.look(runs[kind])
    found: dict[tuple[str, str], list[Run]] = defaultdict(list)
    for kind, some in runs.items():
        for run in some:
            found[kind, run.case.id].append(run)
    return found


def _on_plans(cases: list[Case]) -> list[tuple[Case, str]]:
    """Return what to run on which plan, the slow ones first: the others run meanwhile."""
    wanted = [(case, "wallet") for case in cases]
    wanted += [(case, "included") for case in cases if case.ending.billed == "nothing" and not case.streamed]
    return sorted(wanted, key=lambda one: not one[0].name.startswith(("f26", "f46")))
