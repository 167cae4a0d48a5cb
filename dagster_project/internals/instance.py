"""The Dagster instance of a data root: one history for command line, UI and daemon.

    data/.dagster/            ($DAGSTER_HOME if that is set)
    ├─ dagster.yaml           from the template beside this module, only if the file is missing
    ├─ history/               runs.db, runs/index.db, runs/<run id>.db
    └─ schedules/

The storage of the history is implemented in storage.py, its runs in runs.py.
"""

import glob
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dagster import DagsterError, DagsterInstance
from dagster._check import CheckError
from dagster._core.instance.config import PoolGranularity
from dagster._core.instance.ref import InstanceRef
from dagster._core.storage.runs.sql_run_storage import SqlRunStorage
from dagster._serdes import serialize_value
from dagster._utils.env import environ
from sqlalchemy.exc import DBAPIError

from assets.partitions import GPU_POOL
from dagster_project.history_errors import config_unusable, history_errors
from dagster_project.internals.runs import sweep
from dagster_project.internals.shared_history import name_of_root, register_root
from imagemill.domain.layout import HOME_VARIABLE, NAME_VARIABLE, ROOT_VARIABLE, DataRoot, home_of
from imagemill.errors import WrongUsage, disk_full_reported
from imagemill.fs.atomic import sweep_temporaries, write_bytes_atomic
from imagemill.fs.mounts import refuse_network_folder
from imagemill.fs.owners import use
from imagemill.store.locations import refuse_read_only
from imagemill.store.trust import DAGSTER_CONFIG, dagster_demands, read_mapping, refuse_untrusted

TEMPLATE = Path(__file__).parents[1] / "dagster.yaml"

# Output of our own runs goes directly to their terminal. Stock capture would send it through a file and four child processes:
# no progress bar, and half a second per run.
_TO_THE_TERMINAL = {
    "compute_logs": {
        "module": "dagster._core.storage.noop_compute_log_manager",
        "class": "NoOpComputeLogManager",
    }
}


def prepare_home(root: DataRoot) -> Path:
    """Create the history's folder, with our `dagster.yaml` if it has none; return the folder.

    Raises:
        NotTrusted: if its `dagster.yaml` is inside the data root and needs consent.
        HistoryUnusable: if this file is not YAML.
        ReadOnly: if the folder cannot be written to. Nothing is created.
    """
    home = home_of(root)
    config = home / DAGSTER_CONFIG
    try:
        read_mapping(config)
        if not os.environ.get(HOME_VARIABLE):
            refuse_untrusted(dagster_demands(config), root, f"set {HOME_VARIABLE} to another folder")
    except WrongUsage as error:
        raise config_unusable(config, error.why or error.what) from error
    refuse_network_folder(home, "the Dagster history")
    refuse_read_only(home)
    home.mkdir(parents=True, exist_ok=True)
    sweep_temporaries(home)
    if not config.exists():
        write_bytes_atomic(config, TEMPLATE.read_bytes())
    return home


def reference_of(home: Path, overrides: Mapping[str, Any] | None = None) -> InstanceRef:
    """Return the instance that a home's `dagster.yaml` describes. Raises HistoryUnusable."""
    with _config_errors(home):
        # Dagster expands `*`, `?` and `[` in this path, and would read the file of another folder.
        return InstanceRef.from_dir(
            str(home), config_dir=os.sep, config_filename=glob.escape(str(home / DAGSTER_CONFIG)), overrides=overrides
        )


@contextmanager
def _config_errors(home: Path) -> Iterator[None]:
    """Raise the errors of an unusable `dagster.yaml` as HistoryUnusable."""
    try:
        yield
    except (DagsterError, CheckError, ImportError, AttributeError, TypeError, ValueError) as error:
        # Dagster's message contains its whole schema before the findings.
        _, found, findings = str(error).partition("Error 1: ")
        raise config_unusable(home / DAGSTER_CONFIG, " ".join((findings if found else str(error)).split())) from error


def environment_of(root: DataRoot) -> dict[str, str]:
    """Return the variables by which every process of this root, including the UI's, finds history and data."""
    return {HOME_VARIABLE: str(home_of(root)), ROOT_VARIABLE: str(root.path)}


def environment_of_service(root: DataRoot, name: str | None) -> dict[str, str]:
    """Return the variables of a code server, which keeps the root's name in the history until it ends."""
    return {**environment_of(root), NAME_VARIABLE: name or ""}


