"""Tar shards, compared with the standard library's tarfile and with plain WebDataset."""

import io
import os
import re
import struct
import subprocess
import tarfile
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from imagemill.domain.ids import id_of_member_key, member_key
from imagemill.errors import ImagemillError
from imagemill.formats import tar
from imagemill.formats.jsonl import encode_sorted
from imagemill.formats.npy import npy_header
from imagemill.formats.tar import IndexEntry, Sample, parse_sample, read_sample, read_shard, view_sample, write_shard

BLOCK = 512

keys = st.text(st.characters(exclude_categories=["Cc", "Cs"], exclude_characters="./\\"), min_size=1, max_size=180)
sizes = st.one_of(st.sampled_from([0, 1, 511, 512, 513, 1024, 65_536, 65_537]), st.integers(0, 3000))
SUFFIXES = ("json", "dinov3.npy", "vae.npy", "t5h.npy", "t5m.npy")
contents = st.lists(sizes, min_size=1, max_size=len(SUFFIXES)).map(
    lambda chosen: [(suffix, os.urandom(1) * size) for suffix, size in zip(SUFFIXES, chosen, strict=False)]
)
shards = st.dictionaries(keys, contents, max_size=4).map(lambda samples: list(samples.items()))


def as_values(samples) -> list[tuple[str, dict[str, bytes]]]:
    return [
        (key, {suffix: s if isinstance(s, bytes) else s.read_bytes() for suffix, s in members})
        for key, members in samples
    ]


def by_tarfile(samples) -> bytes:
    """Return the standard library's bytes in PAX format, with everything machine-dependent fixed."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT, encoding="utf-8") as archive:
        for key, members in as_values(samples):
            for suffix, values in members.items():
                info = tarfile.TarInfo(f"{key}.{suffix}")
                info.size, info.mode, info.mtime = len(values), 0o644, 0
                archive.addfile(info, io.BytesIO(values))
    return buffer.getvalue()


def on_disk(folder: Path, samples) -> list[Sample]:
    """The same samples with every npy member in a separate file."""
    made: list[Sample] = []
    for number, (key, members) in enumerate(samples):
        sources: list[tuple[str, bytes | Path]] = []
        for suffix, values in members:
            if suffix != "json":
                path = folder / f"{number}.{suffix}"
                path.write_bytes(values)
                sources.append((suffix, path))
            else:
                sources.append((suffix, values))
        made.append((key, sources))
    return made


def few(count: int = 3) -> list[Sample]:
    return [(f"s{n:03d}", [("json", b"{}\n"), ("dinov3.npy", bytes([n % 256]) * (700 + n))]) for n in range(count)]


@pytest.fixture
def shard(tmp_path) -> Path:
    return tmp_path / "shard-000000.tar"


# ---- writing


@given(shards)
@settings(max_examples=60, deadline=None)
@example([("k" * 95, [("json", b"1")]), ("k" * 96, [("json", b"2")])])
@example([("漢" * 180, [("json", b"{}"), ("vae.npy", b"v" * 512)])])
@example([("k" * 420, [(suffix, b"x") for suffix in SUFFIXES])])
@example([("k" * 479, [("json", b"x")]), ("k" * 480, [("json", b"x")]), ("k" * 990, [("json", b"x")])])
def test_shard_is_byte_for_byte_what_tarfile_writes(tmp_path_factory, samples):
    """Names around 100 bytes, PAX records around a change of digits and around a block, any payload size."""
    folder = tmp_path_factory.mktemp("tar")
    path = folder / "shard.tar"
    entries = write_shard(path, on_disk(folder, samples))
    assert path.read_bytes() == by_tarfile(samples)
    assert list(read_shard(path)) == as_values(samples)
    assert [read_sample(path, entry) for entry in entries] == [values for _, values in as_values(samples)]


@given(shards)
@settings(max_examples=30, deadline=None)
def test_index_says_where_samples_and_values_lie(tmp_path_factory, samples):
    """Samples are adjacent, and each member's bytes are at its offset."""
    path = tmp_path_factory.mktemp("tar") / "shard.tar"
    entries = write_shard(path, samples)
    data = path.read_bytes()
    assert [entry.key for entry in entries] == [key for key, _ in samples]
    end = 0
    for entry, (_, members) in zip(entries, samples, strict=True):
        assert entry.offset == end
        assert entry.size % BLOCK == 0
        end = entry.offset + entry.size
        assert [(suffix, data[offset : offset + size]) for suffix, offset, size in entry.members] == members
    assert not any(data[end:])


