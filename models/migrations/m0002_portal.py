"""What the portal keeps: passwords and second factors, sessions, one-time links, mail, top-ups, daily sums.

Types and conventions as in the first migration. Secrets are kept as hashes wherever a hash will do.
"""

from models.migrations._operations import RecordedMigration, Statements

SUMS_OF_CALLS = """INSERT INTO usage_days (account_id, day, offer, key_id, outcome, calls, input_tokens,
    cached_input_tokens, output_tokens, cost_microusd, charged_microusd)
    SELECT account_id, day, offer, key_id, outcome, SUM(repeated), SUM(input_tokens + cache_write_tokens),
        SUM(cached_input_tokens), SUM(output_tokens), SUM(cost_microusd), SUM(charged_microusd)
    FROM (SELECT *, {day} AS day, CASE WHEN state = 'refused' THEN 'refused'
        WHEN state = 'released' OR status >= 400 THEN 'failed' ELSE 'served' END AS outcome
        FROM calls WHERE state <> 'open') ended
    GROUP BY account_id, day, offer, key_id, outcome"""


# Failures are rare, so finding them must not mean reading all that went well. Key and model stand in the indexes
# that lists are read by, so that a filter finds the few calls it wants without looking at the rows of the others.
# It costs a call next to nothing: they never change, and it is one index still.
LISTS = (
    "CREATE INDEX calls_failed ON calls (account_id, {id}, state, key_id, offer, status) WHERE status >= 400",
    "CREATE INDEX calls_account ON calls (account_id, {id}, key_id, offer)",
)


