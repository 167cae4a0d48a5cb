"""`imagemill preset {convert|rescale|coord|all|validate} DATASET`: public datasets into presets, over the preset assets."""

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from dagster_project.cli.ended import leave_if_ended
from dagster_project.cli.options import root_options
from imagemill.adapters.convert import check_rule, find_adapter, listing_of
from imagemill.domain.layout import DataRoot, local_path
from imagemill.domain.preset_names import MAX_OBJECTS_VARIABLE, Command, PresetName, effective_preset, parse_preset
from imagemill.domain.preset_records import ORDERS, ObjectOrder
from imagemill.errors import WrongUsage
from imagemill.formats.jsonl import read_jsonl
from imagemill.pipeline.presets import derive
from imagemill.pipeline.presets.object_order import check_order
from imagemill.pipeline.presets.preset_config import Presets, read_presets
from imagemill.pipeline.presets.raw_source import raw_source
from imagemill.pipeline.presets.rescale_plan import choose_parameters, chosen_splits
from imagemill.store.ledger import Ledger
from imagemill.store.locations import put
from imagemill.store.public_data import SPLITS, Dataset, PublicData

# Lines of what a conversion left out, on the terminal.
SHOWN = 5


@click.group("preset", context_settings={"token_normalize_func": lambda name: name.replace("_", "-")})
def command() -> None:
    """Public datasets: adapt, rescale, add coordinates, derive filtered presets by hardlink, validate."""


def dataset_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """What every subcommand takes; the function gets `root` and `dataset`."""

    @click.argument("dataset")
    @click.option(
        "--public-data-root", metavar="DIR", help="Folder of public datasets (default: public_data/ in the data root)."
    )
    @root_options
    def with_dataset(root: DataRoot, dataset: str, public_data_root: str | None, **given: Any) -> Any:
        place = PublicData.at(public_data_root) if public_data_root else PublicData(root.public_data)
        return function(root=root, dataset=place.dataset(dataset), **given)

    with_dataset.__name__, with_dataset.__doc__ = function.__name__, function.__doc__
    with_dataset.__click_params__ = [  # type: ignore[attr-defined]
        *with_dataset.__click_params__,  # type: ignore[attr-defined]
        *getattr(function, "__click_params__", []),
    ]
    return with_dataset


_preset = click.option(
    "--preset", help="The preset's name (default: default_preset of presets.yaml, else the dataset's only one)."
)


def _known_order(context: click.Context, option: click.Parameter, given: str | None) -> str | None:
    """Check the value here, as click.Choice would show `top-left`."""
    if given not in (None, *ORDERS):
        raise click.BadParameter(f"{given!r} is not one of {', '.join(ORDERS)}")
    return given


_object_order = click.option(
    "--object-order",
    metavar="|".join(ORDERS),
    callback=_known_order,
    help="Order of a record's objects: as annotated, or by (min y, min x) (default: presets.yaml, else annotation).",
)
_splits = click.option("--split", "splits", multiple=True, type=click.Choice(SPLITS), help="May repeat (default: all).")
_workers = click.option(
    "--workers", type=click.IntRange(min=1), help="Processes (default: imagemill.yaml's, else all processors)."
)
_max_objects = click.option(
    "--max-objects", help=f"Drop records with more objects (also: {MAX_OBJECTS_VARIABLE}); coord alone takes it."
)


def _parameters(function: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        _object_order,
        click.option(
            "--library", type=click.Choice(["torch", "pillow"]), help="What resizes; a preset never mixes two."
        ),
        click.option("--min-pixels", type=click.IntRange(min=1), help="Smallest width times height (4096)."),
        click.option("--max-pixels", type=click.IntRange(min=1), help="Largest width times height (786432)."),
        click.option("--image-factor", type=click.IntRange(min=1), help="Both sides are multiples of this (32)."),
    ):
        function = option(function)
    return function


