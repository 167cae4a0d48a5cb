"""Ranks by a worker that sees no folder, with the worker in this process: what is sent, and what comes back.

Spec: docs/spec/engines.md#stage-a
"""

import os
import pickle

import pytest

from imagemill.config import SummarizerSettings
from imagemill.encoders.prompts import Prompts
from imagemill.encoders.recipes import SummarizerClass, SummarizerModel
from imagemill.errors import ModelMismatch
from imagemill.pipeline.remote import BatchEnded, BatchFailed, NodeWorker, Parcel
from imagemill.pipeline.stage_a.rank_files import rank_file, read_mark, read_rank_lines
from imagemill.pipeline.stage_a.ranks_remote import RanksPass, RemoteSummaryWorker
from imagemill.pipeline.stage_a.worker import RankWorker
from tests.helpers.stage_a import MISSION, Bench, ticket
from tests.helpers.summarizers import MODULE

MODES = ["per_group", "per_image"]
NAMED = f"{MODULE}:Named"


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """Groups of 5, 1 and 3 images; `asked` returns the names of each call since it was last read."""
    monkeypatch.setenv("ASKED", str(tmp_path / "asked"))
    bench = Bench(tmp_path)
    ticket(bench.input, "pass", "a", *[f"a{number}.jpg" for number in range(5)])
    ticket(bench.input, "pass", "b", "b.jpg")
    ticket(bench.input, "fail", "c", "c1.png", "c2.png", "c10.png")
    return bench


@pytest.fixture
def asked(tmp_path):
    def read():
        path = tmp_path / "asked"
        lines = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return [line.split()[1:] for line in lines]

    return read


def options_of(bench, plan, summarizer=None, **options):
    defaults = {"batch_size": 2, "color": "srgb"}
    files = {"output": bench.output, "store": bench.store}
    return {"plan": plan, "summarizer": summarizer or SummarizerClass(NAMED), **files, **defaults, **options}


def task_of(bench, plan, **options):
    return RanksPass(options_of(bench, plan, **options), 2, {})


def rows_of(task, worker, batches):
    """Yield the lines of batches, which a worker on another machine gets one by one."""
    for batch in batches:
        sent = task.send(batch)
        if not isinstance(sent, Parcel):
            yield sent
            continue
        for part in worker.run(pickle.loads(pickle.dumps([sent.payload]))):
            assert not isinstance(part, BatchFailed), part
            if not isinstance(part, BatchEnded):
                yield from map(task.receive, part)


def run(bench, *, stop_after=None, **options):
    """Run all ranks on another machine; return their results."""
    of_plan = {name: options.pop(name) for name in ("mode", "world_size") if name in options}
    plan = bench.plan(identity=NAMED, **of_plan)
    task = task_of(bench, plan, **options)
    worker = NodeWorker(pickle.dumps(task.recipe))

    def stream(batches):
        for number, row in enumerate(rows_of(task, worker, batches)):
            if number == stop_after:
                raise KeyboardInterrupt
            yield row

    bench.import_summaries()
    try:
        return list(task.ranks(range(plan.ranks.world_size), stream))
    finally:
        bench.import_summaries()
        worker.close()


def finish(bench, **options):
    bench.finish(bench.plan(identity=NAMED, **options))
    return bench.result.read_bytes()


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("mode", MODES)
def test_output_and_batches_are_those_of_ranks_on_this_machine(bench, tmp_path, asked, mode, world_size):
    (bench.input / MISSION / "审核通过" / "d").mkdir()
    (bench.input / MISSION / "审核通过" / "d" / "d.jpg").write_bytes(b"no picture")
    here = Bench(tmp_path)
    here.output, here.store = tmp_path / "here", tmp_path / "state of here"

    results = run(bench, mode=mode, world_size=world_size)
    batches = asked()
    plan = here.plan(identity=NAMED, mode=mode, world_size=world_size)
    for _ in RankWorker(**options_of(here, plan)).stream(range(world_size)):
        pass

    assert sorted(batches) == sorted(asked())
    assert sum(result.inferred for result in results) == 9
    assert sum(result.failed for result in results) == 1
    assert {result.rank for result in results} == set(range(world_size))
    both = [
        sorted((line.group_seq, line.image_index, line.ok, line.summary, line.error, line.fingerprint) for line in lines)
        for lines in (
            [line for rank in range(world_size) for line in read_rank_lines(rank_file(output, MISSION, rank))]
            for output in (bench.output, here.output)
        )
    ]  # fmt: skip
    assert both[0] == both[1]
    remote, local = finish(bench, mode=mode, world_size=world_size), finish(here, mode=mode, world_size=world_size)
    assert remote == local


