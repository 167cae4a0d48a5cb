"""npy files: writing, reading and checking one file, and the folder of one embedding kind.

    derived/dinov3/
    ├─ abc123xyz.npy                  magic, version, header text padded to 64 bytes, values in C order
    └─ .tmp-<owner>-<pid>x000001      staged: complete and on disk, without its final name

Missing and stale files are determined in pipeline/stage2/plan.py; staged files are renamed in pipeline/stage2/embed.py.
Reference: NumPy's format description (NEP 1).
Spec: docs/spec/conventions.md#completion, docs/spec/stage2.md#embeddings
"""

import functools
import io
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from imagemill.domain.embedding_specs import EmbeddingSpec
from imagemill.domain.ids import image_id as valid_id
from imagemill.errors import InvalidNpy
from imagemill.fs.atomic import sweep_own_temporaries, sweep_temporaries, temporary_path
from imagemill.fs.durable import begin_writing_back
from imagemill.fs.fingerprints import FileSignature, file_signature, fingerprint, read_whole
from imagemill.fs.listing import FileListing, list_files
from imagemill.fs.location import Location

# NumPy is imported on first use: most commands list arrays without reading one.
if TYPE_CHECKING:
    import numpy as np

SUFFIX = ".npy"

# NumPy refuses header text above 10,000 characters; a version 1 header cannot be longer than this.
_LONGEST_HEADER = 1 << 16
# Of a preview model's file, whose header is written by `npy_header`.
_LONGEST_PREVIEW_HEADER = 1024

# For smaller files, 128 of which are flushed together, writing back early gains nothing.
_WRITTEN_BACK_BYTES = 64 * 1024

# ---- writing


PREVIEW_COMMENT = "imagemill-preview"
"""Comment in the header of a preview model's files: NumPy evaluates the header as a Python literal, so comments are allowed."""


