"""A vision-language model of the Qwen3-VL class: images and a prompt in, one text per image out.

One conversation per image, all of a call in one batch, padded on the left: the model continues where each prompt ends.

Pixels and tokens are prepared in vlm_processor.py; failures and answers are handled in pipeline/batch_inference.py and
pipeline/stage_a/summaries.py.

Spec: docs/spec/stage2.md#caption-sources, docs/spec/stage-a.md#summaries
"""

import os
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
from PIL import Image

from imagemill.config import VlmSettings
from imagemill.domain.embedding_specs import ModelSpec
from imagemill.encoders.loading import (
    Checkpoint,
    expect_config,
    file_sha256,
    identity,
    json_sha256,
    library,
    load_model,
    release,
    resolve,
    set_up_arithmetic,
    weight_patterns,
)
from imagemill.encoders.prompts import Prompts
from imagemill.encoders.vlm_preview import write_preview
from imagemill.encoders.vlm_processor import image_size, load_processor, pads_right, require_one_vocabulary
from imagemill.errors import NonFiniteEmbedding
from imagemill.models import CutShort, NamedImage
from imagemill.store.provenance import ModelIdentity

PREPROCESSING = "qwen3-vl-1"
# Settings in the facts of an identity.
_SETTINGS = ("max_pixels", "max_new_tokens", "temperature", "top_p", "repetition_penalty")
DEFAULT_MAX_NEW_TOKENS = 512

