"""Sets of shards on disk; any bytes give findings, never a traceback.

Spec: docs/spec/shards.md#updating-a-set, docs/spec/validation.md#checks
"""

import io
import json
import sqlite3
import tarfile
from contextlib import closing

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from imagemill.domain.embedding_specs import T5, embedding_specs
from imagemill.domain.layout import DataRoot
from imagemill.formats.jsonl import read_jsonl, write_jsonl
from imagemill.formats.manifest import read_json, write_json
from imagemill.formats.npy import npy_header
from imagemill.pipeline.shards.shard_manifest import sealed
from imagemill.pipeline.shards.shard_plan import plan_shards
from imagemill.pipeline.shards.shard_sets import ShardParameters, read_index, set_digest
from imagemill.pipeline.shards.shard_writer import write_bucket
from imagemill.validation.findings import collect
from imagemill.validation.shards import shard_set
from tests.helpers.shard_sets import bury
from tests.helpers.situations import repack
from tests.helpers.stage2 import foreign, identity_of, ready, record_of, stage2, write_text

SQUARE = "1024x1024"


@pytest.fixture
def layout(data_root):
    foreign(data_root, record_of("a", size=(24, 24)), record_of("b", size=(24, 24)))
    return data_root


def rules(report):
    return sorted(report.rules)


# ---- shard sets


@pytest.fixture
def packed(layout):
    """A set of two shards, one sample each."""
    write_set(layout, shard_size=1)
    return layout


def write_set(root, **parameters):
    found = ready(root, [SQUARE])
    plan = plan_shards(found.ready, [SQUARE], root.shards, ShardParameters(**parameters), "replace")
    write_bucket(plan, plan.plans[0], root.derived, {})


def folder_of(root):
    return root.shards / f"bucket_{SQUARE}"


def check_set(root, *, derived=True):
    return collect("set", "shards", shard_set(folder_of(root), derived=root.derived if derived else None))


def edit_manifest(root, **changes):
    path = folder_of(root) / "manifest.json"
    write_json(path, sealed({**read_json(path), **changes}))


def test_set_as_it_was_written_passes(packed):
    report = check_set(packed)

    assert (report.passed, report.checked, report.findings) == (True, 2, [])


def test_set_written_again_by_the_helper_passes(packed):
    """This ensures that the failing cases below fail for the reason they name."""
    repack(packed, lambda members: members)

    assert check_set(packed).findings == []


@pytest.mark.parametrize("damage", ["absent", "{", '{"format": "other"}'])
def test_set_without_our_manifest_is_found(packed, damage):
    path = folder_of(packed) / "manifest.json"
    path.unlink()
    if damage != "absent":
        path.write_text(damage)

    assert check_set(packed).rules == {"manifest": 1}


def test_flipped_byte_is_found_by_the_checksum(packed):
    path = folder_of(packed) / "shard-000001.tar"
    data = bytearray(path.read_bytes())
    data[-3000] ^= 1
    path.write_bytes(data)

    report = check_set(packed, derived=False)
    assert "checksum" in report.rules
    assert report.findings[0].file == f"bucket_{SQUARE}/shard-000001.tar"


@pytest.mark.parametrize("position", range(0, 40960, 4001))
def test_byte_flipped_anywhere_is_found_and_never_a_traceback(packed, position):
    path = folder_of(packed) / "shard-000000.tar"
    data = bytearray(path.read_bytes())
    data[position] ^= 0xFF
    path.write_bytes(data)

    assert "checksum" in check_set(packed).rules


def test_missing_shard_is_found(packed):
    (folder_of(packed) / "shard-000001.tar").unlink()

    report = check_set(packed)
    assert report.rules == {"missing_shard": 1, "index": 1}


def test_shard_that_the_manifest_does_not_name_is_found(packed):
    (folder_of(packed) / "shard-000007.tar").touch()

    (found,) = check_set(packed).findings
    assert (found.rule, found.file) == ("foreign_shard", f"bucket_{SQUARE}/shard-000007.tar")


def test_cut_shard_is_found(packed):
    path = folder_of(packed) / "shard-000000.tar"
    path.write_bytes(path.read_bytes()[:20_000])

    assert {"checksum", "unreadable", "count"} <= check_set(packed).rules.keys()


