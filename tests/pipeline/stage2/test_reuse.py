"""A missing array is linked from a file of the same kind, model and input; no model is called.

Spec: docs/spec/stage2.md#reuse
"""

import errno
import os
import shutil

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagemill.domain.embedding_specs import DINOV3, T5, VAE, embedding_specs
from imagemill.fs.fingerprints import posix_signature
from imagemill.pipeline.stage2 import reuse
from imagemill.pipeline.stage2.damage import damaged_file
from imagemill.pipeline.stage2.plan import plan_for
from imagemill.pipeline.stage2.regenerate import regenerate
from imagemill.pipeline.stage2.reuse import find_donors, mark_linkable
from imagemill.store.inputs import PixelRule
from imagemill.store.ledger import IN_MEMORY, Ledger, SourceRow
from imagemill.store.provenance import UNKNOWN
from tests.helpers.passes import run_pass
from tests.helpers.stage2 import photos, picture, surveyed, with_encoder, worker_of
from tests.helpers.stubs import StubEncoder


class NoModel(StubEncoder):
    """A model that cannot be loaded."""

    @classmethod
    def load(cls, settings, **given):
        raise AssertionError("the model was loaded")


def embed(root, spec=DINOV3, encoder=StubEncoder):
    """Run a pass as the asset does; return its counters and the jobs."""
    with Ledger(root.ledger) as ledger:
        inventory = surveyed(root, ledger)
        plan = plan_for(spec, list(inventory.scan.sources), inventory, ledger)
        donors = find_donors(spec, plan.jobs, ledger)
        jobs = mark_linkable(spec, plan.jobs, donors, PixelRule.read(ledger))
        worker = worker_of(root, with_encoder(spec, encoder), donors=donors)
        return run_pass(worker, jobs, ledger), {job.image_id: job for job in jobs}


def path(root, image_id, spec=DINOV3):
    return root.derived / spec.folder / f"{image_id}.npy"


def row(root, image_id, spec=DINOV3):
    with Ledger(root.ledger) as ledger:
        (found,) = ledger.files(spec.kind, [image_id]).values()
    return found


@pytest.fixture
def root(data_root):
    photos(data_root, "a", "b")
    for spec in embedding_specs():
        embed(data_root, spec)
    return data_root


def move(root, old, new):
    for suffix in (".png", ".txt"):
        target = root.approved / f"{new}{suffix}"
        target.parent.mkdir(exist_ok=True)
        (root.approved / f"{old}{suffix}").rename(target)


@pytest.mark.parametrize("spec", embedding_specs(), ids=lambda spec: spec.kind)
def test_array_of_a_moved_image_is_linked_without_a_model(root, spec):
    move(root, "a", "dog/a")

    counts, jobs = embed(root, spec, NoModel)

    assert counts["linked"] == 1
    assert (counts["computed"], counts["calls"]) == (0, 0)
    assert not jobs["dog%2Fa"].needs_model
    assert path(root, "dog%2Fa", spec).samefile(path(root, "a", spec))
    old, new = row(root, "a", spec), row(root, "dog%2Fa", spec)
    assert (new.stat, new.source, new.content, new.model_key) == (old.stat, old.source, old.content, old.model_key)
    assert not list((root.derived / spec.folder).glob(".tmp-*"))


def test_moved_image_is_not_opened(root, monkeypatch):
    """Size, time and inode of its file are those of the last reading. Spec: docs/spec/conventions.md#completion"""
    move(root, "a", "c")
    for module in ("embed", "examine"):
        opened = f"imagemill.pipeline.stage2.{module}.inspect_image"
        monkeypatch.setattr(opened, lambda *_: pytest.fail("an image was opened"))

    assert embed(root, DINOV3, NoModel)[0]["linked"] == 1


def test_copied_image_is_opened_and_its_array_linked(root):
    shutil.copy(root.approved / "a.png", root.approved / "c.png")

    counts, jobs = embed(root, VAE, NoModel)

    assert counts["linked"] == 1
    assert jobs["c"].facts is None
    assert path(root, "c", VAE).samefile(path(root, "a", VAE))


def test_image_with_other_bytes_of_the_same_size_is_computed(root):
    data = bytearray((root.approved / "a.png").read_bytes())
    picture(root.approved / "c.png", seed=99)
    assert len(data) == (root.approved / "c.png").stat().st_size

    counts, _ = embed(root)

    assert (counts["linked"], counts["computed"]) == (0, 1)
    assert not path(root, "c").samefile(path(root, "a"))


def test_copy_is_computed_if_many_images_have_its_size(root, monkeypatch):
    """Their rows would be read for each range of images: the cost of a range would depend on the number of all images."""
    monkeypatch.setattr(reuse, "MOST_OF_A_SIZE", 2)
    shutil.copy(root.approved / "a.png", root.approved / "c.png")
    assert embed(root)[0]["linked"] == 1, "two have it"
    shutil.copy(root.approved / "a.png", root.approved / "d.png")

    counts, _ = embed(root)

    assert (counts["linked"], counts["computed"]) == (0, 1)
    assert path(root, "d").read_bytes() == path(root, "a").read_bytes()


