"""What a rescale has to do, by its raw records and by what is there: decided before anything is written.

    raw/{train,val}.jsonl ─▶ problems of lines
                         └─▶ images with their sizes ─▶ those that stand as they are
                                                    └─▶ jobs

Belongs here: reading raw records, which images to look at.
Belongs elsewhere: doing it (rescale.py), one image (rescale_worker.py).
Source: seed 004; CONTRACTS section 3.
"""

import posixpath
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import xxhash

from imagemill.domain.geometry import scale_objects, target_size
from imagemill.domain.preset_names import refuse_derived
from imagemill.domain.preset_records import outside_objects, violations
from imagemill.errors import MissingInput, Refused, WrongUsage
from imagemill.formats.jsonl import parse_line, read_raw
from imagemill.pipeline.presets.preset_images import KnownImage, read_known
from imagemill.pipeline.presets.rescale_problems import RescaleProblem, RescaleProblems
from imagemill.pipeline.presets.rescale_setup import RescaleParameters
from imagemill.pipeline.presets.rescale_worker import RescaleJob
from imagemill.store.public_data import IMAGES, SPLITS, Dataset, PresetDir, no_dataset

Sized = tuple[int, int]


@dataclass(slots=True)
class SplitPlan:
    """One split: its raw file's fingerprint, what is in it, and the first line of each of its images."""

    split: str
    fingerprint: str = ""
    records: int = 0
    objects: int = 0
    images: dict[str, int] = field(default_factory=dict)


class Sizes(NamedTuple):
    """An image's sizes, (width, height): as declared, and in the preset."""

    declared: Sized
    target: Sized


@dataclass(slots=True)
class RescalePlan:
    """What a run would do; a value, printed by a dry run.

    Attributes:
        jobs: images to look at: absent ones, and those of which files changed or nothing is known.
        standing: what is known of images that need no look.
        problems: of lines. Those of images are met when the jobs run.
    """

    dataset: Dataset
    preset: PresetDir
    parameters: RescaleParameters
    splits: list[SplitPlan]
    images: dict[str, Sizes]
    jobs: list[RescaleJob]
    standing: dict[str, KnownImage]
    problems: RescaleProblems

    @property
    def worker_options(self) -> dict[str, Any]:
        return {"raw": self.dataset.raw, "preset": self.preset.path, "library": self.parameters.library}


def plan_rescale(
    dataset: Dataset, preset: str, parameters: RescaleParameters, splits: Sequence[str] | None = None
) -> RescalePlan:
    """Read raw records and look at what is there; nothing is written.

    Args:
        splits: those wanted; None means all that raw has.

    Raises:
        WrongUsage: a derived preset's name, an unknown split. MissingInput: no raw records of a split.
    """
    refuse_derived(preset, "only a base preset is rescaled; coord makes derived ones")
    folder = dataset.preset(preset)
    plan = RescalePlan(dataset, folder, parameters, [], {}, [], {}, RescaleProblems())
    for split in chosen_splits(dataset, splits):
        plan.splits.append(_read_split(plan, split))
    known = read_known(folder)
    for name, sizes in plan.images.items():
        _plan_image(plan, name, sizes, known.get(name))
    return plan


def chosen_splits(dataset: Dataset, asked: Sequence[str] | None) -> list[str]:
    """Splits in their own order. Raises WrongUsage or MissingInput."""
    if unknown := sorted(set(asked or ()) - set(SPLITS)):
        raise WrongUsage(f"no split {unknown[0]!r}", do=f"choose from {', '.join(SPLITS)}")
    wanted = [split for split in SPLITS if split in (asked or [SPLITS[0], *dataset.splits()])]
    for split in wanted:
        if not dataset.path.is_dir():
            command = f"imagemill preset convert {dataset.name} --adapter NAME --annotations FILE --images DIR"
            raise no_dataset(dataset, f"{command} makes one")
        if not dataset.raw_jsonl(split).is_file():
            raise MissingInput(
                f"{dataset.name} has no raw records of {split}",
                where=dataset.raw_jsonl(split),
                do=f"imagemill preset convert {dataset.name} --adapter NAME --annotations FILE --images DIR --split {split}",
            )
    return wanted


def _plan_image(plan: RescalePlan, name: str, sizes: Sizes, known: KnownImage | None) -> None:
    raw, made = plan.dataset.raw / name, plan.preset.path / name
    if known and known.raw_size == sizes.declared and known.stands(raw, made):
        plan.standing[name] = known
    else:
        plan.jobs.append(RescaleJob(name, sizes.declared, sizes.target, known))


def _read_split(plan: RescalePlan, split: str) -> SplitPlan:
    told, digest = SplitPlan(split), xxhash.xxh3_128()
    for number, raw in read_raw(plan.dataset.raw_jsonl(split)):
        digest.update(raw + b"\n")
        told.records += 1
        line = parse_line(number, raw)
        if line.value is None:
            problem = RescaleProblem(split, number, "line", line.problem or "", "repair or remove the raw line")
            plan.problems.add(problem)
            continue
        for problem in _record_problems(plan, split, number, line.value):
            plan.problems.add(problem)
            break
        else:
            told.objects += len(line.value["objects"])
            told.images.setdefault(image_name(line.value), number)
    told.fingerprint = f"xxh3:{digest.hexdigest()}"
    return told


def image_name(record: Mapping[str, Any]) -> str:
    """The image of a valid record, below raw and below a preset alike; two spellings of one path are one image."""
    return posixpath.normpath(record["images"][0])


def _record_problems(plan: RescalePlan, split: str, number: int, record: Mapping[str, Any]) -> Iterator[RescaleProblem]:
    """What is wrong with a record; one that is good has its image in the plan."""
    for found in violations(record, "pixel"):
        yield RescaleProblem(split, number, found.rule, f"{found.field} {found.message}", found.remedy)
        return
    name, declared = image_name(record), (record["width"], record["height"])
    if not name.startswith(f"{IMAGES}/"):
        message = f"images {name!r} does not lie in {IMAGES}/"
        yield RescaleProblem(
            split, number, "image_path", message, f"put the file below raw/{IMAGES} and correct the record"
        )
        return
    there = plan.images.get(name)
    if there and there.declared != declared:
        sizes = f"{there.declared[0]}x{there.declared[1]} and {declared[0]}x{declared[1]}"
        yield RescaleProblem(
            split, number, "two_sizes", f"{name} is named with {sizes}", "give the size of the file in each record"
        )
        return
    if outside := outside_objects(record):
        message = f"objects[{outside[0]}] of {name} lies outside {declared[0]}x{declared[1]}"
        yield RescaleProblem(
            split, number, "outside_image", message, "correct the object in the raw record, or remove it"
        )
        return
    try:
        target = there.target if there else _target(plan.parameters, declared)
        if min(target) < 2:
            scale_objects(record["objects"], declared, target)
    except Refused as refusal:
        yield RescaleProblem(split, number, refusal.reason, f"{name}: {refusal.what}", refusal.do or "")
        return
    plan.images[name] = there or Sizes(declared, target)


def _target(parameters: RescaleParameters, declared: Sized) -> Sized:
    return target_size(
        *declared,
        image_factor=parameters.image_factor,
        max_pixels=parameters.max_pixels,
        min_pixels=parameters.min_pixels,
    )
