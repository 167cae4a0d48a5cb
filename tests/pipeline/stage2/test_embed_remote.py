"""An embedding pass whose worker sees no folder, with the worker in this process: what is sent, checked and staged."""

import pickle
import shutil
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from imagemill.domain.embedding_specs import DINOV3, T5, VAE
from imagemill.domain.layout import DataRoot
from imagemill.errors import ModelMismatch
from imagemill.formats.npy import NpyStore
from imagemill.fs.folders import SentFolder
from imagemill.pipeline.remote import BatchEnded, NodeWorker, Parcel
from imagemill.pipeline.stage2.embed_remote import EmbedPass
from imagemill.pipeline.stage2.publish import publish
from imagemill.store.ledger import Ledger
from tests.helpers.passes import run_pass
from tests.helpers.stage2 import models_of, photos, plan_of, worker_of
from tests.helpers.stubs import StubEncoder

SPECS = (DINOV3, VAE, T5)


@pytest.fixture(autouse=True)
def stub_encoders(monkeypatch):
    monkeypatch.setattr("imagemill.domain.embedding_specs.EmbeddingSpec.encoder_class", lambda self: StubEncoder)


def task_of(root, spec, **options):
    return EmbedPass(
        {
            "spec": spec.requested(spec.settings_class()), "approved": root.approved,
            "store": NpyStore(root.derived / spec.folder, spec), "recorded_models": models_of(root, spec.kind),
            "preview_root": root.preview_models, "settings": spec.settings_class(), "threads": 1,
            "decode_ahead_pixels": 1 << 26, "empty_captions": root.empty_captions, **options,
        },
        decode_threads=1, gpus={},
    )  # fmt: skip


def work(task, jobs, change=lambda row: row):
    """Send the jobs, let a worker make what it needs, and return the rows."""
    made = [task.send(job) for job in jobs]
    worker = NodeWorker(pickle.dumps(task.recipe))
    about = worker.about()
    task.agree(about)
    parcels = pickle.loads(pickle.dumps([each.payload for each in made if isinstance(each, Parcel)]))
    parts = [part for part in worker.run(parcels) if not isinstance(part, BatchEnded)]
    rows = pickle.loads(pickle.dumps([row for part in parts for row in part]))
    return [each for each in made if not isinstance(each, Parcel)] + [task.receive(change(row)) for row in rows]


def run(root, spec, change=lambda row: row, **options):
    with Ledger(root.ledger) as ledger:
        task = task_of(root, spec, **options)
        rows = work(task, plan_of(root, spec, ledger).jobs, change)
        for _ in publish(rows, task._store, ledger):
            pass
    return rows


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.kind)
def test_files_and_rows_are_those_of_a_worker_that_sees_the_folder(data_root, tmp_path, spec):
    """Spec: docs/spec/engines.md#what-travels"""
    here = DataRoot(tmp_path / "here")
    photos(data_root, "a", "b", "c")
    shutil.copytree(data_root.approved, here.approved)

    rows = run(data_root, spec)
    with Ledger(here.ledger) as ledger:
        run_pass(worker_of(here, spec), plan_of(here, spec, ledger).jobs, ledger)

    def state(root):
        with Ledger(root.ledger) as ledger:
            files = ledger.files(spec.kind, ["a", "b", "c"])
            sources = ledger.sources(["a", "b", "c"])
            assert len(files) == len(sources) == 3
        contents = {path.name: path.read_bytes() for path in (root.derived / spec.folder).iterdir()}
        facts = {row.image_id: (row.source, row.content, row.model_key) for row in files.values()}
        return contents, facts, {i: (row.fingerprint, row.height, row.width) for i, row in sources.items()}

    assert {row.outcome for row in rows} == {"computed"}
    assert state(data_root) == state(here)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.kind)
def test_file_that_exists_is_not_sent(data_root, spec):
    """Spec: docs/spec/engines.md#what-travels"""
    photos(data_root, "a", "b")
    run(data_root, spec)
    with Ledger(data_root.ledger) as ledger:
        jobs = plan_of(data_root, spec, ledger).jobs
        assert jobs == []
        ledger._db.execute("DELETE FROM files")
        jobs = plan_of(data_root, spec, ledger).jobs

    rows = [task_of(data_root, spec).send(job) for job in jobs]

    assert {row.outcome for row in rows} == {"adopted"}


def test_image_of_a_caption_is_sent_only_if_its_facts_are_unknown(data_root):
    """Spec: docs/spec/engines.md#what-travels"""
    photos(data_root, "a")
    with Ledger(data_root.ledger) as ledger:
        (job,) = plan_of(data_root, T5, ledger).jobs

    unknown = task_of(data_root, T5).send(job)
    run(data_root, DINOV3)
    with Ledger(data_root.ledger) as ledger:
        (job,) = plan_of(data_root, T5, ledger).jobs
    known = task_of(data_root, T5).send(job)

    assert unknown.payload.image.tobytes() == (data_root.approved / "a.png").read_bytes()
    assert known.payload.image is None


def test_what_travels_names_no_folder(data_root):
    """Spec: docs/spec/engines.md#what-travels"""
    photos(data_root, "a")
    with Ledger(data_root.ledger) as ledger:
        (job,) = plan_of(data_root, VAE, ledger).jobs

    task = task_of(data_root, VAE)
    parcel = task.send(replace(job, known=(), present=None))

    assert str(data_root.path).encode() not in pickle.dumps(parcel.payload)


@pytest.mark.parametrize(
    ("array", "reason"),
    [
        (np.zeros(3, np.float32), "wrong_shape"),
        (np.zeros(1024, np.float16), "wrong_shape"),
        (np.full(1024, np.nan, np.float32), "non_finite"),
    ],
)
def test_array_that_is_not_what_the_kind_stores_is_refused(data_root, array, reason):
    """Spec: docs/spec/engines.md#what-travels"""
    photos(data_root, "a")

    (row,) = run(data_root, DINOV3, change=lambda row: replace(row, array=array))

    assert (row.outcome, row.reason) == ("failed", reason)
    assert not list((data_root.derived / DINOV3.folder).iterdir())


def test_worker_that_changes_its_model_ends_the_pass(data_root, monkeypatch):
    """Spec: docs/spec/engines.md#reference"""
    photos(data_root, "a")

    def change(row):
        other = msgspec.structs.replace(row.identity, facts={"stub": "another"})
        return replace(row, identity=other)

    with pytest.raises(ModelMismatch, match="a worker changed its model"):
        run(data_root, DINOV3, change=change)
    assert not list((data_root.derived / DINOV3.folder).iterdir())


def test_broken_image_is_refused_by_the_worker(data_root):
    (data_root.approved / "a.png").write_bytes(b"no picture")

    (row,) = run(data_root, DINOV3)

    assert (row.outcome, row.reason) == ("refused", "undecodable")


def test_empty_caption_is_kept_here(data_root):
    photos(data_root, "a")

    run(data_root, T5)

    (state,) = data_root.empty_captions.iterdir()
    assert state.name.startswith("t5_hidden-")


def test_file_that_was_not_sent_does_not_exist():
    folder = SentFolder({"a.png": b"data"})

    assert (folder / "a.png").open().read() == b"data"
    with pytest.raises(FileNotFoundError):
        folder / "b.png"
