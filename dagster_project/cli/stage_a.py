"""`imagemill stage-a --mission M`: one-line summaries of a mission's images, merged per group.

    imagemill stage-a --mission M                    one rank, in this process
    imagemill stage-a --mission M --world-size W     W ranks, each in a process of this machine; or a cluster works on all
    torchrun … -m imagemill stage-a                  each process is one rank; rank 0 waits for the others and merges

Spec: docs/spec/conventions.md#command-line
"""

import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_args

import click

from dagster_project.cli.exit_codes import leave_if_ended
from dagster_project.cli.options import accept_node, options, root_options
from imagemill.config import check_kind, file_in_force
from imagemill.domain.layout import DataRoot
from imagemill.domain.ranks import Ranks, ShardingMode, launch_of, ranks_of
from imagemill.errors import ImagemillError, WrongUsage
from imagemill.options import GroupsOptions, RanksOptions, StageAOptions
from imagemill.pipeline.session import Session
from imagemill.pipeline.stage_a.merge import ASSET
from imagemill.pipeline.stage_a.missions import LABEL_NAMES, Discovery, discover, leave_unselected
from imagemill.pipeline.stage_a.rank_files import RANK_DIED
from imagemill.store.ledger import Problem
from imagemill.store.locations import refuse_no_root

# Longest time without output of the other ranks, which may have to load a model of many gigabytes.
WAIT_SECONDS = 1800.0


def _refuse_batching_mode(context: click.Context, option: click.Parameter, given: str | None) -> None:
    if given is not None:
        do = f"use --sharding_mode {{{'|'.join(get_args(ShardingMode))}}}"
        raise WrongUsage("--batching_mode was removed", do=do)


# Options of the original Stage-A that are settings of imagemill.yaml now.
_CONFIGURED = ("checkpoint", "model", "device", "dtype", "max-new-tokens", "temperature")


def _refuse_configured(context: click.Context, option: click.Parameter, given: str | None) -> None:
    if given is None:
        return
    key = "model" if option.name == "checkpoint" else option.name
    raise WrongUsage(
        f"--{option.name} is not an option",
        where=f"summarizer.{key} in imagemill.yaml",
        why="a summary records the model and the settings that made it",
        do=f"set {key} below summarizer in imagemill.yaml, and run again without the option",
    )


def _refused(function: Callable[..., Any]) -> Callable[..., Any]:
    """Accept the options of the original Stage-A that are settings now, and `--batching-mode`, and report their replacement."""
    how: dict[str, Any] = {"is_flag": False, "flag_value": "", "hidden": True, "expose_value": False}
    for name in _CONFIGURED:
        function = click.option(f"--{name}", **how, callback=_refuse_configured)(function)
    return click.option("--batching-mode", **how, callback=_refuse_batching_mode)(function)


@click.command("stage-a", context_settings={"token_normalize_func": lambda name: name.replace("_", "-")})
@click.option("--mission", required=True, help="Name of a folder of the input.")
@options(StageAOptions)
@click.option(
    "--summarizer", metavar="transformers|MODULE:CLASS", help="What makes the summaries (default: imagemill.yaml)."
)
@click.option(
    "--wait-seconds",
    type=click.FloatRange(min=0),
    default=WAIT_SECONDS,
    show_default=True,
    help="Under torchrun: longest silence of the other ranks, and longest that they wait for rank 0 to begin.",
)
@accept_node
@_refused
@root_options
def command(
    session: Session,
    mission: str,
    options: StageAOptions,
    summarizer: str | None,
    wait_seconds: float,
    accept_node: str | None,
) -> None:
    """Summarise every image of a mission in one line, and merge the lines into one record per group."""
    world_size = options.world_size
    if world_size is None and not os.environ.get("WORLD_SIZE"):
        world_size = session.config.stage_a_ranks
    ranks = ranks_of(os.environ, world_size)
    if ranks.rank is not None and session.config.engine.kind != "local":
        raise WrongUsage(
            f"rank {ranks.rank} of torchrun, and engine.kind is {session.config.engine.kind}",
            where=file_in_force(session.root),
            why="the workers of the cluster take the images of all ranks",
            do="run `imagemill stage-a` once, without torchrun; or set engine.kind: local",
        )
    if summarizer:
        check_kind(summarizer, where="--summarizer")
    here = options.located(session.root)
    found = leave_unselected(discover(here.stage_a_input, mission), passes=options.passes, fails=options.fails)
    if ranks.rank:
        _other_rank(here, found, ranks, summarizer, options, wait_seconds)
    else:
        _whole(session, here, found, ranks, summarizer, options, wait_seconds, accept_node)


