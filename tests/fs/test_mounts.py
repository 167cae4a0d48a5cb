"""Databases and locks are refused on network file systems."""

import pytest

from imagemill.fs import mounts
from imagemill.fs.mounts import NetworkFileSystem, file_system_type, refuse_network_folder
from imagemill.store.ledger import Ledger

TABLE = """\
22 1 259:1 / / rw,relatime shared:1 - ext4 /dev/root rw
40 22 0:34 / /mnt/share rw,relatime shared:20 - nfs4 server:/export rw,vers=4.2
41 22 0:35 / /mnt/with\\040space rw - cifs //server/x rw
42 40 0:36 / /mnt/share/local rw master:3 - xfs /dev/sdb rw
"""


@pytest.fixture
def table(monkeypatch):
    monkeypatch.setattr(mounts, "_read_mounts", lambda: TABLE)


@pytest.mark.parametrize(
    ("folder", "kind"),
    [("/home/a", "ext4"), ("/mnt/share/data", "nfs4"), ("/mnt/share", "nfs4"), ("/mnt/shared", "ext4"),
     ("/mnt/with space/x", "cifs"), ("/mnt/share/local/x", "xfs")],
)  # fmt: skip
def test_type_is_that_of_the_longest_mount_point_above(table, folder, kind):
    assert file_system_type(folder) == kind


def test_network_folder_is_refused_with_the_remedy(table):
    with pytest.raises(NetworkFileSystem, match=r"nfs4(.|\n)*keep .imagemill/ and .dagster/ on a local disk"):
        refuse_network_folder("/mnt/share/data/.imagemill", "the ledger")
    refuse_network_folder("/home/a/data/.imagemill", "the ledger")


def test_ledger_on_a_network_file_system_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(mounts, "_read_mounts", lambda: "22 1 0:1 / / rw - nfs server:/ rw\n")

    with pytest.raises(NetworkFileSystem):
        Ledger(tmp_path / "state" / "ledger.sqlite")
    assert list(tmp_path.iterdir()) == []


def test_system_without_a_mount_table_is_not_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(mounts, "_read_mounts", lambda: "")

    assert file_system_type(tmp_path) is None
    refuse_network_folder(tmp_path, "the ledger")
