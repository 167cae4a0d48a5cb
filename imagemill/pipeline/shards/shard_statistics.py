"""Statistics of a set's samples: caption lengths, image shapes and image sizes.

Tables for people are made in shard_card.py; statistics of latent values are in latent_statistics.py.

Spec: docs/spec/shards.md#updating-a-set
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

import msgspec

from imagemill.domain.buckets import LEAST_COVERAGE, MOST_ENLARGEMENT, use_of_crop, use_of_window
from imagemill.domain.stage2_records import repeats_of
from imagemill.pipeline.shards.shard_manifest import CropStatistics
from imagemill.pipeline.shards.shard_sets import IndexLine

# Upper limits of the size classes, in megapixels; the last class has no upper limit.
MEGAPIXELS = (0.25, 0.5, 1, 2, 4, 8, 16)
_SIZE_CLASSES = (*(f"<{limit}" for limit in MEGAPIXELS), f">={MEGAPIXELS[-1]}")

# Width of the classes of width / height.
RATIO_STEP = 0.1


class Measures(NamedTuple):
    """Measures of a sample: oriented width and height in pixels, tokens of the caption; 0 if not known."""

    width: int
    height: int
    tokens: int


class _Drawn(msgspec.Struct):
    width: int
    height: int
    image_path: str
    repeats: Any = None


_decode = msgspec.json.Decoder(_Drawn).decode


def measures_of(record: bytes, mask: Sequence[int]) -> Measures:
    """Return the measures of a sample to be packed, from its json member (a valid record) and its T5 mask."""
    size = _decode(record)
    return Measures(size.width, size.height, sum(mask))


def repeats_in(record: bytes) -> int:
    """Return how often training draws a sample in an epoch, from its json member (a valid record)."""
    drawn = _decode(record)
    return 1 if drawn.repeats is None else repeats_of({"image_path": drawn.image_path, "repeats": drawn.repeats})


def summed_repeats(samples: Iterable[IndexLine]) -> int | msgspec.UnsetType:
    """Return the number of draws in an epoch over the live samples; UNSET if no sample has repeats."""
    counted = Counter(sample.repeats for sample in samples)
    return sum(int(repeats or 1) * count for repeats, count in counted.items()) if any(counted) else msgspec.UNSET


def statistics_of(samples: Iterable[Measures | IndexLine]) -> dict[str, Any]:
    """Return counts over the live samples.

    Returns:
        `caption_tokens`: tokens → samples.
        `aspect_ratios`: width / height, rounded to one decimal → samples.
        `megapixels`: `<0.25` to `<16` and `>=16` → samples; a size is counted in the first class that contains it.
        `unmeasured`: samples of sets that were written before measures were recorded.

        Keys are text, zero counts are left out, and the order is by size.
    """
    counted = Counter((sample.width, sample.height, sample.tokens) for sample in samples)
    unmeasured = sum(count for measures, count in counted.items() if not all(measures))
    known = {Measures(*measures): count for measures, count in counted.items() if all(measures)}
    return {
        "caption_tokens": _counts(known, lambda m: m.tokens, str),
        "aspect_ratios": _counts(
            known, lambda m: round(m.width / m.height / RATIO_STEP), lambda n: f"{n * RATIO_STEP:.1f}"
        ),
        "megapixels": _counts(
            known, lambda m: bisect_right(MEGAPIXELS, m.width * m.height / 1_000_000), _SIZE_CLASSES.__getitem__
        ),
        "unmeasured": unmeasured,
    }


def crop_statistics(samples: Iterable[IndexLine], bucket: str, size: str) -> dict[str, Any] | None:
    """Return the use of the samples' images at the bucket's size, None if no sample is measured.

    Args:
        samples: the live samples.
        bucket: of the samples.
        size: the picture that the VAE encoded, `original` or `bucket`.

    Returns:
        the fields of `CropStatistics`; values are rounded to three decimals.
    """
    use = use_of_crop if size == "bucket" else use_of_window
    sizes = Counter((sample.width, sample.height) for sample in samples if sample.width and sample.height)
    if not sizes:
        return None
    used = {size: use(*size, bucket) for size in sizes}
    coverages, enlargements = zip(*(used[size] for size in sizes.elements()), strict=True)
    return {
        "size": size,
        "median_coverage": round(median(coverages), 3),
        "median_enlargement": round(median(enlargements), 3),
        "most_enlargement": round(max(enlargements), 3),
    }


POOR_USE = (
    "at the bucket's size, training would see a small part of the pictures, or enlarged latents; "
    "set encoders.vae_latents.size: bucket in imagemill.yaml, then `imagemill stage2 --regenerate vae`"
)


def is_poor(crop: CropStatistics) -> bool:
    """Return whether `size: bucket` would serve training better than these latents of the images' own size."""
    poor = crop.median_coverage < LEAST_COVERAGE or crop.median_enlargement > MOST_ENLARGEMENT
    return crop.size == "original" and poor


def use_line(crop: CropStatistics) -> str:
    """Return the statistics for people."""
    return f"median {crop.median_coverage:.0%} of the picture, enlarged {crop.median_enlargement:.2f} times"


def _counts(
    known: Mapping[Measures, int], key: Callable[[Measures], int], name: Callable[[int], str]
) -> dict[str, int]:
    counts: Counter[int] = Counter()
    for measures, count in known.items():
        counts[key(measures)] += count
    return {name(value): counts[value] for value in sorted(counts)}
