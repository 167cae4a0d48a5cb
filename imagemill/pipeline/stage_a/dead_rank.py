"""A rank whose process died, brought to its end by whoever is left: what it finished is merged, the rest is named.

    its lines ──────────────────────────────▶ stay
    images it was at work on, or never came to ──▶ failed lines, `rank_died` ──▶ end mark

Belongs here: the lines that a dead rank lacks.
Belongs elsewhere: noticing its death (resources/local_pool.py), what it was at work on (at_work.py), the merge.
Source: seed 003 "merge SHALL continue for other groups"; CONTRACTS section 0, "Nothing disappears silently".
"""

from pathlib import Path

from imagemill.pipeline.batch_inference import Unanswered
from imagemill.pipeline.stage_a.at_work import RANK_DIED, in_hands
from imagemill.pipeline.stage_a.missions import printable
from imagemill.pipeline.stage_a.rank_files import (
    LineAppender,
    RankMark,
    new_rank_file,
    rank_file,
    read_mark,
    read_rank_lines,
    write_mark,
)
from imagemill.pipeline.stage_a.rank_shares import RankShare
from imagemill.pipeline.stage_a.rank_worker import StageAPlan, rank_line
from imagemill.ranks import ImageJob

_SHOWN = 3


def close_dead_rank(plan: StageAPlan, output: Path, store: Path, launch: str, rank: int, how: str) -> RankShare:
    """Give every image of the rank a line, and the rank its end mark; what it had finished counts as inferred.

    Args:
        how: it ended, such as "was ended by SIGKILL".
    """
    path, mark = rank_file(output, plan.mission, rank), read_mark(output, plan.mission, rank)
    ours = mark is not None and not mark.ended and (mark.plan, mark.launch) == (plan.digest, launch)
    present = {(line.group_seq, line.image_index): line.ok for line in read_rank_lines(path)} if ours else {}
    hands = in_hands(store, rank)
    died = f"{name_of(plan, rank)} {how}"
    lost = 0
    with LineAppender(path) if ours else new_rank_file(path) as lines:
        for job in plan.ranks.jobs(rank):
            if (job.group_seq, job.image_index) not in present:
                lines.append(rank_line(plan, job, "", Unanswered(RANK_DIED, f"{died} {_when(plan, job, hands)}")))
                lost += 1
    write_mark(output, plan.mission, rank, RankMark(plan.digest, launch, ended=True))
    finished = sum(present.values())
    return RankShare(rank, finished, 0, len(present) - finished + lost, died=f"{died}{_at(hands)}")


def name_of(plan: StageAPlan, rank: int) -> str:
    return f"rank {rank} of {plan.ranks.world_size} of {plan.mission}"


def _when(plan: StageAPlan, job: ImageJob, hands: list[str]) -> str:
    if plan.groups[job.group_seq].image_place(job.image_index) not in hands:
        return "before it had finished this image"
    return "at work on this image" + (f" and {len(hands) - 1} more" if len(hands) > 1 else "")


def _at(hands: list[str]) -> str:
    more = f" and {len(hands) - _SHOWN} more" if len(hands) > _SHOWN else ""
    return f" at work on {printable(', '.join(hands[:_SHOWN]))}{more}" if hands else ""
