"""Writing the members of an archive to a folder of `approved/`: nothing outside of it, and no existing file is replaced.

    approved/00000/.tmp-<owner>-<pid>x000001     being written
    approved/00000/000000000.jpg                 whole and flushed

Folders are opened one by one, relative to the last, so that no link is followed. Files of one folder are flushed together.

What becomes of a member is decided in archives.py.
Spec: docs/spec/stage2.md#archives, docs/spec/conventions.md#atomic-names
"""

import errno
import os
import stat
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from imagemill.errors import disk_full_reported
from imagemill.formats.tar_members import BrokenArchive, TarMember, TarMembers, TooMuch, open_members
from imagemill.fs.atomic import sweep_temporaries, temporary_path
from imagemill.fs.durable import begin_writing_back, flush_files
from imagemill.inputs.archives import HIDDEN, Rejected, Target, plan_member, printable

# Files of one folder get their final names together, after so many files or bytes.
_BATCH_FILES: Final = 256
_BATCH_BYTES: Final = 64 << 20

# Problems and names of hidden members that are kept for the report; all are counted.
_KEPT: Final = 20

_OPEN_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# The file may be a pipe, which must not be waited for.
_OPEN_FILE: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CREATE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

# Errors of a name that this file system cannot store, and of something that has the name already.
_OF_NAMES: Final = {errno.ENAMETOOLONG, errno.EILSEQ, errno.EINVAL}
_IN_THE_WAY: Final = {errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENXIO, errno.EEXIST}
_NO_HARD_LINKS: Final = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}

_KEEP_OR_MOVE: Final = (
    "keep it, or move it elsewhere and run the same command again; "
    "if the archive contains the name twice, rename a member"
)


class MemberProblem(NamedTuple):
    """A member that was not imported, or, with a blank name, a fault of the whole archive."""

    member: str
    reason: str
    detail: str
    remedy: str


@dataclass(slots=True)
class Unpacked:
    """Result of one archive.

    Attributes:
        files: number of files that were written.
        size: their bytes.
        present: number of members that existed already with equal bytes.
        hidden: number of members whose names begin with a dot; they are not imported.
        hidden_names: the first of them.
        reasons: number of problems by reason.
        problems: the first of them.
        limit_reached: whether a limit of the command ended the import.
    """

    files: int = 0
    size: int = 0
    present: int = 0
    hidden: int = 0
    hidden_names: list[str] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)
    problems: list[MemberProblem] = field(default_factory=list)
    limit_reached: bool = False

    def note(self, member: str, reason: str, detail: str, remedy: str) -> None:
        """Count a problem, and keep it if it is one of the first."""
        self.reasons[reason] += 1
        if len(self.problems) < _KEPT:
            self.problems.append(MemberProblem(printable(member), reason, detail, remedy))

    def note_bad_name(self, member: str, why: str | None) -> None:
        """Count a member whose name this file system cannot store."""
        remedy = "unpack the archive with another program, and rename the file"
        self.note(member, "bad_name", f"this disk cannot store its name: {why}", remedy)

    def note_hidden(self, member: str) -> None:
        """Count a hidden member, and keep its name if it is one of the first."""
        self.hidden += 1
        if len(self.hidden_names) < 3:
            self.hidden_names.append(printable(member))


@dataclass(slots=True)
class Limits:
    """Number of files, with the folders inside those of archives, and of bytes that a command may still write."""

    files: int
    size: int


class _LimitReached(Exception):
    """A member that would exceed a limit of the command: its name, and the option that sets the limit."""


class _Different(Exception):
    """A member that cannot be written because something else has its name; why."""


