"""Work on many items, some at a time, so that memory does not grow with their number."""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TypeVar

T = TypeVar("T")

# Images whose files, captions or rows are in memory together.
IMAGES_TOGETHER = 16_384


def in_parts(items: Iterable[T], most: int | None = None) -> Iterator[list[T]]:
    """Yield lists of at most so many successive items, by default `IMAGES_TOGETHER`; each is taken when it is asked for.

    >>> list(in_parts("abcde", 2))
    [['a', 'b'], ['c', 'd'], ['e']]
    """
    remaining = iter(items)
    while part := list(islice(remaining, most or IMAGES_TOGETHER)):
        yield part
