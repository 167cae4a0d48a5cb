"""DINOv3 ViT-L/16: one vector per image, its class token after the final norm.

The preprocessor is our own, bit-equal to transformers' on the CPU: theirs needs torchvision, whose builds fit one build of
torch each.

Spec: docs/spec/stage2.md#dinov3
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch.nn.functional import interpolate

from imagemill.domain.embedding_specs import DINOV3_WIDTH, EmbeddingSpec
from imagemill.encoders.base import LaunchedEncoder
from imagemill.encoders.loading import (
    Checkpoint,
    begin_storing,
    json_sha256,
    library,
    load_model,
    require_pixels,
    to_device,
)
from imagemill.encoders.preview import save_preview, write_json
from imagemill.models import Prepared

PREPROCESSING = "dinov3-1"

_PROCESSOR = "preprocessor_config.json"
_BILINEAR = 2

# Rows that are resized together: their floats stay in the processor's cache, which halves the time for large images.
_ROWS = 128


class DinoV3Preprocessor:
    """Preprocessor: uint8 RGB pixels → normalised tensor of the model's size, as transformers' DINOv3ViTImageProcessor.

    In the same order: rescale, resize (aspect not kept, antialiased), normalise. If the spec's contract has `resize: fast`, the
    pixels are resized before they are rescaled, and rounded to whole grey levels.
    """

    def __init__(self, checkpoint: Checkpoint, spec: EmbeddingSpec) -> None:
        config = checkpoint.json(_PROCESSOR)
        steps = {name: config.get(name, True) for name in ("do_resize", "do_rescale", "do_normalize")}
        if (
            not str(config.get("image_processor_type", "")).startswith("DINOv3ViTImageProcessor")
            or config.get("resample", _BILINEAR) != _BILINEAR
            or config.get("do_center_crop")
            or not all(steps.values())
        ):
            raise checkpoint.unusable(f"{_PROCESSOR} requests preprocessing steps that differ from DINOv3's")
        try:
            self.size = (int(config["size"]["height"]), int(config["size"]["width"]))
            self.scale = float(config["rescale_factor"])
            self.mean, self.std = (
                torch.tensor(config[name], dtype=checkpoint.host_dtype).reshape(3, 1, 1)
                for name in ("image_mean", "image_std")
            )
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise checkpoint.unusable(f"{_PROCESSOR} lacks a usable value: {error!r}") from error
        self.dtype = checkpoint.host_dtype
        self.resize = self._fast if spec.contract.get("resize") == "fast" else self._exact
        self._values = {name: config[name] for name in ("rescale_factor", "image_mean", "image_std")}

    @property
    def sha256(self) -> str:
        """Fingerprint of the values in use; other entries of the file are ignored."""
        return json_sha256({"size": self.size, **self._values})

    def __call__(self, pixels: np.ndarray) -> torch.Tensor:
        """Convert uint8 (H, W, 3) to float32 (3, height, width), or float64 if the model computes in it."""
        planes = torch.from_numpy(np.require(pixels, requirements=["C", "W"])).permute(2, 0, 1)
        return (self.resize(planes) - self.mean) / self.std

    def _exact(self, planes: torch.Tensor) -> torch.Tensor:
        """Rescale and resize; torch resizes the width first, row by row, so that blocks of rows give the same bits."""
        rows, size = planes.shape[1], self.size
        if tuple(planes.shape[1:]) == size:
            return self._rescaled(planes)
        narrow = torch.empty(3, rows, size[1], dtype=self.dtype)
        for start in range(0, rows, _ROWS):
            block = self._rescaled(planes[:, start : start + _ROWS])
            narrow[:, start : start + _ROWS] = _resized(block, (block.shape[1], size[1]))
        return _resized(narrow, size)

    def _fast(self, planes: torch.Tensor) -> torch.Tensor:
        return self._rescaled(_resized(planes, self.size))

    def _rescaled(self, planes: torch.Tensor) -> torch.Tensor:
        return planes.to(self.dtype, memory_format=torch.contiguous_format).mul_(self.scale)


def _resized(planes: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    return interpolate(planes[None], size, mode="bilinear", align_corners=False, antialias=True)[0]


class DinoV3Encoder(LaunchedEncoder):
    """Pixels → float32 (1024,), not normalised."""

    files = ("config.json", _PROCESSOR)
    config: ClassVar = {"model_type": "dinov3_vit", "hidden_size": DINOV3_WIDTH}
    host_class = DinoV3Preprocessor

    @classmethod
    def _facts(cls, checkpoint: Checkpoint, spec: EmbeddingSpec) -> dict[str, Any]:
        return {
            "output": "class token after the final norm",
            "preprocessing": PREPROCESSING,
            **({"resize": "fast"} if spec.contract.get("resize") == "fast" else {}),
            "preprocessor_sha256": DinoV3Preprocessor(checkpoint, spec).sha256,
        }

    @classmethod
    def _model_of(cls, checkpoint: Checkpoint, host: Any, spec: EmbeddingSpec) -> Any:
        return load_model(library("transformers").DINOv3ViTModel, checkpoint).to(checkpoint.device)

    def prepare(self, item: np.ndarray | str) -> Prepared:
        """Resize and normalise one image. All results have one size, so the image's own pixels do not count."""
        return Prepared(self._host(require_pixels(self._spec.kind, item)), group=self._host.size)

    @torch.inference_mode()
    def launch(self, batch: Sequence[Prepared]) -> Callable[[], list[np.ndarray]]:
        """Start one call; its arrays are float32 (1024,) each."""
        values = to_device(torch.stack([item.payload for item in batch]), self._checkpoint.device)
        self.calls += 1
        pooled = self._model(pixel_values=values.to(self._checkpoint.torch_dtype)).pooler_output
        stored = begin_storing(pooled, self._spec)
        return lambda: list(stored())

    @staticmethod
    def write_preview(folder: Path) -> None:
        """Write a model with one layer of the real width, so that the class token depends on the image; about 10 MB."""
        transformers = library("transformers")
        config = transformers.DINOv3ViTConfig(
            hidden_size=DINOV3_WIDTH,
            intermediate_size=128,
            num_hidden_layers=1,
            num_attention_heads=16,
            num_register_tokens=4,
        )
        # A small gain for the class token: with the usual one it dominates the image, and all vectors are similar.
        gains = {"cls_token": 2.0, "register_tokens": 8.0, "mask_token": 1.0}
        save_preview(transformers.DINOv3ViTModel(config), folder, gains=gains)
        write_json(
            folder / _PROCESSOR,
            {
                "do_center_crop": None,
                "do_normalize": True,
                "do_rescale": True,
                "do_resize": True,
                "image_mean": [0.485, 0.456, 0.406],
                "image_processor_type": "DINOv3ViTImageProcessorFast",
                "image_std": [0.229, 0.224, 0.225],
                "resample": _BILINEAR,
                "rescale_factor": 1 / 255,
                "size": {"height": 224, "width": 224},
            },
        )
