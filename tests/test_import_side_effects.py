"""Importing the product changes no state that other code of the same process shares."""

import os
import subprocess
import sys

from tests.helpers.product import PROJECT

# Libraries add filters of their own while they are imported, so only filters that our modules add are compared.
IMPORT_ALL = """
import pkgutil
import sys
import warnings

import tqdm
from PIL import Image, ImageFile, PngImagePlugin
from sqlalchemy import create_engine

PACKAGES = ["imagemill", "assets", "checks", "dagster_project", "io_managers", "resources"]
added = []

def recording(add):
    def wrapper(*args, **kwargs):
        add(*args, **kwargs)
        if sys._getframe(1).f_globals["__name__"].partition(".")[0] in PACKAGES:
            added.append(warnings.filters[0])
    return wrapper

def state():
    return {
        "Pillow": (Image.MAX_IMAGE_PIXELS, PngImagePlugin.MAX_TEXT_CHUNK, ImageFile.LOAD_TRUNCATED_IMAGES),
        "tqdm": isinstance(getattr(tqdm.tqdm, "_lock", None), tqdm.std.TqdmDefaultWriteLock | None),
        "SQLAlchemy": len(list(create_engine("sqlite://").pool.dispatch.connect)),
        "warnings": [entry for entry in warnings.filters if entry in added],
    }

warnings.filterwarnings, warnings.simplefilter = recording(warnings.filterwarnings), recording(warnings.simplefilter)
before, names = state(), []
for package in PACKAGES:
    for module in pkgutil.walk_packages(__import__(package).__path__, f"{package}."):
        if not module.name.endswith("__main__"):
            __import__(module.name)
            names.append(module.name)
after = state()
assert before == after, (before, after)
print(len(names))
"""


def test_import_of_every_module_changes_no_global_state():
    done = subprocess.run([sys.executable, "-c", IMPORT_ALL], cwd=PROJECT, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 150


IMPORT_WATCHED = """
import os
import pkgutil
import sys

read = []

class Watched(type(os.environ)):
    def __getitem__(self, name):
        if name.startswith("IMAGEMILL_"):
            read.append(name)
        return super().__getitem__(name)

os.environ.__class__ = Watched
os.environ.get("IMAGEMILL_WATCHED")
import imagemill
for module in pkgutil.walk_packages(imagemill.__path__, "imagemill."):
    if not module.name.endswith("__main__"):
        __import__(module.name)
print(*read)
"""


def test_import_of_the_domain_packages_reads_none_of_our_variables():
    """The commands of the tests run in forks of a process that has imported `imagemill` (tests/helpers/forks.py)."""
    # Libraries copy the environment, which reads what is set.
    unset = {name: value for name, value in os.environ.items() if not name.startswith("IMAGEMILL_")}
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_WATCHED], cwd=PROJECT, env=unset, capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["IMAGEMILL_WATCHED"]
