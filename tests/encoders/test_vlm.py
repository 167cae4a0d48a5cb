"""The vision-language model: one answer per image through the real loading path, without torchvision."""

import hashlib
import json
import shutil
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import load_file, save_file

from imagemill.config import VlmSettings
from imagemill.encoders import vlm
from imagemill.encoders.preview import ensure_preview, is_preview
from imagemill.encoders.prompts import Prompts
from imagemill.encoders.vlm import CAPTIONER, SUMMARIZER, VisionLanguageModel, VlmCaptioner, VlmSummarizer
from imagemill.errors import ModelUnusable, NonFiniteEmbedding
from imagemill.models import CutShort, NamedImage
from imagemill.pipeline.batch_inference import Answered
from imagemill.pipeline.stage_a.summaries import summarize_batch

WEIGHTS = "6dc73ace59b360f7d27cb058a8b14449e662197c69789d3afae7d6d85c2cecaf"
PROMPT = "请用一行中文概括这张图片。"
# The shapes differ, so a batch of them is padded.
SIZES = [(40, 64), (256, 256), (300, 90), (33, 700), (1, 1), (900, 700)]


def image(size, seed):
    noise = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize(size)


IMAGES = [image(size, seed) for seed, size in enumerate(SIZES)]


def load(preview_root, model="preview", **settings):
    chosen = VlmSettings(model=str(model), device="cpu", **settings)
    return VisionLanguageModel.load(chosen, spec=SUMMARIZER, threads=1, preview_root=preview_root)


def identify(preview_root, model="preview", spec=SUMMARIZER, facts=None, **settings):
    chosen = VlmSettings(model=str(model), **settings)
    return VisionLanguageModel.identify(chosen, spec=spec, threads=1, preview_root=preview_root, **(facts or {}))


@pytest.fixture(scope="module")
def model(preview_root):
    return load(preview_root)


@pytest.fixture
def folder(preview_root, tmp_path):
    """A copy of the preview model as another program would have written it."""
    return shutil.copytree(ensure_preview(SUMMARIZER, preview_root), tmp_path / "model")


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


# ---- answers


def test_every_image_has_one_line_of_text(model):
    answers = model.generate(IMAGES, PROMPT)

    assert len(answers) == len(IMAGES)
    assert all(answer.isprintable() and 1 <= len(answer.split()) <= 12 for answer in answers)


def test_answer_depends_on_the_image(model):
    """Without this, no test would detect exchanged answers of two images."""
    answers = model.generate(IMAGES, PROMPT)

    assert len(IMAGES) == len(set(answers))


def test_answer_depends_on_the_prompt(model):
    assert model.generate(IMAGES[:1], PROMPT) != model.generate(IMAGES[:1], "描述标签。")


def test_answers_of_a_batch_equal_those_of_single_images(model):
    """Padding is on the left: right padding changed three of four answers. This holds in float32 only."""
    alone = [model.generate([one], PROMPT)[0] for one in IMAGES]

    assert alone == model.generate(IMAGES, PROMPT)


def test_images_of_one_batch_share_one_call(preview_root):
    model = load(preview_root)

    model.generate(IMAGES, PROMPT)

    assert (model.calls, model.generate([], PROMPT)) == (1, [])
    assert model.calls == 1


def test_padding_is_on_the_left(model):
    inputs = model._inputs(IMAGES, PROMPT)

    mask = inputs["attention_mask"]
    assert torch.equal(mask, mask.sort(dim=1).values)
    assert 0 in mask


def test_processor_with_right_padding_is_refused(preview_root):
    """The library only warns, and answers change silently."""
    model = load(preview_root)
    model._processor.tokenizer.padding_side = "right"

    with pytest.raises(ModelUnusable, match="its processor does not pad on the left"):
        model.generate(IMAGES, PROMPT)


def test_tokenizer_saved_with_right_padding_pads_on_the_left(preview_root, folder, model):
    edit(folder / "tokenizer_config.json", padding_side="right")

    assert model.generate(IMAGES, PROMPT) == load(preview_root, folder).generate(IMAGES, PROMPT)


