"""The checks of the records: line by line, and as a table.

Spec: docs/spec/validation.md#checks, docs/spec/conventions.md#completion-and-identity
"""

import json

import dagster as dg
import pytest

from assets.stage2_jsonl import stage2_jsonl
from checks.stage2_jsonl import inputs_accepted, records_valid, table_valid, within_limits
from tests.helpers.stage2 import embed, photos, record_of, write_text
from tests.helpers.wiring import checks_of, history, materialize, stub_every_kind

RECORDS, TABLE = "stage2_jsonl:records_valid", "stage2_jsonl:table_valid"
INPUTS = "stage2_jsonl:inputs_accepted"


@pytest.fixture
def instance(monkeypatch):
    stub_every_kind(monkeypatch)
    with history() as instance:
        yield instance


def check_lines(root, instance, *lines):
    """Return the verdicts on a file that contains these lines."""
    write_text(root.stage2_jsonl, *(line if isinstance(line, bytes) else json.dumps(line) for line in lines))
    return check_alone(root, instance, records_valid, table_valid, inputs_accepted)


def check_alone(root, instance, *checks):
    """Run only the checks; a blocking one fails the run."""
    selection = dg.AssetSelection.all_asset_checks()
    return checks_of(materialize(root, instance, stage2_jsonl, *checks, selection=selection))


def test_checks_pass_on_output_of_a_run(data_root, instance):
    photos(data_root, "a", "b")
    embed(data_root)

    result = materialize(data_root, instance, stage2_jsonl, records_valid, table_valid, inputs_accepted)

    found = checks_of(result)
    assert {name: e.passed for name, e in found.items()} == {RECORDS: True, TABLE: True, INPUTS: True}
    assert {name: found[name].metadata["checked"].value for name in (RECORDS, TABLE)} == {RECORDS: 2, TABLE: 2}
    assert found[RECORDS].description == "no findings"


def test_filters_are_compared_with_the_limits_of_the_configuration(data_root, instance):
    photos(data_root, "a", "b", "c")
    (data_root.approved / "c.txt").unlink()
    embed(data_root)
    assert materialize(data_root, instance, stage2_jsonl).success

    def verdict(limits):
        data_root.config_file.write_text(limits)
        return check_alone(data_root, instance, within_limits)["stage2_jsonl:within_limits"]

    found = verdict("limits: {no_caption: 0.3, failed: 0}\n")
    assert (found.passed, found.severity) == (False, dg.AssetCheckSeverity.WARN)
    assert found.description == "no_caption 33.3% (1), limit 30.0%"
    assert found.metadata["no_caption (share)"].value == 0.3333
    assert found.metadata["look"].value == "[no caption](/imagemill/images?show=no_caption)"
    found = verdict("limits: {no_caption: 0.4}\n")
    assert (found.passed, found.description) == (True, "no_caption 33.3% (1), limit 40.0%")
    found = verdict("threads: 1\n")
    assert (found.passed, found.description) == (True, "imagemill.yaml sets no limits")


@pytest.fixture
def merged(data_root, instance):
    """Two records as a merge wrote them."""
    photos(data_root, "a", "b")
    embed(data_root)
    assert materialize(data_root, instance, stage2_jsonl).success
    return [json.loads(line) for line in data_root.stage2_jsonl.read_text().splitlines()]


@pytest.mark.parametrize("damage", [{"aspect_bucket": "1x1"}, {"caption": ""}, {"height": "24"}])
def test_invalid_record_of_an_image_that_was_merged_stops_packing(data_root, instance, merged, damage):
    """The check is blocking, and its severity is an error."""
    evaluation = check_lines(data_root, instance, merged[0], merged[1] | damage)[RECORDS]

    assert (evaluation.passed, evaluation.severity) == (False, dg.AssetCheckSeverity.ERROR)
    assert next(iter(records_valid.check_specs)).blocking


