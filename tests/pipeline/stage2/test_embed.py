"""The stream from images to npy files: batches, isolation of failures, adoption, publication, interrupts.

Spec: docs/spec/stage2.md#determinism, docs/spec/stage2.md#folders-and-files
"""

import contextlib
import errno
import json
import os
import shutil
import threading
import time
import weakref
from collections import Counter
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import ClassVar

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from imagemill.domain.buckets import BUCKETS
from imagemill.domain.embedding_specs import DINOV3, T5, VAE, embedding_specs
from imagemill.domain.layout import DataRoot
from imagemill.errors import DiskFull, ModelMismatch, ModelUnusable, NonFiniteEmbedding, Refused
from imagemill.formats.jsonl import Span
from imagemill.formats.npy import NpyStore, read_npy
from imagemill.fs import durable
from imagemill.fs.atomic import temporaries
from imagemill.fs.fingerprints import file_signature, fingerprint
from imagemill.pipeline.stage2 import embed as embed_module
from imagemill.pipeline.stage2 import publish as publish_module
from imagemill.pipeline.stage2.embed import READY_BATCHES
from imagemill.pipeline.stage2.examine import EmbedRow
from imagemill.pipeline.stage2.plan import Job
from imagemill.pipeline.stage2.publish import after_interrupt, count_rows, publish, publish_on_thread
from imagemill.pipeline.turns import Turns
from imagemill.store.ledger import LeaseLost, Ledger
from imagemill.store.provenance import UNKNOWN_PREVIEW
from tests.helpers.passes import run_pass
from tests.helpers.stage2 import (
    embed,
    identity_of,
    photos,
    picture,
    plan_of,
    ready,
    record_of,
    with_encoder,
    worker_of,
    write_text,
)
from tests.helpers.stubs import StubEncoder


def recording(encode=None, prepare=None):
    """A stub encoder that records its input; `encode` and `prepare` may raise or return other arrays.

    `.batches`: the batches of every call; `.loads`: the number of loads.
    """

    class Encoder(StubEncoder):
        batches: ClassVar = []
        prepared: ClassVar = []
        loads = 0

        @classmethod
        def load(cls, settings, **given):
            cls.loads += 1
            return super().load(settings, **given)

        def prepare(self, item):
            if prepare:
                prepare(self, item)
            made = super().prepare(item)
            self.prepared.append(made)
            return made

        def encode(self, batch):
            self.batches.append(list(batch))
            arrays = super().encode(batch)
            return arrays if encode is None else encode(batch, arrays)

    return Encoder


def sizes(encoder):
    return [len(batch) for batch in encoder.batches]


def unusable(settings, **given):
    raise AssertionError("no model may be loaded")


class NoEncoder(StubEncoder):
    """An encoder for passes that must not need a model."""

    load = classmethod(lambda cls, settings, **given: unusable(settings))


def rows_of(root, spec, encoder, **options):
    """Stream without publishing."""
    worker = worker_of(root, with_encoder(spec, encoder), **options)
    with Ledger(root.ledger) as ledger:
        return {row.image_id: row for row in worker.stream(plan_of(root, spec, ledger).jobs)}


def problems(root):
    with Ledger(root.ledger) as ledger:
        return {(p.item, p.outcome, p.reason) for p in ledger.problems()}


def value_of(image_id, root, spec=DINOV3):
    """Return the stub's output for an image: one number."""
    return float(read_npy(NpyStore(root.derived / spec.folder, spec).path(image_id)).flat[0])


def snapshot(folder):
    return {path.name: (path.read_bytes(), file_signature(path)) for path in folder.iterdir()}


@pytest.fixture
def ledger(data_root):
    with Ledger(data_root.ledger) as ledger:
        yield ledger


# ---- batches


def test_first_batch_is_a_single_image_before_full_batches(data_root):
    """A model that cannot run here fails early. Spec: docs/spec/stage2.md#first-image"""
    photos(data_root, *map(str, range(10)))
    encoder = recording()

    counts = embed(data_root, DINOV3, encoder=encoder, batch_size=4)[DINOV3.kind]

    assert sizes(encoder) == [1, 4, 4, 1]
    assert (counts["computed"], counts["calls"]) == (10, 4)


def test_rows_of_a_call_arrive_while_later_calls_run(data_root):
    """Progress is reported during long calls: at most the batches that are ready and the one before them are outstanding."""
    photos(data_root, *map(str, range(9)))
    arrived, late = threading.Semaphore(0), []

    def encode(batch, arrays):
        if len(encoder.batches) > 2 + READY_BATCHES and not arrived.acquire(timeout=10):
            late.append(len(encoder.batches))
        return arrays

    encoder = recording(encode)
    worker = worker_of(data_root, with_encoder(DINOV3, encoder), batch_size=1)

    with Ledger(data_root.ledger) as ledger:
        for _ in worker.stream(plan_of(data_root, DINOV3, ledger).jobs):
            arrived.release()

    assert (len(encoder.batches), late) == (9, [])


def test_only_images_of_one_shape_share_a_call(data_root):
    photos(data_root, "a", "c", "e", "g", size=(32, 24))
    photos(data_root, "b", "d", "f", "h", size=(24, 32))
    encoder = recording()

    embed(data_root, VAE, encoder=encoder, batch_size=8)

    assert all(len({item.group for item in batch}) == 1 for batch in encoder.batches)
    assert sorted(sizes(encoder)) == [1, 3, 4]
    for image_id in "abcdefgh":
        NpyStore(data_root.derived / VAE.folder, VAE).check(image_id, *((24, 32) if image_id in "aceg" else (32, 24)))


def test_batch_contains_no_more_pixels_than_its_budget(data_root):
    photos(data_root, *map(str, range(10)), size=(16, 16))
    encoder = recording()

    embed(data_root, VAE, encoder=encoder, batch_size=8, batch_pixels=3 * 16 * 16)

    assert sizes(encoder) == [1, 3, 3, 3]


def test_image_above_the_budget_is_a_batch_of_one(data_root):
    photos(data_root, *"abc", size=(32, 32))
    encoder = recording()

    embed(data_root, VAE, encoder=encoder, batch_pixels=10)

    assert sizes(encoder) == [1, 1, 1]


