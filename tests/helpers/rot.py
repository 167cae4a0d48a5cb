"""Damage to files on disk, as by a failing disk, a broken copy or a careless user."""

import os


def rot(path, position=-1):
    """Flip a bit and restore the time: size, time and inode stay the same."""
    before = path.stat()
    flip(path, position)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = path.stat()
    assert (before.st_size, before.st_mtime_ns, before.st_ino) == (after.st_size, after.st_mtime_ns, after.st_ino)


def flip(path, position=-1):
    """Flip a bit in place."""
    with open(path, "r+b") as file:
        file.seek(position, os.SEEK_END if position < 0 else os.SEEK_SET)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def truncate(path):
    """Cut off the last 200 bytes."""
    os.truncate(path, max(path.stat().st_size - 200, 0))
