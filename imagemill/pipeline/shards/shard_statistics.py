"""Statistics of a set's samples: caption lengths, image shapes and image sizes.

Tables for people are made in shard_card.py; statistics of latent values are in latent_statistics.py.

Spec: docs/spec/shards.md#updating-a-set
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

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


class _Size(msgspec.Struct):
    width: int
    height: int


_decode_size = msgspec.json.Decoder(_Size).decode


def measures_of(record: bytes, mask: Sequence[int]) -> Measures:
    """Return the measures of a sample to be packed, from its json member (a valid record) and its T5 mask."""
    size = _decode_size(record)
    return Measures(size.width, size.height, sum(mask))


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


def _counts(
    known: Mapping[Measures, int], key: Callable[[Measures], int], name: Callable[[int], str]
) -> dict[str, int]:
    counts: Counter[int] = Counter()
    for measures, count in known.items():
        counts[key(measures)] += count
    return {name(value): counts[value] for value in sorted(counts)}
