"""Dagster resources: live objects built from the configuration."""
