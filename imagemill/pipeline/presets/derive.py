"""Coord: norm and coord records of a base preset, or a derived preset with all of them and the base's images as hardlinks.

    coco/rescale_32_768/            base: gets train.norm.jsonl and train.coord.jsonl beside its train.jsonl
    coco/rescale_32_768_max60/      derived: records with at most 60 objects; appears with its manifest in one rename
       ├─ images/                   hardlinks to the base's files, exactly those that the kept records name
       ├─ pipeline_manifest.json    the base's stage_stats.rescale, and which base records all this was made from
       └─ train.{filter_stats.json,norm.jsonl,coord.jsonl,jsonl}

Order keeps readers safe: everything is checked and written under temporary names; the directory appears; images are linked; then
the files get their names, `<split>.jsonl` last; the manifest tells of the split when it is there. So no published record names an
image that is not linked, and a killed run is gone on with by the next: what is there is compared and left alone.

Belongs here: the steps and their order, the checks before any write.
Belongs elsewhere: records (coord_files.py), links (formats/hardlinks.py), names (preset_names.py), claims (the callers).
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
from imagemill.errors import ImagemillError, MissingInput, disk_full_told
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
    """Lines or images that keep a preset from being made; `problems` has them all (of very many, the first ones)."""

    def __init__(self, what: str, problems: list[str], **hints: Any) -> None:
        super().__init__("\n".join([what, *(f"  {problem}" for problem in problems)]), **hints)
        self.problems = problems


class BaseChanged(ImagemillError, RuntimeError):
    """A derived preset was made from other records than its base has now."""


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
    _refuse_problems(base, drafts, None)
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
    there = _derived_manifest(base, derived, manifest, order)
    check_file_system(base.manifest, derived.path if there else dataset.path)
    folder = derived.path
    if there is None:  # a folder that takes the derived preset's name later, or is removed
        sweep_temporaries(dataset.path, folders=True)
        folder = temporary_path(dataset.path)
        folder.mkdir()
        unpublished.callback(shutil.rmtree, folder, ignore_errors=True)
    drafts = draft_in(folder)
    _refuse_changed(base, derived, there or {}, {draft.split: draft.source for draft in drafts})
    plan = plan_links({image: None for draft in drafts for image in draft.images}.keys(), base.path, derived.path)
    _refuse_problems(base, drafts, plan)
    manifest = _made_of(base, derived, manifest, order, there, drafts)
    _appear(derived, folder, manifest, drafts)
    linked = link_tree(plan)
    return _publish(derived, manifest, drafts, name.max_objects)._replace(linked=linked, present=plan.linked)


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
    made["base"] = {"preset": base.name, "rescale": _rescale_fingerprint(manifest), "splits": splits}
    return made


def _appear(derived: PresetDir, folder: Path, manifest: Manifest, drafts: Sequence[SplitDraft]) -> None:
    """Let the directory appear with its manifest, or record the splits of one that is there."""
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
    """Give the files their names, then say so in the manifest."""
    changed = [name for draft in drafts for name in draft.changed]
    for draft in drafts:
        draft.publish()
    if changed:
        sync_folder(preset.path)
    made = copy.deepcopy(manifest)
    stage = made["stage_stats"].setdefault("coord", {"splits": {}})
    stage["max_objects"] = max_objects
    stage["splits"] |= {
        draft.split: {"records": draft.counts.kept, "dropped": draft.counts.dropped, "source": draft.source}
        for draft in drafts
    }
    if write_if_changed(preset.manifest, json_bytes(made)):
        changed.append(preset.manifest.name)
    return CoordResult(preset, {draft.split: draft.counts for draft in drafts}, changed)


# ---- checks before any write


def check_preset_exists(preset: PresetDir) -> None:
    """Raise MissingInput if there is no folder of that name; presets and datasets that exist are listed."""
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
        why=f"presets there: {', '.join(names)}" if names else "there is no preset yet",
        do=f"check --preset; a new one is made by imagemill preset rescale {dataset.name} --preset {base}",
    )


def base_manifest(base: PresetDir) -> Manifest:
    """Return the base's manifest, with what rescale recorded.

    Raises:
        MissingInput: no such dataset or preset, or rescale did not make it.
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
    """Return the manifest of a derived preset; None if there is no such directory.

    Raises:
        ImagemillError: the directory is not a preset derived from this base. BaseChanged: the base has other parameters or
        records now. CoordRefused: the base has other records, and bad lines are among them.
    """
    if not os.path.lexists(derived.path):
        return None
    there = read_preset_manifest(derived)
    made_of = (there or {}).get("base")
    if there is None or not isinstance(made_of, dict) or made_of.get("preset") != base.name:
        raise ImagemillError(
            f"{derived.name} is there and was not derived from {base.name}",
            where=derived.manifest,
            why="a derived preset appears together with its manifest, and nothing in it is ever replaced",
            do="rename or delete that directory, then run coord again",
        )
    if made_of.get("rescale") != _rescale_fingerprint(manifest):
        raise _base_changed(base, derived, "its rescale parameters")
    if recorded_order(derived, there) != order:
        raise _base_changed(base, derived, f"its object_order, which is {order}")
    recorded = [split for split in SPLITS if split in made_of.get("splits", {})]
    paths = {split: base.jsonl(split) for split in recorded}
    sources = {split: f"sha256:{sha256_file(path)}" if path.is_file() else "none" for split, path in paths.items()}
    _refuse_changed(base, derived, there, sources)
    return there


def _refuse_changed(base: PresetDir, derived: PresetDir, there: Manifest, sources: Mapping[str, str]) -> None:
    recorded = there.get("base", {}).get("splits", {})
    changed = [base.jsonl(split).name for split, now in sources.items() if recorded.get(split, now) != now]
    if not changed:
        return
    # A damaged line is the cause, and its repair the remedy; deleting the derived preset would not help.
    lines = [line_problems(base, split) for split in sources if base.jsonl(split).is_file()]
    _refuse_problems(base, lines, None)
    raise _base_changed(base, derived, " and ".join(changed))


def _base_changed(base: PresetDir, derived: PresetDir, what: str) -> BaseChanged:
    return BaseChanged(
        f"{base.name} has changed since {derived.name} was made from it: {what}",
        where=derived.manifest,
        why="images of a derived preset are never removed or replaced, so it cannot follow",
        do=f"delete {derived.path} and run coord again (the base keeps its images)",
    )


def _rescale_fingerprint(manifest: Manifest) -> str:
    """Return the fingerprint of the parameters that decide images.

    Counts change when a split is added, and coord may record the object order of a preset that another program made.
    """
    rescale = manifest["stage_stats"]["rescale"]
    return fingerprint(json_bytes({key: rescale[key] for key in rescale.keys() - {"splits", "object_order"}}))


def _refuse_problems(base: PresetDir, drafts: Iterable[SplitDraft], plan: LinkPlan | None) -> None:
    """Raise with every bad line and every image that cannot be linked."""
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
        why="a split is published when all of it is good",
        do="; ".join(repairs + ([remedy(plan)] if plan and refused else [])),
    )
