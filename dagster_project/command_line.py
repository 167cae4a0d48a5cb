"""The arguments of this process's command, for the tag on its runs. Does not import Dagster, so that commands start fast."""

import shlex

import click

# Tag of a run that a command started: the full command line.
COMMAND_TAG = "imagemill/command"

_ARGUMENTS = "imagemill.arguments"


def note_arguments(context: click.Context, arguments: list[str]) -> None:
    """Keep the arguments of the whole command, before they are parsed."""
    context.meta[_ARGUMENTS] = list(arguments)


def command_tags() -> dict[str, str]:
    """Return the tag of a run that the current command starts; empty outside a command."""
    context = click.get_current_context(silent=True)
    arguments = context.meta.get(_ARGUMENTS) if context else None
    return {COMMAND_TAG: shlex.join(["imagemill", *arguments])} if arguments else {}
