"""Re-export: the dagster.yaml of every data root names this module."""
