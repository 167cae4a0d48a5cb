"""The runs that the tests of both seeds look at: each is made once, each test asks its own question of it."""

import signal
import time

import pytest

from imagemill.domain.embedding_specs import DINOV3, T5, VAE
from imagemill.domain.layout import DataRoot
from tests.helpers.product import imagemill, photos, snapshot, start
from tests.helpers.spec_runs import (
    INTERRUPTED_IMAGES,
    NEW,
    Interrupted,
    Ran,
    ids_in,
    product,
    records,
    sample_pictures,
    stage1_root,
    unfinished,
)
from tests.helpers.stage1 import stage1_record, write_stage1
from tests.helpers.stage2 import embed


@pytest.fixture(scope="session")
def samples(tmp_path_factory) -> Ran:
    """Ten of eleven pictures, embedded by the real model classes with preview weights. Read only."""
    root = DataRoot(tmp_path_factory.mktemp("samples") / "data")
    sample_pictures(root.approved)
    done = imagemill("stage2", "--limit", 10, "--data-root", root.path)
    assert done.returncode == 0, done.stdout + done.stderr
    return Ran(root, done.stdout)


@pytest.fixture(scope="session")
def migrated(tmp_path_factory) -> Ran:
    """Stage 1 records that one command without any flag has migrated. Read only."""
    root, before = stage1_root(tmp_path_factory.mktemp("migrated") / "data")
    return Ran(root, product(root, "stage2"), before)


@pytest.fixture(scope="session")
def interrupted(tmp_path_factory) -> Interrupted:
    """Sixteen Stage 1 records with latents already, stopped while their hidden states were made. Read only."""
    root = DataRoot(tmp_path_factory.mktemp("interrupted") / "data")
    before = write_stage1(root, [stage1_record(n) for n in range(INTERRUPTED_IMAGES)])
    embed(root, DINOV3, VAE)
    process = start("stage2", "--data-root", root.path, IMAGEMILL_STUB_SLEEP=2)
    while process.poll() is None and not ids_in(root, T5):
        time.sleep(0.01)
    while_running = root.stage2_jsonl.read_bytes()
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=120)
    stopped = {
        "stopped_with": ids_in(root, T5),
        "stopped": snapshot(root.derived),
        "recorded": records(root),
        "left": unfinished(root).exists(),
    }
    bring_new_photos(root, tmp_path_factory.mktemp("new"))
    output = product(root, "stage2")
    return Interrupted(root, before, while_running, process.returncode, said, **stopped, output=output)


def bring_new_photos(root, folder):
    photos(folder, INTERRUPTED_IMAGES + len(NEW))
    for path in folder.iterdir():
        if path.stem in NEW:
            path.rename(root.approved / path.name)
