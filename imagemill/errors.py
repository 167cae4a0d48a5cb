"""Base class of all errors, and the errors that more than one package raises.

Findings about data (validation/findings.py) and ledger rows (store/ledger/) are values, not exceptions.
"""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class ImagemillError(Exception):
    """A failure that the reader can act on: what, where, why, and what to do, as attributes and in the message."""

    def __init__(self, what: str, *, where: object = None, why: str | None = None, do: str | None = None) -> None:
        self.what, self.where, self.why, self.do = what, where, why, do
        super().__init__(what)

    def __str__(self) -> str:
        hints = (("where:", self.where), ("why:  ", self.why), ("do:   ", self.do))
        return "\n".join([self.what, *(f"  {label} {text}" for label, text in hints if text)])

    def __reduce__(self):
        # Without this, exceptions with keyword-only arguments cannot be pickled and sent by a worker process.
        return _rebuild, (type(self), self.__dict__.copy())


def _rebuild(cls: type[ImagemillError], state: dict) -> ImagemillError:
    error = cls.__new__(cls)
    Exception.__init__(error, state["what"])
    error.__dict__.update(state)
    return error


class WrongUsage(ImagemillError, ValueError):
    """An unknown name or a bad value: exit code 2."""


class UnknownKind(WrongUsage):
    """An embedding kind that is not installed, cannot be imported, or has a name of another kind."""


class MissingInput(ImagemillError, FileNotFoundError):
    """An input file or folder does not exist."""


class Refused(ImagemillError):
    """An input cannot be accepted. It is tried again only when it changes, and never fails a run.

    `reason` is the ledger's reason code (`undecodable`, `too_small`, …).
    """

    def __init__(self, reason: str, what: str, *, where: object = None, why: str | None = None, do: str | None = None):
        super().__init__(what, where=where, why=why, do=do)
        self.reason = reason


class InvalidNpy(ImagemillError, ValueError):
    """A file with a final name violates its contract; `reason` is one word for reports."""

    def __init__(self, reason: str, path: object, detail: str) -> None:
        super().__init__(
            f"{reason}: {detail}", where=path, do="run `imagemill run`: it replaces the file and reports it"
        )
        self.reason = reason


class NonFiniteEmbedding(ImagemillError, ValueError):
    """An encoder produced NaN or infinity before the cast to its stored dtype."""


class ModelUnusable(ImagemillError, RuntimeError):
    """A model cannot be found, loaded or run on this machine."""


class WeightsMissing(ModelUnusable):
    """A model folder without weights, or with only a part of them."""


class ModelMismatch(ImagemillError, RuntimeError):
    """The encoder of this run did not make the existing files: one directory never mixes two models."""


class ShardExists(ImagemillError, FileExistsError):
    """Shards already exist, and the caller did not ask to replace them."""


class NotEnoughSpace(ImagemillError, OSError):
    """A disk has too little space, or room for too few files, for what a job is about to write; `needed` and `free` in bytes."""

    def __init__(
        self, what: str, *, needed: int, free: int, where: object = None, why: str | None = None, do: str | None = None
    ) -> None:
        super().__init__(what, where=where, why=why, do=do)
        self.needed, self.free = needed, free


class DiskFull(ImagemillError, OSError):
    """A disk, or the user's quota on it, filled up during a write."""


# The second code: the shared-memory index of the write-ahead log cannot grow, because the disk is full or has an I/O error.
_MAYBE_FULL = "SQLITE_IOERR_SHMSIZE"
_SQLITE_FULL = {"SQLITE_FULL", _MAYBE_FULL}

FULL_DISK = (
    "finished work is kept and every file is whole: free space, or delete files if `df -i` shows that no further ones can be "
    "made, then run the same command again"
)

_FULL_OR_FAILED = (
    "finished work is kept and every file is whole: free space, or check the disk, then run the same command again"
)
FAILED_DISK = (
    "run the same command again: finished work is kept. If the error returns, check that the file exists and that the disk has "
    "no errors"
)


@contextmanager
def disk_full_reported(where: Path) -> Iterator[None]:
    """Convert the error that any library raises in this block for a full disk to `DiskFull`."""
    try:
        yield
    except ImagemillError:
        raise
    except Exception as error:
        if not is_disk_full(error):
            raise
        maybe = _may_be_full(error)
        what = "the disk is full or has an error" if maybe else "the disk is full"
        remedy = _FULL_OR_FAILED if maybe else FULL_DISK
        raise DiskFull(f"{what}: {str(error).splitlines()[0]}", where=where, do=remedy) from error


def _may_be_full(error: BaseException | None) -> bool:
    """Return whether an I/O error may be the cause, by the first SQLite error of the exception chain."""
    names = (getattr(cause, "sqlite_errorname", None) for cause in causes(error))
    return next(filter(None, names), None) == _MAYBE_FULL


def is_disk_full(error: BaseException | None) -> bool:
    """Return whether an exception, or one in its chain of causes, reports that there is no space left."""
    return any(
        (isinstance(cause, OSError) and cause.errno in {errno.ENOSPC, errno.EDQUOT})
        or getattr(cause, "sqlite_errorname", None) in _SQLITE_FULL
        for cause in causes(error)
    )


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception and its chain of causes, newest first."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
