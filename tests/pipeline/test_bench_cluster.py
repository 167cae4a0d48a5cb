"""The measurement of a cluster, with workers of its pass in this process. On a cluster: tests/cli/test_ray.py."""

import pickle
from dataclasses import dataclass, field
from typing import Any

import pytest

from imagemill.domain.embedding_specs import DINOV3, EmbeddingSpec
from imagemill.errors import ImagemillError
from imagemill.pipeline.bench import measure_cluster, sample_jobs
from imagemill.pipeline.remote import BatchEnded, NodeWorker
from imagemill.pipeline.session import open_session
from imagemill.pipeline.stage2.embed_remote import EmbedPass
from resources.data_root import DataRootResource
from resources.encoders import Encoders
from resources.ray_pool import NodeWork
from tests.helpers.product import photos
from tests.helpers.stubs import StubEncoder


@dataclass
class Pool:
    """Works on all keys at once, as a node with one worker that makes `rate` images per second."""

    task: Any
    rate: float = 100.0
    work: dict = field(default_factory=dict)
    sent: int = 0
    returned: int = 0

    def stream(self, keys):
        parcels = [self.task.send(key) for key in keys]
        self.sent = sum(parcel.size for parcel in parcels)
        worker = NodeWorker(pickle.dumps(self.task.recipe))
        self.task.agree(worker.about())
        for part in worker.run([parcel.payload for parcel in parcels]):
            if not isinstance(part, BatchEnded):
                self.returned += sum(row.array.nbytes for row in part)
                yield from map(self.task.receive, part)
        self.work["one"] = NodeWork(1, len(keys), len(keys) / self.rate)


@pytest.fixture
def measured(data_root, monkeypatch):
    monkeypatch.setattr(EmbeddingSpec, "encoder_class", lambda self: StubEncoder)
    photos(data_root.approved, 4)
    with open_session(data_root.path) as session:
        inventory = session.overview()
        jobs = sample_jobs(DINOV3, inventory, session.reading.captions(), 4)
        data = DataRootResource(path=str(data_root.path), config_file="", output_base_dir="")
        options = Encoders(data_root=data, overrides={}).worker_options(DINOV3)

    def measure(link=1e9, pool=Pool, **how):
        def pool_of(own):
            worker = {name: value for name, value in own.items() if name != "spec"}
            return pool(EmbedPass({**worker, "spec": DINOV3}, 1, {}), **how)

        return measure_cluster(DINOV3, options, jobs, data_root, 1000, pool_of=pool_of, link=link)

    return measure


def test_lowest_rate_is_the_limit(measured, data_root):
    """Spec: docs/spec/engines.md#speed"""
    before = sorted(data_root.path.rglob("*"))

    slow_nodes = measured(rate=0.5)

    assert slow_nodes.nodes == {"one": pytest.approx(0.5)}
    assert (slow_nodes.limit, slow_nodes.shares) == ("nodes", False)
    assert slow_nodes.hours == pytest.approx(1000 / 0.5 / 3600)
    assert (slow_nodes.images, slow_nodes.returned) == (4, 4096)
    assert slow_nodes.sent == pytest.approx(sum(path.stat().st_size for path in data_root.approved.glob("*.jpg")) / 4)
    assert slow_nodes.gigabytes == pytest.approx(1000 * (4096 + 128) / 1e9)
    slow_link = measured(link=100.0, rate=1e6)
    assert (slow_link.limit, slow_link.shares) == ("link", True)
    assert slow_link.ceilings["link"] == pytest.approx(100 / 4096)
    assert sorted(data_root.path.rglob("*")) == before


def test_cluster_that_returns_nothing_cannot_be_measured(measured):
    class Empty(Pool):
        def stream(self, keys):
            return iter(())

    with pytest.raises(ImagemillError, match="0 images of 4 came back with a file, and two are needed"):
        measured(pool=Empty)
