"""io_managers/npy.py: renames files, reports exactly those to Dagster, and records the counts in the ledger."""

import dagster as dg
import numpy as np
import pytest
from dagster._core.definitions.data_version import extract_data_provenance_from_entry, extract_data_version_from_entry
from dagster._core.storage.asset_check_execution_record import AssetCheckExecutionRecordStatus
from dagster_shared.serdes import serialize_value

from assets.embeddings import embedding_assets
from checks.embeddings import embedding_checks
from imagemill.domain.buckets import assign_bucket
from imagemill.domain.embedding_specs import DINOV3, T5
from imagemill.formats.npy import NpyStore
from imagemill.pipeline.stage2.models_in_use import PREVIEW_TEXT
from imagemill.store.ledger import Ledger
from io_managers import npy
from io_managers.embedding_results import FILES, INPUTS
from resources.keys import APPROVED_IMAGES
from tests.helpers.stage2 import embed, photos
from tests.helpers.stubs import StubEncoder
from tests.helpers.wiring import claims, failure_of, history, materialize, materialized, stub_every_kind

dinov3_npy, _, t5_hidden = embedding_assets

KEYS = ["a", "b", "c"]


@pytest.fixture
def instance():
    with history(*KEYS) as instance:
        yield instance


@pytest.fixture(autouse=True)
def stubs(monkeypatch):
    stub_every_kind(monkeypatch)


def counts(root, result, kind="dinov3_npy"):
    with Ledger(root.ledger) as ledger:
        return ledger.counts([result.run_id])[kind]


def test_event_carries_the_versions_of_the_file_and_its_image(data_root, instance):
    """Dagster uses these versions to distinguish fresh from stale."""
    photos(data_root, "a")
    materialize(data_root, instance, dinov3_npy, keys=["a", "a"], deferred=True)

    (record,) = instance.fetch_materializations(dg.AssetKey("dinov3_npy"), limit=10).records
    store = NpyStore(data_root.derived / DINOV3.folder, DINOV3)
    with Ledger(data_root.ledger) as ledger:
        row = ledger.files(DINOV3.kind)["a", store.stat("a")]
    assert extract_data_version_from_entry(record.event_log_entry) == dg.DataVersion(row.content)
    provenance = extract_data_provenance_from_entry(record.event_log_entry)
    assert provenance.input_data_versions[dg.AssetKey("approved_images")] == dg.DataVersion(row.source)
    metadata = record.asset_materialization.metadata
    assert metadata["model"].value == PREVIEW_TEXT
    with Ledger(data_root.ledger) as ledger:
        source = ledger.sources()["a"]
    assert metadata["look"].value == (
        f"[![a](/imagemill/thumb?id=a)](/imagemill/image?id=a) {source.width} × {source.height}, "
        f"bucket {assign_bucket(source.width, source.height)}, PREVIEW WEIGHTS"
    )


@pytest.mark.parametrize("definition", embedding_assets, ids=lambda asset: asset.key.path[-1])
def test_two_events_of_an_image_fit_a_page_of_the_history(data_root, definition):
    """An event of 2,020 bytes takes a page of its own, which doubles the history; a colour profile needs 50 bytes more."""
    image_id = "000000000009"
    photos(data_root, image_id, size=(1280, 1024))
    with history(image_id) as instance:
        materialize(data_root, instance, definition, keys=[image_id, image_id], deferred=True)
        for key in (definition.key, APPROVED_IMAGES):
            (record,) = instance.fetch_materializations(key, limit=10).records
            assert 1300 < len(serialize_value(record.event_log_entry)) <= 1900


def test_event_of_an_unfinished_regeneration_has_its_progress(data_root, instance):
    """The page of the asset displays the latest event."""
    photos(data_root, *KEYS)
    embed(data_root, DINOV3)

    def latest(**config):
        assert materialize(data_root, instance, dinov3_npy, keys=KEYS, deferred=True, dinov3_npy=config).success
        (record,) = instance.fetch_materializations(dg.AssetKey("dinov3_npy"), limit=1).records
        return {name: value.value for name, value in record.asset_materialization.metadata.items()}

    assert latest(regenerate=True, up_to="a")["regeneration (at that time)"] == "1 of 3 files replaced"
    assert "regeneration (at that time)" not in latest()


def test_ledger_records_the_counters_of_the_run(data_root, instance):
    photos(data_root, *KEYS)
    (data_root.approved / "b.png").write_bytes(b"no picture")

    result = materialize(data_root, instance, dinov3_npy, keys=KEYS, deferred=True)

    made = counts(data_root, result)
    assert (made["computed"], made["refused"], made["kept"], made["calls"]) == (2, 1, 0, 2)


def test_recorded_refusals_are_counted_without_opening_the_images_again(data_root, instance):
    photos(data_root, *KEYS)
    (data_root.approved / "b.png").write_bytes(b"no picture")
    embed(data_root, DINOV3)

    result = materialize(data_root, instance, dinov3_npy, keys=KEYS, deferred=True)

    assert counts(data_root, result) == {"kept": 2, "refused": 1, "absent": 0}