@pytest.mark.parametrize(
    "line",
    [
        b"{",
        record_of("unknown") | {"aspect_bucket": "1x1"},
        record_of("unknown") | {"caption": ""},
        record_of("unknown") | {"t5_attention_mask": [1]},
    ],
)
def test_record_that_packing_skips_is_a_warning(data_root, instance, merged, line):
    evaluation = check_lines(data_root, instance, *merged, line)[RECORDS]

    assert (evaluation.passed, evaluation.severity) == (False, dg.AssetCheckSeverity.WARN)
    assert evaluation.metadata["look"].value == "[inputs with a problem](/imagemill/images?show=problems)"


def test_earlier_duplicate_is_a_warning(data_root, instance, merged):
    evaluation = check_lines(data_root, instance, *merged, merged[0])[RECORDS]

    assert (evaluation.passed, evaluation.severity) == (False, dg.AssetCheckSeverity.WARN)


def test_file_that_cannot_be_read_stops_packing(data_root, instance, merged):
    data_root.stage2_jsonl.unlink()
    data_root.stage2_jsonl.mkdir()

    evaluation = check_alone(data_root, instance, records_valid)[RECORDS]

    assert (evaluation.passed, evaluation.severity) == (False, dg.AssetCheckSeverity.ERROR)
    assert evaluation.description == "read_error: 1"


def test_check_fails_on_a_malformed_line(data_root, instance):
    found = check_lines(data_root, instance, record_of("a"), b"{", record_of("b"))

    assert not found[RECORDS].passed
    assert found[RECORDS].description == "strict_json: 1"
    assert ":2: strict_json" in found[RECORDS].metadata["first findings"].value
    assert found[TABLE].passed, "the table is that of the records that can be read"


def test_checks_fail_on_a_duplicate_id(data_root, instance):
    found = check_lines(data_root, instance, record_of("a"), record_of("a"))

    assert (found[RECORDS].passed, found[TABLE].passed) == (False, False)


def test_inputs_without_a_record_are_a_warning_with_their_reasons(data_root, instance):
    """Refusals are shown with the records."""
    photos(data_root, "a", "b")
    (data_root.approved / "b.png").write_bytes(b"no picture")
    (data_root.approved / "x.psd").write_bytes(b"")

    result = materialize(data_root, instance, stage2_jsonl, records_valid, table_valid, inputs_accepted)

    assert result.success, "a warning fails nothing"
    evaluation = checks_of(result)[INPUTS]
    assert (evaluation.passed, evaluation.severity) == (False, dg.AssetCheckSeverity.WARN)
    named = [(row.data["image"], row.data["reason"].split(":")[0]) for row in evaluation.metadata["inputs"].records]
    assert named == [("b", "undecodable"), ("x.psd", "unsupported_type")]


def test_warnings_do_not_fail_a_check(data_root, instance):
    found = check_lines(data_root, instance, record_of("a", size=(90, 9)))

    assert found[RECORDS].passed
    assert (found[RECORDS].metadata["warnings"].value, found[RECORDS].metadata["errors"].value) == (1, 0)


def test_all_findings_are_counted_and_only_the_first_are_shown(data_root, instance):
    found = check_lines(data_root, instance, *[b"{"] * 500)

    assert found[RECORDS].metadata["errors"].value == 500
    assert len(found[RECORDS].metadata["first findings"].value.splitlines()) <= 40


def test_stage1_record_with_nan_in_its_vector_is_pending_like_any_other(data_root, instance):
    old = {"image_path": "data/approved/a.jpg", "dinov3_embedding": [float("nan")], "caption": "c"}
    found = check_lines(data_root, instance, old)

    assert (found[RECORDS].passed, found[RECORDS].description) == (True, "stage1: 1")

    found = check_lines(data_root, instance, old | {"score": float("nan")})
    assert (found[RECORDS].passed, found[RECORDS].description) == (False, "strict_json: 1")
