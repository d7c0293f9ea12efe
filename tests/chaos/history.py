"""What clients were told, held against what the books say."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from models.database import Database
from tests.cast import Actor
from tests.chaos.sizes import HOLD_S_MAX
from tests.house import House

# Many tests share a machine with this one.
READ_S_MAX = 30


class Ending(Enum):
    """How a call ended in the eyes of its client."""

    WHOLE = "whole"  # a whole body, or a stream up to its `[DONE]`
    FAILED = "failed"  # a stream that ended in an error frame
    CUT = "cut"  # a 200 whose body broke off
    REFUSED = "refused"  # an error instead of an answer
    UNREACHED = "unreached"  # nobody listened
    UNKNOWN = "unknown"  # the connection broke before a status came


@dataclass(slots=True, eq=False)
class Told:
    """What one client was told of one call. `cost` in micro-dollars, as the answer itself says it."""

    actor: Actor
    moment: str
    asked: dict[str, object]
    idempotency_key: str | None = None
    call_id: str | None = None
    status: int | None = None
    error_code: str | None = None
    ending: Ending = Ending.UNKNOWN
    cost: int | None = None
    tokens: int = 0

    def __str__(self) -> str:
        return f"{self.call_id} ({self.moment}: {self.ending.value}, {self.status}, {self.tokens} tokens)"


@dataclass(slots=True)
class History:
    """Keep what all clients were told."""

    told: list[Told] = field(default_factory=list)

    def endings(self) -> Counter[str]:
        """Return how many calls ended in which way."""
        return Counter(told.ending.value for told in self.told)

    def accounts(self) -> set[str]:
        """Return the accounts that made the calls."""
        return {told.actor.account.id for told in self.told}


async def until_nothing_is_held(books: Database, within_s: float = HOLD_S_MAX) -> float:
    """Wait until no call is open and no wallet holds anything; return how long that took, in seconds."""
    began = time.monotonic()
    while left := await _open_or_held(books):
        assert time.monotonic() - began < within_s, f"still open or held after {within_s} s: {left[:5]}"
        await asyncio.sleep(0.2)
    return time.monotonic() - began


async def _open_or_held(books: Database) -> list[str]:
    rows = await books.fetch(
        "SELECT id FROM calls WHERE state = 'open' UNION ALL"
        " SELECT account_id FROM wallets WHERE held_microusd <> 0 UNION ALL"
        " SELECT key_id FROM key_spend WHERE reserved_microusd <> 0 UNION ALL"
        " SELECT key FROM idempotency_keys WHERE state = 'running'",
        deadline_s=READ_S_MAX,
    )
    return [row[0] for row in rows]


async def longest_hold_s(books: Database) -> float:
    """Return how long the longest call held money: from its admission until it was ended."""
    rows = await books.fetch(
        "SELECT MAX(finished_at_ms - created_at_ms) FROM calls WHERE state <> 'refused'", deadline_s=READ_S_MAX
    )
    return (rows[0][0] or 0) / 1000


async def assert_books_agree(house: House, books: Database, history: History) -> None:
    """Hold the books to what the clients were told, then have them audited as a whole."""
    problems: list[str] = []
    for account_id in sorted(history.accounts()):
        told = [one for one in history.told if one.actor.account.id == account_id]
        problems += await _disagreements(books, account_id, told)
    assert not problems, f"{len(problems)} disagreements:\n" + "\n".join(problems[:20])
    audit = await asyncio.to_thread(house.command, "audit", "--full")
    assert audit.returncode == 0, audit.stdout + audit.stderr


async def _disagreements(books: Database, account_id: str, all_told: list[Told]) -> list[str]:
    rows = await books.fetch("SELECT * FROM calls WHERE account_id = ?", (account_id,), deadline_s=READ_S_MAX)
    calls = {row["id"]: row for row in rows}
    entries: dict[str, list[int]] = defaultdict(list)
    for reference, amount in await books.fetch(
        "SELECT reference, amount_microusd FROM ledger WHERE kind = 'usage' AND account_id = ?", (account_id,),
        deadline_s=READ_S_MAX,
    ):
        entries[reference].append(-amount)
    problems = [
        f"{call_id}: charged {call['charged_microusd']}, entered {entries[call_id]}"
        for call_id, call in calls.items()
        if entries[call_id] != ([call["charged_microusd"]] if call["charged_microusd"] else [])
    ]
    problems += [f"{call_id}: still open" for call_id, call in calls.items() if call["state"] == "open"]
    for told in all_told:
        if (problem := _disagreement(told, calls.get(told.call_id or ""))) is not None:
            problems.append(f"{told}: {problem}")
    problems += _of_unknown(all_told, calls.values())
    problems += _of_keys(calls.values())
    return problems


def _disagreement(told: Told, call: object) -> str | None:
    """Return what is wrong with the books' view of a call whose client learned its id."""
    match told.ending:
        case Ending.WHOLE:
            if call is None or (call["state"], call["status"]) != ("settled", 200):
                return f"its client has the whole answer, but the books say {_brief(call)}"
            paid_by = "wallet" if call["included_month"] is None else "included"
            if call["charged_from"] != paid_by or call["charged_microusd"] != told.cost:
                return f"the answer says it cost {told.cost}, the books say {_brief(call)}"
            if paid_by == "wallet" and not told.cost:
                return "it was answered for nothing"
        case Ending.REFUSED:
            if call is not None and (call["state"] not in ("released", "refused") or call["charged_microusd"]):
                return f"it was refused, but the books say {_brief(call)}"
        case Ending.FAILED | Ending.CUT:
            if call is None:
                return "its client has a part of it, but the books do not know it"
            if call["state"] == "expired" and call["output_tokens"] > told.tokens:
                return f"charged for more than was delivered: {_brief(call)}"
    return None


def _of_unknown(all_told: Iterable[Told], calls: Iterable[object]) -> list[str]:
    """Calls whose clients never learned an id were charged for at most once each."""
    known = {told.call_id for told in all_told}
    unknown = sum(told.ending is Ending.UNKNOWN for told in all_told)
    charged = [call["id"] for call in calls if call["state"] in ("settled", "expired") and call["id"] not in known]
    if len(charged) <= unknown:
        return []
    return [f"{unknown} clients do not know how their call went, but {len(charged)} such calls were charged"]


def _of_keys(calls: Iterable[object]) -> list[str]:
    """However often a call with an idempotency key was tried, it was charged for once at most."""
    charged = Counter(
        call["idempotency_key"] for call in calls
        if call["idempotency_key"] is not None and call["state"] in ("settled", "expired")
    )
    return [f"idempotency key {key} was charged {count} times" for key, count in charged.items() if count > 1]


def _brief(call: object) -> str:
    if call is None:
        return "nothing"
    return (
        f"{call['state']}, status {call['status']} {call['error_code']}, charged {call['charged_microusd']} from"
        f" {call['charged_from']}, {call['output_tokens']} tokens"
    )
