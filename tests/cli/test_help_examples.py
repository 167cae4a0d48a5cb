"""Every help page ends with two examples, and every example works."""

import json
import shlex

import click
import pytest

from dagster_project.cli.main import cli
from tests.helpers.archives import img2dataset, tar_of
from tests.helpers.product import imagemill, photos


def pages(group=cli, path=()):
    """Yield the words of each command, and the command."""
    context = click.Context(group)
    yield path, group
    for name in group.list_commands(context):
        found = group.get_command(context, name)
        if isinstance(found, click.Group):
            yield from pages(found, (*path, name))
        else:
            yield (*path, name), found


PAGES = dict(pages())


def examples_of(path):
    help_page = PAGES[path].get_help(click.Context(PAGES[path], info_name=" ".join(("imagemill", *path))))
    return [line.strip() for line in help_page.partition("Examples:\n")[2].splitlines() if line.strip()]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: " ".join(path) or "imagemill")
def test_help_ends_with_two_examples_of_its_command(path):
    examples = examples_of(path)

    assert len(examples) == len(set(examples)) == 2
    assert all(shlex.split(example)[: len(path) + 1] == ["imagemill", *path] for example in examples)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a data root, photographs of a detection dataset, and a Stage-A mission."""
    folder = tmp_path_factory.mktemp("examples")
    work = folder / "work"
    photos(work / "data" / "approved", 3)
    photos(work / "photos", 1, size=(640, 480))
    group = work / "data" / "stage_a" / "input" / "roof" / "审核通过" / "QC-TEMP-20250118-0015956"
    photos(group, 2)
    (work / "tars").mkdir()
    for number in range(2):
        (work / "tars" / f"{number:05d}.tar").write_bytes(tar_of(*img2dataset(1, first=number)))
    (folder / "colleague" / "data" / ".imagemill").mkdir(parents=True)
    annotation = {"id": 5, "image_id": 1, "category_id": 17, "bbox": [10, 20, 190, 260], "iscrowd": 0}
    document = {
        "images": [{"id": 1, "file_name": "photo0000.jpg", "width": 640, "height": 480}],
        "categories": [{"id": 17, "name": "cat"}],
        "annotations": [annotation],
    }
    (work / "instances.json").write_text(json.dumps(document))
    return work


EXAMPLES = list(dict.fromkeys(example for path in PAGES for example in examples_of(path)))


@pytest.mark.slow
def test_examples_work_in_the_order_of_the_help(folder):
    """Services run until terminated, and a push needs a server: see tests/cli/test_ui.py, test_serve.py and so on."""
    failed = {}
    for example in EXAMPLES:
        arguments = shlex.split(example)[1:]
        if arguments[0] in {"ui", "serve", "look", "push"} and arguments[1:2] != ["migrate"]:
            continue
        done = imagemill(*arguments, stub=arguments[0] != "stage-a", folder=folder)
        if done.returncode:
            failed[example] = done.stdout[-800:] + done.stderr[-800:]

    assert failed == {}
