"""A PostgreSQL server of a test, which listens on a Unix socket only."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from imagemill.domain.layout import DataRoot

USER, PASSWORD = "postgres", "secret"
OURS = "{module: dagster_project.storage, class: BatchPostgresStorage, config: {postgres_url: '%s'}}"
STOCK = "{module: dagster_postgres, class: DagsterPostgresStorage, config: {postgres_url: '%s'}}"
SERVER_USER, SERVER_GROUP = "nobody", "nogroup"  # quoted


def keep_history(root: DataRoot, url: str, storage: str = OURS) -> None:
    """Write a `dagster.yaml` with which the history of a data root is in this database."""
    root.dagster_home.mkdir(parents=True, exist_ok=True)
    settings = f"storage:\n  custom: {storage % url}\ntelemetry: {{enabled: false}}\n"
    (root.dagster_home / "dagster.yaml").write_text(settings)


def program(name: str) -> str:
    """Return the path of a program of PostgreSQL; Debian keeps them outside PATH."""
    debian = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"), reverse=True)
    found = shutil.which(name) or (str(debian[0]) if debian else "")
    if not found:
        pytest.skip(f"{name} of PostgreSQL is not installed")
    return found


class PostgresServer:
    """A running server.

    Attributes:
        folder: the folder of its data, its socket and its log.
    """

    def __init__(self, folder: Path, *, fsync: bool) -> None:
        self.folder, self.fsync = folder, "on" if fsync else "off"

    def url(self, database: str = "postgres", user: str = USER, password: str = PASSWORD) -> str:
        """Return the URL of a database."""
        return f"postgresql://{user}:{password}@/{database}?host={self.folder}"

    def create(self, database: str) -> str:
        """Create a database; return its URL."""
        self.query(f'CREATE DATABASE "{database}"')
        return self.url(database)

    def query(self, sql: str, database: str = "postgres") -> list[list[str]]:
        """Return the rows of a query as text."""
        done = subprocess.run(
            [program("psql"), self.url(database), "-AtX", "-F", "\t", "-v", "ON_ERROR_STOP=1", "-c", sql],
            check=True, capture_output=True, text=True,
        )  # fmt: skip
        return [line.split("\t") for line in done.stdout.splitlines()]

    def start(self) -> None:
        """Start the server and wait until it accepts connections."""
        options = f"-c listen_addresses='' -c unix_socket_directories='{self.folder}' -c fsync={self.fsync}"
        self._pg_ctl("-o", options, "-l", str(self.folder / "log"), "-w", "start")

    def restart(self) -> None:
        """End the server as a crash does, which breaks every connection, and start it again."""
        self._pg_ctl("-m", "immediate", "-l", str(self.folder / "log"), "-w", "restart")

    def stop(self) -> None:
        """End the server as a crash does."""
        self._pg_ctl("-m", "immediate", "stop")

    def _pg_ctl(self, *arguments: str) -> None:
        command = [program("pg_ctl"), "-D", str(self.folder / "data"), *arguments]
        subprocess.run(_as_server_user(*command), check=True, stdout=subprocess.DEVNULL, cwd=self.folder)


@contextmanager
def postgres_server(*, fsync: bool = False) -> Iterator[PostgresServer]:
    """Create and start a server; stop it and delete its folder afterwards. Without `fsync` it does not wait for the disk."""
    initdb = program("initdb")
    folder = Path(tempfile.mkdtemp(prefix="imagemill-postgres-"))  # short enough for the path of a socket
    password = folder / "password"
    password.write_text(PASSWORD)
    if os.getuid() == 0:
        for path in (folder, password):
            shutil.chown(path, SERVER_USER, SERVER_GROUP)
    create = ["-D", str(folder / "data"), "-U", USER, "--auth=scram-sha-256", f"--pwfile={password}", "--no-sync"]
    subprocess.run(_as_server_user(initdb, *create), check=True, capture_output=True, cwd=folder)
    server = PostgresServer(folder, fsync=fsync)
    server.start()
    try:
        yield server
    finally:
        if (folder / "data" / "postmaster.pid").exists():
            server.stop()
        shutil.rmtree(folder, ignore_errors=True)


def _as_server_user(*command: str) -> list[str]:
    """Return a command that runs as another user if this process is root, which the server refuses."""
    user = (
        ["setpriv", f"--reuid={SERVER_USER}", f"--regid={SERVER_GROUP}", "--clear-groups"] if os.getuid() == 0 else []
    )
    return [*user, *command]
