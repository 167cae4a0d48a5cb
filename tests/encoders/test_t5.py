"""T5: tokens and masks equal those of transformers, and hidden states do not depend on neighbours."""

import hashlib
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from imagemill.domain.embedding_specs import T5
from imagemill.domain.encoder_settings import EncoderSettings
from imagemill.encoders.preview import ensure_preview
from imagemill.encoders.t5 import T5Encoder, T5Tokenizer
from imagemill.errors import ModelUnusable, NonFiniteEmbedding

# Value of the float64 reference, which is the same for any number of threads, batch, and instruction set.
GOLDEN = "164f6b9b8419d80f7b9774fd9d04dc39c2001dd4897500cdaa056badc27d9b34"

SHORT = "a photo of a dog"
LONG = "a red bird on a green tree near the old bridge " * 12
CAPTIONS = [
    SHORT,
    LONG,
    "",
    " ",
    "dog",
    "Tomatoes, 3.50 a pound!",
    "猫 on a mat",
    "a </s> b <pad> c",
    "x" * 300,
    "\n\ta\u2028b ",
]


def load(preview_root, *, model="preview", threads=1, dtype="float32"):
    chosen = EncoderSettings(model=str(model), device="cpu", dtype=dtype)
    return T5Encoder.load(chosen, spec=T5, threads=threads, preview_root=preview_root)


@pytest.fixture(scope="module")
def encoder(preview_root):
    return load(preview_root)


@pytest.fixture(scope="module")
def tokenizer(preview_root):
    return T5Encoder.tokenizer(EncoderSettings(), spec=T5, threads=1, preview_root=preview_root)


@pytest.fixture(scope="module")
def reference(preview_root):
    """Call transformers' tokenizer with its own padding and truncation."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(ensure_preview(T5, preview_root))
    return lambda caption: tokenizer(caption, padding="max_length", truncation=True, max_length=77)


def encode(encoder, *captions):
    return np.stack(encoder.encode([encoder.prepare(caption) for caption in captions]))


# ---- tokens and masks


@pytest.mark.parametrize("caption", CAPTIONS)
def test_tokens_and_mask_equal_those_of_transformers(caption, encoder, tokenizer, reference):
    """77 tokens, padded and truncated. Spec: docs/spec/stage2.md#t5"""
    expected = reference(caption)

    ids, _ = tokenizer.encode(caption)
    [(mask, _)] = tokenizer.masks([caption])

    assert expected["attention_mask"] == mask
    assert expected["input_ids"] == ids + [0] * (77 - len(ids))
    assert mask == encoder.prepare(caption).facts["mask"]


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=200))
def test_tokens_of_any_text_equal_those_of_transformers(tokenizer, reference, caption):
    expected = reference(caption)

    ids, truncated = tokenizer.encode(caption)

    assert expected["input_ids"][: len(ids)] == ids
    assert (sum(expected["attention_mask"]), 1) == (len(ids), ids[-1])
    assert not truncated or len(ids) == 77


@pytest.mark.parametrize(("tokens", "truncated"), [(76, False), (77, False), (78, True), (200, True)])
def test_caption_is_truncated_to_77_tokens_including_the_end_token(tokens, truncated, encoder, tokenizer):
    """A caption of exactly 77 tokens with the end token is kept; a longer one is truncated and reported."""
    caption = "dog " * (tokens - 1)

    ids, cut = tokenizer.encode(caption)
    prepared = encoder.prepare(caption)

    assert (min(tokens, 77), truncated, 1) == (len(ids), cut, ids[-1])
    assert ([1] * min(tokens, 77) + [0] * max(77 - tokens, 0), truncated) == (
        prepared.facts["mask"],
        prepared.facts["truncated"],
    )


def test_mask_is_77_python_integers(tokenizer):
    """It is serialised to JSON without conversion. Spec: docs/spec/stage2.md#record-fields"""
    [(mask, truncated)] = tokenizer.masks([SHORT])

    assert {int} == {type(value) for value in mask}
    assert (len(mask), sum(mask), truncated) == (77, 6, False)


def test_empty_caption_still_has_its_end_token(tokenizer):
    assert tokenizer.masks([""]) == [([1] + [0] * 76, False)]


def test_lone_surrogate_in_a_caption_is_accepted(encoder, tokenizer):
    """A JSON escape can produce one. One bad item never stops the others.

    Spec: docs/spec/conventions.md#completion-and-identity
    """
    assert tokenizer.encode("a ? dog") == tokenizer.encode("a \ud800 dog")
    assert encode(encoder, "a \ud800 dog")[0].shape == (77, 1024)


