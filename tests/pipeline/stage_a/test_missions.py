"""Listing of a mission folder.

Spec: docs/spec/stage-a.md#group-records, docs/spec/stage-a.md#group-id, docs/spec/stage-a.md#missions-and-groups
"""

import errno
import os
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagemill.errors import MissingInput, WrongUsage
from imagemill.pipeline.stage_a import missions
from imagemill.pipeline.stage_a.missions import LABEL_FOLDERS, discover, group_id_in, leave_unselected, sample_groups
from tests.helpers.stage_a import MISSION, TICKET, group, touch


@pytest.fixture
def mission(tmp_path):
    """Return a function that creates empty files: `lay("pass", "a/1.jpg")`."""
    (tmp_path / MISSION).mkdir()

    def lay(label, *places):
        for place in places:
            touch(tmp_path / MISSION / LABEL_FOLDERS[label] / place)

    lay.root, lay.folder = tmp_path, tmp_path / MISSION
    lay.find = lambda: discover(tmp_path, MISSION)
    return lay


def reported(found):
    return {(problem.outcome, problem.reason, problem.place) for problem in found.problems}


def test_basic_directory_with_three_images_in_one_group(mission):
    """Scenario: Basic directory with 3 images in one group."""
    mission("pass", *(f"x/{TICKET}-{number}.jpeg" for number in ("010", "002", "001")))

    (found,) = mission.find().groups

    assert (found.group_id, found.label) == (TICKET, "pass")
    assert tuple(f"{TICKET}-{number}.jpeg" for number in ("001", "002", "010")) == found.images
    assert f"审核通过/x/{TICKET}-002.jpeg" == found.image_place(2)


def test_images_are_in_natural_order_with_ties_sorted_by_name(mission):
    mission("pass", "x/10.jpg", "x/9.jpg", "x/009.jpg", "x/1.png")

    assert mission.find().groups[0].images == ("1.png", "009.jpg", "9.jpg", "10.jpg")


def test_fail_groups_come_first_and_each_label_is_sorted_by_name(mission):
    mission("pass", "10/1.jpg", "9/1.jpg")
    mission("fail", "b/1.jpg", "a/1.jpg")

    found = mission.find()

    assert [(g.label, g.folder) for g in found.groups] == [("fail", "a"), ("fail", "b"), ("pass", "10"), ("pass", "9")]
    assert found.problems == []


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("QC-TEMP-20250118-0015956-001.jpeg", "QC-TEMP-20250118-0015956"),
        ("QC-t-20250118-1.jpg", "QC-t-20250118-1"),
        ("QC-TEMP-2025011-1.jpg", None), ("QC-T3-20250118-1.jpg", None), ("xQC-T-20250118-1.jpg", None),
        ("QC-T-2025011٨-1.jpg", None), ("QC-T-20250118-.jpg", None), ("1.jpg", None),
    ],
)  # fmt: skip
def test_group_id_is_the_prefix_of_the_file_name(name, expected):
    assert expected == group_id_in(name)


def test_group_without_id_in_its_first_image_is_named_after_its_folder(mission):
    mission("pass", "folder/1.jpg", f"folder/{TICKET}-2.jpg")

    found = mission.find()

    assert [g.group_id for g in found.groups] == ["folder"]
    assert {("warning", "mixed_ids", "审核通过/folder")} == reported(found)


def test_mixed_ids_are_a_warning_and_the_first_is_used(mission):
    mission("pass", "x/QC-A-20250118-1-1.jpg", "x/QC-A-20250118-2-1.jpg", "x/z.jpg")

    found = mission.find()

    assert [g.group_id for g in found.groups] == ["QC-A-20250118-1"]
    assert len(found.groups[0].images) == 3
    assert {("warning", "mixed_ids", "审核通过/x")} == reported(found)


def test_duplicate_id_under_one_label_fails_the_later_group_and_names_both(mission):
    mission("pass", f"b/{TICKET}-1.jpg", f"a/{TICKET}-2.jpg")
    mission("fail", f"c/{TICKET}-1.jpg")

    found = mission.find()

    assert [g.folder for g in found.groups] == ["c", "a"]
    (problem,) = found.failed
    assert (problem.place, problem.reason) == ("审核通过/b", "duplicate_group")
    assert "审核通过/a" in problem.detail
    assert "审核通过/b" in problem.detail