def _other_rank(
    root: DataRoot, found: Discovery, ranks: Ranks, summarizer: str | None, options: StageAOptions, wait_seconds: float
) -> None:
    """Run a rank of torchrun other than rank 0. It has no Dagster history; its output is its lines and its end mark."""
    from assets.stage_a_groups import rank_options, run_ranks
    from imagemill.pipeline.stage_a.torchrun import stop_if_superseded, wait_for_first
    from resources.engine import LocalProcesses

    assert ranks.rank
    resource, launch = _resource(root, summarizer), launch_of(os.environ)
    plan = options.plan(
        found, resource.identity(found.mission), ranks.world_size, resource.former_identity(found.mission)
    )
    given = rank_options(plan, root, resource, options, launch=launch)
    if not plan.groups:
        return
    output = root.stage_a_output
    wait_for_first(output, found.mission, plan.digest, launch, seconds=wait_seconds)
    go_on = partial(stop_if_superseded, output, found.mission, launch)
    for share in run_ranks(LocalProcesses(workers=1).map_keys, [ranks.rank], given, go_on):
        counts = f"inferred={share.inferred} reused={share.reused} failed={share.failed}"
        click.echo(f"rank {ranks.rank} of {ranks.world_size}: {counts}")
        if share.died:  # not a failure of this process: torchrun would end the others, and rank 0 could not merge
            click.echo(f"imagemill: {share.died}", err=True)


def _whole(
    session: Session,
    here: DataRoot,
    found: Discovery,
    ranks: Ranks,
    summarizer: str | None,
    options: StageAOptions,
    wait_seconds: float,
    accept_node: str | None,
) -> None:
    """Run all ranks, or rank 0 of torchrun; then merge."""
    from dagster_project.work import open_command
    from resources.engine import ConfiguredEngine

    root, resource = session.root, _resource(session.root, summarizer)
    # A mistake or a missing model raises here, and leaves neither a partition nor a run.
    model_metadata = resource.metadata(found.mission)
    resource.factory()
    if found.groups:
        ConfiguredEngine(data_root=resource.data_root, accept_node="").check()
    refuse_no_root(root, may_begin=True)
    _make_folder(here.stage_a_output)
    under_torchrun = ranks.rank is not None
    launch = launch_of(os.environ) if under_torchrun else None
    numbers = [0] if under_torchrun else list(range(ranks.world_size))
    folders = {"input_dir": str(here.stage_a_input), "output_dir": str(here.stage_a_output)}
    completed = options.model_copy(update={**folders, "workers": len(numbers), "world_size": ranks.world_size})
    with open_command(session, may_begin=True) as work:
        for name, folder in options.folders.items():
            session.put(name, folder)
        if found.groups:
            how = {**completed.given(RanksOptions), "launch": launch, "claim_stays": True}
            work.infer_ranks(
                found.mission, numbers, ranks.world_size, summarizer=summarizer, accept_node=accept_node, **how
            )
            if work.interrupted or not work.only_images_failed:
                leave_if_ended(work)
        wait = wait_seconds if under_torchrun else None
        how = {**completed.given(GroupsOptions), "launch": launch, "wait_seconds": wait}
        work.merge_groups(found.mission, summarizer=summarizer, **how)
        if work.interrupted or not work.only_images_failed:
            leave_if_ended(work)
        problems = session.reading.problems()
        rows = [row for row in problems if row.asset == ASSET and row.item.startswith(f"{found.mission}/")]
        _print_summary(found, work.counts(), model_metadata, rows)
        leave_if_ended(work)
    if any(row.reason == RANK_DIED for row in rows):  # a rank of torchrun, whose process alone has reported it
        sys.exit(1)


def _make_folder(output: Path) -> None:
    """Create the output folder first: if it cannot be written to, no image is inferred and the path is not remembered."""
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        what = f"cannot create the output folder: {error.strerror}"
        raise ImagemillError(what, where=output, do="give another --output_dir") from error


def _resource(root: DataRoot, summarizer: str | None) -> Any:
    from resources.data_root import DataRootResource
    from resources.summarizer import SummarizerResource

    data_root = DataRootResource(path=str(root.path), config_file="", output_base_dir="")
    return SummarizerResource(data_root=data_root, kind=summarizer, overrides={})


def _print_summary(
    found: Discovery, counts: dict[str, dict[str, int]], model_metadata: dict[str, str], rows: Sequence[Problem]
) -> None:
    """Print the summary: the summarizer, counters, then every group without a record."""
    revision = f", revision {model_metadata['revision']}" if "revision" in model_metadata else ""
    click.echo(f"summarizer: {model_metadata['summarizer']}{revision}")
    if "preview" in model_metadata:
        click.echo(model_metadata["preview"])
    for what, of in sorted(counts.items(), reverse=True):  # ranks, then groups
        click.echo(f"{what} {found.mission}: {' '.join(f'{name}={count}' for name, count in of.items())}")
    if not counts[ASSET]["groups"]:
        why = "no group was chosen from" if found.groups else "there are no groups in"
        expected = "" if found.groups else f"; groups are folders in {LABEL_NAMES}"
        click.echo(f"imagemill: warning: {why} mission {found.mission}; the output is empty{expected}", err=True)
    for problem in found.problems:
        click.echo(f"{problem.outcome}: {problem.place}: {problem.reason}: {problem.detail}", err=True)
    for row in rows:
        if row.reason == "incomplete_group":
            click.echo(f"failed: {row.detail}", err=True)
