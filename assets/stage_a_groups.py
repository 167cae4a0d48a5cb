"""Stage-A: one-line summaries of a mission's images by ranks, merged into one record per group.

stage_a_ranks <mission>/<r>of<W>  ─▶  stage_a_groups <mission>

A rank's lines belong to a plan (groups, sampling, mode, world size, summarizer). Both assets build the plan from the same
configuration, and the merge ignores lines of other plans.

One rank is implemented in pipeline/stage_a/worker.py, the merge in pipeline/stage_a/merge.py.
Spec: docs/spec/stage-a.md#work
"""

import os
import re
import sys
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import dagster as dg

from assets.command_options import RankOptions, read_options
from assets.partitions import asset, missions, ranged_asset, ranks
from imagemill.domain.layout import DataRoot
from imagemill.domain.ranks import processes_here
from imagemill.errors import ImagemillError, WrongUsage, disk_full_reported
from imagemill.fs.atomic import sweep_temporaries
from imagemill.options import GroupsOptions, RanksOptions
from imagemill.pipeline.leases import claimed
from imagemill.pipeline.stage_a.merge import (
    ASSET,
    MergeResult,
    counts_of,
    ended_on_another_plan,
    failed_groups,
    finish_stage_a,
    late_ranks,
    nothing_written,
    stage_a_problems,
    warnings,
)
from imagemill.pipeline.stage_a.missions import Discovery, discover, leave_unselected
from imagemill.pipeline.stage_a.plan import StageAPlan
from imagemill.pipeline.stage_a.rank_files import left_behind, output_file, rank_file
from imagemill.pipeline.stage_a.summaries import import_summaries, summaries_folder
from imagemill.pipeline.stage_a.torchrun import FIRST, wait_for_ranks
from imagemill.pipeline.stage_a.worker import RankResult, RankRunner, close_dead_rank
from imagemill.store.ledger import Ledger
from io_managers.figures import with_units
from io_managers.viewer import page_shown
from resources.dagster_internals.events import ExplainedFailure, images_failed
from resources.data_root import DataRootResource
from resources.engine import ConfiguredEngine
from resources.summarizer import SummarizerResource

RANKS = "stage_a_ranks"

# Each mission has one claim, for its ranks and its merge.
CLAIM = "stage_a"

_KEY = re.compile(r"(?P<mission>.+)/(?P<rank>0|[1-9][0-9]*)of(?P<world>[1-9][0-9]*)")


class RanksConfig(dg.Config, RanksOptions):
    """Options of the ranks."""


class GroupsConfig(dg.Config, GroupsOptions):
    """Options of the merge of a mission."""


def rank_key(mission: str, rank: int, world_size: int) -> str:
    """Return the partition key of a rank."""
    return f"{mission}/{rank}of{world_size}"


def split_rank_keys(keys: Sequence[str]) -> tuple[str, list[int], int]:
    """Return mission, ranks and world size of some partitions.

    Raises:
        WrongUsage: for a key of another form, and for keys of two missions or world sizes.
    """
    matches = [_KEY.fullmatch(key) for key in keys]
    parts = {(match["mission"], int(match["world"])) for match in matches if match}
    numbers = [int(match["rank"]) for match in matches if match]
    if len(numbers) < len(keys) or len(parts) != 1:
        do = "choose the ranks of one mission and one world size, such as mission/0of2 and mission/1of2"
        raise WrongUsage(f"no ranks of one mission: {', '.join(keys[:4])}", do=do)
    ((mission, world_size),) = parts
    return mission, numbers, world_size


