"""Checks of the records as one table, which checks of single records cannot make. Spec: docs/spec/validation.md#checks"""

import json
import sqlite3
import sys
from contextlib import closing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from imagemill.formats.jsonl import encode_line, read_jsonl, write_jsonl
from imagemill.pipeline.shards.shard_sets import bucket_folder
from imagemill.pipeline.stage2.record_index import read_recorded, unfinished
from imagemill.store.ledger import Ledger
from imagemill.validation import tables
from imagemill.validation.findings import collect
from imagemill.validation.tables import validate_index_table, validate_ledger_tables, validate_stage2_table
from tests.helpers.situations import SQUARE, embedded, shards
from tests.helpers.stage2 import record_of, write_text


def check(tmp_path, *lines):
    path = tmp_path / "records.jsonl"
    write_text(path, *(line if isinstance(line, bytes | str) else json.dumps(line) for line in lines))
    return collect(path.name, "table", validate_stage2_table(path))


def test_valid_records_are_a_valid_table(tmp_path):
    report = check(tmp_path, record_of("a"), record_of("b", size=(24, 24), extra=[1]))

    assert (report.passed, report.checked, report.findings) == (True, 2, [])


def test_records_without_a_version_are_taken(tmp_path):
    """If format_version is present, it is 2. Spec: docs/spec/shards.md#readiness"""
    nameless = {name: value for name, value in record_of("a").items() if name != "format_version"}

    assert check(tmp_path, nameless).findings == []
    assert check(tmp_path, nameless, record_of("b")).findings == []


@pytest.mark.parametrize("lines", [[], [""], ["null", "{", "[]"]])
def test_file_without_a_record_is_an_empty_table(tmp_path, lines):
    report = check(tmp_path, *lines)

    assert (report.passed, report.checked) == (True, 0)


def test_id_that_stands_twice_is_found(tmp_path):
    report = check(tmp_path, record_of("a"), record_of("b"), record_of("a"))

    assert not report.passed
    assert {finding.field for finding in report.findings} == {"image_id"}
    assert {finding.item for finding in report.findings} == {"a"}


@pytest.mark.parametrize(
    "records",
    [
        [record_of("a"), record_of("b"), record_of("a")],
        [record_of("a"), record_of("a", extra=1), record_of("b")],
        [record_of("a", extra=1), record_of("a"), record_of("a")],
        [record_of("a"), record_of("b", caption=" "), record_of("c", height=7)],
        [record_of("a", t5_attention_mask=[2]), record_of("a")],
        [record_of("a"), record_of("b")],
    ],
)
def test_findings_do_not_depend_on_how_lines_are_written(tmp_path, records):
    """Lines as imagemill writes them are judged without pandas."""
    ours, others = (check(tmp_path, *map(encode, records)) for encode in (encode_line_without_end, json.dumps))

    assert (ours.checked, ours.findings) == (others.checked, others.findings)
    assert ours.checked == len(records)


def encode_line_without_end(record):
    return encode_line(record)[:-1]


def test_pandas_is_not_needed_for_a_valid_table(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    lines = [encode_line_without_end(record_of(name)) for name in ("a", "b")]

    assert check(tmp_path, *lines).checked == 2


def test_records_that_this_process_has_read_as_valid_are_not_read_again(tmp_path, monkeypatch):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"".join(encode_line(record_of(name)) for name in ("a", "b")))
    read_recorded(path)
    with monkeypatch.context() as patch:
        patch.setattr(tables, "_unusual_records", None)
        assert collect(path.name, "table", validate_stage2_table(path)).checked == 2

    path.write_bytes(path.read_bytes() + encode_line(record_of("c", height=7)))
    read_recorded(path)
    assert collect(path.name, "table", validate_stage2_table(path)).rules == {"table": 1}

    path.write_bytes(encode_line(record_of("a")))
    unfinished(path).write_bytes(encode_line(record_of("b")))
    read_recorded(path)
    assert collect(path.name, "table", validate_stage2_table(path)).checked == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("image_id", None), ("image_id", 7), ("image_id", ["a"]), ("image_id", {"a": 1}),
        ("image_path", ""), ("image_path", 3), ("caption", " \t"), ("caption", {}), ("caption", None),
        ("height", 7), ("height", "24"), ("height", 24.5), ("height", True), ("height", None), ("height", 10**30),
        ("width", 0), ("width", [32]), ("aspect_bucket", "512x512"), ("aspect_bucket", ["1024x1024"]),
        ("format_version", 1), ("format_version", "2"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("company", [[], [record_of("good")]], ids=["alone", "among others"])
def test_value_out_of_its_column_is_found(tmp_path, field, value, company):
    report = check(tmp_path, *company, record_of("a") | {field: value})

    assert not report.passed
    assert field in {finding.field for finding in report.findings}
    assert all(finding.rule == "table" and finding.message and finding.remedy for finding in report.findings)
    assert not {finding.item for finding in report.findings} & {"good"}


def test_record_without_any_field_is_found(tmp_path):
    report = check(tmp_path, "{}", record_of("a"))

    assert report.checked == 2
    assert not report.passed


values = (
    st.none()
    | st.booleans()
    | st.integers(-(10**25), 10**25)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=4)
)
containers = st.lists(values, max_size=2) | st.dictionaries(st.text(max_size=2), values, max_size=2)
odd = st.dictionaries(st.sampled_from(list(record_of("a"))), values | containers, max_size=3)


