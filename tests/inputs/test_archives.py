"""The folder of an archive, and the file of each member: decided without a disk.

Spec: docs/spec/stage2.md#archives
"""

import os
import subprocess
from pathlib import Path, PurePosixPath

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from imagemill.errors import WrongUsage
from imagemill.formats.tar_members import TarMember
from imagemill.inputs.archives import (
    HIDDEN,
    Rejected,
    Target,
    archive_remedy,
    archive_stem,
    assign_folders,
    is_tar,
    plan_member,
    printable,
)
from imagemill.inputs.scan import scan_approved


def planned(name, kind="file", **fields):
    return plan_member(TarMember(name, kind, **fields))


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("000000000.jpg", Target((), "000000000.jpg")),
        ("./a.jpg", Target((), "a.jpg")),
        ("train//x/./a.b.jpg", Target(("train", "x"), "a.b.jpg")),
        ("é ü.jpg", Target((), "é ü.jpg")),
        ("-rf", Target((), "-rf")),
        ("a...b", Target((), "a...b")),
    ],
)
def test_file_keeps_its_path_below_the_folder(name, target):
    assert planned(name) == target


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("/a.jpg", "unsafe_path"),
        ("../a.jpg", "unsafe_path"),
        ("a/../../b.jpg", "unsafe_path"),
        ("a/..", "unsafe_path"),
        ("", "bad_name"),
        (".", "bad_name"),
        ("a\nb.jpg", "bad_name"),
        ("a\0b.jpg", "bad_name"),
        ("a\\b.jpg", "bad_name"),
        ("\udcff.jpg", "bad_name"),
        (".tmp-1-2x000001", "bad_name"),
        ("x" * 256, "bad_name"),
        ("é" * 128, "bad_name"),
        ("a/" * 100 + "b", "bad_name"),
        ("/".join(["x" * 200] * 11), "bad_name"),
        (".hidden", "hidden"),
        ("a/.hidden/b.jpg", "hidden"),
        ("._a.jpg", "hidden"),
    ],
)
def test_unsafe_and_hidden_names_are_rejected(name, reason):
    rejected = planned(name)

    assert isinstance(rejected, Rejected)
    assert rejected.reason == reason
    assert rejected is HIDDEN or (rejected.detail and rejected.remedy)


def test_name_that_is_not_utf8_says_so():
    assert planned("\udcff.jpg").detail == "its name is not UTF-8"
    assert planned("a\\b").detail == "its name contains a path separator"


@pytest.mark.parametrize(
    ("kind", "reason"), [("link", "link"), ("special", "not_a_file"), ("other", "not_a_file"), ("sparse", "sparse")]
)
def test_everything_but_files_is_rejected(kind, reason):
    assert planned("a", kind, target="/etc/passwd").reason == reason


def test_folders_are_made_by_their_files_and_their_paths_are_checked():
    assert planned("a/b/", "folder") is None
    assert planned("./", "folder") is None
    assert planned("../a/", "folder").reason == "unsafe_path"


@settings(deadline=None, max_examples=500)
@given(
    st.binary(max_size=60)
    | st.lists(st.sampled_from(["..", ".", "a", "", ".b", "é"]), max_size=8).map("/".join).map(str.encode)
)
def test_no_name_leads_out_of_the_folder(name):
    found = planned(os.fsdecode(name))

    if isinstance(found, Target):
        path = PurePosixPath(*found.folders, found.name)
        assert not path.is_absolute()
        assert ".." not in path.parts
        assert path.parts == (*found.folders, found.name)
        assert not any(part.startswith(".") or "\0" in part for part in path.parts)
        str(path).encode()


@pytest.mark.parametrize(
    ("name", "stem"),
    [
        ("00000.tar", "00000"),
        ("a.b.tar.gz", "a.b"),
        ("X.TGZ", "X"),
        ("10_sks dog.tar", "10_sks dog"),
        ("data.bin", "data"),
        ("x", "x"),
    ],
)
def test_folder_has_the_name_of_the_archive(name, stem):
    assert archive_stem(name) == stem
    assert assign_folders([Path("/a") / name]) == {Path("/a") / name: stem}


@pytest.mark.parametrize("name", [".tar", ".x.tar", "__MACOSX.tar", "a\nb.tar", "\udcff.tar", "...tar", "old.tar"])
def test_archive_whose_name_gives_no_folder_is_refused(name):
    with pytest.raises(WrongUsage, match="gives no folder") as error:
        assign_folders([Path("/a") / name], ["old*"])
    assert str(error.value).isprintable() or "\n" in str(error.value)


def test_two_archives_of_one_name_are_refused_and_one_given_twice_is_one():
    """Keys repeat between archives."""
    assert assign_folders([Path("/a/0.tar"), Path("/a/0.tar"), Path("/a/1.tar")]) == {
        Path("/a/0.tar"): "0", Path("/a/1.tar"): "1",
    }  # fmt: skip
    for other in ("/b/0.tar", "/a/0.tar.gz"):
        with pytest.raises(WrongUsage, match="two archives would be unpacked into approved/0"):
            assign_folders([Path("/a/0.tar"), Path(other)])


def test_remedy_names_the_command_with_a_path_for_the_shell():
    assert archive_remedy("sub/my shard.tar").startswith("unpack it (`imagemill import 'sub/my shard.tar'`)")
    assert [is_tar(name) for name in ("a.tar", "a.TGZ", "a.tar.gz", "a.tar.xz", "a.zip")] == [
        True,
        True,
        True,
        False,
        False,
    ]


def test_problem_of_an_archive_has_the_remedy_for_its_format(tmp_path):
    (tmp_path / "sub").mkdir()
    for name in ("sub/00000.tar", "photos.zip", "photos.tar.xz"):
        (tmp_path / name).touch()

    problems = {each.item: (each.reason, each.remedy) for each in scan_approved(tmp_path).problems}

    assert problems == {
        "sub/00000.tar": ("archive", archive_remedy("sub/00000.tar")),
        "photos.zip": ("archive", "unpack it into the folder, then remove it"),
        "photos.tar.xz": ("archive", "unpack it into the folder, then remove it"),
    }


def test_long_and_unprintable_names_are_shortened_and_escaped():
    assert printable("a\x1b[2J\udcff") == "a\\x1b[2J\\udcff"
    assert len(printable("x" * 5000)) == 200


@pytest.mark.parametrize("path", [f"{'long' * 60}/00000.tar", "it's.tar", "a\nb\\'c.tar", "\udcff.tar", "é`x`$y.tar"])
def test_remedy_is_a_command_with_the_whole_path(path):
    command = archive_remedy(path).partition("`")[2].rpartition("`")[0]
    words = subprocess.run(
        ["bash", "-c", f'imagemill() {{ printf "%s\\0" "$@"; }}; {command}'], capture_output=True, check=True
    )
    assert words.stdout.split(b"\0") == [b"import", os.fsencode(path), b""]
