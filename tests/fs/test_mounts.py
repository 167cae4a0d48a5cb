"""Databases and locks are refused on network file systems."""

import os
from types import SimpleNamespace

import pytest

from imagemill.fs.mounts import NetworkFileSystem, file_system_type, refuse_network_folder
from imagemill.store.ledger import Ledger

TABLE = {
    "/": "ext4", "/mnt/share": "nfs4", "/mnt/with space": "cifs", "/mnt/share/local": "xfs", "/mnt/two": "ext4",
}  # fmt: skip


def mounted(monkeypatch, *mounts):
    found = [SimpleNamespace(mountpoint=point, fstype=kind) for point, kind in mounts]
    monkeypatch.setattr("psutil.disk_partitions", lambda all: found)


@pytest.fixture
def table(monkeypatch):
    mounted(monkeypatch, *TABLE.items(), ("/mnt/two", "nfs"))


@pytest.mark.parametrize(
    ("folder", "kind"),
    [("/home/a", "ext4"), ("/mnt/share/data", "nfs4"), ("/mnt/share", "nfs4"), ("/mnt/shared", "ext4"),
     ("/mnt/with space/x", "cifs"), ("/mnt/share/local/x", "xfs"), ("/mnt/two/x", "nfs")],
)  # fmt: skip
def test_type_is_that_of_the_longest_mount_point_above(table, folder, kind):
    assert file_system_type(folder) == kind


def test_network_folder_is_refused_with_the_remedy(table):
    with pytest.raises(NetworkFileSystem, match=r"nfs4(.|\n)*keep .imagemill/ and .dagster/ on a local disk"):
        refuse_network_folder("/mnt/share/data/.imagemill", "the ledger")
    refuse_network_folder("/home/a/data/.imagemill", "the ledger")


def test_ledger_on_a_network_file_system_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    mounted(monkeypatch, ("/", "nfs"))

    with pytest.raises(NetworkFileSystem):
        Ledger(tmp_path / "state" / "ledger.sqlite")
    assert list(tmp_path.iterdir()) == []


def test_system_without_a_mount_table_is_not_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("psutil.disk_partitions", lambda all: os.stat("/nowhere"))

    assert file_system_type(tmp_path) is None
    refuse_network_folder(tmp_path, "the ledger")