@given(st.lists(st.integers(1, 30), max_size=12), st.sets(st.integers(1, 30)), st.integers(0, 3))
def test_rows_of_a_size_are_found_unless_there_are_too_many(sizes, wanted, most):
    rows = [
        SourceRow(f"i{n}", f"i{n}.png", posix_signature(size, n, n), "xxh3:0", 1, 1) for n, size in enumerate(sizes)
    ]
    with Ledger(IN_MEMORY) as ledger:
        ledger.record_sources(rows)

        found = ledger.sources_of_sizes(wanted, most)

    expected = [row for row, size in zip(rows, sizes, strict=True) if size in wanted and sizes.count(size) <= most]
    assert sorted(row.image_id for row in found) == sorted(row.image_id for row in expected)


def test_equal_captions_share_a_state_and_its_mask(root):
    """The tokenizer is not needed for the mask."""
    picture(root.approved / "c.png")
    (root.approved / "c.txt").write_text("noise called a")

    assert embed(root, T5, NoModel)[0]["linked"] == 1

    with Ledger(root.ledger) as ledger:
        masks = {image_id: caption.mask for image_id, caption in ledger.captions(["a", "c"]).items()}
    assert masks["c"] == masks["a"] is not None


def test_copy_where_there_are_no_hard_links(root, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    move(root, "a", "c")

    assert embed(root, DINOV3, NoModel)[0]["linked"] == 1

    assert path(root, "c").read_bytes() == path(root, "a").read_bytes()
    assert not path(root, "c").samefile(path(root, "a"))
    assert row(root, "c").content == row(root, "a").content


def test_file_whose_signature_changed_is_read_before_it_is_linked(root):
    os.utime(path(root, "a"))
    move(root, "a", "c")

    assert embed(root, DINOV3, NoModel)[0]["linked"] == 1


@pytest.mark.parametrize("fault", ["changed", "deleted", "noted", "truncated"])
def test_damaged_file_is_not_linked(root, fault):
    file = path(root, "a")
    data = file.read_bytes()
    if fault == "changed":
        file.write_bytes(data[:-4] + bytes(4))
    elif fault == "deleted":
        file.unlink()
    elif fault == "truncated":
        file.write_bytes(data[:-4])
    else:
        with Ledger(root.ledger) as ledger:
            ledger.record_problems([damaged_file(DINOV3.kind, "a")])
    move(root, "a", "c")

    counts, _ = embed(root)

    assert (counts["linked"], counts["computed"]) == (0, 1)
    assert np.load(path(root, "c")).shape == (1024,)
    assert not list(file.parent.glob(".tmp-*"))


def test_damaged_file_is_not_replaced_by_a_link_to_itself(root):
    """Two names of one file have the same damage."""
    move(root, "a", "c")
    embed(root)
    shutil.copy(root.approved / "c.png", root.approved / "a.png")
    stat = path(root, "c").stat()
    data = path(root, "c").read_bytes()
    with open(path(root, "c"), "r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(bytes(4))
    os.utime(path(root, "c"), ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with Ledger(root.ledger) as ledger:
        ledger.record_problems([damaged_file(DINOV3.kind, "c")])

    counts, _ = embed(root)

    assert counts["linked"] == 0
    assert path(root, "c").read_bytes() == data


def test_a_replaced_array_leaves_the_other_names_of_its_file(root):
    """Nothing writes into an array, because other images may share it."""
    move(root, "a", "c")
    embed(root)
    before = path(root, "a").read_bytes()
    picture(root.approved / "c.png")

    counts, _ = embed(root)

    assert (counts["computed"], counts["replaced"]) == (1, 1)
    assert path(root, "a").read_bytes() == before != path(root, "c").read_bytes()


def test_array_of_an_unknown_model_stays_one(root):
    with Ledger(root.ledger) as ledger:
        (known,) = ledger.files(DINOV3.kind, ["a"]).values()
        ledger.record_files([msgspec.structs.replace(known, model_key=UNKNOWN)])
    move(root, "a", "c")

    assert embed(root, DINOV3, NoModel)[0]["linked"] == 1
    assert row(root, "c").model_key == UNKNOWN


def test_known_model_is_preferred_then_the_first_id(root):
    shutil.copy(root.approved / "a.png", root.approved / "0.png")
    shutil.copy(root.approved / "a.png", root.approved / "z.png")
    embed(root)
    with Ledger(root.ledger) as ledger:
        (first,) = ledger.files(DINOV3.kind, ["0"]).values()
        ledger.record_files([msgspec.structs.replace(first, model_key=UNKNOWN)])
        inventory = surveyed(root, ledger)
        path(root, "z").unlink()
        plan = plan_for(DINOV3, ["z"], inventory, ledger)
        (donors,) = find_donors(DINOV3, plan.jobs, ledger).values()

    assert [donor.image_id for donor in donors] == ["a", "z", "0"]


def test_nothing_is_linked_while_a_kind_is_regenerated(root):
    with Ledger(root.ledger) as ledger:
        regenerate(ledger, DINOV3.kind, "run")
        move(root, "a", "c")
        inventory = surveyed(root, ledger)
        plan = plan_for(DINOV3, ["c"], inventory, ledger)
        assert find_donors(DINOV3, plan.jobs, ledger) == {}


def test_array_of_other_pixels_is_not_linked(root):
    """The input of an array includes the colours that were converted. Spec: docs/spec/stage2.md#colour"""
    converted = row(root, "a")
    move(root, "a", "c")
    with Ledger(root.ledger) as ledger:
        ledger.record_files([msgspec.structs.replace(converted, source=f"{converted.source}+srgb:icc:1")])

    assert embed(root)[0]["computed"] == 1
