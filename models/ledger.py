"""The ledger: append-only transfers that every balance adds up from, and the audit of the books.

A row is one transfer from `debit_account` to `credit_account`, so it balances by construction. Only
customer wallets (`wallet:<account>`) keep a running balance; `revenue`, `promotions` and the like are
summed on demand, so they serialise nobody.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from models import clock, ids, usage_day
from models.database import Database, Row, Script

USAGE = "usage"
ADJUSTMENT = "adjustment"
TOP_UP = "top_up"
REFUND = "refund"
DISPUTE = "dispute"
PROMOTION = "promotion"
REVENUE = "revenue"
PROMOTIONS = "promotions"

AUDIT_MARK = "audited_until_ms"
# A call lives at most a quarter of an hour and an hour more to settle: looking back this far from the
# last audit's moment covers every row that could have changed since.
AUDIT_OVERLAP_MS = 2 * 3600 * 1000
OPEN_CALL_AGE_MAX_MS = 3600 * 1000
# A payment that is older than this is looked at again by a full audit alone.
PAYMENT_AGE_MS = 30 * 24 * 3600 * 1000
SEQ_MAX = (1 << 63) - 1  # the largest BIGINT
# Of each rule: books that are wrong throughout are found out by these, and all of them would be all of the history.
VIOLATIONS_MAX = 1000

Read = Callable[..., Awaitable[Sequence[Row]]]


@dataclass(frozen=True, slots=True)
class Entry:
    """Be one line of the ledger. `amount` (micro-dollars) is positive for credit, negative for debit."""

    account_id: str
    seq: int
    kind: str
    reference: str
    amount: int
    balance_after: int
    other_account: str
    reason: str | None
    created_at_ms: int


@dataclass(frozen=True, slots=True)
class Violation:
    """Name a promise of the books that does not hold, and where."""

    rule: str
    subject: str
    detail: str

    def __str__(self) -> str:
        return f"{self.rule} {self.subject}: {self.detail}"


@dataclass(frozen=True, slots=True)
class Audit:
    """Hold what an audit looked at and found."""

    accounts: int
    entries: int
    calls: int
    violations: tuple[Violation, ...]


def append(entry: Entry) -> Script[None]:
    """Write one line. The caller has changed the wallet's balance and seq in the same transaction."""
    wallet = f"wallet:{entry.account_id}"
    debit, credit = (wallet, entry.other_account) if entry.amount < 0 else (entry.other_account, wallet)
    yield (
        "INSERT INTO ledger (account_id, seq, kind, reference, amount_microusd, balance_after_microusd,"
        " debit_account, credit_account, reason, created_at_ms) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            entry.account_id, entry.seq, entry.kind, entry.reference, entry.amount, entry.balance_after,
            debit, credit, entry.reason, entry.created_at_ms,
        ),
    )


def append_charge(account_id: str, call_id: str, charged: int, now_ms: int) -> Script[None]:
    """Write what a call was charged as one line, from the wallet as its change has left it; as above."""
    yield (
        "INSERT INTO ledger (account_id, seq, kind, reference, amount_microusd, balance_after_microusd,"
        " debit_account, credit_account, reason, created_at_ms)"
        f" SELECT account_id, seq, '{USAGE}', CAST(? AS TEXT), CAST(? AS BIGINT), posted_microusd,"
        f" 'wallet:' || account_id, '{REVENUE}', NULL, CAST(? AS BIGINT) FROM wallets WHERE account_id = ?",
        (call_id, -charged, now_ms, account_id),
    )


async def movements(
    database: Database, account_id: str, *, limit: int, before: int | None = None
) -> Sequence[Row]:
    """Return what changed a balance beside calls and top-ups, newest first."""
    return await database.fetch(
        "SELECT seq, kind, reference, amount_microusd, balance_after_microusd, reason, created_at_ms FROM ledger"
        " WHERE account_id = ? AND kind <> 'usage' AND kind <> 'top_up' AND seq < ? ORDER BY seq DESC LIMIT ?",
        (account_id, SEQ_MAX if before is None else before, limit),
    )


