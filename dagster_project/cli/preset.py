"""`imagemill preset {convert|rescale|coord|all|validate} DATASET`: convert public datasets into presets, by the preset assets."""

import os
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import click

from dagster_project.cli.exit_codes import leave_if_ended
from dagster_project.cli.options import options, root_options
from dagster_project.cli.validate import as_lines, image_check_mode, image_check_n, show
from imagemill.adapters.convert import check_rule, find_adapter, listing_of
from imagemill.domain.layout import local_path
from imagemill.domain.preset_names import MAX_OBJECTS_VARIABLE, Command, PresetName, effective_preset, parse_preset
from imagemill.errors import WrongUsage
from imagemill.formats.jsonl import read_jsonl
from imagemill.options import CoordOptions, RawOptions, RescaleOptions
from imagemill.pipeline.presets import derive
from imagemill.pipeline.presets.object_order import check_order
from imagemill.pipeline.presets.preset_config import Presets, read_presets
from imagemill.pipeline.presets.raw_source import raw_source
from imagemill.pipeline.presets.rescale_plan import choose_parameters, chosen_splits
from imagemill.pipeline.session import Session
from imagemill.store.public_data import SPLITS, Dataset, PublicData
from imagemill.validation.validator import Options, validate_preset
from imagemill.validation.validator import validate as validate_file

# Number of omissions of a conversion that are printed.
SHOWN = 5


@click.group("preset", context_settings={"token_normalize_func": lambda name: name.replace("_", "-")})
def command() -> None:
    """Public datasets: adapt, rescale, add coordinates, derive filtered presets by hardlink, validate."""


