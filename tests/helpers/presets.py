"""Presets made by Dagster in the test's own process, and the resulting files."""

import io
import os
import shutil
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from typing import NamedTuple
from unittest import mock

import dagster as dg
import pytest

from dagster_project.cli.main import main
from dagster_project.deployments import test_resources
from imagemill.domain.preset_names import MAX_OBJECTS_VARIABLE, parse_preset
from imagemill.formats.jsonl import encode_line
from imagemill.pipeline.presets.derive import coord
from imagemill.pipeline.presets.rescale import plan_rescale, run_rescale
from imagemill.pipeline.presets.rescale_plan import choose_parameters
from imagemill.store.public_data import PublicData
from resources.engine import Engine
from tests.helpers.product import PROJECT
from tests.helpers.public import picture, put_records, raw_dataset, record
from tests.helpers.wiring import QUIET

SIZES = [(101, 67), (96, 64), (42, 41)]


def public_data(root) -> PublicData:
    return PublicData(root.public_data)


def make_here(root, instance, asset, key, *checks, **config):
    """Make one partition of a preset asset, with these checks; a failing step is in the result."""
    instance.add_dynamic_partitions(asset.partitions_def.name, [key])
    return dg.materialize(
        [asset, *checks], partition_key=key, instance=instance, resources=test_resources(str(root.path)),
        run_config={**QUIET, "ops": {asset.op.name: {"config": config}}}, raise_on_error=False,
    )  # fmt: skip


def coco_annotations(folder, sizes=SIZES, objects=1, split="train"):
    """Write COCO annotations with `objects` boxes in the first image and one more in each next, and the images."""
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
    """Return inode and mtime of each image of a preset by path, without temporary files."""
    paths = [path for path in preset.images.rglob("*") if not path.name.startswith(".tmp-") and not path.is_dir()]
    stats = {path: path.lstat() for path in paths}
    return {str(path.relative_to(preset.path)): (stat.st_ino, stat.st_mtime_ns) for path, stat in stats.items()}


def rescale_here(dataset, preset="p", *, engine=None, splits=None, library="pillow", **asked):
    """Call the pipeline's functions alone, with Pillow, which starts faster than torch."""
    parameters = choose_parameters(dataset.preset(preset), library=library, **asked)
    return run_rescale(plan_rescale(dataset, preset, parameters, splits), (engine or Engine()).map_batches)


def coord_here(dataset, name="p", **options):
    return coord(dataset, parse_preset(name), **options)


class Done(NamedTuple):
    """Output and exit code of a command."""

    returncode: int
    stdout: str
    stderr: str


def imagemill_here(root, *arguments, **environment) -> Done:
    """Run a command in the test's own process, which saves its start-up time; variables that it sets are gone afterwards."""
    out, err = io.StringIO(), io.StringIO()
    with mock.patch.dict(os.environ), pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.delenv(MAX_OBJECTS_VARIABLE, raising=False)
        patch.setenv("IMAGEMILL_DATA_ROOT", str(root.path))
        patch.setattr(sys, "argv", ["imagemill", *map(str, arguments)])
        for name, value in environment.items():
            patch.setenv(name, str(value))
        try:
            main()
        except SystemExit as end:
            return Done(int(end.code or 0), out.getvalue(), err.getvalue())
    return Done(0, out.getvalue(), err.getvalue())


def public_data_runner(folder):
    """`public_data/` in a folder, with run.sh, presets.yaml and a raw dataset: one of its images has 61 objects.

    Returns a function that runs a line of shell in the folder; it returns the finished process and the dataset.
    """
    shutil.copytree(PROJECT / "examples" / "public_data", folder / "public_data")
    program = folder / "bin" / "imagemill"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m dagster_project.cli.main "$@"\n')
    program.chmod(0o755)
    sizes = [(900, 1000), (96, 64), (42, 41)]
    dataset = raw_dataset(folder / "public_data" / "coco", sizes)
    thing = {"desc": "thing", "bbox_2d": [1, 2, 30, 31]}
    for split in ("train", "val"):
        records = [
            record(f"{n}.jpg", *size, *[thing] * count)
            for (n, size), count in zip(enumerate(sizes), (61, 60, 1), strict=True)
        ]
        put_records(dataset, records, split)
    environment = {"PATH": f"{program.parent}:/usr/bin:/bin", "PYTHONPATH": str(PROJECT), "HOME": str(folder)}

    def run(line):
        done = subprocess.run(
            ["/bin/bash", "-c", line], cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
        return done, dataset

    return run
