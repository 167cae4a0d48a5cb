"""A registered embedding kind takes two source files: spec, and encoder with its preview recipe. Everything else follows.

The two are tests/helpers/toy_kind/{spec,encoder}.py; command.py there is `imagemill` with them. Kinds of other packages are in
tests/test_plugin.py.
"""

import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import webdataset

from imagemill.domain.layout import DataRoot
from tests.helpers.product import PROJECT, photos

PHOTOS = 3
SHIPPED = ("dinov3_npy", "vae_latents", "t5_hidden")


def python(*arguments):
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=PROJECT, env={**os.environ, "PYTHONPATH": str(PROJECT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip


def toy_imagemill(root, *arguments):
    return python("-m", "tests.helpers.toy_kind.command", *arguments, "--data-root", root.path)


def made(output, kind):
    """Return (files, model calls) of a kind, from the summary's counters."""
    found = re.search(rf"{kind} +(\d+) made in (\d+) model calls?", output)
    assert found, output
    return int(found[1]), int(found[2])


@pytest.fixture(scope="module")
def toy_run(tmp_path_factory):
    """A data root after the main job with the fourth kind, and the output of the command."""
    root = DataRoot(tmp_path_factory.mktemp("toy") / "data")
    photos(root.approved, PHOTOS)
    # Settings of the new kind are known by its name, like those of any other.
    root.config_file.write_text("encoders: {mean_colour: {batch_size: 2}}\n")
    done = toy_imagemill(root, "run")
    assert done.returncode == 0, done.stdout + done.stderr
    return root, done.stdout


def test_toy_kind_is_a_member_of_every_sample_with_the_bytes_of_its_file(toy_run):
    root, _ = toy_run
    tars = [str(tar) for tar in root.shards.glob("*/shard-*.tar")]
    samples = list(webdataset.WebDataset(tars, shardshuffle=False, empty_check=False))

    assert len(samples) == PHOTOS
    for sample in samples:
        image_id = json.loads(sample["json"])["image_id"]
        file = root.derived / "mean_colour" / f"{image_id}.npy"
        assert sample["colour.npy"] == file.read_bytes()
        assert (np.load(file).shape, np.load(file).dtype) == ((5,), np.float32)
        assert sample.keys() >= {"dinov3.npy", "vae.npy", "t5h.npy", "t5m.npy"}


def test_toy_kind_is_in_the_manifest_with_the_preview_model_that_made_it(toy_run):
    root, _ = toy_run
    (manifest,) = (json.loads(path.read_text()) for path in root.shards.glob("*/manifest.json"))

    assert "colour.npy" in manifest["members"]
    assert manifest["provenance"]["mean_colour"]["preview"] is True
    assert manifest["provenance"]["mean_colour"]["facts"]["preprocessing"] == "mean-1"


def test_toy_kind_has_a_counter_and_a_check_in_the_summary(toy_run):
    _, said = toy_run

    files, calls = made(said, "mean_colour")
    assert files == PHOTOS
    assert calls == 2  # the first batch is a single one, then two by its own batch_size
    assert "13 of 13 passed" in said


def test_toy_kind_is_counted_by_status_reported_by_explain_and_read_by_verify(toy_run):
    root, _ = toy_run

    assert f"mean_colour {PHOTOS} done, 0 to do, 0 refused" in toy_imagemill(root, "status").stdout
    assert "file derived/mean_colour/photo0000.npy" in toy_imagemill(root, "explain", "photo0000").stdout

    file = root.derived / "mean_colour" / "photo0001.npy"
    whole, stat = file.read_bytes(), file.stat()
    file.write_bytes(whole[:-1])
    verified = toy_imagemill(root, "verify")
    file.write_bytes(whole)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert verified.returncode == 1
    assert "truncated: photo0001 mean_colour" in verified.stdout


def test_toy_kind_is_a_pass_of_its_own(toy_run):
    root, _ = toy_run
    file = root.derived / "mean_colour" / "photo0002.npy"
    before = file.read_bytes()
    file.unlink()

    done = toy_imagemill(root, "stage2", "--pass", "toy")

    assert done.returncode == 0, done.stdout + done.stderr
    assert made(done.stdout, "mean_colour") == (1, 1)
    assert [made(done.stdout, kind) for kind in SHIPPED] == [(0, 0)] * 3
    assert file.read_bytes() == before


def test_toy_kind_is_named_among_the_passes_where_a_name_is_wrong(toy_run):
    root, _ = toy_run

    for arguments in (("stage2", "--pass", "nonsense"), ("run", "--passes", "nonsense")):
        refused = toy_imagemill(root, *arguments)
        assert refused.returncode == 2
        assert "toy" in refused.stderr


GRAPH = """
import tests.helpers.toy_kind.spec
import dagster as dg
from dagster_project.definitions import build_definitions
from dagster_project.deployments import local_resources

definitions = build_definitions(local_resources("unused"))
graph, toy = definitions.resolve_asset_graph(), dg.AssetKey("mean_colour")
print(toy in graph.get(dg.AssetKey("stage2_jsonl")).parent_keys)
print(toy in {check.asset_key for check in graph.asset_check_keys})
print(toy in definitions.resolve_job_def("embed_images").asset_layer.selected_asset_keys)
print("imagemill/streamed" in graph.get(toy).tags)
"""


def test_toy_kind_is_in_graph_checks_job_and_coordinator():
    """Records depend on it, it has checks, the sensor's job makes it, and a run of the UI reports its images one by one."""
    done = python("-c", GRAPH)

    assert done.stdout.split() == ["True"] * 4, done.stdout + done.stderr
