"""Captions by a worker that sees no folder, with the worker in this process: what is sent, and what comes back."""

import pickle
from functools import partial

import pytest

from imagemill.config import CaptionerSettings
from imagemill.errors import ModelMismatch
from imagemill.inputs.survey import survey
from imagemill.pipeline.remote import BatchEnded, BatchFailed, NodeWorker, Parcel
from imagemill.pipeline.stage2.caption import CaptionWorker, caption_jobs
from imagemill.pipeline.stage2.caption_remote import CaptionPass
from imagemill.store.ledger import Ledger
from imagemill.store.provenance import ModelIdentity
from tests.helpers.stage2 import picture


class Sizes:
    """A captioner that says how large a picture is."""

    def __init__(self, prompt):
        self.prompt = prompt

    def caption(self, images):
        return [f"{self.prompt} {image.width}x{image.height}" for image in images]

    def close(self):
        pass


def make(settings, prompt, threads, preview_root):
    return Sizes(prompt)


def identify(settings, prompt, threads, preview_root):
    return ModelIdentity(kind="captioner", model="m", facts={"prompt": prompt})


def task_of(options, **gpus):
    return CaptionPass(options, decode_threads=1, gpus=gpus, identify=identify)


@pytest.fixture
def options(data_root):
    for number in range(5):
        picture(data_root.approved / f"i{number}.png", size=(32 + 8 * number, 24))
    (data_root.approved / "broken.png").write_bytes(b"no picture")
    return {
        "approved": data_root.approved,
        "captioner": partial(make, CaptionerSettings(enabled=True), "a picture of", 1, data_root.preview_models),
        "images_per_call": 2,
        "decode_threads": 1,
        "decode_ahead_pixels": 1 << 26,
        "color": "srgb",
    }


@pytest.fixture
def jobs(data_root, options):
    with Ledger(data_root.ledger) as ledger:
        scan = survey(data_root.approved, ledger)
        return caption_jobs(scan.sources, scan, ledger, preview=False)


def test_rows_are_those_of_a_worker_that_sees_the_folder(options, jobs):
    """Spec: docs/spec/engines.md#what-travels"""
    task = task_of(options)

    parcels = [task.send(job) for job in jobs]
    assert all(isinstance(parcel, Parcel) for parcel in parcels)
    worker = NodeWorker(pickle.dumps(task.recipe))
    about = worker.about()
    assert not isinstance(about, BatchFailed)
    assert task.fits(about)
    task.agree(about)
    sent = pickle.loads(pickle.dumps([parcel.payload for parcel in parcels]))
    parts = [part for part in worker.run(sent) if not isinstance(part, BatchEnded)]
    rows = [task.receive(row) for part in parts for row in part]

    here = CaptionWorker(**{**options, "captioner": lambda: Sizes("a picture of")})
    assert sorted(rows, key=task.name_of) == sorted(here.stream(jobs), key=task.name_of)
    assert {row.outcome for row in rows} == {"captioned", "refused"}


def test_image_that_is_gone_fails_here(options, jobs, data_root):
    for path in data_root.approved.iterdir():
        path.unlink()
    task = task_of(options)

    rows = [task.send(job) for job in jobs]

    assert {(row.outcome, row.reason) for row in rows} == {("failed", "read_error")}


def test_captioner_that_is_not_that_of_this_machine_is_refused(options):
    """Spec: docs/spec/engines.md#reference"""
    task = task_of(options)
    other = partial(make, CaptionerSettings(enabled=True), "another prompt", 1, options["approved"])
    about = task_of({**options, "captioner": other}).recipe().about()

    assert not task.fits(about)
    with pytest.raises(ModelMismatch, match="it differs in prompt"):
        task.agree(about)


def test_gpus_of_the_captioner_have_their_own_entry(options):
    assert task_of(options, captioner=0.5, vae=1).gpus == 0.5
    assert task_of(options, vae=1).recipe.settings.device == "cpu"
