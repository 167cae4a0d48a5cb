"""Every benchmark runs to its end on minimal inputs. Its measurements are then meaningless, so goals may be missed."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.product import PROJECT

SMALL = {
    "bookkeeping": ["--images", "2", "--stock-images", "2"],
    "colour": ["--rounds", "1", "--photographs", "1"],
    "coords": ["--records", "50", "--rounds", "1"],
    "device_busy": ["--images", "8", "--photos", "4", "--rounds", "1"],
    "device_scaling": ["--images", "16", "--rounds", "1"],
    "dinov3_preprocessing": ["--rounds", "1"],
    "embedding_efficiency": ["--rounds", "1", "--images", "1", "--latents", "1", "--side", "32", "--caption-count", "2"],
    "embedding_stream": ["--images", "2", "--rounds", "1"],
    "hardlinks": ["--images", "20", "--rounds", "1"],
    "inputs": ["--images", "8", "--rows", "50", "--names", "50"],
    "look": ["--images", "2", "--small", "2", "--rounds", "1"],
    "look_events": ["--images", "4", "--rounds", "1"],
    "look_pages": ["--images", "8"],
    "migration": ["--records", "20"],
    "object_listing": ["--keys", "3000"],
    "npy_writes": ["--samples", "2", "--rounds", "1"],
    "ray_transport": ["--images", "32", "--rounds", "1", "--keys", "200"],
    "reading": [
        "--samples", "16", "--sample-kb", "2", "--tars", "2", "--classes", "4", "--batch-size", "4",
        "--rounds", "1", "--seconds", "0.1",
    ],
    "reading_url": ["--samples", "32", "--sample-kb", "2", "--opened-samples", "40", "--rounds", "1", "--seconds", "0.1"],
    "partition_statistics": ["--images", "8", "--rounds", "1"],
    "postgresql": ["--images", "8", "--rounds", "1"],
    "rescale": ["--images", "64", "--rounds", "1", "--compared", "1", "--worker-rounds", "1", "--repeat", "2"],
    "scale": ["--images", "8", "--new", "2", "--tiny"],
    "ui_start": ["--images", "8", "--rounds", "1"],
    "shards": ["--samples", "4", "--records", "40", "--rounds", "1"],
    "stage_a": ["--lines", "200", "--rounds", "1"],
    "system_calls": ["--samples", "2", "--rounds", "1"],
    "validation": ["--records", "50", "--presets", "50", "--rounds", "1"],
}  # fmt: skip
# Full-size weights of gigabytes; many runs of the command; images enough for two workers to get going; large photographs.
SLOW = {
    "embedding_efficiency",
    "bookkeeping",
    "colour",
    "device_busy",
    "dinov3_preprocessing",
    "inputs",
    "look_events",
    "look_pages",
    "postgresql",
    "ray_transport",
    "reading_url",
    "rescale",
    "scale",
    "ui_start",
    "device_scaling",
    "migration",
}


def test_every_benchmark_is_tried() -> None:
    """A new benchmark needs a line in the table of this file."""
    assert {path.stem for path in Path(PROJECT, "benchmarks").glob("[a-z]*.py")} == set(SMALL)


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.soak) if n in SLOW else n for n in SMALL])
def test_benchmark_runs_to_its_end(name: str) -> None:
    """Exit code 0: goals reached; 1: missed, which is expected of so few items; anything else, or a traceback, is an error."""
    command = [sys.executable, "-m", f"benchmarks.{name}", *SMALL[name]]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False)

    assert "Traceback" not in done.stderr, done.stderr
    assert done.returncode in {0, 1}, done.stdout + done.stderr
    assert "goal" in done.stdout
