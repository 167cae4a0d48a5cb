"""The contents of a data root's folders: images and captions, records, embedding files. Each folder is listed once.

A command lists them once for all its steps; a step of a run in the UI lists them for itself after acquiring its lease.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from imagemill.domain.embedding_specs import EmbeddingSpec, embedding_specs
from imagemill.domain.inputs import NEW_INPUTS, InputSettings
from imagemill.domain.layout import DataRoot
from imagemill.formats.npy import SUFFIX, NpyStore
from imagemill.fs.fingerprints import FileSignature
from imagemill.fs.folders import is_folder
from imagemill.fs.listing import FileListing, start_listing
from imagemill.inputs.scan import ListedFolder, ListingAhead, Scan, list_approved, scan_approved
from imagemill.inputs.survey import differing, survey
from imagemill.pipeline.header_sizes import HeaderSizes
from imagemill.pipeline.stage2.record_index import Recorded, has_many, read_recorded
from imagemill.pipeline.stage2.renames import note_arrivals
from imagemill.store.ledger import ACCEPTED, Ledger
from imagemill.store.locations import refuse_gone


class Settled(NamedTuple):
    """The end of the last command, if it left nothing to do and only the ledger and `approved/` may have changed since.

    Attributes:
        unfinished: images that were not complete then, such as refused ones.
        records: signature of the file of records.
        settings: those of the ledger.
        seen: `Ledger.last_row_change`.
    """

    unfinished: Set[str]
    records: str | None
    settings: Mapping[str, str]
    seen: int


@dataclass(slots=True)
class Inventory:
    """The contents of a data root's folders, each listed on first use.

    Attributes:
        root: the data root.
        ledger_version: `Ledger.version_seen` before the listing.
        listed: the result of `files`, for the kinds that it was called for.
        outdated: kinds of which files have been made since their folder was listed.
        records_state: signatures of the file of records when its captions were adopted.
        in_force: kind as declared → kind with the data root's settings and contract.
        inputs: how `approved/` is read.
        ended: former ids of renamed images whose records are not written yet; `recorded` does not contain them.
        kept: the last plans that were made of this listing (current_plans.py).
        surveyed: whether the captions beside the images have been read.
        worked_on: images whose rows and files steps may have changed since the listing.
        compared: by kind, the images whose listed file is the one that its row describes, as planning found, see `unchanged`.
        header_sizes: sizes of images that no pass had opened when the command was planned.
        swept: kinds whose folder a step has cleared of the files of dead processes.
        ahead: kinds that `list_ahead` lists, and the iterator that waits for their listings.
        approved_ahead: the process that lists `approved/`, see `listing_ahead`.
        settled: what is known from the end of the last command, see `in_question`; None if nothing is.
    """

    root: DataRoot
    ledger_version: int = 0
    _approved: ListedFolder | None = None
    listed: dict[EmbeddingSpec, FileListing] = field(default_factory=dict)
    outdated: set[str] = field(default_factory=set)
    records_state: tuple[FileSignature | None, FileSignature | None] = (None, None)
    in_force: Callable[[EmbeddingSpec], EmbeddingSpec] = lambda spec: spec
    inputs: InputSettings = NEW_INPUTS
    ended: frozenset[str] = frozenset()
    kept: Any = None
    surveyed: bool = False
    worked_on: set[str] = field(default_factory=set)
    compared: dict[str, set[str]] = field(default_factory=dict)
    header_sizes: HeaderSizes = field(default_factory=HeaderSizes)
    swept: set[str] = field(default_factory=set)
    ahead: tuple[list[EmbeddingSpec], Iterator[FileListing]] | None = None
    approved_ahead: ListingAhead | None = None
    settled: Settled | None = None
    _differing: Set[str] | None = None

    @property
    def approved(self) -> ListedFolder:
        """The entries of `approved/`; none without that folder if there is a ledger (public data or Stage A only)."""
        if self._approved is None:
            refuse_gone(self.root, "approved")
            listed = is_folder(self.root.approved) or not self.root.ledger.exists()
            self._approved = self._list_approved() if listed else ListedFolder([], self.inputs)
        return self._approved

    def _list_approved(self) -> ListedFolder:
        if self.approved_ahead:
            return self.approved_ahead.listed()
        return list_approved(self.root.approved, self.inputs, self.root.other_folders)

    @contextmanager
    def listing_ahead(self) -> Iterator[Callable[[], str]]:
        """Begin to list `approved/`, in another process if there are many records, and yield the function that gives its digest.

        Within the block, `approved` takes its entries from that process.
        """
        folder = self.root.approved
        if self._approved is not None or not isinstance(folder, Path) or not has_many(self.root.stage2_jsonl):
            yield lambda: self.approved.digest
            return
        with ListingAhead(folder, self.inputs, self.root.other_folders) as ahead:
            self.approved_ahead = ahead
            try:
                yield ahead.digest
            finally:
                self.approved_ahead = None

    @property
    def scan(self) -> Scan:
        """Images and captions of `approved/`."""
        return self.approved.scan

    def scan_of(self, ids: Collection[str]) -> Scan:
        """Return the entries of `approved/` with these image ids, as `scan` does for all. Listed at each call."""
        refuse_gone(self.root, "approved")
        listed = is_folder(self.root.approved) or not self.root.ledger.exists()
        return scan_approved(self.root.approved, self.inputs, ids, self.root.other_folders) if listed else Scan({}, [])

    def survey(self, ledger: Ledger) -> None:
        """List `approved/` unless it has been listed, read the captions that are new, and record both in the ledger.

        New images are compared with those that are gone.

        Raises:
            MissingInput: if the folder does not exist.
        """
        self._approved = self._approved or self._list_approved()
        scan = self._approved.scan
        # A table that precedes caption files may change captions of any image, whose files are then read again.
        among = None if any(table.first for table in scan.metadata) else self.in_question(ledger)
        survey(self.root.approved, ledger, scan, inputs=self.inputs, among=among)
        self.surveyed = True
        note_arrivals(scan, ledger)
        self.ended = frozenset(rename.former for rename in ledger.renames(ACCEPTED))

    def in_question(self, ledger: Ledger) -> set[str] | None:
        """Return images of which something may be missing or outdated. All others have a caption, a record and every file.

        Returns:
            ids, also of images that are gone; None if all images may be, or so many that comparing all takes less time.
        """
        settled = self.settled
        if settled is None or ledger.settings() != settled.settings:
            return None
        changed = ledger.row_changes_after(settled.seen)
        if changed is None:
            return None
        if self._differing is None:
            self._differing = differing(self.scan, ledger)
        found = changed.union(self._differing, settled.unfinished, self.worked_on)
        return found if 4 * len(found) < len(self.scan.sources) else None

    @property
    def recorded(self) -> Recorded:
        """The index of the records, as they are now."""
        return read_recorded(self.root.stage2_jsonl).without(self.ended)

    def store(self, spec: EmbeddingSpec) -> NpyStore:
        """Return the npy store of a kind."""
        return NpyStore(self.root.derived / spec.folder, self.in_force(spec))

    def list_ahead(self) -> None:
        """Begin to list the folders of all kinds in another process, if there are many records. `files` waits for it."""
        if not self.listed and has_many(self.root.stage2_jsonl):
            stores = [self.store(spec) for spec in embedding_specs()]
            self.ahead = [store.spec for store in stores], start_listing([store.folder for store in stores], SUFFIX)

    def files(self, spec: EmbeddingSpec) -> FileListing:
        """Return the signature of each file of a kind by image id."""
        if self.ahead:
            (specs, listings), self.ahead = self.ahead, None
            self.listed.update(zip(specs, listings, strict=True))
        if spec not in self.listed:
            self.listed[spec] = self.store(spec).listing(like=next(reversed(self.listed.values()), None))
        return self.listed[spec]

    def current_files(self, spec: EmbeddingSpec) -> FileListing:
        """Return `files` with those that steps have made since the folder was listed."""
        self._refresh([spec.kind])
        return self.files(spec)

    def unchanged(self, spec: EmbeddingSpec) -> Set[str]:
        """Return images whose file in `current_files` is known to be the one that its row describes; not all of them."""
        self._refresh([spec.kind])
        compared = self.compared.get(spec.kind, set())
        compared -= self.worked_on
        return compared

    def refresh(self) -> None:
        """Bring the listings of all kinds up to date in which steps have made files since."""
        self._refresh(list(self.outdated))

    def _refresh(self, kinds: Collection[str]) -> None:
        """Look up the files of the images that steps have worked on; list the folder if they are more than a tenth."""
        for spec in [spec for spec in self.listed if spec.kind in self.outdated and spec.kind in kinds]:
            listing = self.listed.pop(spec)
            if 10 * len(self.worked_on) < len(listing):
                found, others = self.store(spec).signatures(self.worked_on), list(self.listed.values())
                self.listed[spec] = listing.renewed(self.worked_on, found, others)
            else:
                self.compared.pop(spec.kind, None)
        self.outdated.difference_update(kinds)
