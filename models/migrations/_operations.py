"""The one operation our migrations are made of: statements, where needed apart per database."""

from __future__ import annotations

from typing import Any

from tortoise.migrations.operations import RunSQL


class Statements(RunSQL):
    """Run statements in the migration's transaction, `both` first, then those of the database in use."""

    def __init__(self, both: list[str], *, sqlite: list[str] = [], postgres: list[str] = []) -> None:  # noqa: B006
        super().__init__(both)
        self._own = {"sqlite": sqlite, "postgres": postgres}

    async def _run_sql(self, state_editor: Any, sqls: list[str]) -> None:
        for sql in [*sqls, *self._own[state_editor.DIALECT]]:
            await state_editor.client.execute_query(sql)
