"""Text encoders of the CLIP architecture: a caption as hidden states and a pooled state, of one forward call.

The states are those that the pipelines of FLUX, Stable Diffusion 3 and SDXL give to their transformers: all positions of the
model are computed without a mask, and padding follows the end token.

Spec: docs/spec/stage2.md#clip-text
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from imagemill.domain.embedding_specs import CLIP_WIDTH, EmbeddingSpec
from imagemill.encoders.base import LaunchedEncoder
from imagemill.encoders.captions import CaptionTokenizer, launch_equal_calls, required_text
from imagemill.encoders.loading import Checkpoint, begin_storing, json_sha256, library, load_model, to_device
from imagemill.encoders.preview import preview_data, save_preview
from imagemill.formats.manifest import sha256_file
from imagemill.models import Prepared

PREPROCESSING = "clip-text-1"

_TOKENIZER = "tokenizer_config.json"
_VOCABULARY = ("vocab.json", "merges.txt", "tokenizer.json")
_FILES = ("config.json", _TOKENIZER, "special_tokens_map.json", *_VOCABULARY)


class ClipTokenizer(CaptionTokenizer):
    """The tokenizer of CLIP."""

    files = _FILES
    config = _TOKENIZER


class ClipTextEncoder(LaunchedEncoder):
    """Caption → float16 `hidden` (tokens, width) and `pooled` (pooled width,)."""

    files = _FILES
    config: ClassVar = {"model_type": "clip_text_model"}
    host_class = ClipTokenizer

    @classmethod
    def _contract(cls, checkpoint: Checkpoint, spec: EmbeddingSpec) -> EmbeddingSpec:
        config = checkpoint.json()
        width = config.get("hidden_size")
        pooled = config.get("projection_dim") if spec.contract.get("pooled") == "projected" else width
        sizes = {"tokens": config.get("max_position_embeddings"), "width": width, "pooled_width": pooled}
        if wrong := [name for name, value in sizes.items() if not isinstance(value, int) or value < 1]:
            raise checkpoint.unusable(f"config.json does not determine {wrong[0]}")
        return replace(spec, contract={**spec.contract, **sizes})

    @classmethod
    def _facts(cls, checkpoint: Checkpoint, spec: EmbeddingSpec) -> dict[str, Any]:
        folder = ClipTokenizer.folder(checkpoint).path
        vocabulary = {name: sha256_file(folder / name) for name in _VOCABULARY[:2] if (folder / name).is_file()}
        vocabulary = vocabulary or {name: sha256_file(folder / name) for name in _VOCABULARY[2:]}
        return {
            "preprocessing": PREPROCESSING,
            "tokenizer_sha256": json_sha256(vocabulary),
            "pad_id": ClipTokenizer(checkpoint, spec).pad_id,
            **{name: spec.contract.get(name) for name in spec.contract_names},
        }

    @classmethod
    def _model_of(cls, checkpoint: Checkpoint, host: ClipTokenizer, spec: EmbeddingSpec) -> Any:
        transformers = library("transformers")
        projected = spec.contract.get("pooled") == "projected"
        model_class = transformers.CLIPTextModelWithProjection if projected else transformers.CLIPTextModel
        model = load_model(model_class, checkpoint).to(checkpoint.device)
        host.check_fits(model, checkpoint)
        return model

    def prepare(self, item: np.ndarray | str) -> Prepared:
        """Tokenise one caption."""
        ids, truncated = self._host.encode(required_text(item, self._spec))
        padding = [self._host.pad_id] * (self._host.tokens - len(ids))
        return Prepared([*ids, *padding], group=self._host.tokens, facts={"truncated": truncated})

    @torch.inference_mode()
    def launch(self, batch: Sequence[Prepared]) -> Callable[[], list[np.ndarray]]:
        """Start the calls for captions; their arrays are structured."""
        return launch_equal_calls(batch, self._host.tokens, self._checkpoint.device, self._states)

    def _states(self, captions: Sequence[Sequence[int]]) -> Callable[[], list[np.ndarray]]:
        """Start one call."""
        self.calls += 1
        given = to_device(torch.tensor(captions), self._checkpoint.device)
        output = self._model(input_ids=given, output_hidden_states=True)
        last = self._spec.contract.get("layer", "last") == "last"
        hidden = begin_storing(output.last_hidden_state if last else output.hidden_states[-2], self._spec)
        projected = self._spec.contract.get("pooled") == "projected"
        pooled = begin_storing(output.text_embeds if projected else output.pooler_output, self._spec)

        def collect() -> list[np.ndarray]:
            states = np.zeros(len(captions), self._spec.layout(0, 0)[1])
            states["hidden"], states["pooled"] = hidden(), pooled()
            return [np.array(state) for state in states]

        return collect

    @staticmethod
    def write_preview(folder: Path) -> None:
        """Write a model with two layers of CLIP-L's width over a fixed vocabulary; 3 MB."""
        transformers = library("transformers")
        vocabulary, merges = _preview_vocabulary()
        tokenizer = transformers.CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=77)
        tokenizer.save_pretrained(folder)
        config = transformers.CLIPTextConfig(
            vocab_size=len(tokenizer), hidden_size=CLIP_WIDTH, projection_dim=CLIP_WIDTH, intermediate_size=128,
            num_hidden_layers=2, num_attention_heads=12, bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        )  # fmt: skip
        model = transformers.CLIPTextModelWithProjection(config)
        save_preview(model, folder, gains={"token_embedding": 32.0, "position_embedding": 8.0})


def _preview_vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return pieces and merges of a byte-level vocabulary: all bytes, and the words of the T5 preview."""
    from tokenizers.pre_tokenizers import ByteLevel

    letters = sorted(ByteLevel.alphabet())
    pieces = [*letters, *(f"{letter}</w>" for letter in letters)]
    merges: dict[tuple[str, str], None] = {}
    for word in preview_data("words.txt").split():
        *parts, last = word
        rest = [*parts, f"{last}</w>"]
        begun = rest[0]
        for part in rest[1:]:
            merges[begun, part] = None
            begun += part
    pieces += [first + second for first, second in merges]
    special = ["<|startoftext|>", "<|endoftext|>"]
    return {piece: number for number, piece in enumerate(dict.fromkeys([*pieces, *special]))}, list(merges)
