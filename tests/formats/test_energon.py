"""Energon's index beside a set of shards.

Reference: megatron-energon 7.4.1, flavors/webdataset/{prepare,indexing,itar,structs}.py.

tests/spec/test_shards_readback.py reads the index with energon itself.
"""

import itertools
import json
import sqlite3
import tarfile
from contextlib import closing

import numpy as np
import pytest
import yaml
from braceexpand import braceexpand
from hypothesis import given
from hypothesis import strategies as st

from imagemill.errors import ImagemillError
from imagemill.formats.energon import META, SQLITE, Earlier, is_energon, metadataset, write_energon
from imagemill.formats.tar import IndexEntry, write_shard

BUCKET = "1024x1024"
PARTS = (("json", b"{}"), ("vae.npy", bytes(700)))


def shards(folder, *names):
    """Write tars with these keys; return the `shards` argument of `write_energon`."""
    folder.mkdir(exist_ok=True, parents=True)
    return [
        (f"shard-{n:06d}.tar", write_shard(folder / f"shard-{n:06d}.tar", [(key, PARTS) for key in keys]))
        for n, keys in enumerate(names)
    ]


def bare(written):
    """The same entries without members, as an index has them."""
    return [(name, [IndexEntry(e.key, e.offset, e.size) for e in entries]) for name, entries in written]


def read(folder, name):
    """Read a document with a YAML reader."""
    return yaml.safe_load((folder / META / name).read_bytes())


def rows(folder, table):
    with closing(sqlite3.connect(folder / META / SQLITE)) as database:
        return database.execute(f"SELECT * FROM {table} ORDER BY rowid").fetchall()


