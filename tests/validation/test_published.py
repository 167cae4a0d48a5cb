"""Published sets keep the rules of sets on a disk, and every damage to an object is found.

Spec: docs/spec/object-storage.md#validation
"""

import json
import time

import pytest

from imagemill.formats.published import POINTER, decode_pointer, set_key
from imagemill.fs.blobs import StorageSettings
from imagemill.fs.location import Location
from imagemill.fs.objects import Objects
from imagemill.pipeline.push import Publisher, PushRequest
from imagemill.reading.published import current_version
from imagemill.store.ledger import Ledger
from imagemill.validation.published import validate_published
from tests.helpers.s3 import s3_server
from tests.helpers.shard_sets import publish, shard_set

SIZES = {f"wide{n}": (1216, 832) for n in range(5)} | {f"square{n}": (1024, 1024) for n in range(3)}


@pytest.fixture(scope="module")
def server():
    with s3_server() as running:
        running.make_bucket("training")
        yield running


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return shard_set(tmp_path_factory.mktemp("sets") / "data", SIZES, shard_size=2)


@pytest.fixture
def store(root, server, monkeypatch):
    """The sets of the root, published."""
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    found = Objects(Location("s3", "training", f"validated-{time.time_ns()}"), StorageSettings(allow_http=True))
    push(found, root)
    return found


def push(store, root, **request):
    return Publisher(store, root.shards, Ledger(root.ledger), "root", "a test").push(PushRequest(**request))


def reports(store):
    return list(validate_published(current_version(store)))


def test_published_sets_pass_with_every_sample(store):
    assert [(each.passed, each.warnings, each.checked) for each in reports(store)] == [(True, 0, 3), (True, 0, 5)]


def test_set_with_tombstones_and_an_emptied_tar_passes(tmp_path, store):
    other = shard_set(tmp_path / "data", SIZES, shard_size=2)
    publish(other, "update", withdrawn=["wide0", "wide1", "wide2"], shard_size=2)
    push(store, other)

    assert [(each.passed, each.warnings, each.checked) for each in reports(store)] == [(True, 0, 3), (True, 0, 2)]


def of_set(store, name):
    pointer = decode_pointer(store.read(POINTER)[0], "")
    return set_key(pointer.sets["1216x832"], name)


def tar(store, suffix=".tar"):
    listed = store.read(of_set(store, "shards.txt"))[0].decode().splitlines()
    return listed[0].removesuffix(".tar") + suffix


def flipped(data):
    return data[:700] + bytes([data[700] ^ 1]) + data[701:]


def without_last_line(data):
    return b"".join(data.splitlines(keepends=True)[:-1])


def other_number(data):
    document = json.loads(data)
    return json.dumps({**document, "samples": document["samples"] + 1}).encode()


@pytest.mark.parametrize(
    ("key", "change", "rules"),
    [
        (tar, None, {"missing_shard"}),
        (tar, flipped, {"checksum"}),
        (tar, lambda data: data[:-1024], {"checksum", "count"}),
        (lambda store: tar(store, ".tar.idx"), None, {"energon"}),
        (lambda store: tar(store, ".tar.idx"), lambda data: data[:-8], {"energon"}),
        (lambda store: of_set(store, ".nv-meta/split.yaml"), None, {"energon"}),
        (lambda store: of_set(store, ".nv-meta/.info.json"), lambda data: data + b" ", {"energon"}),
        (lambda store: of_set(store, ".nv-meta/index.sqlite"), lambda data: data[:-4096], {"energon"}),
        (lambda store: of_set(store, "index.jsonl"), None, {"index"}),
        (lambda store: of_set(store, "index.jsonl"), without_last_line, {"index", "live_samples"}),
        (lambda store: of_set(store, "shards.txt"), None, {"missing_shard"}),
        (lambda store: of_set(store, "shards.txt"), without_last_line, {"missing_shard"}),
        (lambda store: of_set(store, "manifest.json"), None, {"manifest"}),
        (lambda store: of_set(store, "manifest.json"), other_number, {"manifest_digest", "live_samples"}),
    ],
)
def test_damage_to_any_object_is_found_and_mended_by_the_remedy(root, store, key, change, rules):
    found = key(store)
    if change:
        store.put(found, change(store.read(found)[0]))
    else:
        store.delete([found])

    square, wide = reports(store)

    assert square.passed
    assert not wide.passed
    assert rules <= wide.rules.keys()
    assert all("imagemill push --verify" in each.remedy for each in wide.findings)
    store.delete([found])
    push(store, root, verify=True)
    assert all(each.passed for each in reports(store))
