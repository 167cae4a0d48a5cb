"""`imagemill stage-a …`: ranks one by one, in processes and under torchrun; death and resumption; wrong usage.

Spec: docs/spec/conventions.md#command-line
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from random import Random

import dagster as dg
import pytest

from assets.partitions import ranks
from dagster_project.internals.instance import open_instance
from imagemill.formats.jsonl import read_raw
from imagemill.pipeline.stage_a import torchrun as waits
from imagemill.pipeline.stage_a.rank_files import RankMark, output_file, rank_files, read_mark
from imagemill.store.ledger import Ledger
from imagemill.validation.validator import validate
from resources.summarizer import SummarizerResource
from tests.helpers.presets import imagemill_here
from tests.helpers.product import PROJECT, start
from tests.helpers.sessions import locate
from tests.helpers.stage_a import MISSION, TICKET, ticket
from tests.helpers.summarizers import MODULE, asked

NAMED = f"{MODULE}:Named"
SIZES = {"a": 5, "b": 1, "c": 3, "d": 4}
NAMES = {name: [f"{name}{n}.{'jpg' if n % 2 else 'png'}" for n in range(1, size + 1)] for name, size in SIZES.items()}
ALL_IMAGES = sorted(name for names in NAMES.values() for name in names)
WHOLE = {"a::fail": 5, "b::pass": 1, "c::fail": 3, "d::pass": 4}


@pytest.fixture
def tickets(data_root):
    """Four groups, two of each label."""
    for number, (name, images) in enumerate(NAMES.items()):
        ticket(data_root.stage_a_input, "pass" if number % 2 else "fail", name, *images)
    return data_root


def stage_a(root, *options, summarizer=NAMED, **environment):
    """Run the command in the test's own process."""
    environment = {"RANK": "", "WORLD_SIZE": "", **environment}
    given = ["--mission", MISSION, "--summarizer", summarizer]
    return imagemill_here(root, "stage-a", *given, *options, **environment)


def records(root, mission=MISSION):
    return [json.loads(raw) for _, raw in read_raw(output_file(root.stage_a_output, mission))]


def groups(root):
    return {f"{record['group_id']}::{record['label']}": record["images"] for record in records(root)}


def counts(done):
    """Return the counters printed by a command."""
    words = [word.partition("=") for word in done.stdout.split() if "=" in word]
    return {name: int(value) for name, _, value in words}


# ---- ranks


@pytest.fixture
def shared(monkeypatch):
    """Return, for each run's summarizers, the number of processes that share the machine."""
    asked, factory = [], SummarizerResource.factory
    monkeypatch.setattr(
        SummarizerResource, "factory", lambda self, processes=1: (asked.append(processes), factory(self, processes))[1]
    )
    return asked


def test_every_world_size_and_mode_gives_the_same_groups(tickets, tmp_path, shared):
    """ "Rank r of W takes jobs[r::W] (per_image) or groups[r::W] (per_group)"; known summaries are kept."""
    assert stage_a(tickets).returncode == 0
    expected, bytes_before = groups(tickets), output_file(tickets.stage_a_output, MISSION).read_bytes()
    assert {group_id: len(images) for group_id, images in expected.items()} == WHOLE

    log = tmp_path / "asked"
    two = stage_a(tickets, "--sharding_mode", "per_image", "--world_size", 2, "--fresh", ASKED=log)
    assert two.returncode == 0, two.stderr
    assert groups(tickets) == expected
    assert sorted(sum(map(len, batches)) for batches in asked(log).values()) == [6, 7], (
        "each rank in a process of its own"
    )
    assert shared[-1] == 2, "and each model takes half of the threads"

    tickets.config_file.write_text("stage_a_ranks: 4\n")
    four = stage_a(tickets, "--sharding-mode", "per_group", "--keep-intermediate-outputs")
    assert (counts(four)["inferred"], counts(four)["reused"]) == (0, 13)
    assert output_file(tickets.stage_a_output, MISSION).read_bytes() == bytes_before
    assert list(rank_files(tickets.stage_a_output, MISSION)) == [0, 1, 2, 3]
    assert validate(output_file(tickets.stage_a_output, MISSION)).passed


def test_ranks_registered_in_any_order_are_all_run(tickets):
    """Partitions keep their order of registration, which the UI or a deletion can change."""
    with open_instance(tickets) as instance:
        instance.add_dynamic_partitions(ranks.name, [f"{MISSION}/1of2", "other/0of1"])

    done = stage_a(tickets, "--world-size", 2)

    assert done.returncode == 0, done.stderr
    assert (counts(done)["inferred"], counts(done)["written"], counts(done)["missing_ranks"]) == (13, 4, 0)
    with open_instance(tickets) as instance:
        assert instance.get_materialized_partitions(dg.AssetKey("stage_a_ranks")) == {
            f"{MISSION}/0of2", f"{MISSION}/1of2",
        }  # fmt: skip


