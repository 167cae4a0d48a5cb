"""Plan of a rescale: parameters, problems of the raw records, images to make. Nothing is written here.

    coco/rescale_32_768/pipeline_manifest.json      stage_stats.rescale: {image_factor: 32, max_pixels: 786432, …}

    raw/{train,val}.jsonl ─▶ problems of lines
                         └─▶ images with their sizes ─▶ those that are up to date
                                                    └─▶ jobs

The recorded parameters of a preset never change; a request that differs from them fails before any write.

Requested parameters come from preset_config.py. The plan is executed in rescale.py, one image at a time in
rescale_worker.py.

Spec: docs/spec/presets.md#strictness, docs/spec/presets.md#rescale-parameters
"""

import os
import posixpath
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import msgspec
import xxhash

from imagemill.domain.geometry import (
    IMAGE_FACTOR,
    MAX_ASPECT,
    MAX_PIXELS,
    MIN_PIXELS,
    check_limits,
    scale_objects,
    target_size,
)
from imagemill.domain.preset_names import refuse_derived
from imagemill.domain.preset_records import DEFAULT_ORDER, ORDERS, outside_objects, violations
from imagemill.errors import ImagemillError, MissingInput, Refused, WrongUsage
from imagemill.formats.jsonl import parse_line, read_raw
from imagemill.formats.resize import DEFAULT_LIBRARY, FILTER, QUALITY, check_library
from imagemill.pipeline.presets.preset_images import KnownImage, read_known
from imagemill.pipeline.presets.rescale_worker import OS_ERROR, RescaleJob
from imagemill.store.public_data import IMAGES, SPLITS, Dataset, PresetDir, no_dataset, read_preset_manifest

Sized = tuple[int, int]

# Number of problems that are listed one by one; all are counted.
LISTED = 1000

IMMUTABLE = "preset images never change once written"
REBUILD = "choose a new preset name, or delete the preset directory and rescale again"


# ---- parameters


class PresetConflict(ImagemillError, ValueError):
    """A preset exists and was made with other or unknown parameters."""


class RescaleParameters(msgspec.Struct, frozen=True, kw_only=True):
    """All parameters that determine a preset's pixels and records.

    Attributes:
        image_factor: sizes are multiples of this, in pixels.
        max_pixels: largest image area, in pixels.
        min_pixels: smallest image area, in pixels.
        library: used for resizing.
        filter: used for resizing.
        quality: of encoded images.
        max_aspect: the largest ratio of sides that is accepted.
        exif_policy: EXIF orientation is never applied.
        size_policy: rule for target sizes.
        object_order: order of a record's objects: as annotated, or by (min y, min x) in 0…999.
    """

    image_factor: int = IMAGE_FACTOR
    max_pixels: int = MAX_PIXELS
    min_pixels: int = MIN_PIXELS
    library: str = DEFAULT_LIBRARY
    filter: str = FILTER
    quality: int = QUALITY
    max_aspect: int = MAX_ASPECT
    exif_policy: str = "stored_pixels"
    size_policy: str = "nearest_multiple_half_even"
    object_order: str = DEFAULT_ORDER


def choose_parameters(preset: PresetDir, **requested: int | str | None) -> RescaleParameters:
    """Return the requested parameters; those that are None are as the preset was made, else the default.

    Raises:
        PresetConflict: if the preset was made with others, or exists without a record of them.
        WrongUsage: if parameters are impossible.
    """
    given = {key: value for key, value in requested.items() if value is not None}
    stats = (read_preset_manifest(preset) or {}).get("stage_stats", {}).get("rescale")
    # Presets of earlier releases keep the order of the annotations, and do not record it.
    recorded = {"object_order": DEFAULT_ORDER, **stats} if isinstance(stats, dict) else None
    # A recorded value of another type differs from the requested one, which is reported below.
    kinds = {"image_factor": int, "max_pixels": int, "min_pixels": int, "library": str, "object_order": str}
    usable = {key: recorded[key] for key, kind in kinds.items() if recorded and type(recorded.get(key)) is kind}
    parameters = RescaleParameters(**{**usable, **given})  # type: ignore[arg-type]
    if os.path.lexists(preset.path):
        _check_agreement(preset, recorded, msgspec.to_builtins(parameters))
    check_limits(parameters.image_factor, parameters.max_pixels, parameters.min_pixels)
    check_library(parameters.library)
    if parameters.object_order not in ORDERS:
        raise WrongUsage(f"unknown object_order {parameters.object_order!r}", do=f"choose from {', '.join(ORDERS)}")
    return parameters


