"""Second of the two files that add an embedding kind: its encoder, with the recipe of its preview model."""

import json

import numpy as np
import torch
from safetensors.numpy import load_file, save_file

from imagemill.encoders.loading import identity, require_pixels, resolve, to_stored
from imagemill.models import Prepared
from tests.helpers.toy_kind.spec import COLOURS


class ToyEncoder:
    """Pixels → float32 (5,): the mean colour multiplied by a matrix."""

    def __init__(self, matrix, spec, made_by):
        self.calls, self.identity = 0, made_by
        self._matrix, self._spec = torch.from_numpy(matrix), spec

    @classmethod
    def identify(cls, settings, *, spec, threads, preview_root):
        return cls.load(settings, spec=spec, threads=threads, preview_root=preview_root).identity

    look_up = identify

    @classmethod
    def load(cls, settings, *, spec, threads, preview_root):
        checkpoint = resolve(settings, spec=spec, preview_root=preview_root, files=("config.json", "model.safetensors"))
        made_by = identity(checkpoint, threads=threads, weights="model", preprocessing="mean-1")
        return cls(load_file(checkpoint.path / "model.safetensors")["matrix"], spec, made_by)

    def prepare(self, item):
        return Prepared(require_pixels(self._spec.kind, item).mean((0, 1)), group="one size")

    def encode(self, batch):
        self.calls += 1
        means = torch.tensor(np.stack([item.payload for item in batch]), dtype=torch.float32)
        return list(to_stored(means @ self._matrix.T, self._spec))

    def close(self):
        pass

    @staticmethod
    def write_preview(folder):
        matrix = np.arange(3 * COLOURS, dtype=np.float32).reshape(COLOURS, 3)
        save_file({"matrix": matrix}, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({"model_type": "mean_colour"}))