def test_member_has_no_time_owner_or_mode_of_its_own(tmp_path, shard):
    """Spec: docs/spec/shards.md#determinism"""
    write_shard(shard, [("é", [("json", b"{}")]), *few()])
    with tarfile.open(shard) as archive:
        facts = {(m.mtime, m.uid, m.gid, m.uname, m.gname, m.mode, m.type) for m in archive}
    assert facts == {(0, 0, 0, "", "", 0o644, tarfile.REGTYPE)}


def test_same_samples_give_the_same_bytes_whatever_their_files_say(tmp_path, shard):
    """Times, modes, folders and names of the source files do not affect the bytes."""
    write_shard(shard, on_disk(tmp_path, few()))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    samples = on_disk(elsewhere, few())
    for number, path in enumerate(elsewhere.iterdir()):
        os.utime(path, (number * 1000, number * 1000.5))
        path.chmod(0o600)
    write_shard(elsewhere / "other.tar", samples)
    assert (elsewhere / "other.tar").read_bytes() == shard.read_bytes()


def test_more_samples_than_are_read_ahead_keep_their_order(tmp_path, shard):
    """The files of 16 samples are open at once, never those of all."""
    samples = on_disk(tmp_path, few(100))
    seen = []

    def counted():
        for sample in samples:
            seen.append(len(os.listdir("/dev/fd")))
            yield sample

    before = len(os.listdir("/dev/fd"))
    write_shard(shard, counted())
    assert [key for key, _ in read_shard(shard)] == [key for key, _ in samples]
    assert max(seen) <= before + 20
    assert len(os.listdir("/dev/fd")) == before


def test_empty_shard_is_a_whole_archive(shard):
    assert write_shard(shard, []) == []
    assert shard.read_bytes() == bytes(10_240)
    assert list(read_shard(shard)) == []


@pytest.mark.parametrize("key", ["", "a.b", "a/b", "..", "a\\b", "a\nb", "a\0b", "a\udcff"])
def test_key_that_webdataset_would_split_elsewhere_is_refused(shard, key):
    """Spec: docs/spec/shards.md#members"""
    with pytest.raises(ImagemillError, match="cannot be a sample's key"):
        write_shard(shard, [*few(), (key, [("json", b"{}")])])
    assert not shard.exists()


@pytest.mark.parametrize("change", [-1, 1, -700, 5000])
def test_file_that_changes_its_length_while_it_is_packed_is_an_error(tmp_path, shard, change):
    """The header has the length at opening: with another length the next header would be inside the values."""
    samples = on_disk(tmp_path, few(40))
    victim = tmp_path / "5.dinov3.npy"

    def changing():
        for number, sample in enumerate(samples):
            if number == 8:  # sample 5 is open by then and not yet read
                os.truncate(victim, victim.stat().st_size + change) if change < 0 else victim.write_bytes(
                    bytes(705 + change)
                )
            yield sample

    with pytest.raises(ImagemillError, match="the length of a file changed") as caught:
        write_shard(shard, changing())
    assert caught.value.where == victim
    assert not shard.exists()


def test_failure_closes_every_file_and_leaves_nothing(tmp_path, shard):
    """Cases: a missing source, and a producer that raises, in the middle of a shard."""
    samples = on_disk(tmp_path, few(30))
    before = len(os.listdir("/dev/fd"))
    (tmp_path / "20.dinov3.npy").unlink()
    with pytest.raises(FileNotFoundError):
        write_shard(shard, samples)

    def failing():
        yield from samples[:18]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_shard(shard, failing())
    assert len(os.listdir("/dev/fd")) == before
    assert not shard.exists()


def test_reads_and_writes_cut_short_by_the_system_are_continued(tmp_path, shard, monkeypatch):
    """`readv` and `write` may stop anywhere."""
    samples = on_disk(tmp_path, few())
    readv, write = os.readv, os.write
    monkeypatch.setattr(os, "readv", lambda handle, places: readv(handle, [places[0][:100] or places[1]]))
    monkeypatch.setattr(os, "write", lambda handle, data: write(handle, data[:777]))
    write_shard(shard, samples)
    monkeypatch.undo()
    assert shard.read_bytes() == by_tarfile(samples)


