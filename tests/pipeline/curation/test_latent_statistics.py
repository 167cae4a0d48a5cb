"""Moments of the latents equal those of a single pass, for any split and order."""

import json
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagemill.domain.buckets import BUCKETS
from imagemill.domain.embedding_specs import DINOV3, VAE
from imagemill.errors import InvalidNpy
from imagemill.pipeline.curation.latent_statistics import (
    ALL,
    as_table,
    merge,
    merged,
    moments_of,
    plan_statistics,
    read_statistics,
    statistics_path,
    statistics_reports,
)
from imagemill.pipeline.curation.reports import write_report
from imagemill.store.ledger import Ledger
from imagemill.store.provenance import ModelIdentity
from tests.helpers.stage2 import embed, identity_of, photos, picture

SQUARE, TALL = "1024x1024", "832x1216"
IDENTITY = ModelIdentity(kind="vae_latents", model="m", facts={"scaling_factor": 0.5, "shift_factor": 2.0})

sizes = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=12)


def latents(shapes, seed, offset=0.0):
    random = np.random.default_rng(seed)
    return [(random.standard_normal((16, *shape)) + offset).astype(np.float16) for shape in shapes]


def one_pass(arrays):
    """Mean and standard deviation over all values at once, in extended precision."""
    values = np.concatenate([array.reshape(16, -1) for array in arrays], axis=1).astype(np.longdouble)
    mean = values.mean(axis=1)
    return mean, np.sqrt(((values - mean[:, None]) ** 2).mean(axis=1))


def assert_close(moments, mean, std):
    """To 1e-12, relative to the spread of the channel, which is what an error in its mean matters against."""
    scale = np.maximum(np.abs(mean), std) + 1e-300
    assert (np.abs(moments.mean - mean) <= 1e-12 * scale).all()
    assert (np.abs(moments.std - std) <= 1e-12 * scale).all()


@given(sizes, st.integers(0, 2**32), st.sampled_from([0.0, 3.0, 1000.0]), st.data())
def test_any_split_in_any_order_gives_the_moments_of_one_pass(shapes, seed, offset, data):
    arrays = latents(shapes, seed, offset)
    parts = [moments_of(array) for array in data.draw(st.permutations(arrays))]
    cuts = sorted(data.draw(st.sets(st.integers(0, len(parts)), max_size=4)))
    pieces = [parts[a:b] for a, b in zip([0, *cuts], [*cuts, len(parts)], strict=True)]

    together = merge([merge(piece) for piece in data.draw(st.permutations(pieces))])

    assert (together.images, together.count) == (len(arrays), sum(h * w for h, w in shapes))
    assert_close(together, *one_pass(arrays))
    every = np.concatenate([array.reshape(16, -1) for array in arrays], axis=1)
    assert np.array_equal(together.min, every.min(axis=1))
    assert np.array_equal(together.max, every.max(axis=1))


def test_moments_of_nothing_are_no_values():
    nothing = merge([])

    assert (nothing.images, nothing.count) == (0, 0)
    assert merge([nothing, moments_of(np.ones((16, 1, 1), np.float16))]).mean.tolist() == [1.0] * 16


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_latent_with_a_value_that_is_not_finite_is_refused(value):
    latent = np.zeros((16, 2, 2), np.float16)
    latent[3, 1, 1] = value

    with pytest.raises(InvalidNpy, match="non_finite"):
        moments_of(latent)


# ---- a data root


