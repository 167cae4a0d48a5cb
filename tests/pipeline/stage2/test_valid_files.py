"""Files that curation uses: valid and current according to the ledger.

Spec: docs/spec/conventions.md#completion-and-identity
"""

import os

import msgspec
import numpy as np
import pytest

from imagemill.domain.embedding_specs import DINOV3, VAE
from imagemill.formats.npy import NpyStore
from imagemill.fs.fingerprints import file_signature, fingerprint
from imagemill.pipeline.stage2.valid_files import current_files, measured
from imagemill.store.ledger import Ledger
from imagemill.store.provenance import UNKNOWN
from tests.helpers.stage2 import embed, photos, picture


@pytest.fixture
def root(data_root):
    photos(data_root, "b", "a")
    embed(data_root, DINOV3)
    return data_root


def look(root):
    with Ledger(root.ledger) as ledger:
        return current_files(DINOV3, root.derived, ledger)


def npy(root, image_id):
    return root.derived / DINOV3.folder / f"{image_id}.npy"


def test_files_come_in_order_of_id_with_the_fingerprint_of_their_bytes(root):
    found = look(root)

    assert [file.image_id for file in found.files] == ["a", "b"]
    assert found.files[0].content == fingerprint(npy(root, "a").read_bytes())
    assert found.left_out == {}


def test_file_that_matches_its_ledger_row_is_not_opened(root, monkeypatch):
    monkeypatch.setattr(NpyStore, "check", lambda *_: pytest.fail("read"))

    assert len(look(root).files) == 2


def test_valid_file_without_a_ledger_row_is_adopted(root):
    """The file is kept, its model is recorded as unknown, and it is not read again.

    Spec: docs/spec/conventions.md#adoption
    """
    np.save(npy(root, "a"), np.ones(1024, np.float32))

    assert len(look(root).files) == 2
    with Ledger(root.ledger) as ledger:
        model_keys = {row.model_key for row in ledger.files(DINOV3.kind, ["a"]).values()}
    assert UNKNOWN in model_keys


def test_copied_folder_keeps_its_fingerprints_and_model_keys(root):
    before = [file.content for file in look(root).files]
    for image_id in "ab":
        data = npy(root, image_id).read_bytes()
        npy(root, image_id).unlink()
        npy(root, image_id).write_bytes(data)

    assert [file.content for file in look(root).files] == before
    with Ledger(root.ledger) as ledger:
        assert UNKNOWN not in {row.model_key for row in ledger.files(DINOV3.kind).values()}


def test_file_made_from_an_earlier_image_is_left_out(root):

    picture(root.approved / "a.png")
    embed(root, VAE)

    assert look(root).left_out == {"a": "stale"}


def test_old_file_of_a_kind_being_regenerated_is_left_out(root):
    with Ledger(root.ledger) as ledger:
        ledger.supersede_files(DINOV3.kind, "begun")

    assert look(root).left_out == {"a": "superseded", "b": "superseded"}


def test_image_without_a_file_and_file_without_an_image_are_left_out(root):
    npy(root, "a").unlink()
    np.save(npy(root, "stranger"), np.ones(1024, np.float32))

    assert look(root).left_out == {"a": "missing_file", "stranger": "unknown_image"}


def test_file_of_a_missing_image_is_kept(root):
    """A missing source makes nothing stale. Spec: docs/spec/conventions.md#completion-and-identity"""
    (root.approved / "a.png").unlink()

    assert len(look(root).files) == 2


def test_reading_keeps_the_order_and_skips_invalid_arrays(root):
    found = look(root)
    stat = os.stat(npy(root, "a"))
    np.save(npy(root, "a"), np.zeros(1024, np.float64))

    read = list(measured(found, found.files[::-1], lambda array, path: (path.stem, array.shape), threads=2))

    assert [(file.image_id, result) for file, result in read] == [("b", ("b", (1024,)))]
    assert found.left_out == {"a": "damaged"}, "not the recorded bytes, before anything else"
    assert stat.st_size != os.stat(npy(root, "a")).st_size


def test_recorded_file_of_another_shape_is_left_out(root):
    """Its bytes match the recorded ones, but they are not an array of the kind."""
    array = np.zeros(512, np.float32)
    np.save(npy(root, "a"), array)
    with Ledger(root.ledger) as ledger:
        (row,) = ledger.files(DINOV3.kind, ["a"]).values()
        stat = file_signature(npy(root, "a"))
        ledger.record_files([msgspec.structs.replace(row, stat=stat, content=fingerprint(npy(root, "a").read_bytes()))])
    found = look(root)

    read = list(measured(found, found.files, lambda array, path: array.shape, threads=2))

    assert [file.image_id for file, _ in read] == ["b"]
    assert found.left_out == {"a": "wrong_shape"}
