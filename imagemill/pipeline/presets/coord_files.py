"""One split of a preset in all its forms, from one pass over the base's records.

    <base>/train.jsonl  ─ read once ─┬→ train.filter_stats.json   derived presets: what was kept and dropped
                                     ├→ train.norm.jsonl          the kept records, ints 0…999
                                     ├→ train.coord.jsonl         the kept records, tokens <|coord_0|> … <|coord_999|>
                                     └→ train.jsonl               derived presets: the kept lines, byte for byte

One bad line refuses the split, after all of them are listed. Memory is flat in the number of records, but for the names of the
images that a derived preset links.

One process does it: to send lines to others and their files back costs more than two of them gain.

Belongs here: lines in, files with temporary names out.
Belongs elsewhere: one record (coords.py), when files get their names and images their links (derive.py).
Spec: docs/spec/conventions.md#completion, docs/spec/presets.md#strictness, docs/spec/presets.md#hardlinks
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from imagemill.domain.preset_records import DEFAULT_ORDER, ObjectOrder
from imagemill.formats.diff_writer import Draft
from imagemill.formats.manifest import json_bytes
from imagemill.pipeline.presets.coords import Chunk, RecordCounts, transform
from imagemill.store.public_data import PresetDir

# Bytes of lines handled at a time: some dozens of records, which stay in the processor's cache (256 KiB take a third longer).
CHUNK_BYTES = 1 << 14

# A list of problems says the rest by their number, so that a million bad lines stay small.
KEPT_PROBLEMS = 10_000


@dataclass
class SplitDraft:
    """A split's files, whole under temporary names, or why there are none.

    Attributes:
        source: sha256 of the base's records, as they were read.
        images: the paths the kept records name, each once; empty where nothing was asked to be linked.
        problems: what is wrong, by line; `more` counts those beyond the bound.
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
        """Go on with what some more lines became."""
        # Pixel records are there for a derived preset only.
        for draft, data in zip(self.drafts, (chunk.norm, chunk.coord, chunk.pixel), strict=False):
            draft.write(data)
        if len(self.drafts) > 2:
            self.images.update(dict.fromkeys(chunk.images))
        self.counts = self.counts.plus(chunk.counts)
        room = KEPT_PROBLEMS - len(self.problems)
        self.problems += chunk.problems[:room]
        self.more += len(chunk.problems[room:])

    def publish(self) -> None:
        """Give the files their names: `<split>.jsonl` is the last, for it says that the split is there."""
        for draft in self.drafts:
            draft.publish()

    def move(self, folder: Path) -> None:
        for draft in self.drafts:
            draft.move(folder)

    def discard(self) -> None:
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
    """Make a split's files from the base's records, in one pass, under temporary names in `folder`.

    Without `max_objects` these are norm and coord; with it the kept pixel records and the statistics, too. Files that would come
    out as those that stand there are left alone (bytes and mtime).

    Args:
        order: of the objects in each record.
        keep_files: read and count the records of a base preset, and write no file.
        advance: called with the number of records done since the last call.
    """
    target, made = PresetDir(folder), SplitDraft(split)
    names = [target.norm(split), target.coord(split), *([target.jsonl(split)] if max_objects is not None else [])]
    made.drafts = [] if keep_files else [Draft(folder, path.name) for path in names]
    try:
        digest = hashlib.sha256()
        for first, lines in _some_lines(base.jsonl(split), digest):
            chunk = transform(first, lines, max_objects, order)
            made.take(chunk)
            advance(chunk.counts.records)
        made.source = f"sha256:{digest.hexdigest()}"
        if max_objects is not None:
            made.drafts.insert(0, Draft(folder, target.filter_stats(split).name))
            made.drafts[0].write(json_bytes(_filter_statistics(base.name, made, max_objects)))
        made.changed = [draft.path.name for draft in made.drafts if draft.finish()]
    except BaseException:
        made.discard()
        raise
    return made


def line_problems(base: PresetDir, split: str) -> SplitDraft:
    """Return what is wrong with the lines of a split, by number; nothing is written."""
    return draft_split(base, split, base.path, keep_files=True)


def _filter_statistics(base: str, made: SplitDraft, max_objects: int) -> dict[str, Any]:
    """What `<split>.filter_stats.json` says."""
    counts = made.counts
    return {
        "base": base,
        "split": made.split,
        "source": made.source,
        "max_objects": max_objects,
        "records": {"read": counts.records, "kept": counts.kept, "dropped": counts.dropped},
        "objects": {"read": counts.objects, "kept": counts.objects - counts.dropped_objects},
        "most_objects_in_a_record": counts.largest,
    }


def _some_lines(path: Path, digest: Any) -> Iterator[tuple[int, list[bytes]]]:
    """Lines with the first one's number, some at a time; `digest` takes in every byte."""
    number = 1
    with open(path, "rb") as file:
        while lines := file.readlines(CHUNK_BYTES):
            for line in lines:
                digest.update(line)
            yield number, lines
            number += len(lines)
