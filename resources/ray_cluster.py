"""Joining a Ray cluster as its driver, and every reason why that cannot be, in one message each.

Ray ends the process, or waits for minutes, where a computer is no node of the cluster. Therefore a child process joins first.
Does not import ray before it is known to be installed.
Spec: docs/spec/engines.md#refused
"""

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, NoReturn

from imagemill.errors import ImagemillError, WrongUsage

AUTO = "auto"
CLIENT = "ray://"

# Bytes of images and arrays on the driver, if nothing else is set.
IN_FLIGHT_BYTES = 256_000_000

CONNECT_SECONDS = 2.0
PROBE_SECONDS = 12.0

_OTHER_VERSION = "Version mismatch"
_NOTHING_RUNS = "Could not find any running Ray instance"
_WRONG_TOKEN = "InvalidAuthToken"
_NO_NODE = "no raylet on this computer"


class ClusterUnusable(ImagemillError, RuntimeError):
    """The cluster cannot be joined."""


def check_address(address: str, where: object = None) -> None:
    """Check what can be known without a connection.

    Raises:
        WrongUsage: if ray is not installed, or for the address of Ray Client.
    """
    if importlib.util.find_spec("ray") is None:
        raise WrongUsage(
            "engine.kind is ray, but ray is not installed",
            where=where,
            do="pip install 'imagemill[ray]', or set engine.kind: local",
        )
    if address.startswith(CLIENT):
        raise WrongUsage(
            f"engine.address {address} is one of Ray Client, which imagemill does not use",
            where=where,
            why="the process of the run has to be on a node of the cluster",
            do="run imagemill on the head node, with engine.address: auto",
        )


def join(address: str, *, insecure: bool, least_memory: int, where: object = None) -> None:
    """Make this process the driver of a cluster; do nothing if it is.

    Args:
        address: `host:port`, or `auto` for the cluster of this computer.
        insecure: whether a cluster without a token may be joined over the network.
        least_memory: bytes that the object store of this computer must have.
        where: the configuration file, for messages.

    Raises:
        WrongUsage: as `check_address`.
        ClusterUnusable: if the cluster cannot be joined.
    """
    check_address(address, where)
    import ray

    if ray.is_initialized():
        return
    if address != AUTO:
        _connect(address, where)
    found = _probe(address)
    if "error" in found:
        _refuse(address, found["error"], where)
    if not (insecure or _is_loopback(found["address"]) or _has_token()):
        raise ClusterUnusable(
            f"the cluster at {found['address']} is joined without a token",
            where=where,
            why="who can reach one of its ports can run code on its nodes, and in this process",
            do="start its nodes with RAY_AUTH_MODE=token, or set engine.insecure: true on a network that you trust",
        )
    if found["memory"] < least_memory:
        raise ClusterUnusable(
            f"the object store of this computer has {found['memory'] / 1e6:.0f} MB, and {least_memory / 1e6:.0f} MB are needed",
            where=where,
            why="images that are sent and arrays that return are there, in /dev/shm",
            do="give /dev/shm more memory and restart the node, or set engine.in_flight_mb to less",
        )
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        ray.init(address=address, log_to_driver=False, configure_logging=False)
    except Exception as error:
        _refuse(address, f"{type(error).__name__}: {error}", where)
    finally:
        for number, handler in handlers.items():  # ray.init has replaced one
            if handler is not None:
                signal.signal(number, handler)


