"""Recording what a folder of approved images contains in the ledger.

Spec: docs/spec/stage2.md#inputs
"""

from collections.abc import Iterator

from imagemill.domain.inputs import NEW_INPUTS, InputSettings
from imagemill.fs.folders import Folder
from imagemill.inputs.row_captions import read_metadata
from imagemill.inputs.scan import SOURCE_ASSET, Scan, scan_approved
from imagemill.inputs.sidecars import SIDECARS, read_captions
from imagemill.inputs.sources import SourceFile
from imagemill.parts import in_parts
from imagemill.store.ledger import Ledger, Problem


def with_unread_captions(scan: Scan, ledger: Ledger) -> Iterator[list[SourceFile]]:
    """Yield the images whose present caption files are not those that their captions were read from, in parts."""
    for ids in in_parts(sorted(scan.sources)):
        read = ledger.sidecar_signatures(ids[0], ids[-1])
        sources = map(scan.sources.__getitem__, ids)
        yield [each for each in sources if each.caption is not None and read.get(each.image_id) != each.caption]


def survey(folder: Folder, ledger: Ledger, scan: Scan | None = None, *, inputs: InputSettings = NEW_INPUTS) -> Scan:
    """Scan the folder unless its scan is given, read new and changed captions, and record both in the ledger."""
    scan = scan or scan_approved(folder, inputs)
    first = any(file.first for file in scan.metadata)
    if first:
        read_metadata(folder, scan, ledger, inputs)
    problems: list[Problem] = []
    for unread in with_unread_captions(scan, ledger):
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
