"""Refused and failed inputs in the UI: the result of the check `inputs_accepted`, and the table of inputs.

The problems of an asset are selected in imagemill/pipeline/problem_list.py.
"""

from collections.abc import Sequence
from datetime import datetime

import dagster as dg

from imagemill.pipeline.problem_list import InputProblem
from imagemill.store.ledger import Problem
from io_managers.viewer import page_shown

SHOWN = 100
# Problems that a message names.
NAMED = 5

CHECK = "inputs_accepted"


def inputs_accepted(problems: Sequence[InputProblem]) -> dg.AssetCheckResult:
    """Return a passed result, or a warning with a table of the first `SHOWN` problems."""
    refused = sum(problem.outcome == "refused" for problem in problems)
    counts = {"refused (inputs)": refused, "failed (inputs)": len(problems) - refused}
    return dg.AssetCheckResult(
        passed=not problems,
        severity=dg.AssetCheckSeverity.WARN,
        description=_description(problems),
        metadata={
            **counts,
            **page_shown("show the images", "images", show="problems"),
            "inputs": problem_table(problems),
        }
        if problems
        else counts,
    )


def not_arrived(problems: Sequence[Problem | InputProblem], what: str) -> str:
    """Return the message of a run that made everything but these images: the first `NAMED` with reason, detail and remedy.

    `what`: what else is done, such as the asset.
    """
    lines = [f"  {p.item}: {p.reason}: {p.detail}; {p.remedy}" for p in problems[:NAMED]]
    if len(problems) > NAMED:
        lines.append(f"  and {len(problems) - NAMED} more: see the check {CHECK}, or run `imagemill problems`")
    images = "1 image" if len(problems) == 1 else f"{len(problems)} images"
    return "\n".join([f"{images} did not arrive, everything else of {what} is done", *lines])


def problem_table(problems: Sequence[InputProblem]) -> dg.TableMetadataValue:
    """Return a table with one row per problem, at most `SHOWN`."""
    rows = [
        dg.TableRecord(
            {
                "image": problem.item,
                "reason": f"{problem.reason}: {problem.detail}",
                "remedy": problem.remedy,
                "since": _since(problem),
            }
        )
        for problem in problems[:SHOWN]
    ]
    columns = [dg.TableColumn(name) for name in ("image", "reason", "remedy", "since")]
    return dg.MetadataValue.table(rows, dg.TableSchema(columns))


def _description(problems: Sequence[InputProblem]) -> str:
    if not problems:
        return "every input was accepted"
    names = ", ".join(f"{problem.item} ({problem.reason})" for problem in problems[:3])
    more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
    rest = f"; the table shows the first {SHOWN}, `imagemill problems` lists all" if len(problems) > SHOWN else ""
    return f"{len(problems)} not accepted: {names}{more}{rest}"


def _since(problem: InputProblem) -> str:
    try:
        return f"{datetime.fromisoformat(problem.since):%Y-%m-%d %H:%M} UTC"
    except ValueError:
        return problem.since
