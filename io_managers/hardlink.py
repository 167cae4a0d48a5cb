"""IO manager of presets by hardlink. Links and records are made in imagemill/pipeline/presets/derive.py."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import dagster as dg

from imagemill.domain.preset_names import PresetName
from imagemill.domain.preset_records import ObjectOrder
from imagemill.formats.jsonl import read_raw
from imagemill.pipeline.leases import Leased
from imagemill.pipeline.presets.derive import CoordResult, coord
from imagemill.pipeline.presets.preset_config import split_key
from imagemill.pipeline.presets.preset_sheet import sheet_page, write_preset_sheet
from imagemill.progress import Progress
from imagemill.store.public_data import Dataset, PresetDir, PublicData
from io_managers.figures import with_units
from io_managers.table_schemas import COLUMN_SCHEMA, PRESET_COLUMNS, ROW_COUNT, column_schema
from resources.data_root import DataRootResource
from resources.keys import asset_name

# One claim name for all work on a preset, because rescale and coord both write a base preset's manifest.
CLAIM = "presets"


@dataclass(frozen=True, slots=True)
class Coord:
    """A request for a preset's records in coordinates.

    Attributes:
        dataset: dataset of the preset.
        name: name of the preset.
        splits: splits to process; None for all that the base has published.
        order: requested order of objects; None for the recorded one.
    """

    dataset: Dataset
    name: PresetName
    splits: Sequence[str] | None = None
    order: ObjectOrder | None = None


class HardlinkIOManager(dg.ConfigurableIOManager):
    """Writes a preset's records in coordinates, and for a derived preset also the hardlinks to the base's images."""

    data_root: dg.ResourceDependency[DataRootResource]

    def handle_output(self, context: dg.OutputContext, obj: Leased) -> None:
        """Run the request, and record its counts."""
        with obj.claimed() as request:
            result = _run_coord(request)
            obj.ledger.record_counts(context.run_id, asset_name(context.asset_key), counts_of(result))
        context.add_output_metadata(_metadata(request, result))

    def load_input(self, context: dg.InputContext) -> PresetDir:
        """Return the preset's folder."""
        dataset, preset = split_key(context.asset_partition_key)
        return PublicData(self.data_root.root().public_data).dataset(dataset).preset(preset)


def _run_coord(request: Coord) -> CoordResult:
    base = request.dataset.preset(request.name.base)
    splits = [split for split in base.splits() if request.splits is None or split in request.splits]
    records = sum(1 for split in splits for _ in read_raw(base.jsonl(split)))
    with Progress(f"coord {request.dataset.name}/{request.name.effective}", records, unit="record") as progress:
        return coord(
            request.dataset, request.name, splits=request.splits, order=request.order, advance=progress.advance
        )


def counts_of(result: CoordResult) -> dict[str, int]:
    """Return the counters over all splits."""
    splits = result.counts.values()
    return {
        "records": sum(counts.kept for counts in splits),
        "dropped": sum(counts.dropped for counts in splits),
        "linked": result.linked,
        "present": result.present,
        "files_written": len(result.changed),
    }


def _metadata(request: Coord, result: CoordResult) -> dict[str, Any]:
    splits = {
        f"{split} {name}": value
        for split, counts in result.counts.items()
        for name, value in {
            "records": counts.kept,
            "dropped (records)": counts.dropped,
            "largest (objects)": counts.largest,
        }.items()
    }
    pages = {}
    if request.name.max_objects is not None:  # a base preset has its sheet from rescale
        sheet = write_preset_sheet(request.dataset, result.preset, result.preset.splits()[0])
        pages = {"boxes": dg.MetadataValue.md(sheet_page(sheet))}
    totals = with_units(counts_of(result), "images", dropped="records", records="records", files_written="files")
    table = {ROW_COUNT: totals["records"], COLUMN_SCHEMA: column_schema(PRESET_COLUMNS)}
    return {**splits, **totals, **pages, **table, "path": dg.MetadataValue.path(str(result.preset.path))}
