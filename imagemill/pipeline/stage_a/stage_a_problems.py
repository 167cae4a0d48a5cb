"""Why images and groups of a mission have no place in its output, as rows of the ledger.

    <mission>/<label folder>/<group folder>            a group without a record
    <mission>/<label folder>/<group folder>/<image>    an image that kept its group from having one

Source: CONTRACTS section 0, "Nothing disappears silently", "Refused and failed".
"""

from collections.abc import Iterator

from imagemill.pipeline.stage_a.missions import Discovery, printable
from imagemill.pipeline.stage_a.stage_a_merge import GroupFailure, ImageFailure, Merged
from imagemill.store.ledger import Problem

ASSET = "stage_a_groups"

_REPLACE = "replace the file by a whole image of at least 8 by 8 pixels, or take it out of its group"
_AGAIN = "run again: what is finished is not inferred again"

# Reasons that are the image's own; every other one is ours.
_REFUSALS = {"undecodable", "too_small", "too_large"}
_REMEDIES = {
    "blank_answer": "run again; if it stays blank, change the prompt or the summarizer",
    "wrong_answers": "correct the summarizer: it gives one text per image, in order",
    "model_error": "see the detail: it is what the summarizer raised for this image",
    "out_of_memory": "scale the image down, or run the summarizer on a larger device",
    "rank_died": "run again: what a process was at work on comes last, and alone; if it dies again, replace the image",
    "foreign_line": "run again; nothing else should write rank files",
    "duplicate_line": "run again; nothing else should write rank files",
}


def stage_a_problems(found: Discovery, merged: Merged) -> list[Problem]:
    """One row per input that did not arrive; a warning is none."""
    rows = [
        Problem(
            f"{found.mission}/{problem.place}", ASSET, problem.outcome, problem.reason, problem.detail, problem.remedy
        )
        for problem in found.problems
        if problem.outcome != "warning"
    ]
    return rows + [row for failure in merged.failures for row in _of_group(found.mission, failure)]


def told(failure: GroupFailure, *, most: int = 5) -> str:
    """A failed group on one line, with its first images and reasons; names may hold what is no text."""
    images = [f"{image.image_name}: {image.reason} ({image.detail})" for image in failure.images]
    more = f"; and {len(images) - most} more" if len(images) > most else ""
    return printable(f"{failure.group.label} {failure.group.group_id}: {'; '.join(images[:most])}{more}")


def _of_group(mission: str, failure: GroupFailure) -> Iterator[Problem]:
    place = printable(f"{mission}/{failure.group.place}")
    refused = all(image.reason in _REFUSALS for image in failure.images)
    remedy = _REPLACE if refused else _AGAIN
    yield Problem(place, ASSET, "refused" if refused else "failed", "incomplete_group", told(failure), remedy)
    # One row per image: of several reasons the first.
    for image in {image.image_name: image for image in reversed(failure.images)}.values():
        yield _of_image(f"{place}/{printable(image.image_name)}", image)


def _of_image(item: str, image: ImageFailure) -> Problem:
    detail = printable(image.detail)
    if image.reason in _REFUSALS:
        return Problem(item, ASSET, "refused", image.reason, detail, _REPLACE)
    return Problem(item, ASSET, "failed", image.reason, detail, _REMEDIES.get(image.reason, _AGAIN))
