"""Shared by the encoders of captions: tokenizers, and model calls whose results do not depend on the other captions.

Spec: docs/spec/stage2.md#text-encoders
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import msgspec
import numpy as np

from imagemill.domain.embedding_specs import EmbeddingSpec
from imagemill.domain.encoder_settings import PREVIEW, TextSettings
from imagemill.encoders.loading import Checkpoint, library, resolve
from imagemill.models import Prepared

# Rows of one call on a CPU, by the largest padded length that they hold for: the last bits depend on the number of rows.
_ROWS = {64: 8, 128: 4, 256: 2}


class CaptionTokenizer:
    """Captions → token ids and masks, without the model's weights. Safe on several threads.

    Attributes:
        files: the tokenizer's files.
        config: the one of them that must exist.

    Args:
        checkpoint: folder of the model, or of the tokenizer if it has its own.
        spec: `tokens` of its contract is the length of masks.
    """

    files: ClassVar[tuple[str, ...]]
    config: ClassVar[str]

    def __init__(self, checkpoint: Checkpoint, spec: EmbeddingSpec) -> None:
        self.tokens: int = spec.shape(0, 0)[0]
        checkpoint = self.folder(checkpoint)
        with checkpoint.loading():
            tokenizer = library("transformers").AutoTokenizer.from_pretrained(checkpoint.path, local_files_only=True)
            self._backend = tokenizer.backend_tokenizer
        # Calling the transformers object sets truncation and padding on this shared backend at each call, which threads
        # would see of each other. Without both, encoding reads only.
        self._backend.no_truncation()
        self._backend.no_padding()
        self.pad_id: int = tokenizer.pad_token_id
        self.vocabulary_size = len(tokenizer)
        if self._backend.encode("").ids[-1:] != [tokenizer.eos_token_id]:
            raise checkpoint.unusable("its tokenizer does not end a caption with the end token")

    @classmethod
    def folder(cls, checkpoint: Checkpoint) -> Checkpoint:
        """Return the folder of a model's tokenizer: its own subfolder if one is configured. Raises ModelUnusable."""
        settings = checkpoint.settings
        if not isinstance(settings, TextSettings) or settings.tokenizer_subfolder is None or settings.model == PREVIEW:
            return checkpoint
        settings = msgspec.structs.replace(
            settings, subfolder=settings.tokenizer_subfolder, revision=checkpoint.revision or settings.revision
        )
        folder = checkpoint.path.parent  # of preview models, which this is not
        return resolve(settings, spec=checkpoint.spec, preview_root=folder, files=cls.files, config=cls.config)

    def check_fits(self, model: Any, checkpoint: Checkpoint) -> None:
        """Raise ModelUnusable if the model has no embedding for a token of this tokenizer."""
        if self.vocabulary_size > model.config.vocab_size:
            raise checkpoint.unusable(
                f"its tokenizer knows {self.vocabulary_size} pieces, its model {model.config.vocab_size}"
            )

    def encode(self, caption: str) -> tuple[list[int], bool]:
        """Return token ids, at most `tokens`, the last of them the end token; and whether the caption was truncated."""
        # A lone surrogate, which a JSON escape may produce, is not a character of any vocabulary.
        ids = self._backend.encode(caption.encode("utf-8", "replace").decode("utf-8")).ids
        if len(ids) <= self.tokens:
            return ids, False
        return [*ids[: self.tokens - 1], ids[-1]], True

    def masks(self, captions: Iterable[str]) -> list[tuple[list[int], bool]]:
        """Return the mask of each caption, `tokens` numbers, 1 for a token, 0 for padding; and whether it was truncated."""
        return [(self.mask_of(ids), truncated) for ids, truncated in map(self.encode, captions)]

    def mask_of(self, ids: Sequence[int]) -> list[int]:
        """Return the attention mask of these token ids, padded to `tokens`."""
        return [1] * len(ids) + [0] * (self.tokens - len(ids))


def required_text(item: np.ndarray | str, spec: EmbeddingSpec) -> str:
    """Return the item as a caption. Raises TypeError otherwise, which is an error of the caller."""
    if not isinstance(item, str):
        raise TypeError(f"{spec.kind} takes a caption, not {type(item).__name__}")
    return item


def launch_equal_calls(
    batch: Sequence[Prepared],
    length: int,
    device: str,
    call: Callable[[Sequence[tuple[int, ...]]], Callable[[], Iterable[np.ndarray]]],
) -> Callable[[], list[np.ndarray]]:
    """Start a model on the different captions of a batch; return a function that waits for the state of each item.

    On a CPU, calls have a fixed number of rows per length, so that a state does not depend on the other captions.

    Args:
        batch: items whose payload is the token ids.
        length: positions at which the captions are computed.
        device: device of the model.
        call: (token ids of captions) → a function that waits for their states.
    """
    captions = list({tuple(item.payload): None for item in batch})
    size = len(captions)
    if device == "cpu":
        size = next((rows for most, rows in _ROWS.items() if length <= most), 1)
    launched = []
    for start in range(0, len(captions), size):
        part = captions[start : start + size]
        launched.append((part, call(part + part[-1:] * (size - len(part)))))

    def collect() -> list[np.ndarray]:
        states: dict[tuple[int, ...], np.ndarray] = {}
        for part, computed in launched:
            states.update(zip(part, computed(), strict=False))
        return [states[tuple(item.payload)] for item in batch]

    return collect
