"""Validation of the npy files of one kind on disk, using the ledger's rows."""

from collections.abc import Iterator, Mapping, Set
from typing import Any

from imagemill.domain.ids import id_problem
from imagemill.formats.npy import NpyStore
from imagemill.fs.fingerprints import FileSignature
from imagemill.parts import in_parts
from imagemill.store.ledger import Ledger
from imagemill.validation.catalogue import finding
from imagemill.validation.contents import check_file
from imagemill.validation.findings import Finding


def embedding_files(
    store: NpyStore,
    ledger: Ledger,
    listing: Mapping[str, FileSignature] | None = None,
    unchanged: Set[str] = frozenset(),
) -> Iterator[Finding | int]:
    """Check every file of a kind.

    A file whose signature matches its ledger row was read in full before and is not read again.

    Args:
        store: folder of the kind.
        ledger: rows of images and files.
        listing: the files that exist; unset: they are listed.
        unchanged: images whose files are known to be those that their rows describe.
    """
    kind, listing = store.spec.kind, store.listing() if listing is None else listing
    yield len(listing)
    names = listing.keys() - unchanged
    # One or two columns of the rows between two ids are read twice as fast as the rows of a list of ids.
    few = 4 * len(names) < len(listing)
    for part in in_parts(sorted(names)):
        # Others, such as names that are not Unicode, are ids of no image.
        ids = [name for name in part if not id_problem(name)] or [""]
        unknown = set(part) - (ledger.sources(ids).keys() if few else ledger.source_ids((ids[0], ids[-1])))
        recorded = ledger.files(kind, ids).keys() if few else ledger.file_states(kind, ids[0], ids[-1])
        unread = {image_id for image_id in part if (image_id, listing[image_id]) not in recorded} - unknown
        sources = ledger.sources(sorted(unread))
        for image_id in sorted(unknown | unread):
            at: dict[str, Any] = {"file": store.folder.name, "item": image_id}
            if image_id in unknown:
                yield finding("unknown_image", "a file of an unknown image", **at)
                continue
            source = sources[image_id]
            yield from check_file(store, image_id, (source.height, source.width), at)
