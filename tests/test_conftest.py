"""IMAGEMILL_NO_SKIP=1 turns skips into failures, and only skips."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

CONFTEST = Path(__file__).with_name("conftest.py")
MIXED = """
import pytest

def test_passes(): pass

def test_skips_inside(): pytest.skip("no camera")

@pytest.mark.skip(reason="no printer")
def test_skips_by_mark(): pass

@pytest.mark.xfail(reason="known")
def test_fails_as_known(): assert False

def test_wants_photographs(coco128): pass
"""
WHOLE_MODULE = "import pytest\npytest.importorskip('no_such_module_anywhere')\n"


SLOW_EXAMPLE = """
import time
from hypothesis import given, settings, strategies

@given(strategies.booleans())
def test_sleeps(value): time.sleep(0.3)
"""


def run_pytest(folder: Path, tests: str, no_skip: str | None, **more: str) -> tuple[int, str]:
    """Return exit code and output of a new pytest run over `tests` with the project's conftest."""
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "conftest.py").write_bytes(CONFTEST.read_bytes())
    (folder / "test_given.py").write_text(tests)
    env = {name: value for name, value in os.environ.items() if not name.startswith(("IMAGEMILL_", "PYTEST_", "CI"))}
    env |= {"PYTHONPATH": str(CONFTEST.parent.parent)} | ({"IMAGEMILL_NO_SKIP": no_skip} if no_skip else {}) | more
    command = [sys.executable, "-m", "pytest", "-ra", "-p", "no:cacheprovider", str(folder)]
    done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout


def test_skips_fail_with_their_reason_when_nothing_may_be_skipped(tmp_path):
    """Every skip fails with its reason; an expected failure stays one."""
    code, output = run_pytest(tmp_path, MIXED, "1")

    assert code == 1
    assert "1 failed, 1 passed, 1 xfailed, 2 errors" in output
    assert all(f"Skipped: {reason}" in output for reason in ("no camera", "no printer", "IMAGEMILL_COCO128 names no"))


@pytest.mark.parametrize("no_skip", [None, "0"])
def test_skips_stay_skips_otherwise(tmp_path, no_skip):
    """A developer without the photographs can run the tests, and sees what was skipped."""
    code, output = run_pytest(tmp_path, MIXED, no_skip)

    assert code == 0
    assert "1 passed, 3 skipped, 1 xfailed" in output
    assert "no camera" in output


def test_module_skipped_as_a_whole_fails_too(tmp_path):
    """A skip at collection hides as many tests as the module has."""
    code, output = run_pytest(tmp_path, WHOLE_MODULE, "1")

    assert code != 0
    assert "no_such_module_anywhere" in output


@pytest.mark.parametrize(
    ("no_skip", "more", "expected"),
    [("1", {}, 0), (None, {"CI": "true"}, 0), (None, {}, 1)],
    ids=["no skip", "CI", "plain"],
)
def test_examples_have_no_deadline_in_continuous_integration(tmp_path, no_skip, more, expected):
    """A busy machine takes longer than the 200 ms that hypothesis allows an example."""
    code, output = run_pytest(tmp_path, SLOW_EXAMPLE, no_skip, **more)

    assert expected == code, output
    assert ("DeadlineExceeded" in output) == bool(expected)


def test_deprecation_is_an_error_of_our_own_code_alone():
    def warn(module):
        return lambda: warnings.warn_explicit("old", DeprecationWarning, f"{module}.py", 1, module=module)

    for ours in ("imagemill.formats.images", "assets", "tests.test_conftest"):
        with pytest.raises(DeprecationWarning):
            warn(ours)()
    warn("imagemillion.other")()


def test_environment_is_clean(clean_environment):
    """No test can see a data root or Dagster history of the developer, or access a hub."""
    assert not os.environ.keys() & {"IMAGEMILL_DATA_ROOT", "DAGSTER_HOME"}
    assert os.environ["HF_HUB_OFFLINE"] == "1"


def test_data_root_has_an_empty_approved_folder(data_root):
    assert list(data_root.approved.iterdir()) == []
