"""What we know about each image, and why it did or did not get where it was going. One SQLite file per data root.

    sources   the approved image as it was last read: stat triple, fingerprint, oriented size
    captions  its caption: text, where it came from, T5 mask
    files     every npy we vouch for, by the stat triple it has on disk: made from what, by which model
    problems  one row per input and asset that did not arrive: reason code, detail, remedy
    counts    what each run did, for summaries
    changes   what was made of which image since the last merge of the records
    regenerating  kinds whose files are all being replaced
    claims    which process works on which partition now
    verified  shard sets that passed a full check, by what the file system said of them then
    withdrawn images that somebody took out of the shards
    places    folders outside the root that a run was told to use

A file's row is committed *before* the file gets its final name, and is found by stat triple: a kill between the two leaves
either the old file with its old row, or the new file with its new one, never a file with the wrong history.

Belongs here: the schema, typed rows, reads and writes in one transaction each.
Belongs elsewhere: what to do about it (pipeline/).
"""

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import msgspec

from imagemill.atomic import is_dead_owner, owner_name
from imagemill.columns import END, Column
from imagemill.errors import ImagemillError, disk_full_told
from imagemill.files import StatTriple
from imagemill.listing import Listing

SCHEMA_VERSION = 2

# Where a caption came from. `preview` in front keeps it out of shards.
FROM_SIDECAR, FROM_RECORD, FROM_CAPTIONER = "sidecar", "record", "captioner"
FROM_PREVIEW, FROM_PREVIEW_RECORD = "preview captioner", "preview record"

# Of the tables `captions`, `captioned` and `sources`: a caption by a model of a picture that is not the image's any more.
_OUTDATED = f"""origin IN ('{FROM_CAPTIONER}', '{FROM_PREVIEW}') AND EXISTS (
    SELECT 1 FROM captioned m JOIN sources s ON s.image_id = m.image_id
    WHERE m.image_id = captions.image_id AND s.fingerprint != m.image)"""

# Maker of a file that is still there while its kind is being regenerated.
SUPERSEDED = "superseded"
_SCHEMA = """
CREATE TABLE IF NOT EXISTS sources (
    image_id TEXT PRIMARY KEY, file_name TEXT NOT NULL, size INT, mtime_ns INT, inode INT,
    fingerprint TEXT NOT NULL, height INT NOT NULL, width INT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS captions (
    image_id TEXT PRIMARY KEY, size INT, mtime_ns INT, inode INT,
    text TEXT NOT NULL, origin TEXT NOT NULL, fingerprint TEXT NOT NULL, mask TEXT, truncated INT) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS captioned (image_id TEXT PRIMARY KEY, image TEXT NOT NULL, maker TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS files (
    kind TEXT, image_id TEXT, size INT, mtime_ns INT, inode INT,
    source TEXT, content TEXT NOT NULL, maker TEXT NOT NULL,
    PRIMARY KEY (kind, image_id, size, mtime_ns, inode)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS problems (
    item TEXT, asset TEXT, outcome TEXT NOT NULL, reason TEXT NOT NULL, detail TEXT NOT NULL, remedy TEXT NOT NULL,
    size INT, mtime_ns INT, inode INT, run_id TEXT, at TEXT NOT NULL, PRIMARY KEY (item, asset)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS counts (run_id TEXT, asset TEXT, counts TEXT NOT NULL, PRIMARY KEY (run_id, asset)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS changes (item TEXT, asset TEXT, what TEXT, PRIMARY KEY (item, asset, what)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS regenerating (kind TEXT PRIMARY KEY, state TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS withdrawn (image_id TEXT PRIMARY KEY, at TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS claims (
    asset TEXT, item TEXT, owner TEXT NOT NULL, run_id TEXT NOT NULL, PRIMARY KEY (asset, item)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS verified (path TEXT PRIMARY KEY, signature TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS places (name TEXT PRIMARY KEY, path TEXT NOT NULL) WITHOUT ROWID;
"""


class SourceRow(msgspec.Struct, frozen=True):
    """An approved image as last read. `height` and `width` in pixels, after EXIF orientation."""

    image_id: str
    file_name: str
    stat: StatTriple
    fingerprint: str
    height: int
    width: int


class CaptionRow(msgspec.Struct, frozen=True):
    """A caption as it goes into the record. `stat` is the sidecar's, None for other origins; `mask` holds 77 ints."""

    image_id: str
    stat: StatTriple | None
    text: str
    origin: str
    fingerprint: str
    mask: list[int] | None = None
    truncated: bool = False


