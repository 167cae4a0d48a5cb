"""List folders: the signature of each file, from one pass, without opening any.

A call per file is all the work there is, and the interpreter takes one at a time: large folders are therefore listed side by
side, each by a small interpreter of its own.

Source: CONTRACTS section 0, "Completion is validity".
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from imagemill import stat_folder
from imagemill.columns import Column
from imagemill.files import FileSignature


class Listing(NamedTuple):
    """Files in order of name, without their suffix, in columns: names and signatures."""

    names: Column
    signatures: Column

    @classmethod
    def of(cls, texts: Sequence[str]) -> "Listing":
        return cls(*map(Column, texts))

    def stat(self, at: int) -> FileSignature:
        return FileSignature(self.signatures.values[at])


def list_files(folder: Path, suffix: str) -> dict[str, FileSignature]:
    """Return the regular files (links to them too) in order of name; none if there is no such folder."""
    names, signatures = stat_folder.stat_folder(folder, suffix)
    return dict(zip(names, map(FileSignature, signatures), strict=True))


def begin_listing(
    pool: ThreadPoolExecutor, folders: Sequence[Path], suffix: str, *, aside: bool
) -> list[Future[Listing]]:
    """List these folders side by side on the pool's threads, while the caller does something else.

    Args:
        aside: by other interpreters; a few thousand files are listed before one has started.
    """
    return [pool.submit(_list_aside if aside else _list_here, folder, suffix) for folder in folders]


def _list_here(folder: Path, suffix: str) -> Listing:
    return Listing.of(stat_folder.as_text(stat_folder.stat_folder(folder, suffix)))


def _list_aside(folder: Path, suffix: str) -> Listing:
    command = [sys.executable, "-I", "-S", stat_folder.__file__, str(folder), suffix]
    listed = subprocess.run(
        command, check=False, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    # Whatever kept it from its work, a verdict or an error is for this process to give.
    return Listing.of(os.fsdecode(listed.stdout).split("\0")) if listed.returncode == 0 else _list_here(folder, suffix)
