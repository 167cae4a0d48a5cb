"""`imagemill push`: versions of the shard sets in object storage, through faults, kills and other writers.

Spec: docs/spec/object-storage.md#push, docs/spec/object-storage.md#conditions, docs/spec/object-storage.md#deletion
"""

import json
import os
import random
import shutil
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
import webdataset

from assets.published_shards import published_shards
from checks.published_shards import published_complete
from imagemill.domain.layout import DataRoot
from imagemill.errors import ImagemillError, MissingInput
from imagemill.formats.published import POINTER, TARS, decode_pointer, set_id, set_key
from imagemill.fs.blobs import StorageSettings, StoreFailed
from imagemill.fs.fingerprints import fingerprint
from imagemill.fs.location import Location
from imagemill.fs.objects import Objects
from imagemill.pipeline.push import Publisher, PushRequest, local_sets
from imagemill.pipeline.shards.shard_manifest import decode_manifest
from imagemill.store.ledger import ROOT_ID, Ledger
from imagemill.store.trust import record_consent
from tests.helpers.product import SEARCH_PATH, photos, product, start
from tests.helpers.s3 import SECRET, Answer, Cut, Dropped, Ignored, fault_proxy, s3_server
from tests.helpers.shard_sets import publish, shard_set
from tests.helpers.wiring import check, checks_of, history, materialize

SIZES = {f"wide{n}": (1216, 832) for n in range(8)} | {f"square{n}": (1024, 1024) for n in range(4)}
SETTINGS = StorageSettings(allow_http=True)


@pytest.fixture(scope="module")
def server():
    with s3_server() as running:
        running.make_bucket("training")
        yield running


@pytest.fixture
def proxy(server, monkeypatch):
    with fault_proxy(server) as running:
        for name, value in running.environment.items():
            monkeypatch.setenv(name, value)
        yield running


@pytest.fixture
def root(tmp_path):
    return shard_set(tmp_path / "data", SIZES, shard_size=2)


@pytest.fixture
def location(request):
    return Location("s3", "training", f"{request.node.name}-{time.time_ns()}".replace("[", "-").replace("]", ""))


def call(root, location, settings=SETTINGS, writer="root"):
    return Publisher(Objects(location, settings), root.shards, Ledger(root.ledger), writer, "a test")


def push(root, location, settings=SETTINGS, writer="root", **request):
    return call(root, location, settings, writer).push(PushRequest(**request))


def read_version(location, settings=SETTINGS):
    """Return the samples of the current version: id → bytes. Every document and tar is checked against its name."""
    store = Objects(location, settings)
    pointer = decode_pointer(store.read(POINTER)[0], location)
    samples = {}
    for bucket, identifier in pointer.sets.items():
        document = store.read(set_key(identifier, "manifest.json"))[0]
        assert set_id(document) == identifier
        manifest = decode_manifest(msgspec.json.decode(document))
        assert manifest.bucket == bucket
        keys = store.read(set_key(identifier, "shards.txt"))[0].decode().splitlines()
        tars = {}
        for shard, key in zip(manifest.shards, keys, strict=True):
            tars[shard.name] = store.read(key)[0]
            assert fingerprint(tars[shard.name]) == shard.checksum
        for text in store.read(set_key(identifier, "index.jsonl"))[0].splitlines():
            line = json.loads(text)
            assert line["image_id"] not in samples, "an image in two sets"
            samples[line["image_id"]] = tars[line["shard"]][line["offset"] : line["offset"] + line["size"]]
    return samples


def local_samples(root):
    samples = {}
    for one in local_sets(root.shards).values():
        for text in (one.folder / "index.jsonl").read_bytes().splitlines():
            line = json.loads(text)
            data = (one.folder / line["shard"]).read_bytes()
            samples[line["image_id"]] = data[line["offset"] : line["offset"] + line["size"]]
    return samples


