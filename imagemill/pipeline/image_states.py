"""The state of every image of a data root, and of every other input that has a problem, for the viewer. Opens no image.

    approved/ ─┐
    ledger ────┼──> one row per item (store/ledger/overview.py)
    shards ────┘

Counts of outcomes are those of accounting.py, problems those of problem_list.py.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, suppress
from typing import Literal, NamedTuple

from imagemill.domain.buckets import BUCKETS, assign_bucket, use_of_crop, use_of_window
from imagemill.domain.embedding_specs import VAE
from imagemill.errors import ImagemillError
from imagemill.pipeline.accounting import Standing
from imagemill.pipeline.curation.near_duplicates import duplicates_in, read_groups, read_summary
from imagemill.pipeline.problem_list import InputProblem, current_problems, list_problems
from imagemill.pipeline.session import Session
from imagemill.pipeline.shards.shard_sets import bucket_folder, live_places, read_manifest
from imagemill.pipeline.snapshot import Snapshot, read_snapshot, state_read
from imagemill.pipeline.stage2.inventory import Inventory
from imagemill.pipeline.status import ledger_of_runs
from imagemill.store.ledger.overview import Additions, Listed, Overview


def latent_picture(session: Session) -> Literal["original", "bucket"]:
    """Return the picture that the data root's VAE encodes."""
    return session.in_force(VAE).contract["size"]


class States(NamedTuple):
    """The state of each item, and all problems. Close the table."""

    table: Overview
    problems: list[InputProblem]


def read_states(
    session: Session,
    inventory: Inventory | None = None,
    *,
    fresh: bool = False,
    meanwhile: Callable[[Overview], object] = lambda table: None,
) -> States:
    """Gather the state of a data root. If nothing has changed since the last command, only `approved/` is listed.

    Args:
        session: the session of the data root.
        inventory: a listing that the caller has made; a new one without it.
        fresh: whether to list the other folders and plan every kind in any case.
        meanwhile: called with a table while `approved/` is listed. It is the one that is returned, or another one that is closed
            if something has changed.

    Raises:
        MissingInput: if nothing has run, or the folder of images is gone.
    """
    inventory = inventory or session.overview()
    snapshot = None if fresh else read_snapshot(session.root)
    if snapshot and snapshot.read and (found := _states_of(session, snapshot, inventory, meanwhile)):
        return found
    inventory.list_ahead()
    scan = inventory.scan
    ledger = ledger_of_runs(session)
    standing = Standing.read(inventory, ledger, current_problems(scan, ledger), captioned=session.captioned)
    outcomes = standing.outcomes([spec.kind for spec in standing.plans], migrate=True)
    problems = list_problems(inventory, ledger, standing.problems)
    return States(_table(session, standing.differing(outcomes, ledger, inventory.recorded.lines), problems), problems)


def _states_of(
    session: Session, snapshot: Snapshot, inventory: Inventory, meanwhile: Callable[[Overview], object]
) -> States | None:
    """Return the state that a snapshot has; None if something has changed since."""
    with ExitStack() as unless_returned, inventory.listing_ahead() as digest:
        table = unless_returned.enter_context(closing(_table(session, snapshot.differing, snapshot.status.problems)))
        meanwhile(table)
        with suppress(ImagemillError):  # an unreadable configuration or a missing folder, which their use reports
            if snapshot.read == state_read(session, digest()):
                unless_returned.pop_all()
                return States(table, snapshot.status.problems)
            _ = inventory.approved  # for what follows
    return None


def _table(session: Session, differing: Mapping[str, Listed | None], problems: Iterable[InputProblem]) -> Overview:
    reasons: dict[str, set[str]] = defaultdict(set)
    for problem in problems:
        reasons[problem.item].add(problem.reason)
    use = use_of_crop if latent_picture(session) == "bucket" else use_of_window

    def training(width: int, height: int) -> tuple[str, float, float]:
        bucket = assign_bucket(width, height)
        coverage, enlargement = use(width, height, bucket)
        return bucket, coverage, enlargement

    added = Additions(differing, reasons, _samples(session), _near_duplicates(session), training)
    return Overview.of(session.root.ledger, added)


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
    with closing(read_states(session).table) as table:
        counts = table.counts()
    return [Share(name, counts[name], counts[name] / max(1, counts["seen"]), limit) for name, limit in limits.items()]


def _samples(session: Session) -> Iterator[tuple[str, str, int]]:
    """Yield id, tar and offset of each live sample. Sets that cannot be read have none; `status` reports them."""
    for folder in (bucket_folder(session.root.shards, bucket) for bucket in BUCKETS):
        if read_manifest(folder):
            before, places = f"{folder.name}/", []
            with suppress(ImagemillError):
                places = list(live_places(folder))
            yield from ((each.image_id, before + each.shard, each.offset) for each in places)


def _near_duplicates(session: Session) -> dict[str, str]:
    """Return the representative of each image that the last report calls a near duplicate."""
    summary = read_summary(session.root.derived)
    groups = read_groups(session.root.derived, summary)
    if summary is None or groups is None:
        return {}
    return {member.image_id: representative for member, representative in duplicates_in(groups, summary.threshold)}
