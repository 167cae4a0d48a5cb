"""Tar shards in the WebDataset convention: deterministic writer and reader.

    abc123.json          one member per suffix, adjacent, in the order given
    abc123.dinov3.npy    the file's bytes as they are on disk
    …
    def456.json

Equal samples give equal bytes on any machine: times, owners and modes are fixed. A name that is not ASCII, or longer than 100
bytes, is stored in a PAX header before its member, in UTF-8 regardless of the reader's locale. The bytes equal those that
`tarfile` writes in its PAX format, and are written an order of magnitude faster.

Samples are assigned to shards in pipeline/shards/shard_plan.py; shards are stored by io_managers/tar.py.
Reference: POSIX pax, "ustar Interchange Format".
Spec: docs/spec/shards.md#updating-a-set
"""

import functools
import io
import itertools
import os
import struct
import tarfile
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from imagemill.domain.embedding_specs import EmbeddingSpec
from imagemill.domain.ids import name_problem
from imagemill.errors import ImagemillError
from imagemill.formats.npy import join_npy
from imagemill.fs.durable import begin_writing_back, flush
from imagemill.fs.fingerprints import FileSignature, RunningFingerprint, file_signature, fingerprint
from imagemill.fs.location import Location


class KnownFile(NamedTuple):
    """A file to be copied only if it is unchanged since its last check. `content` is the fingerprint of its bytes."""

    path: str
    stat: FileSignature
    content: str | None = None


class DamagedFile(ImagemillError):
    """A file to be packed does not hold the recorded bytes, although its size, time and inode are the recorded ones."""


# A key, and its members in order: suffix without the leading dot, and the bytes or the file that holds them.
Sample = tuple[str, Sequence[tuple[str, bytes | Path | KnownFile]]]

BLOCK = 512
_PLACE = struct.Struct("=QQ")
_RECORD = 20 * BLOCK
_END = bytes(2 * BLOCK)

# Median throughput of writes of this size was five times that of large ones.
_PIECE = 64 * 1024
# Samples whose files are opened and prefetched by the system while an earlier one is written. This reaches the full speed of a
# cold disk.
_AHEAD = 16

# Writing to disk starts each time this many bytes are buffered, while more is read: half the time of one flush at the end.
_WRITE_BACK = 2 * 1024 * 1024


class IndexEntry(msgspec.Struct, frozen=True, gc=False):
    """Position of a sample in its shard, in bytes from the beginning.

    Attributes:
        key: the sample's key.
        offset: position of the first header.
        size: size of headers, values and padding of all members.
        suffixes: suffix of each member.
        places: offset from that header and size of the values of each member, packed, because a set has millions of them.
    """

    key: str
    offset: int
    size: int
    suffixes: tuple[str, ...] = ()
    places: bytes = b""

    @property
    def members(self) -> tuple[tuple[str, int, int], ...]:
        """(suffix, offset, size) of the values of each member; empty if only the sample's position is known."""
        places = zip(self.suffixes, _PLACE.iter_unpack(self.places), strict=True)
        return tuple((suffix, self.offset + start, size) for suffix, (start, size) in places)

    def with_members(self, members: Iterable[tuple[str, int, int]]) -> "IndexEntry":
        """Return the entry with these members, which are as those of `members`."""
        found = tuple(members)
        places = b"".join(_PLACE.pack(offset - self.offset, size) for _, offset, size in found)
        return msgspec.structs.replace(
            self, suffixes=_shared(tuple(suffix for suffix, _, _ in found)), places=_shared(places)
        )


# ---- writing


def write_shard(
    path: Path, samples: Iterable[Sample], *, checksum: RunningFingerprint | None = None
) -> list[IndexEntry]:
    """Write one tar to exactly this path and flush it. The caller chooses a temporary name and renames it.

    Files are copied verbatim. `samples` is read up to 16 samples ahead.

    Args:
        path: path of the tar.
        samples: the samples in order.
        checksum: updated with every byte of the tar, in order, because reading a finished tar costs as much as writing it.

    Raises:
        ImagemillError: if WebDataset would read a key differently, if a file changed since its last check, or if its length
            changed while it was read. Nothing is left at `path`.
        DamagedFile: if a file's bytes differ from the recorded ones. Nothing is left at `path`.
    """
    entries: list[IndexEntry] = []
    output = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        _write_samples(output, samples, entries, checksum)
        flush(output)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(output)
    return entries


