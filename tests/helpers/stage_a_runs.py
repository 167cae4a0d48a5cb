"""The assets of Stage-A run by Dagster in the test's own process, and their output."""

import json

import dagster as dg
from PIL import Image

from assets.command_options import split_options
from assets.partitions import missions, ranks
from assets.stage_a_groups import rank_key, stage_a_groups, stage_a_ranks
from dagster_project.deployments import test_resources
from imagemill.config import SummarizerSettings
from imagemill.encoders.prompts import Prompts
from imagemill.encoders.recipes import SummarizerModel
from imagemill.formats.images import decode_rgb
from imagemill.models import NamedImage
from imagemill.pipeline.stage_a.missions import discover
from imagemill.pipeline.stage_a.rank_files import output_file
from imagemill.pipeline.stage_a.summaries import clean_answer
from resources.summarizer import SummarizerResource
from tests.helpers.stage_a import MISSION
from tests.helpers.summarizers import MODULE
from tests.helpers.wiring import QUIET

NAMED = f"{MODULE}:Named"


def run(root, instance, asset, *checks, tags=None, key=None, summarizer=NAMED, **config):
    """Run an asset of Stage-A once; a failing step is in the result."""
    resources = test_resources(str(root.path))
    resources["summarizer"] = SummarizerResource(data_root=resources["data_root"], kind=summarizer, overrides={})
    config, options = split_options(config)
    return dg.materialize(
        [asset, *checks], instance=instance, resources=resources, tags={**(tags or {}), **options}, partition_key=key,
        run_config={**QUIET, "ops": {asset.op.name: {"config": config}}}, raise_on_error=False,
    )  # fmt: skip


def rank(root, instance, number, world_size, *checks, mission=MISSION, **config):
    """Run one rank as one partition."""
    key = rank_key(mission, number, world_size)
    instance.add_dynamic_partitions(ranks.name, [key])
    return run(root, instance, stage_a_ranks, *checks, key=key, **config)


def merge(root, instance, *checks, mission=MISSION, **config):
    instance.add_dynamic_partitions(missions.name, [mission])
    return run(root, instance, stage_a_groups, *checks, key=mission, **config)


def groups(root):
    """Return the written summaries by group id."""
    lines = output_file(root.stage_a_output, MISSION).read_bytes().splitlines()
    return {record["group_id"]: list(record["per_image"].values()) for record in map(json.loads, lines)}


def summaries_written(root):
    """Return `group_id::label` → file name → summary; coverage is strict, and no group occurs twice."""
    lines = output_file(root.stage_a_output, MISSION).read_bytes().splitlines()
    written = {}
    for record in map(json.loads, lines):
        assert list(record["per_image"]) == [f"image_{n}" for n in range(1, len(record["images"]) + 1)]
        texts = record["per_image"].values()
        written[f"{record['group_id']}::{record['label']}"] = dict(zip(record["images"], texts, strict=True))
    assert len(written) == len(lines)
    return written


def summaries_alone(root):
    """Return the preview model's answers for single images, without ranks, batches, lines or a merge."""
    model = SummarizerModel(SummarizerSettings(), Prompts({}), 1, root.preview_models, ["auto"])(0)
    found = discover(root.stage_a_input, MISSION)
    expected = {}
    for group in found.groups:
        for index, name in enumerate(group.images, start=1):
            pixels = decode_rgb((found.folder / group.image_place(index)).read_bytes(), name)
            (answer,) = model.summarize([NamedImage(name, Image.fromarray(pixels))], MISSION)
            expected.setdefault(f"{group.group_id}::{group.label}", {})[name] = clean_answer(answer)
    return expected


def metadata(instance, asset):
    event = instance.get_latest_materialization_event(dg.AssetKey(asset))
    return {name: value.value for name, value in event.asset_materialization.metadata.items()}
