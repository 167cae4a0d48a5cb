"""File system types. Databases and locks are refused on network file systems, because their locks hold on one kernel only."""

import os
from contextlib import suppress
from pathlib import Path

import psutil

from imagemill.errors import ImagemillError

# Spelled as the kernel spells them; FUSE clients are named `fuse.<program>`.
_NETWORK = {
    "afs", "beegfs", "ceph", "cifs", "gfs2", "gpfs", "lustre", "ncpfs", "nfs", "nfs4", "ocfs2", "orangefs",
    "smb3", "smbfs", "fuse.gcsfuse", "fuse.glusterfs", "fuse.goofys", "fuse.rclone", "fuse.s3fs", "fuse.sshfs",
    "fuse.mount-s3", "fuse.juicefs",
}  # fmt: skip


class NetworkFileSystem(ImagemillError, OSError):
    """A folder with a database or locks is on a network file system, so other machines would not see the locks."""


def refuse_network_folder(folder: Path, what: str) -> None:
    """Raise NetworkFileSystem if a folder, or its nearest existing parent, is on a network file system."""
    kind = file_system_type(folder)
    if kind in _NETWORK:
        raise NetworkFileSystem(
            f"{what} is on a network file system ({kind})",
            where=folder,
            why="its locks hold on one machine only; two machines would overwrite each other's work",
            do="keep .imagemill/ and .dagster/ on a local disk; approved/, derived/ and shards/ may be links to the network",
        )


def file_system_type(folder: Path) -> str | None:
    """Return the type of the mount that holds a folder, or None if the system does not report it."""
    path = os.path.realpath(folder)
    mounts: dict[str, str] = {}
    with suppress(OSError):
        # If several file systems are mounted at one point, the last one is visible.
        mounts = {mount.mountpoint: mount.fstype for mount in psutil.disk_partitions(all=True)}
    matching = [point for point in mounts if path == point or path.startswith(point.rstrip("/") + "/")]
    return mounts[max(matching, key=len)] if matching else None
