"""The job `resume_missing`: `imagemill run`, launched in the UI.

    run of the job ──> embedding runs over ranges of images ──> one run for records, shards and checks

The job's one step executes these nested runs in its own process, one after another, so they need no place in the queue. A range
of a backfill is contiguous: scattered images would need one run per gap.

A termination is forwarded by dagster_project/internals/coordinator.py. Reference: docs/decisions/0123-nested-runs.md.
"""

import dagster as dg

from assets.partitions import GPU_POOL
from dagster_project.internals.coordinator import RESUME_JOB
from dagster_project.internals.runs import end_with_nested, free_pools
from dagster_project.snapshot import Ended, Unchanged, settled_snapshot, write_snapshot
from dagster_project.summary import OTHER_INPUTS, summary_lines
from dagster_project.work import CommandSession, open_command
from imagemill.fs.owners import use
from imagemill.inputs.row_captions import METADATA
from imagemill.options import ResumeOptions
from imagemill.pipeline.problem_list import OF_LINES, InputProblem
from imagemill.pipeline.stage2.passes import Passes
from imagemill.pipeline.status import Status, read_state
from imagemill.store.ledger import DECISIONS
from imagemill.store.locations import refuse_no_images
from io_managers.refusals import not_arrived
from resources.dagster_internals.events import ExplainedFailure, claim_run, images_failed
from resources.dagster_internals.tags import MAX_RETRIES_TAG
from resources.data_root import DataRootResource
from resources.keys import ROOT_TAGS


class ResumeConfig(dg.Config, ResumeOptions):
    """Part of the images to embed."""


@dg.op(pool=GPU_POOL)
def make_missing(context: dg.OpExecutionContext, config: ResumeConfig, data_root: DataRootResource) -> None:
    """Make what is missing, invalid or stale, decided by the files and the ledger; then fail if images are refused or failed.

    Raises:
        dg.Failure: after all other work, naming the images with their reasons.
        DagsterExecutionInterruptedError: if this run or a nested one was terminated.
    """
    session, given = data_root.session, config.given()
    refuse_no_images(session.root)
    use(session.root.owners)
    claim_run(context.instance, context.run)
    free_pools(context.instance, context.run)
    if not given and (snapshot := settled_snapshot(session)):
        _end(context, Unchanged(session, snapshot), snapshot.status)
        return
    with open_command(session, parent=context.run) as work:
        _embed_and_publish(work, context.run, config)
        state = read_state(session, work.embedded)
        write_snapshot(work, state, everything=not given)
    _end(context, work, state.status)


def _embed_and_publish(work: CommandSession, run: dg.DagsterRun, config: ResumeConfig) -> None:
    passes = Passes.named([])
    work.embed(passes, limit=config.limit, ids=config.only, packs=True)
    if work.outcomes:
        end_with_nested(work.instance, run, work.outcomes[-1])
    work.publish(passes)
    end_with_nested(work.instance, run, work.outcomes[-1])
    work.end_former_names()


def _end(context: dg.OpExecutionContext, work: Ended, status: Status) -> None:
    """Log the summary, and fail if the nested runs or checks failed, or if images did not reach the output."""
    context.log.info("\n".join(summary_lines(work, status)))
    problems = image_problems(status)
    errors = [work.error] if work.error else work.findings()
    if problems:
        text = "\n".join([not_arrived(problems, "this data root" if not errors else "it"), *errors])
        raise images_failed(text, [problem.item for problem in problems])
    if errors:
        raise ExplainedFailure("\n".join(errors))


def image_problems(status: Status) -> list[InputProblem]:
    """Return the first problem of each image that did not reach the output. Decisions of the user are left out."""
    of_images = {
        problem.item: problem
        for problem in reversed(status.stage2_problems)
        if problem.outcome != "gone"
        and problem.reason not in {*DECISIONS, *OTHER_INPUTS, *OF_LINES}
        and problem.assets != [METADATA]
    }
    return sorted(of_images.values(), key=lambda problem: problem.item)


@dg.job(
    name=RESUME_JOB,
    tags={MAX_RETRIES_TAG: "0", **ROOT_TAGS},  # a retry would meet the same images
    description=(
        "Embed every image whose files are missing, invalid or stale, then write records and the shards that changed, as "
        "`imagemill run` does. Needs no configuration; the finished work of a terminated or killed run is kept. Fails at its end "
        "if images were refused, and names them."
    ),
)
def resume_missing() -> None:
    """Make what is missing, as nested runs."""
    make_missing()
