"""Names similar to a mistyped one, for error messages."""

import difflib
import heapq
import itertools
from collections.abc import Collection, Iterable
from pathlib import PurePath

MOST = 5

# difflib compares some 20,000 names per second. A larger collection is reduced to this many candidates first.
_CANDIDATES = 2000


def close_names(given: str, names: Collection[str]) -> list[str]:
    """Return at most five of these names that are similar to the given one, the most similar first.

    The comparison ignores case, and a file name matches a name that equals it without the extension.
    """
    target = given.casefold()
    folded = {name: name.casefold() for name in _likely(target, names)}
    equal = [name for name, lower in folded.items() if lower in (target, PurePath(target).stem)]
    originals: dict[str, list[str]] = {}
    for name, lower in folded.items():
        originals.setdefault(lower, []).append(name)
    similar = difflib.get_close_matches(target, originals, n=MOST)
    return list(dict.fromkeys([*sorted(equal), *(name for lower in similar for name in sorted(originals[lower]))]))[
        :MOST
    ]


def name_hint(given: str, names: Collection[str]) -> str | None:
    """Return a sentence with the similar names, else with the first ones, or None if there are no names."""
    if not names:
        return None
    if similar := close_names(given, names):
        return f"similar names: {', '.join(similar)}"
    first = heapq.nsmallest(MOST, names)
    more = f" and {len(names) - len(first)} more" if len(names) > len(first) else ""
    return f"existing names: {', '.join(first)}{more}"


def _likely(target: str, names: Collection[str]) -> Iterable[str]:
    """Return the names to compare: of a large collection, those that share the longest prefixes and suffixes with `target`."""
    if len(names) <= _CANDIDATES:
        return sorted(names)

    def shared(name: str) -> int:
        lower = name.casefold()
        return _shared_beginning(lower, target) + _shared_beginning(lower[::-1], target[::-1])

    return sorted(heapq.nlargest(_CANDIDATES, names, key=shared))


def _shared_beginning(one: str, other: str) -> int:
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