def test_only_images_without_a_summary_travel(bench, asked):
    run(bench)
    asked()
    changed = bench.input / MISSION / "审核通过" / "a"
    os.utime(changed / "a1.jpg", ns=(1, 1))  # the same bytes
    (changed / "a2.jpg").write_bytes((changed / "a3.jpg").read_bytes())

    (result,) = run(bench)

    assert asked() == [["a2.jpg"]]
    assert (result.inferred, result.reused, result.failed) == (1, 8, 0)
    (result,) = run(bench, fresh=True)
    assert (result.inferred, result.reused) == (9, 0)


def test_lines_of_an_interrupted_run_are_used_by_the_next(bench, asked):
    with pytest.raises(KeyboardInterrupt):
        run(bench, stop_after=2)
    assert not read_mark(bench.output, MISSION, 0).ended
    before = [name for batch in asked() for name in batch]

    (result,) = run(bench)

    after = [name for batch in asked() for name in batch]
    assert (result.reused, len(after)) == (3, 6)
    lines = read_rank_lines(rank_file(bench.output, MISSION, 0))
    assert sorted({*before[:3], *after}) == sorted(line.image_name for line in lines)


def test_rank_without_images_ends(bench):
    results = run(bench, world_size=12, mode="per_image")

    assert len(results) == 12
    assert all(read_mark(bench.output, MISSION, rank).ended for rank in range(12))


def test_images_that_a_dead_process_left_come_last_and_alone(bench, asked):
    bench.store.mkdir(parents=True)
    (bench.store / "rank7.at_work").write_text('null\n"审核通过/a/a0.jpg"\n')

    run(bench)

    assert asked()[-1] == ["a0.jpg"]


def test_batch_that_ended_its_worker_is_divided_and_an_image_alone_is_lost(bench):
    task = task_of(bench, bench.plan(identity=NAMED))
    seen = {}

    def stream(batches):
        seen["batches"] = batches
        yield from [task.lost(part, "was killed") for batch in batches for part in task.parts(batch)]

    (result,) = task.ranks([0], stream)

    assert result.failed == 9
    names = [
        task.name_of(part) for batch in seen["batches"] for part in (batch, *task.parts(batch)) if len(batch.jobs) > 1
    ]
    assert len(set(names)) == len(names)
    (error,) = {line.error for line in read_rank_lines(rank_file(bench.output, MISSION, 0))}
    assert error == "worker_died: its worker process was killed each time"


def test_image_that_is_gone_fails_here(bench):
    task = task_of(bench, bench.plan(identity=NAMED))
    (bench.input / MISSION / "审核通过" / "b" / "b.jpg").unlink()

    (result,) = task.ranks([0], lambda batches: rows_of(task, NodeWorker(pickle.dumps(task.recipe)), batches))

    assert (result.inferred, result.failed) == (8, 1)


def test_summarizer_that_is_not_that_of_this_machine_is_refused(bench):
    """Spec: docs/spec/engines.md#reference"""
    task = task_of(bench, bench.plan(identity=NAMED))
    mine = RemoteSummaryWorker(task.recipe).about()
    other = RemoteSummaryWorker(
        task_of(bench, bench.plan(), summarizer=SummarizerClass(f"{MODULE}:Blank")).recipe
    ).about()

    assert task.fits(mine)
    task.agree(mine)
    assert not task.fits(other)
    with pytest.raises(ModelMismatch, match=f"it is {MODULE}:Blank, not {NAMED}"):
        task.agree(other)


def test_model_with_another_prompt_is_refused_with_the_fact(bench, tmp_path):
    """Spec: docs/spec/engines.md#reference"""
    models = [
        SummarizerModel(SummarizerSettings(), Prompts({MISSION: text}), 1, tmp_path / "previews", ["auto"])
        for text in ("one", "other")
    ]
    made_by = models[0].identity(MISSION)
    task = task_of(bench, bench.plan(identity=f"{made_by.kind}:{made_by.key}"), summarizer=models[0])
    other = task_of(bench, bench.plan(), summarizer=models[1])

    mine = RemoteSummaryWorker(task.recipe).about()
    assert (task.fits(mine), mine.device) == (True, "cpu")
    with pytest.raises(ModelMismatch, match="it differs in prompt"):
        task.agree(RemoteSummaryWorker(other.recipe).about())


def test_gpus_of_the_summarizer_have_their_own_entry(bench):
    plan = bench.plan(identity=NAMED)

    assert RanksPass(options_of(bench, plan), 1, {"summarizer": 0.5, "vae": 1}).gpus == 0.5
    assert RanksPass(options_of(bench, plan), 1, {"vae": 1}).gpus == 0
