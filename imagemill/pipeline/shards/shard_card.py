"""What stands beside the buckets for people and their tools: a dataset card, and energon's blend of all buckets.

    shards/
    ├─ README.md            the card: counts, members, models, histograms, how to read; front matter for `load_dataset`
    ├─ metadataset.yaml     for Megatron-Energon: every bucket, weighted by its samples
    └─ bucket_<bucket>/ …

Both are made of the buckets' manifests alone, and hold no date: equal sets, equal bytes. Files of these names that are not ours
stay as they are; the card is then `DATASET_CARD.md`. Ours carry a line that says so.

Belongs here: which sets are told about, which file is ours.
Belongs elsewhere: the card's words (card_sections.py), counting (shard_statistics.py), energon's formats (formats/energon.py).
Source: CONTRACTS section 2.
"""

from contextlib import suppress
from pathlib import Path

from imagemill.atomic import write_bytes_atomic
from imagemill.buckets import BUCKETS
from imagemill.formats.energon import METADATASET, metadataset
from imagemill.pipeline.shards.card_sections import Set, card
from imagemill.pipeline.shards.shard_sets import bucket_folder, read_manifest, read_tombstones

CARD = "README.md"
# Where somebody wrote a README of their own.
OTHER_CARD = "DATASET_CARD.md"

MARKER = "Written by imagemill, again after every run. Remove this line to keep the file as it is."


def read_sets(output: Path) -> list[Set]:
    """Every bucket's set that is there and ours, in the buckets' order."""
    folders = ((bucket, bucket_folder(output, bucket)) for bucket in BUCKETS)
    found = ((bucket, folder, read_manifest(folder)) for bucket, folder in folders)
    return [Set(bucket, manifest, read_tombstones(folder)) for bucket, folder, manifest in found if manifest]


def write_beside(output: Path, *, licence: str | None = None) -> None:
    """Both, until they tell of the sets that are there: a run that packs other buckets may publish one at any moment."""
    told = None
    while (sets := read_sets(output)) != told:
        write_card(output, licence=licence)
        write_metadataset(output)
        told = sets


def write_card(output: Path, *, licence: str | None = None) -> Path | None:
    """Write the card of the sets below `output` as they are now; without sets there is none.

    Args:
        licence: the data's licence by its id on the hub (`cc-by-4.0`), from the configuration.

    Returns:
        The card's path: another name than README.md where that one is somebody else's; None where nothing could be said.
    """
    sets = read_sets(output)
    place = next((path for path in (output / CARD, output / OTHER_CARD) if _may_be_written(path)), None)
    for path in (output / CARD, output / OTHER_CARD):
        if (path != place or not sets) and _is_ours(path):
            path.unlink()
    if place is None or not sets:
        return None
    _write(place, card(sets, MARKER, licence).encode())
    return place


def write_metadataset(output: Path) -> Path | None:
    """Write energon's blend of the buckets below `output`; None where there are none, or the file is somebody else's."""
    weights = {bucket_folder(output, one.bucket).name: one.samples for one in read_sets(output)}
    path = output / METADATASET
    if not _may_be_written(path):
        return None
    if not weights:
        path.unlink(missing_ok=True)
        return None
    _write(path, f"# {MARKER}\n".encode() + metadataset(weights))
    return path


def _is_ours(path: Path) -> bool:
    with suppress(OSError):
        return not path.is_symlink() and MARKER.encode() in path.read_bytes()
    return False


def _may_be_written(path: Path) -> bool:
    return _is_ours(path) or not (path.exists() or path.is_symlink())


def _write(path: Path, content: bytes) -> None:
    if not path.exists() or path.read_bytes() != content:
        write_bytes_atomic(path, content)
