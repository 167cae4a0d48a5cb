"""Presets made by Dagster in the test's own process, and what lies on disk afterwards."""

import dagster as dg

from dagster_project.deployments import test_resources
from imagemill.formats.jsonl import encode_line
from imagemill.public_data import PublicData
from tests.helpers.public import picture
from tests.helpers.wiring import QUIET

SIZES = [(101, 67), (96, 64), (42, 41)]


def public_data(root) -> PublicData:
    return PublicData(root.public_data)


def make_here(root, instance, asset, key, *checks, **config):
    """One partition of a preset asset, with these checks; a failing step is in the result."""
    instance.add_dynamic_partitions(asset.partitions_def.name, [key])
    return dg.materialize(
        [asset, *checks], partition_key=key, instance=instance, resources=test_resources(str(root.path)),
        run_config={**QUIET, "ops": {asset.op.name: {"config": config}}}, raise_on_error=False,
    )  # fmt: skip


def coco_annotations(folder, sizes=SIZES, objects=1, split="train"):
    """A file of COCO annotations with `objects` boxes in the first image, one more in each next, and its images."""
    images, annotations = [], []
    for number, (width, height) in enumerate(sizes):
        name = f"{split}{number}.jpg"
        path = folder / "images" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(picture(width, height, seed=number))
        images.append({"id": number, "file_name": name, "width": width, "height": height})
        for n in range(objects + number):
            annotations.append(
                {"id": len(annotations), "image_id": number, "category_id": 1, "bbox": [n, 2, 20, 30], "iscrowd": 0}
            )
    file = folder / f"instances_{split}.json"
    categories = [{"id": 1, "name": "bowl"}]
    file.write_bytes(encode_line({"images": images, "annotations": annotations, "categories": categories}))
    return file


def inodes(preset):
    """Inode and mtime of each image of a preset, by its path."""
    stats = {path: path.lstat() for path in preset.images.rglob("*") if not path.is_dir()}
    return {str(path.relative_to(preset.path)): (stat.st_ino, stat.st_mtime_ns) for path, stat in stats.items()}
