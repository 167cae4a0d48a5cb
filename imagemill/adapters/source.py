"""Tools of all adapters: the files, the counts, and objects built one way.

Belongs here: finding images, building objects, reading documents. Belongs elsewhere: one family's layout (its module).
"""

import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal, NamedTuple, TypeVar
from urllib.parse import unquote, urlsplit

import msgspec

from imagemill.errors import ImagemillError, MissingInput
from imagemill.geometry import MAX_SIDE, Number, overlaps
from imagemill.preset_records import path_problem
from imagemill.strict_json import NOT_JSON

Geometry = Literal["boxes", "polygons"]
T = TypeVar("T")

# Sums of two annotated decimals are written without a float's tail of digits.
_DECIMALS = 4


class SizedImage(NamedTuple):
    """An image by its name in the folder of images; width and height in pixels, as annotated."""

    name: str
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class Source:
    """One split's files.

    Attributes:
        annotations: the file of annotations. images: the folder that image names are relative to.
        geometry: what an instance with both becomes.
        counts: what was made and what was left out, by reason.
        dropped: for each image, how many of its objects were left out, by reason and object name.
    """

    annotations: Path
    images: Path
    geometry: Geometry = "boxes"
    counts: Counter[str] = field(default_factory=Counter)
    dropped: defaultdict[str, Counter[tuple[str, str]]] = field(default_factory=lambda: defaultdict(Counter))

    def read(self, kind: type[T], path: Path | None = None) -> T:
        """Read a document of this kind; its other fields are ignored. Raises MissingInput or ImagemillError."""
        path = path or self.annotations
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            raise MissingInput(f"no {path.name}", where=path, do="give the file's place") from None
        try:
            return msgspec.json.decode(_nan_as_null(data), type=kind)
        except NOT_JSON as error:
            raise self.foreign(str(error), path) from error

    def foreign(self, why: str, path: Path | None = None) -> ImagemillError:
        """Return the error for a document that is not the adapter's."""
        path = path or self.annotations
        return ImagemillError(
            f"{path.name} does not hold what this adapter reads",
            where=path,
            why=why,
            do="check --adapter and --annotations",
        )

    def each(self, kind: type[T], items: Iterable[msgspec.Raw], what: str) -> Iterator[T]:
        """Decode items one by one; those of another form are counted as `malformed_<what>` and skipped."""
        decode: Callable[[msgspec.Raw], T] = msgspec.json.Decoder(kind).decode
        for item in items:
            try:
                yield decode(item)
            except NOT_JSON:
                self.counts[f"malformed_{what}"] += 1

    def find(self, names: Iterable[str]) -> str | None:
        """Return the first of these names that is a file in the folder of images; count the image if there is no such file."""
        for name in names:
            if path_problem(name) is None and _is_file(self.images / name):
                return name
        self.counts["missing_image"] += 1
        return None

    def record(self, image: SizedImage, objects: Iterable[dict[str, Any] | None]) -> dict[str, Any]:
        """Return the raw record of an image with those of its objects that were not left out."""
        kept = [found for found in objects if found is not None]
        self.counts["records"] += 1
        self.counts["objects"] += len(kept)
        self.counts["without_objects"] += not kept
        return {"images": [f"images/{image.name}"], "objects": kept, "width": image.width, "height": image.height}

    def drop(self, reason: str, image: SizedImage, name: str) -> None:
        """Count an object that is left out."""
        self.counts[reason] += 1
        self.dropped[image.name][reason, name] += 1

    def box(
        self, image: SizedImage, desc: str, corner: Sequence[float], extent: Sequence[float]
    ) -> dict[str, Any] | None:
        """Return an object with a box, clipped to the image; one without area in the image is dropped and counted.

        Args:
            corner: x and y of the upper left, extent: width and height; in pixels.
        """
        x, y = map(_number, corner)
        values = [x, y, _sum(x, _number(extent[0])), _sum(y, _number(extent[1]))]
        reason = _object_problem(desc, values, image)
        if reason is None and not (values[2] > x and values[3] > y):
            reason = "degenerate_box"
        if reason or not overlaps(values, image.width, image.height):
            self.drop(reason or "outside_image", image, desc)
            return None
        box = [max(x, 0), max(y, 0), min(values[2], image.width), min(values[3], image.height)]
        self.counts["clipped_box"] += box != values
        return {"desc": desc.strip(), "bbox_2d": box}

    def polygon(self, image: SizedImage, desc: str, points: Sequence[float]) -> dict[str, Any] | None:
        """Return an object with an outline as it is annotated; one whose box does not overlap the image is dropped."""
        values = list(map(_number, points))
        reason = _object_problem(desc, values, image)
        if reason or not overlaps(values, image.width, image.height):
            self.drop(reason or "outside_image", image, desc)
            return None
        return {"desc": desc.strip(), "poly": values, "poly_points": len(values) // 2}


def _object_problem(desc: str, values: Sequence[Number], image: SizedImage) -> str | None:
    if not desc.strip():
        return "blank_name"
    return None if all(abs(value) <= MAX_SIDE for value in values) else "out_of_range"


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # longer than a file system allows
        return False


def _number(value: float) -> Number:
    """Whole pixels are written as integers."""
    return int(value) if value.is_integer() else value


def _sum(start: Number, extent: Number) -> Number:
    end = start + extent
    return end if isinstance(end, int) else round(end, _DECIMALS)


def _nan_as_null(data: bytes) -> bytes:
    """Replace NaN and infinity, as Python's `json` writes them, by null: they spoil one annotation, not the document."""
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
    """Where an image of this address may lie: in a folder named as there, or by its own name."""
    try:
        path = PurePosixPath(unquote(urlsplit(url).path))
    except ValueError:  # not an address
        return []
    return [f"{path.parent.name}/{path.name}", path.name] if path.name else []
