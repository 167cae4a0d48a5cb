"""Stored text states equal those that the pipelines of diffusers give to their transformers.

Each pipeline is built with small random text encoders in its own folder layout; no pipeline loads a transformer.
Spec: docs/spec/stage2.md#text-encoders
"""

import numpy as np
import pytest
import torch

from imagemill.domain.embedding_specs import CLIP_TEXT, T5
from imagemill.domain.encoder_settings import ClipTextSettings, T5Settings
from imagemill.encoders.clip_text import ClipTextEncoder
from imagemill.encoders.preview import ensure_preview
from imagemill.encoders.t5 import T5Encoder
from imagemill.errors import ModelUnusable

CAPTIONS = ["a red bird on a green tree near the old bridge", "dog", "two cats near a car " * 40]
WIDTH = 48


def t5(architecture, vocabulary):
    """Return a random encoder of this architecture whose states are of order one."""
    import transformers

    torch.manual_seed(3)
    config = getattr(transformers, f"{architecture}Config")(
        vocab_size=vocabulary, d_model=WIDTH, d_kv=8, d_ff=64, num_layers=2, num_heads=4,
        feed_forward_proj="gated-gelu", tie_word_embeddings=False,
    )  # fmt: skip
    return getattr(transformers, f"{architecture}EncoderModel")(config).eval()


def save_pipeline(folder, preview_root, encoder_folder, tokenizer_folder, architecture="T5"):
    """Save a text encoder and its tokenizer in subfolders of these names; return both."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(ensure_preview(T5, preview_root))
    model = t5(architecture, len(tokenizer))
    model.save_pretrained(folder / encoder_folder)
    tokenizer.save_pretrained(folder / tokenizer_folder)
    return model, tokenizer


@pytest.fixture
def saved(preview_root, tmp_path):
    """Save a text encoder and its tokenizer; return the folder and both."""
    return lambda *names: (tmp_path, *save_pipeline(tmp_path, preview_root, *names))


def states(folder, encoder_folder, tokenizer_folder, **settings):
    """Return the stored states of the captions, and their masks."""
    chosen = T5Settings(
        model=str(folder), subfolder=encoder_folder, tokenizer_subfolder=tokenizer_folder, device="cpu", **settings
    )
    encoder = T5Encoder.load(chosen, spec=T5, threads=torch.get_num_threads(), preview_root=folder)
    prepared = [encoder.prepare(caption) for caption in CAPTIONS]
    return [encoder.encode([one])[0] for one in prepared], [np.array(one.facts["mask"], bool) for one in prepared]


def within_one_step(stored, expected):
    """Whether float16 values differ from float32 ones by at most the float16 step of the larger of the value and 1.

    Sums of another order differ by a few float32 steps of their terms, which for a sum near zero is many of its own.
    """
    expected = expected.numpy()
    step = np.spacing(np.maximum(np.abs(expected), 1).astype(np.float16)).astype(np.float32)
    return np.all(np.abs(stored - expected) <= step)


@torch.inference_mode()
def test_states_equal_those_of_the_flux_pipeline(saved):
    from diffusers import FluxPipeline

    folder, model, tokenizer = saved("text_encoder_2", "tokenizer_2")
    pipeline = FluxPipeline(None, None, None, None, model, tokenizer, None)

    stored, _ = states(folder, "text_encoder_2", "tokenizer_2", tokens=512, padding="attended")

    for caption, state in zip(CAPTIONS, stored, strict=True):
        expected = pipeline._get_t5_prompt_embeds(caption, max_sequence_length=512, dtype=torch.float32)[0]
        assert (state.shape, state.dtype) == ((512, WIDTH), np.float16)
        assert within_one_step(state, expected)
        assert state[-1].any(), "the states of the padding are kept"


@torch.inference_mode()
def test_states_equal_those_of_the_stable_diffusion_3_pipeline(saved):
    from diffusers import StableDiffusion3Pipeline

    folder, model, tokenizer = saved("text_encoder_3", "tokenizer_3")
    pipeline = StableDiffusion3Pipeline(None, None, None, None, None, None, None, model, tokenizer)

    stored, _ = states(folder, "text_encoder_3", "tokenizer_3", tokens=256, padding="attended")

    for caption, state in zip(CAPTIONS, stored, strict=True):
        assert within_one_step(
            state, pipeline._get_t5_prompt_embeds(caption, max_sequence_length=256, dtype=torch.float32)[0]
        )


@pytest.mark.parametrize("tokens", [120, 300])
@torch.inference_mode()
def test_states_and_mask_equal_those_of_the_pixart_pipeline(saved, tokens):
    """The pipeline's transformer does not attend to the padding, whose stored rows are zeros. Its captions are in lower case."""
    from diffusers import PixArtAlphaPipeline

    folder, model, tokenizer = saved("text_encoder", "tokenizer")
    pipeline = PixArtAlphaPipeline(tokenizer, model, None, None, None)

    stored, masks = states(folder, "text_encoder", "tokenizer", tokens=tokens, padding="zero")

    for caption, state, mask in zip(CAPTIONS, stored, masks, strict=True):
        expected, expected_mask, _, _ = pipeline.encode_prompt(
            caption, do_classifier_free_guidance=False, device="cpu", max_sequence_length=tokens
        )
        assert np.array_equal(mask, expected_mask[0].numpy().astype(bool))
        assert within_one_step(state[mask], expected[0][torch.from_numpy(mask)])
        assert not state[~mask].any()


