"""What Dagster writes into a history, and its rows without the values that differ between any two runs."""

import os
import re
import subprocess
import sys

import dagster as dg
from toy_defs import run_toy

from resources.dagster_internals.events import report_without_run
from tests.helpers.product import PROJECT

KEYS = [f"k{n:02d}" for n in range(12)]
WRITERS, BATCHES, EVENTS = 3, 6, 50


def everything_dagster_writes(instance):
    """Write automatic, streamed, unpartitioned, check, observation and runless events."""
    instance.add_dynamic_partitions("images", KEYS)
    runs = [
        run_toy(instance, "plain", partition_range=(KEYS[0], KEYS[-1])),
        run_toy(instance, "dinov3_npy", partition_range=(KEYS[0], KEYS[-1])),
        run_toy(instance, "dinov3_npy", partition_range=(KEYS[2], KEYS[-2]), deferred=True),
        run_toy(instance, "totals", "shards", partition_range=("wide", "tall")),
        run_toy(instance, "watched"),
    ]
    assert all(run.success for run in runs)
    events = [
        event
        for key in KEYS[:3]
        for event in (
            dg.AssetMaterialization("approved_images", partition=key, tags={"dagster/data_version": key}),
            dg.AssetObservation("approved_images", partition=key, tags={"dagster/data_version": key}),
        )
    ]
    assert report_without_run(instance, events) == len(events)


# Values that differ between any two runs: times, the process, random names.
_VOLATILE = [
    (re.compile(r'("[a-z_]*time[a-z_]*": )(?:[\d.]+|"[^"]*")'), r"\1TIME"),
    (re.compile(r'("(?:pid|duration_ms)": )[\d.]+'), r"\1N"),
    (re.compile(r'("log_key": )"\w+"'), r"\1KEY"),
    (re.compile(r"\b[\d.]+m?s\b|pid: \d+"), "N"),
    (re.compile(r"\b[0-9a-f]+\.[0-9a-f]+\.[0-9a-f]{8}-[0-9a-f]{12}/"), "OWNER/"),
]
_TIME_COLUMN = re.compile("time|migration_completed")


def stable_rows(rows, run_ids):
    """Return rows, mappings by column, with run ids as `run 0`, `run 1`, … and without volatile values."""
    return [
        {name: _stable(value, run_ids) for name, value in row.items() if not _TIME_COLUMN.search(name)} for row in rows
    ]


def stable_name(name, run_ids):
    """Return a name, with run ids as `run 0`, `run 1`, …"""
    return _stable(name, run_ids)


def _stable(text, run_ids):
    if not isinstance(text, str):
        return text
    for number, run_id in enumerate(run_ids):
        text = text.replace(run_id, f"run {number}")
    for pattern, instead in _VOLATILE:
        text = pattern.sub(instead, text)
    return text


_WRITER = """
import sys, dagster as dg
from dagster_project.internals.instance import open_instance
from imagemill.domain.layout import DataRoot
from resources.dagster_internals.events import report_without_run
who, batches, events = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
print(flush=True)
sys.stdin.readline()  # until every writer is ready
with open_instance(DataRoot.resolve()) as instance:
    for batch in range(batches):
        instance.add_dynamic_partitions("images", [f"{who}-{batch}"])
        report_without_run(instance, [
            dg.AssetMaterialization("shared", partition=f"{who}-{batch}-{n}", tags={"dagster/data_version": f"{who}-{batch}-{n}"})
            for n in range(events)
        ])
"""


def write_in_several_processes(root):
    """Let several processes open the history at once and report materialisations of `shared`; return its partitions."""
    arguments = [sys.executable, "-W", "ignore", "-c", _WRITER]
    writers = [
        subprocess.Popen(
            [*arguments, f"w{n}", str(BATCHES), str(EVENTS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=PROJECT,
            env={**os.environ, "IMAGEMILL_DATA_ROOT": str(root.path)},
        )
        for n in range(WRITERS)
    ]
    for writer in writers:
        assert writer.stdout.readline()
    for writer in writers:
        writer.stdin.close()
    assert [writer.wait(timeout=180) for writer in writers] == [0] * WRITERS
    return {f"w{w}-{b}-{n}" for w in range(WRITERS) for b in range(BATCHES) for n in range(EVENTS)}


def assert_partitions_agree(instance, stock):
    """Compare the partitions found by our storage and by Dagster's own, for the history of `everything_dagster_writes`."""
    ours = instance.event_log_storage
    stock.register_instance(instance)
    assets = [dg.AssetKey(name) for name in ("dinov3_npy", "approved_images", "watched", "nothing")]
    newest = ours.get_maximum_record_id()

    def compare():
        for asset in assets:
            for before, after in [(None, None), (newest, 1), (newest - 5, None), (None, newest - 20), (3, 0)]:
                found = ours.get_materialized_partitions(asset, before, after)
                assert found == stock.get_materialized_partitions(asset, before, after)

    compare()
    assert len(ours.get_materialized_partitions(assets[0])) == len(KEYS)
    keys = [*KEYS[:3], "unknown"]
    assert ours.get_existing_dynamic_partitions("images", keys) == set(KEYS[:3])
    if theirs := getattr(stock, "get_existing_dynamic_partitions", None):  # not in the oldest Dagster that is permitted
        assert ours.get_existing_dynamic_partitions("images", keys) == theirs("images", keys)
    instance.wipe_assets(assets[:1])
    assert ours.get_materialized_partitions(assets[0]) == set()
    compare()
