"""The services of compose.yaml as processes of this machine, with its commands and variables.

Only these texts are replaced, because one machine has one address and one file system:

    name of a service with a port, as in `postgres:5432`    127.0.0.1 and a free port, the same one everywhere
    0.0.0.0                                                 127.0.0.1
    value of `--port`                                       the free port of that service and port
    target of a volume, as in `/history`                    a folder named after the volume's source
    `imagemill` (the image's entry point)                   this interpreter and checkout

The service `postgres` is a server of this machine's PostgreSQL with the name, password and database of the variables.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers.product import PROJECT, SEARCH_PATH
from tests.helpers.ui import STUBBED, free_port, wait_until

FILE = PROJECT / "compose.yaml"
HEALTHY_SECONDS = 180

_VARIABLE = re.compile(r"\$\$|\$\{(?P<name>\w+)(?::(?P<kind>[-?])(?P<rest>[^}]*))?\}")
_SERVER_USER = "nobody"  # quoted


def interpolated(value: Any, variables: Mapping[str, str]) -> Any:
    """Return a value of the file with `${NAME}`, `${NAME:-default}` and `${NAME:?message}` replaced, as compose does."""

    def replaced(match: re.Match[str]) -> str:
        name, kind, rest = match["name"], match["kind"], match["rest"]
        if name is None:
            return "$"
        assert name in variables or kind == "-", f"{name}: {rest}"
        return variables.get(name, rest)

    if isinstance(value, str):
        return _VARIABLE.sub(replaced, value)
    if isinstance(value, list):
        return [interpolated(item, variables) for item in value]
    return {key: interpolated(item, variables) for key, item in value.items()} if isinstance(value, dict) else value


@dataclass(slots=True)
class ComposeProject:
    """The services of the file; `folder` contains the volumes and the output of each service."""

    folder: Path
    variables: Mapping[str, str]
    file: dict[str, Any] = field(init=False)
    processes: dict[str, subprocess.Popen] = field(default_factory=dict)
    _ports: dict[tuple[str, int], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.file = interpolated(yaml.safe_load(FILE.read_text()), self.variables)

    @property
    def services(self) -> dict[str, dict[str, Any]]:
        return self.file["services"]

    def port(self, service: str, port: int) -> int:
        """Return the port of this machine for the port of a service."""
        if (service, port) not in self._ports:
            self._ports[service, port] = free_port()
        return self._ports[service, port]

    def volume(self, service: str, target: str) -> Path:
        """Return the folder that a service has at this path."""
        return self._volumes(service)[target]

    def _volumes(self, service: str) -> dict[str, Path]:
        pairs = [text.split(":") for text in self.services[service].get("volumes", [])]
        return {target: self.folder / Path(source).name for source, target, *_ in pairs}

    def replaced(self, service: str, text: str) -> str:
        """Return a text of a service with host names, ports and paths of this machine."""
        for target, folder in self._volumes(service).items():
            if text == target or text.startswith(f"{target}/"):
                return f"{folder}{text.removeprefix(target)}"
        names = "|".join(self.services)
        found = re.sub(rf"\b({names}):(\d+)\b", lambda at: f"127.0.0.1:{self.port(at[1], int(at[2]))}", text)
        return found.replace("0.0.0.0", "127.0.0.1")

    def arguments(self, service: str, words: Sequence[str]) -> list[str]:
        """Return a command of a service for this machine."""
        words = [
            str(self.port(service, int(word))) if before == "--port" else self.replaced(service, word)
            for before, word in zip(["", *words], words, strict=False)
        ]
        return (
            [sys.executable, "-P", "-m", "dagster_project.cli.main", *words[1:]] if words[0] == "imagemill" else words
        )

    def environment(self, service: str) -> dict[str, str]:
        """Return the variables of a service, and those without which the checkout does not run."""
        given = {name: self.replaced(service, value) for name, value in self.services[service]["environment"].items()}
        kept = {name: os.environ[name] for name in ("PATH", "HOME", "XDG_CONFIG_HOME") if name in os.environ}
        return {**kept, "PYTHONPATH": f"{SEARCH_PATH}:{STUBBED}", "TMPDIR": str(self.folder), **given}

    def start(self, service: str) -> None:
        """Start a service; its output is appended to `<service>.log`."""
        for folder in self._volumes(service).values():
            folder.mkdir(parents=True, exist_ok=True)
        for config in self.services[service].get("configs", []):
            target = Path(self.replaced(service, config["target"]))
            target.write_text(self.file["configs"][config["source"]]["content"])
        if service == "postgres":
            command = self._create_database()
        else:
            command = self.arguments(service, ["imagemill", *self.services[service]["command"]])
        with open(self.log(service), "a") as log:
            self.processes[service] = subprocess.Popen(
                command, env=self.environment(service), cwd=self.folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip

    def log(self, service: str) -> Path:
        return self.folder / f"{service}.log"

    def _create_database(self) -> list[str]:
        """Do what the image of PostgreSQL does at its first start; return the command of the server."""
        given = self.services["postgres"]["environment"]
        folder, port = self.volume("postgres", "/var/lib/postgresql/data"), self.port("postgres", 5432)
        password = self.folder / "password"
        password.write_text(given["POSTGRES_PASSWORD"])
        for path in (folder, password):
            if os.getuid() == 0:
                shutil.chown(path, _SERVER_USER, "nogroup")
        create = ["initdb", "-D", str(folder), "-U", given["POSTGRES_USER"], "-A", "scram-sha-256", "--no-sync"]
        subprocess.run(_as_server_user(*create, f"--pwfile={password}"), check=True, capture_output=True, cwd=folder)
        settings = [f"--port={port}", "--listen_addresses=127.0.0.1", "--unix_socket_directories=", "--fsync=off"]
        single = _as_server_user("postgres", "--single", "-D", str(folder), "postgres")
        statement = f"CREATE DATABASE {given['POSTGRES_DB']}\n"
        subprocess.run(single, input=statement, text=True, check=True, capture_output=True, cwd=folder)
        return _as_server_user("postgres", "-D", str(folder), *settings)

    def execute(self, service: str, *words: str, given: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
        """Execute a command as in the container of a service, with this standard input."""
        environment = self.environment(service)
        if service == "postgres":
            words = (program(words[0]), *words[1:])
            password = self.services[service]["environment"]["POSTGRES_PASSWORD"]
            port = str(self.port(service, 5432))
            environment |= {"PGHOST": "127.0.0.1", "PGPORT": port, "PGPASSWORD": password}
        command = self.arguments(service, words)
        return subprocess.run(
            command, env=environment, cwd=self.folder, input=given or b"", capture_output=True, check=False
        )

    def health(self, service: str) -> subprocess.CompletedProcess[bytes]:
        """Execute the health check of a service."""
        kind, *words = self.services[service]["healthcheck"]["test"]
        assert kind == "CMD"
        return self.execute(service, *words)

    def wait_healthy(self, service: str) -> None:
        """Wait until the health check of a service succeeds."""

        def healthy() -> bool:
            assert self.processes[service].poll() is None, self.log(service).read_text()
            return self.health(service).returncode == 0

        wait_until(healthy, HEALTHY_SECONDS, f"{service} is healthy")

    def terminate(self, *services: str) -> None:
        for service in services:
            # PostgreSQL's image is stopped by SIGINT (STOPSIGNAL).
            self.processes[service].send_signal(signal.SIGINT if service == "postgres" else signal.SIGTERM)

    def kill(self) -> None:
        """End what a failed test has left."""
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
                process.wait()


def program(name: str) -> str:
    """Return the path of a program of PostgreSQL; Debian keeps them outside PATH."""
    debian = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"), reverse=True)
    found = str(debian[0]) if debian else shutil.which(name)
    if not found:
        pytest.skip(f"{name} of PostgreSQL is not installed")
    return found


def _as_server_user(name: str, *arguments: str) -> list[str]:
    """Return a command of PostgreSQL that runs as another user if this process is root, which the server refuses."""
    user = ["setpriv", f"--reuid={_SERVER_USER}", "--regid=nogroup", "--clear-groups"] if os.getuid() == 0 else []
    return [*user, program(name), *arguments]
