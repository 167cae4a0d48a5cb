"""Dagster definitions: assets, checks, jobs, sensors, and the resources of the chosen deployment.

Loads without torch, transformers, diffusers and webdataset, which are imported only when a run needs them.
"""

import dagster as dg

import dagster_project  # noqa: F401 (first, because workspace.yaml names this file instead of a module)
from dagster_project.configured_kinds import KIND_CHECKS, without_kinds  # before the assets, which follow the kinds
from dagster_project.deployments import Resources, chosen_resources
from dagster_project.jobs import (
    embed_images,
    embed_range,
    publish_shards,
    roll_back_to_stage1,
    verify_stage2_files,
    verify_weekly,
)
from dagster_project.lineage import with_lineage, without_unpublished
from dagster_project.resume import resume_missing
from dagster_project.sensors import configured_presets, found_missions, new_images


def build_definitions(resources: Resources) -> dg.Definitions:
    """Return the code location with these resources."""
    assets, checks = without_kinds(
        dg.load_assets_from_package_name("assets", include_specs=True),
        dg.load_asset_checks_from_package_name("checks"),
    )
    assets, checks = without_unpublished(assets, checks, resources["data_root"])
    return dg.Definitions(
        assets=with_lineage(assets, resources["data_root"]),
        asset_checks=[*checks, *KIND_CHECKS],
        jobs=[resume_missing, embed_images, embed_range, publish_shards, verify_stage2_files, roll_back_to_stage1],
        schedules=[verify_weekly],
        sensors=[new_images, configured_presets, found_missions],
        resources=resources,
        # The multiprocess executor costs seconds per step, and its children outlive a killed run.
        executor=dg.in_process_executor,
    )


@dg.definitions
def defs() -> dg.Definitions:
    """Return the code location of the chosen deployment."""
    return build_definitions(chosen_resources())
