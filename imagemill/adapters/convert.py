"""One split of a public dataset made raw: `raw/<split>.jsonl`, and `raw/images`, a link to where the images are.

    imagemill preset convert coco --adapter coco --annotations instances_train2017.json --images /data/coco --split train

The link keeps every image's path below its folder. Splits whose images lie in different folders are converted with the
folder that holds both.

Belongs here: adapters by name, and what they write. Belongs elsewhere: what one of them reads (its module).
Source: CONTRACTS section 3, "raw/images may be a symlink (convert makes one: raw is only read)".
"""

import importlib
import os
import pkgutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from imagemill import adapters
from imagemill.adapters.source import Geometry, Source
from imagemill.atomic import sweep_temporaries, sync_folder, temporary_path
from imagemill.errors import ImagemillError, MissingInput, WrongUsage
from imagemill.formats.jsonl import encode_line, replace_lines
from imagemill.public_data import SPLITS, Dataset

_NOT_ADAPTERS = {"convert", "source"}

Read = Callable[[Source], Iterator[dict[str, Any]]]


class Converted(NamedTuple):
    """The result of a conversion: counts by reason; for each image, its objects left out by (reason, name)."""

    counts: Counter[str]
    dropped: Mapping[str, Counter[tuple[str, str]]]


def adapter_names() -> list[str]:
    """Each module beside this one is an adapter."""
    found = (module.name for module in pkgutil.iter_modules(adapters.__path__))
    return sorted(name for name in found if name not in _NOT_ADAPTERS)


def find_adapter(name: str) -> Read:
    """An adapter's `read`. Raises WrongUsage for an unknown name."""
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
) -> Converted:
    """Write one split's raw records; equal ones leave the file as it is.

    Returns:
        counts of `records` and `objects` made, `without_objects` and `clipped_box` among them, and of what was left out:
        `missing_image`, `duplicate_image`, `crowd`, `degenerate_box`, `outside_image`, `out_of_range`, `blank_name`,
        `unknown_category`, `unknown_image`, `malformed_image`, `malformed_annotation`, `malformed_category`; with polygons
        `polygon_as_box`, `parts_dropped`.

    Raises:
        WrongUsage: an unknown adapter or split. MissingInput: no such file or folder, or none of the images is there.
        ImagemillError: the file is not the adapter's, or raw has images from another folder.
    """
    read = find_adapter(adapter)
    if split not in SPLITS:
        raise WrongUsage(f"no split {split!r}", do=f"choose from {', '.join(SPLITS)}")
    if not os.path.isfile(annotations):
        raise MissingInput("no file of annotations", where=annotations, do="check --annotations")
    if not os.path.isdir(images):
        raise MissingInput("no folder of images", where=images, do="check --images")
    source = Source(annotations, images, geometry)
    _check_link(dataset, images)
    sweep_temporaries(dataset.raw)
    replace_lines(dataset.raw_jsonl(split), _lines(source, read))
    _link(dataset, images)
    return Converted(source.counts, source.dropped)


def _lines(source: Source, read: Read) -> Iterator[bytes]:
    yield from map(encode_line, read(source))
    if source.counts["missing_image"] and not source.counts["records"]:
        raise MissingInput(
            f"none of {source.counts['missing_image']} annotated images is in the folder of images",
            where=source.images,
            do="check --images: names in the annotations are relative to it",
        )
    malformed = [name for name in source.counts if name.startswith("malformed_")]
    if malformed and not source.counts["records"]:
        raise source.foreign(f"no record, and {', '.join(f'{source.counts[name]} {name}' for name in malformed)}")


def _check_link(dataset: Dataset, images: Path) -> None:
    there = dataset.raw_images
    if os.path.lexists(there) and os.path.realpath(there) != os.path.realpath(images):
        raise ImagemillError(
            f"{dataset.name} has its raw images from another folder",
            where=f"{there}, which is {os.path.realpath(there)}",
            why="one folder holds the images of all splits",
            do="give --images the folder that holds both splits, and convert each; or remove the link",
        )


def _link(dataset: Dataset, images: Path) -> None:
    if os.path.lexists(dataset.raw_images):
        return
    dataset.raw.mkdir(parents=True, exist_ok=True)
    temporary = temporary_path(dataset.raw)
    temporary.symlink_to(os.path.realpath(images), target_is_directory=True)
    os.rename(temporary, dataset.raw_images)
    sync_folder(dataset.raw)
