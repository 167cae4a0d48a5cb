"""Linked arrays in Dagster: materialised like others, also in runs of the UI and of the sensor.

Spec: docs/spec/stage2.md#reuse
"""

import dagster as dg
import pytest

from assets.embeddings import embedding_assets
from imagemill.domain.embedding_specs import DINOV3, embedding_specs
from imagemill.store.ledger import Ledger
from tests.helpers.stage2 import photos
from tests.helpers.stubs import StubEncoder
from tests.helpers.wiring import history, materialize, materialized, stub_every_kind


@pytest.fixture
def stubs(monkeypatch):
    stub_every_kind(monkeypatch)


def test_linked_arrays_are_materialised_and_counted(data_root, stubs, monkeypatch):
    photos(data_root, "a")
    with history("a", "b") as instance:
        assert materialize(data_root, instance, *embedding_assets, keys=("a", "a"), deferred=True).success
        for suffix in (".png", ".txt"):
            (data_root.approved / f"a{suffix}").rename(data_root.approved / f"b{suffix}")
        monkeypatch.setattr(StubEncoder, "load", lambda *_, **__: pytest.fail("a model was loaded"))

        result = materialize(data_root, instance, *embedding_assets, keys=("b", "b"), deferred=True)

        assert result.success
        for spec in embedding_specs():
            assert materialized(instance, spec.kind) == ["a", "b"]
            first, second = (
                instance.fetch_materializations(
                    dg.AssetRecordsFilter(dg.AssetKey(spec.kind), asset_partitions=[key]), limit=1
                )
                .records[0]
                .asset_materialization
                for key in ("a", "b")
            )
            assert first.tags["dagster/data_version"] == second.tags["dagster/data_version"]
    with Ledger(data_root.ledger) as ledger:
        assert {spec.kind: ledger.counts([result.run_id])[spec.kind]["linked"] for spec in embedding_specs()} == {
            spec.kind: 1 for spec in embedding_specs()
        }
        assert ledger.changes()["b"] >= {(DINOV3.kind, "linked")}
