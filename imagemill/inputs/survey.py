"""Recording what a folder of approved images contains in the ledger.

Spec: docs/spec/stage2.md#inputs
"""

from collections.abc import Iterator, Set

from imagemill.domain.inputs import NEW_INPUTS, InputSettings
from imagemill.fs.folders import Folder
from imagemill.inputs.row_captions import read_metadata
from imagemill.inputs.scan import SOURCE_ASSET, Scan, scan_approved
from imagemill.inputs.sidecars import SIDECARS, read_captions
from imagemill.inputs.sources import SourceFile
from imagemill.parts import in_parts
from imagemill.store.ledger import Ledger, Problem


def with_unread_captions(scan: Scan, ledger: Ledger, among: Set[str] | None = None) -> Iterator[list[SourceFile]]:
    """Yield the images whose present caption files are not those that their captions were read from, in parts.

    `among`: ids of the only images that may be; None: all may be.
    """
    for ids in in_parts(sorted(scan.sources if among is None else scan.sources.keys() & among)):
        read = ledger.sidecar_signatures(ids[0], ids[-1])
        sources = map(scan.sources.__getitem__, ids)
        yield [each for each in sources if each.caption is not None and read.get(each.image_id) != each.caption]


def differing(scan: Scan, ledger: Ledger) -> set[str]:
    """Return the images whose file or caption files are not those that the ledger has, and all that are gone."""
    sources, found = scan.sources, set(scan.sources.keys())
    for image_id, signature, sidecar in ledger.files_read():
        source = sources.get(image_id)
        if source is not None and source.stat == signature and source.caption == sidecar:
            found.discard(image_id)
        else:
            found.add(image_id)
    return found


def survey(
    folder: Folder,
    ledger: Ledger,
    scan: Scan | None = None,
    *,
    inputs: InputSettings = NEW_INPUTS,
    among: Set[str] | None = None,
) -> Scan:
    """Scan the folder unless its scan is given, read new and changed captions, and record both in the ledger.

    `among`: as for `with_unread_captions`.
    """
    scan = scan or scan_approved(folder, inputs)
    first = any(file.first for file in scan.metadata)
    if first:
        read_metadata(folder, scan, ledger, inputs)
    problems: list[Problem] = []
    for unread in with_unread_captions(scan, ledger, among):
        known = ledger.captions([source.image_id for source in unread])
        captions, found = read_captions(folder, unread, known, inputs, after_metadata=first)
        ledger.record_captions(captions)
        problems += found
    with ledger.transaction():
        ledger.replace_problems(SOURCE_ASSET, scan.problems)
        ledger.replace_problems(SIDECARS, problems)
    if not first:
        read_metadata(folder, scan, ledger, inputs)
    return scan