def test_shard_is_written_where_the_system_has_no_advice_to_take(tmp_path, shard, monkeypatch):
    """macOS has no posix_fadvise."""
    monkeypatch.delattr(os, "posix_fadvise", raising=False)
    samples = on_disk(tmp_path, few())
    write_shard(shard, samples)
    assert shard.read_bytes() == by_tarfile(samples)


def test_system_tar_lists_and_unpacks_a_shard(tmp_path, shard):
    """An independent reader accepts long and non-ASCII names too."""
    key = "漢字-" + "k" * 60
    write_shard(shard, [(key, [("json", b"{}\n"), ("vae.npy", b"v" * 1000)]), *few()])
    try:
        subprocess.run(["tar", "-xf", shard, "-C", tmp_path], check=True, env={**os.environ, "LC_ALL": "C.UTF-8"})
    except FileNotFoundError:
        pytest.skip("no tar program on this machine")
    assert (tmp_path / f"{key}.vae.npy").read_bytes() == b"v" * 1000
    assert (tmp_path / "s000.json").read_bytes() == b"{}\n"


# ---- WebDataset

IDS = ["abc123", "a.b.c", "100%", "äöü 漢字", "x" * 180, "é" * 120, "_meta_", "__init__"]


def npy(array: np.ndarray) -> bytes:
    return npy_header(array.shape, array.dtype) + array.tobytes()


def test_plain_webdataset_reads_and_decodes_a_shard(tmp_path, shard):
    """Every sample whole and in order, arrays and records decoded, ids recovered. Spec: docs/spec/shards.md#updating-a-set"""
    import webdataset

    rng = np.random.default_rng(0)
    arrays = {
        image_id: {
            "dinov3.npy": rng.standard_normal(1024, dtype=np.float32),
            "vae.npy": rng.standard_normal((16, 8, 6)).astype(np.float16),
            "t5m.npy": rng.integers(0, 2, 77).astype(np.uint8),
        }
        for image_id in IDS
    }
    samples = [
        (
            member_key(image_id),
            [("json", encode_sorted({"image_id": image_id})), *((s, npy(a)) for s, a in members.items())],
        )
        for image_id, members in arrays.items()
    ]
    write_shard(shard, on_disk(tmp_path, samples))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        read = list(webdataset.WebDataset(str(shard), shardshuffle=False).decode())
    assert [id_of_member_key(sample["__key__"]) for sample in read] == IDS
    for sample in read:
        image_id = sample["json"]["image_id"]
        assert image_id == id_of_member_key(sample["__key__"])
        for suffix, array in arrays[image_id].items():
            assert sample[suffix].dtype == array.dtype
            np.testing.assert_array_equal(sample[suffix], array)


def test_shard_that_webdataset_wrote_is_read(shard):
    """Tars of other programs can be checked too."""
    import webdataset

    with webdataset.TarWriter(str(shard)) as writer:
        writer.write({"__key__": "abc", "json": {"a": 1}, "t5m.npy": np.ones(77, np.uint8)})
        writer.write({"__key__": "漢字", "json": {"a": 2}})
    read = dict(read_shard(shard))
    assert list(read) == ["abc", "漢字"]
    assert set(read["abc"]) == {"json", "t5m.npy"}


# ---- reading


def tar_of(*members: tuple[str, bytes, bytes], end: bool = True) -> bytes:
    buffer = io.BytesIO()
    archive = tarfile.open(fileobj=buffer, mode="w")  # noqa: SIM115
    for name, values, kind in members:
        info = tarfile.TarInfo(name)
        info.size, info.type = len(values), kind
        archive.addfile(info, io.BytesIO(values))
    if end:
        archive.close()
    return buffer.getvalue()


REG = tarfile.REGTYPE


def damaged(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 0x55]) + data[at + 1 :]


