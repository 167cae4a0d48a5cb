"""Every rule once kept and once broken; any bytes give findings, never a traceback. Source: CONTRACTS sections 0, 2 and 4."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from imagemill.embedding_specs import DINOV3, T5, VAE, embedding_specs
from imagemill.formats.jsonl import read_jsonl, write_jsonl
from imagemill.formats.manifest import read_json, sha256_file, write_json
from imagemill.formats.npy import npy_header
from imagemill.formats.tar import read_shard, write_shard
from imagemill.layout import DataRoot
from imagemill.pipeline.shard_sets import ShardParameters
from imagemill.pipeline.shards import plan_shards, write_bucket
from imagemill.validation.findings import collect
from imagemill.validation.rules import shard_set, stage2_records
from tests.helpers.stage2 import foreign, ready, record_of, write_text

SQUARE = "1024x1024"


def check_records(path, derived=None):
    return collect(path.name, "stage2", stage2_records(path, derived=derived))


def check_lines(tmp_path, *lines):
    path = tmp_path / "records.jsonl"
    write_text(path, *(line if isinstance(line, bytes | str) else json.dumps(line) for line in lines))
    return check_records(path)


def rules(report):
    return sorted(report.rules)


# ---- records


def test_valid_records_pass_and_are_counted(tmp_path):
    report = check_lines(tmp_path, record_of("a"), record_of("b", size=(24, 24), extra={"kept": True}))

    assert (report.passed, report.checked, report.findings) == (True, 2, [])


def test_record_without_a_version_passes(tmp_path):
    record = record_of("a")
    del record["format_version"]

    assert check_lines(tmp_path, record).findings == []


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("image_id", None, "id"), ("image_id", "a/b", "id"), ("image_id", 7, "id"), ("image_id", "", "id"),
        ("image_path", "", "path"), ("image_path", 7, "path"), ("caption", " ", "caption"), ("caption", None, "caption"),
        ("t5_attention_mask", [1] * 76, "mask"), ("t5_attention_mask", [True] * 77, "mask"),
        ("t5_attention_mask", [0] * 77, "mask"), ("t5_attention_mask", [1.0] * 77, "mask"),
        ("height", 0, "size"), ("height", True, "size"), ("width", -1, "size"), ("width", 8.0, "size"),
        ("aspect_bucket", "512x512", "bucket"), ("aspect_bucket", ["1024x1024"], "bucket"),
        ("format_version", 1, "version"), ("format_version", True, "version"), ("dinov3_embedding", [0.5], "inline"),
    ],
)  # fmt: skip
def test_bad_field_is_found_with_line_field_rule_message_and_remedy(tmp_path, field, value, rule):
    report = check_lines(tmp_path, record_of("good"), record_of("a") | {field: value})

    (found,) = report.findings
    assert (found.file, found.line, found.field, found.rule) == ("records.jsonl", 2, field, rule)
    assert found.message
    assert found.remedy
    assert (report.checked, report.errors) == (2, 1)


def test_every_bad_field_of_a_record_is_found(tmp_path):
    assert len(check_lines(tmp_path, {}).findings) == 7, "all but version and inline vector"


@pytest.mark.parametrize(
    "line",
    [b"", b"  ", b"null", b"[]", b"7", b'"x"', b"true", b"{", b"\xff", b'{"a": NaN}', b'{"a": Infinity}', b'{"a": "\\ud800"}',
     b"\xef\xbb\xbf{}", b"[" * 5000, b'{"a": 1e999}'],
)  # fmt: skip
def test_line_that_is_no_json_object_is_found_with_its_number(tmp_path, line):
    report = check_lines(tmp_path, record_of("a"), line, record_of("b"))

    (found,) = report.findings
    assert (found.line, found.rule) == (2, "strict_json")
    assert report.checked == 3, "to the end of the file"


def test_id_of_two_records_is_found_at_the_second(tmp_path):
    report = check_lines(tmp_path, record_of("a"), record_of("b"), record_of("a"))

    (found,) = report.findings
    assert (found.rule, found.line, found.item) == ("duplicate_id", 3, "a")
    assert "line 1" in found.message


def test_records_without_an_id_are_no_duplicates_of_each_other(tmp_path):
    nameless = {name: value for name, value in record_of("a").items() if name != "image_id"}

    assert check_lines(tmp_path, nameless, nameless, record_of(7), record_of("7")).rules == {"id": 3}


def test_unusual_ratio_is_a_warning(tmp_path):
    """Outside [0.4, 2.5] a warning, never a failure. Source: CONTRACTS section 1, "bucket"."""
    report = check_lines(tmp_path, record_of("usual", size=(25, 10)), record_of("strip", size=(26, 10)))

    assert [(f.item, f.rule, f.severity) for f in report.findings] == [("strip", "unusual_ratio", "warning")]
    assert report.passed


def test_other_bucket_than_the_nearest_is_a_warning(tmp_path):
    """A record's bucket is taken as written if it is one of the seven. Source: CONTRACTS section 2, "Order"."""
    report = check_lines(tmp_path, record_of("a", aspect_bucket="704x1344"))

    (found,) = report.findings
    assert (found.rule, found.severity, found.field) == ("not_nearest_bucket", "warning", "aspect_bucket")
    assert "1216x832" in found.message


