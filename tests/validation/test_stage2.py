"""Stage 2 records line by line; any bytes give findings, never a traceback.

Spec: docs/spec/shards.md#updating-a-set, docs/spec/validation.md#checks,
docs/spec/conventions.md#completion-and-identity
"""

import json

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from imagemill.domain.embedding_specs import DINOV3, VAE, embedding_specs
from imagemill.validation.findings import collect
from imagemill.validation.stage2 import stage2_records
from tests.helpers.stage2 import foreign, record_of, write_text


def check_records(path, derived=None):
    return collect(path.name, "stage2", stage2_records(path, derived=derived))


def check_lines(tmp_path, *lines):
    """Check records in the canonical form, which the fast path accepts."""
    path = tmp_path / "records.jsonl"
    write_text(path, *(line if isinstance(line, bytes | str) else msgspec.json.encode(line) for line in lines))
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
    """A ratio outside [0.4, 2.5] is a warning, never an error. Spec: docs/spec/stage2.md#buckets"""
    report = check_lines(tmp_path, record_of("usual", size=(25, 10)), record_of("strip", size=(26, 10)))

    assert [(f.item, f.rule, f.severity) for f in report.findings] == [("strip", "unusual_ratio", "warning")]
    assert report.passed


def test_other_bucket_than_the_nearest_is_a_warning(tmp_path):
    """A record's bucket is accepted if it is one of the seven. Spec: docs/spec/shards.md#order"""
    report = check_lines(tmp_path, record_of("a", aspect_bucket="704x1344"))

    (found,) = report.findings
    assert (found.rule, found.severity, found.field) == ("not_nearest_bucket", "warning", "aspect_bucket")
    assert "1216x832" in found.message


def test_side_that_no_image_has_is_found(tmp_path):
    last = 2**31 - 1
    longest = record_of("c") | {"width": last, "height": last}
    records = [record_of("a", height=10**400), record_of("b", width=last + 1), longest]
    report = check_lines(tmp_path, *records)

    assert [(found.rule, found.line) for found in report.findings if found.severity == "error"] == [
        ("size", 1),
        ("size", 2),
    ]


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
    """The file name is too long, or a folder has the name."""
    path = layout.derived / DINOV3.folder / "a.npy"
    path.unlink()
    path.mkdir()
    write_text(layout.stage2_jsonl, *(json.dumps(record_of(i, size=(24, 24))) for i in ("a", "b", "x" * 300)))

    report = check_records(layout.stage2_jsonl, layout.derived)

    assert report.rules == {"read_error": 1, "id": 1}


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