def torchrun(root, *options, **environment):
    """Start the command as two ranks of the real torchrun."""
    arguments = ["--data-root", root.path, "--mission", MISSION, "--summarizer", NAMED, *options]
    return subprocess.Popen(
        [
            *[sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
            *["-m", "dagster_project.cli.main", "stage-a", *map(str, arguments)],
        ],
        cwd=PROJECT, env={**os.environ, **{name: str(value) for name, value in environment.items()}},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def test_torchrun_runs_each_process_as_one_rank_and_the_first_merges(tickets, tmp_path):
    """The real torchrun, two processes."""
    log = tmp_path / "asked"
    process = torchrun(tickets, "--sharding_mode", "per_image", ASKED=log)
    said, _ = process.communicate()

    assert process.returncode == 0, said
    assert "rank 1 of 2: inferred=6" in said
    assert "written=4" in said
    assert len(asked(log)) == 2
    assert len(groups(tickets)) == 4


def test_rank_of_torchrun_names_the_image_that_ended_its_process(tickets, tmp_path):
    """The second start processes that image in a separate process, so the rank survives and rank 0 merges."""
    ticket(tickets.stage_a_input, "fail", "c", "deadly.jpg")
    for _ in range(2):
        said, _ = torchrun(tickets, "--summarizer", f"{MODULE}:Deadly", ASKED=tmp_path / "asked").communicate()

    assert f"imagemill: rank 1 of 2 of {MISSION} ended with exit code 9 working on 审核不通过/c/deadly.jpg" in said, (
        said
    )
    assert groups(tickets).keys() == {"a::fail", "b::pass", "d::pass"}


@pytest.mark.soak
def test_simultaneous_starts_of_torchrun_do_not_affect_each_other(tickets, tmp_path):
    """The second start waits with all its ranks: each start writes every group, and no image is inferred twice.

    Decision 35.
    """
    log = tmp_path / "asked"
    slow = ["--batch-size", 1, "--sharding_mode", "per_image"]
    first = torchrun(tickets, *slow, ASKED=log, BATCH_SECONDS=1)
    while len(asked(log)) < 2 and first.poll() is None:
        time.sleep(0.05)
    second = torchrun(tickets, *slow, "--pass-group-number", 1, ASKED=log, BATCH_SECONDS=1)
    said = [process.communicate()[0] for process in (first, second)]

    assert [first.returncode, second.returncode] == [0, 0], said
    assert "groups=4 written=4 failed=0 missing_ranks=0" in said[0]
    assert "groups=3 written=3 failed=0 missing_ranks=0" in said[1]
    assert "inferred=0" in said[1]
    assert sorted(name for batches in asked(log).values() for batch in batches for name in batch) == ALL_IMAGES


def test_rank_superseded_by_another_start_stops_without_an_end_mark(tickets, monkeypatch):
    """Its end mark would confirm the lines of the other start. Decision 35."""
    assert stage_a(tickets, "--wait-seconds", 0, RANK=0, WORLD_SIZE=2).returncode == 0
    first = read_mark(tickets.stage_a_output, MISSION, 0)
    marks = iter([first, RankMark("any plan", "another start", False)])
    monkeypatch.setattr(waits, "read_mark", lambda *_: next(marks))

    done = stage_a(tickets, RANK=1, WORLD_SIZE=2)

    assert done.returncode == 1
    assert "the ranks have been started again" in done.stderr
    assert not read_mark(tickets.stage_a_output, MISSION, 1).ended


def test_rank_does_nothing_before_rank_0_of_its_start_has_claimed_the_mission(tickets):
    """Rank 0 claims for all ranks. Ranks without a claim would overwrite those of the active run. Decision 35."""
    done = stage_a(tickets, "--wait-seconds", 0, RANK=1, WORLD_SIZE=2)

    assert done.returncode == 1
    assert "rank 0 did not start within 0 s" in done.stderr
    assert rank_files(tickets.stage_a_output, MISSION) == {}


def test_rank_0_names_missing_ranks_and_merges_the_others(tickets, shared):
    """ "Waits a bounded time for the other ranks' end marks (missing ranks named)"."""
    first = stage_a(tickets, "--wait-seconds", 0, RANK=0, WORLD_SIZE=2, LOCAL_WORLD_SIZE=2)
    assert first.returncode == 0, first.stderr
    assert shared[-1] == 2
    assert counts(first) | {"missing_ranks": 1, "written": 2, "failed": 2} == counts(first)
    assert "ranks that have not come to their end: 1" in first.stderr
    assert groups(tickets).keys() == {"a::fail", "b::pass"}

    other = stage_a(tickets, RANK=1, WORLD_SIZE=2, LOCAL_WORLD_SIZE=2)
    assert other.stdout == "rank 1 of 2: inferred=7 reused=0 failed=0\n"
    again = stage_a(tickets, "--wait-seconds", 0, RANK=0, WORLD_SIZE=2, LOCAL_WORLD_SIZE=2)
    assert (counts(again)["missing_ranks"], counts(again)["written"]) == (0, 4)


# ---- death and resumption


def kill_one_rank(root, log, *, seconds, rng):
    """Run two ranks on single images, and kill one some time after both have started; return exit code and output."""
    arguments = [
        "--data-root",
        root.path,
        "--mission",
        MISSION,
        "--summarizer",
        NAMED,
        "--batch-size",
        1,
        "--world-size",
        2,
    ]
    process = start("stage-a", *arguments, stub=False, ASKED=log, BATCH_SECONDS=0.4)
    until = time.monotonic() + 60
    while len(asked(log)) < 2 and time.monotonic() < until:
        time.sleep(0.05)
    time.sleep(seconds)
    with suppress(ProcessLookupError):  # the process has already ended
        os.kill(rng.choice(sorted(asked(log))), signal.SIGKILL)
    said, _ = process.communicate(timeout=60)
    return process.returncode, said


def finished(root):
    """Return the names of the images with finished summaries."""
    store = root.state / "stage_a" / MISSION
    lines = [line for path in store.glob("*.jsonl") for line in path.read_bytes().splitlines()]
    return {json.loads(line)["image"].rpartition("/")[2] for line in lines}


def resume(root, log, **options):
    """Run the command again; return the names of the images passed to the summarizer."""
    done = stage_a(root, ASKED=log, **options)
    assert done.returncode == 0, done.stderr
    return [name for batches in asked(log).values() for batch in batches for name in batch]


def test_killed_rank_loses_only_its_current_batch(tickets, tmp_path):
    """ "Kill -9 one of two ranks …, rerun, merge: the same groups as an uninterrupted run"; the other rank continues."""
    code, said = kill_one_rank(tickets, tmp_path / "asked", seconds=0.6, rng=Random(1))

    assert code == 1, said
    assert f"of 2 of {MISSION} was ended by SIGKILL working on 审核" in said
    assert "rank_died" in said
    assert len(groups(tickets)) >= 2, "those of the other rank"
    assert {name: len(images) for name, images in groups(tickets).items()}.items() < WHOLE.items()
    kept = finished(tickets)
    assert 0 < len(kept) < 13
    inferred = resume(tickets, tmp_path / "again")
    assert sorted([*inferred, *kept]) == ALL_IMAGES
    assert {name: len(images) for name, images in groups(tickets).items()} == WHOLE


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_only_the_group_of_a_deadly_image_is_missing_after_a_rerun(tickets, tmp_path, world):
    """ "A killed worker: retried by the next run, and this run exits 1 after all the rest is done"."""
    ticket(tickets.stage_a_input, "pass", "b", "b1.jpg", "deadly.jpg")
    given = [
        "--data-root",
        tickets.path,
        "--mission",
        MISSION,
        "--summarizer",
        f"{MODULE}:Deadly",
        "--world-size",
        world,
    ]
    for _ in range(2):
        process = start("stage-a", *given, stub=False, ASKED=tmp_path / "asked")
        said, _ = process.communicate(timeout=120)

    assert process.returncode == 1, said
    assert groups(tickets).keys() == {"a::fail", "c::fail", "d::pass"}
    assert "failed: pass b: deadly.jpg: rank_died" in said
    with Ledger(tickets.ledger) as ledger:
        rows = {row.item: (row.outcome, row.reason) for row in ledger.problems()}
    place = f"{MISSION}/审核通过/b"
    assert rows == {place: ("failed", "incomplete_group"), f"{place}/deadly.jpg": ("failed", "rank_died")}

    (tickets.stage_a_input / place / "deadly.jpg").unlink()
    assert resume(tickets, tmp_path / "again", summarizer=f"{MODULE}:Deadly") == []
    assert {name: len(images) for name, images in groups(tickets).items()} == WHOLE
    with Ledger(tickets.ledger) as ledger:
        assert ledger.problems() == []


@pytest.mark.soak
def test_ten_random_moments_to_kill_a_rank_all_end_in_the_same_groups(tickets, tmp_path):
    """The same rule, tested ten times: no run infers an image that an earlier one has finished."""
    rng = Random(7)
    for trial in range(10):
        for folder in (tickets.stage_a_output, tickets.state):
            shutil.rmtree(folder, ignore_errors=True)
        code, said = kill_one_rank(tickets, tmp_path / f"asked{trial}", seconds=rng.uniform(0, 3), rng=rng)
        assert code in {0, 1}, said
        kept = finished(tickets)
        inferred = resume(tickets, tmp_path / f"again{trial}")
        assert sorted([*inferred, *kept]) == ALL_IMAGES, trial
        assert {name: len(images) for name, images in groups(tickets).items()} == WHOLE, trial


# ---- groups that fail


def test_failed_group_is_listed_and_the_others_are_written(tickets):
    """ "Exit 0 when groups failed but others were written (each listed)"; section 0, the ledger."""
    ticket(tickets.stage_a_input, "pass", "e", "e1.jpg", "blank.jpg")

    done = stage_a(tickets, summarizer=f"{MODULE}:Blank")

    assert done.returncode == 0, done.stderr
    assert counts(done) | {"groups": 5, "written": 4, "failed": 1} == counts(done)
    assert "failed: pass e: blank.jpg: blank_answer" in done.stderr
    with Ledger(tickets.ledger) as ledger:
        rows = {row.item: row.reason for row in ledger.problems()}
    place = f"{MISSION}/审核通过/e"
    assert rows == {place: "incomplete_group", f"{place}/blank.jpg": "blank_answer"}
    assert rank_files(tickets.stage_a_output, MISSION), "they are the resume"

    (tickets.stage_a_input / place / "blank.jpg").unlink()
    assert counts(stage_a(tickets, summarizer=f"{MODULE}:Blank"))["written"] == 5
    with Ledger(tickets.ledger) as ledger:
        assert ledger.problems() == []


def test_command_without_written_groups_exits_with_1_and_keeps_the_output(tickets):
    """ "1 when none could be written, and the previous output stays"."""
    assert stage_a(tickets, "--pass-group-number", 1, "--fail_group_number", 0).returncode == 0
    before = output_file(tickets.stage_a_output, MISSION).read_bytes()

    done = stage_a(tickets, summarizer=f"{MODULE}:Dumb")

    assert done.returncode == 1
    assert "none of 4 groups could be written" in done.stderr
    assert "blank_answer" in done.stderr
    assert output_file(tickets.stage_a_output, MISSION).read_bytes() == before


def test_mission_without_groups_has_an_empty_output_and_a_warning(data_root):
    """ "Mission folder without groups: a warning, exit 0, an empty file"."""
    (data_root.stage_a_input / MISSION).mkdir(parents=True)

    done = stage_a(data_root)

    assert done.returncode == 0, done.stderr
    assert "warning" in done.stderr
    assert "there are no groups in mission" in done.stderr
    assert "审核不通过 (fail) or 审核通过 (pass)" in done.stderr
    assert output_file(data_root.stage_a_output, MISSION).read_bytes() == b""

    ticket(data_root.stage_a_input, "pass", "a", "a.jpg")
    done = stage_a(data_root, "--pass-group-number", 0)
    assert done.returncode == 0, done.stderr
    assert "no group was chosen from mission" in done.stderr


def test_missing_mission_lists_those_found_and_writes_nothing(tickets):
    """ "Mission folder missing: exit 1, nothing written, the missions found are listed"."""
    done = imagemill_here(tickets, "stage-a", "--mission", "nowhere", "--summarizer", NAMED)

    assert done.returncode == 1
    assert MISSION in done.stderr
    assert not tickets.stage_a_output.exists()
    assert not tickets.dagster_home.exists()


# ---- models


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            "summarizer: {model: /nowhere/at-all}",
            "model /nowhere/at-all cannot be used on cpu: there is no such folder",
        ),
        ("summarizer: {prompts: {default: absent.txt}}", "absent.txt"),
    ],
)
def test_missing_model_is_reported_before_any_run(tickets, config, message):
    """ "A missing model is an error, never a template answer". No Dagster history exists afterwards."""
    tickets.config_file.write_text(config)

    done = stage_a(tickets, summarizer="transformers")

    assert done.returncode == 1
    assert message in done.stderr
    assert "  do:    " in done.stderr
    assert not tickets.dagster_home.exists()
    assert not tickets.stage_a_output.exists()


