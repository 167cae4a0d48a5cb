"""The order in which people number files: `1.jpg`, `2.jpg`, `10.jpg`.

Digits mean 0 to 9 only; names that are equal but for leading zeros are told apart by their raw form.

Spec: docs/spec/stage-a.md#group-records
"""

import re

_DIGITS = re.compile("([0-9]+)")

NaturalKey = tuple[tuple[tuple[int, str], ...], str]


def natural_key(name: str) -> NaturalKey:
    """What to sort names by.

    >>> sorted(["10.jpg", "2.jpg", "02.jpg"], key=natural_key)
    ['02.jpg', '2.jpg', '10.jpg']
    """
    # Every second part is a number. Its length before its digits: no conversion, so no limit on how many there are.
    parts = _DIGITS.split(name)
    return tuple(_number(part) if place % 2 else (0, part) for place, part in enumerate(parts)), name


def _number(digits: str) -> tuple[int, str]:
    significant = digits.lstrip("0")
    return len(significant), significant