@pytest.fixture
def root(data_root):
    """Three images of one bucket and one of another, with latents of many values."""
    photos(data_root, *"abc", size=(24, 24))
    photos(data_root, "tall", size=(24, 36))
    embed(data_root)
    for seed, image_id in enumerate(["a", "b", "c", "tall"]):
        (array,) = latents([(36 // 8 if image_id == "tall" else 3, 3)], seed)
        np.save(data_root.derived / VAE.folder / f"{image_id}.npy", array)
    return data_root


def count(root, *buckets, identity=IDENTITY):
    """As the asset and its IO manager do; the reports."""
    with Ledger(root.ledger) as ledger:
        plan = plan_statistics(root.derived, ledger, identity, buckets or BUCKETS)
        reports = []
        for report in statistics_reports(plan):
            write_report(report)
            reports.append(report)
    return reports


def statistics(root, name=ALL):
    return read_statistics(statistics_path(root.derived, name))


def stored(root, *ids):
    return [np.load(root.derived / VAE.folder / f"{image_id}.npy") for image_id in ids]


def test_each_bucket_has_the_moments_of_its_latents_and_all_those_of_all(root):
    count(root)

    assert_close(statistics(root, SQUARE).moments, *one_pass(stored(root, *"abc")))
    assert_close(statistics(root, TALL).moments, *one_pass(stored(root, "tall")))
    assert_close(statistics(root).moments, *one_pass(stored(root, *"abc", "tall")))
    assert (statistics(root).images, statistics(root).values_per_channel) == (4, 3 * 9 + 12)
    assert statistics(root).buckets == list(BUCKETS)
    assert statistics(root, "768x1280").mean == []


def test_numbers_after_the_models_scaling_stand_beside_those_as_stored(root):
    """`(z - shift) * scale`, by the factors that the provenance records."""
    count(root)

    found = statistics(root, SQUARE)
    every = np.concatenate([array.reshape(16, -1) for array in stored(root, *"abc")], axis=1).astype(np.float64)
    assert (found.scaled.shift, found.scaled.scale) == (2.0, 0.5)
    assert np.allclose(found.scaled.mean, ((every - 2.0) * 0.5).mean(axis=1), rtol=1e-12)
    assert np.allclose(found.scaled.std, ((every - 2.0) * 0.5).std(axis=1), rtol=1e-12)


def test_model_without_both_factors_gives_numbers_as_stored_only(root):
    count(root, identity=identity_of(root, "vae_latents"))

    assert statistics(root).scaled is None
    assert "scaled" not in as_table(statistics(root))


def test_buckets_counted_one_by_one_give_what_one_run_gives(root):
    count(root)
    together = {path.name: path.read_bytes() for path in (root.derived / "latent_statistics").iterdir()}
    for path in (root.derived / "latent_statistics").iterdir():
        path.unlink()

    for bucket in reversed(BUCKETS):
        count(root, bucket)

    assert {path.name: path.read_bytes() for path in (root.derived / "latent_statistics").iterdir()} == together


def test_second_count_of_the_same_files_reads_none_and_writes_none(root, monkeypatch):
    count(root)
    before = {path: path.stat().st_mtime_ns for path in (root.derived / "latent_statistics").iterdir()}
    monkeypatch.setattr("imagemill.pipeline.stage2.valid_files.read_npy", lambda path: pytest.fail(f"read {path}"))

    reports = count(root)

    assert {path: path.stat().st_mtime_ns for path in (root.derived / "latent_statistics").iterdir()} == before
    assert [report.partition for report in reports] == [*BUCKETS, None]
    assert "left out" not in str(reports[0].counts)


def test_bucket_is_counted_again_where_a_latent_of_it_changed_and_only_that_bucket(root):
    count(root)
    before = statistics_path(root.derived, TALL).stat().st_mtime_ns
    np.save(root.derived / VAE.folder / "a.npy", np.full((16, 3, 3), 7, np.float16))

    count(root)

    assert statistics_path(root.derived, TALL).stat().st_mtime_ns == before
    assert_close(statistics(root, SQUARE).moments, *one_pass(stored(root, *"abc")))
    assert statistics(root).max == [7.0] * 16


def test_file_that_is_broken_missing_or_stale_is_left_out_and_counted(root):
    photos(root, *"def", size=(24, 24))
    embed(root)
    picture(root.approved / "f.png", size=(24, 24))
    embed(root, DINOV3)
    path = root.derived / VAE.folder / "a.npy"
    path.write_bytes(path.read_bytes()[:-1])
    (root.derived / VAE.folder / "b.npy").unlink()
    np.save(root.derived / VAE.folder / "c.npy", np.full((16, 3, 3), np.nan, np.float16))
    np.save(root.derived / VAE.folder / "d.npy", np.zeros((16, 3, 4), np.float16))
    np.save(root.derived / VAE.folder / "stranger.npy", np.zeros((16, 3, 3), np.float16))

    count(root)

    found = statistics(root, SQUARE)
    assert found.images == 1
    assert found.left_out == {
        "truncated": 1, "missing_file": 1, "non_finite": 1, "wrong_shape": 1, "stale": 1,
    }  # fmt: skip


def test_latent_that_rots_under_the_ledgers_eyes_is_left_out(root):
    """Same size, same time, same inode: only the numbers tell."""
    count(root)
    statistics_path(root.derived, SQUARE).unlink()
    path = root.derived / VAE.folder / "a.npy"
    before = path.stat()
    with open(path, "r+b") as file:
        file.seek(-2, 2)
        file.write(np.float16(np.inf).tobytes())
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))

    count(root)

    assert (statistics(root, SQUARE).images, statistics(root, SQUARE).left_out) == (2, {"damaged": 1})


def test_bucket_of_another_model_is_not_merged(root):
    """One directory never mixes two models, and no number does."""
    count(root)
    other = ModelIdentity(kind="vae_latents", model="other", facts={"weights": "other"})

    count(root, SQUARE, identity=other)

    assert statistics(root).buckets == [SQUARE]
    assert merged(root.derived, IDENTITY).buckets == [bucket for bucket in BUCKETS if bucket != SQUARE]


def test_document_that_is_not_ours_is_replaced(root):
    path = statistics_path(root.derived, SQUARE)
    path.parent.mkdir()
    path.write_text(json.dumps({"format": "another"}))

    count(root)

    assert statistics(root, SQUARE).images == 3


def test_table_has_a_row_per_channel(root):
    count(root)

    lines = as_table(statistics(root)).splitlines()
    assert len(lines) == 2 + 16
    assert {line.count("|") for line in lines} == {8}


def test_data_root_without_images_gives_documents_without_numbers(data_root):
    count(data_root)

    assert (statistics(data_root).images, statistics(data_root).mean) == (0, [])
    assert statistics(data_root).scaled is None