def _write_samples(
    output: int, samples: Iterable[Sample], entries: list[IndexEntry], checksum: RunningFingerprint | None
) -> None:
    offset, begun, buffer = 0, 0, bytearray()
    with closing(_opened(samples)) as opened:
        for sample in opened:
            if len(buffer) < sample.size:
                buffer = bytearray(sample.size)
            content = memoryview(buffer)[: sample.size]
            entries.append(sample.fill(content, offset))
            _write_all(output, content, checksum)
            offset += sample.size
            if offset - begun >= _WRITE_BACK:
                begin_writing_back(output, begun, offset - begun)
                begun = offset
    _write_all(output, memoryview(_END + bytes(-(offset + len(_END)) % _RECORD)), checksum)


def _opened(samples: Iterable[Sample]) -> Generator["_OpenSample"]:
    """Open samples ahead of the writer. All open samples are closed when the generator ends."""
    waiting: deque[_OpenSample] = deque()
    try:
        for key, members in samples:
            waiting.append(_OpenSample(key))
            waiting[-1].open(members)
            if len(waiting) > _AHEAD:
                yield waiting[0]
                waiting.popleft().close()
        while waiting:
            yield waiting[0]
            waiting.popleft().close()
    finally:
        for sample in waiting:
            sample.close()


class _OpenFile(NamedTuple):
    path: str | Path
    handle: int
    size: int
    content: str | None

    @classmethod
    def open_ahead(cls, source: Path | KnownFile) -> "_OpenFile":
        path, known, content = source if isinstance(source, KnownFile) else (source, None, None)
        try:
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            if known:
                raise _changed(path) from None
            raise
        status = os.fstat(handle)
        if known and file_signature(status) != known:
            os.close(handle)
            raise _changed(path)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_WILLNEED)
        return cls(path, handle, status.st_size, content)


def read_known(file: KnownFile) -> bytes:
    """Return the bytes of a file that is unchanged since its last check. Raises as `write_shard`."""
    opened = _OpenFile.open_ahead(file)
    data = bytearray(opened.size)
    try:
        _read_exactly(opened, memoryview(data))
    finally:
        os.close(opened.handle)
    _refuse_damage(opened, memoryview(data))
    return bytes(data)


def _changed(path: str | Path) -> ImagemillError:
    return ImagemillError(
        "a file changed while it was being packed",
        where=path,
        why="its bytes differ from those that were recorded when the run was planned",
        do="run the command again",
    )


class _OpenSample:
    """One sample with its files open and its layout computed."""

    def __init__(self, key: str) -> None:
        problem = "contains a dot" if "." in key else name_problem(key)
        if problem:
            raise ImagemillError(
                f"{key!r} cannot be a sample's key: it {problem}",
                why="WebDataset ends a key at the first dot after the last slash",
                do="encode the id with imagemill.domain.ids.member_key",
            )
        self.key = key
        self.size = 0
        # Suffix, header, size of the values, and the values.
        self._members: list[tuple[str, bytes, int, bytes | _OpenFile]] = []

    def open(self, members: Sequence[tuple[str, bytes | Path | KnownFile]]) -> None:
        """Open the members' files and compute their headers."""
        for suffix, source in members:
            if problem := name_problem(suffix):
                raise ImagemillError(
                    f"{suffix!r} cannot be a member's suffix: it {problem}", do="rename the kind's member"
                )
            values = source if isinstance(source, bytes) else _OpenFile.open_ahead(source)
            size = len(values) if isinstance(values, bytes) else values.size
            header = _header(f"{self.key}.{suffix}", size)
            self._members.append((suffix, header, size, values))
            self.size += len(header) + size + _padding(size)

    def close(self) -> None:
        """Close the members' files."""
        for _, _, _, values in self._members:
            if isinstance(values, _OpenFile):
                os.close(values.handle)

    def fill(self, content: memoryview, offset: int) -> IndexEntry:
        """Write the sample into `content`, which is `size` bytes long; `offset` is its position in the shard."""
        position = 0
        places = bytearray()
        for _, header, size, values in self._members:
            start = position + len(header)
            end = start + size
            content[position:start] = header
            if isinstance(values, bytes):
                content[start:end] = values
            else:
                _read_exactly(values, content[start:end])
                _refuse_damage(values, content[start:end])
            places += _PLACE.pack(start, size)
            position = end + _padding(size)
            content[end:position] = _END[: position - end]
        suffixes = _shared(tuple([suffix for suffix, *_ in self._members]))
        return IndexEntry(self.key, offset, self.size, suffixes, _shared(bytes(places)))


