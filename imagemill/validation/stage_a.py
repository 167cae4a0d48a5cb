"""Validation of Stage-A output: one record per group of images, with exactly five fields.

    {"group_id": "QC-TEMP-20250118-0015956", "mission": "…", "label": "pass",
     "images": ["….jpeg", "….jpeg"], "per_image": {"image_1": "…", "image_2": "…"}}

The records are made in pipeline/.

Spec: docs/spec/stage-a.md#group-records, docs/spec/stage-a.md#failed-groups
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from imagemill.validation.catalogue import finding
from imagemill.validation.findings import Finding
from imagemill.validation.lines import Findings, check_lines

STAGE_A_FIELDS = ("group_id", "mission", "label", "images", "per_image")
LABELS = ("pass", "fail")
SUFFIX = "_stage_a.jsonl"
EXTENSIONS = (".jpg", ".jpeg", ".png")

Broken = Iterator[tuple[str, str, str]]


def stage_a_records(jsonl: Path) -> Findings:
    """Check every line of a Stage-A output; the mission is taken from its name, `<mission>_stage_a.jsonl`."""
    return check_lines(jsonl, _StageALines(jsonl.name))


class _StageALines:
    decoder = msgspec.json.Decoder(None)  # no fast path: files are small

    def __init__(self, file: str) -> None:
        self._file = file
        self._mission = file.removesuffix(SUFFIX) if file.endswith(SUFFIX) else None
        self._seen: dict[tuple[str, str], int] = {}

    def accept(self, record: None, number: int) -> bool:
        return False

    def judge(self, record: dict[str, Any], number: int) -> Iterator[Finding]:
        group_id, label = record.get("group_id"), record.get("label")
        at: dict[str, Any] = {"file": self._file, "line": number}
        at["item"] = group_id if isinstance(group_id, str) else ""
        for rule, field, message in _broken(record, self._mission):
            yield finding(rule, message, field=field, **at)
        if isinstance(group_id, str) and isinstance(label, str):
            first = self._seen.setdefault((group_id, label), number)
            if first != number:
                yield finding("duplicate_group", f"also in line {first}", **at)


def _broken(record: dict[str, Any], mission: str | None) -> Broken:
    """Yield rule, field and message of every violation within a record."""
    for name in STAGE_A_FIELDS:
        if name not in record:
            yield "fields", name, "missing"
    for name in sorted(record.keys() - set(STAGE_A_FIELDS)):
        yield "fields", name, "not one of the five"
    for name in ("group_id", "mission"):
        if name in record and not _is_text(record[name]):
            yield "group", name, "no text, or blank"
    if mission is not None and _is_text(record.get("mission")) and record["mission"] != mission:
        yield "mission", "mission", f"{record['mission']!r}, the file is of {mission!r}"
    if "label" in record and record["label"] not in LABELS:
        yield "label", "label", f"not one of {', '.join(LABELS)}"
    yield from _broken_images(record)


def _broken_images(record: dict[str, Any]) -> Broken:
    images, summaries = record.get("images"), record.get("per_image")
    if "images" in record and (problem := _images_problem(images)):
        yield "group_images", "images", problem
        return
    if "per_image" not in record:
        return
    if not isinstance(summaries, dict):
        yield "coverage", "per_image", "no object"
        return
    expected = {f"image_{number}" for number in range(1, len(images) + 1)} if isinstance(images, list) else None
    if expected is not None and expected != summaries.keys():
        names = sorted(expected ^ summaries.keys())
        yield "coverage", "per_image", f"missing or too many: {', '.join(names[:5])}"
    for name, summary in summaries.items():
        if not _is_text(summary) or len(summary.splitlines()) != 1:
            yield "summary", f"per_image.{name}", "not one line of text"


def _images_problem(images: object) -> str | None:
    if not isinstance(images, list) or not images:
        return "no list of file names, or an empty one"
    for name in images:
        if not isinstance(name, str) or "/" in name or not name.lower().endswith(EXTENSIONS):
            return f"{str(name)[:60]!r} is no file name of a jpg, jpeg or png"
    return "a name twice" if len(set(images)) < len(images) else None


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())
