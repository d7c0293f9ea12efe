"""One-time links: used once, in time, for what they were made for."""

from __future__ import annotations

import pytest

from models import one_time_link
from models.database import Database
from models.one_time_link import CHANGE_EMAIL, LIFE_MS, RESET, LinkUsed, make, redeem


@pytest.mark.parametrize(("purpose", "late_ms", "good"), [
    (RESET, LIFE_MS - 1, True), (RESET, LIFE_MS, False), (CHANGE_EMAIL, 0, False),
])
async def test_a_link_is_redeemed_in_time_and_for_its_purpose(
    books: Database, monkeypatch: pytest.MonkeyPatch, purpose: str, late_ms: int, good: bool
) -> None:
    now_ms = one_time_link.now_ms()
    monkeypatch.setattr(one_time_link, "now_ms", lambda: now_ms)
    await books.run(lambda: make(RESET, "secret", "acc_1", "ada@example.com"))
    monkeypatch.setattr(one_time_link, "now_ms", lambda: now_ms + late_ms)
    if good:
        assert (await books.run(lambda: redeem(purpose, "secret"))).account_id == "acc_1"
    for secret in ("secret", "another"):
        with pytest.raises(LinkUsed):
            await books.run(lambda secret=secret: redeem(purpose, secret))
