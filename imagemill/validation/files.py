"""Rules about the npy files of one kind as they lie on disk, with the ledger as witness."""

from collections.abc import Iterator
from typing import Any

from imagemill.formats.npy import NpyStore
from imagemill.store.ledger import Ledger
from imagemill.validation.catalogue import finding
from imagemill.validation.contents import check_file
from imagemill.validation.findings import Finding


def embedding_files(store: NpyStore, ledger: Ledger) -> Iterator[Finding | int]:
    """Every file of a kind. One whose stat triple the ledger vouches for has been read whole before and is not again."""
    sources, rows = ledger.sources(), ledger.files(store.spec.kind)
    for image_id, stat in sorted(store.listing().items()):
        yield 1
        at: dict[str, Any] = {"file": store.folder.name, "item": image_id}
        source = sources.get(image_id)
        if source is None:
            yield finding("unknown_image", "a file of an image that was never seen", **at)
            continue
        if (image_id, stat) in rows:
            continue
        yield from check_file(store, image_id, (source.height, source.width), at)
