"""Model captions for images without a caption.

Spec: docs/spec/conventions.md#staleness, docs/spec/stage2.md#caption-sources
"""

import json
import os

import pytest

from imagemill.errors import ModelUnusable
from imagemill.fs.fingerprints import posix_signature
from imagemill.inputs.survey import survey
from imagemill.models import CAPTIONER
from imagemill.pipeline.stage2.caption import (
    CaptionJob,
    CaptionWorker,
    caption_jobs,
    forget_problems,
    keep_captions,
    look_again,
    lost_caption,
)
from imagemill.pipeline.stage2.image_metadata import adopt_captions, complete_facts, note_missing_captions
from imagemill.store.ledger import FROM_CAPTIONER, FROM_PREVIEW, FROM_PREVIEW_RECORD, FROM_RECORD, Ledger
from imagemill.store.provenance import ModelIdentity
from tests.helpers.stage2 import photos, picture, record_identity_of, record_of, surveyed, write_text


class Model:
    """A captioner with given answers, or "a picture" and the size. `fails` maps a batch to the error to raise."""

    def __init__(self, *answers, fails=None):
        self.answers, self.fails, self.batches, self.closed = list(answers), fails, [], False

    def caption(self, images):
        self.batches.append(len(images))
        if self.fails and (error := self.fails(images)):
            raise error
        return [self.answers.pop(0) if self.answers else f"a picture\n of  {image.size}" for image in images]

    def close(self):
        self.closed = True


@pytest.fixture
def ledger(data_root):
    with Ledger(data_root.ledger) as ledger:
        yield ledger


def jobs(root, ledger, *, preview=False, replacing=None):
    scan = survey(root.approved, ledger)
    return caption_jobs(scan.sources, scan, ledger, preview=preview, replacing=replacing and {replacing})


def run(root, ledger, model, *, preview=False, replacing=None, model_key="key", images_per_call=8):
    asked = jobs(root, ledger, preview=preview, replacing=replacing)
    worker = CaptionWorker(approved=root.approved, captioner=lambda: model, images_per_call=images_per_call)
    counts = keep_captions(worker.stream(asked), ledger, model_key=model_key, preview=preview)
    worker.close()
    return dict(counts)


def texts(ledger):
    return {image_id: row.text for image_id, row in ledger.captions().items()}


def ids_of_problems(ledger):
    return [problem.item for problem in ledger.problems() if problem.asset == CAPTIONER]


def ids(found):
    return [job.image_id for job in found]


# ---- which images


def test_only_images_without_a_caption_are_captioned(data_root, ledger):
    photos(data_root, "a")
    photos(data_root, "b", "c", captions=False)
    (data_root.approved / "c.txt").write_text(" \n ")

    assert ids(jobs(data_root, ledger)) == ["b", "c"]
    assert run(data_root, ledger, Model()) == {"captioned": 2}

    assert texts(ledger) == {"a": "noise called a", "b": "a picture of (32, 24)", "c": "a picture of (32, 24)"}
    assert ledger.captions()["b"].origin == FROM_CAPTIONER
    assert jobs(data_root, ledger) == []


def test_new_sidecar_replaces_the_model_caption_for_good(data_root, ledger):
    photos(data_root, "a", captions=False)
    run(data_root, ledger, Model())
    (data_root.approved / "a.txt").write_text("what I see")

    assert jobs(data_root, ledger, replacing="another") == []
    assert texts(ledger) == {"a": "what I see"}


def test_caption_is_regenerated_for_a_replaced_image_and_kept_for_a_touched_one(data_root, ledger):
    photos(data_root, "a", "b", captions=False)
    run(data_root, ledger, Model("one", "two"))
    picture(data_root.approved / "a.png")
    os.utime(data_root.approved / "b.png", ns=(1, 1))
    model = Model("three")

    assert run(data_root, ledger, model) == {"captioned": 1, "kept": 1}
    assert model.batches == [1]
    assert texts(ledger) == {"a": "three", "b": "two"}
    assert jobs(data_root, ledger) == []


def test_caption_of_a_replaced_image_is_outdated_without_a_captioner(data_root, ledger):
    """Spec: docs/spec/conventions.md#staleness"""
    photos(data_root, "a", "b", "mine", captions=False)
    run(data_root, ledger, Model("one", "two", "three"))
    (data_root.approved / "mine.txt").write_text("as I see it")
    old = (data_root.approved / "a.png").read_bytes()
    for image_id in ("a", "mine"):
        picture(data_root.approved / f"{image_id}.png")
    os.utime(data_root.approved / "b.png", ns=(1, 1))
    scan = survey(data_root.approved, ledger)
    assert ledger.outdated_captions() == set(), "no pass has opened it yet"

    look_again(scan.sources, scan, ledger, data_root.approved)

    assert ledger.outdated_captions() == {"a"}
    assert texts(ledger) == {"b": "two", "mine": "as I see it"}
    assert [image_id for image_id, _, _ in ledger.facts()] == ["a", "b", "mine"], "its record follows the image's size"
    note_missing_captions(scan, ledger)
    (problem,) = [p for p in ledger.problems(["a"]) if p.reason == "missing_caption"]
    assert "for an earlier image of this name" in problem.detail

    (data_root.approved / "a.png").write_bytes(old)
    scan = survey(data_root.approved, ledger)
    look_again(scan.sources, scan, ledger, data_root.approved)
    assert texts(ledger)["a"] == "one"