def test_summary_names_the_model_and_has_the_note_of_preview_models(data_root):
    """The number of summaries alone does not reveal which model made them."""
    (data_root.stage_a_input / MISSION).mkdir(parents=True)  # without groups no model is loaded

    assert stage_a(data_root).stdout.startswith(f"summarizer: {NAMED}\nstage_a_groups ")
    preview = stage_a(data_root, summarizer="transformers").stdout
    assert preview.startswith(
        "summarizer: preview\npreview model: these summaries do not describe the images\nstage_a_groups "
    )


# ---- folders, usage


def test_custom_folders_are_used_and_remembered(data_root, tmp_path):
    """Options `--input_dir` and `--output_dir`."""
    given, out = tmp_path / "photos", tmp_path / "lines"
    ticket(given, "pass", TICKET, f"{TICKET}-001.jpeg")

    first = stage_a(data_root, "--input_dir", given, "--output-dir", out, "--keep_intermediate_outputs")
    assert first.returncode == 0, first.stderr
    assert list(rank_files(out, MISSION)) == [0]
    assert (locate(data_root.path).stage_a_input, locate(data_root.path).stage_a_output) == (given, out)
    again = stage_a(data_root)
    assert counts(again)["reused"] == 1
    assert list(rank_files(out, MISSION)) == []


