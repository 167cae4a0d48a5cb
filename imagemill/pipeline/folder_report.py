"""The report on a folder of images, from file headers and captions alone: no model, and nothing is written.

    folder ──scan_approved──> entries ──headers──> formats, colours, more problems
                                      ──survey───> captions by source, in a ledger in memory

Spec: docs/spec/stage2.md#scan
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Literal

import msgspec

from imagemill.domain.inputs import HDR_TRANSFER, SRGB, InputSettings
from imagemill.errors import Refused
from imagemill.formats.images import PictureFacts, hdr_refusal, read_facts
from imagemill.fs.folders import Folder, reads_ahead
from imagemill.inputs.folder_words import caption_by_folder
from imagemill.inputs.layouts import CaptionCounts, recognise, suggest, yaml_lines
from imagemill.inputs.scan import SOURCE_ASSET, Scan, scan_approved
from imagemill.inputs.survey import survey
from imagemill.pipeline.colours import ColourCounts, count_colours
from imagemill.pipeline.prefetch import map_on
from imagemill.store.ledger import FROM_METADATA, FROM_SIDECAR, IN_MEMORY, CaptionRow, Ledger, Problem

Class = Literal["sample", "caption", "companion", "ignored", "problem"]


class FolderProblem(msgspec.Struct, frozen=True):
    """An entry of the folder that would not become a sample, or not as it is."""

    item: str
    reason: str
    detail: str
    remedy: str


class FolderEntry(msgspec.Struct, frozen=True):
    """One entry of the folder. `reason`: of a problem."""

    path: str
    entry: Class
    reason: str = ""


class FolderReport(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of a folder, as a run would find them.

    Attributes:
        folder: the folder.
        layouts: layouts of trainers and datasets that it has.
        counts: number of entries by class: each entry is counted once.
        images: images that a run would open.
        captions: number of images by the source of their caption, such as `.txt`, the name of a table, or `none`.
        several_lines: caption files with several lines.
        several_captions: images with several captions.
        conflicts: images of which a source of a lower rank has another caption.
        without_caption: images without a caption.
        formats: number of images by the format of their content.
        colours: of the images, and how pixels would be read.
        first_frames: files of which only one of several pictures is used.
        problems: inputs that would be refused, or not used as they are; each once.
        settings: lines for imagemill.yaml that would use what is not used.
        entries: every entry, if requested.
        share: of the images that would be taken; empty: all. `elsewhere`: files of other shares.
    """

    folder: str
    layouts: list[str]
    counts: dict[Class, int]
    images: int
    captions: dict[str, int]
    several_lines: int
    several_captions: int
    conflicts: int
    without_caption: list[str]
    formats: dict[str, int]
    colours: ColourCounts
    first_frames: int
    problems: list[FolderProblem]
    settings: list[str]
    entries: list[FolderEntry]
    share: str = ""
    elsewhere: int = 0


def report_folder(
    folder: Folder, inputs: InputSettings, own: Collection[Path] = (), *, threads: int = 2, entries: bool = True
) -> FolderReport:
    """Read the headers of all images of a folder, and its captions.

    Args:
        folder: the folder.
        inputs: how a run would read it.
        own: folders of the data root, which links must not lead into.
        threads: threads that open files.
        entries: whether the report lists every entry.

    Raises:
        MissingInput: if the folder does not exist.
    """
    scan = scan_approved(folder, inputs, own=own)
    sources = list(scan.sources.values())
    with ThreadPoolExecutor(reads_ahead(folder, threads), "inspect") as pool:
        found = list(map_on(pool, lambda source: _facts(folder, source.file_name, inputs), sources))
    with Ledger(IN_MEMORY) as ledger:
        survey(folder, ledger, scan, inputs=inputs)
        caption_by_folder(scan, ledger, inputs)
        captions = ledger.captions()
        of_texts = [problem for problem in ledger.problems() if problem.asset != SOURCE_ASSET]
    return _report(folder, scan, found, captions, of_texts, inputs, entries=entries)


