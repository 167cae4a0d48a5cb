"""A table of all inputs of a data root, in memory, for the viewer: filters, search, sorting and counts in SQL.

    ledger: sources, captions, withdrawals, marks ──┐
    Additions (pipeline/image_states.py) ───────────┴──one statement──> states

The rows of all images go from the ledger into the table without becoming Python objects.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import msgspec

from imagemill.domain.buckets import LEAST_COVERAGE, MOST_ENLARGEMENT
from imagemill.domain.filters import FILTERS
from imagemill.store.ledger.database import IN_MEMORY, Database, attached
from imagemill.store.ledger.recent import CHANGES_SINCE, query_since
from imagemill.store.ledger.table import BOOL, Codec, Table, in_statements


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
        added_at: when it was first read, in seconds since the epoch; None if unknown.
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
    added_at: int | None = None


# SQLite's name of the ledger where it is attached.
_LEDGER = "ledger"

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
        change: kind of change, see `CHANGES_SINCE`, and the time since when, in seconds since the epoch; None for all.
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
    change: tuple[str, int] | None = None
    sort: str = "id"
    descending: bool = False

    def condition(self) -> tuple[str, list[Any]]:
        """Return the condition in SQL, and its parameters. That of a change reads the table `changed`."""
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
        if self.change is not None:
            kind, since = self.change
            # All images may be new; a query for them would take longer than the table.
            parts.append(f"added_at >= {int(since)}" if kind == "added" else "item IN (SELECT item FROM changed)")
        return " AND ".join(parts), given


def show_of(change: str) -> str:
    """Return the filter that shows the inputs of a kind of change: withdrawn images are in their own filter only."""
    return _WITHDRAWN if change == _WITHDRAWN else "all"


class Listed(NamedTuple):
    """An image file of `approved/`: its path there, and its outcome, see `pipeline.accounting`."""

    file: str
    outcome: str


UP_TO_DATE = "up_to_date"


class Additions(NamedTuple):
    """The part of the table that does not come from the ledger.

    Attributes:
        differing: items that are not as the ledger alone would have them: each image with a row of `sources` is in `approved/`
            under the name that the row has, and up to date; no other one is there. None: it is not there.
        reasons: codes of the problems of an item.
        samples: item, tar and offset of each sample.
        duplicates: the image that represents its group of near duplicates, by image.
        training: returns bucket, coverage and enlargement of an image of a width and height.
    """

    differing: Mapping[str, Listed | None]
    reasons: Mapping[str, Iterable[str]]
    samples: Iterable[tuple[str, str, int]]
    duplicates: Mapping[str, str]
    training: Callable[[int, int], tuple[str, float, float]]


# Tables for the statement that fills `states`: columns, and their number. Keys have types, without which no key is looked up by
# a column that has one.
_ADDED = {
    "differing": ("item TEXT PRIMARY KEY, file, outcome", 3),
    "reasons": ("item TEXT PRIMARY KEY, reasons", 2),
    "samples": ("item TEXT PRIMARY KEY, tar, offset", 3),
    "duplicates": ("item TEXT PRIMARY KEY, duplicate_of", 2),
    "training": ("width INT, height INT, bucket, coverage, enlargement, PRIMARY KEY (width, height)", 5),
}

# In the order of the columns.
_FILL = f"""
INSERT INTO states
SELECT
    item, file, file IS NOT NULL, CASE WHEN file IS NULL THEN '' ELSE outcome END, ifnull(reasons, ''),
    width, height, bucket, coverage, enlargement,
    text, origin, length(mask) - length(replace(mask, '1', '')), ifnull(truncated, 0),
    tar, offset, duplicate_of, withdrawn, marked, added_at
