"""Idempotency keys: claimed once, kept with the answer, freed by failures, forgotten after a day."""

from __future__ import annotations

import pytest

from models import idempotency
from models.database import Database
from models.idempotency import KEPT_MS, Claim, Kept, StoredAnswer, claim, fail, find, forget, keep, prune

NOW = 1_800_000_000_000
ANSWER = StoredAnswer(200, "application/json", b'{"a": "\x00\xff"}')


def claiming(books, call_id="req_1", fingerprint="f", *, at_ms=NOW, account="a", key="k"):
    return books.run(lambda: claim(account, Claim(key, fingerprint), call_id, at_ms))


def running(call_id="req_1", fingerprint="f"):
    return Kept(call_id, fingerprint, "running", None, None, None)


async def test_a_key_is_claimed_once(books):
    assert await claiming(books) is None
    assert await claiming(books, "req_2", "g") == running()
    assert await find(books, "a", "k", NOW) == running()
    assert await find(books, "a", "other", NOW) is None


async def test_keys_belong_to_their_account(books):
    assert await claiming(books) is None
    assert await claiming(books, "req_2", account="b") is None
    assert await claiming(books, "req_3", key="K") is None


async def test_the_answer_is_kept_byte_for_byte(books):
    await claiming(books)
    await books.run(lambda: keep("a", "k", "req_1", ANSWER))
    kept = Kept("req_1", "f", "done", 200, "application/json", ANSWER.body)
    assert await claiming(books, "req_2") == await find(books, "a", "k", NOW) == kept


@pytest.mark.parametrize(
    ("change", "state", "status"),
    [
        (lambda: keep("a", "k", "req_1", StoredAnswer(200, "x", None)), "lost", 200),
        (lambda: keep("a", "k", "req_1", StoredAnswer(200, "x", b"")), "done", 200),
        (lambda: fail("a", "k", "req_1"), "failed", 502),
    ],
)
async def test_what_a_key_may_become(books, change, state, status):
    await claiming(books)
    await books.run(change)
    kept = await claiming(books, "req_2")
    assert (kept.state, kept.status) == (state, status)


async def test_a_key_freed_by_a_failure_is_claimed_anew(books):
    await claiming(books)
    await books.run(lambda: forget("a", "k", "req_1"))
    assert await find(books, "a", "k", NOW) is None
    assert await claiming(books, "req_2", "g") is None


@pytest.mark.parametrize(
    "change",
    [
        lambda: keep("a", "k", "req_0", ANSWER),
        lambda: fail("a", "k", "req_0"),
        lambda: forget("a", "k", "req_0"),
        lambda: keep("b", "k", "req_1", ANSWER),
        lambda: forget("a", "j", "req_1"),
    ],
)
async def test_only_the_call_that_claimed_a_key_changes_it(books, change):
    await claiming(books)
    await books.run(change)
    assert await find(books, "a", "k", NOW) == running()


async def test_a_key_is_kept_for_a_day(books):
    await claiming(books)
    await books.run(lambda: keep("a", "k", "req_1", ANSWER))
    last = NOW + KEPT_MS - 1
    assert (await find(books, "a", "k", last)).state == "done"
    assert (await claiming(books, "req_2", "g", at_ms=last)).state == "done"
    assert await find(books, "a", "k", last + 1) is None
    assert await claiming(books, "req_2", "g", at_ms=last + 1) is None
    assert await find(books, "a", "k", last + 1) == running("req_2", "g")


async def test_a_call_that_still_runs_keeps_its_key_however_old(books):
    await claiming(books)
    long_after = NOW + 3 * KEPT_MS
    assert await claiming(books, "req_2", at_ms=long_after) == running()
    await books.run(lambda: prune(long_after))
    assert await find(books, "a", "k", long_after) == running()


async def test_expired_keys_are_forgotten(books):
    for n, key in enumerate("kl"):
        await claiming(books, key=key, at_ms=NOW + n)
        await books.run(lambda key=key: keep("a", key, "req_1", ANSWER))
    await books.run(lambda: prune(NOW + KEPT_MS))
    assert [row[0] for row in await books.fetch("SELECT key FROM idempotency_keys")] == ["l"]


async def test_expired_keys_go_in_batches(books: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idempotency, "PRUNED_AT_ONCE", 2)
    for n in range(5):
        await books.run(lambda n=n: claim("acc_1", Claim(f"k{n}", "f"), f"req_{n}", NOW + n))
        await books.run(lambda n=n: keep("acc_1", f"k{n}", f"req_{n}", StoredAnswer(200, "text/plain", b"x")))
    left = []
    while await books.run(lambda: prune(NOW + KEPT_MS + 3)):
        left.append(len(await books.fetch("SELECT key FROM idempotency_keys")))
    assert left == [3, 1]
    assert [row[0] for row in await books.fetch("SELECT key FROM idempotency_keys")] == ["k4"]
