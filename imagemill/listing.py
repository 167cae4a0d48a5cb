"""What a folder's files are, from one pass over it: a size, a time and an inode each, and none is opened.

A call per file is all the work there is, and the interpreter takes one at a time: large folders are therefore listed side by
side, each by a small interpreter of its own. That one loads nothing but this file, so it imports the standard library only.

Source: CONTRACTS section 0, "Completion is validity".
"""

import marshal
import os
import stat
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

# Size in bytes, modification time in nanoseconds, inode: equal to a `StatTriple`.
Triple = tuple[int, int, int]

# Fewer files than these are listed before another interpreter has started.
_MANY = 10_000


def list_files(folder: str | Path, suffix: str) -> dict[str, Triple]:
    """Regular files (links to them too) by name without `suffix`; none where there is no folder."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return {}
    found: dict[str, Triple] = {}
    look, regular, cut = os.stat, stat.S_ISREG, -len(suffix)
    try:
        for name in os.listdir(handle):
            if not name.endswith(suffix):
                continue
            try:
                status = look(name, dir_fd=handle)  # by handle: one name is looked up, not a whole path
            except FileNotFoundError:  # gone since the folder was read
                continue
            if regular(status.st_mode):
                found[name[:cut]] = (status.st_size, status.st_mtime_ns, status.st_ino)
        return found
    finally:
        os.close(handle)


def begin_listing(pool: ThreadPoolExecutor, folders: Sequence[Path], suffix: str) -> list[Future[Mapping[str, Triple]]]:
    """List these folders side by side on the pool's threads, while the caller does something else."""
    return [pool.submit(_list_aside, folder, suffix) for folder in folders]


def _list_aside(folder: Path, suffix: str) -> dict[str, Triple]:
    if not _is_large(folder):
        return list_files(folder, suffix)
    command = [sys.executable, "-I", "-S", __file__, str(folder), suffix]
    listed = subprocess.run(
        command, check=False, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    # Whatever kept it from its work, a verdict or an error is for this process to give.
    return marshal.loads(listed.stdout) if listed.returncode == 0 else list_files(folder, suffix)


def _is_large(folder: Path) -> bool:
    try:
        return len(os.listdir(folder)) > _MANY
    except OSError:
        return False


if __name__ == "__main__":
    sys.stdout.buffer.write(marshal.dumps(list_files(sys.argv[1], sys.argv[2])))