def _connect(address: str, where: object) -> None:
    """Raise if nothing answers at an address."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise WrongUsage(
            f"engine.address {address!r} is neither `auto` nor HOST:PORT", where=where, do="write 10.0.0.5:6379"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
    except OSError as error:
        raise ClusterUnusable(
            f"no Ray cluster answers at {address}",
            where=where,
            why=str(error),
            do="check engine.address, and that `ray start --head` runs there",
        ) from None


def _probe(address: str) -> dict[str, Any]:
    """Let a child process join; return its address and the memory of its object store, or its error."""
    command = [sys.executable, "-c", "from resources.ray_cluster import answer; answer()", address]
    folder = str(Path(__file__).parents[1])
    search = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": search},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
        )
        until = time.monotonic() + PROBE_SECONDS
        try:
            # With a wrong token Ray tries again for 20 seconds, and then gives no reason.
            while process.poll() is None and time.monotonic() < until and _WRONG_TOKEN not in _written(errors):
                time.sleep(0.1)
            unanswered = process.poll() is None
        finally:  # also after an interrupt
            process.kill()
            process.wait()
        lines = [line for line in _written(output).splitlines() if line.startswith('{"')]
        stderr = _written(errors)
    if _WRONG_TOKEN in stderr:
        return {"error": _WRONG_TOKEN}
    if unanswered:
        return {"error": f"no answer within {PROBE_SECONDS:g} s"}
    return json.loads(lines[-1]) if lines and process.returncode == 0 else {"error": _of_abort(stderr)}


def _written(file: IO[bytes]) -> str:
    """Return what a child process has written, without moving its position."""
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode("utf-8", "replace")


def answer() -> None:
    """Join the cluster of the command line; print what was found as a line of JSON."""
    import ray

    address = sys.argv[1]
    try:
        if address != AUTO and not _has_node():
            raise RuntimeError(_NO_NODE)
        ray.init(address=address, log_to_driver=False, configure_logging=False)
        context = ray.get_runtime_context()
        (node,) = [each for each in ray.nodes() if each["NodeID"] == context.get_node_id()]
        found = {"address": context.gcs_address, "memory": node["Resources"].get("object_store_memory", 0)}
    except Exception as error:
        found = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(found), flush=True)


def _has_node() -> bool:
    """Return whether a node of any cluster runs on this computer, as Ray looks for it: Ray would look for a minute."""
    try:
        from ray._private.services import find_node_ids
    except ImportError:
        return True  # Ray answers
    return bool(find_node_ids())


def _of_abort(stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    return next((line for line in reversed(lines) if "raylet" in line.lower() or "node" in line.lower()), "raylet")


def _refuse(address: str, error: str, where: object) -> NoReturn:
    """Raise ClusterUnusable for an error of Ray."""
    lower = error.lower()
    if _NOTHING_RUNS in error:
        raise ClusterUnusable(
            "no Ray cluster runs on this computer",
            where=where,
            do="start a node with `ray start`, or name the cluster: engine.address: HOST:PORT",
        )
    if _OTHER_VERSION in error:
        raise ClusterUnusable(
            f"the cluster at {address} has another Ray or Python",
            where=where,
            why=" ".join(error.partition(_OTHER_VERSION)[2].strip(": ").split()),
            do="install the same ray, with the same Python, on all nodes",
        )
    if "auth" in lower or "token" in lower:
        raise ClusterUnusable(
            f"the cluster at {address} refuses the token of this process",
            where=where,
            do="set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH as on the head node",
        )
    if "no answer" in lower:
        raise ClusterUnusable(
            f"the cluster at {address} does not let this process join: {error}",
            where=where,
            do="check that a node of it runs on this computer: `ray status`",
        )
    if "raylet" in lower or "node" in lower:
        raise ClusterUnusable(
            f"this computer is no node of the cluster at {address}",
            where=where,
            why="the process of a run has to be on a node",
            do=f"run imagemill on a node, or make this computer one: ray start --address={address} --num-cpus=0",
        )
    raise ClusterUnusable(
        f"the cluster at {address} cannot be joined: {error.splitlines()[0]}", where=where, do="see `ray status`"
    )


def _is_loopback(address: str) -> bool:
    return address.rpartition(":")[0].strip("[]") in {"localhost", "::1"} or address.startswith("127.")


def _has_token(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether Ray uses a token in this process: as set, or the one in the home folder."""
    if environment.get("RAY_AUTH_MODE", "token").lower() != "token":
        return False
    named = any(environment.get(name) for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
    return named or (Path.home() / ".ray" / "auth_token").is_file()
