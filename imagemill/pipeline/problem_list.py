"""Every input of a data root that did not reach the output, with the reason and the remedy.

    ledger ──problems that still hold──┐
    quarantine files ──lines───────────┼──> one entry per input and reason
    ledger and approved/ ──gone images─┘

Problems are recorded in store/ledger/problems.py; images are counted in accounting.py.

Spec: docs/spec/conventions.md#no-silent-loss
"""

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Literal

import msgspec

from imagemill.domain.embedding_specs import EmbeddingSpec, embedding_specs
from imagemill.domain.layout import DataRoot
from imagemill.fs.fingerprints import FileSignature
from imagemill.fs.listing import FileListing
from imagemill.inputs.row_captions import METADATA
from imagemill.inputs.scan import SOURCE_ASSET, Scan, is_image
from imagemill.inputs.sidecars import SIDECARS
from imagemill.models import CAPTIONER
from imagemill.pipeline.shards.readiness import ASSET as SHARDS
from imagemill.pipeline.stage2.inventory import Inventory
from imagemill.pipeline.stage2.merge import ASSET as RECORDS
from imagemill.pipeline.stage2.plan import IMAGE_REASONS, plan_for
from imagemill.pipeline.stage2.quarantine import BAD_ID, DUPLICATE, MALFORMED, REPLACED_TEXTS, quarantined
from imagemill.pipeline.stage2.renames import find_renames
from imagemill.store.ledger import DECISIONS, Ledger, Problem, SourceRow
from imagemill.text.units import counted

SOURCE_MISSING, RENAMED, UNPAIRED = "source_missing", "renamed", "unpaired"

# What to do about renamed images.
ACCEPT = "`imagemill run --accept-renames`"


def stage2_assets() -> set[str]:
    """Return the assets of Stage 2 and of its shards. Public data and Stage-A have summaries of their own."""
    return {SOURCE_ASSET, SIDECARS, METADATA, CAPTIONER, *(spec.kind for spec in embedding_specs()), RECORDS, SHARDS}


# Reasons of lines of the file of records, which are not images.
OF_LINES = frozenset({MALFORMED, BAD_ID, DUPLICATE})

_OF_CAPTIONS = {SIDECARS, CAPTIONER}

_REMEDIES = {
    MALFORMED: "repair the line and add it to {origin} again; then remove it from {kept_in}",
    BAD_ID: "give the record the image's file name without extension as image_id and add it to {origin} again; then remove "
    "the line from {kept_in}",
    DUPLICATE: "if the earlier record is the right one, copy it into {origin} in place of the later one; then remove it "
    "from {kept_in}",
}


Outcome = Literal["refused", "failed", "gone"]

# Images that a message names.
_SHOWN = 3


class InputProblem(msgspec.Struct, frozen=True):
    """One input that did not reach the output, and one reason for it.

    Attributes:
        item: image id; file name if there is no id; `file:line` of a record.
        outcome: `refused`, `failed`, or `gone` for an image that is no longer in `approved/`.
        assets: those that stopped it, in alphabetical order.
        since: time of the first report (UTC, ISO 8601); empty if unknown.
    """

    item: str
    outcome: Outcome
    reason: str
    assets: list[str]
    detail: str
    remedy: str
    since: str = ""


def current_problems(scan: Scan, ledger: Ledger, problems: Iterable[Problem] | None = None) -> list[Problem]:
    """Return the problems that still hold: those of bytes and names that exist now.

    Args:
        scan: contents of `approved/`.
        ledger: contains the problems.
        problems: rows of the ledger; unset: all.
    """
    problems = ledger.problems() if problems is None else problems
    rows = [p for p in problems if p.stat is None or p.stat == _signature_of(p, scan)]
    captions = ledger.captions([p.item for p in rows if p.reason == "missing_caption"])
    explained = captions.keys() | {p.item for p in rows if p.asset == SIDECARS}
    return [p for p in rows if p.reason != "missing_caption" or p.item not in explained]


