"""The share of one rank: inferred images, their batches, and reused summaries. Spec: docs/spec/stage-a.md#work"""

import gc
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import weakref

import pytest
from PIL import Image

from imagemill.errors import ModelUnusable, WrongUsage
from imagemill.formats.images import decode_rgb
from imagemill.formats.jsonl import read_jsonl
from imagemill.pipeline.stage_a.rank_files import rank_file, rank_files, read_mark, read_rank_lines
from imagemill.pipeline.stage_a.worker import RankWorker
from tests.helpers.product import PROJECT
from tests.helpers.stage_a import MISSION, Bench, Recorder, ticket, touch

MODES = ["per_group", "per_image"]


def names(count, start=1):
    return [f"{number}.jpg" for number in range(start, start + count)]


@pytest.fixture
def bench(tmp_path):
    """Groups of 20, 1 and 3 images."""
    bench = Bench(tmp_path)
    ticket(bench.input, "pass", "a", *names(20))
    ticket(bench.input, "pass", "b", "1.jpeg")
    ticket(bench.input, "fail", "c", "1.PNG", "2.png", "10.png")
    return bench


def total(made):
    return sorted(name for summarizer in made for name in summarizer.asked)


def everything():
    return sorted([*names(20), "1.jpeg", "1.PNG", "2.png", "10.png"])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_image_is_inferred_once(bench, mode, world):
    made, merged = bench.run(mode=mode, world_size=world)

    assert everything() == total(made)
    assert (merged.groups, merged.written, merged.failures, merged.missing_ranks) == (3, 3, [], [])


def test_skewed_groups_are_spread_in_per_image_mode(tmp_path):
    """In a skewed set of 20 + 1 images, the slowest rank has half of the images."""
    bench = Bench(tmp_path)
    ticket(bench.input, "pass", "a", *names(20))
    ticket(bench.input, "pass", "b", "1.jpeg")

    by_group, _ = bench.run(mode="per_group", world_size=2, batch_size=1, fresh=True)
    by_image, _ = bench.run(mode="per_image", world_size=2, batch_size=1, fresh=True)

    assert [len(summarizer.batches) for summarizer in by_group] == [20, 1]
    assert [len(summarizer.batches) for summarizer in by_image] == [11, 10]


def test_per_group_batching_is_group_local(bench):
    """Scenario: per_group batching is group-local. File names distinguish the groups."""
    (summarizer,), _ = bench.run(mode="per_group", batch_size=16)

    assert [["1.PNG", "2.png", "10.png"], names(16), names(4, 17), ["1.jpeg"]] == summarizer.batches


def test_per_image_batches_are_full(bench):
    (summarizer,), _ = bench.run(mode="per_image", batch_size=16)

    assert [len(batch) for batch in summarizer.batches] == [16, 8]


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.soak), 4])
@pytest.mark.parametrize("mode", MODES)
def test_at_most_a_batch_of_decoded_images_is_in_memory(bench, mode, size, monkeypatch):
    """Scenario: "keeping at most batch_size images in flight". Each decoding counts the images still referenced."""
    alive, most = [], []
    made = Image.fromarray

    def counted(*given):
        image = made(*given)
        alive.append(weakref.ref(image))
        gc.collect()
        most.append(sum(each() is not None for each in alive))
        return image

    monkeypatch.setattr(Image, "fromarray", counted)
    bench.run(mode=mode, batch_size=size)

    assert len(most) == 24
    assert max(most) == size


def test_images_are_upright_rgb(tmp_path):
    bench, seen = Bench(tmp_path), []
    folder = touch(bench.input / MISSION / "审核通过" / "x" / "1.jpg")
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("L", (40, 20)).save(folder, exif=exif)

    class Looker:
        def summarize(self, images, mission):
            seen.extend((image.image.size, image.image.mode, mission) for image in images)
            return ["甲"]

    bench.run(Looker())

    assert seen == [((20, 40), "RGB", MISSION)]


def test_second_run_infers_nothing_and_does_not_change_the_output(bench):
    bench.run()
    before = bench.result.stat()

    made, merged = bench.run()

    assert total(made) == []
    assert merged.rewritten is False
    assert (before.st_mtime_ns, before.st_ino) == (bench.result.stat().st_mtime_ns, bench.result.stat().st_ino)


