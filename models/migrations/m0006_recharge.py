"""Around auto-recharge: who was told of a reached ceiling, and customers whom a processor is still to forget."""

from models.migrations._operations import RecordedMigration, Statements


class Migration(RecordedMigration):
    """Add the column and the table."""

    dependencies = [("models", "m0005_lists")]
    operations = [
        Statements([
            # The month whose reached ceiling the account was told of.
            "ALTER TABLE auto_recharges ADD COLUMN told_month TEXT NOT NULL DEFAULT ''",
            # Customers of closed accounts whom a processor still knows; whose they were is not known any more.
            """CREATE TABLE former_customers (
                processor TEXT NOT NULL,
                customer_id TEXT NOT NULL,
                due_at_ms BIGINT NOT NULL,
                PRIMARY KEY (processor, customer_id)
            )""",
        ])
    ]
