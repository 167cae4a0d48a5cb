"""One worker's share of a rescale: raw image files in, preset image files out, one small row each.

    read raw ─▶ fingerprint ─▶ header agrees with the record? ─▶ right size already: the same bytes
                                                             └▶ else decode ─▶ resize ─▶ encode
    ─▶ .tmp-… in images/ ─▶ a batch is flushed ─▶ linked to its final name, which never replaces a file

Belongs here: what becomes of one image.
Belongs elsewhere: which images (rescale.py), pixels (formats/resize.py).
Source: CONTRACTS section 3; seed 004 "Invariants".
"""

import errno
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from imagemill.errors import Refused, disk_full_told, is_disk_full
from imagemill.formats.images import StoredHeader, check_decodable, stored_header
from imagemill.formats.resize import resized, written_format
from imagemill.fs.atomic import sync_folder, temporary_path
from imagemill.fs.durable import begin_writing_back, flush_files
from imagemill.fs.fingerprints import FileSignature, file_signature, fingerprint
from imagemill.pipeline.malloc_tuning import reuse_freed_memory
from imagemill.pipeline.presets.preset_images import KnownImage
from imagemill.pipeline.presets.rescale_problems import OS_ERROR

# How much is flushed together: enough to share the flush, little enough to lose when a run is killed.
BATCH_FILES = 64
BATCH_BYTES = 64 * 1024 * 1024

Status = Literal["resized", "copied", "kept", "adopted", "refused", "failed"]


class RescaleJob(NamedTuple):
    """One image: its path below raw and below the preset, declared and target size (width, height), what is known of it."""

    name: str
    size: tuple[int, int]
    target: tuple[int, int]
    known: KnownImage | None = None


