"""Mean and spread of the VAE latents per channel, which training of a latent model needs.

    derived/latent_statistics/
    ├─ 1024x1024.json …    one per aspect bucket: counts, and mean, sum of squared distances (m2), std, min, max per channel
    └─ all.json            all existing buckets, merged

Each file contains its moments in float64. Moments are merged by Chan's formula, so buckets are counted separately and merged
without reading a latent again. Files are read in order of image id: equal files give equal bytes.

The files are selected in pipeline/stage2/valid_files.py and reports written in io_managers/report.py.

Reference: Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979.
"""

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from imagemill.domain.buckets import BUCKETS, assign_bucket
from imagemill.domain.embedding_specs import VAE, VAE_CHANNELS
from imagemill.errors import InvalidNpy
from imagemill.formats.manifest import json_bytes, read_document
from imagemill.fs.fingerprints import fingerprint
from imagemill.pipeline.curation.reports import CurationReport
from imagemill.pipeline.stage2.valid_files import CurrentFile, CurrentFiles, current_files, measured
from imagemill.progress import Progress
from imagemill.store.ledger import Ledger
from imagemill.store.provenance import ModelIdentity

ASSET = "latent_statistics"
FORMAT: Literal["imagemill-latent-statistics/1"] = "imagemill-latent-statistics/1"
ALL = "all"

_PER_CHANNEL = ("mean", "m2", "std", "min", "max")

# Number of moments merged at once: numpy adds them pairwise, and memory use stays constant.
_TOGETHER = 1024


# ---- moments


@dataclass(frozen=True, slots=True)
class Moments:
    """Per channel, float64: the mean, the sum of squared distances from it, the minimum and the maximum.

    `images`: number of latents; `count`: values per channel in all of them.
    """

    images: int
    count: int
    mean: np.ndarray
    m2: np.ndarray
    min: np.ndarray
    max: np.ndarray

    @property
    def std(self) -> np.ndarray:
        """Standard deviation of the population, divided by `count`; not an estimate from a sample."""
        return np.sqrt(self.m2 / max(self.count, 1))


def moments_of(latent: np.ndarray, path: Path = Path("latent")) -> Moments:
    """Compute moments of a latent, any float dtype, shape (channels, h, w), in two passes. Raises InvalidNpy if not finite."""
    values = latent.reshape(len(latent), -1).astype(np.float64)
    low, high = values.min(axis=1), values.max(axis=1)
    if not (np.isfinite(low) & np.isfinite(high)).all():
        raise InvalidNpy("non_finite", path, "NaN or infinity among the values")
    mean = values.mean(axis=1)
    values -= mean[:, None]
    return Moments(1, values.shape[1], mean, np.einsum("ij,ij->i", values, values), low, high)


def merge(parts: Iterable[Moments]) -> Moments:
    """Return the moments of all parts together; zeros for no values."""
    parts = [part for part in parts if part.count]
    if not parts:
        zeros = np.zeros(VAE_CHANNELS)
        return Moments(0, 0, zeros, zeros, zeros, zeros)
    counts = np.array([part.count for part in parts], np.float64)
    # One row per channel: numpy adds along the last axis pairwise, which limits the error to that of a few additions.
    means, m2s, lows, highs = (
        np.stack([getattr(part, name) for part in parts], axis=1) for name in ("mean", "m2", "min", "max")
    )
    near = means[:, :1]  # distances from one of the means stay exact even if the mean is large compared with the spread
    mean = near[:, 0] + ((means - near) * counts).sum(axis=1) / counts.sum()
    m2 = m2s.sum(axis=1) + ((means - mean[:, None]) ** 2 * counts).sum(axis=1)
    images, count = sum(part.images for part in parts), sum(part.count for part in parts)
    return Moments(images, count, mean, m2, lows.min(axis=1), highs.max(axis=1))


# ---- documents