def test_images_above_the_configured_size_are_scaled_down(preview_root, model):
    """A patch has 16x16 pixels. The model's own limit of 256x256 applies too."""
    small = load(preview_root, max_pixels=64 * 64)

    assert len(small._inputs([image((900, 900), 0)], PROMPT)["pixel_values"]) == 4 * 4
    assert len(model._inputs([image((900, 900), 0)], PROMPT)["pixel_values"]) == 16 * 16


def test_bfloat16_gives_valid_answers(preview_root):
    """Only shape and validity are checked, because ties can resolve differently in bfloat16."""
    answers = load(preview_root, dtype="bfloat16").generate(IMAGES, PROMPT)

    assert len(answers) == len(IMAGES)
    assert all(answer.isprintable() and 1 <= len(answer.split()) <= 12 for answer in answers)


# ---- generation


def test_generation_is_greedy_despite_settings_of_the_model(preview_root, folder, model, capfd, recwarn):
    """Published Qwen3-VL models enable sampling in their own settings."""
    edit(folder / "generation_config.json", do_sample=True, temperature=0.7, top_p=0.8, top_k=20)

    answers = load(preview_root, folder).generate(IMAGES, PROMPT)

    assert model.generate(IMAGES, PROMPT) == answers
    assert capfd.readouterr() == ("", "")
    assert [str(warning.message) for warning in recwarn] == []


def test_temperature_enables_sampling(preview_root):
    model = load(preview_root, temperature=5.0)

    assert len({model.generate(IMAGES[:1], PROMPT)[0] for _ in range(4)}) > 1


def test_sampling_settings_reach_the_model(preview_root, model):
    """They leave only the most likely token to sample from."""
    drawing = load(preview_root, temperature=5.0, top_p=1e-6, repetition_penalty=1.5)

    assert drawing._generation.repetition_penalty == 1.5
    drawing._generation.repetition_penalty = 1.0
    assert model.generate(IMAGES, PROMPT) == drawing.generate(IMAGES, PROMPT)


def test_answer_length_limit_is_configured_or_taken_from_the_model(preview_root, folder):
    edit(folder / "generation_config.json", max_new_tokens=5)

    own, given = load(preview_root, folder), load(preview_root, folder, max_new_tokens=3)

    assert [len(model.generate(IMAGES[:1], PROMPT)[0].split()) for model in (own, given)] == [5, 3]


def test_answer_that_ends_at_the_limit_is_marked_and_one_that_the_model_ended_is_not(preview_root):
    """The preview model uses no word twice, so that it ends before 300 of them."""
    cut = load(preview_root, max_new_tokens=3).generate(IMAGES, PROMPT)
    whole = load(preview_root, max_new_tokens=300).generate(IMAGES, PROMPT)

    assert [type(answer) for answer in cut] == [CutShort] * len(IMAGES)
    assert [type(answer) for answer in whole] == [str] * len(IMAGES)


def test_model_without_a_length_limit_uses_the_default(preview_root, folder):
    path = folder / "generation_config.json"
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "max_new_tokens"}))

    assert load(preview_root, folder)._generation.max_new_tokens == vlm.DEFAULT_MAX_NEW_TOKENS


# ---- the model


def test_preview_weights_have_the_same_bytes_everywhere(preview_root):
    """Weights come from SHAKE-256 over keys, without a random generator. Spec: docs/spec/stage2.md#preview-models"""
    folder = ensure_preview(SUMMARIZER, preview_root)

    assert hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest() == WEIGHTS
    assert sum(path.stat().st_size for path in folder.iterdir()) < 1_000_000


def test_copied_preview_is_still_marked(preview_root, folder):
    """Preview models can never be mistaken for real ones. Spec: docs/spec/conventions.md#provenance"""
    assert is_preview(folder)
    assert (identify(preview_root).preview, identify(preview_root, folder).preview) == (True, True)
    (folder / "PREVIEW.json").unlink()
    assert not identify(preview_root, folder).preview


def test_preview_files_contain_no_library_version(preview_root):
    for path in ensure_preview(SUMMARIZER, preview_root).glob("*.json"):
        if path.name != "PREVIEW.json":
            assert "transformers_version" not in path.read_text()


def test_torchvision_is_not_imported(model):
    """Each build of torchvision fits one build of torch only."""
    model.generate(IMAGES[:1], PROMPT)

    assert "torchvision" not in sys.modules


