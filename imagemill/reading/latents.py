"""Fitting of latents to their bucket's size, by cropping or resizing.

Options are applied in batches.py; latents are encoded in encoders/flux_vae.py.
"""

from typing import Literal

import numpy as np

from imagemill.domain.embedding_specs import VAE
from imagemill.errors import ImagemillError
from imagemill.pipeline.shards.shard_manifest import Manifest, ModelEntry

Fit = Literal["as_stored", "crop", "resize"]

Size = tuple[int, int]


def fit_latent(
    latent: np.ndarray, size: Size, fit: Fit, corner: tuple[float, float] | None = None, *, where: object = None
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
    too_small = latent.shape[1] < size[0] or latent.shape[2] < size[1]
    if fit == "resize" or too_small:
        latent = _covering(latent, size)
    room = latent.shape[1] - size[0], latent.shape[2] - size[1]
    down, right = corner or (0.5, 0.5)
    top, left = (int(down * (room[0] + 1)), int(right * (room[1] + 1))) if corner else (room[0] // 2, room[1] // 2)
    return latent[:, top : top + size[0], left : left + size[1]]


def _covering(latent: np.ndarray, size: Size) -> np.ndarray:
    """Return the smallest latent of these proportions that covers `size`: area averages if smaller, bilinear if larger."""
    import torch
    from torch.nn import functional

    _, height, width = latent.shape
    scale = max(size[0] / height, size[1] / width)
    covering = max(size[0], round(height * scale)), max(size[1], round(width * scale))
    if covering == (height, width):
        return latent
    values = torch.from_numpy(latent.astype(np.float32))[None]
    mode = "area" if scale < 1 else "bilinear"
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
