"""Commands of the product in the test's own process with stub encoders, which saves seconds of start-up each."""

import re
from typing import NamedTuple

from click.testing import CliRunner

from dagster_project.cli.main import cli
from imagemill.errors import ImagemillError, WrongUsage


class Ended(NamedTuple):
    """Exit code and complete output of a command."""

    code: int
    text: str


def called(root, *arguments):
    """Run `imagemill ARGUMENTS` on a data root. An error without a message for the user propagates."""
    done = CliRunner().invoke(cli, [*map(str, arguments), "--data-root", str(root.path)])
    if isinstance(done.exception, ImagemillError):  # as `main` prints it
        return Ended(2 if isinstance(done.exception, WrongUsage) else 1, f"{done.output}imagemill: {done.exception}")
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    return Ended(done.exit_code, done.output)


def remedies(text):
    """Return the commands in the first remedy of an output, in order."""
    first = next(line for line in text.splitlines() if line.strip().startswith("do:"))
    return [command.split() for command in re.findall(r"imagemill ((?:run|shards|stage2)(?: --[a-z]+)*)", first)]