async def audit(database: Database, *, full: bool) -> Audit:
    """Check the books in one snapshot: all of them, or what changed since the last clean audit.

    R1 each account's chain has no gap, every balance follows from the one before and the last is the
    wallet's. R2 what is held is the sum of the open calls' holds. R3 a call is charged exactly when it
    has one usage entry of that amount. R4 included calls used are the month's calls that were not
    given back. R6 all accounts, the house's own included, add up to zero. R8 nothing has been open
    longer than a call can live. R5 what was paid, refunded and disputed of an order is what its entries
    say, and as many payments freeze a wallet as are disputed. R9 the sums of each day are those of its calls.
    R10 each redemption of a code has its entry, and each code's uses are its redemptions. Of each rule no more than
    VIOLATIONS_MAX violations are named.
    """
    now = clock.now_ms()
    since = 0 if full else await _audited_until(database)
    async with database.snapshot() as read:
        accounts, entries, chain = await _check_chains(read, since)
        calls, charges = await _check_charges(read, since)
        found = [
            *chain,
            *await _check_holds(read),
            *charges,
            *await _check_included(read, since),
            *(await _check_transfers(read) if full else []),
            *await _check_open(read, now),
            *await _check_usage_days(read, since, database.dialect),
            *await _check_redemptions(read, since),
            *await _check_payments(read, since, full),
        ]
    if not found:
        await database.run(lambda: _mark(now), deadline_s=10)
    return Audit(accounts, entries, calls, tuple(found))


async def _audited_until(database: Database) -> int:
    rows = await database.fetch("SELECT value FROM marks WHERE name = ?", (AUDIT_MARK,))
    return max(rows[0][0] - AUDIT_OVERLAP_MS, 0) if rows else 0


def _mark(at_ms: int) -> Script[None]:
    yield (
        "INSERT INTO marks (name, value) VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = ?",
        (AUDIT_MARK, at_ms, at_ms),
    )


async def _check_chains(read: Read, since_ms: int) -> tuple[int, int, list[Violation]]:
    found: list[Violation] = []
    accounts = entries = 0
    last = ""
    # By pages of accounts, so that the memory an audit takes does not grow with the customers.
    while wallets := await read(
        "SELECT account_id, posted_microusd, seq FROM wallets WHERE account_id > ?"
        " ORDER BY account_id LIMIT 500",
        (last,),
    ):
        for account_id, posted, seq in wallets:
            checked, wrong = await _check_chain(read, account_id, posted, seq, since_ms)
            accounts += 1
            entries += checked
            found += wrong[: VIOLATIONS_MAX - len(found)]
        last = wallets[-1][0]
    return accounts, entries, found


async def _check_chain(
    read: Read, account_id: str, posted: int, seq: int, since_ms: int
) -> tuple[int, list[Violation]]:
    found: list[Violation] = []
    start, balance = await _chain_start(read, account_id, since_ms)
    expected, checked = start, 0
    while lines := await read(
        "SELECT seq, amount_microusd, balance_after_microusd FROM ledger WHERE account_id = ? AND seq >= ?"
        " ORDER BY seq LIMIT 1000",
        (account_id, expected),
    ):
        for line, amount, after in lines:
            if line != expected:
                found.append(Violation("R1", account_id, f"entry {expected} is missing"))
            balance += amount
            if after != balance:
                found.append(Violation("R1", account_id, f"entry {line} says {after}, should say {balance}"))
                balance = after
            expected = line + 1
            checked += 1
        del found[VIOLATIONS_MAX:]
    if expected - 1 != seq:
        found.append(Violation("R1", account_id, f"the wallet counts {seq} entries, there are {expected - 1}"))
    if balance != posted:
        found.append(Violation("R1", account_id, f"the wallet says {posted}, its entries add up to {balance}"))
    return checked, found


