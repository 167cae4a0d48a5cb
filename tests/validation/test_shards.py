"""Sets of shards on disk; any bytes give findings, never a traceback. Source: CONTRACTS sections 2 and 4."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from imagemill.embedding_specs import T5, embedding_specs
from imagemill.formats.manifest import read_json, write_json
from imagemill.formats.npy import npy_header
from imagemill.layout import DataRoot
from imagemill.pipeline.shards.shard_plan import plan_shards
from imagemill.pipeline.shards.shard_sets import ShardParameters
from imagemill.pipeline.shards.shard_writer import write_bucket
from imagemill.validation.findings import collect
from imagemill.validation.shards import shard_set
from tests.helpers.situations import repack
from tests.helpers.stage2 import foreign, ready, record_of, write_text

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
    write_json(path, {**read_json(path), **changes})


def test_set_as_it_was_written_passes(packed):
    report = check_set(packed)

    assert (report.passed, report.checked, report.findings) == (True, 2, [])


def test_set_written_again_by_the_helper_passes(packed):
    """So that the failing cases below fail for the reason they name."""
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
    """NPY files are copied as-is. Source: seed 001."""
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


def test_odd_ids_pass(data_root):
    """Dots and percent signs are encoded in keys and true in records. Source: CONTRACTS section 2."""
    foreign(data_root, *(record_of(i, size=(16, 16)) for i in ("a.b", "100%", "%2E", "ü x")))
    write_set(data_root)

    assert check_set(data_root).findings == []


# ---- any bytes


@pytest.fixture(scope="module")
def module_set(tmp_path_factory):
    root = DataRoot(tmp_path_factory.mktemp("any") / "data")
    foreign(root, record_of("a", size=(24, 24)))
    write_set(root)
    return root


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(["manifest.json", "index.jsonl", "shard-000000.tar"]), st.data())
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