def unpack(
    archive: Path, approved: Path, folder: str, limits: Limits, advance: Callable[[int], None] = lambda position: None
) -> Unpacked:
    """Write the members of an archive to the folder `approved`/`folder`, and return what became of them.

    Args:
        archive: a tar, compressed by gzip or not.
        approved: an existing folder.
        folder: name of the folder in it, which is created if there is a member to write.
        limits: what may still be written; reduced by what was.
        advance: called with the number of bytes of the archive that have been read.

    Raises:
        OSError: if the disk fails or is full. Files with final names are whole.
    """
    result = Unpacked()
    place = approved / folder
    if os.path.lexists(place) and not stat.S_ISDIR(os.lstat(place).st_mode):
        remedy = "move it elsewhere, or rename the archive"
        result.note("", "exists", f"{place} is a file or a link, not a folder", remedy)
        return result
    _sweep(place)
    try:
        with disk_full_reported(place), open_members(archive, most_unused=limits.size) as members:
            with _Writer(approved, folder, limits, result) as writer:
                for member in members:
                    _import(member, members, writer, result)
                    advance(members.position)
    except BrokenArchive as error:
        remedy = "get a whole tar archive, then run the same command again"
        result.note("", "damaged", f"{error.what}; what was read before is imported", remedy)
    except (TooMuch, _LimitReached) as error:
        member, option = ("", "--max-bytes") if isinstance(error, TooMuch) else error.args
        result.limit_reached = True
        detail = f"{option} would be exceeded; what follows in the archive is not imported"
        remedy = (
            f"if you trust the archive, give a larger {option}, with enough free space, and run the same command again"
        )
        result.note(member, "limit", detail, remedy)
    return result


def _import(member: TarMember, members: TarMembers, writer: "_Writer", result: Unpacked) -> None:
    """Write one member, or note why it is not written. Raises `_LimitReached` if that would exceed a limit."""
    planned = plan_member(member)
    if planned is HIDDEN:
        result.note_hidden(member.name)
    elif isinstance(planned, Rejected):
        result.note(member.name, planned.reason, planned.detail, planned.remedy)
    elif planned is not None:
        try:
            writer.write(planned, member.size, members.read)
        except _Different as error:
            result.note(member.name, "exists", str(error), _KEEP_OR_MOVE)
        except OSError as error:
            if error.errno not in _OF_NAMES:
                raise
            result.note_bad_name(member.name, error.strerror)


def _sweep(folder: Path) -> None:
    """Remove temporaries of dead processes. Links are not followed."""
    folders = [folder] if folder.is_dir() else []
    while folders:
        path = folders.pop()
        sweep_temporaries(path)
        with os.scandir(path) as entries:
            folders += [Path(each.path) for each in entries if each.is_dir(follow_symlinks=False)]


class _Pending(NamedTuple):
    """A file under its temporary name."""

    temporary: str
    name: str
    size: int


