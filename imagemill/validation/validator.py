"""Entry point of the validator: returns a report for a path. Used by asset checks, the command line and training scripts.

The rules are in catalogue.py and one module per kind; reports are in findings.py.
"""

import os
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from imagemill.domain.embedding_specs import T5_TOKENS
from imagemill.domain.layout import DataRoot
from imagemill.domain.preset_records import NO_LIMITS, PresetRules
from imagemill.errors import ImagemillError, MissingInput, WrongUsage
from imagemill.formats.jsonl import parse_object
from imagemill.fs.location import Location
from imagemill.fs.swap import read_unswapped
from imagemill.store.public_data import MANIFEST, RAW
from imagemill.validation.catalogue import finding
from imagemill.validation.findings import Report, collect
from imagemill.validation.images import FIRST, ImageLook, ImageMode
from imagemill.validation.lines import Findings
from imagemill.validation.presets import preset_files, preset_folder, preset_records
from imagemill.validation.stage2 import stage2_records
from imagemill.validation.stage_a import SUFFIX, stage_a_records

if TYPE_CHECKING:
    from imagemill.validation.contents import RecordedContents


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a validation; a kind ignores options that do not concern it.

    Attributes:
        limits: of a preset's sizes; limits that are None come from its manifest.
        image_mode: how images are checked.
        image_first: number of valid records whose images are checked; 0 or less: all.
        enforce_real_images_folder: require a real `images/` even without a manifest beside the records.
        derived: parent of the npy folders; if given, files on disk are read, or compared with the shards' members.
        sample: number of samples of each tar to compare; None or less than 1: all.
        data_root: the data root of the images of Stage 2 records; without it they are not checked.
        contents: the ledger's rows of the files below `derived`.
        tokens: length of the masks of Stage 2 records, unless `contents` determines it.
    """

    limits: PresetRules = NO_LIMITS
    image_mode: ImageMode = "open"
    image_first: int = FIRST
    enforce_real_images_folder: bool = False
    derived: Path | None = None
    sample: int | None = None
    data_root: DataRoot | None = None
    contents: "RecordedContents | None" = None
    tokens: int = T5_TOKENS

    def images(self) -> ImageLook:
        """Return a new counter of images to check."""
        return ImageLook(self.image_mode, self.image_first)


def _stage2(path: Path, options: Options) -> Findings:
    return stage2_records(
        path,
        derived=options.derived,
        images=options.images(),
        data_root=options.data_root,
        contents=options.contents,
        tokens=options.tokens,
    )


def _preset(path: Path, options: Options) -> Findings:
    enforced = options.enforce_real_images_folder
    return preset_records(path, limits=options.limits, images=options.images(), enforce_real_images_folder=enforced)


def _shards(path: Path, options: Options) -> Findings:
    from imagemill.validation.shards import shard_set  # shards need numpy, records do not

    return shard_set(
        path if path.is_dir() else path.parent,
        derived=options.derived,
        sample=options.sample,
        contents=options.contents,
    )


KINDS: dict[str, Callable[[Path, Options], Findings]] = {
    "stage2": _stage2,
    "preset": _preset,
    "stage-a": lambda path, options: stage_a_records(path),
    "shards": _shards,
}

# Keys that only one kind of record has.
_DISTINCTIVE_KEYS = {"objects": "preset", "per_image": "stage-a", "t5_attention_mask": "stage2"}
_LINES_READ, _BYTES_READ = 20, 1 << 20

# Files and folders to validate, relative to a data root or to one of its folders.
_VALIDATED = (
    "derived/approved_image_dataset.jsonl",
    "approved_image_dataset.jsonl",
    "shards/bucket_*",
    "bucket_*",
    f"public_data/*/*/{MANIFEST}",
    f"*/*/{MANIFEST}",
    f"*/{MANIFEST}",
    f"stage_a/output/*{SUFFIX}",
    f"output/*{SUFFIX}",
    f"*{SUFFIX}",
)
_SHOWN_PATHS = 5


def kind_of(path: Path) -> str:
    """Return the kind of a path: by its name, by neighbouring files, or by the keys of its first lines.

    Raises:
        WrongUsage: if the path is neither a folder nor a .jsonl nor a .tar.
    """
    if path.is_dir():
        return "preset" if os.path.lexists(path / MANIFEST) else "shards"
    if path.suffix == ".tar":
        return "shards"
    if path.suffix != ".jsonl":
        raise WrongUsage(
            f"cannot determine what to validate {path.name} as", where=path, do=f"give --kind {'|'.join(KINDS)}"
        )
    if path.name.endswith(SUFFIX):
        return "stage-a"
    if path.name.endswith((".norm.jsonl", ".coord.jsonl")) or os.path.lexists(path.parent / MANIFEST):
        return "preset"
    return _kind_by_keys(path) or ("preset" if path.parent.name == RAW else "stage2")


def _kind_by_keys(path: Path) -> str | None:
    try:
        with open(path, "rb") as file:
            head = [file.readline(_BYTES_READ) for _ in range(_LINES_READ)]
    except OSError:
        return None
    keys = (key for line in head for key in parse_object(line) or ())
    return next((_DISTINCTIVE_KEYS[key] for key in keys if key in _DISTINCTIVE_KEYS), None)


def validate(
    path: Path, *, kind: str | None = None, derived: Path | None = None, options: Options | None = None
) -> Report:
    """Check one file of records or one bucket's folder by all rules of its kind.

    Args:
        path: the file or folder.
        kind: determined from the path if None.
        derived: short for `Options(derived=…)`.
        options: see Options.

    Raises:
        MissingInput: if the path does not exist, or is a folder without shards.
        WrongUsage: if the kind is unknown, or does not fit the path.
    """
    options = options or Options(derived=derived)
    kind = _checked_kind(path, kind)
    if path.is_dir() != (kind == "shards") and path.suffix != ".tar":
        expected = "a bucket's folder, or a tar in it" if kind == "shards" else "a file of records"
        raise WrongUsage(f"{path.name} cannot be validated as {kind}", where=path, do=f"give {expected}")
    if kind == "shards":
        folder = path if path.is_dir() else path.parent
        return read_unswapped(folder, partial(_report, folder, kind, options))
    return _report(path, kind, options)


def _report(path: Path, kind: str, options: Options) -> Report:
    if not path.exists():
        raise MissingInput("nothing to validate", where=path, do="check the path")
    return collect(str(path), kind, KINDS[kind](path, options))


def validate_each(path: Path, *, kind: str | None = None, options: Options | None = None) -> Iterator[Report]:
    """Run `validate`; for a preset's folder, yield a report for each of its files and one for the folder."""
    if path.is_dir() and _checked_kind(path, kind) == "preset":
        yield from validate_preset(path, options)
    else:
        yield validate(path, kind=kind, options=options)