def test_other_count_than_the_manifests_is_found(packed):
    shards = read_json(folder_of(packed) / "manifest.json")["shards"]
    edit_manifest(packed, shards=[{**shards[0], "samples": 2}, shards[1]])

    assert check_set(packed).rules == {"count": 1}


@pytest.mark.parametrize(
    "change",
    [
        lambda members: {name: members[name] for name in reversed(members)},
        lambda members: {name: data for name, data in members.items() if name != "t5m.npy"},
        lambda members: {**members, "extra": b""},
    ],
    ids=["order", "missing", "more"],
)
def test_members_that_are_not_those_of_the_manifest_are_found(packed, change):
    repack(packed, change)

    (found,) = check_set(packed).findings
    assert (found.rule, found.item) == ("members", "a")


def json_with(**changes):
    def change(members):
        return {**members, "json": json.dumps({**json.loads(members["json"]), **changes}).encode()}

    return change


@pytest.mark.parametrize(
    ("change", "rule", "field"),
    [
        (lambda members: {**members, "json": b"{"}, "record", "json"),
        (json_with(caption=""), "record", "json"),
        (json_with(image_id="b"), "record", "json"),
        (json_with(t5_attention_mask=[1] * 77), "mask", "t5m.npy"),
        (json_with(height=32), "npy", "vae.npy"),
        (lambda members: {**members, "vae.npy": members["dinov3.npy"]}, "npy", "vae.npy"),
        (lambda members: {**members, "dinov3.npy": npy(np.full(1024, np.nan, np.float32))}, "npy", "dinov3.npy"),
        (lambda members: {**members, "t5h.npy": npy(np.zeros((77, 1024), ">f2"))}, "npy", "t5h.npy"),
        (lambda members: {**members, "t5h.npy": b"no npy"}, "npy", "t5h.npy"),
        (lambda members: {**members, "t5m.npy": b""}, "mask", "t5m.npy"),
        (lambda members: {**members, "t5m.npy": members["t5m.npy"][:-1] + b"\2"}, "mask", "t5m.npy"),
        (lambda members: {**members, "t5m.npy": npy(np.array([1] * 2 + [0] * 75, np.float32))}, "mask", "t5m.npy"),
    ],
)  # fmt: skip
def test_member_that_does_not_fit_its_sample_is_found(packed, change, rule, field):
    repack(packed, change)

    report = check_set(packed, derived=False)

    assert [(f.rule, f.field, f.item) for f in report.findings] == [(rule, field, "a")]
    assert report.checked == 2, "and the rest is looked at too"


def npy(array):
    return npy_header(array.shape, array.dtype) + array.tobytes()


@pytest.mark.parametrize("spec", embedding_specs(), ids=lambda spec: spec.kind)
def test_npy_that_is_not_the_file_on_disk_is_found(packed, spec):
    """NPY files are copied as they are. Spec: docs/spec/shards.md#updating-a-set"""
    np.save(packed.derived / spec.folder / "b.npy", np.full(spec.shape(24, 24), 3, spec.dtype))

    (found,) = check_set(packed).findings
    assert (found.rule, found.item, found.field) == ("verbatim", "b", spec.member)
    assert check_set(packed, derived=False).passed


def test_npy_whose_file_is_gone_is_not_compared(packed):
    (packed.derived / T5.folder / "a.npy").unlink()

    assert check_set(packed).findings == []


def change_index(root, change):
    path = folder_of(root) / "index.jsonl"
    write_text(path, *change(path.read_bytes().splitlines()))


@pytest.mark.parametrize(
    "change",
    [
        lambda lines: lines[:1], lambda lines: [], lambda lines: [lines[0], lines[1].replace(b"000001", b"000000")],
        lambda lines: [*lines, b'{"image_id":"c","key":"c","shard":"shard-000000.tar","offset":0,"size":1}'],
        lambda lines: [lines[0], b"null"], lambda lines: [lines[0], b"{"], lambda lines: [lines[0], b"{}"],
        lambda lines: [lines[0], b'{"key": ["b"]}'], lambda lines: [lines[0], b'{"key": "b"}'],
        lambda lines: [lines[0], lines[1].replace(b'"offset":0', b'"offset":512')],
        lambda lines: [lines[0], lines[1].replace(b'"size":', b'"size":1')],
    ],
)  # fmt: skip
def test_index_that_does_not_agree_with_the_tars_is_found(packed, change):
    change_index(packed, change)

    report = check_set(packed)
    assert "index" in rules(report)
    assert not report.passed