def test_entry_other_than_an_image_of_a_group_is_reported_and_skipped(mission):
    mission(
        "pass", "x/1.JPG", "x/2.png", "x/3.webp", "x/.4.jpg", "x/deep/5.jpg", "6.jpg", "empty/.keep", ".hidden/7.jpg"
    )
    touch(mission.folder / "notes.txt")
    os.symlink("loop", mission.folder / "审核通过" / "loop")

    found = mission.find()

    assert [g.images for g in found.groups] == [("1.JPG", "2.png")]
    assert {
        ("refused", "outside_labels", "notes.txt"),
        ("refused", "outside_groups", "审核通过/6.jpg"),
        ("refused", "outside_groups", "审核通过/loop"),
        ("refused", "unsupported_type", "审核通过/x/3.webp"),
        ("refused", "too_deep", "审核通过/x/deep"),
        ("refused", "empty_group", "审核通过/empty"),
    } == reported(found)
    assert "1 images" in next(problem.detail for problem in found.problems if problem.reason == "too_deep")


@pytest.mark.parametrize("name", ["pass", "通过", "审核 通过"])
def test_error_for_an_unknown_label_folder_lists_the_two_names(mission, name):
    touch(mission.folder / name / "x" / "1.jpg")

    (problem,) = mission.find().problems

    assert (problem.place, problem.reason) == (name, "outside_labels")
    assert "审核不通过 (fail) or 审核通过 (pass)" in problem.detail


@pytest.mark.parametrize("images", [["x/1.jpg", "x/2.jpg"], []])
def test_group_with_an_image_that_cannot_be_opened_or_named_has_no_record(mission, images):
    """A record without this image would be partial. Spec: docs/spec/stage-a.md#failed-groups"""
    mission("pass", "whole/1.jpg", *images)
    for name in ("8.jpg", os.fsdecode(b"\xff.jpg")):
        (mission.folder / "审核通过" / "x").mkdir(exist_ok=True)
        os.symlink("nowhere", mission.folder / "审核通过" / "x" / name)

    found = mission.find()

    assert [g.folder for g in found.groups] == ["whole"]
    assert {
        ("refused", "not_a_file", "审核通过/x/8.jpg"),
        ("refused", "bad_name", "审核通过/x/\ufffd.jpg"),
        ("failed", "unusable_image", "审核通过/x"),
    } == reported(found)
    assert "8.jpg, \ufffd.jpg" in found.failed[0].detail


@pytest.mark.parametrize(
    ("wanted", "failed"),
    [
        ({}, ["c", "z"]),
        ({"passes": 0}, ["c"]),
        ({"passes": 1}, ["c"]),
        ({"passes": 2}, ["c", "z"]),
        ({"passes": 0, "fails": 0}, []),
        ({"fails": 1}, ["c", "z"]),
    ],
)
def test_invalid_group_outside_the_sample_is_not_a_failure(mission, wanted, failed):
    """Enough valid groups exist for the requested sample. Spec: docs/spec/stage-a.md#sampling"""
    mission("pass", "a/1.jpg", "deep/er/1.jpg")
    for label, folder in (("pass", "z"), ("fail", "c")):
        touch(mission.folder / LABEL_FOLDERS[label] / folder / "1.jpg")
        os.symlink("nowhere", mission.folder / LABEL_FOLDERS[label] / folder / "2.jpg")
    found = mission.find()

    selected = leave_unselected(found, **wanted)

    assert [problem.place.rpartition("/")[2] for problem in selected.failed] == failed
    refused = [p for p in found.problems if p.outcome == "refused"]
    assert [p for p in selected.problems if p.outcome == "refused"] == refused
    assert selected.groups == found.groups


def test_message_about_a_group_is_printable(mission):
    """A file name may contain sequences that move the cursor of a terminal."""
    mission("pass", f"a\x1b[2J/{TICKET}-1.jpg", f"b\n/{TICKET}-2.jpg")

    (problem,) = mission.find().failed

    assert (problem.place + problem.detail).isprintable()


