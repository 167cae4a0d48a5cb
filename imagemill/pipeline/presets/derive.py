"""Coord: norm and coord records of a base preset, or a derived preset that also hardlinks the base's images.

    coco/rescale_32_768/            base: gets train.norm.jsonl and train.coord.jsonl beside its train.jsonl
    coco/rescale_32_768_max60/      derived: records with at most 60 objects; appears with its manifest in one rename
       ├─ images/                   hardlinks to the base's files, exactly those that the kept records name
       ├─ pipeline_manifest.json    the base's stage_stats.rescale, and the base records that it was made from
       └─ train.{filter_stats.json,norm.jsonl,coord.jsonl,jsonl}

The order of writes keeps concurrent readers safe. First everything is checked and written under temporary names. Then
the directory appears, images are linked, the files get their names (`<split>.jsonl` last), and the manifest records the
split. So a published record never refers to an image that is not linked. A killed run is continued by the next one:
existing files are compared and left alone.

Records are handled in coord_files.py, links in formats/hardlinks.py, names in preset_names.py; callers take the leases.

Spec: docs/spec/presets.md#strictness, docs/spec/presets.md#hardlinks
"""

import copy
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from imagemill.domain.preset_names import PresetName, parse_preset
from imagemill.domain.preset_records import ObjectOrder
from imagemill.errors import ImagemillError, MissingInput, disk_full_reported
from imagemill.formats.hardlinks import LinkPlan, check_file_system, link_tree, plan_links, remedy
from imagemill.formats.manifest import json_bytes, sha256_file, write_json
from imagemill.fs.atomic import sweep_temporaries, sync_folder, temporary_path, write_if_changed
from imagemill.fs.fingerprints import fingerprint
from imagemill.pipeline.presets.coord_files import SplitDraft, draft_split, line_problems
from imagemill.pipeline.presets.coords import RecordCounts
from imagemill.pipeline.presets.object_order import choose_order, recorded_order, with_order
from imagemill.store.public_data import MANIFEST_FORMAT, SPLITS, Dataset, PresetDir, no_dataset, read_preset_manifest

Manifest = dict[str, Any]


class CoordRefused(ImagemillError, ValueError):
    """Lines or images prevent a preset from being made; `problems` lists them (up to a bound)."""

    def __init__(self, what: str, problems: list[str], **hints: Any) -> None:
        super().__init__("\n".join([what, *(f"  {problem}" for problem in problems)]), **hints)
        self.problems = problems


class BaseChanged(ImagemillError, RuntimeError):
    """The records of a base differ from those that its derived preset was made from."""


class CoordResult(NamedTuple):
    """The outcome of a run.

    Attributes:
        preset: the preset that was written.
        counts: of each split.
        changed: names of the files that were written; empty if all were up to date.
        linked: number of images linked by this run.
        present: number of images that were linked before.
    """

    preset: PresetDir
    counts: dict[str, RecordCounts]
    changed: list[str]
    linked: int = 0
    present: int = 0


def coord(
    dataset: Dataset,
    name: PresetName,
    *,
    splits: Sequence[str] | None = None,
    order: ObjectOrder | None = None,
    advance: Callable[[int], object] = lambda records: None,
) -> CoordResult:
    """Write a preset's norm and coord records; with `name.max_objects`, write the whole derived preset.

    Args:
        dataset: the dataset.
        name: the preset.
        splits: the splits to process; None for all that the base has published.
        order: requested order of objects; None for the recorded one.
        advance: called with the number of records done since the last call.

    Raises:
        MissingInput: if the base preset or a split is missing.
        CoordRefused: if there are bad lines or images that cannot be linked; all are listed.
        BaseChanged: if the base's records differ from those that the derived preset was made from.
        OrderConflict: if the preset has another order of objects.
        NotLinkable: if base and derived preset are on different file systems.
    """
    base = dataset.preset(name.base)
    manifest, chosen = base_manifest(base), chosen_splits(base, splits)
    chosen_order = choose_order(base, manifest, chosen, order)

    def draft_in(folder: Path) -> list[SplitDraft]:
        sweep_temporaries(folder)
        drafts = []
        for split in chosen:
            kept = name.max_objects is None and split in chosen_order.kept
            options = {
                "max_objects": name.max_objects,
                "order": chosen_order.order,
                "keep_files": kept,
                "advance": advance,
            }
            drafts.append(draft_split(base, split, folder, **options))
            unpublished.callback(drafts[-1].discard)
        return drafts

    with disk_full_reported(dataset.path), ExitStack() as unpublished:
        if name.max_objects is None:
            return _coord_base(base, chosen_order.order, draft_in)
        return _derive(dataset, base, manifest, name, chosen_order.order, draft_in, unpublished)


DraftIn = Callable[[Path], list[SplitDraft]]


