"""The near-duplicate asset, its check, and shards that exclude near duplicates."""

import json

import dagster as dg
import numpy as np
import pytest

from assets.bucket_shards import bucket_shards
from assets.near_duplicates import near_duplicates
from checks.near_duplicates import groups_valid
from dagster_project.lineage import with_lineage
from imagemill.domain.buckets import BUCKETS
from imagemill.domain.embedding_specs import DINOV3, VAE
from imagemill.formats.tar import read_shard
from imagemill.fs.fingerprints import fingerprint
from imagemill.store.ledger import Ledger
from resources.data_root import DataRootResource
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
    """Four samples; `b` and `copy` are near duplicates."""
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
def test_run_writes_groups_and_their_preview(root, instance, deferred):
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


def test_run_configuration_overrides_the_threshold_of_the_file(root, instance):
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


def test_damaged_file_is_left_out_and_counted(root, instance):
    (root.derived / DINOV3.folder / "copy.npy").write_bytes(b"torn")

    assert find(root, instance).success
    assert metadata(instance)["left out: truncated"] == 1
    assert lines(root) == []


# ---- the check


def test_check_passes_without_a_report(data_root, instance):
    assert check(data_root, instance, near_duplicates, groups_valid)[NAME].passed


def test_check_fails_on_damaged_lines_or_summary(root, instance):
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
def test_check_fails_on_invalid_groups(root, instance, spoil, rule):
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


def test_shards_contain_near_duplicates_by_default(root, instance):
    find(root, instance)

    assert pack(root, instance).success
    assert shards(root) == ["a", "b", "c", "copy"]


def test_near_duplicates_are_excluded_on_request_and_included_again(root, instance):
    """An update republishes the set if its samples changed, in both directions."""
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


def test_explain_names_the_representative_of_an_excluded_image(root, instance):
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


def test_near_duplicates_across_buckets_are_excluded_too(root, instance):
    configure(root, exclude=True)
    find(root, instance)

    result = pack(root, instance, "832x1216")

    assert counts(root, result) == {"total_records": 4, "ready_records": 0, "skipped_incomplete": 0, "filtered": 4}


@pytest.mark.parametrize("report", ["missing", "older"])
def test_shards_require_a_current_report_if_duplicates_are_excluded(root, instance, report):
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


def test_image_without_a_vector_does_not_outdate_the_report(root, instance):
    """It is not a sample yet. A new report is required only after the pass that writes its vector."""
    configure(root, exclude=True)
    find(root, instance)
    photos(root, "new", size=(24, 24))
    embed(root, VAE)
    write_records(root)

    assert pack(root, instance).success
    assert shards(root) == ["a", "b", "c"]


def test_one_run_makes_the_report_and_the_shards(root, instance):
    """`imagemill run` does this if near duplicates are excluded: the report is written before it is read."""
    configure(root, exclude=True)

    assets = with_lineage([near_duplicates, bucket_shards], DataRootResource(path=str(root.path)))

    result = materialize(root, instance, *assets, keys=[BUCKETS[0], BUCKETS[-1]])

    assert result.success
    assert shards(root) == ["a", "b", "c"]
    assert materialized(instance, "near_duplicates") == [None]
