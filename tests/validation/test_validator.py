"""The validator returns a report for any path. Spec: docs/spec/validation.md#checks"""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from imagemill.domain.embedding_specs import embedding_specs
from imagemill.errors import MissingInput, WrongUsage
from imagemill.pipeline.shards.shard_plan import plan_shards
from imagemill.pipeline.shards.shard_sets import ShardParameters, bucket_folder
from imagemill.pipeline.shards.shard_writer import write_bucket
from imagemill.store.ledger import Ledger
from imagemill.validation import shards
from imagemill.validation.catalogue import RULES
from imagemill.validation.shard_sets import set_folders, validate_shards
from imagemill.validation.validator import Options, kind_of, validate, validate_each, verify_stage2
from tests.helpers.product import PROJECT
from tests.helpers.situations import preset
from tests.helpers.stage2 import foreign, ready, record_of, write_text

SQUARE, TALL = "1024x1024", "832x1216"


@pytest.fixture
def packed(data_root):
    """One sample in each of two buckets."""
    foreign(data_root, record_of("a", size=(24, 24)), record_of("tall", size=(24, 36)))
    buckets = [SQUARE, TALL]
    plan = plan_shards(ready(data_root, buckets).ready, buckets, data_root.shards, ShardParameters(), "replace")
    for bucket in plan.plans:
        write_bucket(plan, bucket, data_root.derived, {})
    return data_root


def tar_of(root, bucket=SQUARE):
    return root.shards / f"bucket_{bucket}" / "shard-000000.tar"


def flip(path, position=2000):
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("removed", [False, True], ids=["another set", "no set"])
def test_set_that_changes_place_while_it_is_read_gives_no_findings(packed, monkeypatch, removed):
    """A reader sees the complete old set or the complete new one. Spec: docs/spec/shards.md#updating-a-set"""
    foreign(packed, *(record_of(i, size=(24, 24)) for i in "abc"), record_of("tall", size=(24, 36)))
    folder, read = bucket_folder(packed.shards, SQUARE), shards.checked_manifest

    def read_and_publish(path):
        manifest = yield from read(path)
        monkeypatch.undo()
        found = [] if removed else ready(packed, [SQUARE]).ready
        plan = plan_shards(found, [SQUARE], packed.shards, ShardParameters(shard_size=2), "replace")
        write_bucket(plan, plan.plans[0], packed.derived, {})
        return manifest

    monkeypatch.setattr(shards, "checked_manifest", read_and_publish)
    with Ledger(packed.ledger) as ledger:
        reports = {Path(r.file).name: r for r in validate_shards(set_folders(packed.shards), packed.derived, ledger)}

    found = reports.get(folder.name)
    assert (found and found.findings, found and found.checked) == ((None, None) if removed else ([], 3))


def test_kind_follows_from_the_path(packed):
    assert kind_of(packed.stage2_jsonl) == "stage2"
    assert kind_of(tar_of(packed)) == "shards"
    assert kind_of(packed.shards / f"bucket_{SQUARE}") == "shards"
    with pytest.raises(WrongUsage, match=r"--kind stage2\|preset\|stage-a\|shards"):
        kind_of(packed.path / "imagemill.yaml")


@pytest.mark.parametrize(
    ("name", "lines", "kind"),
    [
        ("x.jsonl", ["", "{", '{"image_id": "a", "t5_attention_mask": []}'], "stage2"),
        ("x.jsonl", ['{"width": 1, "objects": []}'], "preset"), ("x.jsonl", ["[]", '{"per_image": {}}'], "stage-a"),
        ("x.jsonl", [], "stage2"), ("m_stage_a.jsonl", [], "stage-a"), ("train.norm.jsonl", [], "preset"),
        ("train.coord.jsonl", ['{"t5_attention_mask": 1}'], "preset"), ("raw/train.jsonl", [], "preset"),
        ("raw/x.jsonl", ['{"t5_attention_mask": 1}'], "stage2"),
    ],
)  # fmt: skip
def test_kind_of_records_follows_from_name_place_or_first_lines(tmp_path, name, lines, kind):
    write_text(tmp_path / name, *lines)

    assert kind_of(tmp_path / name) == kind


def test_records_beside_a_presets_manifest_are_a_presets(tmp_path):
    write_text(tmp_path / "train.jsonl", '{"t5_attention_mask": 1}')
    (tmp_path / "pipeline_manifest.json").symlink_to("nowhere")

    assert kind_of(tmp_path / "train.jsonl") == "preset"
    assert kind_of(tmp_path) == "preset"


