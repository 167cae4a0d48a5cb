"""The ledger: facts about each image, and why it did or did not reach the output. One SQLite file per data root.

There is one module per table, with its typed rows, reads and writes; `schema.py` has the numbered upgrades. SQL belongs
nowhere else. Decisions based on the rows are made in pipeline/.
"""

from collections.abc import Collection, Mapping, Sequence
from enum import Enum
from typing import Any, Literal

from imagemill.store.ledger.captions import (
    CAPTIONED,
    CAPTIONS,
    FROM_CAPTIONER,
    FROM_FOLDER,
    FROM_METADATA,
    FROM_PREVIEW,
    FROM_PREVIEW_RECORD,
    FROM_RECORD,
    FROM_SIDECAR,
    RECORDED_CAPTIONS,
    Captioned,
    CaptionKey,
    CaptionRow,
    Captions,
    fingerprint_texts,
)
from imagemill.store.ledger.counts import CHANGES, COUNTS, Counts
from imagemill.store.ledger.database import IN_MEMORY, LedgerDamaged, one_of
from imagemill.store.ledger.files import FILES, SUPERSEDED, FileRow, Files
from imagemill.store.ledger.inputs import INPUTS
from imagemill.store.ledger.leases import EVERY, LEASES, Lease, LeaseLost, Leases
from imagemill.store.ledger.problems import DECISIONS, PROBLEMS, Problem, Problems
from imagemill.store.ledger.recent import CHANGES_SINCE, GONE, SOLVED, Recent
from imagemill.store.ledger.regeneration import SUPERSEDED_FILES, Regenerations
from imagemill.store.ledger.renames import ACCEPTED, DONE, RECORDED, RENAMES, Rename, Renames, Takeover
from imagemill.store.ledger.row_changes import MERGED, PACKED, ROW_CHANGES, MergedRecords, PackedSets, RowChanges
from imagemill.store.ledger.schema import VERSION
from imagemill.store.ledger.settings import BEGUN, HISTORY, ROOT_ID, SETTINGS
from imagemill.store.ledger.sources import ARRIVALS, SOURCES, SourceRow, Sources
from imagemill.store.ledger.stamps import RUNS
from imagemill.store.ledger.summaries import SUMMARIES, FinishedSummary, Summaries
from imagemill.store.ledger.table import Table
from imagemill.store.ledger.verified import VERIFIED, VerifiedSets
from imagemill.store.ledger.withdrawals import MARKS, WITHDRAWN, Withdrawals

_TABLES: tuple[Table[Any], ...] = (
    SOURCES, CAPTIONS, CAPTIONED, RECORDED_CAPTIONS, FILES, SUPERSEDED_FILES, PROBLEMS, COUNTS, CHANGES, SETTINGS,
    WITHDRAWN, LEASES, VERIFIED, SUMMARIES, ARRIVALS, RENAMES, RUNS, SOLVED, GONE, MARKS,
    ROW_CHANGES, MERGED, PACKED, INPUTS,
)  # fmt: skip


class ValueRule(Enum):
    """A rule for the values of a column: a text that is not blank, a text with a colon, a positive integer.

    The value is a condition of SQL that proves the rule; a value that it does not prove may keep the rule as well.
    """

    TEXT = "typeof({0}) = 'text' AND {0} GLOB '*[!-~]*'"
    FINGERPRINT = "typeof({0}) = 'text' AND instr({0}, ':')"
    POSITIVE = "typeof({0}) = 'integer' AND {0} > 0"


# A rule, or the texts that a column may contain.
ColumnRule = ValueRule | tuple[str, ...]


class Ledger(
    Sources,
    Captions,
    Files,
    Problems,
    Counts,
    Regenerations,
    Withdrawals,
    Leases,
    VerifiedSets,
    Summaries,
    Renames,
    Recent,
    RowChanges,
):
    """One connection to a data root's ledger. Use as a context manager; `transaction()` groups writes."""

    def check(self) -> str | None:
        """Read every page and every row of every table; return the problems found, or None."""
        problems = [text for (text,) in self._rows("PRAGMA integrity_check(3)") if text != "ok"]
        for table in _TABLES:
            for _ in self._select(table):
                pass
        return "; ".join(problems) or None

    def cells(self, table: str, columns: Sequence[str]) -> list[tuple[Any, ...]]:
        """Return these columns of every row of a table, as stored."""
        return list(self._rows(f"SELECT {', '.join(columns)} FROM {table}"))

    def unusual_rows(
        self,
        table: str,
        columns: Mapping[str, ColumnRule],
        among: Collection[str] | None = None,
        *,
        key: str = "image_id",
    ) -> tuple[int, list[tuple[Any, ...]]]:
        """Return the number of a table's rows, and these columns, as stored, of each row that may break a rule.

        `among`: the values of the column `key` in the only rows that may; None: all rows may.
        """
        conditions, given = [], []
        for name, rule in columns.items():
            if isinstance(rule, ValueRule):
                conditions.append(rule.value.format(name))
            else:
                conditions.append(f"{name} IN ({', '.join('?' * len(rule))})")
                given += rule
        count = self._one(f"SELECT count(*) FROM {table}")
        chosen, values = one_of(among, key)
        where = f"({' AND '.join(conditions)}) IS NOT TRUE AND {chosen}"
        rows = self._rows(f"SELECT {', '.join(columns)} FROM {table} WHERE {where}", (*given, *values))
        return (count[0] if count else 0), list(rows)

    def ids(self, table: Literal["sources", "captions", "withdrawn"]) -> set[str]:
        """Return the image ids of a table."""
        return {image_id for (image_id,) in self._rows(f"SELECT image_id FROM {table}")}


__all__ = [
    "ACCEPTED", "BEGUN", "CHANGES_SINCE", "DECISIONS", "DONE", "EVERY", "FROM_CAPTIONER", "FROM_FOLDER", "FROM_METADATA",
    "FROM_PREVIEW", "FROM_PREVIEW_RECORD", "FROM_RECORD", "FROM_SIDECAR", "HISTORY", "IN_MEMORY", "RECORDED", "ROOT_ID",
    "SUPERSEDED", "VERSION",
    "CaptionKey", "CaptionRow", "Captioned", "ColumnRule", "FileRow", "FinishedSummary", "Lease", "LeaseLost",
    "Ledger", "LedgerDamaged",
    "MergedRecords", "PackedSets", "Problem", "Rename", "SourceRow", "Takeover", "ValueRule", "fingerprint_texts",
]  # fmt: skip
