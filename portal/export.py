"""Exports: an account's calls as CSV or JSON, of any number, written while they are read.

No more than one page of calls is in memory at a time, and an export rests for longer than it works: calls are
served by the same processor, and a million rows may take a minute more. What starts like a formula is made text:
names of keys and models are chosen by people, and a spreadsheet would run them.
"""

from __future__ import annotations

import asyncio
import csv
import io
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import msgspec

from models import call as calls
from models.database import Database, Row
from models.errors import DatabaseUnavailable
from models.money import usd
from portal.format import iso
from portal.result import outcome_of

PAGE_CALLS = 500
PIECE_CALLS = 100
REST_SHARE = 2
REST_S_MAX = 1
READ_DEADLINE_S = 30
TRIES = 3
TRY_PAUSE_S = 1
TYPES = {"csv": "text/csv; charset=utf-8", "json": "application/json"}
FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")
COLUMNS = (
    "created_at", "finished_at", "request_id", "key", "key_id", "model", "path", "stream", "result", "status",
    "error_code", "times", "input_tokens", "cached_input_tokens", "cache_write_tokens", "output_tokens",
    "reasoning_tokens", "estimated", "latency_ms", "first_byte_ms", "cost_usd", "charged_usd", "paid_from",
)

# What a row of a file is made from.
READ = (
    "id", "key_id", "offer", "path", "streamed", "state", "status", "error_code", "repeated", "input_tokens",
    "cached_input_tokens", "cache_write_tokens", "output_tokens", "checkpoint_output_tokens", "reasoning_tokens",
    "estimated", "latency_ms", "first_byte_ms", "cost_microusd", "charged_microusd", "charged_from",
    "created_at_ms", "finished_at_ms",
)

T = TypeVar("T")
Names = Callable[[set[str]], Awaitable[dict[str, str]]]


async def pieces(
    database: Database, account_id: str, narrowed: calls.Filter, kind: str, names: Names
) -> AsyncIterator[bytes]:
    """Give the pieces of a file of the calls that match, the newest first."""
    write = _csv if kind == "csv" else _json
    yield write([], first=True, last=False)
    wrote = False
    named: dict[str, str] = {}
    began = time.monotonic()
    async for rows in _pages(database, account_id, narrowed):
        await _rest(began)
        if unnamed := {row["key_id"] for row in rows} - named.keys():
            # A key that is gone has no name, and is not to be looked for again.
            named |= dict.fromkeys(unnamed, "") | await _patiently(lambda unnamed=unnamed: names(unnamed))
        for start in range(0, len(rows), PIECE_CALLS):
            began = time.monotonic()
            records = [_record(row, named) for row in rows[start : start + PIECE_CALLS]]
            piece = write(records, first=False, last=False, joined=wrote)
            await _rest(began)
            yield piece
            wrote = True
        began = time.monotonic()
    yield write([], first=False, last=True)


async def gently(rows: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Give another file's rows, many in a piece, and rest after each piece as for calls."""
    held, began = [], time.monotonic()
    async for row in rows:
        held.append(row)
        if len(held) == PIECE_CALLS:
            await _rest(began)
            yield b"".join(held)
            held, began = [], time.monotonic()
    yield b"".join(held)


async def _rest(since_s: float) -> None:
    """Leave the processor and the database to others, the longer the more work took, and so the busier they are."""
    await asyncio.sleep(min(REST_SHARE * (time.monotonic() - since_s), REST_S_MAX))


def defused(text: str) -> str:
    """Return a text as a cell that no spreadsheet takes for a formula."""
    return f"'{text}" if text.lstrip(" \u00a0\u3000").startswith(FORMULA_STARTS) else text


async def _pages(database: Database, account_id: str, narrowed: calls.Filter) -> AsyncIterator[list[Row]]:
    after = None
    while True:
        found = await _patiently(lambda after=after: calls.page(
            database, account_id, narrowed, limit=PAGE_CALLS, after=after, columns=READ, deadline_s=READ_DEADLINE_S
        ))
        if found.rows:
            yield list(found.rows)
        if found.reached is None and len(found.rows) < PAGE_CALLS:
            return
        after = found.reached or found.rows[-1]["id"]


async def _patiently(read: Callable[[], Awaitable[T]]) -> T:
    """Read, and once more if need be: a file that has begun cannot say that the database is busy."""
    for left in reversed(range(TRIES)):
        try:
            return await read()
        except DatabaseUnavailable:
            if not left:
                raise
            await asyncio.sleep(TRY_PAUSE_S)
    raise AssertionError("unreachable")


def _record(row: Row, names: dict[str, str]) -> dict[str, Any]:
    running = row["state"] == "open"
    return {
        "created_at": iso(row["created_at_ms"]),
        "finished_at": None if row["finished_at_ms"] is None else iso(row["finished_at_ms"]),
        "request_id": row["id"],
        "key": names.get(row["key_id"], ""),
        "key_id": row["key_id"],
        "model": row["offer"],
        "path": row["path"],
        "stream": bool(row["streamed"]),
        "result": outcome_of(row),
        "status": row["status"],
        "error_code": row["error_code"],
        "times": row["repeated"],
        "input_tokens": row["input_tokens"],
        "cached_input_tokens": row["cached_input_tokens"],
        "cache_write_tokens": row["cache_write_tokens"],
        "output_tokens": row["checkpoint_output_tokens"] if running else row["output_tokens"],
        "reasoning_tokens": row["reasoning_tokens"],
        "estimated": bool(row["estimated"]),
        "latency_ms": row["latency_ms"],
        "first_byte_ms": row["first_byte_ms"],
        "cost_usd": usd(row["cost_microusd"]),
        "charged_usd": usd(row["charged_microusd"]),
        "paid_from": row["charged_from"],
    }


def _csv(records: list[dict[str, Any]], *, first: bool, last: bool, joined: bool = False) -> bytes:
    if first:
        return (",".join(COLUMNS) + "\r\n").encode()
    text = io.StringIO()
    writer = csv.writer(text)
    for record in records:
        writer.writerow([_cell(value) for value in record.values()])
    return text.getvalue().encode()


def _cell(value: Any) -> Any:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return defused(value) if isinstance(value, str) else value


def _json(records: list[dict[str, Any]], *, first: bool, last: bool, joined: bool = False) -> bytes:
    if first:
        return b"["
    if last:
        return b"\n]\n"
    text = b",\n".join(msgspec.json.encode(record) for record in records)
    return (b",\n" if joined else b"\n") + text
