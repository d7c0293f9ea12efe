"""The background loops, as far as they can hold up calls."""

from __future__ import annotations

from typing import Any

import pytest

from models import ledger
from portal.loops import VIOLATIONS_LOGGED_MAX, Loops


async def test_books_that_are_wrong_throughout_are_no_flood_of_lines(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Lines are written on the event loop: millions of them held it up until the watchdog ended the process."""
    wrong = tuple(ledger.Violation("R3", f"req_{n}", "x") for n in range(VIOLATIONS_LOGGED_MAX + 7))

    async def audit(_: Any, *, full: bool) -> ledger.Audit:
        return ledger.Audit(1, 1, 1, wrong)

    monkeypatch.setattr(ledger, "audit", audit)
    nobody: Any = None
    await Loops(*[nobody] * 7)._audit()
    assert len(caplog.records) == VIOLATIONS_LOGGED_MAX + 1
    assert "in 7 more places" in caplog.text