def validate_preset(folder: Path, options: Options | None = None, *, coord_is_due: bool = False) -> Iterator[Report]:
    """Check all files of records of a preset, then the folder itself; a preset without records fails.

    Args:
        folder: the preset.
        options: see Options.
        coord_is_due: rescale has just run, so that norm and coord need not match the pixel records yet.
    """
    files = preset_files(folder)
    if not files:
        do = "run imagemill preset rescale, then coord"
        yield missing(folder, MissingInput("no records in this preset", where=folder, do=do))
        return
    for path in files:
        yield validate(path, kind="preset", options=options)
    yield collect(str(folder), "preset", preset_folder(folder, coord_is_due=coord_is_due))


def missing(path: Path | Location, error: ImagemillError) -> Report:
    """Return the report for a path or a URL that does not exist or cannot be checked."""
    return collect(str(path), "", [finding("missing_input", error.what, file=path.name, remedy=error.do)])


def _checked_kind(path: Path, kind: str | None) -> str:
    if not path.exists():
        raise MissingInput("nothing to validate", where=path, do="check the path")
    kind = kind or kind_of(path)
    if kind not in KINDS:
        raise WrongUsage(f"unknown kind {kind!r}", do=f"choose from {', '.join(KINDS)}")
    if kind == "shards" and path.is_dir() and not _may_be_set(path):
        raise _no_set(path)
    return kind


def _may_be_set(folder: Path) -> bool:
    """Return whether a folder has a bucket's name or a file of a set; any other folder is a mistyped path."""
    from imagemill.pipeline.shards import shard_sets  # not needed for records

    if folder.absolute().name.startswith("bucket_") or any(folder.glob("*.tar")):
        return True
    return any(os.path.lexists(folder / name) for name in (shard_sets.MANIFEST, shard_sets.INDEX))


def _no_set(folder: Path) -> MissingInput:
    found = [
        path.parent if path.name == MANIFEST else path for name in _VALIDATED for path in sorted(folder.glob(name))
    ]
    paths = list(dict.fromkeys(shlex.quote(str(path)) for path in found))
    more = f" (and {len(paths) - _SHOWN_PATHS} more)" if len(paths) > _SHOWN_PATHS else ""
    return MissingInput(
        "nothing to validate in this folder",
        where=folder,
        why="it contains neither a shard set nor a preset",
        do=f"imagemill validate {' '.join(paths[:_SHOWN_PATHS])}{more}"
        if paths
        else "give a file of records, the folder of a bucket (shards/bucket_<bucket>) or the folder of a preset",
    )


def verify_stage2(jsonl: Path, derived: Path, contents: "RecordedContents | None" = None) -> Report:
    """Check every record by all rules, and read every npy file that it refers to.

    Header, shape, dtype, length and finite values are checked; with `contents`, also the bytes against the ledger.
    """
    if not jsonl.is_file():
        raise MissingInput("no Stage 2 records", where=jsonl, do="run `imagemill stage2` first")
    return collect(str(jsonl), "stage2, files read whole", stage2_records(jsonl, derived=derived, contents=contents))
