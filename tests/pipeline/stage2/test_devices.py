"""Several devices of a machine: one worker process each, and one process that publishes.

Spec: docs/spec/stage2.md#determinism, docs/spec/conventions.md#refused-and-failed
"""

import dataclasses
import pickle
from collections import Counter

import pytest

from imagemill.domain.embedding_specs import DINOV3, embedding_specs
from imagemill.encoders.loading import chosen_devices
from imagemill.errors import WrongUsage
from imagemill.formats.npy import NpyStore
from imagemill.fs.atomic import temporaries
from imagemill.fs.owners import owner_name, use
from imagemill.pipeline.session import open_session
from imagemill.pipeline.stage2.embed import EmbedWorker
from imagemill.pipeline.stage2.examine import lost_row
from imagemill.pipeline.stage2.publish import publish
from imagemill.store.ledger import Ledger
from resources.data_root import DataRootResource
from resources.encoders import Encoders
from resources.engine import Engine
from tests.helpers.pool_workers import KilledEmbedWorker
from tests.helpers.stage2 import embed, models_of, photos, plan_of

IDS = [f"i{n:02d}" for n in range(24)]
STUBBED = dataclasses.replace(DINOV3, encoder="tests.helpers.stubs:StubEncoder")


def run(root, worker_class=EmbedWorker, **options):
    """Embed every image with two workers; return the published rows, and the names of the files with their bytes."""
    store = NpyStore(root.derived / DINOV3.folder, STUBBED)
    with Ledger(root.ledger) as ledger:
        use(root.ledger.parent / "owners")
        given = {
            "spec": STUBBED, "approved": root.approved, "store": store, "recorded_models": models_of(root, DINOV3.kind),
            "preview_root": root.preview_models, "threads": 1, "owner": owner_name(), **options,
        }  # fmt: skip
        each = [{**given, "settings": DINOV3.settings_class(device=device)} for device in ("cpu", "cuda:1")]
        jobs = plan_of(root, DINOV3, ledger).jobs
        rows = Engine().map_devices(worker_class, jobs, each=each, batch_size=4, lost_key=lost_row)
        published = [row for batch in publish(rows, store, ledger) for row in batch]
    return published, {path.stem: path.read_bytes() for path in store.folder.glob("*.npy")}


def test_two_workers_make_the_files_of_one(data_root, tmp_path):
    photos(data_root, *IDS)
    rows, files = run(data_root, KilledEmbedWorker, log=tmp_path, dies="", times=0)
    for path in (data_root.derived / DINOV3.folder).iterdir():
        path.unlink()
    data_root.ledger.unlink()
    embed(data_root, DINOV3)

    assert Counter(row.outcome for row in rows) == {"computed": len(IDS)}
    assert files == {path.stem: path.read_bytes() for path in (data_root.derived / DINOV3.folder).iterdir()}
    assert {path.read_text() for path in tmp_path.glob("device-*")} == {"cpu", "cuda:1"}


@pytest.mark.parametrize("times", [1, 2])
def test_killed_worker_is_replaced_on_its_device_and_its_keys_run_again(data_root, tmp_path, times):
    """No key is lost, and no file is published twice."""
    photos(data_root, *IDS)

    rows, files = run(data_root, KilledEmbedWorker, log=tmp_path, dies="i13", times=times)

    assert sorted(row.image_id for row in rows) == IDS == sorted(files)
    assert {row.outcome for row in rows} == {"computed"}
    devices = Counter(path.read_text() for path in tmp_path.glob("device-*"))
    assert (set(devices), devices.total()) == ({"cpu", "cuda:1"}, 2 + times)


def test_image_that_kills_every_worker_fails_alone(data_root, tmp_path):
    photos(data_root, *IDS)

    rows, files = run(data_root, KilledEmbedWorker, log=tmp_path, dies="i13", times=99)

    assert [(row.image_id, row.reason) for row in rows if row.outcome == "failed"] == [("i13", "worker_died")]
    assert sorted(files) == [image_id for image_id in IDS if image_id != "i13"]
    assert "SIGKILL" in next(row.detail for row in rows if row.outcome == "failed")


def test_staged_files_belong_to_the_process_that_publishes_them(data_root, tmp_path):
    """A sweep of another run leaves them, although the worker that wrote them is dead."""
    photos(data_root, *IDS)
    run(data_root, KilledEmbedWorker, log=tmp_path, dies="i13", times=1)

    left = temporaries(data_root.derived / DINOV3.folder)

    assert left, "the killed worker left staged files"
    assert all(owner_name() in path.name for path in left)
    assert NpyStore(data_root.derived / DINOV3.folder, DINOV3).sweep() == 0


def test_arguments_of_workers_can_be_pickled(data_root):
    """A worker process gets them by pickle."""
    data_root.config_file.write_text("devices: [cpu, cpu]\ndecode_threads: 6\n")
    with open_session(str(data_root.path)):
        data_root_resource = DataRootResource(path=str(data_root.path), config_file="", output_base_dir="")
        encoders = Encoders(data_root=data_root_resource)
        for spec in embedding_specs():
            one, two = pickle.loads(pickle.dumps(encoders.options_of_devices(spec)))

            assert (one["settings"].device, two["settings"].device) == ("cpu", "cpu")
            assert (one["spec"].kind, one["decode_threads"]) == (spec.kind, 3)


THERE = ["cuda", "cpu", "cuda:0", "cuda:1"]


@pytest.mark.parametrize(
    ("chosen", "existing", "expected"),
    [
        (None, THERE, ["auto"]),
        ("all", THERE, ["cuda:0", "cuda:1"]),
        ("all", ["cpu"], ["auto"]),
        ([1, 0], THERE, ["cuda:1", "cuda:0"]),
        (["cpu", "cpu"], ["cpu"], ["cpu", "cpu"]),
    ],
)
def test_devices_are_those_of_the_configuration(chosen, existing, expected):
    assert expected == chosen_devices(chosen, existing)


@pytest.mark.parametrize(("chosen", "missing"), [([0, 2], "cuda:2"), (["tpu"], "tpu")])
def test_device_that_does_not_exist_is_refused_with_those_that_do(chosen, missing):
    with pytest.raises(WrongUsage, match=f"has no {missing}") as refused:
        chosen_devices(chosen, THERE)

    assert "cuda, cpu, cuda:0, cuda:1" in str(refused.value)