def _signature_of(problem: Problem, scan: Scan) -> FileSignature | None:
    if problem.asset == METADATA:
        return next((file.stat for file in scan.metadata if file.path == problem.item), None)
    source = scan.sources.get(problem.item)
    if source is None:
        return None
    return source.caption if problem.asset == SIDECARS else source.stat


def list_problems(inventory: Inventory, ledger: Ledger, problems: Iterable[Problem]) -> list[InputProblem]:
    """Return one entry per input and reason, in order of items. A refused image is not listed for its caption as well.

    Args:
        inventory: contents of the folders.
        ledger: sources and withdrawals.
        problems: those of the ledger that still hold.
    """
    problems = list(problems)
    refused = {p.item for p in problems if p.asset != SIDECARS and p.reason not in DECISIONS}
    problems = [p for p in problems if p.asset != SIDECARS or p.item not in refused]
    entries = [*_of_ledger(problems), *gone_images(inventory.scan, ledger), *_quarantined_lines(inventory.root)]
    return _sorted(entries)


def _of_ledger(problems: Iterable[Problem]) -> Iterator[InputProblem]:
    together: dict[tuple[str, str], list[Problem]] = {}
    for problem in problems:
        together.setdefault((problem.item, problem.reason), []).append(problem)
    for (item, reason), rows in together.items():
        # If there are several assets, the one that reported the input first describes it.
        first = min(rows, key=lambda row: (row.at, row.asset))
        outcome: Outcome = "refused" if any(row.outcome == "refused" for row in rows) else "failed"
        yield InputProblem(
            item=item,
            outcome=outcome,
            reason=reason,
            assets=sorted({row.asset for row in rows}),
            detail=first.detail,
            remedy=first.remedy,
            since=first.at,
        )


def gone_images(scan: Scan, ledger: Ledger, among: Mapping[str, SourceRow] | None = None) -> Iterator[InputProblem]:
    """Yield the images that were deleted or renamed, except withdrawn ones.

    Args:
        scan: contents of `approved/`.
        ledger: sources and withdrawals.
        among: the rows to compare with the folder, by image id; unset: all.
    """
    ids = (ledger.source_ids() if among is None else among.keys()) - scan.sources.keys()
    gone, withdrawn = ledger.sources(sorted(ids)), ledger.withdrawals()
    if not gone:
        return
    pairing = find_renames(scan, ledger, among)
    for former, image in pairing.pairs:
        yield InputProblem(
            image.image_id,
            "gone",
            RENAMED,
            [SOURCE_ASSET],
            f"the same bytes as {former.file_name}, which no longer exists; the files made from it are kept",
            f"if it was renamed, {ACCEPT}; else remove the earlier one from the shards: {_withdraw(former)}",
        )
    for former, images in pairing.unpaired:
        names = ", ".join(image.file_name for image in images[:_SHOWN])
        rest = f" and {len(images) - _SHOWN:,} more" if len(images) > _SHOWN else ""
        yield InputProblem(
            former.image_id,
            "gone",
            UNPAIRED,
            [SOURCE_ASSET],
            f"{former.file_name} is no longer in approved/; {names}{rest} have the same bytes, so its new name is not clear",
            f"leave as many of them as are gone, or restore it; or remove it from the shards: {_withdraw(former)}",
        )
    explained = {former.image_id for former, _ in (*pairing.pairs, *pairing.unpaired)}
    # Present images whose recorded signature is current, by the fingerprint of their bytes.
    found = scan.sources
    alike = ledger.sources_with({row.fingerprint for row in gone.values()}) if among is None else among
    equal = {row.fingerprint: row for i, row in alike.items() if i in found and found[i].stat == row.stat}
    for row in gone.values():
        if row.image_id in explained or row.image_id in withdrawn:
            continue
        other = equal.get(row.fingerprint)
        same = f"; {other.file_name} has the same bytes" if other else ""
        yield InputProblem(
            row.image_id,
            "gone",
            SOURCE_MISSING,
            [SOURCE_ASSET],
            f"{row.file_name} is no longer in approved/; the files made from it are kept{same}",
            f"restore the image, or remove it from the shards: {_withdraw(row)}",
        )