async def _chain_start(read: Read, account_id: str, since_ms: int) -> tuple[int, int]:
    """Return the first sequence number to check and the balance before it."""
    rows = await read(
        "SELECT seq, balance_after_microusd FROM ledger WHERE account_id = ? AND created_at_ms < ?"
        " ORDER BY seq DESC LIMIT 1",
        (account_id, since_ms),
    )
    return (rows[0][0] + 1, rows[0][1]) if rows else (1, 0)


async def _check_holds(read: Read) -> list[Violation]:
    rows = await read(
        # First all that is open, by its own index: SQLite would else read every call in the order of accounts.
        "WITH open_now AS MATERIALIZED (SELECT account_id, hold_microusd FROM calls WHERE state = 'open')"
        " SELECT w.account_id, w.held_microusd, COALESCE(o.held, 0) AS open_holds FROM wallets w LEFT JOIN"
        " (SELECT account_id, SUM(hold_microusd) AS held FROM open_now GROUP BY account_id) o"
        " ON o.account_id = w.account_id WHERE w.held_microusd <> COALESCE(o.held, 0) LIMIT ?",
        (VIOLATIONS_MAX,),
    )
    return [
        Violation("R2", account_id, f"the wallet holds {held}, its open calls {int(open_holds)}")
        for account_id, held, open_holds in rows
    ]


async def _check_charges(read: Read, since_ms: int) -> tuple[int, list[Violation]]:
    first = ids.first_id_at("req", since_ms)
    unentered = await read(
        "SELECT c.id, c.charged_microusd, l.amount_microusd FROM calls c"
        " LEFT JOIN ledger l ON l.kind = 'usage' AND l.reference = c.id"
        " WHERE c.id >= ? AND (COALESCE(-l.amount_microusd, 0) <> c.charged_microusd"
        " OR (c.charged_microusd > 0 AND (l.account_id <> c.account_id OR c.included_month IS NOT NULL))) LIMIT ?",
        (first, VIOLATIONS_MAX),
    )
    uncalled = await read(
        "SELECT l.reference, l.amount_microusd FROM ledger l WHERE l.kind = 'usage' AND l.reference >= ?"
        " AND NOT EXISTS (SELECT 1 FROM calls c WHERE c.id = l.reference) LIMIT ?",
        (first, VIOLATIONS_MAX),
    )
    count = await read("SELECT COUNT(*) FROM calls WHERE id >= ?", (first,))
    found = [
        Violation("R3", call_id, f"the call was charged {charged}, its entry says {amount}")
        for call_id, charged, amount in unentered
    ]
    found += [Violation("R3", call_id, f"{amount} was taken for no call") for call_id, amount in uncalled]
    return count[0][0], found


async def _check_included(read: Read, since_ms: int) -> list[Violation]:
    # A month is checked whole or not at all: from the first day of the month the overlap began in.
    month = clock.month(since_ms)
    first = ids.first_id_at("req", max(since_ms - 32 * 24 * 3600 * 1000, 0))
    rows = await read(
        "SELECT account_id, month, SUM(used) AS used, SUM(counted) AS counted FROM"
        " (SELECT account_id, month, used, 0 AS counted FROM included_calls WHERE month >= ? UNION ALL"
        " SELECT account_id, included_month, 0, 1 FROM calls"
        " WHERE id >= ? AND included_month >= ? AND state <> 'released') sides"
        " GROUP BY account_id, month HAVING SUM(used) <> SUM(counted) LIMIT ?",
        (month, first, month, VIOLATIONS_MAX),
    )
    return [
        Violation("R4", account_id, f"{used} included calls counted in {month}, {counted} made")
        for account_id, month, used, counted in rows
    ]


