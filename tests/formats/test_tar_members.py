"""Members of archives by other programs; `tarfile` is the reference for valid ones.

Spec: docs/spec/stage2.md#archives
"""

import gzip
import io
import os
import tarfile
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from imagemill.formats.tar_members import BrokenArchive, TarMember, TooMuch, open_members
from tests.helpers.archives import END, Made, header, member, octal, pax, tar_of

FORMS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}


def listed(folder, data, **limits):
    """Return each member with its data."""
    path = folder / "a.tar"
    path.write_bytes(data)
    found = []
    with open_members(path, **limits) as members:
        for each in members:
            found.append((each, b"".join(iter(members.read, b""))))
    return found


def why(folder, data):
    with pytest.raises(BrokenArchive) as error:
        listed(folder, data)
    assert error.value.where == folder / "a.tar"
    return error.value.what


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_members_of_each_format_are_read(tmp_path, form, packed):
    long = "d" * 90 + "/" + "n" * 90 + ".jpg"
    given = [("a.jpg", b"x" * 1000), (long, b"y"), ("empty", b""), Made("d", kind="folder")]
    given += [
        Made("l", kind="link", target="a.jpg"),
        Made("h", kind="hardlink", target="a.jpg"),
        Made("p", kind="fifo"),
    ]

    found = listed(tmp_path, tar_of(*given, packed=packed, form=FORMS[form]))

    assert [(each.name.rstrip("/"), each.kind, data) for each, data in found] == [
        ("a.jpg", "file", b"x" * 1000), (long, "file", b"y"), ("empty", "file", b""), ("d", "folder", b""),
        ("l", "link", b""), ("h", "link", b""), ("p", "special", b""),
    ]  # fmt: skip
    assert found[4][0].target == "a.jpg"


NAMES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=120)


@settings(deadline=None, max_examples=60)
@given(
    files=st.lists(st.tuples(NAMES, st.binary(max_size=1500)), max_size=5),
    form=st.sampled_from([*FORMS][1:]),
    packed=st.booleans(),
)
def test_members_equal_those_of_tarfile(tmp_path_factory, files, form, packed):
    folder = tmp_path_factory.mktemp("tar")
    data = tar_of(*files, packed=packed, form=FORMS[form])
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        expected = [(info.name, tar.extractfile(info).read() if info.isfile() else b"") for info in tar]

    # `tarfile` removes slashes at the end of a name.
    assert [(each.name.rstrip("/"), content) for each, content in listed(folder, data)] == [
        (name.rstrip("/"), content) for name, content in expected
    ]


def test_names_that_are_not_utf8_are_kept(tmp_path):
    ((found, _),) = listed(tmp_path, member(b"\xff.jpg") + END)

    assert os.fsencode(found.name) == b"\xff.jpg"


def test_unread_data_is_skipped(tmp_path):
    for packed in (False, True):
        (tmp_path / "a.tar").write_bytes(tar_of(("a", b"x" * 3_000_000), ("b", b"y"), packed=packed))
        with open_members(tmp_path / "a.tar") as members:
            assert [each.name for each in members] == ["a", "b"]
            assert members.position == members.size


def test_archives_one_after_another_are_all_read(tmp_path):
    """`cat a.tar b.tar`: nothing after the first end is dropped silently."""
    assert [each.name for each, _ in listed(tmp_path, tar_of(("a", b"1")) + tar_of(("b", b"2")))] == ["a", "b"]
    assert "not a tar" not in why(tmp_path, tar_of(("a", b"1")) + b"garbage " * 64)


def test_sparse_files_and_unknown_types_are_named(tmp_path):
    sparse = bytearray(header(b"s", size=octal(4), kind=b"S", magic=b"ustar  \0"))
    sparse[482] = 1
    sparse[148:156] = b" " * 8
    sparse[148:156] = b"%06o\0 " % sum(sparse)
    data = bytes(sparse) + bytes(512) + member(b"", b"data")[512:]
    data += (
        pax((b"GNU.sparse.major", b"1"))
        + member(b"t", b"data")
        + member(b"v", b"label", kind=b"V")
        + member(b"z", b"z")
        + END
    )

    assert [(each.name, each.kind) for each, _ in listed(tmp_path, data)] == [
        ("s", "sparse"), ("t", "sparse"), ("v", "other"), ("z", "file"),
    ]  # fmt: skip


