"""Visual Genome objects: one document of objects per image, and `image_data.json` beside it, which has the sizes.

    objects.json       [{"image_id": 1, "objects": [{"names": ["clock"], "x": 421, "y": 91, "w": 79, "h": 339}]}]
    image_data.json    [{"image_id": 1, "width": 800, "height": 600, "url": "https://…/VG_100K_2/1.jpg"}]

There are boxes only. An object's first name is its text.

Source: homes.cs.washington.edu/~ranjay/visualgenome, "API, data format".
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import msgspec

from imagemill.adapters.source import SizedImage, Source, names_of_url
from imagemill.errors import WrongUsage
from imagemill.records import Side

SIZES = "image_data.json"


class Size(msgspec.Struct, gc=False):
    image_id: int
    width: Side
    height: Side
    url: str = ""


class Object(msgspec.Struct):
    x: float
    y: float
    w: float
    h: float
    names: list[str] = []


class Objects(msgspec.Struct):
    """The objects of one image. They stay bytes until they are decoded one by one: an odd one does not spoil the others."""

    image_id: int
    objects: list[msgspec.Raw]


def read(source: Source) -> Iterator[dict[str, Any]]:
    """Raises WrongUsage where polygons are asked for."""
    if source.geometry != "boxes":
        raise WrongUsage("Visual Genome has no polygons", do="leave --geometry out")
    listed = source.read(list[msgspec.Raw], source.annotations.with_name(SIZES))
    sizes = {size.image_id: size for size in source.each(Size, listed, "image")}
    for image_id, raws in _by_image(source).items():
        size = sizes.get(image_id)
        if size is None:
            source.counts["unknown_image"] += 1
            continue
        name = source.find([*names_of_url(size.url), f"{size.image_id}.jpg"])
        if name is not None:
            image = SizedImage(name, size.width, size.height)
            yield source.record(image, [_box(source, image, item) for item in source.each(Object, raws, "annotation")])


def _by_image(source: Source) -> dict[int, list[msgspec.Raw]]:
    """The objects of each image as bytes, in the order of the document: all of them are four million.

    Entries of one image are one record; an entry with the bytes of an earlier one adds nothing.
    """
    entries: dict[int, list[list[msgspec.Raw]]] = defaultdict(list)
    for entry in source.each(Objects, source.read(list[msgspec.Raw]), "image"):
        of_image = entries[entry.image_id]
        if of_image:
            source.drop("duplicate_image", SizedImage(f"{entry.image_id}", 0, 0), f"image id {entry.image_id}")
        if entry.objects not in of_image:
            of_image.append(entry.objects)
    return {image_id: [raw for objects in of_image for raw in objects] for image_id, of_image in entries.items()}


def _box(source: Source, image: SizedImage, item: Object) -> dict[str, Any] | None:
    return source.box(image, item.names[0] if item.names else "", (item.x, item.y), (item.w, item.h))