def _check_agreement(preset: PresetDir, recorded: Mapping[str, Any] | None, requested: Mapping[str, Any]) -> None:
    if recorded is None:
        raise PresetConflict(
            f"{preset.name} exists, and the parameters it was made with are not recorded",
            where=f"{preset.manifest}, stage_stats.rescale",
            why=f"{IMMUTABLE}, and parameters are not guessed from them",
            do=REBUILD,
        )
    different = [
        f"{key} recorded {recorded.get(key, 'nowhere')}, requested {value}"
        for key, value in requested.items()
        if recorded.get(key) != value
    ]
    if different:
        raise PresetConflict(
            f"rescale parameters differ: {'; '.join(different)}",
            where=f"{preset.manifest}, stage_stats.rescale",
            why=IMMUTABLE,
            do=REBUILD,
        )


# ---- problems


class RescaleProblem(NamedTuple):
    """A problem that keeps a line or an image out of the preset."""

    split: str
    line: int
    reason: str
    message: str
    remedy: str

    @property
    def outcome(self) -> Literal["refused", "failed"]:
        """`failed` for disk errors, `refused` for faults of the input."""
        return "failed" if self.reason == OS_ERROR else "refused"

    def __str__(self) -> str:
        return f"{self.split}.jsonl:{self.line} {self.reason}: {self.message}"


class RescaleProblems:
    """Problems in the order in which they were found, up to the first thousand; all are counted."""

    def __init__(self) -> None:
        self.listed: list[RescaleProblem] = []
        self.by_reason: Counter[str] = Counter()
        self.by_split: Counter[str] = Counter()
        self._remedies: dict[str, str] = {}

    def add(self, problem: RescaleProblem) -> None:
        """Count a problem, and list it if there is room."""
        self.by_reason[problem.reason] += 1
        self.by_split[problem.split] += 1
        self._remedies.setdefault(problem.remedy, problem.reason)
        if len(self.listed) < LISTED:
            self.listed.append(problem)

    def __len__(self) -> int:
        return self.by_reason.total()

    def remedies(self) -> list[str]:
        """Return the remedy of each type of problem, with its reason code."""
        return [f"{reason}: {remedy}" for remedy, reason in self._remedies.items() if remedy]


# ---- the plan


@dataclass(slots=True)
class SplitPlan:
    """One split: its raw file's fingerprint, its counts, and the first line of each of its images."""

    split: str
    fingerprint: str = ""
    records: int = 0
    objects: int = 0
    images: dict[str, int] = field(default_factory=dict)


class Sizes(NamedTuple):
    """An image's sizes, (width, height): as declared, and in the preset."""

    declared: Sized
    target: Sized

    @property
    def copied(self) -> bool:
        """Whether the preset's image has the raw image's bytes."""
        return self.declared == self.target


@dataclass(slots=True)
class RescalePlan:
    """The work of a run, which a dry run prints.

    Attributes:
        dataset: the dataset.
        preset: the preset to write.
        parameters: of the rescale.
        splits: the splits to publish.
        images: sizes by image name.
        jobs: images to process: missing ones, those whose files changed, and untracked ones.
        standing: index entries of the images that are up to date.
        problems: of lines. Problems of images are found when the jobs run.
    """

    dataset: Dataset
    preset: PresetDir
    parameters: RescaleParameters
    splits: list[SplitPlan]
    images: dict[str, Sizes]
    jobs: list[RescaleJob]
    standing: dict[str, KnownImage]
    problems: RescaleProblems


def plan_rescale(
    dataset: Dataset, preset: str, parameters: RescaleParameters, splits: Sequence[str] | None = None
) -> RescalePlan:
    """Read the raw records and compare them with the existing preset, without writing anything.

    Args:
        dataset: the dataset.
        preset: name of a base preset.
        parameters: of the rescale.
        splits: the requested splits; None means all that raw has.

    Raises:
        WrongUsage: if the name is that of a derived preset, or a split is unknown.
        MissingInput: if a split has no raw records.
    """
    refuse_derived(preset, "only a base preset is rescaled; coord makes derived ones")
    folder = dataset.preset(preset)
    plan = RescalePlan(dataset, folder, parameters, [], {}, [], {}, RescaleProblems())
    for split in chosen_splits(dataset, splits):
        plan.splits.append(_read_split(plan, split))
    known = read_known(folder)
    for name, sizes in plan.images.items():
        entry = known.get(name)
        if entry and entry.raw_size == sizes.declared and entry.stands(dataset.raw / name, folder.path / name):
            plan.standing[name] = entry
        else:
            plan.jobs.append(RescaleJob(name, sizes.declared, sizes.target, entry))
    return plan


