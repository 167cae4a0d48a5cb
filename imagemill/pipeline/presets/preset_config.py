"""`presets.yaml`: the configured datasets and presets. Each preset in it is a partition of the preset assets.

    datasets:
      coco:
        adapter: coco
        annotations: {train: coco/instances_train2017.json, val: coco/instances_val2017.json}
        images: /data/coco              # relative to this file, as annotations are
        geometry: boxes
        default_preset: rescale_32_768
      vg:
        adapter: visual_genome
        annotations: {train: vg/objects.json}
        images: vg
        split_rule: id % 20 == 0        # val; all other images are train
    presets:
      coco/rescale_32_768: {image_factor: 32, max_pixels: 786432, max_objects: 60, splits: [train, val]}

Parameters that a preset leaves out are those it was made with, else the defaults. `max_objects` adds a derived preset
beside the base.

Comparison with recorded parameters is in rescale_plan.py; sources of `max_objects` are in preset_names.py.

Spec: docs/spec/presets.md#presets-file
"""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeVar

import msgspec

from imagemill.adapters.convert import adapter_names, parse_split_rule
from imagemill.adapters.source import Geometry
from imagemill.domain.geometry import IMAGE_FACTOR, MAX_PIXELS, MIN_PIXELS, check_limits
from imagemill.domain.preset_names import derived_name, parse_preset
from imagemill.domain.preset_records import ObjectOrder, ResizeLibrary
from imagemill.errors import ImagemillError, WrongUsage
from imagemill.store.public_data import Dataset, folder_name, no_dataset
from imagemill.text.safe_yaml import read_yaml

Positive = Annotated[int, msgspec.Meta(ge=1)]
Split = Literal["train", "val"]
T = TypeVar("T", bound=msgspec.Struct)

# Fields of a preset that rescale takes and records.
PARAMETERS = ("image_factor", "max_pixels", "min_pixels", "library", "object_order")

# Fields of a dataset that an adapter needs.
_OWN_FILES = ("adapter", "annotations", "images")

# Fields with another name on the command line.
_FLAGS = {"splits": "split"}


class DatasetSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A dataset's own files and its default preset; missing fields come from flags.

    Attributes:
        adapter: name of the adapter.
        annotations: one file per split.
        images: folder of the raw images.
        geometry: used for an instance that has both a box and a polygon.
        split_rule: divides a single annotation file into train and val.
        default_preset: the base preset of commands without `--preset`.
    """

    adapter: str | None = None
    annotations: dict[Split, str] | None = None
    images: str | None = None
    geometry: Geometry = "boxes"
    split_rule: str | None = None
    default_preset: str | None = None


class PresetSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The requested parameters of a preset; None: not requested. Sizes are in pixels."""

    image_factor: Positive | None = None
    max_pixels: Positive | None = None
    min_pixels: Positive | None = None
    library: ResizeLibrary | None = None
    splits: list[Split] | None = None
    max_objects: Positive | None = None
    object_order: ObjectOrder | None = None

    @property
    def parameters(self) -> dict[str, Any]:
        """The arguments of `choose_parameters`."""
        return {name: getattr(self, name) for name in PARAMETERS}


class Presets(msgspec.Struct, frozen=True, kw_only=True):
    """The whole file. `presets`: base presets by key, `<dataset>/<preset>`."""

    path: Path
    datasets: dict[str, DatasetSettings] = {}
    presets: dict[str, PresetSettings] = {}

    def keys(self) -> list[str]:
        """Return the partition keys in the order of the file, each base before the preset derived from it."""
        found = []
        for key, settings in self.presets.items():
            dataset, preset = split_key(key)
            found.append(key)
            if settings.max_objects is not None:
                found.append(f"{dataset}/{derived_name(preset, settings.max_objects)}")
        return found

    def settings(self, dataset: str, preset: str, **flags: Any) -> PresetSettings:
        """Return the parameters of a base preset from the file and from flags; flags alone if the file does not contain it.

        Args:
            dataset: name of the dataset.
            preset: name of the base preset.
            flags: fields of PresetSettings except max_objects; None if a flag was not given. `splits` may be a subset
                of the file's.

        Raises:
            WrongUsage: if a flag differs from the file; the message names both values.
        """
        key = f"{dataset}/{preset}"
        of_file = self.presets.get(key, PresetSettings())
        given = {name: value for name, value in flags.items() if value is not None}
        for name, value in given.items():
            stated = getattr(of_file, name)
            agrees = set(value) <= set(stated or value) if name == "splits" else stated in {None, value}
            if not agrees:
                flag = _FLAGS.get(name, name)
                raise self.difference(
                    key, flag, value, stated, do="leave the flag out, correct the file, or choose a new preset name"
                )
        return msgspec.structs.replace(of_file, **given)

    def difference(self, of: str, name: str, flag: object, stated: object, *, do: str) -> WrongUsage:
        """Return the error for a flag that differs from the file."""
        what = f"{of}: --{name.replace('_', '-')} gives {flag}, {self.path.name} gives {stated}"
        return WrongUsage(what, where=self.path, do=do)

    def default_preset(self, dataset: Dataset) -> str:
        """Return the base preset of a command without `--preset`.

        This is `default_preset` of the file, else the only base preset in the file or in the dataset's folder.

        Raises:
            WrongUsage: if there is no preset, or several; they are listed.
            MissingInput: if the dataset does not exist.
        """
        settings = self.datasets.get(dataset.name)
        if settings and settings.default_preset:
            return settings.default_preset
        named = {preset for name, preset in map(split_key, self.presets) if name == dataset.name}
        names = sorted(named | {name for name in dataset.presets() if _is_base(name)})
        if not names and not dataset.path.is_dir():
            raise no_dataset(dataset, f"imagemill preset convert {dataset.name} makes one")
        if len(names) == 1:
            return names[0]
        raise WrongUsage(
            f"no --preset, and {dataset.name} has {', '.join(names) if names else 'no preset yet'}",
            where=self.path,
            do=f"give --preset NAME, or set default_preset of {dataset.name} in {self.path.name}",
        )

    def place(self, path: str) -> Path:
        """Resolve a path of the file, relative to the file's folder."""
        return self.path.parent / os.path.expanduser(path)


