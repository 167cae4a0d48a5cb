"""Merge of the ranks' lines to one record per group, and the report of groups without a record.

    pass 1   position of each line that fits its group                    8 bytes per image of the plan
    pass 2   group by group: its lines, read again ─▶ one record          one group at a time

A missing, duplicate, foreign, failed or blank line fails its group and no other; such a group has no record. Rows of the ledger:

    <mission>/<label folder>/<group folder>            a group without a record
    <mission>/<label folder>/<group folder>/<image>    an image because of which its group has none

Lines are written in worker.py; the rules for the output as a file are in validation/stage_a.py.
Spec: docs/spec/conventions.md#refused-and-failed, docs/spec/stage-a.md#failed-groups, docs/spec/stage-a.md#intermediate-files
"""

from array import array
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO, NamedTuple

from imagemill.formats.jsonl import encode_line, line_at, lines_with_offsets, replace_lines
from imagemill.pipeline.stage_a.missions import Discovery, ImageGroup, printable
from imagemill.pipeline.stage_a.plan import StageAPlan
from imagemill.pipeline.stage_a.rank_files import (
    RANK_DIED,
    RankLine,
    forget,
    output_file,
    parse_rank_line,
    rank_file,
    read_mark,
    remove_rank_files,
    unfinished_ranks,
)
from imagemill.pipeline.stage_a.summaries import import_summaries, is_summary
from imagemill.store.ledger import Ledger, Problem

ASSET = "stage_a_groups"

# Most failed groups that an error message lists.
LISTED = 20

# Of the images of a failed group, how many a line about it lists.
_SHOWN = 5

# The place of a line: the number of its file above, its offset below.
_OFFSET_BITS = 44
_NOWHERE = -1


class ImageFailure(NamedTuple):
    """Why an image's group has no record. `reason`: one of the merge's own or of the rank's line."""

    image_name: str
    reason: str
    detail: str


class GroupFailure(NamedTuple):
    """A group without a record."""

    group: ImageGroup
    images: tuple[ImageFailure, ...]

    def places(self, reason: str) -> list[str]:
        """Return its images that failed for this reason, relative to the mission's folder."""
        return [f"{self.group.place}/{image.image_name}" for image in self.images if image.reason == reason]


