"""COCO instances: one document with images, annotations and categories.

    {"images": [{"id": 9, "file_name": "000000000009.jpg", "width": 640, "height": 480}],
     "annotations": [{"image_id": 9, "category_id": 51, "bbox": [x, y, w, h], "segmentation": [[x, y, …], …], "iscrowd": 0}],
     "categories": [{"id": 51, "name": "bowl"}]}

With polygons, an instance in several parts (because something occludes it) becomes its largest part, so that an object
stays one instance. Run-length masks have no outline and become their box. Both are counted. An object keeps its
category's id in `metadata`.

Reference: cocodataset.org, "Data format".
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from imagemill.adapters.source import SizedImage, Source, names_of_url
from imagemill.domain.stage2_records import Side
from imagemill.text.strict_json import NOT_JSON


class Image(msgspec.Struct, gc=False):
    """One image of the document."""

    id: int
    width: Side
    height: Side
    file_name: str = ""
    coco_url: str = ""


class Annotation(msgspec.Struct):
    """One annotation of the document."""

    image_id: int
    category_id: int
    bbox: tuple[float, float, float, float]
    iscrowd: int | bool = 0
    id: int | str = ""
    segmentation: msgspec.Raw = msgspec.Raw(b"null")  # kept as bytes, because most runs never decode it


class Category(msgspec.Struct):
    """One category of the document."""

    id: int
    name: str


class Instances(msgspec.Struct):
    """The document.

    Its items stay bytes until they are decoded one by one, so that a malformed item does not affect the others.
    """

    images: list[msgspec.Raw]
    annotations: list[msgspec.Raw]
    categories: list[msgspec.Raw]


def read(source: Source) -> Iterator[dict[str, Any]]:
    """Yield one record per image that exists on disk."""
    return read_instances(source, described=lambda name: name)


def read_instances(source: Source, *, described: Callable[[str], str]) -> Iterator[dict[str, Any]]:
    """Yield one record per image that exists on disk; `described` converts a category's name to the object's text."""
    document = source.read(Instances)
    images = list(_images(source, document))
    categories = source.each(Category, document.categories, "category")
    names = {category.id: described(category.name) for category in categories}
    of_image: dict[int, list[Annotation]] = defaultdict(list)
    for annotation in source.each(Annotation, document.annotations, "annotation"):
        of_image[annotation.image_id].append(annotation)
    for image in images:
        annotations = of_image.pop(image.id, [])
        name = source.find(_names(image), f"image id {image.id}, {len(annotations)} annotations")
        if name is not None:
            sized = SizedImage(name, image.width, image.height, image.id, image.file_name)
            yield source.record(sized, [_object(source, sized, annotation, names) for annotation in annotations])
    for image_id, annotations in of_image.items():
        for annotation in annotations:
            source.drop("unknown_image", source.image_name(image_id), _name(names, annotation), _which(annotation))


def _images(source: Source, document: Instances) -> Iterator[Image]:
    """Yield the first image of each id, which gets the annotations of all images with that id."""
    for image in source.each(Image, document.images, "image"):
        name = next(iter(_names(image)), f"image id {image.id}")
        if image.id in source.names:
            source.drop("duplicate_image", name, detail=f"image id {image.id}")
        else:
            source.names[image.id] = name
            yield image


def _names(image: Image) -> list[str]:
    """Return the possible file names of an image.

    LVIS has no file names of its own. Both splits may be side by side, in folders named as in the URL.
    """
    return [name for name in (image.file_name, *names_of_url(image.coco_url)) if name]


def _object(source: Source, image: SizedImage, annotation: Annotation, names: dict[int, str]) -> dict[str, Any] | None:
    category = annotation.category_id
    if annotation.iscrowd or category not in names:
        reason = "crowd" if annotation.iscrowd else "unknown_category"
        source.drop(reason, image.name, _name(names, annotation), _which(annotation))
        return None
    outlines = _outlines(annotation) if source.geometry == "polygons" else []
    if outlines:
        source.counts["parts_dropped"] += len(outlines) - 1
        return source.polygon(image, names[category], max(outlines, key=_area), category=category)
    box = source.box(image, names[category], annotation.bbox[:2], annotation.bbox[2:], category=category)
    source.counts["polygon_as_box"] += box is not None and source.geometry == "polygons"
    return box


def _name(names: dict[int, str], annotation: Annotation) -> str:
    return names.get(annotation.category_id, f"category {annotation.category_id}")


def _which(annotation: Annotation) -> str:
    return f"annotation {annotation.id}" if annotation.id != "" else ""


def _outlines(annotation: Annotation) -> list[list[float]]:
    """Return the parts of an instance that have an outline; run-length masks have none."""
    try:
        parts = msgspec.json.decode(annotation.segmentation, type=list[list[float]])
    except NOT_JSON:
        return []
    return [part for part in parts if len(part) >= 6 and len(part) % 2 == 0]


def _area(part: Sequence[float]) -> float:
    """Return the area of a closed outline by the shoelace formula, regardless of its direction."""
    xs, ys = part[0::2], part[1::2]
    return abs(sum(xs[n - 1] * ys[n] - xs[n] * ys[n - 1] for n in range(len(xs)))) / 2
