"""The npy files of one kind on disk, checked with the ledger's rows.

Spec: docs/spec/conventions.md#completion-and-identity
"""

import os

import numpy as np
import pytest

from imagemill import parts
from imagemill.domain.embedding_specs import DINOV3, VAE
from imagemill.formats.npy import NpyStore
from imagemill.store.ledger import Ledger
from imagemill.validation.files import embedding_files
from imagemill.validation.findings import collect
from tests.helpers.stage2 import stage2


@pytest.fixture
def root(data_root):
    stage2(data_root, "a", "b", size=(24, 24))
    return data_root


def check(root, spec=VAE, unchanged=frozenset()):
    store = NpyStore(root.derived / spec.folder, spec)
    with Ledger(root.ledger) as ledger:
        return collect(spec.folder, spec.kind, embedding_files(store, ledger, unchanged=unchanged))


def test_files_that_the_ledger_vouches_for_pass_without_being_read(root, monkeypatch):
    monkeypatch.setattr(NpyStore, "check", lambda *_: pytest.fail("read"))
    report = check(root)

    assert (report.passed, report.checked, report.findings) == (True, 2, [])


def test_touched_file_is_read_and_passes(root):
    os.utime(root.derived / VAE.folder / "a.npy", ns=(1, 1))

    assert check(root).findings == []


@pytest.mark.parametrize(
    ("array", "rule"),
    [
        (np.zeros((16, 3, 3), np.float32), "wrong_dtype"), (np.zeros((16, 3, 4), np.float16), "wrong_shape"),
        (np.full((16, 3, 3), -np.inf, np.float16), "non_finite"),
    ],
)  # fmt: skip
def test_file_that_is_not_what_its_contract_says_is_found(root, array, rule):
    np.save(root.derived / VAE.folder / "b.npy", array)

    report = check(root)

    assert [(f.rule, f.item, f.severity, f.file) for f in report.findings] == [(rule, "b", "error", VAE.folder)]
    assert report.findings[0].remedy
    assert check(root, DINOV3).passed


def test_cut_file_is_found(root):
    path = root.derived / VAE.folder / "a.npy"
    path.write_bytes(path.read_bytes()[:100])

    assert check(root).rules == {"truncated": 1}


def test_file_of_an_image_that_was_never_seen_is_a_warning(root):
    np.save(root.derived / VAE.folder / "stranger.npy", np.zeros(3))

    report = check(root)

    assert report.passed
    assert [(f.rule, f.item, f.severity) for f in report.findings] == [("unknown_image", "stranger", "warning")]


def test_file_that_cannot_be_read_is_a_finding(root, monkeypatch):
    """Disk errors, and files that are removed during the check."""
    os.utime(root.derived / VAE.folder / "a.npy", ns=(1, 1))

    def fail(self, image_id, *size):
        raise OSError(5, "input/output error")

    monkeypatch.setattr(NpyStore, "check", fail)
    assert check(root).rules == {"read_error": 1}


def test_folder_that_is_not_there_has_no_files(root):
    assert check(type(root)(root.path / "elsewhere")).checked == 0


def test_many_files_are_looked_up_in_parts(root, monkeypatch):
    """The findings are in order of the images, as if all files had been looked up at once."""
    monkeypatch.setattr(parts, "IMAGES_TOGETHER", 1)
    folder = root.derived / VAE.folder
    np.save(folder / "aa.npy", np.zeros(3))
    np.save(folder / "c.npy", np.zeros(3))
    (folder / "b.npy").write_bytes((folder / "b.npy").read_bytes()[:100])

    report = check(root)

    found = [(f.rule, f.item) for f in report.findings]
    assert (report.checked, found) == (4, [("unknown_image", "aa"), ("truncated", "b"), ("unknown_image", "c")])


@pytest.mark.parametrize("at_once", [1, 16_384])
def test_name_that_is_not_text_is_that_of_an_unknown_image(root, monkeypatch, at_once):
    monkeypatch.setattr(parts, "IMAGES_TOGETHER", at_once)
    name = os.fsdecode(b"\xff")
    np.save(root.derived / VAE.folder / f"{name}.npy", np.zeros(3))

    assert [(f.rule, f.item) for f in check(root).findings] == [("unknown_image", name)]


def test_only_files_that_have_not_been_compared_are_looked_up(root):
    """All are counted. The rows of a few files are looked up by their ids, as those between two ids are."""
    for name in "cdefghijkl":
        np.save(root.derived / VAE.folder / f"{name}.npy", np.zeros(3))
    np.save(root.derived / VAE.folder / "b.npy", np.zeros(3))
    name = os.fsdecode(b"\xff")
    np.save(root.derived / VAE.folder / f"{name}.npy", np.zeros(3))

    few, many = check(root, unchanged=set("acdefghijkl")), check(root, unchanged=set("hijkl"))

    assert (few.checked, few.rules, many.checked, many.rules) == (
        13, {"wrong_dtype": 1, "unknown_image": 1}, 13, {"wrong_dtype": 1, "unknown_image": 6},
    )  # fmt: skip
    assert check(root, unchanged={*"abcdefghijkl", name}).findings == []