@dataclass(slots=True)
class MergeResult:
    """The result of a merge.

    Attributes:
        groups, written: number of groups, and of records.
        rewritten: whether the output file changed; an equal file keeps its modification time.
        kept_previous: whether the previous output was kept because no group could be written.
        strays: lines that name no group of the plan. unreadable: lines that cannot be parsed.
        missing_ranks: ranks that did not end. other_plan: those of them that ended on another plan.
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
        """1 if there were groups and none could be written; failed groups are listed either way."""
        return 1 if self.kept_previous else 0


def finish_stage_a(
    plan: StageAPlan,
    output: Path,
    store: Path,
    ledger: Ledger,
    *,
    launch: str | None = None,
    keep: bool = False,
    failed: int = 0,
) -> MergeResult:
    """Merge the ranks' lines, then remove rank files that are no longer needed.

    Args:
        plan: the plan of the run.
        output: folder of the rank files and of the output.
        store: the mission's `summaries_folder`.
        ledger: receives the summaries.
        launch: ranks count as ended only if those of this start have; None: those of any start.
        keep: whether rank files stay. They also stay after a failed group, for the next run.
        failed: number of groups that had failed before there was a plan.
    """
    import_summaries(ledger, plan.mission, output, store)
    ranks = range(plan.ranks.world_size)
    missing = unfinished_ranks(output, plan.mission, ranks, plan.digest, launch) if plan.groups else []
    marks = {rank: read_mark(output, plan.mission, rank) for rank in ranks}
    files = {
        rank: rank_file(output, plan.mission, rank) for rank, mark in marks.items() if mark and mark.plan == plan.digest
    }
    merged = merge_ranks(plan.mission, plan.groups, files, output_file(output, plan.mission), failed=failed)
    merged.missing_ranks = missing
    merged.other_plan = [rank for rank in missing if ended_on_another_plan(plan, output, rank)]
    if plan.groups and not missing:
        forget(store, but={image for failure in merged.failures for image in failure.places(RANK_DIED)})
        if not merged.failures and not failed and not keep:
            merged.removed = remove_rank_files(output, plan.mission)
    return merged


def ended_on_another_plan(plan: StageAPlan, output: Path, rank: int) -> bool:
    """Return True if waiting for this rank is useless: it has ended, and images or options have changed since."""
    mark = read_mark(output, plan.mission, rank)
    return mark is not None and mark.ended and mark.plan != plan.digest


def merge_ranks(
    mission: str, groups: Sequence[ImageGroup], files: Mapping[int, Path], into: Path, *, failed: int = 0
) -> MergeResult:
    """Replace the output by one record for each complete group. Memory: 8 bytes per image, and the failures.

    Args:
        mission: the mission.
        groups: of the plan, in its order.
        files: rank files, by rank.
        into: the output.
        failed: groups that had failed before.
    """
    merged = MergeResult(groups=len(groups))
    with ExitStack() as stack:
        handles = [stack.enter_context(open(path, "rb")) for path in files.values() if path.is_file()]
        lines = _Lines(groups, handles, merged)
        try:
            merged.rewritten = replace_lines(into, _records(mission, groups, lines, merged, failed))
        except _NothingToWrite:
            merged.kept_previous = True
    return merged


class _NothingToWrite(Exception):
    """Raised if every group failed; the previous output stays."""


def _records(
    mission: str, groups: Sequence[ImageGroup], lines: "_Lines", merged: MergeResult, failed: int
) -> Iterator[bytes]:
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
    """Position of each image's line, and failures of the lines themselves."""

    def __init__(self, groups: Sequence[ImageGroup], files: Sequence[BinaryIO], merged: MergeResult) -> None:
        self._groups, self._files = groups, files
        self._begins = array("q", accumulate((len(group.images) for group in groups), initial=0))
        self._places = array("q", [_NOWHERE]) * self._begins[-1]
        self._wrong: defaultdict[int, list[ImageFailure]] = defaultdict(list)
        for number, file in enumerate(files):
            for offset, raw in lines_with_offsets(file):
                line = parse_rank_line(raw)
                if line is None:
                    merged.unreadable += 1
                elif not 0 <= line.group_seq < len(groups):
                    merged.strays += 1
                else:
                    self._add(line, number << _OFFSET_BITS | offset)

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
        """Return a group's summaries in order, and the reasons why it has no record; one of the two is empty."""
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
            return ImageFailure(name, "missing_line", "no rank wrote a line for it")
        line = parse_rank_line(line_at(self._files[place >> _OFFSET_BITS], place & ((1 << _OFFSET_BITS) - 1)))
        if line is None:  # it has changed since the first pass
            return ImageFailure(name, "missing_line", "its line changed while it was merged")
        if not line.ok:
            reason, _, detail = (line.error or "failed").partition(": ")
            return ImageFailure(name, reason, detail)
        if not is_summary(line.summary):
            return ImageFailure(
                name, "blank_answer", "its line contains no summary, or one that is not a single line of text"
            )
        return str(line.summary)


def _fits(line: RankLine, group: ImageGroup) -> bool:
    """Return True if a line belongs to the group that it names, and to an image at that position in the group."""
    return (
        line.group_id == group.group_id
        and line.label == group.label
        and 0 < line.image_index <= len(group.images)
        and line.image_name == group.images[line.image_index - 1]
    )


# ---- report

_REPLACE = "replace the file by a complete image of at least 8 by 8 pixels, or remove it from its group"
_AGAIN = "run again: what is finished is not inferred again"

# Reasons with their cause in the image; every other reason is a failure of the run.
_REFUSALS = {"undecodable", "too_small", "too_large"}
_REMEDIES = {
    "blank_answer": "run again; if it stays blank, change the prompt or the summarizer",
    "wrong_answers": "correct the summarizer: it gives one text per image, in order",
    "model_error": "see the detail: it is what the summarizer raised for this image",
    "out_of_memory": "scale the image down, or run the summarizer on a larger device",
    "rank_died": "run again: what a process was working on comes last, and alone; if it dies again, replace the image",
    "worker_died": "run again; if it ends its worker again, replace the image",
    "foreign_line": "run again; nothing else should write rank files",
    "duplicate_line": "run again; nothing else should write rank files",
}


