"""The near-duplicate asset, its check, and shards that leave near duplicates out."""

import json

import dagster as dg
import numpy as np
import pytest

from assets.bucket_shards import bucket_shards
from assets.near_duplicates import near_duplicates
from checks.near_duplicates import groups_valid
from imagemill.domain.buckets import BUCKETS
from imagemill.domain.embedding_specs import DINOV3, VAE
from imagemill.formats.tar import read_shard
from imagemill.fs.fingerprints import fingerprint
from imagemill.store.ledger import Ledger
from tests.helpers.sessions import explain, read_status
from tests.helpers.stage2 import embed, photos, stage2, write_records
from tests.helpers.wiring import check, checks_of, claims, failure_of, history, materialize, materialized

NAME = "near_duplicates:groups_valid"
SQUARE = "1024x1024"


@pytest.fixture
def instance():
    with history() as instance:
        yield instance


@pytest.fixture
def root(data_root):
    """Four samples, of which `b` and `copy` are nearly the same."""
    stage2(data_root, "a", "b", "c", "copy", size=(24, 24))
    for n, image_id in enumerate(["a", "b", "c"]):
        point(data_root, image_id, np.eye(1024)[n])
    point(data_root, "copy", np.eye(1024)[1] + np.eye(1024)[5] / 10)
    return data_root


def point(root, image_id, vector):
    np.save(root.derived / DINOV3.folder / f"{image_id}.npy", vector.astype(np.float32))


def configure(root, **settings):
    (root.path / "imagemill.yaml").write_text(json.dumps({"near_duplicates": settings}))


def find(root, instance, *, deferred=False, **config):
    return materialize(root, instance, near_duplicates, groups_valid, deferred=deferred, near_duplicates=config)


def pack(root, instance, *chosen, **config):
    chosen = chosen or BUCKETS
    return materialize(root, instance, bucket_shards, keys=[chosen[0], chosen[-1]], deferred=True, bucket_shards=config)


def lines(root):
    return [json.loads(line) for line in (root.derived / "near_duplicates.jsonl").read_text().splitlines()]


def shards(root, bucket=SQUARE):
    tars = sorted((root.shards / f"bucket_{bucket}").glob("*.tar"))
    return [json.loads(members["json"])["image_id"] for tar in tars for _, members in read_shard(tar)]


def metadata(instance):
    (record,) = instance.fetch_materializations(dg.AssetKey("near_duplicates"), limit=1).records
    return {name: value.value for name, value in record.asset_materialization.metadata.items()}


# ---- the report


@pytest.mark.parametrize("deferred", [False, True])
def test_run_lists_groups_and_shows_them(root, instance, deferred):
    result = find(root, instance, deferred=deferred)

    assert result.success
    assert lines(root) == [{"representative": "b", "members": [
        {"image_id": "b", "file": "b.png", "width": 24, "height": 24, "cosine": 1.0},
        {"image_id": "copy", "file": "copy.png", "width": 24, "height": 24, "cosine": 0.995037},
    ]}]  # fmt: skip
    assert materialized(instance, "near_duplicates") == [None]
    shown = metadata(instance)
    assert (shown["images"], shown["groups"], shown["members"]) == (4, 1, 2)
    assert "data:image/jpeg;base64," in shown["sheet"]
    assert shown["path"] == str(root.derived / "near_duplicates.jsonl")
    assert checks_of(result)[NAME].passed
    with Ledger(root.ledger) as ledger:
        assert claims(ledger) == []


def test_threshold_of_the_configuration_file_and_of_the_run(root, instance):
    configure(root, threshold=0.999)
    find(root, instance)
    assert lines(root) == []

    find(root, instance, threshold=0.9)
    assert len(lines(root)) == 1


def test_second_run_changes_no_byte_and_no_mtime(root, instance):
    find(root, instance)
    paths = sorted(root.derived.glob("near_duplicates.*"))
    before = [(path.read_bytes(), path.stat().st_mtime_ns) for path in paths]

    result = find(root, instance)

    assert [(path.read_bytes(), path.stat().st_mtime_ns) for path in paths] == before
    assert [path.suffix for path in paths] == [".json", ".jsonl", ".png"]
    with Ledger(root.ledger) as ledger:
        assert ledger.counts([result.run_id])["near_duplicates"] == {"reports": 1, "rewritten": 0}


def test_empty_data_root_has_an_empty_report(data_root, instance):
    assert find(data_root, instance).success
    assert lines(data_root) == []


def test_broken_file_is_left_out_and_counted(root, instance):
    (root.derived / DINOV3.folder / "copy.npy").write_bytes(b"torn")

    assert find(root, instance).success
    assert metadata(instance)["left out: truncated"] == 1
    assert lines(root) == []


# ---- the check


def test_check_passes_where_nothing_was_compared(data_root, instance):
    assert check(data_root, instance, near_duplicates, groups_valid)[NAME].passed