def split_key(key: str) -> tuple[str, str]:
    """Return the dataset and preset of a partition key; raise WrongUsage if it is invalid."""
    dataset, slash, preset = key.partition("/")
    if not slash:
        raise WrongUsage(f"{key!r} is not the key of a preset", do="write <dataset>/<preset>")
    return folder_name(dataset, "dataset"), folder_name(preset, "preset", taken=("raw",))


def read_presets(path: Path) -> Presets:
    """Read and check the file; a missing file configures no preset.

    Raises:
        WrongUsage: if the file is not YAML, or has an unknown field, a bad value or a duplicate name; with the line
            number.
    """
    if not path.exists():
        return Presets(path=path)
    document = _Document(path)
    if unknown := [key for key in document.value if key not in {"datasets", "presets"}]:
        document.refuse([str(unknown[0])], "unknown field", "the file has `datasets` and `presets`")
    datasets = document.entries("datasets", DatasetSettings)
    for name, settings in datasets.items():
        with document.refusing("datasets", name):
            folder_name(name, "dataset")
        if settings.adapter is not None and settings.adapter not in adapter_names():
            known = f"choose from {', '.join(adapter_names())}"
            document.refuse(["datasets", name, "adapter"], f"no adapter {settings.adapter!r}", known)
        own = [field for field in _OWN_FILES if getattr(settings, field) is None]
        if own and own != list(_OWN_FILES):
            what = f"missing {own[0]}: the dataset's own files need {', '.join(_OWN_FILES)}"
            document.refuse(["datasets", name], what, "add it, or leave all of them out")
        if settings.split_rule is not None:
            with document.refusing("datasets", name, "split_rule"):
                parse_split_rule(settings.split_rule)
        if settings.default_preset is not None:
            with document.refusing("datasets", name, "default_preset"):
                _check_base(f"{name}/{settings.default_preset}")
    presets = document.entries("presets", PresetSettings)
    for key, settings in presets.items():
        limits = {"image_factor": IMAGE_FACTOR, "max_pixels": MAX_PIXELS, "min_pixels": MIN_PIXELS}
        with document.refusing("presets", key):
            _check_base(key)
            check_limits(**{name: getattr(settings, name) or default for name, default in limits.items()})
    return Presets(path=path, datasets=datasets, presets=presets)


def _is_base(name: str) -> bool:
    try:
        return parse_preset(name).max_objects is None
    except WrongUsage:
        return False


def _check_base(key: str) -> None:
    dataset, preset = split_key(key)
    base, limit = parse_preset(preset)
    if limit is not None:
        raise WrongUsage("the file names base presets", do=f"write {dataset}/{base} with max_objects: {limit}")


class _Document:
    """A YAML file of nested mappings, with errors that name the line."""

    def __init__(self, path: Path) -> None:
        self._document = read_yaml(path)
        self.value: Mapping[str, Any] = self._document.value or {}
        if not isinstance(self.value, dict):
            self.refuse([], "not a mapping", "the file has `datasets` and `presets`")

    def entries(self, section: str, kind: type[T]) -> dict[str, T]:
        """Return the entries of a section, decoded as `kind`."""
        entries = self.value.get(section) or {}
        if not isinstance(entries, dict) or not all(isinstance(name, str) for name in entries):
            self.refuse([section], "not a mapping of names", f"write `{section}:` and below it `name: {{…}}`")
        return {name: self._entry([section, name], entry or {}, kind) for name, entry in entries.items()}

    def _entry(self, place: list[str], entry: Any, kind: type[T]) -> T:
        try:
            return msgspec.convert(entry, kind)
        except msgspec.ValidationError as error:
            field = re.search(r"unknown field `([^`]+)`|at `\$\.(\w+)", str(error))
            name = [field[1] or field[2]] if field else []
            known = f"its fields are {', '.join(kind.__struct_fields__)}"
            self.refuse([*place, *name], str(error), known)

    @contextmanager
    def refusing(self, *place: str) -> Iterator[None]:
        """Re-raise an error of the block as an error at this place of the file."""
        try:
            yield
        except ImagemillError as error:
            self.refuse(list(place), error.what, error.do or "")

    def refuse(self, place: list[str], what: str, do: str) -> NoReturn:
        """Raise WrongUsage for this place of the file, with its line number."""
        path, named = self._document.path, ".".join(place)
        line = self._document.line(place)
        raise WrongUsage(f"{path.name} line {line}: {named + ': ' if named else ''}{what}", where=path, do=do)
