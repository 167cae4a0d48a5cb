"""`summaries`: finished Stage-A summaries, so that no image is inferred twice."""

from collections.abc import Iterable, Iterator
from typing import Annotated

import msgspec

from imagemill.fs.fingerprints import StoredSignature, stored_signature
from imagemill.store.ledger.database import Database
from imagemill.store.ledger.table import Table


class FinishedSummary(msgspec.Struct, frozen=True, gc=False):
    """One summary: a row of the table, and a line of the files that ranks read.

    Attributes:
        fingerprint: of file name, file bytes and summarizer.
        summary: the text.
        mission: of the image.
        image: the file, relative to the mission's folder.
        stat: the file's signature when it was read, None if unknown.
        content: fingerprint of its bytes, empty if unknown.
        at: when the summary was made, in nanoseconds since 1970.
    """

    fingerprint: str
    summary: str
    mission: str = ""
    image: str = ""
    stat: StoredSignature | None = None
    content: str = ""
    at: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)] = 0

    def __post_init__(self) -> None:
        if self.stat is not None:
            msgspec.structs.force_setattr(self, "stat", stored_signature(self.stat))


SUMMARIES = Table("summaries", FinishedSummary)

_KEEP_NEWER = (
    " ON CONFLICT (mission, fingerprint, image) DO UPDATE SET summary = excluded.summary, stat = excluded.stat,"
    " content = excluded.content, at = excluded.at WHERE excluded.at > summaries.at"
)


class Summaries(Database):
    """Reads and writes of finished summaries."""

    def has_summaries(self, mission: str) -> bool:
        """Return whether a mission has summaries."""
        return self._one("SELECT 1 FROM summaries WHERE mission = ? LIMIT 1", (mission,)) is not None

    def summaries(self, mission: str) -> Iterator[FinishedSummary]:
        """Yield a mission's summaries, the newest last."""
        return self._select(SUMMARIES, where="mission = ? ORDER BY at, fingerprint, image", given=(mission,))

    def record_summaries(self, rows: Iterable[FinishedSummary]) -> int:
        """Record rows that are new, or newer than the recorded ones; return their number."""
        return self._insert_each(SUMMARIES.insert + _KEEP_NEWER, SUMMARIES.values(rows))

    def thin_summaries(self, mission: str, per_image: int) -> None:
        """Keep the newest `per_image` summaries of each image.

        Also delete rows without a file's signature if a newer row has the same fingerprint.
        """
        self._change(
            "DELETE FROM summaries WHERE mission = ?1 AND stat IS NULL AND EXISTS (SELECT 1 FROM summaries other"
            " WHERE other.mission = ?1 AND other.fingerprint = summaries.fingerprint"
            " AND (other.at, other.image) > (summaries.at, summaries.image))",
            (mission,),
        )
        self._change(
            "DELETE FROM summaries WHERE mission = ?1 AND (fingerprint, image) IN (SELECT fingerprint, image FROM ("
            " SELECT fingerprint, image, row_number() OVER (PARTITION BY image ORDER BY at DESC, fingerprint) AS nth"
            " FROM summaries WHERE mission = ?1) WHERE nth > ?2)",
            (mission, per_image),
        )