@ranged_asset(
    partitions_def=ranks,
    group_name="stage_a",
    kinds={"json"},
)
def stage_a_ranks(
    context: dg.AssetExecutionContext,
    config: RanksConfig,
    data_root: DataRootResource,
    engine: ConfiguredEngine,
    summarizer: SummarizerResource,
) -> dg.MaterializeResult:
    """`<mission>_stage_a.images.rank<r>.jsonl`: one line per image of a rank. Several ranks of a run use several processes."""
    mission, numbers, world_size = split_rank_keys(context.partition_keys)
    root = config.located(data_root.root())
    given = read_options(context, RankOptions)
    ledger = data_root.session.ledger
    with claimed(ledger, CLAIM, [mission], context.run.run_id, stays=given.claim_stays):
        plan = config.plan(
            discover(root.stage_a_input, mission),
            summarizer.identity(mission),
            world_size,
            summarizer.former_identity(mission),
        )
        model_metadata = summarizer.metadata(mission)
        workers = min(config.workers, len(numbers))
        here = engine.processes_here(workers)
        options = rank_options(plan, root, summarizer, config, launch=given.launch or "", processes=here)
        for folder in (options["output"], options["store"]):
            sweep_temporaries(folder)
        import_summaries(ledger, mission, options["output"], options["store"])
        shares = list(run_ranks(partial(engine.map_keys, workers=workers), numbers if plan.groups else [], options))
        import_summaries(ledger, mission, options["output"], options["store"])
        ledger.record_counts(context.run.run_id, RANKS, _sum(shares))
    path = dg.MetadataValue.path(str(root.stage_a_output))
    _refuse_dead(context, mission, world_size, shares, {"path": path, **model_metadata})
    for share in shares:
        context.add_asset_metadata(
            with_units(_sum([share]), "images"), partition_key=rank_key(mission, share.rank, world_size)
        )
    return dg.MaterializeResult(metadata={"path": path, **model_metadata})


def run_ranks(
    map_keys: Callable[..., Iterator[RankResult]],
    numbers: Sequence[int],
    options: Mapping[str, Any],
    go_on: Callable[[], None] | None = None,
) -> Iterator[RankResult]:
    """Run each of these ranks to its end. A rank whose process dies is closed, and the others continue.

    Images that an earlier rank left unfinished when its process died are processed in a child process.

    Args:
        map_keys: method of an engine.
        numbers: the ranks.
        options: arguments of RankRunner, from `rank_options`.
        go_on: argument of RankRunner.
    """
    plan, store = options["plan"], options["store"]
    behind = left_behind(store)
    apart = any(plan.split_jobs(rank, behind)[1] for rank in numbers)
    died = partial(close_dead_rank, plan, options["output"], store, options["launch"])
    return map_keys(RankRunner, numbers, died, apart=apart, options=options, go_on=go_on)


def _refuse_dead(
    context: dg.AssetExecutionContext,
    mission: str,
    world_size: int,
    shares: Sequence[RankResult],
    metadata: Mapping[str, Any],
) -> None:
    """Fail the step if ranks died, after reporting the others to Dagster. The merge lists the groups that are lost by this."""
    dead = [share for share in shares if share.died]
    if not dead:
        return
    for share in shares:
        if not share.died:
            key = rank_key(mission, share.rank, world_size)
            shown = {**metadata, **with_units(_sum([share]), "images")}
            context.log_event(dg.AssetMaterialization(RANKS, partition=key, metadata=shown))
    failure = ImagemillError(
        "\n".join(share.died for share in dead),
        why="the system ended it, for example because memory ran out, or one of these images crashed it",
        do="run again: finished images are kept, and these images are processed last, in a separate process",
    )
    raise images_failed(str(failure), [rank_key(mission, share.rank, world_size) for share in dead])


def rank_options(
    plan: StageAPlan,
    root: DataRoot,
    summarizer: SummarizerResource,
    config: RanksOptions,
    *,
    launch: str = "",
    processes: int = 1,
) -> dict[str, Any]:
    """Return the arguments of a RankRunner in any process.

    Args:
        plan: the plan of the mission.
        root: data root with the folders of the plan.
        summarizer: source of the summarizer.
        config: options of the ranks.
        launch: name of the torchrun start that the rank belongs to.
        processes: number of ranks that this process runs at a time.
    """
    return {
        "plan": plan,
        "summarizer": summarizer.factory(processes * processes_here(os.environ)),
        "output": root.stage_a_output,
        "store": summaries_folder(root.state, plan.mission),
        "batch_size": config.batch_size or summarizer.settings().batch_size,
        "launch": launch,
        "fresh": config.fresh,
        "color": summarizer.data_root.session.inputs.color,
    }


def _sum(shares: Sequence[RankResult]) -> dict[str, int]:
    return {name: sum(getattr(share, name) for share in shares) for name in ("inferred", "reused", "failed")}


