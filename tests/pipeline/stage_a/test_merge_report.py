"""Report of a merge. Spec: docs/spec/stage-a.md#exit-codes-of-stage-a"""

from pathlib import Path

from imagemill.pipeline.stage_a.merge import (
    LISTED,
    GroupFailure,
    ImageFailure,
    MergeResult,
    counts_of,
    failed_groups,
    late_ranks,
    nothing_written,
    warnings,
)
from imagemill.pipeline.stage_a.missions import Discovery, MissionProblem
from tests.helpers.stage_a import MISSION, group


def found(*problems):
    return Discovery(MISSION, Path("m"), problems=list(problems))


def failure(name):
    return GroupFailure(group(name, 1), (ImageFailure(f"{name}-1.jpg", "undecodable", "no image"),))


TWICE = MissionProblem("审核通过/b", "failed", "duplicate_group", "a is b", "rename")
MIXED = MissionProblem("审核通过/c", "warning", "mixed_ids", "two ids", "part them")


def test_groups_that_failed_before_and_in_the_merge_are_counted_and_listed():
    merged = MergeResult(groups=3, written=2, failures=[failure("a")], removed=1)

    assert counts_of(found(TWICE, MIXED), merged) == {
        "groups": 4, "written": 2, "failed": 2, "missing_ranks": 0, "rank_files_removed": 1,
    }  # fmt: skip
    assert failed_groups(found(TWICE, MIXED), merged) == [
        "审核通过/b: duplicate_group (a is b)", "pass a: a-1.jpg: undecodable (no image)",
    ]  # fmt: skip
    assert warnings(found(TWICE, MIXED)) == ["审核通过/c: two ids"]


def test_late_ranks_are_named():
    assert late_ranks(MergeResult()) == []
    assert late_ranks(MergeResult(missing_ranks=[0, 2])) == ["ranks that have not come to their end: 0, 2"]
    late, changed = late_ranks(MergeResult(missing_ranks=[0, 1, 2], other_plan=[1]))
    assert late == "ranks that have not come to their end: 0, 2"
    assert changed.startswith("ranks that worked on another plan: 1 (since then images, ")
    assert "run stage-a again" in changed


def test_error_lists_the_first_groups_and_the_number_of_others():
    failures = [failure(f"g{n}") for n in range(LISTED + 2)]

    lines = nothing_written(found(), MergeResult(groups=LISTED + 2, failures=failures, missing_ranks=[1])).splitlines()

    assert lines[0].startswith(f"none of {LISTED + 2} groups")
    assert lines[1].endswith("their end: 1")
    assert len(lines) == LISTED + 3
    assert lines[-1] == "and 2 more"
