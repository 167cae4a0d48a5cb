"""Ranks run by an engine. Spec: docs/spec/stage-a.md#sharding-modes"""

import os
from types import SimpleNamespace

import pytest

from imagemill.errors import ImagemillError
from imagemill.pipeline.stage_a import worker as rank_worker
from imagemill.pipeline.stage_a.rank_files import unfinished_ranks
from imagemill.pipeline.stage_a.worker import RankResult, RankRunner
from tests.helpers.stage_a import MISSION, Bench, Recorder, ticket


@pytest.fixture
def bench(tmp_path):
    bench = Bench(tmp_path)
    ticket(bench.input, "pass", "a", "a1.jpg", "a2.jpg", "a3.jpg")
    return bench


def worker(bench, plan, summarizer, **options):
    given = {"plan": plan, "summarizer": lambda rank: summarizer, "output": bench.output, "store": bench.store}
    return RankRunner({**given, "batch_size": 1, **options})


def test_each_rank_is_one_row_with_the_outcome_of_its_images(bench):
    plan = bench.plan(mode="per_image", world_size=2)
    summarizer = Recorder({"a3.jpg": ""})

    assert list(worker(bench, plan, summarizer).stream([1, 0])) == [RankResult(1, 1, 0, 0), RankResult(0, 1, 0, 1)]
    assert list(worker(bench, plan, summarizer).stream([0])) == [RankResult(0, 0, 1, 1)], (
        "a failed image is tried again"
    )


@pytest.mark.parametrize(("alive", "ended"), [(True, True), (False, False)])
def test_rank_of_a_killed_run_stops_after_its_current_batch(bench, monkeypatch, alive, ended):
    """The next run may already process this rank, so an end mark would confirm lines that do not exist."""
    monkeypatch.setenv("LOCAL_RANK", "")  # restored after the test
    plan, summarizer = bench.plan(), Recorder()
    parent = SimpleNamespace(is_alive=lambda: alive)
    monkeypatch.setattr(rank_worker.multiprocessing, "parent_process", lambda: parent)

    rows = worker(bench, plan, summarizer).stream([0])

    if ended:
        assert list(rows) == [RankResult(0, 3, 0, 0)]
    else:
        with pytest.raises(ImagemillError, match="was killed"):
            list(rows)
        assert summarizer.asked == ["a1.jpg"]
    assert (unfinished_ranks(bench.output, MISSION, [0], plan.digest, None) == []) is ended


def test_rank_in_its_own_process_has_the_environment_of_torchrun(bench, monkeypatch):
    """Models choose their GPU by these variables. A process that runs ranks in itself does not set them."""
    monkeypatch.setenv("LOCAL_RANK", "unset")
    list(worker(bench, bench.plan(), Recorder()).stream([0]))
    assert os.environ["LOCAL_RANK"] == "unset"

    monkeypatch.setattr(rank_worker.multiprocessing, "parent_process", lambda: SimpleNamespace(is_alive=lambda: True))
    list(worker(bench, bench.plan(world_size=2), Recorder()).stream([1]))
    assert os.environ["LOCAL_RANK"] == "1"
