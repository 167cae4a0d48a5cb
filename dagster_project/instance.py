"""The Dagster instance of a data root: one history for command line, UI and daemon.

    data/.dagster/            ($DAGSTER_HOME where that is set)
    ├─ dagster.yaml           from the template beside this module, only where there is none
    ├─ history/               runs.db, runs/index.db, runs/<run id>.db
    └─ schedules/

Belongs here: where the history is, how it is opened.
Belongs elsewhere: how it is stored (storage.py), running something in it (runs.py).
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from dagster import DagsterInstance
from dagster._core.instance.ref import InstanceRef

from imagemill.atomic import write_bytes_atomic
from imagemill.errors import disk_full_told
from imagemill.layout import ROOT_VARIABLE, DataRoot

HOME_VARIABLE = "DAGSTER_HOME"
TEMPLATE = Path(__file__).with_name("dagster.yaml")

# What our own runs print belongs to the terminal they were started from. Stock capture would send it through a file
# and four child processes: no progress bar, and half a second per run.
_TO_THE_TERMINAL = {
    "compute_logs": {
        "module": "dagster._core.storage.noop_compute_log_manager",
        "class": "NoOpComputeLogManager",
    }
}


def home_of(root: DataRoot) -> Path:
    """$DAGSTER_HOME, else `.dagster` in the data root; absolute."""
    given = os.environ.get(HOME_VARIABLE)
    return Path(os.path.abspath(os.path.expanduser(given))) if given else root.dagster_home


def prepare_home(root: DataRoot) -> Path:
    """Make the history's folder, with our `dagster.yaml` where it has none; returns the folder."""
    home = home_of(root)
    home.mkdir(parents=True, exist_ok=True)
    config = home / "dagster.yaml"
    if not config.exists():
        write_bytes_atomic(config, TEMPLATE.read_bytes())
    return home


def environment_of(root: DataRoot) -> dict[str, str]:
    """The variables by which every process of this root, the UI's too, finds history and data."""
    return {HOME_VARIABLE: str(home_of(root)), ROOT_VARIABLE: str(root.path)}


@contextmanager
def open_instance(root: DataRoot) -> Iterator[DagsterInstance]:
    """The root's instance, for runs in this process. DAGSTER_HOME and IMAGEMILL_DATA_ROOT are set meanwhile.

    Raises:
        DiskFull: where history or ledger could not be written to in the block.
    """
    with disk_full_told(root.path), _environment(environment_of(root)):
        home = prepare_home(root)
        reference = InstanceRef.from_dir(str(home), overrides=_TO_THE_TERMINAL)
        with DagsterInstance.from_ref(reference) as instance:
            yield instance


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
