"""Rescaling of single images in a worker process: reads raw image files, writes preset image files, yields one row each.

    read raw ─▶ fingerprint ─▶ header agrees with the record? ─▶ right size already: the same bytes
                                                             └▶ else decode ─▶ resize ─▶ encode
    ─▶ .tmp-… in images/ ─▶ a batch is flushed ─▶ linked to its final name, which never replaces a file

The images to process are chosen in rescale_plan.py; pixels are handled in formats/resize.py.

Spec: docs/spec/presets.md#rescale-parameters
"""

import errno
import functools
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from imagemill.errors import Refused, disk_full_reported, is_disk_full
from imagemill.formats.images import StoredHeader, check_decodable, stored_header
from imagemill.formats.resize import resized, written_format
from imagemill.fs.atomic import sync_folder, temporary_path
from imagemill.fs.durable import begin_writing_back, flush_files
from imagemill.fs.fingerprints import FileSignature, file_signature, fingerprint, read_signed
from imagemill.pipeline.malloc_tuning import reuse_freed_memory
from imagemill.pipeline.presets.preset_images import KnownImage

# Size of a batch that is flushed together: large enough to share the flush, small enough to lose when a run is killed.
BATCH_FILES = 64
BATCH_BYTES = 64 * 1024 * 1024

# Reason code of a disk failure, as opposed to a fault of the image.
OS_ERROR = "os_error"

Status = Literal["resized", "copied", "kept", "adopted", "refused", "failed"]


class RescaleJob(NamedTuple):
    """One image: its path below raw and below the preset, declared and target size (width, height), and its index entry."""

    name: str
    size: tuple[int, int]
    target: tuple[int, int]
    known: KnownImage | None = None


