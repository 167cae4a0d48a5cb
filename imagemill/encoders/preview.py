"""Preview checkpoints: small, deterministic stand-ins in `save_pretrained` form, for machines without hub access or GPU.

    .imagemill/preview_models/
    └─ vae_latents/     config.json  diffusion_pytorch_model.safetensors  PREVIEW.json

Values come from SHAKE-256 over the key in the weight file, not from a random generator: they are the same on every machine
and with every library version, and exact in float32, float16 and bfloat16.

The small configuration of each model is in `write_preview` of its encoder.
"""

import hashlib
import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from imagemill.domain.embedding_specs import ModelSpec
from imagemill.errors import ModelUnusable
from imagemill.formats.manifest import sha256_file
from imagemill.fs.atomic import sweep_temporaries, temporary_path
from imagemill.fs.swap import replace_folder

# A change of `_values` or of any `write_preview` needs another value: old folders are then rebuilt.
RECIPE = "imagemill-preview-1"
MARKER = "PREVIEW.json"

# Keys in config.json that libraries write about themselves.
LIBRARY_KEYS = frozenset({"transformers_version", "_diffusers_version", "dtype"})

_BIAS_GAIN = 0.25
# Standard deviation of a uniform int8.
_INT8_SPREAD = 73.6


def ensure_preview(spec: ModelSpec, root: Path) -> Path:
    """Return the folder of this kind's preview model; build it if it is missing, damaged, or of another recipe.

    Processes that build at the same time produce equal bytes; one of the folders is kept.

    Raises:
        ModelUnusable: if the encoder has no `write_preview`, or the folder cannot be written.
    """
    folder = root / spec.kind
    try:
        if not _is_whole(folder):
            _build(spec, folder)
    except OSError as error:
        raise ModelUnusable(
            f"{spec.kind}: the preview model cannot be built: {error}",
            where=folder,
            do="free space there, then run again",
        ) from error
    return folder


def preview_data(name: str) -> str:
    """Return the text of a file in preview_data/, from which preview models are made."""
    return Path(__file__).with_name("preview_data").joinpath(name).read_text("utf-8")


def is_preview(folder: Path) -> bool:
    """Return True if the checkpoint in this folder is a preview, even if it was copied."""
    return (folder / MARKER).exists()


def save_preview(model: Any, folder: Path, *, gains: Mapping[str, float] | None = None) -> None:
    """`save_pretrained` a model built from a small config, then give its weights the recipe's values.

    Args:
        model: a transformers or diffusers model; its random values are not used.
        folder: folder to write.
        gains: part of a key in the weight file → gain; 1 for the rest, 0.25 for biases. Norm weights are ones.
    """
    model.save_pretrained(folder)
    for file in sorted(folder.glob("*.safetensors")):
        _rewrite_weights(file, gains or {})
    config = json.loads((folder / "config.json").read_text("utf-8"))
    write_json(folder / "config.json", {key: config[key] for key in config.keys() - LIBRARY_KEYS})


def write_json(path: Path, value: Any) -> None:
    """Write JSON, indented, with sorted keys."""
    path.write_text(json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n", "utf-8")


def _build(spec: ModelSpec, folder: Path) -> None:
    import torch

    write = getattr(spec.encoder_class(), "write_preview", None)
    if write is None:
        raise ModelUnusable(
            f"{spec.kind}: there is no preview model of this kind",
            where=spec.encoder,
            why="the encoder class has no write_preview(folder)",
            do=f"set {spec.section}.model in imagemill.yaml",
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    sweep_temporaries(folder.parent, folders=True)
    building = temporary_path(folder.parent)
    building.mkdir()
    try:
        # Building a model draws random numbers; the caller's generator must stay unchanged.
        with torch.random.fork_rng(devices=[]):
            write(building)
        files = {path.name: sha256_file(path) for path in sorted(building.iterdir())}
        marker = {"kind": "preview", "recipe": RECIPE, "stands_for": spec.default_model, "files": files}
        write_json(building / MARKER, marker)
        try:
            replace_folder(building, folder)
        except OSError:
            # Another process has put the same bytes there.
            if not _is_whole(folder):
                raise
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _is_whole(folder: Path) -> bool:
    try:
        marker = json.loads((folder / MARKER).read_text("utf-8"))
        return marker["recipe"] == RECIPE and all(
            sha256_file(folder / name) == expected for name, expected in marker["files"].items()
        )
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False


def _rewrite_weights(file: Path, gains: Mapping[str, float]) -> None:
    """Replace every tensor of a weight file. Keys in the file are stable; parameter names change between versions."""
    from safetensors import safe_open
    from safetensors.numpy import save

    with safe_open(file, "np") as stored:
        shapes = {key: tuple(stored.get_slice(key).get_shape()) for key in sorted(stored.keys())}
    data = save({key: _tensor(key, shape, gains) for key, shape in shapes.items()}, metadata={"format": "pt"})
    # A new file, because the library makes its own readable by one user only.
    file.unlink()
    file.write_bytes(data)


def _tensor(key: str, shape: tuple[int, ...], gains: Mapping[str, float]) -> np.ndarray:
    gain = next((gain for part, gain in gains.items() if part in key), None)
    if gain is None and len(shape) == 1 and not key.endswith("bias"):
        return np.ones(shape, np.float16)
    if gain is None:
        gain = _BIAS_GAIN if key.endswith("bias") else 1.0
    return _values(key, shape, gain)


def _values(key: str, shape: tuple[int, ...], gain: float) -> np.ndarray:
    """float16: int8 numbers from SHAKE-256 times a power of two, spread about gain / sqrt(fan-in)."""
    digest = hashlib.shake_256(f"{RECIPE}:{key}:{shape}".encode()).digest(math.prod(shape))
    numbers = np.frombuffer(digest, np.int8).astype(np.int16)
    numbers = np.where(numbers == -128, 0, numbers)
    fan_in = math.prod(shape[1:] or shape)
    power = round(math.log2(_INT8_SPREAD * math.sqrt(fan_in) / gain))
    return (numbers.astype(np.float32) * np.float32(2.0**-power)).astype(np.float16).reshape(shape)
