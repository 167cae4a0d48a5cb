"""Rollback to Stage 1: one file with the vectors inside.

    approved_image_dataset.jsonl                  the Stage 1 file again
    approved_image_dataset.jsonl.stage1.backup    its source; gone after it is renamed back
    approved_image_dataset.jsonl.stage2.backup    the version 2 file it replaces

Conversion of one record is in stage1.py, making the backup in merge.py.

Spec: docs/spec/migration.md#rollback
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from imagemill.domain.embedding_specs import DINOV3, embedding_specs
from imagemill.domain.layout import DataRoot
from imagemill.domain.stage2_records import is_stage1
from imagemill.errors import ImagemillError, InvalidNpy, MissingInput
from imagemill.formats.jsonl import encode_line, read_jsonl, replace_lines
from imagemill.formats.npy import NpyStore, read_npy
from imagemill.fs.atomic import link_or_copy, sync_folder
from imagemill.fs.fingerprints import FileSignature
from imagemill.pipeline.leases import claimed
from imagemill.pipeline.stage2.merge import STAGE1, stage1_backup
from imagemill.pipeline.stage2.record_index import record_id
from imagemill.pipeline.stage2.stage1 import as_vector, stage1_record
from imagemill.store.ledger import EVERY, FileRow, Ledger
from imagemill.store.provenance import forget_identity

_SHOWN = 5


def roll_back(root: DataRoot, ledger: Ledger, run_id: str, *, delete_embeddings: bool = False) -> dict[str, int]:
    """Restore the Stage 1 file, from the backup or from the npy files; return counters.

    If embeddings are to be deleted, wait until no run makes any: that run's finished files would remain as part of a kind.

    Raises:
        MissingInput: if there are neither records nor a backup.
        ImagemillError: if a record has no valid vector, or the records were never migrated; nothing is changed then.
    """
    jsonl = root.stage2_jsonl
    backup = stage1_backup(jsonl)
    if not jsonl.is_file() and not backup.is_file():
        raise MissingInput("no records to roll back", where=jsonl, do="check --data-root and --output-base-dir")
    if not backup.is_file() and ledger.setting(STAGE1) is None:
        raise ImagemillError(
            "nothing to roll back: the records were never migrated from Stage 1",
            where=jsonl,
            why=f"there is no {backup.name}, and the data root is not marked as migrated; nothing was changed",
            do="check --data-root and --output-base-dir",
        )
    with ExitStack() as alone:
        for spec in embedding_specs() if delete_embeddings else ():
            alone.enter_context(claimed(ledger, spec.kind, [EVERY], run_id))
        _keep_version_2(jsonl)
        counts = _from_backup(jsonl, backup) if backup.is_file() else _from_files(jsonl, root.derived, ledger)
        ledger.forget_changes()
        if delete_embeddings:
            counts["deleted_files"] = _delete_embeddings(root, ledger)
    return counts


def stage2_backup(jsonl: Path) -> Path:
    """Return the path of the version 2 backup."""
    return jsonl.with_name(f"{jsonl.name}.stage2.backup")


def _keep_version_2(jsonl: Path) -> None:
    """Link the current file to its backup name, replacing a backup of an earlier rollback; skip a file of Stage 1 only."""
    if not jsonl.is_file() or all(line.value is None or is_stage1(line.value) for line in read_jsonl(jsonl)):
        return
    link_or_copy(jsonl, stage2_backup(jsonl))


def _from_backup(jsonl: Path, backup: Path) -> dict[str, int]:
    os.replace(backup, jsonl)
    sync_folder(jsonl.parent)
    return {"records": sum(1 for _ in read_jsonl(jsonl)), "from_backup": 1}


def _from_files(jsonl: Path, derived: Path, ledger: Ledger) -> dict[str, int]:
    store, recorded = NpyStore(derived / DINOV3.folder, DINOV3), ledger.files(DINOV3.kind)
    separate = (line.value for line in read_jsonl(jsonl) if line.value is not None and not is_stage1(line.value))
    ids = (image_id for value in separate if (image_id := record_id(value)))
    missing = [image_id for image_id in ids if not _has_vector(store, image_id, recorded)]
    if missing:
        shown = ", ".join(missing[:_SHOWN]) + (f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else "")
        raise ImagemillError(
            f"{len(missing)} records have no valid vector to restore: {shown}",
            where=store.folder,
            why="the Stage 1 backup does not exist, so every vector has to come from its npy file",
            do="run `imagemill stage2 --verify`, which notes damaged files, then `imagemill stage2 --pass dinov3`",
        )
    counts = {"records": 0, "from_backup": 0}
    replace_lines(jsonl, _rebuilt(jsonl, store, counts))
    return counts


def _has_vector(store: NpyStore, image_id: str, recorded: Mapping[tuple[str, FileSignature], FileRow]) -> bool:
    """Return True if the file is valid and, if the ledger has a row for it, contains the recorded bytes."""
    try:
        content = store.check(image_id, 0, 0)
        row = recorded.get((image_id, store.stat(image_id)))
    except (InvalidNpy, OSError):
        return False
    return row is None or row.content == content


def _rebuilt(jsonl: Path, store: NpyStore, counts: dict[str, int]) -> Iterator[bytes]:
    for line in read_jsonl(jsonl):
        if line.value is None or is_stage1(line.value):
            yield line.raw + b"\n"
            continue
        counts["records"] += 1
        vector = read_npy(store.path(record_id(line.value) or ""))
        yield encode_line(stage1_record(line.value, as_vector(vector.tolist())))


def _delete_embeddings(root: DataRoot, ledger: Ledger) -> int:
    deleted = 0
    for spec in embedding_specs():
        store = NpyStore(root.derived / spec.folder, spec)
        names: Sequence[str] = list(store.listing())
        for image_id in names:
            store.path(image_id).unlink(missing_ok=True)
        ledger.forget_files(spec.kind)
        forget_identity(ledger, spec.kind)
        deleted += len(names)
    return deleted
