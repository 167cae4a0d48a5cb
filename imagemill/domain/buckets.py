"""The seven aspect buckets, and the assignment of images to them.

Spec: docs/spec/stage2.md#buckets
"""

from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

# Ties are broken by this order.
BUCKETS = ("1024x1024", "832x1216", "1216x832", "768x1280", "1280x768", "704x1344", "1344x704")

# Outside this range of width / height an image still gets its nearest bucket, with a warning.
USUAL_RATIOS = (Fraction(2, 5), Fraction(5, 2))

# Image sizes for which results are kept: few photographs have a size of their own.
_SIZES = 1 << 16


def bucket_size(bucket: str) -> tuple[int, int]:
    """Return (width, height) in pixels."""
    width, _, height = bucket.partition("x")
    return int(width), int(height)


@lru_cache(maxsize=_SIZES)
def assign_bucket(width: int, height: int) -> str:
    """Return the bucket whose width/height is nearest to the image's; on a tie, the first in BUCKETS."""
    # Exact arithmetic, because the last bit of rounded quotients would break ties. All distances are scaled by the
    # image's height.
    distances = [Fraction(abs(width * h - height * w), h) for w, h in map(bucket_size, BUCKETS)]
    return BUCKETS[distances.index(min(distances))]


def is_unusual_ratio(width: int, height: int) -> bool:
    """Return whether width / height is outside USUAL_RATIOS."""
    low, high = USUAL_RATIOS
    return not low <= Fraction(width, height) <= high


@lru_cache(maxsize=_SIZES)
def bucket_crop(width: int, height: int, bucket: str | None = None) -> tuple[int, int, int, int]:
    """Return (left, top, right, bottom) of the centred crop of an image that has its bucket's aspect ratio, in whole pixels.

    The smaller margin is at the left and at the top.
    Spec: docs/spec/stage2.md#bucket-size
    """
    wide, high = bucket_size(bucket or assign_bucket(width, height))
    box_width, box_height = min(width, round(height * wide / high)), min(height, round(width * high / wide))
    left, top = (width - box_width) // 2, (height - box_height) // 2
    return left, top, left + box_width, top + box_height


# Below this coverage, or above this enlargement, training at the bucket's size uses an image poorly.
LEAST_COVERAGE, MOST_ENLARGEMENT = 0.8, 1.2


class PictureUse(NamedTuple):
    """The part of an image that training on its bucket's latents uses.

    Attributes:
        coverage: share of the image's pixels, from 0 to 1.
        enlargement: how many times they are enlarged; less than 1 if they are scaled down.
    """

    coverage: float
    enlargement: float


def use_of_crop(width: int, height: int, bucket: str | None = None) -> PictureUse:
    """Return the use of an image of which the VAE encodes the bucket's crop."""
    bucket = bucket or assign_bucket(width, height)
    (wide, high), (left, top, right, bottom) = bucket_size(bucket), bucket_crop(width, height, bucket)
    coverage = (right - left) * (bottom - top) / (width * height)
    return PictureUse(coverage, max(wide / (right - left), high / (bottom - top)))


def use_of_window(width: int, height: int, bucket: str | None = None) -> PictureUse:
    """Return the use of an image encoded at its own size, of whose latent readers cut a window of the bucket's size."""
    wide, high = bucket_size(bucket or assign_bucket(width, height))
    enlargement = max(1.0, wide / width, high / height)
    return PictureUse(wide * high / enlargement**2 / (width * height), enlargement)
