"""The ledger: nothing is ever changed in it, and the audit finds whatever does not add up."""

from __future__ import annotations

import sqlite3
from collections import Counter

import asyncpg
import pytest

from models import call, clock, ids, ledger, usage_day
from models.clock import now_ms
from models.errors import DatabaseUnavailable
from models.migrations.m0002_portal import SUMS_OF_CALLS
from tests.cast import enter, give
from tests.models.test_call import admit, outcome

DAY_MS = 24 * 3600 * 1000
REFUSALS = (sqlite3.IntegrityError, asyncpg.IntegrityConstraintViolationError, DatabaseUnavailable)


async def sql(books, *statements):
    def script():
        for statement in statements:
            yield (statement, ()) if isinstance(statement, str) else statement

    await books.run(script)


async def tamper(books, *statements):
    """Change what nobody may change: first take the guards away, as somebody with the file could."""
    guards = {
        "sqlite": ["DROP TRIGGER ledger_no_update", "DROP TRIGGER ledger_no_delete"],
        "postgres": ["DROP TRIGGER ledger_no_change ON ledger"],
    }[books.dialect]
    await sql(books, *guards, *statements)


async def lived_in(books):
    """Fill the books: an account with credit, a settled, a released, an expired, an included, an open call."""
    actor = await enter(books, credit_microusd=10_000)
    await give(books, actor.account.id, 500)
    settled, released, expired, opened = [await admit(books, actor) for _ in range(4)]
    free, given_back = await admit(books, actor, included=5), await admit(books, actor, included=5)
    await books.run(lambda: call.settle(settled.call_id, outcome(300)))
    await books.run(lambda: call.release(released.call_id, outcome()))
    await books.run(lambda: call.checkpoint("prc_1", [(expired.call_id, 50, 5)]))
    await books.run(lambda: call.expire(books, expired.call_id))
    await books.run(lambda: call.settle(free.call_id, outcome(10)))
    await books.run(lambda: call.release(given_back.call_id, outcome()))
    return actor, settled, expired, opened, free


def summed_again(books):
    """Return what makes the sums of days anew, as the migration that brought them did."""
    return ["DELETE FROM usage_days", SUMS_OF_CALLS.format(day=usage_day.day_sql(books.dialect))]


async def found(books, *, full=True):
    return [(one.rule, one.subject) for one in (await ledger.audit(books, full=full)).violations]


@pytest.mark.parametrize("statement", ["UPDATE ledger SET reason = 'x'", "DELETE FROM ledger"])
async def test_entries_are_never_changed(books, statement):
    await enter(books, credit_microusd=100)
    with pytest.raises(REFUSALS) as refusal:
        await sql(books, statement)
    assert "append only" in f"{refusal.value}{refusal.value.__cause__}"
    assert len(await books.fetch("SELECT * FROM ledger")) == 1


@pytest.mark.parametrize("database_kind", ["postgres"], indirect=True)
async def test_the_ledger_is_not_truncated(books):
    await enter(books, credit_microusd=100)
    with pytest.raises(REFUSALS):
        await sql(books, "TRUNCATE ledger")


async def test_replacing_an_entry_is_refused(books):
    """SQLite's INSERT OR REPLACE deletes without firing delete triggers unless told to; the keys must hold."""
    actor = await enter(books, credit_microusd=100)
    row = (await books.fetch("SELECT * FROM ledger"))[0]
    with pytest.raises(REFUSALS):
        await books.run(lambda: ledger.append(ledger.Entry(
            actor.account.id, 1, row["kind"], "other", 5, 5, ledger.PROMOTIONS, None, 1
        )))
    with pytest.raises(REFUSALS):
        await books.run(lambda: ledger.append(ledger.Entry(
            actor.account.id, 2, row["kind"], row["reference"], 5, 105, ledger.PROMOTIONS, None, 1
        )))


