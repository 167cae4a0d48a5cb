"""Where public datasets and their presets live. Paths and names; only `splits` and the manifest look at the disk.

    public_data/
    ├─ presets.yaml
    └─ coco/                                     a dataset
       ├─ raw/                                   train.jsonl  val.jsonl  images/ (may be a symlink; only read)
       └─ rescale_32_768/                        a preset
          ├─ train.jsonl  train.norm.jsonl  train.coord.jsonl  train.filter_stats.json
          ├─ images/                             always a real folder; a file in it is never replaced
          └─ pipeline_manifest.json

Belongs here: names of files and folders, the manifest as a value.
Belongs elsewhere: what a record holds (preset_records.py), what a preset's name says (preset_names.py).
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
    """Which numbers a file of records holds, by its name: `val.coord.jsonl` → `coord`, `val.jsonl` → `pixel`."""
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
        return self.path.name

    @property
    def images(self) -> Path:
        return self.path / IMAGES

    @property
    def manifest(self) -> Path:
        return self.path / MANIFEST

    def records(self, split: str, space: Space) -> Path:
        return self.path / (split + SPACES[space])

    def jsonl(self, split: str) -> Path:
        """Records in pixels."""
        return self.records(split, "pixel")

    def norm(self, split: str) -> Path:
        return self.records(split, "norm")

    def coord(self, split: str) -> Path:
        return self.records(split, "coord")

    def filter_stats(self, split: str) -> Path:
        return self.path / f"{split}.filter_stats.json"

    def splits(self) -> list[str]:
        """The splits whose pixel records are published."""
        return [split for split in SPLITS if self.jsonl(split).is_file()]


@dataclass(frozen=True, slots=True)
class Dataset:
    """One dataset: its raw records and images, and its presets."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def raw(self) -> Path:
        return self.path / RAW

    @property
    def raw_images(self) -> Path:
        return self.raw / IMAGES

    def raw_jsonl(self, split: str) -> Path:
        return self.raw / f"{split}.jsonl"

    def splits(self) -> list[str]:
        """The splits that raw holds."""
        return [split for split in SPLITS if self.raw_jsonl(split).is_file()]

    def presets(self) -> list[str]:
        """Return the names of the folders that hold a preset, in order."""
        return sorted(path.parent.name for path in self.path.glob(f"[!.]*/{MANIFEST}"))

    def preset(self, name: str) -> PresetDir:
        """Raises WrongUsage where the name is none of a folder beside raw."""
        return PresetDir(self.path / folder_name(name, "preset", taken=(RAW,)))


@dataclass(frozen=True, slots=True)
class PublicData:
    """The folder of public datasets, as an absolute path."""

    path: Path

    @classmethod
    def at(cls, folder: str | os.PathLike[str]) -> "PublicData":
        return cls(local_path(folder, "--public-data-root"))

    @property
    def presets_yaml(self) -> Path:
        return self.path / "presets.yaml"

    def datasets(self) -> list[str]:
        """Return the names of the folders that hold raw records or a preset, in order."""
        found = [*self.path.glob(f"[!.]*/{RAW}"), *self.path.glob(f"[!.]*/*/{MANIFEST}")]
        return sorted({path.relative_to(self.path).parts[0] for path in found})

    def dataset(self, name: str) -> Dataset:
        """Raises WrongUsage where the name is none of a folder."""
        return Dataset(self.path / folder_name(name, "dataset"))


def no_dataset(dataset: Dataset, do: str) -> MissingInput:
    """Return the error for a dataset without a folder; those that exist are listed."""
    names = PublicData(dataset.path.parent).datasets()
    return MissingInput(
        f"no dataset {dataset.name}",
        where=dataset.path.parent,
        why=f"datasets there: {', '.join(names)}" if names else "there is no dataset yet",
        do=f"check the dataset's name; {do}",
    )


def folder_name(name: str, what: str, *, taken: tuple[str, ...] = ()) -> str:
    """A name that becomes one folder here and one half of a partition's key.

    Raises:
        WrongUsage: empty, hidden, with a separator or a control character, or one of `taken`.
    """
    bad = not name or name.startswith(".") or "/" in name or "\\" in name or not name.isprintable() or name in taken
    if bad or name != name.strip():
        raise WrongUsage(f"{name!r} is no name of a {what}", do="choose a plain folder name, such as rescale_32_768")
    return name


def is_foreign(manifest: Mapping[str, Any]) -> bool:
    """True if another program made the preset of a manifest."""
    return "format" not in manifest


def read_preset_manifest(preset: PresetDir) -> dict[str, Any] | None:
    """What a preset's stages recorded; None where it has no manifest.

    Raises:
        ImagemillError: the file is no JSON object, or of another format.
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
