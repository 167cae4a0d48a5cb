"""The Flux VAE's encoder: an image as 16 channels at an eighth of its size.

The module has the crop, the scaling of pixels, the tiling rule, the forward call, and the preview configuration.
Spec: docs/spec/stage2.md#vae-latents
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image

from imagemill.domain.buckets import assign_bucket, bucket_crop, bucket_size
from imagemill.domain.embedding_specs import (
    TILE_OVERLAP,
    TILE_PIXELS,
    TILED_ABOVE_PIXELS,
    VAE_CHANNELS,
    VAE_DOWNSAMPLING,
    EmbeddingSpec,
)
from imagemill.encoders.base import LaunchedEncoder
from imagemill.encoders.loading import Checkpoint, begin_storing, library, load_model, require_pixels, to_device
from imagemill.encoders.preview import save_preview
from imagemill.errors import Refused
from imagemill.models import Prepared

PREPROCESSING = "flux-vae-1"
BUCKET_FILTER = "pillow lanczos, reducing_gap 3"


def bucket_picture(pixels: np.ndarray) -> np.ndarray:
    """Return the centred crop of an image that has its bucket's aspect ratio, resized to the bucket.

    Args:
        pixels: uint8 (height, width, 3).

    Returns:
        uint8 (bucket height, bucket width, 3).
    """
    height, width = pixels.shape[:2]
    bucket = assign_bucket(width, height)
    crop = Image.fromarray(pixels).crop(bucket_crop(width, height, bucket))
    return np.asarray(crop.resize(bucket_size(bucket), Image.Resampling.LANCZOS, reducing_gap=3.0))


class FluxVaeEncoder(LaunchedEncoder):
    """Pixels → float16 (16, H // 8, W // 8): the posterior's mean, neither scaled nor shifted.

    The image is cropped at right and bottom to multiples of 8, so that the decoded latent is exactly the cropped picture.
    """

    weights = "diffusion_pytorch_model"
    config: ClassVar = {"_class_name": "AutoencoderKL", "latent_channels": VAE_CHANNELS, "in_channels": 3}

    @classmethod
    def _facts(cls, checkpoint: Checkpoint, spec: EmbeddingSpec) -> dict[str, Any]:
        config = checkpoint.json()
        downsampling = 2 ** (len(config.get("down_block_types", ())) - 1)
        if downsampling != VAE_DOWNSAMPLING:
            raise checkpoint.unusable(f"it makes images {downsampling} times smaller; required is {VAE_DOWNSAMPLING}")
        size = spec.contract.get("size", "original")
        return {
            "size": size,
            **({"filter": BUCKET_FILTER} if size == "bucket" else {}),
            "memory_format": str(cls._memory_format(checkpoint, spec)).removeprefix("torch."),
            "output": "posterior mean",
            "preprocessing": PREPROCESSING,
            "crop_to_multiple_of": VAE_DOWNSAMPLING,
            "scaled": False,
            "scaling_factor": config.get("scaling_factor"),
            "shift_factor": config.get("shift_factor"),
            "tiling": {"above_pixels": TILED_ABOVE_PIXELS, "tile_pixels": TILE_PIXELS, "overlap": TILE_OVERLAP},
        }

    @classmethod
    def _model_of(cls, checkpoint: Checkpoint, host: Any, spec: EmbeddingSpec) -> Any:
        """Load the model without its decoder."""
        # Without accelerate, the alternative gives the same result but logs a long warning.
        model = load_model(library("diffusers").AutoencoderKL, checkpoint, low_cpu_mem_usage=False)
        del model.decoder
        model.tile_sample_min_size = TILE_PIXELS
        model.tile_latent_min_size = TILE_PIXELS // VAE_DOWNSAMPLING
        model.tile_overlap_factor = TILE_OVERLAP
        # One image at a time inside a call: otherwise the mid attention's norm gives other last bits in a batch.
        model.use_slicing = True
        return model.to(checkpoint.device, memory_format=cls._memory_format(checkpoint, spec))

    @classmethod
    def _memory_format(cls, checkpoint: Checkpoint, spec: EmbeddingSpec) -> torch.memory_format:
        """Return the recorded format of tensors, else the exact one on the CPU and the fast one elsewhere."""
        # torch's group norm on the CPU loses three digits in channels_last.
        exact = checkpoint.device == "cpu" and checkpoint.settings.dtype in {"float32", "float64"}
        return getattr(torch, spec.contract.get("memory_format", "contiguous_format" if exact else "channels_last"))

    @property
    def _memory(self) -> torch.memory_format:
        return self._memory_format(self._checkpoint, self._spec)

    def prepare(self, item: np.ndarray | str) -> Prepared:
        """Crop one image, or resize its bucket's crop. It stays uint8 until it is on the device: a quarter of the bytes.

        Raises:
            Refused: `too_small`, a side under 8 pixels.
        """
        pixels = require_pixels(self._spec.kind, item)
        if self._spec.contract.get("size") == "bucket" and min(pixels.shape[:2]) >= VAE_DOWNSAMPLING:
            pixels = bucket_picture(pixels)
        height, width = (side // VAE_DOWNSAMPLING * VAE_DOWNSAMPLING for side in pixels.shape[:2])
        if not height or not width:
            raise Refused(
                "too_small",
                f"the image is {pixels.shape[1]}x{pixels.shape[0]} pixels, a latent needs {VAE_DOWNSAMPLING} on each side",
                do="replace the image",
            )
        group = (height // VAE_DOWNSAMPLING, width // VAE_DOWNSAMPLING, height * width > TILED_ABOVE_PIXELS)
        return Prepared(torch.from_numpy(np.array(pixels[:height, :width], order="C")), group, height * width)

    @torch.inference_mode()
    def launch(self, batch: Sequence[Prepared]) -> Callable[[], list[np.ndarray]]:
        """Start one call on images of one size; its arrays are float16 (16, H // 8, W // 8) each."""
        pixels = to_device(torch.stack([item.payload for item in batch]), self._checkpoint.device)
        values = pixels.to(self._checkpoint.host_dtype).div_(127.5).sub_(1)
        # Height, width, colour in memory is what channels_last means: then nothing is moved.
        values = values.permute(0, 3, 1, 2).to(self._checkpoint.torch_dtype, memory_format=self._memory)
        self._model.use_tiling = batch[0].pixels > TILED_ABOVE_PIXELS
        self.calls += 1
        mean = self._model.encode(values).latent_dist.mean
        stored = begin_storing(mean, self._spec)
        return lambda: list(np.ascontiguousarray(stored()))

    @staticmethod
    def write_preview(folder: Path) -> None:
        """Write four narrow blocks, three downsamplings, no mid attention (half of the time at a megapixel); 0.2 MB."""
        model = library("diffusers").AutoencoderKL(
            in_channels=3,
            out_channels=3,
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            block_out_channels=(8, 8, 16, 16),
            layers_per_block=1,
            latent_channels=VAE_CHANNELS,
            norm_num_groups=4,
            sample_size=1024,
            scaling_factor=0.3611,
            shift_factor=0.1159,
            use_quant_conv=False,
            use_post_quant_conv=False,
            mid_block_add_attention=False,
        )
        save_preview(model, folder)
