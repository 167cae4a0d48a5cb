"""Listing of a mission's folder: groups of images under two labels, and unexpected entries.

    stage_a/input/<mission>/审核不通过/<group folder>/QC-TEMP-20250118-0015956-001.jpeg    label fail
                            审核通过/<group folder>/…                                      label pass

A group's id comes from its first image's name, else from its folder's. If an id occurs twice under one label, the later group
fails; the same id under both labels is two groups.

Images are assigned to ranks in domain/ranks.py; records are made in merge.py.

Spec: docs/spec/stage-a.md#sampling, docs/spec/stage-a.md#group-records
"""

import os
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from random import Random
from typing import Literal

import msgspec

from imagemill.domain.ids import id_problem
from imagemill.domain.natural_sort import natural_key
from imagemill.errors import MissingInput, WrongUsage
from imagemill.text.close_names import name_hint

Label = Literal["fail", "pass"]

# In the order of processing.
LABEL_FOLDERS: dict[Label, str] = {"fail": "审核不通过", "pass": "审核通过"}
LABEL_NAMES = " or ".join(f"{folder} ({label})" for label, folder in LABEL_FOLDERS.items())
EXTENSIONS = (".jpg", ".jpeg", ".png")
DEFAULT_SEED = 42

# The additions to a mission's name in file names, with a rank of ten digits, must fit into 255 bytes.
MAX_MISSION_BYTES = 255 - len("_stage_a.images.rank0123456789.jsonl")

_GROUP_ID = re.compile(r"QC-[A-Za-z]+-[0-9]{8}-[0-9]+")


class ImageGroup(msgspec.Struct, frozen=True, gc=False):
    """One group.

    Attributes:
        label: `fail` or `pass`.
        folder: name of its folder below the label's folder.
        group_id: id of the group.
        images: file names in natural order, at least one.
    """

    label: Label
    folder: str
    group_id: str
    images: tuple[str, ...]

    @property
    def place(self) -> str:
        """Path of the group's folder, relative to the mission's folder."""
        return f"{LABEL_FOLDERS[self.label]}/{self.folder}"

    def image_place(self, image_index: int) -> str:
        """Return the path of an image, counted from 1, relative to the mission's folder."""
        return f"{self.place}/{self.images[image_index - 1]}"


class MissionProblem(msgspec.Struct, frozen=True):
    """A problem or warning about an entry in a mission's folder. `place`: relative to the mission's folder.

    `outcome`: *refused*, invalid itself; *failed*, a group that the output lacks; *warning*, it is processed.
    """

    place: str
    outcome: Literal["refused", "failed", "warning"]
    reason: str
    detail: str
    remedy: str


@dataclass(slots=True)
class Discovery:
    """A mission's groups, fail before pass, each in order of folder name; and problems of other entries."""

    mission: str
    folder: Path
    groups: list[ImageGroup] = field(default_factory=list)
    problems: list[MissionProblem] = field(default_factory=list)

    @property
    def failed(self) -> list[MissionProblem]:
        """Groups that cannot become a record."""
        return [problem for problem in self.problems if problem.outcome == "failed"]


def mission_folder(root: Path, mission: str) -> Path:
    """Return the folder of a mission.

    Raises:
        WrongUsage: if no folder can have that name.
        MissingInput: if there is no such mission; the message names similar ones.
    """
    if problem := name_problem(mission):
        raise WrongUsage(
            f"{mission!r} is not a valid mission name: {problem}", do="give the name of a folder of the input"
        )
    folder = root / mission
    if not folder.is_dir():
        raise _no_mission(root, mission)
    return folder


def discover(root: Path, mission: str) -> Discovery:
    """List one mission; no image is opened. Raises as `mission_folder`."""
    folder = mission_folder(root, mission)
    found = Discovery(mission, folder)
    names = {label_folder: label for label, label_folder in LABEL_FOLDERS.items()}
    for entry in _entries(folder):
        if entry.name not in names:
            found.problems.append(_not_a_label(entry))
        elif not _is_folder(entry):
            detail = "it has the name of a label and is not a folder"
            found.problems.append(_problem(entry.name, "not_a_folder", detail, "remove it"))
    for label, label_folder in LABEL_FOLDERS.items():
        if (folder / label_folder).is_dir():
            _list_label(found, label)
    return found