def test_missing_index_is_found(packed):
    (folder_of(packed) / "index.jsonl").unlink()

    assert "index" in check_set(packed).rules


def test_index_in_another_order_is_found(packed):
    """Readers and Energon count positions."""
    change_index(packed, lambda lines: lines[::-1])

    report = check_set(packed)

    assert report.rules == {"index_order": 1}, "and nothing else: energon's files are still right"
    assert report.findings[0].file == f"bucket_{SQUARE}/index.jsonl"


@pytest.mark.parametrize(
    ("old", "new"), [(b'"width":24', b'"width":32'), (b'"tokens":', b'"tokens":1'), (b'"height":24', b'"height":8')]
)
def test_index_that_measures_otherwise_than_its_record_is_found(packed, old, new):
    change_index(packed, lambda lines: [lines[0], lines[1].replace(old, new)])

    report = check_set(packed)

    assert report.rules.keys() >= {"indexed", "statistics"}
    assert {f.item for f in report.findings if f.rule == "indexed"} == {"b"}


def test_digest_of_other_files_is_found(packed):
    """Index and manifest agree on the digest, but the sample does not match it."""
    change_index(packed, lambda lines: [json.dumps({**json.loads(lines[0]), "digest": "f" * 32}).encode(), lines[1]])
    edit_manifest(packed, digest=set_digest(line.digest for line in read_index(folder_of(packed))))

    (found,) = check_set(packed, derived=False).findings
    assert (found.rule, found.item) == ("indexed", "a")


def test_set_of_before_samples_were_measured_passes(packed):
    """Such sets have neither measures in the index nor statistics; the card reports this."""
    kept = ("image_id", "key", "shard", "offset", "size", "digest")
    change_index(
        packed, lambda lines: [json.dumps({key: json.loads(line)[key] for key in kept}).encode() for line in lines]
    )
    manifest = read_json(folder_of(packed) / "manifest.json")
    del manifest["statistics"], manifest["crop"]
    write_json(folder_of(packed) / "manifest.json", sealed(manifest))

    assert check_set(packed).findings == []


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"tombstones": 3}, "tombstones"),
        ({"statistics": {"caption_tokens": {"5": 99}}}, "statistics"),
        (
            {"crop": {"size": "original", "median_coverage": 1, "median_enlargement": 1, "most_enlargement": 1}},
            "statistics",
        ),
        ({"bucket": "832x1216"}, "set_bucket"),
    ],
)
def test_manifest_that_says_otherwise_than_the_index_is_found(packed, changes, rule):
    """Spec: docs/spec/shards.md#index-and-manifest"""
    edit_manifest(packed, **changes)

    report = check_set(packed)

    assert set(report.rules) == {rule}
    assert report.findings[0].file == f"bucket_{SQUARE}/manifest.json"


@pytest.mark.parametrize("field", ["width", "height", "tokens"])
@pytest.mark.parametrize("value", [10**400, 2**31, -1])
def test_index_with_a_measure_that_no_image_has_is_found(packed, field, value):
    path = folder_of(packed) / "index.jsonl"
    first, *rest = path.read_text().splitlines()
    write_text(path, json.dumps({**json.loads(first), field: value}), *rest)

    assert "index" in check_set(packed).rules


@pytest.mark.parametrize("shard_size", [1, 2])
def test_tar_whose_members_occur_twice_is_found(layout, shard_size):
    """The copies follow other samples or, with one sample per tar, the sample itself."""
    write_set(layout, shard_size=shard_size)
    path = folder_of(layout) / "shard-000000.tar"
    with tarfile.open(path) as tar:
        members = [(member, tar.extractfile(member).read()) for member in tar]
    with tarfile.open(path, "a", format=tarfile.USTAR_FORMAT) as tar:
        for member, data in members:
            tar.addfile(member, io.BytesIO(data))

    report = check_set(layout)

    assert {"checksum"} < report.rules.keys()
    messages = " ".join(found.message for found in report.findings)
    assert ("a second sample of this id" if shard_size == 2 else "not a readable shard") in messages


def test_set_in_the_folder_of_another_bucket_is_found(packed):
    folder_of(packed).rename(packed.shards / "bucket_832x1216")

    report = collect("set", "shards", shard_set(packed.shards / "bucket_832x1216"))

    assert [f.item for f in report.findings if f.rule == "set_bucket"] == ["", "a", "b"]