def test_extended_header_of_the_whole_archive_changes_no_member(tmp_path):
    data = pax((b"path", b"evil"), (b"size", b"0"), kind=b"g") + member(b"a", b"data") + END

    assert listed(tmp_path, data) == [(TarMember("a", "file", 4), b"data")]


@pytest.mark.parametrize("packed", [False, True])
def test_archive_that_is_cut_off_gives_what_is_before(tmp_path, packed):
    whole = tar_of(("a", os.urandom(1000)), ("b", os.urandom(5000)), packed=packed)
    path = tmp_path / "a.tar"
    for length in (len(whole) // 2, 1500):
        path.write_bytes(whole[:length])
        names = []
        with pytest.raises(BrokenArchive, match="cut off"), open_members(path) as members:
            for each in members:
                names.append(each.name)
                while members.read():
                    pass
        assert names[:1] == ["a"]


def test_archive_without_an_end_is_cut_off(tmp_path):
    assert why(tmp_path, member(b"a", b"data")) == "it was cut off"
    assert why(tmp_path, pax((b"path", b"x"))) == "it was cut off"
    assert why(tmp_path, pax((b"path", b"x")) + END) == "it was cut off"


@pytest.mark.parametrize("data", [b"<html>", b"BZh91AY", b"PK\x03\x04" + bytes(2000), os.urandom(4096)])
def test_file_that_is_no_archive_is_named(tmp_path, data):
    assert why(tmp_path, data) == "it is not a tar archive, nor one compressed by gzip"


def test_empty_file_is_named_and_an_empty_archive_is_read(tmp_path):
    assert why(tmp_path, b"") == "the file is empty"
    assert listed(tmp_path, END) == []


@pytest.mark.parametrize(
    "blocks",
    [
        header(size=b"\xff" * 12),
        header(size=b"\x80" + b"\xff" * 11),
        header(size=b"9"),
        member(b"p", b"99 path=x\n", kind=b"x"),
        member(b"p", b"9" * 30 + b" a=b\n", kind=b"x"),
        member(b"p", b"x", kind=b"x"),
        pax((b"size", b"-1")) + member(b"a"),
        pax((b"size", b"9" * 30)) + member(b"a"),
        os.urandom(512),
    ],
)
def test_damaged_header_ends_the_archive(tmp_path, blocks):
    assert "is damaged" in why(tmp_path, member(b"first", b"data") + blocks + END)


def test_damaged_compression_is_named(tmp_path):
    data = bytearray(tar_of(("a", os.urandom(100_000)), packed=True))
    data[50_000] ^= 0xFF

    assert why(tmp_path, bytes(data)).startswith(("it cannot be read", "the header at byte"))


def test_long_header_is_refused_without_reading_it(tmp_path):
    huge = header(b"p", size=octal(4 << 30), kind=b"x")

    assert why(tmp_path, huge + bytes(4096)) == f"a header of {4 << 30} bytes"


def test_chain_of_headers_does_not_recurse(tmp_path):
    data = pax((b"path", b"last")) * 5000 + member(b"short", b"data") + END

    assert [each.name for each, _ in listed(tmp_path, data)] == ["last"]


def test_compressed_archive_of_much_and_nothing_is_stopped(tmp_path):
    bomb = gzip.compress(member(b"a", b"x") + bytes(50 << 20))

    with pytest.raises(TooMuch):
        listed(tmp_path, bomb, most_unused=1 << 20)
    assert len(listed(tmp_path, bomb)) == 1


def test_memory_does_not_depend_on_the_archive(tmp_path):
    data = tar_of(*((f"{number:06d}", b"x") for number in range(3000)), ("large", bytes(64 << 20)), packed=True)
    (tmp_path / "a.tar").write_bytes(data)
    del data
    tracemalloc.start()
    try:
        with open_members(tmp_path / "a.tar") as members:
            assert sum(1 for _ in members) == 3001
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_archive_that_cannot_be_opened_is_named(tmp_path):
    with pytest.raises(BrokenArchive, match="cannot be read"), open_members(tmp_path / "none.tar"):
        pass
