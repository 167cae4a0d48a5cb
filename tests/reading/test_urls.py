"""Sets that are published: the same batches as from the disk, from object storage and from a web server.

Spec: docs/spec/object-storage.md#reading
"""

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

import numpy as np
import pytest
import torch

from imagemill.errors import ImagemillError, MissingInput, WrongUsage
from imagemill.fs.blobs import Blob, StorageSettings, StoreFailed
from imagemill.fs.fingerprints import fingerprint
from imagemill.fs.location import Location, parse_location
from imagemill.fs.objects import Objects
from imagemill.pipeline.push import Publisher, PushRequest
from imagemill.reading import ShardDataset, ShardSet, ShardsReplaced
from imagemill.reading.batches import _stacked
from imagemill.reading.published import Version
from imagemill.store.ledger import Ledger
from tests.helpers.product import PROJECT
from tests.helpers.s3 import SECRET, Cut, Ignored, fault_proxy, s3_server
from tests.helpers.shard_sets import change_manifest, publish, shard_set
from tests.helpers.ui import wait_until

SIZES = {f"wide{n}": (1216, 832) for n in range(7)} | {f"square{n}": (1024, 1024) for n in range(5)}
STORAGE = {"allow_http": True}
OPTIONS = {"batch_size": 2, "members": ("json", "vae", "dinov3")}


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
    return shard_set(tmp_path / "data", SIZES)


@pytest.fixture
def url(root, proxy):
    location = Location("s3", "training", f"test-{time.time_ns()}")
    push(root, location)
    return str(location)


def store_of(url):
    return Objects(parse_location(str(url), "url"), StorageSettings(**STORAGE))


def push(root, location):
    Publisher(store_of(location), root.shards, Ledger(root.ledger), "root", "a test").push(PushRequest())


def remote(url, **options):
    return ShardDataset(url, object_storage=STORAGE, **{**OPTIONS, **options})


def plain(batch):
    """Return a batch as values that can be compared."""
    return {
        name: value.tolist() if isinstance(value, torch.Tensor) else [v.tolist() for v in value]
        if isinstance(value, list) and value and isinstance(value[0], torch.Tensor) else value
        for name, value in batch.items()
    }  # fmt: skip


def batches(source, epochs=1):
    return [plain(batch) for _ in range(epochs) for batch in source]


def test_batches_are_those_of_the_folder(root, url):
    local, published = ShardDataset(root.shards, **OPTIONS), remote(url)

    assert batches(published, 3) == batches(local, 3)


@pytest.mark.parametrize("context", [None, pytest.param("spawn", marks=pytest.mark.soak)])
def test_workers_deliver_the_batches_of_the_folder(root, url, context):
    """The parent has used the store before."""
    expected = batches(ShardDataset(root.shards, **OPTIONS), 3)
    dataset = remote(url)
    options = {"multiprocessing_context": context} if context else {}
    began = time.monotonic()
    loader = dataset.loader(num_workers=2, **options)

    first = next(iter(loader))

    assert time.monotonic() - began < 20
    assert plain(first) == expected[0]
    dataset.set_epoch(0)
    assert batches(dataset.loader(num_workers=2, **options), 3) == expected


def test_forked_workers_say_what_to_do(url):
    loader = remote(url).loader(num_workers=1, multiprocessing_context="fork")
    began = time.monotonic()

    with pytest.raises(ImagemillError, match="multiprocessing_context"):
        next(iter(loader))

    assert time.monotonic() - began < 5


def test_state_continues_in_the_folder_and_at_the_url(root, url):
    local, published = ShardDataset(root.shards, **OPTIONS), remote(url)
    for one, other in ((local, published), (published, local)):
        one.set_epoch(0)
        expected, steps = batches(one), iter(one)
        one.set_epoch(0)
        for _ in range(3):
            next(steps)
        other.load_state_dict(one.state_dict())
        assert batches(other) == expected[3:]


def test_single_samples_are_those_of_the_folder(root, url):
    local, published = ShardSet.open(root.shards), ShardSet.open(url, object_storage=STORAGE)

    assert list(published) == list(local)
    for image_id in local:
        for name, value in local[image_id].items():
            found = published[image_id][name]
            assert np.array_equal(found, value) if isinstance(value, np.ndarray) else found == value