def missions(root: Path) -> list[str]:
    """Return the names of all folders that may be a mission, sorted."""
    return [entry.name for entry in _entries(root) if _is_folder(entry)] if root.is_dir() else []


def name_problem(mission: str) -> str | None:
    """Return why this cannot name a mission, None if it can."""
    if problem := id_problem(mission):
        return problem
    if not mission.strip() or mission.startswith("."):
        return "hidden or blank"
    too_long = len(mission.encode()) > MAX_MISSION_BYTES
    return (
        f"longer than {MAX_MISSION_BYTES} bytes, so that no output file could be named after it" if too_long else None
    )


def sample_groups(
    groups: Sequence[ImageGroup], *, passes: int | None = None, fails: int | None = None, seed: int = DEFAULT_SEED
) -> list[ImageGroup]:
    """Return a sample of at most so many groups of each label, in their order: None takes all, 0 none.

    Raises:
        WrongUsage: if a number is negative.
    """
    wanted: dict[Label, tuple[int | None, int]] = {"fail": (fails, seed + 1), "pass": (passes, seed)}
    kept: set[int] = set()
    for label, (count, label_seed) in wanted.items():
        if count is not None and count < 0:
            raise WrongUsage(f"--{label}_group_number is {count}", do="give 0 or more, or leave it out for all")
        indices = [index for index, group in enumerate(groups) if group.label == label]
        kept.update(indices if count is None or count >= len(indices) else Random(label_seed).sample(indices, count))
    return [group for index, group in enumerate(groups) if index in kept]


def leave_unselected(found: Discovery, *, passes: int | None = None, fails: int | None = None) -> Discovery:
    """Return a copy without failed groups that sampling does not need: enough others of their label can be processed."""
    wanted = {LABEL_FOLDERS["pass"]: passes, LABEL_FOLDERS["fail"]: fails}
    there = Counter(LABEL_FOLDERS[group.label] for group in found.groups)

    def passed_by(problem: MissionProblem) -> bool:
        folder = problem.place.partition("/")[0]
        most = wanted.get(folder)
        return problem.outcome == "failed" and most is not None and most <= there[folder]

    return replace(found, problems=[problem for problem in found.problems if not passed_by(problem)])


def group_id_in(name: str) -> str | None:
    """Return the group id at the beginning of a file name."""
    match = _GROUP_ID.match(PurePath(name).stem)
    return match[0] if match else None


def _list_label(found: Discovery, label: Label) -> None:
    seen: dict[str, ImageGroup] = {}
    label_folder = LABEL_FOLDERS[label]
    for entry in _entries(found.folder / label_folder):
        place = f"{label_folder}/{entry.name}"
        if not _is_folder(entry):
            found.problems.append(_unexpected(entry, place, "outside_groups", "directly in a label's folder"))
            continue
        try:
            group = _list_group(found, label, entry.name)
        except OSError as error:
            found.problems.append(_failed(place, "read_error", str(error), "repair it and run again"))
            continue
        if group is None:
            continue
        first = seen.setdefault(group.group_id, group)
        if first is group:
            found.groups.append(group)
        else:
            what = f"{group.group_id} is already the id of {first.place}; {group.place} has no record"
            found.problems.append(
                _failed(place, "duplicate_group", what, "rename the images of one, or put both in one")
            )


def _list_group(found: Discovery, label: Label, name: str) -> ImageGroup | None:
    """Return one group; None, after adding a problem, if the folder is not a valid group."""
    place = f"{LABEL_FOLDERS[label]}/{name}"
    images, unusable = _list_images(found, place)
    if unusable:
        what = f"a record would lack {', '.join(map(printable, unusable[:3]))}{', …' if len(unusable) > 3 else ''}"
        found.problems.append(_failed(place, "unusable_image", what, "replace or remove these images"))
        return None
    if not images:
        found.problems.append(_problem(place, "empty_group", "no image in it", "put its images there, or remove it"))
        return None
    images.sort(key=natural_key)
    group_id = group_id_in(images[0]) or name
    why = "not UTF-8" if _no_text(name) else id_problem(group_id) or (None if group_id.strip() else "blank")
    if why:
        found.problems.append(_failed(place, "bad_name", f"its name is not valid for a group: {why}", "rename it"))
        return None
    found.problems.extend(_mixed(place, group_id, images))
    return ImageGroup(label, name, group_id, tuple(images))


