"""Accounts: the customers."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace

from tortoise import fields
from tortoise.models import Model

from models import ids, one_time_link, outbox, payment_card, session
from models.clock import now_ms
from models.database import Database, Row, Script
from models.errors import DomainError, NotFound

ACTIVE = "active"
EMAIL_LENGTH_MAX = 254  # RFC 5321, section 4.5.3.1.3
# What has a meaning of its own in the header of a mail, and in no address that anybody uses.
MEANINGFUL = frozenset("()<>[]:;,\\\"")
DOTLESS_DOMAINS = {"gmail.com": "gmail.com", "googlemail.com": "gmail.com"}
# Where everybody may have a mailbox, and nobody as many as he likes.
SHARED_DOMAINS = frozenset((
    "126.com", "163.com", "aol.com", "fastmail.com", "gmail.com", "gmx.at", "gmx.ch", "gmx.com", "gmx.de",
    "gmx.net", "hey.com", "hotmail.com", "icloud.com", "live.com", "mac.com", "mail.com", "mail.ru", "me.com",
    "msn.com", "naver.com", "outlook.com", "pm.me", "proton.me", "protonmail.com", "qq.com", "t-online.de",
    "tuta.com", "web.de", "yahoo.com", "yandex.com", "yandex.ru", "zoho.com",
))
# Below these, a country's registry gives names as it does below the country itself: "example.co.uk".
REGISTRIES = frozenset(("ac", "co", "com", "edu", "gob", "gov", "net", "or", "org"))


class EmailTaken(DomainError):
    """Report that an account with this address exists."""


class PasswordChanged(DomainError):
    """Report that the password that was checked is not the account's any more."""


class InvalidEmail(DomainError):
    """Report an address that mail cannot be sent to."""


class Account(Model):
    """Hold one customer. `version` grows with every change that a cached caller must notice.

    `mailbox` is where its mail ends up, whatever alias the address is. The second factor is on when there is
    a `totp_secret`; `totp_last_step` is the last one whose code was used. `mails_notices` says whether notices
    other than of security and of credit are sent.
    """

    id = fields.CharField(primary_key=True, max_length=40)
    email = fields.TextField()
    name = fields.TextField(default="")
    time_zone = fields.TextField(default="UTC")
    mailbox = fields.TextField(null=True)
    password_hash = fields.TextField(null=True)
    totp_secret = fields.TextField(null=True)
    totp_last_step = fields.BigIntField(default=0)
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
    ordinary = email.isprintable() and not any(
        character.isspace() or character in MEANINGFUL for character in email
    )
    if not (name and at and domain and ordinary) or len(email) > EMAIL_LENGTH_MAX or "@" in name:
        raise InvalidEmail(f"{text!r} is not an e-mail address")
    return email


def mailbox_of(email: str) -> str:
    """Return where mail to a normal address ends up: tags, the dots of Gmail and spellings of a domain aside."""
    name, _, domain = email.rpartition("@")
    name = name.partition("+")[0] or name
    with suppress(UnicodeError):
        domain = domain.rstrip(".").encode("idna").decode()
    if domain in DOTLESS_DOMAINS:
        name, domain = name.replace(".", "") or name, DOTLESS_DOMAINS[domain]
    return f"{name}@{domain}"


def owner_domain_of(mailbox: str) -> str | None:
    """Return the domain whose owner can make any number of such mailboxes; None where nobody can."""
    labels = mailbox.rpartition("@")[2].split(".")
    is_below_registry = len(labels) > 2 and len(labels[-1]) == 2 and labels[-2] in REGISTRIES
    domain = ".".join(labels[-3 if is_below_registry else -2:])
    return None if domain in SHARED_DOMAINS else domain


def gate_of(mailbox: str) -> str:
    """Return the gate behind which a mailbox is given to an account: one of several at once gets it."""
    return f"mailbox:{mailbox}"


