"""What is known of each image of a preset: which raw bytes it was made of, and that nobody touched it since.

    coco/rescale_32_768/.images.jsonl
    {"image": "images/a.jpg", "raw": "posix:<size>:<mtime_ns>:<inode>", "raw_fingerprint": "xxh3:…", "raw_size": [640, 427],
     "made": "posix:…", "made_fingerprint": "xxh3:…", "orientation": 1}

It lies in the preset, not in a data root's ledger: a preset is moved, copied and given away by itself, and public data may lie
outside every data root. It is a cache: without it images are read and adopted. Lines are appended as images get their names;
the last line of an image counts, and a torn one is passed over.

Belongs here: those lines. Belongs elsewhere: who decides by them (rescale.py, rescale_worker.py).
Spec: docs/spec/conventions.md#staleness, docs/spec/presets.md#preset-images
"""

from pathlib import Path

import msgspec

from imagemill.formats.jsonl import read_raw
from imagemill.fs.fingerprints import FileSignature, StoredSignature, file_signature, stored_signature
from imagemill.store.public_data import PresetDir
from imagemill.text.strict_json import NOT_JSON

INDEX = ".images.jsonl"


class KnownImage(msgspec.Struct, frozen=True, kw_only=True):
    """One image: its raw file and its own, as they were when they were last read whole. `raw_size`: (width, height)."""

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
        """Whether both files look as they did; a raw file that is gone makes nothing stale."""
        return _signature(made) == self.made and _signature(raw) in {self.raw, None}


def _signature(path: Path) -> FileSignature | None:
    try:
        return file_signature(path)
    except OSError:
        return None


_decoder = msgspec.json.Decoder(KnownImage)


def read_known(preset: PresetDir) -> dict[str, KnownImage]:
    """Every image's last line, by its path in the preset."""
    path, found = preset.path / INDEX, {}
    for _, raw in read_raw(path) if path.is_file() else ():
        try:
            known = _decoder.decode(raw)
        except NOT_JSON:
            continue  # torn, or not ours: its image is looked at again
        found[known.image] = known
    return found
