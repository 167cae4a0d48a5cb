"""Requests, their plans, and dry runs. Spec: docs/spec/shards.md#dry-run"""

from contextlib import contextmanager

import pytest

from imagemill.config import Config, NearDuplicateSettings
from imagemill.domain.buckets import BUCKETS
from imagemill.errors import ImagemillError, MissingInput, ShardExists, WrongUsage
from imagemill.pipeline.session import open_session
from imagemill.pipeline.shards.conflicts import refuse_conflicts
from imagemill.pipeline.shards.packing import PackRequest, dry_run, plan_packing
from imagemill.pipeline.shards.shard_sets import ShardParameters, bucket_folder, live_lines
from imagemill.pipeline.shards.shard_writer import write_bucket
from imagemill.pipeline.stage2.inventory import Inventory
from imagemill.store.ledger import Ledger
from tests.helpers.product import snapshot
from tests.helpers.stage1 import stage1_record, write_stage1
from tests.helpers.stage2 import foreign, record_of

SQUARE, TALL = "1024x1024", "832x1216"


def rehearse(root, config, packing):
    """Make a dry run, which reads the ledger if there is one."""
    with open_session(root.path) as session:
        return dry_run(Inventory(root), config, session.reading, packing)


@pytest.fixture
def root(data_root):
    foreign(data_root, *(record_of(i, size=(24, 24)) for i in "abcd"), record_of("tall", size=(24, 36)))
    return data_root


def packing(root, existing="refuse", *, buckets=BUCKETS, **asked):
    return PackRequest(buckets, root.shards, existing, asked)


@pytest.mark.parametrize("existing", ["refuse", "replace", "append", "repack"])
def test_records_of_stage_1_are_refused_and_the_remedy_migrates_them(root, existing):
    """Nothing could be packed, and replacing the sets would remove them."""
    pack(root)
    before = snapshot(root.shards)
    write_stage1(root, [stage1_record(0), stage1_record(1)])

    with pytest.raises(ImagemillError, match=r"no record has version 2: 2 of Stage 1") as error:
        plan(root, existing)
    assert "imagemill run" in error.value.do
    with pytest.raises(ImagemillError, match="no record has version 2"):
        rehearse(root, Config(), packing(root, existing))
    assert snapshot(root.shards) == before


def test_records_of_stage_1_beside_others_are_left_out_and_name_the_remedy(root):
    records = root.stage2_jsonl.read_bytes()
    write_stage1(root, [stage1_record(0)])
    root.stage2_jsonl.write_bytes(records + root.stage2_jsonl.read_bytes())
    with Ledger(root.ledger) as ledger:
        found, _ = plan_packing(Inventory(root), Config(), ledger, packing(root))

    assert len(found.ready) == 5
    assert [(p.reason, p.remedy) for p in found.problems] == [("stage1", "run `imagemill run`: it migrates them")]


@contextmanager
def planned(root, *given, **asked):
    with Ledger(root.ledger) as ledger:
        yield plan_packing(Inventory(root), Config(shard_size=3), ledger, packing(root, *given, **asked))[1]


def plan(root, *given, **asked):
    with planned(root, *given, **asked) as shard_set:
        return shard_set


def pack(root, *given, **asked):
    with planned(root, *given, **asked) as shard_set:
        for bucket in shard_set.plans:
            write_bucket(shard_set, bucket, root.derived, {})


def parameters(shard_set):
    return {bucket.bucket: bucket.parameters for bucket in shard_set.plans}


def test_what_no_one_asked_for_is_the_configuration_s(root):
    asked = parameters(plan(root, shuffle=True, seed=3))

    assert set(asked.values()) == {ShardParameters(shard_size=3, shuffle=True, seed=3)}


@pytest.mark.parametrize("existing", ["update", "append", "repack", "withdraw"])
def test_set_of_ours_keeps_what_it_was_written_with(root, existing):
    pack(root, shuffle=True, shard_size=2, buckets=[SQUARE])

    kept = parameters(plan(root, existing))

    assert kept[SQUARE] == ShardParameters(shard_size=2, shuffle=True)
    assert kept[TALL] == ShardParameters(shard_size=3), "no set there to keep anything of"


@pytest.mark.parametrize("existing", ["replace", "refuse"])
def test_set_written_again_keeps_nothing(root, existing):
    pack(root, shuffle=True, shard_size=2)

    assert set(parameters(plan(root, existing)).values()) == {ShardParameters(shard_size=3)}


