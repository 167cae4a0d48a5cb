"""The pipeline's own state, as a loader keeps it that runs copies of the pipeline in its workers. See `BatchPipeline`."""

import json
import pickle
from itertools import islice

import pytest
import torch
import webdataset

import imagemill.reading
from imagemill.errors import WrongUsage
from imagemill.reading import ShardDataset, batches


@pytest.fixture
def dataset(root):
    return lambda **settings: ShardDataset(root.shards, 2, **{"members": ("t5m",), "repeat": True} | settings)


def ids(items):
    return [(batch["epoch"], batch["step"], batch["image_id"]) for batch in items]


def as_worker(monkeypatch, worker, workers):
    monkeypatch.setenv("WORKER", str(worker))
    monkeypatch.setenv("NUM_WORKERS", str(workers))


@pytest.mark.parametrize(("worker", "workers"), [(0, 1), (0, 2), (1, 2), (2, 3)])
def test_each_workers_state_continues_its_own_share(dataset, monkeypatch, worker, workers):
    """Over several epochs, and after loading twice."""
    expected = ids(islice(dataset(), worker, 24, workers))
    as_worker(monkeypatch, worker, workers)
    one = iter(first := dataset().pipeline())
    before = ids(islice(one, 3))
    state = json.loads(json.dumps(first.state_dict()))
    second = pickle.loads(pickle.dumps(dataset().pipeline()))
    second.load_state_dict(state)
    unchanged = second.state_dict()
    between = ids(islice(second, 2))
    third = dataset().pipeline()
    third.load_state_dict(second.state_dict())

    assert unchanged == state
    assert before + between + ids(islice(third, len(expected) - 5)) == expected


def test_loading_a_state_reads_no_earlier_sample(dataset, monkeypatch):
    first = dataset().pipeline()
    list(islice(first, 4))
    second, read, real = dataset().pipeline(), [], batches.read_members
    second.load_state_dict(first.state_dict())
    monkeypatch.setattr(batches, "read_members", lambda *given: read.append(given[1].image_id) or real(*given))

    batch = next(iter(second))

    assert (batch["step"], read) == (4, batch["image_id"])


def test_composed_pipeline_has_the_state_too(dataset):
    def composed():
        return dataset().pipeline().compose(webdataset.map(lambda batch: batch["image_id"]))

    expected = list(islice(composed(), 7))
    first = composed()
    before = list(islice(first, 3))
    second = composed()

    second.load_state_dict(first.state_dict())

    assert before + list(islice(second, 4)) == expected


def test_iteration_after_a_resumed_one_begins_at_the_dataset_position(dataset):
    """Each epoch after the resumed one is whole, once the script has set it."""
    once = dataset(repeat=False)
    pipeline = once.pipeline()
    pipeline.load_state_dict({**once.state_dict(), "taken": 4})
    rest = ids(pipeline)
    once.set_epoch(1)

    assert [step for _, step, _ in rest] == [4, 5]
    assert [(epoch, step) for epoch, step, _ in ids(pipeline)] == [(1, step) for step in range(6)]


def test_pipeline_refuses_the_state_of_another_plan(dataset):
    with pytest.raises(WrongUsage, match="another plan: seed was 0, now 1"):
        dataset(seed=1).pipeline().load_state_dict(dataset().pipeline().state_dict())


def test_loader_is_a_data_loader_with_the_state_of_its_dataset(dataset):
    shards = dataset(repeat=False)
    loader = shards.loader()
    list(islice(loader, 2))
    other = dataset(repeat=False).loader()

    other.load_state_dict(loader.state_dict())

    assert isinstance(loader, torch.utils.data.DataLoader)
    assert isinstance(loader, imagemill.reading.ShardLoader)
    assert loader.state_dict() == shards.state_dict()
    assert [step for _, step, _ in ids(other)] == [2, 3, 4, 5]


def test_persistent_workers_begin_at_the_present_position(dataset):
    loader = dataset(repeat=False).loader(num_workers=1, persistent_workers=True)

    assert [batch["epoch"] for _ in range(2) for batch in loader] == [0] * 6 + [1] * 6
