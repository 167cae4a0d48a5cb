"""Paths and names of public datasets and their presets. Only lists of names and the manifest are read from the disk.

    public_data/
    ├─ presets.yaml
    └─ coco/                                     a dataset
       ├─ raw/                                   train.jsonl  val.jsonl  images/ (may be a symlink; only read)
       └─ rescale_32_768/                        a preset
          ├─ train.jsonl  train.norm.jsonl  train.coord.jsonl  train.filter_stats.json
          ├─ images/                             always a real folder; a file in it is never replaced
          └─ pipeline_manifest.json

Rules for records are in preset_records.py, those for preset names in preset_names.py.

Spec: docs/spec/presets.md#dataset-layout
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from imagemill.domain.layout import local_path
from imagemill.domain.preset_records import Space
from imagemill.errors import ImagemillError, MissingInput, WrongUsage
from imagemill.formats.manifest import read_json

SPLITS = ("train", "val")
SPACES: dict[Space, str] = {"pixel": ".jsonl", "norm": ".norm.jsonl", "coord": ".coord.jsonl"}

RAW = "raw"
IMAGES = "images"
MANIFEST = "pipeline_manifest.json"
MANIFEST_FORMAT = 1


def space_of(path: str | os.PathLike[str]) -> Space:
    """Return the space of a file of records by its name: `val.coord.jsonl` → `coord`, `val.jsonl` → `pixel`."""
    name = Path(path).name
    for space, ending in SPACES.items():
        if space != "pixel" and name.endswith(ending):  # every name of records ends as those in pixels do
            return space
    return "pixel"


@dataclass(frozen=True, slots=True)
class PresetDir:
    """One preset of one dataset."""

    path: Path

    @property
    def name(self) -> str:
        """Name of the preset."""
        return self.path.name

    @property
    def images(self) -> Path:
        """Images of the preset."""
        return self.path / IMAGES

    @property
    def manifest(self) -> Path:
        """The preset's manifest."""
        return self.path / MANIFEST

    def records(self, split: str, space: Space) -> Path:
        """Records of a split in one space."""
        return self.path / (split + SPACES[space])

    def jsonl(self, split: str) -> Path:
        """Records in pixels."""
        return self.records(split, "pixel")

    def filter_stats(self, split: str) -> Path:
        """Counts of kept and dropped records of a derived preset."""
        return self.path / f"{split}.filter_stats.json"

    def splits(self) -> list[str]:
        """Return the splits whose pixel records are published."""
        return [split for split in SPLITS if self.jsonl(split).is_file()]


@dataclass(frozen=True, slots=True)
class Dataset:
    """One dataset: its raw records and images, and its presets."""

    path: Path

    @property
    def name(self) -> str:
        """Name of the dataset."""
        return self.path.name

    @property
    def raw(self) -> Path:
        """Folder of the raw records and images."""
        return self.path / RAW

    @property
    def raw_images(self) -> Path:
        """Folder of the raw images."""
        return self.raw / IMAGES

    def raw_jsonl(self, split: str) -> Path:
        """Raw records of a split."""
        return self.raw / f"{split}.jsonl"

    def splits(self) -> list[str]:
        """Return the splits that have raw records."""
        return [split for split in SPLITS if self.raw_jsonl(split).is_file()]

    def presets(self) -> list[str]:
        """Return the names of the folders that contain a preset, in order."""
        return sorted(path.parent.name for path in self.path.glob(f"[!.]*/{MANIFEST}"))

    def preset(self, name: str) -> PresetDir:
        """Return a preset of this name; raise WrongUsage if it is not a valid folder name beside raw."""
        return PresetDir(self.path / folder_name(name, "preset", taken=(RAW,)))


@dataclass(frozen=True, slots=True)
class PublicData:
    """The folder of public datasets, as an absolute path."""

    path: Path

    @classmethod
    def at(cls, folder: str | os.PathLike[str]) -> "PublicData":
        """Return the folder of public datasets at this path; raise WrongUsage for a URL."""
        return cls(local_path(folder, "--public-data-root"))

    @property
    def presets_yaml(self) -> Path:
        """The file of configured datasets and presets."""
        return self.path / "presets.yaml"

    def datasets(self) -> list[str]:
        """Return the names of the folders that contain raw records or a preset, in order."""
        found = [*self.path.glob(f"[!.]*/{RAW}"), *self.path.glob(f"[!.]*/*/{MANIFEST}")]
        return sorted({path.relative_to(self.path).parts[0] for path in found})

    def dataset(self, name: str) -> Dataset:
        """Return a dataset of this name; raise WrongUsage if it is not a valid folder name."""
        return Dataset(self.path / folder_name(name, "dataset"))


def no_dataset(dataset: Dataset, do: str) -> MissingInput:
    """Return the error for a dataset without a folder; existing datasets are listed."""
    names = PublicData(dataset.path.parent).datasets()
    return MissingInput(
        f"no dataset {dataset.name}",
        where=dataset.path.parent,
        why=f"existing datasets: {', '.join(names)}" if names else "there is no dataset yet",
        do=f"check the dataset's name; {do}",
    )


def folder_name(name: str, what: str, *, taken: tuple[str, ...] = ()) -> str:
    """Return a name that is valid as a folder and as a part of a partition key.

    Raises:
        WrongUsage: if it is empty, hidden, in `taken`, or contains a separator or a control character.
    """
    bad = not name or name.startswith(".") or "/" in name or "\\" in name or not name.isprintable() or name in taken
    if bad or name != name.strip():
        raise WrongUsage(
            f"{name!r} is not a valid name of a {what}", do="choose a plain folder name, such as rescale_32_768"
        )
    return name


def is_foreign(manifest: Mapping[str, Any]) -> bool:
    """Return True if another program made the preset of a manifest."""
    return "format" not in manifest


def read_preset_manifest(preset: PresetDir) -> dict[str, Any] | None:
    """Return the manifest of a preset; None if it has none.

    Raises:
        ImagemillError: if the file is not a JSON object of this format.
    """
    if not preset.manifest.is_file():
        return None
    manifest = read_json(preset.manifest)
    if not isinstance(manifest, dict) or not isinstance(manifest.get("stage_stats", {}), dict):
        raise ImagemillError(
            f"{MANIFEST} is no manifest of a preset",
            where=preset.manifest,
            do="restore it, or delete the preset directory and rescale again",
        )
    return manifest