@pytest.mark.parametrize(("amount", "other"), [(0, "promotions"), (5, None)])
async def test_an_entry_moves_something_from_one_to_another(books, amount, other):
    actor = await enter(books)
    other = other or f"wallet:{actor.account.id}"
    with pytest.raises(REFUSALS):
        await books.run(lambda: ledger.append(ledger.Entry(
            actor.account.id, 1, "adjustment", "r", amount, amount, other, None, 1
        )))


async def test_sound_books(books):
    await lived_in(books)
    report = await ledger.audit(books, full=True)
    assert report == ledger.Audit(accounts=1, entries=4, calls=6, violations=())
    assert await found(books, full=False) == []


TAMPERINGS = {
    "R1 a changed amount": ("UPDATE ledger SET amount_microusd = 9999 WHERE seq = 1", "R1"),
    "R1 a changed balance": ("UPDATE ledger SET balance_after_microusd = 9999 WHERE seq = 2", "R1"),
    "R1 a missing first entry": ("DELETE FROM ledger WHERE seq = 1", "R1"),
    "R1 a gap": ("DELETE FROM ledger WHERE seq = 2", "R1"),
    "R1 a missing last entry": ("DELETE FROM ledger WHERE seq = 4", "R1"),
    "R1 a balance too high": ("UPDATE wallets SET posted_microusd = posted_microusd + 1", "R1"),
    "R1 a count too high": ("UPDATE wallets SET seq = seq + 1", "R1"),
    "R2 too much held": ("UPDATE wallets SET held_microusd = held_microusd + 1", "R2"),
    "R2 too little held": ("UPDATE wallets SET held_microusd = 0", "R2"),
    "R2 a hold changed": ("UPDATE calls SET hold_microusd = 7 WHERE state = 'open'", "R2"),
    "R2 a call ended by hand": ("UPDATE calls SET state = 'released' WHERE state = 'open'", "R2"),
    "R3 a charge without its entry": (
        "UPDATE calls SET charged_microusd = 5 WHERE state = 'released' AND included_month IS NULL", "R3",
    ),
    "R3 a charge of another amount": ("UPDATE calls SET charged_microusd = 299 WHERE charged_microusd = 300", "R3"),
    "R3 an entry without its charge": ("UPDATE calls SET charged_microusd = 0 WHERE charged_microusd = 300", "R3"),
    "R3 an entry without its call": ("DELETE FROM calls WHERE charged_microusd = 300", "R3"),
    "R3 a charge to somebody else": ("UPDATE calls SET account_id = 'x' WHERE charged_microusd = 300", "R3"),
    "R3 a charged included call": ("UPDATE calls SET included_month = 'x' WHERE charged_microusd = 300", "R3"),
    "R4 a call too many counted": ("UPDATE included_calls SET used = used + 1", "R4"),
    "R4 a call too few counted": ("UPDATE included_calls SET used = used - 1", "R4"),
    "R4 no count": ("DELETE FROM included_calls", "R4"),
    "R4 a count of nothing": (
        "INSERT INTO included_calls (account_id, month, used) VALUES ('acc_x', '2999-11', 1)", "R4",
    ),
    "R6 a transfer between others": ("UPDATE ledger SET debit_account = 'x' WHERE kind = 'usage'", "R6"),
    "R6 a transfer turned round": (
        "UPDATE ledger SET debit_account = credit_account, credit_account = debit_account WHERE seq = 1", "R6",
    ),
    "R6 a wallet that vanished": ("DELETE FROM wallets", "R6"),
    "R8 a call open too long": (
        "UPDATE calls SET created_at_ms = created_at_ms - 3700000 WHERE state = 'open'", "R8",
    ),
    "R9 a call too many in a sum": ("UPDATE usage_days SET calls = calls + 1 WHERE outcome = 'served'", "R9"),
    "R9 a wrong sum of charges": (
        "UPDATE usage_days SET charged_microusd = charged_microusd - 1 WHERE outcome = 'failed'", "R9",
    ),
    "R9 a wrong sum of prices": ("UPDATE usage_days SET cost_microusd = 0", "R9"),
    "R9 a wrong sum of output": ("UPDATE usage_days SET output_tokens = output_tokens + 1", "R9"),
    "R9 a wrong sum of input": ("UPDATE usage_days SET input_tokens = input_tokens + 1", "R9"),
    "R9 a wrong sum of cached input": ("UPDATE usage_days SET cached_input_tokens = 1", "R9"),
    "R9 a sum under another model": ("UPDATE usage_days SET offer = 'x'", "R9"),
    "R9 a sum under another key": ("UPDATE usage_days SET key_id = 'x'", "R9"),
    "R9 a sum under another day": ("UPDATE usage_days SET day = '2999-01-01'", "R9"),
    "R9 no sum": ("DELETE FROM usage_days WHERE outcome = 'served'", "R9"),
    "R9 a sum of nothing": (
        "INSERT INTO usage_days (account_id, day, offer, key_id, outcome, calls)"
        " VALUES ('x', '2999-01-01', 'm', 'k', 'refused', 1)", "R9",
    ),
}


