"""`make run` selects the data root and writes into no folder of images. The tools in .venv are stand-ins here.

Spec: docs/spec/conventions.md#set-up
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


@pytest.fixture
def checkout(tmp_path) -> Path:
    """A folder with our Makefile and a `.venv` that counts as set up."""
    folder = tmp_path / "check out"
    tools = folder / ".venv" / "bin"
    tools.mkdir(parents=True)
    for name in ("Makefile", "requirements.lock", "pyproject.toml"):
        shutil.copyfile(REPOSITORY / name, folder / name)
    scripts = {"python": f'exec "{sys.executable}" "$@"'}
    scripts |= {name: f'for word in {name} "$@"; do echo "[$word]"; done' for name in ("uv", "imagemill")}
    for name, script in scripts.items():
        (tools / name).write_text(f"#!/bin/sh\n{script}\n")
        (tools / name).chmod(0o755)
    (folder / ".venv" / "set-up.stamp").touch()
    return folder


@pytest.fixture
def photos(tmp_path) -> Path:
    folder = tmp_path / "summer photos"
    folder.mkdir()
    (folder / "beach.jpg").write_bytes(b"mine")
    return folder


def make(checkout: Path, *words: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run make; `path` is the folder in which recipes find programs by name."""
    # An outer `make test` hands down its own flags and variables.
    handed_down = {"IMAGES", "DATA_ROOT", "TORCH", "TEST_MARKS", "MAKEFLAGS", "MAKELEVEL", "MFLAGS"}
    env = {k: v for k, v in os.environ.items() if k not in handed_down} | {"PYTHONPATH": str(REPOSITORY)}
    if path:
        env["PATH"] = str(path)
    return subprocess.run(
        [str(shutil.which("make")), *words],
        cwd=checkout,
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_run_without_images_places_samples_in_data(checkout):
    """"""
    done = make(checkout, "run")

    assert done.returncode == 0, done.stderr
    assert (checkout / "data" / "approved" / "chelsea.png").is_file()
    assert "[imagemill]\n[run]\n[--data-root]\n[data]\n" in done.stdout


@pytest.mark.parametrize("relative", [True, False])
def test_run_with_images_links_them_and_writes_nothing_there(checkout, photos, relative):
    """The data root is `data-<folder name>`, `approved/` is a symlink, names may contain spaces."""
    given = os.path.relpath(photos, checkout) if relative else str(photos)

    done = make(checkout, "run", f"IMAGES={given}/")
    root = checkout / "data-summer photos"

    assert done.returncode == 0, done.stderr
    assert (root / "approved").readlink() == photos.resolve()
    assert f"[imagemill]\n[run]\n[--data-root]\n[{root}]\n" in done.stdout
    assert os.listdir(photos) == ["beach.jpg"]
    assert make(checkout, "run", f"IMAGES={given}").returncode == 0


def test_run_with_images_takes_the_data_root_it_is_given(checkout, photos, tmp_path):
    done = make(checkout, "run", f"IMAGES={photos}", f"DATA_ROOT={tmp_path}/my root")

    assert done.returncode == 0, done.stderr
    assert (tmp_path / "my root" / "approved").readlink() == photos.resolve()


def test_run_refuses_a_data_root_that_has_other_images(checkout, photos):
    """The user's photos are never mixed with the samples."""
    (checkout / "data" / "approved").mkdir(parents=True)

    done = make(checkout, "run", f"IMAGES={photos}", "DATA_ROOT=data")

    assert done.returncode != 0
    assert "data/approved holds or names other images; choose another DATA_ROOT=" in done.stderr
    assert "[imagemill]" not in done.stdout


@pytest.mark.parametrize("inside", ["", "/out"])
def test_run_refuses_a_data_root_within_the_images(checkout, photos, inside):
    """Nothing is written into the user's folder."""
    done = make(checkout, "run", f"IMAGES={photos}", f"DATA_ROOT={photos}{inside}")

    assert done.returncode != 0
    assert "only read" in done.stderr
    assert os.listdir(photos) == ["beach.jpg"]


def test_run_names_a_folder_that_is_not_there(checkout):
    done = make(checkout, "run", "IMAGES=nowhere at all")

    assert done.returncode != 0
    assert "no such folder: IMAGES=nowhere at all" in done.stderr
    assert not list(checkout.glob("data*"))


def test_set_up_is_done_once_and_again_when_the_lock_changes(checkout):
    """"""
    assert "[uv]" not in make(checkout, "setup").stdout

    stamp = (checkout / ".venv" / "set-up.stamp").stat().st_mtime
    os.utime(checkout / "requirements.lock", (stamp + 5, stamp + 5))

    assert "[uv]\n[pip]\n[install]" in make(checkout, "setup").stdout
    os.utime(checkout / "requirements.lock", (stamp - 5, stamp - 5))
    assert "[uv]" not in make(checkout, "setup").stdout


def test_slow_tests_run_where_they_are_asked_for(checkout):
    (checkout / ".venv/bin/pytest").write_text('#!/bin/sh\nfor word in "$@"; do echo "[$word]"; done')
    (checkout / ".venv/bin/pytest").chmod(0o755)

    assert "[-m]\n[not soak and not slow]\n" in make(checkout, "test").stdout
    assert "[-m]\n[not soak]\n" in make(checkout, "test", "TEST_MARKS=not soak").stdout
    assert "make test TEST_MARKS='not soak' || failed=$?\n" in (REPOSITORY / ".ci/run").read_text()


def test_plain_make_lists_the_targets(checkout):
    done = make(checkout)

    assert done.returncode == 0
    assert {"make run", "make test", "make setup", "make ui", "make lint", "make image-test", "make lock"} <= {
        line.partition("  ")[0] for line in done.stdout.splitlines()
    }


@pytest.mark.parametrize("no_skip", ["", "1"])
def test_compose_file_is_unchecked_without_npx_only_where_skips_are_permitted(checkout, tmp_path, monkeypatch, no_skip):
    monkeypatch.setenv("IMAGEMILL_NO_SKIP", no_skip)
    done = make(checkout, "lint-containers", path=tmp_path)

    assert "[hadolint]\n[Dockerfile]\n" in done.stdout
    assert "compose.yaml is not checked: npx (Debian's package npm) is not installed" in done.stderr
    assert (done.returncode != 0) is bool(no_skip)


def test_compose_file_is_checked_by_a_pinned_linter(checkout, tmp_path):
    npx = tmp_path / "npx"
    npx.write_text('#!/bin/sh\nfor word in "$@"; do echo "[$word]"; done; exit 3')
    npx.chmod(0o755)

    done = make(checkout, "lint-containers", path=tmp_path)

    assert done.returncode != 0
    assert re.search(r"\[dclint@[\d.]+\]\n\[--max-warnings\]\n\[0\]\n\[compose.yaml\]\n", done.stdout)
    lint = (REPOSITORY / "Makefile").read_text().partition("\nlint: setup")[2].partition("\n\n")[0]
    assert "check-defs lint-containers" in lint