def tars_sent(proxy):
    return {
        request.key.rpartition("/")[2]
        for request in proxy.requests
        if request.method in {"PUT", "POST"} and f"/{TARS}/" in request.key and request.key.endswith(".tar")
    }


# ---- cost


def test_first_version_is_what_is_on_the_disk(root, location, proxy):
    result = push(root, location)

    assert (result.changed, result.tars, result.sent_tars) == (True, 6, 6)
    assert read_version(location) == local_samples(root)
    for one in local_sets(root.shards).values():
        for name in ("manifest.json", "index.jsonl"):
            assert (
                Objects(location, SETTINGS).read(set_key(one.identifier, name))[0] == (one.folder / name).read_bytes()
            )


def test_equal_version_costs_one_request(root, location, proxy):
    push(root, location)
    proxy.clear()

    result = push(root, location)

    assert (result.changed, result.sent_tars) == (False, 0)
    assert proxy.counts() == {"GET": 1}


@pytest.fixture
def large(tmp_path):
    """A set of 42 tars."""
    return shard_set(tmp_path / "large" / "data", {f"wide{n:02}": (304, 208) for n in range(84)}, shard_size=2)


def test_one_changed_tar_of_42_is_sent_alone(large, location, proxy):
    assert push(large, location).sent_tars == 42
    publish(large, "update", withdrawn=["wide83"], shard_size=2)
    proxy.clear()

    result = push(large, location)

    assert len(tars_sent(proxy)) == result.sent_tars == 1
    assert read_version(location) == local_samples(large)


def test_emptied_tar_3_of_42_is_not_sent(large, location, proxy):
    push(large, location)
    publish(large, "update", withdrawn=["wide04", "wide05"], shard_size=2)
    proxy.clear()

    assert push(large, location).sent_tars == 0
    assert tars_sent(proxy) == set()
    assert read_version(location) == local_samples(large)


def test_plain_webdataset_reads_the_published_tars(root, location, proxy):
    push(root, location)
    store = Objects(location, SETTINGS)
    proxy.public = True
    base = f"{proxy.url}/{location.bucket}/{location.prefix}"
    identifiers = decode_pointer(store.read(POINTER)[0], "").sets.values()
    lines = [line for each in identifiers for line in store.read(set_key(each, "shards.txt"))[0].decode().split()]
    for tars in ([f"{base}/{line}" for line in lines], [f"pipe:curl -sf {base}/{line}" for line in lines]):
        samples = list(webdataset.WebDataset(tars, shardshuffle=False))
        assert {json.loads(sample["json"])["image_id"] for sample in samples} == set(SIZES)
        assert len(samples) == len(SIZES)


# ---- what may not be published


def test_preview_sets_need_an_option(tmp_path, location, proxy):
    root = shard_set(tmp_path / "data", {"a": (1024, 1024)}, preview=True)

    with pytest.raises(ImagemillError, match="preview models made arrays"):
        push(root, location)
    assert proxy.counts() == {"GET": 1}
    push(root, location, allow_preview=True)
    assert decode_pointer(Objects(location, SETTINGS).read(POINTER)[0], "").preview


def test_another_data_root_does_not_replace_a_version(root, location, proxy):
    push(root, location, writer="first")

    with pytest.raises(ImagemillError, match="another data root publishes there"):
        push(root, location, writer="second")
    push(root, location, writer="second", take_over=True)
    assert decode_pointer(Objects(location, SETTINGS).read(POINTER)[0], "").root == "second"


def test_one_bucket_is_published_alone_unless_an_image_moves(root, location, proxy, tmp_path):
    push(root, location)
    publish(root, "update", withdrawn=["wide7", "square3"], shard_size=2)
    push(root, location, buckets=("1216x832",))
    samples = read_version(location)
    assert "wide7" not in samples
    assert "square3" in samples

    moved = shard_set(tmp_path / "moved", SIZES | {"wide0": (1024, 1024)}, shard_size=2)
    for bucket in (("1216x832",), ("1024x1024",)):
        with pytest.raises(ImagemillError, match="images would be in two buckets or in none: wide0"):
            push(moved, location, buckets=bucket)
    push(moved, location)
    assert read_version(location) == local_samples(moved)


