"""dagster_project/command_line.py: runs of a command have it as a tag."""

import click
import pytest
from click.testing import CliRunner

from dagster_project.cli.main import cli
from dagster_project.command_line import COMMAND_TAG, command_tags


@pytest.fixture
def seen(monkeypatch):
    """Return the tags during a command."""
    found = []

    @click.command("probe", context_settings={"ignore_unknown_options": True})
    @click.argument("rest", nargs=-1)
    def probe(rest):
        found.append(command_tags())

    monkeypatch.setattr(type(cli), "get_command", lambda self, context, name: probe)
    return found


def test_run_of_a_command_names_it_as_it_was_called(seen):
    assert CliRunner().invoke(cli, ["shards", "--bucket", "1024x1024", "--data-root", "a b"]).exit_code == 0
    assert seen == [{COMMAND_TAG: "imagemill shards --bucket 1024x1024 --data-root 'a b'"}]


def test_run_outside_a_command_has_no_such_tag():
    assert command_tags() == {}
