"""Parts of a photograph that a latent contains: as it is stored, and in the window that readers cut from it.

Boxes are (left, top, right, bottom) in pixels of the upright photograph. Latents are cut in reading/latents.py; crops of buckets
and the use of a photograph are in buckets.py.

Spec: docs/spec/stage2.md#bucket-size
"""

from imagemill.domain.buckets import bucket_crop, bucket_size
from imagemill.domain.embedding_specs import VAE_DOWNSAMPLING, latent_shape

Box = tuple[int, int, int, int]

# (height, width) of a latent.
LatentSize = tuple[int, int]


def encoded_box(width: int, height: int, size: str, bucket: str | None = None, cell: int = VAE_DOWNSAMPLING) -> Box:
    """Return the part of an image that its array as stored contains.

    Args:
        width: of the image.
        height: of the image.
        size: the picture that was encoded, `original` or `bucket`.
        bucket: of the image; None for the nearest one.
        cell: pixels of the encoded picture for each place of the array.
    """
    if size == "bucket":
        return bucket_crop(width, height, bucket)
    return 0, 0, width // cell * cell, height // cell * cell


def window_box(width: int, height: int, bucket: str) -> Box:
    """Return the part of an image that the window in the middle of its latent contains, if the image's own size was encoded.

    It is `latents="crop"` of readers, rounded to whole pixels. The VAE also saw the pixels around the window.
    """
    _, rows, columns = latent_shape(height, width)
    wide, high = bucket_size(bucket)
    size = latent_shape(high, wide)[1:]
    covering = covering_size((rows, columns), size) if is_smaller((rows, columns), size) else (rows, columns)
    top, left = middle(covering, size)
    across, down = (VAE_DOWNSAMPLING * own / made for own, made in ((columns, covering[1]), (rows, covering[0])))
    return round(left * across), round(top * down), round((left + size[1]) * across), round((top + size[0]) * down)


def is_smaller(latent: LatentSize, size: LatentSize) -> bool:
    """Return whether a latent is too small for a window of this size, so that it is enlarged first."""
    return latent[0] < size[0] or latent[1] < size[1]


def covering_size(latent: LatentSize, size: LatentSize) -> LatentSize:
    """Return the size of the smallest latent with the proportions of `latent` that covers `size`."""
    scale = max(size[0] / latent[0], size[1] / latent[1])
    return max(size[0], round(latent[0] * scale)), max(size[1], round(latent[1] * scale))


def middle(latent: LatentSize, size: LatentSize) -> tuple[int, int]:
    """Return (top, left) of the window in the middle of a latent."""
    return (latent[0] - size[0]) // 2, (latent[1] - size[1]) // 2
