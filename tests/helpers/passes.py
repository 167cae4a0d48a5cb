"""One embedding pass in this process, without Dagster."""

import contextlib
from collections import Counter
from collections.abc import Sequence

from imagemill.pipeline.stage2.embed import EmbedWorker
from imagemill.pipeline.stage2.plan import Job
from imagemill.pipeline.stage2.publish import count_rows, publish
from imagemill.store.ledger import Ledger


def run_pass(worker: EmbedWorker, jobs: Sequence[Job], ledger: Ledger, *, run_id: str = "") -> Counter[str]:
    """Run one whole pass as an asset does; return its counters."""
    counts: Counter[str] = Counter()
    with contextlib.closing(worker):
        for batch in publish(worker.stream(jobs), worker.store, ledger, run_id=run_id):
            count_rows(counts, batch)
    return counts