def stage_a_problems(found: Discovery, merged: MergeResult) -> list[Problem]:
    """Return one row per input that is not in the output; warnings have none."""
    rows = [
        Problem(
            f"{found.mission}/{problem.place}", ASSET, problem.outcome, problem.reason, problem.detail, problem.remedy
        )
        for problem in found.problems
        if problem.outcome != "warning"
    ]
    return rows + [row for failure in merged.failures for row in _of_group(found.mission, failure)]


def format_failure(failure: GroupFailure) -> str:
    """Return a failed group on one line, with its first images and reasons; names may contain unprintable characters."""
    images = [f"{image.image_name}: {image.reason} ({image.detail})" for image in failure.images]
    more = f"; and {len(images) - _SHOWN} more" if len(images) > _SHOWN else ""
    return printable(f"{failure.group.label} {failure.group.group_id}: {'; '.join(images[:_SHOWN])}{more}")


def _of_group(mission: str, failure: GroupFailure) -> Iterator[Problem]:
    place = printable(f"{mission}/{failure.group.place}")
    refused = all(image.reason in _REFUSALS for image in failure.images)
    remedy = _REPLACE if refused else _AGAIN
    yield Problem(place, ASSET, "refused" if refused else "failed", "incomplete_group", format_failure(failure), remedy)
    # One row per image, with the first of several reasons.
    for image in {image.image_name: image for image in reversed(failure.images)}.values():
        yield _of_image(f"{place}/{printable(image.image_name)}", image)


def _of_image(item: str, image: ImageFailure) -> Problem:
    detail = printable(image.detail)
    if image.reason in _REFUSALS:
        return Problem(item, ASSET, "refused", image.reason, detail, _REPLACE)
    return Problem(item, ASSET, "failed", image.reason, detail, _REMEDIES.get(image.reason, _AGAIN))


def counts_of(found: Discovery, merged: MergeResult) -> dict[str, int]:
    """Return the counters of a merge, in groups; in ranks and files if the name says so."""
    return {
        "groups": merged.groups + len(found.failed),
        "written": merged.written,
        "failed": len(merged.failures) + len(found.failed),
        "missing_ranks": len(merged.missing_ranks),
        "rank_files_removed": merged.removed,
    }


def failed_groups(found: Discovery, merged: MergeResult) -> list[str]:
    """Return every group without a record, with its images and reasons."""
    earlier = [f"{problem.place}: {problem.reason} ({problem.detail})" for problem in found.failed]
    return earlier + [format_failure(failure) for failure in merged.failures]


def late_ranks(merged: MergeResult) -> list[str]:
    """Return which ranks left nothing to merge, and why; no line if all have ended."""
    late = [rank for rank in merged.missing_ranks if rank not in merged.other_plan]
    lines = [f"ranks that have not come to their end: {', '.join(map(str, late))}"] if late else []
    if merged.other_plan:
        since = "since then images, sampling, summarizer or the number of ranks have changed"
        do = "run stage-a again: what is finished is not inferred again"
        ranks = ", ".join(map(str, merged.other_plan))
        lines.append(f"ranks that worked on another plan: {ranks} ({since}; {do})")
    return lines


def warnings(found: Discovery) -> list[str]:
    """Return the warnings about groups that are processed nevertheless."""
    return [f"{problem.place}: {problem.detail}" for problem in found.problems if problem.outcome == "warning"]


def nothing_written(found: Discovery, merged: MergeResult) -> str:
    """Return the error message of a merge without output."""
    failed = failed_groups(found, merged)
    more = [f"and {len(failed) - LISTED} more"] if len(failed) > LISTED else []
    head = f"none of {len(failed)} groups could be written; the previous output stays as it is"
    return "\n".join([head, *late_ranks(merged), *failed[:LISTED], *more])
