"""Blocks of documentation pages that no test executes: commands parse, configurations are valid, Python compiles."""

import re
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from dagster_project.cli.main import cli
from imagemill.config import read_config
from tests.docs.console import ROOT

PAGES = [*sorted(page for page in (ROOT / "docs").rglob("*.md") if "decisions" not in page.parts), ROOT / "README.md"]


def _blocks(kind: str) -> Iterator[tuple[Path, str]]:
    for page in PAGES:
        for block in re.findall(
            rf"^ *```{kind}\b[^\n]*\n(.*?)^ *```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL
        ):
            yield page, textwrap.dedent(block)


def _commands() -> Iterator[object]:
    for page, block in _blocks("sh"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] == ["imagemill"]:
                yield pytest.param(words[1:], id=f"{page.stem}: {line.strip()}")


def _parse(command: click.Command, name: str, arguments: list[str], parent: click.Context | None = None) -> None:
    """Parse arguments without running anything; raises click.UsageError as the command line would."""
    context = command.make_context(name, list(arguments), parent=parent)
    left = [*context._protected_args, *context.args]
    if isinstance(command, click.Group) and left:
        inner, subcommand, rest = command.resolve_command(context, left)
        assert subcommand is not None
        _parse(subcommand, inner or "", rest, context)


@pytest.mark.parametrize("arguments", list(_commands()))
def test_commands_of_the_pages_parse(arguments):
    _parse(cli, "imagemill", arguments)


def test_command_with_an_unknown_option_does_not_parse():
    with pytest.raises(click.UsageError, match="No such option"):
        _parse(cli, "imagemill", ["run", "--no-such-option"])


def test_configurations_of_the_pages_are_valid(tmp_path):
    file, found = tmp_path / "imagemill.yaml", 0
    for _, block in _blocks("yaml"):
        if re.search(r"^(encoders|captioner|summarizer|near_duplicates|shard_size):", block, re.MULTILINE):
            file.write_text(block)
            read_config(file)
            found += 1
    assert found >= 2


def test_python_of_the_pages_compiles():
    blocks = list(_blocks("python"))
    for page, block in blocks:
        compile(block, str(page), "exec")
    assert len(blocks) > 2
