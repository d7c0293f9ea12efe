"""What lists of calls are found by: between which calls a day's sum lies, and days by key and by offer.

A filter that matches few calls looks only between the first and the last of each day that has any, and finds
those days without passing over all others. It costs a call nothing but two more columns in a row that is written
anyway: keys, offers and days of a sum never change, and so neither do the indexes' entries.

Sums of before keep the widest bounds: their days are looked through whole, as they always were.
"""

from models.migrations._operations import RecordedMigration, Statements

BOUNDS = (
    "ALTER TABLE usage_days ADD COLUMN first_id TEXT {collation} NOT NULL DEFAULT ''",
    # Greater than every id.
    "ALTER TABLE usage_days ADD COLUMN last_id TEXT {collation} NOT NULL DEFAULT '~'",
)


class Migration(RecordedMigration):
    """Add the columns and the indexes."""

    dependencies = [("models", "m0004_recharge")]
    operations = [
        Statements(
            [
                "CREATE INDEX usage_days_key ON usage_days (account_id, key_id, day)",
                "CREATE INDEX usage_days_offer ON usage_days (account_id, offer, day)",
            ],
            sqlite=[sql.format(collation="") for sql in BOUNDS],
            # By bytes, as everywhere: the order of a language may ignore characters.
            postgres=[sql.format(collation='COLLATE "C"') for sql in BOUNDS],
        )
    ]
