"""Archives written to a folder of `approved/`.

Spec: docs/spec/stage2.md#archives, docs/spec/conventions.md#atomic-names
"""

import errno
import gzip
import os
from pathlib import Path

import pytest

from imagemill.errors import DiskFull
from imagemill.fs.atomic import temporary_path
from imagemill.inputs import unpacking
from imagemill.inputs.unpacking import Limits, unpack
from tests.helpers.archives import END, Made, header, img2dataset, member, octal, tar_of


@pytest.fixture
def approved(tmp_path):
    (tmp_path / "data" / "approved").mkdir(parents=True)
    return tmp_path / "data" / "approved"


def imported(approved, data, *, files=1000, size=1 << 30, name="0.tar"):
    archive = approved.parent.parent / name
    archive.write_bytes(data)
    return unpack(archive, approved, "0", Limits(files, size))


def tree(folder):
    """Return every entry: bytes of a file, target of a link, None of a folder."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        found[name] = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
    return found


@pytest.mark.parametrize("packed", [False, True])
def test_files_are_written_into_the_folder(approved, packed):
    result = imported(approved, tar_of(("a.jpg", b"x" * 3_000_000), ("d/e/b.jpg", b"y"), ("empty", b""), packed=packed))

    assert tree(approved) == {
        "0": None, "0/a.jpg": b"x" * 3_000_000, "0/d": None, "0/d/e": None, "0/d/e/b.jpg": b"y", "0/empty": b"",
    }  # fmt: skip
    assert (result.files, result.size, result.present, result.problems) == (3, 3_000_001, 0, [])


def test_second_import_changes_nothing(approved):
    data = tar_of(*img2dataset(200))
    imported(approved, data)
    before = {path: path.stat().st_mtime_ns for path in approved.rglob("*")}

    result = imported(approved, data)

    assert (result.files, result.present, result.problems) == (0, 600, [])
    assert {path: path.stat().st_mtime_ns for path in approved.rglob("*")} == before


def test_missing_files_are_added(approved):
    imported(approved, tar_of(*img2dataset(3)))
    (approved / "0" / "000000001.jpg").unlink()

    result = imported(approved, tar_of(*img2dataset(3)))

    assert (result.files, result.present) == (1, 8)


@pytest.mark.parametrize("other", [b"", b"another caption", b"noise number 9"])
def test_existing_file_of_other_bytes_is_kept_and_named(approved, other):
    imported(approved, tar_of(("a.txt", b"noise number 0")))
    (approved / "0" / "a.txt").write_bytes(other)

    result = imported(approved, tar_of(("a.txt", b"noise number 0"), ("b.txt", b"b")))

    (problem,) = result.problems
    assert (problem.member, problem.reason, result.files) == ("a.txt", "exists", 1)
    assert (approved / "0" / "a.txt").read_bytes() == other


def test_second_member_of_a_name_is_compared_with_the_first(approved):
    """Also while the first has no final name yet."""
    result = imported(approved, tar_of(("a", b"1"), ("a", b"1"), ("a", b"2"), ("d/x", b""), ("a", b"22")))

    assert (result.files, result.present, dict(result.reasons)) == (2, 1, {"exists": 2})
    assert tree(approved / "0") == {"a": b"1", "d": None, "d/x": b""}


def test_files_and_folders_of_one_name_are_named(approved):
    result = imported(approved, tar_of(("a", b"1"), ("a/b", b"2"), ("c/d", b"3"), ("c", b"4"), ("e", b"5")))

    assert [(each.member, each.reason) for each in result.problems] == [("a/b", "exists"), ("c", "exists")]
    assert tree(approved / "0") == {"a": b"1", "c": None, "c/d": b"3", "e": b"5"}


def test_links_and_devices_are_not_made_and_hidden_members_are_counted(approved):
    members = [Made("l", kind="link", target="/etc"), Made("h", kind="hardlink", target="a")]
    members += [Made("p", kind="fifo"), Made("c", kind="device"), ("l/passwd", b"x"), ("../out", b"x")]
    members += [("/out", b"x"), (".DS_Store", b"x"), ("._a", b"x"), ("a", b"x")]

    result = imported(approved, tar_of(*members))

    assert dict(result.reasons) == {"link": 2, "not_a_file": 2, "unsafe_path": 2}
    assert (result.hidden, result.hidden_names) == (2, [".DS_Store", "._a"])
    assert tree(approved / "0") == {"l": None, "l/passwd": b"x", "a": b"x"}
    assert sorted(os.listdir(approved.parent.parent)) == ["0.tar", "data"]


@pytest.mark.parametrize("inner", ["link", "link/deep"])
def test_links_in_the_folder_are_not_followed(approved, tmp_path, inner):
    outside = tmp_path / "outside"
    (outside / "deep").mkdir(parents=True)
    (approved / "0").mkdir()
    (approved / "0" / "link").symlink_to(outside)
    (approved / "0" / "file").symlink_to(outside / "new")

    result = imported(approved, tar_of((f"{inner}/a", b"x"), ("file", b"x"), ("ok", b"x")))

    assert dict(result.reasons) == {"exists": 2}
    assert tree(outside) == {"deep": None}
    assert (approved / "0" / "ok").read_bytes() == b"x"


def test_pipe_in_place_of_a_file_is_not_waited_for(approved):
    (approved / "0").mkdir()
    os.mkfifo(approved / "0" / "a")

    assert dict(imported(approved, tar_of(("a", b"x"))).reasons) == {"exists": 1}


@pytest.mark.parametrize("kind", ["file", "link"])
def test_folder_that_is_a_file_or_a_link_is_named(approved, tmp_path, kind):
    (tmp_path / "outside").mkdir()
    (approved / "0").touch() if kind == "file" else (approved / "0").symlink_to(tmp_path / "outside")

    (problem,) = imported(approved, tar_of(("a", b"x"))).problems

    assert (problem.reason, problem.remedy) == ("exists", "move it elsewhere, or rename the archive")
    assert tree(tmp_path / "outside") == {}


def test_number_of_files_is_limited(approved):
    data = tar_of(*img2dataset(3))

    result = imported(approved, data, files=4)

    assert (result.files, result.limit_reached) == (4, True)
    assert [(each.member, each.reason) for each in result.problems] == [("000000001.txt", "limit")]
    assert "--max-files" in result.problems[0].remedy
    assert imported(approved, data, files=4).present == 4, "existing files do not count"
    assert len(list((approved / "0").iterdir())) == 8


def test_folders_count_as_files(approved):
    """A file of no bytes may have a hundred folders."""
    result = imported(approved, tar_of(*((f"{number}/b/c", b"") for number in range(10))), files=8)

    assert (result.files, [(each.member, each.reason) for each in result.problems]) == (2, [("2/b/c", "limit")])
    assert len(list(approved.rglob("*"))) <= 1 + 8


@pytest.mark.parametrize("packed", [False, True])
def test_number_of_bytes_is_limited_before_they_are_written(approved, packed):
    result = imported(approved, tar_of(("a", b"x" * 600), ("b", b"x" * 600), ("c", b"x"), packed=packed), size=1000)

    assert (tree(approved / "0"), result.limit_reached) == ({"a": b"x" * 600}, True)
    assert "--max-bytes" in result.problems[0].detail


def test_huge_declared_size_writes_nothing(approved):
    packed = gzip.compress(member(b"ok", b"x") + header(b"huge", size=octal(8**11 - 1)) + bytes(1 << 20))

    result = imported(approved, packed)

    assert tree(approved / "0") == {"ok": b"x"}
    assert result.limit_reached


def test_compressed_zeros_reach_the_limit(approved):
    result = imported(approved, gzip.compress(member(b"ok", b"x") + bytes(8 << 20)), size=1 << 20)

    assert (tree(approved / "0"), dict(result.reasons)) == ({"ok": b"x"}, {"limit": 1})


@pytest.mark.parametrize("packed", [False, True])
def test_archive_that_is_cut_off_keeps_whole_files_only(approved, packed):
    whole = tar_of(("a", os.urandom(1000)), ("b", os.urandom(100_000)), packed=packed)

    result = imported(approved, whole[:50_000])

    (problem,) = result.problems
    assert (problem.reason, problem.member) == ("damaged", "")
    assert list(tree(approved / "0")) == ["a"]
    assert imported(approved, whole).problems == []


def test_problems_are_counted_and_the_first_are_kept(approved):
    result = imported(approved, tar_of(*((f"../{number}", b"") for number in range(100))))

    assert (result.reasons["unsafe_path"], len(result.problems)) == (100, 20)


def test_more_files_than_a_batch_and_several_folders(approved):
    members = [(f"{number % 3}/{number}", b"x") for number in range(20)] + [
        (f"d/{number}", b"y") for number in range(600)
    ]

    assert imported(approved, tar_of(*members)).files == 620
    assert len(list((approved / "0" / "d").iterdir())) == 600
    assert list(approved.rglob(".tmp-*")) == []


def test_temporaries_of_dead_processes_are_removed(approved):
    folder = approved / "0" / "d"
    folder.mkdir(parents=True)
    dead, alive = folder / ".tmp-0123abcd-1-2-000001", temporary_path(folder)
    for path in (dead, alive):
        path.touch()

    imported(approved, tar_of(("a", b"x")))

    assert (dead.exists(), alive.exists()) == (False, True)


def test_name_that_the_disk_cannot_store_is_named(approved, monkeypatch):
    real = os.open

    def refuse(path, *args, **kwargs):
        if path == "bad":
            raise OSError(errno.EILSEQ, "Invalid or incomplete multibyte character", path)
        return real(path, *args, **kwargs)

    monkeypatch.setattr(unpacking.os, "open", refuse)

    result = imported(approved, tar_of(("bad", b"x"), ("good", b"x")))

    assert [(each.member, each.reason) for each in result.problems] == [("bad", "bad_name")]
    assert tree(approved / "0") == {"good": b"x"}


def test_file_system_without_hard_links(approved, monkeypatch):
    def refuse(*args, **kwargs):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(unpacking.os, "link", refuse)

    result = imported(approved, tar_of(("a", b"x"), ("b", b"x"), ("a", b"y")))

    assert (result.files, dict(result.reasons)) == (2, {"exists": 1})
    assert tree(approved / "0") == {"a": b"x", "b": b"x"}


def test_name_that_the_disk_refuses_at_the_end_is_named(approved, monkeypatch):
    real = os.link

    def refuse(temporary, name, **kwargs):
        if name == "bad":
            raise OSError(errno.EINVAL, "Invalid argument")
        real(temporary, name, **kwargs)

    monkeypatch.setattr(unpacking.os, "link", refuse)

    result = imported(approved, tar_of(("d/a", b"x"), ("d/bad", b"x"), ("d/c", b"x")))

    assert [(each.member, each.reason) for each in result.problems] == [("d/bad", "bad_name")]
    assert tree(approved / "0" / "d") == {"a": b"x", "c": b"x"}


def test_existing_file_that_cannot_be_read_is_named(approved, monkeypatch):
    real = os.open

    def refuse(path, *args, **kwargs):
        if path == "a":
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return real(path, *args, **kwargs)

    monkeypatch.setattr(unpacking.os, "open", refuse)

    (problem,) = imported(approved, tar_of(("a", b"x"))).problems

    assert (problem.reason, problem.detail) == ("exists", "a file that cannot be read has its name")


def test_full_disk_leaves_whole_files_and_no_temporaries(approved, monkeypatch):
    real, written = os.write, []

    def fill(handle, data):
        written.append(len(data))
        if len(written) > 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(handle, data)

    monkeypatch.setattr(unpacking.os, "write", fill)

    with pytest.raises(DiskFull):
        imported(approved, tar_of(("a", b"x"), ("b", b"x"), ("c", b"x")))
    assert tree(approved / "0") == {}


def test_file_that_another_process_made_meanwhile_is_kept(approved, monkeypatch):
    def meanwhile(paths):
        (approved / "0" / "a").write_bytes(b"theirs")
        return {}

    monkeypatch.setattr(unpacking, "flush_files", meanwhile)

    result = imported(approved, tar_of(("a", b"ours")))

    assert tree(approved / "0") == {"a": b"theirs"}
    assert [(each.member, each.reason) for each in result.problems] == [("a", "exists")]


def test_flush_that_fails_raises_and_leaves_nothing(approved, monkeypatch):
    monkeypatch.setattr(unpacking, "flush_files", lambda paths: {Path("x"): OSError(errno.EIO, "io")} if paths else {})

    with pytest.raises(OSError, match="io"):
        imported(approved, tar_of(("a", b"x")))
    assert tree(approved / "0") == {}


def test_damage_after_members_is_named_once(approved):
    result = imported(approved, member(b"a", b"x") + os.urandom(512) + END)

    assert (tree(approved / "0"), dict(result.reasons)) == ({"a": b"x"}, {"damaged": 1})
