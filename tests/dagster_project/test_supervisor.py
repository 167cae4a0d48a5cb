"""The processes behind `imagemill ui`. tests/cli/test_ui.py tests them together."""

import socket
import tempfile
from pathlib import Path

from dagster_project.service import SOCKET
from dagster_project.supervisor import socket_folder


def test_socket_fits_where_the_temporary_folder_has_a_long_path(tmp_path, monkeypatch):
    """TMPDIR of a cluster's job may be long, but the path of a socket must be short."""
    long = tmp_path / ("a" * 120)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))

    folder = socket_folder()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(folder / SOCKET.format(99)))

    assert folder.parent == Path("/tmp")
    (folder / SOCKET.format(99)).unlink()
    folder.rmdir()
