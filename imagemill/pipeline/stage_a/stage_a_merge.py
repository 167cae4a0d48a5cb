"""From the lines of all ranks to one record per group.

    pass 1   each line that fits the group it names: where it stands      8 bytes per image of the plan
    pass 2   group by group: its lines, read again ─▶ one record          one group at a time

A missing, duplicate, foreign, failed or blank line fails its group and no other; such a group has no record at all.

Belongs here: the merge, what it says of each failed group, when rank files go.
Belongs elsewhere: making the lines (stage_a.py), rules for the output as a file (validation/stage_a.py).
Source: seed 003 "image_{i} alignment and coverage", "per_image merge SHALL mark incomplete groups as failed and continue",
"per_image intermediate outputs SHALL be deleted by default"; CONTRACTS section 5.
"""

from array import array
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO, NamedTuple

from imagemill.formats.jsonl import encode_line, replace_lines
from imagemill.pipeline.stage_a.at_work import RANK_DIED, forget
from imagemill.pipeline.stage_a.finished import compact
from imagemill.pipeline.stage_a.missions import Group
from imagemill.pipeline.stage_a.rank_files import (
    RankLine,
    output_file,
    parse_rank_line,
    rank_file,
    read_mark,
    remove_rank_files,
    unfinished_ranks,
)
from imagemill.pipeline.stage_a.rank_worker import StageAPlan
from imagemill.pipeline.stage_a.summaries import is_summary

# Where a line is: the number of its file above, its offset below.
_OFFSET_BITS = 44
_NOWHERE = -1


class ImageFailure(NamedTuple):
    """Why an image's group has no record. `reason`: one of the merge's own or of the rank's line."""

    image_name: str
    reason: str
    detail: str


class GroupFailure(NamedTuple):
    """A group without a record."""

    group: Group
    images: tuple[ImageFailure, ...]

    def places(self, reason: str) -> list[str]:
        """Its images that failed for this reason, relative to the mission's folder."""
        return [f"{self.group.place}/{image.image_name}" for image in self.images if image.reason == reason]


@dataclass(slots=True)
class Merged:
    """What a merge came to.

    Attributes:
        groups, written: how many there were, and how many have a record.
        rewritten: whether the output file changed; where it would be the same, it stays as it is.
        kept_previous: no group could be written, so whatever lay there stays.
        strays: lines that name no group of the plan. unreadable: lines that are none.
        missing_ranks: ranks that did not come to their end. other_plan: those of them that did, on another plan.
        removed: rank files removed.
    """

    groups: int = 0
    written: int = 0
    rewritten: bool = False
    kept_previous: bool = False
    strays: int = 0
    unreadable: int = 0
    failures: list[GroupFailure] = field(default_factory=list)
    missing_ranks: list[int] = field(default_factory=list)
    other_plan: list[int] = field(default_factory=list)
    removed: int = 0

    @property
    def exit_code(self) -> int:
        """1 where no group could be written and there was one; each failed group is told either way."""
        return 1 if self.kept_previous else 0


def finish_stage_a(
    plan: StageAPlan, output: Path, store: Path, *, launch: str | None = None, keep: bool = False, failed: int = 0
) -> Merged:
    """Merge what the ranks left, and clear up behind them.

    Args:
        launch: ranks count as ended only if this start's have; None: whichever start's.
        keep: rank files stay. They also stay after a failed group: they are the resume.
        failed: groups that had failed before there was a plan.
    """
    ranks = range(plan.ranks.world_size)
    missing = unfinished_ranks(output, plan.mission, ranks, plan.digest, launch) if plan.groups else []
    files = {rank: rank_file(output, plan.mission, rank) for rank in ranks if _is_of(plan, output, rank)}
    merged = merge_ranks(plan.mission, plan.groups, files, output_file(output, plan.mission), failed=failed)
    merged.missing_ranks = missing
    merged.other_plan = [rank for rank in missing if ended_on_another_plan(plan, output, rank)]
    if plan.groups and not missing:
        compact(store)
        forget(store, but={place for failure in merged.failures for place in failure.places(RANK_DIED)})
        if not merged.failures and not failed and not keep:
            merged.removed = remove_rank_files(output, plan.mission)
    return merged


def _is_of(plan: StageAPlan, output: Path, rank: int) -> bool:
    mark = read_mark(output, plan.mission, rank)
    return mark is not None and mark.plan == plan.digest


def ended_on_another_plan(plan: StageAPlan, output: Path, rank: int) -> bool:
    """Whether there is no use in waiting for this rank: it has come to its end, and images or options have changed since."""
    mark = read_mark(output, plan.mission, rank)
    return mark is not None and mark.ended and mark.plan != plan.digest