def _coord_base(base: PresetDir, order: ObjectOrder, draft_in: DraftIn) -> CoordResult:
    drafts = draft_in(base.path)
    _refuse_problems(base, drafts, None)
    # Read again, because a rescale of another split may have recorded it meanwhile.
    manifest = base_manifest(base)
    stats = manifest["stage_stats"]
    stats["rescale"] = with_order(stats["rescale"], manifest, order)
    return _publish(base, manifest, drafts, None)


def _derive(
    dataset: Dataset,
    base: PresetDir,
    manifest: Manifest,
    name: PresetName,
    order: ObjectOrder,
    draft_in: DraftIn,
    unpublished: ExitStack,
) -> CoordResult:
    derived = dataset.preset(name.effective)
    existing_manifest = _derived_manifest(base, derived, manifest, order)
    check_file_system(base.manifest, derived.path if existing_manifest else dataset.path)
    folder = derived.path
    if existing_manifest is None:  # a temporary folder, which is renamed to the derived preset or removed
        sweep_temporaries(dataset.path, folders=True)
        folder = temporary_path(dataset.path)
        folder.mkdir()
        unpublished.callback(shutil.rmtree, folder, ignore_errors=True)
    drafts = draft_in(folder)
    _refuse_changed(base, derived, existing_manifest or {}, {draft.split: draft.source for draft in drafts})
    plan = plan_links({image: None for draft in drafts for image in draft.images}.keys(), base.path, derived.path)
    _refuse_problems(base, drafts, plan)
    manifest = _derived_document(base, derived, manifest, order, existing_manifest, drafts)
    _appear(derived, folder, manifest, drafts)
    linked = link_tree(plan)
    return _publish(derived, manifest, drafts, name.max_objects)._replace(linked=linked, present=plan.linked)


def _derived_document(
    base: PresetDir,
    derived: PresetDir,
    manifest: Manifest,
    order: ObjectOrder,
    existing_manifest: Manifest | None,
    drafts: Sequence[SplitDraft],
) -> Manifest:
    """Return the derived preset's manifest before its splits are published."""
    document = copy.deepcopy(
        existing_manifest or {"format": MANIFEST_FORMAT, "dataset": base.path.parent.name, "preset": derived.name}
    )
    stats, of_base = document.setdefault("stage_stats", {}), manifest["stage_stats"]
    stats["rescale"] = with_order(of_base["rescale"], manifest, order)
    if "convert" in of_base:
        stats["convert"] = of_base["convert"]
    splits = {**document.get("base", {}).get("splits", {}), **{draft.split: draft.source for draft in drafts}}
    document["base"] = {"preset": base.name, "rescale": _rescale_fingerprint(manifest), "splits": splits}
    return document


def _appear(derived: PresetDir, folder: Path, manifest: Manifest, drafts: Sequence[SplitDraft]) -> None:
    """Rename the new directory, with its manifest, into place; if the directory exists, record the splits in its manifest."""
    if folder == derived.path:
        write_if_changed(derived.manifest, json_bytes(manifest))
        return
    (folder / derived.images.name).mkdir()
    write_json(folder / derived.manifest.name, manifest)
    sync_folder(folder)
    os.rename(folder, derived.path)
    sync_folder(derived.path.parent)
    for draft in drafts:
        draft.move(derived.path)


def _publish(
    preset: PresetDir, manifest: Manifest, drafts: Sequence[SplitDraft], max_objects: int | None
) -> CoordResult:
    """Give the files their names, then record the splits in the manifest."""
    changed = [name for draft in drafts for name in draft.changed]
    for draft in drafts:
        draft.publish()
    if changed:
        sync_folder(preset.path)
    document = copy.deepcopy(manifest)
    stage = document["stage_stats"].setdefault("coord", {"splits": {}})
    stage["max_objects"] = max_objects
    stage["splits"] |= {
        draft.split: {"records": draft.counts.kept, "dropped": draft.counts.dropped, "source": draft.source}
        for draft in drafts
    }
    if write_if_changed(preset.manifest, json_bytes(document)):
        changed.append(preset.manifest.name)
    return CoordResult(preset, {draft.split: draft.counts for draft in drafts}, changed)


# ---- checks before any write


def check_preset_exists(preset: PresetDir) -> None:
    """Raise MissingInput if the preset's folder does not exist; existing presets and datasets are listed."""
    if preset.path.is_dir():
        return
    dataset = Dataset(preset.path.parent)
    if not dataset.path.is_dir():
        raise no_dataset(dataset, f"imagemill preset convert {dataset.name} makes one")
    names = dataset.presets()
    base = parse_preset(preset.name).base
    raise MissingInput(
        f"no preset {preset.name} in {dataset.name}",
        where=dataset.path,
        why=f"existing presets: {', '.join(names)}" if names else "there is no preset yet",
        do=f"check --preset; a new one is made by imagemill preset rescale {dataset.name} --preset {base}",
    )