def test_missing_model_is_an_error_that_names_its_setting(preview_root, tmp_path):
    """A template answer is never used instead."""
    for call in (load, identify):
        with pytest.raises(ModelUnusable) as caught:
            call(preview_root, tmp_path / "nowhere")
        assert f"vision_language: model {tmp_path}/nowhere cannot be used on cpu" in caught.value.what
        assert "summarizer.model" in caught.value.do


def test_error_of_the_captioner_names_the_captioner_setting(preview_root, tmp_path):
    with pytest.raises(ModelUnusable) as caught:
        identify(preview_root, tmp_path / "nowhere", spec=CAPTIONER)

    assert "captioner.model" in caught.value.do


def test_model_of_another_kind_is_refused(preview_root, folder):
    edit(folder / "config.json", model_type="t5")

    with pytest.raises(ModelUnusable, match=r"config\.json has model_type 't5', expected 'qwen3_vl'"):
        load(preview_root, folder)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("model.safetensors", "it has no model.safetensors"),
        ("preprocessor_config.json", "preprocessor_config.json"),
        ("tokenizer.json", "it has no tokenizer.json"),
        ("chat_template.jinja", "it has no chat template"),
    ],
)
def test_folder_without_a_file_it_needs_is_refused(preview_root, folder, name, reason):
    (folder / name).unlink()

    with pytest.raises(ModelUnusable, match=reason):
        load(preview_root, folder)


@pytest.mark.parametrize("name", ["model.safetensors", "preprocessor_config.json", "tokenizer.json"])
def test_missing_file_is_reported_before_anything_is_loaded(preview_root, folder, name):
    (folder / name).unlink()

    with pytest.raises(ModelUnusable, match=f"it has no {name}"):
        identify(preview_root, folder)


def test_checkpoint_with_a_missing_tensor_is_refused(preview_root, folder):
    """The tensor would be random and differ in each run."""
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.visual.merger.linear_fc1.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(ModelUnusable, match=r"its weights are incomplete: missing keys .*merger\.linear_fc1"):
        load(preview_root, folder)


