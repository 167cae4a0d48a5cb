"""Encoders of the T5 and UMT5 architectures: a caption as hidden states; the tokenizer can be used separately.

The module has tokens and masks, the forward call, and the preview configuration and vocabulary.
Spec: docs/spec/stage2.md#t5
"""

import string
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
import torch

from imagemill.domain.embedding_specs import OLD_VALUES, T5_WIDTH, EmbeddingSpec
from imagemill.domain.encoder_settings import EncoderSettings
from imagemill.encoders.base import LaunchedEncoder
from imagemill.encoders.captions import CaptionTokenizer, launch_equal_calls, required_text
from imagemill.encoders.loading import Checkpoint, begin_storing, json_sha256, library, load_model, resolve, to_device
from imagemill.encoders.preview import preview_data, save_preview
from imagemill.models import Prepared

PREPROCESSING = "t5-1"

# Each caption is computed padded to its own multiple of this: its bytes do not depend on its neighbours.
LENGTH_STEP = 8

_ARCHITECTURES = {"t5": "T5EncoderModel", "umt5": "UMT5EncoderModel"}

_TOKENIZER = "tokenizer.json"
_TOKENIZER_FILES = ("config.json", _TOKENIZER, "tokenizer_config.json", "special_tokens_map.json")


class T5Tokenizer(CaptionTokenizer):
    """The tokenizer of T5 and UMT5."""

    files = _TOKENIZER_FILES
    config = _TOKENIZER


