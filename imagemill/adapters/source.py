"""Shared functions of all adapters: finding images, building objects, reading documents, counting.

The layout of one family of datasets is in its own module.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal, NamedTuple, TypeVar
from urllib.parse import unquote, urlsplit

import msgspec

from imagemill.domain.geometry import MAX_SIDE, Number, overlaps
from imagemill.domain.preset_records import path_problem
from imagemill.errors import ImagemillError, MissingInput
from imagemill.text.strict_json import NOT_JSON

Geometry = Literal["boxes", "polygons"]
T = TypeVar("T")

# Sums of two annotated decimals are rounded, to avoid a float's long tail of digits.
_DECIMALS = 4
# Maximum number of characters of a malformed item in a listing.
_SHOWN = 120


class SizedImage(NamedTuple):
    """An image by its name in the folder of images; width and height in pixels, as annotated.

    `image_id` and `file_name` are those of the dataset's own document.
    """

    name: str
    width: int
    height: int
    image_id: int
    file_name: str = ""


class Dropped(NamedTuple):
    """An annotation or image that was left out: the image's name, a reason code, the object's name, and details."""

    image: str
    reason: str
    name: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Source:
    """The files of one split.

    Attributes:
        annotations: the file of annotations.
        images: the folder that image names are relative to.
        geometry: used for an instance that has both a box and a polygon.
        counts: of written and dropped items, by reason.
        dropped: all dropped items, in order.
        names: names of images by id, for messages about annotations.
    """

    annotations: Path
    images: Path
    geometry: Geometry = "boxes"
    counts: Counter[str] = field(default_factory=Counter)
    dropped: list[Dropped] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)

    def read(self, kind: type[T], path: Path | None = None) -> T:
        """Read a document of this type; other fields are ignored. Raises MissingInput or ImagemillError."""
        path = path or self.annotations
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            raise MissingInput(f"no {path.name}", where=path, do="give the path of the file") from None
        try:
            return msgspec.json.decode(_nan_as_null(data), type=kind)
        except NOT_JSON as error:
            raise self.foreign(str(error), path) from error

    def foreign(self, why: str, path: Path | None = None) -> ImagemillError:
        """Return the error for a document that is not in the adapter's format."""
        path = path or self.annotations
        return ImagemillError(
            f"{path.name} is not in the format that this adapter reads",
            where=path,
            why=why,
            do="check --adapter and --annotations",
        )

    def each(
        self,
        kind: type[T],
        items: Iterable[msgspec.Raw],
        what: str,
        *,
        image: str = "",
        aliases: Mapping[str, str] | None = None,
    ) -> Iterator[T]:
        """Decode items one by one; drop malformed ones as `malformed_<what>`.

        A quoted number, an integer with a fraction of zero, and null for an absent field are accepted.

        Args:
            kind: type of the items.
            items: the items as JSON.
            what: part of the reason code.
            image: name of the image that the items belong to, if known.
            aliases: alternative field names, by the field of `kind`.
        """
        decode: Callable[[msgspec.Raw], T] = msgspec.json.Decoder(kind).decode
        lenient: Callable[[bytes], T] = msgspec.json.Decoder(kind, strict=False).decode
        for item in items:
            try:
                found = decode(item)
            except NOT_JSON as error:
                try:
                    found = lenient(_normalised(item, aliases or {}))
                except (*NOT_JSON, OverflowError):  # an integer of more than 64 bits
                    self.drop(f"malformed_{what}", image or self._image_of(item), detail=f"{error}: {_shown(item)}")
                    continue
            yield found

    def find(self, names: Iterable[str], detail: str = "") -> str | None:
        """Return the first of these names that is a file in the folder of images.

        If no such file exists, drop the image and return None.
        """
        names = list(names)
        for name in names:
            if path_problem(name) is None and _is_file(self.images / name):
                return name
        self.drop("missing_image", next(iter(names), ""), detail=detail)
        return None

    def record(self, image: SizedImage, objects: Iterable[dict[str, Any] | None]) -> dict[str, Any]:
        """Return the raw record of an image, with the objects that were not dropped."""
        kept = [found for found in objects if found is not None]
        self.counts["records"] += 1
        self.counts["objects"] += len(kept)
        self.counts["without_objects"] += not kept
        return {
            "images": [f"images/{image.name}"],
            "objects": kept,
            "width": image.width,
            "height": image.height,
            "metadata": {"image_id": image.image_id, "file_name": image.file_name or image.name},
        }

    def drop(self, reason: str, image: str, name: str = "", detail: str = "") -> None:
        """Count and list an annotation or image that is left out."""
        self.counts[reason] += 1
        self.dropped.append(Dropped(image, reason, name, detail))

    def image_name(self, image_id: int) -> str:
        """Return the name of an image, for messages."""
        return self.names.get(image_id) or f"image id {image_id}"

    def box(
        self,
        image: SizedImage,
        desc: str,
        corner: Sequence[float],
        extent: Sequence[float],
        *,
        category: int | None = None,
    ) -> dict[str, Any] | None:
        """Return an object with a box, clipped to the image; a box without area in the image is dropped and counted.

        Args:
            image: the image.
            desc: the object's text.
            corner: x and y of the upper left corner, in pixels.
            extent: width and height, in pixels.
            category: its `category_id`, if the dataset has categories.
        """
        x, y = map(_number, corner)
        values = [x, y, _sum(x, _number(extent[0])), _sum(y, _number(extent[1]))]
        degenerate = not (values[2] > x and values[3] > y)
        if self._is_dropped(image, desc, values, f"box {[*corner, *extent]}", degenerate=degenerate):
            return None
        box = [max(x, 0), max(y, 0), min(values[2], image.width), min(values[3], image.height)]
        self.counts["clipped_box"] += box != values
        return {"desc": self._text(desc), "bbox_2d": box, **_category(category)}

    def polygon(
        self, image: SizedImage, desc: str, points: Sequence[float], *, category: int | None = None
    ) -> dict[str, Any] | None:
        """Return an object with its annotated outline; one whose bounding box does not overlap the image is dropped."""
        values = list(map(_number, points))
        if self._is_dropped(image, desc, values, f"polygon from {points[:2]}"):
            return None
        return {"desc": self._text(desc), "poly": values, "poly_points": len(values) // 2, **_category(category)}

    def _is_dropped(
        self, image: SizedImage, desc: str, values: Sequence[Number], shape: str, *, degenerate: bool = False
    ) -> bool:
        """Drop an object that cannot be in a record; return whether it was dropped."""
        reason = None
        if not desc.strip():
            reason = "blank_name"
        elif not all(abs(value) <= MAX_SIDE for value in values):
            reason = "out_of_range"
        elif degenerate or not overlaps(values, image.width, image.height):
            reason = "degenerate_box" if degenerate else "outside_image"
        if reason:
            self.drop(reason, image.name, desc.strip(), f"{shape}, image {image.width}x{image.height}")
        return reason is not None

    def _text(self, desc: str) -> str:
        """Return an object's text on one line."""
        text = desc.strip()
        if len(text.splitlines()) > 1:
            self.counts["joined_lines"] += 1
            return " ".join(text.split())
        return text

    def _image_of(self, item: bytes) -> str:
        """Return the name of a malformed image, or of the image that a malformed annotation belongs to."""
        try:
            value = msgspec.json.decode(item)
        except NOT_JSON:
            return ""
        if not isinstance(value, dict):
            return ""
        if isinstance(value.get("file_name"), str):
            return value["file_name"]
        image_id = value.get("image_id")
        return self.image_name(image_id) if type(image_id) is int else ""


def _category(category: int | None) -> dict[str, Any]:
    return {} if category is None else {"metadata": {"category_id": category}}


def _normalised(item: bytes, aliases: Mapping[str, str]) -> bytes:
    """Return a JSON object without nulls, with its fields under their usual names."""
    value = msgspec.json.decode(item)
    if not isinstance(value, dict):
        return item
    named = {name: value[alias] for name, alias in aliases.items() if name not in value and alias in value}
    return msgspec.json.encode({key: each for key, each in {**value, **named}.items() if each is not None})


def _shown(item: bytes) -> str:
    text = bytes(item).decode("utf-8", "replace")
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # longer than the file system allows
        return False


def _number(value: float) -> Number:
    """Return whole pixels as an integer."""
    return int(value) if value.is_integer() else value


def _sum(start: Number, extent: Number) -> Number:
    end = start + extent
    return end if isinstance(end, int) else round(end, _DECIMALS)


def _nan_as_null(data: bytes) -> bytes:
    """Replace NaN and infinity, which Python's `json` writes, by null.

    So they affect one annotation and not the whole document.
    """
    if b"NaN" not in data and b"Infinity" not in data:
        return data
    try:
        loose = json.loads(data.decode("utf-8"), parse_constant=lambda _: None, parse_float=_finite_or_none)
        return msgspec.json.encode(loose)
    except (ValueError, RecursionError):  # malformed in another way, which the strict decoder reports
        return data


def _finite_or_none(text: str) -> float | None:
    value = float(text)
    return value if math.isfinite(value) else None


def names_of_url(url: str) -> list[str]:
    """Return possible locations of the image of a URL: in a folder named as in the URL, or its file name alone."""
    try:
        path = PurePosixPath(unquote(urlsplit(url).path))
    except ValueError:  # not a URL
        return []
    return [f"{path.parent.name}/{path.name}", path.name] if path.name else []
