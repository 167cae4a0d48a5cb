"""docs/how-to/postgresql.md: its settings, with a real PostgreSQL server and the packages that the page installs."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
from PIL import Image

from tests.docs.console import ROOT

pytestmark = pytest.mark.slow

PAGE = (ROOT / "docs" / "how-to" / "postgresql.md").read_text("utf-8")
PASSWORD_FILE = "password"
USER = "imagemill"
SERVER_USER = "nobody"  # quoted


def _program(name: str) -> str:
    """Return the path of a program of PostgreSQL; Debian keeps them outside PATH."""
    debian = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"), reverse=True)
    found = shutil.which(name) or (str(debian[0]) if debian else "")
    if not found:
        pytest.skip(f"{name} of PostgreSQL is not installed")
    return found


def _as_server_user(*command: str) -> list[str]:
    """Return a command that runs as another user if this process is root, which the server refuses."""
    user = ["setpriv", f"--reuid={SERVER_USER}", "--regid=nogroup", "--clear-groups"] if os.getuid() == 0 else []
    return [*user, *command]


@pytest.fixture
def server() -> Iterator[str]:
    """Yield the URL of a database of a server that listens on a Unix socket only."""
    initdb, pg_ctl = _program("initdb"), _program("pg_ctl")
    folder = Path(tempfile.mkdtemp(prefix="imagemill-postgresql-"))  # short enough for the path of a socket
    (folder / PASSWORD_FILE).write_text("secret")
    if os.getuid() == 0:
        for path in (folder, folder / PASSWORD_FILE):
            shutil.chown(path, SERVER_USER, "nogroup")
    data = str(folder / "data")
    create = [initdb, "-D", data, "-U", USER, "--auth=scram-sha-256", f"--pwfile={folder / PASSWORD_FILE}", "--no-sync"]
    subprocess.run(_as_server_user(*create), check=True, capture_output=True, cwd=folder)
    options = f"-c listen_addresses='' -c unix_socket_directories='{folder}' -c fsync=off"
    start = [pg_ctl, "-D", data, "-o", options, "-l", str(folder / "log"), "-w", "start"]
    subprocess.run(_as_server_user(*start), check=True, stdout=subprocess.DEVNULL, cwd=folder)
    try:
        yield f"postgresql://{USER}:secret@/postgres?host={folder}"
    finally:
        subprocess.run(
            _as_server_user(pg_ctl, "-D", data, "-m", "immediate", "stop"), check=True, cwd=folder, capture_output=True
        )


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the packages of the page's command, without those that the environment has already."""
    (command,) = re.findall(r"^pip install (.*)$", PAGE, re.MULTILINE)
    folder = tmp_path_factory.mktemp("packages")
    _, minor, patch = version("dagster").split(".")
    wanted = [name.strip("'") for name in command.split()]
    wanted[wanted.index("dagster-postgres")] += (
        f"==0.{int(minor) + 16}.{patch}"  # released together, 16 minor versions apart
    )
    uv = [str(Path(sys.executable).parent / "uv"), "pip", "install", "--quiet", "--python", sys.executable]
    subprocess.run([*uv, "--no-deps", "--target", str(folder), *wanted, "psycopg2-binary"], check=True)
    return folder


def test_run_writes_its_history_to_postgresql(server, packages, tmp_path):
    root = tmp_path / "data"
    (settings,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    url = "postgresql://imagemill:secret@localhost/imagemill"
    assert url in settings
    (root / "approved").mkdir(parents=True)
    Image.effect_noise((640, 480), 80).convert("RGB").save(root / "approved" / "a.jpg")
    (root / "approved" / "a.txt").write_text("noise")
    (root / ".dagster").mkdir()
    (root / ".dagster" / "dagster.yaml").write_text(settings.replace(url, server))
    environment = {**os.environ, "PYTHONPATH": f"{packages}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}

    def imagemill(*arguments: str) -> str:
        command = [sys.executable, "-m", "dagster_project.cli.main", *arguments, "--data-root", str(root)]
        done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout

    first, second = imagemill("run"), imagemill("run")

    assert "checks     10 of 10 passed" in first
    assert "nothing to do" in second

    query = "SELECT asset_key FROM asset_keys"
    rows = subprocess.run(
        [_program("psql"), server, "-At", "-c", query], check=True, capture_output=True, text=True
    ).stdout
    assert {'["dinov3_npy"]', '["bucket_shards"]'} <= set(rows.split())
    assert not list((root / ".dagster" / "history").glob("runs*")), "nothing is in SQLite"
