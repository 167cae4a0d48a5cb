"""Models of the real classes and sizes with random weights: their cost is realistic, their results are meaningless."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from imagemill.domain.embedding_specs import DINOV3, T5, VAE, EmbeddingSpec
from imagemill.encoders.dinov3 import DinoV3Encoder
from imagemill.encoders.loading import library

SENTENCEPIECE_SPACE = "\u2581"


def write_model(spec: EmbeddingSpec, folder: Path, dtype: str, *, captions: Iterable[str] = ()) -> Path:
    """Write a checkpoint in `save_pretrained` form.

    Args:
        spec: the embedding kind.
        folder: folder of the checkpoint.
        dtype: dtype of the weights; half precision also halves the time to write and to hash them.
        captions: T5 only; their words become the tokenizer's vocabulary.
    """
    # The libraries' own initialisation of a new model takes longer than the benchmark's work.
    with torch.device("meta"):
        model = _MODELS[spec.kind]()
    model = model.to(getattr(torch, dtype)).to_empty(device="cpu")
    if spec is T5:
        model.tie_weights()
    for name, values in model.named_parameters():
        _fill(name, values.data)
    model.save_pretrained(folder)
    if spec is DINOV3:
        _borrow_processor(folder)
    if spec is T5:
        _tokenizer(captions).save_pretrained(folder)
    return folder


def _fill(name: str, values: torch.Tensor) -> None:
    if values.dim() > 1:
        values.uniform_(-0.03, 0.03)
    else:
        values.fill_(0.0 if name.endswith("bias") else 1.0)


def _dinov3() -> Any:
    transformers = library("transformers")
    return transformers.DINOv3ViTModel(
        transformers.DINOv3ViTConfig(
            hidden_size=1024,
            intermediate_size=4096,
            num_hidden_layers=24,
            num_attention_heads=16,
            num_register_tokens=4,
        )
    )


def _vae() -> Any:
    return library("diffusers").AutoencoderKL(
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(128, 256, 512, 512),
        layers_per_block=2,
        latent_channels=16,
        norm_num_groups=32,
        sample_size=1024,
        scaling_factor=0.3611,
        shift_factor=0.1159,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


def _t5() -> Any:
    transformers = library("transformers")
    return transformers.T5EncoderModel(
        transformers.T5Config(d_model=1024, d_kv=64, d_ff=4096, num_layers=24, num_heads=16, vocab_size=32128)
    )


_MODELS = {DINOV3.kind: _dinov3, VAE.kind: _vae, T5.kind: _t5}


def _borrow_processor(folder: Path) -> None:
    """Copy the preview model's preprocessor, which equals the real one."""
    config = json.loads((folder / "config.json").read_text("utf-8"))
    weights = (folder / "model.safetensors").rename(folder / "kept")
    DinoV3Encoder.write_preview(folder)
    weights.replace(folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config), "utf-8")


def _tokenizer(captions: Iterable[str]) -> Any:
    """Return a tokenizer with one piece per word, which is about what the real vocabulary has for common words."""
    words = sorted({word for caption in captions for word in caption.split()})
    letters = sorted({letter for word in words for letter in word})
    pieces = {"<pad>": 0.0, "</s>": 0.0, "<unk>": 0.0, SENTENCEPIECE_SPACE: -3.0}
    for piece, score in [*((SENTENCEPIECE_SPACE + word, -5.0) for word in words), *((x, -10.0) for x in letters)]:
        pieces.setdefault(piece, score)
    return library("transformers").T5Tokenizer(vocab=list(pieces.items()), extra_ids=0, model_max_length=512)
