"""The source of the graph: the folder of approved images, which imagemill never writes."""

import dagster as dg

from assets.partitions import images
from io_managers.viewer import page_shown
from resources.keys import APPROVED_IMAGES, shared_name

approved_images = dg.AssetSpec(
    APPROVED_IMAGES,
    partitions_def=images,
    group_name=shared_name("stage2"),
    kinds={"file"},
    owners=["team:imagemill"],
    metadata=page_shown("all photographs", "images", show="seen"),
    description=(
        "One partition per image of `approved/`, of a format of `inputs.formats`, at its top level, its caption beside it as "
        "`{image_id}.txt`. Read only. New files become partitions through `imagemill run`, the job `resume_missing` or the "
        "sensor, and count as materialized once they were opened; `imagemill explain ID` shows why one is not."
    ),
)
