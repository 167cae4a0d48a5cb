"""Detection of a full disk in the errors of several libraries. Spec: docs/spec/conventions.md#atomic-names"""

import errno
import os
import sqlite3
from pathlib import Path

import pytest

from imagemill.errors import DiskFull, ImagemillError, WrongUsage, disk_full_reported, is_disk_full

PLACE = Path("data/shards")


def sqlite_error(name):
    error = sqlite3.OperationalError("database or disk is full")
    error.sqlite_errorname = name
    return error


def wrapped(error):
    """Wrap an error as SQLAlchemy does."""
    outer = RuntimeError("(sqlite3.OperationalError) database or disk is full\n(Background on this error at: …)")
    outer.__cause__ = error
    return outer


FULL = [
    OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
    OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)),
    sqlite_error("SQLITE_FULL"),
    wrapped(sqlite_error("SQLITE_FULL")),
]


@pytest.mark.parametrize("error", FULL, ids=str)
def test_full_disk_is_reported_with_place_and_remedy(error):
    with pytest.raises(DiskFull) as caught, disk_full_reported(PLACE):
        raise error

    assert is_disk_full(error)
    assert isinstance(caught.value, OSError)
    assert caught.value.what.startswith("the disk is full: ")
    assert "\n" not in caught.value.what
    assert caught.value.where == PLACE
    assert "free space" in caught.value.do


def test_disk_that_may_be_full_is_not_called_full():
    """SQLite has one code for a full disk and an I/O error when it maps the index of its log."""
    with pytest.raises(DiskFull) as caught, disk_full_reported(PLACE):
        raise sqlite_error("SQLITE_IOERR_SHMSIZE")

    assert caught.value.what.startswith("the disk is full or has an error: ")
    assert "check the disk" in caught.value.do


@pytest.mark.parametrize(
    "error",
    [OSError(errno.EIO, "Input/output error"), sqlite_error("SQLITE_BUSY"), WrongUsage("what"), KeyboardInterrupt()],
    ids=repr,
)
def test_every_other_error_goes_its_way(error):
    with pytest.raises(type(error)) as caught, disk_full_reported(PLACE):
        raise error
    assert caught.value is error


def test_error_that_says_so_already_keeps_its_words():
    ours = DiskFull("the disk is full", where="inner")
    with pytest.raises(ImagemillError) as caught, disk_full_reported(PLACE):
        raise ours
    assert caught.value is ours
