"""Reader of tar archives that other programs made: members in order, from a stream, in bounded memory.

No header is trusted. `tarfile` of the supported Pythons recurses with every extended header, reads headers of any size into
memory, does not end on some sizes, and takes a damaged header for the end of the archive.

Our own shards are written and read in tar.py. Names are judged in inputs/archives.py.
Reference: POSIX pax, "ustar Interchange Format"; GNU tar manual, "Basic Tar Format".
"""

import gzip
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final, Literal, NamedTuple

from imagemill.errors import ImagemillError

Kind = Literal["file", "folder", "link", "special", "sparse", "other"]

_BLOCK: Final = 512
_ZEROS: Final = bytes(_BLOCK)
_PIECE: Final = 1 << 20

# An extended header contains names and times; a longer one is refused.
_LONGEST_EXTENSION: Final = 1 << 20
_LARGEST: Final = 1 << 62

_KINDS: Final[dict[bytes, Kind]] = {
    b"0": "file", b"\0": "file", b"7": "file", b"1": "link", b"2": "link", b"3": "special", b"4": "special", b"5": "folder",
    b"6": "special", b"S": "sparse",
}  # fmt: skip
# Data follows the header of these kinds only; of others, the size field means something else.
_WITH_DATA: Final = {"file", "sparse", "other"}
_GZIP: Final = b"\x1f\x8b"
_POSIX: Final = b"ustar\x0000"


class BrokenArchive(ImagemillError, ValueError):
    """An archive that is not a tar, or is damaged or cut off; members before that place were read."""


class TooMuch(ImagemillError, ValueError):
    """A compressed archive that unpacks to more unused bytes than allowed."""


class TarMember(NamedTuple):
    """One member.

    Attributes:
        name: as in the archive; bytes that are not UTF-8 are lone surrogates.
        kind: what it is.
        size: of its data in the archive, in bytes.
        target: of a link.
    """

    name: str
    kind: Kind
    size: int = 0
    target: str = ""


class _Header(NamedTuple):
    name: bytes
    size: int
    type: bytes
    target: bytes
    block: bytes


