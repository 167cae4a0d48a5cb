"""Visual Genome objects: one document of objects per image, and `image_data.json` beside it with the image sizes.

    objects.json       [{"image_id": 1, "objects": [{"names": ["clock"], "x": 421, "y": 91, "w": 79, "h": 339}]}]
    image_data.json    [{"image_id": 1, "width": 800, "height": 600, "url": "https://…/VG_100K_2/1.jpg"}]

There are only boxes. The first of an object's names is its text. Objects of one image with equal text and box are one
object. Early releases call the `image_id` of images `id`.

Reference: homes.cs.washington.edu/~ranjay/visualgenome, "API, data format".
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from imagemill.adapters.source import SizedImage, Source, names_of_url
from imagemill.domain.stage2_records import Side
from imagemill.errors import WrongUsage

SIZES = "image_data.json"


# Field names of early releases.
ALIASES = {"image_id": "id"}


class Size(msgspec.Struct, gc=False):
    """Size and URL of one image."""

    image_id: int
    width: Side | None = None
    height: Side | None = None
    url: str = ""


class Object(msgspec.Struct):
    """One object of an image."""

    x: float
    y: float
    w: float
    h: float
    names: list[Any] | str = []


class GenomeObjects(msgspec.Struct):
    """The objects of one image.

    They stay bytes until they are decoded one by one, so that a malformed one does not affect the others.
    """

    image_id: int
    objects: list[msgspec.Raw]


def read(source: Source) -> Iterator[dict[str, Any]]:
    """Yield one record per image that exists on disk; raise WrongUsage for polygons."""
    if source.geometry != "boxes":
        raise WrongUsage("Visual Genome has no polygons", do="leave --geometry out")
    listed = source.read(list[msgspec.Raw], source.annotations.with_name(SIZES))
    sizes = {size.image_id: size for size in source.each(Size, listed, "image", aliases=ALIASES)}
    source.names.update({size.image_id: _names(size)[0] for size in sizes.values()})
    for image_id, raws in _by_image(source).items():
        size = sizes.get(image_id)
        if size is None or not (size.width and size.height):
            reason = "unknown_image" if size is None else "missing_size"
            source.drop(reason, source.image_name(image_id), detail=f"{len(raws)} objects; no size in {SIZES}")
            continue
        name = source.find(_names(size), f"image id {image_id}, {len(raws)} objects")
        if name is not None:
            image = SizedImage(name, size.width, size.height, image_id)
            items = source.each(Object, raws, "annotation", image=name)
            yield source.record(image, _without_repeats(source, [_box(source, image, item) for item in items]))


def _names(size: Size) -> list[str]:
    return [*names_of_url(size.url), f"{size.image_id}.jpg"]


def _by_image(source: Source) -> dict[int, list[msgspec.Raw]]:
    """Return the objects of each image as bytes, in the order of the document: there are four million of them.

    Entries of one image form one record; an entry with the same bytes as an earlier one adds nothing.
    """
    entries: dict[int, list[list[msgspec.Raw]]] = defaultdict(list)
    for entry in source.each(GenomeObjects, source.read(list[msgspec.Raw]), "image", aliases=ALIASES):
        of_image = entries[entry.image_id]
        if of_image:
            source.drop("duplicate_image", source.image_name(entry.image_id), detail=f"image id {entry.image_id}")
        if entry.objects not in of_image:
            of_image.append(entry.objects)
    return {image_id: [raw for objects in of_image for raw in objects] for image_id, of_image in entries.items()}


def _box(source: Source, image: SizedImage, item: Object) -> dict[str, Any] | None:
    names = [item.names] if isinstance(item.names, str) else item.names
    text = next((name for name in names if isinstance(name, str) and name.strip()), "")
    return source.box(image, text, (item.x, item.y), (item.w, item.h))


def _without_repeats(source: Source, objects: Iterable[dict[str, Any] | None]) -> Iterator[dict[str, Any]]:
    """Yield the first of the objects with equal text and box; count the others."""
    seen: set[tuple[str, tuple[float, ...]]] = set()
    for found in objects:
        if found is None:
            continue
        key = (found["desc"], tuple(found["bbox_2d"]))
        if key in seen:
            source.counts["repeated_object"] += 1
        else:
            seen.add(key)
            yield found
