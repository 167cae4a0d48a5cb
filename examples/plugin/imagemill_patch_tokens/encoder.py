"""The encoder of `patch_tokens`, imported only when a file has to be made."""

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image

from imagemill.domain.embedding_specs import EmbeddingSpec
from imagemill.encoders.base import CheckpointEncoder
from imagemill.encoders.dinov3 import DinoV3Encoder, DinoV3Preprocessor
from imagemill.encoders.flux_vae import bucket_picture
from imagemill.encoders.loading import Checkpoint, library, load_model, require_pixels, to_device, to_stored
from imagemill.models import Prepared
from imagemill_patch_tokens import PATCH, WIDTH, picture_size


class PatchTokenEncoder(CheckpointEncoder):
    """Pixels → float16 (rows, columns, 1024), without the class token and the register tokens."""

    files = ("config.json", "preprocessor_config.json")
    config: ClassVar = {"model_type": "dinov3_vit", "hidden_size": WIDTH, "patch_size": PATCH}
    host_class = DinoV3Preprocessor  # for its mean and standard deviation; its size is not used
    write_preview = DinoV3Encoder.write_preview

    @classmethod
    def _facts(cls, checkpoint: Checkpoint, spec: EmbeddingSpec) -> dict[str, Any]:
        """Return what affects the bytes besides the checkpoint."""
        return {
            "output": "patch tokens",
            "preprocessing": "patch-tokens-1",
            "preprocessor_sha256": DinoV3Preprocessor(checkpoint, spec).sha256,
            "reduce": spec.contract.get("reduce", 1),
        }

    @classmethod
    def _model_of(cls, checkpoint: Checkpoint, host: Any, spec: EmbeddingSpec) -> Any:
        return load_model(library("transformers").DINOv3ViTModel, checkpoint).to(checkpoint.device)

    def prepare(self, item: np.ndarray | str) -> Prepared:
        """Crop and resize one image on the CPU; may run on several threads."""
        pixels = require_pixels(self._spec.kind, item)
        size = picture_size(self._spec.contract, *pixels.shape[:2])
        picture = Image.fromarray(bucket_picture(pixels)).resize(size[::-1], Image.Resampling.LANCZOS)
        values = torch.from_numpy(np.array(picture)).permute(2, 0, 1).to(self._host.dtype) * self._host.scale
        return Prepared((values - self._host.mean) / self._host.std, group=size, pixels=size[0] * size[1])

    @torch.inference_mode()
    def encode(self, batch: Sequence[Prepared]) -> list[np.ndarray]:
        """Encode images of one size in one call. Raises NonFiniteEmbedding."""
        values = to_device(torch.stack([item.payload for item in batch]), self._checkpoint.device)
        self.calls += 1
        tokens = self._model(pixel_values=values.to(self._checkpoint.torch_dtype)).last_hidden_state
        high, wide = values.shape[2] // PATCH, values.shape[3] // PATCH
        patches = tokens[:, 1 + self._model.config.num_register_tokens :]
        return list(np.ascontiguousarray(to_stored(patches, self._spec)).reshape(len(batch), high, wide, WIDTH))
