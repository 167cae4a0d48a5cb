"""What every adapter gets and uses: the files, the counts, and objects built one way.

Belongs here: finding images, building objects, reading documents. Belongs elsewhere: one family's layout (its module).
Source: CONTRACTS section 3, "Record"; issue 6, "Adapters".
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal, TypeVar
from urllib.parse import unquote, urlsplit

import msgspec

from imagemill.errors import ImagemillError, MissingInput
from imagemill.preset_records import path_problem

Geometry = Literal["boxes", "polygons"]
T = TypeVar("T")

# Sums of two annotated decimals are written without a float's tail of digits.
_DECIMALS = 4


@dataclass(frozen=True, slots=True)
class Source:
    """One split's files.

    Attributes:
        annotations: the file of annotations. images: the folder that image names are relative to.
        geometry: what an instance with both becomes.
        counts: what was made and what was left out, by reason.
    """

    annotations: Path
    images: Path
    geometry: Geometry = "boxes"
    counts: Counter[str] = field(default_factory=Counter)

    def read(self, kind: type[T], path: Path | None = None) -> T:
        """A document of this kind; fields it does not have are passed over. Raises MissingInput or ImagemillError."""
        path = path or self.annotations
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            raise MissingInput(f"no {path.name}", where=path, do="give the file's place") from None
        return self.decode(kind, data, path)

    def decode(self, kind: type[T], data: bytes | msgspec.Raw, path: Path | None = None) -> T:
        """The same of bytes that come from there."""
        path = path or self.annotations
        try:
            return msgspec.json.decode(data, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ImagemillError(
                f"{path.name} does not hold what this adapter reads",
                where=path,
                why=str(error),
                do="check --adapter and --annotations",
            ) from error

    def find(self, names: Iterable[str]) -> str | None:
        """The first of these names that is a file in the folder of images; none is counted."""
        for name in names:
            if path_problem(name) is None and (self.images / name).is_file():
                return name
        self.counts["missing_image"] += 1
        return None

    def record(self, name: str, width: int, height: int, objects: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """A raw record of the image with this name in the folder of images."""
        self.counts["records"] += 1
        self.counts["objects"] += len(objects)
        self.counts["without_objects"] += not objects
        return {"images": [f"images/{name}"], "objects": list(objects), "width": width, "height": height}

    def box(self, desc: str, x: float, y: float, width: float, height: float) -> dict[str, Any] | None:
        """An object with a box from its corner and extent, in pixels; one without an extent is dropped and counted."""
        x2, y2 = _sum(x, width), _sum(y, height)
        if not desc.strip():
            self.counts["blank_name"] += 1
        elif not (x2 > x and y2 > y):
            self.counts["degenerate_box"] += 1
        else:
            return {"desc": desc.strip(), "bbox_2d": [x, y, x2, y2]}
        return None


def _sum(start: float, extent: float) -> float:
    end = start + extent
    return end if isinstance(end, int) else round(end, _DECIMALS)


def names_of_url(url: str) -> list[str]:
    """Where an image of this address may lie: in a folder named as there, or by its own name."""
    path = PurePosixPath(unquote(urlsplit(url).path))
    return [f"{path.parent.name}/{path.name}", path.name] if path.name else []
