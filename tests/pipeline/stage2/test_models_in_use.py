"""pipeline/stage2/models_in_use.py: the models of existing files, as text. Spec: docs/spec/conventions.md#provenance"""

from types import SimpleNamespace

import pytest

from imagemill.domain.embedding_specs import DINOV3, VAE
from imagemill.pipeline.stage2 import models_in_use
from imagemill.pipeline.stage2.models_in_use import (
    PREVIEW_TEXT,
    ProgressOfBatches,
    file_model_text,
    model_in_use,
    model_lines,
    model_text,
)
from imagemill.pipeline.stage2.regenerate import regenerate
from imagemill.store.ledger import Ledger
from imagemill.store.provenance import UNKNOWN, UNKNOWN_PREVIEW, ModelIdentity
from tests.helpers.stage2 import embed, photos


@pytest.fixture
def ledger(data_root):
    with Ledger(data_root.ledger) as ledger:
        yield ledger


def identity(**given):
    return ModelIdentity(kind=DINOV3.kind, model="facebook/dinov3", facts={"weights": "x"}, **given)


def test_files_of_a_real_model_need_no_note(data_root, ledger):
    photos(data_root, "a")
    embed(data_root, DINOV3, model="facebook/dinov3")

    used = model_in_use(ledger, DINOV3.kind)
    assert (used.model, used.notes) == ("facebook/dinov3", [])
    assert list(model_lines(ledger)) == []


def test_files_of_a_preview_model_have_a_note(data_root, ledger):
    photos(data_root, "a")
    embed(data_root, DINOV3)

    assert model_in_use(ledger, DINOV3.kind).notes == [PREVIEW_TEXT]
    assert list(model_lines(ledger)) == [f"  model      dinov3_npy: {PREVIEW_TEXT}"]


def test_unfinished_regeneration_is_counted_until_its_last_file(data_root, ledger):
    photos(data_root, "a", "b")
    embed(data_root, VAE, model="first")
    regenerate(ledger, VAE.kind, "run")

    used = model_in_use(ledger, VAE.kind)
    assert used.regeneration
    assert used.regeneration.startswith("regeneration not finished: 0 of 2 files replaced")
    assert "`imagemill stage2`" in used.notes[0]


@pytest.mark.parametrize(("seconds", "counts"), [(0.001, 100), (0.04, 5)])
def test_long_count_is_not_repeated_for_each_batch(ledger, monkeypatch, seconds, counts):
    """At a million files a count takes a fifth of a second, and the model a twentieth for a batch."""
    now, counted = 0.0, 0

    def progress(ledger, kind):
        nonlocal now, counted
        now, counted = now + seconds, counted + 1
        return f"count {counted}"

    monkeypatch.setattr(models_in_use, "regeneration_progress", progress)
    monkeypatch.setattr(models_in_use, "time", SimpleNamespace(monotonic=lambda: now))
    batches = ProgressOfBatches(VAE.kind)

    for _ in range(100):
        now += 0.04
        assert batches.text(ledger) == f"count {counted}"
    assert counted == counts


def test_kind_without_files_has_no_model(ledger):
    used = model_in_use(ledger, DINOV3.kind)
    assert (used.model, used.notes) == ("none recorded", [])


def test_model_of_a_file_is_that_of_its_own_row():
    real = identity(revision="0123456789abcdef")

    assert model_text(real) == "facebook/dinov3 at revision 0123456789ab"
    assert file_model_text(real.key, real) == model_text(real)
    assert file_model_text(UNKNOWN, real) == UNKNOWN
    assert file_model_text(UNKNOWN_PREVIEW, real) == file_model_text(UNKNOWN_PREVIEW, None) == PREVIEW_TEXT
    assert model_text(identity(preview=True)) == PREVIEW_TEXT
