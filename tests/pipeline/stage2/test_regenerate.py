"""The regeneration mark of a kind while all its files are replaced. Spec: docs/spec/conventions.md#provenance"""

from contextlib import contextmanager

import msgspec
import pytest

from imagemill.domain.embedding_specs import DINOV3, VAE
from imagemill.errors import ImagemillError
from imagemill.formats.npy import NpyStore
from imagemill.fs.fingerprints import posix_signature
from imagemill.pipeline.stage2.regenerate import cancel, finish, refuse_regenerating, regenerate, resume
from imagemill.store.ledger import SUPERSEDED, Ledger
from imagemill.store.provenance import ModelIdentity, guard_identity
from tests.helpers.stage2 import embed, identity_of, photos, plan_of


@pytest.fixture
def root(data_root):
    photos(data_root, "a", "b")
    embed(data_root, DINOV3)
    return data_root


@pytest.fixture
def ledger(root):
    with Ledger(root.ledger) as ledger:
        yield ledger


def store(root):
    return NpyStore(root.derived / DINOV3.folder, DINOV3)


def test_started_regeneration_makes_every_file_a_job_and_drops_the_model(root, ledger):
    assert regenerate(ledger, DINOV3.kind, "run")

    assert [job.image_id for job in plan_of(root, DINOV3, ledger).jobs] == ["a", "b"]
    assert identity_of(root, DINOV3.kind) is None
    assert not resume(ledger, VAE.kind), "other kinds are left alone"
    with pytest.raises(ImagemillError, match="dinov3_npy: being regenerated"):
        refuse_regenerating(ledger)


def test_second_request_continues_the_regeneration(root, ledger):
    regenerate(ledger, DINOV3.kind, "run")
    (row, *_) = ledger.files(DINOV3.kind).values()
    ledger.record_files([msgspec.structs.replace(row, model_key="newer", source="pixels")])

    assert not regenerate(ledger, DINOV3.kind, "run")
    assert "newer" in {row.model_key for row in ledger.files(DINOV3.kind).values()}


def test_regeneration_started_by_another_process_continues(root, ledger, monkeypatch):
    """Files made by the other process are not superseded."""

    @contextmanager
    def waited(ledger, kind, items, run_id):
        ledger.note_regeneration(kind, "under way")
        yield

    monkeypatch.setattr("imagemill.pipeline.stage2.regenerate.claimed", waited)

    assert not regenerate(ledger, DINOV3.kind, "run")
    assert SUPERSEDED not in {row.model_key for row in ledger.files(DINOV3.kind).values()}


def test_interrupted_start_of_a_regeneration_is_completed(root, ledger):
    """The kill is between the mark and the model's record. Otherwise the next run would refuse the new model."""
    ledger.supersede_files(DINOV3.kind, "begun")
    assert identity_of(root, DINOV3.kind) is not None

    assert resume(ledger, DINOV3.kind)

    assert identity_of(root, DINOV3.kind) is None


def test_mark_and_leftover_rows_are_removed_with_the_last_old_file(root, ledger):
    """A kill between a rename and the clean-up of the ledger leaves such a row."""
    regenerate(ledger, DINOV3.kind, "run")
    assert finish(ledger, store(root), ["a", "b"]) == []
    assert DINOV3.kind in ledger.regenerating()

    for (image_id, _), row in ledger.files(DINOV3.kind).items():
        ledger.record_files([msgspec.structs.replace(row, model_key="newer")])
        ledger.record_files([msgspec.structs.replace(row, stat=posix_signature(1, 1, 1), model_key=SUPERSEDED)])
        assert image_id in "ab"
    assert finish(ledger, store(root), ["a", "b"]) == []

    assert ledger.regenerating() == {}
    assert {row.model_key for row in ledger.files(DINOV3.kind).values()} == {"newer"}


def test_old_file_of_a_missing_image_is_reported_until_resolved(root, ledger):
    regenerate(ledger, DINOV3.kind, "run")

    assert finish(ledger, store(root), ["a"]) == ["b"]
    assert [(p.item, p.reason) for p in ledger.problems()] == [("b", "cannot_regenerate")]

    (root.derived / "dinov3" / "b.npy").unlink()
    assert finish(ledger, store(root), ["a"]) == []
    assert ledger.problems() == []


def test_regeneration_without_earlier_rows_cannot_be_cancelled(root, ledger):
    """An earlier release started it: nothing would prevent another model from writing to the folder."""
    regenerate(ledger, DINOV3.kind, "run")
    ledger._change("DELETE FROM superseded", ())

    with pytest.raises(ImagemillError, match="earlier model is not recorded"):
        cancel(ledger, DINOV3.kind, "run")
    assert DINOV3.kind in ledger.regenerating()


def test_regeneration_restarts_for_another_model(root, ledger):
    """The first model may have become unusable. Every file is replaced, so no models are mixed."""
    first = ModelIdentity(kind=DINOV3.kind, model="b", facts={"weights": "b"})
    assert regenerate(ledger, DINOV3.kind, "run", first)
    guard_identity(ledger, first)
    row = next(iter(ledger.files(DINOV3.kind).values()))
    ledger.record_files([msgspec.structs.replace(row, model_key=first.key, source="pixels")])
    assert not regenerate(ledger, DINOV3.kind, "run", first), "the same model continues"

    other = ModelIdentity(kind=DINOV3.kind, model="c", facts={"weights": "c"})
    assert regenerate(ledger, DINOV3.kind, "run", other)

    assert {row.model_key for row in ledger.files(DINOV3.kind).values()} == {SUPERSEDED}
    assert guard_identity(ledger, other) == other
