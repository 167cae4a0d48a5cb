"""The layers of docs/architecture.md: permitted imports, and libraries that reading commands must not load."""

import ast
import os
import pkgutil
import subprocess
import sys
import tomllib
from collections import defaultdict

import dagster
import pytest

from imagemill.domain.layout import DataRoot
from tests.helpers.product import PROJECT, imagemill, photos

MODELS = {"torch", "transformers", "diffusers", "webdataset", "faiss"}
HEAVY = MODELS | {"dagster", "pandas", "pandera"}

# Prints the loaded modules after a block, even if the block raises.
LOADED = """
import sys
import tomllib
try:
    {block}
finally:
    print("loaded:", *sorted({{name.partition(".")[0] for name in sys.modules}}))
"""


def loaded_by(block):
    """Return the top-level modules in memory after a block of Python in a separate process."""
    done = subprocess.run(
        [sys.executable, "-c", LOADED.format(block=block)],
        cwd=PROJECT, env={**os.environ, "PYTHONPATH": str(PROJECT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return set(done.stdout.rpartition("loaded:")[2].split())


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A data root on which the main job has run."""
    root = DataRoot(tmp_path_factory.mktemp("floors") / "data")
    photos(root.approved, 2)
    done = imagemill("run", "--data-root", root.path, stub=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return root


def test_import_contracts_are_kept():
    """Layers, no Dagster in the subject, no circles: [tool.importlinter] in pyproject.toml."""
    done = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()", "--no-cache"],
        cwd=PROJECT, env={**os.environ, "PYTHONPATH": str(PROJECT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


@pytest.mark.parametrize(
    "arguments",
    [("validate", "{root}/derived/approved_image_dataset.jsonl"), ("validate", "{root}/shards/bucket_1216x832"),
     ("explain", "photo0000"), ("status",), ("verify",)],
    ids=["validate records", "validate shards", "explain", "status", "verify"],
)  # fmt: skip
def test_reading_command_loads_no_heavy_library(finished, arguments):
    """`validate`, `verify`, `explain`, `status` start fast. Spec: docs/spec/conventions.md#command-line"""
    argv = ["imagemill", *(part.format(root=finished.path) for part in arguments), "--data-root", str(finished.path)]
    loaded = loaded_by(f"from dagster_project.cli.main import main; sys.argv = {argv!r}; main()")

    assert "imagemill" in loaded
    assert not loaded & HEAVY


def test_definitions_load_without_models_or_tars():
    """A code location is loaded often, so it must load fast."""
    loaded = loaded_by("from dagster_project.definitions import defs; defs().resolve_asset_graph()")

    assert "dagster" in loaded
    assert not loaded & MODELS


def test_viewer_loads_no_heavy_library():
    """It starts fast, and beside Dagster's webserver it takes no memory for models. Modules imported in functions count, too."""
    loaded = loaded_by(
        "import pkgutil, imagemill.look as look; "
        "[__import__(module.name) for module in pkgutil.walk_packages(look.__path__, 'imagemill.look.')]; "
        "from huggingface_hub import try_to_load_from_cache; from tokenizers import Tokenizer"
    )

    assert "imagemill" in loaded
    assert not loaded & HEAVY


def test_public_class_names_mean_one_thing():
    """`imagemill.reading.ShardSet` is not `PackPlan`."""
    places = defaultdict(list)
    for package in ("imagemill", "resources", "io_managers", "assets", "checks", "dagster_project"):
        for path in (PROJECT / package).rglob("*.py"):
            classes = (node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.ClassDef))
            for node in classes:
                if not node.name.startswith("_"):
                    places[node.name].append(path.relative_to(PROJECT))

    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}


def test_every_private_module_of_dagster_is_banned():
    """ruff refuses the listed names outside the two packages for them; the list is complete."""
    settings = tomllib.loads((PROJECT / "pyproject.toml").read_text())["tool"]["ruff"]["lint"]["flake8-tidy-imports"]
    private = {f"dagster.{module.name}" for module in pkgutil.iter_modules(dagster.__path__) if module.name[0] == "_"}

    assert private - {"dagster.__main__"} <= settings["banned-api"].keys()