def test_names_that_cannot_be_written_to_the_output_are_reported(mission):
    folder = mission.folder / "审核通过"
    touch(folder / os.fsdecode(b"\xff") / f"{TICKET}-1.jpg")
    touch(folder / " " / "1.jpg")
    touch(folder / "two\nlines" / "1.jpg")
    touch(folder / "x" / "1.jpg")

    found = mission.find()

    assert [g.images for g in found.groups] == [("1.jpg",)]
    assert {
        ("failed", "bad_name", "审核通过/\ufffd"),
        ("failed", "bad_name", "审核通过/ "),
        ("failed", "bad_name", "审核通过/two\ufffdlines"),
    } == reported(found)


def test_file_with_the_name_of_a_label_folder_is_refused(mission):
    touch(mission.root / MISSION / LABEL_FOLDERS["pass"])

    (problem,) = mission.find().problems

    assert (problem.reason, problem.detail) == ("not_a_folder", "it has the name of a label and is not a folder")


def test_group_folder_that_cannot_be_listed_fails_only_its_group(mission, monkeypatch):
    for name in ("a", "b"):
        touch(mission.root / MISSION / LABEL_FOLDERS["pass"] / name / "1.jpg")
    entries = missions._entries

    def broken(folder):
        if folder.name == "a":
            raise OSError(errno.EIO, "Input/output error")
        return entries(folder)

    monkeypatch.setattr(missions, "_entries", broken)
    found = mission.find()

    assert [group.folder for group in found.groups] == ["b"]
    assert [(problem.outcome, problem.reason) for problem in found.problems] == [("failed", "read_error")]


def test_error_of_a_missing_mission_lists_similar_names(mission):
    (mission.root / "乙").mkdir()
    (mission.root / ".git").mkdir()
    touch(mission.root / "file")

    with pytest.raises(MissingInput) as caught:
        discover(mission.root, "甲")

    assert caught.value.why == f"existing names: 乙, {MISSION}"
    (mission.root / "mission-2025").mkdir()
    with pytest.raises(MissingInput, match="similar names: mission-2025"):
        discover(mission.root, "mision-2025")
    with pytest.raises(MissingInput, match="甲") as caught:
        discover(mission.root / "nowhere", "甲")
    assert caught.value.why == "there is no such folder"


def test_mission_without_groups_gives_an_empty_list(mission):
    assert (mission.find().groups, mission.find().problems) == ([], [])


@pytest.mark.parametrize("name", ["", " ", "..", "a/b", ".dagster", "检" * 80, "a\nb"])
def test_invalid_mission_name_is_refused(tmp_path, name):
    with pytest.raises(WrongUsage):
        discover(tmp_path, name)


POPULATION = [group(f"f{n}", 1, "fail") for n in range(20)] + [group(f"p{n}", 1) for n in range(30)]


def test_sample_uses_the_random_generator_of_the_label():
    """Spec: docs/spec/stage-a.md#sampling"""
    fails, passes = range(20), range(20, 50)
    expected = sorted(Random(43).sample(fails, 3)) + sorted(Random(42).sample(passes, 5))

    assert [POPULATION[n] for n in expected] == sample_groups(POPULATION, passes=5, fails=3)


@given(st.none() | st.integers(0, 40), st.none() | st.integers(0, 40), st.integers(0, 5))
def test_sample_keeps_order_and_counts(passes, fails, seed):
    """Scenario: Sampling preserves group counts. None takes all, 0 takes none, and an excessive number takes all."""
    sampled = sample_groups(POPULATION, passes=passes, fails=fails, seed=seed)

    assert [g for g in POPULATION if g in sampled] == sampled
    for label, wanted, there in (("pass", passes, 30), ("fail", fails, 20)):
        assert there if wanted is None else min(wanted, there) == sum(g.label == label for g in sampled)
    assert sampled == sample_groups(POPULATION, passes=passes, fails=fails, seed=seed)


def test_sample_of_one_label_does_not_depend_on_the_other():
    alone, both = (sample_groups(POPULATION, passes=5, fails=fails) for fails in (0, 7))

    assert alone == [g for g in both if g.label == "pass"]


def test_negative_number_of_groups_is_refused():
    with pytest.raises(WrongUsage, match="--fail_group_number is -1"):
        sample_groups(POPULATION, fails=-1)