class RescaleRow(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one image; `known` where it is in the preset now, `reason`, `message`, `remedy` where it is not."""

    name: str
    status: Status
    known: KnownImage | None = None
    reason: str = ""
    message: str = ""
    remedy: str = ""


class _Staged(NamedTuple):
    job: RescaleJob
    path: Path
    status: Status
    data_fingerprint: str
    raw_fingerprint: str
    raw: FileSignature
    orientation: int


class RescaleWorker:
    """Built once per process. `raw`, `preset`: the folders that names are relative to; `library`: what resizes."""

    def __init__(self, *, raw: Path, preset: Path, library: str) -> None:
        self._raw, self._preset, self._library = raw, preset, library
        self._folders: set[Path] = set()
        reuse_freed_memory()
        self._threads = _one_thread() if library == "torch" else None

    def close(self) -> None:
        if self._threads:
            _torch_threads(self._threads)

    def stream(self, jobs: Iterable[RescaleJob]) -> Iterator[RescaleRow]:
        """One row per job. Raises DiskFull; every other failure is a row."""
        staged: list[_Staged] = []
        held = 0
        try:
            with disk_full_told(self._preset):
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
            return self._look(job)
        except Refused as refusal:
            return _refusal_row(job, refusal)
        except OSError as error:
            if is_disk_full(error):
                raise
            return _failure_row(job, error)

    def _look(self, job: RescaleJob) -> RescaleRow | _Staged:
        """Raises Refused for an image that cannot be in the preset."""
        raw, made = self._raw / job.name, self._preset / job.name
        if job.known and job.known.raw_size == job.size and job.known.stands(raw, made):
            return RescaleRow(name=job.name, status="kept", known=job.known)
        data, triple = _read(raw)
        header = stored_header(data, job.name)
        _check_size(job, header)
        written_format(header, job.name)
        if os.path.lexists(made):
            return self._existing(job, made, data, triple, header)
        return self._stage(job, data, triple, header)

    def _existing(
        self, job: RescaleJob, made: Path, data: bytes, triple: FileSignature, header: StoredHeader
    ) -> RescaleRow:
        """Keep what is there, or refuse: it is never replaced."""
        source = fingerprint(data)
        if job.known and job.known.raw_fingerprint != source:
            raise _stays(job, "raw_changed", "its raw image changed since it was made")
        pixels, made_triple = _read_made(job, made)
        bytes_now = fingerprint(pixels)
        if job.known and job.known.made_fingerprint != bytes_now:
            raise _stays(job, "preset_image_changed", "its bytes are not those that rescale wrote")
        if not job.known:
            _check_made(job, pixels, data)
        known = KnownImage(
            image=job.name, raw=triple, raw_fingerprint=source, raw_size=job.size, made=made_triple,
            made_fingerprint=bytes_now, orientation=header.orientation,
        )  # fmt: skip
        return RescaleRow(name=job.name, status="kept" if job.known else "adopted", known=known)

    def _stage(self, job: RescaleJob, data: bytes, triple: FileSignature, header: StoredHeader) -> _Staged:
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
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        return _Staged(job, path, status, fingerprint(pixels), fingerprint(data), triple, header.orientation)

    def _publish(self, staged: list[_Staged]) -> Iterator[RescaleRow]:
        """Flush a batch and give its files their names."""
        unflushed = flush_files([item.path for item in staged])
        rows, touched = [], set()
        for item in staged:
            final = self._preset / item.job.name
            try:
                if error := unflushed.get(item.path):
                    raise error
                self._name(item.path, final)
                touched.add(final.parent)
                rows.append(_made_row(item, final))
            except FileExistsError:
                rows.append(_meanwhile_row(item, final))
            except OSError as error:
                if is_disk_full(error):
                    raise
                rows.append(_failure_row(item.job, error))
            finally:
                item.path.unlink(missing_ok=True)
        for folder in touched:
            sync_folder(folder)
        yield from rows

    def _name(self, temporary: Path, final: Path) -> None:
        """Raises FileExistsError where the name is taken, which a rename would not."""
        if final.parent not in self._folders:
            _make_folders(final.parent)
            self._folders.add(final.parent)
        try:
            os.link(temporary, final)
        except OSError as error:
            if error.errno not in {errno.EPERM, errno.ENOTSUP, errno.EMLINK, errno.ENOSYS}:
                raise
            if os.path.lexists(final):
                raise FileExistsError(errno.EEXIST, "exists", str(final)) from error
            os.rename(temporary, final)  # a disk without links


def _meanwhile_row(item: _Staged, final: Path) -> RescaleRow:
    """Of a name that somebody took first: a worker whose run was killed may still finish its batch, with the very same bytes."""
    try:
        if not final.is_symlink() and fingerprint(final.read_bytes()) == item.data_fingerprint:
            return _made_row(item._replace(status="adopted"), final)
    except OSError:
        pass
    return _refusal_row(item.job, _stays(item.job, "appeared", "it appeared while this run made it"))


def _made_row(item: _Staged, final: Path) -> RescaleRow:
    known = KnownImage(
        image=item.job.name, raw=item.raw, raw_fingerprint=item.raw_fingerprint, raw_size=item.job.size,
        made=file_signature(final), made_fingerprint=item.data_fingerprint, orientation=item.orientation,
    )  # fmt: skip
    return RescaleRow(name=item.job.name, status=item.status, known=known)


def _make_folders(folder: Path) -> None:
    missing = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync_folder(path.parent)


def _read(raw: Path) -> tuple[bytes, FileSignature]:
    try:
        with open(raw, "rb") as file:
            # Taken before the bytes: a file that changes while it is read does not look as it did afterwards.
            triple = file_signature(os.fstat(file.fileno()))
            return file.read(), triple
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        what = "is a folder" if isinstance(error, IsADirectoryError) else "is not there"
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
        f"declared {declared[0]}x{declared[1]}, the file holds {stored[0]}x{stored[1]}"
        + (f" and an EXIF orientation tag ({header.orientation}) that turns it" if turned else ""),
        where=job.name,
        why="boxes and sizes mean stored pixels: EXIF orientation is never applied" if turned else None,
        do="turn the raw image's pixels and drop its EXIF tag, or record stored sizes and boxes"
        if turned
        else "correct width and height in the record, or replace the raw image",
    )


def _read_made(job: RescaleJob, made: Path) -> tuple[bytes, FileSignature]:
    if made.is_symlink() or not made.is_file():
        raise _stays(job, "preset_image_bad", "it is not a regular file")
    data, triple = _read(made)
    return data, triple


def _check_made(job: RescaleJob, pixels: bytes, raw: bytes) -> None:
    """An image of which nothing is known is taken for what it is: whole, of the right size, a copy where it must be one."""
    try:
        header = stored_header(pixels, job.name)
        check_decodable(pixels, job.name)
    except Refused as refusal:
        raise _stays(job, "preset_image_bad", refusal.what) from refusal
    if (header.width, header.height) != job.target:
        size = f"{header.width}x{header.height}, expected {job.target[0]}x{job.target[1]}"
        raise _stays(job, "preset_image_bad", f"it is {size}")
    if job.size == job.target and pixels != raw:
        raise _stays(job, "raw_changed", "it differs from the raw image, of which it has to be a copy")


def _stays(job: RescaleJob, reason: str, what: str) -> Refused:
    return Refused(
        reason,
        f"the preset's image stays as it is, and {what}",
        where=job.name,
        why="preset images are never replaced",
        do="delete that file in the preset and rescale again, or choose a new preset name",
    )


def _refusal_row(job: RescaleJob, refusal: Refused) -> RescaleRow:
    return RescaleRow(
        name=job.name, status="refused", reason=refusal.reason, message=refusal.what, remedy=refusal.do or ""
    )


def _failure_row(job: RescaleJob, error: OSError) -> RescaleRow:
    return RescaleRow(
        name=job.name, status="failed", reason=OS_ERROR, message=str(error), remedy="repair it and run again"
    )


def _one_thread() -> int:
    """Each worker is one core's work; returns how many threads torch had before."""
    import torch

    before = torch.get_num_threads()
    _torch_threads(1)
    return before


def _torch_threads(count: int) -> None:
    import torch

    torch.set_num_threads(count)
