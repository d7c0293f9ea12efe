"""The outbox: a mail is a row before it is sent, so that none is lost and none waits for a mail server.

Whoever delivers claims a letter by moving its due time ahead; one that died with it in hand leaves it to
the next. A letter may so arrive twice, but never not at all, unless a day of tries has failed.
"""

from __future__ import annotations

from dataclasses import dataclass

from models import ids
from models.clock import now_ms
from models.database import Database, Row, Script

CLAIMED_MS = 60 * 1000
TRIES_MAX = 12
WAITS_MS = (5_000, 30_000, 120_000, 600_000, 1_800_000, 3_600_000, 7_200_000)
KEPT_MS = 30 * 24 * 3600 * 1000
ERROR_LENGTH_MAX = 300
PRUNED_AT_ONCE = 500


@dataclass(frozen=True, slots=True)
class Letter:
    """Be one mail. `kind` names its templates."""

    recipient: str
    kind: str
    subject: str
    text: str
    html: str
    account_id: str | None = None


@dataclass(frozen=True, slots=True)
class Claimed:
    """Be a letter that is ours to send now."""

    id: str
    recipient: str
    subject: str
    text: str
    html: str
    tries: int


def put(letter: Letter) -> Script[None]:
    """Put a letter in the outbox, in the transaction that gives cause for it."""
    now = now_ms()
    yield (
        "INSERT INTO outbox (id, account_id, recipient, letter, subject, body_text, body_html, created_at_ms,"
        " due_at_ms) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            ids.new_id("mail"), letter.account_id, letter.recipient, letter.kind, letter.subject, letter.text,
            letter.html, now, now,
        ),
    )


async def is_due(database: Database) -> bool:
    """Return whether there is a letter to send."""
    return bool(await database.fetch(
        "SELECT 1 FROM outbox WHERE sent_at_ms IS NULL AND given_up_at_ms IS NULL AND due_at_ms <= ? LIMIT 1",
        (now_ms(),),
    ))


def claim(limit: int) -> Script[list[Claimed]]:
    """Take letters that are due, for a minute."""
    now = now_ms()
    due = yield (
        "SELECT id FROM outbox WHERE sent_at_ms IS NULL AND given_up_at_ms IS NULL AND due_at_ms <= ?"
        " ORDER BY due_at_ms LIMIT ?",
        (now, limit),
    )
    claimed = []
    for (letter_id,) in due:
        rows = yield (
            "UPDATE outbox SET due_at_ms = ?, tries = tries + 1 WHERE id = ? AND due_at_ms <= ?"
            " AND sent_at_ms IS NULL AND given_up_at_ms IS NULL"
            " RETURNING id, recipient, subject, body_text, body_html, tries",
            (now + CLAIMED_MS, letter_id, now),
        )
        claimed += [Claimed(*row) for row in rows]
    return claimed


def sent(letter_id: str) -> Script[None]:
    """Note that a letter was taken by the mail server. What it said is not kept."""
    yield (
        "UPDATE outbox SET sent_at_ms = ?, error = NULL, body_text = '', body_html = '' WHERE id = ?",
        (now_ms(), letter_id),
    )


def kept(letter_id: str) -> Script[None]:
    """Note that a letter was shown where mail only pretends to be sent; its text stays for the mailbox page."""
    yield ("UPDATE outbox SET sent_at_ms = ?, error = NULL WHERE id = ?", (now_ms(), letter_id))


def failed(letter: Claimed, error: str, *, for_good: bool) -> Script[None]:
    """Note that a letter was not taken: it is tried again later, or given up."""
    now = now_ms()
    if for_good or letter.tries >= TRIES_MAX:
        yield (
            "UPDATE outbox SET given_up_at_ms = ?, error = ? WHERE id = ?",
            (now, error[:ERROR_LENGTH_MAX], letter.id),
        )
        return
    wait_ms = WAITS_MS[min(letter.tries, len(WAITS_MS)) - 1]
    yield (
        "UPDATE outbox SET due_at_ms = ?, error = ? WHERE id = ?",
        (now + wait_ms, error[:ERROR_LENGTH_MAX], letter.id),
    )


async def latest(database: Database, limit: int) -> list[Row]:
    """Return the newest letters, for the mailbox page of a development house."""
    return list(await database.fetch(
        "SELECT id, recipient, letter, subject, body_text, body_html, created_at_ms, sent_at_ms FROM outbox"
        " ORDER BY id DESC LIMIT ?",
        (limit,),
    ))


def prune(at_ms: int) -> Script[bool]:
    """Forget letters that were sent or given up long ago, a batch of them; return whether there may be more."""
    rows = yield (
        "DELETE FROM outbox WHERE id IN (SELECT id FROM outbox WHERE (sent_at_ms IS NOT NULL"
        " OR given_up_at_ms IS NOT NULL) AND id < ? LIMIT ?) RETURNING id",
        (ids.first_id_at("mail", at_ms - KEPT_MS), PRUNED_AT_ONCE),
    )
    return len(rows) == PRUNED_AT_ONCE
