"""How a command ends whose runs did not end well."""

import signal
import sys
from typing import TYPE_CHECKING, NoReturn

import click

if TYPE_CHECKING:
    from dagster_project.work import Work


def leave_by_checks(work: "Work") -> NoReturn:
    """Say what failed checks found, and exit: 1 where one failed, else 0."""
    for said in work.findings():
        click.echo(f"imagemill: {said}", err=True)
    sys.exit(0 if all(work.checks().values()) else 1)


def leave_if_ended(work: "Work") -> None:
    """Say why the last run failed or was stopped, and exit: 1, or 128 and the signal's number. Else nothing."""
    if work.error:
        click.echo(f"imagemill: {work.error}", err=True)
    if work.interrupted:
        name = signal.Signals(work.interrupted).name
        click.echo(f"imagemill: stopped by {name}; finished work is kept, run the same command to resume", err=True)
    if work.error or work.interrupted:
        sys.exit(128 + work.interrupted if work.interrupted else 1)