def dataset_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the arguments of every subcommand; the function gets `session` and `dataset`."""

    @click.argument("dataset")
    @click.option(
        "--public-data-root", metavar="DIR", help="Folder of public datasets (default: public_data/ in the data root)."
    )
    @root_options
    @wraps(function)
    def with_dataset(session: Session, dataset: str, public_data_root: str | None, **given: Any) -> Any:
        place = PublicData.at(public_data_root) if public_data_root else PublicData(session.root.public_data)
        return function(session=session, dataset=place.dataset(dataset), **given)

    return with_dataset


_preset = click.option(
    "--preset", help="The preset's name (default: default_preset of presets.yaml, else the dataset's only one)."
)


def _known_adapter(context: click.Context, option: click.Parameter, given: str | None) -> str | None:
    if given:
        find_adapter(given)
    return given


_max_objects = click.option(
    "--max-objects", help=f"Drop records with more objects (also: {MAX_OBJECTS_VARIABLE}); coord alone takes it."
)


@command.command("convert")
@options(RawOptions, adapter={"type": str, "callback": _known_adapter})
@click.option("--annotations", metavar="FILE", help="The dataset's own file (default: presets.yaml).")
@click.option("--split", type=click.Choice(SPLITS), help="What the file is (default: train, or those of presets.yaml).")
@click.option("--preset", hidden=True, help="The runner names one with every step; raw records are of no preset.")
@dataset_options
def convert(
    session: Session,
    dataset: Dataset,
    preset: str | None,
    options: RawOptions,
    annotations: str | None,
    split: str | None,
) -> None:
    """Convert a dataset's own annotations into raw/<split>.jsonl, with a link to its images.

    What is left out is listed in raw/<split>.dropped.jsonl.
    """
    config = options.given()
    if annotations:
        config["annotations"] = {split or SPLITS[0]: str(local_path(annotations, "--annotations"))}
    if options.images:
        config["images"] = str(local_path(options.images, "--images"))
    if split and not annotations:
        raise WrongUsage("--split without --annotations", do="name the split's file, or leave both to presets.yaml")
    source = raw_source(_configured(dataset), dataset.name, config)
    if split and source.split_rule:
        why = f"the rule {source.split_rule} divides the file into train and val"
        raise WrongUsage("--split with a split rule", why=why, do="leave --split out, or the rule")
    check_rule(dataset, source.split_rule)
    _materialise(session, dataset, [("raw_dataset", dataset.name, config)])
    for converted in SPLITS[:1] if source.split_rule else source.annotations:
        _show_dropped(listing_of(dataset, converted))


@command.command("rescale")
@_preset
@options(RescaleOptions)
@_max_objects
@dataset_options
def rescale(
    session: Session, dataset: Dataset, preset: str | None, max_objects: str | None, options: RescaleOptions
) -> None:
    """Rescale every image to its target size, once: existing images are never replaced."""
    name = _name("rescale", dataset, preset, max_objects)
    _materialise(session, dataset, [_rescaling(dataset, name.base, options)])


@command.command("coord")
@_preset
@options(CoordOptions)
@click.option("--workers", type=click.IntRange(min=1), help="Accepted; one process reads records, as two took longer.")
@_max_objects
@dataset_options
def coord(
    session: Session,
    dataset: Dataset,
    preset: str | None,
    max_objects: str | None,
    options: CoordOptions,
    workers: int | None,
) -> None:
    """Write norm and coord records; with a limit on objects, a derived preset that shares every image by hardlink.

    A base preset that presets.yaml limits gets its own records, and its derived preset.
    """
    name = _name("coord", dataset, preset, max_objects)
    base = dataset.preset(name.base)
    given = options.given()
    order = _configured(dataset).settings(dataset.name, name.base, object_order=given.get("object_order")).object_order
    check_order(base, derive.base_manifest(base), order)
    derive.chosen_splits(base, given.get("splits"))
    limited_by_file = preset in (None, name.base) and not max_objects and not os.environ.get(MAX_OBJECTS_VARIABLE)
    names = dict.fromkeys([name._replace(max_objects=None), name] if limited_by_file else [name])
    _materialise(session, dataset, [_coordinates(dataset, each, given) for each in names])


@command.command("all")
@_preset
@options(RescaleOptions)
@_max_objects
@dataset_options
def everything(
    session: Session, dataset: Dataset, preset: str | None, max_objects: str | None, options: RescaleOptions
) -> None:
    """Rescale, then coord; if presets.yaml limits the objects, also the derived preset."""
    base = _name("all", dataset, preset, max_objects)
    names = dict.fromkeys([base, base._replace(max_objects=_limit(dataset, base.base))])
    splits = {"splits": options.given().get("splits")}
    coords = [_coordinates(dataset, name, splits) for name in names]
    _materialise(session, dataset, [_rescaling(dataset, base.base, options), *coords])


@command.command("validate")
@_preset
@_max_objects
@image_check_mode
@image_check_n
@click.option("--skip-image-check", is_flag=True, help="The same as --image-check-mode none.")
@click.option("--raw-only", is_flag=True, help="Raw records alone, of no preset.")
@click.option("--preset-only", is_flag=True, help="The preset alone, which is the default.")
@as_lines
@dataset_options
def validate(
    session: Session,
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
    """Check every file of a preset, and its images/, by every rule. Writes nothing."""
    if raw_only and preset_only:
        raise WrongUsage("--raw-only with --preset-only", do="leave one out")
    options = Options(image_mode="none" if skip_image_check else image_check_mode, image_first=image_check_n)
    if raw_only:
        splits = chosen_splits(dataset, None)
        reports = (validate_file(dataset.raw_jsonl(split), kind="preset", options=options) for split in splits)
    else:
        name = _name("validate", dataset, preset, max_objects)
        folder = dataset.preset(name.effective)
        derive.check_preset_exists(folder)
        reports = validate_preset(folder.path, options)
    sys.exit(show(reports, as_lines=as_lines))


# ---- the options as runs of the assets

Step = tuple[str, str, dict[str, Any]]


def _configured(dataset: Dataset) -> Presets:
    return read_presets(PublicData(dataset.path.parent).presets_yaml)


def _limit(dataset: Dataset, preset: str) -> int | None:
    """Return max_objects of presets.yaml, which names base presets."""
    settings = _configured(dataset).presets.get(f"{dataset.name}/{parse_preset(preset).base}")
    return settings.max_objects if settings else None


def _name(command: Command, dataset: Dataset, preset: str | None, flag: str | None) -> PresetName:
    """Return the requested preset name. Contradictory options are refused before any work."""
    preset = preset or _configured(dataset).default_preset(dataset)
    dataset.preset(preset)
    environment = os.environ.get(MAX_OBJECTS_VARIABLE)
    return effective_preset(command, preset, flag=flag, config=_limit(dataset, preset), environment=environment)


def _rescaling(dataset: Dataset, preset: str, options: RescaleOptions) -> Step:
    """Return the rescaling step. Errors are checked here too, so that they leave neither a partition nor a run."""
    given = options.given()
    flags = {name: value for name, value in given.items() if name != "workers"}
    settings = _configured(dataset).settings(dataset.name, preset, **flags)
    choose_parameters(dataset.preset(preset), **settings.parameters)
    chosen_splits(dataset, settings.splits)
    return "rescale_preset", f"{dataset.name}/{preset}", given


def _coordinates(dataset: Dataset, name: PresetName, given: dict[str, Any]) -> Step:
    return "derived_preset", f"{dataset.name}/{name.effective}", given


def _show_dropped(listing: Path) -> None:
    """Print the first omissions of a conversion, and the file that lists all of them."""
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


def _materialise(session: Session, dataset: Dataset, steps: Sequence[Step]) -> None:
    from dagster_project.work import open_command

    with open_command(session, may_begin=True) as work:
        if dataset.path.parent != session.root.public_data:
            session.put("public_data", dataset.path.parent)
        for asset, key, config in steps:
            work.make_preset(asset, key, **config)
            leave_if_ended(work)
            counts = session.reading.counts(work.run_ids[-1:]).get(asset, {})
            text = " ".join(f"{name.replace(' ', '_')}={count}" for name, count in counts.items())
            click.echo(f"{key}: {text}")
