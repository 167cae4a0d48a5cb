"""New tars and tombstones over an existing set. Spec: docs/spec/shards.md#appending"""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagemill.domain.embedding_specs import embedding_specs
from imagemill.errors import ImagemillError
from imagemill.pipeline.shards.append import plan_append
from imagemill.pipeline.shards.shard_plan import PackPlan, plan_shards
from imagemill.pipeline.shards.shard_sets import (
    IndexLine,
    ShardParameters,
    Tombstone,
    bucket_folder,
    live_lines,
    read_manifest,
    read_tombstones,
)
from imagemill.pipeline.shards.shard_writer import write_bucket
from imagemill.store.ledger import Ledger
from imagemill.store.provenance import ModelIdentity
from imagemill.validation.validator import validate
from tests.helpers.product import snapshot
from tests.helpers.stage2 import embed, photos, picture, ready, stage2, write_records

BUCKET = "1216x832"

# ---- the decision

ids = st.sampled_from("abcdef")
digests = st.sampled_from(["1", "2"])
index = st.lists(st.tuples(ids, digests), max_size=10).map(
    lambda rows: [IndexLine(i, i, "shard-000000.tar", n, 1, digest) for n, (i, digest) in enumerate(rows)]
)
planned = st.dictionaries(ids, digests)


@given(index, st.data(), planned, st.sets(ids))
def test_what_counts_afterwards_is_exactly_the_plan(lines, data, planned_digests, withdrawn):
    """This holds after any appends, changes, withdrawals and restorations; of one id at most one sample is live."""
    planned_digests = {i: digest for i, digest in planned_digests.items() if i not in withdrawn}
    dead = data.draw(st.sets(st.sampled_from(lines))) if lines else set()
    tombstones = [Tombstone(line.image_id, line.shard, line.offset, "changed") for line in dead]

    overlay = plan_append(lines, tombstones, planned_digests, withdrawn)

    gone = {tombstone.place for tombstone in overlay.tombstones}
    counting = [line for line in lines if line.place not in gone]
    found = {line.image_id: line.digest for line in counting} | {i: planned_digests[i] for i in overlay.missing}
    assert found == planned_digests
    assert len(counting) + len(overlay.missing) == len(planned_digests)
    assert sorted(overlay.live) == sorted(line.digest for line in counting)


@given(index, planned, st.sets(ids))
def test_withdrawing_takes_out_those_ids_and_nothing_else(lines, planned_digests, withdrawn):
    lines = list({line.image_id: line for line in lines}.values())

    overlay = plan_append(lines, [], planned_digests, withdrawn, withdrawals_only=True)

    assert {tombstone.image_id for tombstone in overlay.tombstones} == withdrawn & {line.image_id for line in lines}
    assert overlay.missing == ()


@given(index, st.data(), planned, st.sets(ids))
def test_restoring_undoes_exactly_the_withdrawing(lines, data, planned_digests, withdrawn):
    """Samples that were dead stay dead with their reason; those that were live are live again, regardless of readiness."""
    newest = {line.image_id: line for line in lines}
    dead = data.draw(st.sets(st.sampled_from(lines))) if lines else set()
    before = [
        Tombstone(line.image_id, line.shard, line.offset, "changed")
        for line in lines
        if line in dead or newest[line.image_id] is not line
    ]

    after_withdrawal = plan_append(lines, before, planned_digests, withdrawn, withdrawals_only=True)
    back = plan_append(lines, after_withdrawal.tombstones, planned_digests, set(), withdrawals_only=True)

    assert list(back.tombstones) == before


def test_sample_that_is_ready_and_not_planned_is_beyond_the_limit():
    line = IndexLine("a", "a", "shard-000000.tar", 0, 1, "1")

    (limited,) = plan_append([line], [], {}, set(), ready={"a"}).tombstones
    (unready,) = plan_append([line], [], {}, set(), ready={"b"}).tombstones

    assert (limited.why, unready.why) == ("beyond_limit", "not_ready")


# ---- on disk


def pack(root, existing, identities=None, **parameters):
    """Pack one bucket as the asset does."""
    with Ledger(root.ledger) as ledger:
        withdrawn = ledger.ids("withdrawn")
    found = ready(root, [BUCKET])
    shard_set: PackPlan = plan_shards(
        found.ready, [BUCKET], root.shards, ShardParameters(**parameters), existing, withdrawn=withdrawn
    )
    return write_bucket(shard_set, shard_set.plans[0], root.derived, identities or {})


def live(root):
    return sorted(line.image_id for line in live_lines(bucket_folder(root.shards, BUCKET)))


def whole(root):
    report = validate(bucket_folder(root.shards, BUCKET), derived=root.derived)
    assert report.passed, report.findings
    return True


@pytest.fixture
def root(data_root):
    """Three images in one tar; then a new image, an edited caption and a replaced image."""
    stage2(data_root, "a", "b", "c")
    pack(data_root, "replace")
    photos(data_root, "d")
    (data_root.approved / "b.txt").write_text("another caption")
    picture(data_root.approved / "c.png", seed=77)
    embed(data_root)
    write_records(data_root)
    return data_root


