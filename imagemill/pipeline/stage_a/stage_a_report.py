"""What a merge came to, in numbers and lines for people.

Belongs here: counters, one line per group without a record.
Belongs elsewhere: the same as rows of the ledger (stage_a_problems.py).
Source: CONTRACTS section 5, "Exit 0 when groups failed but others were written (each listed)".
"""

from imagemill.pipeline.stage_a.missions import Discovery
from imagemill.pipeline.stage_a.stage_a_merge import Merged
from imagemill.pipeline.stage_a.stage_a_problems import told

# Of groups that failed, how many an error message lists.
LISTED = 20


def counts_of(found: Discovery, merged: Merged) -> dict[str, int]:
    """Counters of a merge, in groups; ranks and their files where the name says so."""
    return {
        "groups": merged.groups + len(found.failed),
        "written": merged.written,
        "failed": len(merged.failures) + len(found.failed),
        "missing_ranks": len(merged.missing_ranks),
        "rank_files_removed": merged.removed,
    }


def failed_groups(found: Discovery, merged: Merged) -> list[str]:
    """Every group without a record, with its images and reasons."""
    earlier = [f"{problem.place}: {problem.reason} ({problem.detail})" for problem in found.failed]
    return earlier + [told(failure) for failure in merged.failures]


def late_ranks(merged: Merged) -> list[str]:
    """Which ranks have left nothing to merge, and why; no line where all have come to their end."""
    late = [rank for rank in merged.missing_ranks if rank not in merged.other_plan]
    told = [f"ranks that have not come to their end: {_listed(late)}"] if late else []
    if merged.other_plan:
        since = "since then images, sampling, summarizer or the number of ranks have changed"
        do = "run stage-a again: what is finished is not inferred again"
        told.append(f"ranks that worked on another plan: {_listed(merged.other_plan)} ({since}; {do})")
    return told


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))


def warnings(found: Discovery) -> list[str]:
    """What is odd about groups that are processed all the same."""
    return [f"{problem.place}: {problem.detail}" for problem in found.problems if problem.outcome == "warning"]


def nothing_written(found: Discovery, merged: Merged) -> str:
    """Why there is no new output."""
    failed = failed_groups(found, merged)
    more = [f"and {len(failed) - LISTED} more"] if len(failed) > LISTED else []
    head = f"none of {len(failed)} groups could be written; the previous output stays as it is"
    return "\n".join([head, *late_ranks(merged), *failed[:LISTED], *more])
