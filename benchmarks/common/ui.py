"""A UI in a process of its own, and queries to it."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from benchmarks.common.processes import PROJECT

STATISTICS = "{ assetNodes { assetKey { path } partitionStats { numMaterialized numPartitions } } }"
_LOADED = (
    "{ workspaceOrError { ... on Workspace { locationEntries { loadStatus locationOrLoadError { __typename } } } } }"
)


class RunningUi(NamedTuple):
    """A running UI, and the seconds from its start until its assets were listed."""

    port: int
    seconds: float

    def ask(self, query: str) -> dict:
        """Return the answer of GraphQL."""
        return _ask(self.port, query)


@contextmanager
def running_ui(command: Sequence[object], **environment: str) -> Iterator[RunningUi]:
    """Start `python COMMAND… PORT` and yield when its code location is loaded; terminate its process group afterwards."""
    port = free_port()
    words = [sys.executable, *map(str, command), str(port)]
    variables = {**os.environ, "PYTHONPATH": str(PROJECT), **environment}
    began = time.perf_counter()
    with subprocess.Popen(
        words,
        cwd=PROJECT,
        env=variables,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        try:
            while not _loaded(port):
                if process.poll() is not None:
                    raise RuntimeError(f"{words} ended with {process.returncode}")
                time.sleep(0.05)
            yield RunningUi(port, time.perf_counter() - began)
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


def free_port() -> int:
    """Return a port that no server uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