class Migration(RecordedMigration):
    """Add the portal's tables and columns."""

    dependencies = [("models", "m0001_books")]
    operations = [
        Statements(
            [
                "ALTER TABLE accounts ADD COLUMN name TEXT NOT NULL DEFAULT ''",
                "ALTER TABLE accounts ADD COLUMN time_zone TEXT NOT NULL DEFAULT 'UTC'",
                "ALTER TABLE accounts ADD COLUMN mailbox TEXT",
                "ALTER TABLE accounts ADD COLUMN password_hash TEXT",
                "ALTER TABLE accounts ADD COLUMN totp_secret TEXT",
                "ALTER TABLE accounts ADD COLUMN totp_last_step BIGINT NOT NULL DEFAULT 0",
                "ALTER TABLE accounts ADD COLUMN mails_notices BIGINT NOT NULL DEFAULT 1",
                "CREATE INDEX accounts_mailbox ON accounts (mailbox)",
                "ALTER TABLE api_keys ADD COLUMN rotated_from TEXT",
                """CREATE TABLE sessions (
                    id TEXT PRIMARY KEY,
                    hash TEXT NOT NULL UNIQUE,
                    account_id TEXT NOT NULL,
                    state TEXT NOT NULL CHECK (state IN ('half', 'whole')),
                    address TEXT NOT NULL,
                    agent TEXT NOT NULL,
                    created_at_ms BIGINT NOT NULL,
                    proven_at_ms BIGINT NOT NULL,
                    seen_at_ms BIGINT NOT NULL,
                    expires_at_ms BIGINT NOT NULL
                )""",
                "CREATE INDEX sessions_account ON sessions (account_id)",
                "CREATE INDEX sessions_expiry ON sessions (expires_at_ms)",
                """CREATE TABLE one_time_links (
                    hash TEXT PRIMARY KEY,
                    purpose TEXT NOT NULL CHECK (purpose IN ('verify', 'reset', 'change_email')),
                    account_id TEXT NOT NULL,
                    email TEXT NOT NULL,
                    password_hash TEXT,
                    created_at_ms BIGINT NOT NULL,
                    expires_at_ms BIGINT NOT NULL,
                    used_at_ms BIGINT
                )""",
                "CREATE INDEX one_time_links_account ON one_time_links (account_id, purpose)",
                "CREATE INDEX one_time_links_expiry ON one_time_links (expires_at_ms)",
                """CREATE TABLE recovery_codes (
                    account_id TEXT NOT NULL,
                    hash TEXT NOT NULL,
                    used_at_ms BIGINT,
                    PRIMARY KEY (account_id, hash)
                )""",
                """CREATE TABLE passkeys (
                    id TEXT PRIMARY KEY,
                    account_id TEXT NOT NULL,
                    credential_id TEXT NOT NULL UNIQUE,
                    public_key TEXT NOT NULL,
                    sign_count BIGINT NOT NULL,
                    name TEXT NOT NULL,
                    created_at_ms BIGINT NOT NULL,
                    last_used_at_ms BIGINT
                )""",
                "CREATE INDEX passkeys_account ON passkeys (account_id)",
                """CREATE TABLE challenges (
                    hash TEXT PRIMARY KEY,
                    purpose TEXT NOT NULL,
                    account_id TEXT,
                    expires_at_ms BIGINT NOT NULL
                )""",
                "CREATE INDEX challenges_expiry ON challenges (expires_at_ms)",
                """CREATE TABLE outbox (
                    id TEXT PRIMARY KEY,
                    account_id TEXT,
                    recipient TEXT NOT NULL,
                    letter TEXT NOT NULL,
                    subject TEXT NOT NULL,
                    body_text TEXT NOT NULL,
                    body_html TEXT NOT NULL,
                    created_at_ms BIGINT NOT NULL,
                    due_at_ms BIGINT NOT NULL,
                    tries BIGINT NOT NULL DEFAULT 0,
                    error TEXT,
                    sent_at_ms BIGINT,
                    given_up_at_ms BIGINT
                )""",
                "CREATE INDEX outbox_due ON outbox (due_at_ms) WHERE sent_at_ms IS NULL AND given_up_at_ms IS NULL",
                """CREATE TABLE top_ups (
                    id TEXT PRIMARY KEY,
                    account_id TEXT NOT NULL,
                    amount_microusd BIGINT NOT NULL CHECK (amount_microusd > 0),
                    processor TEXT NOT NULL,
                    state TEXT NOT NULL CHECK (state IN ('pending', 'paid', 'failed', 'expired', 'refunded')),
                    checkout_id TEXT,
                    checkout_url TEXT,
                    receipt_url TEXT,
                    refunded_microusd BIGINT NOT NULL DEFAULT 0 CHECK (refunded_microusd >= 0),
                    created_at_ms BIGINT NOT NULL,
                    paid_at_ms BIGINT,
                    CHECK (refunded_microusd <= amount_microusd)
                )""",
                "CREATE INDEX top_ups_account ON top_ups (account_id, id)",
                "CREATE UNIQUE INDEX top_ups_checkout ON top_ups (processor, checkout_id)",
                """CREATE TABLE usage_days (
                    account_id TEXT NOT NULL,
                    day TEXT NOT NULL,
                    offer TEXT NOT NULL,
                    key_id TEXT NOT NULL,
                    outcome TEXT NOT NULL CHECK (outcome IN ('served', 'failed', 'refused')),
                    calls BIGINT NOT NULL,
                    input_tokens BIGINT NOT NULL DEFAULT 0,
                    cached_input_tokens BIGINT NOT NULL DEFAULT 0,
                    output_tokens BIGINT NOT NULL DEFAULT 0,
                    cost_microusd BIGINT NOT NULL DEFAULT 0,
                    charged_microusd BIGINT NOT NULL DEFAULT 0,
                    PRIMARY KEY (account_id, day, offer, key_id, outcome)
                )""",
                "DROP INDEX calls_account",
                "CREATE INDEX top_ups_pending ON top_ups (id) WHERE state = 'pending'",
                # What changed a balance beside calls and top-ups is rare among millions of entries.
                "CREATE INDEX ledger_other ON ledger (account_id, seq) WHERE kind <> 'usage' AND kind <> 'top_up'",
                # One hidden key for each purpose of an account, whoever makes it first.
                "CREATE UNIQUE INDEX api_keys_hidden ON api_keys (account_id, name)"
                " WHERE hidden = 1 AND revoked_at_ms IS NULL",
            ],
            # What there is already is added up once; from then on every outcome adds itself.
            sqlite=[
                *(sql.format(id="id") for sql in LISTS),
                SUMS_OF_CALLS.format(day="strftime('%Y-%m-%d', created_at_ms / 1000, 'unixepoch')"),
            ],
            postgres=[
                *(sql.format(id='id COLLATE "C"') for sql in LISTS),
                SUMS_OF_CALLS.format(
                    day="to_char(to_timestamp(created_at_ms / 1000) AT TIME ZONE 'UTC', 'YYYY-MM-DD')"
                )
            ],
        )
    ]