def test_tokenizer_of_the_spec_needs_no_weights(preview_root, tmp_path):
    """The mask comes from the tokenizer alone, which any pass may load. Spec: docs/spec/stage2.md#record-fields"""
    folder = shutil.copytree(ensure_preview(T5, preview_root), tmp_path / "model")
    (folder / "model.safetensors").unlink()
    chosen = EncoderSettings(model=str(folder))

    tokenizer = T5.encoder_class().tokenizer(chosen, spec=T5, threads=1, preview_root=preview_root)

    assert isinstance(tokenizer, T5Tokenizer)
    assert sum(tokenizer.masks([SHORT])[0][0]) == 6


def test_saved_tokenizer_settings_do_not_change_padding_and_truncation(preview_root, tmp_path, tokenizer):
    """Files saved after use contain truncation and padding settings, which must not be combined with imagemill's."""
    from tokenizers import Tokenizer

    folder = shutil.copytree(ensure_preview(T5, preview_root), tmp_path / "model")
    baked = Tokenizer.from_file(str(folder / "tokenizer.json"))
    baked.enable_truncation(9)
    baked.enable_padding(length=12)
    baked.save(str(folder / "tokenizer.json"))

    other = T5Encoder.tokenizer(EncoderSettings(model=str(folder)), spec=T5, threads=1, preview_root=preview_root)

    assert tokenizer.masks([SHORT, LONG]) == other.masks([SHORT, LONG])


def test_tokenizer_without_an_end_token_is_refused(preview_root, tmp_path):
    folder = shutil.copytree(ensure_preview(T5, preview_root), tmp_path / "model")
    from transformers import GPT2Tokenizer

    GPT2Tokenizer(vocab={"a": 0, "<|endoftext|>": 1}, merges=[]).save_pretrained(folder)

    with pytest.raises(ModelUnusable, match="its tokenizer does not end a caption with the end token"):
        T5Encoder.tokenizer(EncoderSettings(model=str(folder)), spec=T5, threads=1, preview_root=preview_root)


def test_tokenizer_larger_than_its_model_is_refused(preview_root, tmp_path):
    """Its last tokens would crash the model in the middle of a pass."""
    import json

    folder = shutil.copytree(ensure_preview(T5, preview_root), tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors["shared.weight"] = tensors["shared.weight"][:50].copy()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"vocab_size": 50}
    (folder / "config.json").write_text(json.dumps(config))

    with pytest.raises(ModelUnusable, match=r"its tokenizer knows \d+ pieces, its model 50"):
        load(preview_root, model=folder)


def test_preparation_gives_equal_results_on_one_and_many_threads(encoder):
    """`prepare` runs on decode threads, where transformers' own call is not safe."""
    captions = [f"{caption} {n}" for n in range(40) for caption in CAPTIONS]
    expected = [encoder.prepare(caption) for caption in captions]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(8) as pool:
            prepared = list(pool.map(encoder.prepare, captions))
    finally:
        sys.setswitchinterval(interval)

    assert expected == prepared


def test_item_other_than_text_is_refused(encoder):
    with pytest.raises(TypeError, match="t5_hidden takes a caption, not bytes"):
        encoder.prepare(b"caption")


# ---- hidden states


@pytest.mark.parametrize("caption", CAPTIONS)
def test_only_rows_of_padding_are_zero(caption, encoder):
    """Shape (77, 1024), float16; zeros where the mask is 0. Spec: docs/spec/stage2.md#t5"""
    prepared = encoder.prepare(caption)
    [hidden] = encoder.encode([prepared])
    mask = np.array(prepared.facts["mask"], bool)

    assert ((77, 1024), np.float16) == (hidden.shape, hidden.dtype)
    assert not hidden[~mask].any()
    assert hidden[mask].any(axis=1).all()
    assert np.isfinite(hidden).all()


def test_hidden_state_equals_that_of_the_unpadded_caption(encoder):
    """The model receives the mask: without it, real tokens change by up to 2.9."""
    prepared = encoder.prepare(SHORT)
    with torch.inference_mode():
        expected = encoder._model(input_ids=torch.tensor([prepared.payload])).last_hidden_state[0].numpy()

    [hidden] = encoder.encode([prepared])

    np.testing.assert_allclose(expected, hidden[: len(expected)].astype(np.float32), atol=2e-3)


@pytest.mark.parametrize(("words", "length"), [(0, 8), (7, 8), (8, 16), (70, 72), (76, 80), (500, 80)])
def test_captions_are_grouped_by_length_rounded_up_to_eight(words, length, encoder):
    """Each caption is padded to the next multiple of 8. Spec: docs/spec/stage2.md#t5"""
    prepared = encoder.prepare("dog " * words)

    assert (length, 0) == (prepared.group, prepared.pixels)


