"""Ledger rows for inputs missing from the output. Spec: docs/spec/conventions.md#no-silent-loss"""

from pathlib import Path

from imagemill.pipeline.stage_a.merge import (
    ASSET,
    GroupFailure,
    ImageFailure,
    MergeResult,
    format_failure,
    stage_a_problems,
)
from imagemill.pipeline.stage_a.missions import Discovery, ImageGroup, MissionProblem
from imagemill.store.ledger import Ledger
from tests.helpers.stage_a import group

PLACE = "m/审核通过/a"


def failed(*reasons):
    images = tuple(ImageFailure(f"a-{number}.jpg", reason, "why") for number, reason in enumerate(reasons, start=1))
    return GroupFailure(group("a", len(reasons)), images)


def rows(*failures, problems=()):
    found = Discovery("m", Path("m"), [], list(problems))
    return {row.item: row for row in stage_a_problems(found, MergeResult(failures=list(failures)))}


def test_group_and_each_failing_image_have_a_row():
    found = rows(failed("undecodable", "missing_line"))

    assert {item: (row.outcome, row.reason) for item, row in found.items()} == {
        PLACE: ("failed", "incomplete_group"),
        f"{PLACE}/a-1.jpg": ("refused", "undecodable"),
        f"{PLACE}/a-2.jpg": ("failed", "missing_line"),
    }
    assert all(row.remedy and row.asset == ASSET for row in found.values())


def test_group_is_refused_if_each_failing_image_is_refused():
    assert rows(failed("undecodable", "too_small"))[PLACE].outcome == "refused"


def test_message_about_an_image_is_printable():
    """A file name may contain line breaks or sequences that move the cursor of a terminal."""
    image = ImageFailure("x\nfailed: pass fake\x1b[31m.jpg", "undecodable", "of \x1b[31m.jpg\u2028")
    failure = GroupFailure(ImageGroup("pass", "a\x07", "a", (image.image_name,)), (image,))

    assert format_failure(failure).isprintable()
    for item, row in rows(failure).items():
        assert (item + row.detail).isprintable()


def test_image_with_two_reasons_has_one_row_with_the_first():
    images = (ImageFailure("a-1.jpg", "foreign_line", "1"), ImageFailure("a-1.jpg", "missing_line", "2"))

    assert rows(GroupFailure(group("a", 1), images))[f"{PLACE}/a-1.jpg"].reason == "foreign_line"


def test_unprocessed_input_has_a_row_and_a_warning_has_none():
    found = rows(
        problems=[
            MissionProblem("审核通过/x.jpg", "refused", "outside_groups", "why", "move it"),
            MissionProblem("审核通过/b", "failed", "duplicate_group", "why", "rename"),
            MissionProblem("审核通过/c", "warning", "mixed_ids", "why", "split"),
        ]
    )

    assert {item: row.outcome for item, row in found.items()} == {
        "m/审核通过/x.jpg": "refused",
        "m/审核通过/b": "failed",
    }


def test_ledger_accepts_the_rows(tmp_path):
    given = rows(failed("model_error"))
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        ledger.record_problems(given.values())

        assert given.keys() == {row.item for row in ledger.problems()}


def test_failed_group_is_reported_with_image_and_reason():
    text = format_failure(failed("undecodable", *["missing_line"] * 6))

    assert text.startswith("pass a: a-1.jpg: undecodable (why); a-2.jpg: missing_line (why)")
    assert text.endswith("; and 2 more")