async def _check_transfers(read: Read) -> list[Violation]:
    rows = await read(
        "SELECT SUM(CASE WHEN credit_account = 'wallet:' || account_id THEN ABS(amount_microusd) ELSE 0 END)"
        " - SUM(CASE WHEN debit_account = 'wallet:' || account_id THEN ABS(amount_microusd) ELSE 0 END) AS wallets,"
        " SUM(amount_microusd) AS amounts,"
        " SUM(CASE WHEN (debit_account = 'wallet:' || account_id) = (credit_account = 'wallet:' || account_id)"
        " THEN 1 ELSE 0 END) AS odd FROM ledger"
    )
    wallets, amounts, odd = (int(value or 0) for value in rows[0])
    posted = int((await read("SELECT COALESCE(SUM(posted_microusd), 0) FROM wallets"))[0][0])
    found = []
    if odd:
        found.append(Violation("R6", "ledger", f"{odd} entries do not touch their own wallet exactly once"))
    if not wallets == amounts == posted:
        found.append(Violation(
            "R6", "ledger", f"transfers add up to {wallets}, entries to {amounts}, wallets to {posted}"
        ))
    return found


async def _check_open(read: Read, now_ms: int) -> list[Violation]:
    rows = await read(
        "SELECT id, created_at_ms FROM calls WHERE state = 'open' AND created_at_ms < ? LIMIT ?",
        (now_ms - OPEN_CALL_AGE_MAX_MS, VIOLATIONS_MAX),
    )
    return [Violation("R8", call_id, f"open since {clock.moment(at)}") for call_id, at in rows]


async def _check_redemptions(read: Read, since_ms: int) -> list[Violation]:
    first = ids.first_id_at("rdm", since_ms)
    rows = await read(
        "SELECT r.id, r.amount_microusd AS redeemed, COALESCE(l.amount_microusd, 0) AS entered FROM redemptions r"
        " LEFT JOIN ledger l ON l.kind = 'promotion' AND l.reference = r.id AND l.account_id = r.account_id"
        " WHERE r.id >= ? AND r.amount_microusd <> COALESCE(l.amount_microusd, 0)"
        " UNION ALL SELECT l.reference, 0, l.amount_microusd FROM ledger l"
        " WHERE l.kind = 'promotion' AND l.reference >= ? AND NOT EXISTS"
        " (SELECT 1 FROM redemptions r WHERE r.id = l.reference AND r.account_id = l.account_id)",
        (first, first),
    )
    found = [
        Violation("R10", code_id, f"{redeemed} redeemed, {entered} entered") for code_id, redeemed, entered in rows
    ]
    rows = await read(
        "SELECT c.id, c.used, COUNT(r.id) AS redeemed FROM redeem_codes c"
        " LEFT JOIN redemptions r ON r.code_id = c.id"
        " WHERE c.id IN (SELECT code_id FROM redemptions WHERE id >= ?) GROUP BY c.id, c.used"
        " HAVING c.used <> COUNT(r.id)",
        (first,),
    )
    found += [Violation("R10", code_id, f"{used} uses counted, {made} made") for code_id, used, made in rows]
    return found


async def _check_usage_days(read: Read, since_ms: int, dialect: str) -> list[Violation]:
    # A day is checked whole or not at all: from the one the overlap began in.
    day = usage_day.day_of(since_ms)
    # A call's id is older than the call by what its body took to come, which is never as much.
    first = ids.first_id_at("req", usage_day.start_of(day) - OPEN_CALL_AGE_MAX_MS)
    sums = (
        "calls", "input_tokens", "cached_input_tokens", "output_tokens", "cost_microusd", "charged_microusd",
    )
    counted = "repeated", "input_tokens + cache_write_tokens", *sums[2:]
    noted = ", ".join(f"{name} AS noted_{name}, 0 AS made_{name}" for name in sums)
    made = ", ".join(f"0, {sql}" for sql in counted)
    both = ", ".join(f"SUM({side}_{name}) AS {side}_{name}" for name in sums for side in ("noted", "made"))
    of_calls = f"account_id, {usage_day.day_sql(dialect)}, offer, key_id, {usage_day.OUTCOME_SQL}"
    rows = await read(
        f"SELECT account_id, day, offer, key_id, outcome, {both} FROM"
        f" (SELECT account_id, day, offer, key_id, outcome, {noted} FROM usage_days WHERE day >= ? UNION ALL"
        f" SELECT {of_calls}, {made} FROM calls"
        " WHERE id >= ? AND state <> 'open' AND created_at_ms >= ?) sides"
        " GROUP BY account_id, day, offer, key_id, outcome"
        f" HAVING {' OR '.join(f'SUM(noted_{name}) <> SUM(made_{name})' for name in sums)} LIMIT ?",
        (day, first, usage_day.start_of(day), VIOLATIONS_MAX),
    )
    return [
        Violation("R9", row["account_id"], _unequal_day(row, sums)) for row in rows
    ]