_WEIGHTS = "model"
# All files besides the weights that affect an answer. Which of them exist depends on the version that wrote the folder.
_PARTS = (
    "preprocessor_config.json",
    "processor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
_FILES = ("config.json", *_PARTS, *weight_patterns(_WEIGHTS))
# One file of each pair is required, depending on the version that wrote them; this is checked before anything is loaded.
_NEEDED = (("tokenizer.json", "vocab.json"), ("preprocessor_config.json", "processor_config.json"))


# Uses of the model, identified by their sections of the configuration.
_MODEL = ModelSpec(
    kind="vision_language",
    encoder="imagemill.encoders.vlm:VisionLanguageModel",
    default_model="Qwen/Qwen3-VL-4B-Instruct",
)
SUMMARIZER, CAPTIONER = (replace(_MODEL, own_section=section) for section in ("summarizer", "captioner"))


class VisionLanguageModel:
    """Images and a prompt → one answer per image. `calls` counts calls of the model."""

    def __init__(
        self, model: Any, processor: Any, checkpoint: Checkpoint, settings: VlmSettings, made_by: ModelIdentity
    ) -> None:
        self.calls = 0
        self.identity = made_by
        self._model: Any = model
        self._processor, self._checkpoint = processor, checkpoint
        self._size = image_size(processor, settings.max_pixels)
        self._generation = _generation(model, settings)

    @classmethod
    def identify(
        cls, settings: VlmSettings, *, spec: ModelSpec, threads: int, preview_root: Path, **facts: Any
    ) -> ModelIdentity:
        """Determine the identity from the files, and add `facts`; no weights are loaded. Raises ModelUnusable."""
        return _identify(_resolve(settings, spec, preview_root), settings, threads, **facts)

    @classmethod
    def load(cls, settings: VlmSettings, *, spec: ModelSpec, threads: int, preview_root: Path) -> Self:
        """Load the complete processor and model. Raises ModelUnusable."""
        checkpoint = _resolve(settings, spec, preview_root)
        made_by = _identify(checkpoint, settings, threads)
        processor = load_processor(checkpoint)
        set_up_arithmetic(threads)
        with checkpoint.loading():
            _take_own_gpu(checkpoint)
            model_class = library("transformers").Qwen3VLForConditionalGeneration
            model = load_model(model_class, checkpoint).to(checkpoint.device)
            require_one_vocabulary(checkpoint, processor, model.config)
            return cls(model, processor, checkpoint, settings, made_by)

    @torch.inference_mode()
    def generate(self, images: Sequence[Image.Image], prompt: str) -> list[str]:
        """Answer the prompt for RGB images in one call; return the model's answers, stripped, CutShort where one is.

        Raises:
            ModelUnusable: if its processor does not pad on the left.
            NonFiniteEmbedding: if the model produced NaN. Other errors of the libraries, such as out of memory, propagate.
        """
        if not images:
            return []
        inputs = self._inputs(images, prompt)
        self.calls += 1
        tokens = self._model.generate(
            **inputs.to(self._checkpoint.device),
            generation_config=self._generation,
            logits_processor=[self._require_numbers],
        )
        answers = tokens[:, inputs["input_ids"].shape[1] :]
        texts = self._processor.tokenizer.batch_decode(answers, skip_special_tokens=True)
        ended = (
            torch.isin(answers, torch.as_tensor(self._generation.eos_token_id, device=answers.device)).any(1).tolist()
        )
        return [text.strip() if end else CutShort(text.strip()) for text, end in zip(texts, ended, strict=True)]

    def _inputs(self, images: Sequence[Image.Image], prompt: str) -> Any:
        """Return token ids and masks (images, longest prompt); patches of all images, one after another."""
        content = [{"type": "image"}, {"type": "text", "text": prompt}]
        text = self._processor.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        inputs = self._processor(
            text=[text] * len(images),
            images=[[image] for image in images],
            images_kwargs={"size": self._size},
            text_kwargs={"padding": True},
            return_tensors="pt",
        )
        if not inputs["attention_mask"][:, -1].all():
            raise pads_right(self._checkpoint)
        return inputs

    def _require_numbers(self, tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        # With NaN the most likely token is always the same one: an answer of exclamation marks without an error.
        if scores.isnan().any():
            raise NonFiniteEmbedding(
                "the model produced NaN", do=f"set {self._checkpoint.spec.section}.dtype: bfloat16 or float32"
            )
        return scores

    def close(self) -> None:
        """Free the model's memory."""
        self._model = None
        release()

    write_preview = staticmethod(write_preview)


class VlmSummarizer:
    """Stage-A's summarizer."""

    def __init__(self, model: VisionLanguageModel, prompts: Prompts) -> None:
        self._model, self._prompts = model, prompts

    def summarize(self, images: Sequence[NamedImage], mission: str) -> list[str]:
        """Return one answer per image to the mission's prompt, in one call of the model."""
        return self._model.generate([named.image for named in images], self._prompts.of(mission))


class VlmCaptioner:
    """A caption for an image that has none."""

    def __init__(self, model: VisionLanguageModel, prompt: str) -> None:
        self._model, self._prompt = model, prompt
        self.identity = model.identity

    def caption(self, images: Sequence[Image.Image]) -> list[str]:
        """Return one paragraph per image, runs of whitespace as one space; blank or CutShort if the model's answer is."""
        return [type(text)(" ".join(text.split())) for text in self._model.generate(images, self._prompt)]

    def close(self) -> None:
        """Free the model's memory, which the next step needs."""
        let_go()


# ---- one model per process

_held: dict[tuple[Any, ...], VisionLanguageModel] = {}
_holding = threading.RLock()


def held(settings: VlmSettings, spec: ModelSpec, threads: int, preview_root: Path) -> VisionLanguageModel:
    """Return the model of these settings, loaded once in this process. Another one is closed first: two may not fit."""
    # The settings that summarizer and captioner share.
    bare = VlmSettings(**{name: getattr(settings, name) for name in VlmSettings.__struct_fields__})
    wanted = (bare, threads, preview_root)
    with _holding:
        if wanted not in _held:
            let_go()
            _held[wanted] = VisionLanguageModel.load(settings, spec=spec, threads=threads, preview_root=preview_root)
        return _held[wanted]


def let_go() -> None:
    """Close the model that is held, if there is one."""
    with _holding:
        for model in _held.values():
            model.close()
        _held.clear()


def _take_own_gpu(checkpoint: Checkpoint) -> None:
    """Select the GPU of LOCAL_RANK: torchrun starts one process per GPU, which would all use the first one otherwise."""
    local_rank = os.environ.get("LOCAL_RANK", "")
    if checkpoint.device == "cuda" and local_rank.isdecimal():
        torch.cuda.set_device(int(local_rank) % torch.cuda.device_count())


# ---- generation


def _generation(model: Any, settings: VlmSettings) -> Any:
    """Return the model's generation settings, overridden by ours; greedy unless a temperature is set."""
    own = model.generation_config
    values = own.to_dict() | {
        "max_new_tokens": settings.max_new_tokens or own.max_new_tokens or DEFAULT_MAX_NEW_TOKENS,
        "max_length": None,
        "do_sample": settings.temperature > 0,
    }
    if settings.repetition_penalty is not None:
        values["repetition_penalty"] = settings.repetition_penalty
    if values["do_sample"]:
        values |= {"temperature": settings.temperature, "top_p": settings.top_p}
    else:
        values |= dict.fromkeys(("temperature", "top_p", "top_k"))
    return library("transformers").GenerationConfig.from_dict(values)


# ---- identity


def _resolve(settings: VlmSettings, spec: ModelSpec, preview_root: Path) -> Checkpoint:
    checkpoint = resolve(settings, spec=spec, preview_root=preview_root, files=_FILES)
    expect_config(checkpoint, model_type="qwen3_vl")
    for names in _NEEDED:
        if not any((checkpoint.path / name).is_file() for name in names):
            raise checkpoint.unusable(f"it has no {names[0]}")
    return checkpoint


def _identify(checkpoint: Checkpoint, settings: VlmSettings, threads: int, **facts: Any) -> ModelIdentity:
    parts = [checkpoint.path / name for name in _PARTS if (checkpoint.path / name).is_file()]
    return identity(
        checkpoint,
        threads=threads,
        weights=_WEIGHTS,
        parts_sha256={
            path.name: json_sha256(checkpoint.json(path.name)) if path.suffix == ".json" else file_sha256(path)
            for path in parts
        },
        preprocessing=PREPROCESSING,
        **{name: getattr(settings, name) for name in _SETTINGS},
        **facts,
    )
