"""What our migrations are made of: statements, where needed apart per database."""

from __future__ import annotations

from typing import Any

from tortoise.migrations.migration import Migration as BaseMigration
from tortoise.migrations.operations import RunSQL
from tortoise.migrations.recorder import MigrationRecorder


class RecordedMigration(BaseMigration):
    """Be a migration that is recorded in the transaction that applies it.

    Tortoise records it in another one: a process killed between the two would never start again.
    """

    async def apply(self, state: Any, *, schema_editor: Any = None, **how: Any) -> Any:
        state = await super().apply(state, schema_editor=schema_editor, **how)
        if schema_editor is not None:
            await MigrationRecorder(schema_editor.client).record_applied(self.app_label, self.name)
        return state


class Statements(RunSQL):
    """Run statements in the migration's transaction, `both` first, then those of the database in use."""

    def __init__(self, both: list[str], *, sqlite: list[str] = [], postgres: list[str] = []) -> None:  # noqa: B006
        super().__init__(both)
        self._own = {"sqlite": sqlite, "postgres": postgres}

    async def _run_sql(self, state_editor: Any, sqls: list[str]) -> None:
        for sql in [*sqls, *self._own[state_editor.DIALECT]]:
            await state_editor.client.execute_query(sql)