@functools.lru_cache(maxsize=4096)
def _shared(value: Any) -> Any:
    """Return the first value that was equal to this one: many samples have the same kinds, shapes and lengths."""
    return value


def _read_exactly(file: _OpenFile, place: memoryview) -> None:
    """Read the whole file into `place`. One extra byte is requested to detect a file that grew."""
    beyond = bytearray(1)
    filled = count = os.readv(file.handle, [place, beyond])
    while count and filled < len(place):  # interrupted by a signal
        count = os.readv(file.handle, [place[filled:], beyond])
        filled += count
    if filled != len(place):
        raise ImagemillError(
            "the length of a file changed while it was being packed",
            where=file.path,
            why=f"{len(place)} bytes when it was opened, {'fewer' if filled < len(place) else 'more'} when it was read",
            do="let the program that writes it finish, then run the command again",
        )


def _refuse_damage(file: _OpenFile, content: memoryview) -> None:
    if file.content is not None and fingerprint(content) != file.content:
        raise DamagedFile(
            "a file does not contain the recorded bytes",
            where=file.path,
            why="the disk returns other bytes than were written, or a program changed them and restored the modification time",
            do="run `imagemill run` again: it restores the file from the shards or recomputes it",
        )


def _write_all(output: int, content: memoryview, checksum: RunningFingerprint | None) -> None:
    if checksum:
        checksum.update(content)
    for start in range(0, len(content), _PIECE):
        piece = content[start : start + _PIECE]
        while piece:
            piece = piece[os.write(output, piece) :]


# ---- headers


# Constant fields of a ustar header: mode, owner and group before the size; time, type and empty names behind it.
_BEFORE_SIZE = b"0000644\0" + b"0000000\0" * 2
_AFTER_SIZE = b"\0" + b"0" * 11 + b"\0"
_AFTER_CHECKSUM = b"\0 0" + bytes(100) + b"ustar\x0000" + bytes(32 + 32 + 8 + 8 + 155 + 12)
# In the sum, the checksum's own eight bytes count as blanks.
_CONSTANT_SUM = sum(_BEFORE_SIZE) + sum(_AFTER_SIZE) + 8 * ord(" ") + sum(_AFTER_CHECKSUM[2:])


def _header(name: str, size: int) -> bytes:
    """Return the bytes before a member's values: one block, or three and more if the name requires a PAX header."""
    if not name.isascii() or len(name) > 100:
        info = tarfile.TarInfo(name)
        info.size = size
        return info.tobuf(tarfile.PAX_FORMAT)
    path, digits = name.encode(), b"%011o" % size
    checksum = sum(path) + sum(digits) + _CONSTANT_SUM
    return b"%b%b%b%b%06o%b" % (path.ljust(100, b"\0"), _BEFORE_SIZE, digits, _AFTER_SIZE, checksum, _AFTER_CHECKSUM)


def _padding(size: int) -> int:
    return -size % BLOCK


# ---- reading


def read_shard(path: Path) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Yield every sample of a tar in order, one in memory at a time: key, and values by suffix.

    Raises:
        ImagemillError: if the tar is not complete, or has members that belong to no sample.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        end = yield from _samples(file, size, path)
        file.seek(end)
        if file.read(len(_END)) != _END:
            # tarfile treats a damaged header after the first member as the end of the archive.
            raise _broken(path, f"no end of archive at byte {end}: it is cut off or damaged")


def read_sample(path: Path, entry: IndexEntry) -> dict[str, bytes]:
    """Return the values of one sample by suffix, read at its position in the index (`key`, `offset` and `size` are enough).

    Raises:
        ImagemillError: if the sample is not at that position.
    """
    with open(path, "rb") as file:
        if entry.offset < 0 or entry.size < 0 or entry.offset + entry.size > os.fstat(file.fileno()).st_size:
            raise _broken(path, f"no {entry.size} bytes at byte {entry.offset}, where the index has {entry.key}")
        file.seek(entry.offset)
        return parse_sample(file.read(entry.size), entry, path)