def merge_ranks(
    mission: str, groups: Sequence[Group], files: Mapping[int, Path], into: Path, *, failed: int = 0
) -> Merged:
    """Replace the output by one record for each complete group. Memory: 8 bytes per image, and what is told of failures.

    Args:
        groups: of the plan, in its order. files: by rank. failed: groups that had failed before.
    """
    merged = Merged(groups=len(groups))
    with ExitStack() as stack:
        handles = [stack.enter_context(open(path, "rb")) for path in files.values() if path.is_file()]
        lines = _Lines(groups, handles, merged)
        try:
            merged.rewritten = replace_lines(into, _records(mission, groups, lines, merged, failed))
        except _NothingToWrite:
            merged.kept_previous = True
    return merged


class _NothingToWrite(Exception):
    """Every group failed: the previous output stays."""


def _records(mission: str, groups: Sequence[Group], lines: "_Lines", merged: Merged, failed: int) -> Iterator[bytes]:
    for seq, group in enumerate(groups):
        summaries, failures = lines.of(seq)
        if failures:
            merged.failures.append(GroupFailure(group, tuple(failures)))
            continue
        merged.written += 1
        yield encode_line(
            {
                "group_id": group.group_id,
                "mission": mission,
                "label": group.label,
                "images": group.images,
                "per_image": {f"image_{index}": summary for index, summary in enumerate(summaries, start=1)},
            }
        )
    if not merged.written and (merged.failures or failed):
        raise _NothingToWrite


class _Lines:
    """Where the line of each image stands, and what is wrong with a group's lines as such."""

    def __init__(self, groups: Sequence[Group], files: Sequence[BinaryIO], merged: Merged) -> None:
        self._groups, self._files = groups, files
        self._begins = array("q", accumulate((len(group.images) for group in groups), initial=0))
        self._places = array("q", [_NOWHERE]) * self._begins[-1]
        self._wrong: defaultdict[int, list[ImageFailure]] = defaultdict(list)
        for number, file in enumerate(files):
            place = number << _OFFSET_BITS
            for raw in file:
                line = parse_rank_line(raw)
                if line is None:
                    merged.unreadable += 1
                elif not 0 <= line.group_seq < len(groups):
                    merged.strays += 1
                else:
                    self._add(line, place)
                place += len(raw)

    def _add(self, line: RankLine, place: int) -> None:
        group = self._groups[line.group_seq]
        if not _fits(line, group):
            what = f"a line of {line.label} {line.group_id}, image {line.image_index}, among this group's"
            self._wrong[line.group_seq].append(ImageFailure(line.image_name, "foreign_line", what))
            return
        cell = self._begins[line.group_seq] + line.image_index - 1
        if self._places[cell] == _NOWHERE:
            self._places[cell] = place
        else:
            what = "more than one line of this image"
            self._wrong[line.group_seq].append(ImageFailure(line.image_name, "duplicate_line", what))

    def of(self, seq: int) -> tuple[list[str], list[ImageFailure]]:
        """A group's summaries in order, and why it has no record: of one of the two there is nothing."""
        failures = self._wrong.get(seq, [])
        summaries: list[str] = []
        begin = self._begins[seq]
        for index, name in enumerate(self._groups[seq].images):
            result = self._result(self._places[begin + index], name)
            if isinstance(result, str):
                summaries.append(result)
            else:
                failures.append(result)
        return ([], failures) if failures else (summaries, [])

    def _result(self, place: int, name: str) -> str | ImageFailure:
        if place == _NOWHERE:
            return ImageFailure(name, "missing_line", "no rank has a line of it")
        file = self._files[place >> _OFFSET_BITS]
        file.seek(place & ((1 << _OFFSET_BITS) - 1))
        line = parse_rank_line(file.readline())
        if line is None:  # it was one a moment ago
            return ImageFailure(name, "missing_line", "its line changed while it was merged")
        if not line.ok:
            reason, _, detail = (line.error or "failed").partition(": ")
            return ImageFailure(name, reason, detail)
        if not is_summary(line.summary):
            return ImageFailure(name, "blank_answer", "its line holds no summary, or not one line of text")
        return str(line.summary)


def _fits(line: RankLine, group: Group) -> bool:
    """Whether a line is of the group that its number names, and of an image that this group has in that place."""
    return (
        line.group_id == group.group_id
        and line.label == group.label
        and 0 < line.image_index <= len(group.images)
        and line.image_name == group.images[line.image_index - 1]
    )