def test_state_of_a_kept_version_opens_it(root, url):
    before = remote(url)
    steps = iter(before)
    next(steps)
    state, expected = before.state_dict(), batches(steps)
    publish(root, "update", withdrawn=["wide1"])
    push(root, url)

    now = remote(url)
    assert now.samples == 11
    now.load_state_dict(state)

    assert now.samples == 12
    assert batches(now) == expected
    assert ShardSet.open(url, object_storage=STORAGE, set_id=state["sets"]).keys() == SIZES.keys()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_loader_that_was_made_before_reads_the_version_of_a_state(root, url, num_workers):
    """As Lightning and Accelerate do: the loader exists when the state is loaded."""
    before = remote(url)
    steps = iter(before)
    next(steps)
    state, expected = before.state_dict(), batches(steps)
    publish(root, "update", withdrawn=["wide1"])
    push(root, url)
    dataset = remote(url)
    loader = dataset.loader(num_workers=num_workers)

    loader.load_state_dict(state)

    assert batches(loader) == expected


def test_pipeline_that_was_made_before_reads_the_version_of_a_state(root, url):
    before = remote(url)
    steps = iter(before)
    next(steps)
    state, expected = before.state_dict(), batches(steps)
    publish(root, "update", withdrawn=["wide1"])
    push(root, url)
    dataset = remote(url)
    pipeline = dataset.pipeline()

    dataset.load_state_dict(state)

    assert batches(pipeline) == expected


def test_two_ranks_around_a_push_open_one_version(root, url, proxy, tmp_path):
    """Rank 0 opens before the push, rank 1 after it."""
    script = tmp_path / "train.py"
    script.write_text(
        "import pathlib, sys, time\n"
        "import torch.distributed as dist\n"
        "from imagemill.reading import ShardDataset\n"
        "url, folder, rank = sys.argv[1], pathlib.Path(sys.argv[2]), int(sys.argv[3])\n"
        "dist.init_process_group('gloo', init_method=f'file://{folder}/group', rank=rank, world_size=2)\n"
        "while rank == 1 and not (folder / 'pushed').exists():\n"
        "    time.sleep(0.05)\n"
        f"dataset = ShardDataset(url, 2, members=('json',), object_storage={STORAGE!r}, rank=rank, world_size=2)\n"
        "print(dataset.samples, sorted(dataset.state_dict()['sets'].values()))\n"
        "dist.barrier()\n"
    )
    before = sorted(remote(url).state_dict()["sets"].values())
    proxy.clear()
    ranks = [
        subprocess.Popen(
            [sys.executable, script, url, tmp_path, str(rank)], stdout=subprocess.PIPE, text=True, cwd=PROJECT,
            env={**os.environ, "PYTHONPATH": str(PROJECT)},
        )
        for rank in range(2)
    ]  # fmt: skip
    wait_until(lambda: any(one.key.endswith("current.json") for one in proxy.requests), 60, "rank 0 reads the pointer")
    publish(root, "update", withdrawn=["wide1"])
    push(root, url)
    (tmp_path / "pushed").touch()

    said = [process.communicate(timeout=60)[0] for process in ranks]

    assert said == [f"12 {before}\n"] * 2
    assert remote(url).samples == 11


def test_readers_during_15_updates_see_one_version_each(tmp_path, url):
    """With every update one image changes its bucket, and another one is replaced by a new one."""
    versions = []
    for n in range(16):
        sizes = {f"wide{i}": (304, 208) for i in range(1, 5)}
        sizes |= {"moving": (256, 256) if n % 2 else (304, 208), f"new{n}": (256, 256)}
        versions.append(shard_set(tmp_path / f"v{n}" / "data", sizes, shard_size=2))
    url += "-15"
    push(versions[0], url)
    stop = threading.Event()

    def read():
        found = []
        while not stop.is_set():
            published = ShardSet.open(url, object_storage=STORAGE)
            found.append([described(sample) for sample in published.values()])
        return found

    with ThreadPoolExecutor(3) as pool:
        readers = [pool.submit(read) for _ in range(3)]
        try:
            for version in versions[1:]:
                push(version, url)
        finally:
            stop.set()
        found = [one for reader in readers for one in reader.result()]

    expected = [[described(sample) for sample in ShardSet.open(version.shards).values()] for version in versions]
    assert len({tuple(one) for one in found}) > 2
    assert all(one in expected for one in found)


