"""The sizes of many images, in little memory."""

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping

# Upright height and width in pixels; None if the header cannot be read.
Size = tuple[int, int] | None


class HeaderSizes:
    """The sizes of images of one listing whose headers have been read. Each takes 16 bytes."""

    def __init__(self) -> None:
        self._ids: list[str] = []
        # Height and width of each; zeros for None.
        self._sizes = array("I")

    def add(self, sizes: Mapping[str, Size]) -> None:
        """Add the sizes of images. Those whose ids do not sort after all earlier ones are left out."""
        last = self._ids[-1] if self._ids else ""
        for image_id in sorted(image_id for image_id in sizes if image_id > last):
            self._ids.append(image_id)
            self._sizes.extend(sizes[image_id] or (0, 0))

    def of(self, ids: Iterable[str]) -> Iterator[tuple[str, Size]]:
        """Yield the id and size of each of these images that was added."""
        for image_id in ids:
            place = bisect_left(self._ids, image_id)
            if place < len(self._ids) and self._ids[place] == image_id:
                height, width = self._sizes[2 * place : 2 * place + 2]
                yield image_id, (height, width) if height else None