@pytest.mark.parametrize(("mode", "world"), [("per_image", 3), ("per_group", 1), ("per_image", 1)])
def test_finished_images_of_a_dead_rank_are_reused_for_any_world_size_and_mode(bench, mode, world):
    """Spec: docs/spec/stage-a.md#reuse-of-summaries"""
    plan = bench.plan(mode="per_group", world_size=2)
    first = Recorder()
    died = bench.rank(plan, 0, first, batch_size=4)
    for _ in range(3):
        next(died)
    died.close()

    made, merged = bench.run(mode=mode, world_size=world)

    assert everything() == sorted([*first.asked, *total(made)])
    assert 0 < len(first.asked) < 24
    assert merged.written == 3


class Killed(Recorder):
    """A summarizer that ends its process in its third batch, like SIGKILL."""

    def summarize(self, images, mission):
        if len(self.batches) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().summarize(images, mission)


@pytest.mark.parametrize("lost", ["state", "store", "output"])
def test_killed_rank_loses_only_its_current_batch(bench, lost):
    """Spec: docs/spec/stage-a.md#reuse-of-summaries"""
    program = (
        "import sys; from pathlib import Path; from tests.helpers.stage_a import Bench\n"
        "from tests.pipeline.stage_a.test_worker import Killed\n"
        "bench = Bench(Path(sys.argv[1])); bench.infer(bench.plan(mode='per_image'), Killed(), batch_size=5)"
    )
    killed = subprocess.run([sys.executable, "-c", program, bench.input.parent], cwd=PROJECT, check=False)
    bench.import_summaries()  # rank 0 does this after the death of a rank
    shutil.rmtree(getattr(bench, lost))

    made, merged = bench.run(mode="per_image", world_size=2)

    assert killed.returncode == -signal.SIGKILL
    assert len(total(made)) == 24 - 10
    assert merged.written == 3


@pytest.mark.parametrize("lost", ["state", "store", "ledger", "rank files"])
def test_finished_summaries_survive_the_loss_of_one_of_their_copies(bench, lost):
    bench.infer(bench.plan(mode="per_group", world_size=4))
    if lost == "ledger":
        (bench.state / "ledger.sqlite").unlink()
        shutil.rmtree(bench.output)
    else:
        shutil.rmtree({"state": bench.state, "store": bench.store, "rank files": bench.output}[lost])

    made, merged = bench.run(mode="per_image", world_size=2)

    assert total(made) == []
    assert merged.written == 3


def test_rank_opens_no_ledger_and_writes_only_its_own_files(bench, monkeypatch):
    """Ranks write only their rank file and one in-flight line, and never open the ledger."""
    monkeypatch.setattr("imagemill.store.ledger.database._connect", None)
    worker = RankWorker(plan=bench.plan(), summarizer=lambda rank: Recorder(), output=bench.output, store=bench.store)

    rows = list(worker.stream([0]))

    assert len(rows) == 24
    assert list(bench.store.iterdir()) == []
    assert {path.name for path in bench.output.iterdir()} == {
        f"{MISSION}_stage_a.images.rank0.json", f"{MISSION}_stage_a.images.rank0.jsonl",
    }  # fmt: skip


def test_rank_reuses_lines_written_after_the_snapshot(bench):
    """A rank of a superseded start can finish a batch while rank 0 of the next start imports."""
    plan = bench.plan(mode="per_image", world_size=2)
    worker = RankWorker(plan=plan, summarizer=lambda rank: Recorder(), output=bench.output, store=bench.store)

    assert {row.how for row in worker.stream([1])} == {"inferred"}
    assert {row.how for row in worker.stream([1])} == {"reused"}


def test_truncated_last_line_loses_only_its_image(bench):
    bench.infer(bench.plan(mode="per_image"))
    shutil.rmtree(bench.state)
    path = rank_file(bench.output, MISSION, 0)
    path.write_bytes(path.read_bytes()[:-20])

    made, merged = bench.run(mode="per_image", world_size=2)

    assert total(made) == ["1.jpeg"]
    assert merged.written == 3