@pytest.mark.parametrize("what", list(TAMPERINGS))
async def test_the_audit_finds(books, what):
    statement, rule = TAMPERINGS[what]
    actor, *_ = await lived_in(books)
    await tamper(books, statement)
    assert rule in {rule for rule, _ in await found(books)}
    # Nor does the next one take these books for sound and begin after what is wrong in them.
    assert list(await books.fetch("SELECT * FROM marks")) == []
    if rule != "R6":  # transfers are added up in a full audit only
        assert rule in {rule for rule, _ in await found(books, full=False)}


async def test_a_violation_says_where(books):
    actor, settled, *_ = await lived_in(books)
    await tamper(
        books, "UPDATE wallets SET held_microusd = held_microusd + 1, posted_microusd = posted_microusd + 1",
        "UPDATE calls SET charged_microusd = 1 WHERE charged_microusd = 300",
    )
    assert [str(one) for one in (await ledger.audit(books, full=False)).violations] == [
        f"R1 {actor.account.id}: the wallet says 10151, its entries add up to 10150",
        f"R2 {actor.account.id}: the wallet holds 1001, its open calls 1000",
        f"R3 {settled.call_id}: the call was charged 1, its entry says -300",
        f"R9 {actor.account.id}: served calls of m by {actor.key_id} on {clock.day(now_ms())}:"
        " 300 charged_microusd noted, 1 made",
    ]


async def test_an_incremental_audit_begins_where_the_last_clean_one_ended(books):
    actor, settled, *_ = await lived_in(books)
    long_ago = now_ms() - 10 * DAY_MS
    old_id = ids.first_id_at("req", long_ago)
    await tamper(
        books,
        ("UPDATE ledger SET created_at_ms = ?", (long_ago,)),
        ("UPDATE ledger SET reference = ? WHERE reference = ?", (old_id, settled.call_id)),
        ("UPDATE calls SET id = ?, created_at_ms = ? WHERE id = ?", (old_id, long_ago, settled.call_id)),
        *summed_again(books),
    )
    first = await ledger.audit(books, full=False)  # without a mark it begins at the beginning
    assert (first.entries, first.calls, first.violations) == (4, 6, ())
    ((mark,),) = [tuple(row) for row in await books.fetch("SELECT value FROM marks")]
    assert abs(mark - now_ms()) < 5000
    await give(books, actor.account.id, 1)
    second = await ledger.audit(books, full=False)
    assert (second.accounts, second.entries, second.calls, second.violations) == (1, 1, 5, ())
    # What was found sound long ago is not looked at again, but in full.
    await sql(books, ("UPDATE calls SET charged_microusd = 1 WHERE id = ?", (old_id,)))
    assert await found(books, full=False) == []
    assert await found(books) == [("R3", old_id), ("R9", actor.account.id)]
    # What came since is: and while it is wrong the mark stays.
    before = (await books.fetch("SELECT value FROM marks"))[0][0]
    await sql(books, "UPDATE wallets SET posted_microusd = posted_microusd + 1")
    assert await found(books, full=False) == [("R1", actor.account.id)]
    assert (await books.fetch("SELECT value FROM marks"))[0][0] == before


