"""Re-export, because the dagster.yaml of every data root names this module."""

from dagster_project.internals.storage import BatchSqliteStorage

__all__ = ["BatchSqliteStorage"]