WHOLE = by_tarfile(few())


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"not a tar" * 200, id="text"),
        pytest.param(WHOLE[:100], id="cut in the first header"),
        pytest.param(WHOLE[: 3 * BLOCK + 9], id="cut in the values"),
        pytest.param(WHOLE[: 5 * BLOCK], id="cut between two samples"),
        pytest.param(WHOLE[: len(few()) * 5 * BLOCK], id="without the end"),
        pytest.param(WHOLE[: len(few()) * 5 * BLOCK + BLOCK], id="with half the end"),
        pytest.param(damaged(WHOLE, 5 * BLOCK + 3), id="damaged in a later header"),
        pytest.param(tar_of(("abc.json", b"", REG), end=False) + struct.pack("511x"), id="a short block last"),
        pytest.param(tar_of(("folder.d", b"", tarfile.DIRTYPE)), id="a folder"),
        pytest.param(tar_of(("abc.json", b"", tarfile.SYMTYPE)), id="a link"),
        pytest.param(tar_of(("abc", b"x", REG)), id="a name without a suffix"),
        pytest.param(tar_of((".json", b"x", REG)), id="a name without a key"),
        pytest.param(tar_of(("abc.json", b"x", REG), ("abc.json", b"y", REG)), id="a member twice"),
    ],
)
def test_file_that_is_no_whole_shard_is_named(shard, data):
    """None of these is read as a shorter shard without an error; tarfile alone accepts several."""
    shard.write_bytes(data)
    with pytest.raises(ImagemillError, match="not a readable shard") as caught:
        list(read_shard(shard))
    assert caught.value.where == shard
    assert caught.value.why


def test_size_no_file_has_is_refused_before_memory_is_asked_for(shard):
    """A header may claim 8 GiB of values in a file of 10 KiB."""
    header = tarfile.TarInfo("abc.json")
    header.size = 8**11 - 1
    shard.write_bytes(header.tobuf() + bytes(10_240))
    with pytest.raises(ImagemillError, match="cut off within"):
        next(read_shard(shard))


def test_samples_before_the_damage_are_still_read(shard):
    """All except the last one before it, because only the damaged header would show whether that one is complete."""
    shard.write_bytes(WHOLE[: 11 * BLOCK])
    reader = read_shard(shard)
    assert next(reader) == as_values(few())[0]
    with pytest.raises(ImagemillError):
        next(reader)


def test_key_keeps_the_folders_before_it(shard):
    """WebDataset's key ends at the first dot after the last slash."""
    shard.write_bytes(tar_of(("a.d/abc.t5h.npy", b"x", REG), ("a.d/abc.json", b"y", REG)))
    assert list(read_shard(shard)) == [("a.d/abc", {"t5h.npy": b"x", "json": b"y"})]


@pytest.mark.parametrize("key", ["../abc", "/abc", "a/../abc", "./abc", "a//abc", "a\\abc", "a\nbc"])
def test_member_that_leaves_its_folder_is_refused(shard, key):
    shard.write_bytes(tar_of((f"{key}.json", b"y", REG)))

    with pytest.raises(ImagemillError, match=r"is no member of a sample"):
        list(read_shard(shard))


@given(st.text(min_size=1, max_size=12), st.text(min_size=1, max_size=12))
def test_written_member_is_a_plain_file_name(tmp_path_factory, key, suffix):
    """For any key and suffix, a name without separators is written, or nothing is."""
    path = tmp_path_factory.getbasetemp() / "any-name.tar"
    try:
        write_shard(path, [(key, [(suffix, b"x")])])
    except ImagemillError:
        assert not path.exists()
        return
    with tarfile.open(path, encoding="utf-8") as tar:
        assert tar.getnames() == [f"{key}.{suffix}"]
    assert not {"/", "\\", "\0", "\n"} & set(key + suffix)


@given(st.integers(0, len(WHOLE) - 1), st.binary(min_size=1, max_size=600))
@settings(max_examples=150, deadline=None)
def test_damaged_shard_is_read_or_refused_and_nothing_else(tmp_path_factory, at, patch):
    """For any bytes the caller gets samples or ImagemillError."""
    path = tmp_path_factory.getbasetemp() / "damaged.tar"
    path.write_bytes(WHOLE[:at] + patch + WHOLE[at + len(patch) :])
    try:
        assert all(isinstance(key, str) and isinstance(values, dict) for key, values in read_shard(path))
    except ImagemillError as error:
        assert error.where == path


def test_sample_is_found_by_key_offset_and_size_alone(shard):
    """The index on disk has only these fields of an entry."""
    samples = [*few(), ("漢" * 60, [("json", b"{}")])]
    for entry, (_, values) in zip(write_shard(shard, samples), as_values(samples), strict=True):
        assert read_sample(shard, IndexEntry(entry.key, entry.offset, entry.size)) == values