def files(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def prepared(folder, *tars):
    """Offsets per tar, rows of samples and of parts by the rules of `WebdatasetPreparator._preprocess_tar`."""
    offsets, samples, parts = [], [], []
    for tar_id, name in enumerate(tars):
        with tarfile.open(folder / name, encoding="utf-8") as tar:
            groups = [(k, list(g)) for k, g in itertools.groupby(tar, key=lambda member: member.name.split(".")[0])]
            starts = [members[0].offset for _, members in groups]
            offsets.append([*starts, tar.offset])
        for number, ((key, members), (start, end)) in enumerate(
            zip(groups, itertools.pairwise(offsets[-1]), strict=True)
        ):
            samples.append((tar_id, key, number, start, end - start))
            parts += [(tar_id, number, m.name.partition(".")[2], m.offset_data, m.size) for m in members]
    return offsets, samples, parts


# ---- the files energon reads


def test_tar_index_says_where_samples_begin_and_the_last_one_ends(tmp_path):
    """`TarIndexReader` reads a sequence of unsigned 64-bit numbers."""
    written = shards(tmp_path, ["a", "é" * 60], ["c"])

    write_energon(tmp_path, written, bucket=BUCKET)

    expected, _, _ = prepared(tmp_path, "shard-000000.tar", "shard-000001.tar")
    found = [np.fromfile(tmp_path / f"{name}.idx", "<u8").tolist() for name, _ in written]
    assert expected == found
    assert [len(offsets) for offsets in found] == [3, 2]


def test_sqlite_index_has_the_rows_that_prepare_would_write(tmp_path):
    write_energon(tmp_path, shards(tmp_path, ["b", "a", "é" * 60], ["c"]), bucket=BUCKET)

    _, samples, parts = prepared(tmp_path, "shard-000000.tar", "shard-000001.tar")
    assert samples == rows(tmp_path, "samples")
    assert parts == rows(tmp_path, "sample_parts")


def test_sqlite_index_has_the_columns_and_indices_that_readers_name(tmp_path):
    """`SqliteIndexWriter` creates two tables with unique keys, and three indices by name."""
    write_energon(tmp_path, shards(tmp_path, ["a"]), bucket=BUCKET)

    with closing(sqlite3.connect(tmp_path / META / SQLITE)) as database:
        columns = {
            table: [row[1] for row in database.execute(f"PRAGMA table_info({table})")]
            for table in ("samples", "sample_parts")
        }
        names = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'index'")}
        with pytest.raises(sqlite3.IntegrityError):
            database.execute("INSERT INTO samples VALUES (0, 'a', 1, 0, 0)")
    assert columns == {
        "samples": ["tar_file_id", "sample_key", "sample_index", "byte_offset", "byte_size"],
        "sample_parts": ["tar_file_id", "sample_index", "part_name", "content_byte_offset", "content_byte_size"],
    }
    assert {"idx_samples_by_tar_and_idx", "idx_sample_parts_seq", "idx_sample_parts_full"} <= names


def test_documents_name_every_tar_in_the_order_of_the_set(tmp_path):
    """Energon numbers tars by their order in `.info.json`; earlier releases read `.info.yaml`."""
    written = shards(tmp_path, ["a", "b"], ["c"])[::-1]

    write_energon(tmp_path, written, bucket=BUCKET)

    counts = json.loads((tmp_path / META / ".info.json").read_bytes())
    assert list(counts["shard_counts"].items()) == [("shard-000001.tar", 1), ("shard-000000.tar", 2)]
    assert counts == read(tmp_path, ".info.yaml")
    assert read(tmp_path, "split.yaml") == {
        "split_parts": {"train": ["shard-000001.tar", "shard-000000.tar"], "val": [], "test": []},
        "exclude": [],
    }
    assert read(tmp_path, "dataset.yaml") == {
        "__module__": "megatron.energon", "__class__": "CrudeWebdataset", "subflavors": {"bucket": BUCKET},
    }  # fmt: skip


# ---- dead samples


def test_dead_sample_is_excluded_and_still_counted_by_position(tmp_path):
    """Positions are those of the tar: `.idx` and counts include the sample, and `exclude` makes readers skip it."""
    written = shards(tmp_path, ["a", "b", "c"])

    write_energon(tmp_path, written, bucket=BUCKET, dead={("shard-000000.tar", written[0][1][1].offset)})

    assert read(tmp_path, "split.yaml")["exclude"] == ["shard-000000.tar/b"]
    assert read(tmp_path, ".info.yaml")["shard_counts"] == {"shard-000000.tar": 3}
    assert len(np.fromfile(tmp_path / "shard-000000.tar.idx", "<u8")) == 4
    assert [(key, number) for _, key, number, *_ in rows(tmp_path, "samples")] == [("a", 0), ("c", 2)]


def test_key_in_two_tars_is_found_where_it_counts(tmp_path):
    """A changed image is appended again under its key, and the keys of energon's table are unique."""
    written = shards(tmp_path, ["a", "b"], ["a"])

    write_energon(tmp_path, written, bucket=BUCKET, dead={("shard-000000.tar", 0)})

    assert [(tar, key) for tar, key, *_ in rows(tmp_path, "samples")] == [(0, "b"), (1, "a")]


@given(st.text(st.sampled_from("ab{},.1é"), min_size=1))
def test_excluded_name_survives_brace_expansion(tmp_path_factory, key):
    """Energon expands `{a,b}` in every name that it reads from split.yaml."""
    folder = tmp_path_factory.mktemp("set")

    write_energon(
        folder,
        [("shard.tar", [IndexEntry(key, 0, 512).with_members([("json", 512, 0)])])],
        bucket=BUCKET,
        dead={("shard.tar", 0)},
    )

    (name,) = read(folder, "split.yaml")["exclude"]
    assert [f"shard.tar/{key}"] == list(braceexpand(name))


# ---- sets that continue another one


def same_names(folder, shards_):
    return Earlier(folder, {name: name for name, _ in shards_})


@pytest.mark.parametrize("damage", [None, "no index", "no database", "no info", "no parts"])
def test_members_of_earlier_tars_are_those_of_the_tar(tmp_path, damage):
    """The rows from the earlier set's index equal those from the tar's headers, which are read if that index is unreadable."""
    new, old = tmp_path / "new", tmp_path / "old"
    written = shards(old, ["a", "é" * 60, "b"], ["c"])
    write_energon(old, written[:1], bucket=BUCKET)
    if damage == "no index":
        (old / META / SQLITE).unlink()
    elif damage == "no database":
        (old / META / SQLITE).write_bytes(b"x" * 5000)
    elif damage == "no parts":
        with closing(sqlite3.connect(old / META / SQLITE)) as database:
            (page,) = database.execute("SELECT rootpage FROM sqlite_schema WHERE name = 'sample_parts'").fetchone()
        with open(old / META / SQLITE, "r+b") as file:
            file.seek((page - 1) * 4096)
            file.write(b"x" * 4096)
    elif damage == "no info":
        (old / META / ".info.json").unlink()
    shards(new, ["a", "é" * 60, "b"], ["c"])

    write_energon(
        new,
        [*bare(written[:1]), *written[1:]],
        bucket=BUCKET,
        earlier=same_names(old, written),
    )

    _, samples, parts = prepared(new, "shard-000000.tar", "shard-000001.tar")
    assert (samples, parts) == (rows(new, "samples"), rows(new, "sample_parts"))


def test_earlier_index_spares_the_tars(tmp_path):
    """Appending a few samples opens no existing tar: reading the headers of 60,000 samples is slow on a cold disk."""
    old, new = tmp_path / "old", tmp_path / "new"
    written = shards(old, ["a", "b"])
    write_energon(old, written, bucket=BUCKET)
    new.mkdir()  # has no tar

    write_energon(new, bare(written), bucket=BUCKET, earlier=same_names(old, written))

    assert rows(old, "sample_parts") == rows(new, "sample_parts")


def test_tar_with_another_number_has_the_members_and_the_index_of_the_earlier_one(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    first, second = shards(old, ["a", "b"], ["c"])
    write_energon(old, [first, second], bucket=BUCKET)
    new.mkdir()
    (new / "shard-000000.tar").write_bytes((old / "shard-000001.tar").read_bytes())

    (moved,) = bare([("shard-000000.tar", second[1])])
    write_energon(new, [moved], bucket=BUCKET, earlier=Earlier(old, {"shard-000000.tar": "shard-000001.tar"}))

    _, samples, parts = prepared(new, "shard-000000.tar")
    assert (samples, parts) == (rows(new, "samples"), rows(new, "sample_parts"))
    assert (new / "shard-000000.tar.idx").stat().st_ino == (old / "shard-000001.tar.idx").stat().st_ino


@pytest.mark.parametrize("wrong", [IndexEntry("b", 0, 512), IndexEntry("a", 512, 512), IndexEntry("a", 10**6, 512)])
def test_entry_of_another_tar_is_refused(tmp_path, wrong):
    shards(tmp_path, ["a"])

    with pytest.raises(ImagemillError, match="no sample"):
        write_energon(tmp_path, [("shard-000000.tar", [wrong])], bucket=BUCKET)


# ---- equal bytes


def test_equal_sets_give_equal_bytes_wherever_their_members_come_from(tmp_path):
    for name in ("one", "two", "three"):
        shards(tmp_path / name, ["a", "b"], ["c"])
    written = shards(tmp_path / "one", ["a", "b"], ["c"])
    dead = {("shard-000000.tar", 0)}

    write_energon(tmp_path / "one", written, bucket=BUCKET, dead=dead)
    write_energon(tmp_path / "two", bare(written), bucket=BUCKET, dead=dead)
    write_energon(
        tmp_path / "three",
        bare(written),
        bucket=BUCKET,
        dead=dead,
        earlier=same_names(tmp_path / "one", written),
    )

    assert files(tmp_path / "one") == files(tmp_path / "two") == files(tmp_path / "three")


def test_uuid_is_another_one_when_samples_or_places_are_others(tmp_path):
    """`JoinDatasetLoader` rebuilds its join if a dataset's uuid differs."""
    sets = {"same": (["a", "b"], set()), "again": (["a", "b"], set()), "order": (["b", "a"], set())}
    sets["dead"] = (["a", "b"], {("shard-000000.tar", 0)})
    for name, (keys, dead) in sets.items():
        write_energon(tmp_path / name, shards(tmp_path / name, keys), bucket=BUCKET, dead=dead)

    uuids = {name: (tmp_path / name / META / "index.uuid").read_text() for name in sets}
    assert uuids["same"] == uuids["again"]
    assert len({uuids["same"], uuids["order"], uuids["dead"]}) == 3


# ---- names, and the blend


def test_names_written_here_are_reported_from_others():
    assert [is_energon(n) for n in (".nv-meta", "shard-000000.tar.idx", "shard-000000.tar", "notes.idx", "a.txt")] == [
        True, True, False, False, False,
    ]  # fmt: skip


def test_metadataset_mounts_every_sample_of_each_bucket_once_an_epoch():
    """Metadataset v2: paths are relative to the file. Energon refuses weights where a dataset is not repeated."""
    assert yaml.safe_load(metadataset(["bucket_1024x1024", "bucket_832x1216"])) == {
        "__module__": "megatron.energon",
        "__class__": "MetadatasetV2",
        "splits": {
            "train": {
                "blend_epochized": [
                    {"path": "./bucket_1024x1024", "repetitions": 1},
                    {"path": "./bucket_832x1216", "repetitions": 1},
                ]
            }
        },
    }