class StoredSample(NamedTuple):
    """A sample in a tar, by its position."""

    path: Path
    entry: IndexEntry

    def file(self, spec: EmbeddingSpec, content: str) -> bytes | None:
        """Return the bytes of a kind's file if their fingerprint is `content`; None otherwise, also for an unreadable sample."""
        try:
            data = join_npy(read_sample(self.path, self.entry), spec)
        except (ImagemillError, OSError):
            return None
        return data if data is not None and fingerprint(data) == content else None


def parse_sample(content: bytes, entry: IndexEntry, path: Path | Location) -> dict[str, bytes]:
    """Parse one sample from the bytes at its position; `path` is for messages. Raises the errors of `read_sample`."""
    samples = list(_samples(io.BytesIO(content), len(content), path)) if content else []
    if len(content) != entry.size or [key for key, _ in samples] != [entry.key]:
        raise _broken(path, f"no sample {entry.key!r} at byte {entry.offset}: the index is of another shard")
    return samples[0][1]


def view_sample(content: memoryview, entry: IndexEntry, path: Path | Location) -> dict[str, memoryview]:
    """Return writable views of the values that `parse_sample` copies. Raises the same errors.

    Headers of `write_shard` are compared instead of being parsed by tarfile, which took ten times as long.
    """
    return _own_members(content, entry) or {
        suffix: memoryview(bytearray(values)) for suffix, values in parse_sample(bytes(content), entry, path).items()
    }


def _own_members(content: memoryview, entry: IndexEntry) -> dict[str, memoryview] | None:
    """Return the values of a sample whose headers `write_shard` wrote without PAX headers; None for any other content."""
    members: dict[str, memoryview] = {}
    position = 0
    while position < len(content) == entry.size:
        block = bytes(content[position : position + BLOCK])
        try:
            name, size = block[:100].rstrip(b"\0").decode("ascii"), int(block[124:135], 8)
        except ValueError:
            return None
        key, _, suffix = name.partition(".")
        if size < 0 or block != _header(name, size) or name_problem(name) or key != entry.key:
            return None
        start = position + BLOCK
        position = start + size + _padding(size)
        if position > len(content) or not suffix or suffix in members:
            return None
        members[suffix] = content[start : start + size]
    return members or None


def _samples(file: io.BufferedIOBase, size: int, path: Path | Location) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Yield adjacent members grouped by key; return the position at which the members end."""
    try:
        with tarfile.open(fileobj=file, mode="r:", encoding="utf-8") as tar:
            members = (_member(tar, info, size) for info in tar)
            for key, group in itertools.groupby(members, key=lambda member: member[0]):
                yield key, _sample(key, [(suffix, values) for _, suffix, values in group])
            return tar.offset
    except (tarfile.TarError, ValueError, OverflowError) as error:  # tarfile leaks some of these
        raise _broken(path, str(error)) from error


def _member(tar: tarfile.TarFile, info: tarfile.TarInfo, size: int) -> tuple[str, str, bytes]:
    key, dot, suffix = info.name.rpartition("/")[2].partition(".")
    # A member's name must not point outside its folder; relative folders are part of WebDataset's keys.
    if not info.isreg() or not (key and dot and suffix) or any(map(name_problem, info.name.split("/"))):
        raise ValueError(f"{info.name!r} is no member of a sample")
    if info.offset_data + info.size > size:
        raise ValueError(f"cut off within {info.name!r}")
    file = tar.extractfile(info)
    assert file is not None
    return info.name[: -len(suffix) - 1], suffix, file.read()


def _sample(key: str, members: Sequence[tuple[str, bytes]]) -> dict[str, bytes]:
    values = dict(members)
    if len(values) < len(members):
        raise ValueError(f"sample {key!r} has a member twice")
    return values


def _broken(path: Path | Location, why: str) -> ImagemillError:
    return ImagemillError("not a readable shard", where=path, why=why, do="run `imagemill shards --overwrite`")
