"""The seven aspect buckets, and the assignment of images to them.

Spec: docs/spec/stage2.md#buckets
"""

from fractions import Fraction

# Ties are broken by this order.
BUCKETS = ("1024x1024", "832x1216", "1216x832", "768x1280", "1280x768", "704x1344", "1344x704")

# Outside this range of width / height an image still gets its nearest bucket, with a warning.
USUAL_RATIOS = (Fraction(2, 5), Fraction(5, 2))


def bucket_size(bucket: str) -> tuple[int, int]:
    """Return (width, height) in pixels."""
    width, _, height = bucket.partition("x")
    return int(width), int(height)


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
