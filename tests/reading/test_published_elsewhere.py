"""Other libraries read every sample of a published version over HTTP, as docs/how-to/object-storage.md says.

Spec: docs/spec/object-storage.md#published-version
"""

import json
import os
import subprocess
import sys
import time

import msgspec
import pytest
import webdataset

from imagemill.formats.published import POINTER, decode_pointer, set_key
from imagemill.fs.blobs import StorageSettings
from imagemill.fs.location import Location
from imagemill.fs.objects import Objects
from imagemill.pipeline.push import Publisher, PushRequest
from imagemill.store.ledger import Ledger
from tests.helpers.s3 import fault_proxy, s3_server
from tests.helpers.shard_sets import shard_set

SIZES = {f"wide{n}": (304, 208) for n in range(250)} | {f"square{n}": (256, 256) for n in range(150)}


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A proxy that anybody may read through, the location of 400 samples, and the ids of their sets."""
    root = shard_set(tmp_path_factory.mktemp("sets") / "data", SIZES, shard_size=30)
    location = Location("s3", "training", f"cats-{time.time_ns()}")
    with s3_server() as server, fault_proxy(server) as proxy, pytest.MonkeyPatch.context() as environment:
        server.make_bucket("training")
        for name, value in proxy.environment.items():
            environment.setenv(name, value)
        store = Objects(location, StorageSettings(allow_http=True))
        Publisher(store, root.shards, Ledger(root.ledger), "root", "a test").push(PushRequest())
        proxy.public = True
        sets = decode_pointer(store.read(POINTER)[0], location).sets
        yield proxy, store, sets


@pytest.fixture(scope="module")
def tars(published):
    """The URL of every tar, by bucket."""
    proxy, store, sets = published
    base = f"{proxy.url}/{store.location.bucket}/{store.location.prefix}"
    return {
        bucket: [f"{base}/{key}" for key in store.read(set_key(identifier, "shards.txt"))[0].decode().split()]
        for bucket, identifier in sets.items()
    }


@pytest.mark.parametrize("form", ["{}", "pipe:curl --silent --fail {}"])
def test_webdataset(tars, form):
    urls = [form.format(url) for each in tars.values() for url in each]

    ids = [json.loads(sample["json"])["image_id"] for sample in webdataset.WebDataset(urls, shardshuffle=False)]

    assert sorted(ids) == sorted(SIZES)


def test_webdataset_through_the_command_line_of_aws(published):
    proxy, store, sets = published
    uv = os.path.join(os.path.dirname(sys.executable), "uv")
    tool = [uv, "tool", "run", "--quiet", "--from", "awscli==1.44.0", "aws"]
    if subprocess.run([*tool, "--version"], capture_output=True, check=False).returncode:
        pytest.skip("the command line of aws cannot be installed: uv tool run --from awscli aws")
    keys = [
        key for identifier in sets.values() for key in store.read(set_key(identifier, "shards.txt"))[0].decode().split()
    ]
    command = f"pipe:{' '.join(tool)} --endpoint-url {proxy.url} s3 cp {store.location}/%s -"

    ids = [
        json.loads(sample["json"])["image_id"]
        for sample in webdataset.WebDataset([command % key for key in keys], shardshuffle=False)
    ]

    assert sorted(ids) == sorted(SIZES)


def test_hugging_face_datasets(tars, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    datasets = pytest.importorskip("datasets", reason="datasets is not installed: pip install '.[dev]'")
    ids = []
    for urls in tars.values():
        dataset = datasets.load_dataset("webdataset", data_files={"train": urls}, split="train", streaming=True)
        for sample in dataset.with_format("numpy"):
            ids.append(sample["json"]["image_id"])
            assert sample["vae.npy"].shape[0] == 16

    assert sorted(ids) == sorted(SIZES)


def test_energon(published, tmp_path, monkeypatch):
    reason = "megatron-energon is not installed: pip install '.[dev]'"
    energon = pytest.importorskip("megatron.energon", reason=reason)
    from imagemill.reading.energon import BucketEncoder

    proxy, store, sets = published
    options = {"base_path": "training", "endpoint_url": proxy.url, "region_name": "us-east-1"}
    config = {"profiles": {"training": {"storage_provider": {"type": "s3", "options": options}}}}
    (tmp_path / "msc.json").write_bytes(msgspec.json.encode(config))
    monkeypatch.setenv("MSC_CONFIG", str(tmp_path / "msc.json"))
    ids = []
    for identifier in sets.values():
        dataset = energon.get_train_dataset(
            f"msc://training/{store.location.prefix}/sets/{identifier}",
            task_encoder=BucketEncoder(1), batch_size=None, repeat=False,
            worker_config=energon.WorkerConfig(rank=0, world_size=1, num_workers=0),
            shuffle_buffer_size=None, max_samples_per_sequence=None,
        )  # fmt: skip
        ids += [image_id for batch in energon.get_loader(dataset) for image_id in batch["image_id"]]

    assert sorted(ids) == sorted(SIZES)
