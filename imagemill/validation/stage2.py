"""Validation of Stage 2 records: the eight fields of every line, unique ids, and optionally every npy file of a record.

Rules for one record are in imagemill/domain/stage2_records.py, those for the records as a table in tables.py.

Spec: docs/spec/shards.md#readiness
"""

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from imagemill.domain.buckets import assign_bucket, is_unusual_ratio
from imagemill.domain.embedding_specs import T5_TOKENS, embedding_specs, mask_length
from imagemill.domain.layout import DataRoot
from imagemill.domain.stage2_records import (
    DECODER,
    INLINE_VECTOR,
    Stage2Record,
    is_plain,
    is_stage1,
    usual_masks,
    violations,
)
from imagemill.domain.violations import is_plain_text, text_warnings
from imagemill.formats.jsonl import Line, parse_line, tolerate
from imagemill.validation.catalogue import finding, findings_of
from imagemill.validation.findings import Finding
from imagemill.validation.images import ImageLook
from imagemill.validation.lines import Findings, check_lines

if TYPE_CHECKING:
    from imagemill.store.ledger import Ledger
    from imagemill.validation.contents import RecordedContents


def stage2_records(
    jsonl: Path,
    *,
    derived: Path | None = None,
    migrating: bool = False,
    images: ImageLook | None = None,
    data_root: DataRoot | None = None,
    contents: "RecordedContents | None" = None,
    tokens: int = T5_TOKENS,
) -> Findings:
    """Check every line of a Stage 2 record file; with `derived`, also read every npy file in full.

    Args:
        jsonl: the record file.
        derived: parent of the npy folders.
        migrating: report a Stage 1 record as a warning, because it may wait for an embedding pass, a caption or its
            image.
        images: which images to check.
        data_root: the data root of the images; without it, no images are checked.
        contents: with `derived`, the ledger's rows of the npy files.
        tokens: length of masks, unless `contents` determines it.
    """
    look = images if data_root else None
    lines = _Stage2Lines(jsonl.name, derived, migrating, look, data_root, contents, tokens)
    return check_lines(jsonl, lines, _parse_waiting if migrating else parse_line)


def blocks_packing(found: Finding, ledger: "Ledger") -> bool:
    """Return whether a finding must stop packing: the file cannot be read, or a merge wrote an invalid record from the ledger.

    Packing skips all other invalid lines: those without a caption, refused or unknown images, and earlier duplicates.
    """
    if found.severity != "error" or found.rule == "duplicate_id":
        return False
    if found.rule == "read_error":
        return True
    if not found.item or found.item not in ledger.sources([found.item]):
        return False
    caption = ledger.captions([found.item]).get(found.item)
    return caption is not None and caption.mask is not None


def _parse_waiting(number: int, raw: bytes) -> Line:
    """Parse a line of a file that is being migrated; a Stage 1 vector with NaN is accepted, since it is recomputed."""
    return tolerate(parse_line(number, raw), INLINE_VECTOR)


class _Stage2Lines:
    decoder = DECODER

    def __init__(
        self,
        file: str,
        derived: Path | None,
        migrating: bool,
        images: ImageLook | None,
        data_root: DataRoot | None,
        contents: "RecordedContents | None",
        tokens: int = T5_TOKENS,
    ) -> None:
        self._file, self._migrating, self._images, self._data_root = file, migrating, images, data_root
        self._stores, self._contents = _stores(derived, contents), contents
        self._seen: dict[str, int] = {}
        self._tokens = mask_length(contents.in_force.values()) if contents else tokens
        self._masks = usual_masks(self._tokens)

    def accept(self, record: Stage2Record, number: int) -> bool:
        if self._stores or (self._images and self._images.wanted):
            return False
        return (
            is_plain(record, self._masks)
            and not _aspect(record.width, record.height, record.aspect_bucket)
            and is_plain_text(record.caption)
            and self._seen.setdefault(record.image_id, number) == number
        )

    def judge(self, record: dict[str, Any], number: int) -> Iterator[Finding]:
        image_id = record.get("image_id")
        at: dict[str, Any] = {"file": self._file, "line": number, "item": image_id if isinstance(image_id, str) else ""}
        if self._migrating and is_stage1(record):
            yield finding("stage1", "a Stage 1 record, which cannot be packed", **at)
            return
        problems = violations(record, self._tokens)
        yield from findings_of(problems, at)
        if isinstance(image_id, str):
            first = self._seen.setdefault(image_id, number)
            if first != number:
                yield finding("duplicate_id", f"also in line {first}", **at)
        if problems:
            return
        for rule, field, message in _aspect(record["width"], record["height"], record["aspect_bucket"]):
            yield finding(rule, message, field=field, **at)
        yield from findings_of(text_warnings("caption", record["caption"]), at)
        for store in self._stores:
            from imagemill.validation.contents import (
                check_file,  # numpy takes longer to load than a thousand records to check
            )

            size, where = (record["height"], record["width"]), {**at, "field": store.spec.folder}
            yield from check_file(store, record["image_id"], size, where, self._contents)
        if self._images and self._data_root and self._images.take():
            yield from self._images.look_at_source(self._data_root, record, at)


def _stores(derived: Path | None, contents: "RecordedContents | None") -> list[Any]:
    if derived is None:
        return []
    from imagemill.formats.npy import NpyStore

    in_force = contents.in_force if contents else {}
    return [NpyStore(derived / spec.folder, in_force.get(spec, spec)) for spec in embedding_specs()]


@lru_cache(maxsize=1 << 14)
def _aspect(width: int, height: int, bucket: str) -> tuple[tuple[str, str, str], ...]:
    """Return rule, field and message of unusual but valid sizes and buckets. Cached, because most files have few sizes."""
    found = []
    if is_unusual_ratio(width, height):
        found.append(("unusual_ratio", "", f"{width}x{height}"))
    nearest = assign_bucket(width, height)
    if nearest != bucket:
        found.append(("not_nearest_bucket", "aspect_bucket", f"{bucket}, nearest is {nearest}"))
    return tuple(found)