class Captioned(msgspec.Struct, frozen=True):
    """What a caption by a model was made of, and by which: fingerprint of the image's bytes, key of the captioner."""

    image_id: str
    image: str
    maker: str


class FileRow(msgspec.Struct, frozen=True, gc=False):
    """One npy file we vouch for.

    `source`: fingerprint of what it was made from, None where nobody knows; `content`: of the file's bytes;
    `maker`: the model's key, or `unknown` for adopted files.
    """

    kind: str
    image_id: str
    stat: StatTriple
    source: str | None
    content: str
    maker: str


class FileColumns(NamedTuple):
    """Rows of one kind's files, column by column: many are held against others at once, and few are ever asked for.

    `listing`: the files as they were when they were vouched for, by image id.
    """

    kind: str
    listing: Listing
    sources: Column
    contents: Column
    makers: Column

    @classmethod
    def of(cls, kind: str, texts: Sequence[str]) -> "FileColumns":
        return cls(kind, Listing.of(texts[:4]), *map(Column, texts[4:]))

    def row(self, at: int) -> FileRow:
        image_id, source = self.listing.names.values[at], self.sources.values[at] or None
        stat = self.listing.stat(at)
        return FileRow(self.kind, image_id, stat, source, self.contents.values[at], self.makers.values[at])


class SourceColumns(NamedTuple):
    """Of the approved images as last read, in order of id: fingerprints, and oriented sizes in pixels."""

    image_ids: Column
    fingerprints: Column
    heights: Column
    widths: Column

    def size(self, at: int) -> tuple[int, int]:
        return int(self.heights.values[at]), int(self.widths.values[at])


_FILE_COLUMNS = ("image_id", "size", "mtime_ns", "inode", "ifnull(source, '')", "content", "maker")
_SOURCE_COLUMNS = ("image_id", "fingerprint", "height", "width")


class Problem(msgspec.Struct, frozen=True):
    """Why an input did not get through an asset. `item`: image id, or file name where there is no id.

    `outcome`: *refused* is the input's own fault (not tried again until `stat` changes), *failed* is ours.
    """

    item: str
    asset: str
    outcome: Literal["refused", "failed"]
    reason: str
    detail: str
    remedy: str
    stat: StatTriple | None = None
    run_id: str = ""
    at: str = ""


# Claimed like a partition: all of an asset at once. No image id begins like this: it would name no file.
EVERY = "/"

# A ledger for looking only, where a data root has none.
IN_MEMORY = Path(":memory:")


