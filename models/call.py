"""Calls: one request and its row, from admission to outcome. The dashboard's usage row is this row.

A call is `open`, then exactly one of `settled`, `released`, `expired`; or it was `refused` and never
open. Every transition is an UPDATE that requires `state = 'open'`: one row changed means you own the
outcome, none means somebody decided already and nothing may be touched.

Locks are taken in the order rate window, included calls, wallet, key spending, ledger, and groups of calls
run in the order of accounts: the wallet's row is the mutex of everything an account owns. A call's own row
is written last by its admission and first by its outcome. An idempotency key is claimed first and written
last; only its own call ever holds it while it waits.

What ends a call adds it to the sums of its day (models/usage_day.py) in the same transaction, after the wallet
and the key's spending. Included calls and refused ones reach those sums without the wallet's row, and a group has
more calls of the account to come: what runs outside of the lanes (`expire`, `write_refusals`) therefore passes the
account's gate first, as the lanes' groups do.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from models import api_key, idempotency, ids, included_calls, rate_limit, usage_day, wallet
from models.clock import now_ms
from models.database import Database, Row, Script, Statement
from models.errors import (
    CallerChanged,
    DatabaseUnavailable,
    DomainError,
    IdempotencyKeyReused,
    InsufficientCredits,
    NotFound,
    RateLimited,
    UnknownKey,
)
from models.process import SILENT_MS
from models.usage import Usage

HANG_UPS_PER_HOUR = 20
HOLD_TRIES_MAX = 3
FROM_WALLET = "wallet"


# What there is a few of for each call are structs: a frozen dataclass takes as long to make as a statement.


class Admission(msgspec.Struct, frozen=True):
    """Ask to run a call.

    Amounts in micro-dollars. `hold` covers `output_limit` output tokens; when the wallet has less,
    `affordable(available)` gives the largest limit that fits and its hold, or None when not even the
    input and a few tokens do. `included_output_limit` is the limit that keeps an included call within
    the plan's cost, None when its input alone exceeds it. `input_tokens` is an estimate, which stands in
    the row until the provider's own count replaces it.
    """

    call_id: str
    owner: str
    key: api_key.LiveKey
    surface: str
    path: str
    offer: str
    streamed: bool
    rates: str
    now_ms: int
    limits: tuple[rate_limit.Limit, ...]
    month: str
    included_limit: int
    included_output_limit: int | None
    output_limit: int
    hold: int
    affordable: Callable[[int], tuple[int, int] | None]
    idempotency: idempotency.Claim | None = None
    input_tokens: int = 0


class Admitted(msgspec.Struct, frozen=True):
    """Say on what terms a call was admitted."""

    call_id: str
    account_id: str
    key_id: str
    hold: int
    output_limit: int
    included_month: str | None
    included_remaining: int | None
    spend_period: str | None
    standing: rate_limit.Standing | None
    idempotency_key: str | None = None


class Attempt(msgspec.Struct, frozen=True):
    """Record one try at an upstream."""

    upstream: str
    status: int | None
    started_at_ms: int
    ended_at_ms: int
    upstream_request_id: str | None = None


class Outcome(msgspec.Struct, frozen=True):
    """Say how a call ended. `id` is random, so that a commit whose answer was lost is recognised."""

    id: str
    status: int
    usage: Usage = Usage()
    cost: int = 0
    estimated: bool = False
    finish_reason: str | None = None
    error_code: str | None = None
    upstream: str | None = None
    upstream_model: str | None = None
    upstream_request_id: str | None = None
    latency_ms: int = 0
    first_byte_ms: int | None = None
    attempts: tuple[Attempt, ...] = ()
    answer: idempotency.StoredAnswer | None = None


class Settled(msgspec.Struct, frozen=True):
    """Say what a call cost its account, in micro-dollars; 0 for an included one."""

    charged: int
    charged_from: str | None
    house_loss: int


@dataclass(frozen=True, slots=True)
class Refusal:
    """Record a call of a known account that was turned away, at no cost."""

    call_id: str
    account_id: str
    key_id: str
    surface: str
    path: str
    offer: str
    streamed: bool
    status: int
    error_code: str
    created_at_ms: int
    latency_ms: int


def admit(wanted: Admission) -> Script[Admitted | InsufficientCredits | idempotency.Kept]:
    """Admit a call: key, rate, then an included call, else a hold under the key's limit and the wallet.

    An included call costs nothing and so does not count towards a key's spending limit.
    Returns `Kept` when its idempotency key was used before with the same request, and
    InsufficientCredits *as a value* when the credit is short: that refusal keeps its count in the rate
    window and its row. Raises UnknownKey, CallerChanged, RateLimited or IdempotencyKeyReused, upon
    which nothing is kept, and DatabaseUnavailable when an earlier try has admitted the call.
    """
    key = wanted.key
    if wanted.idempotency is not None:
        kept = yield from idempotency.claim(key.account_id, wanted.idempotency, wanted.call_id, wanted.now_ms)
        if kept is not None:
            if kept.call_id == wanted.call_id:
                raise _unsure()
            yield from _require_live(wanted)
            if kept.fingerprint != wanted.idempotency.fingerprint:
                raise IdempotencyKeyReused(wanted.idempotency.key)
            return kept
    try:
        standing = yield from _count(wanted)
    except DomainError:
        # By an earlier try, which took the last place in the window or came before the key was revoked.
        if (yield ("SELECT 1 FROM calls WHERE id = ?", (wanted.call_id,))):
            raise _unsure() from None
        raise
    period = None
    if key.spend_limit_microusd is not None:
        period = api_key.spend_period(key.spend_period or "month", wanted.now_ms)
    funded = yield from _fund(wanted, period)
    if isinstance(funded, InsufficientCredits):
        yield from usage_day.add(
            key.account_id, wanted.call_id, wanted.now_ms, wanted.offer, key.id, usage_day.REFUSED,
            usage_day.Sums(calls=1),
        )
        yield from _insert(wanted, _NO_CREDIT)
        if wanted.idempotency is not None:
            yield from idempotency.forget(key.account_id, wanted.idempotency.key, wanted.call_id)
        return funded
    hold, output_limit, used = funded
    yield from _insert(wanted, _Terms(
        state="open", hold=hold, output_limit=output_limit, month=None if used is None else wanted.month,
        period=period,
    ))
    remaining = yield from _included_remaining(wanted, used)
    return Admitted(
        call_id=wanted.call_id,
        account_id=key.account_id,
        key_id=key.id,
        hold=hold,
        output_limit=output_limit,
        included_month=None if used is None else wanted.month,
        included_remaining=remaining,
        spend_period=period,
        standing=standing,
        idempotency_key=wanted.idempotency.key if wanted.idempotency else None,
    )


def extend(admitted_id: str, account_id: str, more: int) -> Script[bool]:
    """Hold more for a call that is running on the wallet; return whether it still runs.

    Raises InsufficientCredits when the key's limit or the wallet does not have it.
    """
    rows = yield (
        "UPDATE calls SET hold_microusd = hold_microusd + ? WHERE id = ? AND state = 'open'"
        " AND included_month IS NULL RETURNING key_id, spend_period",
        (more, admitted_id),
    )
    if not rows:
        return False
    key_id, period = rows[0]
    if period is not None:
        rows = yield ("SELECT spend_limit_microusd FROM api_keys WHERE id = ?", (key_id,))
        # The outcome gives the whole hold back, so all of it is set aside even if the limit is gone by now.
        limit = api_key.NO_LIMIT if rows[0][0] is None else rows[0][0]
        yield from api_key.reserve_spending(key_id, period, limit, more)
    if (yield from wallet.reserve(account_id, more)):
        return True
    raise InsufficientCredits(needed=more, available=0)


def checkpoint(owner: str, running: Sequence[tuple[str, int, int]]) -> Script[list[str]]:
    """Write down how far calls have come: (call, micro-dollars, output tokens). Return the lost ones.

    A call is lost when somebody else has decided its outcome: its stream must be cut.
    """
    lost = []
    for call_id, cost, tokens in sorted(running):
        rows = yield (
            "UPDATE calls SET checkpoint_microusd = ?, checkpoint_output_tokens = ?"
            " WHERE id = ? AND state = 'open' AND owner = ? RETURNING 1",
            (cost, tokens, call_id, owner),
        )
        if not rows:
            lost.append(call_id)
    return lost


def settle(call_id: str, outcome: Outcome) -> Script[Settled | None]:
    """Charge a call that delivered; None when its outcome was decided by somebody else.

    Charged is the cost, but never more than was held; what is above it is the house's loss. An
    included call is charged nothing.
    """
    usage = outcome.usage
    rows = yield (
        "UPDATE calls SET state = 'settled',"
        " charged_microusd = CASE WHEN included_month IS NOT NULL THEN 0"
        " WHEN hold_microusd < ? THEN hold_microusd ELSE ? END,"
        " house_loss_microusd = CASE WHEN included_month IS NULL AND ? > hold_microusd"
        " THEN ? - hold_microusd ELSE 0 END,"
        " charged_from = CASE WHEN included_month IS NOT NULL THEN 'included' ELSE 'wallet' END,"
        " cost_microusd = ?, estimated = ?, input_tokens = ?, cached_input_tokens = ?, cache_write_tokens = ?,"
        " output_tokens = ?, reasoning_tokens = ?, images = ?, audio_ms = ?, characters = ?,"
        f" {_ENDED} WHERE id = ? AND state = 'open'"
        " RETURNING account_id, key_id, hold_microusd, included_month, spend_period, charged_microusd,"
        " charged_from, house_loss_microusd, idempotency_key, offer, created_at_ms",
        (
            outcome.cost, outcome.cost, outcome.cost, outcome.cost, outcome.cost, int(outcome.estimated),
            usage.input_tokens, usage.cached_input_tokens, usage.cache_write_tokens, usage.output_tokens,
            usage.reasoning_tokens, usage.images, usage.audio_ms, usage.characters,
            *_ended(outcome), call_id,
        ),
    )
    if not rows:
        return (yield from _settled_by_us(call_id, outcome.id))
    account_id, key_id, hold, month, period, charged, charged_from, loss, idempotency_key, offer, at_ms = rows[0]
    if month is None:
        yield from wallet.settle(account_id, hold, charged, call_id, now_ms())
        if period is not None:
            yield from api_key.settle_spending(key_id, period, hold, charged)
    yield from usage_day.add(
        account_id, call_id, at_ms, offer, key_id, usage_day.outcome_of(outcome.status),
        usage_day.Sums(
            1, usage.input_tokens + usage.cache_write_tokens, usage.cached_input_tokens, usage.output_tokens,
            outcome.cost, charged,
        ),
    )
    yield from _note_attempts(call_id, outcome.attempts)
    if idempotency_key is not None:
        if outcome.answer is None:
            yield from idempotency.fail(account_id, idempotency_key, call_id)
        else:
            yield from idempotency.keep(account_id, idempotency_key, call_id, outcome.answer)
    return Settled(charged, charged_from, loss)


def release(call_id: str, outcome: Outcome) -> Script[bool]:
    """End a call that delivered nothing, at no cost, the included call given back.

    Its status is an error's: an answer that could not be charged was not given. Returns false when its outcome was
    decided by somebody else.
    """
    if outcome.status < usage_day.ERROR_STATUS_LEAST:
        outcome = msgspec.structs.replace(outcome, status=503, error_code="service_unavailable", finish_reason=None)
    rows = yield (
        f"UPDATE calls SET state = 'released', input_tokens = 0, {_ENDED} WHERE id = ? AND state = 'open'"
        " RETURNING account_id, key_id, hold_microusd, included_month, spend_period, idempotency_key, offer,"
        " created_at_ms",
        (*_ended(outcome), call_id),
    )
    if not rows:
        return False
    account_id, key_id, hold, month, period, idempotency_key, offer, created_at_ms = rows[0]
    yield from _give_back(account_id, key_id, hold, month, period)
    yield from usage_day.add(
        account_id, call_id, created_at_ms, offer, key_id, usage_day.FAILED, usage_day.Sums(calls=1)
    )
    if idempotency_key is not None:
        yield from idempotency.forget(account_id, idempotency_key, call_id)
    yield from _note_attempts(call_id, outcome.attempts)
    return True


def hang_up(account_id: str, call_id: str, free: Outcome, paid: Outcome, at_ms: int) -> Script[None]:
    """End a call whose client left before the first token.

    It is released, but an account that does so more than 20 times an hour pays its input (or keeps
    the included call spent) from then on: the provider bills us for each.
    """
    window = rate_limit.Limit(f"hang-ups:{account_id}", HANG_UPS_PER_HOUR)
    try:
        yield from rate_limit.count(window, at_ms, window_ms=3600 * 1000)
    except RateLimited:
        yield from settle(call_id, paid)
        return
    yield from release(call_id, free)


def expire(database: Database, call_id: str, *, dead_owner: str | None = None) -> Script[bool]:
    """End a call whose process is gone: charged at its checkpoint, or released when there is none.

    Requires the owner's heartbeat to have stopped, unless `dead_owner` is known to be gone.
    """
    gone, arguments = (
        ("owner = ?", (dead_owner,))
        if dead_owner is not None
        else (
            "NOT EXISTS (SELECT 1 FROM processes p WHERE p.id = calls.owner"
            f" AND p.heartbeat_at_ms >= {database.now_ms_sql} - {SILENT_MS})",
            (),
        )
    )
    at_ms = now_ms()
    rows = yield (
        "UPDATE calls SET state = CASE WHEN checkpoint_output_tokens > 0 THEN 'expired' ELSE 'released' END,"
        " charged_microusd = CASE WHEN included_month IS NOT NULL OR checkpoint_output_tokens = 0 THEN 0"
        " WHEN hold_microusd < checkpoint_microusd THEN hold_microusd ELSE checkpoint_microusd END,"
        " charged_from = CASE WHEN checkpoint_output_tokens = 0 THEN NULL"
        " WHEN included_month IS NOT NULL THEN 'included' ELSE 'wallet' END,"
        " cost_microusd = CASE WHEN checkpoint_output_tokens = 0 THEN 0 ELSE checkpoint_microusd END,"
        " input_tokens = CASE WHEN checkpoint_output_tokens = 0 THEN 0 ELSE input_tokens END,"
        " output_tokens = checkpoint_output_tokens, estimated = 1,"
        " status = 502, error_code = 'upstream_error', latency_ms = ? - created_at_ms, finished_at_ms = ?"
        f" WHERE id = ? AND state = 'open' AND {gone}"
        " RETURNING state, account_id, key_id, hold_microusd, included_month, spend_period, idempotency_key,"
        " charged_microusd, offer, created_at_ms, input_tokens, output_tokens, cost_microusd",
        (at_ms, at_ms, call_id, *arguments),
    )
    if not rows:
        return False
    state, account_id, key_id, hold, month, period, idempotency_key, charged, *counted = rows[0]
    offer, created_at_ms, input_tokens, output_tokens, cost = counted
    if state == "released":
        yield from _give_back(account_id, key_id, hold, month, period)
    elif month is None:
        yield from wallet.settle(account_id, hold, charged, call_id, at_ms)
        if period is not None:
            yield from api_key.settle_spending(key_id, period, hold, charged)
    yield from usage_day.add(
        account_id, call_id, created_at_ms, offer, key_id, usage_day.FAILED,
        usage_day.Sums(1, input_tokens, 0, output_tokens, cost, charged),
    )
    if idempotency_key is not None:
        end = idempotency.forget if state == "released" else idempotency.fail
        yield from end(account_id, idempotency_key, call_id)
    return True


def write_refusals(refusals: Iterable[tuple[Refusal, int]]) -> Script[None]:
    """Write rows of refused calls of one account, or count them up: each with how often it was repeated since."""
    for refusal, repeated in refusals:
        rows = yield (
            "INSERT INTO calls (id, account_id, key_id, surface, path, offer, streamed, state, status, error_code,"
            " repeated, created_at_ms, finished_at_ms, latency_ms)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, 'refused', ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE"
            " SET repeated = calls.repeated + excluded.repeated WHERE calls.state = 'refused'"
            " RETURNING created_at_ms",
            (
                refusal.call_id, refusal.account_id, refusal.key_id, refusal.surface, refusal.path,
                refusal.offer, int(refusal.streamed), refusal.status, refusal.error_code, repeated,
                refusal.created_at_ms, refusal.created_at_ms + refusal.latency_ms, refusal.latency_ms,
            ),
        )
        if rows:
            yield from usage_day.add(
                refusal.account_id, refusal.call_id, rows[0][0], refusal.offer, refusal.key_id,
                usage_day.REFUSED, usage_day.Sums(calls=repeated),
            )


async def account_of(database: Database, call_id: str) -> str | None:
    """Return whose call it is."""
    rows = await database.fetch("SELECT account_id FROM calls WHERE id = ?", (call_id,))
    return rows[0]["account_id"] if rows else None


async def open_of_dead(database: Database) -> list[tuple[str, str]]:
    """Return (call, owner) of open calls whose owner has been silent too long, oldest first."""
    rows = await database.fetch(
        f"WITH {_OPEN_NOW} SELECT c.id, c.owner FROM open_now c LEFT JOIN processes p ON p.id = c.owner"
        f" WHERE p.id IS NULL OR p.heartbeat_at_ms < {database.now_ms_sql} - {SILENT_MS} ORDER BY c.id LIMIT 1000"
    )
    return [(row["id"], row["owner"]) for row in rows]


async def open_of(database: Database, owner: str) -> list[str]:
    """Return the open calls of one process."""
    rows = await database.fetch("SELECT id FROM calls WHERE owner = ? AND state = 'open' ORDER BY id", (owner,))
    return [row["id"] for row in rows]


@dataclass(frozen=True, slots=True)
class Filter:
    """Narrow a list of calls. Times in milliseconds since 1970; None does not narrow.

    `outcome` is one of models.usage_day.OUTCOMES, or "running".
    """

    key_id: str | None = None
    offer: str | None = None
    status: int | None = None
    state: str | None = None
    outcome: str | None = None
    from_ms: int | None = None
    until_ms: int | None = None

    @property
    def outcomes(self) -> tuple[str, ...] | None:
        """Return in what sums the calls that match can stand, None for in any."""
        if self.outcome is not None:
            return (self.outcome,)
        if self.state is not None:
            return _OUTCOMES_OF_STATE[self.state]
        if self.status is None:
            return None
        return (usage_day.SERVED,) if self.status < usage_day.ERROR_STATUS_LEAST else _NOT_SERVED

    @property
    def is_sparse(self) -> bool:
        """Return whether what matches may lie far apart."""
        return any(value is not None for value in (self.key_id, self.offer, self.status, self.state, self.outcome))

    @property
    def is_of_errors(self) -> bool:
        """Return whether only calls match that an index of their own holds."""
        return (
            self.outcome in _NOT_SERVED or (self.status or 0) >= usage_day.ERROR_STATUS_LEAST
            or self.state in ("refused", "released", "expired")
        )

    @property
    def is_covered(self) -> bool:
        """Return whether an index alone tells what matches, so that no row of others is read."""
        return self.status is None and (
            self.is_of_errors or (self.outcome in (None, RUNNING) and self.state in (None, "open"))
        )


@dataclass(frozen=True, slots=True)
class Page:
    """Hold some calls of a list. `reached` is an id to go on from when not all were looked through."""

    rows: Sequence[Row]
    reached: str | None = None


async def page(
    database: Database,
    account_id: str,
    narrowed: Filter,
    *,
    limit: int,
    after: str | None = None,
    before: str | None = None,
    ascending: bool = False,
    columns: Sequence[str] | None = None,
    deadline_s: float = 5,
) -> Page:
    """Return a page of an account's calls by keyset, newest first unless `ascending`.

    `after` and `before` are the ids next to which the page lies, in the order asked for. What it costs is bounded
    whatever is asked for and however many calls there are: only days that have any that match are read, and once
    a great many calls have been looked through the page ends, says how far it has `reached`, and may be short.

    A page of very many rows names its `columns`, `id` among them, and has its rows by those names.
    """
    scan = _scan(database, account_id, narrowed, after, before, ascending, columns, deadline_s)
    if narrowed.is_sparse:
        found = await _scattered(scan, account_id, narrowed, limit)
    else:
        found = Page(await scan.read(limit))
    return replace(found, rows=list(reversed(found.rows))) if before is not None else found


async def recent(
    database: Database,
    account_id: str,
    narrowed: Filter,
    *,
    limit: int,
    after: str | None = None,
    before: str | None = None,
    ascending: bool = False,
    deadline_s: float = 5,
) -> Sequence[Row]:
    """Return a page that is as long as it can be: what a page does not look through, the next one does."""
    rows: list[Row] = []
    while True:
        found = await page(
            database, account_id, narrowed, limit=limit - len(rows), after=after, before=before,
            ascending=ascending, deadline_s=deadline_s,
        )
        rows = [*found.rows, *rows] if before is not None else [*rows, *found.rows]
        if found.reached is None or len(rows) >= limit:
            return rows
        after, before = (None, found.reached) if before is not None else (found.reached, None)


async def find(database: Database, account_id: str, call_id: str) -> Row:
    """Return one call of an account. Raises NotFound."""
    rows = await database.fetch("SELECT * FROM calls WHERE id = ? AND account_id = ?", (call_id, account_id))
    if not rows:
        raise NotFound(f"there is no call {call_id}")
    return rows[0]


async def several(database: Database, account_id: str, call_ids: Sequence[str]) -> dict[str, Row]:
    """Return those of some calls that are an account's, by their ids."""
    if not call_ids:
        return {}
    marks = ", ".join("?" * len(call_ids))
    rows = await database.fetch(
        f"SELECT * FROM calls WHERE account_id = ? AND id IN ({marks})", (account_id, *call_ids)
    )
    return {row["id"]: row for row in rows}


