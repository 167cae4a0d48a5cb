"""Presets by hardlink: which folder a request becomes. Links and records are made in imagemill/pipeline/presets/derive.py."""

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
from resources.data_root import DataRootResource

# One name for all work on a preset: rescale and coord both write a base preset's manifest.
CLAIM = "presets"


@dataclass(frozen=True, slots=True)
class Coord:
    """A request for a preset's records in coordinates.

    Attributes:
        splits: None for all that the base has published.
        order: requested order of objects; None for the recorded one.
    """

    dataset: Dataset
    name: PresetName
    splits: Sequence[str] | None = None
    order: ObjectOrder | None = None


class HardlinkIOManager(dg.ConfigurableIOManager):
    """Makes a preset's records in coordinates; those of a derived preset with hardlinks to the base's images."""

    data_root: dg.ResourceDependency[DataRootResource]

    def handle_output(self, context: dg.OutputContext, obj: Leased) -> None:
        with obj.claimed() as asked:
            made = _made(asked)
            obj.ledger.record_counts(context.run_id, context.asset_key.to_user_string(), counts_of(made))
        context.add_output_metadata(_told(asked, made))

    def load_input(self, context: dg.InputContext) -> PresetDir:
        """The preset's folder."""
        dataset, preset = split_key(context.asset_partition_key)
        return PublicData(self.data_root.root().public_data).dataset(dataset).preset(preset)


def _made(asked: Coord) -> CoordResult:
    base = asked.dataset.preset(asked.name.base)
    splits = [split for split in base.splits() if asked.splits is None or split in asked.splits]
    records = sum(1 for split in splits for _ in read_raw(base.jsonl(split)))
    with Progress(f"coord {asked.dataset.name}/{asked.name.effective}", records, unit="record") as progress:
        return coord(asked.dataset, asked.name, splits=asked.splits, order=asked.order, advance=progress.advance)


def counts_of(made: CoordResult) -> dict[str, int]:
    """Counters over all splits."""
    splits = made.counts.values()
    return {
        "records": sum(counts.kept for counts in splits),
        "dropped": sum(counts.dropped for counts in splits),
        "linked": made.linked,
        "present": made.present,
        "files_written": len(made.changed),
    }


def _told(asked: Coord, made: CoordResult) -> dict[str, Any]:
    splits = {
        f"{split} {name}": value
        for split, counts in made.counts.items()
        for name, value in {
            "records": counts.kept,
            "dropped (records)": counts.dropped,
            "largest (objects)": counts.largest,
        }.items()
    }
    pages = {}
    if asked.name.max_objects is not None:  # a base preset has its sheet from rescale
        sheet = write_preset_sheet(asked.dataset, made.preset, made.preset.splits()[0])
        pages = {"boxes": dg.MetadataValue.md(sheet_page(sheet))}
    totals = with_units(counts_of(made), "images", dropped="records", records="records", files_written="files")
    return {**splits, **totals, **pages, "path": dg.MetadataValue.path(str(made.preset.path))}
