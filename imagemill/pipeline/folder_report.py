"""The report on a folder of images, from file headers alone: no model, no ledger, and nothing is written.

    folder ──scan_approved──> images and problems ──headers──> formats, colours, more problems

Spec: docs/spec/stage2.md#scan
"""

from collections import Counter
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from imagemill.domain.inputs import HDR_TRANSFER, SRGB, InputSettings
from imagemill.errors import Refused
from imagemill.formats.images import PictureFacts, hdr_refusal, read_facts
from imagemill.inputs.scan import Scan, scan_approved
from imagemill.pipeline.colours import ColourCounts, count_colours
from imagemill.pipeline.prefetch import map_on
from imagemill.store.ledger import Problem


class FolderProblem(msgspec.Struct, frozen=True):
    """An entry of the folder that would not become a sample, or not as it is."""

    item: str
    reason: str
    detail: str
    remedy: str


class FolderReport(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of a folder, as a run would find them.

    Attributes:
        folder: the folder.
        images: images that a run would open.
        captions: those with a caption file.
        caption_files: caption files that belong to an image.
        companions: masks and control images beside an image.
        ignored: entries that are ignored.
        formats: number of images by the format of their content.
        colours: of the images, and how pixels would be read.
        first_frames: files of which only one of several pictures is used.
        problems: entries that would be refused.
    """

    folder: str
    images: int
    captions: int
    caption_files: int
    companions: int
    ignored: int
    formats: dict[str, int]
    colours: ColourCounts
    first_frames: int
    problems: list[FolderProblem]


def report_folder(folder: Path, inputs: InputSettings, own: Collection[Path] = (), *, threads: int = 2) -> FolderReport:
    """Read the headers of all images of a folder.

    Args:
        folder: the folder.
        inputs: how a run would read it.
        own: folders of the data root, which links must not lead into.
        threads: threads that open files.

    Raises:
        MissingInput: if the folder does not exist.
    """
    scan = scan_approved(folder, inputs, own=own)
    sources = list(scan.sources.values())
    with ThreadPoolExecutor(threads, "inspect") as pool:
        found = list(map_on(pool, lambda source: _facts(folder, source.file_name, inputs), sources))
    return _report(folder, scan, found, inputs)


def _facts(folder: Path, name: str, inputs: InputSettings) -> PictureFacts | FolderProblem:
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
    folder: Path, scan: Scan, found: Iterable[PictureFacts | FolderProblem], inputs: InputSettings
) -> FolderReport:
    facts = [each for each in found if isinstance(each, PictureFacts)]
    refused = [each for each in found if isinstance(each, FolderProblem)]
    formats = Counter(each.format for each in facts)
    return FolderReport(
        folder=str(folder),
        images=len(facts),
        captions=sum(source.caption is not None for source in scan.sources.values()),
        caption_files=scan.captions,
        companions=len(scan.companions),
        ignored=scan.ignored,
        formats=dict(sorted(formats.items(), key=lambda item: (-item[1], item[0]))),
        colours=count_colours(((each.colour.state, each.colour.profile) for each in facts), inputs.color),
        first_frames=sum(each.first_frame for each in facts),
        problems=sorted([*map(_of_entry, scan.problems), *refused], key=lambda problem: (problem.item, problem.reason)),
    )


def _of_entry(problem: Problem) -> FolderProblem:
    return FolderProblem(problem.item, problem.reason, problem.detail, problem.remedy)
