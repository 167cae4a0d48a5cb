"""Validation of curation reports by their own content, without reading any vector or latent again."""

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from imagemill.domain.buckets import BUCKETS
from imagemill.pipeline.curation.latent_statistics import ALL, LatentMoments, merge, read_statistics, statistics_path
from imagemill.pipeline.curation.near_duplicates import lines_path, read_groups, read_summary, summary_path
from imagemill.validation.catalogue import finding
from imagemill.validation.findings import Finding

# Merging in another order changes moments by a few units in the last place.
RELATIVE = 1e-12


def latent_statistics(derived: Path) -> Iterator[Finding | int]:
    """Check that every document is complete with possible values, and that `all.json` is the merge of the buckets it names."""
    present = {
        name: read_statistics(path) for name in (*BUCKETS, ALL) if (path := statistics_path(derived, name)).exists()
    }
    for name, statistics in present.items():
        yield 1
        if statistics is None:
            yield _finding(f"{name}.json", "unreadable", "not a file that imagemill wrote", "latent_statistics")
            continue
        yield from _numbers(f"{name}.json", statistics)
    parts = {name: statistics for name, statistics in present.items() if name != ALL and statistics}
    merged = present.get(ALL)
    if parts and merged is None:
        yield _finding(f"{ALL}.json", "missing_file", "there are buckets, but no merged file", "latent_statistics")
    elif merged and not _is_merge(merged, parts):
        yield _finding(f"{ALL}.json", "not_the_merge", "differs from the merge of its buckets", "latent_statistics")


def _numbers(file: str, statistics: LatentMoments) -> Iterator[Finding]:
    numbers = [*statistics.mean, *statistics.m2, *statistics.std]
    if not all(map(math.isfinite, numbers)) or any(value < 0 for value in [*statistics.m2, *statistics.std]):
        yield _finding(file, "impossible", "values of mean, m2 or std that no data can have", "latent_statistics")
    if not all(
        low <= mean <= high for low, mean, high in zip(statistics.min, statistics.mean, statistics.max, strict=True)
    ):
        yield _finding(file, "impossible", "a mean outside min and max", "latent_statistics")
    if flat := [n for n, std in enumerate(statistics.std) if std == 0]:
        yield finding("constant_channel", f"channels {flat} have a single value", file=file)


def _is_merge(merged: LatentMoments, parts: dict[str, LatentMoments]) -> bool:
    if not set(merged.buckets) <= parts.keys():
        return False
    expected, found = merge(parts[name].moments for name in merged.buckets), merged.moments
    if (expected.images, expected.count) != (found.images, found.count):
        return False
    if not expected.count:
        return True
    close = np.allclose(found.mean, expected.mean, rtol=RELATIVE, atol=RELATIVE * float(expected.std.max()))
    return close and np.allclose(found.m2, expected.m2, rtol=RELATIVE, atol=0)


def near_duplicates(derived: Path) -> Iterator[Finding | int]:
    """Check the groups: at least two members in order of id, including the representative, and no image in two groups."""
    summary = read_summary(derived)
    if summary is None:
        if lines_path(derived).exists() or summary_path(derived).exists():
            yield _finding(
                summary_path(derived).name, "unreadable", "not a file that imagemill wrote", "near_duplicates"
            )
        return
    file = lines_path(derived).name
    groups = read_groups(derived, summary)
    if groups is None:
        yield _finding(file, "not_the_summarys", "not the lines that belong to the summary", "near_duplicates")
        return
    seen: set[str] = set()
    for group in groups:
        yield 1
        ids = [member.image_id for member in group.members]
        if len(ids) < 2 or ids != sorted(set(ids)) or group.representative not in ids:
            yield _finding(
                file, "bad_group", "members not sorted, alone, or without the representative", "near_duplicates"
            )
        if repeated := seen.intersection(ids):
            yield _finding(file, "two_groups", f"{min(repeated)} is in two groups", "near_duplicates")
        if any(not -1 <= member.cosine <= 1 for member in group.members):
            yield _finding(file, "impossible", "a cosine outside -1 and 1", "near_duplicates")
        seen.update(ids)


def _finding(file: str, rule: str, message: str, asset: str) -> Finding:
    return finding(rule, message, file=file, remedy=f"remove the file and materialize {asset} again")