async def attempts_of(database: Database, call_id: str) -> Sequence[Row]:
    """Return the tries at upstreams of a call that needed more than one, in order."""
    return await database.fetch("SELECT * FROM attempts WHERE call_id = ? ORDER BY n", (call_id,))


RUNNING = "running"
# As it stands in the indexes of lists. On PostgreSQL it has an order of its own there: by that of the primary key
# it would rather read the calls of all accounts, the latest first, until it has met enough of one.
CALL_ID_SQL = {"sqlite": "id", "postgres": 'id COLLATE "C"'}
# By their own index: asked for in order or with anything else, SQLite would rather read every call there ever was.
_OPEN_NOW = "open_now AS MATERIALIZED (SELECT * FROM calls WHERE state = 'open' AND owner > '')"
_NOT_SERVED = (usage_day.FAILED, usage_day.REFUSED)
_OUTCOMES_OF_STATE = {
    "open": (RUNNING,), "settled": (usage_day.SERVED, usage_day.FAILED), "released": (usage_day.FAILED,),
    "expired": (usage_day.FAILED,), "refused": (usage_day.REFUSED,),
}
# Word for word the condition of the partial index on errors.
_IS_ERROR = "status >= 400"
_CONDITION_OF_OUTCOME = {
    usage_day.SERVED: "status < 400",
    usage_day.FAILED: f"{_IS_ERROR} AND state <> 'refused'",
    usage_day.REFUSED: f"{_IS_ERROR} AND state = 'refused'",
    RUNNING: "state = 'open'",
}
# An id is made before anything else, and its call is admitted once its body has come: never as late as this.
_ID_EARLIER_MS = 3600 * 1000
# Two clocks of one host may differ by a little.
_ID_LATER_MS = 60 * 1000
_DAYS_AT_FIRST, _DAYS_AT_ONCE = 7, 62
# Looked through first, for what is not rare; a page looks through no more than the second figure. Where an index
# tells what matches, a call that does not costs a tenth of one whose row has to be read.
_CALLS_AT_FIRST, _CALLS_AT_MOST = 2_000, 200_000
_ROWS_AT_FIRST, _ROWS_AT_MOST = 500, 10_000
_WINDOWS_AT_ONCE = 20


