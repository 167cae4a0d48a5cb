"""The state of every image of a data root, and of every other input that has a problem, for the viewer. Opens no image.

    approved/ ─┐
    ledger ────┼──> one row per item (store/ledger/overview.py)
    shards ────┘

Counts of outcomes are those of accounting.py, problems those of problem_list.py.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing
from functools import cache
from typing import Final, Literal, NamedTuple

from imagemill.domain.buckets import BUCKETS, assign_bucket, use_of_crop, use_of_window
from imagemill.domain.embedding_specs import VAE
from imagemill.errors import ImagemillError
from imagemill.pipeline.accounting import Standing
from imagemill.pipeline.curation.near_duplicates import duplicates_in, read_groups, read_summary
from imagemill.pipeline.problem_list import InputProblem, current_problems, list_problems
from imagemill.pipeline.session import Session
from imagemill.pipeline.shards.shard_sets import IndexLine, bucket_folder, live_lines, read_manifest
from imagemill.pipeline.stage2.inventory import Inventory
from imagemill.pipeline.status import ledger_of_runs
from imagemill.store.ledger import ShownCaption
from imagemill.store.ledger.overview import ImageState, Overview


def latent_picture(session: Session) -> Literal["original", "bucket"]:
    """Return the picture that the data root's VAE encodes."""
    return session.in_force(VAE).contract["size"]


_NO_CAPTION: Final = ShownCaption("", None, None, None, False)


class States(NamedTuple):
    """The state of each item, in no order; all problems; and the folders of `approved/` that contain images."""

    rows: Iterator[ImageState]
    problems: list[InputProblem]
    folders: set[str]


def read_states(session: Session, inventory: Inventory | None = None) -> States:
    """Gather the state of a data root.

    Args:
        session: the session of the data root.
        inventory: a listing that the caller has made; a new one without it.

    Raises:
        MissingInput: if nothing has run, or the folder of images is gone.
    """
    inventory = inventory or session.overview()
    inventory.list_ahead()
    scan = inventory.scan
    ledger = ledger_of_runs(session)
    standing = Standing.read(inventory, ledger, current_problems(scan, ledger), captioned=session.captioned)
    outcomes = standing.outcomes([spec.kind for spec in standing.plans], migrate=True)
    problems = list_problems(inventory, ledger, standing.problems)
    reasons: dict[str, set[str]] = defaultdict(set)
    for problem in problems:
        reasons[problem.item].add(problem.reason)
    refused_names = {problem.item for problem in scan.refused_images}
    withdrawn, marks = ledger.withdrawals(), ledger.marks()
    samples, duplicates = _samples(session), _near_duplicates(session)
    use = use_of_crop if latent_picture(session) == "bucket" else use_of_window

    @cache
    def training(width: int, height: int) -> tuple[str, float, float]:
        """Return bucket, coverage and enlargement of images of a size."""
        bucket = assign_bucket(width, height)
        coverage, enlargement = use(width, height, bucket)
        return bucket, coverage, enlargement

    sizes = ledger.sizes()

    def state(item: str, caption: ShownCaption = _NO_CAPTION) -> ImageState:
        listed, is_refused, size = scan.sources.get(item), item in refused_names, sizes.get(item)
        width, height = size or (None, None)
        bucket, coverage, enlargement = training(*size) if size else (None, None, None)
        _, text, origin, tokens, truncated = caption
        tar, offset = samples.get(item, (None, None))
        # By position, in order of the fields: keywords take six times as long.
        return ImageState(
            item,
            listed.file_name if listed else item if is_refused else None,
            listed is not None or is_refused,
            outcomes[item] if listed else "refused" if is_refused else "",
            tuple(sorted(reasons[item])) if item in reasons else (),
            width,
            height,
            bucket,
            coverage,
            enlargement,
            text,
            origin,
            tokens,
            truncated,
            tar,
            offset,
            duplicates.get(item),
            withdrawn.get(item),
            item in marks,
        )

    def states() -> Iterator[ImageState]:
        others = dict.fromkeys(
            (*scan.sources, *refused_names, *sizes, *inventory.recorded.lines, *samples, *withdrawn, *marks, *reasons)
        )
        for caption in ledger.shown_captions():
            others.pop(caption.image_id, None)
            yield state(caption.image_id, caption)
        yield from map(state, others)

    return States(states(), problems, {source.file_name.rpartition("/")[0] for source in scan.sources.values()})


class Share(NamedTuple):
    """The share of a filter in the images of `approved/`. `images`: its number; `limit`: the largest permitted share."""

    name: str
    images: int
    share: float
    limit: float


def limited_shares(session: Session) -> list[Share]:
    """Return the share of each filter that the configuration limits; no state is read if it limits none."""
    if not (limits := session.config.limits):
        return []
    with closing(Overview(read_states(session).rows)) as table:
        counts = table.counts()
    return [Share(name, counts[name], counts[name] / max(1, counts["seen"]), limit) for name, limit in limits.items()]


def _samples(session: Session) -> dict[str, tuple[str, int]]:
    """Return tar and offset of each live sample. Sets that cannot be read have none; `status` reports them."""
    found: dict[str, tuple[str, int]] = {}
    for bucket in BUCKETS:
        folder = bucket_folder(session.root.shards, bucket)
        try:
            lines: list[IndexLine] = live_lines(folder) if read_manifest(folder) else []
        except (ImagemillError, OSError):
            continue
        found.update((line.image_id, (f"{folder.name}/{line.shard}", line.offset)) for line in lines)
    return found


def _near_duplicates(session: Session) -> dict[str, str]:
    """Return the representative of each image that the last report calls a near duplicate."""
    summary = read_summary(session.root.derived)
    groups = read_groups(session.root.derived, summary)
    if summary is None or groups is None:
        return {}
    return {member.image_id: representative for member, representative in duplicates_in(groups, summary.threshold)}
