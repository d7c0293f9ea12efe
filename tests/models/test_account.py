"""Accounts: one per address, each with a wallet."""

from __future__ import annotations

import asyncio

import pytest

from models import account as accounts
from models import wallet
from models.account import Account, EmailTaken, InvalidEmail, mailbox_of, normal_email
from models.errors import NotFound


@pytest.mark.parametrize(
    ("text", "email"),
    [
        ("alice@example.com", "alice@example.com"), ("  Alice@Example.COM\n", "alice@example.com"),
        ("a+b.c@sub.example.org", "a+b.c@sub.example.org"), ("müller@exämple.de", "müller@exämple.de"),
        (f"{'a' * 242}@example.com", f"{'a' * 242}@example.com"),
    ],
)
def test_addresses_have_one_form(text, email):
    assert normal_email(text) == email
    assert normal_email(email) == email


@pytest.mark.parametrize(
    "text",
    [
        "", " ", "alice", "@example.com", "alice@", "a@b@c", "al ice@example.com", "alice@exam\tple.com",
        "alice@example.com\r\nBcc: x@y.z", "alice\x00@example.com", "al\u200bice@example.com",
        f"{'a' * 243}@example.com", "<alice@example.com>", "alice@example.com,bob@example.com",
        'al"ice@example.com',
    ],
)
def test_what_is_no_address(text):
    with pytest.raises(InvalidEmail):
        normal_email(text)


@pytest.mark.parametrize(
    ("email", "mailbox"),
    [
        ("ada@example.com", "ada@example.com"), ("ada+tag+more@example.com", "ada@example.com"),
        ("a.d.a@example.com", "a.d.a@example.com"), ("a.d.a+x@gmail.com", "ada@gmail.com"),
        ("a.da@googlemail.com", "ada@gmail.com"), ("+tag@example.com", "+tag@example.com"),
        ("ada@exämple.com", "ada@xn--exmple-cua.com"), ("ada@xn--exmple-cua.com", "ada@xn--exmple-cua.com"),
        ("ada@example.com.", "ada@example.com"), ("...@gmail.com", "...@gmail.com"),
    ],
)
def test_where_mail_ends_up(email, mailbox):
    assert mailbox_of(normal_email(email)) == mailbox
    assert mailbox_of(mailbox) == mailbox


async def test_an_account_comes_with_an_empty_wallet(books):
    made = await accounts.create(books, "Alice@example.com", plan="free")
    assert (made.email, made.plan, made.state, made.version) == ("alice@example.com", "free", "active", 1)
    assert made.email_verified_at_ms is None
    assert await wallet.balance(books, made.id) == wallet.Balance(0, 0, False)
    (stored,) = await Account.filter(id=made.id).values()
    assert stored == {name: getattr(made, name) for name in stored}
    verified = await accounts.create(books, "bob@example.com", plan="free", verified=True)
    assert verified.email_verified_at_ms == verified.created_at_ms


async def test_what_create_returns_can_be_changed_and_saved(books):
    made = await accounts.create(books, "alice@example.com", plan="free")
    made.state = "suspended"
    await made.save()
    assert (await accounts.by_email("alice@example.com")).state == "suspended"


async def test_an_address_is_taken_once_however_written(books):
    made = await accounts.create(books, "alice@example.com", plan="free")
    with pytest.raises(EmailTaken):
        await accounts.create(books, " ALICE@example.com", plan="free")
    outcomes = await asyncio.gather(
        *(accounts.create(books, "bob@example.com", plan="free") for _ in range(10)), return_exceptions=True
    )
    assert sum(isinstance(outcome, Account) for outcome in outcomes) == 1
    assert sum(isinstance(outcome, EmailTaken) for outcome in outcomes) == 9
    assert (await accounts.by_email(" Alice@EXAMPLE.com ")).id == made.id
    assert len(await books.fetch("SELECT account_id FROM wallets")) == 2


async def test_unknown_addresses(books):
    with pytest.raises(NotFound):
        await accounts.by_email("nobody@example.com")
    with pytest.raises(InvalidEmail):
        await accounts.by_email("nobody")
