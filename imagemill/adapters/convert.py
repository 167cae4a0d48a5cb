"""Conversion of a public dataset to raw records: `raw/<split>.jsonl`, and `raw/images`, a link to the folder of images.

    raw/train.jsonl  raw/val.jsonl      records
    raw/train.dropped.jsonl             a line per annotation or image that was left out: image, reason, name, detail
    raw/manifest.json                   adapter, geometry and split rule of each split
    raw/images                          the link

    imagemill preset convert coco --adapter coco --annotations instances_train2017.json --images /data/coco --split train

The link keeps every image's path below its folder. Splits with images in different folders are converted with their
common parent folder.

This module lists adapters and writes their records. Each adapter's format is in its own module.

Spec: docs/spec/presets.md#dataset-layout
"""

import importlib
import os
import pkgutil
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from imagemill import adapters
from imagemill.adapters.source import Dropped, Geometry, Source
from imagemill.errors import ImagemillError, MissingInput, WrongUsage
from imagemill.formats.diff_writer import Draft
from imagemill.formats.jsonl import encode_line, replace_lines
from imagemill.formats.manifest import json_bytes, read_document
from imagemill.fs.atomic import sweep_temporaries, sync_folder, temporary_path, write_if_changed
from imagemill.store.public_data import MANIFEST_FORMAT, SPLITS, Dataset

_NOT_ADAPTERS = {"convert", "source"}

Read = Callable[[Source], Iterator[dict[str, Any]]]

RAW_MANIFEST = "manifest.json"

_RULE = re.compile(r"\s*id\s*%\s*([1-9][0-9]{0,9})\s*==\s*(0|[1-9][0-9]{0,9})\s*")


class SplitRule(NamedTuple):
    """Images whose id has this remainder go to val, all others to train."""

    divisor: int
    remainder: int

    def __str__(self) -> str:
        return f"id % {self.divisor} == {self.remainder}"

    def split_of(self, image_id: int) -> str:
        """Return the split of an image."""
        return "val" if image_id % self.divisor == self.remainder else "train"


def parse_split_rule(text: str) -> SplitRule:
    """Parse a rule such as `id % 20 == 0`.

    Raises:
        WrongUsage: for another form, a divisor below 2, or an impossible remainder.
    """
    match = _RULE.fullmatch(text)
    rule = SplitRule(int(match[1]), int(match[2])) if match else None
    if rule is None or rule.divisor < 2 or rule.remainder >= rule.divisor:
        raise WrongUsage(
            f"split rule {text!r} is not of the form id % N == K",
            why="images whose id leaves the remainder K go to val, all others to train",
            do="give N of 2 or more and K from 0 to N - 1, such as 'id % 20 == 0'",
        )
    return rule


class SplitSource(msgspec.Struct, frozen=True):
    """Source and options of the raw records of one split."""

    adapter: str
    geometry: str
    split_rule: str | None = None


class RawManifest(msgspec.Struct, frozen=True, kw_only=True):
    """`raw/manifest.json`, which records for the next conversion how the splits were made."""

    format: int = MANIFEST_FORMAT
    dataset: str
    splits: dict[str, SplitSource]


class Converted(NamedTuple):
    """The result of a conversion: counts by reason, the dropped items, and the file that lists them, if any."""

    counts: Counter[str]
    dropped: Sequence[Dropped]
    listing: Path | None


def listing_of(dataset: Dataset, split: str) -> Path:
    """Return the path of the file that lists the items dropped by a conversion."""
    return dataset.raw / f"{split}.dropped.jsonl"


def adapter_names() -> list[str]:
    """Return the names of all adapters: the modules in this package."""
    found = (module.name for module in pkgutil.iter_modules(adapters.__path__))
    return sorted(name for name in found if name not in _NOT_ADAPTERS)


def find_adapter(name: str) -> Read:
    """Return an adapter's `read`; raise WrongUsage for an unknown name."""
    if name not in adapter_names():
        raise WrongUsage(f"no adapter {name!r}", do=f"choose from {', '.join(adapter_names())}")
    return importlib.import_module(f"{adapters.__name__}.{name}").read


def convert(
    dataset: Dataset,
    adapter: str,
    annotations: Path,
    images: Path,
    *,
    split: str = "train",
    geometry: Geometry = "boxes",
    split_rule: SplitRule | None = None,
) -> Converted:
    """Write raw records from one file of annotations; a file with equal content is left as it is.

    Args:
        dataset: the dataset to write.
        adapter: name of the adapter.
        annotations: the file of annotations.
        images: the folder of images.
        split: the split of all records.
        geometry: used for an instance that has both a box and a polygon.
        split_rule: divides the records into train and val instead.

    Returns:
        Counts of written `records` and `objects`, of `without_objects`, `clipped_box` and `joined_lines` among them, and
        of dropped items: `missing_image`, `duplicate_image`, `crowd`, `degenerate_box`, `outside_image`, `out_of_range`,
        `blank_name`, `unknown_category`, `unknown_image`, `missing_size`, `malformed_image`, `malformed_annotation`,
        `malformed_category`, `repeated_object`; with polygons `polygon_as_box`, `parts_dropped`; with a rule
        `train_records` and `val_records`.

    Raises:
        WrongUsage: if the adapter or the split is unknown.
        MissingInput: if the file or folder does not exist, or no image is found.
        ImagemillError: if the file is not in the adapter's format, raw has images from another folder, or its splits
            were made differently.
    """
    read = find_adapter(adapter)
    if split not in SPLITS:
        raise WrongUsage(f"no split {split!r}", do=f"choose from {', '.join(SPLITS)}")
    if not os.path.isfile(annotations):
        raise MissingInput("the annotation file does not exist", where=annotations, do="check --annotations")
    if not os.path.isdir(images):
        raise MissingInput("no folder of images", where=images, do="check --images")
    source = Source(annotations, images, geometry)
    _check_link(dataset, images)
    check_rule(dataset, split_rule)
    sweep_temporaries(dataset.raw)
    split_source = SplitSource(adapter, geometry, str(split_rule) if split_rule else None)
    splits: dict[str, SplitSource] = dict.fromkeys(SPLITS if split_rule else (split,), split_source)
    _write_records(dataset, splits, _routed(source, read, split, split_rule))
    listing = _write_listing(dataset, next(iter(splits)), source.dropped)
    _link(dataset, images)
    return Converted(source.counts, source.dropped, listing)


