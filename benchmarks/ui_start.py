"""Time from the start of the UI to its first page with all assets, beside `dagster dev` with one empty asset.

A page is there when GraphQL reports the code location as loaded. Wall time, because several processes start at once.
"""

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common.inputs import noise_photos, scratch
from benchmarks.common.processes import PROJECT, cost
from imagemill.domain.layout import DataRoot

OURS = ("-m", "benchmarks.common.ours")
RATIO = 2.0
_EMPTY = "import dagster as dg\n\n\n@dg.asset\ndef empty():\n    return None\n\n\ndefs = dg.Definitions([empty])\n"
_LOADED = (
    "{ workspaceOrError { ... on Workspace { locationEntries { loadStatus locationOrLoadError { __typename } } } } }"
)
_STATISTICS = "{ assetNodes { assetKey { path } partitionStats { numMaterialized numPartitions } } }"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with scratch() as folder:
        root = DataRoot(folder / "data")
        noise_photos(root.approved, arguments.images, width=64, height=64, smooth=8)
        cost([*OURS, "run", "--data-root", root.path], DAGSTER_HOME=str(root.dagster_home))
        (folder / "empty.py").write_text(_EMPTY)
        (folder / "home").mkdir()
        ours = [*OURS, "ui", "--data-root", root.path, "--port"]
        plain = ["-m", "dagster", "dev", "-f", folder / "empty.py", "--port"]
        times: dict[str, list[float]] = {"imagemill ui": [], "dagster dev": []}
        statistics_cold = []
        for _ in range(arguments.rounds):
            seconds, _ = _started(plain, folder / "home")
            times["dagster dev"].append(seconds)
            seconds, cold = _started(ours, root.dagster_home)
            times["imagemill ui"].append(seconds)
            statistics_cold.append(cold)
    medians = {name: statistics.median(each) for name, each in times.items()}
    for name, seconds in medians.items():
        print(f"{name:<40}{seconds:>8.2f} s")
    ratio = medians["imagemill ui"] / medians["dagster dev"]
    print(f"{'first page, relative to dagster dev':<40}{ratio:>8.2f}   (goal: at most {RATIO})")
    print(f"{'partition statistics, cold':<40}{statistics.median(statistics_cold):>8.2f} s")
    return 0 if ratio <= RATIO else 1


def _started(command: Sequence[object], home: Path) -> tuple[float, float]:
    """Return the seconds until all assets are listed, and those of the first query for the numbers of partitions."""
    port = _free_port()
    environment = {**os.environ, "PYTHONPATH": str(PROJECT), "DAGSTER_HOME": str(home)}
    words = [sys.executable, *map(str, command), str(port)]
    began = time.perf_counter()
    with subprocess.Popen(
        words,
        cwd=PROJECT,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        try:
            while not _loaded(port):
                if process.poll() is not None:
                    raise RuntimeError(f"{words} ended with {process.returncode}")
                time.sleep(0.05)
            ready = time.perf_counter()
            _ask(port, _STATISTICS)
            return ready - began, time.perf_counter() - ready
        finally:
            os.killpg(process.pid, signal.SIGTERM)


def _loaded(port: int) -> bool:
    try:
        entries = _ask(port, _LOADED)["data"]["workspaceOrError"]["locationEntries"]
    except (OSError, ValueError, KeyError):
        return False
    return bool(entries) and all(entry["loadStatus"] == "LOADED" for entry in entries)


def _ask(port: int, query: str) -> dict:
    body = json.dumps({"query": query}).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/graphql", body, headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    sys.exit(main())
