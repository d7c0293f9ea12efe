"""Payments: what processors tell of an order, refunds, disputes, the cards kept by consent.

Types and conventions as in the first migration. What was told and what the wallet has seen of it stand in
columns of their own, so that news may come in any order.
"""

from models.migrations._operations import RecordedMigration, Statements


class Migration(RecordedMigration):
    """Add what real payments need."""

    dependencies = [("models", "m0002_portal")]
    operations = [
        Statements([
            # What the buyer paid, tax included; the order's own amount is the credit it buys.
            "ALTER TABLE top_ups ADD COLUMN total_microusd BIGINT",
            "ALTER TABLE top_ups ADD COLUMN payment_id TEXT",
            "ALTER TABLE top_ups ADD COLUMN failure TEXT",
            "ALTER TABLE top_ups ADD COLUMN keeps_card BIGINT NOT NULL DEFAULT 0",
            "ALTER TABLE top_ups ADD COLUMN off_session BIGINT NOT NULL DEFAULT 0",
            "ALTER TABLE top_ups ADD COLUMN told_refunded_microusd BIGINT NOT NULL DEFAULT 0",
            "ALTER TABLE top_ups ADD COLUMN disputed_microusd BIGINT NOT NULL DEFAULT 0",
            "ALTER TABLE top_ups ADD COLUMN frozen BIGINT NOT NULL DEFAULT 0",
            "ALTER TABLE top_ups ADD COLUMN reversals BIGINT NOT NULL DEFAULT 0",
            "ALTER TABLE top_ups ADD COLUMN asked_at_ms BIGINT NOT NULL DEFAULT 0",
            "CREATE UNIQUE INDEX top_ups_payment ON top_ups (processor, payment_id)",
            # Orders whose payment, receipt or card is still to be asked for.
            "CREATE INDEX top_ups_open ON top_ups (asked_at_ms)"
            " WHERE state = 'pending' OR (state = 'paid' AND receipt_url IS NULL)",
            "CREATE INDEX top_ups_frozen ON top_ups (account_id) WHERE frozen = 1",
            """CREATE TABLE payment_cards (
                account_id TEXT NOT NULL,
                processor TEXT NOT NULL,
                customer_id TEXT NOT NULL,
                payment_method_id TEXT,
                brand TEXT,
                last4 TEXT,
                created_at_ms BIGINT NOT NULL,
                PRIMARY KEY (account_id, processor)
            )""",
            """CREATE TABLE refunds (
                id TEXT PRIMARY KEY,
                top_up_id TEXT NOT NULL,
                account_id TEXT NOT NULL,
                amount_microusd BIGINT NOT NULL CHECK (amount_microusd > 0),
                total_microusd BIGINT NOT NULL CHECK (total_microusd > 0),
                state TEXT NOT NULL CHECK (state IN ('pending', 'done', 'failed')),
                processor_refund_id TEXT,
                forced BIGINT NOT NULL DEFAULT 0,
                created_at_ms BIGINT NOT NULL,
                ended_at_ms BIGINT
            )""",
            "CREATE INDEX refunds_top_up ON refunds (top_up_id)",
            "CREATE INDEX refunds_pending ON refunds (created_at_ms) WHERE state = 'pending'",
            """CREATE TABLE disputes (
                id TEXT PRIMARY KEY,
                processor TEXT NOT NULL,
                payment_id TEXT NOT NULL,
                total_microusd BIGINT NOT NULL,
                state TEXT NOT NULL CHECK (state IN ('asked', 'open', 'won', 'lost')),
                created_at_ms BIGINT NOT NULL,
                closed_at_ms BIGINT
            )""",
            "CREATE INDEX disputes_payment ON disputes (processor, payment_id)",
            """CREATE TABLE payment_events (
                id TEXT PRIMARY KEY,
                processor TEXT NOT NULL,
                type TEXT NOT NULL,
                object_id TEXT NOT NULL,
                outcome TEXT NOT NULL CHECK (outcome IN ('done', 'ignored', 'refused')),
                detail TEXT,
                created_at_ms BIGINT NOT NULL
            )""",
            "CREATE INDEX payment_events_age ON payment_events (created_at_ms)",
        ])
    ]
