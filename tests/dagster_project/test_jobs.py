"""Reading everything back, from the UI. Source: CONTRACTS section 1, "verify"."""

import dagster as dg
import pytest

from dagster_project.deployments import test_resources
from dagster_project.jobs import verify_stage2_files
from tests.helpers.stage2 import stage2


def verify(root):
    with dg.DagsterInstance.ephemeral() as instance:
        return verify_stage2_files.execute_in_process(
            resources={"data_root": test_resources(str(root.path))["data_root"]},
            instance=instance,
            raise_on_error=False,
        )


@pytest.fixture
def root(data_root):
    stage2(data_root, "a", "b")
    return data_root


def test_whole_data_root_passes(root):
    assert verify(root).success


def test_one_flipped_byte_fails_the_run(root):
    path = root.derived / "vae_latents" / "a.npy"
    data = bytearray(path.read_bytes())
    data[-1] = 0x7F
    path.write_bytes(data[:-1] + b"\x7f" + b"\x00")

    result = verify(root)

    assert not result.success
    (failure,) = [event for event in result.all_events if event.is_step_failure]
    assert "findings" in failure.step_failure_data.user_failure_data.description