@settings(deadline=None, max_examples=25)
@given(
    st.lists(
        odd.map(lambda changes: json.dumps({**record_of("a"), **changes}).encode()) | st.binary(max_size=8), max_size=4
    )
)
def test_any_lines_give_a_report(tmp_path_factory, lines):
    report = check(tmp_path_factory.mktemp("any"), *lines)

    assert report.passed == (not report.findings)


# ---- the ledger and the index of shards


def ledger_rules(root):
    with Ledger(root.ledger) as ledger:
        return collect("ledger", "ledger", validate_ledger_tables(ledger))


def test_ledger_of_a_run_is_valid_tables(tmp_path):
    root = embedded(tmp_path)

    report = ledger_rules(root)
    assert (report.passed, report.findings) == (True, [])
    assert report.checked == 2 + 2 + 6, "images, captions, files"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ("UPDATE sources SET height = 0 WHERE image_id = 'a'", "height"), ("UPDATE sources SET file_name = ' '", "file_name"),
        ("UPDATE captions SET origin = ''", "origin"),
        ("UPDATE captions SET fingerprint = 'x' WHERE image_id = 'b'", "fingerprint"),
        ("UPDATE files SET kind = 'other' WHERE image_id = 'a'", "kind"), ("UPDATE files SET maker = ''", "maker"),
        ("UPDATE sources SET width = 'wide'", "width"),
        ("INSERT INTO problems VALUES ('a', 'x', 'lost', 'r', 'd', 'm', NULL, '', 'now')", "outcome"),
    ],
)  # fmt: skip
def test_value_that_no_run_writes_is_found_in_the_ledger(tmp_path, change, field):
    root = embedded(tmp_path)
    with closing(sqlite3.connect(root.ledger)) as db, db:
        db.execute(change)

    report = ledger_rules(root)

    assert report.rules.keys() == {"ledger_table"}
    assert {found.field for found in report.findings} == {field}
    assert all(found.file.startswith("ledger.sqlite:") for found in report.findings)


def test_index_of_a_set_is_a_valid_table(tmp_path):
    folder = bucket_folder(shards(tmp_path).shards, SQUARE)

    assert collect("index", "shards", validate_index_table(folder)).findings == []


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"offset": 7}, "offset"), ({"offset": -512}, "offset"), ({"size": 0}, "size"), ({"size": 1000}, "size"),
        ({"key": ""}, "key"), ({"digest": None}, "digest"), ({"shard": "shard-000000.tar"}, "shard"),
        ({"image_id": 7}, "image_id"),
        ({"offset": "0"}, "offset"),
    ],
)  # fmt: skip
def test_line_that_no_index_has_is_found(tmp_path, change, field):
    folder = bucket_folder(shards(tmp_path).shards, SQUARE)
    first, second = (line.value for line in read_jsonl(folder / "index.jsonl"))
    write_jsonl(folder / "index.jsonl", [first, {**second, **change}])

    report = collect("index", "shards", validate_index_table(folder))

    assert report.rules.keys() == {"index_table"}
    assert field in {found.field for found in report.findings}
