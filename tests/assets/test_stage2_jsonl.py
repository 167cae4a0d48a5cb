"""The records asset: built from the ledger; missing passes are completed first.

Spec: docs/spec/stage2.md#record-fields, docs/spec/stage2.md#pass-names
"""

import json

import pytest

from assets.embeddings import embedding_assets
from assets.stage2_jsonl import stage2_jsonl
from dagster_project.deployments import test_resources as resources_of
from dagster_project.jobs import roll_back_to_stage1
from imagemill.domain.embedding_specs import DINOV3, T5, VAE
from imagemill.domain.stage2_records import violations
from imagemill.formats.jsonl import read_jsonl
from imagemill.pipeline.stage2 import image_metadata as facts
from imagemill.store.ledger import Ledger
from tests.helpers.stage1 import stage1_record, write_stage1
from tests.helpers.stage2 import embed, photos, record_of, write_text
from tests.helpers.stubs import StubEncoder
from tests.helpers.wiring import claims, failure_of, history, materialize, stub_every_kind

dinov3_npy = embedding_assets[0]


@pytest.fixture
def instance():
    with history() as instance:
        yield instance


@pytest.fixture(autouse=True)
def stubs(monkeypatch):
    stub_every_kind(monkeypatch)


def records(root):
    return {line.value["image_id"]: line.value for line in read_jsonl(root.stage2_jsonl)}


def problems(root):
    with Ledger(root.ledger) as ledger:
        return {(p.item, p.asset, p.reason) for p in ledger.problems()}


def test_record_needs_no_embedding(data_root, instance):
    """A record requires a decodable image, a caption, and a mask, which the tokenizer alone provides."""
    photos(data_root, "a", "b")

    assert materialize(data_root, instance, stage2_jsonl).success

    assert records(data_root).keys() == {"a", "b"}
    assert all(violations(record) == [] for record in records(data_root).values())


@pytest.mark.parametrize("passes", [[], [DINOV3], [T5], [VAE, T5]], ids=len)
def test_records_do_not_depend_on_the_passes_run_before(data_root, instance, passes):
    photos(data_root, "a")
    if passes:
        embed(data_root, *passes)

    materialize(data_root, instance, stage2_jsonl)

    assert records(data_root) == {"a": record_of("a", caption="noise called a")}


def test_image_opened_by_a_pass_is_not_opened_again(data_root, instance, monkeypatch):
    photos(data_root, "a", "b")
    embed(data_root)
    monkeypatch.setattr(facts, "inspect_image", lambda *_: pytest.fail("opened"))
    monkeypatch.setattr(StubEncoder, "tokenizer", classmethod(lambda *_, **__: pytest.fail("loaded a tokenizer")))

    assert materialize(data_root, instance, stage2_jsonl).success
    assert records(data_root).keys() == {"a", "b"}


def test_interrupted_run_writes_finished_records_without_opening_images(data_root, instance, monkeypatch):
    """An interrupt preserves all finished work and opens no image. Spec: docs/spec/stage2.md#merge"""
    photos(data_root, "a")
    embed(data_root)
    photos(data_root, "b")
    monkeypatch.setattr(facts, "inspect_image", lambda *_: pytest.fail("opened"))

    assert materialize(data_root, instance, stage2_jsonl, stage2_jsonl={"complete": False}).success
    assert records(data_root).keys() == {"a"}


def test_inputs_without_a_record_have_a_row(data_root, instance):
    photos(data_root, "a", "uncaptioned", "torn")
    (data_root.approved / "uncaptioned.txt").unlink()
    (data_root.approved / "torn.png").write_bytes(b"no picture")

    assert materialize(data_root, instance, stage2_jsonl).success

    assert records(data_root).keys() == {"a"}
    assert problems(data_root) == {
        ("uncaptioned", "stage2_jsonl", "missing_caption"), ("torn", "stage2_jsonl", "undecodable"),
    }  # fmt: skip


def test_caption_of_a_record_is_used_for_an_image_without_a_sidecar(data_root, instance):
    photos(data_root, "a", captions=False)
    write_text(
        data_root.stage2_jsonl, json.dumps({"image_path": "data/approved/a.png", "caption": "of  Stage 1", "x": 1})
    )

    materialize(data_root, instance, stage2_jsonl)

    (record,) = records(data_root).values()
    assert (record["caption"], record["x"]) == ("of  Stage 1", 1)
    assert violations(record) == []


def test_data_root_without_images_fails_with_a_remedy_and_no_claim(data_root, instance):
    data_root.approved.rmdir()

    result = materialize(data_root, instance, stage2_jsonl)

    assert "put images there" in failure_of(result, "stage2_jsonl")
    with Ledger(data_root.ledger) as ledger:
        assert claims(ledger) == []


# ---- Stage 1 from the UI: run configuration


def test_run_configuration_starts_a_migration_and_a_job_the_rollback(data_root, instance):
    """Both can be started from the UI."""
    before = write_stage1(data_root, [stage1_record(n) for n in range(2)])
    ids = ["photo0000", "photo0001"]
    instance.add_dynamic_partitions("images", ids)

    materialize(data_root, instance, stage2_jsonl, stage2_jsonl={"migrate": False})
    assert data_root.stage2_jsonl.read_bytes() == before
    extracted = materialize(
        data_root,
        instance,
        dinov3_npy,
        keys=ids,
        deferred=True,
        dinov3_npy={"extract_only": True, "up_to": "photo0000"},
    )
    result = materialize(data_root, instance, stage2_jsonl)
    assert extracted.success
    assert result.success
    (event,) = result.asset_materializations_for_node("stage2_jsonl")
    assert (event.metadata["migrated (records)"].value, event.metadata["stage1 (records)"].value) == (1, 1)
    assert ("photo0001", "stage2_jsonl", "missing_vector") in problems(data_root)

    result = roll_back_to_stage1.execute_in_process(resources=resources_of(str(data_root.path)), instance=instance)
    assert result.success
    assert data_root.stage2_jsonl.read_bytes() == before


def test_counters_since_the_last_merge_are_metadata(data_root, instance):
    photos(data_root, "a", "b")
    embed(data_root)

    for expected in ((2, 0), (0, 2)):
        (event,) = materialize(data_root, instance, stage2_jsonl).asset_materializations_for_node("stage2_jsonl")
        assert (event.metadata["migrated new (images)"].value, event.metadata["skipped (images)"].value) == expected
        assert event.metadata["total (images)"].value == 2


def test_caption_longer_than_the_text_encoder_limit_is_counted(data_root, instance):
    """Truncated captions are counted and shown."""
    photos(data_root, "a", "b")
    (data_root.approved / "a.txt").write_text("word " * 200)
    embed(data_root)

    (event,) = materialize(data_root, instance, stage2_jsonl).asset_materializations_for_node("stage2_jsonl")

    assert event.metadata["truncated captions"].value == 1
