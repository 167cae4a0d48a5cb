"""A table of all inputs of a data root, in memory, for the viewer: filters, search, sorting and counts in SQL.

The rows are gathered in pipeline/image_states.py.
"""

from collections.abc import Collection, Iterable, Sequence
from statistics import median
from typing import Any

import msgspec

from imagemill.domain.buckets import LEAST_COVERAGE, MOST_ENLARGEMENT
from imagemill.domain.filters import FILTERS
from imagemill.store.ledger.database import IN_MEMORY, Database
from imagemill.store.ledger.table import BOOL, Codec, Table


class ImageState(msgspec.Struct, frozen=True):
    """The state of one image, or of another input that has a problem.

    Attributes:
        item: image id, or the name of the input that has no id.
        file: path in `approved/`; None if there is no such file.
        seen: whether it is an image file of `approved/`.
        outcome: of an image that is seen, see `pipeline.accounting`; else empty.
        reasons: codes of its problems, in alphabetical order.
        width: in pixels, upright; None if it was never opened. Likewise `height`, `bucket`, `coverage` and `enlargement`.
        coverage: share of the image that training sees, from 0 to 1.
        enlargement: how many times that part is enlarged.
        caption: text of the caption, None without one.
        origin: of the caption.
        tokens: of the caption, None if not counted.
        truncated: whether the text encoder sees only a part of the caption.
        tar: of its sample, `bucket_…/….tar`; None if it is not in the shards. `offset`: of the sample, in bytes.
        duplicate_of: the image that represents its group of near duplicates, if it is another one.
        withdrawn: time of its withdrawal, UTC, ISO 8601.
        marked: whether it is marked.
    """

    item: str
    file: str | None = None
    seen: bool = False
    outcome: str = ""
    reasons: tuple[str, ...] = ()
    width: int | None = None
    height: int | None = None
    bucket: str | None = None
    coverage: float | None = None
    enlargement: float | None = None
    caption: str | None = None
    origin: str | None = None
    tokens: int | None = None
    truncated: bool = False
    tar: str | None = None
    offset: int | None = None
    duplicate_of: str | None = None
    withdrawn: str | None = None
    marked: bool = False


# ` a b `, so that a reason is found between spaces.
_REASONS = Codec(lambda reasons: f" {' '.join(reasons)} " if reasons else "", lambda text: tuple(text.split()))
STATES = Table("states", ImageState, seen=BOOL, truncated=BOOL, marked=BOOL, reasons=_REASONS)

# Conditions of the filters. Withdrawn images are in their own filter only.
_WITHDRAWN = "withdrawn"
_CONDITIONS = {
    "all": "1",
    "seen": "seen",
    "in_shards": "tar IS NOT NULL",
    **{outcome: f"seen AND outcome = '{outcome}'" for outcome in ("up_to_date", "refused", "failed", "waiting")},
    _WITHDRAWN: "withdrawn IS NOT NULL",
    "marked": "marked",
    "problems": "reasons != ''",
    "no_caption": "seen AND caption IS NULL",
    "caption_cut": "seen AND truncated",
    "enlarged": f"seen AND enlargement > {MOST_ENLARGEMENT}",
    "low_coverage": f"seen AND coverage < {LEAST_COVERAGE}",
    "near_duplicates": "seen AND duplicate_of IS NOT NULL",
}

# Columns to sort by; unknown values come first.
SORTS = {
    "id": "item", "size": "ifnull(width * height, 0)", "tokens": "ifnull(tokens, -1)",
    "coverage": "ifnull(coverage, -1)", "enlargement": "ifnull(enlargement, -1)", "bucket": "ifnull(bucket, '')",
    "source": "ifnull(origin, '')", "outcome": "outcome", "caption": "ifnull(caption, '')", "withdrawn": "ifnull(withdrawn, '')",
}  # fmt: skip


class Selection(msgspec.Struct, frozen=True):
    """Which inputs to show, in which order.

    Attributes:
        show: name of a filter.
        reason: code of a problem.
        bucket: of the image.
        source: origin of the caption.
        text: a part of the caption or of the item; ASCII letters match in both cases.
        least_size, most_size: megapixels.
        least_tokens, most_tokens: of the caption.
        among: the only items, None for all.
        sort: name of a column to sort by; equal rows are in order of the item.
        descending: whether the order is reversed.
    """

    show: str = "all"
    reason: str | None = None
    bucket: str | None = None
    source: str | None = None
    text: str | None = None
    least_size: float | None = None
    most_size: float | None = None
    least_tokens: int | None = None
    most_tokens: int | None = None
    among: tuple[str, ...] | None = None
    sort: str = "id"
    descending: bool = False

    def condition(self) -> tuple[str, list[Any]]:
        """Return the condition in SQL, and its parameters."""
        parts, given = [f"({_CONDITIONS[self.show]})"], []
        if self.show != _WITHDRAWN:
            parts.append("withdrawn IS NULL")
        for value, condition in (
            (self.reason and f" {self.reason} ", "instr(reasons, ?)"),
            (self.bucket, "bucket = ?"),
            (self.source, "origin = ?"),
            (self.least_size, "width * height >= ? * 1000000"),
            (self.most_size, "width * height <= ? * 1000000"),
            (self.least_tokens, "tokens >= ?"),
            (self.most_tokens, "tokens <= ?"),
        ):
            if value not in (None, ""):
                parts.append(condition)
                given.append(value)
        if self.text:
            parts.append("(caption LIKE ? ESCAPE '\\' OR item LIKE ? ESCAPE '\\')")
            escaped = self.text.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
            given += [f"%{escaped}%"] * 2
        if self.among is not None:
            parts.append("item IN (SELECT value FROM json_each(?))")
            given.append(msgspec.json.encode(self.among).decode())
        return " AND ".join(parts), given


