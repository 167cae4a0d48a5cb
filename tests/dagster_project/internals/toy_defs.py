"""A code location with one asset of each sort, without imagemill, to test the use of Dagster's internals.

Environment: TOY_MISSING (comma-separated keys that are not made), TOY_SLEEP (seconds per row), TOY_MARK (a file that
grows by one line per row), TOY_BREAK (`ours`, `foreign` or `resource`), TOY_SIGNAL (number of a signal that arrives
during a callback of the garbage collector, before the first row).
"""

import atexit
import functools
import os
import shutil
import signal
import sys
import tempfile
import time
import weakref
from contextlib import contextmanager
from pathlib import Path

import dagster as dg

from dagster_project.internals.instance import open_instance
from dagster_project.internals.runs import run_here
from imagemill.domain.layout import DataRoot
from imagemill.errors import ModelMismatch
from resources.dagster_internals.events import STREAMED_TAG, StreamedEvents, deferred, images_failed, launched_in_ui

images = dg.DynamicPartitionsDefinition(name="images")
buckets = dg.StaticPartitionsDefinition(["wide", "square", "tall"])

approved_images = dg.AssetSpec("approved_images", partitions_def=images)


class Rows:
    """A handle around the keys, because Dagster would read a bare generator as events."""

    def __init__(self, keys):
        self.keys = keys


def _signal_in_callback(number):
    """Raise the signal in a callback, whose exceptions Python reports and drops."""
    rows = Rows([])
    reference = weakref.ref(rows, lambda _: signal.raise_signal(number))
    del rows
    assert reference() is None


class StreamingIO(dg.IOManager):
    """Counterpart of io_managers/npy.py."""

    def handle_output(self, context, obj):
        if number := os.environ.get("TOY_SIGNAL"):
            _signal_in_callback(int(number))
        missing = [key for key in os.environ.get("TOY_MISSING", "").split(",") if key in obj.keys]
        with StreamedEvents(context) as events:
            for key in obj.keys:
                time.sleep(float(os.environ.get("TOY_SLEEP", "0")))
                if key not in missing:
                    events.add(key, data_version=f"v-{key}", inputs={"approved_images": f"in-{key}"}, metadata={"n": 1})
                if mark := os.environ.get("TOY_MARK"):
                    with Path(mark).open("a") as file:
                        file.write(f"{key}\n")
            if missing and (launched_in_ui(context) or not deferred(context)):
                raise images_failed(f"{len(missing)} images did not arrive: {', '.join(missing)}", missing)
        context.add_output_metadata({"rows": len(obj.keys)})

    def load_input(self, context):
        raise NotImplementedError


class NothingIO(dg.IOManager):
    def handle_output(self, context, obj):
        context.add_output_metadata({"value": str(obj)})

    def load_input(self, context):
        return None


class Breakable(dg.ConfigurableResource):
    def setup_for_execution(self, context):
        if os.environ.get("TOY_BREAK") == "resource":
            raise ModelMismatch("the resource is broken", where="resource", do="mend it")


@dg.asset(
    deps=[approved_images],
    partitions_def=images,
    backfill_policy=dg.BackfillPolicy.multi_run(8192),
    io_manager_key="stream_io",
    code_version="7",
    tags={STREAMED_TAG: ""},
)
def dinov3_npy(context: dg.AssetExecutionContext) -> Rows:
    match os.environ.get("TOY_BREAK"):
        case "ours":
            raise ModelMismatch("two models", where="here", why="never mixed", do="choose one")
        case "foreign":
            raise ZeroDivisionError("unexpected")
    context.log.info("streaming")
    return Rows(list(context.partition_keys))


@dg.asset(
    partitions_def=images,
    deps=[approved_images],
    backfill_policy=dg.BackfillPolicy.multi_run(8192),
    io_manager_key="nothing_io",
    code_version="1",
)
def plain(context: dg.AssetExecutionContext) -> int:
    """An asset with Dagster's own events."""
    return len(context.partition_keys)


@dg.asset(
    deps=[dg.AssetDep(dinov3_npy, partition_mapping=dg.AllPartitionMapping())],
    io_manager_key="nothing_io",
    code_version="1",
)
def totals(breakable: Breakable) -> int:
    return 1


@dg.asset(
    deps=[totals],
    partitions_def=buckets,
    backfill_policy=dg.BackfillPolicy.single_run(),
    io_manager_key="nothing_io",
    code_version="1",
)
def shards(context: dg.AssetExecutionContext) -> int:
    for key in context.partition_keys:
        context.add_asset_metadata({"samples": 3}, partition_key=key)
    return 3


@dg.asset(code_version="1")
def watched(context: dg.AssetExecutionContext) -> None:
    context.log_event(dg.AssetObservation("watched", metadata={"n": 1}, tags={"dagster/data_version": "seen"}))


@dg.asset_check(asset=dinov3_npy)
def files_valid() -> dg.AssetCheckResult:
    severity = dg.AssetCheckSeverity(os.environ.get("TOY_SEVERITY", "ERROR"))
    return dg.AssetCheckResult(passed=not os.environ.get("TOY_MISSING"), metadata={"checked": 3}, severity=severity)


@dg.asset_check(asset=totals)
def adds_up() -> dg.AssetCheckResult:
    return dg.AssetCheckResult(passed=True)


@dg.op
def count(context: dg.OpExecutionContext) -> None:
    context.log.info("1")


@dg.job
def count_up() -> None:
    count()


@dg.definitions
def defs() -> dg.Definitions:
    return dg.Definitions(
        assets=[approved_images, dinov3_npy, plain, totals, shards, watched],
        asset_checks=[files_valid, adds_up],
        jobs=[count_up],
        resources={"stream_io": StreamingIO(), "nothing_io": NothingIO(), "breakable": Breakable()},
        executor=dg.in_process_executor,
    )


@functools.cache
def _empty_history() -> Path:
    """An empty history with its tables, whose creation takes longer than most tests."""
    root = DataRoot(Path(tempfile.mkdtemp()) / "data")
    atexit.register(shutil.rmtree, root.path.parent)
    with open_instance(root):
        pass
    return root.dagster_home


@contextmanager
def toy_instance(root, keys):
    """The root's instance, with these keys registered as images."""
    shutil.copytree(_empty_history(), root.dagster_home)
    with open_instance(root) as instance:
        instance.add_dynamic_partitions("images", keys)
        yield instance


def run_toy(instance, *assets, **how):
    return run_here(instance, assets, module="toy_defs", location="toy", **how)


def run_from_command_line() -> None:
    """Run in another process: `python -c 'import toy_defs; toy_defs.run_from_command_line()' first last`."""
    first, last = sys.argv[1:3]
    with open_instance(DataRoot.resolve()) as instance:
        outcome = run_toy(instance, "dinov3_npy", partition_range=(first, last), deferred=True)
    print(outcome.run.status.value, outcome.signal, flush=True)
    sys.exit(128 + outcome.signal if outcome.signal else 0)
