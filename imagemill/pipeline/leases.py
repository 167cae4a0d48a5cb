"""Leases on partitions: one claim per asset and partition.

Chunks of a backfill, buckets, ranks and a sensor's run work in parallel, but never twice on the same partition. Claims are
stored in the ledger; a claim of a dead process is ignored.

Spec: docs/spec/conventions.md#leases
"""

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from imagemill.errors import ImagemillError
from imagemill.store.ledger import Ledger

POLL_SECONDS = 0.25
MOST_SECONDS = 3600.0

_WITHOUT_RUN = "of process "


def holder_without_run() -> str:
    """Return the text that a command without a run records in its leases instead of a run id."""
    return f"{_WITHOUT_RUN}{os.getpid()}"


class StillHeld(ImagemillError, TimeoutError):
    """Raised if another living run has held a partition for too long."""


def wait_for_claim(ledger: Ledger, asset: str, items: Sequence[str], run_id: str) -> None:
    """Lease these partitions to this process; while a living run holds one of them, wait and print its run id.

    Raises:
        StillHeld: after `MOST_SECONDS` seconds.
    """
    reported: set[str] = set()
    began = time.monotonic()
    while holders := ledger.claim(asset, items, run_id):
        for holder in sorted(holders - reported):
            print(f"{asset}: waiting for run {holder}, which works on the same partitions", file=sys.stderr, flush=True)
        reported |= holders
        if time.monotonic() - began > MOST_SECONDS:
            raise StillHeld(
                f"{asset}: after {MOST_SECONDS / 60:.0f} minutes, still held by run {', '.join(sorted(holders))}",
                where=ledger.path,
                why="only one run at a time may work on a partition",
                do="let that run end, or terminate it, then run the same command again",
            )
        time.sleep(POLL_SECONDS)
    if not run_id.startswith(_WITHOUT_RUN):
        ledger.in_run(run_id)


@contextmanager
def claimed(ledger: Ledger, asset: str, items: Sequence[str], run_id: str, *, stays: bool = False) -> Iterator[None]:
    """Claim partitions for the block; with `stays`, keep them until this process ends unless the block raises."""
    wait_for_claim(ledger, asset, items, run_id)
    try:
        yield
    except BaseException:
        stays = False
        raise
    finally:
        if not stays:
            ledger.release(asset, run_id)


@dataclass(frozen=True, slots=True)
class Leased:
    """Work on some partitions, which an asset returns to its IO manager. It is planned once the partitions are claimed.

    Attributes:
        asset, items, run_id: of the claim.
        plan: returns what the IO manager stores; called within the claim, since another run may have worked on the same
            partitions while this one waited.
    """

    ledger: Ledger
    asset: str
    items: Sequence[str]
    run_id: str
    plan: Callable[[], Any]

    @contextmanager
    def claimed(self) -> Iterator[Any]:
        """Claim the partitions, yield the plan, and release them when the block ends."""
        with claimed(self.ledger, self.asset, self.items, self.run_id):
            yield self.plan()