class Ledger:
    """One connection. Use as a context manager; `transaction()` groups writes."""

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        self.path = path
        try:
            with disk_full_told(path):
                self._db = _connect(path, read_only)
        except sqlite3.OperationalError as error:
            raise ImagemillError(
                f"the ledger cannot be opened: {error}",
                where=path,
                why="its folder cannot be written to, or another program holds the file",
                do="make the folder writable or end the other program, then run the same command again",
            ) from error
        except sqlite3.DatabaseError as error:
            raise ImagemillError(
                f"the ledger cannot be opened: {error}",
                where=path,
                do="move the file away: imagemill makes a new one and adopts the files on disk",
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._db.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All or nothing, and durable when the block ends. Nested blocks join the outer one."""
        if self._db.in_transaction:
            yield
            return
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    # ---- reads

    def sources(self, ids: Sequence[str] | None = None) -> dict[str, SourceRow]:
        rows = self._select("sources", "image_id, file_name, size, mtime_ns, inode, fingerprint, height, width", ids)
        return {r[0]: SourceRow(r[0], r[1], StatTriple(*r[2:5]), *r[5:]) for r in rows}

    def captions(self, ids: Sequence[str] | None = None) -> dict[str, CaptionRow]:
        """Every caption but the outdated ones."""
        columns = "image_id, size, mtime_ns, inode, text, origin, fingerprint, mask, truncated"
        rows = self._select("captions", columns, ids, f"NOT ({_OUTDATED})")
        return {r[0]: CaptionRow(r[0], _triple(r[1:4]), r[4], r[5], r[6], _mask(r[7]), bool(r[8])) for r in rows}

    def captioned(self) -> dict[str, Captioned]:
        """Every image that a model has captioned; its caption may be another one by now."""
        return {row[0]: Captioned(*row) for row in self._db.execute("SELECT image_id, image, maker FROM captioned")}

    def outdated_captions(self) -> set[str]:
        """Images whose caption a model made of the picture that was there before, as far as somebody has looked."""
        return {row[0] for row in self._db.execute(f"SELECT image_id FROM captions WHERE {_OUTDATED}")}

    def files(self, kind: str, ids: Sequence[str] | None = None) -> dict[tuple[str, StatTriple], FileRow]:
        """Every file vouched for, by (image id, stat triple)."""
        if ids is None:
            known = self.file_columns(kind)
            return {(row.image_id, row.stat): row for row in map(known.row, range(len(known.makers.values)))}
        rows = self._select(
            "files", "kind, image_id, size, mtime_ns, inode, source, content, maker", ids, "kind = ?", (kind,)
        )
        found = (FileRow(r[0], r[1], StatTriple(*r[2:5]), *r[5:]) for r in rows)
        return {(row.image_id, row.stat): row for row in found}

    def file_columns(self, kind: str) -> FileColumns:
        """Every file vouched for, in the order of the key."""
        return FileColumns.of(kind, self._columns(_FILE_COLUMNS, "files WHERE kind = ?", kind))

    def source_columns(self) -> SourceColumns:
        """What records are held against, in the order of the key."""
        return SourceColumns(*map(Column, self._columns(_SOURCE_COLUMNS, "sources")))

    def _columns(self, names: Sequence[str], rows: str, *given: str) -> Sequence[str]:
        """Each column as a text that SQLite joins, with no Python per row.

        In the order in which the table lies, which is its key's. Sorting, where nothing is to sort, takes a third more time, and
        nobody relies on the order for more than speed.
        """
        texts = ", ".join(f"ifnull(group_concat({name}, '{END}') || '{END}', '')" for name in names)
        return self._db.execute(f"SELECT {texts} FROM {rows}", given).fetchone()

    def problems(self, items: Sequence[str] | None = None) -> list[Problem]:
        columns = "item, asset, outcome, reason, detail, remedy, size, mtime_ns, inode, run_id, at"
        rows = self._select("problems", columns, items, key="item")
        return [Problem(r[0], r[1], r[2], r[3], r[4], r[5], _triple(r[6:9]), r[9], r[10]) for r in rows]

    def counts(self, run_ids: Sequence[str]) -> dict[str, dict[str, int]]:
        """Counters per asset, added up over these runs."""
        total: dict[str, dict[str, int]] = {}
        for asset, counts in self._select("counts", "asset, counts", run_ids, key="run_id"):
            into = total.setdefault(asset, {})
            for name, value in msgspec.json.decode(counts).items():
                into[name] = into.get(name, 0) + value
        return total

    def place(self, name: str) -> Path | None:
        row = self._db.execute("SELECT path FROM places WHERE name = ?", (name,)).fetchone()
        return Path(row[0]) if row else None

    def verified(self, path: Path) -> str | None:
        row = self._db.execute("SELECT signature FROM verified WHERE path = ?", (str(path),)).fetchone()
        return row[0] if row else None

    def ids(self, table: Literal["sources", "captions", "withdrawn"]) -> set[str]:
        return {row[0] for row in self._db.execute(f"SELECT image_id FROM {table}")}

    def facts(self) -> Iterator[tuple[str, SourceRow | None, CaptionRow]]:
        """Every image with a caption, an outdated one too, its source where it has been read: in order of id, row by row."""
        columns = (
            "captions.image_id, captions.size, captions.mtime_ns, captions.inode, text, origin, captions.fingerprint"
        )
        source = "mask, truncated, file_name, f.size, f.mtime_ns, f.inode, f.fingerprint, height, width"
        joined = "captions LEFT JOIN sources f USING (image_id) ORDER BY image_id"
        for r in self._db.execute(f"SELECT {columns}, {source} FROM {joined}"):
            caption = CaptionRow(r[0], _triple(r[1:4]), r[4], r[5], r[6], _mask(r[7]), bool(r[8]))
            yield r[0], SourceRow(r[0], r[9], StatTriple(*r[10:13]), *r[13:]) if r[9] else None, caption

    def changes(self) -> dict[str, set[tuple[str, str]]]:
        """Per image, what was made of it since the last merge: (asset, what)."""
        found: dict[str, set[tuple[str, str]]] = {}
        for item, asset, what in self._db.execute("SELECT item, asset, what FROM changes"):
            found.setdefault(item, set()).add((asset, what))
        return found

    def preview_captions(self) -> set[str]:
        """Images whose caption a preview model made, or may have made: its origin begins with `preview`."""
        return {row[0] for row in self._db.execute("SELECT image_id FROM captions WHERE origin GLOB 'preview*'")}

    def truncated(self) -> int:
        """Captions of which the text encoder sees only the first 77 tokens."""
        return self._db.execute("SELECT count(*) FROM captions WHERE truncated").fetchone()[0]

    def regenerating(self) -> dict[str, str]:
        """Kinds whose files are all being replaced, with how far the beginning got (pipeline/stage2/regenerate.py)."""
        return dict(self._db.execute("SELECT kind, state FROM regenerating"))

    # ---- writes

    def record_sources(self, rows: Iterable[SourceRow]) -> None:
        self._upsert("sources", 8, ((r.image_id, r.file_name, *r.stat, r.fingerprint, r.height, r.width) for r in rows))

    def record_captions(self, rows: Iterable[CaptionRow]) -> None:
        self._upsert(
            "captions",
            9,
            (
                (
                    r.image_id,
                    *(r.stat or _NO_STAT),
                    r.text,
                    r.origin,
                    r.fingerprint,
                    _mask_text(r.mask),
                    int(r.truncated),
                )
                for r in rows
            ),
        )

    def record_captioned(self, rows: Iterable[Captioned]) -> None:
        self._upsert("captioned", 3, ((r.image_id, r.image, r.maker) for r in rows))

    def record_masks(self, rows: Iterable[tuple[str, str, list[int], bool]]) -> None:
        """(image id, caption fingerprint, mask, truncated): only where that is still the caption."""
        with self.transaction():
            self._db.executemany(
                "UPDATE captions SET mask = ?, truncated = ? WHERE image_id = ? AND fingerprint = ?",
                ((_mask_text(mask), int(cut), image_id, fingerprint) for image_id, fingerprint, mask, cut in rows),
            )

    def record_files(self, rows: Iterable[FileRow]) -> None:
        self._upsert("files", 8, ((r.kind, r.image_id, *r.stat, r.source, r.content, r.maker) for r in rows))

    def forget_superseded(self, rows: Iterable[FileRow]) -> None:
        """Drop the rows of files that these have replaced on disk. Call after the rename."""
        with self.transaction():
            self._db.executemany(
                "DELETE FROM files WHERE kind = ? AND image_id = ? AND NOT (size = ? AND mtime_ns = ? AND inode = ?)",
                ((r.kind, r.image_id, *r.stat) for r in rows),
            )

    def record_problems(self, rows: Iterable[Problem]) -> None:
        now = datetime.now(UTC).isoformat(timespec="seconds")
        self._upsert(
            "problems",
            11,
            (
                (r.item, r.asset, r.outcome, r.reason, r.detail, r.remedy, *(r.stat or _NO_STAT), r.run_id, r.at or now)
                for r in rows
            ),
        )

    def clear_problems(self, asset: str, items: Iterable[str]) -> None:
        with self.transaction():
            self._db.executemany("DELETE FROM problems WHERE item = ? AND asset = ?", ((item, asset) for item in items))

    def replace_problems(self, asset: str, rows: Iterable[Problem]) -> None:
        """These are all the problems this asset has now."""
        with self.transaction():
            self._db.execute("DELETE FROM problems WHERE asset = ?", (asset,))
            self.record_problems(rows)

    def record_changes(self, rows: Iterable[tuple[str, str, str]]) -> None:
        """(image id, asset, what was done)."""
        self._upsert("changes", 3, rows)

    def forget_changes(self) -> None:
        with self.transaction():
            self._db.execute("DELETE FROM changes")

    def forget_files(self, kind: str) -> None:
        """The files of this kind are gone, all of them."""
        with self.transaction():
            self._db.execute("DELETE FROM files WHERE kind = ?", (kind,))

    def supersede_files(self, kind: str, state: str) -> None:
        """Vouch for no file of this kind any more, and remember that all are being replaced."""
        with self.transaction():
            self._db.execute("UPDATE files SET maker = ?, source = NULL WHERE kind = ?", (SUPERSEDED, kind))
            self._upsert("regenerating", 2, [(kind, state)])

    def note_regeneration(self, kind: str, state: str | None) -> None:
        """How far it is; None: every file has been replaced, and rows that a kill left of earlier ones go too."""
        with self.transaction():
            self._db.execute("DELETE FROM regenerating WHERE kind = ?", (kind,))
            if state is not None:
                self._upsert("regenerating", 2, [(kind, state)])
            else:
                self._db.execute("DELETE FROM files WHERE kind = ? AND maker = ?", (kind, SUPERSEDED))

    def record_counts(self, run_id: str, asset: str, counts: dict[str, int]) -> None:
        self._upsert("counts", 3, [(run_id, asset, msgspec.json.encode(counts).decode())])

    def record_verified(self, path: Path, signature: str) -> None:
        self._upsert("verified", 2, [(str(path), signature)])

    def withdraw(self, ids: Iterable[str]) -> None:
        now = datetime.now(UTC).isoformat(timespec="seconds")
        self._upsert("withdrawn", 2, ((image_id, now) for image_id in ids))

    def restore(self, ids: Iterable[str]) -> None:
        with self.transaction():
            self._db.executemany("DELETE FROM withdrawn WHERE image_id = ?", ((image_id,) for image_id in ids))

    # ---- claims

    def claim(self, asset: str, items: Sequence[str], run_id: str) -> set[str]:
        """Claim all of these partitions for this process, or none: then the runs of living processes that hold some.

        `[EVERY]` claims the whole asset, partitions that nobody knows yet too.
        """
        owner, met = owner_name(), None if EVERY in items else [*items, EVERY]
        with self.transaction():
            held = set(self._select("claims", "owner, run_id", met, "asset = ?", (asset,), key="item"))
            others = {holder for name, holder in held if name != owner and not is_dead_owner(name)}
            if not others:
                self._upsert("claims", 4, ((asset, item, owner, run_id) for item in items))
        return others

    def release(self, asset: str, run_id: str) -> None:
        with self.transaction():
            self._db.execute(
                "DELETE FROM claims WHERE asset = ? AND owner = ? AND run_id = ?", (asset, owner_name(), run_id)
            )

    def remember_place(self, name: str, path: Path) -> None:
        self._upsert("places", 2, [(name, str(path))])

    # ---- plumbing

    def _select(
        self,
        table: str,
        columns: str,
        ids: Sequence[str] | None,
        where: str = "1",
        given: tuple = (),
        *,
        key: str = "image_id",
    ) -> Iterator[tuple[Any, ...]]:
        if ids is not None:
            # json_each takes any number of ids in one parameter, where IN (?, ?, …) has a limit.
            where, given = (
                f"{where} AND {key} IN (SELECT value FROM json_each(?))",
                (*given, msgspec.json.encode(ids).decode()),
            )
        return self._db.execute(f"SELECT {columns} FROM {table} WHERE {where}", given)

    def _upsert(self, table: str, columns: int, rows: Iterable[tuple]) -> None:
        with self.transaction():
            self._db.executemany(f"INSERT OR REPLACE INTO {table} VALUES ({', '.join('?' * columns)})", rows)


_NO_STAT = (None, None, None)


def _connect(path: Path, read_only: bool) -> sqlite3.Connection:
    if read_only:
        db = sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, timeout=60, isolation_level=None)
        if db.execute("PRAGMA user_version").fetchone()[0] < SCHEMA_VERSION:
            # Of an earlier imagemill, or whoever was about to make it has been stopped.
            db.close()
            _connect(path, read_only=False).close()
            return _connect(path, read_only=True)
        return db
    path.parent.mkdir(parents=True, exist_ok=True)
    db = sqlite3.connect(path, timeout=60, isolation_level=None)
    # FULL: a row is on the disk before the file it vouches for gets its name.
    db.execute("PRAGMA synchronous = FULL")
    version = db.execute("PRAGMA user_version").fetchone()[0]
    if version > SCHEMA_VERSION:
        raise ImagemillError(
            f"the ledger has version {version}, this imagemill knows up to {SCHEMA_VERSION}",
            where=path,
            do="upgrade imagemill",
        )
    if version < SCHEMA_VERSION:
        _make(db, path)
    return db


def _make(db: sqlite3.Connection, path: Path) -> None:
    from filelock import FileLock

    # SQLite fails instead of waiting where two processes turn its write-ahead log on.
    with nullcontext() if path == IN_MEMORY else FileLock(path.with_name(f".{path.name}.lock")):
        db.execute("PRAGMA journal_mode = WAL")
        # At once: nobody meets some of the tables, and a version says that all are there.
        db.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT")


def _triple(columns: Sequence[int | None]) -> StatTriple | None:
    return None if columns[0] is None else StatTriple(*columns)  # type: ignore[arg-type]


def _mask(text: str | None) -> list[int] | None:
    # Stored as "1110…": 77 characters instead of a JSON array.
    return None if text is None else [int(c) for c in text]


def _mask_text(mask: Sequence[int] | None) -> str | None:
    return None if mask is None else "".join("1" if bit else "0" for bit in mask)
