"""Locations of a public dataset's own files: from the request of a run, else from `presets.yaml`.

The file is read in preset_config.py; the dataset's files are read in adapters/.

Spec: docs/spec/presets.md#presets-file
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from imagemill.adapters.convert import SplitRule, parse_split_rule
from imagemill.adapters.source import Geometry
from imagemill.errors import WrongUsage
from imagemill.pipeline.presets.preset_config import Presets


class RawSource(NamedTuple):
    """Arguments of an adapter.

    `annotations`: one file per split. `split_rule`: divides a single annotation file into train and val.
    """

    adapter: str
    annotations: Mapping[str, Path]
    images: Path
    geometry: Geometry
    split_rule: SplitRule | None


def raw_source(configured: Presets, dataset: str, requested: Mapping[str, Any]) -> RawSource:
    """Return a dataset's source.

    Args:
        configured: `presets.yaml`.
        dataset: name of the dataset.
        requested: requested fields of RawSource, paths as text; None if not given. `annotations` may contain a subset of
            the file's splits.

    Raises:
        WrongUsage: if a required field is given by neither, or a requested value differs from the file.
    """
    settings = configured.datasets.get(dataset)
    stated = _typed({name: getattr(settings, name) for name in RawSource._fields} if settings else {}, configured.place)
    given = _typed(requested, Path)
    for name, value in given.items():
        in_file = stated.get(name, value)
        same = value.items() <= in_file.items() if isinstance(value, dict) else value == in_file
        if not same:
            texts = _shown(value), _shown(in_file)
            raise configured.difference(dataset, name, *texts, do="leave the flag out, or correct the file")
    source = {"geometry": "boxes", "split_rule": None, **stated, **given}
    if missing := [name for name in RawSource._fields if name not in source]:
        raise WrongUsage(
            f"{dataset}: no {missing[0]} given",
            where=configured.path,
            do=f"give --{missing[0].replace('_', '-')}, or name the dataset in {configured.path.name}",
        )
    if source["split_rule"] and len(source["annotations"]) > 1:
        raise WrongUsage(
            f"{dataset}: a split rule, and {len(source['annotations'])} files of annotations",
            where=configured.path,
            why="the rule divides one file into train and val",
            do="name one file, or leave the rule out",
        )
    return RawSource(**source)


def _typed(values: Mapping[str, Any], place: Callable[[str], Path]) -> dict[str, Any]:
    """Return the values that are set, with the types of RawSource. `place` converts text to a path."""
    found = {name: value for name, value in values.items() if value}
    if "annotations" in found:
        found["annotations"] = {split: place(path) for split, path in found["annotations"].items()}
    if "images" in found:
        found["images"] = place(found["images"])
    if "split_rule" in found:
        found["split_rule"] = parse_split_rule(found["split_rule"])
    return found


def _shown(value: Any) -> str:
    return ", ".join(f"{name}: {one}" for name, one in value.items()) if isinstance(value, dict) else str(value)
