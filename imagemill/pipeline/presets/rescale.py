"""Rescale: from raw records and images to a rescaled preset.

    raw/{train,val}.jsonl ─▶ plan_rescale ─▶ jobs ─▶ RescaleWorker, on every core ─▶ images/
                                          └─ finish: <split>.jsonl, once its whole split is good ─▶ manifest

    plan = plan_rescale(dataset, "rescale_32_768", choose_parameters(preset, max_pixels=602112))      # writes nothing
    report = run_rescale(plan, engine.map_batches)

Presets are strict: one refused line or image fails the run, after all problems are listed; finished images are kept.

The preset's folder appears with its manifest before the first image is written.

This module executes a plan and publishes its splits. Parameters and the list of images to make are in rescale_plan.py,
one image in rescale_worker.py, norm and coord in coords.py.

Spec: docs/spec/presets.md#layout
"""

import os
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Set
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from imagemill.adapters.convert import recorded_rule
from imagemill.domain.geometry import in_top_left_order, quantise_objects, scale_objects
from imagemill.errors import ImagemillError
from imagemill.formats.jsonl import LineAppender, encode_line, parse_line, read_raw, replace_lines
from imagemill.formats.manifest import json_bytes, write_json
from imagemill.fs.atomic import sweep_temporaries, sync_folder, temporary_path
from imagemill.pipeline.presets.preset_images import INDEX
from imagemill.pipeline.presets.rescale_plan import (
    REBUILD,
    PresetConflict,
    RescaleParameters,
    RescalePlan,
    RescaleProblem,
    RescaleProblems,
    SplitPlan,
    image_name,
    plan_rescale,
)
from imagemill.pipeline.presets.rescale_worker import RescaleRow, RescaleWorker
from imagemill.progress import Progress
from imagemill.store.public_data import IMAGES, MANIFEST, MANIFEST_FORMAT, Dataset, PresetDir, read_preset_manifest

__all__ = ["RescaleFailed", "RescalePlan", "RescaleReport", "RescaleWorker", "run_rescale", "plan_rescale"]

# Number of problems in the message; the report has more.
SHOWN = 20
BATCH = 32


@dataclass(slots=True)
class RescaleReport:
    """The outcome of a run.

    Attributes:
        counts: images by outcome (`resized`, `copied`, `kept`, `adopted`, `refused`, `failed`).
        splits: the manifest's entry of each published split.
        rewritten: splits whose file of records changed.
        turned: number of identity copies with an orientation tag, which viewers apply and training does not: a warning.
        problems: of lines and images.
    """

    counts: Counter[str]
    splits: dict[str, dict[str, Any]]
    rewritten: list[str]
    turned: int
    problems: RescaleProblems


class RescaleFailed(ImagemillError):
    """Lines or images were refused or failed; `report` describes the work that was completed."""

    def __init__(self, plan: RescalePlan, report: RescaleReport) -> None:
        self.report = report
        problems = report.problems
        counts = ", ".join(f"{reason}: {count}" for reason, count in problems.by_reason.most_common())
        shown = [f"    {problem}" for problem in problems.listed[:SHOWN]]
        more = len(problems) - len(shown)
        unpublished = [f"{split.split}.jsonl" for split in plan.splits if split.split not in report.splits]
        if more:
            shown.append(f"    and {more} more")
        super().__init__(
            "\n".join([f"{plan.dataset.name}/{plan.preset.name}: {counts}", *shown]),
            where=plan.dataset.raw,
            why=f"a preset is published whole: not written: {', '.join(unpublished)}; finished images are kept",
            do="; ".join([*problems.remedies(), "then run the same command again"]),
        )


def run_rescale(plan: RescalePlan, map_batches: Callable[..., Iterator[RescaleRow]]) -> RescaleReport:
    """Make the missing images, then publish each complete split.

    Args:
        plan: the plan.
        map_batches: the engine's method (resources/engine.py).

    Raises:
        RescaleFailed: if lines or images were refused or failed; all other work is done.
        PresetConflict: if `images` is not a real folder.
    """
    counts, known = Counter(kept=len(plan.standing)), dict(plan.standing)
    bad: dict[str, RescaleRow] = {}
    if plan.images or not plan.problems:
        _open_preset(plan.dataset, plan.preset, plan.parameters)
        for folder in (plan.preset.path, plan.preset.images):
            sweep_temporaries(folder)
        try:
            with closing(_rows(plan, map_batches)) as rows:
                for row in rows:
                    counts[row.status] += 1
                    if row.known:
                        known[row.name] = row.known
                    else:
                        bad[row.name] = row
        finally:
            sweep_temporaries(plan.preset.images)  # temporary files of workers that were stopped or killed
    for split in plan.splits:  # report each bad image once per split that refers to it, at its first line
        for name in sorted(bad.keys() & split.images.keys(), key=split.images.__getitem__):
            row, line = bad[name], split.images[name]
            plan.problems.add(RescaleProblem(split.split, line, row.reason, f"{name}: {row.message}", row.remedy))
    turned = {name for name, entry in known.items() if entry.orientation != 1 and plan.images[name].copied}
    report = RescaleReport(counts, {}, [], len(turned), plan.problems)
    for split in plan.splits:
        if not plan.problems.by_split[split.split]:
            _finish_split(plan, split, turned, report)
    if plan.problems:
        raise RescaleFailed(plan, report)
    return report


