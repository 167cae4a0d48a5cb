"""Documentation pages do what they print: their commands are executed in order, in an empty folder."""

from pathlib import Path

import pytest

from tests.docs.console import ROOT, Command, agrees, normalised, run_page, steps

PAGES = sorted(path for path in (ROOT / "docs").rglob("*.md") if "```console" in path.read_text(encoding="utf-8"))


def test_pages_with_commands_are_found():
    assert ROOT / "docs" / "tutorial.md" in PAGES


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=() if page.name == "tutorial.md" else pytest.mark.slow, id=page.stem) for page in PAGES],
)
def test_commands_of_a_page_print_what_it_shows(page, tmp_path):
    assert "\n".join(run_page(page, tmp_path)) == ""


def test_page_that_prints_something_else_differs(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```console\n$ echo one\ntwo\n$ false\n```\n")

    first, second = run_page(page, tmp_path / "folder")

    assert "page.md:2: `echo one` printed:\none" in first
    assert "page.md:4: exit code 1" in second


def test_commands_files_and_exit_codes_of_a_page():
    page = 'A\n\n```json title="a.json"\n{}\n```\n\n<!-- exit code 1 -->\n```console\n$ false \\\n> x\n…\n```\n'
    page += "\n```sh\nnot run\n```\n"

    file, command = steps(page)

    assert (file.name, file.text) == ("a.json", "{}\n")
    assert command == Command(9, "false \\\nx", ["…"], 1)


@pytest.mark.parametrize(
    ("expected", "actual", "equal"),
    [
        (["a", "…", "z"], ["a", "b", "c", "z"], True),
        (["a", "…"], ["a"], True),
        (["a"], ["a", "b"], False),
        (["  time       15 s, 1.1 images/s"], ["  time       3 s"], True),
        (["since 2026-01-01T00:00:00+00:00"], ["since 2027-02-03T04:05:06+00:00"], True),
        (["3 images"], ["4 images"], False),
    ],
)
def test_output_agrees_but_for_times_and_left_out_lines(expected, actual, equal):
    assert agrees(expected, actual) is equal


def test_normalised_lines_keep_what_a_reader_compares():
    assert normalised(["  records    6, 1 changed"]) == ["  records    6, 1 changed"]


def test_no_page_contains_a_path_of_the_machine_that_made_it():
    assert [page for page in PAGES if str(Path.home()) in page.read_text(encoding="utf-8")] == []