class Overview(Database):
    """The table. One thread uses it."""

    def __init__(self, states: Iterable[ImageState] = ()) -> None:
        super().__init__(IN_MEMORY)
        keys = ("item",)
        columns = ", ".join(f"{name} PRIMARY KEY" if name in keys else name for name in STATES.names)
        with self._errors():
            self._db.execute(f"CREATE TABLE states ({columns}) WITHOUT ROWID")
        self._insert(STATES, states)

    def count(self, selection: Selection) -> int:
        """Return the number of selected inputs."""
        where, given = selection.condition()
        return self._number(f"SELECT count(*) FROM states WHERE {where}", given)

    def counts(self) -> dict[str, int]:
        """Return the number of inputs in each filter."""
        conditions = ", ".join(f"total({Selection(name).condition()[0]})" for name in FILTERS)
        row = self._one(f"SELECT {conditions} FROM states") or ()
        return {name: int(count) for name, count in zip(FILTERS, row, strict=True)}

    def named_counts(self) -> dict[str, int]:
        """Return the number of inputs by filter, and by `bucket=`, `source=` and `reason=`: each number of the first page."""
        parts = {"bucket": self.counts_by("bucket"), "source": self.counts_by("origin"), "reason": self.reasons()}
        return self.counts() | {f"{name}={value}": n for name, part in parts.items() for value, n in part.items()}

    def counts_by(self, column: str) -> dict[str, int]:
        """Return the number of inputs that are not withdrawn by bucket or origin, in order of the value."""
        assert column in {"bucket", "origin"}
        rows = self._rows(
            f"SELECT {column}, count(*) FROM states WHERE withdrawn IS NULL AND {column} IS NOT NULL"
            f" GROUP BY {column} ORDER BY {column}"
        )
        return dict(rows)  # type: ignore[arg-type]

    def reasons(self) -> dict[str, int]:
        """Return the number of inputs by reason of a problem; withdrawn images count for no other reason."""
        counts: dict[str, int] = {}
        for (text,) in self._rows("SELECT reasons FROM states WHERE reasons != '' AND withdrawn IS NULL"):
            for reason in text.split():
                counts[reason] = counts.get(reason, 0) + 1
        return dict(sorted(counts.items()))

    def select(self, selection: Selection, limit: int, offset: int = 0) -> list[ImageState]:
        """Return selected inputs in order."""
        where, given = selection.condition()
        order = self._order(selection)
        rows = self._rows(
            f"SELECT {STATES.columns} FROM states WHERE {where} ORDER BY {order} LIMIT ? OFFSET ?",
            [*given, limit, offset],
        )
        return list(STATES.rows(rows))

    def items(self, selection: Selection) -> list[str]:
        """Return the selected items in order."""
        where, given = selection.condition()
        order = self._order(selection)
        return [item for (item,) in self._rows(f"SELECT item FROM states WHERE {where} ORDER BY {order}", given)]

    def state(self, item: str) -> ImageState | None:
        """Return the state of one input."""
        return next(self._select(STATES, [item], key="item"), None)

    def states(self, items: Sequence[str]) -> dict[str, ImageState]:
        """Return the states of some inputs."""
        return {state.item: state for state in self._select(STATES, items, key="item")}

    def position(self, selection: Selection, item: str) -> int | None:
        """Return the number of selected inputs before one, None if it is not selected."""
        where, given = selection.condition()
        if not self._number(f"SELECT count(*) FROM states WHERE {where} AND item = ?", [*given, item]):
            return None
        column, before = SORTS[selection.sort], ">" if selection.descending else "<"
        value = f"(SELECT {column} FROM states WHERE item = ?)"
        return self._number(
            f"SELECT count(*) FROM states WHERE {where}"
            f" AND ({column} {before} {value} OR ({column} = {value} AND item {before} ?))",
            [*given, item, item, item],
        )

    def set_marks(self, items: Collection[str]) -> None:
        """Mark exactly these inputs."""
        marked = msgspec.json.encode(list(items)).decode()
        self._change("UPDATE states SET marked = item IN (SELECT value FROM json_each(?))", (marked,))

    def medians(self) -> dict[str, tuple[float, float]]:
        """Return, by bucket, the median coverage and enlargement of its images that are not withdrawn."""
        found: dict[str, tuple[list[float], list[float]]] = {}
        for bucket, coverage, enlargement in self._rows(
            "SELECT bucket, coverage, enlargement FROM states WHERE coverage IS NOT NULL AND withdrawn IS NULL"
        ):
            coverages, enlargements = found.setdefault(bucket, ([], []))
            coverages.append(coverage)
            enlargements.append(enlargement)
        return {bucket: (median(coverages), median(times)) for bucket, (coverages, times) in sorted(found.items())}

    def _order(self, selection: Selection) -> str:
        direction = "DESC" if selection.descending else "ASC"
        return f"{SORTS[selection.sort]} {direction}, item {direction}"

    def _number(self, sql: str, given: Sequence[Any]) -> int:
        row = self._one(sql, given)
        assert row
        return int(row[0])