def described(sample):
    return sample["image_id"], sample["bucket"], fingerprint(sample["vae"].tobytes() + sample["dinov3"].tobytes())


def test_refused_state_changes_nothing(root, url):
    before = remote(url)
    next(iter(before))
    state = before.state_dict()
    publish(root, "update", withdrawn=["wide1"])
    push(root, url)
    dataset = remote(url)
    now, expected = dataset.state_dict(), batches(remote(url))

    with pytest.raises(WrongUsage, match="seed was 7"):
        dataset.load_state_dict({**state, "seed": 7})

    assert dataset.samples == 11
    assert dataset.state_dict() == now
    assert batches(dataset) == expected


def test_reader_keeps_its_version_until_it_is_deleted(root, url):
    dataset = remote(url)
    expected = batches(dataset)
    publish(root, "replace", withdrawn=["wide1"])
    push(root, url)
    dataset.set_epoch(0)
    assert batches(dataset) == expected

    store = store_of(url)
    Publisher(store, root.shards, Ledger(root.ledger), "root", "a test").collect(now=True)
    dataset.set_epoch(0)
    with pytest.raises(ShardsReplaced, match="was removed"):
        batches(dataset)


def test_requests_of_opening_and_of_an_epoch(url, proxy):
    """The figures of docs/how-to/object-storage.md, for two buckets."""
    proxy.clear()
    dataset = remote(url)
    assert proxy.counts() == {"GET": 1 + 4 * 2, "LIST": 1}
    proxy.clear()

    batches(dataset)

    assert len(proxy.requests) == len(SIZES)
    sizes = sum(line.size for bucket in dataset.buckets for line in bucket.lines)
    assert sum(request.got for request in proxy.requests) == sizes
    assert all(request.headers.get("if-match") and request.headers.get("range") for request in proxy.requests)


def test_broken_connections_change_nothing(root, url, proxy):
    expected = batches(ShardDataset(root.shards, **OPTIONS))
    proxy.fault = lambda request: Cut(0.3) if request.number % 5 == 0 else None

    assert batches(remote(url)) == expected


def test_web_server_is_read_too(root, url, proxy):
    proxy.public = True
    expected = batches(ShardDataset(root.shards, **OPTIONS))

    assert batches(ShardDataset(url.replace("s3://", f"{proxy.url}/"), **OPTIONS)) == expected


def test_web_server_without_ranges_is_refused_at_opening(url, proxy):
    proxy.public = True
    proxy.fault = lambda request: Ignored(frozenset({"range"}))

    with pytest.raises(StoreFailed, match="sends whole files only"):
        ShardDataset(url.replace("s3://", f"{proxy.url}/"), **OPTIONS)


def test_tar_that_a_server_without_conditions_replaced_is_noticed(root, url, proxy):
    """The other tar has the same size."""
    dataset = remote(url)
    proxy.fault = lambda request: Ignored()
    store = store_of(url)
    for key in [blob.key for page in store.list("tars") for blob in page if blob.key.endswith(".tar")]:
        store.put(key, store.read(key)[0][:-1] + b"x")

    with pytest.raises(ShardsReplaced, match="was removed"):
        batches(dataset)


def test_set_that_is_not_published_is_named(root, url):
    state = remote(url).state_dict()
    publish(root, "replace", withdrawn=["wide1"])
    push(root, url)
    store = store_of(url)
    Publisher(store, root.shards, Ledger(root.ledger), "root", "a test").collect(now=True)

    for read in (
        lambda: ShardSet.open(url, object_storage=STORAGE, set_id=state["sets"]),
        lambda: remote(url).load_state_dict(state),
    ):
        with pytest.raises(MissingInput, match=r"the set [0-9a-f]{32} of .* is not published"):
            read()
    with pytest.raises(WrongUsage, match=r"unknown bucket 1x1"):
        ShardSet.open(url, object_storage=STORAGE, set_id={**state["sets"], "1x1": "0" * 32})


