"""Every scenario of Stage-A: one test each, named after it.

Images are small and summarizers stubs; ranks run one after another in the test's process, as a rank is the same wherever it
runs. A docstring names a departure from the original specification.
Depth is elsewhere: tests/pipeline, tests/assets/test_stage_a_groups.py, tests/cli/test_stage_a.py (processes, torchrun, kills).
"""

import json
from itertools import count

import pytest

from dagster_project.cli.stage_a import command
from imagemill.domain.layout import DataRoot
from imagemill.options import StageAOptions
from imagemill.pipeline.stage_a.rank_files import rank_file, rank_files, read_rank_lines
from imagemill.validation.validator import validate
from tests.helpers.presets import imagemill_here
from tests.helpers.stage_a import MISSION, TICKET, Bench, Recorder, ticket

WORLD = 2


@pytest.fixture
def bench(tmp_path):
    return Bench(tmp_path)


@pytest.fixture
def skewed(bench):
    """The set of the specification: group A of 20 images, group B of one."""
    ticket(bench.input, "pass", "A", *(f"a{n}.jpg" for n in range(1, 21)))
    ticket(bench.input, "pass", "B", "b1.png")
    return bench


@pytest.fixture
def six(bench):
    """Three groups of each label, 24 images."""
    for label in ("pass", "fail"):
        for number in (1, 2, 3):
            ticket(bench.input, label, f"{label}{number}", *(f"{label}{number}-{n}.jpg" for n in range(number * 2)))
    return bench


class Sampling(Recorder):
    """Never the same text twice, as stochastic decoding."""

    def __init__(self):
        super().__init__()
        self._numbers = count()

    def summarize(self, images, mission):
        return [f"{name} {next(self._numbers)}" for name in super().summarize(images, mission)]


def records(bench):
    return [json.loads(line) for line in bench.result.read_bytes().splitlines()]


def groups(bench):
    """Return the written groups: `group_id::label` → names of its images."""
    return {f"{record['group_id']}::{record['label']}": record["images"] for record in records(bench)}


def summaries(bench):
    return {f"{record['group_id']}::{record['label']}": record["per_image"] for record in records(bench)}


def is_covered(record):
    """Strict image_{1..N}, in order, one line each."""
    expected = [f"image_{n}" for n in range(1, len(record["images"]) + 1)]
    return list(record["per_image"]) == expected and all(text.strip() for text in record["per_image"].values())


# ---- per-image inference and grouped aggregation


def test_basic_directory_with_3_images_in_one_group(bench):
    """Basic directory with 3 images in one group: natural order, five fields."""
    ticket(bench.input, "pass", "any", *(f"{TICKET}-{n}.jpeg" for n in ("010", "001", "002")))

    bench.run()

    images = [f"{TICKET}-{n}.jpeg" for n in ("001", "002", "010")]
    assert records(bench) == [
        {
            "group_id": TICKET,
            "mission": MISSION,
            "label": "pass",
            "images": images,
            "per_image": {f"image_{n}": f"{MISSION} {name}" for n, name in enumerate(images, start=1)},
        }
    ]


def test_empty_summary_validation(bench):
    """Empty summary validation: the group has no record; its failure is listed (the original raises)."""
    ticket(bench.input, "pass", "empty", "1.jpg", "2.jpg")
    ticket(bench.input, "pass", "whole", "3.jpg")

    _, merged = bench.run(Recorder({"2.jpg": " \n "}))

    assert groups(bench) == {"whole::pass": ["3.jpg"]}
    assert [(f.group.group_id, [(i.image_name, i.reason) for i in f.images]) for f in merged.failures] == [
        ("empty", [("2.jpg", "blank_answer")])
    ]


# ---- the mode switch


def test_default_behavior_remains_per_group(six):
    """Default behavior remains per_group: of the plan and of the command."""
    assert six.plan(world_size=WORLD).ranks == six.plan(world_size=WORLD, mode="per_group").ranks
    (option,) = [option for option in command.params if "--sharding-mode" in option.opts]
    assert StageAOptions().mode == "per_group"
    assert "(default: per_group)" in option.help


def test_legacy_batching_flag_is_rejected(tmp_path):
    """Legacy batching flag is rejected: with the name of the one that replaces it."""
    root = DataRoot(tmp_path / "data")

    done = imagemill_here(root, "stage-a", "--mission", MISSION, "--batching_mode", "per_image")

    assert done.returncode == 2
    assert "--batching_mode" in done.stderr
    assert "--sharding_mode {per_group|per_image}" in done.stderr
    assert not root.path.exists()


def test_sampling_preserves_group_counts_in_per_image_mode(six):
    """Sampling preserves group counts in per_image mode: and only images of the chosen groups are processed."""
    made, _ = six.run(mode="per_image", world_size=WORLD, passes=2, fails=1)

    labels = [record["label"] for record in records(six)]
    assert (labels.count("pass"), labels.count("fail")) == (2, 1)
    asked = sorted(name for summarizer in made for name in summarizer.asked)
    assert asked == sorted(name for images in groups(six).values() for name in images)


