"""`presets.yaml`: which datasets and presets there are. Each preset named here is a partition of the preset assets.

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

What a preset leaves out is as it was made, else the default. `max_objects` yields a derived preset beside the base.

Belongs here: the file as a value, its errors by line, agreement of flags with it.
Belongs elsewhere: agreement with what was recorded (rescale_plan.py), sources of max_objects (preset_names.py).
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
from imagemill.domain.preset_records import ObjectOrder
from imagemill.errors import ImagemillError, WrongUsage
from imagemill.store.public_data import Dataset, folder_name, no_dataset
from imagemill.text.safe_yaml import read_yaml

Positive = Annotated[int, msgspec.Meta(ge=1)]
Split = Literal["train", "val"]
T = TypeVar("T", bound=msgspec.Struct)

# Fields of a preset that a rescale takes and records.
PARAMETERS = ("image_factor", "max_pixels", "min_pixels", "library", "object_order")

# Fields of a dataset that an adapter needs.
_OWN_FILES = ("adapter", "annotations", "images")

# Fields that the command line spells otherwise.
_FLAGS = {"splits": "split"}


class DatasetSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A dataset's own files, and its default preset; what is left out comes from flags.

    Attributes:
        annotations: a file per split. geometry: what an instance with both becomes.
        split_rule: divides the one file of annotations into train and val.
        default_preset: the base preset of commands without `--preset`.
    """

    adapter: str | None = None
    annotations: dict[Split, str] | None = None
    images: str | None = None
    geometry: Geometry = "boxes"
    split_rule: str | None = None
    default_preset: str | None = None


class PresetSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is asked of a preset; None: nothing is. Sizes in pixels."""

    image_factor: Positive | None = None
    max_pixels: Positive | None = None
    min_pixels: Positive | None = None
    library: Literal["torch", "pillow"] | None = None
    splits: list[Split] | None = None
    max_objects: Positive | None = None
    object_order: ObjectOrder | None = None

    @property
    def parameters(self) -> dict[str, Any]:
        """What `choose_parameters` takes."""
        return {name: getattr(self, name) for name in PARAMETERS}


class Presets(msgspec.Struct, frozen=True, kw_only=True):
    """The whole file. `presets` by key, `<dataset>/<preset>`, of base presets."""

    path: Path
    datasets: dict[str, DatasetSettings] = {}
    presets: dict[str, PresetSettings] = {}

    def keys(self) -> list[str]:
        """Partition keys in the order of the file, each base before what is derived from it."""
        found = []
        for key, settings in self.presets.items():
            dataset, preset = split_key(key)
            found.append(key)
            if settings.max_objects is not None:
                found.append(f"{dataset}/{derived_name(preset, settings.max_objects)}")
        return found

    def settings(self, dataset: str, preset: str, **flags: Any) -> PresetSettings:
        """What is asked of a base preset by the file and by flags; one the file does not name takes flags alone.

        Args:
            flags: fields of PresetSettings but max_objects, None where a flag was not given. `splits` may be some of the file's.

        Raises:
            WrongUsage: a flag differs from the file; both are named.
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
        what = f"{of}: --{name.replace('_', '-')} says {flag}, {self.path.name} says {stated}"
        return WrongUsage(what, where=self.path, do=do)

    def default_preset(self, dataset: Dataset) -> str:
        """Return the base preset that a command without a preset's name means.

        That is `default_preset` of the file, else the only base preset that the file or the dataset's folder has.

        Raises:
            WrongUsage: no preset, or several, which are listed. MissingInput: no such dataset.
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
        """A path of the file: relative to its folder."""
        return self.path.parent / os.path.expanduser(path)


def split_key(key: str) -> tuple[str, str]:
    """Dataset and preset of a partition's key. Raises WrongUsage where it is none."""
    dataset, slash, preset = key.partition("/")
    if not slash:
        raise WrongUsage(f"{key!r} names no preset", do="write <dataset>/<preset>")
    return folder_name(dataset, "dataset"), folder_name(preset, "preset", taken=("raw",))


def read_presets(path: Path) -> Presets:
    """Read and check the file; where there is none, no preset is configured.

    Raises:
        WrongUsage: not YAML, an unknown field, a bad value, a name twice; with the line.
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
        """Each entry of a section as a value."""
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
        """Raise an error of the block as a mistake at this place of the file."""
        try:
            yield
        except ImagemillError as error:
            self.refuse(list(place), error.what, error.do or "")

    def refuse(self, place: list[str], what: str, do: str) -> NoReturn:
        path, named = self._document.path, ".".join(place)
        line = self._document.line(place)
        raise WrongUsage(f"{path.name} line {line}: {named + ': ' if named else ''}{what}", where=path, do=do)