def _open_preset(dataset: Dataset, preset: PresetDir, parameters: RescaleParameters) -> None:
    """Create the preset's folder, with its manifest and an empty `images/`, in one rename; use an existing one as it is.

    Raises:
        PresetConflict: if `images` is a link or not a folder.
    """
    sweep_temporaries(dataset.path, folders=True)
    if not os.path.lexists(preset.path):
        _create_folder(dataset, preset, parameters)
    if preset.images.is_symlink() or (preset.images.exists() and not preset.images.is_dir()):
        raise PresetConflict(
            f"{preset.name}/{IMAGES} is not a real folder",
            where=preset.images,
            why="files written through a link would replace files in another place",
            do=REBUILD,
        )
    preset.images.mkdir(exist_ok=True)


def _create_folder(dataset: Dataset, preset: PresetDir, parameters: RescaleParameters) -> None:
    staging = temporary_path(dataset.path)
    (staging / IMAGES).mkdir(parents=True)
    stats = {**msgspec.to_builtins(parameters), "splits": {}}
    manifest = {
        "format": MANIFEST_FORMAT, "dataset": dataset.name, "preset": preset.name, "stage_stats": {"rescale": stats},
    }  # fmt: skip
    write_json(staging / MANIFEST, manifest)
    os.rename(staging, preset.path)
    sync_folder(dataset.path)


def _rows(plan: RescalePlan, map_batches: Callable[..., Iterator[RescaleRow]]) -> Generator[RescaleRow]:
    """Yield the row of each job, after the image's index entry has been written."""
    if not plan.jobs:
        return
    options = {"raw": plan.dataset.raw, "preset": plan.preset.path, "library": plan.parameters.library}
    rows = map_batches(RescaleWorker, plan.jobs, batch_size=BATCH, **options)
    task = f"rescale {plan.dataset.name}/{plan.preset.name}"
    try:
        pixels = {job.name: job.size[0] * job.size[1] for job in plan.jobs}
        with (
            Progress(task, len(plan.jobs), work=sum(pixels.values())) as progress,
            LineAppender(plan.preset.path / INDEX) as index,
        ):
            for row in rows:
                if row.known:
                    index.append(row.known)
                    index.flush()
                progress.advance(1, pixels[row.name], free=row.status == "kept")
                yield row
    finally:
        # After an interrupt, stop the engine's processes now rather than when its traceback is released.
        getattr(rows, "close", lambda: None)()


def _finish_split(plan: RescalePlan, split: SplitPlan, turned: Set[str], report: RescaleReport) -> None:
    """Publish a split whose lines and images are all good; a file with equal content keeps its bytes and mtime."""
    raw, digest = plan.dataset.raw_jsonl(split.split), xxhash.xxh3_128()

    def lines() -> Iterator[bytes]:
        for number, line in read_raw(raw):
            digest.update(line + b"\n")
            yield encode_line(_rescaled(plan, parse_line(number, line).value, raw))
        if f"xxh3:{digest.hexdigest()}" != split.fingerprint:
            raise _changed(raw)

    if replace_lines(plan.preset.jsonl(split.split), lines()):
        report.rewritten.append(split.split)
    copied = sum(plan.images[name].copied for name in split.images)
    counts = {
        "records": split.records,
        "objects": split.objects,
        "images": len(split.images),
        "copied": copied,
        "resized": len(split.images) - copied,
        "orientation_tags": len(turned & split.images.keys()),
        "raw_fingerprint": split.fingerprint,
    }
    _record_split(plan, split.split, counts)
    report.splits[split.split] = counts


def _record_split(plan: RescalePlan, split: str, counts: Mapping[str, Any]) -> None:
    """Record a published split in the manifest, with the rule that divided raw records into train and val, if there is one."""
    manifest = read_preset_manifest(plan.preset) or {}
    before = json_bytes(manifest)
    stats = manifest["stage_stats"]
    stats["rescale"].setdefault("splits", {})[split] = dict(counts)
    stats.pop("convert", None)
    if rule := recorded_rule(plan.dataset):
        stats["convert"] = {"split_rule": rule}
    if json_bytes(manifest) != before:
        write_json(plan.preset.manifest, manifest)


def _rescaled(plan: RescalePlan, record: Mapping[str, Any] | None, raw: Path) -> dict[str, Any]:
    """Return a raw record as the preset has it: with the preset's size and geometry, and objects in the preset's order."""
    sizes = plan.images.get(image_name(record)) if record and record.get("images") else None
    if record is None or sizes is None:
        raise _changed(raw)
    (width, height), objects = sizes.target, scale_objects(record["objects"], sizes.declared, sizes.target)
    if plan.parameters.object_order == "top_left":
        objects = in_top_left_order(objects, quantise_objects(objects, width, height))
    return {**record, "width": width, "height": height, "objects": objects}


def _changed(raw: Path) -> ImagemillError:
    return ImagemillError(
        f"{raw.name} changed while it was rescaled",
        where=raw,
        do="run the same command again; finished images are kept",
    )