# ---- equivalence of the modes


def test_same_groups_different_texts_are_allowed(six):
    """Same groups, different texts are allowed: identical `group_id::label`, strict coverage."""
    chosen = {"world_size": WORLD, "passes": 2, "fails": 2, "seed": 7, "fresh": True}
    six.run(Sampling(), mode="per_group", **chosen)
    expected, texts = groups(six), summaries(six)
    assert len(expected) == 4

    six.run(Sampling(), mode="per_image", **chosen)

    assert groups(six) == expected
    assert summaries(six) != texts
    assert all(is_covered(record) for record in records(six))
    assert validate(six.result, kind="stage-a").passed


def test_per_group_batching_is_group_local(bench):
    """per_group batching is group-local: no call has images of A and B, though both would fit."""
    ticket(bench.input, "pass", "A", "A1.jpg", "A2.jpg", "A3.jpg")
    ticket(bench.input, "pass", "B", "B1.jpg", "B2.jpg")

    (summarizer,), _ = bench.run(batch_size=8)
    assert summarizer.batches == [["A1.jpg", "A2.jpg", "A3.jpg"], ["B1.jpg", "B2.jpg"]]

    (mixing,), _ = bench.run(batch_size=8, mode="per_image", fresh=True)
    assert mixing.batches == [["A1.jpg", "A2.jpg", "A3.jpg", "B1.jpg", "B2.jpg"]], "where it may, it does"


def test_per_image_sharding_improves_balance_without_changing_group_contract(skewed):
    """per_image sharding improves balance without changing group contract: 20 and 1 images on two ranks."""
    plan = skewed.plan(mode="per_image", world_size=WORLD)
    made = skewed.infer(plan, batch_size=4)

    assert [len(summarizer.asked) for summarizer in made] == [11, 10]
    assert all(any(name.startswith("a") for name in summarizer.asked) for summarizer in made), "A is on both"
    assert max(len(batch) for summarizer in made for batch in summarizer.batches) == 4
    lines = [
        line.group_seq for rank in range(WORLD) for line in read_rank_lines(rank_file(skewed.output, MISSION, rank))
    ]
    assert (lines.count(0), lines.count(1)) == (20, 1)

    skewed.run(mode="per_image", world_size=WORLD)
    assert groups(skewed) == {"A::pass": [f"a{n}.jpg" for n in range(1, 21)], "B::pass": ["b1.png"]}
    assert all(is_covered(record) for record in records(skewed))


def test_merge_order_is_not_a_correctness_criterion(six):
    """Merge order is not a correctness criterion: the set is identical; records in any order pass the validator."""
    six.run(mode="per_group", world_size=WORLD)
    expected = groups(six)
    six.run(mode="per_image", world_size=3)
    assert groups(six) == expected

    lines = six.result.read_bytes().splitlines(keepends=True)
    six.result.write_bytes(b"".join(reversed(lines)))
    assert list(groups(six)) != list(expected)
    assert validate(six.result, kind="stage-a").passed


# ---- the merge


def test_missing_image_result_causes_group_failure_only(bench):
    """Missing image result causes group failure only: no partial record, the others are written."""
    ticket(bench.input, "pass", "A", "A1.jpg", "A2.jpg", "A3.jpg")
    ticket(bench.input, "pass", "B", "B1.jpg")
    bench.run(mode="per_image", keep=True)
    file = rank_file(bench.output, MISSION, 0)
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(line for line in lines if b"A3.jpg" not in line))

    merged = bench.merge(mode="per_image")

    assert groups(bench) == {"B::pass": ["B1.jpg"]}
    assert [(f.group.group_id, [(i.image_name, i.reason) for i in f.images]) for f in merged.failures] == [
        ("A", [("A3.jpg", "missing_line")])
    ]
    assert merged.exit_code == 0


def test_default_cleanup_of_intermediate_files(six):
    """Default cleanup of intermediate files: nothing but the output is left in its folder."""
    plan = six.plan(mode="per_image", world_size=WORLD)
    six.infer(plan)
    assert list(rank_files(six.output, MISSION)) == [0, 1]

    six.run(mode="per_image", world_size=WORLD)

    assert list(six.output.iterdir()) == [six.result]


def test_keep_intermediate_files_for_debugging(six):
    """Keep intermediate files for debugging: every rank's lines are there after the merge."""
    _, merged = six.run(mode="per_image", world_size=WORLD, keep=True)

    assert merged.written == 6
    kept = rank_files(six.output, MISSION)
    assert sum(1 for path in kept.values() for line in read_rank_lines(path) if line.ok) == 24
    assert "--keep-intermediate-outputs" in {flag for option in command.params for flag in option.opts}