@pytest.mark.parametrize("one_shape", [True, False])
def test_stream_prepares_a_bounded_number_of_images_ahead_of_the_model(data_root, one_shape):
    """Memory does not grow with the number of images or of their shapes."""
    for n in range(80):
        picture(
            data_root.approved / f"{n:03d}.png", size=(16, 16) if one_shape else (8 + 8 * (n // 9), 8 + 8 * (n % 9))
        )
    ahead = []

    def encode(batch, arrays):
        ahead.append(len(encoder.prepared) - sum(sizes(encoder)))
        return arrays

    encoder = recording(encode)
    embed(data_root, VAE, encoder=encoder, batch_size=2, decode_threads=2)

    decoding, waiting, ready = (1 + READY_BATCHES) * 2 + 2 * 2, 4 * 2, (1 + READY_BATCHES) * 2
    assert max(ahead) <= decoding + waiting + ready
    assert sum(sizes(encoder)) == 80


def test_stream_writes_a_bounded_number_of_bytes_behind_the_model(data_root, monkeypatch):
    """A slow disk slows down the model instead of filling the memory."""
    photos(data_root, *(f"{n:03d}" for n in range(30)), size=(64, 64))
    latent = 16 * 8 * 8 * 2
    stage, written, behind = NpyStore.stage, [], []

    def slowly(self, array, **marks):
        time.sleep(0.005)
        written.append(1)
        return stage(self, array, **marks)

    def encode(batch, arrays):
        behind.append(sum(sizes(encoder)) - len(batch) - len(written))
        return arrays

    monkeypatch.setattr(NpyStore, "stage", slowly)
    monkeypatch.setattr(embed_module, "WRITE_BEHIND_BYTES", 3 * latent)
    encoder = recording(encode)
    embed(data_root, VAE, encoder=encoder, batch_size=2, write_threads=8)

    assert 0 < max(behind) <= 3


def test_pixels_are_released_before_their_array_is_written(data_root):
    photos(data_root, *"abc")
    encoder = recording()

    embed(data_root, VAE, encoder=encoder)

    assert {item.payload for batch in encoder.batches for item in batch} == {None}


def test_captions_of_one_length_share_a_call_and_equal_ones_are_adjacent(data_root):
    """For any order of the images, batches are full, and equal texts go to the model together."""
    captions = ["a dog", "a much longer caption of one of them", "a dog", "a cat"]
    for n in range(12):
        photos(data_root, f"{n:02d}")
        (data_root.approved / f"{n:02d}.txt").write_text(captions[n % 4])
    texts = []

    encoder = recording(prepare=lambda encoder, item: texts.append(item))
    embed(data_root, T5, encoder=encoder, decode_threads=1)

    assert texts == ["a cat"] * 3 + ["a dog"] * 6 + ["a much longer caption of one of them"] * 3


def test_model_is_loaded_once_and_only_if_a_file_is_missing(data_root):
    photos(data_root, *"abcdef")
    encoder = recording()

    embed(data_root, DINOV3, encoder=encoder, decode_threads=4)
    embed(data_root, DINOV3, encoder=NoEncoder)

    assert encoder.loads == 1


# ---- failures and their effect on other images


def failing_for(root, *bad, error=None):
    """Return an `encode` that raises if one of these images is in the batch."""
    error = error or RuntimeError("out of memory")
    others = {value_of_image(root, path.stem) for path in root.approved.glob("*.png") if path.stem not in bad}
    while others & (values := {value_of_image(root, image_id) for image_id in bad}):
        photos(root, *bad)  # one stub value in a thousand is that of another picture

    def encode(batch, arrays):
        if values & {item.payload[0] for item in batch}:
            raise error
        return arrays

    return encode


def value_of_image(root, image_id):
    from imagemill.formats.images import open_rgb

    return StubEncoder(DINOV3, None).prepare(open_rgb(root.approved / f"{image_id}.png")).payload[0]


def test_batch_that_raises_is_halved_until_the_failing_image_is_alone(data_root):
    """One bad item never stops the others. Spec: docs/spec/conventions.md#refused-and-failed"""
    photos(data_root, *"abcdefghi")
    encoder = recording(failing_for(data_root, "e"))

    counts = embed(data_root, DINOV3, encoder=encoder, batch_size=8)[DINOV3.kind]

    assert (counts["computed"], counts["failed"]) == (8, 1)
    assert problems(data_root) == {("e", "failed", "out_of_memory")}
    assert sizes(encoder) == [1, 8, 4, 2, 2, 1, 1, 4]
    assert {p.stem for p in (data_root.derived / DINOV3.folder).iterdir()} == set("abcdfghi")


def test_size_that_fits_into_memory_is_remembered(data_root):
    """The failed batch is freed before it is divided; later batches have the size that fitted."""
    photos(data_root, *(f"i{n:02d}" for n in range(17)))
    living = []

    def encode(batch, arrays):
        assert not [one for one in living if one() is not None], "an earlier batch is still in memory"
        values = np.zeros((len(batch), 1000))
        living.append(weakref.ref(values))
        if len(batch) > 3:
            raise MemoryError("out of memory")
        return arrays

    encoder = recording(encode)

    counts = embed(data_root, DINOV3, encoder=encoder, batch_size=8)[DINOV3.kind]

    assert (counts["computed"], counts["failed"], counts["divided"]) == (17, 0, 1)
    assert sizes(encoder) == [1, 8, 4, 2, 2, 4, 2, 2, 2, 2, 2, 2]


def test_image_that_does_not_fit_into_memory_alone_is_named(data_root):
    """It is not tiled: which images are tiled depends on their pixels alone. The others are made."""
    photos(data_root, *"abcde")
    big = value_of_image(data_root, "d")

    def encode(batch, arrays):
        if any(item.payload[0] == big for item in batch):
            raise MemoryError("out of memory")
        return arrays

    counts = embed(data_root, DINOV3, encoder=recording(encode), batch_size=2)[DINOV3.kind]

    assert (counts["computed"], counts["failed"]) == (4, 1)
    with Ledger(data_root.ledger) as ledger:
        (problem,) = ledger.problems()
    assert (problem.item, problem.reason) == ("d", "out_of_memory")
    assert problem.detail == "one image of this size does not fit into the memory of cpu"
    embed(data_root, DINOV3, encoder=recording())
    assert problems(data_root) == set()


def on_a_gpu(monkeypatch, *, best):
    """An encoder of another device, which computes up to `best` images in one second of a clock of its own."""
    clock = [0.0]

    def encode(batch, arrays):
        clock[0] += max(1, len(batch) / best)
        return arrays

    class Encoder(recording(encode)):
        @classmethod
        def identify(cls, settings, **given):
            return msgspec.structs.replace(super().identify(settings, **given), device="cuda")

    monkeypatch.setattr(embed_module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    return Encoder


def test_fastest_size_of_batches_is_found_and_recorded(data_root, monkeypatch):
    photos(data_root, *(f"i{n:03d}" for n in range(520)))
    encoder = on_a_gpu(monkeypatch, best=16)

    embed(data_root, DINOV3, encoder=encoder)

    found = sizes(encoder)
    assert found[:4] == [1, 8, 8, 8]
    assert found[-2] == 16, "the last batch is the rest"
    assert max(found) == 32
    assert identity_of(data_root, DINOV3.kind).batch_size == 16

    photos(data_root, *(f"j{n:03d}" for n in range(40)))
    again = on_a_gpu(monkeypatch, best=1000)
    embed(data_root, DINOV3, encoder=again)
    assert sizes(again) == [1, 16, 16, 7], "the recorded size holds"


def test_size_of_batches_on_a_processor_is_not_that_of_a_gpu(data_root, monkeypatch):
    photos(data_root, *(f"i{n:03d}" for n in range(520)))
    embed(data_root, DINOV3, encoder=on_a_gpu(monkeypatch, best=16))
    photos(data_root, *(f"j{n:03d}" for n in range(20)))
    encoder = recording()

    embed(data_root, DINOV3, encoder=encoder)

    assert sizes(encoder) == [1, 8, 8, 3]


def test_images_are_prepared_ahead_of_the_batches_in_use_not_of_the_largest(data_root):
    """Prepared images of kinds that count no pixels are limited by their number alone."""
    photos(data_root, *(f"i{n:03d}" for n in range(200)))
    prepared = []

    class Encoder(recording(prepare=lambda encoder, item: prepared.append(item))):
        def encode(self, batch):
            if len(self.batches) == 1:
                time.sleep(0.5)  # long enough to prepare everything that is allowed
                ahead.append(len(prepared))
            return super().encode(batch)

    ahead = []
    embed(data_root, DINOV3, encoder=Encoder)

    assert ahead[0] <= (2 + READY_BATCHES) * 8 + 2 * 16 + 1


def test_configured_size_is_recorded(data_root):
    photos(data_root, *"abc")

    embed(data_root, DINOV3, encoder=recording(), batch_size=2)

    assert identity_of(data_root, DINOV3.kind).batch_size == 2


def test_failed_image_is_retried_and_its_problem_removed(data_root):
    """The next run retries *failed* images."""
    photos(data_root, *"abc")
    embed(data_root, DINOV3, encoder=recording(failing_for(data_root, "b")))
    assert problems(data_root) == {("b", "failed", "out_of_memory")}

    assert embed(data_root, DINOV3)[DINOV3.kind]["computed"] == 1
    assert problems(data_root) == set()


@pytest.mark.parametrize("error", [RuntimeError("no kernel image"), NonFiniteEmbedding("NaN", do="use float32")])
def test_model_that_fails_every_image_is_named_with_its_device(data_root, error):
    """The pass ends in seconds instead of failing every image. Spec: docs/spec/stage2.md#first-image"""

    def encode(batch, arrays):
        raise error

    photos(data_root, *map(str, range(50)))
    encoder = recording(encode)

    with pytest.raises(ModelUnusable) as caught:
        embed(data_root, DINOV3, encoder=encoder, model="org/model")

    assert all(text in str(caught.value) for text in ("org/model", "on cpu", str(error), "imagemill.yaml"))
    assert len(encoder.batches) <= 4
    assert not list((data_root.derived / DINOV3.folder).iterdir())


def test_first_image_that_fails_alone_does_not_stop_the_pass(data_root):
    """Otherwise one image that the model rejects, first by name, would stop every run."""
    photos(data_root, *"abcdef")

    counts = embed(data_root, DINOV3, encoder=recording(failing_for(data_root, "a")))[DINOV3.kind]

    assert (counts["computed"], counts["failed"]) == (5, 1)
    with Ledger(data_root.ledger) as ledger:
        (problem,) = ledger.problems()
    assert (problem.item, problem.outcome, problem.reason) == ("a", "failed", "model_error")
    assert "out of memory" in problem.detail


def test_images_rejected_by_the_model_stop_at_most_one_run(data_root):
    """In the next run they come last and do not count as model failures.

    Spec: docs/spec/conventions.md#refused-and-failed
    """
    photos(data_root, *"abcdef")
    encoder = recording(failing_for(data_root, *"abcd"))
    with pytest.raises(ModelUnusable):
        embed(data_root, DINOV3, encoder=encoder)

    counts = embed(data_root, DINOV3, encoder=encoder)[DINOV3.kind]
    assert (counts["computed"], counts["failed"]) == (2, 4)

    photos(data_root, "z")
    counts = embed(data_root, DINOV3, encoder=encoder)[DINOV3.kind]
    assert (counts["computed"], counts["failed"]) == (1, 4)
    counts = embed(data_root, DINOV3, encoder=encoder)[DINOV3.kind]
    assert (counts["computed"], counts["failed"]) == (0, 4), "each is counted"


def test_model_that_cannot_be_loaded_is_named_and_loaded_only_once(data_root):
    """Any exception of the model's library is converted."""
    photos(data_root, *"abcdef")
    tries = []

    class Broken(StubEncoder):
        @classmethod
        def load(cls, settings, **given):
            tries.append(1)
            raise RuntimeError("libcudart.so.12 not found")

    with pytest.raises(ModelUnusable, match=r"preview cannot be loaded: RuntimeError: libcudart"):
        embed(data_root, DINOV3, encoder=Broken, decode_threads=1)

    assert len(tries) <= 1 + 8 + 2, "at most what was under way"


def test_full_disk_ends_the_pass_and_keeps_finished_files(data_root, monkeypatch):
    """No other file would fit, so the model is not called for the remaining images.

    Spec: docs/spec/conventions.md#atomic-names
    """
    photos(data_root, *(f"i{n:03d}" for n in range(200)))
    stage, staged = NpyStore.stage, []

    def stage_or_fail(self, array, **marks):
        if len(staged) >= 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        staged.append(stage(self, array, **marks))
        return staged[-1]

    monkeypatch.setattr(NpyStore, "stage", stage_or_fail)
    with pytest.raises(DiskFull) as caught:
        embed(data_root, DINOV3, write_threads=1)

    folder = data_root.derived / DINOV3.folder
    assert caught.value.where == folder
    assert len(list(folder.glob("*.npy"))) == 3
    assert 0 < len(problems(data_root)) < 100
    assert not temporaries(folder)


class Pressed(BaseException):
    """An interrupt."""


class SlowEncoder(StubEncoder):
    """Takes a tenth of a second for each call."""

    def encode(self, items):
        time.sleep(0.1)
        return super().encode(items)


def test_interrupt_outside_the_stream_still_publishes_finished_files(data_root, monkeypatch):
    """Ctrl-C can arrive at any position of the main thread."""
    photos(data_root, *(f"i{n:03d}" for n in range(40)))
    monkeypatch.setattr(publish_module, "PUBLISH_ROWS", 1)
    rows = []
    with Ledger(data_root.ledger) as ledger:
        jobs = plan_of(data_root, DINOV3, ledger).jobs
        worker = worker_of(data_root, with_encoder(DINOV3, SlowEncoder), write_threads=4)
        with pytest.raises(Pressed):
            interrupt_first(publish(worker.stream(jobs), worker.store, ledger), rows, raising=True)

    folder = data_root.derived / DINOV3.folder
    assert not temporaries(folder)
    assert 0 < len(rows) == len(list(folder.glob("*.npy"))) < 40, "every published file is counted and reported"


def publish_all(root, ledger, take, on_row=lambda row: None, encoder=StubEncoder):
    """Publish a pass over every image on the publishing thread."""
    worker = worker_of(root, with_encoder(DINOV3, encoder))
    jobs = plan_of(root, DINOV3, ledger).jobs
    publish_on_thread(worker.stream(jobs), worker.store, ledger, take, on_row=on_row)


def test_threads_of_a_pass_take_turns_while_its_files_are_small(data_root, ledger, monkeypatch):
    """They would wait for Python's interpreter lock at each of their system calls."""
    photos(data_root, *(f"i{n:03d}" for n in range(40)))
    turn, threads = Turns.turn, []

    def noted(self, items):
        threads.append((threading.current_thread().name.partition("_")[0], items))
        return turn(self, items)

    monkeypatch.setattr(Turns, "turn", noted)

    publish_all(data_root, ledger, lambda batch, _: None)

    done = Counter()
    for thread, items in threads:
        done[thread] += items
    assert done == {"decode": 2 * 40, "write": 40, "publish": 3 * 40}  # sizes and images; rows, names and events


def test_interrupt_loses_no_batch_that_its_thread_publishes(data_root, ledger, monkeypatch):
    """Files, ledger rows and reported rows agree, although the interrupt arrives while other threads publish."""
    photos(data_root, *(f"i{n:03d}" for n in range(40)))
    monkeypatch.setattr(publish_module, "PUBLISH_ROWS", 1)
    taken, seen = [], []

    def interrupt(row):
        seen.append(row)
        if len(seen) == 5:
            raise Pressed

    with pytest.raises(Pressed):
        publish_all(data_root, ledger, lambda batch, _: taken.extend(row.image_id for row in batch), interrupt)

    folder = data_root.derived / DINOV3.folder
    assert not temporaries(folder)
    assert len(taken) >= 5
    assert sorted(taken) == sorted(path.stem for path in folder.glob("*.npy"))
    assert {image_id for image_id, _ in ledger.files(DINOV3.kind)} == set(taken)


@pytest.mark.parametrize("number", range(1, 7))
def test_interrupt_loses_no_row_that_has_just_arrived(data_root, ledger, monkeypatch, number):
    """It arrives after an item has left its queue, before the caller has it."""
    photos(data_root, *(f"i{n:03d}" for n in range(40)))

    class Interrupted(SimpleQueue):
        left = number

        def get(self, *args, **options):
            item = super().get(*args, **options)
            self.left -= 1
            if not self.left:
                raise Pressed
            return item

    monkeypatch.setattr(embed_module, "SimpleQueue", Interrupted)
    taken = []
    with pytest.raises(Pressed):
        publish_all(data_root, ledger, lambda batch, _: taken.extend(row.image_id for row in batch))

    folder = data_root.derived / DINOV3.folder
    assert not temporaries(folder)
    assert sorted(taken) == sorted(path.stem for path in folder.glob("*.npy"))
    assert taken


@pytest.mark.parametrize("number", [1, 5])
def test_interrupt_loses_no_row_that_is_being_handed_over(data_root, ledger, monkeypatch, number):
    photos(data_root, *(f"i{n:03d}" for n in range(40)))
    signature_bytes, measured, taken = publish_module.signature_bytes, [], []

    def interrupted(stat):
        measured.append(stat)
        if len(measured) == number:
            raise Pressed
        return signature_bytes(stat)

    monkeypatch.setattr(publish_module, "signature_bytes", interrupted)
    with pytest.raises(Pressed):
        publish_all(data_root, ledger, lambda batch, _: taken.extend(row.image_id for row in batch))

    folder = data_root.derived / DINOV3.folder
    assert not temporaries(folder)
    assert sorted(taken) == sorted(path.stem for path in folder.glob("*.npy"))
    assert number <= len(taken)


def test_rows_are_published_on_a_thread_with_its_own_connection(data_root, ledger):
    photos(data_root, *"abc")
    threads, connections = set(), set()

    def take(batch, connection):
        threads.add(threading.current_thread().name)
        connections.add(connection is ledger)

    publish_all(data_root, ledger, take)

    assert (threads, connections) == ({"publish"}, {False})


def test_error_of_publishing_stops_the_model(data_root, ledger, monkeypatch):
    photos(data_root, *(f"i{n:03d}" for n in range(40)))
    monkeypatch.setattr(publish_module, "PUBLISH_ROWS", 1)
    seen = []

    def lost(batch, _):
        raise LeaseLost("another run has taken over")

    def wait(row):
        seen.append(row)
        for thread in threading.enumerate():
            if thread.name == "publish":
                thread.join(10)

    with pytest.raises(LeaseLost):
        publish_all(data_root, ledger, lost, wait)

    assert len(seen) == 1
    assert not [t for t in threading.enumerate() if t.name.startswith(("decode", "write", "device", "publish"))]


def interrupt_first(batches, rows, *, raising):
    """Consume as the IO manager does: after an interrupt, take the remaining batches, then re-raise."""
    try:
        for batch in batches:
            rows += batch
            if raising:
                raise Pressed
    except Pressed as pressed:
        for batch in after_interrupt(batches, pressed):
            rows += batch
        raise


def test_non_finite_value_fails_only_its_image(data_root):
    photos(data_root, *"abcd")
    bad = failing_for(data_root, "c", error=NonFiniteEmbedding("the model produced NaN"))

    counts = embed(data_root, DINOV3, encoder=recording(bad))[DINOV3.kind]

    assert (counts["computed"], counts["failed"]) == (3, 1)
    assert problems(data_root) == {("c", "failed", "non_finite")}


@pytest.mark.parametrize(
    "wrong",
    [np.zeros(1023, np.float32), np.zeros((1, 1024), np.float32), np.zeros(1024, np.float64), np.zeros(1024, np.float16)],
)  # fmt: skip
def test_array_of_another_shape_or_dtype_is_not_written(data_root, wrong):
    photos(data_root, *"abc")

    counts = embed(data_root, DINOV3, encoder=recording(lambda batch, arrays: [wrong, *arrays[1:]]))[DINOV3.kind]

    assert counts["failed"] == 2, "the first of each batch"
    assert {reason for _, _, reason in problems(data_root)} == {"wrong_shape"}
    assert len(list((data_root.derived / DINOV3.folder).iterdir())) == 1


@pytest.mark.parametrize("answer", [lambda arrays: arrays[:-1], lambda arrays: [*arrays, *arrays], lambda arrays: []])
def test_wrong_number_of_arrays_never_assigns_a_vector_to_another_image(data_root, answer):
    """A batch with too few or too many arrays is split like one that raised."""
    photos(data_root, *"abcdef")
    encoder = recording(lambda batch, arrays: arrays if len(batch) == 1 else answer(arrays))

    counts = embed(data_root, DINOV3, encoder=encoder)[DINOV3.kind]

    assert counts["computed"] == 6
    for image_id in "abcdef":
        assert value_of(image_id, data_root) == value_of_image(data_root, image_id)


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), MemoryError("no memory")])
def test_file_that_cannot_be_written_fails_only_its_image(data_root, monkeypatch, error):
    """Disk and memory errors are failures rather than refusals, and are retried."""
    photos(data_root, *"abcd")
    stage, wrong = NpyStore.stage, value_of_image(data_root, "b")

    def stage_or_fail(self, array, **marks):
        if array.flat[0] == wrong:
            raise error
        return stage(self, array, **marks)

    with monkeypatch.context() as patched:
        patched.setattr(NpyStore, "stage", stage_or_fail)
        counts = embed(data_root, DINOV3)[DINOV3.kind]

    assert (counts["computed"], counts["failed"]) == (3, 1)
    assert problems(data_root) == {("b", "failed", "write_error")}
    assert embed(data_root, DINOV3)[DINOV3.kind]["computed"] == 1


