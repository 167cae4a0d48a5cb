"""io_managers/report.py: reports are written to files one by one, and become metadata of their partitions."""

import dagster as dg
import pytest

from assets.partitions import buckets
from imagemill.domain.buckets import BUCKETS
from imagemill.pipeline.curation.reports import CurationReport, Reports, write_report
from imagemill.pipeline.leases import Leased
from imagemill.store.ledger import Ledger
from resources.data_root import DataRootResource
from tests.helpers.wiring import claims, failure_of, history, materialize, materialized

FIRST, SECOND = BUCKETS[:2]

pytestmark = pytest.mark.filterwarnings("ignore:Parameter `backfill_policy`")


@pytest.fixture
def instance():
    with history() as instance:
        yield instance


def partitioned(root, stream):
    """Define an asset partitioned by bucket; a function maps its partition keys to reports."""

    @dg.asset(
        partitions_def=buckets, backfill_policy=dg.BackfillPolicy.single_run(), io_manager_key="report_io",
        metadata={"place": "thing"}, code_version="1",
    )  # fmt: skip
    def thing(context: dg.AssetExecutionContext, data_root: DataRootResource) -> Leased:
        def plan():
            return Reports(root.derived / "thing", stream(context.partition_keys))

        return Leased(data_root.session.ledger, "thing", ["x"], context.run.run_id, plan)

    return thing


def one_each(root):
    def stream(keys):
        for key in keys:
            path = root.derived / "thing" / f"{key}.json"
            yield CurationReport(
                f"v-{key}", key, {path: key.encode()}, {"images": len(key)}, {"table": f"| {key} |"}, path
            )
        yield CurationReport(
            "v-all", None, {root.derived / "thing" / "all.json": b"all"}, {"images": 1}, {"sum": "| all |"}
        )

    return stream


def metadata(instance):
    """Return the metadata of each partition's newest event."""
    records = instance.fetch_materializations(dg.AssetKey("thing"), limit=100).records
    return {
        r.partition_key: {k: v.value for k, v in r.asset_materialization.metadata.items()} for r in reversed(records)
    }


@pytest.mark.parametrize("deferred", [False, True])
def test_each_report_is_written_and_materialised_with_its_partition(data_root, instance, deferred):
    result = materialize(
        data_root, instance, partitioned(data_root, one_each(data_root)), keys=[FIRST, SECOND], deferred=deferred
    )

    assert result.success
    assert {p.name: p.read_text() for p in (data_root.derived / "thing").iterdir()} == {
        f"{FIRST}.json": FIRST, f"{SECOND}.json": SECOND, "all.json": "all",
    }  # fmt: skip
    assert sorted(materialized(instance, "thing")) == sorted([FIRST, SECOND])
    shown = metadata(instance)
    assert shown[SECOND]["table"] == f"| {SECOND} |"
    assert shown[SECOND]["images"] == len(SECOND)
    assert shown[SECOND]["path"] == str(data_root.derived / "thing" / f"{SECOND}.json"), (
        "its own, not the folder of all"
    )
    assert deferred or shown[FIRST]["sum"] == "| all |"
    with Ledger(data_root.ledger) as ledger:
        assert ledger.counts([result.run_id])["thing"] == {"reports": 3, "rewritten": 3}
        assert claims(ledger) == []


def test_reports_made_before_a_failure_are_kept(data_root, instance):
    def stream(keys):
        yield from list(one_each(data_root)(keys[:1]))[:1]
        raise OSError("the disk is gone")

    result = materialize(data_root, instance, partitioned(data_root, stream), keys=[FIRST, SECOND], deferred=True)

    assert "the disk is gone" in failure_of(result, "thing")
    assert [path.name for path in (data_root.derived / "thing").iterdir()] == [f"{FIRST}.json"]
    assert materialized(instance, "thing") == [FIRST]
    with Ledger(data_root.ledger) as ledger:
        assert claims(ledger) == [], "the next run does not wait for this one"


def test_unchanged_file_is_not_written_again(tmp_path):
    path, other = tmp_path / "folder" / "a.json", tmp_path / "b.png"
    assert write_report(CurationReport("v", files={path: b"same", other: b"one"})) == 2
    before = path.stat().st_mtime_ns

    assert write_report(CurationReport("v", files={path: b"same", other: b"two"})) == 1
    assert (path.stat().st_mtime_ns, other.read_bytes()) == (before, b"two")


def test_downstream_asset_gets_the_folder(data_root, instance):
    @dg.asset(
        partitions_def=buckets, ins={"thing": dg.AssetIn()}, io_manager_key="plain",
        backfill_policy=dg.BackfillPolicy.single_run(),
    )  # fmt: skip
    def reader(thing):
        return sorted(path.name for path in thing.iterdir())

    result = materialize(
        data_root, instance, partitioned(data_root, one_each(data_root)), reader, keys=[FIRST],
        resources={"plain": dg.InMemoryIOManager()},
    )  # fmt: skip

    assert result.output_for_node("reader") == [f"{FIRST}.json", "all.json"]
