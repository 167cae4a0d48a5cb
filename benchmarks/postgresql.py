"""The Dagster history in PostgreSQL beside that in SQLite, on one server and in one run.

    events       CPU time of this process and wall time per event, materialised and planned, in batches
    statistics   `partitionStats` of every asset by GraphQL: the first query after the start of the UI
    empty        `imagemill run` on complete images with an empty history: each is reported, no array is made again

Images of 64 x 64 pixels, three kinds of 16 bytes (benchmarks/tiny_kinds), encoders without cost. PostgreSQL waits for its disk.
"""

import argparse
import itertools
import logging
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dagster as dg
from dagster._core.events import AssetMaterializationPlannedData  # noqa: TID251

from benchmarks.common.inputs import noise_photos, scratch
from benchmarks.common.ui import STATISTICS, running_ui
from benchmarks.scale import BYTES_PER_TINY, OURS, SIDE, TINY_KINDS, TINY_PATH, command, line_of, use_tiny_kinds
from dagster_project.internals.instance import open_instance
from imagemill.domain.layout import DataRoot
from resources.dagster_internals.events import report_without_run, version_tags
from tests.helpers.postgres import PostgresServer, keep_history, postgres_server

CPU_MS, WALL_MS, STATISTICS_RATIO = 0.3, 0.5, 1.5
NOTHING_RATIO, EVENT_MS = 3.0, 0.5
PLANNED_BATCH = 1000
RUN_ID = "00000000-0000-0000-0000-000000000000"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--images", type=int, default=60_000)
    parser.add_argument("--rounds", type=int, default=3, help="the median of this many first queries")
    arguments = parser.parse_args()
    with (
        scratch(in_memory_bytes=2 * BYTES_PER_TINY * arguments.images) as folder,
        postgres_server(fsync=True) as server,
    ):
        print(
            f"{arguments.images:,} images, SQLite in {folder.parent}, PostgreSQL in {server.folder.parent}", flush=True
        )
        met = [
            *_events(folder, server, arguments.images),
            *_commands(folder, server, arguments.images, arguments.rounds),
        ]
    return 0 if all(met) else 1


# ---- events


def _events(folder: Path, server: PostgresServer, images: int) -> Iterator[bool]:
    """Print the cost of an event in both databases; yield whether PostgreSQL's is within its goals."""
    keys = [f"photo{number:06d}" for number in range(images)]
    for name, url in (("SQLite", None), ("PostgreSQL", server.create("events"))):
        goals = (CPU_MS, WALL_MS) if url else (None, None)
        with _opened(DataRoot(folder / name), url) as instance:
            costs = {"materialised": _milliseconds(images, report_without_run, instance, map(_materialised, keys))}
            planned = list(map(_planned, keys))
            costs["planned"] = _milliseconds(images, _in_batches, planned, instance.event_log_storage.store_event_batch)
        for kind, (cpu, wall) in costs.items():
            yield line_of(f"{name}, {kind}: CPU ms", cpu, goals[0])
            yield line_of(f"{name}, {kind}: wall ms", wall, goals[1])


@contextmanager
def _opened(root: DataRoot, url: str | None) -> Iterator[dg.DagsterInstance]:
    if url:
        keep_history(root, url)
    os.environ["DAGSTER_HOME"] = str(root.dagster_home)
    with open_instance(root) as instance:
        yield instance
    del os.environ["DAGSTER_HOME"]


def _materialised(key: str) -> dg.AssetMaterialization:
    tags = version_tags(key, code_version="1", inputs={"approved_images": key}, pointer=1)
    return dg.AssetMaterialization("events", partition=key, tags=tags, metadata={"bytes": 16, "content": key})


def _planned(key: str) -> dg.EventLogEntry:
    asset = dg.AssetKey("events")
    event = dg.DagsterEvent(
        event_type_value=dg.DagsterEventType.ASSET_MATERIALIZATION_PLANNED.value,
        job_name="job",
        message=f"job intends to materialize asset {asset.to_string()}",
        event_specific_data=AssetMaterializationPlannedData(asset, partition=key),
        step_key="events",
    )
    return dg.EventLogEntry(
        error_info=None, level=logging.DEBUG, user_message="", run_id=RUN_ID, timestamp=time.time(), step_key="events",
        job_name="job", dagster_event=event,
    )  # fmt: skip


