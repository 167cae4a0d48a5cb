"""Reporting private names that a Dagster release lacks."""

import click
import dagster


def report_missing(name: object, switched_off: str) -> None:
    """Print to stderr that a private name is missing, and which feature is disabled without it."""
    click.echo(
        f"imagemill: Dagster {dagster.__version__} lacks a name that imagemill uses ({name}); {switched_off}. "
        "Install dagster>=1.13.13,<1.14",
        err=True,
    )
