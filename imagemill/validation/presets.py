"""Validation of records of a preset or of raw public data, in pixels, norm or coord: single records, files and folders.

Rules for one record are in imagemill/domain/preset_records.py, checks of one image in images.py.

Spec: docs/spec/presets.md#layout, docs/spec/validation.md#checks
"""

import os
import posixpath
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from imagemill.domain.preset_records import (
    DECODERS,
    NO_LIMITS,
    PresetRecord,
    PresetRules,
    Space,
    is_plain,
    violations,
    warnings,
)
from imagemill.errors import ImagemillError
from imagemill.formats.manifest import nested_value
from imagemill.store.public_data import IMAGES, MANIFEST, PresetDir, read_preset_manifest, space_of
from imagemill.validation.catalogue import finding, findings_of
from imagemill.validation.findings import Finding
from imagemill.validation.images import ImageLook, is_real_directory
from imagemill.validation.lines import Findings, check_lines
from imagemill.validation.preset_splits import splits_agree


def preset_records(
    jsonl: Path,
    *,
    limits: PresetRules = NO_LIMITS,
    images: ImageLook | None = None,
    enforce_real_images_folder: bool = False,
) -> Findings:
    """Check every line of a preset's or raw file of records; the space is determined by the file name.

    Args:
        jsonl: the file of records.
        limits: limits that are None are taken from the manifest beside the file, if there is one.
        images: how images are checked; None: not at all.
        enforce_real_images_folder: require a real `images/` even without a manifest.
    """
    folder = jsonl.parent
    has_manifest = (folder / MANIFEST).exists() or (folder / MANIFEST).is_symlink()
    if (has_manifest or enforce_real_images_folder) and not is_real_directory(folder / IMAGES):
        yield finding("images_folder", "a link, or not a directory", file=jsonl.name, field=IMAGES)
    manifest: Mapping[str, Any] = {}
    if has_manifest:
        try:
            manifest = read_preset_manifest(PresetDir(folder)) or {}
        except (ImagemillError, OSError) as error:
            yield finding("preset_manifest", str(error).partition("\n")[0], file=jsonl.name)
        recorded = limits_of(manifest)
        limits = PresetRules(
            *(given if given is not None else own for given, own in zip(limits, recorded, strict=True))
        )
        if None in limits:
            yield finding("no_limits", "no max_pixels or image_factor recorded", file=jsonl.name)
    base = base_of(folder, manifest)
    yield from check_lines(jsonl, _PresetLines(jsonl, space_of(jsonl), limits, images or ImageLook("none"), base))


def preset_files(folder: Path) -> list[Path]:
    """Return the files of records in a preset's folder, by name, without legacy and hidden ones."""
    return [path for path in sorted(folder.glob("[!.]*.jsonl")) if not _is_legacy(path)]


def preset_folder(folder: Path, *, coord_is_due: bool = False) -> Findings:
    """Check the folder as a whole: legacy files, and files of a split that do not match.

    Args:
        folder: the preset.
        coord_is_due: rescale has just run, so that norm and coord may still belong to earlier records.
    """
    for path in sorted(folder.glob("*.jsonl")):
        if _is_legacy(path):
            yield finding("legacy_file", "a file of an older layout", file=path.name)
    if not coord_is_due:
        manifest = _readable_manifest(folder)
        yield from splits_agree(folder, manifest, base_of(folder, manifest))
    yield 1


def _readable_manifest(folder: Path) -> Mapping[str, Any]:
    """Return the manifest; empty if it is missing or unreadable, which the checks of the files report."""
    try:
        return read_preset_manifest(PresetDir(folder)) or {}
    except (ImagemillError, OSError):
        return {}


def _is_legacy(path: Path) -> bool:
    return path.name.endswith(".raw.jsonl")


def limits_of(manifest: Mapping[str, Any]) -> PresetRules:
    """Return `max_pixels` and `image_factor` of a manifest's `stage_stats.rescale`."""
    values = (nested_value(manifest, "stage_stats", "rescale", name) for name in ("max_pixels", "image_factor"))
    return PresetRules(*(value if type(value) is int and value > 0 else None for value in values))


def base_of(folder: Path, manifest: Mapping[str, Any]) -> Path | None:
    """Return the folder of the base preset whose images this one shares; None if there is no base."""
    name = nested_value(manifest, "base", "preset")
    if not isinstance(name, str) or name in {"", ".", ".."} or name != Path(name).name:
        return None
    path = folder.absolute().parent / name
    return path if os.path.isdir(path) else None  # also False for a name that no file system accepts


class _PresetLines:
    def __init__(self, jsonl: Path, space: Space, limits: PresetRules, images: ImageLook, base: Path | None) -> None:
        self._file, self._folder, self._limits = jsonl.name, jsonl.parent, limits
        self._space: Space = space
        self.decoder = DECODERS[space]
        self._images, self._base = images, base
        self._max_pixels = limits.max_pixels or float("inf")
        self._factor = limits.multiple_of or 1
        # One tuple per size, shared by all images of that size.
        self._sizes: dict[str, tuple[int, int]] = {}
        self._tuples: dict[tuple[int, int], tuple[int, int]] = {}

    def accept(self, record: PresetRecord[Any], number: int) -> bool:
        if self._images.wanted or not is_plain(record, self._space):
            return False
        width, height = record.width, record.height
        return (
            width * height <= self._max_pixels
            and width % self._factor == 0 == height % self._factor
            and self._remembered(record.images[0], width, height) == (width, height)
        )

    def judge(self, record: dict[str, Any], number: int) -> Iterator[Finding]:
        at: dict[str, Any] = {"file": self._file, "line": number}
        problems = violations(record, self._space, self._limits)
        images = record.get("images")
        if images and isinstance(images, list) and isinstance(images[0], str):
            at["item"] = images[0]
        yield from findings_of(problems, at)
        if problems:
            return
        width, height = record["width"], record["height"]
        before = self._remembered(at["item"], width, height)
        if before != (width, height):
            message = f"{width}x{height} here, {before[0]}x{before[1]} in a line above"
            yield finding("two_sizes", message, field="images", **at)
            return
        yield from findings_of(warnings(record, self._space), at)
        if self._images.take():
            yield from self._images.look_at_preset(self._folder, self._base, record, at)

    def _remembered(self, path: str, width: int, height: int) -> tuple[int, int]:
        """Return the first size recorded for an image; equivalent spellings of its path are one image."""
        if "//" in path or "./" in path:
            path = posixpath.normpath(path)
        size = self._sizes.get(path)
        if size is None:
            size = width, height
            self._sizes[path] = size = self._tuples.setdefault(size, size)
        return size