def test_nothing_to_publish(tmp_path, root, location, proxy):
    with pytest.raises(MissingInput, match="there is no set of 832x1216"):
        push(root, location, buckets=("832x1216",))
    shutil.rmtree(root.shards)
    with pytest.raises(MissingInput, match="there are no shards to publish"):
        push(root, location)


def test_damaged_tar_is_not_published(root, location, proxy):
    push(root, location)
    before = read_version(location)
    publish(root, "replace", withdrawn=["wide0"], shard_size=2)
    tar = next((root.shards / "bucket_1216x832").glob("*.tar"))
    tar.write_bytes(tar.read_bytes()[:-1] + b"x")

    with pytest.raises(ImagemillError, match="is damaged"):
        push(root, location)
    assert read_version(location) == before


def test_store_that_ignores_conditions_is_refused_before_the_first_upload(root, location, proxy):
    proxy.fault = lambda _: Ignored()

    with pytest.raises(StoreFailed, match="the store ignores conditions"):
        push(root, location)
    assert tars_sent(proxy) == set()
    push(root, location, msgspec.structs.replace(SETTINGS, single_writer=True))
    assert read_version(location) == local_samples(root)


# ---- faults


def test_bytes_are_equal_in_spite_of_overload_and_broken_connections(root, location, proxy):
    chance = random.Random(3)
    proxy.fault = lambda _: (
        Answer(503, "SlowDown") if (drawn := chance.random()) < 0.2 else Cut(chance.random()) if drawn < 0.3 else None
    )

    assert push(root, location, verify=True).verified > 10

    proxy.fault = lambda _: None
    assert read_version(location) == local_samples(root)


@pytest.mark.parametrize("again", [False, True])
def test_lost_answer_to_the_pointer_is_a_success(root, location, proxy, again):
    if again:
        push(root, location)
        publish(root, "update", withdrawn=["wide1"], shard_size=2)
    dropped = []

    def lose(request):
        if request.method == "PUT" and request.key.endswith(POINTER) and not dropped:
            dropped.append(request)
            return Dropped()
        return None

    proxy.fault = lose

    assert push(root, location).changed
    assert dropped
    assert read_version(location) == local_samples(root)


def test_of_four_writers_one_publishes(tmp_path, root, location, proxy):
    push(root, location)
    roots = []
    for n in range(4):
        shutil.copytree(root.path, tmp_path / f"copy{n}" / "data")
        roots.append(DataRoot(tmp_path / f"copy{n}" / "data"))
        publish(roots[-1], "update", withdrawn=[f"wide{n}"], shard_size=2)
    together = threading.Barrier(4)

    def wait(request):
        if request.method == "PUT" and request.key.endswith(POINTER):
            together.wait(30)

    proxy.fault = wait

    def one(root):
        try:
            return push(root, location).version
        except ImagemillError as error:
            assert error.what == "another call has published there meanwhile"
            return None

    with ThreadPoolExecutor(4) as pool:
        published = [version for version in pool.map(one, roots) if version]

    assert len(published) == 1
    proxy.fault = lambda _: None
    samples = read_version(location)
    assert samples in [local_samples(each) for each in roots]


def test_readers_see_whole_versions_during_updates(tmp_path, root, location, proxy):
    """One image changes its bucket with every update."""
    versions = []
    for n in range(5):
        sizes = SIZES | {"wide0": (1024, 1024) if n % 2 else (1216, 832), f"new{n}": (1024, 1024)}
        versions.append(shard_set(tmp_path / f"v{n}" / "data", sizes, shard_size=2))
    expected = [local_samples(each) for each in versions]
    push(versions[0], location)
    ended, seen = threading.Event(), []

    def read():
        while not ended.is_set():
            seen.append(read_version(location))

    with ThreadPoolExecutor(3) as pool:
        readers = [pool.submit(read) for _ in range(3)]
        for version in versions[1:]:
            push(version, location)
        ended.set()
        for reader in readers:
            reader.result()
    assert seen
    assert all(samples in expected for samples in seen)


