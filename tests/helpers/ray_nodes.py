"""A Ray cluster whose nodes see nothing of a data root: mount, host-name and process namespaces on this machine.

The head has no processors and runs where the driver runs. Killing a node kills all its processes at once. Needs root. Where the
system permits it, the cluster is in a network namespace of its own.
"""

import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil

from tests.helpers.ui import free_port

PORT = free_port()
ADDRESS = f"127.0.0.1:{PORT}"
_RAY = str(Path(sys.executable).with_name("ray"))
# Switches the loopback interface on (SIOCSIFFLAGS; IFF_UP, IFF_LOOPBACK, IFF_RUNNING), and keeps the namespace.
_LOOPBACK = """
import fcntl, signal, socket, struct
with socket.socket() as any_socket:
    fcntl.ioctl(any_socket, 0x8914, struct.pack("16sh14x", b"lo", 0x1 | 0x8 | 0x40))
print("up", flush=True)
signal.pause()
"""
_QUIET = ("--disable-usage-stats", "--object-store-memory=300000000")


def can_make_nodes():
    """Return whether this process may make namespaces."""
    return os.geteuid() == 0 and all(shutil.which(name) for name in ("unshare", "nsenter"))


class RayNodes:
    """A cluster in a network namespace of its own.

    Args:
        folder: for the files of Ray; sockets have long paths, so it is short.
        hidden: folders that are empty on the nodes.
        ip: address of the head; with another one than 127.0.0.1, commands with `outside` run on a computer that is no node.
        environment: changes of the environment of head and nodes.
    """

    def __init__(self, folder, hidden, *, ip="127.0.0.1", **environment):
        self.folder, self.hidden, self.address = folder, [str(path) for path in hidden], f"{ip}:{PORT}"
        self.environment = {"RAY_AUTH_MODE": "disabled", **environment}
        self.nodes = {}
        self._network = self._other = None
        if subprocess.run(["unshare", "-n", "true"], capture_output=True, check=False).returncode == 0:
            self._network = _new_network()
        if ip != "127.0.0.1":
            self._other = _new_network()
            _connect({self._network: ip, self._other: f"{ip}0"})
        head = [_RAY, "start", "--head", f"--port={PORT}", f"--node-ip-address={ip}", "--num-cpus=0", *_QUIET]
        done = self.inside([*head, "--include-dashboard=false", f"--temp-dir={folder}"])
        assert done.returncode == 0, done.stdout + done.stderr

    @property
    def prefix(self):
        """Words before a command that runs where the head is."""
        return _words_of(self._network) if self._network else []

    @property
    def outside(self):
        """Words before a command that runs on a computer without processes or sockets of Ray, which reaches the head."""
        hide = f"mount -t tmpfs none '{self.folder}' && exec \"$@\""
        spaces = ["unshare", "-m", "-p", "-f", "--kill-child", "--mount-proc", "--propagation", "private"]
        return [*_words_of(self._other), *spaces, "sh", "-c", hide, "sh"]

    def inside(self, command, **how):
        """Run a command to its end where the head is."""
        environment = {**os.environ, **self.environment, **how.pop("environment", {})}
        return subprocess.run(
            [*self.prefix, *command], capture_output=True, text=True, check=False, env=environment, **how
        )

    def start(self, name, *, cpus=1, **environment):
        """Start a node, and wait until the head knows it."""
        hide = " && ".join(f"mount -t tmpfs -o ro none '{path}'" for path in self.hidden) or "true"
        node = (
            f"{_RAY} start --address={ADDRESS} --node-ip-address=127.0.0.1 --num-cpus={cpus} {' '.join(_QUIET)} --block"
        )
        spaces = ["unshare", "-m", "-u", "-p", "-f", "--kill-child", "--mount-proc", "--propagation", "private"]
        process = subprocess.Popen(
            [*self.prefix, *spaces, "sh", "-c", f"{hide} && hostname {name} && exec {node}"],
            env={**os.environ, **self.environment, **environment},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip
        self.nodes[name] = process
        assert process.stdout
        for line in process.stdout:
            if "Ray runtime started" in line:
                return
        raise AssertionError(f"{name} did not start")

    def kill(self, name):
        """Kill all processes of a node."""
        process = self.nodes.pop(name)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def processes(self):
        """Yield the processes of Ray: those in the network of the cluster, else all of this machine."""
        own = os.readlink(f"/proc/{self._network.pid}/ns/net") if self._network else None
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if own:
                    inside = os.readlink(f"/proc/{process.pid}/ns/net") == own and process.pid != self._network.pid
                else:
                    inside = any(name in " ".join(process.cmdline()) for name in ("ray::", "raylet", "gcs_server"))
                if inside:
                    yield process

    def close(self):
        """End the cluster."""
        for name in list(self.nodes):
            self.kill(name)
        for process in self.processes():
            with suppress(psutil.Error):
                process.kill()
        for network in filter(None, (self._network, self._other)):
            network.kill()
            network.wait()


def _new_network():
    """Return a process in a network namespace of its own."""
    process = subprocess.Popen(["unshare", "-n", sys.executable, "-c", _LOOPBACK], stdout=subprocess.PIPE, text=True)
    assert process.stdout
    assert process.stdout.readline() == "up\n"
    return process


def _words_of(network):
    return ["nsenter", f"--net=/proc/{network.pid}/ns/net"]


def _connect(addresses):
    """Connect two networks, each with an address."""
    first, second = addresses
    pair = ["ip", "link", "add", "lan", "type", "veth", "peer", "name", "lan", "netns", str(second.pid)]
    subprocess.run([*_words_of(first), *pair], check=True)
    for network, ip in addresses.items():
        for words in (["address", "add", f"{ip}/24", "dev", "lan"], ["link", "set", "lan", "up"]):
            subprocess.run([*_words_of(network), "ip", *words], check=True)