@functools.lru_cache(maxsize=8192)
def npy_header(shape: tuple[int, ...], dtype: "np.dtype | str", *, preview: bool = False) -> bytes:
    """Return the bytes that `np.save` writes before the values of a C-ordered array.

    Args:
        shape: shape of the array.
        dtype: dtype of the array.
        preview: put PREVIEW_COMMENT into the padding.
    """
    header = _plain_header(shape, dtype)
    if not preview:
        return header
    magic, text = header[:_TEXT_BEGINS], header[_TEXT_BEGINS:].decode("latin1").rstrip()
    text = f"{text} # {PREVIEW_COMMENT}"
    length = -(-(_TEXT_BEGINS + len(text) + 1) // _ALIGNMENT) * _ALIGNMENT - _TEXT_BEGINS
    return magic[:-2] + length.to_bytes(2, "little") + text.ljust(length - 1).encode("latin1") + b"\n"


# Magic, version and the length of the text in two bytes; the values begin at a multiple of the alignment.
_TEXT_BEGINS, _ALIGNMENT = 10, 64


def _plain_header(shape: tuple[int, ...], dtype: "np.dtype | str") -> bytes:
    import numpy as np
    from numpy.lib import format as npy_format

    dtype = np.dtype(dtype)
    if dtype.hasobject:
        raise ValueError(f"{dtype} is stored by pickling, which imagemill's files never contain")
    stream = io.BytesIO()
    fields = {"descr": npy_format.dtype_to_descr(dtype), "fortran_order": False, "shape": tuple(map(int, shape))}
    npy_format.write_array_header_1_0(stream, fields)
    return stream.getvalue()


def stage_npy(folder: Path, array: "np.ndarray", *, preview: bool = False) -> Path:
    """Write an array to a temporary name in a folder, and start writing it to disk.

    Args:
        folder: folder of the final name.
        array: the values.
        preview: mark the file as the output of a preview model.

    Returns:
        the temporary path: `flush_files`, then rename it, then flush the folder. On an error the file is removed.
    """
    import numpy as np

    array = np.asarray(array, order="C")
    return _stage(folder, npy_header(array.shape, array.dtype, preview=preview), array.reshape(-1).view(np.uint8).data)


def _stage(folder: Path, header: bytes, values: memoryview) -> Path:
    path = temporary_path(folder)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        _write_all(handle, header, values)
        if len(values) >= _WRITTEN_BACK_BYTES:
            begin_writing_back(handle)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(handle)
    return path


def _write_all(handle: int, header: bytes, values: memoryview) -> None:
    written = os.writev(handle, [header, values])
    if written < len(header) + len(values):  # interrupted by a signal, or more than one call can write
        rest = memoryview(header + values)[written:]
        while rest:
            rest = rest[os.write(handle, rest) :]


# ---- reading


@dataclass(frozen=True)
class _Header:
    """A parsed header. `offset` is the position of the first value in bytes."""

    shape: tuple[int, ...]
    dtype: "np.dtype"
    fortran_order: bool
    offset: int

    @functools.cached_property
    def file_size(self) -> int:
        return self.offset + math.prod(self.shape) * self.dtype.itemsize


@functools.lru_cache(maxsize=8192)
def _own_header(shape: tuple[int, ...], dtype: "np.dtype | str") -> _Header:
    """Return the parsed form of `npy_header`."""
    import numpy as np

    return _Header(shape, np.dtype(dtype), False, len(npy_header(shape, dtype)))


def read_npy(path: str | Path, *, content: str | None = None) -> "np.ndarray":
    """Return the array of a file, writable.

    Args:
        path: the file.
        content: recorded fingerprint of the file's bytes, to compare them with.

    Raises:
        InvalidNpy: for the reasons of `parse_npy`, and `damaged` if the bytes are not the recorded ones. OSErrors propagate.
    """
    data = _read(path)
    if content is not None and fingerprint(memoryview(data)) != content:
        raise InvalidNpy("damaged", path, "not the recorded bytes")
    return parse_npy(data, path)


def parse_npy(data: bytes | bytearray | memoryview, path: str | Path | Location = "npy bytes") -> "np.ndarray":
    """Return the array of an npy file held in memory, as a view of `data`.

    Args:
        data: the bytes of the whole file.
        path: name of the bytes in messages.

    Raises:
        InvalidNpy: `unreadable`, `truncated`, `trailing_bytes`, or `wrong_dtype` for pickled objects.
    """
    import numpy as np

    # NumPy evaluates the text of a header as Python, which takes longer than reading a small file.
    header = _known_header(bytes(data[: _own_length(data)])) or _parse_header(data, path)
    if header.dtype.hasobject:
        raise InvalidNpy("wrong_dtype", path, f"{header.dtype} contains pickled objects")
    _check_size(header, len(data), path)
    try:
        values = np.frombuffer(data, header.dtype, math.prod(header.shape), header.offset)
        return values.reshape(header.shape, order="F" if header.fortran_order else "C")
    except (ValueError, OverflowError) as error:  # an impossible shape or item size
        raise InvalidNpy("unreadable", path, str(error)) from error


def _own_length(data: bytes | bytearray | memoryview) -> int:
    """Return the length of a header in bytes by its format version 1.0."""
    return _TEXT_BEGINS + int.from_bytes(data[_TEXT_BEGINS - 2 : _TEXT_BEGINS], "little")


@functools.lru_cache(maxsize=1024)
def _known_header(head: bytes) -> _Header | None:
    """Return the parsed form of a header of format version 1.0; None for any other bytes."""
    try:
        header = _parse_header(head, Path())
    except InvalidNpy:
        return None
    return header if header.offset == len(head) else None


def check_npy(path: Path, shape: Sequence[int], dtype: "np.dtype | str") -> str:
    """Read a whole file and check it against its contract. Any header that NumPy reads is accepted.

    Returns:
        fingerprint of the file's bytes.

    Raises:
        InvalidNpy: `unreadable`, `wrong_dtype`, `wrong_shape`, `fortran_order`, `truncated`, `trailing_bytes` or `non_finite`.
        OSError: if the disk fails, or the file does not exist.
    """
    import numpy as np

    data = _read(path)
    header = _check_header(data, len(data), tuple(shape), dtype, path)
    if not all_finite(np.frombuffer(data, header.dtype, offset=header.offset)):
        raise InvalidNpy("non_finite", path, "NaN or infinity among the values")
    return fingerprint(memoryview(data))


def check_npy_header(path: Path, shape: Sequence[int], dtype: "np.dtype | str") -> None:
    """Check header and length only: one open, one read, one fstat. Raises the errors of `check_npy`, except `non_finite`."""
    shape = tuple(shape)
    expected = npy_header(shape, dtype)
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        head, size = os.read(handle, len(expected)), os.fstat(handle).st_size
        if head != expected:
            head = os.pread(handle, _LONGEST_HEADER, 0)
    finally:
        os.close(handle)
    _check_header(head, size, shape, dtype, path)


def _read(path: str | Path) -> bytearray:
    with open(path, "rb", buffering=0) as file:
        data = bytearray(os.fstat(file.fileno()).st_size)
        filled = 0
        while count := file.readinto(memoryview(data)[filled:]):
            filled += count
    return data if filled == len(data) else data[:filled]


def _check_header(
    head: bytes | bytearray, size: int, shape: tuple[int, ...], dtype: "np.dtype | str", path: Path
) -> _Header:
    """Check the header of a file.

    Args:
        head: beginning of the file, at least its header.
        size: size of the whole file in bytes.
        shape: expected shape.
        dtype: expected dtype.
        path: name of the file in messages.
    """
    import numpy as np

    expected, header = npy_header(shape, dtype), _own_header(shape, dtype)
    if not head.startswith(expected):  # our and NumPy's header; parsing costs more than reading a small file
        header = _parse_header(head, path)
        _check_contract(header, shape, np.dtype(dtype), path)
        if header.dtype.names and not head.startswith(npy_header(shape, dtype, preview=True)):
            # A shard contains the parts, from which this header cannot be restored.
            raise InvalidNpy("wrong_dtype", path, "the header of a file with several arrays is not that of np.save")
    _check_size(header, size, path)
    return header


def _check_contract(header: _Header, shape: tuple[int, ...], dtype: "np.dtype", path: Path) -> None:
    if header.dtype != dtype:
        raise InvalidNpy("wrong_dtype", path, f"{dtype_text(header.dtype)}, expected {dtype_text(dtype)}")
    if header.shape != shape:
        raise InvalidNpy("wrong_shape", path, f"{header.shape}, expected {shape}")
    if header.fortran_order and sum(side > 1 for side in shape) > 1:
        raise InvalidNpy("fortran_order", path, "values in Fortran order, expected C order")


def dtype_text(dtype: "np.dtype") -> str:
    """Return a dtype as a header has it: `<f2`, or fields with their shapes."""
    return dtype.str if dtype.names is None else str(dtype)


def _check_size(header: _Header, size: int, path: str | Path | Location) -> None:
    if size != header.file_size:
        reason = "truncated" if size < header.file_size else "trailing_bytes"
        raise InvalidNpy(reason, path, f"{size} bytes, the header implies {header.file_size}")


def _parse_header(head: bytes | bytearray | memoryview, path: str | Path | Location) -> _Header:
    from numpy.lib import format as npy_format

    stream = io.BytesIO(head)
    try:
        version = npy_format.read_magic(stream)
        if version == (1, 0):
            shape, fortran_order, dtype = npy_format.read_array_header_1_0(stream)
        elif version in {(2, 0), (3, 0)}:
            # 3.0 is 2.0 with UTF-8 text, which matters only for field names.
            shape, fortran_order, dtype = npy_format.read_array_header_2_0(stream)
        else:
            raise ValueError(f"format version {version} is unknown")
        if min(shape, default=0) < 0:
            raise ValueError(f"shape {shape} is negative")
    except Exception as error:  # the text is evaluated as a Python literal, whose errors have no common type
        reason = "truncated" if "EOF" in str(error) else "unreadable"
        raise InvalidNpy(reason, path, f"not a valid npy header: {error}") from error
    return _Header(shape, dtype, fortran_order, stream.tell())


def all_finite(values: "np.ndarray") -> bool:
    """Return whether an array has neither NaN nor infinity; of a structured array, in none of its fields."""
    import numpy as np

    if values.dtype.names:
        return all(all_finite(values[name]) for name in values.dtype.names)
    if values.dtype.kind not in "fc" or not values.size:
        return True
    if values.dtype == np.float16:
        # By the bits: 15 times faster than isfinite, which converts each half-precision value first.
        return int((values.view(np.uint16) & 0x7FFF).max()) < 0x7C00
    return bool(np.isfinite(values).all())


# ---- members of a sample


def split_npy(data: bytes | bytearray, spec: EmbeddingSpec) -> list[tuple[str, bytes]]:
    """Return the members of a sample that the bytes of a kind's file become: the file itself, or one npy file for each part.

    Raises:
        InvalidNpy: as `parse_npy`, and `wrong_dtype` if a part is missing.
    """
    import numpy as np

    if not spec.parts:
        return [(spec.member, bytes(data))]
    array, preview = parse_npy(data), _is_preview(data)
    if array.dtype.names != tuple(part.name for part in spec.parts):
        raise InvalidNpy("wrong_dtype", Path(spec.member), f"{dtype_text(array.dtype)}, expected fields for each part")
    members = []
    for member, part in zip(spec.members, spec.parts, strict=True):
        values = np.ascontiguousarray(array[part.name])
        members.append((member, npy_header(values.shape, values.dtype, preview=preview) + values.tobytes()))
    return members


def join_npy(members: Mapping[str, bytes], spec: EmbeddingSpec) -> bytes | None:
    """Return the bytes of a kind's file from the members of a sample; None if a member is missing.

    They are the bytes that were split if these had the header that NumPy or imagemill writes.

    Raises:
        InvalidNpy: as `parse_npy`.
    """
    import numpy as np

    found = [members[member] for member in spec.members if member in members]
    if len(found) < len(spec.members):
        return None
    if not spec.parts:
        return found[0]
    arrays = [parse_npy(data) for data in found]
    fields = [(part.name, array.dtype, array.shape) for part, array in zip(spec.parts, arrays, strict=True)]
    joined = np.zeros((), np.dtype(fields))
    for part, array in zip(spec.parts, arrays, strict=True):
        joined[part.name] = array
    return npy_header((), joined.dtype, preview=_is_preview(found[0])) + joined.tobytes()


def _is_preview(head: bytes | bytearray) -> bool:
    return PREVIEW_COMMENT.encode() in head[:_LONGEST_PREVIEW_HEADER].partition(b"\n")[0]


# ---- a folder of them


@dataclass(frozen=True)
class NpyStore:
    """Files of one embedding kind, one per image. A picklable value without open files."""

    folder: Path
    spec: EmbeddingSpec

    def path(self, image_id: str) -> Path:
        """Return the file of an image. Raises InvalidImageId for an id that could name a file outside the folder."""
        return self.folder / f"{valid_id(image_id)}{SUFFIX}"

    def path_text(self, image_id: str) -> str:
        """Return `path` as text, in a fifth of the time."""
        return f"{self.folder}{os.sep}{valid_id(image_id)}{SUFFIX}"

    def stat(self, image_id: str) -> FileSignature:
        """Return the signature of an image's file."""
        return file_signature(self.path(image_id))

    def listing(self, like: FileListing | None = None) -> FileListing:
        """Return the existing files by image id, from one directory listing; empty if the folder does not exist.

        `like`: the listing of another kind, which probably has files of the same images.
        """
        return list_files(self.folder, SUFFIX, like)

    def signatures(self, ids: Iterable[str]) -> dict[str, FileSignature]:
        """Return the signatures of the files of these images that exist."""
        found = {}
        for image_id in ids:
            try:
                found[image_id] = self.stat(image_id)
            except (OSError, ValueError):  # no file, or an id that cannot be a file name
                continue
        return found

    def sweep(self) -> int:
        """Remove files staged by dead processes; return their number."""
        return sweep_temporaries(self.folder)

    def sweep_own(self) -> int:
        """Remove files staged by this process and its workers; return their number. Call it when all rows are published."""
        return sweep_own_temporaries(self.folder)

    def check(self, image_id: str, height: int, width: int) -> str:
        """Check this image's file by `check_npy` and its spec; height and width in pixels, after orientation."""
        return check_npy(self.path(image_id), *self.spec.layout(height, width))

    def is_preview(self, image_id: str) -> bool:
        """Return whether the header of this image's file has the comment of a preview model."""
        with open(self.path(image_id), "rb") as file:
            return _is_preview(file.read(_LONGEST_PREVIEW_HEADER))

    def stage(self, array: "np.ndarray", *, preview: bool = False) -> Path:
        """Stage an array in this folder by `stage_npy`."""
        return stage_npy(self.folder, array, preview=preview)

    def stage_same(self, image_id: str) -> Path:
        """Stage a hard link to the file of an image; a copy if the file system has no hard links, or no further ones.

        Raises:
            FileNotFoundError: if the image has no file.
        """
        source, staged = self.path(image_id), temporary_path(self.folder)
        try:
            os.link(source, staged)
        except FileNotFoundError:
            raise
        except OSError:
            return self.stage_bytes(read_whole(source))
        return staged

    def stage_bytes(self, data: bytes) -> Path:
        """Stage the bytes of a whole file; its header may be any that NumPy reads."""
        return _stage(self.folder, b"", memoryview(data))
