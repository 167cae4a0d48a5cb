"""`arrivals` and `renames`: images that may have been renamed, and renames that the user has accepted.

Which images were renamed is decided in pipeline/stage2/renames.py.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Final, NamedTuple

import msgspec

from imagemill.store.ledger.captions import CAPTIONED, CAPTIONS, RECORDED_CAPTIONS, CaptionRow
from imagemill.store.ledger.database import Database
from imagemill.store.ledger.sources import ARRIVALS, SOURCES, Arrival
from imagemill.store.ledger.table import Table
from imagemill.store.ledger.withdrawals import MARKS, WITHDRAWN

# States of an accepted rename: the records have the former id, the records are written, nothing is left to do.
ACCEPTED: Final = "accepted"
RECORDED: Final = "recorded"
DONE: Final = "done"

# Tables with rows of an image that end with its name. Those of its files stay, as the files do.
_ENDED: Final = (SOURCES, CAPTIONS, CAPTIONED, RECORDED_CAPTIONS, ARRIVALS, WITHDRAWN, MARKS)


class Rename(msgspec.Struct, frozen=True):
    """An accepted rename.

    Attributes:
        former: the id that ended.
        image_id: the id that the image has now.
        at: time of the acceptance, UTC, ISO 8601.
        state: one of the constants above.
    """

    former: str
    image_id: str
    at: str
    state: str = ACCEPTED


class Takeover(NamedTuple):
    """One rename to accept. `caption`: the former caption under the new id, if it is taken over."""

    former: str
    image_id: str
    caption: CaptionRow | None = None


RENAMES = Table("renames", Rename)


class Renames(Database):
    """Reads and writes of renames."""

    def arrivals(self) -> dict[str, str]:
        """Return the time by image id of images that were new while an equal one was gone, and of those that were gone.

        The time is empty for a new image that has not been compared with others yet.
        """
        return {row.image_id: row.at for row in self._select(ARRIVALS)}

    def note_arrivals(self, compared: Iterable[str], equal: Iterable[str]) -> None:
        """Record the result of a comparison.

        Args:
            compared: new images.
            equal: those of them with the bytes of an image that is gone, and that image.
        """
        now = datetime.now(UTC).isoformat(timespec="microseconds")
        with self.transaction():
            self._delete("arrivals", compared, "at = ''")
            self._insert(ARRIVALS, (Arrival(each, now) for each in equal))

    def renames(self, state: str | None = None) -> list[Rename]:
        """Return the accepted renames, or those in one state, in the order of their acceptance."""
        where, given = ("1", ()) if state is None else ("state = ?", (state,))
        return sorted(self._select(RENAMES, where=where, given=given), key=lambda row: (row.at, row.former))

    def rename_of(self, former: str) -> Rename | None:
        """Return the accepted rename of an id, if there is one."""
        return next(self._select(RENAMES, [former], key="former"), None)

    def accept_renames(self, taken: Sequence[Takeover]) -> None:
        """End the former ids, in one transaction; the new ones take over captions, withdrawals, marks and times.

        An earlier rename to a former id becomes one to the new id.
        """
        now = datetime.now(UTC).isoformat(timespec="microseconds")
        new = {each.former: each.image_id for each in taken}
        with self.transaction():
            self._insert(CAPTIONS, (each.caption for each in taken if each.caption))
            for table, columns in (("captioned", "image, maker, cut_off"), ("withdrawn", "at"), ("marks", "at")):
                # Only with its caption does an image take over which model wrote it.
                pairs = [each for each in taken if each.caption or table != "captioned"]
                self._change_each(
                    f"INSERT OR REPLACE INTO {table} SELECT ?, {columns} FROM {table} WHERE image_id = ?",
                    ((each.image_id, each.former) for each in pairs),
                )
            self._change_each(
                "UPDATE sources SET (added_at, changed_at, run_id) ="
                " (SELECT added_at, changed_at, run_id FROM sources WHERE image_id = ?) WHERE image_id = ?",
                ((each.former, each.image_id) for each in taken),
            )
            for table in _ENDED:
                self._delete(table.name, new)
            self._delete("problems", new, key="item")
            self._delete("changes", new, key="item")
            self._delete("arrivals", new.values())
            self._change_each(
                "UPDATE renames SET image_id = ? WHERE image_id = ?", ((now_id, old) for old, now_id in new.items())
            )
            self._insert(RENAMES, (Rename(former, image_id, now) for former, image_id in new.items()))
            self._delete("renames", new.values(), key="former")

    def advance_renames(self, former: Collection[str], state: str) -> None:
        """Change the state of renames."""
        self._change_each("UPDATE renames SET state = ? WHERE former = ?", ((state, each) for each in former))

    def forget_renames(self, former: Iterable[str]) -> None:
        """Delete renames whose records are written, because there is an image with the former id again."""
        self._delete("renames", former, "state != ?", (ACCEPTED,), key="former")

    def copy_masks(self, donors: Mapping[str, str]) -> None:
        """Give captions the mask of another image's equal caption.

        Args:
            donors: id of the image to copy from, by that of the image whose caption lacks a mask.
        """
        self._change_each(
            "UPDATE captions SET (mask, truncated) = (SELECT d.mask, d.truncated FROM captions d WHERE d.image_id = ?)"
            " WHERE image_id = ? AND mask IS NULL"
            " AND fingerprint = (SELECT d.fingerprint FROM captions d WHERE d.image_id = ?)",
            ((donor, image_id, donor) for image_id, donor in donors.items()),
        )
