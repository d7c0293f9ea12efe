"""Redeem codes: to each account once, to no more accounts than meant, to nobody after the end."""

from __future__ import annotations

import asyncio
import sys
import time

import pytest

from models import ledger, redeem_code, wallet
from models.account import Account
from models.clock import now_ms
from models.database import Database
from models.errors import NotFound
from models.redeem_code import NotRedeemed
from tests.cast import enter
from tests.house import ROOT

FIVE = 5_000_000


async def made(books: Database, **limits) -> str:
    code = redeem_code.new_code()
    await books.run(lambda: redeem_code.create(code, FIVE, **limits))
    return code


async def redeem(books: Database, account_id: str, code: str):
    return await books.run(lambda: redeem_code.redeem(account_id, code))


async def refusal(books: Database, account_id: str, code: str) -> str:
    with pytest.raises(NotRedeemed) as caught:
        await redeem(books, account_id, code)
    return str(caught.value)


async def posted(books: Database, account_id: str) -> int:
    return (await wallet.balance(books, account_id)).posted


async def the_code(books: Database, code: str) -> redeem_code.RedeemCode:
    return next(one for one in await redeem_code.newest(books) if one.shown_prefix == code[:4])


async def test_a_code_gives_its_credit_and_says_so_in_the_books(books: Database) -> None:
    alice = (await enter(books, plan="free")).account.id
    code = await made(books)
    given = await redeem(books, alice, code)
    assert given.amount_microusd == await posted(books, alice) == FIVE
    (entry,) = await ledger.movements(books, alice, limit=9)
    assert (entry["kind"], entry["reference"], entry["amount_microusd"]) == ("promotion", given.id, FIVE)
    rows = await books.fetch("SELECT debit_account FROM ledger WHERE account_id = ?", (alice,))
    assert rows[0][0] == "promotions"
    assert (await Account.get(id=alice)).plan == "free"
    assert not (await ledger.audit(books, full=True)).violations
    stored = str([tuple(row) for row in await books.fetch("SELECT * FROM redeem_codes")])
    assert code not in stored and code.replace("-", "") not in stored


@pytest.mark.parametrize("typed", [str.lower, lambda code: code.replace("-", ""), lambda code: f" {code} \t"])
async def test_a_code_is_taken_however_it_is_typed(books: Database, typed) -> None:
    alice = (await enter(books)).account.id
    await redeem(books, alice, typed(await made(books)))
    assert await posted(books, alice) == FIVE


def test_letters_that_look_like_digits_are_those_digits() -> None:
    assert redeem_code.code_hash("oOiIlL11-0") == redeem_code.code_hash("0011 1111 0")
    assert not set("OILU") & set(redeem_code.ALPHABET)
    assert len({redeem_code.new_code() for _ in range(100)}) == 100


async def test_every_refusal_is_one_sentence_and_gives_nothing(books: Database) -> None:
    alice, bob = (await enter(books)).account.id, (await enter(books, "bob")).account.id
    used, ended, revoked = await made(books), await made(books, expires_at_ms=now_ms() + 300), await made(books)
    await redeem(books, bob, used)
    await books.run(lambda: redeem_code.revoke(revoked))
    await asyncio.sleep(0.4)
    assert await refusal(books, alice, used) == "This code has been used up."
    assert await refusal(books, bob, used) == "You have redeemed this code already."
    assert await refusal(books, alice, ended) == "This code has expired."
    assert await refusal(books, alice, revoked) == "This code is no longer valid."
    for unknown in ("", "x", redeem_code.new_code(), "\udcff", "' OR 1=1 --", "code_" + "0" * 26):
        assert (await refusal(books, alice, unknown)).startswith("There is no such code.")
    twice = await made(books, uses_max=3)
    await redeem(books, alice, twice)
    assert await refusal(books, alice, twice) == "You have redeemed this code already."
    assert (await the_code(books, twice)).used == 1
    assert await posted(books, alice) == await posted(books, bob) == FIVE


async def test_a_code_is_revoked_by_itself_or_by_its_id(books: Database) -> None:
    for by_id in (False, True):
        code = await made(books)
        known = await the_code(books, code)
        await books.run(lambda name=known.id if by_id else code: redeem_code.revoke(name))
        assert (await the_code(books, code)).state(now_ms()) == "revoked"
    with pytest.raises(NotFound):
        await books.run(lambda: redeem_code.revoke("code_none"))


async def test_many_accounts_at_once_take_no_more_than_there_is(books: Database) -> None:
    people = [(await enter(books, f"p{number}")).account.id for number in range(8)]
    code = await made(books, uses_max=3)
    outcomes = await asyncio.gather(
        *(redeem(books, one, code) for one in people), return_exceptions=True
    )
    assert sum(not isinstance(one, Exception) for one in outcomes) == 3
    assert sum([await posted(books, one) for one in people]) == 3 * FIVE
    assert not (await ledger.audit(books, full=True)).violations


@pytest.mark.parametrize(("sql", "says"), [
    ("UPDATE redeem_codes SET used = used - 1", "0 uses counted, 1 made"),
    ("UPDATE redemptions SET amount_microusd = 4", "4 redeemed, 5000000 entered"),
    ("UPDATE redemptions SET id = 'rdm_' || SUBSTR(id, 5, 25) || '!'", "0 redeemed, 5000000 entered"),
])
async def test_the_audit_sees_what_does_not_agree(books: Database, sql: str, says: str) -> None:
    alice = (await enter(books)).account.id
    await redeem(books, alice, await made(books))

    def tamper():
        yield (sql, ())

    await books.run(tamper)
    for full in (True, False):
        found = (await ledger.audit(books, full=full)).violations
        assert any(one.rule == "R10" and says in one.detail for one in found), found


REDEEMER = """
import asyncio, sys, time
from models import redeem_code
from models.database import Database
from models.redeem_code import NotRedeemed
async def main(url, account, code, at):
    database = Database(url)
    await database.open()
    time.sleep(max(0, float(at) - time.time()))
    async def one():
        try:
            await database.run(lambda: redeem_code.redeem(account, code), deadline_s=20)
            return "given"
        except NotRedeemed as error:
            return str(error)
    print(*await asyncio.gather(*(one() for _ in range(8))), sep="|")
    await database.close()
asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.parametrize("uses", [1, 24])
async def test_eight_tries_each_of_three_processes_give_once(books: Database, uses: int) -> None:
    alice = (await enter(books)).account.id
    code = await made(books, uses_max=uses)
    at = str(time.time() + 2.5)
    processes = [
        await asyncio.create_subprocess_exec(
            sys.executable, "-c", REDEEMER, books.url, alice, code, at, cwd=ROOT,
            stdout=asyncio.subprocess.PIPE,
        )
        for _ in range(3)
    ]
    said = "|".join([(await one.communicate())[0].decode().strip() for one in processes]).split("|")
    assert sorted(said) == ["You have redeemed this code already."] * 23 + ["given"]
    assert await posted(books, alice) == FIVE
    assert (await the_code(books, code)).used == 1
    assert not (await ledger.audit(books, full=True)).violations
