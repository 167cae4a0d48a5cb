"""Comparison of records with shards: ready records are live once, in their own bucket; other absences are no finding."""

import shutil

import pytest

from imagemill.domain.buckets import BUCKETS
from imagemill.pipeline.shards.shard_plan import plan_shards
from imagemill.pipeline.shards.shard_sets import ShardParameters, bucket_folder
from imagemill.pipeline.shards.shard_writer import write_bucket
from imagemill.store.ledger import Ledger
from imagemill.validation.findings import collect
from imagemill.validation.shard_coverage import shard_coverage
from tests.helpers.situations import check_coverage, two_buckets
from tests.helpers.stage2 import foreign, ready, record_of

SQUARE, WIDE = "1024x1024", "1216x832"


@pytest.fixture
def root(tmp_path):
    return two_buckets(tmp_path)


def pack(root, *buckets, existing="replace", **parameters):
    plan = plan_shards(ready(root, buckets or BUCKETS).ready, list(buckets or BUCKETS), root.shards,
                       ShardParameters(**parameters), existing)  # fmt: skip
    for one in plan.plans:
        write_bucket(plan, one, root.derived, {})


def more(root, **sizes):
    """Add records of further images."""
    known = {"a": (24, 24), "b": (24, 24), "wide": (32, 24)}
    foreign(root, *(record_of(image_id, size=size) for image_id, size in {**known, **sizes}.items()))


def test_packed_records_have_no_finding(root):
    report = check_coverage(root)

    assert (report.findings, report.checked) == ([], 3)


def test_ready_record_in_no_shard_is_found(root):
    more(root, new=(24, 24))

    (found,) = check_coverage(root).findings
    assert (found.rule, found.item) == ("unpacked", "new")
    assert "imagemill run" in found.remedy


def test_ready_record_of_a_bucket_without_a_set_is_found(root):
    shutil.rmtree(bucket_folder(root.shards, WIDE))

    (found,) = check_coverage(root).findings
    assert (found.rule, found.item) == ("unpacked", "wide")


def test_root_without_shards_has_nothing_to_find(root):
    shutil.rmtree(root.shards)

    assert (check_coverage(root).findings, check_coverage(root).checked) == ([], 0)


@pytest.mark.parametrize("limit", [1, 2])
def test_record_beyond_the_limit_of_the_manifest_is_no_finding(root, limit):
    pack(root, limit=limit)

    assert check_coverage(root).findings == []


def test_withdrawn_record_is_no_finding(root):
    with Ledger(root.ledger) as ledger:
        ledger.withdraw(["a"])
    pack(root)

    assert check_coverage(root).findings == []


def test_record_that_is_not_ready_is_no_finding(root):
    more(root, new=(24, 24))
    (root.derived / "t5_hidden" / "new.npy").unlink()

    assert check_coverage(root).findings == []


def test_near_duplicate_is_no_finding(root):
    more(root, new=(24, 24))
    with Ledger(root.ledger) as ledger:
        found = shard_coverage(root.stage2_jsonl, root.derived, root.shards, ledger, excluded={"new": "like a"})
        assert collect("shards", "", found).findings == []


def test_kind_that_is_being_regenerated_keeps_new_records_out(root):
    more(root, new=(24, 24))
    with Ledger(root.ledger) as ledger:
        ledger.note_regeneration("vae_latents", "begun")

    assert check_coverage(root).findings == []


def test_damaged_set_is_left_to_its_own_report(root):
    (bucket_folder(root.shards, SQUARE) / "index.jsonl").write_text("{")

    assert check_coverage(root).findings == []
