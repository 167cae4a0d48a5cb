"""Validation of the npy files of one kind on disk, using the ledger's rows."""

from collections.abc import Iterator
from typing import Any

from imagemill.formats.npy import NpyStore
from imagemill.store.ledger import Ledger
from imagemill.validation.catalogue import finding
from imagemill.validation.contents import check_file
from imagemill.validation.findings import Finding


def embedding_files(store: NpyStore, ledger: Ledger) -> Iterator[Finding | int]:
    """Check every file of a kind.

    A file whose signature matches its ledger row was read in full before and is not read again.
    """
    sources, rows = ledger.sources(), ledger.files(store.spec.kind)
    for image_id, stat in sorted(store.listing().items()):
        yield 1
        at: dict[str, Any] = {"file": store.folder.name, "item": image_id}
        source = sources.get(image_id)
        if source is None:
            yield finding("unknown_image", "a file of an unknown image", **at)
            continue
        if (image_id, stat) in rows:
            continue
        yield from check_file(store, image_id, (source.height, source.width), at)