# ---- deletion


def test_garbage_is_what_no_kept_version_needs(root, location, proxy):
    push(root, location)
    publish(root, "update", withdrawn=["wide7"], shard_size=2)
    push(root, location)
    store = Objects(location, SETTINGS)
    before = {blob.key for page in store.list() for blob in page}

    assert call(root, location).collect(now=False) == 0
    assert {blob.key for page in store.list() for blob in page} == before
    deleted = call(root, location).collect(now=True)

    left = {blob.key for page in store.list() for blob in page}
    assert deleted == len(before - left) > 3
    assert len([key for key in left if key.startswith("sets/") and key.endswith("manifest.json")]) == 2
    assert read_version(location) == local_samples(root)
    assert b"wide7" not in b"".join(store.read(key)[0] for key in left)
    assert decode_pointer(store.read(POINTER)[0], "").previous == []


def test_damaged_object_is_found(root, location, proxy):
    push(root, location)
    store = Objects(location, SETTINGS)
    key = next(blob.key for page in store.list(TARS) for blob in page if blob.key.endswith(".tar"))
    data = store.read(key)[0]
    store.put(key, data[:-1] + b"x")

    with pytest.raises(ImagemillError, match="delete the object, then run the same command again"):
        push(root, location, verify=True)

    store.delete([key])
    assert push(root, location).sent_tars == 0
    again = push(root, location, verify=True)
    assert (again.changed, again.sent_tars, again.verified) == (False, 1, 30)
    assert read_version(location) == local_samples(root)


@pytest.mark.parametrize("name", ["shards.txt", "manifest.json", "index.jsonl", ".nv-meta/split.yaml"])
def test_verify_restores_missing_documents(root, location, proxy, name):
    push(root, location)
    store = Objects(location, SETTINGS)
    before = {blob.key: store.read(blob.key)[0] for page in store.list() for blob in page}
    store.delete([key for key in before if key.endswith(f"/{name}")])

    assert push(root, location, verify=True).verified == 30

    assert {blob.key: store.read(blob.key)[0] for page in store.list() for blob in page} == before


# ---- the command


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """A data root whose shards the product has packed, with preview models."""
    root = DataRoot(tmp_path_factory.mktemp("packed") / "data")
    photos(root.approved, 6, size=(96, 64))
    root.config_file.write_text("object_storage: {allow_http: true}\nshard_size: 2\n")
    product(root, "run")
    return root


def test_command_publishes_and_says_so(packed, location, proxy):
    said = product(packed, "push", str(location), "--allow-preview", "--dry-run")
    assert "dry run, nothing written" in said
    assert proxy.counts().get("PUT", 0) == 0

    said = product(packed, "push", str(location), "--allow-preview")
    assert said.startswith("published: version ")
    assert f"at {location}, 3 tars of 3, " in said
    assert "nothing to do: version" in product(packed, "push", str(location))
    found = json.loads(
        product(packed, "push", str(location), "--json", "--verify", "--gc", "--now").partition("\npush:")[0]
    )
    assert (found["tars"], found["sent_tars"], found["changed"]) == (3, 0, False)
    assert found["verified"] > 5
    assert SECRET not in said
    assert [p for p in packed.path.rglob("*") if p.is_file() and SECRET.encode() in p.read_bytes()] == []


