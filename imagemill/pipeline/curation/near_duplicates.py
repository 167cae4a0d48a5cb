"""Groups of nearly identical images, by the cosine of their DINOv3 vectors.

    derived/
    ├─ near_duplicates.jsonl   one line per group: its representative, every member with its cosine to it
    ├─ near_duplicates.png     thumbnails of the first groups by size and similarity, one row each
    └─ near_duplicates.json    threshold, counts, fingerprints of inputs and lines; written last

A group consists of images connected by pairs of at least the threshold. The ends of a long chain of pairs may have little in
common, so a member is a near duplicate *of the representative* only if its own cosine reaches the threshold. The representative
is the member with the most pixels, the first by id among equals; members with a caption that are not withdrawn take precedence.

The search is in pipeline/curation/similarity.py, drawing in pipeline/contact_sheet.py.
"""

import io
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
from PIL import Image

from imagemill.config import NearDuplicateSettings
from imagemill.domain.embedding_specs import DINOV3, DINOV3_WIDTH
from imagemill.domain.inputs import SRGB, ColorSetting
from imagemill.errors import ImagemillError, InvalidNpy, MissingInput
from imagemill.formats.jsonl import encode_line
from imagemill.formats.manifest import json_bytes, read_document
from imagemill.fs.fingerprints import fingerprint
from imagemill.fs.folders import Folder
from imagemill.pipeline.contact_sheet import Row, Tile, as_page, as_png, draw_sheet
from imagemill.pipeline.curation.reports import CurationReport
from imagemill.pipeline.curation.similarity import (
    TOLERANCE,
    block_size,
    connected,
    make_index,
    search_threads,
    similar_pairs,
    training_size,
)
from imagemill.pipeline.stage2.valid_files import CurrentFile, CurrentFiles, current_files, measured
from imagemill.progress import Progress
from imagemill.store.inputs import PixelRule
from imagemill.store.ledger import Ledger

ASSET = "near_duplicates"
FORMAT: Literal["imagemill-near-duplicates/1"] = "imagemill-near-duplicates/1"

# Most groups on the sheet.
SHEET_GROUPS = 20


class Member(msgspec.Struct, frozen=True):
    """An image of a group; `cosine` to the representative, six decimal places. Sizes in pixels, upright."""

    image_id: str
    file: str
    width: int
    height: int
    cosine: float