def test_tar_of_other_length_than_the_manifests_is_found(packed):
    shards = read_json(folder_of(packed) / "manifest.json")["shards"]
    edit_manifest(packed, shards=[{**shards[0], "bytes": 5}, shards[1]])

    assert check_set(packed).rules == {"count": 1}


def test_tombstone_of_another_id_than_the_sample_it_lies_on_is_found(packed):
    tombstone = {"image_id": "z", "shard": "shard-000000.tar", "offset": 0, "why": "withdrawn"}
    write_text(folder_of(packed) / "tombstones.jsonl", json.dumps(tombstone).encode())

    assert "tombstones" in check_set(packed).rules


# ---- every leaf of manifest and index


def leaves(value, path=()):
    """Return the paths of all leaf values in a document; an empty list or object is a leaf."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = [leaf for key, child in children for leaf in leaves(child, (*path, key))]
    return found or [path]


def with_leaf(value, path, change):
    """Return the document with another value at this path."""
    if not path:
        return change(value)
    copy = value.copy()
    copy[path[0]] = with_leaf(value[path[0]], path[1:], change)
    return copy


def other(value):
    """Return another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    return f"{value}x" if isinstance(value, str) else ["x"] if isinstance(value, list) else {"x": 1}


@pytest.fixture(scope="module")
def embedded_set(tmp_path_factory):
    """A set of embeddings made by this program, so that provenance has facts; shuffled, appended to, with a tombstone."""
    root = DataRoot(tmp_path_factory.mktemp("leaves") / "data")
    root.approved.mkdir(parents=True)
    stage2(root, "a", "b", size=(24, 24))
    identities = {spec.kind: identity_of(root, spec.kind) for spec in embedding_specs()}
    for existing in ("replace", "append"):
        plan = plan_shards(
            ready(root, [SQUARE]).ready, [SQUARE], root.shards, ShardParameters(1, True, 3), existing,
            withdrawn={"a"} if existing == "append" else set(),
        )  # fmt: skip
        write_bucket(plan, plan.plans[0], root.derived, identities)
    assert check_set(root).findings == []
    return root


def test_every_changed_leaf_of_the_manifest_is_found(embedded_set):
    path = folder_of(embedded_set) / "manifest.json"
    original = path.read_bytes()
    document = read_json(path)
    places = leaves(document)
    assert ("provenance", "dinov3_npy", "facts", "stub") in places
    unnoticed = []
    try:
        for place in places:
            for change in (other, lambda value: None if value is not None else 0):
                write_json(path, with_leaf(document, place, change))
                if check_set(embedded_set).passed:
                    unnoticed.append(place)
    finally:
        path.write_bytes(original)

    # A set without the digest comes from an earlier release, which is a warning.
    assert unnoticed == [("manifest_digest",)]


def test_every_changed_leaf_of_the_index_is_found(embedded_set):
    path = folder_of(embedded_set) / "index.jsonl"
    original = path.read_bytes()
    lines = [line.value for line in read_jsonl(path)]
    unnoticed = []
    try:
        for place in leaves(lines):
            for change in (other, lambda value: None):
                write_jsonl(path, with_leaf(lines, place, change))
                if check_set(embedded_set).passed:
                    unnoticed.append(place)
    finally:
        path.write_bytes(original)

    assert unnoticed == []


def test_key_added_to_manifest_or_index_is_found(packed):
    change_index(packed, lambda lines: [lines[0][:-1] + b',"more":1}', lines[1]])
    assert "index" in check_set(packed).rules

    edit_manifest(packed, more=1)
    assert "manifest" in check_set(packed).rules


@pytest.mark.parametrize("shard", ["../../victim.tar", "/tmp/victim.tar", "..", "shard-000000.tar/../x"])
def test_index_line_of_a_tar_outside_the_folder_is_found_and_makes_nothing(packed, tmp_path, shard):
    """The check of Energon's files creates links with these names."""
    before = sorted(tmp_path.rglob("*"))
    change_index(packed, lambda lines: [json.dumps({**json.loads(lines[0]), "shard": shard}).encode(), lines[1]])

    assert "index" in check_set(packed).rules
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("key", ["../../b", "/etc/b", "b/../a", "."])
def test_member_that_leaves_the_folder_is_found_and_compared_with_nothing(packed, key):
    """A member's name determines the file of `derived/` that it is compared with."""
    path = folder_of(packed) / "shard-000000.tar"
    with tarfile.open(path, "w") as tar:
        for suffix in ("json", "dinov3.npy"):
            tar.addfile(tarfile.TarInfo(f"{key}.{suffix}"), io.BytesIO())

    assert "unreadable" in check_set(packed).rules