def test_check_fails_where_lines_or_summary_were_spoilt(root, instance):
    find(root, instance)
    path = root.derived / "near_duplicates.jsonl"
    path.write_bytes(path.read_bytes() * 2)
    evaluation = check(root, instance, near_duplicates, groups_valid)[NAME]
    assert "not_the_summarys" in evaluation.description
    assert not evaluation.passed

    (root.derived / "near_duplicates.json").write_text("{")
    assert not check(root, instance, near_duplicates, groups_valid)[NAME].passed


@pytest.mark.parametrize(
    ("spoil", "rule"),
    [
        (lambda group: [group, group], "two_groups"),
        (lambda group: [{**group, "members": group["members"][::-1]}], "bad_group"),
        (lambda group: [{**group, "members": group["members"][:1]}], "bad_group"),
        (lambda group: [{**group, "representative": "a"}], "bad_group"),
        (lambda group: [{**group, "members": [{**m, "cosine": 1.5} for m in group["members"]]}], "impossible"),
    ],
)
def test_check_fails_where_groups_are_not_what_they_should_be(root, instance, spoil, rule):
    find(root, instance)
    data = b"".join(json.dumps(group).encode() + b"\n" for group in spoil(lines(root)[0]))
    (root.derived / "near_duplicates.jsonl").write_bytes(data)
    summary = root.derived / "near_duplicates.json"
    summary.write_text(json.dumps(json.loads(summary.read_text()) | {"lines": fingerprint(data)}))

    evaluation = check(root, instance, near_duplicates, groups_valid)[NAME]

    assert not evaluation.passed
    assert rule in evaluation.description


# ---- shards


def counts(root, result):
    with Ledger(root.ledger) as ledger:
        return ledger.counts([result.run_id])["bucket_shards"]


def test_shards_hold_near_duplicates_unless_asked(root, instance):
    find(root, instance)

    assert pack(root, instance).success
    assert shards(root) == ["a", "b", "c", "copy"]


def test_near_duplicates_are_left_out_where_asked_and_come_back(root, instance):
    """An update republishes the set whose samples changed, in both directions."""
    find(root, instance)
    pack(root, instance)
    configure(root, exclude=True)

    result = pack(root, instance)

    assert shards(root) == ["a", "b", "c"]
    assert counts(root, result) == {"total_records": 4, "ready_records": 3, "skipped_incomplete": 1, "filtered": 0}

    configure(root, exclude=False)
    pack(root, instance)
    assert shards(root) == ["a", "b", "c", "copy"]
    with Ledger(root.ledger) as ledger:
        assert ledger.problems() == []


def test_explain_tells_what_stands_for_an_image_that_was_left_out(root, instance):
    configure(root, exclude=True)
    find(root, instance)
    pack(root, instance)

    story = explain(root, "copy")

    assert story["shard"] is None
    assert story["problems"] == [{
        "asset": "bucket_shards", "outcome": "refused", "reason": "near_duplicate",
        "detail": "cosine 0.9950 to b, which represents it",
        "do": "set near_duplicates.exclude: false, or remove one of them",
    }]  # fmt: skip
    assert explain(root, "b")["problems"] == []
    assert read_status(root).reasons() == {"near_duplicate": 1}


def test_near_duplicates_of_other_buckets_are_filtered_like_any_other(root, instance):
    configure(root, exclude=True)
    find(root, instance)

    result = pack(root, instance, "832x1216")

    assert counts(root, result) == {"total_records": 4, "ready_records": 0, "skipped_incomplete": 0, "filtered": 4}


@pytest.mark.parametrize("report", ["missing", "older"])
def test_shards_wait_for_a_report_of_these_vectors_where_asked(root, instance, report):
    configure(root, exclude=True)
    if report == "older":
        find(root, instance)
        point(root, "a", np.eye(1024)[9])

    result = pack(root, instance)

    assert "near duplicates" in failure_of(result, "bucket_shards")
    assert not root.shards.exists()
    with Ledger(root.ledger) as ledger:
        assert claims(ledger) == []
    find(root, instance)
    assert pack(root, instance).success


def test_image_without_a_vector_does_not_make_the_report_older(root, instance):
    """It is not a sample yet; only the pass that makes its vector requires another report."""
    configure(root, exclude=True)
    find(root, instance)
    photos(root, "new", size=(24, 24))
    embed(root, VAE)
    write_records(root)

    assert pack(root, instance).success
    assert shards(root) == ["a", "b", "c"]


def test_report_and_shards_fit_into_one_run(root, instance):
    """`imagemill run` does this if near duplicates are excluded: the report is made before it is read."""
    configure(root, exclude=True)

    result = materialize(root, instance, near_duplicates, bucket_shards, keys=[BUCKETS[0], BUCKETS[-1]])

    assert result.success
    assert shards(root) == ["a", "b", "c"]
    assert materialized(instance, "near_duplicates") == [None]
