"""Visual Genome objects: one document of objects per image, and `image_data.json` beside it, which has the sizes.

    objects.json       [{"image_id": 1, "objects": [{"names": ["clock"], "x": 421, "y": 91, "w": 79, "h": 339}]}]
    image_data.json    [{"image_id": 1, "width": 800, "height": 600, "url": "https://…/VG_100K_2/1.jpg"}]

There are boxes only. An object's first name is its text.

Source: homes.cs.washington.edu/~ranjay/visualgenome, "API, data format".
"""

from collections.abc import Iterator
from typing import Any

import msgspec

from imagemill.adapters.source import Source, names_of_url
from imagemill.errors import WrongUsage

SIZES = "image_data.json"


class Size(msgspec.Struct, gc=False):
    image_id: int
    width: int
    height: int
    url: str = ""


class Object(msgspec.Struct):
    x: float
    y: float
    w: float
    h: float
    names: list[str] = []


class Objects(msgspec.Struct):
    image_id: int
    objects: list[Object]


def read(source: Source) -> Iterator[dict[str, Any]]:
    """Raises WrongUsage where polygons are asked for."""
    if source.geometry != "boxes":
        raise WrongUsage("Visual Genome has no polygons", do="leave --geometry out")
    sizes = {size.image_id: size for size in source.read(list[Size], source.annotations.with_name(SIZES))}
    for raw in source.read(list[msgspec.Raw]):  # one image's objects at a time: all of them are four million
        annotated = source.decode(Objects, raw)
        size = sizes.get(annotated.image_id)
        if size is None:
            source.counts["unknown_image"] += 1
            continue
        name = source.find([*names_of_url(size.url), f"{size.image_id}.jpg"])
        if name is not None:
            boxes = [_box(source, item) for item in annotated.objects]
            yield source.record(name, size.width, size.height, [box for box in boxes if box])


def _box(source: Source, item: Object) -> dict[str, Any] | None:
    x, y, width, height = (int(v) if v.is_integer() else v for v in (item.x, item.y, item.w, item.h))
    return source.box(item.names[0] if item.names else "", x, y, width, height)