def test_refusals(root, url, proxy, tmp_path):
    with pytest.raises(MissingInput, match="nothing is published there"):
        remote("s3://training/nothing")
    with pytest.raises(WrongUsage, match="object_storage cannot be used"):
        ShardSet.open(url, object_storage={"end_point": "x"})
    with pytest.raises(WrongUsage, match="cannot use gs://training/x"):
        remote("gs://training/x")


def test_pickled_dataset_contains_no_secret(url):
    assert SECRET.encode() not in pickle.dumps(remote(url))


def test_local_sets_need_no_package(root):
    code = (
        f"import sys; from imagemill.reading import ShardDataset; list(ShardDataset({str(root.shards)!r}, 2));"
        "assert 'obstore' not in sys.modules and 'botocore' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=PROJECT)


@pytest.mark.parametrize("published", [False, True])
def test_no_worker_is_left_after_the_trainer_was_killed(root, url, published, tmp_path):
    source = url if published else str(root.shards)
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, time\n"
        "from imagemill.reading import ShardDataset\n"
        "if __name__ == '__main__':\n"
        f"    storage = {STORAGE!r} if '://' in sys.argv[1] else None\n"
        "    dataset = ShardDataset(sys.argv[1], 2, members=('json',), object_storage=storage, repeat=True)\n"
        "    for batch in dataset.loader(num_workers=2):\n"
        "        print('batch', flush=True)\n"
        "        time.sleep(0.2)\n"
    )
    process = subprocess.Popen(
        [sys.executable, script, source], stdout=subprocess.PIPE, text=True, start_new_session=True, cwd=PROJECT,
        env={**os.environ, "PYTHONPATH": str(PROJECT)},
    )  # fmt: skip
    assert process.stdout.readline() == "batch\n"
    workers = [pid for pid in members_of(process.pid) if pid != process.pid]
    assert workers

    process.send_signal(signal.SIGKILL)
    process.wait()

    time.sleep(1)
    assert [pid for pid in members_of(process.pid) if is_alive(pid)] == []


def members_of(session):
    """Return the processes of a session."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                if os.getsid(int(entry)) == session:
                    found.append(int(entry))
            except ProcessLookupError:
                continue
    return found


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_web_server_without_strong_tags_is_refused():
    class Server:
        location = Location("https", "host", "cats")

        def head(self, key):
            return Blob(key, 1, 'W/"1"', datetime.now(UTC))

    with pytest.raises(ImagemillError, match="the web server gives no strong ETags"):
        Version(Server(), {}).find_tars(["tars/a.tar"])


def test_arrays_of_answers_which_are_not_writable_are_stacked_without_a_warning(monkeypatch):
    monkeypatch.setattr("torch.utils.data.get_worker_info", object)
    values = [np.full(3, 1.0), np.frombuffer(np.full(3, 2.0).tobytes())]
    assert [value.flags.writeable for value in values] == [True, False]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _stacked(values).tolist() == [[1.0] * 3, [2.0] * 3]


def test_state_of_the_empty_caption_is_that_of_the_folder(root, proxy):
    state = np.full((77, 1024), 0.5, np.float16)
    for folder in root.shards.glob("bucket_*"):
        np.save(folder / "empty-t5_hidden.npy", state)
        content = fingerprint((folder / "empty-t5_hidden.npy").read_bytes())
        change_manifest(folder, empty_captions={"t5_hidden": content})
    where = Location("s3", "training", f"empty-{time.time_ns()}")
    push(root, where)
    published = ShardSet.open(str(where), object_storage=STORAGE)

    assert np.array_equal(published.empty_caption("t5_hidden"), state)

    store = store_of(where)
    for page in store.list("sets"):
        for blob in page:
            if blob.key.endswith("empty-t5_hidden.npy"):
                store.put(blob.key, b"x")
    with pytest.raises(ImagemillError, match="is damaged"):
        published.empty_caption("t5_hidden")
