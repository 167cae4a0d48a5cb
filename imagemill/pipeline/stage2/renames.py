"""Renamed images: which new image is which earlier one.

    images that are gone ──┐
                           ├──equal bytes──> pairs, and images that are gone without a pair
    images that are new ───┘

An image is new if it was first read while an image with the same bytes was gone. A copy beside its original is not new in this
sense, so the deletion of one of two equal images is no rename. Renames are accepted in takeover.py.

Spec: docs/spec/stage2.md#renames
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from imagemill.inputs.scan import Scan
from imagemill.store.ledger import Ledger, SourceRow


class Renamed(NamedTuple):
    """An image that is gone, and the new image with the same bytes that it became."""

    former: SourceRow
    image: SourceRow


@dataclass(frozen=True, slots=True)
class Pairing:
    """The result of pairing, in name order.

    Attributes:
        pairs: images that were renamed.
        unpaired: images that are gone, each with the new images that have the same bytes, if the numbers differ.
    """

    pairs: tuple[Renamed, ...] = ()
    unpaired: tuple[tuple[SourceRow, tuple[SourceRow, ...]], ...] = ()


def pair_renames(gone: Iterable[SourceRow], new: Iterable[SourceRow]) -> Pairing:
    """Pair images of equal bytes: those with equal file names first, the rest in name order if the numbers agree.

    Several images with one file name are paired by it only if as many are new as are gone.
    """
    pairs: list[Renamed] = []
    unpaired: list[tuple[SourceRow, tuple[SourceRow, ...]]] = []
    arrived = _grouped(new, lambda row: row.fingerprint)
    for fingerprint, lost in _grouped(gone, lambda row: row.fingerprint).items():
        found = arrived.get(fingerprint, [])
        moved = list(_of_equal_names(lost, found))
        taken = {row.image_id for pair in moved for row in pair}
        lost_rest, found_rest = ([row for row in rows if row.image_id not in taken] for rows in (lost, found))
        pairs += moved
        if len(lost_rest) == len(found_rest):
            pairs += map(Renamed, lost_rest, found_rest)
        elif found_rest:
            unpaired += ((row, tuple(found_rest)) for row in lost_rest)
    return Pairing(
        tuple(sorted(pairs, key=lambda pair: _name(pair.former))),
        tuple(sorted(unpaired, key=lambda each: _name(each[0]))),
    )


def _of_equal_names(gone: Sequence[SourceRow], new: Sequence[SourceRow]) -> Iterator[Renamed]:
    by_name = _grouped(new, _file_name)
    for name, lost in _grouped(gone, _file_name).items():
        if len(lost) == len(by_name.get(name, ())):
            yield from map(Renamed, lost, by_name[name])


def _grouped(rows: Iterable[SourceRow], key: Callable[[SourceRow], str]) -> dict[str, list[SourceRow]]:
    """Return the rows by key; each group in name order."""
    groups: dict[str, list[SourceRow]] = defaultdict(list)
    for row in sorted(rows, key=_name):
        groups[key(row)].append(row)
    return groups


def _file_name(row: SourceRow) -> str:
    return row.file_name.rpartition("/")[2]


def _name(row: SourceRow) -> bytes:
    return row.file_name.encode("utf-8", "surrogateescape")


# ---- in a data root


def find_renames(scan: Scan, ledger: Ledger, among: Collection[str] | None = None) -> Pairing:
    """Return the renames of a data root. The ledger is read only for images that may have been renamed.

    An image that the user withdrew after it had been renamed is not included.

    Args:
        scan: contents of `approved/`, at least of the images that are looked at.
        ledger: images and arrivals.
        among: the images to look at, which include all of the same bytes; None for all.
    """
    arrivals = ledger.arrivals()
    if among is not None:
        arrivals = {image_id: at for image_id, at in arrivals.items() if image_id in among}
    if not arrivals:
        return Pairing()
    ids = {image_id for image_id, at in arrivals.items() if at} | _equal(scan, ledger, arrivals)
    rows = ledger.sources(sorted(ids)).values() if ids else ()
    withdrawn = ledger.withdrawals() if rows else {}
    gone = [
        row
        for row in rows
        if row.image_id not in scan.sources and withdrawn.get(row.image_id, "") <= arrivals.get(row.image_id, "")
    ]
    present = (row for row in rows if row.image_id in scan.sources and scan.sources[row.image_id].stat == row.stat)
    return pair_renames(gone, present)


def note_arrivals(scan: Scan, ledger: Ledger) -> None:
    """Compare new images with those that are gone, and record which of them may have been renamed."""
    arrivals = ledger.arrivals()
    if new := [image_id for image_id, at in arrivals.items() if not at]:
        is_any_gone = not ledger.source_ids() <= scan.sources.keys()
        with ledger.transaction():
            ledger.note_arrivals(new, _equal(scan, ledger, arrivals) if is_any_gone else ())
            ledger.forget_renames(image_id for image_id in new if image_id in scan.sources)


def _equal(scan: Scan, ledger: Ledger, arrivals: dict[str, str]) -> set[str]:
    """Return the arrivals not compared yet that have the bytes of an image that is gone, and those images."""
    new = ledger.sources([image_id for image_id, at in arrivals.items() if not at and image_id in scan.sources])
    same = ledger.sources_with({row.fingerprint for row in new.values()}) if new else {}
    gone = {image_id: row.fingerprint for image_id, row in same.items() if image_id not in scan.sources}
    lost = set(gone.values())
    return {*gone, *(image_id for image_id, row in new.items() if row.fingerprint in lost)} if lost else set()
