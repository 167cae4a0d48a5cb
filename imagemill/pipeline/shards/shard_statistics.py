"""What a set's samples are like, counted: caption lengths, shapes and sizes of the images.

Belongs here: the numbers of one sample, and their counts over a set, as they stand in its manifest.
Belongs elsewhere: the tables that people read (shard_card.py), statistics of the latents' values (latent_statistics.py).
Spec: docs/spec/shards.md#updating-a-set
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from imagemill.pipeline.shards.shard_sets import IndexLine

# Upper limits of the classes of image sizes, in megapixels; the last class has none.
MEGAPIXELS = (0.25, 0.5, 1, 2, 4, 8, 16)
_SIZE_CLASSES = (*(f"<{limit}" for limit in MEGAPIXELS), f">={MEGAPIXELS[-1]}")

# Width / height is counted in steps of this.
RATIO_STEP = 0.1


class Measures(NamedTuple):
    """A sample's numbers. Width and height of the oriented image in pixels, tokens of the caption; 0: not known."""

    width: int
    height: int
    tokens: int


class _Size(msgspec.Struct):
    width: int
    height: int


_decode_size = msgspec.json.Decoder(_Size).decode


def measures_of(record: bytes, mask: Sequence[int]) -> Measures:
    """Of one sample on its way into a tar: its json member's bytes (a valid record), and its T5 mask."""
    size = _decode_size(record)
    return Measures(size.width, size.height, sum(mask))


def statistics_of(samples: Iterable[Measures | IndexLine]) -> dict[str, Any]:
    """Counts over the samples that count.

    Returns:
        `caption_tokens`: tokens → samples; `aspect_ratios`: width / height, rounded to one decimal → samples; `megapixels`:
        `<0.25` to `<16` and `>=16` → samples (one size is counted in the first class that takes it); `unmeasured`: samples of
        sets that were written before these were counted. Keys are text, zero counts are left out, order is by size.
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
