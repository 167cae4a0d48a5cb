"""Loss of `.imagemill/`: models are not mixed, preview vectors and withdrawals stay marked, and the loss is reported.

Spec: docs/spec/conventions.md#second-copies
"""

import shutil

import pytest

from imagemill.domain.embedding_specs import VAE
from imagemill.domain.layout import DataRoot
from imagemill.errors import ImagemillError
from imagemill.formats.npy import NpyStore
from imagemill.reading import ShardSet
from imagemill.store.ledger import Ledger
from imagemill.store.second_copy import NAME
from tests.helpers.commands import called
from tests.helpers.product import imagemill, photos, snapshot
from tests.helpers.stage2 import photos as small_photos
from tests.helpers.wiring import stub_every_kind


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    root = DataRoot(tmp_path_factory.mktemp("finished") / "data")
    photos(root.approved, 3)
    assert imagemill("run", "--data-root", root.path, stub=True).returncode == 0
    assert imagemill("withdraw", "photo0001", "--data-root", root.path, stub=True).returncode == 0
    return root


@pytest.fixture
def lost(finished, tmp_path):
    """A data root without `.imagemill/`, but with the second copies."""
    shutil.copytree(finished.path, tmp_path / "data")
    root = DataRoot(tmp_path / "data")
    shutil.rmtree(root.state)
    return root


def forget_copies(root):
    for folder in (root.derived, root.shards):
        (folder / ".imagemill.json").unlink()


def test_second_copy_prevents_the_use_of_another_model(lost):
    before = snapshot(lost.derived)
    lost.config_file.write_text('{"encoders": {"vae_latents": {"model": "newer"}}}')

    done = imagemill("run", "--data-root", lost.path, stub=True)

    assert done.returncode == 1
    assert "was lost; taken from .imagemill.json" in done.stderr
    assert "this run's model is not the one that made the existing files" in done.stdout + done.stderr
    assert snapshot(lost.derived) == before


def test_withdrawn_sample_stays_out_and_preview_stays_preview(lost):
    done = imagemill("run", "--data-root", lost.path, stub=True)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 withdrawn" in done.stderr
    with pytest.raises(ImagemillError, match="preview model"):
        ShardSet.open(lost.shards)
    assert set(ShardSet.open(lost.shards, allow_preview=True)) == {"photo0000", "photo0002"}


def test_files_of_a_preview_model_are_recognised_by_their_header_alone(lost):
    """Without ledger and second copy, a newly packed set is still marked as preview."""
    forget_copies(lost)
    shutil.rmtree(lost.shards)

    done = imagemill("run", "--data-root", lost.path, stub=True)

    assert done.returncode == 0, done.stdout + done.stderr
    with Ledger(lost.ledger, read_only=True) as ledger:
        assert ledger.model_keys(VAE.kind) == {"unknown preview"}
    with pytest.raises(ImagemillError, match="preview model"):
        ShardSet.open(lost.shards)


def test_real_model_replaces_files_that_a_preview_model_made(lost):
    """They are never adopted together with those of a real model."""
    forget_copies(lost)
    shutil.rmtree(lost.shards)
    models = ", ".join(f'"{kind}": {{"model": "real"}}' for kind in ("dinov3_npy", "vae_latents", "t5_hidden"))
    lost.config_file.write_text(f'{{"encoders": {{{models}}}}}')

    done = imagemill("run", "--data-root", lost.path, stub=True)

    assert done.returncode == 0, done.stdout + done.stderr
    store = NpyStore(lost.derived / VAE.folder, VAE)
    assert not any(store.is_preview(image_id) for image_id in store.listing())
    assert ShardSet.open(lost.shards)


def test_read_only_commands_report_the_lost_ledger(lost):
    for command in ("status", "verify"):
        done = imagemill(command, "--data-root", lost.path)
        assert done.returncode == 1
        assert "the ledger is lost" in done.stderr
        assert "imagemill repair" in done.stderr


def test_command_that_cannot_write_the_second_copy_fails_and_the_next_one_writes_it(data_root, monkeypatch):
    """Otherwise models and withdrawals would be lost with the ledger although the command reported success."""
    stub_every_kind(monkeypatch)
    small_photos(data_root, "a", size=(24, 24))
    (data_root.derived / NAME).mkdir(parents=True)

    done = called(data_root, "run")

    assert done.code == 1
    assert "the second copy of the settings cannot be written" in done.text
    assert "1 image seen: 1 embedded" in done.text
    (data_root.derived / NAME).rmdir()
    assert called(data_root, "run").code == 0
    assert (data_root.derived / NAME).is_file()
