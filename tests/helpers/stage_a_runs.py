"""The assets of Stage-A run by Dagster in the test's own process, and what they leave."""

import json

import dagster as dg

from assets.partitions import missions, ranks
from assets.stage_a_groups import rank_key, stage_a_groups, stage_a_ranks
from dagster_project.deployments import test_resources
from imagemill.pipeline.rank_files import output_file
from resources.summarizer import SummarizerResource
from tests.helpers.stage_a import MISSION
from tests.helpers.summarizers import MODULE
from tests.helpers.wiring import QUIET

NAMED = f"{MODULE}:Named"


def run(root, instance, asset, *checks, tags=None, key=None, summarizer=NAMED, **config):
    """One run of an asset of Stage-A; a failing step is in the result."""
    resources = test_resources(str(root.path))
    resources["summarizer"] = SummarizerResource(data_root=resources["data_root"], kind=summarizer, overrides={})
    return dg.materialize(
        [asset, *checks], instance=instance, resources=resources, tags=tags, partition_key=key,
        run_config={**QUIET, "ops": {asset.op.name: {"config": config}}}, raise_on_error=False,
    )  # fmt: skip


def rank(root, instance, number, world_size, *checks, mission=MISSION, **config):
    """One rank as one partition."""
    key = rank_key(mission, number, world_size)
    instance.add_dynamic_partitions(ranks.name, [key])
    return run(root, instance, stage_a_ranks, *checks, key=key, **config)


def merge(root, instance, *checks, mission=MISSION, **config):
    instance.add_dynamic_partitions(missions.name, [mission])
    return run(root, instance, stage_a_groups, *checks, key=mission, **config)


def groups(root):
    """What was written: group id → summaries."""
    lines = output_file(root.stage_a_output, MISSION).read_bytes().splitlines()
    return {record["group_id"]: list(record["per_image"].values()) for record in map(json.loads, lines)}


def metadata(instance, asset):
    event = instance.get_latest_materialization_event(dg.AssetKey(asset))
    return {name: value.value for name, value in event.asset_materialization.metadata.items()}