def test_hidden_state_does_not_depend_on_neighbours_or_repetition(encoder):
    """Its bytes do not depend on its neighbours. Spec: docs/spec/stage2.md#t5"""
    captions = ["a dog", "a red bird", "two cats near a car", "sun"]

    together = encode(encoder, *captions)

    np.testing.assert_array_equal(together, np.concatenate([encode(encoder, caption) for caption in captions]))
    np.testing.assert_array_equal(together[::-1], encode(encoder, *captions[::-1]))
    assert len({hidden.tobytes() for hidden in together}) == 4


@pytest.mark.parametrize(("length", "rows"), [(8, 8), (64, 8), (72, 4)])
def test_calls_on_the_cpu_have_a_fixed_number_of_rows_per_length(length, rows, encoder, monkeypatch):
    """The last bits depend on the number of rows at the model's full size. Spec: docs/spec/stage2.md#t5"""
    shapes = []
    forward = encoder._model.forward
    monkeypatch.setattr(
        encoder._model, "forward", lambda **given: shapes.append(tuple(given["input_ids"].shape)) or forward(**given)
    )

    captions = [f"{'dog ' * (length - 3)}{word}" for word in ["the", "of", "in", "on", "at", "with", "and", "or", "is"]]
    for count in (1, 3, 9):
        encode(encoder, *captions[:count])

    assert set(shapes) == {(rows, length)}
    assert len(shapes) == sum(-(-count // rows) for count in (1, 3, 9))


def test_equal_captions_of_a_batch_are_computed_once(encoder, monkeypatch):
    """A call on the CPU has a fixed number of rows; the rows after the distinct captions repeat the last one."""
    sizes = []
    forward = encoder._model.forward
    monkeypatch.setattr(
        encoder._model,
        "forward",
        lambda **given: sizes.append(given["input_ids"].unique(dim=0).shape) or forward(**given),
    )

    dog, bird, again, spaced = encode(encoder, "a dog", "a bird", "a dog", "a  dog")

    assert sizes == [(2, 8)]
    np.testing.assert_array_equal(dog, again)
    np.testing.assert_array_equal(dog, spaced)
    assert (dog != bird).any()


@pytest.mark.parametrize("threads", [1, 2])
def test_float64_reference_has_its_golden_value(threads, preview_root):
    """Bit-stable over threads, batches, and instruction sets."""
    encoder = load(preview_root, threads=threads, dtype="float64")
    captions = ["a photo of a dog", "two cats near a red car"]

    hidden = np.concatenate([encode(encoder, caption) for caption in (*captions, LONG)])

    assert hashlib.sha256(hidden.tobytes()).hexdigest() == GOLDEN
    groups = {encoder.prepare(caption).group for caption in captions}
    assert {8} == groups
    np.testing.assert_array_equal(hidden[:2], encode(encoder, *captions))


def test_float32_is_close_to_the_float64_reference(encoder, preview_root):
    """The tolerance is 1e-4 plus one float16 step."""
    reference = load(preview_root, dtype="float64")

    expected, hidden = (encode(one, LONG).astype(np.float32) for one in (reference, encoder))

    np.testing.assert_allclose(expected, hidden, rtol=2**-9, atol=1e-4)


def test_bfloat16_hidden_state_has_nearly_the_same_direction(encoder, preview_root):
    expected, hidden = (
        encode(e, SHORT)[0, :6].astype(np.float32) for e in (encoder, load(preview_root, dtype="bfloat16"))
    )

    assert (expected * hidden).sum() / np.linalg.norm(expected) / np.linalg.norm(hidden) >= 0.999


def test_calls_are_counted(preview_root):
    """The summary prints model calls per kind. Spec: docs/spec/stage2.md#first-image"""
    encoder = load(preview_root)
    counts = [encoder.calls]
    for batch in (1, 3):
        encode(encoder, *[SHORT] * batch)
        counts.append(encoder.calls)

    assert counts == [0, 1, 2]


def test_non_finite_weights_give_no_hidden_state(preview_root, tmp_path):
    """Spec: docs/spec/conventions.md#refused-and-failed"""
    folder = shutil.copytree(ensure_preview(T5, preview_root), tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors["encoder.final_layer_norm.weight"][5] = np.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(NonFiniteEmbedding, match="t5_hidden: the model produced NaN or infinity"):
        encode(load(preview_root, model=folder), SHORT)
