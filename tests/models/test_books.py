"""The books as a whole: whatever happens to calls, in whatever order, no cent appears or vanishes.

A state machine drives the money scripts on the real database and a few lines of plain Python beside
it; after every step the two must agree on every balance, hold, counter, call and ledger entry.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import asyncpg
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from models import account as accounts
from models import api_key, call, clock, idempotency, ids, ledger, wallet
from models.database import Database, migrate
from models.errors import (
    CallerChanged,
    IdempotencyKeyReused,
    InsufficientCredits,
    NotFound,
    RateLimited,
    UnknownKey,
)
from models.rate_limit import WINDOW_MS, Limit, account_bucket, key_bucket
from models.usage import Usage
from tests.house import PatientDatabase

T = TypeVar("T")
DAY_MS = 24 * 3600 * 1000
CALLS_PER_WINDOW = 25
HANG_UPS_PER_HOUR = 2
FREE = call.Outcome(id="free", status=499)
AUDIT_EVERY = 50  # examples: a full audit reads everything that all the examples before have written


class Stage:
    """Hold one database and one event loop for all the examples of a test."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.examples = 0
        self.books: Database

    def do(self, work: Awaitable[T]) -> T:
        return self.loop.run_until_complete(work)

    async def open(self, kind: str, new_database: Callable[[str], Awaitable[str]]) -> None:
        url = await new_database(kind)
        await migrate(url)
        self.books = PatientDatabase(url)
        await self.books.open()

    def audit(self) -> None:
        report = self.do(ledger.audit(self.books, full=True))
        assert [str(violation) for violation in report.violations] == []


@dataclass(eq=False)
class Purse:
    """Be what the model knows of one account."""

    id: str
    included_limit: int
    posted: int = 0
    held: int = 0
    disputed: bool = False
    active: bool = True
    version: int = 1
    overdrawn: bool = False  # by a refund, which alone may do that
    entries: list[tuple[str, str, int]] = field(default_factory=list)

    def has(self, amount: int) -> bool:
        return not self.disputed and self.posted >= 0 and self.posted - self.held >= amount


@dataclass(eq=False)
class Key:
    """Be what the model knows of one key, and `read`, the value that a process has cached."""

    id: str
    purse: Purse
    limit: int | None
    period: str | None
    per_window: int | None
    version: int = 1
    revoked: bool = False
    read: api_key.LiveKey | None = None
    spend: dict[str, list[int]] = field(default_factory=dict)  # period -> reserved, spent

    def live(self) -> api_key.LiveKey:
        return api_key.LiveKey(
            self.id, self.version, self.purse.id, self.purse.version, "any", None, None, None,
            self.limit, self.period, self.per_window, None,
        )


@dataclass(eq=False)
class Call:
    """Be what the model knows of one call."""

    id: str
    key: Key
    owner: str
    state: str
    hold: int = 0
    month: str | None = None
    period: str | None = None
    charged: int = 0
    outcome_id: str | None = None
    checkpoint: tuple[int, int] = (0, 0)
    idempotency_key: str | None = None

    @property
    def purse(self) -> Purse:
        return self.key.purse


Op = tuple[Callable[[], Any], Any]


def pennies(top: int) -> st.SearchStrategy[int]:
    return st.integers(0, top)


which = st.integers(0, 11)
costs = st.one_of(pennies(300), pennies(3000))
answers = st.sampled_from(
    [
        None, idempotency.StoredAnswer(200, "application/json", b"{}"),
        idempotency.StoredAnswer(200, "text/plain", None),
    ]
)
claims = st.one_of(
    st.none(), st.builds(idempotency.Claim, key=st.sampled_from("KL"), fingerprint=st.sampled_from("fg"))
)
# (verb, arguments): one thing that happens to the books. The machine knows how to do and predict each.
admissions = st.tuples(
    st.just("admit"), which, pennies(60), pennies(9), st.integers(1, 64), st.sampled_from([None, 16, 64]), claims,
    st.sampled_from([True, True, True, False]),
)
settlements = st.tuples(st.just("settle"), which, costs, st.sampled_from("ab"), answers)
releases = st.tuples(st.just("release"), which)
extensions = st.tuples(st.just("extend"), which, pennies(200))
checkpoints = st.tuples(
    st.just("checkpoint"), st.sampled_from([0, 1]),
    st.dictionaries(which, st.tuples(costs, st.sampled_from([3, 2, 1, 0])), max_size=3),
)
expiries = st.tuples(st.just("expire"), which, st.booleans())
hang_ups = st.tuples(st.just("hang_up"), which, costs)
credits = st.tuples(st.just("credit"), st.integers(0, 2), st.integers(1, 3000), st.sampled_from("rst"))
refunds = st.tuples(st.just("refund"), st.integers(0, 1), st.integers(1, 400))
poisons = st.tuples(st.just("poison"), which)
happenings = st.one_of(
    admissions, settlements, releases, extensions, checkpoints, expiries, hang_ups, credits, poisons
)


