"""Verification of all files and rollback to Stage 1 from the UI.

Spec: docs/spec/migration.md#rollback, docs/spec/stage2.md#verification
"""

import json

import dagster as dg
import pytest

from assets.stage2_jsonl import stage2_jsonl
from dagster_project.definitions import build_definitions
from dagster_project.deployments import test_resources
from dagster_project.jobs import roll_back_to_stage1, verify_stage2_files
from imagemill.domain.embedding_specs import DINOV3, embedding_specs
from imagemill.pipeline.leases import Leased
from imagemill.pipeline.stage2.merge import ASSET, stage1_backup
from imagemill.pipeline.stage2.rollback import stage2_backup
from imagemill.store.ledger import Ledger
from tests.helpers.stage1 import stage1_record
from tests.helpers.stage2 import stage2
from tests.helpers.wiring import claims, failure_of


def verify(root):
    with dg.DagsterInstance.ephemeral() as instance:
        return verify_stage2_files.execute_in_process(
            resources={"data_root": test_resources(str(root.path))["data_root"]},
            instance=instance,
            raise_on_error=False,
        )


@pytest.fixture
def root(data_root):
    stage2(data_root, "a", "b")
    return data_root


def test_whole_data_root_passes(root):
    assert verify(root).success


def test_one_flipped_byte_fails_the_run(root):
    path = root.derived / "vae_latents" / "a.npy"
    data = bytearray(path.read_bytes())
    data[-1] = 0x7F
    path.write_bytes(data[:-1] + b"\x7f" + b"\x00")

    result = verify(root)

    assert not result.success
    (failure,) = [event for event in result.all_events if event.is_step_failure]
    assert "findings" in failure.step_failure_data.user_failure_data.description


# ---- back to Stage 1


def go_back(root, instance, **config):
    """Run the job as the launchpad does."""
    return roll_back_to_stage1.execute_in_process(
        run_config={"ops": {"roll_back_records": {"config": config}}},
        resources={"data_root": test_resources(str(root.path))["data_root"]},
        instance=instance,
        raise_on_error=False,
    )


@pytest.fixture
def migrated(root):
    """Records of version 2 with their files, a backup of Stage 1, and a history with one file."""
    before = json.dumps(stage1_record(0)).encode() + b"\n"
    stage1_backup(root.stage2_jsonl).write_bytes(before)
    with dg.DagsterInstance.ephemeral() as instance:
        instance.report_runless_asset_event(dg.AssetMaterialization(DINOV3.kind, partition="a"))
        yield root, instance, before


def reported(instance, asset):
    return instance.get_latest_materialization_event(dg.AssetKey(asset))


def test_rollback_puts_the_stage1_file_back_and_reports_it(migrated):
    """The event has the counters, as a merge's has; the lease is released; npy files and their history stay."""
    root, instance, before = migrated
    newer = root.stage2_jsonl.read_bytes()

    result = go_back(root, instance)

    assert result.success
    assert root.stage2_jsonl.read_bytes() == before
    assert stage2_backup(root.stage2_jsonl).read_bytes() == newer
    metadata = reported(instance, ASSET).asset_materialization.metadata
    assert {name: value.value for name, value in metadata.items()} == {
        "records": 1, "from backup (files)": 1, "path": str(root.stage2_jsonl),
    }  # fmt: skip
    with Ledger(root.ledger, read_only=True) as ledger:
        assert ledger.counts([result.run_id]) == {ASSET: {"records": 1, "from_backup": 1}}
        assert claims(ledger) == []
    assert reported(instance, DINOV3.kind)


def test_rollback_can_delete_the_embeddings_and_their_history(migrated):
    root, instance, _ = migrated
    kept = len(list(root.derived.rglob("*.npy")))

    result = go_back(root, instance, delete_embeddings=True)

    assert result.success
    assert kept
    assert not list(root.derived.rglob("*.npy"))
    assert reported(instance, ASSET).asset_materialization.metadata["deleted files"].value == kept
    assert [spec.kind for spec in embedding_specs() if reported(instance, spec.kind)] == []


def test_rollback_without_stage1_fails_and_changes_nothing(root):
    before = root.stage2_jsonl.read_bytes()
    with dg.DagsterInstance.ephemeral() as instance:
        result = go_back(root, instance, delete_embeddings=True)

        assert "never migrated from Stage 1" in failure_of(result, "roll_back_records")
        assert reported(instance, ASSET) is None
    assert root.stage2_jsonl.read_bytes() == before
    assert list(root.derived.rglob("*.npy"))
    with Ledger(root.ledger, read_only=True) as ledger:
        assert claims(ledger) == []


def test_records_asset_has_no_configuration_and_one_type(tmp_path):
    """The asset never does a rollback: a re-executed rollback run of an earlier version is refused instead of merging."""
    definitions = build_definitions(test_resources(str(tmp_path)))

    assert not getattr(definitions.get_assets_def("stage2_jsonl").op.config_schema.config_type, "fields", None)
    job = definitions.resolve_implicit_job_def_def_for_assets([stage2_jsonl.key])
    with pytest.raises(dg.DagsterInvalidConfigError, match="rollback"):
        dg.validate_run_config(job, {"ops": {"stage2_jsonl": {"config": {"rollback": True}}}})
    assert stage2_jsonl.op.outs["result"].dagster_type.typing_type is Leased, "whose plan is a Merge"