class Scaled(msgspec.Struct, frozen=True):
    """Moments after `(z - shift) * scale`, the values that the model is trained on; both factors as recorded of the VAE."""

    shift: float
    scale: float
    mean: list[float]
    std: list[float]


class LatentMoments(msgspec.Struct, frozen=True, kw_only=True):
    """One document. Lists contain one number per channel and are empty if there is no latent.

    `model`: key of the VAE; `fingerprint`: of all inputs of the numbers; `left_out`: reason → images.
    """

    format: Literal["imagemill-latent-statistics/1"] = FORMAT
    buckets: list[str]
    model: str | None
    fingerprint: str
    images: int
    values_per_channel: int
    left_out: dict[str, int]
    mean: list[float]
    m2: list[float]
    std: list[float]
    min: list[float]
    max: list[float]
    scaled: Scaled | None

    @property
    def moments(self) -> Moments:
        """The moments, as arrays."""
        lists = (np.array(values) for values in (self.mean, self.m2, self.min, self.max))
        return Moments(self.images, self.values_per_channel, *lists)


def statistics_path(derived: Path, name: str) -> Path:
    """Return the path of the document of a bucket, or of `all`."""
    return derived / ASSET / f"{name}.json"


def read_statistics(path: Path) -> LatentMoments | None:
    """Return a document; None if it is missing, of another format or incomplete."""
    statistics = read_document(path, LatentMoments)
    lengths = {len(getattr(statistics, name)) for name in _PER_CHANNEL} if statistics else {}
    return statistics if statistics and lengths == {VAE_CHANNELS if statistics.values_per_channel else 0} else None


def _document(
    moments: Moments, buckets: Sequence[str], version: str, left_out: Counter[str], identity: ModelIdentity | None
) -> LatentMoments:
    some = slice(None) if moments.count else slice(0)
    channels = {name: getattr(moments, name)[some].tolist() for name in _PER_CHANNEL}
    return LatentMoments(
        buckets=list(buckets),
        model=identity.key if identity else None,
        fingerprint=version,
        images=moments.images,
        values_per_channel=moments.count,
        left_out=dict(left_out),
        scaled=_scaled(moments, identity) if moments.count else None,
        **channels,
    )


def _scaled(moments: Moments, identity: ModelIdentity | None) -> Scaled | None:
    shift, scale = _factors(identity)
    if shift is None or scale is None:
        return None
    return Scaled(shift, scale, ((moments.mean - shift) * scale).tolist(), (moments.std * abs(scale)).tolist())


def _factors(identity: ModelIdentity | None) -> tuple[float | None, float | None]:
    facts = identity.facts if identity else {}
    return facts.get("shift_factor"), facts.get("scaling_factor")


def as_table(statistics: LatentMoments) -> str:
    """Return a markdown table with a row per channel."""
    scaled = statistics.scaled
    head = ["channel", "mean", "std", "min", "max", *(["mean scaled", "std scaled"] if scaled else [])]
    columns = [statistics.mean, statistics.std, statistics.min, statistics.max]
    columns += [scaled.mean, scaled.std] if scaled else []
    rows = [[str(n), *(f"{value:.5g}" for value in row)] for n, row in enumerate(zip(*columns, strict=True))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [head, ["---:"] * len(head), *rows])


# ---- planning


@dataclass(slots=True)
class BucketPart:
    """Files of one bucket, and why images of it are left out; `version`: fingerprint of both and of the model."""

    bucket: str
    files: list[CurrentFile] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    version: str = ""


@dataclass(slots=True)
class StatisticsPlan:
    """The chosen buckets, from one listing of the folder of latents."""

    derived: Path
    found: CurrentFiles
    parts: list[BucketPart]
    identity: ModelIdentity | None