def test_presets_folder_is_all_its_files_and_a_file_is_one(tmp_path):
    folder = preset(tmp_path)

    assert [Path(report.file).name for report in validate_each(folder)] == ["train.jsonl", "small_max2"]
    assert [report.checked for report in validate_each(folder / "train.jsonl")] == [2]
    with pytest.raises(WrongUsage, match="as preset"):
        validate(folder, kind="preset")


def test_sample_compares_the_first_npy_members_of_each_tar(packed):
    """The option limits comparisons only: a tar is always read in full, since its checksum must match."""
    tall = bucket_folder(packed.shards, TALL)
    for spec in embedding_specs():
        np.save(packed.derived / spec.folder / "tall.npy", np.ones(spec.shape(36, 24), spec.dtype))

    def compared(sample):
        return validate(tall, options=Options(derived=packed.derived, sample=sample)).rules

    assert compared(None) == compared(0) == compared(1) == {"verbatim": 3}
    assert validate(tall).rules == {}


def test_sample_leaves_out_what_comes_after_it(data_root):
    foreign(data_root, record_of("a", size=(24, 24)), record_of("b", size=(24, 24)))
    plan = plan_shards(ready(data_root, [SQUARE]).ready, [SQUARE], data_root.shards, ShardParameters(), "replace")
    write_bucket(plan, plan.plans[0], data_root.derived, {})
    np.save(data_root.derived / "dinov3" / "b.npy", np.ones(1024, np.float32))
    folder = bucket_folder(data_root.shards, SQUARE)

    assert validate(folder, options=Options(derived=data_root.derived, sample=1)).rules == {}
    assert validate(folder, options=Options(derived=data_root.derived, sample=2)).rules == {"verbatim": 1}


def test_records_are_validated_by_their_name_or_by_the_kind_given(packed):
    assert validate(packed.stage2_jsonl).kind == "stage2"
    other = packed.path / "records.txt"
    other.write_bytes(packed.stage2_jsonl.read_bytes())
    assert validate(other, kind="stage2").checked == 2


def test_tar_is_validated_with_its_whole_set(packed):
    report = validate(tar_of(packed))

    assert (report.passed, report.checked, report.kind) == (True, 1, "shards")
    assert report.file == str(tar_of(packed).parent)


def test_files_are_compared_only_where_their_folder_is_given(packed):
    (packed.derived / "dinov3" / "a.npy").unlink()

    assert validate(packed.stage2_jsonl).passed
    assert validate(packed.stage2_jsonl, derived=packed.derived).rules == {"missing_file": 1}


def test_path_that_is_not_there_is_said(packed):
    with pytest.raises(MissingInput, match="nothing to validate"):
        validate(packed.path / "nowhere.jsonl")


def test_unknown_kind_is_wrong_usage(packed):
    with pytest.raises(WrongUsage, match="stage2, preset, stage-a, shards"):
        validate(packed.stage2_jsonl, kind="nonsense")


@pytest.mark.parametrize(("name", "kind"), [("derived", "stage2"), ("derived/approved_image_dataset.jsonl", "shards")])
def test_kind_that_cannot_be_that_path_is_wrong_usage(packed, name, kind):
    """A user's mistake gives no traceback."""
    with pytest.raises(WrongUsage, match=f"as {kind}"):
        validate(packed.path / name, kind=kind)


def test_bucket_folder_without_a_manifest_is_a_finding(packed):
    (tar_of(packed).parent / "manifest.json").unlink()

    assert validate(tar_of(packed).parent).rules == {"manifest": 1}


@pytest.mark.parametrize("kind", [None, "shards"])
def test_folder_without_shards_names_what_can_be_validated(packed, kind):
    """The message does not mention packing, because no shard set is damaged."""
    with pytest.raises(MissingInput, match="nothing to validate in this folder") as caught:
        validate(packed.path, kind=kind)

    program, command, *paths = shlex.split(str(caught.value.do))
    assert (program, command) == ("imagemill", "validate")
    assert paths[0] == str(packed.stage2_jsonl)
    assert set(paths[1:]) == {str(path) for path in packed.shards.glob("bucket_*")}
    assert all(validate(Path(path)).passed for path in paths)


def test_folder_without_anything_to_validate_says_what_may_be_given(tmp_path):
    with pytest.raises(MissingInput, match="give a file of records"):
        validate(tmp_path)


def test_folder_of_a_dataset_names_its_presets(tmp_path):
    folder = preset(tmp_path)

    with pytest.raises(MissingInput) as caught:
        validate(folder.parent)

    assert shlex.split(str(caught.value.do)) == ["imagemill", "validate", str(folder.parent / "small"), str(folder)]


