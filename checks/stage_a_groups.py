"""Checks of Stage-A: every line of a run's ranks can be read, and every output record obeys the validator's rules."""

from pathlib import Path
from typing import Any

import dagster as dg

from assets.partitions import ranks
from assets.stage_a_groups import RANKS, split_rank_keys, stage_a_groups, stage_a_ranks
from imagemill.pipeline.stage_a.merge import ASSET as GROUPS
from imagemill.pipeline.stage_a.rank_files import output_file, parse_rank_line, rank_file
from imagemill.store.locations import at
from imagemill.validation.stage_a import SUFFIX
from imagemill.validation.validator import validate
from io_managers.check_results import as_result
from resources.data_root import DataRootResource
from resources.keys import op_name

_KEY_TAG = "dagster/partition"
_RANGE_TAGS = ("dagster/asset_partition_range_start", "dagster/asset_partition_range_end")


@dg.asset_check(asset=stage_a_ranks)
def lines_whole(context: dg.AssetCheckExecutionContext, data_root: DataRootResource) -> dg.AssetCheckResult:
    """Every line written by a rank of this run can be read. Files that a merge has removed are not required."""
    folder = _output(context, data_root, RANKS)
    paths = [rank_file(folder, mission, rank) for mission, rank in _ranks(context)]
    paths = [path for path in paths if path.is_file()] if paths else sorted(folder.glob("*_stage_a.images.rank*.jsonl"))
    lines = torn = failed = 0
    for path in paths:
        with open(path, "rb") as file:
            for raw in file:
                line = parse_rank_line(raw)
                lines, torn, failed = lines + 1, torn + (line is None), failed + (line is not None and not line.ok)
    text = f"{torn} of {lines} lines cannot be read" if torn else "no findings"
    return dg.AssetCheckResult(
        passed=not torn, description=text, metadata={"checked": lines, "errors": torn, "images failed": failed}
    )


@dg.asset_check(asset=stage_a_groups, blocking=True)
def groups_valid(context: dg.AssetCheckExecutionContext, data_root: DataRootResource) -> dg.AssetCheckResult:
    """Every record has the five fields, a label, and images matching image_1 … image_N, each one line of text; no group twice."""
    folder = _output(context, data_root, GROUPS)
    key = context.run.tags.get(_KEY_TAG)
    paths = [output_file(folder, key)] if key else sorted(folder.glob(f"*{SUFFIX}"))
    return as_result(*(validate(path, kind="stage-a") for path in paths))


def _output(context: dg.AssetCheckExecutionContext, data_root: DataRootResource, asset: str) -> Path:
    """Return the output folder of the asset in this run, or the remembered folder if the check runs by itself."""
    run_config: Any = context.run.run_config
    folder = run_config.get("ops", {}).get(op_name(asset), {}).get("config", {}).get("output_dir")
    root = data_root.root()
    return (at(root, "stage_a_output", folder) if folder else root).stage_a_output


def _ranks(context: dg.AssetCheckExecutionContext) -> list[tuple[str, int]]:
    """Return the ranks of the run; empty if the check runs by itself."""
    tags = context.run.tags
    ends = [tags[name] for name in _RANGE_TAGS if name in tags]
    if ends:
        keys = list(context.instance.get_dynamic_partitions(str(ranks.name)))
        keys = keys[keys.index(ends[0]) : keys.index(ends[-1]) + 1]
    else:
        keys = [tags[_KEY_TAG]] if _KEY_TAG in tags else []
    if not keys:
        return []
    mission, numbers, _ = split_rank_keys(keys)
    return [(mission, rank) for rank in numbers]