def base_manifest(base: PresetDir) -> Manifest:
    """Return the base's manifest, which must contain the results of rescale.

    Raises:
        MissingInput: if the dataset or preset does not exist, or was not made by rescale.
    """
    check_preset_exists(base)
    manifest = read_preset_manifest(base)
    if manifest is None or not isinstance(manifest.get("stage_stats", {}).get("rescale"), dict):
        raise MissingInput(
            f"no preset {base.name} that rescale made",
            where=base.manifest,
            why="coord works on a preset's images and records, which rescale makes",
            do=f"run imagemill preset rescale {base.path.parent.name} --preset {base.name}",
        )
    return manifest


def chosen_splits(base: PresetDir, splits: Sequence[str] | None) -> list[str]:
    """Return the requested published splits, in order; raise MissingInput if one is not published."""
    published = base.splits()
    missing = [split for split in splits or () if split not in published]
    if missing or not published:
        raise MissingInput(
            f"{base.name} has no {' and no '.join(f'{split}.jsonl' for split in missing or SPLITS[:1])}",
            where=base.path,
            why="rescale publishes a split when all its images are made",
            do=f"run imagemill preset rescale {base.path.parent.name} --preset {base.name}",
        )
    return [split for split in published if splits is None or split in splits]


def _derived_manifest(base: PresetDir, derived: PresetDir, manifest: Manifest, order: ObjectOrder) -> Manifest | None:
    """Return the manifest of a derived preset; None if its directory does not exist.

    Raises:
        ImagemillError: if the directory is not a preset derived from this base.
        BaseChanged: if the base now has other parameters or records.
        CoordRefused: if the base now has other records, with bad lines among them.
    """
    if not os.path.lexists(derived.path):
        return None
    existing_manifest = read_preset_manifest(derived)
    made_of = (existing_manifest or {}).get("base")
    if existing_manifest is None or not isinstance(made_of, dict) or made_of.get("preset") != base.name:
        raise ImagemillError(
            f"{derived.name} exists and was not derived from {base.name}",
            where=derived.manifest,
            why="a derived preset appears together with its manifest, and nothing in it is ever replaced",
            do="rename or delete that directory, then run coord again",
        )
    if made_of.get("rescale") != _rescale_fingerprint(manifest):
        raise _base_changed(base, derived, "its rescale parameters")
    if recorded_order(derived, existing_manifest) != order:
        raise _base_changed(base, derived, f"its object_order, which is {order}")
    recorded = [split for split in SPLITS if split in made_of.get("splits", {})]
    paths = {split: base.jsonl(split) for split in recorded}
    sources = {split: f"sha256:{sha256_file(path)}" if path.is_file() else "none" for split, path in paths.items()}
    _refuse_changed(base, derived, existing_manifest, sources)
    return existing_manifest


def _refuse_changed(
    base: PresetDir, derived: PresetDir, existing_manifest: Manifest, sources: Mapping[str, str]
) -> None:
    recorded = existing_manifest.get("base", {}).get("splits", {})
    changed = [base.jsonl(split).name for split, now in sources.items() if recorded.get(split, now) != now]
    if not changed:
        return
    # If a line is damaged, report it: repairing it is the remedy, deleting the derived preset would not help.
    lines = [line_problems(base, split) for split in sources if base.jsonl(split).is_file()]
    _refuse_problems(base, lines, None)
    raise _base_changed(base, derived, " and ".join(changed))


def _base_changed(base: PresetDir, derived: PresetDir, what: str) -> BaseChanged:
    return BaseChanged(
        f"{base.name} has changed since {derived.name} was derived from it: {what}",
        where=derived.manifest,
        why="images of a derived preset are never removed or replaced, so it cannot follow",
        do=f"delete {derived.path} and run coord again (the base keeps its images)",
    )


def _rescale_fingerprint(manifest: Manifest) -> str:
    """Return the fingerprint of the parameters that affect images.

    Counts change when a split is added, and coord may record the object order of a preset that another program made.
    """
    rescale = manifest["stage_stats"]["rescale"]
    return fingerprint(json_bytes({key: rescale[key] for key in rescale.keys() - {"splits", "object_order"}}))


def _refuse_problems(base: PresetDir, drafts: Iterable[SplitDraft], plan: LinkPlan | None) -> None:
    """Raise CoordRefused with every bad line and every image that cannot be linked."""
    problems: list[str] = []
    bad = 0
    for draft in drafts:
        name = base.jsonl(draft.split).name
        problems += [f"{name}: {problem}" for problem in draft.problems]
        problems += [f"{name}: and {draft.more} more"] if draft.more else []
        bad += len(draft.problems) + draft.more
    refused = plan.refused if plan else {}
    problems += [f"{path}: {why}" for path, why in refused.items()]
    if not problems:
        return
    counted = [f"{bad} problems in lines"] if bad else []
    counted += [f"{len(refused)} images that cannot be linked"] if refused else []
    repairs = [f"repair the raw records, run rescale for {base.name}, then coord again"] if bad else []
    raise CoordRefused(
        " and ".join(counted),
        problems,
        where=base.path,
        why="a split is published only if it is complete and valid",
        do="; ".join(repairs + ([remedy(plan)] if plan and refused else [])),
    )
