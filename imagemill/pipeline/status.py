"""The state of a whole data root: images, files, records, shards, and the inputs that did not reach the output.

Reads only; opens no image and no npy file.

Images are counted in accounting.py; the report on one image is in image_report.py, printing in dagster_project/.
"""

from collections import Counter
from collections.abc import Collection, Iterator
from functools import cached_property
from typing import NamedTuple

import msgspec

from imagemill.domain.buckets import BUCKETS
from imagemill.domain.ids import image_id_of, suffix_of
from imagemill.domain.inputs import FORMATS, JOIN, NEW_INPUTS, OFF, SRGB, InputSettings
from imagemill.errors import ImagemillError, MissingInput
from imagemill.inputs.layouts import kohya_layout
from imagemill.inputs.listing import is_companion
from imagemill.inputs.scan import Scan, share_line
from imagemill.pipeline.accounting import ImageCounts, Standing
from imagemill.pipeline.colours import ColourCounts, colour_lines, colours_of, old_inputs_line
from imagemill.pipeline.problem_list import InputProblem, current_problems, list_problems, stage2_assets
from imagemill.pipeline.session import Session
from imagemill.pipeline.shards.shard_manifest import CropStatistics
from imagemill.pipeline.shards.shard_sets import bucket_folder, load_manifest
from imagemill.pipeline.stage2.inventory import Inventory
from imagemill.pipeline.stage2.models_in_use import preview_kinds
from imagemill.store.ledger import DECISIONS, Ledger, Problem
from imagemill.store.ledger.overview import Listed
from imagemill.store.locations import nothing_has_run
from imagemill.store.second_copy import newest
from imagemill.text.units import counted


class Status(msgspec.Struct, dict=True):
    """The state of a data root.

    Attributes:
        images: image files of `approved/` by outcome.
        kinds: per embedding kind, counts of done, missing (`to do`) and refused files.
        records: lines of the file of records with an id; `stage1`: those that are not yet of version 2.
        truncated: captions that are longer than the text encoder's input.
        cut_off: captions of a model that ended at the most tokens that it may write.
        regenerating: kinds whose files are all being replaced.
        previews: kinds with files of a preview model.
        colours: of the images of `approved/`, and how pixels are read.
        first_frames: images whose file has more pictures than the one that is used.
        conflicts: images of which a caption source of a lower rank has another text.
        unused: what a setting that is not set would use, with the setting.
        old_inputs: what the input settings of a new data root would add, if this one has those of an earlier release.
        buckets: samples and tars per bucket.
        crops: per bucket, what training at the bucket's size sees of the images.
        unreadable: buckets whose manifest cannot be used, with the remedy.
        problems: one entry per input and reason, in order of items.
        share: of the images that the data root takes; empty: all. `elsewhere`: files of other shares.
    """

    images: ImageCounts = ImageCounts()
    kinds: dict[str, dict[str, int]] = {}
    records: int = 0
    stage1: int = 0
    truncated: int = 0
    cut_off: int = 0
    regenerating: list[str] = []
    previews: list[str] = []
    colours: ColourCounts = ColourCounts()
    first_frames: int = 0
    conflicts: int = 0
    unused: list[str] = []
    old_inputs: str | None = None
    buckets: dict[str, tuple[int, int]] = {}
    crops: dict[str, CropStatistics] = {}
    unreadable: dict[str, str] = {}
    problems: list[InputProblem] = []
    share: str = ""
    elsewhere: int = 0

    def reasons(self) -> dict[str, int]:
        """Count inputs per reason."""
        return dict(sorted(Counter(problem.reason for problem in self.problems).items()))

    @cached_property
    def stage2_problems(self) -> list[InputProblem]:
        """Problems of images, captions, records and shards: not those of public data and Stage-A."""
        return [problem for problem in self.problems if stage2_assets().intersection(problem.assets)]

    @property
    def complete(self) -> bool:
        """Whether every image has every file and a record, and no input is missing."""
        counts = self.images
        faults = [problem for problem in self.stage2_problems if problem.reason not in DECISIONS]
        unfinished = counts.refused + counts.failed + counts.waiting + self.stage1 + len(faults)
        return not unfinished and not self.regenerating and self.records >= counts.seen


def ledger_of_runs(session: Session) -> Ledger:
    """Return the ledger for reading. Raises MissingInput if nothing has run, or if the ledger is lost."""
    root = session.root
    if not root.ledger.exists() and (found := newest(root)):
        raise MissingInput(
            "the ledger is lost",
            where=root.ledger,
            why=f"there is a second copy of its settings, written at {found.written_at:%Y-%m-%d %H:%M:%S} UTC",
            do="`imagemill repair` reports what can be rebuilt, `imagemill repair --apply` rebuilds it",
        )
    if not root.ledger.exists():
        raise nothing_has_run(root)
    return session.reading


def _chosen_inputs(session: Session) -> Collection[str] | None:
    """Return the input settings that the configuration contains; None if it cannot be read, which its use reports."""
    try:
        return session.config.chosen_inputs
    except ImagemillError:
        return None


