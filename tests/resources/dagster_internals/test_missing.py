"""A Dagster release without a private name: every command reports it and works, but more slowly."""

import os

import dagster as dg
import pytest

from dagster_project.internals.instance import open_instance
from tests.helpers.product import SEARCH_PATH, imagemill, photos

# The name is renamed in its definition and wherever Dagster uses it.
RENAMED_METHOD = """
from dagster._core.storage.event_log.sql_event_log import SqlEventLogStorage
from dagster._core.storage.event_log.sqlite.sqlite_event_log import SqliteEventLogStorage
for storage in (SqlEventLogStorage, SqliteEventLogStorage):
    for name, function in list(vars(storage).items()):
        if hasattr(function, "__code__"):
            names = tuple("renamed" if used == "_store_asset_event_tags" else used for used in function.__code__.co_names)
            function.__code__ = function.__code__.replace(co_names=names)
SqlEventLogStorage.renamed = SqlEventLogStorage._store_asset_event_tags
del SqlEventLogStorage._store_asset_event_tags
"""
REMOVED_TABLE = """
import dagster, dagster._core.storage.event_log.schema as schema
del schema.DynamicPartitionsTable
"""
# Dagster imports some names inside functions, so these are missing only for imagemill's own modules.
REMOVED_NAME = """
import builtins
def without_name(name, globals=None, locals=None, fromlist=(), level=0, imports=builtins.__import__):
    if "{name}" in (fromlist or ()) and globals["__name__"].startswith(("resources.", "dagster_project.")):
        raise ImportError(f"cannot import name '{name}' from '{{name}}'", name=name)
    return imports(name, globals, locals, fromlist, level)
builtins.__import__ = without_name
"""


@pytest.mark.parametrize(
    ("removed", "name", "switched_off"),
    [
        (RENAMED_METHOD, "_store_asset_event_tags", "events are stored one at a time"),
        (REMOVED_TABLE, "DynamicPartitionsTable", "the history is written by Dagster's own storage"),
        (REMOVED_NAME.format(name="RUNLESS_JOB_NAME"), "RUNLESS_JOB_NAME", "events are stored one at a time"),
        (REMOVED_NAME.format(name="SerializableErrorInfo"), "SerializableErrorInfo", "the UI shows a stack trace"),
        (
            REMOVED_NAME.format(name="RegisteredCodeLocationOrigin"),
            "RegisteredCodeLocationOrigin",
            "the UI cannot execute",
        ),
    ],
    ids=["method", "table", "constant", "class", "origin"],
)
def test_missing_private_name_is_reported_and_the_run_succeeds(data_root, tmp_path, removed, name, switched_off):
    photos(data_root.approved, 2)
    (tmp_path / "sitecustomize.py").write_text(removed)

    path = os.pathsep.join([str(tmp_path), SEARCH_PATH])
    done = imagemill("run", "--data-root", data_root.path, stub=True, PYTHONPATH=path)

    assert done.returncode == 0, done.stdout + done.stderr
    said = [line for line in done.stderr.splitlines() if "lacks a name" in line]
    assert len(said) == 1, done.stderr
    assert all(part in said[0] for part in (f"Dagster {dg.__version__}", name, switched_off))
    with open_instance(data_root) as instance:
        for asset in ("approved_images", "dinov3_npy", "vae_latents", "t5_hidden"):
            assert instance.get_materialized_partitions(dg.AssetKey(asset)) == {"photo0000", "photo0001"}


def test_missing_name_without_a_replacement_is_an_error_message(data_root, tmp_path):
    """Command-line runs cannot be created without it."""
    photos(data_root.approved, 1)
    (tmp_path / "sitecustomize.py").write_text(REMOVED_NAME.format(name="execute_run"))

    path = os.pathsep.join([str(tmp_path), SEARCH_PATH])
    done = imagemill("run", "--data-root", data_root.path, stub=True, PYTHONPATH=path)

    assert done.returncode == 1
    assert f"Dagster {dg.__version__} lacks a name" in done.stderr
    assert "execute_run" in done.stderr
    assert "Traceback" not in done.stderr