class Group(msgspec.Struct, frozen=True):
    """A line of the report; members in order of id, including the representative."""

    representative: str
    members: list[Member]

    @property
    def least(self) -> float:
        """Least cosine of a member to the representative."""
        return min(member.cosine for member in self.members)


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Inputs and counts of a report.

    `fingerprint`: of every vector and of the settings; `lines`: of the JSONL's bytes; `left_out`: reason → images.
    """

    format: Literal["imagemill-near-duplicates/1"] = FORMAT
    fingerprint: str
    threshold: float
    images: int
    groups: int
    members: int
    left_out: dict[str, int]
    lines: str


def lines_path(derived: Path) -> Path:
    """Return the path of the groups."""
    return derived / f"{ASSET}.jsonl"


def sheet_path(derived: Path) -> Path:
    """Return the path of the sheet."""
    return derived / f"{ASSET}.png"


def summary_path(derived: Path) -> Path:
    """Return the path of the summary."""
    return derived / f"{ASSET}.json"


# ---- planning


@dataclass(slots=True)
class DuplicatesPlan:
    """The vectors to compare, and the report's version.

    Attributes:
        derived: parent of the reports.
        found: the vectors.
        captioned: ids of images that may be packed: with a caption, and not withdrawn.
        settings: of the search.
        version: of the report.
        color: how the sheet reads pixels.
    """

    derived: Path
    found: CurrentFiles
    captioned: Container[str]
    settings: NearDuplicateSettings
    version: str
    color: ColorSetting = SRGB


def plan_near_duplicates(derived: Path, ledger: Ledger, settings: NearDuplicateSettings) -> DuplicatesPlan:
    """Select the vectors and compute the version of their report."""
    found = current_files(DINOV3, derived, ledger)
    captioned = ledger.captioned_ids() - ledger.ids("withdrawn")
    lines = [f"{FORMAT} {settings.threshold} {settings.probes}"]
    for file in found.files:
        source = file.source
        facts = source.file_name, source.fingerprint, file.content, source.image_id in captioned
        lines.append(f"{source.image_id} {' '.join(map(str, facts))}")
    version = fingerprint("\n".join(lines).encode())
    return DuplicatesPlan(derived, found, captioned, settings, version, PixelRule.read(ledger).color)


# ---- the report


def near_duplicate_reports(
    plan: DuplicatesPlan, approved: Folder, *, threads: int = 2, search: int = 1
) -> Iterator[CurationReport]:
    """Yield the single report; if its version is unchanged, no vector is read.

    Args:
        plan: the vectors.
        approved: folder of the images, for the sheet.
        threads: threads that read files.
        search: threads that compare vectors.
    """
    summary, groups, files = read_summary(plan.derived), None, {}
    if summary and summary.fingerprint == plan.version:
        groups = read_groups(plan.derived, summary)
    sheet = _opened(sheet_path(plan.derived)) if groups is not None else None
    if summary is None or groups is None or sheet is None:
        groups = find_groups(plan, threads=threads, search=search)
        sheet = draw_sheet(
            [_row(approved, group) for group in striking(groups)[:SHEET_GROUPS]],
            empty="no near duplicates",
            color=plan.color,
        )
        lines = b"".join(map(encode_line, groups))
        summary = _summary(plan, groups, lines)
        files = {
            lines_path(plan.derived): lines,
            sheet_path(plan.derived): as_png(sheet, tagged=True),
            summary_path(plan.derived): json_bytes(summary),
        }
    yield CurationReport(
        summary.fingerprint, files=files, counts=_counts(summary), pages={"sheet": _page(groups, sheet)}
    )


def find_groups(plan: DuplicatesPlan, *, threads: int = 2, search: int = 1) -> list[Group]:
    """Compare all vectors; return groups in order of their representatives."""
    found, settings = plan.found, plan.settings
    count = len(found.files)
    if count < 2:
        return []
    compared: list[CurrentFile] = []
    with search_threads(search), Progress(ASSET, count) as progress:
        index = make_index(DINOV3_WIDTH, count, lambda: _sample(found, threads), probes=settings.probes)
        blocks = _blocks(found, compared, threads, progress)
        groups = connected(count, similar_pairs(index, blocks, settings.threshold))
        return sorted((_group(plan, rows, compared, index) for rows in groups), key=lambda group: group.representative)


def unit_vector(vector: np.ndarray, path: Path = Path("vector")) -> np.ndarray:
    """Return the vector scaled to length 1, float32. Raises InvalidNpy if it is zero or not finite."""
    with np.errstate(invalid="ignore"):
        length = np.linalg.norm(vector.astype(np.float64))
    if not np.isfinite(length):
        raise InvalidNpy("non_finite", path, "NaN or infinity among the values")
    if not length:
        raise InvalidNpy("zero_norm", path, "all values are zero")
    return (vector / length).astype(np.float32)


def _sample(found: CurrentFiles, threads: int) -> np.ndarray:
    """Return vectors spread evenly over the folder, to train the index with."""
    size = training_size(len(found.files))
    chosen = [found.files[i] for i in np.linspace(0, len(found.files) - 1, size).astype(int)]
    return np.stack([vector for _, vector in measured(found, chosen, unit_vector, threads=threads)])


def _blocks(found: CurrentFiles, compared: list[CurrentFile], threads: int, progress: Progress) -> Iterator[np.ndarray]:
    """Yield all vectors, float32 (n, 1024); the files of the rows so far are appended to `compared`."""
    size = block_size(len(found.files))
    block: list[np.ndarray] = []
    for file, vector in measured(found, found.files, unit_vector, threads=threads):
        compared.append(file)
        block.append(vector)
        if len(block) == size:
            yield np.stack(block)
            progress.advance(len(block))
            block.clear()
    if block:
        yield np.stack(block)
        progress.advance(len(block))


def _group(plan: DuplicatesPlan, rows: np.ndarray, compared: Sequence[CurrentFile], index) -> Group:
    files = [compared[row].source for row in rows]
    best = min(
        range(len(rows)),
        key=lambda n: (
            files[n].image_id not in plan.captioned,
            -files[n].width * files[n].height,
            files[n].image_id,
        ),
    )
    vectors = np.stack([index.reconstruct(int(row)) for row in rows]).astype(np.float64)
    cosines = np.clip(vectors @ vectors[best] / np.linalg.norm(vectors, axis=1) / np.linalg.norm(vectors[best]), -1, 1)
    members = [
        Member(file.image_id, file.file_name, file.width, file.height, round(float(cosine), 6))
        for file, cosine in zip(files, cosines, strict=True)
    ]
    return Group(files[best].image_id, members)


def _summary(plan: DuplicatesPlan, groups: Sequence[Group], lines: bytes) -> Summary:
    left_out = Counter(sorted(plan.found.left_out.values()))
    compared = len(plan.found.files) - sum(file.image_id in plan.found.left_out for file in plan.found.files)
    return Summary(
        fingerprint=plan.version,
        threshold=plan.settings.threshold,
        images=compared,
        groups=len(groups),
        members=sum(len(group.members) for group in groups),
        left_out=dict(left_out),
        lines=fingerprint(lines),
    )


def _counts(summary: Summary) -> dict[str, int]:
    return {
        "images": summary.images,
        "groups": summary.groups,
        "members": summary.members,
        **{f"left out: {reason}": count for reason, count in sorted(summary.left_out.items())},
    }


# ---- display


def striking(groups: Iterable[Group]) -> list[Group]:
    """Sort groups by size, largest first, then by least cosine, highest first."""
    return sorted(groups, key=lambda group: (-len(group.members), -group.least, group.representative))


def _row(approved: Folder, group: Group) -> Row:
    """Return a row of the sheet: the representative, then the others by decreasing cosine."""
    members = sorted(group.members, key=lambda m: (m.image_id != group.representative, -m.cosine, m.image_id))
    title = f"{len(members)} images, cosine to the first one at least {group.least:.4f}"
    return Row(title, [Tile(approved / member.file, member.image_id) for member in members])


def _page(groups: Sequence[Group], sheet: Image.Image) -> str:
    """Return markdown with a picture of the sheet."""
    shown = f", shown: the {SHEET_GROUPS} largest" if len(groups) > SHEET_GROUPS else ""
    head = f"groups: {len(groups)}{shown}" if groups else "no near duplicates"
    return as_page(head, sheet if groups else None, "near duplicates")


def _opened(path: Path) -> Image.Image | None:
    try:
        return Image.open(io.BytesIO(path.read_bytes()), formats=["PNG"]).convert("RGB")
    except (OSError, SyntaxError):
        return None


# ---- reading


def read_summary(derived: Path) -> Summary | None:
    """Return the summary; None if it is missing, of another format or incomplete."""
    return read_document(summary_path(derived), Summary)


def read_groups(derived: Path, summary: Summary | None) -> list[Group] | None:
    """Return the groups of this summary; None if the file is missing or has other bytes."""
    if summary is None or not lines_path(derived).exists():
        return None
    data = lines_path(derived).read_bytes()
    return msgspec.json.Decoder(Group).decode_lines(data) if fingerprint(data) == summary.lines else None


def excluded_images(derived: Path, ledger: Ledger, settings: NearDuplicateSettings) -> Mapping[str, str]:
    """Return the images that the report excludes from shards: image id → text with representative and cosine. Empty if disabled.

    Raises:
        MissingInput: if there is no report.
        ImagemillError: if the report is of other vectors or settings.
    """
    if not settings.exclude:
        return {}
    summary = read_summary(derived)
    groups = read_groups(derived, summary)
    why = "imagemill.yaml sets near_duplicates.exclude: true"
    do = "run `imagemill run`, or materialize near_duplicates in the UI; or set near_duplicates.exclude: false"
    if summary is None or groups is None:
        raise MissingInput("no report of near duplicates", where=summary_path(derived), why=why, do=do)
    if summary.fingerprint != plan_near_duplicates(derived, ledger, settings).version:
        what = "the report of near duplicates is older than the vectors, or was made with other settings"
        raise ImagemillError(what, where=summary_path(derived), why=why, do=do)
    return _excluded(groups, settings)


def reported_images(derived: Path, settings: NearDuplicateSettings) -> Mapping[str, str] | None:
    """Return the images that the report excludes, even if it is outdated; None if a report is required and missing."""
    if not settings.exclude:
        return {}
    groups = read_groups(derived, read_summary(derived))
    return None if groups is None else _excluded(groups, settings)


def duplicates_in(groups: Iterable[Group], threshold: float) -> Iterator[tuple[Member, str]]:
    """Yield the members that are near duplicates of their representative, with its id."""
    for group in groups:
        for member in group.members:
            if member.image_id != group.representative and member.cosine >= threshold - TOLERANCE:
                yield member, group.representative


def _excluded(groups: Iterable[Group], settings: NearDuplicateSettings) -> dict[str, str]:
    return {
        member.image_id: f"cosine {member.cosine:.4f} to {representative}, which represents it"
        for member, representative in duplicates_in(groups, settings.threshold)
    }