def plan_statistics(
    derived: Path, ledger: Ledger, identity: ModelIdentity | None, buckets: Iterable[str]
) -> StatisticsPlan:
    """Sort the latents into buckets by the size of their images. `identity`: the recorded model of the latents."""
    found = current_files(VAE, derived, ledger)
    bucket_of = functools.cache(assign_bucket)
    parts = {bucket: BucketPart(bucket) for bucket in buckets}
    for file in found.files:
        if part := parts.get(bucket_of(file.source.width, file.source.height)):
            part.files.append(file)
    for image_id, reason in found.left_out.items():
        source = found.sources.get(image_id)
        if source and (part := parts.get(bucket_of(source.width, source.height))):
            part.left_out[image_id] = reason
    for part in parts.values():
        part.version = _version(part, identity)
    return StatisticsPlan(derived, found, list(parts.values()), identity)


def _version(part: BucketPart, identity: ModelIdentity | None) -> str:
    lines = [f"{FORMAT} {identity.key if identity else None} {_factors(identity)}"]
    lines += [f"{file.image_id} {file.content}" for file in part.files]
    lines += [f"{image_id} {reason}" for image_id, reason in sorted(part.left_out.items())]
    return fingerprint("\n".join(lines).encode())


# ---- counting


def statistics_reports(
    plan: StatisticsPlan, *, threads: int = 2, before_merge: Callable[[], None] = lambda: None
) -> Iterator[CurationReport]:
    """Yield one report per bucket, then one of all buckets on disk, which the caller has written by then.

    A bucket whose document is up to date is not read again.

    Args:
        plan: the buckets.
        threads: threads that read files.
        before_merge: called before the buckets on disk are read, to exclude other writers of `all.json`.
    """
    with Progress(ASSET, sum(len(part.files) for part in plan.parts)) as progress:
        for part in plan.parts:
            path = statistics_path(plan.derived, part.bucket)
            statistics = read_statistics(path)
            if statistics and statistics.fingerprint == part.version:
                progress.advance(len(part.files), free=True)
                yield _report(statistics, path, part.bucket, write=False)
            else:
                yield _report(_count(plan, part, threads, progress), path, part.bucket)
    before_merge()
    yield _report(merged(plan.derived, plan.identity), statistics_path(plan.derived, ALL))


def _count(plan: StatisticsPlan, part: BucketPart, threads: int, progress: Progress) -> LatentMoments:
    stream = measured(plan.found, part.files, moments_of, threads=threads)
    chunks: list[Moments] = []
    while chunk := [moments for _, moments in islice(stream, _TOGETHER)]:
        chunks.append(merge(chunk))
        progress.advance(len(chunk))
    # Files that were found to be invalid when they were read.
    unread = plan.found.left_out
    left_out = part.left_out | {file.image_id: unread[file.image_id] for file in part.files if file.image_id in unread}
    return _document(merge(chunks), [part.bucket], part.version, Counter(sorted(left_out.values())), plan.identity)


def merged(derived: Path, identity: ModelIdentity | None) -> LatentMoments:
    """Merge every bucket on disk whose latents this model made into one document."""
    key = identity.key if identity else None
    present = {bucket: read_statistics(statistics_path(derived, bucket)) for bucket in BUCKETS}
    parts = {bucket: part for bucket, part in present.items() if part and part.model == key}
    version = fingerprint("\n".join(f"{bucket} {part.fingerprint}" for bucket, part in parts.items()).encode())
    left_out = sum((Counter(part.left_out) for part in parts.values()), Counter())
    return _document(merge(part.moments for part in parts.values()), list(parts), version, left_out, identity)


def _report(
    statistics: LatentMoments, path: Path, partition: str | None = None, *, write: bool = True
) -> CurationReport:
    counts = {
        "images": statistics.images,
        "values_per_channel": statistics.values_per_channel,
        **{f"left out: {reason}": count for reason, count in sorted(statistics.left_out.items())},
    }
    title = "channels" if partition else "all buckets"
    files = {path: json_bytes(statistics)} if write else {}
    return CurationReport(statistics.fingerprint, partition, files, counts, {title: as_table(statistics)}, path)