async def _check_payments(read: Read, since_ms: int, full: bool) -> list[Violation]:
    first = "" if full else ids.first_id_at("top", max(since_ms - PAYMENT_AGE_MS, 0))
    # References of what was taken back begin with the order's id. They are few beside the calls.
    reversed_sums = (
        "SELECT substr(reference, 1, 30) AS id, account_id,"
        " -SUM(CASE WHEN kind = 'refund' THEN amount_microusd ELSE 0 END) AS returned,"
        " -SUM(CASE WHEN kind = 'dispute' THEN amount_microusd ELSE 0 END) AS held"
        " FROM ledger WHERE kind IN ('refund', 'dispute') AND reference >= ?"
        " GROUP BY substr(reference, 1, 30), account_id"
    )
    rows = await read(
        "SELECT * FROM (SELECT t.id, CASE WHEN t.state = 'paid' THEN t.amount_microusd ELSE 0 END AS paid,"
        " t.refunded_microusd AS refunded, t.disputed_microusd AS disputed,"
        " COALESCE(l.amount_microusd, 0) AS credited, COALESCE(b.returned, 0) AS returned,"
        " COALESCE(b.held, 0) AS held, COALESCE((SELECT SUM(r.amount_microusd) FROM refunds r"
        " WHERE r.top_up_id = t.id AND r.state <> 'failed'), 0) AS asked FROM top_ups t"
        " LEFT JOIN ledger l ON l.kind = 'top_up' AND l.reference = t.id AND l.account_id = t.account_id"
        f" LEFT JOIN ({reversed_sums}) b ON b.id = t.id AND b.account_id = t.account_id WHERE t.id >= ?) seen"
        " WHERE paid <> credited OR refunded <> returned OR disputed <> held OR asked > refunded"
        " OR refunded + disputed > paid",
        (first, first),
    )
    found = [
        Violation("R5", row["id"], ", ".join(f"{name} {int(row[name])}" for name in (
            "paid", "credited", "refunded", "returned", "asked", "disputed", "held"
        )))
        for row in rows
    ]
    rows = await read(
        "SELECT w.account_id, w.disputed, COALESCE(t.frozen, 0) AS frozen FROM wallets w LEFT JOIN"
        " (SELECT account_id, COUNT(*) AS frozen FROM top_ups WHERE frozen = 1 GROUP BY account_id) t"
        " ON t.account_id = w.account_id WHERE w.disputed <> COALESCE(t.frozen, 0)"
    )
    found += [
        Violation("R5", row["account_id"], f"{row['disputed']} payments freeze it, {row['frozen']} are disputed")
        for row in rows
    ]
    if full:
        rows = await read(
            "SELECT l.reference FROM ledger l WHERE l.kind = 'top_up'"
            " AND NOT EXISTS (SELECT 1 FROM top_ups t WHERE t.id = l.reference)"
        )
        found += [Violation("R5", row["reference"], "credit was given for no order") for row in rows]
    return found


def _unequal_day(row: Row, sums: Sequence[str]) -> str:
    """Say which sum of a day is not that of its calls."""
    name = next(name for name in sums if row[f"noted_{name}"] != row[f"made_{name}"])
    noted, made = int(row[f"noted_{name}"]), int(row[f"made_{name}"])
    of = f"{row['outcome']} calls of {row['offer']} by {row['key_id']} on {row['day']}"
    return f"{of}: {noted} {name} noted, {made} made"