def test_folder_that_cannot_be_created_is_refused_before_any_work_and_not_remembered(tickets, tmp_path):
    """Otherwise writing would fail after hours of inference, and the next command would use the folder too."""
    (tmp_path / "file").touch()

    done = stage_a(tickets, "--output_dir", tmp_path / "file" / "out")

    assert done.returncode == 1
    assert "cannot create the output folder: Not a directory" in done.stderr
    assert not tickets.dagster_home.exists()
    assert locate(tickets.path).stage_a_output == tickets.stage_a_output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--batching_mode", "per_image"], "--sharding_mode {per_group|per_image}"),
        (["--batching-mode"], "--sharding_mode {per_group|per_image}"),
        (["--checkpoint", "/models/qwen"], "summarizer.model in imagemill.yaml"),
        (["--model", "qwen"], "set model below summarizer in imagemill.yaml"),
        (["--device", "cuda:0"], "summarizer.device in imagemill.yaml"),
        (["--dtype=bfloat16"], "summarizer.dtype in imagemill.yaml"),
        (["--max_new_tokens", "64"], "--max_new_tokens is not an option"),
        (["--max-new-tokens", "64"], "summarizer.max_new_tokens in imagemill.yaml"),
        (["--temperature", "0.5"], "summarizer.temperature in imagemill.yaml"),
        (["--temp", "0.5"], "No such option"),
        (["--sharding", "per_image"], "No such option"),
        (["--world", "2"], "No such option"),
        (["--sharding_mode", "per_batch"], "per_group"),
        (["--pass_group_number", "-1"], "-1"),
        (["--batch-size", "0"], "0"),
        (["--summarizer", "nowhere:Class"], "nowhere:Class"),
        (["--summarizer", "json:loads"], "not a summarizer class"),
        (["--summarizer", "vllm"], "where: --summarizer"),
        (["--summarizer", "tests.helpers.summarizers:asked"], "not a summarizer class"),
        (["--world-size", "3"], "two world sizes"),
    ],
)
def test_wrong_usage_is_reported_before_any_work(tickets, options, message):
    """`--batching_mode` is refused with a hint, and abbreviations are not accepted."""
    environment = {"WORLD_SIZE": 2} if "3" in options else {}

    done = stage_a(tickets, *options, **environment)

    assert done.returncode == 2
    assert message in done.stderr
    assert not tickets.dagster_home.exists()


def test_rank_of_torchrun_is_refused_with_a_cluster(tickets):
    """Spec: docs/spec/engines.md#stage-a"""
    tickets.config_file.write_text("engine: {kind: ray}\n")

    done = stage_a(tickets, RANK=0, WORLD_SIZE=2)

    assert done.returncode == 2
    assert "rank 0 of torchrun, and engine.kind is ray" in done.stderr


def test_cluster_that_cannot_be_joined_ends_the_command_before_any_run(tickets):
    """Spec: docs/spec/engines.md#refused"""
    tickets.config_file.write_text("engine: {kind: ray, address: 'ray://head:10001'}\n")

    done = stage_a(tickets, "--config", tickets.config_file)

    assert done.returncode == 2
    assert "is one of Ray Client" in done.stderr
    assert not tickets.stage_a_output.exists()
