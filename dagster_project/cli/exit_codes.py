"""Exit codes and messages of commands whose runs did not succeed."""

import signal
import sys
from typing import TYPE_CHECKING, NoReturn

import click

if TYPE_CHECKING:
    from dagster_project.work import CommandSession


def leave_by_checks(work: "CommandSession") -> NoReturn:
    """Print the findings of failed checks, and exit: 1 if one failed, else 0."""
    for text in work.findings():
        click.echo(f"imagemill: {text}", err=True)
    sys.exit(0 if all(work.checks().values()) else 1)


def leave_if_ended(work: "CommandSession") -> None:
    """Print why the last run failed or was stopped, and exit: 1, or 128 + the number of the signal. Return if it succeeded."""
    if work.error:
        click.echo(f"imagemill: {work.error}", err=True)
    if work.interrupted:
        name = signal.Signals(work.interrupted).name
        click.echo(f"imagemill: stopped by {name}; finished work is kept, run the same command to resume", err=True)
    if work.error or work.interrupted:
        sys.exit(128 + work.interrupted if work.interrupted else 1)
