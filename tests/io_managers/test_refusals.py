"""io_managers/refusals.py: problems as a check result."""

import dagster as dg
import pytest

from imagemill.pipeline.problem_list import InputProblem
from io_managers.refusals import SHOWN, inputs_accepted


def problem(item="a", outcome="refused"):
    since = "2026-01-02T03:04:05+00:00"
    return InputProblem(item, outcome, "undecodable", ["dinov3_npy"], "cut off", "replace it", since)


def rows(result):
    return [record.data for record in result.metadata["inputs"].records]


def test_check_without_problems_passes():
    result = inputs_accepted([])

    assert result.passed
    assert result.description == "every input was accepted"
    assert "inputs" not in result.metadata


@pytest.mark.parametrize("outcome", ["refused", "failed"])
def test_problem_is_a_warning_with_reason_remedy_and_first_time(outcome):
    result = inputs_accepted([problem(outcome=outcome)])

    assert not result.passed
    assert result.severity is dg.AssetCheckSeverity.WARN
    assert result.metadata[f"{outcome} (inputs)"].value == 1
    assert rows(result) == [
        {
            "image": "a", "reason": "undecodable: cut off", "remedy": "replace it",
            "since": "2026-01-02 03:04 UTC",
        }
    ]  # fmt: skip


def test_table_is_bounded_and_the_description_gives_the_total():
    result = inputs_accepted([problem(f"i{n:03d}") for n in range(SHOWN + 1)])

    assert len(rows(result)) == SHOWN
    assert result.description.startswith(f"{SHOWN + 1} not accepted: i000 (undecodable), ")
    assert "`imagemill problems`" in result.description