@pytest.mark.parametrize(
    "entry",
    [
        pytest.param(IndexEntry("other", 0, 5 * BLOCK), id="another key"),
        pytest.param(IndexEntry("s000", 5 * BLOCK, 5 * BLOCK), id="the place of another sample"),
        pytest.param(IndexEntry("s000", 0, 10 * BLOCK), id="two samples"),
        pytest.param(IndexEntry("s000", BLOCK, 5 * BLOCK), id="not at a header"),
        pytest.param(IndexEntry("s000", 0, 3 * BLOCK), id="too short"),
        pytest.param(IndexEntry("s000", 10**9, 5 * BLOCK), id="beyond the end"),
    ],
)
def test_index_of_another_shard_is_an_error_not_other_values(shard, entry):
    write_shard(shard, few())
    with pytest.raises(ImagemillError, match="not a readable shard"):
        read_sample(shard, entry)


@given(shards)
@settings(max_examples=30, deadline=None)
@example([("k" * 90, [("json", b"{}"), ("vae.npy", b"v" * 700)])])
def test_views_of_a_sample_are_its_values(tmp_path_factory, samples):
    """Names with and without PAX headers."""
    path = tmp_path_factory.mktemp("tar") / "shard.tar"
    entries = write_shard(path, samples)
    data = memoryview(path.read_bytes())
    views = [view_sample(data[entry.offset : entry.offset + entry.size], entry, path) for entry in entries]
    assert views == [values for _, values in as_values(samples)]
    if samples and samples[0][0] == "k" * 90:
        assert all(view.obj is data.obj for view in views[0].values())  # nothing was copied


ONE = IndexEntry("s000", 0, 5 * BLOCK)


@given(
    st.lists(
        st.tuples(st.one_of(st.integers(0, BLOCK), st.integers(0, 5 * BLOCK - 1)), st.binary(min_size=1, max_size=40)),
        max_size=3,
    ),
    st.booleans(),
)
@settings(max_examples=300, deadline=None)
@example([(0, b"s000.js/n")], True)
@example([(0, b"s000.js\\n")], True)
@example([(0, b"s000.\0\0\0\0\0")], True)
@example([(0, b"s001")], True)
@example([(2 * BLOCK, b"s000.json" + bytes(9))], True)
@example([(124, b"-0000000777")], True)
@example([(124, b"00000077777")], True)
@example([(156, b"5")], True)
def test_views_are_given_or_refused_as_copies_are(patches, checksums):
    """For any bytes at a sample's position, also with valid checksums."""
    content = bytearray(WHOLE[: ONE.size])
    for at, patch in patches:
        content[at : at + len(patch)] = patch
    del content[ONE.size :]
    if checksums:
        for start in (0, 2 * BLOCK):
            header = content[start : start + BLOCK]
            header[148:156] = b" " * 8
            content[start + 148 : start + 156] = b"%06o\0 " % sum(header)
    try:
        expected = parse_sample(bytes(content), ONE, Path("shard.tar"))
    except ImagemillError as error:
        with pytest.raises(ImagemillError, match=re.escape(str(error))):
            view_sample(memoryview(content), ONE, Path("shard.tar"))
    else:
        assert view_sample(memoryview(content), ONE, Path("shard.tar")) == expected


def test_flush_comes_before_the_caller_may_rename(tmp_path, shard, monkeypatch):
    """A renamed shard that is not on disk is lost in a power cut. Spec: docs/spec/conventions.md#completion-and-identity"""
    flushed = []
    monkeypatch.setattr(tar, "flush", lambda handle: flushed.append(os.fstat(handle).st_size))
    write_shard(shard, few())
    assert flushed == [len(WHOLE)]


@pytest.mark.parametrize(("offset", "size"), [(0, -5), (-1, 10), (0, 10**15), (10**9, 512)])
def test_place_outside_the_file_is_not_a_sample(shard, offset, size):
    """An index may be damaged; its sizes are checked before memory is allocated."""
    write_shard(shard, few())
    with pytest.raises(ImagemillError, match="not a readable shard"):
        read_sample(shard, IndexEntry("a", offset, size))