def test_outdated_caption_of_a_replaced_image_stays_in_its_record(data_root, ledger):
    photos(data_root, "a", captions=False)
    run(data_root, ledger, Model("one"))
    write_text(data_root.stage2_jsonl, json.dumps(record_of("a", caption="one")))
    picture(data_root.approved / "a.png")
    scan = survey(data_root.approved, ledger)
    look_again(scan.sources, scan, ledger, data_root.approved)

    adopt_captions(surveyed(data_root, ledger), ledger)

    assert texts(ledger) == {}
    assert ids(jobs(data_root, ledger)) == ["a"]


def test_real_model_replaces_preview_captions_and_never_vice_versa(data_root, ledger):
    photos(data_root, "a", captions=False)
    run(data_root, ledger, Model("preview"), preview=True)
    assert ledger.captions()["a"].origin == FROM_PREVIEW
    assert ledger.preview_captions() == {"a"}
    assert jobs(data_root, ledger, preview=True) == []

    assert run(data_root, ledger, Model("real")) == {"captioned": 1}

    assert (texts(ledger), ledger.preview_captions()) == ({"a": "real"}, set())
    assert jobs(data_root, ledger, preview=True) == []


def test_another_captioner_replaces_captions_only_on_request(data_root, ledger):
    photos(data_root, "a", "b", captions=False)
    run(data_root, ledger, Model("one", "two"), model_key="old")

    assert jobs(data_root, ledger) == []
    assert ids(jobs(data_root, ledger, replacing="new")) == ["a", "b"]
    run(data_root, ledger, Model("three", "four"), model_key="new", replacing="new")
    assert texts(ledger) == {"a": "three", "b": "four"}
    assert jobs(data_root, ledger, replacing="new") == []


def test_undecodable_image_is_not_captioned(data_root, ledger):
    photos(data_root, "a", captions=False)
    (data_root.approved / "b.png").write_bytes(b"no image")
    scan = survey(data_root.approved, ledger)
    complete_facts(data_root.approved, scan, ledger)

    assert ids(jobs(data_root, ledger)) == ["a"]


# ---- the worker


def test_first_image_is_a_batch_of_one_before_full_batches(data_root, ledger):
    photos(data_root, *"abcdef", captions=False)
    model = Model()

    run(data_root, ledger, model, images_per_call=3)

    assert model.batches == [1, 3, 2]
    assert model.closed


def test_only_the_undecodable_image_is_refused(data_root, ledger):
    photos(data_root, "a", "c", captions=False)
    (data_root.approved / "b.png").write_bytes(b"no image")

    assert run(data_root, ledger, Model()) == {"captioned": 2, "refused": 1}
    (problem,) = [p for p in ledger.problems() if p.asset == CAPTIONER]
    assert (problem.item, problem.outcome, problem.reason) == ("b", "refused", "undecodable")


def test_batch_out_of_memory_is_halved_until_one_image_fails_alone(data_root, ledger):
    photos(data_root, *"abcd", captions=False)
    photos(data_root, "e", captions=False, size=(64, 64))

    def full(images):
        large = any(image.size == (64, 64) for image in images)
        return MemoryError("too much") if len(images) > 2 or large else None

    model = Model(fails=full)
    assert run(data_root, ledger, model) == {"captioned": 4, "failed": 1}
    (problem,) = ledger.problems(["e"])
    assert (problem.asset, problem.outcome, problem.reason) == (CAPTIONER, "failed", "out_of_memory")
    assert model.batches == [1, 4, 2, 2, 1, 1]

    assert run(data_root, ledger, Model("at last")) == {"captioned": 1}
    assert ledger.problems(["e"]) == []


def test_blank_answer_is_a_failure(data_root, ledger):
    photos(data_root, "a", "b", captions=False)

    assert run(data_root, ledger, Model("  \n ", "b")) == {"failed": 1, "captioned": 1}
    assert texts(ledger) == {"b": "b"}


def problems(ledger):
    return {p.item: p.reason for p in ledger.problems() if p.asset == CAPTIONER}


