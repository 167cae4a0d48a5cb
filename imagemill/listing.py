"""What a folder's files are, from one pass over it: a size, a time and an inode each, and none is opened.

A call per file is all the work there is, and the interpreter takes one at a time: large folders are therefore listed side by
side, each by a small interpreter of its own.

Source: CONTRACTS section 0, "Completion is validity".
"""

import marshal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from imagemill import stat_folder
from imagemill.stat_folder import Triple


class Listing(NamedTuple):
    """Files in order of name, without their suffix; `triples`: what the file system says of each."""

    names: list[str]
    triples: list[Triple]


def list_files(folder: Path, suffix: str) -> Listing:
    """Regular files (links to them too); none where there is no folder."""
    return Listing(*stat_folder.stat_folder(folder, suffix))


def begin_listing(
    pool: ThreadPoolExecutor, folders: Sequence[Path], suffix: str, *, aside: bool
) -> list[Future[Listing]]:
    """List these folders side by side on the pool's threads, while the caller does something else.

    Args:
        aside: by other interpreters; a few thousand files are listed before one has started.
    """
    return [pool.submit(_list_aside if aside else list_files, folder, suffix) for folder in folders]


def _list_aside(folder: Path, suffix: str) -> Listing:
    command = [sys.executable, "-I", "-S", stat_folder.__file__, str(folder), suffix]
    listed = subprocess.run(
        command, check=False, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    # Whatever kept it from its work, a verdict or an error is for this process to give.
    return Listing(*marshal.loads(listed.stdout)) if listed.returncode == 0 else list_files(folder, suffix)
