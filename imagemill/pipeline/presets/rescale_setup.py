"""What a preset was made with: parameters asked, parameters recorded, and the folder that carries the record.

    coco/rescale_32_768/pipeline_manifest.json      stage_stats.rescale: {image_factor: 32, max_pixels: 786432, …}

The record is there before the first pixel and never changes afterwards; a request that differs from it fails before any write.

Belongs here: agreement of request and record, the birth of a preset's folder.
Belongs elsewhere: where parameters are asked for (preset_config.py), the work (rescale.py).
Source: seed 004, "Invariants"; CONTRACTS section 3, "Rescale with the recorded parameters".
"""

import os
import shutil
from collections.abc import Mapping
from typing import Any

import msgspec

from imagemill.domain.geometry import IMAGE_FACTOR, MAX_ASPECT, MAX_PIXELS, MIN_PIXELS, check_limits
from imagemill.domain.preset_records import DEFAULT_ORDER, ORDERS
from imagemill.errors import ImagemillError, WrongUsage
from imagemill.formats.manifest import json_bytes, write_json
from imagemill.formats.resize import DEFAULT_LIBRARY, FILTER, QUALITY, check_library
from imagemill.fs.atomic import is_orphan, sync_folder, temporaries, temporary_path
from imagemill.store.public_data import IMAGES, MANIFEST, MANIFEST_FORMAT, Dataset, PresetDir, read_preset_manifest

_REBUILD = "choose a new preset name, or delete the preset directory and rescale again"
_IMMUTABLE = "preset images never change once written"


class PresetConflict(ImagemillError, ValueError):
    """A preset is already there, made with other parameters, or nobody knows with which."""


class RescaleParameters(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that decides a preset's pixels and records.

    Attributes:
        image_factor, max_pixels, min_pixels: of images, in pixels. max_aspect: the largest ratio of sides that is accepted.
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

    def check(self) -> None:
        """Raises WrongUsage or ImagemillError where no preset can be made with these here."""
        check_limits(self.image_factor, self.max_pixels, self.min_pixels)
        check_library(self.library)
        if self.object_order not in ORDERS:
            raise WrongUsage(f"no object_order {self.object_order!r}", do=f"choose from {', '.join(ORDERS)}")


def recorded_parameters(preset: PresetDir) -> dict[str, Any] | None:
    """What a preset's manifest says of its rescale, counts left out; None where it says nothing."""
    stats = (read_preset_manifest(preset) or {}).get("stage_stats", {}).get("rescale")
    if not isinstance(stats, dict):
        return None
    recorded = {key: stats[key] for key in RescaleParameters.__struct_fields__ if key in stats}
    # Presets of earlier releases keep the order of the annotations, and record none.
    return {"object_order": DEFAULT_ORDER, **recorded}


def choose_parameters(preset: PresetDir, **asked: int | str | None) -> RescaleParameters:
    """The parameters asked for; what is None is as the preset was made, else the default.

    Raises:
        PresetConflict: the preset was made with others, or is there without a record of them. WrongUsage: impossible ones.
    """
    given = {key: value for key, value in asked.items() if value is not None}
    recorded = recorded_parameters(preset)
    parameters = RescaleParameters(**{**_usable(recorded or {}), **given})  # type: ignore[arg-type]
    if os.path.lexists(preset.path):
        _check_agreement(preset, recorded, msgspec.to_builtins(parameters))
    parameters.check()
    return parameters


def _usable(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Recorded values of the right kind; any other one differs from what is asked, and is told so."""
    kinds = {"image_factor": int, "max_pixels": int, "min_pixels": int, "library": str, "object_order": str}
    return {key: recorded[key] for key, kind in kinds.items() if type(recorded.get(key)) is kind}


def _check_agreement(preset: PresetDir, recorded: Mapping[str, Any] | None, asked: Mapping[str, Any]) -> None:
    if recorded is None:
        raise PresetConflict(
            f"{preset.name} is there, and nothing says with which parameters it was made",
            where=f"{preset.manifest}, stage_stats.rescale",
            why=f"{_IMMUTABLE}, and parameters are not guessed from them",
            do=_REBUILD,
        )
    different = [
        f"{key} recorded {recorded.get(key, 'nowhere')}, requested {value}"
        for key, value in asked.items()
        if recorded.get(key) != value
    ]
    if different:
        raise PresetConflict(
            f"rescale parameters differ: {'; '.join(different)}",
            where=f"{preset.manifest}, stage_stats.rescale",
            why=_IMMUTABLE,
            do=_REBUILD,
        )


def open_preset(dataset: Dataset, preset: PresetDir, parameters: RescaleParameters) -> None:
    """Make the preset's folder, with its manifest and an empty `images/`, in one rename; one that is there is taken as it is.

    Raises:
        PresetConflict: `images` is not a folder of its own.
    """
    _sweep(dataset)
    if not os.path.lexists(preset.path):
        _give_birth(dataset, preset, parameters)
    if preset.images.is_symlink() or (preset.images.exists() and not preset.images.is_dir()):
        raise PresetConflict(
            f"{preset.name}/{IMAGES} is not a real folder",
            where=preset.images,
            why="what is written through a link ends in another place, over files of others",
            do=_REBUILD,
        )
    preset.images.mkdir(exist_ok=True)


def _give_birth(dataset: Dataset, preset: PresetDir, parameters: RescaleParameters) -> None:
    unborn = temporary_path(dataset.path)
    (unborn / IMAGES).mkdir(parents=True)
    stats = {**msgspec.to_builtins(parameters), "splits": {}}
    manifest = {
        "format": MANIFEST_FORMAT, "dataset": dataset.name, "preset": preset.name, "stage_stats": {"rescale": stats},
    }  # fmt: skip
    write_json(unborn / MANIFEST, manifest)
    os.rename(unborn, preset.path)
    sync_folder(dataset.path)


def _sweep(dataset: Dataset) -> None:
    """Folders that dead processes did not bring to the world."""
    for path in temporaries(dataset.path):
        if is_orphan(path) and path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)


def record_split(preset: PresetDir, split: str, counts: Mapping[str, Any], *, split_rule: str | None = None) -> None:
    """Record a published split in the manifest; an equal manifest keeps its bytes.

    Args:
        split_rule: the rule that divided raw records into train and val, if one did.
    """
    manifest = read_preset_manifest(preset) or {}
    before = json_bytes(manifest)
    stats = manifest["stage_stats"]
    stats["rescale"].setdefault("splits", {})[split] = dict(counts)
    if split_rule:
        stats["convert"] = {"split_rule": split_rule}
    else:
        stats.pop("convert", None)
    if json_bytes(manifest) != before:
        write_json(preset.manifest, manifest)
