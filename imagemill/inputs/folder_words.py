"""Captions from the names of folders: `10_sks dog/a.jpg` gives `sks dog`.

Spec: docs/spec/stage2.md#caption-sources
"""

from collections.abc import Collection

from imagemill.domain.inputs import InputSettings, folder_words
from imagemill.inputs.scan import Scan
from imagemill.inputs.sidecars import caption_row, unusable_sidecars
from imagemill.store.ledger import FROM_CAPTIONER, FROM_FOLDER, FROM_PREVIEW, CaptionKey, Ledger

# Origins of captions that the name of a folder replaces.
_LOWER: Collection[str] = frozenset({FROM_FOLDER, FROM_CAPTIONER, FROM_PREVIEW})


def caption_by_folder(scan: Scan, ledger: Ledger, inputs: InputSettings) -> None:
    """Record the names of folders as captions of the images without a higher source, if `captions.folder` is set."""
    if not inputs.folder:
        return
    keys, unusable = ledger.caption_keys(), unusable_sidecars(ledger)
    rows = (
        row
        for image_id, source in scan.sources.items()
        if image_id not in unusable
        and (words := folder_words(source.file_name))
        and _is_lower(keys.get(image_id), (row := caption_row(image_id, words, FROM_FOLDER)).fingerprint)
    )
    with ledger.transaction():
        ledger.record_captions(rows)


def _is_lower(key: CaptionKey | None, words: str) -> bool:
    if key is None:
        return True
    return key.origin in _LOWER and (key.origin, key.fingerprint) != (FROM_FOLDER, words)