@command.command("convert")
@click.option("--adapter", help="coco, lvis or visual_genome (default: presets.yaml).")
@click.option("--annotations", type=click.Path(path_type=Path), help="The dataset's own file (default: presets.yaml).")
@click.option("--images", type=click.Path(path_type=Path), help="Folder of its images (default: presets.yaml).")
@click.option("--split", type=click.Choice(SPLITS), help="What the file is (default: train, or those of presets.yaml).")
@click.option(
    "--geometry", type=click.Choice(["boxes", "polygons"]), help="What an instance with both becomes (boxes)."
)
@click.option("--split-rule", metavar="RULE", help="Divide one file: with 'id % 20 == 0', these image ids are val.")
@click.option("--preset", hidden=True, help="The runner names one with every step; raw records are of no preset.")
@dataset_options
def convert(
    root: DataRoot,
    dataset: Dataset,
    preset: str | None,
    adapter: str | None,
    annotations: Path | None,
    images: Path | None,
    split: str | None,
    geometry: str | None,
    split_rule: str | None,
) -> None:
    """A dataset's own annotations into raw/<split>.jsonl, its images as a link.

    What is left out is listed in raw/<split>.dropped.jsonl.
    """
    config = {
        "adapter": adapter,
        "annotations": {split or SPLITS[0]: str(local_path(annotations, "--annotations"))} if annotations else None,
        "images": str(local_path(images, "--images")) if images else None,
        "geometry": geometry,
        "split_rule": split_rule,
    }
    if split and not annotations:
        raise WrongUsage("--split without --annotations", do="name the split's file, or leave both to presets.yaml")
    source = raw_source(_configured(dataset), dataset.name, config)
    if split and source.split_rule:
        why = f"the rule {source.split_rule} divides the file into train and val"
        raise WrongUsage("--split with a split rule", why=why, do="leave --split out, or the rule")
    find_adapter(source.adapter)
    check_rule(dataset, source.split_rule)
    _materialise(root, dataset, [("raw_dataset", dataset.name, config)])
    for made in SPLITS[:1] if source.split_rule else source.annotations:
        _show_dropped(listing_of(dataset, made))


@command.command("rescale")
@_preset
@_parameters
@_splits
@_workers
@_max_objects
@dataset_options
def rescale(root: DataRoot, dataset: Dataset, preset: str | None, max_objects: str | None, **given: Any) -> None:
    """Every image at its target size, once: an image that is there is never replaced."""
    preset = preset or _configured(dataset).default_preset(dataset)
    _name("rescale", dataset, preset, max_objects)
    _materialise(root, dataset, [_rescaling(dataset, preset, **given)])


@command.command("coord")
@_preset
@_object_order
@_splits
@click.option("--workers", type=click.IntRange(min=1), help="Accepted; one process reads records, as two took longer.")
@_max_objects
@dataset_options
def coord(
    root: DataRoot,
    dataset: Dataset,
    preset: str | None,
    max_objects: str | None,
    splits: tuple[str, ...],
    object_order: ObjectOrder | None,
    workers: int | None,
) -> None:
    """Norm and coord records; with a limit on objects, a derived preset that shares every image by hardlink.

    A base preset that presets.yaml limits gets its own records, and its derived preset.
    """
    preset = preset or _configured(dataset).default_preset(dataset)
    name = _name("coord", dataset, preset, max_objects)
    base = dataset.preset(name.base)
    order = _configured(dataset).settings(dataset.name, name.base, object_order=object_order).object_order
    check_order(base, derive.base_manifest(base), order)
    derive.chosen_splits(base, splits or None)
    limited_by_file = preset == name.base and not max_objects and not os.environ.get(MAX_OBJECTS_VARIABLE)
    names = dict.fromkeys([name._replace(max_objects=None), name] if limited_by_file else [name])
    _materialise(root, dataset, [_coordinates(dataset, each, splits, object_order) for each in names])


@command.command("all")
@_preset
@_parameters
@_splits
@_workers
@_max_objects
@dataset_options
def everything(root: DataRoot, dataset: Dataset, preset: str | None, max_objects: str | None, **given: Any) -> None:
    """Rescale, then coord; where presets.yaml limits the objects, also the derived preset."""
    preset = preset or _configured(dataset).default_preset(dataset)
    base = _name("all", dataset, preset, max_objects)
    names = dict.fromkeys([base, base._replace(max_objects=_limit(dataset, preset))])
    steps = [_rescaling(dataset, preset, **given), *(_coordinates(dataset, name, given["splits"]) for name in names)]
    _materialise(root, dataset, steps)


