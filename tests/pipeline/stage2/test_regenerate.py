"""The mark on a kind whose files are all being replaced. Spec: docs/spec/conventions.md#provenance"""

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


def test_begun_regeneration_makes_every_file_a_job_and_forgets_the_model(root, ledger):
    assert regenerate(ledger, DINOV3.kind, "run")

    assert [job.image_id for job in plan_of(root, DINOV3, ledger).jobs] == ["a", "b"]
    assert identity_of(root, DINOV3.kind) is None
    assert not resume(ledger, VAE.kind), "other kinds are left alone"
    with pytest.raises(ImagemillError, match="dinov3_npy: being regenerated"):
        refuse_regenerating(ledger)


def test_asking_again_goes_on_and_does_not_begin_anew(root, ledger):
    regenerate(ledger, DINOV3.kind, "run")
    (row, *_) = ledger.files(DINOV3.kind).values()
    ledger.record_files([msgspec.structs.replace(row, maker="newer", source="pixels")])

    assert not regenerate(ledger, DINOV3.kind, "run")
    assert "newer" in {row.maker for row in ledger.files(DINOV3.kind).values()}


def test_regeneration_that_another_began_meanwhile_goes_on(root, ledger, monkeypatch):
    """Files that the other process has made are not superseded."""

    @contextmanager
    def waited(ledger, kind, items, run_id):
        ledger.note_regeneration(kind, "under way")
        yield

    monkeypatch.setattr("imagemill.pipeline.stage2.regenerate.claimed", waited)

    assert not regenerate(ledger, DINOV3.kind, "run")
    assert SUPERSEDED not in {row.maker for row in ledger.files(DINOV3.kind).values()}


def test_beginning_that_was_killed_is_completed(root, ledger):
    """Between the mark and the model's record: else the next run would refuse the new model."""
    ledger.supersede_files(DINOV3.kind, "begun")
    assert identity_of(root, DINOV3.kind) is not None

    assert resume(ledger, DINOV3.kind)

    assert identity_of(root, DINOV3.kind) is None


def test_mark_goes_with_the_last_old_file_and_takes_rows_of_replaced_ones_along(root, ledger):
    """A kill between a rename and the ledger's clean-up leaves such a row."""
    regenerate(ledger, DINOV3.kind, "run")
    assert finish(ledger, store(root), ["a", "b"]) == []
    assert DINOV3.kind in ledger.regenerating()

    for (image_id, _), row in ledger.files(DINOV3.kind).items():
        ledger.record_files([msgspec.structs.replace(row, maker="newer")])
        ledger.record_files([msgspec.structs.replace(row, stat=posix_signature(1, 1, 1), maker=SUPERSEDED)])
        assert image_id in "ab"
    assert finish(ledger, store(root), ["a", "b"]) == []

    assert ledger.regenerating() == {}
    assert {row.maker for row in ledger.files(DINOV3.kind).values()} == {"newer"}


def test_old_file_of_an_image_that_is_gone_is_named_until_it_is_decided(root, ledger):
    regenerate(ledger, DINOV3.kind, "run")

    assert finish(ledger, store(root), ["a"]) == ["b"]
    assert [(p.item, p.reason) for p in ledger.problems()] == [("b", "cannot_regenerate")]

    (root.derived / "dinov3" / "b.npy").unlink()
    assert finish(ledger, store(root), ["a"]) == []
    assert ledger.problems() == []


def test_regeneration_of_a_root_whose_earlier_rows_are_not_known_is_not_cancelled(root, ledger):
    """One that an earlier release began: nothing would keep another model out of the folder."""
    regenerate(ledger, DINOV3.kind, "run")
    ledger._change("DELETE FROM superseded", ())

    with pytest.raises(ImagemillError, match="earlier model is not recorded"):
        cancel(ledger, DINOV3.kind, "run")
    assert DINOV3.kind in ledger.regenerating()


def test_regeneration_begins_again_for_another_model(root, ledger):
    """If the first one cannot be used any more: every file is replaced, so nothing is mixed."""
    first = ModelIdentity(kind=DINOV3.kind, model="b", facts={"weights": "b"})
    assert regenerate(ledger, DINOV3.kind, "run", first)
    guard_identity(ledger, first)
    row = next(iter(ledger.files(DINOV3.kind).values()))
    ledger.record_files([msgspec.structs.replace(row, maker=first.key, source="pixels")])
    assert not regenerate(ledger, DINOV3.kind, "run", first), "the same model continues"

    other = ModelIdentity(kind=DINOV3.kind, model="c", facts={"weights": "c"})
    assert regenerate(ledger, DINOV3.kind, "run", other)

    assert {row.maker for row in ledger.files(DINOV3.kind).values()} == {SUPERSEDED}
    assert guard_identity(ledger, other) == other