def _in_batches(events: Sequence[Any], store: Callable[[Sequence[Any]], object]) -> None:
    for first in range(0, len(events), PLANNED_BATCH):
        store(events[first : first + PLANNED_BATCH])


def _milliseconds(events: int, work: Callable[..., object], *arguments: object) -> tuple[float, float]:
    """Return CPU time of this process and wall time per event."""
    cpu, wall = time.process_time(), time.perf_counter()
    work(*arguments)
    return 1000 * (time.process_time() - cpu) / events, 1000 * (time.perf_counter() - wall) / events


# ---- commands


def _commands(folder: Path, server: PostgresServer, images: int, rounds: int) -> Iterator[bool]:
    """Print the cost of a run on an empty history, and of the first query; yield whether PostgreSQL's is within its goals."""
    root = DataRoot(folder / "root")
    noise_photos(root.approved, images, width=SIDE, height=SIDE, smooth=8)
    use_tiny_kinds(root)
    sqlite, postgres = folder / "sqlite", folder / "postgres"
    line_of("first run, CPU s", _run(root, sqlite))
    nothing = _run(root, sqlite)
    line_of("nothing to do, SQLite, CPU s", nothing)
    before = _inodes(root)

    keep_history(DataRoot(postgres.parent / "config"), server.create("history"))
    (postgres.parent / "config" / ".dagster").rename(postgres)
    seconds = _run(root, postgres)
    (events,) = map(int, server.query(_EVENTS, "history")[0])
    counts = {asset: int(count) for asset, count in server.query(_COUNTS, "history")}
    yield line_of("empty history, PostgreSQL, CPU s", seconds, NOTHING_RATIO * nothing + EVENT_MS * events / 1000)
    line_of("  events", events)
    yield line_of("  assets with another number of partitions", sum(count != images for count in counts.values()), 0)
    yield line_of("  image assets that are missing", len(TINY_KINDS) + 1 - len(counts), 0)
    yield line_of("  arrays that were made again", len(_inodes(root) - before), 0)
    line_of("nothing to do, PostgreSQL, CPU s", _run(root, postgres))

    medians = {}
    for name, home in (("SQLite", sqlite), ("PostgreSQL", postgres)):
        medians[name] = statistics.median(_first_query(root, home) for _ in range(rounds))
        line_of(f"partitionStats, {name}, s", medians[name])
    yield line_of("  relative to SQLite", medians["PostgreSQL"] / medians["SQLite"], STATISTICS_RATIO)


_EVENTS = "SELECT count(*) FROM event_logs WHERE dagster_event_type = 'ASSET_MATERIALIZATION'"
_COUNTS = (
    "SELECT asset_key, count(DISTINCT partition) FROM event_logs WHERE dagster_event_type = 'ASSET_MATERIALIZATION' "
    f"AND asset_key IN ({', '.join(repr(dg.AssetKey(name).to_string()) for name in ('approved_images', *TINY_KINDS))}) "
    "GROUP BY 1"
)


def _run(root: DataRoot, home: Path) -> float:
    return command("run", "--data-root", root.path, DAGSTER_HOME=str(home)).cpu_seconds


def _inodes(root: DataRoot) -> set[int]:
    """Return the inodes of all arrays: an array that is made again has another one."""
    folders = (os.scandir(root.derived / kind) for kind in TINY_KINDS)
    return {entry.inode() for entry in itertools.chain.from_iterable(folders) if entry.name.endswith(".npy")}


def _first_query(root: DataRoot, home: Path) -> float:
    """Return the seconds of the first query for the numbers of partitions, without what Dagster has cached in the history."""
    _forget_cached(root, home)
    words = [*OURS, "ui", "--data-root", root.path, "--port"]
    with running_ui(words, DAGSTER_HOME=str(home), PYTHONPATH=TINY_PATH) as ui:
        began = time.perf_counter()
        ui.ask(STATISTICS)
        return time.perf_counter() - began


def _forget_cached(root: DataRoot, home: Path) -> None:
    os.environ["DAGSTER_HOME"] = str(home)
    with open_instance(root) as instance, instance.event_log_storage.index_transaction() as connection:
        connection.exec_driver_sql("UPDATE asset_keys SET cached_status_data = NULL")
    del os.environ["DAGSTER_HOME"]


if __name__ == "__main__":
    sys.exit(main())
