"""Fitting of latents to their bucket's size, by cropping or resizing.

Options are applied in batches.py; latents are encoded in encoders/flux_vae.py. The part of the photograph that a window contains
is computed in domain/latent_boxes.py.
"""

from typing import Literal

import numpy as np

from imagemill.domain.embedding_specs import VAE
from imagemill.domain.latent_boxes import LatentSize, covering_size, is_smaller, middle
from imagemill.errors import ImagemillError
from imagemill.pipeline.shards.shard_manifest import Manifest, ModelEntry

Fit = Literal["as_stored", "crop", "resize"]


def fit_latent(
    latent: np.ndarray, size: LatentSize, fit: Fit, corner: tuple[float, float] | None = None, *, where: object = None
) -> np.ndarray:
    """Return a latent of exactly the bucket's size.

    Resizing a latent is approximate: it is not the latent of the resized image, since the VAE is not linear; expect
    softened detail. Cropping is exact, except that the encoder saw pixels beyond the window's edge.

    Args:
        latent: shape (16, h, w).
        size: (height, width) of the result.
        fit: `crop`: a window of the latent; one that is too small is first enlarged as far as needed. `resize`: scaled
            to just cover the size, with its proportions, then cropped.
        corner: position of the window in the available room, both in [0, 1); None: in the middle.
        where: place of the sample, for the message.

    Returns:
        An array with the dtype of `latent`, shape (16, *size).

    Raises:
        ImagemillError: if the latent is empty, since it cannot be enlarged.
    """
    if not latent.size:
        raise ImagemillError(
            "a latent is empty",
            where=where,
            why=f"its shape is {latent.shape}: a side of its image is shorter than one place of a latent",
            do='imagemill withdraw ID removes the sample; latents="as_stored" delivers it as it is',
        )
    if fit == "resize" or is_smaller(_places(latent), size):
        latent = _covering(latent, size)
    top, left = middle(_places(latent), size)
    if corner:
        rows, columns = _places(latent)
        top, left = int(corner[0] * (rows - size[0] + 1)), int(corner[1] * (columns - size[1] + 1))
    return latent[:, top : top + size[0], left : left + size[1]]


def _places(latent: np.ndarray) -> LatentSize:
    return latent.shape[1], latent.shape[2]


def _covering(latent: np.ndarray, size: LatentSize) -> np.ndarray:
    """Return the smallest latent of these proportions that covers `size`: area averages if smaller, bilinear if larger."""
    import torch
    from torch.nn import functional

    covering = covering_size(_places(latent), size)
    if covering == _places(latent):
        return latent
    values = torch.from_numpy(latent.astype(np.float32))[None]
    mode = "bilinear" if is_smaller(_places(latent), size) else "area"
    return functional.interpolate(values, covering, mode=mode)[0].numpy().astype(latent.dtype)


def latent_factors(manifest: Manifest, where: object) -> tuple[float, float]:
    """Return (scaling factor, shift factor) of a set's VAE; models train on (z - shift) * scaling.

    The shift of a VAE without one is 0.

    Raises:
        ImagemillError: if the manifest does not contain the scaling factor.
    """
    facts = manifest.provenance.get(VAE.kind, ModelEntry()).facts or {}
    scaling = facts.get("scaling_factor")
    if scaling is None:
        raise ImagemillError(
            "the manifest does not record how these latents are scaled",
            where=where,
            why="another program made them, or their model is not recorded",
            do="leave normalized=False and apply your VAE's scaling_factor and shift_factor yourself",
        )
    return float(scaling), float(facts.get("shift_factor") or 0.0)