def test_file_that_cannot_be_renamed_fails_only_its_image(data_root):
    """For example, a folder with that name exists."""
    photos(data_root, *"abc")
    (data_root.derived / DINOV3.folder / "b.npy").mkdir(parents=True)

    counts = embed(data_root, DINOV3)[DINOV3.kind]

    assert (counts["computed"], counts["failed"]) == (2, 1)
    assert problems(data_root) == {("b", "failed", "write_error")}
    assert not temporaries(data_root.derived / DINOV3.folder)


@pytest.mark.parametrize("count", [3, 40])
def test_file_that_cannot_be_flushed_is_never_renamed(data_root, monkeypatch, count):
    """A disk error may occur only at the flush. The image fails and leaves no truncated file, for few and many files."""
    ids = [f"{n:02d}" for n in range(count)]
    photos(data_root, *ids)
    wrong, flush = value_of_image(data_root, "01"), durable.flush
    bad = {image_id for image_id in ids if value_of_image(data_root, image_id) == wrong}

    def flush_or_fail(handle):
        if np.float32(wrong).tobytes() == os.pread(handle, 4, 128):
            raise OSError(errno.ENOSPC, "No space left on device")
        flush(handle)

    with monkeypatch.context() as patched:
        patched.setattr(durable, "flush", flush_or_fail)
        patched.setattr(durable, "_sync_file_system", lambda folder: False)
        counts = embed(data_root, DINOV3)[DINOV3.kind]

    assert (counts["computed"], counts["failed"]) == (count - len(bad), len(bad))
    assert problems(data_root) == {(image_id, "failed", "write_error") for image_id in bad}
    assert {path.stem for path in (data_root.derived / DINOV3.folder).iterdir()} == {*ids} - bad
    assert embed(data_root, DINOV3)[DINOV3.kind]["computed"] == len(bad)


