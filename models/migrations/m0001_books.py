"""Accounts, keys and the books: wallets, ledger, calls and what guards them.

Types are the two both databases keep alike: TEXT, and BIGINT for every number: money in
micro-dollars, times in milliseconds since 1970, flags as 0 and 1. The hot tables carry no foreign
keys: their rows are written only by the scripts of models/, which name accounts they have just read.
"""

from models.migrations._operations import RecordedMigration, Statements


class Migration(RecordedMigration):
    """Create the first tables."""

    dependencies = []
    operations = [
        Statements(
            [
                """CREATE TABLE accounts (
                    id TEXT PRIMARY KEY,
                    email TEXT NOT NULL UNIQUE,
                    email_verified_at_ms BIGINT,
                    plan TEXT NOT NULL,
                    state TEXT NOT NULL CHECK (state IN ('active', 'suspended', 'closed')),
                    version BIGINT NOT NULL DEFAULT 1,
                    created_at_ms BIGINT NOT NULL
                )""",
                """CREATE TABLE api_keys (
                    id TEXT PRIMARY KEY,
                    account_id TEXT NOT NULL REFERENCES accounts (id),
                    name TEXT NOT NULL,
                    hash TEXT NOT NULL UNIQUE,
                    shown_prefix TEXT NOT NULL,
                    shown_suffix TEXT NOT NULL,
                    scopes TEXT,
                    models TEXT,
                    addresses TEXT,
                    spend_limit_microusd BIGINT CHECK (spend_limit_microusd >= 0),
                    spend_period TEXT CHECK (spend_period IN ('day', 'month')),
                    requests_per_minute BIGINT CHECK (requests_per_minute > 0),
                    hidden BIGINT NOT NULL DEFAULT 0,
                    version BIGINT NOT NULL DEFAULT 1,
                    created_at_ms BIGINT NOT NULL,
                    expires_at_ms BIGINT,
                    revoked_at_ms BIGINT,
                    last_used_at_ms BIGINT,
                    CHECK ((spend_limit_microusd IS NULL) = (spend_period IS NULL))
                )""",
                "CREATE INDEX api_keys_account ON api_keys (account_id, id)",
                """CREATE TABLE wallets (
                    account_id TEXT PRIMARY KEY REFERENCES accounts (id),
                    posted_microusd BIGINT NOT NULL DEFAULT 0,
                    held_microusd BIGINT NOT NULL DEFAULT 0 CHECK (held_microusd >= 0),
                    seq BIGINT NOT NULL DEFAULT 0,
                    disputed BIGINT NOT NULL DEFAULT 0
                )""",
                """CREATE TABLE ledger (
                    account_id TEXT NOT NULL,
                    seq BIGINT NOT NULL,
                    kind TEXT NOT NULL,
                    reference TEXT NOT NULL,
                    amount_microusd BIGINT NOT NULL CHECK (amount_microusd <> 0),
                    balance_after_microusd BIGINT NOT NULL,
                    debit_account TEXT NOT NULL,
                    credit_account TEXT NOT NULL,
                    reason TEXT,
                    created_at_ms BIGINT NOT NULL,
                    PRIMARY KEY (account_id, seq),
                    UNIQUE (kind, reference),
                    CHECK (debit_account <> credit_account)
                )""",
                """CREATE TABLE calls (
                    id TEXT PRIMARY KEY,
                    account_id TEXT NOT NULL,
                    key_id TEXT NOT NULL,
                    surface TEXT NOT NULL,
                    path TEXT NOT NULL,
                    offer TEXT NOT NULL,
                    upstream TEXT,
                    upstream_model TEXT,
                    upstream_request_id TEXT,
                    streamed BIGINT NOT NULL DEFAULT 0,
                    state TEXT NOT NULL
                        CHECK (state IN ('open', 'settled', 'released', 'expired', 'refused')),
                    hold_microusd BIGINT NOT NULL DEFAULT 0 CHECK (hold_microusd >= 0),
                    included_month TEXT,
                    spend_period TEXT,
                    rates TEXT,
                    output_limit BIGINT,
                    checkpoint_microusd BIGINT NOT NULL DEFAULT 0,
                    checkpoint_output_tokens BIGINT NOT NULL DEFAULT 0,
                    input_tokens BIGINT NOT NULL DEFAULT 0,
                    cached_input_tokens BIGINT NOT NULL DEFAULT 0,
                    cache_write_tokens BIGINT NOT NULL DEFAULT 0,
                    output_tokens BIGINT NOT NULL DEFAULT 0,
                    reasoning_tokens BIGINT NOT NULL DEFAULT 0,
                    images BIGINT NOT NULL DEFAULT 0,
                    audio_ms BIGINT NOT NULL DEFAULT 0,
                    characters BIGINT NOT NULL DEFAULT 0,
                    cost_microusd BIGINT NOT NULL DEFAULT 0,
                    charged_microusd BIGINT NOT NULL DEFAULT 0 CHECK (charged_microusd >= 0),
                    charged_from TEXT CHECK (charged_from IN ('included', 'wallet')),
                    house_loss_microusd BIGINT NOT NULL DEFAULT 0,
                    estimated BIGINT NOT NULL DEFAULT 0,
                    finish_reason TEXT,
                    status BIGINT,
                    error_code TEXT,
                    latency_ms BIGINT,
                    first_byte_ms BIGINT,
                    owner TEXT,
                    outcome_id TEXT,
                    idempotency_key TEXT,
                    repeated BIGINT NOT NULL DEFAULT 1,
                    created_at_ms BIGINT NOT NULL,
                    finished_at_ms BIGINT
                )""",
                "CREATE INDEX calls_account ON calls (account_id, id)",
                "CREATE INDEX calls_open ON calls (owner) WHERE state = 'open'",
                """CREATE TABLE attempts (
                    call_id TEXT NOT NULL,
                    n BIGINT NOT NULL,
                    upstream TEXT NOT NULL,
                    upstream_request_id TEXT,
                    status BIGINT,
                    provider_cost_microusd BIGINT,
                    started_at_ms BIGINT NOT NULL,
                    ended_at_ms BIGINT NOT NULL,
                    PRIMARY KEY (call_id, n)
                )""",
                """CREATE TABLE included_calls (
                    account_id TEXT NOT NULL,
                    month TEXT NOT NULL,
                    used BIGINT NOT NULL CHECK (used >= 0),
                    PRIMARY KEY (account_id, month)
                )""",
                """CREATE TABLE rate_windows (
                    bucket TEXT PRIMARY KEY,
                    window_start_ms BIGINT NOT NULL,
                    count BIGINT NOT NULL
                )""",
                """CREATE TABLE key_spend (
                    key_id TEXT NOT NULL,
                    period TEXT NOT NULL,
                    reserved_microusd BIGINT NOT NULL CHECK (reserved_microusd >= 0),
                    spent_microusd BIGINT NOT NULL,
                    PRIMARY KEY (key_id, period)
                )""",
                """CREATE TABLE idempotency_keys (
                    account_id TEXT NOT NULL,
                    key TEXT NOT NULL,
                    fingerprint TEXT NOT NULL,
                    call_id TEXT NOT NULL,
                    state TEXT NOT NULL CHECK (state IN ('running', 'done', 'lost', 'failed')),
                    status BIGINT,
                    content_type TEXT,
                    expires_at_ms BIGINT NOT NULL,
                    PRIMARY KEY (account_id, key)
                )""",
                "CREATE INDEX idempotency_keys_expiry ON idempotency_keys (expires_at_ms)",
                """CREATE TABLE processes (
                    id TEXT PRIMARY KEY,
                    host TEXT NOT NULL,
                    heartbeat_at_ms BIGINT NOT NULL,
                    started_at_ms BIGINT NOT NULL
                )""",
                """CREATE TABLE marks (
                    name TEXT PRIMARY KEY,
                    value BIGINT NOT NULL
                )""",
            ],
            sqlite=[
                "ALTER TABLE idempotency_keys ADD COLUMN body BLOB",
                """CREATE TRIGGER ledger_no_update BEFORE UPDATE ON ledger
                   BEGIN SELECT RAISE(ABORT, 'the ledger is append only'); END""",
                """CREATE TRIGGER ledger_no_delete BEFORE DELETE ON ledger
                   BEGIN SELECT RAISE(ABORT, 'the ledger is append only'); END""",
            ],
            postgres=[
                "ALTER TABLE idempotency_keys ADD COLUMN body BYTEA",
                """CREATE FUNCTION ledger_is_append_only() RETURNS trigger LANGUAGE plpgsql AS
                   $$ BEGIN RAISE EXCEPTION 'the ledger is append only'; END $$""",
                """CREATE TRIGGER ledger_no_change BEFORE UPDATE OR DELETE ON ledger
                   FOR EACH ROW EXECUTE FUNCTION ledger_is_append_only()""",
                """CREATE TRIGGER ledger_no_truncate BEFORE TRUNCATE ON ledger
                   FOR EACH STATEMENT EXECUTE FUNCTION ledger_is_append_only()""",
            ],
        )
    ]
