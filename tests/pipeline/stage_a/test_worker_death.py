"""A dead rank loses only its unfinished images, and a rerun loses only the image that kills it.

Spec: docs/spec/conventions.md#refused-and-failed, docs/spec/stage-a.md#failed-groups
"""

import pytest

from imagemill.pipeline.stage_a.rank_files import left_behind
from imagemill.pipeline.stage_a.worker import close_dead_rank
from tests.helpers.stage_a import Bench, Recorder, ticket


class Death(BaseException):
    """Simulated end of the process."""


class Deadly(Recorder):
    """A summarizer that dies on images with `die` in their name."""

    def summarize(self, images, mission):
        if any("die" in image.name for image in images):
            self.batches.append([image.name for image in images])
            raise Death
        return super().summarize(images, mission)


@pytest.fixture
def bench(tmp_path):
    bench = Bench(tmp_path)
    for name, images in {"a": ["a1.jpg"], "b": ["b1.jpg", "die1.jpg", "b2.jpg"], "c": ["die2.jpg"]}.items():
        ticket(bench.input, "pass", name, *images)
    for name in ("d", "e"):
        ticket(bench.input, "pass", name, f"{name}1.jpg")
    return bench


@pytest.fixture(autouse=True)
def death(monkeypatch):
    """Simulate death without clean-up: the record of images in flight remains on disk."""
    from imagemill.pipeline.stage_a.rank_files import InFlight

    leave = InFlight.__exit__
    monkeypatch.setattr(
        InFlight, "__exit__", lambda self, kind, *more: None if kind is Death else leave(self, kind, *more)
    )


def attempt(bench, **options):
    """Run all images on one rank until it dies; return the summarizer, the rank's share, and the merge."""
    plan, summarizer, share = bench.plan(), Deadly(), None
    try:
        for _ in bench.rank(plan, 0, summarizer, **options):
            pass
    except Death:
        share = close_dead_rank(plan, bench.output, bench.store, "", 0, "was ended by SIGKILL")
    return summarizer, share, bench.finish(plan)


def failed(merged):
    return {
        failure.group.group_id: {image.image_name: image.reason for image in failure.images}
        for failure in merged.failures
    }


def test_dead_rank_loses_only_unfinished_images_and_names_them(bench):
    _, share, merged = attempt(bench, batch_size=8)

    assert (merged.written, merged.missing_ranks) == (1, [])
    assert failed(merged).keys() == {"b", "c", "d", "e"}
    assert set(failed(merged)["b"].values()) == {"rank_died"}
    assert (share.rank, share.inferred, share.failed) == (0, 1, 6)
    hands = "审核通过/b/b1.jpg, 审核通过/b/b2.jpg, 审核通过/b/die1.jpg"
    assert share.died == f"rank 0 of 1 of {bench.plan().mission} was ended by SIGKILL working on {hands}"
    details = {image.image_name: image.detail for failure in merged.failures for image in failure.images}
    assert details["die1.jpg"].endswith("was ended by SIGKILL working on this image and 2 more")
    assert details["d1.jpg"].endswith("was ended by SIGKILL before it had finished this image")


def test_reruns_finish_every_group_without_a_deadly_image(bench):
    attempt(bench, batch_size=8)
    attempt(bench, batch_size=8)
    summarizer, _, merged = attempt(bench, batch_size=8)

    assert failed(merged) == {"b": {"die1.jpg": "rank_died"}, "c": {"die2.jpg": "rank_died"}}
    assert merged.written == 3
    assert summarizer.batches == [["d1.jpg"], ["e1.jpg"], ["b1.jpg"], ["b2.jpg"], ["die1.jpg"]]
    assert left_behind(bench.store) == ["审核通过/c/die2.jpg", "审核通过/b/die1.jpg"]

    summarizer, _, again = attempt(bench, batch_size=8)
    assert (summarizer.asked, failed(again)) == (["die2.jpg"], failed(merged))


def test_images_in_flight_at_a_death_are_retried_last_and_alone(bench):
    attempt(bench, batch_size=8)

    assert left_behind(bench.store) == [f"审核通过/b/{name}.jpg" for name in ("b1", "b2", "die1")]
    summarizer, _, _ = attempt(bench, batch_size=8)

    assert summarizer.batches == [["die2.jpg"]], "the first one not tried yet"


def test_record_of_images_in_flight_is_removed_with_the_images(bench):
    attempt(bench, batch_size=8)
    (bench.input / "挡风板安装检查/审核通过/c/die2.jpg").unlink()
    (bench.input / "挡风板安装检查/审核通过/b/die1.jpg").unlink()

    _, share, merged = attempt(bench, batch_size=8)

    assert (share, merged.failures) == (None, [])
    assert left_behind(bench.store) == []


def test_rank_that_died_before_its_first_line_contributes_no_old_lines(bench):
    """Its file may contain lines of an earlier plan, which are not merged."""
    bench.infer(bench.plan(passes=1))
    plan = bench.plan()

    share = close_dead_rank(plan, bench.output, bench.store, "", 0, "ended with exit code 9")

    assert (share.inferred, share.failed, share.died.endswith("exit code 9")) == (0, 7, True)
    assert bench.finish(plan).written == 0
