"""Public datasets: raw records by an adapter, images rescaled into presets, records in coordinates, filtered presets.

raw_dataset <dataset>  ─▶  rescale_preset <dataset>/<preset>  ─▶  derived_preset <dataset>/<preset>[_max{N}]
"""

import os
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

import dagster as dg

from assets.partitions import asset, coord_presets, datasets, presets
from imagemill.adapters.convert import Converted, convert
from imagemill.domain.preset_names import parse_preset
from imagemill.options import CoordOptions, RawOptions, RescaleOptions
from imagemill.pipeline.leases import Leased, claimed
from imagemill.pipeline.presets.preset_config import read_presets, split_key
from imagemill.pipeline.presets.preset_sheet import sheet_page, write_preset_sheet
from imagemill.pipeline.presets.raw_source import raw_source
from imagemill.pipeline.presets.rescale import RescaleFailed, RescalePlan, RescaleReport, plan_rescale, run_rescale
from imagemill.pipeline.presets.rescale_plan import choose_parameters
from imagemill.store.ledger import Ledger, Problem
from imagemill.store.public_data import PublicData
from io_managers.figures import with_units
from io_managers.hardlink import CLAIM, Coord
from io_managers.table_schemas import COLUMN_SCHEMA, PRESET_COLUMNS, ROW_COUNT, column_schema
from io_managers.viewer import page_shown
from resources.data_root import DataRootResource
from resources.engine import LocalProcesses

RAW, RESCALE = "raw_dataset", "rescale_preset"


class RawConfig(dg.Config, RawOptions):
    """Sources of a dataset's raw records; unset ones are those of presets.yaml."""


class RescaleConfig(dg.Config, RescaleOptions):
    """Parameters of a preset; unset ones are those of presets.yaml, else of the preset as it was made, else the defaults."""


class CoordConfig(dg.Config, CoordOptions):
    """Part of a preset that gets coordinates, and the order of objects."""


def public_data(data_root: DataRootResource) -> PublicData:
    """Return the public datasets of a data root."""
    return PublicData(data_root.root().public_data)


@asset(partitions_def=datasets, group_name="public_data", kinds={"json"})
def raw_dataset(
    context: dg.AssetExecutionContext, config: RawConfig, data_root: DataRootResource
) -> dg.MaterializeResult:
    """`<dataset>/raw/<split>.jsonl` and a link to the images, converted from the dataset's own annotations by an adapter."""
    place = public_data(data_root)
    dataset = place.dataset(context.partition_key)
    source = raw_source(read_presets(place.presets_yaml), dataset.name, config.given())
    counts: dict[str, int] = {}
    listings: dict[str, dg.MetadataValue] = {}
    ledger = data_root.session.ledger
    with claimed(ledger, CLAIM, [dataset.name], context.run.run_id):
        for split, annotations in source.annotations.items():
            options = {"geometry": source.geometry, "split_rule": source.split_rule}
            made = convert(dataset, source.adapter, annotations, source.images, split=split, **options)
            by_reason = sorted(made.counts.items())
            prefix = "" if source.split_rule else f"{split} "
            counts |= {f"{prefix}{name.replace('_', ' ')}": count for name, count in by_reason if count}
            if made.listing:
                listings[f"{split} left out"] = dg.MetadataValue.path(str(made.listing))
            _record_dropped(ledger, f"{dataset.name}/raw/{split}.jsonl:", made)
        ledger.record_counts(context.run.run_id, RAW, counts)
    return dg.MaterializeResult(metadata={**counts, **listings, "path": dg.MetadataValue.path(str(dataset.raw))})


def _record_dropped(ledger: Ledger, place: str, made: Converted) -> None:
    """Replace the problems of a split: one per image that is missing or has objects left out, with reasons and names."""
    by_image: dict[str, Counter[tuple[str, str]]] = defaultdict(Counter)
    for one in made.dropped:
        by_image[one.image or "unknown image"][one.reason, one.name] += 1
    problems = (
        Problem(f"{place}{image}", RAW, "refused", next(iter(dropped))[0],
                ", ".join(f"{reason}: {count} x {name!r}" if name else f"{reason}: {count}"
                          for (reason, name), count in dropped.items()),
                "add the image or correct the annotation, then convert again; or leave the record out")
        for image, dropped in by_image.items()
    )  # fmt: skip
    ledger.replace_problems(RAW, problems, lambda problem: problem.item.startswith(place))


