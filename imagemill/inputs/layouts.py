"""Layouts of trainers and datasets that a folder has, and the settings that would use what the present ones leave unused.

    Scan, captions ──recognise──> "kohya: 2 folders, repeats 10, 4"
                   ──suggest────> {"inputs": {"repeats": "kohya"}}

Only `suggest` opens files: tables that may contain captions, at most their first rows.

Spec: docs/spec/stage2.md#scan
"""

import posixpath
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Final, NamedTuple

from imagemill.domain.ids import suffix_of
from imagemill.domain.inputs import AUTO, JOIN, KOHYA, OFF, InputSettings, folder_repeats, folder_words
from imagemill.fs.fingerprints import signature_bytes
from imagemill.fs.folders import File, Folder, on_disk, state_of_file
from imagemill.inputs.matching import PathIndex
from imagemill.inputs.metadata.rows import Columns, MetadataRow, Unreadable, format_of
from imagemill.inputs.scan import Scan
from imagemill.store.ledger import Problem
from imagemill.text.units import counted

# Rows of a table that are compared with the images, and bytes of a table that is looked at.
_ROWS: Final = 200
_SHOWN: Final = 20
_MAX_BYTES: Final = 256 << 20

# Tools whose metadata files have these names.
_TOOLS: Final = {"captions.json": "diffusion-pipe"} | dict.fromkeys(
    ("metadata.jsonl", "metadata.csv", "metadata.parquet"), "Hugging Face imagefolder"
)

# Reasons of files that may be tables of captions.
_UNREAD: Final = frozenset({"unsupported_type", "metadata_not_read"})

Settings = dict[str, dict[str, str | bool]]


class CaptionCounts(NamedTuple):
    """Captions of a folder.

    Attributes:
        several_lines: number of caption files with several lines.
        without: number of images without a caption.
    """

    several_lines: int
    without: int


def recognise(scan: Scan) -> list[str]:
    """Return a line for each layout that the folder has."""
    return list(_layouts(scan))


def _layouts(scan: Scan) -> Iterator[str]:
    numbered = kohya_layout(scan)
    yield from numbered
    tables = [path for path in scan.ignored if path.lower().endswith(("_stats.json", ".parquet"))]
    if tables:
        yield f"img2dataset: {counted(len(tables), 'file')} with its tables or counts"
    if scan.companions:
        yield f"OneTrainer: {counted(len(scan.companions), 'companion image')} (masks, control images)"
    names = Counter(posixpath.basename(file.path) for file in scan.metadata)
    for name, count in sorted(names.items()):
        yield f"{_TOOLS.get(name, 'table')}: {name}" + (f" in {count} folders" if count > 1 else "")
    if any(path.rpartition("/")[2] in ("_latent_cache", "_controls_") for path in scan.ignored):
        yield "ai-toolkit: folders with its caches"
    folders = {source.file_name.rpartition("/")[0] for source in scan.sources.values()} - {""}
    if folders and not numbered:
        yield f"sub-folders: {len(folders)} with images"


def kohya_layout(scan: Scan) -> list[str]:
    """Return the line of kohya's layout, if the folder has it."""
    found = _numbered_folders(source.file_name for source in scan.sources.values())
    repeats = list(map(str, found.values()))
    shown = ", ".join(repeats[:_SHOWN]) + (", …" if len(repeats) > _SHOWN else "")
    return [f"kohya: {counted(len(found), 'folder')}, repeats {shown}"] if found else []


def _numbered_folders(paths: Iterable[str]) -> dict[str, int]:
    """Return the repeats of the folders named by kohya's rule, in order of their names."""
    found = {path.partition("/")[0]: repeats for path in paths if (repeats := folder_repeats(path))}
    return dict(sorted(found.items()))


def suggest(folder: Folder, scan: Scan, inputs: InputSettings, captioned: CaptionCounts) -> Settings:
    """Return settings for imagemill.yaml that would use what the folder contains and `inputs` leave unused."""
    files: dict[str, str | bool] = {}
    texts: dict[str, str | bool] = {}
    paths = [source.file_name for source in scan.sources.values()]
    if inputs.repeats == OFF and _numbered_folders(paths):
        files["repeats"] = KOHYA
    if not inputs.recursive and any(problem.reason == "sub_folder" for problem in scan.problems):
        files["recursive"] = True
    if inputs.lines == JOIN and captioned.several_lines:
        texts["lines"] = "each"
    if inputs.metadata == AUTO and not scan.metadata and (table := _table_of_captions(folder, scan, inputs)):
        texts |= table
    elif captioned.without and not inputs.folder and any(map(folder_repeats, paths)) and any(map(folder_words, paths)):
        texts["folder"] = True
    return {name: chosen for name, chosen in (("inputs", files), ("captions", texts)) if chosen}


def _table_of_captions(folder: Folder, scan: Scan, inputs: InputSettings) -> dict[str, str | bool] | None:
    """Return the settings of the first table whose rows have captions of the images."""
    index = PathIndex(source.file_name for source in scan.sources.values())
    for problem in scan.problems:
        if problem.reason in _UNREAD and suffix_of(problem.item):
            path = folder / problem.item
            rows = _first_rows(path, Columns(inputs.file_column, inputs.text_column), inputs.encoding)
            prefix = _prefix([row.path for row in rows], index, problem)
            if prefix is not None:
                found: dict[str, str | bool] = {"metadata": problem.item}
                return {**found, "strip_prefix": prefix} if prefix else found
    return None


def _first_rows(file: File, columns: Columns, encoding: str) -> list[MetadataRow]:
    chosen = format_of(file.name)
    try:
        if chosen is None or signature_bytes(state_of_file(file)[0]) > _MAX_BYTES:
            return []
        with on_disk(file) as path:
            found = islice(chosen.read_rows(path, columns, encoding), _ROWS)
            return [row for row in found if isinstance(row, MetadataRow) and row.captions]
    except (Unreadable, OSError):
        return []


def _prefix(paths: Sequence[str], index: PathIndex, problem: Problem) -> str | None:
    """Return what the paths of rows begin with, in front of the path of an image; None if they lead to no image."""
    base = problem.item.rpartition("/")[0]
    found: Counter[str] = Counter()
    for path in (each.replace("\\", "/") for each in paths):
        if index.find(posixpath.normpath(posixpath.join(base, path))) or index.find(posixpath.normpath(path)):
            found[""] += 1
            continue
        parts = path.split("/")
        for at in range(1, len(parts)):
            if index.find("/".join(parts[at:])):
                found["/".join(parts[:at]) + "/"] += 1
                break
    if not found:
        return None
    ((prefix, count),) = found.most_common(1)
    return prefix if 2 * count > len(paths) else None


def yaml_lines(settings: Mapping[str, Mapping[str, str | bool]]) -> list[str]:
    """Return settings as lines for imagemill.yaml.

    >>> yaml_lines({"captions": {"lines": "each", "metadata": "a.json"}})
    ['captions: {lines: each, metadata: "a.json"}']
    """
    return [
        f"{name}: {{{', '.join(f'{key}: {_scalar(value)}' for key, value in chosen.items())}}}"
        for name, chosen in settings.items()
    ]


def _scalar(value: str | bool) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return value if value.isascii() and value.isalpha() else f'"{escaped}"'
