"""The contents of a data root's folders: images and captions, records, embedding files. Each folder is listed once.

A command lists them once for all its steps; a step of a run in the UI lists them for itself after acquiring its lease.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from imagemill.domain.embedding_specs import EmbeddingSpec
from imagemill.domain.inputs import NEW_INPUTS, InputSettings
from imagemill.domain.layout import DataRoot
from imagemill.formats.npy import NpyStore
from imagemill.fs.fingerprints import FileSignature
from imagemill.inputs.scan import Scan, scan_approved
from imagemill.inputs.survey import survey
from imagemill.pipeline.stage2.record_index import Recorded, read_recorded
from imagemill.pipeline.stage2.renames import note_arrivals
from imagemill.store.ledger import ACCEPTED, Ledger
from imagemill.store.locations import refuse_gone


@dataclass(slots=True)
class Inventory:
    """The contents of a data root's folders, each listed on first use.

    Attributes:
        root: the data root.
        ledger_version: `Ledger.version_seen` before the listing.
        listed: the result of `files`, for the kinds that it was called for.
        in_force: kind as declared → kind with the data root's settings and contract.
        inputs: how `approved/` is read.
        ended: former ids of renamed images whose records are not written yet; `recorded` does not contain them.
        kept: the last plans that were made of this listing, and the state that they depend on (pipeline/accounting.py).
    """

    root: DataRoot
    ledger_version: int = 0
    _scan: Scan | None = None
    listed: dict[EmbeddingSpec, Mapping[str, FileSignature]] = field(default_factory=dict)
    in_force: Callable[[EmbeddingSpec], EmbeddingSpec] = lambda spec: spec
    inputs: InputSettings = NEW_INPUTS
    ended: frozenset[str] = frozenset()
    kept: tuple[object, Any] | None = None

    @property
    def scan(self) -> Scan:
        """Images and captions of `approved/`; empty without that folder if there is a ledger (public data or Stage A only)."""
        if self._scan is None:
            self._scan = self.scan_of(None)
        return self._scan

    def scan_of(self, ids: Collection[str] | None) -> Scan:
        """Return the entries of `approved/` with these image ids, as `scan` does for all (None). Listed at each call."""
        refuse_gone(self.root, "approved")
        listed = self.root.approved.is_dir() or not self.root.ledger.exists()
        return scan_approved(self.root.approved, self.inputs, ids, self.root.other_folders) if listed else Scan({}, [])

    def survey(self, ledger: Ledger) -> None:
        """List `approved/` unless it has been listed, read the captions that are new, and record both in the ledger.

        New images are compared with those that are gone.

        Raises:
            MissingInput: if the folder does not exist.
        """
        scan = self._scan or scan_approved(self.root.approved, self.inputs, None, self.root.other_folders)
        self._scan = survey(self.root.approved, ledger, scan, inputs=self.inputs)
        note_arrivals(self._scan, ledger)
        self.ended = frozenset(rename.former for rename in ledger.renames(ACCEPTED))

    @property
    def recorded(self) -> Recorded:
        """The index of the records, as they are now."""
        return read_recorded(self.root.stage2_jsonl).without(self.ended)

    def store(self, spec: EmbeddingSpec) -> NpyStore:
        """Return the npy store of a kind."""
        return NpyStore(self.root.derived / spec.folder, self.in_force(spec))

    def files(self, spec: EmbeddingSpec) -> Mapping[str, FileSignature]:
        """Return the signature of each file of a kind by image id."""
        if spec not in self.listed:
            self.listed[spec] = self.store(spec).listing()
        return self.listed[spec]