@torch.inference_mode()
def test_umt5_states_equal_those_of_its_model(saved):
    folder, model, tokenizer = saved("text_encoder", "tokenizer", "UMT5")

    stored, masks = states(folder, "text_encoder", "tokenizer", tokens=128)

    for caption, state, mask in zip(CAPTIONS, stored, masks, strict=True):
        given = tokenizer(caption, return_tensors="pt", truncation=True, max_length=128)
        assert within_one_step(state[mask], model(**given).last_hidden_state[0])


@pytest.mark.parametrize("padding", ["zero", "attended"])
@pytest.mark.parametrize("tokens", [8, 77, 120, 128, 256, 300, 512])
def test_any_number_of_tokens_gives_states_and_masks_of_this_length(saved, tokens, padding):
    folder, *_ = saved("text_encoder", "tokenizer")

    stored, masks = states(folder, "text_encoder", "tokenizer", tokens=tokens, padding=padding)

    assert {state.shape for state in stored} == {(tokens, WIDTH)}
    assert {len(mask) for mask in masks} == {tokens}
    assert masks[-1].all() == (tokens < 200), "the last caption is the longest"


# ---- CLIP


def save_clip(folder, preview_root, number, *, width, projected, pad="<|endoftext|>"):
    """Save a random CLIP text encoder and its tokenizer as a pipeline does; return both. `number`: as in `text_encoder_2`."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(ensure_preview(CLIP_TEXT, preview_root), pad_token=pad)
    torch.manual_seed(width)
    config = transformers.CLIPTextConfig(
        vocab_size=len(tokenizer), hidden_size=width, projection_dim=width, intermediate_size=32, num_hidden_layers=3,
        num_attention_heads=2, bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    model_class = transformers.CLIPTextModelWithProjection if projected else transformers.CLIPTextModel
    model = model_class(config).eval()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.3)
    model.save_pretrained(folder / f"text_encoder{number}")
    tokenizer.save_pretrained(folder / f"tokenizer{number}")
    return model, tokenizer


def clip_states(folder, number, **settings):
    chosen = ClipTextSettings(
        model=str(folder), subfolder=f"text_encoder{number}", tokenizer_subfolder=f"tokenizer{number}", device="cpu",
        **settings,
    )  # fmt: skip
    encoder = ClipTextEncoder.load(chosen, spec=CLIP_TEXT, threads=torch.get_num_threads(), preview_root=folder)
    return [encoder.encode([encoder.prepare(caption)])[0] for caption in CAPTIONS]


@torch.inference_mode()
def test_clip_and_t5_states_equal_those_of_encode_prompt_of_flux(saved, preview_root):
    from diffusers import FluxPipeline

    folder, *t5 = saved("text_encoder_2", "tokenizer_2")
    clip = save_clip(folder, preview_root, "", width=16, projected=False)
    pipeline = FluxPipeline(None, None, *clip, *t5, None)

    stored, _ = states(folder, "text_encoder_2", "tokenizer_2", tokens=512, padding="attended")
    pooled = clip_states(folder, "", pooled="eos")

    for caption, long, short in zip(CAPTIONS, stored, pooled, strict=True):
        expected, expected_pooled, _ = pipeline.encode_prompt(caption, None, device="cpu", max_sequence_length=512)
        assert within_one_step(long, expected[0])
        assert within_one_step(short["pooled"], expected_pooled[0])


@torch.inference_mode()
def test_clip_and_t5_states_equal_those_of_encode_prompt_of_stable_diffusion_3(saved, preview_root):
    from diffusers import StableDiffusion3Pipeline

    folder, *t5 = saved("text_encoder_3", "tokenizer_3")
    first = save_clip(folder, preview_root, "", width=16, projected=True)
    second = save_clip(folder, preview_root, "_2", width=20, projected=True, pad="!")
    pipeline = StableDiffusion3Pipeline(None, None, None, *first, *second, *t5)

    stored, _ = states(folder, "text_encoder_3", "tokenizer_3", tokens=256, padding="attended")
    small, large = (clip_states(folder, number, layer="penultimate", pooled="projected") for number in ("", "_2"))

    for caption, long, one, two in zip(CAPTIONS, stored, small, large, strict=True):
        expected, _, expected_pooled, _ = pipeline.encode_prompt(
            caption, None, None, device="cpu", do_classifier_free_guidance=False, max_sequence_length=256
        )
        hidden = np.concatenate([one["hidden"], two["hidden"]], 1)
        together = np.concatenate([np.pad(hidden, ((0, 0), (0, WIDTH - hidden.shape[1]))), long])
        assert within_one_step(together, expected[0])
        assert within_one_step(np.concatenate([one["pooled"], two["pooled"]]), expected_pooled[0])


@torch.inference_mode()
def test_clip_states_equal_those_of_encode_prompt_of_sdxl(preview_root, tmp_path):
    from diffusers import StableDiffusionXLPipeline

    first = save_clip(tmp_path, preview_root, "", width=16, projected=False)
    second = save_clip(tmp_path, preview_root, "_2", width=20, projected=True, pad="!")
    encoders, tokenizers = zip(first, second, strict=True)
    pipeline = StableDiffusionXLPipeline(None, *encoders, *tokenizers, None, None, add_watermarker=False)

    small = clip_states(tmp_path, "", layer="penultimate")
    large = clip_states(tmp_path, "_2", layer="penultimate", pooled="projected")

    for caption, one, two in zip(CAPTIONS, small, large, strict=True):
        expected, _, expected_pooled, _ = pipeline.encode_prompt(
            caption, device="cpu", do_classifier_free_guidance=False
        )
        assert within_one_step(np.concatenate([one["hidden"], two["hidden"]], 1), expected[0])
        assert within_one_step(two["pooled"], expected_pooled[0])


def test_states_of_a_clip_model_without_projection_can_be_those_at_the_end_token_only(preview_root, tmp_path):
    save_clip(tmp_path, preview_root, "", width=16, projected=False)

    with pytest.raises(ModelUnusable, match="text_projection"):
        clip_states(tmp_path, "", pooled="projected")


def test_states_at_the_end_token_of_a_model_with_projection(preview_root, tmp_path):
    model, _ = save_clip(tmp_path, preview_root, "", width=16, projected=True)

    states = clip_states(tmp_path, "", pooled="eos")
    projected = clip_states(tmp_path, "", pooled="projected")

    for eos, other in zip(states, projected, strict=True):
        with torch.inference_mode():
            expected = model.text_projection(torch.from_numpy(eos["pooled"].astype(np.float32)))
        assert np.allclose(expected, other["pooled"], atol=2e-2)
        assert np.array_equal(eos["hidden"], other["hidden"])


def test_clip_states_do_not_depend_on_the_batch(preview_root):
    settings = ClipTextSettings(device="cpu", layer="penultimate", pooled="projected")
    encoder = ClipTextEncoder.load(settings, spec=CLIP_TEXT, threads=torch.get_num_threads(), preview_root=preview_root)
    captions = [*CAPTIONS, "", "a", "a bridge near a river", "an old house"]
    prepared = [encoder.prepare(caption) for caption in captions]

    together = encoder.encode(prepared)

    for one, state in zip(prepared, together, strict=True):
        assert encoder.encode([one])[0].tobytes() == state.tobytes()
    assert len({state.tobytes() for state in together}) == len(captions)
    assert [one.facts["truncated"] for one in prepared] == [False, False, True, False, False, False, False]
