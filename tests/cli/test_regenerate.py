"""Regeneration of all files of one kind with another model.

Spec: docs/spec/conventions.md#provenance, docs/spec/conventions.md#staleness, docs/spec/conventions.md#regeneration,
docs/spec/conventions.md#one-model-per-folder
"""

import json
import os
import signal
import time

import pytest

from imagemill.domain.embedding_specs import embedding_specs
from imagemill.pipeline.stage2.merge import STAGE1
from imagemill.pipeline.stage2.regenerate import regenerate
from imagemill.store.ledger import Ledger
from imagemill.store.second_copy import NAME
from tests.helpers.product import photos, product, snapshot, start


def made_files(root):
    """Records and arrays, without the second copy of the settings, which names the previous model."""
    return {path: state for path, state in snapshot(root.derived).items() if not path.endswith(NAME)}


def use_model(root, name, kind="vae_latents", **settings):
    root.config_file.write_text(json.dumps({"encoders": {kind: {"model": name, **settings}}}))


def model_keys(root, kind="vae_latents"):
    with Ledger(root.ledger) as ledger:
        return {row.model_key for row in ledger.files(kind).values()}


@pytest.fixture
def root(data_root):
    """Six images in shards, and a new model configured for one kind."""
    photos(data_root.approved, 6)
    product(data_root, "run")
    use_model(data_root, "newer")
    return data_root


def test_error_for_a_changed_model_names_the_command_to_regenerate(root):
    said = product(root, "run", code=1)

    assert "model is not the one that made the existing files" in said
    assert "--regenerate vae_latents" in said


@pytest.mark.parametrize("name", [pytest.param("vae_latents", marks=pytest.mark.soak), "vae"])
def test_exactly_the_files_of_that_kind_are_regenerated(root, name):
    before, old = snapshot(root.derived), model_keys(root)

    said = product(root, "stage2", "--regenerate", name)

    assert "vae_latents 6 made" in said
    assert "dinov3_npy 0 made in 0 model calls" in said
    assert "t5_hidden  0 made in 0 model calls" in said
    after = snapshot(root.derived)
    changed = {path for path in before if before[path] != after[path]} - {str(root.derived / NAME)}
    assert changed == {str(root.derived / "vae_latents" / f"photo{n:04d}.npy") for n in range(6)}
    assert len(model_keys(root)) == 1
    assert model_keys(root).isdisjoint(old)
    assert "6 samples" in product(root, "run")
    assert "nothing to do" in product(root, "run")


def making_anew(root):
    """A run of the earlier model that has replaced one of six deleted files and continues slowly."""
    made = root.derived / "vae_latents"
    for path in made.glob("*.npy"):
        path.unlink()
    use_model(root, "preview", batch_size=1)
    process = start("stage2", "--pass", "vae", "--data-root", root.path, IMAGEMILL_STUB_SLEEP=2.5)
    while not list(made.glob("*.npy")):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)
    return process


def test_regeneration_waits_for_a_run_that_writes_files_of_the_kind(root):
    """Its files would count as new ones, and one folder would contain two models.

    Spec: docs/spec/conventions.md#provenance
    """
    older = making_anew(root)
    use_model(root, "newer")

    said = product(root, "stage2", "--pass", "vae", "--regenerate", "vae")

    assert older.wait(timeout=60) == 0, older.communicate()[0]
    older.communicate()
    assert "vae_latents: waiting for run" in said
    assert "vae_latents 6 made" in said
    assert len(model_keys(root)) == 1


@pytest.mark.soak
def test_deleting_the_embeddings_waits_for_a_run_that_writes_some(root):
    """Otherwise files written after the deletion would have no recorded model."""
    with Ledger(root.ledger) as ledger:
        ledger.record_setting(STAGE1, "migrated")
    model_key = making_anew(root)

    said = product(root, "stage2", "--rollback", "--delete-embeddings")

    model_key.communicate(timeout=60)
    assert "vae_latents: waiting for run" in said
    assert not list(root.derived.glob("*/*.npy"))
    assert model_keys(root) == set()


def test_unfinished_regeneration_prevents_packing_and_the_next_run_continues_it(root):
    """A kind being regenerated stays marked until its last file is replaced."""
    said = product(root, "stage2", "--pass", "vae", "--regenerate", "vae", "--limit", "2")
    assert "vae_latents 2 made" in said

    assert "being regenerated" in product(root, "status")
    assert "vae_latents: being regenerated" in product(root, "shards", "--overwrite", code=1)
    assert "vae_latents: being regenerated" in product(root, "shards", "--dry-run", code=1)
    before = snapshot(root.derived)
    said = product(root, "run")
    assert "vae_latents 4 made" in said
    assert sum(before[path] == after for path, after in snapshot(root.derived).items() if "vae_latents" in path) == 2
    assert "being regenerated" not in product(root, "status")