FROM (
    SELECT
        i.image_id AS item,
        CASE WHEN n.item IS NULL THEN s.file_name ELSE n.file END AS file, ifnull(n.outcome, '{UP_TO_DATE}') AS outcome,
        r.reasons, s.width, s.height, b.bucket, b.coverage, b.enlargement,
        c.text, c.origin, c.mask, c.truncated, t.tar, t.offset, d.duplicate_of,
        w.at AS withdrawn, m.image_id IS NOT NULL AS marked, s.added_at
    FROM {{items}}
    LEFT JOIN training AS b ON b.width = s.width AND b.height = s.height
    LEFT JOIN ledger.captions AS c ON c.image_id = i.image_id
    LEFT JOIN ledger.withdrawn AS w ON w.image_id = i.image_id
    LEFT JOIN ledger.marks AS m ON m.image_id = i.image_id
    LEFT JOIN differing AS n ON n.item = i.image_id
    LEFT JOIN reasons AS r ON r.item = i.image_id
    LEFT JOIN samples AS t ON t.item = i.image_id
    LEFT JOIN duplicates AS d ON d.item = i.image_id
)
"""
_OTHERS = " UNION ".join(
    f"SELECT {key} AS image_id FROM {name} AS x WHERE NOT EXISTS (SELECT 1 FROM ledger.sources WHERE image_id = x.{key})"
    for name, key in {
        **dict.fromkeys(("ledger.captions", "ledger.withdrawn", "ledger.marks"), "image_id"),
        **dict.fromkeys(("differing", "reasons", "samples"), "item"),
    }.items()
)
# Images with a row of their own, in order of their ids; then all other items.
_FILLED = (
    _FILL.replace("i.image_id", "s.image_id").format(items="ledger.sources AS s"),
    _FILL.format(items=f"({_OTHERS}) AS i LEFT JOIN ledger.sources AS s ON s.image_id = i.image_id"),
)


class Numbers(NamedTuple):
    """The numbers of the first page, of inputs that are not withdrawn unless a filter says otherwise.

    Attributes:
        counts: by filter.
        reasons: by reason of a problem.
        buckets: by bucket.
        origins: by origin of the caption.
        medians: median coverage and enlargement of a bucket's images, by bucket.
    """

    counts: dict[str, int]
    reasons: dict[str, int]
    buckets: dict[str, int]
    origins: dict[str, int]
    medians: dict[str, tuple[float, float]]


class Overview(Database):
    """The table. One thread uses it."""

    def __init__(self, ledger: Path | None = None) -> None:
        super().__init__(IN_MEMORY)
        self._ledger = ledger
        self._numbers: Numbers | None = None
        self._changed: tuple[str, int] | None = None
        columns = ", ".join(f"{name} PRIMARY KEY" if name == "item" else name for name in STATES.names)
        with self._errors():
            self._db.execute(f"CREATE TABLE states ({columns}) WITHOUT ROWID")
            self._db.execute("CREATE TABLE changed (item PRIMARY KEY) WITHOUT ROWID")

    @classmethod
    def of(cls, ledger: Path, added: Additions) -> "Overview":
        """Return the table of a ledger."""
        table = cls(ledger)
        try:
            table._fill(added)
        except BaseException:
            table.close()
            raise
        return table

    @contextmanager
    def _attached(self) -> Iterator[None]:
        """Attach the ledger."""
        assert self._ledger
        with self._errors(), attached(self._db, self._ledger, _LEDGER):
            yield

    def _where(self, selection: Selection) -> tuple[str, list[Any]]:
        """Return the condition of a selection, after reading from the ledger which items it concerns, unless that is known."""
        change = selection.change
        if change is not None and change[0] != "added" and change != self._changed:
            self._changed = None
            with self._attached():
                self._db.execute("DELETE FROM changed")
                self._db.execute(f"INSERT INTO changed {query_since(*change, _LEDGER)}")
            self._changed = change
        return selection.condition()

    def _fill(self, added: Additions) -> None:
        rows = {
            "differing": ((item, *(listed or (None, None))) for item, listed in added.differing.items()),
            "reasons": ((item, f" {' '.join(sorted(codes))} ") for item, codes in added.reasons.items()),
            "samples": added.samples,
            "duplicates": added.duplicates.items(),
        }
        with self._attached():
            for name, (columns, _) in _ADDED.items():
                self._db.execute(f"CREATE TABLE {name} ({columns}) WITHOUT ROWID")
            for name, values in rows.items():
                self._add(name, values)
            sizes = self._db.execute("SELECT DISTINCT width, height FROM ledger.sources").fetchall()
            self._add("training", ((*size, *added.training(*size)) for size in sizes))
            for statement in _FILLED:
                self._db.execute(statement)
            for name in _ADDED:
                self._db.execute(f"DROP TABLE {name}")

    def _add(self, name: str, rows: Iterable[Sequence[Any]]) -> None:
        values = ", ".join("?" * _ADDED[name][1])
        for statement in in_statements(f"INSERT OR REPLACE INTO {name} VALUES ({values})", rows):
            self._db.execute(*statement)

    def count(self, selection: Selection) -> int:
        """Return the number of selected inputs."""
        where, given = self._where(selection)
        return self._number(f"SELECT count(*) FROM states WHERE {where}", given)

    def counts_since(self, since: int) -> dict[str, int]:
        """Return the number of inputs for each kind of change since a time, in seconds since the epoch, see `CHANGES_SINCE`.

        Withdrawn ones count as withdrawn alone.
        """
        return {kind: self.count(Selection(show_of(kind), change=(kind, since))) for kind in CHANGES_SINCE}

    def numbers(self) -> Numbers:
        """Return the numbers of the first page. They are computed once, and again after marks have been set."""
        if self._numbers is None:
            by_bucket, by_origin = self.counts_by("bucket"), self.counts_by("origin")
            self._numbers = Numbers(self.counts(), self.reasons(), by_bucket, by_origin, self.medians())
        return self._numbers

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
        where, given = self._where(selection)
        order = self._order(selection)
        query = f"SELECT {STATES.columns} FROM states WHERE {where} ORDER BY {order} LIMIT ? OFFSET ?"
        return list(STATES.rows(self._rows(query, [*given, limit, offset])))

    def items(self, selection: Selection) -> list[str]:
        """Return the selected items in order."""
        where, given = self._where(selection)
        order = self._order(selection)
        return [item for (item,) in self._rows(f"SELECT item FROM states WHERE {where} ORDER BY {order}", given)]

    def folders(self) -> list[str]:
        """Return the folders of `approved/` that contain images, in order; "" for itself."""
        # The characters of a path but the slash, removed from its end, leave the folder and a slash.
        folder = "CASE WHEN instr(file, '/') THEN rtrim(file, replace(file, '/', '')) ELSE '' END"
        rows = self._rows(f"SELECT DISTINCT {folder} AS folder FROM states WHERE file IS NOT NULL ORDER BY folder")
        return [folder.rstrip("/") for (folder,) in rows]

    def state(self, item: str) -> ImageState | None:
        """Return the state of one input."""
        return next(self._select(STATES, [item], key="item"), None)

    def states(self, items: Sequence[str]) -> dict[str, ImageState]:
        """Return the states of some inputs."""
        return {state.item: state for state in self._select(STATES, items, key="item")}

    def position(self, selection: Selection, item: str) -> int | None:
        """Return the number of selected inputs before one, None if it is not selected."""
        where, given = self._where(selection)
        column, before = SORTS[selection.sort], ">" if selection.descending else "<"
        value = f"(SELECT {column} FROM states WHERE item = ?)"
        if not self._number(f"SELECT count(*) FROM states WHERE {where} AND item = ?", [*given, item]):
            return None
        return self._number(
            f"SELECT count(*) FROM states WHERE {where}"
            f" AND ({column} {before} {value} OR ({column} = {value} AND item {before} ?))",
            [*given, item, item, item],
        )

    def set_marks(self, items: Collection[str]) -> None:
        """Mark exactly these inputs."""
        self._numbers = None
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
