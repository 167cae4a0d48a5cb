"""List the files of folders with their signatures, without opening any: as functions, and as a program for large folders.

Source: CONTRACTS section 0, "Completion is validity".
"""

import errno
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from itertools import chain
from pathlib import Path

from imagemill.fs.fingerprints import FileSignature, file_signature


def list_files(folder: Path, suffix: str) -> dict[str, FileSignature]:
    """Return the signature of each regular file (links to them too) by its name without the suffix, in order of name.

    A folder that does not exist has no files.
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
                )  # relative to the folder: one name is resolved, not a path
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.ELOOP):  # removed since the folder was read; a link to itself
                    continue
                raise
            if regular(status.st_mode):
                found[name] = file_signature(status)
    finally:
        os.close(handle)
    return found


def start_listing(folder: Path, suffix: str) -> Callable[[], dict[str, FileSignature]]:
    """Start `list_files` in another process and return the function that waits for its result.

    Listing 60,000 files takes 0.25 s, which a thread would spend in turns with the caller.
    """
    command = [sys.executable, "-P", "-m", __name__, str(folder), suffix]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd="/"
    )

    def result() -> dict[str, FileSignature]:
        listed, _ = process.communicate()
        if process.returncode:  # an error is raised by this process
            return list_files(folder, suffix)
        parts = iter(os.fsdecode(listed).split("\0"))
        return {name: FileSignature(next(parts)) for name in parts if name}

    return result


if __name__ == "__main__":
    parts = chain.from_iterable(list_files(Path(sys.argv[1]), sys.argv[2]).items())
    sys.stdout.buffer.write(os.fsencode("\0".join(parts)))