# ---- all sets of a shards folder


def reports_of(root):
    with Ledger(root.ledger) as ledger:
        return list(validate_shards(set_folders(root.shards), root.derived, ledger))


def test_every_bucket_has_a_report(packed):
    assert [(report.file.rpartition("_")[2], report.passed) for report in reports_of(packed)] == [
        (SQUARE, True), (TALL, True),
    ]  # fmt: skip
    assert reports_of(packed.__class__(packed.path / "none")) == []


def test_folder_that_only_holds_somebodys_notes_is_no_set(packed):
    """Foreign files remain when a bucket's last sample is removed."""
    (packed.shards / "bucket_704x1344").mkdir()
    (packed.shards / "bucket_704x1344" / "notes.txt").touch()
    assert len(reports_of(packed)) == 2

    (packed.shards / "bucket_704x1344" / "shard-000000.tar").touch()
    assert [report.passed for report in reports_of(packed)] == [True, False, True]


def test_set_that_is_as_it_was_is_not_read_again(packed, monkeypatch):
    """A file whose size, mtime and inode are those of its last full check is not read again."""
    first = reports_of(packed)

    monkeypatch.setattr(shards, "fingerprint_file", lambda path: pytest.fail("read again"))
    assert [(r.file, r.checked, r.passed) for r in reports_of(packed)] == [(r.file, r.checked, r.passed) for r in first]


@pytest.mark.parametrize("name", ["shard-000000.tar", "index.jsonl", "manifest.json", ".nv-meta/split.yaml"])
def test_set_that_changed_is_read_again(packed, name):
    reports_of(packed)
    path = packed.shards / f"bucket_{SQUARE}" / name
    flip(path, 3)

    square, tall = reports_of(packed)
    assert not square.passed
    assert tall.passed


def test_touched_set_is_read_again_and_passes(packed):
    reports_of(packed)
    os.utime(tar_of(packed), ns=(1, 1))

    assert all(report.passed for report in reports_of(packed))


def test_set_that_passed_fewer_rules_is_read_again(packed, monkeypatch):
    """A full check is valid only for the rules that existed then."""
    reports_of(packed)
    monkeypatch.setitem(RULES, "a new one", RULES["checksum"])
    monkeypatch.setattr(shards, "fingerprint_file", lambda path: "another")

    assert [report.passed for report in reports_of(packed)] == [False, False]


def test_dangling_link_in_a_set_is_no_traceback(packed):
    (packed.shards / f"bucket_{SQUARE}" / "notes.txt").symlink_to("gone")

    assert all(report.passed for report in reports_of(packed))


def test_broken_set_is_never_remembered_as_checked(packed):
    flip(tar_of(packed))

    assert [report.passed for report in reports_of(packed)] == [False, True]
    assert [report.passed for report in reports_of(packed)] == [False, True]


# ---- Stage 2 read whole


def test_verify_reads_every_record_and_every_file(packed):
    report = verify_stage2(packed.stage2_jsonl, packed.derived)
    assert (report.passed, report.checked) == (True, 2)

    path = packed.derived / "t5_hidden" / "tall.npy"
    path.write_bytes(path.read_bytes()[:-2])
    write_text(
        packed.stage2_jsonl,
        json.dumps(record_of("a", size=(24, 24))),
        "{",
        packed.stage2_jsonl.read_bytes().split(b"\n")[1],
    )
    report = verify_stage2(packed.stage2_jsonl, packed.derived)
    assert report.rules == {"strict_json": 1, "truncated": 1}
    assert [finding.item for finding in report.findings] == ["", "tall"]


def test_verify_without_records_says_what_to_run(data_root):
    with pytest.raises(MissingInput, match="imagemill stage2"):
        verify_stage2(data_root.stage2_jsonl, data_root.derived)


def test_validator_loads_nothing_heavy():
    """Launch scripts call it before training. Spec: docs/spec/conventions.md#command-line"""
    heavy = [
        "torch",
        "dagster",
        "pandas",
        "pandera",
        "webdataset",
        "transformers",
        "diffusers",
        "numpy",
        "PIL",
        "sqlite3",
    ]
    script = f"import sys, imagemill.validation.validator; print([m for m in {heavy} if m in sys.modules])"

    done = subprocess.run([sys.executable, "-c", script], cwd=PROJECT, capture_output=True, text=True, check=True)

    assert done.stdout == "[]\n"