def _list_images(found: Discovery, place: str) -> tuple[list[str], list[str]]:
    """Return file names of a group's images, and of unusable ones; report other entries as problems."""
    images: list[str] = []
    unusable: list[str] = []
    for entry in _entries(found.folder / place):
        inside = f"{place}/{entry.name}"
        if _is_folder(entry):
            found.problems.append(_too_deep(entry, inside))
        elif not _is_image_name(entry.name):
            found.problems.append(_unexpected(entry, inside, "unsupported_type", "neither jpg, jpeg nor png"))
        elif _no_text(entry.name):
            found.problems.append(_problem(inside, "bad_name", "its name is not UTF-8", "rename it"))
            unusable.append(entry.name)
        elif not _answers(entry.is_file):
            found.problems.append(_problem(inside, "not_a_file", "a broken link, or not a file", "replace it"))
            unusable.append(entry.name)
        else:
            images.append(entry.name)
    return images, unusable


def _mixed(place: str, group_id: str, images: Sequence[str]) -> Iterator[MissionProblem]:
    others = sorted({other for name in images if (other := group_id_in(name)) and other != group_id})
    if others:
        what = f"its group is {group_id}, by its first image or folder; some images name {', '.join(others[:3])}"
        yield MissionProblem(place, "warning", "mixed_ids", what, "put each id into a folder of its own")


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """Return the entries of a folder, without dot-files, sorted by name."""
    with os.scandir(folder) as entries:
        return sorted((e for e in entries if not e.name.startswith(".")), key=lambda entry: entry.name)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    return _answers(entry.is_dir)


def _answers(question: Callable[[], bool]) -> bool:
    """Return the result of a check of an entry; False if it raises, as for a link to itself."""
    try:
        return question()
    except OSError:
        return False


def _is_image_name(name: str) -> bool:
    return name.lower().endswith(EXTENSIONS)


def _no_text(name: str) -> bool:
    return any(unicodedata.category(c) == "Cs" for c in name)


def _too_deep(entry: os.DirEntry[str], place: str) -> MissionProblem:
    count = sum(_is_image_name(name) for _, _, names in os.walk(entry.path) for name in names if name[0] != ".")
    return _problem(
        place, "too_deep", f"a folder within a group, with {count} images", "move them into a group's folder"
    )


def _unexpected(entry: os.DirEntry[str], place: str, reason: str, where: str) -> MissionProblem:
    kind = "a folder" if _is_folder(entry) else "an image" if _is_image_name(entry.name) else "a file"
    return _problem(place, reason, f"{kind}: {where}", "move it into a group's folder, or remove it")


def _not_a_label(entry: os.DirEntry[str]) -> MissionProblem:
    if not _is_folder(entry):
        return _unexpected(entry, entry.name, "outside_labels", "beside the folders of the labels")
    what = f"a folder of a mission is named {LABEL_NAMES}; this one is not processed"
    return _problem(entry.name, "outside_labels", what, "rename it to the label that its groups have")


def _problem(place: str, reason: str, detail: str, remedy: str) -> MissionProblem:
    return MissionProblem(printable(place), "refused", reason, printable(detail), remedy)


def _failed(place: str, reason: str, detail: str, remedy: str) -> MissionProblem:
    return MissionProblem(printable(place), "failed", reason, printable(detail), remedy)


def printable(text: str) -> str:
    """Return text for one line of a report, with control characters and undecodable bytes replaced."""
    text = text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    return "".join("\ufffd" if unicodedata.category(c) in {"Cc", "Zl", "Zp"} else c for c in text)


def _no_mission(root: Path, mission: str) -> MissingInput:
    found = missions(root)
    return MissingInput(
        f"no mission {mission!r}",
        where=root,
        why=name_hint(mission, [printable(name) for name in found])
        or ("it contains no missions" if root.is_dir() else "there is no such folder"),
        do="check --mission and --input_dir",
    )
