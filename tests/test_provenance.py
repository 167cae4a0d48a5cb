"""One directory never mixes two models. Source: CONTRACTS section 0, "Provenance"."""

import pytest

from imagemill.errors import ModelMismatch
from imagemill.provenance import ModelIdentity, guard_identity, read_identity


def identity(**changes):
    given = {"kind": "vae_latents", "model": "a/b", "revision": "1", "facts": {"weights": "x", "dtype": "float32"}}
    return ModelIdentity(**{**given, **changes})


def test_first_maker_is_recorded_and_the_same_one_passes(tmp_path):
    guard_identity(tmp_path, identity())
    guard_identity(tmp_path, identity())

    assert read_identity(tmp_path, "vae_latents") == identity()
    assert read_identity(tmp_path, "dinov3_npy") is None


def test_other_weights_are_refused_and_the_difference_is_named(tmp_path):
    guard_identity(tmp_path, identity())

    with pytest.raises(ModelMismatch, match=r"differs in dtype, weights"):
        guard_identity(tmp_path, identity(facts={"weights": "y", "dtype": "bfloat16"}))
    assert read_identity(tmp_path, "vae_latents") == identity(), "the record stays"


def test_same_weights_from_a_mirror_on_another_device_are_the_same_model(tmp_path):
    guard_identity(tmp_path, identity())

    guard_identity(tmp_path, identity(model="mirror/b", revision="2", device="cuda", threads=8))