@pytest.mark.parametrize("existing", ["update", "append", "repack"])
def test_one_parameter_named_leaves_the_others_as_recorded(root, existing):
    """Repacking a limited set must not add samples that the limit left out."""
    pack(root, shuffle=True, limit=3, shard_size=2, buckets=[SQUARE])

    kept = parameters(plan(root, existing, shard_size=5))

    assert kept[SQUARE] == ShardParameters(shard_size=5, shuffle=True, limit=3)
    assert kept[TALL] == ShardParameters(shard_size=5)


def test_dry_run_gives_the_counters_of_the_plan(root):
    (root.derived / "dinov3" / "a.npy").unlink()

    found = rehearse(root, Config(shard_size=2), packing(root, buckets=[SQUARE]))

    assert found.conflicts == []
    assert found.counts == {
        "total_records": 5, "ready_records": 3, "skipped_incomplete": 1, "filtered": 1, "written_samples": 3,
        "written_shards": 2,
    }  # fmt: skip


def test_dry_run_leaves_a_data_root_without_a_ledger_without_one(root):
    before = snapshot(root.path)

    rehearse(root, Config(), packing(root))

    assert snapshot(root.path) == before
    assert not root.state.exists()


def test_dry_run_knows_what_the_ledger_knows(root):
    with Ledger(root.ledger) as ledger:
        ledger.withdraw(["a"])

    assert rehearse(root, Config(), packing(root)).counts["skipped_incomplete"] == 1


def test_dry_run_tells_every_conflict(root):
    pack(root)

    found = rehearse(root, Config(), packing(root))

    assert [conflict.split("/")[0] for conflict in found.conflicts] == [f"bucket_{SQUARE}", f"bucket_{TALL}"]
    assert rehearse(root, Config(), packing(root, "replace")).conflicts == []


@pytest.mark.parametrize("existing", ["update", "repack", "append"])
def test_dry_run_counts_nothing_for_a_set_that_stays(root, existing):
    """The counters are those of the real run."""
    pack(root)

    counts = rehearse(root, Config(shard_size=3), packing(root, existing)).counts

    assert (counts["ready_records"], counts["written_samples"], counts["written_shards"]) == (5, 0, 0)


@pytest.mark.parametrize("existing", ["replace", "append", "update"])
def test_image_that_changed_its_bucket_never_counts_twice(root, existing):
    """Its old bucket must be packed too, or first."""
    pack(root)
    foreign(root, *(record_of(i, size=(24, 24)) for i in "bcd"), *(record_of(i, size=(24, 36)) for i in ("a", "tall")))

    alone = plan(root, existing, buckets=[TALL])

    conflict = f"a belongs to {TALL} now, and is still live in bucket_{SQUARE}"
    assert rehearse(root, Config(shard_size=3), packing(root, existing, buckets=[TALL])).conflicts == [conflict]
    with pytest.raises(ShardExists, match=conflict):
        refuse_conflicts(alone)
    refuse_conflicts(plan(root, existing, buckets=[SQUARE]))
    refuse_conflicts(plan(root, existing))


def test_image_that_changed_its_bucket_is_in_its_new_set_alone(root):
    pack(root)
    foreign(root, *(record_of(i, size=(24, 24)) for i in "bcd"), *(record_of(i, size=(24, 36)) for i in ("a", "tall")))

    pack(root, "append")

    live = {
        bucket: [line.image_id for line in live_lines(bucket_folder(root.shards, bucket))] for bucket in (SQUARE, TALL)
    }
    assert live == {SQUARE: ["b", "c", "d"], TALL: ["tall", "a"]}


def test_damaged_set_of_another_bucket_is_in_nobodys_way(root):
    pack(root)
    (bucket_folder(root.shards, TALL) / "index.jsonl").write_text("{")

    refuse_conflicts(plan(root, "replace", buckets=[SQUARE]))


def test_dry_run_without_its_inputs_says_what_is_missing(root, data_root):
    with pytest.raises(MissingInput, match="near duplicates"):
        rehearse(root, Config(near_duplicates=NearDuplicateSettings(exclude=True)), packing(root))
    root.stage2_jsonl.unlink()
    with pytest.raises(MissingInput, match="no Stage 2 records"):
        rehearse(root, Config(), packing(root))


def test_unknown_way_with_existing_shards_is_refused(root):
    with pytest.raises(WrongUsage, match="Replace"):
        plan(root, "Replace")