@asset(
    deps=[dg.AssetDep(raw_dataset, partition_mapping=dg.AllPartitionMapping())],
    partitions_def=presets,
    group_name="public_data",
    kinds={"file"},
    look=page_shown("records with their boxes", "presets"),
)
def rescale_preset(
    context: dg.AssetExecutionContext, config: RescaleConfig, data_root: DataRootResource, processes: LocalProcesses
) -> dg.MaterializeResult:
    """`<dataset>/<preset>/`: raw images at their target size, and records in its pixels. Existing images are never replaced."""
    place, key = public_data(data_root), context.partition_key
    name, preset = split_key(key)
    dataset = place.dataset(name)
    flags = config.given()
    workers = flags.pop("workers", None) or data_root.session.config.rescale_workers or os.cpu_count() or 1
    settings = read_presets(place.presets_yaml).settings(name, preset, **flags)
    ledger = data_root.session.ledger
    with claimed(ledger, CLAIM, [key], context.run.run_id):
        parameters = choose_parameters(dataset.preset(preset), **settings.parameters)
        plan = plan_rescale(dataset, preset, parameters, settings.splits)
        report = _rescale(plan, processes.with_workers(workers), ledger, key)
        ledger.record_counts(context.run.run_id, RESCALE, dict(report.counts))
    return dg.MaterializeResult(metadata=_metadata(plan, report))


def _rescale(plan: RescalePlan, engine: LocalProcesses, ledger: Ledger, key: str) -> RescaleReport:
    """Run the plan. Lines and images missing from the preset are recorded in the ledger, even if the run fails."""
    try:
        report = run_rescale(plan, engine.map_batches)
    except RescaleFailed as failed:
        _record(ledger, key, plan, failed.report)
        raise
    _record(ledger, key, plan, report)
    return report


def _record(ledger: Ledger, key: str, plan: RescalePlan, report: RescaleReport) -> None:
    """Replace the problems of the run's splits."""
    checked = tuple(f"{key}/{split.split}.jsonl:" for split in plan.splits)
    problems = (
        Problem(f"{key}/{p.split}.jsonl:{p.line}", RESCALE, p.outcome, p.reason, p.message, p.remedy)
        for p in report.problems.listed
    )
    ledger.replace_problems(RESCALE, problems, lambda problem: problem.item.startswith(checked))


def _metadata(plan: RescalePlan, report: RescaleReport) -> Mapping[str, Any]:
    splits = {
        f"{split} {name}": value
        for split, of in report.splits.items()
        for name, value in of.items()
        if isinstance(value, int)
    }
    path = dg.MetadataValue.path(str(plan.preset.path))
    sheet = write_preset_sheet(plan.dataset, plan.preset, plan.preset.splits()[0])
    pages = {"boxes": dg.MetadataValue.md(sheet_page(sheet))}
    counts = {**with_units(report.counts, "images"), **splits, "turned by viewers (images)": report.turned}
    rows = sum(of["records"] for of in report.splits.values())
    table = {ROW_COUNT: rows, COLUMN_SCHEMA: column_schema(PRESET_COLUMNS)}
    return {**counts, "path": path, **table, **pages}


@asset(
    deps=[dg.AssetDep(rescale_preset, partition_mapping=dg.AllPartitionMapping())],
    partitions_def=coord_presets,
    io_manager_key="hardlink_io",
    group_name="public_data",
    kinds={"json"},
    look=page_shown("records with their boxes", "presets"),
)
def derived_preset(context: dg.AssetExecutionContext, config: CoordConfig, data_root: DataRootResource) -> Leased:
    """Norm and coord records of a preset. `<preset>_max{N}` is a separate preset that shares every image by hardlink."""
    dataset, preset = split_key(context.partition_key)
    name = parse_preset(preset)
    keys = sorted({context.partition_key, f"{dataset}/{name.base}"})

    def plan() -> Coord:
        configured = read_presets(public_data(data_root).presets_yaml)
        given = config.given()
        order = configured.settings(dataset, name.base, object_order=given.get("object_order")).object_order
        return Coord(public_data(data_root).dataset(dataset), name, given.get("splits"), order)

    return Leased(data_root.session.ledger, CLAIM, keys, context.run.run_id, plan)