def test_unchanged_file_is_not_read_again(bench, monkeypatch):
    """Spec: docs/spec/conventions.md#completion"""
    bench.run()
    read = []
    from imagemill.pipeline.stage_a import worker as rank_worker

    monkeypatch.setattr(rank_worker, "read_signed", read.append)
    bench.run()

    assert read == []


def test_summaries_of_the_identity_of_an_earlier_release_are_reused(bench):
    """Schemes 1 and 2 of identities hash files. Spec: docs/spec/stage-a.md#reuse-of-summaries"""
    bench.run(identity="of files")

    continued, _ = bench.run(identity="of tensors", former="of files")
    other, _ = bench.run(identity="of tensors", former="of other files")

    assert ([], everything()) == (total(continued), total(other))


def test_touched_file_is_read_once_and_its_summary_reused(bench, monkeypatch):
    from imagemill.pipeline.stage_a import worker as rank_worker

    bench.run()
    image = bench.input / MISSION / "审核通过" / "b" / "1.jpeg"
    os.utime(image, ns=(1, 1))
    read, really = [], rank_worker.read_signed
    monkeypatch.setattr(rank_worker, "read_signed", lambda path: read.append(path) or really(path))

    made = [summarizer for _ in range(2) for summarizer in bench.run()[0]]

    assert total(made) == []
    assert read == [image]


def test_only_the_changed_image_is_inferred_again(bench):
    bench.run()
    ticket(bench.input, "fail", "c", "2.png")
    ticket(bench.input, "pass", "d", "9.jpg")

    made, merged = bench.run(mode="per_image", world_size=2)

    assert total(made) == ["2.png", "9.jpg"]
    assert merged.written == 4


def test_renamed_image_is_inferred_again(bench):
    """A summary belongs to an image and its name, because the summarizer receives the name."""
    bench.run()
    image = bench.input / MISSION / "审核通过" / "b" / "1.jpeg"
    image.rename(image.with_name("2.jpeg"))

    made, _ = bench.run()

    assert total(made) == ["2.jpeg"]


def test_another_summarizer_infers_all_and_summaries_of_the_first_are_kept(bench):
    bench.run(identity="one")
    other, _ = bench.run(identity="two")
    again, _ = bench.run(identity="one")

    assert everything() == total(other)
    assert total(again) == []


def test_fresh_run_infers_all_and_later_runs_use_its_summaries(bench):
    bench.run(Recorder({"2.png": "旧"}), world_size=2)
    fresh, _ = bench.run(Recorder({"2.png": "新"}), fresh=True)
    after, _ = bench.run(world_size=2)

    assert everything() == total(fresh)
    assert total(after) == []
    record = next(line.value for line in read_jsonl(bench.result) if line.value["label"] == "fail")
    assert record["per_image"]["image_2"] == "新"


def test_unreadable_image_gives_a_failed_line(bench):
    folder = bench.input / MISSION / "审核通过" / "b"
    (folder / "2.jpeg").write_bytes(b"no image")
    Image.new("RGB", (7, 30)).save(folder / "3.jpeg")

    (summarizer,) = bench.infer(bench.plan())

    failed = {
        line.image_name: line.error for line in read_rank_lines(rank_file(bench.output, MISSION, 0)) if not line.ok
    }
    assert {"2.jpeg", "3.jpeg"} == failed.keys()
    assert failed["2.jpeg"].startswith("undecodable: ")
    assert failed["3.jpeg"].startswith("too_small: ")
    assert everything() == sorted(summarizer.asked)


def test_image_deleted_during_the_run_gives_a_failed_line(bench):
    plan = bench.plan()
    (bench.input / MISSION / "审核通过" / "b" / "1.jpeg").unlink()

    bench.infer(plan)

    (failed,) = [line for line in read_rank_lines(rank_file(bench.output, MISSION, 0)) if not line.ok]
    assert (failed.image_name, failed.fingerprint) == ("1.jpeg", "")
    assert failed.error.startswith("read_error: ")


def test_failed_image_is_retried(bench):
    bench.run(Recorder({"2.png": " "}))
    made, merged = bench.run()

    assert total(made) == ["2.png"]
    assert merged.written == 3


