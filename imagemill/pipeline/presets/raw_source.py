"""Where a public dataset's own files are: as a run was told, else as `presets.yaml` says.

Belongs here: putting both together, and refusing where they differ.
Belongs elsewhere: the file (preset_config.py), reading what is there (adapters/).
Source: CONTRACTS section 3, last paragraph.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from imagemill.adapters.convert import SplitRule, parse_split_rule
from imagemill.adapters.source import Geometry
from imagemill.errors import WrongUsage
from imagemill.pipeline.presets.preset_config import Presets


class RawSource(NamedTuple):
    """Arguments of an adapter. `annotations`: a file per split; `split_rule`: divides the one file into train and val."""

    adapter: str
    annotations: Mapping[str, Path]
    images: Path
    geometry: Geometry
    split_rule: SplitRule | None


def raw_source(configured: Presets, dataset: str, asked: Mapping[str, Any]) -> RawSource:
    """A dataset's source.

    Args:
        asked: fields of RawSource, paths as text; None where nothing was said. `annotations` may name some splits of the file's.

    Raises:
        WrongUsage: nobody says one of them, or what was asked differs from the file.
    """
    stated = _stated(configured, dataset)
    given = _with_paths({name: value for name, value in asked.items() if value is not None})
    for name, value in given.items():
        _refuse_difference(configured, dataset, name, value, stated.get(name))
    source = {"geometry": "boxes", "split_rule": None, **stated, **given}
    if missing := [name for name in RawSource._fields if name not in source]:
        raise WrongUsage(
            f"{dataset}: nothing says its {missing[0]}",
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


def _stated(configured: Presets, dataset: str) -> dict[str, Any]:
    settings = configured.datasets.get(dataset)
    if settings is None:
        return {}
    annotations = settings.annotations and {
        split: configured.place(path) for split, path in settings.annotations.items()
    }
    stated = {
        "adapter": settings.adapter,
        "annotations": annotations,
        "images": settings.images and configured.place(settings.images),
        "geometry": settings.geometry,
        "split_rule": settings.split_rule and parse_split_rule(settings.split_rule),
    }
    return {name: value for name, value in stated.items() if value}


def _with_paths(given: dict[str, Any]) -> dict[str, Any]:
    if "annotations" in given:
        given["annotations"] = {split: Path(path) for split, path in given["annotations"].items()}
    if "images" in given:
        given["images"] = Path(given["images"])
    if "split_rule" in given:
        given["split_rule"] = parse_split_rule(given["split_rule"])
    return given


def _refuse_difference(configured: Presets, dataset: str, name: str, asked: Any, stated: Any) -> None:
    if stated is None:
        return
    same = asked.items() <= stated.items() if isinstance(stated, dict) else asked == stated
    if not same:
        raise WrongUsage(
            f"{dataset}: --{name.replace('_', '-')} says {_shown(asked)}, {configured.path.name} says {_shown(stated)}",
            where=configured.path,
            do="leave the flag out, or correct the file",
        )


def _shown(value: Any) -> str:
    return ", ".join(f"{name}: {one}" for name, one in value.items()) if isinstance(value, dict) else str(value)
