"""Re-export, because the dagster.yaml of every data root names this module."""

from typing import TYPE_CHECKING, Any

from dagster_project.internals.storage import BatchSqliteStorage

if TYPE_CHECKING:
    from dagster_project.internals.postgres_storage import BatchPostgresStorage

__all__ = ["BatchPostgresStorage", "BatchSqliteStorage"]


def __getattr__(name: str) -> Any:
    """Import the storage for PostgreSQL when it is named, because its packages are an extra."""
    if name != "BatchPostgresStorage":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from dagster_project.internals.postgres_storage import BatchPostgresStorage
    except ModuleNotFoundError as error:
        from dagster_project.history_errors import HistoryUnusable

        raise HistoryUnusable(
            "the packages for a history in PostgreSQL are not installed",
            why=str(error),
            do="install imagemill[postgres], then run the same command again",
        ) from error
    return BatchPostgresStorage
