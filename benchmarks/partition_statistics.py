"""Cold partition statistics of the UI: our storage and Dagster's on the same history.

    limit   SELECT DISTINCT of the partitions of each asset

CPU seconds for all image assets, as the first page of the UI needs them: what is materialised, failed, in progress.
"""

import argparse
import os
import sqlite3
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import dagster as dg
from dagster._core.storage.event_log.sqlite.sqlite_event_log import SqliteEventLogStorage  # noqa: TID251
from dagster._core.storage.partition_status_cache import get_and_update_asset_status_cache_value  # noqa: TID251

from assets.partitions import images
from benchmarks.common.inputs import scratch
from dagster_project.internals.instance import open_instance
from dagster_project.internals.storage import BatchSqliteEventLogStorage
from imagemill.domain.layout import DataRoot
from resources.dagster_internals.events import report_without_run

RATIO = 0.5
ASSETS = ("approved_images", "dinov3_npy", "vae_latents", "t5_hidden")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--images", type=int, default=60_000)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    with scratch() as folder:
        os.environ["DAGSTER_HOME"] = str(folder / ".dagster")
        with open_instance(DataRoot(folder)) as instance:
            history = _fill(instance, arguments.images)
            seconds: dict[str, list[float]] = {"limit": [], "Dagster": [], "imagemill": []}
            for _ in range(arguments.rounds):
                seconds["limit"].append(_cpu(lambda: _distinct(history)))
                for name, kind in (("Dagster", SqliteEventLogStorage), ("imagemill", BatchSqliteEventLogStorage)):
                    seconds[name].append(_cold(instance, history, kind))
    print(f"{arguments.images:,} images, {len(ASSETS)} assets; CPU seconds, medians of {arguments.rounds}")
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    for name, median in medians.items():
        print(f"{name:<40}{median:>8.3f}")
    ratio = medians["imagemill"] / medians["Dagster"]
    print(f"{'relative to Dagster':<40}{ratio:>8.2f}   (goal: at most {RATIO})")
    return 0 if ratio <= RATIO else 1


def _fill(instance: dg.DagsterInstance, count: int) -> Path:
    """Report every image as materialised for each asset; return the database of the history."""
    keys = [f"photo{number:06d}" for number in range(count)]
    instance.add_dynamic_partitions(str(images.name), keys)
    for asset in ASSETS:
        report_without_run(instance, (dg.AssetMaterialization(asset, partition=key) for key in keys))
    (found,) = Path(os.environ["DAGSTER_HOME"]).rglob("index.db")
    return found


def _cold(instance: dg.DagsterInstance, history: Path, kind: type[SqliteEventLogStorage]) -> float:
    """Return the CPU seconds of the first query after a change, with this storage."""
    with sqlite3.connect(history) as connection:
        connection.execute("UPDATE asset_keys SET cached_status_data = NULL")
    storage = kind(str(history.parent))
    storage.register_instance(instance)
    own, instance._event_storage = instance._event_storage, storage

    def ask() -> None:
        for asset in ASSETS:
            get_and_update_asset_status_cache_value(instance, dg.AssetKey(asset), images)

    try:
        return _cpu(ask)
    finally:
        instance._event_storage = own


def _distinct(history: Path) -> None:
    query = (
        "SELECT DISTINCT partition FROM event_logs WHERE asset_key = ? AND dagster_event_type = 'ASSET_MATERIALIZATION'"
    )
    with sqlite3.connect(history) as connection:
        for asset in ASSETS:
            set(connection.execute(query, (dg.AssetKey(asset).to_string(),)))


def _cpu(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


if __name__ == "__main__":
    sys.exit(main())