def test_status_of_a_url(packed, root, location, proxy):
    push(root, location)
    publish(root, "update", withdrawn=["wide7"], shard_size=2)
    version = push(root, location).version

    lines = product(packed, "status", str(location)).splitlines()

    assert lines[0].startswith(f"published   version {version}, ")
    assert lines[0].endswith(" UTC, by data root root")
    assert [line.split()[:4] for line in lines[1:3]] == [
        ["bucket", "1024x1024", "4", "samples"],
        ["bucket", "1216x832", "7", "samples"],
    ]
    assert lines[3].startswith("replaced    version ")
    found = json.loads(product(packed, "status", str(location), "--json"))
    assert (found["version"], found["buckets"]["1216x832"]["samples"]) == (version, 7)
    assert "nothing is published there" in product(packed, "status", f"{location}-no", code=1)


def test_validate_of_a_url(packed, location, proxy):
    product(packed, "push", str(location), "--allow-preview")

    passed = product(packed, "validate", str(location))
    report = json.loads(product(packed, "validate", str(location), "--json").splitlines()[0])

    assert ": passed: shards, 6 checked, 0 errors, 0 warnings" in passed
    assert (report["file"].startswith(f"{location}/sets/"), report["checked"]) == (True, 6)
    store = Objects(location, SETTINGS)
    store.delete([next(blob.key for page in store.list(TARS) for blob in page if blob.key.endswith(".tar"))])
    assert "missing_shard: named by the manifest, but missing" in product(packed, "validate", str(location), code=1)
    nothing = product(packed, "validate", "no.jsonl", f"{location}-no", code=1)
    assert "nothing is published there" in nothing
    assert "no.jsonl" in nothing
    assert "cannot use gs://training/x" in product(packed, "validate", "gs://training/x", code=2)


@pytest.mark.parametrize(
    ("arguments", "code", "what"),
    [
        ([], 2, "no URL to publish to"),
        (["gs://training/x"], 2, "cannot use gs://training/x"),
        (["https://host/x"], 2, "cannot use https://host/x"),
        (["data/there"], 2, "cannot use data/there"),
        (["s3://me:secret@training/x"], 2, "the URL contains credentials"),
        (["s3://training/x", "--now"], 2, "--now has no effect alone"),
        (["s3://no-such-bucket/x"], 1, "there is no such bucket"),
        (["s3://training/new"], 1, "preview models made arrays"),
    ],
)
def test_refusals(packed, proxy, arguments, code, what):
    began = time.monotonic()

    said = product(packed, "push", *arguments, code=code)

    assert what in said
    assert "Traceback" not in said
    assert "secret@" not in said
    assert time.monotonic() - began < 20
    assert tars_sent(proxy) == set()


@pytest.mark.parametrize(
    ("answer", "what"),
    [
        (Answer(400, "ExpiredToken"), "the credentials have expired"),
        (Answer(403, "AccessDenied"), "no permission"),
        (Answer(403, "RequestTimeTooSkewed"), "the clocks of this machine and of the server differ"),
        (Answer(400, "AuthorizationHeaderMalformed"), "the bucket is in another region"),
    ],
)
def test_store_that_cannot_be_used(packed, location, proxy, answer, what):
    proxy.fault = lambda _: answer

    said = product(packed, "push", str(location), code=1)

    assert said.splitlines()[0] == f"imagemill: {what}" or said.splitlines()[0] == what


def kill_at(root, location, proxy, request_number):
    """Start a push, kill it at a request, and return whether it was killed before its end."""
    proxy.clear()
    process = start("push", str(location), "--data-root", root.path)

    def kill(request):
        if request.number == request_number:
            os.killpg(process.pid, signal.SIGKILL)

    proxy.fault = kill
    process.communicate(timeout=120)
    proxy.fault = lambda _: None
    return process.returncode == -signal.SIGKILL


