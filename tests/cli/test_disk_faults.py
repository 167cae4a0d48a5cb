"""Writing commands killed or failed at one disk operation: the next run gives the result of an undisturbed run.

`make soak SEED=1 N=1000` tries these faults in large numbers (tests/soak.py).
"""

import os
import shutil
import tempfile
from pathlib import Path

import pytest

from tests.helpers.disk_faults import Fault
from tests.helpers.fault_trials import Workshop
from tests.helpers.writing_commands import COMMANDS

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed: apt install gcc libc6-dev")


@pytest.fixture(scope="module")
def workshop():
    """Prepared roots, in memory if the system has a suitable folder, because fsync is free there."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="imagemill-faults-", dir=memory))
    shop = Workshop(folder)
    yield shop
    shop.close()
    shutil.rmtree(folder, ignore_errors=True)


MODES = ("kill", "enospc", "eio")


def a_trial(workshop, name, mode):
    trial = workshop.try_fault(name, workshop.choose(name, mode, f"suite-{mode}"))
    assert not trial.failure, f"{trial}\n{trial.failure}"


@pytest.mark.parametrize(("name", "mode"), [(name, MODES[n % 3]) for n, name in enumerate([*COMMANDS][::6])])
def test_command_continues_after_a_fault(workshop, name, mode):
    a_trial(workshop, name, mode)


@pytest.mark.soak
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", COMMANDS)
def test_command_continues_after_each_fault(workshop, name, mode):
    a_trial(workshop, name, mode)


@pytest.mark.parametrize("mode", ["kill", "enospc", "eio"])
def test_fault_is_triggered(workshop, mode):
    """Test of the harness: a fault at the first operation ends the command before it writes anything."""
    trial = workshop.try_fault("stage2", Fault(mode, 1))

    assert trial.at
    assert not trial.failure, trial.failure


def test_changed_output_is_a_failure(workshop, monkeypatch):
    """Test of the harness: output that differs from the undisturbed run is reported."""
    expected = workshop.undisturbed("shards")
    changed = dict(expected.after, extra=b"")
    monkeypatch.setitem(workshop._undisturbed, "shards", expected._replace(after=changed))

    assert "extra missing" in workshop.try_fault("shards", Fault("kill", 1)).failure
