"""The Flux VAE's encoder: crop, tiling rule, one float16 latent per image."""

import hashlib
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import load_file, save_file

from imagemill.domain.buckets import assign_bucket, bucket_crop, bucket_size
from imagemill.domain.embedding_specs import VAE
from imagemill.domain.encoder_settings import VaeSettings
from imagemill.encoders import flux_vae
from imagemill.encoders.flux_vae import FluxVaeEncoder
from imagemill.encoders.preview import ensure_preview
from imagemill.errors import NonFiniteEmbedding, Refused
from imagemill.store.provenance import differing_facts

# Value of the float64 reference, which is the same for any number of threads, batch, and instruction set.
GOLDEN = "88602b50e751a5ce4ddf603d544b9adc4730e9d51a519ae7525a7655a9eb861b"


def image(height, width, seed="image"):
    """Smooth colours with some grain, identical on every machine."""
    y, x = np.mgrid[:height, :width]
    smooth = np.stack([y * 200 // height, x * 200 // width, (x + y) * 200 // (height + width)], axis=2)
    grain = np.frombuffer(hashlib.shake_256(seed.encode()).digest(smooth.size), np.uint8).reshape(smooth.shape)
    return (smooth + grain // 5).astype(np.uint8)


def load(preview_root, *, model="preview", threads=1, dtype="float32", spec=VAE, **settings):
    settings = VaeSettings(model=str(model), device="cpu", dtype=dtype, **settings)
    return FluxVaeEncoder.load(settings, spec=spec, threads=threads, preview_root=preview_root)


@pytest.fixture(scope="module")
def encoder(preview_root):
    return load(preview_root)


@pytest.fixture(scope="module")
def plain(preview_root):
    """The model as loaded by diffusers, without imagemill's settings."""
    from diffusers import AutoencoderKL

    folder = ensure_preview(VAE, preview_root)
    return AutoencoderKL.from_pretrained(folder, low_cpu_mem_usage=False).eval()


@pytest.fixture
def spoilt(preview_root, tmp_path):
    """Copy the preview model with one value of one tensor replaced."""

    def spoil(key, value):
        folder = shutil.copytree(ensure_preview(VAE, preview_root), tmp_path / "model")
        file = folder / "diffusion_pytorch_model.safetensors"
        tensors = {name: tensor.astype(np.float32) for name, tensor in load_file(file).items()}
        tensors[key].flat[0] = value
        save_file(tensors, file, metadata={"format": "pt"})
        return folder

    return spoil


def encode(encoder, *images):
    return np.stack(encoder.encode([encoder.prepare(pixels) for pixels in images]))


@torch.inference_mode()
def plain_mean(plain, pixels):
    values = torch.from_numpy(pixels.astype(np.float32) / 127.5 - 1).permute(2, 0, 1)[None]
    return plain.encode(values).latent_dist.mean[0].numpy()


# ---- shapes


@pytest.mark.parametrize(
    ("height", "width", "expected"),
    [
        (769, 1023, (16, 96, 127)),
        (64, 96, (16, 8, 12)),
        (15, 15, (16, 1, 1)),
        (8, 512, (16, 1, 64)),
        (100, 8, (16, 12, 1)),
    ],
)
def test_latent_is_an_eighth_of_height_and_width(height, width, expected, encoder):
    """float16 (16, H // 8, W // 8), height first. Spec: docs/spec/stage2.md#vae-latents"""
    [latent] = encoder.encode([encoder.prepare(image(height, width))])

    assert (expected, np.float16) == (latent.shape, latent.dtype)
    assert VAE.shape(height, width) == latent.shape
    assert latent.flags.c_contiguous
    assert np.isfinite(latent).all()


@pytest.mark.parametrize(("height", "width"), [(7, 9), (9, 7), (1, 1), (7, 4000)])
def test_side_under_eight_pixels_is_refused_before_the_model(height, width, encoder):
    """`too_small`. Spec: docs/spec/stage2.md#vae-latents"""
    with pytest.raises(Refused, match=f"the image is {width}x{height} pixels, a latent needs 8 on each side") as caught:
        encoder.prepare(np.zeros((height, width, 3), np.uint8))

    assert caught.value.reason == "too_small"


def test_item_other_than_an_rgb_image_is_refused(encoder):
    with pytest.raises(TypeError, match=r"vae_latents takes uint8 pixels \(height, width, 3\), not uint8 \(9, 9, 4\)"):
        encoder.prepare(np.zeros((9, 9, 4), np.uint8))


# ---- the bucket's crop


@pytest.mark.parametrize("size", [(426, 640), (640, 427), (375, 500), (64, 64), (1536, 2048)])
def test_bucket_latent_is_that_of_the_crop_resized_by_pillow(size, preview_root, plain):
    """Equal to `AutoencoderKL.encode` of the same crop, value for value. Spec: docs/spec/stage2.md#bucket-size"""
    pixels = image(*size)
    wide, high = bucket_size(assign_bucket(size[1], size[0]))
    crop = Image.fromarray(pixels).crop(bucket_crop(size[1], size[0]))
    picture = crop.resize((wide, high), Image.Resampling.LANCZOS, reducing_gap=3.0)

    [latent] = encode(load(preview_root, size="bucket"), pixels)

    assert latent.shape == (16, high // 8, wide // 8) == VAE.requested(VaeSettings(size="bucket")).shape(*size)
    np.testing.assert_array_equal(latent, plain_mean(plain, np.asarray(picture)).astype(np.float16))


def test_size_and_filter_are_part_of_the_identity(preview_root):
    original, bucket = load(preview_root).identity, load(preview_root, size="bucket").identity

    assert differing_facts(original, bucket) == ["filter", "size"]


def test_root_with_a_recorded_model_keeps_its_memory_format(preview_root):
    """torch's group norm on the CPU loses three digits in channels_last. Spec: docs/spec/stage2.md#vae-latents"""
    old = load(preview_root, spec=VAE.recorded({}))
    new = load(preview_root)
    pixels = image(512, 512)

    assert (old.identity.facts["memory_format"], new.identity.facts["memory_format"]) == (
        "channels_last",
        "contiguous_format",
    )
    assert not np.array_equal(encode(old, pixels), encode(new, pixels))


# ---- preparation


def test_image_is_cropped_on_the_right_and_bottom(encoder):
    """Decoding the latent gives exactly the cropped image. Spec: docs/spec/stage2.md#vae-latents"""
    pixels = image(45, 61)

    prepared = encoder.prepare(pixels)

    np.testing.assert_array_equal(pixels[:40, :56], prepared.payload.numpy())
    np.testing.assert_array_equal(encode(encoder, pixels[:40, :56]), encode(encoder, pixels))


def test_images_of_one_latent_size_share_a_call_within_the_pixel_budget(encoder):
    """The group is the size of the latent; the pixel budget counts cropped pixels."""
    groups = [(prepared.group, prepared.pixels) for prepared in map(encoder.prepare, (image(47, 63), image(40, 56)))]

    assert groups == [((5, 7, False), 40 * 56)] * 2
    assert encoder.prepare(image(56, 40)).group != groups[0][0]


def test_pixels_may_be_read_only_and_are_released(encoder, recwarn):
    """np.asarray of a PIL image is read-only."""
    pixels = image(40, 56)
    pixels.flags.writeable = False

    prepared = encoder.prepare(pixels)

    assert not recwarn.list
    assert not np.shares_memory(pixels, prepared.payload.numpy())


# ---- the latent


def test_latent_is_the_raw_mean_of_the_posterior(encoder, plain):
    """No sampling, no scale, no shift; pixels as value / 127.5 - 1. Spec: docs/spec/stage2.md#embeddings"""
    pixels = image(64, 96)

    expected = plain_mean(plain, pixels)

    np.testing.assert_allclose(expected, encode(encoder, pixels)[0].astype(np.float32), atol=2e-3)


def test_latent_does_not_depend_on_batch_or_repetition(encoder):
    """A batch of 4, batches of 1, and a repetition give the same bits."""
    images = [image(120, 88, str(n)) for n in range(4)]

    together = encode(encoder, *images)

    np.testing.assert_array_equal(together, np.concatenate([encode(encoder, pixels) for pixels in images]))
    np.testing.assert_array_equal(together, encode(encoder, *images))
    assert len({latent.tobytes() for latent in together}) == 4


@pytest.mark.parametrize("threads", [1, 2])
def test_float64_reference_has_its_golden_value(threads, preview_root):
    """Bit-stable over threads, batches, and instruction sets."""
    encoder = load(preview_root, threads=threads, dtype="float64")

    latents = encode(encoder, image(77, 123, "a"), image(77, 123, "b"))

    assert hashlib.sha256(latents.tobytes()).hexdigest() == GOLDEN
    np.testing.assert_array_equal(latents[:1], encode(encoder, image(77, 123, "a")))


def test_bfloat16_is_close_and_stored_as_float16(encoder, preview_root):
    """The difference is at most 0.1."""
    latent = encode(load(preview_root, dtype="bfloat16"), image(64, 96))

    assert np.float16 == latent.dtype
    np.testing.assert_allclose(encode(encoder, image(64, 96)).astype(np.float32), latent.astype(np.float32), atol=0.1)


def test_attention_in_the_middle_block_gives_the_same_bits_in_a_batch(preview_root, tmp_path):
    """The real model has such a block. The memory layout of a batch must not change the last bits."""
    from diffusers import AutoencoderKL

    torch.manual_seed(0)
    model = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(8, 8, 16, 32),
        latent_channels=16,
        norm_num_groups=4,
        use_quant_conv=False,
        use_post_quant_conv=False,
        mid_block_add_attention=True,
    )
    model.save_pretrained(tmp_path / "model")
    encoder = load(preview_root, model=tmp_path / "model")
    images = [image(160, 96, str(n)) for n in range(4)]

    together = encode(encoder, *images)

    np.testing.assert_array_equal(together, np.concatenate([encode(encoder, pixels) for pixels in images]))


# ---- tiling


@pytest.mark.parametrize(("height", "width", "tiled"), [(2048, 2048, False), (2048, 2055, False), (2056, 2048, True)])
def test_tiling_is_chosen_by_pixel_count_alone(height, width, tiled, encoder):
    """Tiling starts above 4 MP after cropping. Spec: docs/spec/stage2.md#vae-latents"""
    prepared = encoder.prepare(np.zeros((height, width, 3), np.uint8))

    assert (height // 8, width // 8, tiled) == prepared.group


@pytest.mark.parametrize(("height", "width"), [(1100, 772), (776, 1544)])
def test_tiled_latent_has_the_shape_of_an_untiled_one(height, width, encoder, plain, monkeypatch):
    """Without the crop, diffusers' tiling raises for these sizes."""
    monkeypatch.setattr(flux_vae, "TILED_ABOVE_PIXELS", 500_000)
    pixels = image(height, width)
    plain.enable_tiling()
    expected = plain_mean(plain, pixels[: height // 8 * 8, : width // 8 * 8])
    plain.disable_tiling()

    latent = encode(encoder, pixels)[0]
    monkeypatch.undo()
    whole = encode(encoder, pixels)[0]

    np.testing.assert_allclose(expected, latent.astype(np.float32), atol=2e-3)
    assert VAE.shape(height, width) == latent.shape
    assert not np.array_equal(whole, latent), "tiled and whole latents differ: hence a rule"


# ---- other rules


def test_decoder_is_not_loaded(encoder):
    """Only encoding is needed: 50 of 84 million parameters belong to the decoder."""
    assert not hasattr(encoder._model, "decoder")


def test_calls_are_counted(preview_root):
    """The summary prints model calls per kind. Spec: docs/spec/stage2.md#first-image"""
    encoder = load(preview_root)
    counts = [encoder.calls]
    for batch in (1, 3):
        encode(encoder, *[image(16, 24)] * batch)
        counts.append(encoder.calls)

    assert counts == [0, 1, 2]


def test_non_finite_weights_give_no_latent(spoilt, preview_root):
    """Values must be finite before the cast. Spec: docs/spec/stage2.md#vae-latents"""
    encoder = load(preview_root, model=spoilt("encoder.conv_out.bias", np.nan))

    with pytest.raises(NonFiniteEmbedding, match="vae_latents: the model produced NaN or infinity"):
        encode(encoder, image(16, 24))


def test_latent_outside_the_float16_range_is_refused(spoilt, preview_root):
    """Values must be finite after the cast too: 100,000 is finite only in float32."""
    encoder = load(preview_root, model=spoilt("encoder.conv_out.bias", 1e5))

    with pytest.raises(NonFiniteEmbedding, match=r"vae_latents: a value of 1e\+05|vae_latents: a value of 1000"):
        encode(encoder, image(16, 24))
