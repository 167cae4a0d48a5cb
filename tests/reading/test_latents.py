"""Latents fitted to their bucket."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagemill.errors import ImagemillError
from imagemill.pipeline.shards.shard_manifest import FORMAT, Manifest, ModelEntry, ShardParameters
from imagemill.reading.latents import fit_latent, latent_factors

sides = st.integers(1, 40)


def manifest(**provenance):
    """Return the manifest of a set without samples and with these models."""
    return Manifest(
        format=FORMAT, bucket="1024x1024", digest="", samples=0, tombstones=0, appended=False, members=[], shards=[],
        parameters=ShardParameters(), provenance=provenance,
    )  # fmt: skip


def latent(height, width):
    """Return a latent with a different value at every position."""
    return np.arange(16 * height * width, dtype=np.float32).reshape(16, height, width)


@given(sides, sides, st.tuples(sides, sides), st.sampled_from(["crop", "resize"]), st.floats(0, 0.999999))
def test_fitted_latent_has_the_bucket_size_and_its_own_dtype(height, width, size, fit, corner):
    for where in (None, (corner, corner)):
        fitted = fit_latent(latent(height, width).astype(np.float16), size, fit, where)

        assert fitted.shape == (16, *size)
        assert fitted.dtype == np.float16


def test_crop_takes_the_middle_of_a_larger_latent_bit_for_bit():
    given_latent = latent(7, 10)

    np.testing.assert_array_equal(fit_latent(given_latent, (4, 4), "crop"), given_latent[:, 1:5, 3:7])


def test_latent_of_the_bucket_size_stays_as_it_is():
    given_latent = latent(8, 6)

    for fit in ("crop", "resize"):
        np.testing.assert_array_equal(fit_latent(given_latent, (8, 6), fit), given_latent)


def test_random_corner_reaches_every_window_and_no_further():
    given_latent = latent(5, 4)

    corners = {
        int(fit_latent(given_latent, (3, 3), "crop", (down, right))[0, 0, 0])
        for down in np.linspace(0, 0.9999, 20)
        for right in np.linspace(0, 0.9999, 20)
    }

    assert corners == {4 * top + left for top in range(3) for left in range(2)}


def test_crop_enlarges_a_latent_that_is_too_small_one_way_and_keeps_proportions():
    """(4, 16) into (8, 8): doubled, then cropped to the middle. A smooth slope stays smooth."""
    slope = np.broadcast_to(np.arange(16, dtype=np.float32), (16, 4, 16))

    fitted = fit_latent(slope, (8, 8), "crop")

    np.testing.assert_allclose(np.diff(fitted[0, 0]), 0.5)
    np.testing.assert_allclose(fitted[0, :, 0], fitted[0, 0, 0])


def test_resize_shrinks_by_averages_and_keeps_proportions():
    """(12, 36) into (4, 8): reduced to a third, (4, 12), then cropped to the middle eight columns."""
    noise = np.random.default_rng(0).random((16, 12, 36), np.float32)

    third = noise.reshape(16, 4, 3, 12, 3).mean((2, 4))

    np.testing.assert_allclose(fit_latent(noise, (4, 8), "resize"), third[:, :, 2:10], rtol=1e-5)


@pytest.mark.parametrize(("shift", "expected"), [(0.1, (0.3, 0.1)), (None, (0.3, 0.0))])
def test_factors_are_those_of_the_maker(shift, expected):
    facts = {"scaling_factor": 0.3, "shift_factor": shift}

    assert latent_factors(manifest(vae_latents=ModelEntry(facts=facts)), "here") == expected


@pytest.mark.parametrize("maker", [None, ModelEntry(), ModelEntry(facts={}), ModelEntry(facts={"shift_factor": 1.0})])
def test_factors_that_no_one_recorded_are_not_guessed(maker):
    with pytest.raises(ImagemillError, match=r"(?s)does not record.*normalized=False"):
        latent_factors(manifest(**({"vae_latents": maker} if maker else {})), "here")
