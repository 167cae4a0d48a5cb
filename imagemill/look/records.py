"""Records of presets and of Stage-A, a page at a time, with the files of their images.

Only files in the folder of a preset or a mission can be shown.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from imagemill.domain.layout import DataRoot
from imagemill.domain.preset_records import path_problem
from imagemill.errors import MissingInput
from imagemill.formats.jsonl import read_jsonl
from imagemill.fs.listing import is_inside
from imagemill.pipeline.stage_a.missions import discover
from imagemill.pipeline.stage_a.rank_files import output_file
from imagemill.store.public_data import PresetDir, PublicData

PAGE = 40


class Shape(NamedTuple):
    """One object. `points`: of its box or polygon, as SVG writes them; `number`: of its class on the page, for its colour."""

    label: str
    points: str
    number: int


class BoxedImage(NamedTuple):
    """One record of a preset. `number`: of its line; `file`: image, relative to the preset; sizes in pixels."""

    number: int
    file: str
    width: int
    height: int
    shapes: list[Shape]


class PresetPage(NamedTuple):
    """A page of a preset's records. `classes`: objects by class, of all records; `number`: records that are selected."""

    records: list[BoxedImage]
    number: int
    classes: dict[str, int]


class SummarisedGroup(NamedTuple):
    """One record of Stage-A. `images`: (path relative to the mission's folder or None, file name, summary)."""

    group_id: str
    label: str
    images: list[tuple[str | None, str, str]]


def presets(root: DataRoot) -> dict[str, list[str]]:
    """Return the splits of each preset that has records, by `dataset/preset`."""
    public = PublicData.at(root.public_data)
    found = {}
    for name in public.datasets() if public.path.is_dir() else ():
        dataset = public.dataset(name)
        for preset in dataset.presets():
            if splits := dataset.preset(preset).splits():
                found[f"{name}/{preset}"] = splits
    return found


def preset_folder(root: DataRoot, name: str) -> PresetDir:
    """Return a preset by `dataset/preset`. Raises WrongUsage for a name that none can have, MissingInput for another one."""
    dataset, _, preset = name.partition("/")
    found = PublicData.at(root.public_data).dataset(dataset).preset(preset)
    if not found.manifest.is_file():
        raise MissingInput(f"no preset {name!r}", where=root.public_data, do="choose one of the page of presets")
    return found


def preset_page(root: DataRoot, name: str, split: str, label: str | None, page: int) -> PresetPage:
    """Return a page of a preset's records, all of them or those with an object of a class.

    Raises:
        MissingInput: if there is no such preset or split.
    """
    preset = preset_folder(root, name)
    if split not in preset.splits():
        raise MissingInput(f"no split {split!r} in {name}", where=preset.path, do="choose one of the page of presets")
    classes: dict[str, int] = {}
    chosen, number = [], 0
    for line in read_jsonl(preset.jsonl(split)):
        if not isinstance(line.value, dict):
            continue
        objects = _objects(line.value)
        for each in objects:
            classes[each["desc"]] = classes.get(each["desc"], 0) + 1
        if label is None or any(each["desc"] == label for each in objects):
            if (page - 1) * PAGE <= number < page * PAGE:
                chosen.append((line.number, line.value, objects))
            number += 1
    numbers: dict[str, int] = {}
    records = [
        BoxedImage(
            n,
            str((record.get("images") or [""])[0]),
            int(record.get("width") or 1),
            int(record.get("height") or 1),
            [_shape(each, numbers.setdefault(each["desc"], len(numbers))) for each in objects],
        )
        for n, record, objects in chosen
    ]
    return PresetPage(records, number, dict(sorted(classes.items(), key=lambda item: (-item[1], item[0]))))


def _objects(record: Any) -> list[dict[str, Any]]:
    """Return the objects of a record that have a class and numbers."""
    objects = record.get("objects") if isinstance(record, dict) else None
    found = [each for each in objects if isinstance(each, dict)] if isinstance(objects, list) else []
    return [each for each in found if isinstance(each.get("desc"), str) and len(_numbers(each)) >= 4]


def _numbers(each: dict[str, Any]) -> list[float]:
    values = each.get("poly") or each.get("bbox_2d") or []
    return [float(value) for value in values if isinstance(value, int | float)] if isinstance(values, list) else []


def _shape(each: dict[str, Any], number: int) -> Shape:
    values = _numbers(each)
    if not each.get("poly"):
        left, top, right, bottom = values[:4]
        values = [left, top, right, top, right, bottom, left, bottom]
    points = " ".join(f"{x:g},{y:g}" for x, y in zip(values[::2], values[1::2], strict=False))
    return Shape(each["desc"], points, number)


def mission_page(root: DataRoot, mission: str, page: int) -> tuple[list[SummarisedGroup], int]:
    """Return a page of a mission's records, and their number. Raises MissingInput if there is no such mission."""
    found = discover(root.stage_a_input, mission)
    places = {(group.label, group.group_id): group for group in found.groups}
    output = output_file(root.stage_a_output, mission)
    groups, number = [], 0
    for line in read_jsonl(output) if output.is_file() else ():
        record = line.value
        if not isinstance(record, dict):
            continue
        if (page - 1) * PAGE <= number < page * PAGE:
            group = places.get((record.get("label"), record.get("group_id")))  # type: ignore[arg-type]
            groups.append(
                SummarisedGroup(str(record.get("group_id")), str(record.get("label")), list(_images(record, group)))
            )
        number += 1
    return groups, number


def _images(record: dict[str, Any], group: Any) -> Iterator[tuple[str | None, str, str]]:
    summaries = record.get("per_image")
    for index, name in enumerate(record.get("images") or [], start=1):
        place = f"{group.place}/{name}" if group and name in group.images else None
        summary = summaries.get(f"image_{index}", "") if isinstance(summaries, dict) else ""
        yield place, str(name), str(summary)


def image_file(folder: Path, relative: str) -> Path:
    """Return a file below a folder. Raises MissingInput for a path that leads out of it, or to no file."""
    path = folder / relative
    inside = not path_problem(relative) and is_inside(os.path.realpath(path), os.path.realpath(folder))
    if not inside or not path.is_file():
        raise MissingInput("no such image", where=folder, do="reload the page")
    return path