def test_tokenizer_larger_than_its_model_is_refused(preview_root, folder):
    """Its last tokens would crash the model in the middle of a run."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    last = max(token["id"] for token in tokenizer["added_tokens"])
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][-1], "id": last + 1, "content": " more"})
    edit(folder / "tokenizer.json", added_tokens=tokenizer["added_tokens"])

    with pytest.raises(ModelUnusable, match=rf"its tokenizer knows {last + 2} tokens, its model {last + 1}"):
        load(preview_root, folder)


def test_non_finite_logits_are_an_error(preview_root, folder):
    """Its most likely token would always be the same, and the answer a row of exclamation marks."""
    tensors = load_file(folder / "model.safetensors")
    tensors["model.language_model.norm.weight"] = np.full(64, np.nan, np.float16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    model = load(preview_root, folder)

    with pytest.raises(NonFiniteEmbedding, match="the model produced NaN") as caught:
        model.generate(IMAGES[:1], PROMPT)

    assert caught.value.do == "set summarizer.dtype: bfloat16 or float32"


def test_loading_prints_nothing(preview_root, capfd, recwarn):
    load(preview_root).close()

    assert capfd.readouterr() == ("", "")
    assert [str(warning.message) for warning in recwarn] == []


# ---- identity


def test_folder_in_the_hub_layout_is_loaded(preview_root, folder, model):
    """It has a video processor, which needs torchvision, and the chat template in JSON."""
    template = folder / "chat_template.jinja"
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": template.read_text()}))
    template.unlink()
    video = {"video_processor_type": "Qwen3VLVideoProcessor", "processor_class": "Qwen3VLProcessor"}
    (folder / "video_preprocessor_config.json").write_text(json.dumps(video))
    edit(folder / "tokenizer_config.json", processor_class="Qwen3VLProcessor")
    edit(folder / "preprocessor_config.json", processor_class="Qwen3VLProcessor")

    assert model.generate(IMAGES, PROMPT) == load(preview_root, folder).generate(IMAGES, PROMPT)


@pytest.mark.parametrize(
    ("device", "local_rank", "taken"), [("cuda", "5", [1]), ("cuda", "0", [0]), ("cuda", None, []), ("cpu", "1", [])]
)
def test_each_process_of_torchrun_uses_its_own_gpu(device, local_rank, taken, monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank:
        monkeypatch.setenv("LOCAL_RANK", local_rank)

    vlm._take_own_gpu(SimpleNamespace(device=device))

    assert taken == chosen


def test_copied_files_have_the_same_identity(preview_root, folder):
    """Paths are recorded outside the key."""
    edit(folder / "config.json", transformers_version="9.9")

    assert identify(preview_root).key == identify(preview_root, folder).key


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("config.json", {"tie_word_embeddings": False}),
        ("generation_config.json", {"no_repeat_ngram_size": 2}),
        ("preprocessor_config.json", {"patch_size": 14}),
        ("tokenizer_config.json", {"eos_token": "<|im_end|>"}),
    ],
)
def test_changed_file_changes_the_identity(preview_root, folder, name, changes):
    edit(folder / name, **changes)

    assert identify(preview_root).key != identify(preview_root, folder).key


def test_changed_template_changes_the_identity(preview_root, folder):
    (folder / "chat_template.jinja").write_text("{{ messages }}")

    assert identify(preview_root).key != identify(preview_root, folder).key


@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": "bfloat16"},
        {"max_new_tokens": 7},
        {"max_pixels": 4096},
        {"temperature": 0.5},
        {"top_p": 0.5},
        {"repetition_penalty": 1.1},
        {"facts": {"prompt_sha256": "ab"}},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_changed_setting_or_prompt_changes_the_identity(preview_root, settings):
    """Finished summaries are reused if model, prompt and settings are equal.

    Spec: docs/spec/stage-a.md#reuse-of-summaries
    """
    assert identify(preview_root).key != identify(preview_root, **settings).key


# ---- summarizer, captioner, one model per process


def test_summarizer_uses_the_prompt_of_the_mission(model):
    summarizer = VlmSummarizer(model, Prompts({"甲": "一", "乙": "二"}))
    named = [NamedImage(f"{index}.jpg", one) for index, one in enumerate(IMAGES)]

    assert model.generate(IMAGES, "一") == summarizer.summarize(named, "甲")
    assert model.generate(IMAGES, "二") == summarizer.summarize(named, "乙")


def test_summaries_of_the_preview_model_are_clean(model):
    """They pass through the same pipeline as in Stage-A, including batches."""
    named = [NamedImage(f"{index}.jpg", one) for index, one in enumerate(IMAGES)]

    answers = summarize_batch(VlmSummarizer(model, Prompts({})), named, "挡风板安装检查")

    assert [Answered] * len(IMAGES) == [type(answer) for answer in answers]


def test_only_the_image_refused_by_the_model_fails(model):
    """The image is over 200 times wider than high, so the processor raises for the entire batch."""
    named = [NamedImage(f"{index}.jpg", one) for index, one in enumerate([*IMAGES[:2], image((900, 4), 1)])]

    answers = summarize_batch(VlmSummarizer(model, Prompts({})), named, "挡风板安装检查")

    assert [isinstance(answer, Answered) for answer in answers] == [True, True, False]
    assert "aspect ratio" in answers[2].detail


def test_caption_is_one_paragraph(model, monkeypatch):
    """Runs of whitespace, including line breaks, become one space. Spec: docs/spec/stage2.md#caption-sources"""
    monkeypatch.setattr(model, "generate", lambda images, prompt: [f"{prompt}\n\n  a\u2028 dog"] * len(images))

    assert VlmCaptioner(model, "ask").caption(IMAGES[:2]) == ["ask a dog"] * 2


def test_caption_that_ended_at_the_limit_stays_marked(model, monkeypatch):
    monkeypatch.setattr(model, "generate", lambda images, prompt: [CutShort("a\n dog"), "a cat"])

    assert [(text, type(text)) for text in VlmCaptioner(model, "ask").caption(IMAGES[:2])] == [
        ("a dog", CutShort), ("a cat", str),
    ]  # fmt: skip


def test_model_is_loaded_once_per_process_until_another_replaces_it(preview_root):
    chosen = VlmSettings(device="cpu")
    first = vlm.held(chosen, SUMMARIZER, 1, preview_root)

    assert vlm.held(chosen, CAPTIONER, 1, preview_root) is first
    other = vlm.held(VlmSettings(device="cpu", max_new_tokens=3), SUMMARIZER, 1, preview_root)

    assert other is not first
    assert first._model is None
    assert len(vlm._held) == 1
