"""Dagster definitions: assets, checks, jobs, sensors, and the resources of the chosen deployment.

Loads without torch, transformers, diffusers and webdataset, which are imported only when a run needs them.
"""

import dagster as dg

import dagster_project  # noqa: F401 (first, because workspace.yaml names this file instead of a module)
from assets.approved_images import approved_images
from assets.bucket_shards import bucket_shards
from assets.embeddings import embedding_assets
from assets.latent_statistics import latent_statistics
from assets.near_duplicates import near_duplicates
from assets.presets import derived_preset, raw_dataset, rescale_preset
from assets.stage2_jsonl import stage2_jsonl
from assets.stage_a_groups import stage_a_groups, stage_a_ranks
from checks.bucket_shards import shard_checks
from checks.embeddings import embedding_checks
from checks.latent_statistics import statistics_checks
from checks.near_duplicates import near_duplicate_checks
from checks.presets import preset_checks
from checks.stage2_jsonl import stage2_checks
from checks.stage_a_groups import stage_a_checks
from dagster_project.deployments import Resources, chosen_resources
from dagster_project.jobs import embed_images, publish_shards, roll_back_to_stage1, verify_stage2_files
from dagster_project.sensors import configured_presets, found_missions, new_images


def build_definitions(resources: Resources) -> dg.Definitions:
    """Return the code location with these resources."""
    return dg.Definitions(
        assets=[
            approved_images,
            *embedding_assets,
            stage2_jsonl,
            latent_statistics,
            near_duplicates,
            bucket_shards,
            raw_dataset,
            rescale_preset,
            derived_preset,
            stage_a_ranks,
            stage_a_groups,
        ],
        asset_checks=[
            *embedding_checks,
            *stage2_checks,
            *statistics_checks,
            *near_duplicate_checks,
            *shard_checks,
            *preset_checks,
            *stage_a_checks,
        ],
        jobs=[embed_images, publish_shards, verify_stage2_files, roll_back_to_stage1],
        sensors=[new_images, configured_presets, found_missions],
        resources=resources,
        # The multiprocess executor costs seconds per step, and its children outlive a killed run.
        executor=dg.in_process_executor,
    )


@dg.definitions
def defs() -> dg.Definitions:
    """Return the code location of the chosen deployment."""
    return build_definitions(chosen_resources())