def test_files_are_durable_before_their_ledger_rows_and_final_names(data_root, monkeypatch):
    """Otherwise a power failure leaves a row for a file of zeros.

    Spec: docs/spec/conventions.md#completion-and-identity
    """
    photos(data_root, *"abc")
    order, replace = [], os.replace

    def flush_files(paths):
        with Ledger(data_root.ledger) as witness:
            order.append(("flush", len(paths), len(witness.files(DINOV3.kind))))
        return {}

    def named(one, other):
        if Path(other).suffix == ".npy":
            order.append("name")
        return replace(one, other)

    monkeypatch.setattr(publish_module, "flush_files", flush_files)
    monkeypatch.setattr(publish_module.os, "replace", named)
    embed(data_root, DINOV3)

    assert order == [("flush", 3, 0), "name", "name", "name"]


def test_unreadable_image_fails_and_undecodable_one_is_refused(data_root, ledger):
    photos(data_root, "gone", "good", "torn")
    whole = (data_root.approved / "torn.png").read_bytes()
    (data_root.approved / "torn.png").write_bytes(whole[:60])
    jobs = plan_of(data_root, DINOV3, ledger).jobs
    (data_root.approved / "gone.png").unlink()

    counts = run_pass(worker_of(data_root, with_encoder(DINOV3, StubEncoder)), jobs, ledger)

    assert (counts["computed"], counts["failed"], counts["refused"]) == (1, 1, 1)
    assert problems(data_root) == {("gone", "failed", "read_error"), ("torn", "refused", "undecodable")}
    assert all(problem.remedy and problem.stat for problem in ledger.problems())