async def test_an_incremental_audit_counts_a_month_whole(books):
    """Included calls are counted over their whole month, also when the watermark lies within it."""
    actor = await enter(books)
    now = now_ms()
    month_start = usage_day.start_of(f"{clock.month(now)}-01")
    for at in (month_start + 1, now):
        admitted = await admit(
            books, actor, included=9, at_ms=at, month=clock.month(now),
            call_id=ids.first_id_at("req", at)[:-4] + ids.new_id("x")[-4:],
        )
        await books.run(lambda one=admitted.call_id: call.settle(one, outcome(1)))
    for _ in range(2):
        assert await found(books, full=False) == []
    await sql(books, "UPDATE included_calls SET used = 1")
    assert await found(books, full=False) == [("R4", actor.account.id)]


async def test_many_accounts_and_entries_are_read_by_pages(books, monkeypatch):
    actor = await enter(books)

    def many():
        for n in range(1, 2101):
            yield "UPDATE wallets SET posted_microusd = ?, seq = ? WHERE account_id = ?", (n, n, actor.account.id)
            yield from ledger.append(ledger.Entry(
                actor.account.id, n, "adjustment", f"r{n}", 1, n, ledger.PROMOTIONS, None, n
            ))
        for n in range(1010):
            yield (
                "INSERT INTO accounts (id, email, plan, state, created_at_ms) VALUES (?, ?, 'x', 'active', 0)",
                (f"acc_{n:04}", f"{n}@example.com"),
            )
            yield "INSERT INTO wallets (account_id) VALUES (?)", (f"acc_{n:04}",)

    await books.run(many, deadline_s=60)
    report = await ledger.audit(books, full=True)
    assert (report.accounts, report.entries, report.violations) == (1011, 2100, ())
    await tamper(books, "DELETE FROM ledger WHERE seq IN (1000, 1500)")
    assert [str(one) for one in (await ledger.audit(books, full=True)).violations][:2] == [
        f"R1 {actor.account.id}: entry 1000 is missing",
        f"R1 {actor.account.id}: entry 1001 says 1001, should say 1000",
    ]


async def test_books_that_are_wrong_throughout_are_not_read_into_memory(books, monkeypatch):
    monkeypatch.setattr(ledger, "VIOLATIONS_MAX", 3)
    actor, old = await enter(books, credit_microusd=100_000), now_ms() - 2 * 3600 * 1000
    for n in range(5):
        await admit(books, actor, at_ms=old, call_id=ids.first_id_at("req", old)[:-1] + str(n))
        ended = await admit(books, actor)
        await books.run(lambda ended=ended: call.settle(ended.call_id, outcome(300)))
    await tamper(
        books, "UPDATE calls SET charged_microusd = 1 WHERE state = 'settled'",
        "UPDATE ledger SET balance_after_microusd = 7", "UPDATE ledger SET reference = reference || 'x'",
    )
    assert Counter(rule for rule, _ in await found(books)) == {"R1": 3, "R3": 6, "R8": 3, "R9": 1}
    async with books.snapshot() as read:
        checked, wrong = await ledger._check_chain(read, actor.account.id, 0, 0, 0)
    assert (checked, len(wrong)) == (6, 5)  # and what the wallet says of them


@pytest.mark.parametrize("database_kind", ["sqlite"], indirect=True)
async def test_an_incremental_audit_reads_what_was_taken_back_of_recent_payments_alone(books):
    plans: list[str] = []

    async def explained(sql, arguments=()):
        plans.extend(row["detail"] for row in await books.fetch(f"EXPLAIN QUERY PLAN {sql}", arguments))
        return []

    await ledger._check_payments(explained, now_ms(), False)
    reads = [plan for plan in plans if "ledger" in plan and "(kind=?" in plan]
    assert reads and all("reference" in plan for plan in reads), plans