def test_image_without_a_caption_has_a_row_for_the_kind_that_requires_one(data_root, instance):
    photos(data_root, *KEYS)
    (data_root.approved / "b.txt").unlink()

    assert materialize(data_root, instance, t5_hidden, keys=KEYS, deferred=True).success
    with Ledger(data_root.ledger) as ledger:
        assert [(p.item, p.asset, p.reason) for p in ledger.problems()] == [("b", T5.kind, "missing_caption")]


def test_files_without_an_event_in_dagster_are_reported_once(data_root, instance):
    """The Dagster history may be newer than the files."""
    photos(data_root, *KEYS)
    embed(data_root, DINOV3)

    for _ in range(2):
        assert materialize(data_root, instance, dinov3_npy, keys=KEYS, deferred=True).success
    assert sorted(materialized(instance, "dinov3_npy")) == KEYS


@pytest.mark.parametrize(("looked_up", "meanwhile"), [(2, 0), (2, 8), (100, 8)])
def test_materialised_partitions_of_some_images_are_found_by_list_or_by_name(
    instance, monkeypatch, looked_up, meanwhile
):
    """Of many images, the few of a range are looked up by their names, because a list grows with the data root."""
    asset = dg.AssetKey("dinov3_npy")
    for partition in "abcdefg":
        instance.report_runless_asset_event(dg.AssetMaterialization(asset, partition=partition))
    monkeypatch.setattr(npy, "LOOKED_UP", looked_up)
    monkeypatch.setattr(npy, "LISTED_MEANWHILE", meanwhile)
    listed, wanted = [], ["a", "x", "c", "y", "g"]
    real = instance.get_materialized_partitions
    monkeypatch.setattr(instance, "get_materialized_partitions", lambda key: listed.append(key) or real(key))

    found = npy._materialized(instance, asset, wanted, 7)

    assert set(found).intersection(wanted) == set("acg")
    assert listed == ([asset] if looked_up < len(wanted) < 7 < meanwhile * len(wanted) else [])
    assert not npy._materialized(instance, asset, [], 7)


def test_images_that_a_step_of_the_run_has_reported_are_not_looked_up_by_the_next_one(data_root, instance, monkeypatch):
    photos(data_root, *KEYS)
    looked_up, real = [], npy._materialized

    def look_up(of, asset, keys, total):
        looked_up.extend(keys if asset == APPROVED_IMAGES else ())
        return real(of, asset, keys, total)

    monkeypatch.setattr(npy, "_materialized", look_up)

    assert materialize(data_root, instance, *embedding_assets, keys=KEYS, deferred=True).success
    assert looked_up == []
    assert sorted(materialized(instance, APPROVED_IMAGES.path)) == KEYS

    instance.wipe_assets([APPROVED_IMAGES])
    assert materialize(data_root, instance, *embedding_assets, keys=KEYS, deferred=True).success
    assert sorted(looked_up) == KEYS
    assert sorted(materialized(instance, APPROVED_IMAGES.path)) == KEYS


def test_replaced_file_is_reported_again(data_root, instance):
    photos(data_root, *KEYS)
    materialize(data_root, instance, dinov3_npy, keys=KEYS, deferred=True)
    (data_root.derived / DINOV3.folder / "b.npy").write_bytes(b"")

    result = materialize(data_root, instance, dinov3_npy, keys=KEYS, deferred=True)

    assert materialized(instance, "dinov3_npy").count("b") == 2
    assert counts(data_root, result)["replaced"] == 1


def test_all_missing_images_are_counted_and_only_the_first_are_named(data_root):
    keys = [f"i{n:02d}" for n in range(12)]
    photos(data_root, "good")
    with history("good", *keys) as instance:
        result = materialize(data_root, instance, dinov3_npy, keys=["good", keys[-1]])

    failure = failure_of(result, "dinov3_npy").splitlines()
    assert failure[0] == "12 images did not arrive, everything else of dinov3_npy is done"
    assert [line.split(":")[0] for line in failure[1:]] == ["  i00", "  i01", "  i02", "  i03", "  i04", "  and 7 more"]


def test_failure_of_images_shows_reason_and_remedy_without_a_stack_trace(data_root, instance):
    """A failed photograph is not a program error."""
    photos(data_root, *KEYS)
    (data_root.approved / "b.png").write_bytes(b"no picture")

    result = materialize(data_root, instance, dinov3_npy, keys=KEYS)

    (event,) = [event for event in result.all_events if event.is_step_failure]
    error, failure = event.step_failure_data.error, event.step_failure_data.user_failure_data
    assert (error.stack, error.cause, error.context, error.cls_name) == ([], None, None, "Failure")
    assert error.message.strip() == failure.description
    assert "  b: undecodable: " in failure.description
    assert failure.metadata["images"].value == 1