def test_refused_image_is_embedded_once_it_is_replaced(data_root):
    photos(data_root, "a")
    whole = (data_root.approved / "a.png").read_bytes()
    (data_root.approved / "a.png").write_bytes(b"")
    assert embed(data_root, DINOV3)[DINOV3.kind]["refused"] == 1
    assert embed(data_root, DINOV3, encoder=NoEncoder)[DINOV3.kind] == {}, "not opened again"

    (data_root.approved / "a.png").write_bytes(whole)
    assert embed(data_root, DINOV3)[DINOV3.kind]["computed"] == 1
    assert problems(data_root) == set()


def test_image_refused_by_an_encoder_has_its_reason(data_root):
    def prepare(encoder, item):
        raise Refused("too_small", "a side is under 8 pixels", do="replace the image")

    photos(data_root, "a")

    embed(data_root, VAE, encoder=recording(prepare=prepare))

    assert problems(data_root) == {("a", "refused", "too_small")}


def test_other_model_than_the_recorded_one_is_refused_before_any_call(data_root):
    """A folder never mixes two models. Spec: docs/spec/conventions.md#provenance"""
    photos(data_root, "a")
    embed(data_root, DINOV3, model="org/one")
    photos(data_root, "b")
    encoder = recording()

    with pytest.raises(ModelMismatch, match="differs in model"):
        embed(data_root, DINOV3, encoder=encoder, model="org/two")

    assert encoder.batches == []
    identity = identity_of(data_root, DINOV3.kind)
    assert identity
    assert identity.model == "org/one"