def _withdraw(row: SourceRow) -> str:
    return f"`imagemill withdraw {shlex.quote(row.image_id)}`"


def renames_line(problems: Iterable[InputProblem]) -> str | None:
    """Return the line about images with a new name; None without any."""
    if not (new := [problem.item for problem in problems if problem.reason == RENAMED]):
        return None
    rest = f" and {len(new) - _SHOWN:,} more" if len(new) > _SHOWN else ""
    it = "it the caption and the record" if len(new) == 1 else "them the captions and records"
    return (
        f"{counted(len(new), 'image')} with a new name ({', '.join(new[:_SHOWN])}{rest}); "
        f"{ACCEPT} gives {it} of the earlier name, `imagemill problems --reason {RENAMED}` lists both names"
    )


def _quarantined_lines(root: DataRoot) -> Iterator[InputProblem]:
    for line in quarantined(root.quarantine):
        if line.reason in REPLACED_TEXTS:
            continue
        kept_in = f".imagemill/quarantine/{line.kept_in.name}"
        remedy = _REMEDIES.get(line.reason, _REMEDIES[MALFORMED])
        yield InputProblem(
            item=f"{line.origin}:{line.number}",
            outcome="refused",
            reason=line.reason,
            assets=[RECORDS],
            detail=f"{line.why}; the line is kept in {kept_in}",
            remedy=remedy.format(origin=root.stage2_jsonl.name, kept_in=kept_in),
        )


# ---- of one output


def problems_of_kind(inventory: Inventory, ledger: Ledger, spec: EmbeddingSpec) -> list[InputProblem]:
    """Return why images have no file of this kind.

    An image that is refused because of its own bytes is refused for every kind, although only one asset recorded it.
    """
    assets = {spec.kind} | (_OF_CAPTIONS if spec.source == "caption" else set())

    def concerns(problem: Problem) -> bool:
        is_source = problem.asset == SOURCE_ASSET and problem.reason != "unsupported_type" and is_image(problem.item)
        return problem.asset in assets or is_source or _is_of_image(problem)

    held = _held(inventory, ledger, concerns)
    ids = sorted({problem.item for problem in held if problem.item in inventory.scan.sources})
    # List these files again: the inventory's listing may be from before this pass.
    current = replace(inventory, listed={spec: FileListing.of(inventory.store(spec).signatures(ids))})
    done = set(plan_for(spec, ids, current, ledger).done)
    return _sorted(_of_ledger(problem for problem in held if problem.item not in done))


def problems_of_records(inventory: Inventory, ledger: Ledger) -> list[InputProblem]:
    """Return why inputs have no record or an outdated one; includes quarantined lines."""
    assets = {SOURCE_ASSET, RECORDS} | _OF_CAPTIONS
    held = _held(inventory, ledger, lambda problem: problem.asset in assets or _is_of_image(problem))
    return _sorted([*_of_ledger(held), *_quarantined_lines(inventory.root)])


def _sorted(entries: Iterable[InputProblem]) -> list[InputProblem]:
    return sorted(entries, key=lambda entry: (entry.item, entry.reason))


def _is_of_image(problem: Problem) -> bool:
    assets = {RECORDS, CAPTIONER, *(spec.kind for spec in embedding_specs())}
    return problem.asset in assets and problem.reason in IMAGE_REASONS


def _held(inventory: Inventory, ledger: Ledger, concerns: Callable[[Problem], bool]) -> list[Problem]:
    """Return the current problems that the predicate selects. The folder is listed only if there are any."""
    rows = [problem for problem in ledger.problems() if concerns(problem)]
    return current_problems(inventory.scan, ledger, rows) if rows else []
