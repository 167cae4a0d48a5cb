"""Natural order of file names: `1.jpg`, `2.jpg`, `10.jpg`.

Only 0 to 9 are digits. Names that differ only in leading zeros are ordered by their text.

Spec: docs/spec/stage-a.md#group-records
"""

import re

_DIGITS = re.compile("([0-9]+)")

NaturalKey = tuple[tuple[tuple[int, str], ...], str]


def natural_key(name: str) -> NaturalKey:
    """Return the sort key of a name.

    >>> sorted(["10.jpg", "2.jpg", "02.jpg"], key=natural_key)
    ['02.jpg', '2.jpg', '10.jpg']
    """
    # Every second part is a number, compared by length and then by digits: without conversion there is no limit on its
    # length.
    parts = _DIGITS.split(name)
    return tuple(_number(part) if place % 2 else (0, part) for place, part in enumerate(parts)), name


def _number(digits: str) -> tuple[int, str]:
    significant = digits.lstrip("0")
    return len(significant), significant