@contextmanager
def open_instance(root: DataRoot) -> Iterator[DagsterInstance]:
    """Open the root's instance for runs in this process. DAGSTER_HOME and IMAGEMILL_DATA_ROOT are set in the block.

    In a history that several roots share, the root is registered first.

    Raises:
        WrongUsage: if another root uses the history in such a way that this one must not.
        DiskFull: if history or ledger could not be written to in the block.
        NotTrusted, HistoryUnusable, ReadOnly: see `prepare_home`; HistoryUnusable also for a damaged database of the history.
    """
    with disk_full_reported(root.path), history_errors(home_of(root)):
        # This must precede the change of the environment, in which DAGSTER_HOME counts as the user's consent.
        home = prepare_home(root)
        use(root.owners)
        with environ(environment_of(root)), _opened(home, reference_of(home, _TO_THE_TERMINAL)) as instance:
            register_root(instance, root)
            _make_id(instance)
            yield instance


def _make_id(instance: DagsterInstance) -> None:
    """Let Dagster make the id of a new history, which it does on first access. history_state.py reads it."""
    if isinstance(instance.run_storage, SqlRunStorage):
        instance.run_storage.get_run_storage_id()


@contextmanager
def _opened(home: Path, reference: InstanceRef) -> Iterator[DagsterInstance]:
    with _config_errors(home):
        instance = DagsterInstance.from_ref(reference)
        # They are constructed on first access; a class that does not exist is an error of the file.
        _ = instance.run_coordinator, instance.run_launcher
    with instance:
        _limit_pool(instance)
        yield instance


def _limit_pool(instance: DagsterInstance) -> None:
    """Let one run at a time load models, unless the history has a limit for their pool.

    Only where `dagster.yaml` limits pools by run: limited by step, the steps of a run would take turns with those of others.
    """
    log = instance.event_log_storage
    by_run = instance.get_concurrency_config().pool_config.pool_granularity is PoolGranularity.RUN
    if by_run and log.supports_global_concurrency_limits and GPU_POOL not in log.get_concurrency_keys():
        try:
            log.set_concurrency_slots(GPU_POOL, 1)
        except DBAPIError:  # Dagster looks for the limit before it inserts it, and another command may do so in between
            if GPU_POOL not in log.get_concurrency_keys():
                log.set_concurrency_slots(GPU_POOL, 1)


@contextmanager
def read_instance(root: DataRoot) -> Iterator[DagsterInstance]:
    """Open the root's instance to read its history.

    Raises:
        NotTrusted, HistoryUnusable, ReadOnly, DiskFull: see `open_instance`.
    """
    with disk_full_reported(root.path), history_errors(home_of(root)):
        home = prepare_home(root)
        with environ(environment_of(root)), _opened(home, reference_of(home)) as instance:
            yield instance


def serialized_instance(root: DataRoot) -> tuple[str, str | None]:
    """Check that the root can use the history, and report runs of dead processes.

    Returns:
        The reference of the history, and the root's name in it.

    Raises:
        WrongUsage: if another root uses the history in such a way that this one must not.
        NotTrusted, HistoryUnusable, ReadOnly, DiskFull: see `open_instance`.
    """
    with read_instance(root) as instance:
        _read_some(instance)
        name = register_root(instance, root)
        sweep(instance)
        return serialize_value(instance.get_ref()), name


def serialized_history(root: DataRoot, shown: Iterable[DataRoot] = ()) -> tuple[str, list[str | None]]:
    """Check that the history can be read, for services that work on no data root.

    Args:
        root: data root of the history, unless DAGSTER_HOME is set.
        shown: data roots whose photographs the service shows.

    Returns:
        The reference of the history, and the names in it of the roots that are shown.

    Raises:
        WrongUsage: if the configuration of a shown root that is not in the history's list cannot be read.
        NotTrusted, HistoryUnusable, ReadOnly, DiskFull: see `open_instance`.
    """
    with read_instance(root) as instance:
        _read_some(instance)
        return serialize_value(instance.get_ref()), [name_of_root(instance, each) for each in shown]


def _read_some(instance: DagsterInstance) -> None:
    """Read from each database, so that a damaged one is reported before a service opens it."""
    instance.get_run_records(limit=1)
    instance.event_log_storage.get_maximum_record_id()
    instance.get_asset_records()
    instance.all_instigator_state()