def chosen_splits(dataset: Dataset, requested: Sequence[str] | None) -> list[str]:
    """Return the chosen splits in the order of SPLITS; raise WrongUsage or MissingInput."""
    if unknown := sorted(set(requested or ()) - set(SPLITS)):
        raise WrongUsage(f"no split {unknown[0]!r}", do=f"choose from {', '.join(SPLITS)}")
    chosen = [split for split in SPLITS if split in (requested or [SPLITS[0], *dataset.splits()])]
    for split in chosen:
        if not dataset.path.is_dir():
            command = f"imagemill preset convert {dataset.name} --adapter NAME --annotations FILE --images DIR"
            raise no_dataset(dataset, f"{command} makes one")
        if not dataset.raw_jsonl(split).is_file():
            raise MissingInput(
                f"{dataset.name} has no raw records of {split}",
                where=dataset.raw_jsonl(split),
                do=f"imagemill preset convert {dataset.name} --adapter NAME --annotations FILE --images DIR --split {split}",
            )
    return chosen


def _read_split(plan: RescalePlan, split: str) -> SplitPlan:
    found, digest = SplitPlan(split), xxhash.xxh3_128()
    for number, raw in read_raw(plan.dataset.raw_jsonl(split)):
        digest.update(raw + b"\n")
        found.records += 1
        line = parse_line(number, raw)
        try:
            if line.value is None:
                raise Refused("line", line.problem or "", do="repair or remove the raw line")
            _plan_image(plan, line.value)
        except Refused as refusal:
            plan.problems.add(RescaleProblem(split, number, refusal.reason, refusal.what, refusal.do or ""))
        else:
            found.objects += len(line.value["objects"])
            found.images.setdefault(image_name(line.value), number)
    found.fingerprint = f"xxh3:{digest.hexdigest()}"
    return found


def raw_fingerprint(dataset: Dataset, split: str) -> str:
    """Return the fingerprint of a split's raw records, as a preset's manifest records it."""
    digest = xxhash.xxh3_128()
    for _, raw in read_raw(dataset.raw_jsonl(split)):
        digest.update(raw + b"\n")
    return f"xxh3:{digest.hexdigest()}"


def changed_splits(dataset: Dataset, preset: PresetDir) -> list[str]:
    """Return the splits whose raw records exist and are not those that the preset was made from, by its manifest."""
    manifest = read_preset_manifest(preset) or {}
    recorded = manifest.get("stage_stats", {}).get("rescale", {}).get("splits", {})
    made_of = {split: counts.get("raw_fingerprint") for split, counts in recorded.items()}
    return [s for s in dataset.splits() if made_of.get(s) and made_of[s] != raw_fingerprint(dataset, s)]


def image_name(record: Mapping[str, Any]) -> str:
    """Return the image path of a valid record, relative to raw and to the preset; equivalent spellings give one path."""
    return posixpath.normpath(record["images"][0])


def _plan_image(plan: RescalePlan, record: Mapping[str, Any]) -> None:
    """Add the image of a valid record to the plan. Raises Refused for any other record."""
    for found in violations(record, "pixel"):
        raise Refused(found.rule, f"{found.field} {found.message}", do=found.remedy)
    name, declared = image_name(record), (record["width"], record["height"])
    if not name.startswith(f"{IMAGES}/"):
        message = f"images {name!r} is not in {IMAGES}/"
        raise Refused("image_path", message, do=f"put the file below raw/{IMAGES} and correct the record")
    earlier = plan.images.get(name)
    if earlier and earlier.declared != declared:
        sizes = f"{earlier.declared[0]}x{earlier.declared[1]} and {declared[0]}x{declared[1]}"
        raise Refused("two_sizes", f"{name} is named with {sizes}", do="give the size of the file in each record")
    if outside := outside_objects(record):
        message = f"objects[{outside[0]}] of {name} lies outside {declared[0]}x{declared[1]}"
        raise Refused("outside_image", message, do="correct the object in the raw record, or remove it")
    limits = {key: getattr(plan.parameters, key) for key in ("image_factor", "max_pixels", "min_pixels")}
    try:
        target = earlier.target if earlier else target_size(*declared, **limits)
        if min(target) < 2:
            scale_objects(record["objects"], declared, target)
    except Refused as refusal:
        raise Refused(refusal.reason, f"{name}: {refusal.what}", do=refusal.do) from refusal
    plan.images[name] = earlier or Sizes(declared, target)