@pytest.mark.parametrize("count", [3, pytest.param(50, marks=pytest.mark.soak)])
def test_killed_push_leaves_a_whole_version_and_the_next_one_completes_it(tmp_path, root, location, proxy, count):
    root.config_file.write_text("object_storage: {allow_http: true}\n")
    chance = random.Random(count)
    product(root, "push", str(location))
    proxy.clear()
    withdrawn, killed = [], 0
    for n in range(count):
        before, old = read_version(location), withdrawn
        withdrawn = [f"wide{n % 8}", f"square{n % 4}"]
        publish(root, "replace", withdrawn=withdrawn, shard_size=2)
        killed += kill_at(root, location, proxy, chance.randrange(2, 35))
        assert read_version(location) in (before, local_samples(root)), (old, withdrawn)
        product(root, "push", str(location))
        assert read_version(location) == local_samples(root)
    assert killed


def test_run_publishes_after_packing_where_the_configuration_says_so(tmp_path, location, proxy):
    root = DataRoot(tmp_path / "data")
    photos(root.approved, 4)
    config = tmp_path / "given.yaml"
    config.write_text(f"object_storage: {{allow_http: true}}\npush: {location}\n")

    said = product(root, "run", "--config", config, code=1)

    assert "preview models made arrays" in said
    assert proxy.counts() == {"GET": 1}


def test_asset_publishes_and_names_the_version(root, location, proxy, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    root.config_file.write_text(f"object_storage: {{allow_http: true}}\npush: {location}\n")
    record_consent([root.config_file])
    with Ledger(root.ledger) as ledger:
        identity = ledger.setting(ROOT_ID)

    with history() as instance:
        result = materialize(root, instance, published_shards, published_complete)
        passed = checks_of(result)["published_shards:published_complete"]
        store = Objects(location, SETTINGS)
        store.delete([next(blob.key for page in store.list(TARS) for blob in page if blob.key.endswith(".tar"))])
        proxy.clear()
        failed = check(root, instance, published_shards, published_complete)["published_shards:published_complete"]
        assert proxy.counts() == {"GET": 1, "LIST": 3}, "the pointer, and listings of the tars and of two sets"
        push(root, location, writer=identity, verify=True)
        publish(root, "update", withdrawn=["wide7"], shard_size=2)
        behind = check(root, instance, published_shards, published_complete)["published_shards:published_complete"]
        push(root, location, writer=identity)

    assert (passed.passed, passed.metadata["checked"].value) == (True, 30)
    assert (failed.passed, failed.description) == (False, "missing_object: 1")
    assert (behind.passed, behind.description) == (True, "not_published: 1")
    (event,) = result.get_asset_materialization_events()
    metadata = {name: value.value for name, value in event.materialization.metadata.items()}
    assert metadata["url"] == str(location)
    assert (metadata["tars"], metadata["sent tars"]) == (6, 6)
    assert read_version(location) == local_samples(root)


def test_everything_else_works_without_the_packages_of_object_storage(tmp_path):
    for name in ("obstore", "botocore", "boto3"):
        (tmp_path / "absent" / f"{name}.py").parent.mkdir(exist_ok=True)
        (tmp_path / "absent" / f"{name}.py").write_text(f"raise ImportError({name!r})\n")
    environment = {"PYTHONPATH": f"{tmp_path / 'absent'}{os.pathsep}{SEARCH_PATH}"}
    root = DataRoot(tmp_path / "data")
    photos(root.approved, 3)

    assert "3 samples in 1 shard" in product(root, "run", **environment)
    product(root, "status", **environment)
    product(root, "validate", root.stage2_jsonl, root.shards / "bucket_1216x832", **environment)
    began = time.monotonic()
    said = product(root, "push", "s3://training/cats", code=2, **environment)
    assert "pip install 'imagemill[s3]'" in said
    assert time.monotonic() - began < 10


def test_url_in_a_data_root_needs_consent(packed, tmp_path, location, proxy, monkeypatch):
    root = DataRoot(shutil.copytree(packed.path, tmp_path / "copy" / "data"))
    root.config_file.write_text(f"object_storage: {{allow_http: true}}\npush: {location}\n")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))

    said = product(root, "push", code=1)

    assert "settings inside the data root need your consent" in said
    assert f"push: {location}" in said
    assert proxy.requests == []
