"""Payment cards: who an account is to a processor, and the card it agreed to have kept there.

The card itself never comes here: what is kept is the processor's name for it and what a person knows it by.
"""

from __future__ import annotations

from dataclasses import dataclass

from models.clock import now_ms
from models.database import Database, Script

FORMER_AGAIN_MS = 3600 * 1000


@dataclass(frozen=True, slots=True)
class Card:
    """Be a card kept at a processor for payments nobody is there for."""

    customer_id: str
    payment_method_id: str
    brand: str
    last4: str


def keep_customer(account_id: str, processor: str, customer_id: str) -> Script[str]:
    """Note who an account is to a processor, the first one noted, and return that."""
    rows = yield (
        "INSERT INTO payment_cards (account_id, processor, customer_id, created_at_ms) VALUES (?, ?, ?, ?)"
        " ON CONFLICT (account_id, processor) DO UPDATE SET customer_id = payment_cards.customer_id"
        " RETURNING customer_id",
        (account_id, processor, customer_id, now_ms()),
    )
    return rows[0][0]


def keep(account_id: str, processor: str, card: Card) -> Script[None]:
    """Keep a card instead of the one before. Its owner has agreed to it."""
    yield from keep_customer(account_id, processor, card.customer_id)
    yield (
        "UPDATE payment_cards SET payment_method_id = ?, brand = ?, last4 = ?, created_at_ms = ?"
        " WHERE account_id = ? AND processor = ? AND customer_id = ?",
        (card.payment_method_id, card.brand, card.last4, now_ms(), account_id, processor, card.customer_id),
    )


def forget(account_id: str, processor: str) -> Script[None]:
    """Keep no card any more; who the account is to the processor stays known."""
    yield (
        "UPDATE payment_cards SET payment_method_id = NULL, brand = NULL, last4 = NULL"
        " WHERE account_id = ? AND processor = ?",
        (account_id, processor),
    )


def forget_customer(account_id: str, processor: str) -> Script[None]:
    """Forget who an account was to a processor, and the card that was kept there: the processor did so."""
    yield ("DELETE FROM payment_cards WHERE account_id = ? AND processor = ?", (account_id, processor))


def leave(account_id: str) -> Script[None]:
    """Forget who an account was to all processors, and leave it to be forgotten there too."""
    yield (
        "INSERT INTO former_customers (processor, customer_id, due_at_ms)"
        " SELECT processor, customer_id, 0 FROM payment_cards WHERE account_id = ? ON CONFLICT DO NOTHING",
        (account_id,),
    )
    yield ("DELETE FROM payment_cards WHERE account_id = ?", (account_id,))


def claim_former(processor: str, at_ms: int, limit: int) -> Script[list[str]]:
    """Take customers that a processor is still to forget, for an hour; return who they are to it."""
    rows = yield (
        "SELECT customer_id FROM former_customers WHERE processor = ? AND due_at_ms <= ?"
        " ORDER BY due_at_ms LIMIT ?",
        (processor, at_ms, limit),
    )
    claimed = []
    for (customer_id,) in rows:
        taken = yield (
            "UPDATE former_customers SET due_at_ms = ? WHERE processor = ? AND customer_id = ? AND due_at_ms <= ?"
            " RETURNING 1",
            (at_ms + FORMER_AGAIN_MS, processor, customer_id, at_ms),
        )
        if taken:
            claimed.append(customer_id)
    return claimed


def forgotten(processor: str, customer_id: str) -> Script[None]:
    """Note that a processor has forgotten a customer."""
    yield ("DELETE FROM former_customers WHERE processor = ? AND customer_id = ?", (processor, customer_id))


async def customer_of(database: Database, account_id: str, processor: str) -> str | None:
    """Return who an account is to a processor."""
    rows = await database.fetch(
        "SELECT customer_id FROM payment_cards WHERE account_id = ? AND processor = ?", (account_id, processor)
    )
    return rows[0][0] if rows else None


async def find(database: Database, account_id: str, processor: str) -> Card | None:
    """Return the card an account has agreed to have kept."""
    rows = await database.fetch(
        "SELECT customer_id, payment_method_id, brand, last4 FROM payment_cards"
        " WHERE account_id = ? AND processor = ? AND payment_method_id IS NOT NULL",
        (account_id, processor),
    )
    return Card(*rows[0]) if rows else None