def test_endless_number_is_judged_like_any_other(tmp_path):
    report = check_lines(tmp_path, record_of("a", height=10**400), record_of("b", width=10**400))

    assert report.passed
    assert report.rules["unusual_ratio"] == 2


# ---- files of records


@pytest.fixture
def layout(data_root):
    foreign(data_root, record_of("a", size=(24, 24)), record_of("b", size=(24, 24)))
    return data_root


def test_whole_layout_passes_with_its_files(layout):
    report = check_records(layout.stage2_jsonl, layout.derived)

    assert (report.passed, report.checked, report.findings) == (True, 2, [])


@pytest.mark.parametrize("spec", embedding_specs(), ids=lambda spec: spec.kind)
def test_missing_file_is_found(layout, spec):
    (layout.derived / spec.folder / "a.npy").unlink()

    (found,) = check_records(layout.stage2_jsonl, layout.derived).findings
    assert (found.rule, found.item, found.field, found.line) == ("missing_file", "a", spec.folder, 1)
    assert check_records(layout.stage2_jsonl).passed, "files are looked at only where they are asked for"


@pytest.mark.parametrize(
    ("array", "rule"),
    [
        (np.zeros((16, 3, 3), np.float32), "wrong_dtype"), (np.zeros((16, 3, 4), np.float16), "wrong_shape"),
        (np.full((16, 3, 3), np.nan, np.float16), "non_finite"), (np.zeros((16, 3, 3), ">f2"), "wrong_dtype"),
        (np.array([{}]), "wrong_dtype"),
    ],
)  # fmt: skip
def test_file_that_is_not_its_records_is_found(layout, array, rule):
    np.save(layout.derived / VAE.folder / "b.npy", array, allow_pickle=True)

    (found,) = check_records(layout.stage2_jsonl, layout.derived).findings
    assert (found.rule, found.item, found.field, found.line) == (rule, "b", VAE.folder, 2)


def test_file_that_the_system_will_not_open_is_a_finding(layout):
    """A name longer than any file's, a folder in its place."""
    path = layout.derived / DINOV3.folder / "a.npy"
    path.unlink()
    path.mkdir()
    write_text(layout.stage2_jsonl, *(json.dumps(record_of(i, size=(24, 24))) for i in ("a", "b", "x" * 300)))

    report = check_records(layout.stage2_jsonl, layout.derived)

    assert report.rules == {"read_error": 1 + 3}


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


def repack(root, change, *, honest=True, name="shard-000000.tar"):
    """Write one tar again with other members; honest: its checksum and size in the manifest, its places in the index."""
    path = folder_of(root) / name
    samples = [(key, list(change(dict(members)).items())) for key, members in read_shard(path)]
    entries = write_shard(path, samples)
    if not honest:
        return
    manifest = read_json(folder_of(root) / "manifest.json")
    for shard in manifest["shards"]:
        if shard["name"] == name:
            shard.update(sha256=sha256_file(path), bytes=path.stat().st_size)
    write_json(folder_of(root) / "manifest.json", manifest)
    index = [line.value for line in read_jsonl(folder_of(root) / "index.jsonl")]
    for line in index:
        line.update(next(({"offset": e.offset, "size": e.size} for e in entries if e.key == line["key"]), {}))
    write_jsonl(folder_of(root) / "index.jsonl", index)


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

pieces = st.binary(max_size=30) | st.sampled_from([b"null", b"{}", b'{"image_id": "a"}', b"", b"\xff"])
numbers = st.integers(-(10**40), 10**40) | st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    st.none() | st.booleans() | numbers | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)  # fmt: skip
fields = st.sampled_from([*record_of("a"), "dinov3_embedding", "other"])
odd_records = st.dictionaries(fields, values, max_size=4).map(lambda changes: {**record_of("a"), **changes})


@settings(deadline=None, max_examples=60)
@given(st.lists(pieces | odd_records.map(lambda r: json.dumps(r).encode()), max_size=6))
def test_any_lines_give_a_report(tmp_path_factory, lines):
    report = check_lines(tmp_path_factory.mktemp("any"), *lines)

    assert report.checked == sum(line.count(b"\n") + 1 for line in lines)
    assert len(report.findings) <= report.errors + report.warnings


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