FATES = ("good", "undecodable", "gone", "model_error", "non_finite", "wrong_shape", "write_error")
OUTCOMES = {"good": "computed", "undecodable": "refused"}


@settings(deadline=None, max_examples=25)
@given(st.lists(st.sampled_from(FATES), max_size=14), st.integers(1, 5), st.integers(1, 3), st.data())
def test_every_job_has_exactly_one_row_for_any_outcome(tmp_path_factory, fates, batch_size, threads, data):
    """Each row contains the outcome of its own image."""
    root = DataRoot(tmp_path_factory.mktemp("fates") / "data")
    root.approved.mkdir(parents=True)
    wanted = {f"i{n:02d}": fate for n, fate in enumerate(["good", *fates])}
    for seed, image_id in enumerate(wanted):
        picture(root.approved / f"{image_id}.png", seed=seed)
    by_value = {value_of_image(root, image_id): fate for image_id, fate in wanted.items()}
    assert len(by_value) == len(wanted), "the encoder below tells images apart by their value"

    def encode(batch, arrays):
        for item in batch:
            match by_value[item.payload[0]]:
                case "model_error":
                    raise RuntimeError("cannot")
                case "non_finite":
                    raise NonFiniteEmbedding("NaN")
        return [a[:-1] if by_value[float(a[0])] == "wrong_shape" else a for a in arrays]

    class Store(NpyStore):
        def stage(self, array, *, preview=False):
            if by_value[float(array[0])] == "write_error":
                raise OSError(errno.EIO, "input/output error")
            return super().stage(array, preview=preview)

    with Ledger(root.ledger) as ledger:
        for image_id, fate in wanted.items():
            if fate == "undecodable":
                (root.approved / f"{image_id}.png").write_bytes(b"no picture")
        jobs = data.draw(st.permutations(plan_of(root, DINOV3, ledger).jobs[1:])) if fates else []
        jobs = [*plan_of(root, DINOV3, ledger).jobs[:1], *jobs]
        for image_id, fate in wanted.items():
            if fate == "gone":
                (root.approved / f"{image_id}.png").unlink()
        spec = with_encoder(DINOV3, recording(encode))
        worker = worker_of(root, spec, decode_threads=threads, write_threads=threads, batch_size=batch_size)
        worker.store = Store(worker.store.folder, spec)
        rows = [row for batch in publish(worker.stream(jobs), worker.store, ledger) for row in batch]

    assert sorted(row.image_id for row in rows) == sorted(wanted)
    for row in rows:
        fate = wanted[row.image_id]
        assert row.outcome == OUTCOMES.get(fate, "failed"), row
        assert (row.reason or "good") == ("read_error" if fate == "gone" else fate)
    assert {path.stem for path in worker.store.folder.iterdir()} == {i for i, fate in wanted.items() if fate == "good"}


# ---- existing files


def adopted_root(root):
    """Images with embeddings made by another program."""
    photos(root, "a", "b")
    embed(root)
    shutil.rmtree(root.state)


@pytest.mark.parametrize("spec", embedding_specs(), ids=lambda spec: spec.kind)
def test_valid_file_without_a_ledger_row_is_adopted_byte_for_byte(data_root, spec):
    """The file is kept, its source fingerprinted now, and its model key `unknown`.

    Spec: docs/spec/conventions.md#adoption
    """
    adopted_root(data_root)
    before = snapshot(data_root.derived / spec.folder)

    counts = embed(data_root, spec, encoder=NoEncoder)[spec.kind]

    assert counts["adopted"] == 2
    assert snapshot(data_root.derived / spec.folder) == before
    with Ledger(data_root.ledger) as ledger:
        rows, sources, captions = ledger.files(spec.kind), ledger.sources(), ledger.captions()
        assert {row.model_key for row in rows.values()} == {UNKNOWN_PREVIEW}, "the header shows the preview model"
        for image_id in "ab":
            row = rows[image_id, file_signature(data_root.derived / spec.folder / f"{image_id}.npy")]
            wanted = sources if spec.source == "pixels" else captions
            assert row.source == wanted[image_id].fingerprint
            assert row.content == fingerprint((data_root.derived / spec.folder / f"{image_id}.npy").read_bytes())
        assert plan_of(data_root, spec, ledger).jobs == []


def test_file_adopted_by_packing_is_kept_and_gets_its_source(data_root):
    """Packing opens no image, so the next pass fingerprints it."""
    adopted_root(data_root)
    write_text(data_root.stage2_jsonl, *(json.dumps(record_of(image_id)) for image_id in "ab"))
    ready(data_root, BUCKETS)
    before = snapshot(data_root.derived / DINOV3.folder)

    counts = embed(data_root, DINOV3, encoder=NoEncoder)[DINOV3.kind]

    assert (counts["kept"], counts["replaced"]) == (2, 0)
    assert snapshot(data_root.derived / DINOV3.folder) == before
    with Ledger(data_root.ledger) as ledger:
        sources = ledger.sources()
        assert {row.image_id: row.source for row in ledger.files(DINOV3.kind).values()} == {
            image_id: sources[image_id].fingerprint for image_id in "ab"
        }


def truncated(path):
    path.write_bytes(path.read_bytes()[:-10])


def lengthened(path):
    path.write_bytes(path.read_bytes() + b"\0")


def emptied(path):
    path.write_bytes(b"")


def widened(path):
    np.save(path, np.zeros((16, 3, 4), np.float32))