class T5Encoder(LaunchedEncoder):
    """Caption → float16 (tokens, width), (77, 1024) by default.

    With `pad_rows` zero, rows whose mask is 0 contain zeros; with `attended`, the states of the padding.
    """

    files = _TOKENIZER_FILES
    config: ClassVar = {"model_type": tuple(_ARCHITECTURES)}
    host_class = T5Tokenizer

    @classmethod
    def _contract(cls, checkpoint: Checkpoint, spec: EmbeddingSpec) -> EmbeddingSpec:
        return replace(spec, contract={**spec.contract, "width": checkpoint.json().get("d_model")})

    @classmethod
    def _facts(cls, checkpoint: Checkpoint, spec: EmbeddingSpec) -> dict[str, Any]:
        padding = {
            "zero": f"each caption to its own multiple of {LENGTH_STEP}",
            "attended": "to `tokens`, without a mask",
        }
        vocabulary = T5Tokenizer.folder(checkpoint).json(_TOKENIZER)
        return {
            "output": "last hidden state",
            "padding": padding[spec.contract.get("pad_rows", "zero")],
            "preprocessing": PREPROCESSING,
            "tokenizer_sha256": json_sha256(vocabulary, without=("truncation", "padding")),
            **{name: spec.contract.get(name, OLD_VALUES[name]) for name in spec.contract_names},
        }

    @classmethod
    def _model_of(cls, checkpoint: Checkpoint, host: T5Tokenizer, spec: EmbeddingSpec) -> Any:
        model_class = getattr(library("transformers"), _ARCHITECTURES[checkpoint.json()["model_type"]])
        model = load_model(model_class, checkpoint).to(checkpoint.device)
        host.check_fits(model, checkpoint)
        return model

    @classmethod
    def tokenizer(
        cls, settings: EncoderSettings, *, spec: EmbeddingSpec, threads: int, preview_root: Path
    ) -> T5Tokenizer:
        """Return the tokenizer alone; of a hub model only its files are fetched. Raises ModelUnusable.

        `threads` is not used: every class method of an encoder takes the same arguments.
        """
        own = getattr(settings, "tokenizer_subfolder", None)
        settings = msgspec.structs.replace(settings, subfolder=own or settings.subfolder)
        files = _TOKENIZER_FILES
        checkpoint = resolve(settings, spec=spec, preview_root=preview_root, files=files, config=_TOKENIZER)
        return T5Tokenizer(checkpoint, spec)

    def prepare(self, item: np.ndarray | str) -> Prepared:
        """Tokenise one caption."""
        ids, truncated = self._host.encode(required_text(item, self._spec))
        facts = {"mask": self._host.mask_of(ids), "truncated": truncated}
        return Prepared(ids, group=self._padded_length(ids), facts=facts)

    @torch.inference_mode()
    def launch(self, batch: Sequence[Prepared]) -> Callable[[], list[np.ndarray]]:
        """Start the calls for captions of one padded length; their arrays are float16 (tokens, width) each."""
        length = self._padded_length(batch[0].payload)
        return launch_equal_calls(
            batch, length, self._checkpoint.device, lambda captions: self._states(captions, length)
        )

    def _states(self, captions: Sequence[Sequence[int]], length: int) -> Callable[[], np.ndarray]:
        """Start one call; its array is float16 (captions, tokens, width)."""
        ids, mask = self._padded(captions, length)
        device = self._checkpoint.device
        ids, mask = to_device(ids, device), to_device(mask, device)
        self.calls += 1
        if self._attended:
            return begin_storing(self._model(input_ids=ids).last_hidden_state, self._spec)
        # Without the mask, padding would change the real tokens' states.
        hidden = self._model(input_ids=ids, attention_mask=mask).last_hidden_state
        hidden = hidden.masked_fill(mask[..., None] == 0, 0)[:, : self._host.tokens]
        begun = begin_storing(hidden, self._spec)

        def padded() -> np.ndarray:
            stored = begun()
            rows = np.zeros((len(captions), *self._spec.shape(0, 0)), stored.dtype)
            rows[:, : stored.shape[1]] = stored
            return rows

        return padded

    @property
    def _attended(self) -> bool:
        return self._spec.contract.get("pad_rows") == "attended"

    def _padded_length(self, ids: Sequence[int]) -> int:
        """Return the length at which a caption is computed."""
        return self._host.tokens if self._attended else -(-len(ids) // LENGTH_STEP) * LENGTH_STEP

    def _padded(self, captions: Sequence[Sequence[int]], length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return token ids and mask, int64 (captions, length)."""
        ids = torch.full((len(captions), length), self._host.pad_id)
        mask = torch.zeros_like(ids)
        for row, caption in enumerate(captions):
            ids[row, : len(caption)] = torch.tensor(caption)
            mask[row, : len(caption)] = 1
        return ids, mask

    @staticmethod
    def write_preview(folder: Path) -> None:
        """Write a model with one layer of the real width over a fixed vocabulary; 2 MB."""
        transformers = library("transformers")
        tokenizer = transformers.T5Tokenizer(vocab=_preview_vocabulary(), extra_ids=0, model_max_length=512)
        tokenizer.save_pretrained(folder)
        config = transformers.T5Config(
            vocab_size=len(tokenizer), d_model=T5_WIDTH, d_kv=64, d_ff=128, num_layers=1, num_heads=2
        )
        save_preview(
            transformers.T5EncoderModel(config), folder, gains={"shared": 32.0, "relative_attention_bias": 0.5}
        )


_PREVIEW_ENDINGS = ("s", "es", "ed", "ing", "er", "est", "ly", "y", "en", "al", "ion", "ness", "ment", "th")


def _preview_vocabulary() -> list[tuple[str, float]]:
    """Return a fixed list of pieces: training one gives another list on every run. Letters, so that any ASCII text has tokens."""
    letters = string.digits + string.ascii_letters + string.punctuation
    pieces = {"<pad>": 0.0, "</s>": 0.0, "<unk>": 0.0, "\u2581": -3.0}
    for group, score in (
        ([f"\u2581{w}" for w in preview_data("words.txt").split()], -5.0),
        (_PREVIEW_ENDINGS, -7.0),
        (letters, -10.0),
    ):
        for piece in group:
            pieces.setdefault(piece, score)
    return list(pieces.items())