@dataclass(frozen=True, slots=True)
class _Scan:
    """Read calls that match by their ids, from one end. `base` are the conditions that `index` is made for.

    `id` is how it has the id.
    """

    database: Database
    index: str
    id: str
    base: list[Statement]
    narrowing: list[Statement]
    upwards: bool
    columns: Sequence[str] | None
    deadline_s: float

    async def read(self, limit: int, *more: Statement) -> Sequence[Row]:
        """Return the first rows that match more conditions."""
        conditions, arguments = _joined([*self.base, *self.narrowing, *more])
        return await self._rows(
            f"SELECT {self._columns} FROM {self._calls} WHERE {conditions}"
            f" ORDER BY {self.id} {self._order} LIMIT ?",
            (*arguments, limit),
        )

    async def read_windows(self, limit: int, windows: Sequence[_Window], *more: Statement) -> list[Row]:
        """Return the first rows that match in some ranges, in one look: each hop to a database takes its time."""
        parts, values = [], []
        for window in windows:
            conditions, arguments = _joined([*self.base, *self.narrowing, *more, window.ids])
            parts.append(
                f"SELECT * FROM (SELECT {self._columns} FROM {self._calls} WHERE {conditions}"
                f" ORDER BY {self.id} {self._order} LIMIT ?) AS window_{len(parts)}"
            )
            values += [*arguments, limit if window.most is None else min(limit, window.most)]
        rows = await self._rows(" UNION ALL ".join(parts), tuple(values))
        return sorted(rows, key=lambda row: row["id"], reverse=not self.upwards)[:limit]

    async def edge(self, count: int, *more: Statement) -> str | None:
        """Return the id of the last of so many calls, whether they match or not; None if there are fewer."""
        conditions, arguments = _joined([*self.base, *more])
        rows = await self.database.report(
            f"SELECT id FROM {self._calls} WHERE {conditions} ORDER BY {self.id} {self._order} LIMIT 1 OFFSET ?",
            (*arguments, count - 1), deadline_s=self.deadline_s,
        )
        return rows[0]["id"] if rows else None

    async def read_open(self, limit: int) -> Sequence[Row]:
        """Return the first rows of running calls, found by being open: there are never many of those."""
        conditions, arguments = _joined([*self.base, *self.narrowing])
        return await self.database.report(
            f"WITH {_OPEN_NOW} SELECT * FROM open_now WHERE {conditions} ORDER BY {self.id} {self._order} LIMIT ?",
            (*arguments, limit), deadline_s=self.deadline_s,
        )

    def until(self, call_id: str) -> Statement:
        """Return the condition that a scan ends with a call."""
        return f"{self.id} {'<=' if self.upwards else '>='} ?", (call_id,)

    async def _rows(self, sql: str, arguments: tuple[Any, ...]) -> Sequence[Row]:
        if self.columns is None:
            return await self.database.report(sql, arguments, deadline_s=self.deadline_s)
        return await self.database.report_in_bulk(sql, arguments, self.columns, deadline_s=self.deadline_s)

    @property
    def _columns(self) -> str:
        return "*" if self.columns is None else ", ".join(self.columns)

    @property
    def _calls(self) -> str:
        # SQLite has no statistics, and would look for a failure of some model in the index of all calls.
        return f"calls INDEXED BY {self.index}" if self.database.dialect == "sqlite" else "calls"

    @property
    def _order(self) -> str:
        return "ASC" if self.upwards else "DESC"