def test_step_that_fails_for_its_images_evaluates_its_checks(data_root, instance):
    """Dagster skips the checks of a failed step, but their table of problems is needed in that case."""
    photos(data_root, *KEYS)
    (data_root.approved / "b.png").write_bytes(b"no picture")

    result = materialize(data_root, instance, dinov3_npy, *embedding_checks[:2], keys=KEYS)

    assert not result.success
    keys = [dg.AssetCheckKey(dg.AssetKey("dinov3_npy"), name) for name in (INPUTS, FILES)]
    (inputs,), (files,) = (instance.event_log_storage.get_asset_check_execution_history(key, limit=5) for key in keys)
    assert inputs.status is AssetCheckExecutionRecordStatus.FAILED
    assert (inputs.evaluation.severity, inputs.evaluation.passed) == (dg.AssetCheckSeverity.WARN, False)
    assert "b (undecodable)" in inputs.evaluation.description
    assert files.status is AssetCheckExecutionRecordStatus.SUCCEEDED, "the files that are there are valid"


def test_approved_image_is_materialised_once_it_was_opened(data_root, instance):
    """The first kind that opens it reports it once, and again after its file was read again."""
    photos(data_root, *KEYS)
    (data_root.approved / "b.png").write_bytes(b"no picture")
    for asset in (dinov3_npy, t5_hidden, dinov3_npy):
        materialize(data_root, instance, asset, keys=KEYS, deferred=True)
    assert materialized(instance, "approved_images") == ["a", "c"]

    (data_root.approved / "c.png").touch()
    materialize(data_root, instance, dinov3_npy, keys=KEYS, deferred=True)
    assert materialized(instance, "approved_images") == ["a", "c", "c"]


def test_opened_images_of_a_failed_step_are_reported_too(data_root, instance):
    """In a run of the UI a broken image fails the step."""
    photos(data_root, *KEYS)
    (data_root.approved / "b.png").write_bytes(b"no picture")

    assert not materialize(data_root, instance, dinov3_npy, keys=KEYS).success
    assert materialized(instance, "approved_images") == ["a", "c"]


@pytest.mark.parametrize("bad", [False, True])
def test_claims_are_released_when_the_step_ends(data_root, instance, bad):
    photos(data_root, *KEYS)
    if bad:
        (data_root.approved / "b.png").write_bytes(b"no picture")

    materialize(data_root, instance, dinov3_npy, keys=KEYS)

    with Ledger(data_root.ledger) as ledger:
        assert claims(ledger) == []


def test_interrupted_step_keeps_finished_files_and_releases_its_claims(data_root, instance, monkeypatch):
    class Encoder(StubEncoder):
        def encode(self, batch):
            if self.calls:
                raise KeyboardInterrupt
            return super().encode(batch)

    stub_every_kind(monkeypatch, Encoder)
    photos(data_root, *KEYS)

    assert not materialize(data_root, instance, dinov3_npy, keys=KEYS, deferred=True).success

    assert materialized(instance, "dinov3_npy") == ["a"]
    assert [path.name for path in (data_root.derived / DINOV3.folder).iterdir()] == ["a.npy"]
    with Ledger(data_root.ledger) as ledger:
        assert claims(ledger) == []


def test_downstream_asset_gets_a_handle_to_the_files(data_root, instance):
    """The handle contains a folder and a spec, not gigabytes of arrays."""

    @dg.asset(ins={"dinov3_npy": dg.AssetIn(partition_mapping=dg.AllPartitionMapping())}, io_manager_key="plain")
    def norms(dinov3_npy):
        assert isinstance(dinov3_npy, NpyStore)
        return {i: float(np.linalg.norm(np.load(dinov3_npy.path(i)))) for i in dinov3_npy.listing()}

    photos(data_root, *KEYS)
    embed(data_root, DINOV3)
    result = materialize(
        data_root, instance, dinov3_npy.to_source_assets()[0], norms, resources={"plain": dg.InMemoryIOManager()}
    )  # fmt: skip

    assert result.success
    assert sorted(result.output_for_node("norms")) == KEYS


def test_run_that_made_files_has_figures_for_plots(data_root, instance):
    """One observation without a partition; a run that makes nothing has none."""
    photos(data_root, *KEYS, size=(1000, 500))
    materialize(data_root, instance, dinov3_npy, keys=KEYS, deferred=True)
    materialize(data_root, instance, dinov3_npy, keys=KEYS, deferred=True)

    (record,) = instance.fetch_observations(dinov3_npy.key, limit=10).records
    observed = record.event_log_entry.asset_observation
    values = {name: value.value for name, value in observed.metadata.items()}
    assert observed.partition is None
    assert values["bytes"] == sum(path.stat().st_size for path in (data_root.derived / DINOV3.folder).glob("*.npy"))
    assert values["images_per_s"] > 0
    assert values["megapixels_per_s"] == pytest.approx(0.5 * values["images_per_s"], rel=0.01)
