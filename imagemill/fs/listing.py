"""Directory listings with file signatures, without opening a file: in this process, or in a child process for large folders.

Spec: docs/spec/conventions.md#completion
"""

import errno
import marshal
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from imagemill.fs.fingerprints import FileSignature, file_signature


def is_inside(path: str, folder: str) -> bool:
    """Return whether a path leads into a folder. Both are absolute, without links.

    >>> is_inside("/a/b", "/a"), is_inside("/ab", "/a"), is_inside("/a", "/a")
    (True, False, False)
    """
    return path.startswith(folder.rstrip("/") + "/")


def list_files(folder: Path, suffix: str) -> dict[str, FileSignature]:
    """Return the signatures of the regular files (and links to such) with a suffix, by name without the suffix, sorted by name.

    A missing folder gives an empty result.
    """
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    found: dict[str, FileSignature] = {}
    regular, cut = stat.S_ISREG, -len(suffix)
    try:
        for name in sorted(name[:cut] for name in os.listdir(handle) if name.endswith(suffix)):
            try:
                status = os.stat(
                    name + suffix, dir_fd=handle
                )  # relative to the folder: the system resolves one name instead of a path
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.ELOOP):  # removed since the folder was listed; a link to itself
                    continue
                raise
            if regular(status.st_mode):
                found[name] = file_signature(status)
    finally:
        os.close(handle)
    return found


def start_listing(folders: Sequence[Path], suffix: str) -> Callable[[], list[dict[str, FileSignature]]]:
    """Start `list_files` for these folders in a child process, and return the function that waits for the results.

    Listing 60,000 files takes 0.2 s; a thread would alternate with the caller. All folders share one process, which leaves the
    caller a core on a machine with two.
    """
    command = [sys.executable, "-P", "-m", __name__, suffix, *map(str, folders)]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd="/"
    )

    def results() -> list[dict[str, FileSignature]]:
        listed, _ = process.communicate()
        if process.returncode:  # list again here, so that the error is raised in this process
            return [list_files(folder, suffix) for folder in folders]
        return marshal.loads(listed)

    return results


if __name__ == "__main__":
    suffix, *folders = sys.argv[1:]
    sys.stdout.buffer.write(marshal.dumps([list_files(Path(folder), suffix) for folder in folders]))


def nearest_existing(path: Path) -> Path:
    """Return the path itself, or its nearest parent that exists; a broken symlink exists."""
    absolute = Path(os.path.abspath(path))
    return next(place for place in (absolute, *absolute.parents) if os.path.lexists(place))
