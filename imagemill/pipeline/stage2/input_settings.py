"""Changes of the input settings: a configuration that differs from what the data root records is applied by the next run.

    imagemill.yaml ──Config.inputs_in_force──> InputSettings ──apply_inputs──> ledger rows of the images, then the settings

Whether an array is stale then follows from the ledger's rows (store/inputs.py).

Spec: docs/spec/stage2.md#colour, docs/spec/conventions.md#old-data-roots
"""

from concurrent.futures import ThreadPoolExecutor

import msgspec

from imagemill.config import Config
from imagemill.domain.inputs import HDR_TRANSFER, SRGB
from imagemill.errors import Refused, WrongUsage
from imagemill.formats.images import read_facts
from imagemill.fs.folders import Folder, reads_ahead, state_of_file
from imagemill.pipeline.prefetch import map_on
from imagemill.store.inputs import changes, record_inputs, recorded_inputs
from imagemill.store.ledger import Ledger, SourceRow

# Rows per ledger transaction.
_CHUNK = 512


def apply_inputs(config: Config, approved: Folder, ledger: Ledger) -> list[str]:
    """Record the settings in force. A process that is killed before the end changes nothing but rows that were unknown.

    If `pixels.color` changes, the colours of images for which they are not known are read from file headers first.

    Returns:
        a line for each setting that changed.

    Raises:
        WrongUsage: for another share than that of the images which the data root already has.
    """
    recorded = recorded_inputs(ledger.setting)
    wanted = config.inputs_in_force(recorded)
    if wanted == recorded:
        return []
    if wanted.share != recorded.share:
        _refuse_another_share(recorded.share, wanted.share, ledger)
    if wanted.color != recorded.color:
        _fill_colours(approved, ledger, threads=config.decoders)
    with ledger.transaction():
        if wanted.color == SRGB != recorded.color:
            _reopen_hdr(ledger)
        if (wanted.lines, wanted.encoding) != (recorded.lines, recorded.encoding):
            ledger.read_sidecars_again(only_several_lines=wanted.encoding == recorded.encoding)
        record_inputs(ledger, wanted)
    return list(changes(recorded, wanted))


def take_share(ledger: Ledger, share: str) -> None:
    """Record a share that was given on the command line. Raises as `apply_inputs`."""
    recorded = recorded_inputs(ledger.setting)
    if recorded.share != share:
        _refuse_another_share(recorded.share, share, ledger)
        record_inputs(ledger, msgspec.structs.replace(recorded, share=share))


def _refuse_another_share(recorded: str, wanted: str, ledger: Ledger) -> None:
    if recorded or ledger.source_ids():
        has = f"the share {recorded}" if recorded else "all images"
        raise WrongUsage(
            f"this data root has {has}; share {wanted} is another one",
            where=ledger.path,
            why="images would be missing from its sets, or would be in those of two shares",
            do="make a new data root for each share" + (f", or set share: {recorded}" if recorded else ""),
        )


def _reopen_hdr(ledger: Ledger) -> None:
    """Let the next pass open pictures of high dynamic range again, which `srgb` refuses."""
    ledger.forget_sources(row.image_id for row in ledger.sources().values() if row.color == HDR_TRANSFER)


def _fill_colours(approved: Folder, ledger: Ledger, *, threads: int) -> None:
    """Record the colours of unchanged images for which they are not known."""
    unknown = [row for row in ledger.sources().values() if row.color is None]
    with ThreadPoolExecutor(reads_ahead(approved, threads), "inspect") as pool:
        for at in range(0, len(unknown), _CHUNK):
            filled = map_on(pool, lambda row: _filled(approved, row), unknown[at : at + _CHUNK])
            ledger.record_sources([row for row in filled if row])  # files are read before the transaction begins


def _filled(approved: Folder, row: SourceRow) -> SourceRow | None:
    path = approved / row.file_name
    try:
        if state_of_file(path)[0] != row.stat:
            return None
        state, profile, first_frame = read_facts(path).columns
    except (Refused, OSError):
        return None
    return msgspec.structs.replace(row, color=state, profile=profile, first_frame=first_frame)