def test_model_that_fails_every_image_stops_captioning_and_fails_pending_images(data_root, ledger):
    """It stops after three images, because the first one may be one that no model accepts.

    Spec: docs/spec/conventions.md#refused-and-failed
    """
    photos(data_root, *"abcde", captions=False)
    model = Model(fails=lambda images: RuntimeError("no kernel image"))

    assert run(data_root, ledger, model) == {"failed": 5}

    assert model.batches == [1, 1, 1]
    assert problems(ledger) == dict.fromkeys("abc", "model_error") | dict.fromkeys("de", "captioner_unusable")
    assert all("no kernel image" in problem.detail for problem in ledger.problems(["c", "e"]))


def test_model_that_cannot_be_loaded_fails_each_pending_image(data_root, ledger):
    photos(data_root, "a", "b", captions=False)
    made = []

    def load():
        made.append(1)
        raise ModelUnusable("no such device")

    worker = CaptionWorker(approved=data_root.approved, captioner=load)
    rows = list(worker.stream(jobs(data_root, ledger)))
    worker.close()

    assert [(row.outcome, row.reason, row.detail) for row in rows] == [
        ("failed", "captioner_unusable", "no such device")
    ] * 2
    assert len(made) == 1


def test_blank_answers_do_not_stop_captioning(data_root, ledger):
    photos(data_root, *"abcde", captions=False)

    assert run(data_root, ledger, Model(*" " * 4, "at last")) == {"failed": 4, "captioned": 1}

    assert problems(ledger) == dict.fromkeys("abcd", "blank_answer")


def test_failed_images_come_last_in_the_next_run(data_root, ledger):
    """Otherwise the same three images would stop every run before the other images are captioned."""
    photos(data_root, *"abcd", captions=False, size=(64, 64))
    photos(data_root, "e", captions=False)
    model = Model(fails=lambda images: RuntimeError("no") if images[0].size == (64, 64) else None)
    assert run(data_root, ledger, model) == {"failed": 5}

    assert ids(jobs(data_root, ledger)) == ["d", "e", "a", "b", "c"]
    assert run(data_root, ledger, model) == {"failed": 4, "captioned": 1}

    assert texts(ledger).keys() == {"e"}


def test_model_is_not_loaded_without_work(data_root, ledger):
    photos(data_root, "a", captions=False)
    (data_root.approved / "b.png").write_bytes(b"no image")
    run(data_root, ledger, Model())
    os.utime(data_root.approved / "a.png", ns=(1, 1))

    def never():
        raise AssertionError("loaded")

    worker = CaptionWorker(approved=data_root.approved, captioner=never)
    assert [row.outcome for row in worker.stream(jobs(data_root, ledger))] == ["kept"]
    worker.close()


# ---- the ledger


def test_finished_captions_are_kept_if_the_run_is_stopped(data_root, ledger):
    photos(data_root, "a", "b", captions=False)
    model = Model("one", fails=lambda images: KeyboardInterrupt() if len(model.batches) == 2 else None)

    with pytest.raises(KeyboardInterrupt):
        run(data_root, ledger, model)
    assert texts(ledger) == {"a": "one"}
    assert ids(jobs(data_root, ledger)) == ["b"]


def test_problems_of_images_that_are_no_longer_pending_are_removed(data_root, ledger):
    photos(data_root, "a", "b", captions=False)
    run(data_root, ledger, Model("a caption", " "))
    assert ids_of_problems(ledger) == ["b"]
    (data_root.approved / "b.txt").write_text("mine")

    forget_problems(jobs(data_root, ledger), ledger)

    assert ids_of_problems(ledger) == []


@pytest.mark.parametrize("preview", [True, False])
def test_lost_ledger_makes_captions_preview_if_the_captioner_was_a_preview_model(data_root, preview):
    """A record does not contain the origin of its caption. Spec: docs/spec/stage2.md#preview-models"""
    photos(data_root, "a", captions=False)
    write_text(data_root.stage2_jsonl, json.dumps(record_of("a")))
    record_identity_of(data_root, ModelIdentity(kind=CAPTIONER, model="m", preview=preview, facts={}))
    with Ledger(data_root.ledger) as ledger:
        adopt_captions(surveyed(data_root, ledger), ledger)
        (row,) = ledger.captions().values()
        assert row.origin == (FROM_PREVIEW_RECORD if preview else FROM_RECORD)
        assert bool(ledger.preview_captions()) == preview
        assert bool(jobs(data_root, ledger)) == preview, "a real captioner replaces it"
        assert jobs(data_root, ledger, preview=True) == []


def test_image_that_kills_its_workers_has_a_row():
    job = CaptionJob("a", "a.png", posix_signature(1, 2, 3))

    row = lost_caption(job, "was ended by SIGKILL")

    assert (row.job, row.outcome, row.reason) == (job, "failed", "worker_died")
    assert "SIGKILL" in row.detail