def of_another_image(path):
    np.save(path, np.zeros((16, 4, 4), np.float16))


def not_finite(path):
    np.save(path, np.full((16, 3, 4), np.nan, np.float16))


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (truncated, "truncated"), (emptied, "truncated"), (lengthened, "trailing_bytes"), (widened, "wrong_dtype"),
        (of_another_image, "wrong_shape"), (not_finite, "non_finite"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)  # fmt: skip
def test_file_that_violates_its_contract_is_replaced_and_reported(data_root, spoil, reason):
    """Completion is validity, not existence. Spec: docs/spec/conventions.md#completion-and-identity"""
    photos(data_root, "a", "b")
    embed(data_root, VAE)
    store = NpyStore(data_root.derived / VAE.folder, VAE)
    good, other = store.path("a").read_bytes(), store.stat("b")
    spoil(store.path("a"))

    row = rows_of(data_root, VAE, StubEncoder)["a"]
    assert (row.outcome, row.replaced) == ("computed", reason)
    counts = embed(data_root, VAE)[VAE.kind]

    assert (counts["computed"], counts["replaced"]) == (1, 1)
    assert store.path("a").read_bytes() == good
    assert store.stat("b") == other


def test_file_of_a_replaced_image_is_regenerated_and_others_are_kept(data_root):
    """A replaced image makes exactly its derived data stale. Spec: docs/spec/conventions.md#staleness"""
    photos(data_root, "a", "b")
    embed(data_root)
    folder = data_root.derived / DINOV3.folder
    before, old = snapshot(folder), value_of("a", data_root)
    picture(data_root.approved / "a.png")

    made = embed(data_root)

    assert {kind: (c["computed"], c["replaced"]) for kind, c in made.items()} == {
        DINOV3.kind: (1, 1), VAE.kind: (1, 1), T5.kind: (0, 0),
    }  # fmt: skip
    assert value_of("a", data_root) == value_of_image(data_root, "a") != old
    assert snapshot(folder)["b.npy"] == before["b.npy"]
    with Ledger(data_root.ledger) as ledger:
        assert len(ledger.files(DINOV3.kind)) == 2, "the row of the replaced file is gone"


def test_edited_caption_makes_only_its_t5_file_stale(data_root):
    photos(data_root, "a", "b")
    embed(data_root)
    (data_root.approved / "a.txt").write_text("something else entirely, and longer")

    made = embed(data_root)

    assert {kind: c["computed"] for kind, c in made.items()} == {DINOV3.kind: 0, VAE.kind: 0, T5.kind: 1}
    with Ledger(data_root.ledger) as ledger:
        assert sum(ledger.captions()["a"].tokens) == 6, "five words and the end: the mask is of the new caption"


def test_touched_image_is_read_once_and_its_files_are_kept(data_root):
    """Equal bytes are not stale."""
    photos(data_root, "a")
    embed(data_root)
    before = snapshot(data_root.derived / DINOV3.folder)
    os.utime(data_root.approved / "a.png", ns=(5, 5))

    first, second = (embed(data_root, DINOV3, encoder=NoEncoder)[DINOV3.kind] for _ in range(2))

    assert (dict(first), dict(second)) == ({"kept": 1, "calls": 0, "replaced": 0}, {})
    assert snapshot(data_root.derived / DINOV3.folder) == before


def copied(root, to):
    """Copy like `cp -r`: other inodes and times, the same bytes."""
    shutil.copytree(root.path, to, copy_function=shutil.copyfile)
    for number, path in enumerate(sorted(to.rglob("*"))):
        os.utime(path, ns=(number, number))
    return DataRoot(to)


def test_copied_data_root_keeps_the_model_keys_of_its_files(data_root, tmp_path):
    """A file with equal bytes is the same file, independent of inode and times."""
    photos(data_root, "a", "b")
    embed(data_root)
    copy = copied(data_root, tmp_path / "copy" / "data")

    made = embed(copy, encoder=NoEncoder)

    assert {counts["kept"] for counts in made.values()} == {2}
    with Ledger(copy.ledger) as ledger:
        for spec in embedding_specs():
            identity = identity_of(copy, spec.kind)
            assert identity
            rows = ledger.files(spec.kind)
            assert {row.model_key for row in rows.values()} == {identity.key}
            assert len(rows) == 2, "no row of the place it was copied from stays"
            assert plan_of(copy, spec, ledger).jobs == []


def test_stale_file_of_a_copied_data_root_is_still_stale(data_root, tmp_path):
    """After copying, an old vector must not count as that of the new image."""
    photos(data_root, "a")
    embed(data_root)
    copy = copied(data_root, tmp_path / "copy" / "data")
    picture(copy.approved / "a.png")

    assert rows_of(copy, DINOV3, StubEncoder)["a"].replaced == "stale"
    embed(copy, DINOV3)
    assert value_of("a", copy) == value_of_image(copy, "a")


# ---- publication


def test_row_matches_exactly_the_file_on_disk(data_root):
    photos(data_root, "a")
    embed(data_root, VAE)
    store = NpyStore(data_root.derived / VAE.folder, VAE)

    with Ledger(data_root.ledger) as ledger:
        row = ledger.files(VAE.kind)["a", store.stat("a")]
        source = ledger.sources()["a"]
    identity = identity_of(data_root, VAE.kind)
    assert identity
    assert (row.content, row.model_key) == (fingerprint(store.path("a").read_bytes()), identity.key)
    assert row.source == source.fingerprint == fingerprint((data_root.approved / "a.png").read_bytes())
    assert (source.height, source.width) == (24, 32)
    assert row.content == store.check("a", 24, 32)


def test_ledger_row_exists_before_the_final_name(data_root, monkeypatch):
    """A kill between the two leaves no file of an unknown model.

    Reference: ledger.py.
    Spec: docs/spec/conventions.md#completion-and-identity
    """
    photos(data_root, *"abc")
    replace, vouched = os.replace, []

    def kill_at_third(one, other):
        other = Path(other)
        if other.suffix != ".npy":
            return replace(one, other)
        with Ledger(data_root.ledger) as witness:  # another connection sees only what is committed
            vouched.append((other.stem, file_signature(one)) in witness.files(DINOV3.kind))
        if len(vouched) == 3:
            raise KeyboardInterrupt
        return replace(one, other)

    with monkeypatch.context() as patched:
        patched.setattr(publish_module.os, "replace", kill_at_third)
        with pytest.raises(KeyboardInterrupt):
            embed(data_root, DINOV3)
    assert vouched == [True] * 3
    assert len(list((data_root.derived / DINOV3.folder).glob("*.npy"))) == 2

    counts = embed(data_root, DINOV3)[DINOV3.kind]
    assert (counts["computed"], counts["adopted"]) == (1, 0)


