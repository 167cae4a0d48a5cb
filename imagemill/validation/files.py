"""Rules about the npy files of one kind as they lie on disk, with the ledger as witness."""

from collections.abc import Iterator
from typing import Any

from imagemill.errors import InvalidNpy
from imagemill.formats.npy import NpyStore
from imagemill.store.ledger import Ledger
from imagemill.validation.catalogue import finding
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
        try:
            store.check(image_id, source.height, source.width)
        except InvalidNpy as invalid:
            yield finding(invalid.reason, invalid.what, remedy=invalid.do, **at)
        except OSError as error:
            yield finding("read_error", str(error), **at)