async def create(database: Database, email: str, *, plan: str, verified: bool = False) -> Account:
    """Create an account with an empty wallet. Raises EmailTaken or InvalidEmail."""
    now = now_ms()
    account = Account(
        id=ids.new_id("acc"),
        email=normal_email(email),
        mailbox=mailbox_of(normal_email(email)),
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


@dataclass(frozen=True, slots=True)
class SignUp:
    """Hold what somebody asks for who signs up.

    `secret` is the one-time link's. `welcome` goes to the address that was typed; `known` is what the owner of
    an account with this mailbox gets, at the account's own address.
    """

    email: str
    password_hash: str
    plan: str
    secret: str
    welcome: outbox.Letter
    known: outbox.Letter


def sign_up(wanted: SignUp) -> Script[None]:
    """Make an account that is not verified and mail its link; mail its owner when there is a verified one.

    To be run behind the gate of this mailbox, which keeps two sign-ups at the same moment from making two
    accounts of it.
    """
    mailbox = mailbox_of(wanted.email)
    found = yield (
        "SELECT id, email, email_verified_at_ms FROM accounts WHERE mailbox = ? OR email = ?"
        " ORDER BY email_verified_at_ms IS NULL, id LIMIT 1",
        (mailbox, wanted.email),
    )
    if found and found[0]["email_verified_at_ms"] is not None:
        yield from outbox.put(replace(wanted.known, recipient=found[0]["email"], account_id=found[0]["id"]))
        return
    account_id = found[0]["id"] if found else ids.new_id("acc")
    if not found:
        yield from _insert(Account(
            id=account_id, email=wanted.email, mailbox=mailbox, plan=wanted.plan, state=ACTIVE, version=1,
            created_at_ms=now_ms(),
        ))
    yield from one_time_link.make(
        one_time_link.VERIFY, wanted.secret, account_id, wanted.email, wanted.password_hash
    )
    yield from outbox.put(replace(wanted.welcome, account_id=account_id))


def verify(secret: str, password_hash: str | None = None) -> Script[str]:
    """Use a verification link and return its account's id. Raises LinkUsed.

    The account gets the address of the sign-up that the link was mailed for, and its password unless another
    is given. To be run behind the gate of the link's mailbox.
    """
    link = yield from one_time_link.redeem(one_time_link.VERIFY, secret)
    if (yield _other_with(link.email, link.account_id)):
        raise one_time_link.LinkUsed
    rows = yield (
        "UPDATE accounts SET email = ?, mailbox = ?, password_hash = ?, email_verified_at_ms = ?,"
        " version = version + 1 WHERE id = ? AND state = 'active' AND email_verified_at_ms IS NULL RETURNING id",
        (link.email, mailbox_of(link.email), password_hash or link.password_hash, now_ms(), link.account_id),
    )
    if not rows:
        raise one_time_link.LinkUsed
    yield from session.end_all(link.account_id)
    return link.account_id


async def for_sign_in(database: Database, email: str) -> Row | None:
    """Return what a sign-in needs of the verified, active account with this normal address."""
    rows = await database.fetch(
        "SELECT id, email, password_hash, totp_secret FROM accounts WHERE email = ? AND state = 'active'"
        " AND email_verified_at_ms IS NOT NULL",
        (email,),
    )
    return rows[0] if rows else None


async def of_id(database: Database, account_id: str) -> Row:
    """Return the columns of an account that its owner sees and changes. Raises NotFound."""
    rows = await database.fetch(
        "SELECT id, email, name, time_zone, password_hash, totp_secret, totp_last_step, mails_notices,"
        " email_verified_at_ms, plan, created_at_ms FROM accounts WHERE id = ?",
        (account_id,),
    )
    if not rows:
        raise NotFound(f"there is no account {account_id}")
    return rows[0]


def keep_rehashed(account_id: str, old_hash: str, new_hash: str) -> Script[None]:
    """Store the same password hashed with today's parameters."""
    yield (
        "UPDATE accounts SET password_hash = ? WHERE id = ? AND password_hash = ?", (new_hash, account_id, old_hash)
    )


def hold(account_id: str, password_hash: str) -> Script[None]:
    """Lock an account whose password was checked. Raises PasswordChanged when it has another by now."""
    rows = yield (
        "UPDATE accounts SET version = version WHERE id = ? AND password_hash = ? AND state = 'active'"
        " RETURNING id",
        (account_id, password_hash),
    )
    if not rows:
        raise PasswordChanged


def set_profile(account_id: str, name: str, time_zone: str) -> Script[None]:
    """Change the name and the time zone."""
    yield ("UPDATE accounts SET name = ?, time_zone = ? WHERE id = ?", (name, time_zone, account_id))


def set_notices(account_id: str, wanted: bool) -> Script[None]:
    """Change whether notices are sent."""
    yield ("UPDATE accounts SET mails_notices = ? WHERE id = ?", (int(wanted), account_id))


def set_password(
    account_id: str, password_hash: str, notice: outbox.Letter, *, kept_session: str = ""
) -> Script[None]:
    """Change the password, end the sessions but one, void links of the old one's time, and tell the owner.

    A change of address that was asked for is void as well: whoever asked knew the old password.
    """
    rows = yield (
        "UPDATE accounts SET password_hash = ? WHERE id = ? AND state = 'active' RETURNING email",
        (password_hash, account_id),
    )
    if not rows:
        raise NotFound(f"there is no account {account_id}")
    yield from session.end_all(account_id, but=kept_session)
    for purpose in (one_time_link.RESET, one_time_link.CHANGE_EMAIL):
        yield from one_time_link.void(account_id, purpose)
    yield from outbox.put(replace(notice, recipient=rows[0]["email"], account_id=account_id))


def ask_reset(email: str, secret: str, letter: outbox.Letter) -> Script[None]:
    """Mail a reset link when there is a verified account with this address; else do nothing."""
    found = yield (
        "SELECT id FROM accounts WHERE email = ? AND state = 'active' AND email_verified_at_ms IS NOT NULL",
        (email,),
    )
    if found:
        yield from one_time_link.make(one_time_link.RESET, secret, found[0]["id"], email)
        yield from outbox.put(replace(letter, account_id=found[0]["id"]))


def reset(secret: str, password_hash: str, notice: outbox.Letter) -> Script[str]:
    """Use a reset link and return its account's id. Raises LinkUsed."""
    link = yield from one_time_link.redeem(one_time_link.RESET, secret)
    try:
        yield from set_password(link.account_id, password_hash, notice)
    except NotFound:
        raise one_time_link.LinkUsed from None
    return link.account_id


@dataclass(frozen=True, slots=True)
class EmailChange:
    """Hold the letters of a change of address.

    `confirm` goes to the new address, `notice` to the old one; `known` goes to the owner of another account
    that has the new address already.
    """

    email: str
    secret: str
    confirm: outbox.Letter
    notice: outbox.Letter
    known: outbox.Letter


def ask_email_change(account_id: str, wanted: EmailChange) -> Script[None]:
    """Mail a link to a new address and tell the old one."""
    own = yield ("SELECT email FROM accounts WHERE id = ?", (account_id,))
    other = yield _other_with(wanted.email, account_id)
    if other:
        yield from one_time_link.void(account_id, one_time_link.CHANGE_EMAIL)
        yield from outbox.put(replace(wanted.known, recipient=other[0]["email"], account_id=other[0]["id"]))
    else:
        yield from one_time_link.make(one_time_link.CHANGE_EMAIL, wanted.secret, account_id, wanted.email)
        yield from outbox.put(replace(wanted.confirm, account_id=account_id))
    yield from outbox.put(replace(wanted.notice, recipient=own[0]["email"], account_id=account_id))


def change_email(secret: str, notice: outbox.Letter) -> Script[str]:
    """Use the link of a change of address, tell the old one, and return the account's id. Raises LinkUsed.

    Links that were mailed to the old address are void, and sessions that began under it end. To be run behind
    the gate of the new mailbox.
    """
    link = yield from one_time_link.redeem(one_time_link.CHANGE_EMAIL, secret)
    old = yield ("SELECT email FROM accounts WHERE id = ? AND state = 'active'", (link.account_id,))
    other = yield _other_with(link.email, link.account_id)
    if not old or other:
        raise one_time_link.LinkUsed
    yield from _make_room(link.email, link.account_id)
    yield (
        "UPDATE accounts SET email = ?, mailbox = ?, version = version + 1 WHERE id = ?",
        (link.email, mailbox_of(link.email), link.account_id),
    )
    yield from one_time_link.void(link.account_id, one_time_link.RESET)
    yield from session.end_all(link.account_id)
    yield from outbox.put(replace(notice, recipient=old[0]["email"], account_id=link.account_id))
    return link.account_id


def close(account_id: str, notice: outbox.Letter) -> Script[None]:
    """Close an account for good: keys revoked, sessions ended, its person forgotten; the books stay."""
    rows = yield (
        "UPDATE accounts SET version = version WHERE id = ? AND state = 'active' RETURNING email", (account_id,)
    )
    if not rows:
        raise NotFound(f"there is no account {account_id}")
    now = now_ms()
    yield (
        "UPDATE accounts SET state = 'closed', email = ?, mailbox = NULL, name = '', time_zone = 'UTC',"
        " password_hash = NULL, totp_secret = NULL, version = version + 1 WHERE id = ?",
        (f"{account_id}@closed.invalid", account_id),
    )
    yield (
        "UPDATE api_keys SET revoked_at_ms = ?, version = version + 1 WHERE account_id = ?"
        " AND revoked_at_ms IS NULL",
        (now, account_id),
    )
    yield (
        "UPDATE wallets SET low_credit_microusd = 0, recharge_below_microusd = 0 WHERE account_id = ?",
        (account_id,),
    )
    for table in (
        "sessions", "recovery_codes", "passkeys", "one_time_links", "outbox", "low_credits", "auto_recharges",
    ):
        yield (f"DELETE FROM {table} WHERE account_id = ?", (account_id,))
    yield from payment_card.leave(account_id)
    yield from outbox.put(replace(notice, recipient=rows[0]["email"], account_id=None))


def _other_with(email: str, account_id: str) -> tuple[str, tuple[str, str, str]]:
    return (
        "SELECT id, email FROM accounts WHERE (mailbox = ? OR email = ?) AND id <> ?"
        f" AND NOT ({_ONLY_SIGNED_UP}) LIMIT 1",
        (mailbox_of(email), email, account_id),
    )


def _make_room(email: str, account_id: str) -> Script[None]:
    """Close other accounts of a mailbox that nobody ever verified: a stranger's sign-up keeps no owner out."""
    rows = yield (
        "UPDATE accounts SET state = 'closed', email = id || '@closed.invalid', mailbox = NULL,"
        f" version = version + 1 WHERE (mailbox = ? OR email = ?) AND id <> ? AND {_ONLY_SIGNED_UP} RETURNING id",
        (mailbox_of(email), email, account_id),
    )
    for row in rows:
        yield ("DELETE FROM one_time_links WHERE account_id = ?", (row["id"],))


# An account of which there is nothing but the form that somebody sent.
_ONLY_SIGNED_UP = (
    "email_verified_at_ms IS NULL AND NOT EXISTS (SELECT 1 FROM api_keys k WHERE k.account_id = accounts.id)"
    " AND NOT EXISTS (SELECT 1 FROM ledger l WHERE l.account_id = accounts.id)"
)


def _insert(account: Account) -> Script[None]:
    rows = yield (
        "INSERT INTO accounts (id, email, mailbox, email_verified_at_ms, plan, state, version, created_at_ms)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (email) DO NOTHING RETURNING id",
        (
            account.id, account.email, account.mailbox, account.email_verified_at_ms, account.plan, account.state,
            account.version, account.created_at_ms,
        ),
    )
    if not rows:
        raise EmailTaken(f"an account {account.email} exists")
    yield ("INSERT INTO wallets (account_id) VALUES (?)", (account.id,))