def test_interrupt_of_the_model_publishes_finished_files(data_root):
    """All work before the interrupt is preserved. Spec: docs/spec/stage2.md#merge"""
    calls = []

    def encode(batch, arrays):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return arrays

    photos(data_root, *map(str, range(10)))
    with pytest.raises(KeyboardInterrupt):
        embed(data_root, DINOV3, encoder=recording(encode), batch_size=2)

    assert len(list((data_root.derived / DINOV3.folder).glob("*.npy"))) == 5, "a single one and two pairs"
    assert not temporaries(data_root.derived / DINOV3.folder)
    counts = embed(data_root, DINOV3, batch_size=8)[DINOV3.kind]
    assert counts == {"computed": 5, "calls": 2, "replaced": 0}


def test_interrupt_while_a_batch_is_split_keeps_its_first_half(data_root):
    photos(data_root, *"abcde")

    def encode(batch, arrays):
        if len(batch) == 4:
            raise RuntimeError("too many")
        if sum(sizes(encoder)) == 1 + 4 + 2 + 2:
            raise KeyboardInterrupt
        return arrays

    encoder = recording(encode)
    with pytest.raises(KeyboardInterrupt):
        embed(data_root, DINOV3, encoder=encoder, batch_size=4)

    assert {path.stem for path in (data_root.derived / DINOV3.folder).glob("*.npy")} == set("abc")


def test_abandoned_stream_stops_its_threads(data_root, ledger):
    photos(data_root, *map(str, range(10)))
    worker = worker_of(data_root, with_encoder(DINOV3, StubEncoder))
    stream = worker.stream(plan_of(data_root, DINOV3, ledger).jobs)
    next(stream)
    stream.close()

    assert not [t for t in threading.enumerate() if t.name.startswith(("decode", "write", "device"))]


def test_finished_files_are_renamed_while_the_stream_continues(data_root, ledger, monkeypatch):
    """A kill -9 loses at most one second of work or one hundred files."""
    monkeypatch.setattr(publish_module, "PUBLISH_ROWS", 3)
    photos(data_root, *map(str, range(7)))
    worker = worker_of(data_root, with_encoder(DINOV3, StubEncoder))
    folder = data_root.derived / DINOV3.folder

    published = []
    for batch in publish(worker.stream(plan_of(data_root, DINOV3, ledger).jobs), worker.store, ledger):
        published.append(len(batch))
        assert len(list(folder.glob("*.npy"))) == sum(published)
    assert published == [3, 3, 1]


def test_slow_rows_are_published_individually(data_root, ledger, monkeypatch):
    monkeypatch.setattr(publish_module, "PUBLISH_SECONDS", 0.0)
    photos(data_root, *"abc")
    worker = worker_of(data_root, with_encoder(DINOV3, StubEncoder))

    batches = list(publish(worker.stream(plan_of(data_root, DINOV3, ledger).jobs), worker.store, ledger))

    assert [len(batch) for batch in batches] == [1, 1, 1]


def test_problems_contain_their_run(data_root, ledger):
    row = EmbedRow("a", "failed", file_signature(data_root.approved), reason="model_error", detail="why", remedy="do")
    store = NpyStore(data_root.derived / DINOV3.folder, DINOV3)

    list(publish([row], store, ledger, run_id="run-7"))

    (problem,) = ledger.problems()
    assert (problem.asset, problem.run_id, problem.detail, problem.remedy) == (DINOV3.kind, "run-7", "why", "do")


def test_counters_sum_outcomes_calls_and_replacements():
    stat = SimpleNamespace()
    rows = [
        EmbedRow("a", "computed", stat, calls=2, replaced="stale"), EmbedRow("b", "computed", stat),
        EmbedRow("c", "kept", stat), EmbedRow("d", "refused", stat),
    ]  # fmt: skip
    counts = Counter(kept=5)

    count_rows(counts, rows)

    assert counts == {"computed": 2, "kept": 6, "refused": 1, "calls": 2, "replaced": 1}


def test_t5_records_the_mask_it_used(data_root):
    """The mask in the JSONL is the one used for the hidden state. Spec: docs/spec/stage2.md#t5"""
    photos(data_root, "a")

    embed(data_root, T5)

    with Ledger(data_root.ledger) as ledger:
        assert ledger.captions()["a"].tokens == [1] * 4 + [0] * 73


def test_closed_worker_closes_its_model(data_root):
    closed = []

    class Encoder(StubEncoder):
        def close(self):
            closed.append(1)

    photos(data_root, "a")
    embed(data_root, DINOV3, encoder=Encoder)
    worker = worker_of(data_root, with_encoder(DINOV3, Encoder))
    worker.close()

    assert closed == [1], "once where it was loaded, never where it was not"


def test_vector_of_a_missing_image_has_no_source(data_root):
    """A caption is never the recorded source of a file made from pixels. Spec: docs/spec/conventions.md#staleness"""
    path = data_root.stage2_jsonl
    path.parent.mkdir(parents=True)
    line = json.dumps({"image_path": "data/approved/a.jpg", "dinov3_embedding": [0.5] * 1024, "caption": "A."}).encode()
    path.write_bytes(line + b"\n")
    job = Job("a", "", None, None, "A.", fingerprint(b"A."), None, inline=Span(path, 1, 0, len(line)))

    with contextlib.closing(worker_of(data_root, DINOV3)) as worker:
        (row,) = worker.stream([job])

    assert row.outcome == "extracted"
    assert row.file
    assert row.file.source is None


def test_mask_of_another_kind_of_captions_is_not_that_of_the_record(data_root):
    """Facts that an encoder returns belong to its kind. Spec: docs/spec/stage2.md#kinds"""
    photos(data_root, "a")
    embed(data_root)
    with Ledger(data_root.ledger) as ledger:
        before = ledger.captions()["a"].mask
    other = T5.named("other_text")

    class Encoder(StubEncoder):
        def prepare(self, item):
            made = super().prepare(item)
            made.facts["mask"] = [1, 0]
            return made

    embed(data_root, other, encoder=Encoder)

    with Ledger(data_root.ledger) as ledger:
        assert ledger.captions()["a"].mask == before