# ---- energon's files


@pytest.mark.parametrize(
    "name",
    ["shard-000000.tar.idx", ".nv-meta/.info.json", ".nv-meta/.info.yaml", ".nv-meta/split.yaml",
     ".nv-meta/dataset.yaml", ".nv-meta/index.uuid", ".nv-meta/index.sqlite"],
)  # fmt: skip
@pytest.mark.parametrize("damage", [None, b"", b"something else"], ids=["gone", "empty", "other"])
def test_file_of_energon_that_is_not_what_the_index_asks_for_is_found(packed, name, damage):
    """Each file is removed, emptied or overwritten."""
    path = folder_of(packed) / name
    path.unlink()
    if damage is not None:
        path.write_bytes(damage)

    (found,) = check_set(packed).findings
    assert (found.rule, found.file) == ("energon", f"bucket_{SQUARE}/{name}")


@pytest.mark.parametrize(
    "change",
    [
        "DELETE FROM samples WHERE sample_key = 'a'",
        "UPDATE samples SET byte_offset = byte_offset + 512",
        "UPDATE sample_parts SET content_byte_size = content_byte_size - 1 WHERE part_name = 'vae.npy'",
        "INSERT INTO sample_parts VALUES (0, 0, 'more', 0, 1)",
        "DROP TABLE sample_parts",
    ],
)
def test_row_of_energons_index_that_is_another_is_found(packed, change):
    with closing(sqlite3.connect(folder_of(packed) / ".nv-meta" / "index.sqlite")) as database, database:
        database.execute(change)

    assert check_set(packed).rules == {"energon": 1}


def test_index_of_energon_that_is_cut_off_is_found(packed):
    path = folder_of(packed) / ".nv-meta" / "index.sqlite"
    path.write_bytes(path.read_bytes()[:-200])

    assert check_set(packed).rules == {"energon": 1}


def test_index_of_energon_that_another_sqlite_wrote_passes(packed):
    """Its bytes depend on SQLite's version, so rows are compared. Reference: docs/formats.md."""
    with closing(sqlite3.connect(folder_of(packed) / ".nv-meta" / "index.sqlite")) as database:
        database.executescript("PRAGMA page_size = 8192; VACUUM")

    assert check_set(packed).findings == []


def test_odd_ids_pass(data_root):
    """Dots and percent signs are encoded in keys but not in records. Spec: docs/spec/shards.md#updating-a-set"""
    foreign(data_root, *(record_of(i, size=(16, 16)) for i in ("a.b", "100%", "%2E", "ü x")))
    write_set(data_root)

    assert check_set(data_root).findings == []


def test_set_with_tombstones_of_an_earlier_release_passes(packed):
    """Energon's rows contain only live samples."""
    bury(folder_of(packed), "a")
    assert read_json(folder_of(packed) / "manifest.json")["tombstones"] == 1

    assert check_set(packed).findings == []


# ---- any bytes


@pytest.fixture(scope="module")
def module_set(tmp_path_factory):
    root = DataRoot(tmp_path_factory.mktemp("any") / "data")
    foreign(root, record_of("a", size=(24, 24)))
    write_set(root)
    return root


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(["manifest.json", "index.jsonl", "shard-000000.tar", ".nv-meta/index.sqlite"]), st.data())
def test_any_bytes_in_a_set_give_a_report(module_set, name, data):
    path = folder_of(module_set) / name
    original = path.read_bytes()
    start = data.draw(st.integers(0, len(original)))
    end = data.draw(st.integers(start, min(len(original), start + 600)))
    spoilt = original[:start] + data.draw(st.binary(max_size=20)) + original[end:]
    try:
        path.write_bytes(spoilt)
        report = check_set(module_set)
        assert report.passed == (not report.errors)
        if name == "shard-000000.tar":
            assert report.passed == (spoilt == original)
    finally:
        path.write_bytes(original)