def _scan(
    database: Database, account_id: str, narrowed: Filter, after: str | None, before: str | None, ascending: bool,
    columns: Sequence[str] | None, deadline_s: float,
) -> _Scan:
    call_id = CALL_ID_SQL[database.dialect]
    base: list[Statement] = [("account_id = ?", (account_id,))]
    if narrowed.is_of_errors:
        base.append((_IS_ERROR, ()))
    # The bounds of time by id, which is what the index is made of; and then to the millisecond.
    if narrowed.from_ms is not None:
        base.append((f"{call_id} >= ?", (ids.first_id_at("req", narrowed.from_ms - _ID_EARLIER_MS),)))
    if narrowed.until_ms is not None:
        base.append((f"{call_id} < ?", (ids.first_id_at("req", narrowed.until_ms + _ID_LATER_MS),)))
    if after is not None:
        base.append((f"{call_id} {'>' if ascending else '<'} ?", (after,)))
    if before is not None:
        base.append((f"{call_id} {'<' if ascending else '>'} ?", (before,)))
    narrowing: list[Statement] = [
        (condition, (value,)) for condition, value in (
            ("key_id = ?", narrowed.key_id), ("offer = ?", narrowed.offer), ("status = ?", narrowed.status),
            ("state = ?", narrowed.state), ("created_at_ms >= ?", narrowed.from_ms),
            ("created_at_ms < ?", narrowed.until_ms),
        ) if value is not None
    ]
    if narrowed.outcome is not None:
        narrowing.append((_CONDITION_OF_OUTCOME[narrowed.outcome], ()))
    index = "calls_failed" if narrowed.is_of_errors else "calls_account"
    return _Scan(
        database, index, call_id, base, narrowing, upwards=ascending != (before is not None), columns=columns,
        deadline_s=deadline_s,
    )


