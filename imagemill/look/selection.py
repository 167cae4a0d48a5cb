"""The part of the inputs that a page of the viewer shows, as the query string of its URL.

/images?show=refused&reason=undecodable&bucket=1216x832&text=cat&sort=tokens&order=desc&page=2
"""

from collections.abc import Iterable
from urllib.parse import parse_qsl

import msgspec

from imagemill.domain.filters import FILTERS
from imagemill.errors import WrongUsage
from imagemill.look.links import query_string
from imagemill.store.ledger.overview import SORTS, Selection

PAGE_SIZE = 100
# SQLite refuses much longer patterns, and every link of a page contains the text.
MOST_CHARACTERS = 1000

_NUMBERS = {"least_size": float, "most_size": float, "least_tokens": int, "most_tokens": int}
_TEXTS = ("reason", "bucket", "source", "text")


class View(msgspec.Struct, frozen=True):
    """A part of the inputs, and how it is shown.

    Attributes:
        selection: the part and its order; `change` is None.
        changed: kind of change, or None; `since`: the time from which changes count.
        page: number of the page, from 1.
        cropped: whether pictures are shown as cropped.
    """

    selection: Selection = Selection()
    changed: str | None = None
    since: str = "24h"
    page: int = 1
    cropped: bool = False

    @property
    def narrowed(self) -> bool:
        """Whether anything but a filter, the page and the crop is chosen."""
        chosen = self._parameters()
        return any(chosen[name] not in (None, "") for name in chosen.keys() - {"show", "crop", "page"})

    def query(self, **changes: object) -> str:
        """Return the query string of this view with some parameters replaced; None removes one, and page 1 is left out."""
        return query_string(self._parameters() | changes)

    def _parameters(self) -> dict[str, object]:
        chosen = self.selection
        given: dict[str, object] = {name: getattr(chosen, name) for name in (*_TEXTS, *_NUMBERS)}
        return {
            "show": chosen.show if chosen.show != "all" else None,
            **given,
            "changed": self.changed,
            "since": self.since if self.changed else None,
            "sort": chosen.sort if chosen.sort != "id" else None,
            "order": "desc" if chosen.descending else None,
            "crop": "1" if self.cropped else None,
            "page": self.page if self.page > 1 else None,
        }


def read_view(query: str, kinds_of_change: Iterable[str]) -> View:
    """Return the view of a query string. Unknown parameters are ignored: they belong to other pages.

    Args:
        query: without the question mark.
        kinds_of_change: those that exist.

    Raises:
        WrongUsage: for a filter, column, kind of change or number that does not exist.
    """
    given = dict(parse_qsl(query))
    numbers = {name: _number(name, given[name], kind) for name, kind in _NUMBERS.items() if name in given}
    return View(
        Selection(
            show=_one_of("show", given.get("show", "all"), FILTERS),
            **{name: _text(name, given.get(name)) for name in _TEXTS},  # pyright: ignore[reportArgumentType]
            **numbers,  # pyright: ignore[reportArgumentType]
            sort=_one_of("sort", given.get("sort", "id"), SORTS),
            descending=given.get("order") == "desc",
        ),
        changed=_one_of("changed", given["changed"], kinds_of_change) if "changed" in given else None,
        since=given.get("since", "24h"),
        page=max(1, int(_number("page", given.get("page", "1"), int))),
        cropped=given.get("crop") == "1",
    )


def _one_of(name: str, value: str, known: Iterable[str]) -> str:
    if value not in known:
        raise WrongUsage(f"{name}={value!r} is not known", do=f"choose from {', '.join(known)}")
    return value


def _text(name: str, value: str | None) -> str | None:
    if value and len(value) > MOST_CHARACTERS:
        raise WrongUsage(
            f"{name} has {len(value):,} characters",
            why=f"at most {MOST_CHARACTERS:,} are searched",
            do="give a shorter text",
        )
    return value


def _number(name: str, value: str, kind: type) -> float:
    try:
        number = kind(value)
    except ValueError:
        number = -1
    if not 0 <= number < 1e12:
        raise WrongUsage(f"{name}={value!r} is not a number", do="give a number that is not negative")
    return number