def _facts(folder: Folder, name: str, inputs: InputSettings) -> PictureFacts | FolderProblem:
    try:
        facts = read_facts(folder / name)
        if facts.colour.state == HDR_TRANSFER and inputs.color == SRGB:
            raise hdr_refusal(name, facts.colour)
    except Refused as refusal:
        return FolderProblem(name, refusal.reason, refusal.what, refusal.do or "replace the image")
    except OSError as error:
        return FolderProblem(name, "read_error", str(error), "make the file readable")
    return facts


def _report(
    folder: Folder,
    scan: Scan,
    found: Iterable[PictureFacts | FolderProblem],
    captions: dict[str, CaptionRow],
    of_texts: Iterable[Problem],
    inputs: InputSettings,
    *,
    entries: bool,
) -> FolderReport:
    found = list(found)
    facts = [each for each in found if isinstance(each, PictureFacts)]
    refused = {each.item: each for each in found if isinstance(each, FolderProblem)}
    used = {i: source for i, source in scan.sources.items() if source.file_name not in refused}
    without = [source.file_name for i, source in used.items() if i not in captions]
    several_lines = sum(row.lines > 1 for i, row in captions.items() if i in used)
    formats = Counter(each.format for each in facts)
    # An image has one problem: its own before that of its caption.
    problems = {path: _problem(each, path) for each in of_texts for path in [_path(each, scan)]}
    problems |= {each.item: _problem(each, each.item) for each in scan.problems} | refused
    counts: dict[Class, int] = {
        "sample": len(used),
        "caption": len(scan.captions),
        "companion": len(scan.companions),
        "ignored": len(scan.ignored),
        "problem": len(scan.problems) + len(refused),
    }
    settings = suggest(folder, scan, inputs, CaptionCounts(several_lines, len(without)))
    return FolderReport(
        folder=str(folder),
        layouts=recognise(scan),
        counts=counts,
        images=len(facts),
        captions=_by_source(used, captions),
        several_lines=several_lines,
        several_captions=sum(bool(row.texts) for i, row in captions.items() if i in used),
        conflicts=sum(row.conflict for i, row in captions.items() if i in used),
        without_caption=without,
        formats=dict(sorted(formats.items(), key=lambda item: (-item[1], item[0]))),
        colours=count_colours(((each.colour.state, each.colour.profile) for each in facts), inputs.color),
        first_frames=sum(each.first_frame for each in facts),
        problems=[problems[item] for item in sorted(problems)],
        settings=yaml_lines(settings),
        entries=sorted(_entries(scan, refused.values()), key=lambda entry: entry.path) if entries else [],
        share=inputs.share,
        elsewhere=scan.elsewhere,
    )


def _path(problem: Problem, scan: Scan) -> str:
    source = scan.sources.get(problem.item)
    return source.file_name if source else problem.item


def _by_source(used: Collection[str], captions: dict[str, CaptionRow]) -> dict[str, int]:
    """Count images by the source of their caption, the commonest first."""
    counts = Counter(_source_of(captions.get(image_id)) for image_id in used)
    return dict(sorted(counts.items(), key=lambda item: (item[0] == "none", -item[1], item[0])))


def _source_of(row: CaptionRow | None) -> str:
    if row is None:
        return "none"
    if row.origin == FROM_METADATA:
        return PurePosixPath(row.stat or "").name
    return "text files" if row.origin == FROM_SIDECAR else row.origin


def _entries(scan: Scan, refused: Collection[FolderProblem]) -> Iterator[FolderEntry]:
    not_decoded = {problem.item for problem in refused}
    for source in scan.sources.values():
        if source.file_name not in not_decoded:
            yield FolderEntry(source.file_name, "sample")
    yield from (FolderEntry(problem.item, "problem", problem.reason) for problem in refused)
    yield from (FolderEntry(path, "caption") for path in scan.captions)
    yield from (FolderEntry(path, "companion") for path in scan.companions)
    yield from (FolderEntry(path, "ignored") for path in scan.ignored)
    yield from (FolderEntry(problem.item, "problem", problem.reason) for problem in scan.problems)


def _problem(problem: Problem, item: str) -> FolderProblem:
    return FolderProblem(item, problem.reason, problem.detail, problem.remedy)