@command.command("validate")
@_preset
@_max_objects
@click.option("--image-check-mode", type=click.Choice(["none", "exists", "open"]), default="open", show_default=True)
@click.option(
    "--image-check-n", type=int, default=64, show_default=True, help="Images of the first N valid records; 0: all."
)
@click.option("--skip-image-check", is_flag=True, help="The same as --image-check-mode none.")
@click.option("--raw-only", is_flag=True, help="Raw records alone, of no preset.")
@click.option("--preset-only", is_flag=True, help="The preset alone, which is the default.")
@click.option("--json", "as_lines", is_flag=True, help="One JSON report per line, for programs.")
@dataset_options
def validate(
    root: DataRoot,
    dataset: Dataset,
    preset: str | None,
    max_objects: str | None,
    image_check_mode: Any,
    image_check_n: int,
    skip_image_check: bool,
    raw_only: bool,
    preset_only: bool,
    as_lines: bool,
) -> None:
    """Every file of a preset, and its images/, by every rule. Reads only."""
    from dagster_project.cli.validate import show
    from imagemill.validation.validator import Options, validate_preset
    from imagemill.validation.validator import validate as validate_file

    if raw_only and preset_only:
        raise WrongUsage("--raw-only with --preset-only", do="leave one out")
    options = Options(image_mode="none" if skip_image_check else image_check_mode, image_first=image_check_n)
    if raw_only:
        splits = chosen_splits(dataset, None)
        reports = (validate_file(dataset.raw_jsonl(split), kind="preset", options=options) for split in splits)
    else:
        name = _name("validate", dataset, preset or _configured(dataset).default_preset(dataset), max_objects)
        folder = dataset.preset(name.effective)
        derive.check_preset_exists(folder)
        reports = iter(validate_preset(folder.path, options))
    passed = True
    for report in reports:
        passed &= report.passed
        show(report, as_lines=as_lines)
    sys.exit(0 if passed else 1)


# ---- what is asked, as runs of the assets

Step = tuple[str, str, dict[str, Any]]


def _configured(dataset: Dataset) -> Presets:
    return read_presets(PublicData(dataset.path.parent).presets_yaml)


def _limit(dataset: Dataset, preset: str) -> int | None:
    """max_objects of presets.yaml, which names base presets."""
    settings = _configured(dataset).presets.get(f"{dataset.name}/{parse_preset(preset).base}")
    return settings.max_objects if settings else None


def _name(command: Command, dataset: Dataset, preset: str, flag: str | None) -> PresetName:
    """Which preset is meant; whatever contradicts itself is refused before any work."""
    dataset.preset(preset)
    environment = os.environ.get(MAX_OBJECTS_VARIABLE)
    return effective_preset(command, preset, flag=flag, config=_limit(dataset, preset), environment=environment)


def _rescaling(dataset: Dataset, preset: str, splits: Sequence[str], **given: Any) -> Step:
    """Asked here too, so that a mistake is told at once and leaves neither a partition nor a run."""
    flags = {name: value for name, value in given.items() if name != "workers"}
    settings = _configured(dataset).settings(dataset.name, preset, **flags, splits=list(splits) or None)
    choose_parameters(dataset.preset(preset), **settings.parameters)
    chosen_splits(dataset, settings.splits)
    return "rescale_preset", f"{dataset.name}/{preset}", {**given, "splits": list(splits) or None}


def _coordinates(dataset: Dataset, name: PresetName, splits: Sequence[str], order: ObjectOrder | None = None) -> Step:
    return "derived_preset", f"{dataset.name}/{name.effective}", {"splits": list(splits) or None, "object_order": order}


def _show_dropped(listing: Path) -> None:
    """Print the first of what a conversion left out, and the file that lists all of it."""
    if not listing.is_file():
        return
    count = 0
    for count, line in enumerate(read_jsonl(listing), start=1):
        if count <= SHOWN and line.value:
            one = line.value
            about = ": ".join(text for text in (one["image"], one["reason"], one["name"], one["detail"]) if text)
            click.echo(f"dropped: {about}", err=True)
    more = f"and {count - SHOWN} more; " if count > SHOWN else ""
    click.echo(f"dropped: {more}all are listed in {listing}", err=True)


def _materialise(root: DataRoot, dataset: Dataset, steps: Sequence[Step]) -> None:
    from dagster_project.work import open_work

    with open_work(root, may_begin=True) as work:
        if dataset.path.parent != root.public_data:
            put(root, "public_data", dataset.path.parent)
        for asset, key, config in steps:
            work.make_preset(asset, key, **config)
            leave_if_ended(work)
            with Ledger(root.ledger, read_only=True) as ledger:
                counts = ledger.counts(work.run_ids[-1:]).get(asset, {})
            told = " ".join(f"{name.replace(' ', '_')}={count}" for name, count in counts.items())
            click.echo(f"{key}: {told}")
