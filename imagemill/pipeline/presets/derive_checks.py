"""What keeps a preset's coord step from beginning: every check before any write, each with its remedy.

Belongs here: is the base there, whole and unchanged; is the derived directory ours; are lines and images good.
Belongs elsewhere: the steps (derive.py), file systems and links (formats/hardlinks.py).
Source: CONTRACTS section 3, "Presets are strict", "Derived presets"; seed 004 decision 4.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from imagemill.domain.preset_names import parse_preset
from imagemill.domain.preset_records import ObjectOrder
from imagemill.errors import ImagemillError, MissingInput
from imagemill.formats.hardlinks import LinkPlan, remedy
from imagemill.formats.manifest import json_bytes, sha256_file
from imagemill.fs.fingerprints import fingerprint
from imagemill.pipeline.presets.coord_files import SplitDraft, line_problems
from imagemill.pipeline.presets.object_order import recorded_order
from imagemill.store.public_data import SPLITS, Dataset, PresetDir, no_dataset, read_preset_manifest

Manifest = dict[str, Any]


class CoordRefused(ImagemillError, ValueError):
    """Lines or images that keep a preset from being made; `problems` has them all (of very many, the first ones)."""

    def __init__(self, what: str, problems: list[str], **hints: Any) -> None:
        super().__init__("\n".join([what, *(f"  {problem}" for problem in problems)]), **hints)
        self.problems = problems


class BaseChanged(ImagemillError, RuntimeError):
    """A derived preset was made from other records than its base has now."""


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


def derived_manifest(base: PresetDir, derived: PresetDir, manifest: Manifest, order: ObjectOrder) -> Manifest | None:
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
    if made_of.get("rescale") != rescale_fingerprint(manifest):
        raise _base_changed(base, derived, "its rescale parameters")
    if recorded_order(derived, there) != order:
        raise _base_changed(base, derived, f"its object_order, which is {order}")
    recorded = [split for split in SPLITS if split in made_of.get("splits", {})]
    refuse_changed(base, derived, there, {split: _source(base.jsonl(split)) for split in recorded})
    return there


def refuse_changed(base: PresetDir, derived: PresetDir, there: Manifest, sources: Mapping[str, str]) -> None:
    recorded = there.get("base", {}).get("splits", {})
    changed = [base.jsonl(split).name for split, now in sources.items() if recorded.get(split, now) != now]
    if not changed:
        return
    # A damaged line is the cause, and its repair the remedy; deleting the derived preset would not help.
    lines = [line_problems(base, split) for split in sources if base.jsonl(split).is_file()]
    refuse_problems(base, lines, None)
    raise _base_changed(base, derived, " and ".join(changed))


def _base_changed(base: PresetDir, derived: PresetDir, what: str) -> BaseChanged:
    return BaseChanged(
        f"{base.name} has changed since {derived.name} was made from it: {what}",
        where=derived.manifest,
        why="images of a derived preset are never removed or replaced, so it cannot follow",
        do=f"delete {derived.path} and run coord again (the base keeps its images)",
    )


def _source(path: Path) -> str:
    return f"sha256:{sha256_file(path)}" if path.is_file() else "none"


def rescale_fingerprint(manifest: Manifest) -> str:
    """Return the fingerprint of the parameters that decide images.

    Counts change when a split is added, and coord may record the object order of a preset that another program made.
    """
    rescale = manifest["stage_stats"]["rescale"]
    return fingerprint(json_bytes({key: rescale[key] for key in rescale.keys() - {"splits", "object_order"}}))


def refuse_problems(base: PresetDir, drafts: Iterable[SplitDraft], plan: LinkPlan | None) -> None:
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
