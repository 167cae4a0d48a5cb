"""Coord: norm and coord records of a base preset, or a derived preset with all of them and the base's images as hardlinks.

    coco/rescale_32_768/            base: gets train.norm.jsonl and train.coord.jsonl beside its train.jsonl
    coco/rescale_32_768_max60/      derived: records with at most 60 objects; appears with its manifest in one rename
       ├─ images/                   hardlinks to the base's files, exactly those that the kept records name
       ├─ pipeline_manifest.json    the base's stage_stats.rescale, and which base records all this was made from
       └─ train.{filter_stats.json,norm.jsonl,coord.jsonl,jsonl}

Order keeps readers safe: everything is checked and written under temporary names; the directory appears; images are linked; then
the files get their names, `<split>.jsonl` last; the manifest tells of the split when it is there. So no published record names an
image that is not linked, and a killed run is gone on with by the next: what is there is compared and left alone.

Belongs here: the steps and their order.
Belongs elsewhere: checks before any write (derive_checks.py), records (coord_files.py), links (formats/hardlinks.py), names
(preset_names.py), claims (the callers).
Source: seed 004 decision 4; CONTRACTS section 3, "Derived presets".
"""

import copy
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from imagemill.domain.preset_names import PresetName
from imagemill.domain.preset_records import ObjectOrder
from imagemill.errors import disk_full_told
from imagemill.formats.hardlinks import check_file_system, link_tree, plan_links
from imagemill.formats.manifest import json_bytes, write_json
from imagemill.fs.atomic import (
    is_orphan,
    sweep_temporaries,
    sync_folder,
    temporaries,
    temporary_path,
    write_bytes_atomic,
)
from imagemill.pipeline.presets.coord_files import SplitDraft, draft_split
from imagemill.pipeline.presets.coords import RecordCounts
from imagemill.pipeline.presets.derive_checks import (
    Manifest,
    base_manifest,
    chosen_splits,
    derived_manifest,
    refuse_changed,
    refuse_problems,
    rescale_fingerprint,
)
from imagemill.pipeline.presets.object_order import choose_order, with_order
from imagemill.store.public_data import MANIFEST_FORMAT, Dataset, PresetDir


class CoordResult(NamedTuple):
    """What a run did.

    Attributes:
        counts: of each split.
        changed: names of the files that were written; empty where all was there already.
        linked, present: images linked now, and those that were there.
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
    """Make a preset's norm and coord records; with `name.max_objects`, the derived preset as a whole.

    Args:
        splits: those to do; all that the base has published where None.
        order: requested order of objects; None for the recorded one.
        advance: called with the number of records done since the last call.

    Raises:
        MissingInput: no base preset, or not this split. CoordRefused: bad lines, or images that cannot be linked, all listed.
        BaseChanged: the base's records are not those of the derived preset. OrderConflict: the preset has another order of
        objects. NotLinkable: two file systems.
    """
    base = dataset.preset(name.base)
    manifest, chosen = base_manifest(base), chosen_splits(base, splits)
    wanted = choose_order(base, manifest, chosen, order)

    def draft_in(folder: Path) -> list[SplitDraft]:
        sweep_temporaries(folder)
        drafts = []
        for split in chosen:
            kept = name.max_objects is None and split in wanted.kept
            options = {"max_objects": name.max_objects, "order": wanted.order, "keep_files": kept, "advance": advance}
            drafts.append(draft_split(base, split, folder, **options))
            unpublished.callback(drafts[-1].discard)
        return drafts

    with disk_full_told(dataset.path), ExitStack() as unpublished:
        if name.max_objects is None:
            return _coord_base(base, wanted.order, draft_in)
        return _derive(dataset, base, manifest, name, wanted.order, draft_in, unpublished)


DraftIn = Callable[[Path], list[SplitDraft]]


def _coord_base(base: PresetDir, order: ObjectOrder, draft_in: DraftIn) -> CoordResult:
    drafts = draft_in(base.path)
    refuse_problems(base, drafts, None)
    # Read once more: a rescale of another split may have told of it meanwhile.
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
    there = derived_manifest(base, derived, manifest, order)
    check_file_system(base.manifest, derived.path if there else dataset.path)
    folder = derived.path if there else _staging(dataset, unpublished)
    drafts = draft_in(folder)
    refuse_changed(base, derived, there or {}, {draft.split: draft.source for draft in drafts})
    plan = plan_links({image: None for draft in drafts for image in draft.images}.keys(), base.path, derived.path)
    refuse_problems(base, drafts, plan)
    manifest = _made_of(base, derived, manifest, order, there, drafts)
    _appear(derived, folder, manifest, drafts)
    linked = link_tree(plan)
    return _publish(derived, manifest, drafts, name.max_objects)._replace(linked=linked, present=plan.linked)


def _staging(dataset: Dataset, unpublished: ExitStack) -> Path:
    """A folder that takes the derived preset's name later, or goes; those of dead runs go now."""
    for left in temporaries(dataset.path):
        if is_orphan(left) and left.is_dir():
            shutil.rmtree(left, ignore_errors=True)  # another command may be at it too
    sweep_temporaries(dataset.path)
    staging = temporary_path(dataset.path)
    staging.mkdir()
    unpublished.callback(shutil.rmtree, staging, ignore_errors=True)
    return staging


def _made_of(
    base: PresetDir,
    derived: PresetDir,
    manifest: Manifest,
    order: ObjectOrder,
    there: Manifest | None,
    drafts: Sequence[SplitDraft],
) -> Manifest:
    """The derived preset's manifest before its splits are published."""
    made = copy.deepcopy(there or {"format": MANIFEST_FORMAT, "dataset": base.path.parent.name, "preset": derived.name})
    stats, of_base = made.setdefault("stage_stats", {}), manifest["stage_stats"]
    stats["rescale"] = with_order(of_base["rescale"], manifest, order)
    if "convert" in of_base:
        stats["convert"] = of_base["convert"]
    splits = {**made.get("base", {}).get("splits", {}), **{draft.split: draft.source for draft in drafts}}
    made["base"] = {"preset": base.name, "rescale": rescale_fingerprint(manifest), "splits": splits}
    return made


def _appear(derived: PresetDir, folder: Path, manifest: Manifest, drafts: Sequence[SplitDraft]) -> None:
    """Let the directory appear with its manifest, or record the splits of one that is there."""
    if folder == derived.path:
        _write_manifest(derived, manifest)
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
    """Give the files their names, then say so in the manifest."""
    changed = [name for draft in drafts for name in draft.changed]
    for draft in drafts:
        draft.publish()
    if changed:
        sync_folder(preset.path)
    told = copy.deepcopy(manifest)
    stage = told["stage_stats"].setdefault("coord", {"splits": {}})
    stage["max_objects"] = max_objects
    stage["splits"] |= {
        draft.split: {"records": draft.counts.kept, "dropped": draft.counts.dropped, "source": draft.source}
        for draft in drafts
    }
    if _write_manifest(preset, told):
        changed.append(preset.manifest.name)
    return CoordResult(preset, {draft.split: draft.counts for draft in drafts}, changed)


def _write_manifest(preset: PresetDir, manifest: Manifest) -> bool:
    data = json_bytes(manifest)
    if preset.manifest.read_bytes() == data:
        return False
    write_bytes_atomic(preset.manifest, data)
    return True
