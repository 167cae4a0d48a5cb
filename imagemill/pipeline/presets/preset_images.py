"""Index of a preset's images: the raw bytes that each was made from, and its signature.

    coco/rescale_32_768/.images.jsonl
    {"image": "images/a.jpg", "raw": "posix:<size>:<mtime_ns>:<inode>", "raw_fingerprint": "xxh3:…", "raw_size": [640, 427],
     "made": "posix:…", "made_fingerprint": "xxh3:…", "orientation": 1}

The index is in the preset rather than in a data root's ledger, because presets are moved and copied by themselves, and
public data may be outside every data root. It is a cache: without it images are read and adopted. Lines are appended as
images get their names. The last line of an image counts; a torn line is ignored.

Decisions based on the index are made in rescale_plan.py and rescale_worker.py.

Spec: docs/spec/conventions.md#staleness, docs/spec/presets.md#preset-images
"""

from pathlib import Path

import msgspec

from imagemill.formats.jsonl import read_raw
from imagemill.fs.fingerprints import StoredSignature, signature_if_there, stored_signature
from imagemill.store.public_data import PresetDir
from imagemill.text.strict_json import NOT_JSON

INDEX = ".images.jsonl"


class KnownImage(msgspec.Struct, frozen=True, kw_only=True):
    """One image: its raw file and its own file, as they were at the last full read. `raw_size`: (width, height)."""

    image: str
    raw: StoredSignature
    raw_fingerprint: str
    raw_size: tuple[int, int]
    made: StoredSignature
    made_fingerprint: str
    orientation: int = 1

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "raw", stored_signature(self.raw))
        msgspec.structs.force_setattr(self, "made", stored_signature(self.made))

    def stands(self, raw: Path, made: Path) -> bool:
        """Return whether both files have their recorded signatures; a missing raw file does not make the image stale."""
        return signature_if_there(made) == self.made and signature_if_there(raw) in {self.raw, None}


_decoder = msgspec.json.Decoder(KnownImage)


def read_known(preset: PresetDir) -> dict[str, KnownImage]:
    """Return the last entry of every image, by its path in the preset."""
    path, found = preset.path / INDEX, {}
    for _, raw in read_raw(path) if path.is_file() else ():
        try:
            known = _decoder.decode(raw)
        except NOT_JSON:
            continue  # a torn or foreign line: its image is checked again
        found[known.image] = known
    return found
