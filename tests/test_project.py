"""imagemill/project.py: packages with common names are imported from the product's folder."""

import os
import subprocess
import sys

import pytest

from imagemill.project import PACKAGES, PROJECT
from tests.helpers.product import SEARCH_PATH

# A script of a user who has imported packages of the same names, and calls the command.
WRAPPER = """
import sys
sys.path.insert(0, {folder!r})
import assets.models, resources
from imagemill.__main__ import main
sys.argv = ["imagemill", *sys.argv[1:]]
main()
"""


@pytest.fixture
def own(tmp_path):
    """A folder with a package `assets` and a module `resources`."""
    (tmp_path / "assets").mkdir()
    for name in ("assets/__init__.py", "assets/models.py", "resources.py"):
        (tmp_path / name).write_text("MINE = True\n")
    return tmp_path


def python(folder, program, *arguments):
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], cwd=folder, env={**os.environ, "PYTHONPATH": SEARCH_PATH},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_command_works_in_a_process_that_has_imported_packages_of_the_same_names(own, data_root):
    """Definitions import all five packages."""
    said = python(own, WRAPPER.format(folder=str(own)), "run", "--data-root", str(data_root.path))

    assert "0 images seen" in said


def test_other_modules_of_these_names_are_forgotten_and_ours_stay(own):
    program = """
import sys, resources.data_root as ours, imagemill.project as project
sys.path.insert(0, {folder!r})
import assets, assets.models
project.prefer_project()
print(ours is sys.modules["resources.data_root"], "assets" in sys.modules, "assets.models" in sys.modules)
import assets.partitions
print(assets.partitions.__file__)
"""
    program = program.format(folder=str(own))

    assert python("/", program).split() == ["True", "False", "False", f"{PROJECT}/assets/partitions.py"]


def test_processes_that_are_started_search_the_project_first(own):
    program = """
import os, subprocess, sys
os.environ["PYTHONPATH"] = {folder!r}
from imagemill.project import prefer_project
prefer_project()
prefer_project()
print(os.environ["PYTHONPATH"])
"""

    assert python(PROJECT, program.format(folder=str(own))) == os.pathsep.join([PROJECT, str(own)])


def test_importing_the_domain_changes_no_search_path(own):
    """Training scripts import it, and have their own packages."""
    program = (
        "import sys; given = [*sys.path]; import imagemill.reading, resources; print(given == sys.path, resources.MINE)"
    )

    assert python(own, program) == "True True"


def test_project_contains_all_packages():
    assert all(os.path.isfile(os.path.join(PROJECT, name, "__init__.py")) for name in PACKAGES)
