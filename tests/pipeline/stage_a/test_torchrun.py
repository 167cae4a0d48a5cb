"""Ranks of one torchrun start and of another one.

Spec: docs/spec/conventions.md#leases, docs/spec/stage-a.md#torchrun
"""

from functools import partial
from types import SimpleNamespace

import pytest

from imagemill.errors import ImagemillError
from imagemill.pipeline.stage_a import torchrun
from imagemill.pipeline.stage_a.rank_files import RankMark, rank_file, read_rank_lines, unfinished_ranks, write_mark
from imagemill.pipeline.stage_a.torchrun import stop_if_superseded, wait_for_first, wait_for_ranks
from imagemill.pipeline.stage_a.worker import RankResult, RankRunner
from tests.helpers.stage_a import MISSION, Bench, Recorder, ticket


def clock(monkeypatch, monotonic, sleep):
    monkeypatch.setattr(torchrun, "time", SimpleNamespace(monotonic=monotonic, sleep=sleep))


def test_rank_starts_once_rank_0_has_claimed_the_mission(tmp_path, monkeypatch):
    """Rank 0 claims for all of them. A mark of another start or another plan is ignored."""
    now = [0.0]
    marks = {
        2: RankMark("plan", "other start", False),
        4: RankMark("other plan", "start", False),
        6: RankMark("plan", "start", False),
    }

    def sleep(seconds):
        now[0] += seconds
        if now[0] in marks:
            write_mark(tmp_path, "m", 0, marks[now[0]])

    clock(monkeypatch, lambda: now[0], sleep)

    wait_for_first(tmp_path, "m", "plan", "start", seconds=10)

    assert now[0] == 6


def test_rank_reports_the_cause_if_rank_0_does_not_start(tmp_path, monkeypatch):
    """The wait is bounded, because nothing ends processes that were started manually."""
    now = iter(range(100))
    clock(monkeypatch, lambda: next(now), lambda _: None)

    with pytest.raises(ImagemillError, match="rank 0 did not start within 3 s") as caught:
        wait_for_first(tmp_path, "m", "plan", "start", seconds=3)

    assert "another run" in caught.value.why
    assert "--wait-seconds" in caught.value.do


class _TakenOver(Recorder):
    """A summarizer: rank 0 of another start begins while this one handles `a2.jpg`."""

    def __init__(self, bench):
        super().__init__()
        self._bench = bench

    def summarize(self, images, mission):
        if images[0].name == "a2.jpg":
            write_mark(self._bench.output, mission, 0, RankMark("any plan", "two", False))
        return super().summarize(images, mission)


def test_rank_stops_if_another_start_has_claimed_the_mission(tmp_path):
    """Its end mark would confirm the file of the other start's rank. Finished summaries are kept."""
    bench = Bench(tmp_path)
    ticket(bench.input, "pass", "a", "a1.jpg", "a2.jpg", "a3.jpg")
    plan, summarizer = bench.plan(), _TakenOver(bench)
    options = {
        "plan": plan, "summarizer": lambda rank: summarizer, "output": bench.output, "store": bench.store,
        "batch_size": 1, "launch": "one",
    }  # fmt: skip
    go_on = partial(stop_if_superseded, bench.output, MISSION, "one")

    with pytest.raises(ImagemillError, match="started again"):
        list(RankRunner(options, go_on).stream([0]))

    assert summarizer.asked == ["a1.jpg", "a2.jpg"]
    assert unfinished_ranks(bench.output, MISSION, [0], plan.digest, None) == [0]
    assert [line.image_name for line in read_rank_lines(rank_file(bench.output, MISSION, 0))] == ["a1.jpg", "a2.jpg"]
    options["launch"] = "two"
    share = list(RankRunner(options, partial(stop_if_superseded, bench.output, MISSION, "two")).stream([0]))
    assert share == [RankResult(0, 1, 2, 0)]


def test_wait_ends_with_the_last_rank_or_the_timeout(tmp_path, monkeypatch):
    """Spec: docs/spec/stage-a.md#torchrun"""
    now = [0.0]

    def sleep(seconds):
        now[0] += seconds
        if now[0] >= 3:
            write_mark(tmp_path, "m", 0, RankMark("plan", "start", True))

    clock(monkeypatch, lambda: now[0], sleep)

    def waited(ranks):
        return wait_for_ranks(tmp_path, "m", ranks, "plan", "start", seconds=10)

    assert waited([0]) == []
    assert 3 <= now[0] < 10
    assert waited([0, 1]) == [1]
    assert 13 <= now[0] < 15