def _joined(conditions: Sequence[Statement]) -> tuple[str, list[Any]]:
    return " AND ".join(sql for sql, _ in conditions), [value for _, values in conditions for value in values]


async def _scattered(scan: _Scan, account_id: str, narrowed: Filter, limit: int) -> Page:
    """Return the first rows that match, wherever they are: the running ones, and those that have ended."""
    outcomes = narrowed.outcomes
    # First the running ones: one that ends meanwhile is then found twice, and never missed.
    may_run = outcomes in (None, (RUNNING,)) and narrowed.status is None
    found = {row["id"]: row for row in (await scan.read_open(limit) if may_run else ())}
    reached = None
    if outcomes != (RUNNING,):
        ended, reached = await _ended_calls(scan, account_id, narrowed, limit)
        found |= {row["id"]: row for row in ended}
    rows = sorted(found.values(), key=lambda row: row["id"], reverse=not scan.upwards)
    if reached is not None:
        # What lies beyond belongs to the next page, also what is known of it already.
        rows = [row for row in rows if (row["id"] <= reached if scan.upwards else row["id"] >= reached)]
    return Page(rows[:limit], None if len(rows) >= limit else reached)


async def _ended_calls(
    scan: _Scan, account_id: str, narrowed: Filter, limit: int
) -> tuple[list[Row], str | None]:
    """Return the first rows that match of calls that have ended, and how far it looked, None for to the end.

    First what lies next, in which anything common is found; then day by day that has any.
    """
    ended: Statement = "state <> 'open'", ()
    at_first, at_most = (
        (_CALLS_AT_FIRST, _CALLS_AT_MOST) if narrowed.is_covered else (_ROWS_AT_FIRST, _ROWS_AT_MOST)
    )
    edge = await scan.edge(at_first)
    if edge is None:
        return list(await scan.read(limit, ended)), None
    rows = list(await scan.read(limit, ended, scan.until(edge)))
    left = at_most - at_first
    if len(rows) >= limit:
        return rows, None
    async for windows in _windows(scan, account_id, narrowed, edge):
        while windows:
            if left < at_first:
                return rows, windows[0].near
            first, missing = windows[0], limit - len(rows)
            if first.calls > left:
                # No more than that: the sums count a refusal as often as it happened, and all of the day.
                cut = await scan.edge(left, first.ids)
                if cut is not None:
                    return rows + list(await scan.read(missing, ended, first.ids, scan.until(cut))), cut
            together, left = _fitting(windows, missing, left, at_first)
            rows += await scan.read_windows(missing, together, ended)
            if len(rows) >= limit:
                return rows, None
            windows = windows[len(together):]
    return rows, None


