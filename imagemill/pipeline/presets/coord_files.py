"""All files of one split of a preset, written in one pass over the base's records.

    <base>/train.jsonl  ─ read once ─┬→ train.filter_stats.json   derived presets: what was kept and dropped
                                     ├→ train.norm.jsonl          the kept records, ints 0…999
                                     ├→ train.coord.jsonl         the kept records, tokens <|coord_0|> … <|coord_999|>
                                     └→ train.jsonl               derived presets: the kept lines, byte for byte

One bad line refuses the split, after all bad lines are listed. Memory does not grow with the number of records, except
for the names of the images that a derived preset links.

One process does the work: sending lines to others and files back costs more than two processes gain.

This module reads lines and writes files with temporary names. A single record is handled in coords.py; derive.py gives
the files their names and links the images.

Spec: docs/spec/conventions.md#completion, docs/spec/presets.md#strictness, docs/spec/presets.md#hardlinks
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from imagemill.domain.preset_records import DEFAULT_ORDER, ObjectOrder, Space
from imagemill.formats.diff_writer import Draft
from imagemill.formats.manifest import json_bytes
from imagemill.pipeline.presets.coords import Chunk, RecordCounts, transform
from imagemill.store.public_data import PresetDir

# Bytes of lines handled at a time: some dozens of records, which stay in the processor's cache (256 KiB take a third
# longer).
CHUNK_BYTES = 1 << 14

# Largest number of problems kept as text; the rest are only counted, so that a million bad lines need little memory.
KEPT_PROBLEMS = 10_000


@dataclass
class SplitDraft:
    """The complete files of a split under temporary names, or the problems that prevent them.

    Attributes:
        split: `train` or `val`.
        source: sha256 of the base's records as they were read.
        counts: of records and objects.
        images: the paths in the kept records, each once; empty for a base preset, whose images are not linked.
        problems: of lines, by line number.
        more: number of problems beyond KEPT_PROBLEMS.
        drafts: the files.
        changed: names of the files whose content changes.
    """

    split: str
    source: str = ""
    counts: RecordCounts = field(default_factory=RecordCounts)
    images: dict[str, None] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    more: int = 0
    drafts: list[Draft] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)

    def take(self, chunk: Chunk) -> None:
        """Append the results of some more lines."""
        # Only derived presets have pixel records.
        for draft, data in zip(self.drafts, (chunk.norm, chunk.coord, chunk.pixel), strict=False):
            draft.write(data)
        if len(self.drafts) > 2:
            self.images.update(dict.fromkeys(chunk.images))
        self.counts = self.counts.plus(chunk.counts)
        room = KEPT_PROBLEMS - len(self.problems)
        self.problems += chunk.problems[:room]
        self.more += len(chunk.problems[room:])

    def publish(self) -> None:
        """Give the files their names, `<split>.jsonl` last, because its presence publishes the split."""
        for draft in self.drafts:
            draft.publish()

    def move(self, folder: Path) -> None:
        """Move the files to another folder, still under temporary names."""
        for draft in self.drafts:
            draft.move(folder)

    def discard(self) -> None:
        """Delete the files."""
        for draft in self.drafts:
            draft.discard()


def draft_split(
    base: PresetDir,
    split: str,
    folder: Path,
    *,
    max_objects: int | None = None,
    order: ObjectOrder = DEFAULT_ORDER,
    keep_files: bool = False,
    advance: Callable[[int], object] = lambda records: None,
) -> SplitDraft:
    """Write a split's files from the base's records, in one pass, under temporary names in `folder`.

    Without `max_objects` these are norm and coord; with it, also the kept pixel records and the statistics. Files with
    unchanged content are left alone (bytes and mtime).

    Args:
        base: the base preset.
        split: `train` or `val`.
        folder: destination of the files.
        max_objects: drop records with more objects; None for a base preset.
        order: of the objects in each record.
        keep_files: read and count the records of a base preset, but write no file.
        advance: called with the number of records done since the last call.
    """
    target, result = PresetDir(folder), SplitDraft(split)
    written: list[Space] = ["norm", "coord"] if max_objects is None else ["norm", "coord", "pixel"]
    names = [target.records(split, space) for space in written]
    result.drafts = [] if keep_files else [Draft(folder, path.name) for path in names]
    try:
        digest = hashlib.sha256()
        for first, lines in _some_lines(base.jsonl(split), digest):
            chunk = transform(first, lines, max_objects, order)
            result.take(chunk)
            advance(chunk.counts.records)
        result.source = f"sha256:{digest.hexdigest()}"
        if max_objects is not None:
            result.drafts.insert(0, Draft(folder, target.filter_stats(split).name))
            result.drafts[0].write(json_bytes(_filter_statistics(base.name, result, max_objects)))
        result.changed = [draft.path.name for draft in result.drafts if draft.finish()]
    except BaseException:
        result.discard()
        raise
    return result


def line_problems(base: PresetDir, split: str) -> SplitDraft:
    """Return the problems of a split's lines, by line number, without writing anything."""
    return draft_split(base, split, base.path, keep_files=True)


def _filter_statistics(base: str, result: SplitDraft, max_objects: int) -> dict[str, Any]:
    """Return the content of `<split>.filter_stats.json`."""
    counts = result.counts
    return {
        "base": base,
        "split": result.split,
        "source": result.source,
        "max_objects": max_objects,
        "records": {"read": counts.records, "kept": counts.kept, "dropped": counts.dropped},
        "objects": {"read": counts.objects, "kept": counts.objects - counts.dropped_objects},
        "most_objects_in_a_record": counts.largest,
    }


def _some_lines(path: Path, digest: Any) -> Iterator[tuple[int, list[bytes]]]:
    """Yield lines in groups, with the number of the first line; update `digest` with every byte."""
    number = 1
    with open(path, "rb") as file:
        while lines := file.readlines(CHUNK_BYTES):
            for line in lines:
                digest.update(line)
            yield number, lines
            number += len(lines)
