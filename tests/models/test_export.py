"""The document of everything an account owns."""

from __future__ import annotations

import json
from collections import Counter

from models import export, payment_card
from models.database import Database
from models.payment_card import Card
from tests.cast import enter


async def test_every_part_has_a_name_of_its_own(books: Database) -> None:
    alice = (await enter(books)).account.id
    await books.run(lambda: payment_card.keep(alice, "test", Card("cus_1", "pm_1", "visa", "4242")))
    names: Counter[str] = Counter()

    def seen(pairs: list[tuple[str, object]]) -> dict[str, object]:
        if any(name == "ledger" for name, _ in pairs):
            names.update(name for name, _ in pairs)
        return dict(pairs)

    text = b"".join([piece async for piece in export.of_account(books, alice)])
    taken = json.loads(text, object_pairs_hook=seen)
    assert set(names.values()) == {1}, names
    (card,) = taken["payment_cards"]
    assert (card["customer_id"], card["last4"]) == ("cus_1", "4242")
    assert "pm_1" not in text.decode()
