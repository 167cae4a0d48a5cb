"""DINOv3: preprocessing value by value, one float32 vector per image. Spec: docs/spec/stage2.md#dinov3"""

import hashlib
import json
import shutil
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from torch.nn.functional import interpolate

from imagemill.domain.embedding_specs import DINOV3
from imagemill.domain.encoder_settings import DinoV3Settings, EncoderSettings
from imagemill.encoders.dinov3 import DinoV3Encoder
from imagemill.encoders.preview import ensure_preview
from imagemill.errors import ModelUnusable, NonFiniteEmbedding
from imagemill.store.provenance import differing_facts

# Value of the float64 reference, which is the same for any number of threads, batch, and instruction set.
GOLDEN = "023e0e3bd1b186082e2c5beaacdc9a4a536425b96119a4c54e3176ad6a6c7bc0"


def image(height, width, seed="image"):
    """Smooth colours with some grain, identical on every machine."""
    y, x = np.mgrid[:height, :width]
    smooth = np.stack([y * 200 // height, x * 200 // width, (x + y) * 200 // (height + width)], axis=2)
    grain = np.frombuffer(hashlib.shake_256(seed.encode()).digest(smooth.size), np.uint8).reshape(smooth.shape)
    return (smooth + grain // 5).astype(np.uint8)


def load(preview_root, *, model="preview", threads=1, dtype="float32"):
    settings = EncoderSettings(model=str(model), device="cpu", dtype=dtype)
    return DinoV3Encoder.load(settings, spec=DINOV3, threads=threads, preview_root=preview_root)


@pytest.fixture(scope="module")
def encoder(preview_root):
    return load(preview_root)


@pytest.fixture
def folder(preview_root, tmp_path):
    """A copy of the preview model that a test may damage."""
    return shutil.copytree(ensure_preview(DINOV3, preview_root), tmp_path / "model")


def edit_processor(folder, **changes):
    path = folder / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def encode(encoder, *images):
    return np.stack(encoder.encode([encoder.prepare(pixels) for pixels in images]))


def triangle_weights(size, target):
    """Rows of an antialiased bilinear resize: triangle filter as wide as the scale, pixel centres at halves."""
    scale = size / target
    reach = max(scale, 1.0)
    centres = (np.arange(target) + 0.5) * scale
    distance = np.abs(np.arange(size)[None] + 0.5 - centres[:, None])
    weights = np.maximum(1 - distance / reach, 0)
    return weights / weights.sum(axis=1, keepdims=True)


# ---- preprocessing


@pytest.mark.parametrize(("height", "width"), [(769, 1023), (224, 224), (100, 37), (1, 1), (224, 500), (64, 2000)])
def test_preprocessing_equals_an_independent_implementation(height, width, encoder):
    """Rescale, resize without keeping the aspect ratio, antialias, then normalise."""
    pixels = image(height, width)
    resized = np.einsum(
        "ih,jw,hwc->cij", triangle_weights(height, 224), triangle_weights(width, 224), pixels / 255, optimize=True
    )
    mean, std = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    expected = (resized - mean[:, None, None]) / std[:, None, None]

    prepared = encoder.prepare(pixels).payload

    assert (torch.float32, (3, 224, 224)) == (prepared.dtype, tuple(prepared.shape))
    np.testing.assert_allclose(expected, prepared.numpy(), atol=2e-5)


def test_image_with_the_model_size_is_only_rescaled_and_normalised(encoder):
    """Equal bit for bit, because no resize takes place."""
    pixels = image(224, 224)
    mean = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
    std = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)

    expected = (torch.tensor(pixels).permute(2, 0, 1) * (1 / 255) - mean) / std

    assert torch.equal(expected, encoder.prepare(pixels).payload)


def test_preprocessing_has_the_same_bits_with_any_number_of_threads(encoder):
    pixels = image(769, 1023)
    before = torch.get_num_threads()
    prepared = []
    for threads in (1, 2, 4):
        torch.set_num_threads(threads)
        prepared.append(encoder.prepare(pixels).payload)
    torch.set_num_threads(before)

    assert torch.equal(prepared[0], prepared[1])
    assert torch.equal(prepared[0], prepared[2])


def test_preprocessing_takes_size_and_statistics_from_the_model(preview_root, folder):
    edit_processor(folder, size={"height": 64, "width": 96}, image_mean=[0.5] * 3, image_std=[0.5] * 3)
    encoder = load(preview_root, model=folder)

    prepared = encoder.prepare(np.full((80, 80, 3), 255, np.uint8))

    assert (prepared.group, tuple(prepared.payload.shape)) == ((64, 96), (3, 64, 96))
    torch.testing.assert_close(torch.ones(3, 64, 96), prepared.payload)
    assert load(preview_root).identity.key != encoder.identity.key


@pytest.mark.parametrize(
    "change",
    [
        {"image_processor_type": "ViTImageProcessor"},
        {"resample": 3},
        {"do_center_crop": True},
        {"do_resize": False},
        {"do_normalize": False},
        {"size": {"shortest_edge": 224}},
        {"size": None},
        {"image_mean": [0.5, 0.5]},
        {"image_std": "grey"},
        {"rescale_factor": None},
    ],
)
def test_preprocessing_with_unsupported_steps_is_refused(change, preview_root, folder):
    """The model must never silently receive pixels unlike those of its training."""
    edit_processor(folder, **change)

    with pytest.raises(ModelUnusable, match=r"preprocessor_config\.json"):
        load(preview_root, model=folder)


def test_slow_processor_name_selects_the_same_steps(preview_root, folder):
    """Other keys of the file are not part of the identity."""
    edit_processor(folder, image_processor_type="DINOv3ViTImageProcessor", data_format="channels_first")

    assert load(preview_root).identity.key == load(preview_root, model=folder).identity.key


def test_preparation_gives_equal_results_on_one_and_many_threads(encoder):
    """`prepare` runs on decode threads."""
    images = [image(50 + 7 * n, 90 - 3 * n, str(n)) for n in range(16)]
    expected = [encoder.prepare(pixels).payload for pixels in images]

    with ThreadPoolExecutor(8) as pool:
        prepared = list(pool.map(lambda pixels: encoder.prepare(pixels).payload, images))

    assert all(torch.equal(one, other) for one, other in zip(expected, prepared, strict=True))


@pytest.mark.parametrize("flag", ["read-only", "turned", "view"])
def test_pixels_may_be_read_only_or_a_view(flag, encoder, recwarn):
    """np.asarray of a PIL image is read-only."""
    pixels = image(40, 60)
    expected = encoder.prepare(pixels.copy()).payload
    match flag:
        case "read-only":
            pixels.flags.writeable = False
        case "turned":
            pixels = np.ascontiguousarray(pixels[::-1, ::-1])[::-1, ::-1]
        case "view":
            pixels = np.pad(pixels, ((3, 3), (5, 5), (0, 0)))[3:-3, 5:-5]

    assert torch.equal(expected, encoder.prepare(pixels).payload)
    assert not recwarn.list


@pytest.mark.parametrize(
    ("height", "width"), [(769, 1023), (128, 300), (129, 40), (300, 224), (224, 300), (1, 1), (3000, 64)]
)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_resize_in_blocks_of_rows_has_the_bits_of_one_resize(height, width, dtype, preview_root):
    pixels, encoder = image(height, width), load(preview_root, dtype=dtype)
    host = encoder._host
    values = torch.tensor(pixels).permute(2, 0, 1).contiguous().to(host.dtype) * host.scale
    resized = interpolate(values[None], (224, 224), mode="bilinear", align_corners=False, antialias=True)[0]

    assert torch.equal((resized - host.mean) / host.std, encoder.prepare(pixels).payload)


# ---- fast preprocessing


def fast(preview_root, **changes):
    settings = DinoV3Settings(device="cpu", preprocessing="fast", **changes)
    return DinoV3Encoder.load(settings, spec=DINOV3.requested(settings), threads=1, preview_root=preview_root)


@pytest.mark.parametrize(("height", "width"), [(769, 1023), (100, 37), (1, 1), (64, 2000)])
def test_fast_preprocessing_differs_by_at_most_one_grey_level(height, width, encoder, preview_root):
    """Before normalisation, in units of 1/255."""
    pixels, model = image(height, width), fast(preview_root)

    difference = (model.prepare(pixels).payload - encoder.prepare(pixels).payload) * encoder._host.std * 255

    assert difference.abs().max() <= 1.001
    assert not torch.equal(model.prepare(pixels).payload, encoder.prepare(pixels).payload) or (height, width) == (1, 1)


def test_vector_of_fast_preprocessing_has_nearly_the_same_direction(encoder, preview_root):
    [expected], [vector] = encode(encoder, image(769, 1023)), encode(fast(preview_root), image(769, 1023))

    assert expected @ vector / np.linalg.norm(expected) / np.linalg.norm(vector) > 0.9999
    assert not np.array_equal(expected, vector)


def test_fast_preprocessing_is_another_identity(encoder, preview_root):
    """Vectors of the two are never mixed; an identity without the fact is that of exact preprocessing."""
    exact, other = encoder.identity, fast(preview_root).identity

    assert differing_facts(exact, other) == differing_facts(other, exact) == ["resize"]
    assert DINOV3.recorded(exact.facts).contract == {"resize": "exact"}
    assert DINOV3.recorded(other.facts).contract == {"resize": "fast"}


@pytest.mark.parametrize(
    "item",
    ["text", np.zeros((8, 8), np.uint8), np.zeros((8, 8, 4), np.uint8), np.zeros((8, 8, 3), np.float32)],
    ids=["text", "grey", "alpha", "float"],
)
def test_item_other_than_an_rgb_image_is_refused(item, encoder):
    """Alpha would crash a model, and grey would broadcast silently."""
    with pytest.raises(TypeError, match=r"dinov3_npy takes uint8 pixels \(height, width, 3\), not"):
        encoder.prepare(item)


# ---- the model


def test_embedding_is_one_float32_vector(encoder):
    """float32 (1024,). Spec: docs/spec/stage2.md#dinov3"""
    [vector] = encoder.encode([encoder.prepare(image(769, 1023))])

    assert ((1024,), np.float32) == (vector.shape, vector.dtype)
    assert np.isfinite(vector).all()
    assert not np.isclose(np.linalg.norm(vector), 1), "it must not be normalised"


def test_embedding_is_the_class_token_after_the_final_norm(encoder):
    prepared = encoder.prepare(image(100, 150))

    with torch.inference_mode():
        expected = encoder._model(pixel_values=prepared.payload[None]).last_hidden_state[0, 0]

    np.testing.assert_array_equal(expected.numpy(), encoder.encode([prepared])[0])


def test_embedding_does_not_depend_on_batch_or_repetition(encoder):
    """A batch of 4, batches of 1, and a repetition give the same bits."""
    images = [image(60 + 10 * n, 100, str(n)) for n in range(4)]

    together = encode(encoder, *images)

    np.testing.assert_array_equal(together, np.concatenate([encode(encoder, pixels) for pixels in images]))
    np.testing.assert_array_equal(together, encode(encoder, *images))
    assert len({vector.tobytes() for vector in together}) == 4


@pytest.mark.parametrize("threads", [1, 2])
def test_float64_reference_has_its_golden_value(threads, preview_root):
    """Bit-stable over threads, batches, and instruction sets."""
    encoder = load(preview_root, threads=threads, dtype="float64")

    vectors = encode(encoder, image(77, 123, "a"), image(123, 77, "b"))

    assert hashlib.sha256(vectors.tobytes()).hexdigest() == GOLDEN
    np.testing.assert_array_equal(vectors[:1], encode(encoder, image(77, 123, "a")))


def test_float32_is_close_to_the_float64_reference(encoder, preview_root):
    """Within 1e-4."""
    reference = load(preview_root, dtype="float64")

    np.testing.assert_allclose(encode(reference, image(77, 123)), encode(encoder, image(77, 123)), atol=1e-4)


def test_bfloat16_vector_has_nearly_the_same_direction(encoder, preview_root):
    """The cosine is at least 0.999, and the vector is stored as float32."""
    [expected], [vector] = encode(encoder, image(77, 123)), encode(load(preview_root, dtype="bfloat16"), image(77, 123))

    assert np.float32 == vector.dtype
    assert expected @ vector / np.linalg.norm(expected) / np.linalg.norm(vector) >= 0.999


def test_bfloat16_vector_alone_and_in_a_batch_is_within_the_tolerance(encoder, preview_root):
    """0.1 for each value. In bfloat16, bytes may depend on the batch. Spec: docs/spec/stage2.md#determinism"""
    images = [image(77, 123, seed) for seed in "abcdefgh"]
    expected, model = encode(encoder, *images), load(preview_root, dtype="bfloat16")

    alone, together = np.concatenate([encode(model, one) for one in images]), encode(model, *images)

    for vectors in (alone, together):
        np.testing.assert_allclose(expected, vectors, rtol=0, atol=0.1)
    np.testing.assert_allclose(alone, together, rtol=0, atol=0.1)


def test_preview_vectors_reflect_image_similarity(encoder):
    """This allows trying near-duplicate detection without the real model."""
    pixels = image(300, 400)
    smaller = pixels[::2, ::2]
    other = 255 - pixels[::-1]
    a, b, c = (vector / np.linalg.norm(vector) for vector in encode(encoder, pixels, smaller, other))

    assert a @ b > 0.95 > a @ c


def test_calls_are_counted(preview_root):
    """The summary prints model calls per kind. Spec: docs/spec/stage2.md#first-image"""
    encoder = load(preview_root)
    counts = [encoder.calls]
    for batch in (1, 3):
        encode(encoder, *[image(20, 20)] * batch)
        counts.append(encoder.calls)

    assert counts == [0, 1, 2]


def test_non_finite_weights_give_no_embedding(preview_root, folder):
    """Spec: docs/spec/conventions.md#refused-and-failed"""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["norm.weight"][5] = np.nan
    save_file(tensors, file, metadata={"format": "pt"})

    with pytest.raises(NonFiniteEmbedding, match="dinov3_npy: the model produced NaN or infinity"):
        encode(load(preview_root, model=folder), image(20, 20))


def test_closed_encoder_releases_its_model(preview_root):
    """A pass frees the memory at its end. Spec: docs/spec/stage2.md#pass-names"""
    import weakref

    encoder = load(preview_root)
    model = weakref.ref(encoder._model)

    encoder.close()
    encoder.close()

    assert model() is None
