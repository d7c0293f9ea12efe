"""Everything an account owns, as one JSON document that is written piece by piece."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec

from models.call import CALL_ID_SQL
from models.database import Database

PAGE_ROWS = 500
# Table, columns, the columns of its account and its order. Hashes and public keys are left out: they open or
# prove something, and tell their owner nothing.
PARTS = (
    ("accounts", "id, email, name, time_zone, email_verified_at_ms, plan, state, mails_notices,"
     " created_at_ms", "id", "id"),
    ("wallets", "posted_microusd, held_microusd, low_credit_microusd, account_id", "account_id", "account_id"),
    ("api_keys", "id, name, shown_prefix, shown_suffix, scopes, models, addresses, spend_limit_microusd,"
     " spend_period, requests_per_minute, created_at_ms, expires_at_ms, revoked_at_ms, last_used_at_ms,"
     " rotated_from", "account_id", "id"),
    ("sessions", "id, state, address, agent, created_at_ms, seen_at_ms, expires_at_ms", "account_id", "id"),
    ("passkeys", "id, name, created_at_ms, last_used_at_ms", "account_id", "id"),
    ("included_calls", "month, used", "account_id", "month"),
    ("top_ups", "id, amount_microusd, total_microusd, processor, state, receipt_url, refunded_microusd,"
     " disputed_microusd, created_at_ms, paid_at_ms", "account_id", "id"),
    ("payment_cards", "processor, customer_id, brand, last4, created_at_ms", "account_id", "processor"),
    ("refunds", "id, top_up_id, amount_microusd, state, created_at_ms, ended_at_ms", "account_id", "id"),
    ("ledger", "seq, kind, reference, amount_microusd, balance_after_microusd, reason, created_at_ms",
     "account_id", "seq"),
    ("auto_recharges", "account_id, is_on, below_microusd, amount_microusd, ceiling_microusd, off_reason,"
     " changed_at_ms", "account_id", "account_id"),
    ("redemptions", "id, code_id, amount_microusd, redeemed_at_ms", "account_id", "id"),
    ("outbox", "id, recipient, letter, subject, created_at_ms, sent_at_ms", "account_id", "id"),
    ("calls", "id, key_id, surface, path, offer, streamed, state, status, error_code, finish_reason, input_tokens,"
     " cached_input_tokens, cache_write_tokens, output_tokens, reasoning_tokens, images, audio_ms, characters,"
     " cost_microusd, charged_microusd, charged_from, latency_ms, first_byte_ms, repeated, created_at_ms,"
     " finished_at_ms", "account_id", "id"),
)


async def of_account(database: Database, account_id: str) -> AsyncIterator[bytes]:
    """Yield the document: an object with a list of rows for each table."""
    separator = b"{"
    for table, columns, owner, order in PARTS:
        yield separator + b'"%s":[' % table.encode()
        separator = b"],\n"
        comma = b"\n"
        async for row in _rows(database, table, columns, owner, order, account_id):
            yield comma + msgspec.json.encode(row)
            comma = b",\n"
    yield b"]}\n"


async def _rows(
    database: Database, table: str, columns: str, owner: str, order: str, account_id: str
) -> AsyncIterator[dict[str, object]]:
    """Yield an account's rows of a table, read page by page, so that memory does not grow with history."""
    names = [column.strip() for column in columns.split(",")]
    order_sql = CALL_ID_SQL[database.dialect] if table == "calls" else order
    after, arguments = "", (account_id,)
    while True:
        rows = await database.report_in_bulk(
            f"SELECT {columns} FROM {table} WHERE {owner} = ?{after} ORDER BY {order_sql} LIMIT {PAGE_ROWS}",
            arguments, names,
        )
        for row in rows:
            yield dict(row)
        if len(rows) < PAGE_ROWS:
            return
        after, arguments = f" AND {order_sql} > ?", (account_id, rows[-1][order])