def test_summarizer_is_created_once_per_rank_and_only_if_there_is_work(bench):
    """Spec: docs/spec/stage-a.md#summarizers"""
    made = []

    def ran(plan):
        worker = RankWorker(
            plan=plan, summarizer=lambda rank: made.append(rank) or Recorder(), output=bench.output, store=bench.store,
            batch_size=2,
        )  # fmt: skip
        return list(worker.stream(range(2)))

    rows = ran(bench.plan(world_size=2))

    assert made == [0, 1]
    assert {("inferred", 0), ("inferred", 1)} == {(row.how, row.rank) for row in rows}
    assert {"reused"} == {row.how for row in ran(bench.plan(world_size=2))}
    assert len(made) == 2


def test_unusable_model_ends_the_rank_without_a_mark(bench):
    class Broken:
        def summarize(self, images, mission):
            raise ModelUnusable("no model")

    plan = bench.plan()
    with pytest.raises(ModelUnusable):
        bench.infer(plan, Broken())

    mark = read_mark(bench.output, MISSION, 0)
    assert (plan.digest, False) == (mark.plan, mark.ended)


def test_batch_size_below_one_is_refused(bench):
    with pytest.raises(WrongUsage, match="--batch-size is 0"):
        bench.infer(bench.plan(), batch_size=0)


def test_digest_of_the_plan_changes_with_every_parameter(bench):
    """The digest exists so that lines of another plan are never merged."""
    plans = [
        bench.plan(), bench.plan(identity="other"), bench.plan(mode="per_image"), bench.plan(world_size=2),
        bench.plan(passes=1),
    ]  # fmt: skip
    ticket(bench.input, "pass", "b", "1.jpeg")
    plans.append(bench.plan())

    assert len(plans) == len({plan.digest for plan in plans})
    assert plans[-1].digest == bench.plan().digest


def test_plan_survives_pickling(bench):
    plan = bench.plan(mode="per_image", world_size=2)

    assert plan == pickle.loads(pickle.dumps(plan))


@pytest.mark.parametrize("mode", MODES)
def test_only_sampled_groups_are_processed(bench, mode):
    """Scenario: Sampling preserves group counts in per_image mode."""
    made, merged = bench.run(mode=mode, world_size=2, passes=0, fails=1)

    assert total(made) == ["1.PNG", "10.png", "2.png"]
    assert merged.groups == 1


@pytest.mark.parametrize("keep", [False, True])
def test_rank_files_are_kept_if_a_group_failed_before_planning(bench, keep):
    """Spec: docs/spec/stage-a.md#intermediate-files"""
    bench.infer(bench.plan())

    merged = bench.finish(bench.plan(), failed=1)

    assert (merged.removed, list(rank_files(bench.output, MISSION))) == (0, [0])
    assert bench.finish(bench.plan(), keep=keep).removed == (not keep)


def test_store_does_not_grow_with_fresh_runs(bench):
    sizes = []
    for _ in range(6):
        bench.run(fresh=True)
        sizes.append(sum(len(list(read_jsonl(path))) for path in bench.store.iterdir()))

    assert max(sizes) <= 2 * 24
    assert rank_files(bench.output, MISSION) == {}


def test_lines_contain_the_specified_fields(bench):
    bench.infer(bench.plan(mode="per_image", world_size=2))

    lines = [json.loads(raw) for raw in rank_file(bench.output, MISSION, 1).read_text().splitlines()]

    assert {key: lines[0][key] for key in ("group_seq", "group_id", "label", "image_index", "image_name", "ok")} == {
        "group_seq": 0,
        "group_id": "c",
        "label": "fail",
        "image_index": 2,
        "image_name": "2.png",
        "ok": True,
    }
    assert f"{MISSION} 2.png" == lines[0]["summary"]


def test_image_too_large_for_memory_fails_alone(bench, monkeypatch):
    def decode(data, name, color):
        if name == "2.jpg":
            raise MemoryError
        return decode_rgb(data, name, color)

    monkeypatch.setattr("imagemill.pipeline.stage_a.worker.decode_rgb", decode)

    _, merged = bench.run()

    of_images = {
        (image.image_name, image.reason, image.detail) for failure in merged.failures for image in failure.images
    }
    assert of_images == {("2.jpg", "out_of_memory", "out of memory while the image was being decoded")}
