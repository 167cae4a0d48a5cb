"""Shared fixtures: a clean environment, a data root, and skips that fail if skips are forbidden.

IMAGEMILL_NO_SKIP=1        a skipped test fails with the skip's reason (.ci/run sets it)
IMAGEMILL_MESSAGES=file    records which test produces which message of the product (tests/messages/recorder.py)
IMAGEMILL_COCO128=folder   128 photographs with annotations; tests that need them are skipped without it
"""

import gc
import os
from pathlib import Path

# Before any import of huggingface_hub, which reads it once: tests never access a hub.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["DAGSTER_DISABLE_TELEMETRY"] = "yes"

from tests.messages import recorder

recorder.begin()  # before any import of the product

import hypothesis  # noqa: E402
import pytest  # noqa: E402

from imagemill.domain.layout import ROOT_VARIABLE, DataRoot  # noqa: E402
from imagemill.processes import collect_rarely  # noqa: E402
from tests.helpers.product import shards_of_photos  # noqa: E402

collect_rarely()  # a twentieth of the time of tests in this process

# Continuous integration tries the same examples each time; other runs explore.
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True)
if os.environ.get("CI") or os.environ.get("IMAGEMILL_NO_SKIP"):
    hypothesis.settings.load_profile("ci")


def _fail_if_skipped(report):
    if os.environ.get("IMAGEMILL_NO_SKIP") == "1" and report.skipped and not hasattr(report, "wasxfail"):
        path, line, reason = report.longrepr
        report.outcome = "failed"
        report.longrepr = f"{path}:{line}: {reason} (IMAGEMILL_NO_SKIP=1: nothing may be skipped here)"
    return report


# tryfirst makes these the outermost wrappers: they see the report after pytest's own verdict on skips and xfails.
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport():
    return _fail_if_skipped((yield))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report():
    return _fail_if_skipped((yield))


_ENVIRONMENT = {}


def pytest_collection_finish():
    """Keep what is alive now out of garbage collections, each of which would look at all tests and libraries."""
    _ENVIRONMENT.update(os.environ)
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item, nextitem):
    """After a file, do the same with the libraries that its tests have imported, and take back the variables that these have set.

    With other variables, commands would no longer run in forks (tests/helpers/forks.py).
    """
    yield
    if nextitem is not None and nextitem.path != item.path:
        kept = {"PYTEST_CURRENT_TEST": os.environ.get("PYTEST_CURRENT_TEST", "")}
        os.environ.clear()
        os.environ.update({**_ENVIRONMENT, **kept})
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch, tmp_path):
    """Hide the developer's own data root, Dagster history and consents from the tests."""
    for name in (ROOT_VARIABLE, "DAGSTER_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "user-config"))


@pytest.fixture
def data_root(tmp_path) -> DataRoot:
    """A data root with an empty `approved/`."""
    root = DataRoot(tmp_path / "data")
    root.approved.mkdir(parents=True)
    return root


@pytest.fixture(scope="session")
def preview_root(tmp_path_factory) -> Path:
    """One folder for the whole session, in which each preview model is built once."""
    return tmp_path_factory.mktemp("preview_models")


@pytest.fixture(scope="session")
def coco128() -> Path:
    """The folder of 128 photographs: `images/` and `instances_train2017.json`."""
    folder = os.environ.get("IMAGEMILL_COCO128")
    if not folder:
        pytest.skip("IMAGEMILL_COCO128 names no folder with the 128 photographs")
    return Path(folder)


@pytest.fixture(scope="session")
def square_set(tmp_path_factory, coco128) -> DataRoot:
    """A data root with shards of the 128 photographs by stub encoders; latents have the sizes of their buckets."""
    root = DataRoot(tmp_path_factory.mktemp("bucket") / "data")
    root.approved.mkdir(parents=True)
    shards_of_photos(coco128, root, size="bucket")
    return root
