"""Checks of public datasets: every line of raw records and of presets by the validator's rules, and the first images."""

from pathlib import Path

import dagster as dg

from assets.presets import derived_preset, public_data, raw_dataset, rescale_preset
from imagemill.pipeline.presets.preset_config import split_key
from imagemill.pipeline.presets.rescale_plan import changed_splits
from imagemill.store.public_data import MANIFEST, Dataset, PresetDir
from imagemill.validation.validator import validate, validate_preset
from io_managers.check_results import SHOWN, as_result
from io_managers.viewer import page_shown
from resources.data_root import DataRootResource

# Tags of a run over partitions: its one key, or the ends of its range.
_KEY_TAGS = ("dagster/partition", "dagster/asset_partition_range_start", "dagster/asset_partition_range_end")


@dg.asset_check(asset=raw_dataset, blocking=True)
def raw_valid(context: dg.AssetCheckExecutionContext, data_root: DataRootResource) -> dg.AssetCheckResult:
    """Every raw record meets the contract, and the first images match their records."""
    place = public_data(data_root)
    names = _keys(context) or sorted(path.parent.name for path in place.path.glob("*/raw"))
    datasets = map(place.dataset, names)
    paths = (dataset.raw_jsonl(split) for dataset in datasets for split in dataset.splits())
    return as_result(*(validate(path, kind="preset") for path in paths))


@dg.asset_check(asset=rescale_preset, blocking=True)
def rescaled_valid(context: dg.AssetCheckExecutionContext, data_root: DataRootResource) -> dg.AssetCheckResult:
    """Every record meets the contract and the preset's limits; `images/` is a real folder, and its first images are whole."""
    return _presets_valid(context, data_root, coord_is_due=True)


@dg.asset_check(asset=derived_preset, blocking=True)
def derived_valid(context: dg.AssetCheckExecutionContext, data_root: DataRootResource) -> dg.AssetCheckResult:
    """The same rules for norm and coord records, which agree line by line; images of a derived preset are its base's files."""
    return _presets_valid(context, data_root, coord_is_due=False)


def _current_check(asset: dg.AssetsDefinition) -> dg.AssetChecksDefinition:
    """Return the check that compares presets with their raw records.

    The data version of raw records cannot show this: the partitions of a preset depend on all datasets.
    """

    @dg.asset_check(
        asset=asset,
        name="raw_current",
        description="The preset was made from the raw records as they are now, by the fingerprints in its manifest.",
    )
    def raw_current(context: dg.AssetCheckExecutionContext, data_root: DataRootResource) -> dg.AssetCheckResult:
        folders = _folders(context, data_root)
        changed = [
            f"{folder.parent.name}/{folder.name} {split}"
            for folder in folders
            for split in changed_splits(Dataset(folder.parent), PresetDir(folder))
        ]
        return dg.AssetCheckResult(
            passed=not changed,
            severity=dg.AssetCheckSeverity.WARN,
            description=f"raw records changed since: {', '.join(changed[:SHOWN])}" if changed else "no findings",
            metadata={
                "checked": len(folders),
                "changed (splits)": len(changed),
                **(page_shown("records with their boxes", "presets") if changed else {}),
            },
        )

    return raw_current


raw_current_checks = [_current_check(asset) for asset in (rescale_preset, derived_preset)]


def _presets_valid(
    context: dg.AssetCheckExecutionContext, data_root: DataRootResource, *, coord_is_due: bool
) -> dg.AssetCheckResult:
    folders = _folders(context, data_root)
    return as_result(*(report for folder in folders for report in validate_preset(folder, coord_is_due=coord_is_due)))


def _folders(context: dg.AssetCheckExecutionContext, data_root: DataRootResource) -> list[Path]:
    """Return the presets of the run; all if the check runs by itself."""
    place = public_data(data_root)
    keys = map(split_key, _keys(context))
    folders = [place.dataset(dataset).preset(preset).path for dataset, preset in keys]
    return folders or sorted(path.parent for path in place.path.glob(f"*/*/{MANIFEST}"))


def _keys(context: dg.AssetCheckExecutionContext) -> list[str]:
    """Return the partitions of the run; empty if the check runs by itself."""
    tags = context.run.tags
    return list(dict.fromkeys(tags[name] for name in _KEY_TAGS if name in tags))