def _old_inputs(chosen: Collection[str], inputs: InputSettings, scan: Scan, colours: ColourCounts) -> str | None:
    """Return `old_inputs_line` for the settings that the configuration leaves open."""
    counts = Counter(problem.reason for problem in scan.problems)
    texts = counts["caption_extension"] + sum(_is_unread_caption(problem) for problem in scan.problems)
    found = {
        "formats": sum(_is_left_out(problem, inputs, scan) for problem in scan.problems),
        "recursive": 0 if inputs.recursive else counts["sub_folder"],
        "companions": 0 if inputs.companions else sum(is_companion(i, scan.sources) for i in scan.sources),
        "sidecars": texts if inputs.sidecars.exact else 0,
        "metadata": counts["metadata_not_read"] if inputs.metadata == OFF else 0,
    }
    unread = {name: count for name, count in found.items() if name not in chosen}
    return old_inputs_line(SRGB if "color" in chosen else inputs.color, colours, unread)


def _is_unread_caption(problem: Problem) -> bool:
    extension = suffix_of(problem.item)[1:].lower()
    return problem.reason == "unsupported_type" and extension in NEW_INPUTS.sidecars.extensions


def _unused(chosen: Collection[str], inputs: InputSettings, scan: Scan, several_lines: int) -> Iterator[str]:
    """Yield what the folder contains and no setting uses."""
    if several_lines and "lines" not in chosen and inputs.lines == JOIN:
        yield (
            f"{counted(several_lines, 'caption file')} with several lines, which are joined; captions.lines: each makes a "
            "caption of each line, first uses the first line, join keeps this without the notice"
        )
    if "repeats" not in chosen and inputs.repeats == OFF:
        yield from (f"{layout}; inputs.repeats: kohya records them" for layout in kohya_layout(scan))


def _is_left_out(problem: Problem, inputs: InputSettings, scan: Scan) -> bool:
    """Return whether a file has an image format that the data root does not read, and an id that no image has."""
    extension = suffix_of(problem.item)[1:].lower()
    unread = problem.reason == "unsupported_type" and extension in FORMATS and extension not in inputs.formats
    return unread and image_id_of(problem.item) not in scan.sources


class State(NamedTuple):
    """A status; the listing that it was read from; and what `store.ledger.overview.Additions` calls `differing`."""

    status: Status
    inventory: Inventory
    differing: dict[str, Listed | None]


def read_status(session: Session, inventory: Inventory | None = None) -> Status:
    """Gather the state of a data root from listings, ledger, records and manifests.

    Args:
        session: the session of the data root.
        inventory: a listing that the caller has made; a new one without it.
    """
    return read_state(session, inventory=inventory).status


def read_state(
    session: Session, embedded: frozenset[str] | set[str] = frozenset(), inventory: Inventory | None = None
) -> State:
    """Gather the state of a data root as `read_status` does.

    `embedded`: images for which the calling command made a file.
    """
    inventory, status = inventory or session.overview(), Status()
    scan = inventory.scan  # before the ledger: a missing folder of images is reported first
    ledger = ledger_of_runs(session)
    problems = current_problems(scan, ledger)
    standing = Standing.read(inventory, ledger, problems, captioned=session.captioned)
    outcomes = standing.outcomes([spec.kind for spec in standing.plans], embedded, migrate=True)
    status.images = standing.counts(outcomes)
    status.kinds = {
        spec.kind: {"done": len(plan.done), "to do": len(plan.jobs), "refused": len(plan.refused)}
        for spec, plan in standing.plans.items()
    }
    inputs = session.inputs
    status.colours, status.first_frames = colours_of(ledger, scan.sources, inputs.color)
    status.share, status.elsewhere = inputs.share, scan.elsewhere
    chosen = _chosen_inputs(session)
    if chosen is not None:
        status.old_inputs = _old_inputs(chosen, inputs, scan, status.colours)
        status.unused = list(_unused(chosen, inputs, scan, ledger.several_lines()))
    status.conflicts = ledger.conflicts()
    status.regenerating, status.truncated = sorted(ledger.regenerating()), ledger.truncated()
    status.previews, status.cut_off = preview_kinds(ledger), len(ledger.cut_off())
    status.problems = list_problems(inventory, ledger, standing.problems)
    status.records, status.stage1 = len(inventory.recorded.lines), len(inventory.recorded.stage1)
    for bucket in BUCKETS:
        try:
            manifest = load_manifest(bucket_folder(session.root.shards, bucket))
            status.buckets[bucket] = (manifest.samples, len(manifest.shards))
            if manifest.crop:
                status.crops[bucket] = manifest.crop
        except MissingInput:
            continue
        except ImagemillError as error:
            status.unreadable[bucket] = f"{error.what}; {error.do}"
    return State(status, inventory, standing.differing(outcomes, ledger, inventory.recorded.lines))


def input_lines(status: Status) -> Iterator[tuple[str, str]]:
    """Yield label and text of each line about colours and formats, for people."""
    if status.share:
        yield "share", share_line(status.share, status.elsewhere)
    for n, line in enumerate(colour_lines(status.colours, status.first_frames)):
        yield "" if n else "colours", line
    if status.conflicts:
        images = counted(status.conflicts, "image")
        yield (
            "captions",
            f"{images} with another text in a source of a lower rank (caption_conflict); `imagemill scan` lists the sources",
        )
    for line in status.unused:
        yield "unused", line
    if status.old_inputs:
        yield "inputs", f"as in an earlier release; {status.old_inputs}"