class _Writer:
    """Writes files below one folder, a batch at a time. Leaving the context gives the last batch its names."""

    def __init__(self, approved: Path, folder: str, limits: Limits, result: Unpacked) -> None:
        self._base, self._folder, self._limits, self._result = approved, folder, limits, result
        # The folder of the batch: names below `approved`, and its open handle.
        self._at: tuple[str, ...] | None = None
        self._handle = -1
        self._batch: list[_Pending] = []
        self._batch_size = 0

    def __enter__(self) -> "_Writer":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None or issubclass(kind, BrokenArchive | TooMuch | _LimitReached):
                self._publish()
        finally:
            for each in self._batch:
                with suppress(OSError):
                    os.unlink(each.temporary, dir_fd=self._handle)
            self._close()

    def write(self, target: Target, size: int, read: Callable[[], bytes]) -> None:
        """Write a file of `size` bytes from `read`, unless a file of equal bytes has its name.

        Raises:
            _Different: if something else has its name, or a file has the name of one of its folders.
            _LimitReached: if it would exceed a limit.
        """
        self._enter(target)
        if self._is_present(target.name, size, read):
            self._result.present += 1
            return
        if self._limits.files <= 0 or size > self._limits.size:
            raise _LimitReached(target.path, "--max-files" if self._limits.files <= 0 else "--max-bytes")
        temporary = temporary_path(self._base).name
        handle = os.open(temporary, _CREATE, 0o666, dir_fd=self._handle)
        self._batch.append(_Pending(temporary, target.name, size))
        try:
            while data := read():
                view = memoryview(data)
                while view:
                    view = view[os.write(handle, view) :]
            begin_writing_back(handle)
        except BaseException:
            self._batch.pop()
            os.unlink(temporary, dir_fd=self._handle)
            raise
        finally:
            os.close(handle)
        self._limits.files -= 1
        self._limits.size -= size
        self._batch_size += size
        if len(self._batch) >= _BATCH_FILES or self._batch_size >= _BATCH_BYTES:
            self._publish()

    def _is_present(self, name: str, size: int, read: Callable[[], bytes]) -> bool:
        """Return whether a file of equal bytes has the name. Raises `_Different` if something else has it."""
        try:
            handle = os.open(name, _OPEN_FILE, dir_fd=self._handle)
        except FileNotFoundError:
            return False
        except OSError as error:
            if error.errno in _IN_THE_WAY:
                raise _Different("a link or a socket has its name") from error
            if error.errno == errno.EACCES:
                raise _Different("a file that cannot be read has its name") from error
            raise
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode) or status.st_size != size:
            os.close(handle)
            raise _Different(_in_the_way(status, size))
        with open(handle, "rb") as file:
            while data := read():
                if file.read(len(data)) != data:
                    raise _Different("a file of other bytes has its name")
        return True

    def _publish(self) -> None:
        """Flush the batch, and give its files their names."""
        if not self._batch:
            return
        folder = self._base.joinpath(*self._at or ())
        for error in flush_files([folder / each.temporary for each in self._batch]).values():
            raise error
        while self._batch:
            each = self._batch[0]
            try:
                self._name(each)
            except FileExistsError:
                self._compare(each)
            except OSError as error:
                if error.errno not in _OF_NAMES:
                    raise
                self._result.note_bad_name(self._path(each), error.strerror)
            else:
                self._result.files += 1
                self._result.size += each.size
            with suppress(FileNotFoundError):  # on a disk without hard links it was renamed
                os.unlink(each.temporary, dir_fd=self._handle)
            self._batch.pop(0)
        self._batch_size = 0
        os.fsync(self._handle)

    def _name(self, each: _Pending) -> None:
        """Give a file its name without replacing another. Raises FileExistsError if the name is taken."""
        try:
            os.link(each.temporary, each.name, src_dir_fd=self._handle, dst_dir_fd=self._handle, follow_symlinks=False)
        except OSError as error:
            if error.errno not in _NO_HARD_LINKS:
                raise
            try:
                os.stat(each.name, dir_fd=self._handle, follow_symlinks=False)
            except FileNotFoundError:
                os.rename(each.temporary, each.name, src_dir_fd=self._handle, dst_dir_fd=self._handle)
            else:
                raise FileExistsError(each.name) from error

    def _compare(self, each: _Pending) -> None:
        """Count a file whose name was taken after it was begun: a second member of that name, or another process's file."""
        with open(os.open(each.temporary, _OPEN_FILE, dir_fd=self._handle), "rb") as file:
            try:
                self._is_present(each.name, each.size, lambda: file.read(1 << 20))
            except _Different as error:
                self._result.note(self._path(each), "exists", str(error), _KEEP_OR_MOVE)
            else:
                self._result.present += 1

    def _path(self, each: _Pending) -> str:
        return "/".join((*(self._at or ())[1:], each.name))

    def _enter(self, target: Target) -> None:
        """Make the folder of a file that of the batch. Raises as `write`."""
        folders = (self._folder, *target.folders)
        if folders == self._at:
            return
        self._publish()
        self._close()
        handle = os.open(self._base, _OPEN_FOLDER)
        for depth, name in enumerate(folders):
            try:
                inner = self._open_or_make(name, handle, target if depth else None)
            except OSError as error:
                if error.errno in _IN_THE_WAY:
                    raise _Different(f"{printable(name)} is a file or a link, not a folder") from error
                raise
            finally:
                os.close(handle)
            handle = inner
        self._at, self._handle = folders, handle

    def _open_or_make(self, name: str, folder: int, counted_for: Target | None) -> int:
        """Open a folder in an open one; create it durably if it does not exist, and count it for a file if one is given."""
        with suppress(FileNotFoundError):
            return os.open(name, _OPEN_FOLDER, dir_fd=folder)
        if counted_for and self._limits.files <= 0:
            raise _LimitReached(counted_for.path, "--max-files")
        with suppress(FileExistsError):
            os.mkdir(name, dir_fd=folder)
        os.fsync(folder)
        self._limits.files -= 1 if counted_for else 0
        return os.open(name, _OPEN_FOLDER, dir_fd=folder)

    def _close(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
        self._at, self._handle = None, -1


def _in_the_way(status: os.stat_result, size: int) -> str:
    if stat.S_ISREG(status.st_mode):
        return f"a file of {status.st_size} bytes has its name; the member has {size}"
    return "a folder has its name" if stat.S_ISDIR(status.st_mode) else "a device or a pipe has its name"
