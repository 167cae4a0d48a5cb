"""COCO instances: one document with images, annotations and categories.

    {"images": [{"id": 9, "file_name": "000000000009.jpg", "width": 640, "height": 480}],
     "annotations": [{"image_id": 9, "category_id": 51, "bbox": [x, y, w, h], "segmentation": [[x, y, …], …], "iscrowd": 0}],
     "categories": [{"id": 51, "name": "bowl"}]}

As polygons, an instance in several parts (something stands before it) becomes its largest one: an object stays one instance. Run
lengths have no outline, and become their box. Both are counted.

Source: cocodataset.org, "Data format".
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from imagemill.adapters.source import Source, names_of_url


class Image(msgspec.Struct, gc=False):
    id: int
    width: int
    height: int
    file_name: str = ""
    coco_url: str = ""


class Annotation(msgspec.Struct):
    image_id: int
    category_id: int
    bbox: tuple[float, float, float, float]
    iscrowd: int = 0
    segmentation: msgspec.Raw = msgspec.Raw(b"null")  # kept as bytes: most runs never look at it


class Category(msgspec.Struct):
    id: int
    name: str


class Instances(msgspec.Struct):
    images: list[Image]
    annotations: list[Annotation]
    categories: list[Category]


def read(source: Source) -> Iterator[dict[str, Any]]:
    return read_instances(source, described=lambda name: name)


def read_instances(source: Source, *, described: Callable[[str], str]) -> Iterator[dict[str, Any]]:
    """One record per image that is on the disk. `described`: a category's name as the object's text."""
    document = source.read(Instances)
    names = {category.id: described(category.name) for category in document.categories}
    of_image: dict[int, list[Annotation]] = defaultdict(list)
    for annotation in document.annotations:
        of_image[annotation.image_id].append(annotation)
    for image in document.images:
        annotations = of_image.pop(image.id, [])
        name = source.find(_names(image))
        if name is not None:
            objects = [_object(source, annotation, names) for annotation in annotations]
            yield source.record(name, image.width, image.height, [found for found in objects if found])
    source.counts["unknown_image"] += sum(map(len, of_image.values()))


def _names(image: Image) -> list[str]:
    """LVIS has no file names of its own; both splits may lie side by side, in folders named as in the address."""
    return [name for name in (image.file_name, *names_of_url(image.coco_url)) if name]


def _object(source: Source, annotation: Annotation, names: dict[int, str]) -> dict[str, Any] | None:
    if annotation.iscrowd:
        source.counts["crowd"] += 1
        return None
    if annotation.category_id not in names:
        source.counts["unknown_category"] += 1
        return None
    box = source.box(names[annotation.category_id], *map(_number, annotation.bbox))
    return _outlined(source, box, annotation) if box and source.geometry == "polygons" else box


def _outlined(source: Source, box: dict[str, Any], annotation: Annotation) -> dict[str, Any]:
    """The object with its largest outline in place of its box; with the box where there is none."""
    parts = [part for part in _parts(annotation.segmentation) if len(part) >= 6 and len(part) % 2 == 0]
    if not parts:
        source.counts["polygon_as_box"] += 1
        return box
    source.counts["parts_dropped"] += len(parts) - 1
    largest = [_number(value) for value in max(parts, key=_area)]
    return {"desc": box["desc"], "poly": largest, "poly_points": len(largest) // 2}


def _parts(segmentation: msgspec.Raw) -> list[list[float]]:
    try:
        return msgspec.json.decode(segmentation, type=list[list[float]])
    except msgspec.ValidationError:  # run lengths, or nothing
        return []


def _area(part: Sequence[float]) -> float:
    """Of a closed outline, by the shoelace formula, whichever way round it goes."""
    xs, ys = part[0::2], part[1::2]
    return abs(sum(xs[n - 1] * ys[n] - xs[n] * ys[n - 1] for n in range(len(xs)))) / 2


def _number(value: float) -> int | float:
    """Whole pixels are written as such."""
    return int(value) if value.is_integer() else value
