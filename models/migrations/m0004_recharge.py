"""Credit that runs low, and credit that is given: low-credit mails, auto-recharge, redeem codes.

A balance changes in many places: a settled call, a refund, a dispute, a code. So it is the table itself that
notices when one falls below a threshold, in the statement that lowers it: two triggers whose conditions read
nothing but the row. No call runs a statement more, and nobody ever has to look through the wallets.
"""

from models.migrations._operations import RecordedMigration, Statements

FELL_LOW = (
    "NEW.low_credit_microusd > 0 AND NEW.posted_microusd < NEW.low_credit_microusd"
    " AND OLD.posted_microusd >= NEW.low_credit_microusd"
)
FELL_DUE = (
    "NEW.posted_microusd < NEW.recharge_below_microusd AND OLD.posted_microusd >= NEW.recharge_below_microusd"
)
NOTE_LOW = (
    "INSERT INTO low_credits (account_id, seq, below_microusd, balance_microusd)"
    " VALUES (NEW.account_id, NEW.seq, NEW.low_credit_microusd, NEW.posted_microusd) ON CONFLICT DO NOTHING"
)
NOTE_DUE = "UPDATE auto_recharges SET due_at_ms = 0 WHERE account_id = NEW.account_id AND is_on = 1"


class Migration(RecordedMigration):
    """Add the tables, the wallet's thresholds and what watches them."""

    dependencies = [("models", "m0003_payments")]
    operations = [
        Statements(
            [
                "ALTER TABLE wallets ADD COLUMN low_credit_microusd BIGINT NOT NULL DEFAULT 5000000",
                # 0 while auto-recharge is off.
                "ALTER TABLE wallets ADD COLUMN recharge_below_microusd BIGINT NOT NULL DEFAULT 0",
                # A crossing that nobody has been told of yet; `seq` is that of the ledger entry which made it.
                """CREATE TABLE low_credits (
                    account_id TEXT NOT NULL,
                    seq BIGINT NOT NULL,
                    below_microusd BIGINT NOT NULL,
                    balance_microusd BIGINT NOT NULL,
                    PRIMARY KEY (account_id, seq)
                )""",
                """CREATE TABLE auto_recharges (
                    account_id TEXT PRIMARY KEY,
                    is_on BIGINT NOT NULL,
                    below_microusd BIGINT NOT NULL CHECK (below_microusd > 0),
                    amount_microusd BIGINT NOT NULL CHECK (amount_microusd > 0),
                    ceiling_microusd BIGINT NOT NULL CHECK (ceiling_microusd >= amount_microusd),
                    off_reason TEXT CHECK (off_reason IN ('declined', 'authentication', 'failed', 'forgotten')),
                    due_at_ms BIGINT,
                    changed_at_ms BIGINT NOT NULL
                )""",
                "CREATE INDEX auto_recharges_due ON auto_recharges (due_at_ms) WHERE due_at_ms IS NOT NULL",
                # A charge without its payer present; the order is the top-up of the same id. What it is charged
                # with is kept as it was, for a repetition must ask for exactly the same.
                """CREATE TABLE recharges (
                    top_up_id TEXT PRIMARY KEY,
                    account_id TEXT NOT NULL,
                    month TEXT NOT NULL,
                    state TEXT NOT NULL CHECK (state IN ('open', 'paid', 'failed')),
                    customer_id TEXT NOT NULL,
                    payment_method_id TEXT NOT NULL,
                    brand TEXT NOT NULL,
                    last4 TEXT NOT NULL,
                    tries BIGINT NOT NULL DEFAULT 0,
                    claimed_until_ms BIGINT NOT NULL DEFAULT 0,
                    created_at_ms BIGINT NOT NULL
                )""",
                "CREATE UNIQUE INDEX recharges_open ON recharges (account_id) WHERE state = 'open'",
                "CREATE INDEX recharges_month ON recharges (account_id, month)",
                """CREATE TABLE redeem_codes (
                    id TEXT PRIMARY KEY,
                    hash TEXT NOT NULL UNIQUE,
                    shown_prefix TEXT NOT NULL,
                    amount_microusd BIGINT NOT NULL CHECK (amount_microusd > 0),
                    uses_max BIGINT NOT NULL CHECK (uses_max > 0),
                    used BIGINT NOT NULL DEFAULT 0 CHECK (used >= 0),
                    note TEXT NOT NULL DEFAULT '',
                    created_at_ms BIGINT NOT NULL,
                    expires_at_ms BIGINT,
                    revoked_at_ms BIGINT,
                    CHECK (used <= uses_max)
                )""",
                """CREATE TABLE redemptions (
                    id TEXT PRIMARY KEY,
                    code_id TEXT NOT NULL,
                    account_id TEXT NOT NULL,
                    amount_microusd BIGINT NOT NULL,
                    redeemed_at_ms BIGINT NOT NULL,
                    UNIQUE (code_id, account_id)
                )""",
                "CREATE INDEX redemptions_account ON redemptions (account_id, id)",
            ],
            sqlite=[
                f"""CREATE TRIGGER wallets_fell_low AFTER UPDATE OF posted_microusd ON wallets WHEN {FELL_LOW}
                   BEGIN {NOTE_LOW}; END""",
                f"""CREATE TRIGGER wallets_fell_due AFTER UPDATE OF posted_microusd ON wallets WHEN {FELL_DUE}
                   BEGIN {NOTE_DUE}; END""",
            ],
            postgres=[
                f"""CREATE FUNCTION wallet_fell_low() RETURNS trigger LANGUAGE plpgsql AS
                   $$ BEGIN {NOTE_LOW}; RETURN NULL; END $$""",
                f"""CREATE FUNCTION wallet_fell_due() RETURNS trigger LANGUAGE plpgsql AS
                   $$ BEGIN {NOTE_DUE}; RETURN NULL; END $$""",
                f"""CREATE TRIGGER wallets_fell_low AFTER UPDATE OF posted_microusd ON wallets
                   FOR EACH ROW WHEN ({FELL_LOW}) EXECUTE FUNCTION wallet_fell_low()""",
                f"""CREATE TRIGGER wallets_fell_due AFTER UPDATE OF posted_microusd ON wallets
                   FOR EACH ROW WHEN ({FELL_DUE}) EXECUTE FUNCTION wallet_fell_due()""",
            ],
        )
    ]