class TarMembers:
    """The members of an archive in order, and the data of the current one.

    Attributes:
        size: of the archive's file, in bytes.
    """

    def __init__(self, file: BinaryIO, path: Path, *, most_unused: int = _LARGEST) -> None:
        self._raw, self._path, self._most_unused = file, path, most_unused
        self.size = os.fstat(file.fileno()).st_size
        self._packed = file.read(2) == _GZIP
        file.seek(0)
        self._file: BinaryIO | gzip.GzipFile = gzip.GzipFile(fileobj=file, mode="rb") if self._packed else file
        self._at, self._unused, self._left, self._started = 0, 0, 0, False

    @property
    def position(self) -> int:
        """Number of bytes of the archive's file that have been read."""
        return min(self._raw.tell(), self.size)

    def __iter__(self) -> Iterator[TarMember]:
        """Yield each member; the data that the caller did not read is skipped before the next.

        Raises:
            BrokenArchive: if the archive is damaged, cut off, or cannot be read.
            TooMuch: if a compressed archive has more unused bytes than allowed.
        """
        if not self.size:
            raise self._damaged("the file is empty")
        while (member := self._next()) is not None:
            self._left = member.size
            yield member
            self._skip(self._left + -member.size % _BLOCK)

    def read(self) -> bytes:
        """Return the next bytes of the current member's data, at most 1 MiB; empty at its end. Raises as iteration does."""
        data = self._read(min(self._left, _PIECE))
        if not data and self._left:
            raise self._cut_off()
        self._left -= len(data)
        return data

    # ---- headers

    def _next(self) -> TarMember | None:
        extended: dict[bytes, bytes] = {}
        ended = False
        while True:
            block = self._block()
            if not block.strip(b"\0"):
                if extended:
                    raise self._cut_off()
                if not block and ended:
                    return None
                if not block:
                    raise self._cut_off()
                self._count_unused(_BLOCK)
                ended = True
                continue
            header = self._header(block)
            self._started, ended = True, False
            if header.type in b"xX":
                extended |= self._pax(self._extension(header.size))
            elif header.type == b"L":
                extended[b"path"] = _text(self._extension(header.size))
            elif header.type == b"K":
                extended[b"linkpath"] = _text(self._extension(header.size))
            elif header.type == b"g":
                self._skip(header.size + -header.size % _BLOCK)
            else:
                return self._member(header, extended)

    def _member(self, header: _Header, extended: dict[bytes, bytes]) -> TarMember:
        kind = _KINDS.get(header.type, "other")
        if header.type == b"S":
            self._skip_sparse_map(header.block)
        if any(key.startswith(b"GNU.sparse.") for key in extended):
            kind = "sparse"
        if header.type == b"\0" and header.name.endswith(b"/"):
            kind = "folder"
        size = header.size
        if b"size" in extended:
            if not (extended[b"size"].isdigit() and len(extended[b"size"]) < 20):
                raise self._bad_header()
            size = int(extended[b"size"])
        if size > _LARGEST:
            raise self._bad_header()
        name, target = extended.get(b"path", header.name), extended.get(b"linkpath", header.target)
        return TarMember(os.fsdecode(name), kind, size if kind in _WITH_DATA else 0, os.fsdecode(target))

    def _header(self, block: bytes) -> _Header:
        # The checksum counts its own eight bytes as blanks. Some old programs sum signed bytes.
        rest = block[:148] + block[156:]
        signed = sum(rest) - 256 * sum(byte > 127 for byte in rest)
        if len(block) < _BLOCK or self._number(block[148:156]) not in (256 + sum(rest), 256 + signed):
            raise self._cut_off() if len(block) < _BLOCK and self._started else self._bad_header()
        name, prefix = _text(block[:100]), _text(block[345:500])
        if prefix and block[257:265] == _POSIX:
            name = prefix + b"/" + name
        return _Header(name, self._number(block[124:136]), block[156:157], _text(block[157:257]), block)

    def _number(self, field: bytes) -> int:
        """Return an octal number, or a binary one in the form of GNU tar."""
        if field[0] == 0x80:
            return int.from_bytes(field[1:], "big")
        digits = field.partition(b"\0")[0].strip()
        if digits.strip(b"01234567"):
            raise self._bad_header()
        return int(digits or b"0", 8)

    def _pax(self, data: bytes) -> dict[bytes, bytes]:
        """Return the records of an extended header: length, blank, key, `=`, value and line feed."""
        records: dict[bytes, bytes] = {}
        start = 0
        while start < len(data) and data[start]:
            length = data[start : start + 20].partition(b" ")[0]
            if not (length.isdigit() and len(length) < 20):
                raise self._bad_header()
            end = start + int(length)
            key, equals, value = data[start + len(length) + 1 : end].partition(b"=")
            if end > len(data) or not equals or not value.endswith(b"\n"):
                raise self._bad_header()
            records[key] = value[:-1]
            start = end
        return records

    def _extension(self, size: int) -> bytes:
        if size > _LONGEST_EXTENSION:
            raise self._damaged(f"a header of {size} bytes")
        padded = size + -size % _BLOCK
        data = b"".join(self._blocks(padded))
        self._count_unused(padded)
        return data[:size]

    def _blocks(self, size: int) -> Iterator[bytes]:
        while size:
            data = self._read(min(size, _PIECE))
            if not data:
                raise self._cut_off()
            size -= len(data)
            yield data

    def _skip_sparse_map(self, block: bytes) -> None:
        more = block[482:483]
        while more.strip(b"\0"):
            block = self._block()
            if len(block) < _BLOCK:
                raise self._cut_off()
            more = block[504:505]
            self._count_unused(_BLOCK)

    # ---- bytes

    def _block(self) -> bytes:
        block = self._read(_BLOCK)
        while 0 < len(block) < _BLOCK and (more := self._read(_BLOCK - len(block))):
            block += more
        return block

    def _read(self, size: int) -> bytes:
        try:
            data = self._file.read(size) if size else b""
        except EOFError as error:
            raise self._cut_off() from error
        except (OSError, zlib.error) as error:
            raise self._damaged(f"it cannot be read: {getattr(error, 'strerror', None) or error}") from error
        self._at += len(data)
        return data

    def _skip(self, size: int) -> None:
        if not self._packed:
            if self._at + size > self.size:
                raise self._cut_off()
            self._file.seek(size, os.SEEK_CUR)
            self._at += size
            return
        while size:
            data = self._read(min(size, _PIECE))
            if not data:
                raise self._cut_off()
            self._count_unused(len(data))
            size -= len(data)

    def _count_unused(self, size: int) -> None:
        """Bound the work on a compressed archive that contains much and gives nothing."""
        self._unused += size
        if self._packed and self._unused > self._most_unused:
            raise TooMuch(
                f"more than {self._most_unused} unpacked bytes of the archive are of no use", where=self._path
            )

    # ---- errors

    def _bad_header(self) -> BrokenArchive:
        if not self._started:
            return self._damaged("it is not a tar archive, nor one compressed by gzip")
        return self._damaged(f"the header at byte {max(self._at - _BLOCK, 0)} is damaged")

    def _cut_off(self) -> BrokenArchive:
        return self._damaged("it was cut off")

    def _damaged(self, what: str) -> BrokenArchive:
        return BrokenArchive(what, where=self._path)


def _text(field: bytes) -> bytes:
    return field.partition(b"\0")[0]


@contextmanager
def open_members(path: Path, *, most_unused: int = _LARGEST) -> Iterator[TarMembers]:
    """Open an archive, compressed by gzip or not, which its first bytes decide.

    Args:
        path: the archive.
        most_unused: number of unpacked bytes of a compressed archive that may be of no use to the caller.

    Raises:
        BrokenArchive: if it cannot be opened.
    """
    try:
        file = open(path, "rb")  # noqa: SIM115
    except OSError as error:
        raise BrokenArchive(f"it cannot be read: {error.strerror}", where=path) from error
    with file:
        yield TarMembers(file, path, most_unused=most_unused)
