"""Accounts: the customers."""

from __future__ import annotations

from tortoise import fields
from tortoise.models import Model

from models import ids
from models.clock import now_ms
from models.database import Database, Script
from models.errors import DomainError, NotFound

ACTIVE = "active"
EMAIL_LENGTH_MAX = 254  # RFC 5321, section 4.5.3.1.3


class EmailTaken(DomainError):
    """Report that an account with this address exists."""


class InvalidEmail(DomainError):
    """Report an address that mail cannot be sent to."""


class Account(Model):
    """Hold one customer. `version` grows with every change that a cached caller must notice.

    `mailbox` is where its mail ends up, whatever alias the address is. The second factor is on when there is
    a `totp_secret`; `totp_last_step` is the last one whose code was used. `low_credit_microusd` is the credit
    below which a mail is sent, None for none; `mails_notices` whether notices other than of security are.
    """

    id = fields.CharField(primary_key=True, max_length=40)
    email = fields.TextField()
    name = fields.TextField(default="")
    time_zone = fields.TextField(default="UTC")
    mailbox = fields.TextField(null=True)
    password_hash = fields.TextField(null=True)
    totp_secret = fields.TextField(null=True)
    totp_last_step = fields.BigIntField(default=0)
    low_credit_microusd = fields.BigIntField(null=True)
    mails_notices = fields.BigIntField(default=1)
    email_verified_at_ms = fields.BigIntField(null=True)
    plan = fields.TextField()
    state = fields.TextField()
    version = fields.BigIntField(default=1)
    created_at_ms = fields.BigIntField()

    class Meta:
        table = "accounts"


def normal_email(text: str) -> str:
    """Return an address in the one form it is stored in. Raises InvalidEmail."""
    email = text.strip().lower()
    name, at, domain = email.rpartition("@")
    printable = email.isprintable() and not any(character.isspace() for character in email)
    if not (name and at and domain and printable) or len(email) > EMAIL_LENGTH_MAX or "@" in name:
        raise InvalidEmail(f"{text!r} is not an e-mail address")
    return email


async def create(database: Database, email: str, *, plan: str, verified: bool = False) -> Account:
    """Create an account with an empty wallet. Raises EmailTaken or InvalidEmail."""
    now = now_ms()
    account = Account(
        id=ids.new_id("acc"),
        email=normal_email(email),
        email_verified_at_ms=now if verified else None,
        plan=plan,
        state=ACTIVE,
        version=1,
        created_at_ms=now,
    )
    await database.run(lambda: _insert(account))
    account._saved_in_db = True  # so that `save` updates
    return account


async def by_email(email: str) -> Account:
    """Return the account with this address. Raises NotFound."""
    account = await Account.get_or_none(email=normal_email(email))
    if account is None:
        raise NotFound(f"there is no account {email}")
    return account


def _insert(account: Account) -> Script[None]:
    rows = yield (
        "INSERT INTO accounts (id, email, email_verified_at_ms, plan, state, version, created_at_ms)"
        " VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (email) DO NOTHING RETURNING id",
        (
            account.id, account.email, account.email_verified_at_ms, account.plan, account.state,
            account.version, account.created_at_ms,
        ),
    )
    if not rows:
        raise EmailTaken(f"an account {account.email} exists")
    yield ("INSERT INTO wallets (account_id) VALUES (?)", (account.id,))