def recorded_rule(dataset: Dataset) -> str | None:
    """Return the rule that divided raw records into train and val, None if there was no rule."""
    of_train = _recorded_splits(dataset).get("train")
    return of_train.split_rule if of_train else None


def check_rule(dataset: Dataset, rule: SplitRule | None) -> None:
    """Raise ImagemillError if records of another conversion would remain, so that an image is in both splits."""
    before = recorded_rule(dataset)
    if (rule is None) == (before is None) or not dataset.raw_jsonl("val").exists():
        return
    how_made = f"divided by {before!r}" if before else "converted without a rule"
    raise ImagemillError(
        f"raw records of {dataset.name} were {how_made}",
        where=dataset.raw,
        why="an image would be in train and in val",
        do=f"give --split-rule '{before}' again, or delete {dataset.raw_jsonl('val')} first"
        if before
        else f"leave --split-rule out, or delete {dataset.raw_jsonl('val')} first",
    )


Routed = tuple[str, dict[str, Any]]


def _routed(source: Source, read: Read, split: str, rule: SplitRule | None) -> Iterator[Routed]:
    """Yield each record with its split."""
    found: Counter[str] = Counter()
    for record in read(source):
        split = rule.split_of(record["metadata"]["image_id"]) if rule else split
        found[split] += 1
        yield split, record
    if source.counts["missing_image"] and not source.counts["records"]:
        raise MissingInput(
            f"none of {source.counts['missing_image']} annotated images is in the folder of images",
            where=source.images,
            why=f"the first one is {next(one.image for one in source.dropped if one.reason == 'missing_image')!r}",
            do="check --images: names in the annotations are relative to it",
        )
    malformed = [name for name in source.counts if name.startswith("malformed_")]
    if malformed and not source.counts["records"]:
        first = next(one for one in source.dropped if one.reason in malformed)
        counts = ", ".join(f"{source.counts[name]} {name}" for name in malformed)
        raise source.foreign(f"no record, and {counts}; the first one: {first.detail}")
    if rule:
        source.counts.update({f"{name}_records": count for name, count in found.items()})
        if empty := [name for name in SPLITS if not found[name]]:
            raise ImagemillError(
                f"no image goes to {empty[0]} by the split rule {rule}",
                where=source.annotations,
                why=f"{source.counts['records']} images were divided",
                do="choose another N and K",
            )


def _write_records(dataset: Dataset, splits: dict[str, SplitSource], records: Iterator[Routed]) -> None:
    """Write the files of these splits and their manifest entries, after all records have been checked."""
    dataset.raw.mkdir(parents=True, exist_ok=True)
    drafts = {split: Draft(dataset.raw, dataset.raw_jsonl(split).name) for split in splits}
    try:
        for split, record in records:
            drafts[split].write(encode_line(record))
        changed = [draft.finish() for draft in drafts.values()]
        # The manifest is written first, so that the same command continues after a kill in between.
        manifest = RawManifest(dataset=dataset.name, splits=_recorded_splits(dataset) | splits)
        write_if_changed(dataset.raw / RAW_MANIFEST, json_bytes(manifest))
        for draft in drafts.values():
            draft.publish()
    finally:
        for draft in drafts.values():
            draft.discard()
    if any(changed):
        sync_folder(dataset.raw)


def _write_listing(dataset: Dataset, split: str, dropped: Sequence[Dropped]) -> Path | None:
    """Write the dropped items, one per line; without dropped items, remove the listing of an earlier conversion."""
    path = listing_of(dataset, split)
    if not dropped:
        path.unlink(missing_ok=True)
        return None
    replace_lines(path, (encode_line(one._asdict()) for one in dropped))
    return path


def _recorded_splits(dataset: Dataset) -> dict[str, SplitSource]:
    """Return the splits of raw's manifest; empty if it is missing or damaged, because the next conversion rewrites it."""
    manifest = read_document(dataset.raw / RAW_MANIFEST, RawManifest)
    return manifest.splits if manifest else {}


def _check_link(dataset: Dataset, images: Path) -> None:
    link = dataset.raw_images
    if os.path.lexists(link) and os.path.realpath(link) != os.path.realpath(images):
        raise ImagemillError(
            f"{dataset.name} has its raw images from another folder",
            where=f"{link}, which is {os.path.realpath(link)}",
            why="the images of all splits belong in one folder",
            do="give --images the folder with the images of both splits, and convert each; or remove the link",
        )


def _link(dataset: Dataset, images: Path) -> None:
    if os.path.lexists(dataset.raw_images):
        return
    dataset.raw.mkdir(parents=True, exist_ok=True)
    temporary = temporary_path(dataset.raw)
    temporary.symlink_to(os.path.realpath(images), target_is_directory=True)
    os.rename(temporary, dataset.raw_images)
    sync_folder(dataset.raw)
