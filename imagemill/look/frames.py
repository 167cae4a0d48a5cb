"""The part of a photograph that training sees, as a frame to draw, with its share of the photograph and its enlargement.

Spec: docs/spec/stage2.md#bucket-size
"""

from typing import Literal, NamedTuple

from imagemill.domain.buckets import bucket_crop, use_of_crop, use_of_window
from imagemill.domain.latent_boxes import Box, window_box


class Frame(NamedTuple):
    """The part of an upright photograph that training on its bucket's latents sees.

    Attributes:
        box: (left, top, right, bottom) in whole pixels.
        coverage: share of the photograph's pixels, from 0 to 1, as in manifests.
        enlargement: how many times they are enlarged; less than 1 if they are scaled down.
    """

    box: Box
    coverage: float
    enlargement: float


def frame_of(width: int, height: int, bucket: str, size: Literal["bucket", "original"]) -> Frame:
    """Return the frame of a photograph of this size.

    Args:
        width: in pixels, after orientation; at least 8.
        height: in pixels, after orientation; at least 8.
        bucket: of the photograph.
        size: the picture that the VAE encodes. The frame is the bucket's crop with `bucket`; with `original`, the window that
            `latents="crop"` takes from the middle.
    """
    if size == "bucket":
        return Frame(bucket_crop(width, height, bucket), *use_of_crop(width, height, bucket))
    return Frame(window_box(width, height, bucket), *use_of_window(width, height, bucket))
