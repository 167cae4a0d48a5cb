"""Re-export, because the dagster.yaml of every data root names this module."""

from dagster_project.internals.coordinator import DeferCoordinator

__all__ = ["DeferCoordinator"]