def test_killed_regeneration_is_completed_by_the_same_command(root):
    """Files of the new model are not written twice."""
    use_model(root, "newer", batch_size=2)  # several calls: files are published between them
    folder = root.derived / "vae_latents"
    old = {path: path.stat().st_ino for path in folder.glob("*.npy")}
    process = start("stage2", "--regenerate", "vae", "--data-root", root.path, IMAGEMILL_STUB_SLEEP=2.5)
    while process.poll() is None and all(path.stat().st_ino == inode for path, inode in old.items()):
        time.sleep(0.02)
    assert process.poll() is None
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()

    new = {path for path, inode in old.items() if path.stat().st_ino != inode}
    said = product(root, "stage2", "--regenerate", "vae")

    assert f"vae_latents {6 - len(new)} made" in said
    assert "6 samples" in product(root, "run")
    assert len(model_keys(root)) == 1
    assert len({row for spec in embedding_specs() for row in model_keys(root, spec.kind)}) == 3


def test_same_model_can_regenerate_its_files(data_root):
    """For users who distrust the files: the bytes are the same, and each file takes a model call."""
    photos(data_root.approved, 3)
    product(data_root, "stage2")
    before = {path: data for path, (data, _) in made_files(data_root).items()}

    assert "t5_hidden  3 made" in product(data_root, "stage2", "--regenerate", "t5")

    assert {path: data for path, (data, _) in made_files(data_root).items()} == before


def test_file_of_a_missing_image_keeps_the_mark_until_the_user_resolves_it(root):
    """A folder never mixes two models, and a deleted source deletes no files, so the user must resolve it."""
    (root.approved / "photo0003.jpg").unlink()

    said = product(root, "stage2", "--regenerate", "vae", code=1)
    assert "cannot_regenerate" in said
    assert "photo0003" in said
    product(root, "shards", "--overwrite", code=1)

    (root.derived / "vae_latents" / "photo0003.npy").unlink()
    product(root, "run")
    assert "5 samples" in product(root, "status")


def test_regeneration_requires_the_pass_of_the_kind(root):
    assert "needs its pass" in product(root, "stage2", "--pass", "t5", "--regenerate", "vae", code=2)


def marked(root):
    with Ledger(root.ledger) as ledger:
        return ledger.regenerating()


def test_refused_regeneration_leaves_no_mark(root, tmp_path):
    """A missing model is detected before anything is marked, so packing remains possible."""
    use_model(root, str(tmp_path / "no such model"))
    before = model_keys(root)

    said = product(root, "stage2", "--regenerate", "vae", code=1)

    assert "no such model" in said
    assert marked(root) == {}
    assert model_keys(root) == before
    root.config_file.unlink()
    assert "nothing to do" in product(root, "run") or model_keys(root) == before


def test_cancelled_regeneration_changes_no_file(root):
    """Cancelling is possible until the first file has been replaced. The earlier model and packing then work again."""
    before, files = model_keys(root), made_files(root)
    with Ledger(root.ledger) as ledger:
        regenerate(ledger, "vae_latents", "killed at once")

    said = product(root, "stage2", "--regenerate", "vae", "--cancel")

    assert "6 files are valid again" in said
    assert (marked(root), model_keys(root)) == ({}, before)
    root.config_file.unlink()
    product(root, "run")
    assert made_files(root) == files


def test_regeneration_that_has_replaced_a_file_cannot_be_cancelled(root):
    product(root, "stage2", "--regenerate", "vae", "--limit", "1")

    said = product(root, "stage2", "--regenerate", "vae", "--cancel", code=1)

    assert "files have been replaced already" in said
    assert "vae_latents" in marked(root)
    assert "vae_latents 5 made" in product(root, "stage2")


def test_cancelling_without_a_regeneration_is_wrong_usage(root):
    assert "is not being regenerated" in product(root, "stage2", "--regenerate", "vae", "--cancel", code=2)
    assert "--cancel needs the kind" in product(root, "stage2", "--cancel", code=2)


def test_rollback_without_stage1_data_changes_nothing(root):
    before = snapshot(root.derived)

    said = product(root, "stage2", "--rollback", code=1)

    assert "never migrated from Stage 1" in said
    assert snapshot(root.derived) == before