class RescaleRow(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome for one image.

    `known`: its index entry if it is now in the preset. `reason`, `message`, `remedy`: set if it is not.
    """

    name: str
    status: Status
    known: KnownImage | None = None
    reason: str = ""
    message: str = ""
    remedy: str = ""


class _Staged(NamedTuple):
    """A file under its temporary name, and its row once it has its final name."""

    path: Path
    row: RescaleRow


class RescaleWorker:
    """A worker, built once per process.

    `raw`, `preset`: the folders that names are relative to. `library`: used for resizing.
    """

    def __init__(self, *, raw: Path, preset: Path, library: str) -> None:
        self._raw, self._preset, self._library = raw, preset, library
        self._folders: set[Path] = set()
        reuse_freed_memory()
        self._threads = 0
        if library == "torch":
            import torch

            self._threads = torch.get_num_threads()
            torch.set_num_threads(1)  # each worker uses one core

    def close(self) -> None:
        """Restore torch's number of threads."""
        if self._threads:
            import torch

            torch.set_num_threads(self._threads)

    def stream(self, jobs: Iterable[RescaleJob]) -> Iterator[RescaleRow]:
        """Yield one row per job; raise DiskFull. Every other failure is reported in its row."""
        staged: list[_Staged] = []
        held = 0
        try:
            with disk_full_reported(self._preset):
                for job in jobs:
                    outcome = self._outcome(job)
                    if isinstance(outcome, RescaleRow):
                        yield outcome
                        continue
                    staged.append(outcome)
                    held += outcome.path.stat().st_size
                    if len(staged) >= BATCH_FILES or held >= BATCH_BYTES:
                        batch, staged, held = staged, [], 0
                        yield from self._publish(batch)
                batch, staged = staged, []
                yield from self._publish(batch)
        finally:
            for item in staged:
                item.path.unlink(missing_ok=True)

    def _outcome(self, job: RescaleJob) -> RescaleRow | _Staged:
        try:
            return self._check_or_stage(job)
        except Refused as refusal:
            return _refusal_row(job.name, refusal)
        except OSError as error:
            if is_disk_full(error):
                raise
            return _failure_row(job.name, error)

    def _check_or_stage(self, job: RescaleJob) -> RescaleRow | _Staged:
        """Check one image and stage it if it is missing; raise Refused for an image that cannot be in the preset."""
        raw, target = self._raw / job.name, self._preset / job.name
        if job.known and job.known.raw_size == job.size and job.known.stands(raw, target):
            return RescaleRow(name=job.name, status="kept", known=job.known)
        data, signature = _read(raw)
        header = stored_header(data, job.name)
        _check_size(job, header)
        written_format(header, job.name)
        known = functools.partial(
            KnownImage, image=job.name, raw=signature, raw_fingerprint=fingerprint(data), raw_size=job.size,
            orientation=header.orientation,
        )  # fmt: skip
        if not os.path.lexists(target):
            return self._stage(job, data, header, known)
        # An existing image is kept or refused, never replaced.
        if job.known and job.known.raw_fingerprint != known.keywords["raw_fingerprint"]:
            raise _refuse_replacing(job.name, "raw_changed", "its raw image changed since it was made")
        if target.is_symlink() or not target.is_file():
            raise _refuse_replacing(job.name, "preset_image_bad", "it is not a regular file")
        pixels, signature = _read(target)
        entry = known(made=signature, made_fingerprint=fingerprint(pixels))
        if job.known and job.known.made_fingerprint != entry.made_fingerprint:
            raise _refuse_replacing(job.name, "preset_image_changed", "its bytes are not those that rescale wrote")
        if not job.known:
            _check_made(job, pixels, data)
        return RescaleRow(name=job.name, status="kept" if job.known else "adopted", known=entry)

    def _stage(self, job: RescaleJob, data: bytes, header: StoredHeader, known: Callable[..., KnownImage]) -> _Staged:
        if job.size == job.target:
            check_decodable(data, job.name)
            pixels, status = data, "copied"
        else:
            pixels, status = resized(data, header, job.name, job.target, self._library), "resized"
        path = temporary_path(self._preset / "images")
        try:
            with open(path, "xb") as file:
                file.write(pixels)
                file.flush()
                begin_writing_back(file.fileno())
                signature = file_signature(os.fstat(file.fileno()))
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        entry = known(made=signature, made_fingerprint=fingerprint(pixels))
        return _Staged(path, RescaleRow(name=job.name, status=status, known=entry))

    def _publish(self, staged: list[_Staged]) -> Iterator[RescaleRow]:
        """Flush a batch and give its files their names."""
        unflushed = flush_files([item.path for item in staged])
        rows, touched = [], set()
        for item in staged:
            final = self._preset / item.row.name
            try:
                if error := unflushed.get(item.path):
                    raise error
                self._name(item.path, final)
                touched.add(final.parent)
                rows.append(item.row)
            except FileExistsError:
                rows.append(_row_if_taken(item.row, final))
            except OSError as error:
                if is_disk_full(error):
                    raise
                rows.append(_failure_row(item.row.name, error))
            finally:
                item.path.unlink(missing_ok=True)
        for folder in touched:
            sync_folder(folder)
        yield from rows

    def _name(self, temporary: Path, final: Path) -> None:
        """Link a file to its final name; raise FileExistsError if the name is taken, which a rename would not."""
        if final.parent not in self._folders:
            missing = [parent for parent in final.parents if not parent.exists()]
            final.parent.mkdir(parents=True, exist_ok=True)
            for path in missing:
                sync_folder(path.parent)
            self._folders.add(final.parent)
        try:
            os.link(temporary, final)
        except OSError as error:
            if error.errno not in {errno.EPERM, errno.ENOTSUP, errno.EMLINK, errno.ENOSYS}:
                raise
            if os.path.lexists(final):
                raise FileExistsError(errno.EEXIST, "exists", str(final)) from error
            os.rename(temporary, final)  # a file system without hard links


def _row_if_taken(row: RescaleRow, final: Path) -> RescaleRow:
    """Return the row of an image whose name was taken meanwhile.

    It is adopted if its bytes are equal: a worker of a killed run may still have finished its batch.
    """
    try:
        if row.known and not final.is_symlink() and fingerprint(final.read_bytes()) == row.known.made_fingerprint:
            entry = msgspec.structs.replace(row.known, made=file_signature(final))
            return msgspec.structs.replace(row, status="adopted", known=entry)
    except OSError:
        pass
    return _refusal_row(row.name, _refuse_replacing(row.name, "appeared", "another program created it during this run"))


def _read(raw: Path) -> tuple[bytes, FileSignature]:
    try:
        return read_signed(raw)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        what = "is a folder" if isinstance(error, IsADirectoryError) else "does not exist"
        raise Refused(
            "missing_image", f"the raw image {what}", where=raw, do="put the file there, or correct the record"
        ) from error


def _check_size(job: RescaleJob, header: StoredHeader) -> None:
    stored, declared = (header.width, header.height), job.size
    if stored == declared:
        return
    turned = header.turned and stored == declared[::-1]
    raise Refused(
        "size_mismatch",
        f"declared {declared[0]}x{declared[1]}, the file has {stored[0]}x{stored[1]}"
        + (f" and an EXIF orientation tag ({header.orientation}) that rotates it" if turned else ""),
        where=job.name,
        why="boxes and sizes refer to stored pixels; EXIF orientation is never applied" if turned else None,
        do="rotate the raw image's pixels and remove its EXIF tag, or record stored sizes and boxes"
        if turned
        else "correct width and height in the record, or replace the raw image",
    )


def _check_made(job: RescaleJob, pixels: bytes, raw: bytes) -> None:
    """Check an untracked image before it is adopted: complete, of the right size, and a copy of the raw image if required."""
    try:
        header = stored_header(pixels, job.name)
        check_decodable(pixels, job.name)
    except Refused as refusal:
        raise _refuse_replacing(job.name, "preset_image_bad", refusal.what) from refusal
    if (header.width, header.height) != job.target:
        size = f"{header.width}x{header.height}, expected {job.target[0]}x{job.target[1]}"
        raise _refuse_replacing(job.name, "preset_image_bad", f"it is {size}")
    if job.size == job.target and pixels != raw:
        raise _refuse_replacing(job.name, "raw_changed", "it differs from the raw image, of which it must be a copy")


def _refuse_replacing(name: str, reason: str, what: str) -> Refused:
    return Refused(
        reason,
        f"the preset's image is kept, and {what}",
        where=name,
        why="preset images are never replaced",
        do="delete that file in the preset and rescale again, or choose a new preset name",
    )


def _refusal_row(name: str, refusal: Refused) -> RescaleRow:
    return RescaleRow(name=name, status="refused", reason=refusal.reason, message=refusal.what, remedy=refusal.do or "")


def _failure_row(name: str, error: OSError) -> RescaleRow:
    return RescaleRow(name=name, status="failed", reason=OS_ERROR, message=str(error), remedy="repair it and run again")