class Books(RuleBasedStateMachine):
    """Let things happen to two accounts with two keys each."""

    stage: Stage

    def __init__(self) -> None:
        super().__init__()
        self.now = clock.now_ms()
        self.purses: list[Purse] = []
        self.keys: list[Key] = []
        self.calls: list[Call] = []
        self.owners = [ids.new_id("prc"), ids.new_id("prc")]
        self.beating = set(self.owners)
        self.windows: dict[str, tuple[int, int]] = {}
        self.included: dict[tuple[str, str], int] = {}
        self.kept: dict[tuple[str, str], dict[str, Any]] = {}
        self.references: dict[tuple[str, str], str] = {}

    # Setting the stage

    @initialize(
        included=st.tuples(pennies(3), st.just(0)),
        posted=st.tuples(pennies(9000), pennies(2000)),
        limit=st.integers(0, 3000),
        period=st.sampled_from(api_key.SPEND_PERIODS),
        per_window=st.sampled_from([None, None, 4]),
    )
    def enter(self, included, posted, limit, period, per_window):
        self.stage.do(self._enter(included, limit, period, per_window))
        for number, amount in enumerate(posted):
            if amount:
                self.happen([("credit", number, amount, "first")])

    async def _enter(self, included, limit, period, per_window) -> None:
        books = self.stage.books
        for included_limit in included:
            made = await accounts.create(books, f"{ids.new_id('x')}@example.com", plan="any")
            purse = Purse(made.id, included_limit)
            self.purses.append(purse)
            free, _ = await api_key.create(made, "no limit", requests_per_minute=per_window)
            tight, _ = await api_key.create(made, "limit", spend_limit_microusd=limit, spend_period=period)
            self.keys.append(Key(free.id, purse, None, None, per_window))
            self.keys.append(Key(tight.id, purse, limit, period, None))
        for key in self.keys:
            key.read = key.live()
        await self._beat()

    # What can happen to the books, alone or several in one transaction

    @rule(one=admissions)
    def admit(self, one):
        self.happen([one])

    @rule(one=admissions)
    def admit_more(self, one):
        self.happen([one])

    @precondition(lambda self: self.calls)
    @rule(one=settlements)
    def settle(self, one):
        self.happen([one])

    @precondition(lambda self: self.calls)
    @rule(one=settlements)
    def settle_twice(self, one):
        self.happen([one, one])

    @precondition(lambda self: self.calls)
    @rule(one=releases)
    def release(self, one):
        self.happen([one])

    @precondition(lambda self: self.calls)
    @rule(one=extensions)
    def extend(self, one):
        self.happen([one])

    @precondition(lambda self: self.calls)
    @rule(one=checkpoints)
    def checkpoint(self, one):
        self.happen([one])

    @precondition(lambda self: self.calls)
    @rule(one=expiries)
    def expire(self, one):
        self.happen([one])

    @precondition(lambda self: self.calls)
    @rule(one=hang_ups)
    def hang_up(self, one):
        self.happen([one])

    @rule(one=credits)
    def credit(self, one):
        self.happen([one])

    @rule(one=refunds)
    def refund(self, one):
        self.happen([one])

    @rule(several=st.lists(happenings, min_size=2, max_size=6))
    def group(self, several):
        self.happen(several)

    # What can happen around them

    @rule(ms=st.sampled_from([1, 999, WINDOW_MS - 1, WINDOW_MS, 3600 * 1000, DAY_MS, 31 * DAY_MS]))
    def tick(self, ms):
        self.now += ms

    @rule(number=st.integers(0, 1))
    def crash(self, number):
        self.beating.discard(self.owners[number])
        self.stage.do(self._beat())

    @rule(number=st.integers(0, 1))
    def come_back(self, number):
        self.beating.add(self.owners[number])
        self.stage.do(self._beat())

    @rule(number=which)
    def read_key(self, number):
        key = self.keys[number % len(self.keys)]
        key.read = key.live()

    @precondition(lambda self: len(self.calls) > 5)
    @rule(number=which)
    def revoke(self, number):
        key = self.keys[number % len(self.keys)]
        self.stage.do(api_key.revoke(key.purse.id, key.id))
        key.revoked = True

    @rule(number=which, limit=st.one_of(st.none(), pennies(4000)), period=st.sampled_from(api_key.SPEND_PERIODS))
    def change_key(self, number, limit, period):
        key = self.keys[number % len(self.keys)]
        key.limit, key.period = limit, None if limit is None else period
        key.version += 1
        self.sql(
            "UPDATE api_keys SET spend_limit_microusd = ?, spend_period = ?, version = version + 1 WHERE id = ?",
            key.limit, key.period, key.id,
        )

    @precondition(lambda self: len(self.calls) > 3)
    @rule(number=st.integers(0, 1), active=st.booleans())
    def change_account(self, number, active):
        purse = self.purses[number]
        purse.active = active
        purse.version += 1
        self.sql(
            "UPDATE accounts SET state = ?, version = version + 1 WHERE id = ?",
            "active" if active else "suspended", purse.id,
        )

    @rule(number=st.integers(0, 1), disputed=st.booleans())
    def dispute(self, number, disputed):
        self.purses[number].disputed = disputed
        self.sql("UPDATE wallets SET disputed = ? WHERE account_id = ?", int(disputed), self.purses[number].id)

    # Doing it, and comparing

    def happen(self, several: list[tuple[Any, ...]]) -> None:
        ops = [op for verb, *arguments in several if (op := getattr(self, f"_{verb}")(*arguments)) is not None]
        if not ops:
            return
        outcomes = self.stage.do(self.stage.books.run_group([make for make, _ in ops]))
        for (_, predicted), outcome in zip(ops, outcomes, strict=True):
            assert told(outcome) == told(predicted)

    @invariant()
    def books_are_as_predicted(self):
        if self.purses:
            found = self.stage.do(self.stage.books.run(self._look))
            assert found == self._predicted()

    def teardown(self):
        if not self.purses:
            return
        # The books name a wallet that is frozen for no payment's sake.
        for purse in self.purses:
            if purse.disputed:
                self.sql("UPDATE wallets SET disputed = 0 WHERE account_id = ?", purse.id)
                purse.disputed = False
        while any(one.state == "open" for one in self.calls):
            self.happen([("expire", 0, True)])
        self.books_are_as_predicted()
        assert all(purse.held == 0 for purse in self.purses)
        assert all(reserved == 0 for key in self.keys for reserved, _ in key.spend.values())
        self.stage.examples += 1
        if self.stage.examples % AUDIT_EVERY == 0:
            self.stage.audit()

    def sql(self, sql: str, *arguments: Any) -> None:
        def script():
            yield sql, arguments

        self.stage.do(self.stage.books.run(script))

    async def _beat(self) -> None:
        now = self.stage.books.now_ms_sql

        def script():
            for owner in self.owners:
                at = now if owner in self.beating else f"{now} - 60000"
                yield (
                    f"INSERT INTO processes (id, host, heartbeat_at_ms, started_at_ms) VALUES (?, 'h', {at}, {at})"
                    f" ON CONFLICT (id) DO UPDATE SET heartbeat_at_ms = {at}",
                    (owner,),
                )

        await self.stage.books.run(script)

    def _look(self):
        """Read everything the two accounts own, and hold the rules of the books against it."""
        found: dict[str, Any] = {}
        of = "account_id IN (?, ?)"
        mine = tuple(purse.id for purse in self.purses)
        wallets = yield (
            f"SELECT account_id, posted_microusd, held_microusd, seq FROM wallets WHERE {of} ORDER BY account_id",
            mine,
        )
        found["wallets"] = [tuple(row) for row in wallets]
        lines = yield (
            "SELECT account_id, seq, kind, reference, amount_microusd, balance_after_microusd FROM ledger"
            f" WHERE {of} ORDER BY account_id, seq",
            mine,
        )
        found["ledger"] = [tuple(row) for row in lines]
        calls = yield (
            "SELECT id, account_id, key_id, state, hold_microusd, included_month, spend_period, charged_microusd,"
            f" outcome_id FROM calls WHERE {of} ORDER BY id",
            mine,
        )
        found["calls"] = [tuple(row) for row in calls]
        rows = yield (f"SELECT account_id, month, used FROM included_calls WHERE {of} AND used > 0", mine)
        found["included"] = {(account, month): used for account, month, used in rows}
        rows = yield (
            "SELECT key_id, period, reserved_microusd, spent_microusd FROM key_spend WHERE key_id IN (?, ?, ?, ?)"
            " AND (reserved_microusd > 0 OR spent_microusd > 0)",
            tuple(key.id for key in self.keys),
        )
        found["spend"] = {(key, period): (reserved, spent) for key, period, reserved, spent in rows}
        rows = yield (
            f"SELECT account_id, key, fingerprint, call_id, state FROM idempotency_keys WHERE {of}", mine
        )
        found["kept"] = {(account, key): (prints, of_call, state) for account, key, prints, of_call, state in rows}
        rows = yield (
            "SELECT key_id, day, outcome, calls, output_tokens, cost_microusd, charged_microusd FROM usage_days"
            f" WHERE {of}",
            mine,
        )
        found["days"] = {tuple(row[:3]): tuple(row[3:]) for row in rows}
        rows = yield (
            "SELECT key_id, created_at_ms, state, status, repeated, output_tokens, cost_microusd, charged_microusd"
            f" FROM calls WHERE {of} AND state <> 'open'",
            mine,
        )
        found["ended"] = [tuple(row) for row in rows]
        self._rules(found)
        del found["days"], found["ended"]
        return found

    def _rules(self, found: dict[str, Any]) -> None:
        """Hold R1 to R4, and what a hold promises, against the rows alone."""
        overdrawn = {purse.id for purse in self.purses if purse.overdrawn}
        usage: dict[str, list[int]] = {}
        for account, posted, held, seq in found["wallets"]:
            lines = [line for line in found["ledger"] if line[0] == account]
            assert [line[1] for line in lines] == list(range(1, seq + 1))
            balance = 0
            for _, _, kind, reference, amount, after in lines:
                balance += amount
                assert after == balance
                if kind == ledger.USAGE:
                    usage.setdefault(reference, []).append(-amount)
            assert balance == posted
            assert held == sum(row[4] for row in found["calls"] if row[1] == account and row[3] == "open")
            assert posted - held >= 0 or account in overdrawn
        for call_id, _, _, _, hold, month, _, charged, _ in found["calls"]:
            assert usage.pop(call_id, []) == ([charged] if charged else [])
            assert 0 <= charged <= hold
            assert not (month and charged)
        assert not usage
        reserved: dict[tuple[str, str], int] = {}
        counted: dict[tuple[str, str], int] = {}
        for _, account, key, state, hold, month, period, _, _ in found["calls"]:
            if state == "open" and month is None and period is not None and hold:
                reserved[key, period] = reserved.get((key, period), 0) + hold
            if month is not None and state != "released":
                counted[account, month] = counted.get((account, month), 0) + 1
        assert {at: amounts[0] for at, amounts in found["spend"].items() if amounts[0]} == reserved
        assert found["included"] == counted
        days: dict[tuple[str, str, str], list[int]] = {}
        for key, at_ms, state, status, *amounts in found["ended"]:
            ended = "refused" if state == "refused" else "failed" if status >= 400 else "served"
            sums = days.setdefault((key, clock.day(at_ms), ended), [0, 0, 0, 0])
            sums[:] = [one + more for one, more in zip(sums, amounts, strict=True)]
        assert found["days"] == {at: tuple(sums) for at, sums in days.items()}

    def _predicted(self) -> dict[str, Any]:
        ledgers = []
        for purse in sorted(self.purses, key=lambda purse: purse.id):
            balance = 0
            for seq, (kind, reference, amount) in enumerate(purse.entries, 1):
                balance += amount
                ledgers.append((purse.id, seq, kind, reference, amount, balance))
        return {
            "wallets": sorted((purse.id, purse.posted, purse.held, len(purse.entries)) for purse in self.purses),
            "ledger": ledgers,
            "calls": sorted(
                (
                    one.id, one.purse.id, one.key.id, one.state, one.hold, one.month, one.period, one.charged,
                    one.outcome_id,
                )
                for one in self.calls
            ),
            "included": {at: used for at, used in self.included.items() if used},
            "spend": {
                (key.id, period): (reserved, spent)
                for key in self.keys for period, (reserved, spent) in key.spend.items() if reserved or spent
            },
            "kept": {at: (row["fingerprint"], row["call"], row["state"]) for at, row in self.kept.items()},
        }

    # The model: each verb gives the script to run and predicts what it returns or raises

    def _find(self, number: int) -> Call | None:
        """Return an open call, the newest first, or, for a high number or for want of one, any call."""
        opened = [one for one in reversed(self.calls) if one.state == "open"]
        among = opened if opened and number < 9 else self.calls
        return among[number % len(among)] if among else None

    def _admit(self, number, input_cost, price, limit, included_output_limit, claim, fresh) -> Op:
        key = self.keys[number % len(self.keys)]
        if fresh:
            key.read = key.live()
        read, purse = key.read, key.purse
        assert read is not None

        def affordable(available: int) -> tuple[int, int] | None:
            if input_cost + price > available:
                return None
            fits = min((available - input_cost) // price, limit) if price else limit
            return fits, input_cost + price * fits

        limits = [Limit(account_bucket(purse.id), CALLS_PER_WINDOW)]
        if key.per_window:
            limits.append(Limit(key_bucket(key.id), key.per_window))
        wanted = call.Admission(
            call_id=ids.new_id("req"), owner=self.owners[number % 2], key=read, surface="chat", path="/v1/x",
            offer="o", streamed=False, rates="{}", now_ms=self.now, limits=tuple(limits),
            month=clock.month(self.now), included_limit=purse.included_limit,
            included_output_limit=included_output_limit, output_limit=limit, hold=input_cost + price * limit,
            affordable=affordable, idempotency=claim,
        )
        return (lambda: call.admit(wanted)), self._admitted(key, wanted, limits)

    def _admitted(self, key: Key, wanted: call.Admission, limits: list[Limit]) -> Any:
        purse, claim = key.purse, wanted.idempotency
        at = (purse.id, claim.key) if claim else ("", "")
        if key.revoked or not purse.active:
            return UnknownKey()
        if (wanted.key.version, wanted.key.account_version) != (key.version, purse.version):
            return CallerChanged()
        if claim is not None:
            row = self.kept.get(at)
            if row is not None and (row["expires"] > self.now or row["state"] == "running"):
                if row["fingerprint"] != claim.fingerprint:
                    return IdempotencyKeyReused()
                return ("kept", row["call"], row["state"])
        for limit in limits:
            start, used = self.windows.get(limit.bucket, (0, 0))
            if start > self.now - WINDOW_MS and used >= limit.per_window:
                return RateLimited(limit.bucket, limit.per_window, start + WINDOW_MS)
        for limit in limits:
            self._count(limit.bucket, WINDOW_MS)
        made = Call(wanted.call_id, key, wanted.owner, "refused", idempotency_key=claim.key if claim else None)
        self.calls.append(made)
        if claim is not None:
            self.kept.pop(at, None)
        refusal = self._fund(made, wanted)
        if refusal is not None:
            return refusal
        made.state = "open"
        if claim is not None:
            self.kept[at] = {
                "fingerprint": claim.fingerprint, "call": made.id, "state": "running",
                "expires": self.now + idempotency.KEPT_MS,
            }
        return ("admitted", made.id, made.hold, made.month)

    def _fund(self, made: Call, wanted: call.Admission) -> InsufficientCredits | None:
        key, purse, month = made.key, made.purse, wanted.month
        period = None if key.limit is None else api_key.spend_period(key.period or "", self.now)
        used = self.included.get((purse.id, month), 0)
        included_left = used < purse.included_limit
        if included_left and wanted.included_output_limit is not None and purse.posted >= 0 and not purse.disputed:
            self.included[purse.id, month] = used + 1
            made.month, made.period = month, period
            return None
        left = None
        if key.limit is not None:
            left = key.limit - sum(key.spend.get(period or "", [0, 0]))

        def fits(amount: int) -> bool:
            return purse.has(amount) and (left is None or amount <= left)

        there = max(purse.posted - purse.held, 0)
        reason = "disputed" if purse.disputed else "debt" if purse.posted < 0 else "balance"
        if left is not None and max(left, 0) < there and not purse.disputed:
            there, reason = max(left, 0), "key_limit"
        hold = wanted.hold
        if not fits(hold) and not purse.disputed:
            lowered = wanted.affordable(there)
            hold = hold if lowered is None else lowered[1]
        if fits(hold):
            made.hold, made.period = hold, period
            purse.held += hold
            if period is not None:
                key.spend.setdefault(period, [0, 0])[0] += hold
            return None
        return InsufficientCredits(
            needed=0, available=there, reason=reason,
            included_too_small=included_left and wanted.included_output_limit is None,
        )

    def _count(self, bucket: str, window_ms: int) -> None:
        start, used = self.windows.get(bucket, (0, 0))
        running = start > self.now - window_ms
        self.windows[bucket] = (start, used + 1) if running else (self.now, 1)

    def _settle(self, number, cost, outcome, answer) -> Op | None:
        one = self._find(number)
        if one is None:
            return None
        ended = call.Outcome(id=f"{one.id}{outcome}", status=200, usage=Usage(5, 0, 0, 7), cost=cost, answer=answer)
        return (lambda: call.settle(one.id, ended)), self._settled(one, ended)

    def _settled(self, one: Call, ended: call.Outcome) -> Any:
        if one.state != "open":
            ours = one.state == "settled" and one.outcome_id == ended.id
            return ("settled", one.charged) if ours else None
        one.outcome_id = ended.id
        self._charge(one, "settled", min(ended.cost, one.hold))
        state = "failed"
        if ended.answer is not None:
            state = "lost" if ended.answer.body is None else "done"
        self._mark(one, state)
        return ("settled", one.charged)

    def _charge(self, one: Call, state: str, charged: int) -> None:
        one.state = state
        if one.month is not None:
            return
        one.charged = charged
        one.purse.held -= one.hold
        one.purse.posted -= charged
        if charged:
            one.purse.entries.append((ledger.USAGE, one.id, -charged))
        if one.period is not None:
            spend = one.key.spend.setdefault(one.period, [0, 0])
            spend[0] -= one.hold
            spend[1] += charged

    def _mark(self, one: Call, state: str | None) -> None:
        """Mark or free the call's idempotency key, if it still has it."""
        at = (one.purse.id, one.idempotency_key or "")
        if one.idempotency_key is not None and self.kept.get(at, {}).get("call") == one.id:
            if state is None:
                del self.kept[at]
            else:
                self.kept[at]["state"] = state

    def _release(self, number) -> Op | None:
        one = self._find(number)
        if one is None:
            return None
        return (lambda: call.release(one.id, FREE)), self._released(one, FREE.id)

    def _released(self, one: Call, outcome_id: str | None) -> bool:
        if one.state != "open":
            return False
        one.outcome_id = outcome_id
        self._mark(one, None)
        if one.month is not None:
            self.included[one.purse.id, one.month] -= 1
        self._charge(one, "released", 0)
        return True

    def _extend(self, number, more) -> Op | None:
        one = self._find(number)
        if one is None:
            return None
        return (lambda: call.extend(one.id, one.purse.id, more)), self._extended(one, more)

    def _extended(self, one: Call, more: int) -> Any:
        if one.state != "open" or one.month is not None:
            return False
        if one.period is not None and one.key.limit is not None:
            left = one.key.limit - sum(one.key.spend.get(one.period, [0, 0]))
            if more > left:
                return InsufficientCredits(needed=more, available=max(left, 0), reason="key_limit")
        if not one.purse.has(more):
            return InsufficientCredits(needed=more, available=0)
        one.hold += more
        one.purse.held += more
        if one.period is not None:
            one.key.spend.setdefault(one.period, [0, 0])[0] += more
        return True

    def _checkpoint(self, owner_number, marks) -> Op | None:
        if not self.calls:
            return None
        owner = self.owners[owner_number]
        latest = {self._find(number): mark for number, mark in marks.items()}
        lost = []
        for one, mark in latest.items():
            if one.state == "open" and one.owner == owner:
                one.checkpoint = mark
            else:
                lost.append(one.id)
        running = [(one.id, *mark) for one, mark in latest.items()]
        return (lambda: call.checkpoint(owner, running)), sorted(lost)

    def _expire(self, number, known_dead) -> Op | None:
        one = self._find(number)
        if one is None:
            return None
        dead = one.owner if known_dead else None
        return (
            (lambda: call.expire(self.stage.books, one.id, dead_owner=dead)),
            self._expired(one, known_dead or one.owner not in self.beating),
        )

    def _expired(self, one: Call, dead: bool) -> bool:
        if one.state != "open" or not dead:
            return False
        cost, tokens = one.checkpoint
        if tokens == 0:
            return self._released(one, None)
        self._mark(one, "failed")
        self._charge(one, "expired", min(cost, one.hold))
        return True

    def _hang_up(self, number, cost) -> Op | None:
        one = self._find(number)
        if one is None:
            return None
        free = call.Outcome(id=f"{one.id}free", status=499)
        paid = call.Outcome(id=f"{one.id}paid", status=499, cost=cost)
        at_ms = self.now
        bucket = f"hang-ups:{one.purse.id}"
        start, used = self.windows.get(bucket, (0, 0))
        if start > self.now - 3600 * 1000 and used >= HANG_UPS_PER_HOUR:
            self._settled(one, paid)
        else:
            self._count(bucket, 3600 * 1000)
            self._released(one, free.id)
        return (lambda: call.hang_up(one.purse.id, one.id, free, paid, at_ms)), None

    def _credit(self, number, amount, reference) -> Op:
        account_id = self.purses[number].id if number < 2 else "acc_nobody"

        def script():
            return wallet.credit(
                account_id, amount, ledger.ADJUSTMENT, f"{account_id}{reference}", ledger.PROMOTIONS, None, self.now
            )

        if number == 2:
            return script, NotFound()
        purse = self.purses[number]
        entry = (ledger.ADJUSTMENT, f"{account_id}{reference}")
        if entry not in [line[:2] for line in purse.entries]:
            purse.posted += amount
            purse.entries.append((*entry, amount))
        return script, purse.posted

    def _refund(self, number, amount) -> Op:
        """Take credit back, as a refund at the processor does, whatever is held or spent."""
        purse = self.purses[number]
        purse.posted -= amount
        purse.overdrawn = True
        reference = ids.new_id("ref")
        purse.entries.append(("refund", reference, -amount))

        def script():
            rows = yield (
                "UPDATE wallets SET posted_microusd = posted_microusd - ?, seq = seq + 1 WHERE account_id = ?"
                " RETURNING posted_microusd, seq",
                (amount, purse.id),
            )
            posted, seq = rows[0]
            yield from ledger.append(
                ledger.Entry(purse.id, seq, "refund", reference, -amount, posted, "refunds", None, self.now)
            )

        return script, None

    def _poison(self, number) -> Op:
        """Fail in the database after having written: the whole group must be done over, singly."""
        purse = self.purses[number % 2]

        def script():
            yield ("UPDATE wallets SET held_microusd = held_microusd + 1000000 WHERE account_id = ?", (purse.id,))
            yield ("UPDATE wallets SET held_microusd = -1 WHERE account_id = ?", (purse.id,))

        return script, "a constraint held"


def told(outcome: Any) -> Any:
    """Return what matters of a script's outcome, real or predicted."""
    match outcome:
        case call.Admitted():
            return ("admitted", outcome.call_id, outcome.hold, outcome.included_month)
        case call.Settled():
            return ("settled", outcome.charged)
        case idempotency.Kept():
            return ("kept", outcome.call_id, outcome.state)
        case InsufficientCredits():
            return (InsufficientCredits, outcome.reason, outcome.available, outcome.included_too_small)
        case RateLimited():
            return (RateLimited, outcome.bucket, outcome.limit, outcome.until_ms)
        case sqlite3.IntegrityError() | asyncpg.IntegrityConstraintViolationError():
            return "a constraint held"
        case Exception():
            return type(outcome)
    return outcome


@pytest.fixture
def stage(database_kind, new_database, monkeypatch):
    monkeypatch.setattr(call, "HANG_UPS_PER_HOUR", HANG_UPS_PER_HOUR)
    made = Stage()
    made.do(made.open(database_kind, new_database))
    yield made
    made.do(made.books.close())
    made.loop.close()


def test_no_order_of_events_makes_the_books_wrong(stage):
    """P1, P3, P4, P12 and R1 to R4, R6, R8 for any order of admissions, outcomes, crashes and repetitions."""
    machine = type("BooksOnOneDatabase", (Books,), {"stage": stage})
    run_state_machine_as_test(machine, settings=settings(stateful_step_count=40))
    stage.audit()
    assert stage.examples >= 1
