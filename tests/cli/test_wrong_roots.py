"""Wrong folders: URLs, mistyped data roots, read-only ones. Nothing is created, and one message has the remedy.

Spec: docs/spec/conventions.md#data-root
"""

import errno
import os
import subprocess
import sys

import pytest

from dagster_project.cli import main as cli
from imagemill.domain.layout import DataRoot
from tests.helpers.product import imagemill, photos

WRITING = [
    ["run"],
    ["stage2"],
    ["stage2", "--output-base-dir", "elsewhere"],
    ["stage2", "--rollback"],
    ["shards"],
    ["withdraw", "a"],
    ["ui", "--port", "39271"],
    ["preset", "rescale", "coco", "--preset", "p"],
    ["stage-a", "--mission", "m"],
]
READING = [["status"], ["explain", "a"], ["verify"], ["stage2", "--verify"]]


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "--data-root", "s3://bucket/data"],
        ["ui", "--data-root", "gs://bucket/data"],
        ["status", "--data-root", "https://host/data"],
        ["run", "--config", "s3://bucket/imagemill.yaml"],
        ["stage2", "--output-base-dir", "s3://bucket/derived"],
        ["shards", "--output-dir", "s3://bucket/shards"],
        ["preset", "convert", "coco", "--public-data-root", "gs://bucket/public"],
        ["preset", "convert", "coco", "--adapter", "coco", "--annotations", "s3://b/a.json", "--images", "."],
        ["preset", "convert", "coco", "--adapter", "coco", "--annotations", "a.json", "--images", "s3://b/i"],
        ["stage-a", "--mission", "m", "--input_dir", "s3://bucket/in"],
        ["stage-a", "--mission", "m", "--output_dir", "https://host/out"],
    ],
)
def test_url_is_wrong_usage_and_creates_no_folder(data_root, tmp_path, monkeypatch, arguments):
    """Path("s3://b") is the local folder `s3:`."""
    monkeypatch.chdir(tmp_path)
    if "--data-root" not in arguments:
        monkeypatch.setenv("IMAGEMILL_DATA_ROOT", str(data_root.path))

    code, text = called(monkeypatch, arguments)

    assert code == 2, text
    assert "not a path of this machine" in text
    assert os.listdir(tmp_path) == ["data"]
    assert os.listdir(data_root.path) == ["approved"]


def called(monkeypatch, arguments):
    """Run a command in this process, which is faster and allows monkeypatching; return exit code and messages."""
    said = []
    monkeypatch.setattr(sys, "argv", ["imagemill", *map(str, arguments)])
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(cli.click, "echo", lambda text="", **_: said.append(str(text)))
    with pytest.raises(SystemExit) as left:
        cli.main()
    return left.value.code, "\n".join(said)


def test_url_in_the_environment_is_wrong_usage(monkeypatch):
    monkeypatch.setenv("IMAGEMILL_DATA_ROOT", "s3://bucket/data")
    code, text = called(monkeypatch, ["status"])
    assert (code, "IMAGEMILL_DATA_ROOT" in text) == (2, True)


@pytest.mark.parametrize("exists", [False, True])
@pytest.mark.parametrize("arguments", [*WRITING, *READING], ids=" ".join)
def test_mistyped_data_root_is_not_changed(tmp_path, monkeypatch, arguments, exists):
    root = tmp_path / "mistyped"
    if exists:
        root.mkdir()
    monkeypatch.chdir(tmp_path)

    code, text = called(monkeypatch, [*arguments, "--data-root", root])

    assert code == 1, text
    assert "where:" in text
    assert list(tmp_path.rglob("*")) == [root] * exists


@pytest.mark.parametrize(
    "arguments", [["run"], ["stage2"], ["shards"], ["withdraw", "a"], ["ui", "--port", "39271"]], ids=" ".join
)
def test_read_only_data_root_is_one_message(data_root, monkeypatch, arguments):
    """The system's error is simulated, because tests may run as root, which can write anywhere."""
    photos(data_root.approved, 1)
    data_root.shards.mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)

    code, text = called(monkeypatch, [*arguments, "--data-root", data_root.path])

    assert code == 1, text
    assert "read-only" in text
    assert str(data_root.path) in text
    assert {".imagemill", ".dagster"}.isdisjoint(os.listdir(data_root.path))


def test_permission_error_without_a_specific_message_gives_one_message(data_root, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied", "/data/.imagemill/ledger.sqlite")

    monkeypatch.setattr("imagemill.pipeline.status.read_status", refuse)
    monkeypatch.setattr("dagster_project.cli.status.read_status", refuse)
    code, text = called(monkeypatch, ["status", "--data-root", data_root.path])
    assert code == 1
    assert "Permission denied" in text
    assert "/data/.imagemill/ledger.sqlite" in text


@pytest.mark.parametrize(
    ("number", "remedy"), [(errno.EIO, "run the same command again"), (errno.ENOSPC, "free space")]
)
def test_disk_error_without_a_specific_message_gives_one_message(data_root, monkeypatch, number, remedy):
    def fail(*_, **__):
        raise OSError(number, os.strerror(number), "/data/.imagemill/ledger.sqlite")

    monkeypatch.setattr("dagster_project.cli.status.read_status", fail)
    code, text = called(monkeypatch, ["status", "--data-root", data_root.path])
    assert code == 1
    assert os.strerror(number) in text
    assert "/data/.imagemill/ledger.sqlite" in text
    assert remedy in text


DEAD = subprocess.run(
    [sys.executable, "-c", "from imagemill.fs.owners import owner_name; print(owner_name())"],
    cwd=os.path.dirname(os.path.dirname(os.path.dirname(__file__))), capture_output=True, text=True, check=True,
).stdout.strip()  # fmt: skip


def test_temporary_files_of_dead_processes_are_removed_everywhere(tmp_path):
    """Files of a live process (this one) are kept."""
    from imagemill.fs.atomic import temporary_path

    root = DataRoot(tmp_path / "data")
    photos(root.approved, 1)
    folders = [
        root.state, root.quarantine, root.derived, root.derived / "near_duplicates", root.shards,
        root.dagster_home, root.derived / "dinov3",
    ]  # fmt: skip
    dead, living = [], []
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
        dead.append(folder / f".tmp-{DEAD}-000001")
        living.append(temporary_path(folder))
        for path in (dead[-1], living[-1]):
            path.write_bytes(b"half")

    done = imagemill("stage2", "--data-root", root.path, stub=True)

    assert done.returncode == 0, done.stdout + done.stderr
    assert [path for path in dead if path.exists()] == []
    assert [path for path in living if not path.exists()] == []