@asset(
    deps=[dg.AssetDep(stage_a_ranks, partition_mapping=dg.AllPartitionMapping())],
    partitions_def=missions,
    group_name="stage_a",
    kinds={"json"},
    look=page_shown("images beside their summaries", "presets"),
)
def stage_a_groups(
    context: dg.AssetExecutionContext,
    config: GroupsConfig,
    data_root: DataRootResource,
    summarizer: SummarizerResource,
) -> dg.MaterializeResult:
    """`<mission>_stage_a.jsonl`: one record per group whose images all have a summary; the other groups are listed."""
    mission, root = context.partition_key, config.located(data_root.root())
    given = read_options(context, RankOptions)
    output, store = root.stage_a_output, summaries_folder(root.state, mission)
    ledger = data_root.session.ledger
    with claimed(ledger, CLAIM, [mission], context.run.run_id):
        found = leave_unselected(discover(root.stage_a_input, mission), passes=config.passes, fails=config.fails)
        world_size = config.world_size or data_root.session.config.stage_a_ranks
        plan = config.plan(found, summarizer.identity(mission), world_size, summarizer.former_identity(mission))
        late = _wait(plan, output, given)
        sweep_temporaries(output)
        model_metadata = summarizer.metadata(mission)
        others = _ended_elsewhere(plan, late, given, model_metadata)
        with disk_full_reported(output):
            merged = finish_stage_a(
                plan, output, store, ledger, launch=given.launch, keep=config.keep, failed=len(found.failed)
            )
        _record(ledger, found, merged)
        ledger.record_counts(context.run.run_id, ASSET, counts_of(found, merged))
    for event in others:
        context.log_event(event)
    if merged.exit_code:
        raise ExplainedFailure(nothing_written(found, merged), _pages(found, merged))
    _forget_ranks(context.instance, mission, {plan.ranks.world_size, data_root.session.config.stage_a_ranks})
    for line in late_ranks(merged):
        print(f"stage-a {mission}: {line}", file=sys.stderr)
    path = dg.MetadataValue.path(str(output_file(output, mission)))
    counts = with_units(counts_of(found, merged), "groups", missing_ranks="ranks", rank_files_removed="files")
    return dg.MaterializeResult(metadata={**counts, **_pages(found, merged), "path": path, **model_metadata})


def _forget_ranks(instance: dg.DagsterInstance, mission: str, kept: Container[int]) -> None:
    """Delete the partitions of a mission's ranks of other world sizes, which would be shown as missing."""
    assert ranks.name
    for key in instance.get_dynamic_partitions(ranks.name):
        match = _KEY.fullmatch(key)
        if match and match["mission"] == mission and int(match["world"]) not in kept:
            instance.delete_dynamic_partition(ranks.name, key)


def _wait(plan: StageAPlan, output: Path, given: RankOptions) -> list[int]:
    """Wait until all ranks have ended, or none has written anything for `wait_seconds`; return the ranks that have not ended."""
    late = list(range(plan.ranks.world_size)) if plan.groups else []
    if given.launch is not None and ended_on_another_plan(plan, output, FIRST):
        return late  # the other ranks have the same plan as this process had
    written = -1
    while late and written != (written := _size(plan, output, late)):
        late = wait_for_ranks(output, plan.mission, late, plan.digest, given.launch, seconds=given.wait_seconds)
    return late


def _size(plan: StageAPlan, output: Path, numbers: Sequence[int]) -> int:
    """Return the size of these ranks' files in bytes."""
    paths = [rank_file(output, plan.mission, rank) for rank in numbers]
    return sum(path.stat().st_size for path in paths if path.is_file())


def _ended_elsewhere(
    plan: StageAPlan, late: Sequence[int], given: RankOptions, model_metadata: Mapping[str, str]
) -> list[dg.AssetMaterialization]:
    """Return events of the other ranks of a torchrun start. They do not report their end; rank 0 does, before their files go."""
    if given.launch is None or not plan.groups:
        return []
    ended = [rank for rank in range(1, plan.ranks.world_size) if rank not in late]
    keys = [rank_key(plan.mission, rank, plan.ranks.world_size) for rank in ended]
    return [dg.AssetMaterialization(RANKS, partition=key, metadata=dict(model_metadata)) for key in keys]


def _record(ledger: Ledger, found: Discovery, merged: MergeResult) -> None:
    """Replace the mission's problems; those of other missions stay."""
    problems = stage_a_problems(found, merged)
    ledger.replace_problems(ASSET, problems, lambda problem: problem.item.startswith(f"{found.mission}/"))


def _pages(found: Discovery, merged: MergeResult) -> dict[str, Any]:
    pages = {"failed groups": [*late_ranks(merged), *failed_groups(found, merged)], "warnings": warnings(found)}
    return {
        name: dg.MetadataValue.md("\n".join(f"- {line}" for line in lines)) for name, lines in pages.items() if lines
    }