def test_old_tars_stay_as_they_are_and_changed_samples_are_written_again(root):
    folder = bucket_folder(root.shards, BUCKET)
    tar = folder / "shard-000000.tar"
    before = tar.stat().st_ino, tar.stat().st_mtime_ns, tar.read_bytes()

    result = pack(root, "append")

    assert (tar.stat().st_ino, tar.stat().st_mtime_ns, tar.read_bytes()) == before
    assert (result.new_samples, result.new_shards, result.samples, result.shards, result.tombstones) == (3, 1, 4, 2, 2)
    assert live(root) == ["a", "b", "c", "d"]
    assert {(t.image_id, t.why) for t in read_tombstones(folder)} == {("b", "changed"), ("c", "changed")}
    assert whole(root)


def test_manifest_after_appending_is_that_of_overwriting_but_for_the_tars(root):
    """The set of live samples always matches the manifest."""
    pack(root, "append")
    appended = read_manifest(bucket_folder(root.shards, BUCKET))
    pack(root, "replace")
    replaced = read_manifest(bucket_folder(root.shards, BUCKET))

    assert (appended.digest, appended.samples) == (replaced.digest, replaced.samples)


def test_appending_without_news_changes_nothing(root):
    pack(root, "append")
    before = snapshot(root.shards)

    assert pack(root, "append").status == "unchanged"
    assert pack(root, "update").status == "unchanged", "the outcome is the same: nothing to republish"
    assert snapshot(root.shards) == before


def test_repacking_folds_new_tars_and_tombstones_in(root):
    pack(root, "append")
    assert pack(root, "repack").status == "written"
    folded = {path: data for path, (data, _) in snapshot(root.shards).items()}
    assert pack(root, "repack").status == "unchanged"

    pack(root, "replace")

    assert {path: data for path, (data, _) in snapshot(root.shards).items()} == folded
    assert read_tombstones(bucket_folder(root.shards, BUCKET)) == []
    assert whole(root)


def test_append_where_no_set_is_writes_one(data_root):
    stage2(data_root, "a")

    assert pack(data_root, "append").new_samples == 1
    assert live(data_root) == ["a"]


def test_withdrawn_sample_counts_no_more_until_it_is_restored(root):
    """No tar is rewritten; changed samples wait for the next append."""
    folder = bucket_folder(root.shards, BUCKET)
    before = (folder / "shard-000000.tar").read_bytes()
    with Ledger(root.ledger) as ledger:
        ledger.withdraw(["a"])

    assert pack(root, "withdraw").tombstones == 1
    assert live(root) == ["b", "c"]
    assert pack(root, "withdraw").status == "unchanged"
    with Ledger(root.ledger) as ledger:
        ledger.restore(["a"])
    assert pack(root, "withdraw").tombstones == 0

    assert live(root) == ["a", "b", "c"]
    assert (folder / "shard-000000.tar").read_bytes() == before
    assert not (folder / "tombstones.jsonl").exists()


def test_withdrawn_sample_stays_out_of_every_later_set(root):
    with Ledger(root.ledger) as ledger:
        ledger.withdraw(["a"])

    for existing in ("append", "repack", "replace", "update"):
        pack(root, existing)
        assert live(root) == ["b", "c", "d"], existing


def test_withdrawing_says_no_other_model_of_tars_that_stay(root):
    """The manifest records the model that generated the tars' content, not the present one.

    Spec: docs/spec/conventions.md#completion-and-identity
    """
    folder = bucket_folder(root.shards, BUCKET)
    kinds = [spec.kind for spec in embedding_specs()]
    preview = {kind: ModelIdentity(kind=kind, model="preview", preview=True, facts={"weights": "1"}) for kind in kinds}
    real = {kind: ModelIdentity(kind=kind, model="real", facts={"weights": "2"}) for kind in kinds}
    pack(root, "replace", preview)
    before = read_manifest(folder).provenance
    with Ledger(root.ledger) as ledger:
        ledger.withdraw(["a"])

    pack(root, "withdraw", real)

    assert read_manifest(folder).provenance == before
    assert all(entry.preview for entry in before.values())


def test_index_of_another_program_cannot_be_appended_to(root):
    """It lacks the digests by which changed samples are recognised."""
    path = bucket_folder(root.shards, BUCKET) / "index.jsonl"
    path.write_text(
        json.dumps({"image_id": "a", "key": "a", "shard": "shard-000000.tar", "offset": 0, "size": 1}) + "\n"
    )

    with pytest.raises(ImagemillError, match=r"index\.jsonl cannot be read"):
        pack(root, "append")


def test_files_that_are_not_of_the_set_come_along(root):
    """Replacing a set deletes no foreign file."""
    folder = bucket_folder(root.shards, BUCKET)
    (folder / "notes.txt").write_text("mine")
    (folder / "more").mkdir()
    (folder / "more" / "deep.txt").write_text("mine too")
    (folder / "stale.tar").write_bytes(b"")

    pack(root, "replace")

    assert (folder / "notes.txt").read_text() == "mine"
    assert (folder / "more" / "deep.txt").read_text() == "mine too"
    assert not (folder / "stale.tar").exists(), "no stale shard survives"