def _fitting(
    windows: Sequence[_Window], missing: int, left: int, least: int
) -> tuple[Sequence[_Window], int]:
    """Return the first windows that are looked through at once, and how many calls may be looked through after.

    They end where their days have as many calls that match as are missing, and where fewer than `least` may be.
    """
    matching, together = 0, 0
    for window in windows[:_WINDOWS_AT_ONCE]:
        if together and (matching >= missing or left < max(window.calls, least)):
            break
        matching, together = matching + window.matching, together + 1
        left = max(left - window.calls, left // 2)
    return windows[:together], left


@dataclass(frozen=True, slots=True)
class _Window:
    """Hold ids between which calls may match: how many calls there are at most, how many of its days match, where
    it begins, and, if it is known, how many match at most, after which the rest need not be looked through.
    """

    ids: Statement
    calls: int
    matching: int
    near: str
    most: int | None


async def _windows(scan: _Scan, account_id: str, narrowed: Filter, edge: str) -> AsyncIterator[list[_Window]]:
    """Give the ranges of ids beyond an edge that may match, in the order of the scan, some at a time."""
    first_ms, last_ms = _span(scan, narrowed, edge)
    part = usage_day.Part(
        None if first_ms is None else usage_day.day_of(first_ms),
        None if last_ms is None else usage_day.day_of(last_ms),
        narrowed.key_id, narrowed.offer, narrowed.outcomes,
    )
    yesterday, at_once = usage_day.days_before(usage_day.day_of(now_ms()), 1), _DAYS_AT_FIRST
    while days := await usage_day.days_with(
        scan.database, account_id, part, among=_NOT_SERVED if narrowed.is_of_errors else None,
        newest_first=not scan.upwards, limit=at_once, deadline_s=scan.deadline_s,
    ):
        runs, windows, there_are_more = _runs(days), [], len(days) == at_once
        for n, run in enumerate(runs):
            start = ids.first_id_at("req", usage_day.start_of(run.from_day) - _ID_EARLIER_MS)
            end = ids.first_id_at("req", usage_day.start_of(run.until_day) + usage_day.DAY_MS + _ID_LATER_MS)
            # Days reach into one another, and none is to be read twice.
            if scan.upwards:
                near, edge = max(start, edge), max(end, edge)
                least, greatest = (">", near), ("<", end)
            else:
                near, edge = min(end, edge), min(start, edge)
                least, greatest = (">=", start), ("<", near)
            most, calls = None, run.calls
            # What lies in this window of the day beyond is read here, so it must be known where that is.
            beyond = runs[n + 1] if n + 1 < len(runs) else None
            if beyond is not None or not there_are_more:
                first_id, last_id = run.first_id, run.last_id
                if beyond is not None and beyond.first_id < end and beyond.last_id >= start:
                    first_id, last_id = min(first_id, beyond.first_id), max(last_id, beyond.last_id)
                elif run.until_day < yesterday:  # today's go on, and yesterday's may
                    most = run.matching
                if first_id > least[1]:
                    least = ">=", first_id
                if last_id < greatest[1]:
                    greatest = "<=", last_id
                calls = 1 if first_id == last_id else calls
            inside = f"{scan.id} {least[0]} ? AND {scan.id} {greatest[0]} ?", (least[1], greatest[1])
            windows.append(_Window(inside, calls, run.matching, near, most))
        yield windows
        if not there_are_more:
            return
        reached, at_once = days[-1].day, _DAYS_AT_ONCE
        part = replace(
            part,
            from_day=usage_day.days_before(reached, -1) if scan.upwards else part.from_day,
            until_day=part.until_day if scan.upwards else usage_day.days_before(reached, 1),
        )


def _span(scan: _Scan, narrowed: Filter, cursor: str) -> tuple[int | None, int | None]:
    """Return between which moments the calls of a page began, as far as that is known."""
    first_ms = narrowed.from_ms
    last_ms = None if narrowed.until_ms is None else narrowed.until_ms - 1
    try:
        at_ms = ids.made_at_ms(cursor)
    except ValueError:
        at_ms = None
    if at_ms is None:
        return first_ms, last_ms
    if scan.upwards:
        return max(first_ms or 0, at_ms - _ID_LATER_MS), last_ms
    latest_ms = at_ms + _ID_EARLIER_MS
    return first_ms, latest_ms if last_ms is None else min(last_ms, latest_ms)


@dataclass(frozen=True, slots=True)
class _Run:
    """Hold days that lie side by side, as `usage_day.Day` holds one."""

    from_day: str
    until_day: str
    matching: int
    calls: int
    first_id: str
    last_id: str

    def touches(self, other: _Run) -> bool:
        """Return whether no day lies between."""
        return (
            other.until_day == usage_day.days_before(self.from_day, 1)
            or self.until_day == usage_day.days_before(other.from_day, 1)
        )

    def with_(self, other: _Run) -> _Run:
        """Return both as one."""
        return _Run(
            min(self.from_day, other.from_day), max(self.until_day, other.until_day),
            self.matching + other.matching, self.calls + other.calls,
            min(self.first_id, other.first_id), max(self.last_id, other.last_id),
        )


def _runs(days: Sequence[usage_day.Day]) -> list[_Run]:
    """Join days that lie side by side as long as they are few calls."""
    runs: list[_Run] = []
    for day in days:
        here = _Run(day.day, *day)
        if runs and runs[-1].calls + here.calls <= _ROWS_AT_MOST and runs[-1].touches(here):
            runs[-1] = runs[-1].with_(here)
        else:
            runs.append(here)
    return runs


_ENDED = (
    "outcome_id = ?, status = ?, finish_reason = ?, error_code = ?, upstream = ?, upstream_model = ?,"
    " upstream_request_id = ?, latency_ms = ?, first_byte_ms = ?, finished_at_ms = ?"
)


def _ended(outcome: Outcome) -> tuple[Any, ...]:
    return (
        outcome.id, outcome.status, outcome.finish_reason, outcome.error_code, outcome.upstream,
        outcome.upstream_model, outcome.upstream_request_id, outcome.latency_ms, outcome.first_byte_ms, now_ms(),
    )


@dataclass(frozen=True, slots=True)
class _Terms:
    """Hold what an admission adds to a call's row."""

    state: str
    hold: int = 0
    output_limit: int | None = None
    month: str | None = None
    period: str | None = None
    status: int | None = None
    error_code: str | None = None


_NO_CREDIT = _Terms("refused", status=402, error_code="insufficient_credits")


def _count(wanted: Admission) -> Script[rate_limit.Standing | None]:
    """Count a call in its rate windows if its key may be used; return where it stands in the fullest.

    Raises RateLimited, UnknownKey or CallerChanged.
    """
    if not wanted.limits:
        yield from _require_live(wanted)
        return None
    first, *others = wanted.limits
    try:
        # One statement asks for both, and what it refuses has not been written.
        standing = yield from rate_limit.count(first, wanted.now_ms, provided=_live(wanted))
    except RateLimited:
        yield from _require_live(wanted)
        raise
    for limit in others:
        counted = yield from rate_limit.count(limit, wanted.now_ms)
        if counted.remaining < standing.remaining:
            standing = counted
    return standing


def _live(wanted: Admission) -> Statement:
    key = wanted.key
    return api_key.LIVE_AND_UNCHANGED, (key.id, key.version, key.account_version, wanted.now_ms)


def _insert(wanted: Admission, terms: _Terms) -> Script[None]:
    """Write the call's row. Raises DatabaseUnavailable when an earlier try has written it."""
    open_now = terms.state == "open"
    rows = yield (
        "INSERT INTO calls (id, account_id, key_id, surface, path, offer, streamed, state, rates, owner,"
        " idempotency_key, input_tokens, hold_microusd, output_limit, included_month, spend_period, status,"
        " error_code, created_at_ms, finished_at_ms, latency_ms)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
        " ON CONFLICT (id) DO NOTHING RETURNING 1",
        (
            wanted.call_id, wanted.key.account_id, wanted.key.id, wanted.surface, wanted.path, wanted.offer,
            int(wanted.streamed), terms.state, wanted.rates if open_now else None, wanted.owner,
            wanted.idempotency.key if wanted.idempotency else None, wanted.input_tokens if open_now else 0,
            terms.hold, terms.output_limit, terms.month, terms.period, terms.status, terms.error_code,
            wanted.now_ms, None if open_now else now_ms(), None if open_now else now_ms() - wanted.now_ms,
        ),
    )
    if not rows:
        raise _unsure()


def _unsure() -> DatabaseUnavailable:
    """Return the refusal of a try whose first one committed, but its answer was lost.

    Whoever waits gets a 503, and the call is released.
    """
    return DatabaseUnavailable("it is not known whether the call was admitted")


def _require_live(wanted: Admission) -> Script[None]:
    """Raise UnknownKey or CallerChanged unless the key may be used and is the one the caller was built from."""
    key = wanted.key
    condition, arguments = _live(wanted)
    rows = yield (f"SELECT 1 WHERE {condition}", arguments)
    if rows:
        return
    if (yield from api_key.is_live(key.id, wanted.now_ms)):
        raise CallerChanged(key.id)
    raise UnknownKey(key.id)


def _fund(wanted: Admission, period: str | None) -> Script[tuple[int, int, int | None] | InsufficientCredits]:
    """Find the money: (hold, output limit, included calls used) or the refusal."""
    key = wanted.key
    if wanted.included_limit > 0 and wanted.included_output_limit is not None:
        used = yield from included_calls.take(key.account_id, wanted.month, wanted.included_limit)
        if used is not None:
            return 0, wanted.included_output_limit, used
    hold, output_limit = wanted.hold, wanted.output_limit
    # Again: what another transaction took between the look and the hold may call for a smaller one.
    for _ in range(HOLD_TRIES_MAX):
        if (yield from _hold(wanted, period, hold)):
            return hold, output_limit, None
        shortage = yield from _shortage(wanted, period, hold)
        lowered = wanted.affordable(shortage.available) if shortage.reason != "disputed" else None
        if lowered is None or lowered[1] >= hold:
            return shortage
        output_limit, hold = lowered
    return shortage


def _hold(wanted: Admission, period: str | None, hold: int) -> Script[bool]:
    key = wanted.key
    if not (yield from wallet.reserve(key.account_id, hold)):
        return False
    if period is None:
        return True
    try:
        yield from api_key.reserve_spending(key.id, period, key.spend_limit_microusd or 0, hold)
    except InsufficientCredits:
        yield from wallet.release(key.account_id, hold)
        return False
    return True


def _shortage(wanted: Admission, period: str | None, hold: int) -> Script[InsufficientCredits]:
    key = wanted.key
    included_too_small = wanted.included_limit > 0 and wanted.included_output_limit is None
    if included_too_small:
        used = yield from included_calls.used(key.account_id, wanted.month)
        included_too_small = used < wanted.included_limit
    short = yield from wallet.shortage(key.account_id, hold, included_too_small)
    if period is None:
        return short
    rows = yield (
        "SELECT reserved_microusd + spent_microusd AS used FROM key_spend WHERE key_id = ? AND period = ?",
        (key.id, period),
    )
    left = max((key.spend_limit_microusd or 0) - (rows[0]["used"] if rows else 0), 0)
    if left < short.available and short.reason == "balance":
        return InsufficientCredits(
            needed=hold, available=left, reason="key_limit", included_too_small=included_too_small
        )
    return short


def _included_remaining(wanted: Admission, used: int | None) -> Script[int | None]:
    if wanted.included_limit == 0:
        return None
    if used is None:
        if wanted.included_output_limit is not None:
            return 0
        used = yield from included_calls.used(wanted.key.account_id, wanted.month)
    return max(wanted.included_limit - used, 0)


def _give_back(account_id: str, key_id: str, hold: int, month: str | None, period: str | None) -> Script[None]:
    if month is not None:
        yield from included_calls.give_back(account_id, month)
        return
    yield from wallet.release(account_id, hold)
    if period is not None:
        yield from api_key.settle_spending(key_id, period, hold, 0)


def _settled_by_us(call_id: str, outcome_id: str) -> Script[Settled | None]:
    """Recognise our own settlement when the first try committed but its answer was lost."""
    rows = yield (
        "SELECT charged_microusd, charged_from, house_loss_microusd FROM calls"
        " WHERE id = ? AND state = 'settled' AND outcome_id = ?",
        (call_id, outcome_id),
    )
    return Settled(*rows[0]) if rows else None


def _note_attempts(call_id: str, attempts: tuple[Attempt, ...]) -> Script[None]:
    """Write tries down when there was more than one; a single try is the call's own row."""
    if len(attempts) < 2:
        return
    for n, attempt in enumerate(attempts, 1):
        yield (
            "INSERT INTO attempts (call_id, n, upstream, upstream_request_id, status, started_at_ms, ended_at_ms)"
            " VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (call_id, n) DO NOTHING",
            (
                call_id, n, attempt.upstream, attempt.upstream_request_id, attempt.status,
                attempt.started_at_ms, attempt.ended_at_ms,
            ),
        )
