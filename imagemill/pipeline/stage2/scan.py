"""Listing of `approved/`: images, sidecars, and entries refused by name or type.

Images are opened in pipeline/stage2/embed.py; staleness is decided in pipeline/stage2/plan.py.

Spec: docs/spec/stage2.md#inputs, docs/spec/stage2.md#image-id, docs/spec/stage2.md#caption-sources
"""

import errno
import os
import unicodedata
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath

import msgspec

from imagemill.domain.ids import id_problem, image_id_of, suffix_of
from imagemill.domain.inputs import FORMATS, HEIF_EXTRA, HEIF_FORMATS, ColorSetting, Format, formats_text
from imagemill.errors import MissingInput
from imagemill.formats.images import heif_is_installed
from imagemill.fs.fingerprints import FileSignature, RunningFingerprint, file_signature, fingerprint
from imagemill.store.ledger import FROM_SIDECAR, CaptionRow, Ledger, Problem, SourceRow

IMAGE_SUFFIXES = frozenset(f".{name}" for name in FORMATS)
CAPTION_SUFFIX = ".txt"

# A longer sidecar is refused; not more than this is read.
MAX_CAPTION_BYTES = 1 << 20

# Assets of the problems: names and types belong to the source of the graph, sidecars that were read to the second.
SOURCE_ASSET, SIDECARS = "approved_images", "captions"

# Reasons for which a file is refused by its name alone.
_OF_NAMES = frozenset({"bad_id", "id_collision"})

# Reasons for which an image, or a file that may be one, is present but not used.
UNUSED_REASONS = frozenset({"id_collision", "unsupported_type", "bad_id", "not_a_file"})


class SourceFile(msgspec.Struct, frozen=True, gc=False):
    """One approved image as listed; `caption` is its sidecar's signature, None without one.

    `changed_ns`: the latest of the modification and change times of image and sidecar, in nanoseconds.
    """

    image_id: str
    file_name: str
    stat: FileSignature
    caption: FileSignature | None
    changed_ns: int

    def is_known(self, row: SourceRow | None, color: ColorSetting) -> bool:
        """Return whether the ledger's row has this file's state, and everything that planning needs."""
        return row is not None and row.stat == self.stat and row.is_read(color)


@dataclass(frozen=True, slots=True)
class Scan:
    """Contents of `approved/`: images that may be processed, in name order, and a problem for every other entry.

    `names`: `fingerprint_names` of all names in the folder, blank if only some ids were examined.
    """

    sources: dict[str, SourceFile]
    problems: list[Problem]
    names: str = ""

    @property
    def digest(self) -> str:
        """A fingerprint of all entries: names, signatures and problems."""
        digest = RunningFingerprint()
        for source in self.sources.values():
            digest.update(f"{source.file_name}\0{source.stat}\0{source.caption}\n".encode("utf-8", "surrogateescape"))
        for problem in self.problems:
            digest.update(f"{problem.item}\0{problem.reason}\0{problem.detail}\n".encode())
        return str(digest)

    @property
    def refused_images(self) -> list[Problem]:
        """Image files that are refused by their names; folders and dangling links with an image's name are not included."""
        return [p for p in self.problems if p.reason in _OF_NAMES and is_image(p.item)]

    @property
    def seen(self) -> int:
        """Number of image files in the folder, including those refused by name."""
        return len(self.sources) + len(self.refused_images)


def scan_approved(folder: Path, only: Collection[str] | None = None, *, formats: tuple[Format, ...] = FORMATS) -> Scan:
    """List the top level of a folder of approved images.

    Args:
        folder: the folder.
        formats: extensions of images, in lower case.
        only: examine only the entries of these image ids; an entry's id is also the stem of its name as problems show it.

    Raises:
        MissingInput: if the folder does not exist.
    """
    if not folder.is_dir():
        raise MissingInput(
            "no folder of approved images", where=folder, do="put images there, captions beside them as {image_id}.txt"
        )
    images: dict[str, list[tuple[str, os.stat_result]]] = defaultdict(list)
    captions: dict[str, tuple[str, os.stat_result]] = {}
    folders: dict[str, Problem] = {}
    problems: list[Problem] = []
    unread: set[str] = set()  # ids of images of formats that are not read
    with os.scandir(folder) as entries:
        listed = sorted(
            entries if only is None else (entry for entry in entries if _has_id(entry.name, only)), key=lambda e: e.name
        )
        for entry in listed:
            name = entry.name
            if name.startswith("."):
                continue
            suffix = suffix_of(name)
            image_id = name.removesuffix(suffix)
            found = _look_up(entry, image_id, suffix, formats)
            if not isinstance(found, Problem):
                if suffix == CAPTION_SUFFIX:
                    captions[image_id] = name, found
                else:
                    images[image_id].append((name, found))
            elif found.reason == "sub_folder" and suffix == CAPTION_SUFFIX:
                # A folder with a sidecar's name: the caption cannot be read, which `read_captions` reports.
                captions[image_id] = name, entry.stat()
                folders[name] = found
            else:
                problems.append(found)
                if found.reason == "unsupported_type" and is_image(name):
                    unread.add(image_id)
    sources = {}
    for image_id, files in images.items():
        if len(files) > 1:
            problems.extend(_collision(name, [other for other, _ in files if other != name]) for name, _ in files)
        else:
            sources[image_id] = _source(image_id, *files[0], captions.get(image_id))
    orphans = (name for image_id, (name, _) in captions.items() if image_id not in images and image_id not in unread)
    problems.extend(folders.get(name) or _orphan(name) for name in orphans)
    return Scan(sources, problems, fingerprint_names(entry.name for entry in listed) if only is None else "")


def fingerprint_names(names: Iterable[str]) -> str:
    """Return a fingerprint of file names, which does not depend on their order."""
    return fingerprint("\0".join(sorted(names)).encode("utf-8", "surrogateescape"))


def _has_id(name: str, ids: Collection[str]) -> bool:
    # Comparing the first characters costs a tenth of taking the stem.
    if name.isprintable():
        return name.startswith(tuple(ids)) and image_id_of(name) in ids
    return image_id_of(name) in ids or image_id_of(_printable(name)) in ids


def is_image(name: str) -> bool:
    """Return True if a name has the extension of an image format, in any case, whether or not the data root reads it."""
    return suffix_of(name).lower() in IMAGE_SUFFIXES


def _is_sidecar(name: str) -> bool:
    return suffix_of(name) == CAPTION_SUFFIX


def _refuse_entry(entry: os.DirEntry[str], image_id: str, suffix: str, formats: tuple[Format, ...]) -> Problem | None:
    name = entry.name
    if entry.is_dir():
        return _refusal(name, "sub_folder", *_folder(entry))
    if not entry.is_file():
        kind = "a broken symlink" if entry.is_symlink() else "neither a file nor a link to one"
        return _refusal(name, "not_a_file", kind, "remove it, or restore the file")
    if suffix != CAPTION_SUFFIX:
        if suffix.lower() == CAPTION_SUFFIX:
            return _refusal(name, "caption_extension", *_other_case(entry))
        if unread := _unread(suffix[1:].lower(), formats):
            return _refusal(name, "unsupported_type", *unread)
    if problem := id_problem(image_id):
        return _refusal(name, "bad_id", f"the id {problem}", "rename the file")
    return None


def _unread(extension: str, formats: tuple[Format, ...]) -> tuple[str, str] | None:
    """Return why files with this extension are not read as images, and what to do; None if they are."""
    if extension not in formats:
        if extension in FORMATS:
            remedy = f"add {extension} to inputs.formats in imagemill.yaml, or move it elsewhere"
            return f"inputs.formats of this data root does not contain {extension}", remedy
        return f"not {formats_text(formats)}", "convert it, or move it elsewhere"
    if extension in HEIF_FORMATS and not heif_is_installed():
        remedy = f"install imagemill[{HEIF_EXTRA}], then run imagemill again"
        return "a HEIC picture, whose decoder is not installed", remedy
    return None


def _folder(entry: os.DirEntry[str]) -> tuple[str, str]:
    """Return what a folder directly contains, and what to do with it."""
    with os.scandir(entry) as inner:
        names = [each.name for each in inner]
    images, captions = any(map(is_image, names)), any(map(_is_sidecar, names))
    if images or captions:
        what = " and ".join(word for word, found in (("images", images), ("captions", captions)) if found)
        return f"a folder below approved/ that contains {what}", f"move its {what} to the top level of approved/"
    return "a folder below approved/", "move its images to the top level of approved/, or move the folder elsewhere"


def _other_case(entry: os.DirEntry[str]) -> tuple[str, str]:
    """Return why a sidecar such as `a.TXT` is not read, and what to do with it."""
    wanted = PurePath(entry.name).with_suffix(CAPTION_SUFFIX).name
    remedy = (
        f"remove it: {wanted} is read"
        if os.path.lexists(Path(entry.path).with_name(wanted))
        else f"rename it to {wanted}"
    )
    return f"captions are read from files that end in {CAPTION_SUFFIX}, in lower case", remedy


def _look_up(
    entry: os.DirEntry[str], image_id: str, suffix: str, formats: tuple[Format, ...]
) -> os.stat_result | Problem:
    """Return the entry's status, or why it is refused, for example because the system cannot look it up."""
    try:
        return _refuse_entry(entry, image_id, suffix, formats) or entry.stat()
    except OSError as error:
        if error.errno == errno.ELOOP:
            kind, remedy = "a symlink that leads back to itself", "remove it, or restore the file"
        else:
            kind, remedy = f"cannot be looked up: {error.strerror}", "make it readable, or move it elsewhere"
        return _refusal(entry.name, "not_a_file", kind, remedy)


def _source(image_id: str, name: str, stat: os.stat_result, caption: tuple[str, os.stat_result] | None) -> SourceFile:
    # Include the change time: a copy that preserves modification times is still being written although it looks old.
    changed = max(stat.st_mtime_ns, stat.st_ctime_ns)
    if caption is None:
        return SourceFile(image_id, name, file_signature(stat), None, changed)
    of_caption = caption[1]
    changed = max(changed, of_caption.st_mtime_ns, of_caption.st_ctime_ns)
    return SourceFile(image_id, name, file_signature(stat), file_signature(of_caption), changed)


def _collision(name: str, others: list[str]) -> Problem:
    most = "one" if len(others) == 1 else "all but one"
    remedy = f"rename {most} of them: the id is the name without extension"
    return _refusal(name, "id_collision", f"the same id as {', '.join(others)}", remedy)


def _orphan(name: str) -> Problem:
    return _refusal(name, "orphan_caption", "a caption without an image", "add the image, or remove the caption")


def _refusal(name: str, reason: str, detail: str, remedy: str) -> Problem:
    return Problem(_printable(name), SOURCE_ASSET, "refused", reason, detail, remedy)


def _printable(name: str) -> str:
    """Return a file name as problems show it."""
    # Names that are not UTF-8 arrive as lone surrogates, which SQLite cannot store; a line break would split a summary.
    visible = "".join(repr(c)[1:-1] if unicodedata.category(c) == "Cc" else c for c in name)
    return visible.encode("utf-8", "backslashreplace").decode()


def normalise_caption(text: str) -> str:
    """Replace every run of white space, including line breaks, by one space, and strip both ends."""
    return " ".join(text.split())


def caption_row(image_id: str, text: str, origin: str, stat: FileSignature | None = None) -> CaptionRow:
    """Return the ledger's row of a caption, with the fingerprint of its text."""
    return CaptionRow(image_id, stat, text, origin, fingerprint(text.encode("utf-8")))


def read_captions(
    folder: Path, sources: Iterable[SourceFile], known: Mapping[str, CaptionRow]
) -> tuple[list[CaptionRow], list[Problem]]:
    """Read the sidecars that are new or changed.

    Returns:
        rows to record (a mask survives only if the text did not change), and a problem per sidecar that cannot be read,
        is too long, or is not UTF-8.
    """
    rows: list[CaptionRow] = []
    problems: list[Problem] = []
    for source in sources:
        old = known.get(source.image_id)
        if source.caption is None or (old and old.stat == source.caption):
            continue
        path = folder / (source.image_id + CAPTION_SUFFIX)
        try:
            text = _read_sidecar(path, source)
        except FileNotFoundError:
            continue
        if isinstance(text, Problem):
            problems.append(text)
            continue
        if not text and old:
            detail = f"{path.name} is blank; the caption it had, or the record's, is still used"
            problems.append(_refused_caption(source, "blank_caption", detail, "write one line of text"))
        elif text:
            row = caption_row(source.image_id, text, FROM_SIDECAR, source.caption)
            if old and old.fingerprint == row.fingerprint:
                row = CaptionRow(row.image_id, row.stat, row.text, row.origin, row.fingerprint, old.mask, old.truncated)
            rows.append(row)
    return rows, problems


def _read_sidecar(path: Path, source: SourceFile) -> str | Problem:
    """Read a caption of at most `MAX_CAPTION_BYTES`. Raises FileNotFoundError if the sidecar has just disappeared."""
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_CAPTION_BYTES + 1)
        if len(data) > MAX_CAPTION_BYTES:
            limit = f"{path.name} is longer than {MAX_CAPTION_BYTES} bytes"
            return _refused_caption(source, "caption_too_long", limit, "write one line of text")
        return normalise_caption(data.decode("utf-8-sig"))
    except FileNotFoundError:
        raise
    except IsADirectoryError:
        remedy = f"rename or move the folder, then write the caption to a file {path.name}"
        return _refused_caption(source, "bad_caption", f"{path.name} is a folder", remedy)
    except UnicodeDecodeError as error:
        detail = f"{path.name} is not UTF-8: {error.reason}"
        return _refused_caption(source, "bad_caption", detail, "save the caption as UTF-8")
    except OSError as error:
        return _read_error(source, path.name, error.strerror)


def _read_error(source: SourceFile, name: str, why: str | None) -> Problem:
    remedy = "make the file readable, then run imagemill again"
    detail = f"{name} cannot be read: {why}"
    return Problem(source.image_id, SIDECARS, "failed", "read_error", detail, remedy, source.caption)


def _refused_caption(source: SourceFile, reason: str, detail: str, remedy: str) -> Problem:
    return Problem(source.image_id, SIDECARS, "refused", reason, detail, remedy, source.caption)


def survey(folder: Path, ledger: Ledger, scan: Scan | None = None, *, formats: tuple[Format, ...] = FORMATS) -> Scan:
    """Scan the folder unless its scan is given, read new and changed sidecars, and record both in the ledger."""
    scan = scan or scan_approved(folder, formats=formats)
    captions, problems = read_captions(folder, scan.sources.values(), ledger.captions())
    with ledger.transaction():
        ledger.record_captions(captions)
        ledger.replace_problems(SOURCE_ASSET, scan.problems)
        ledger.replace_problems(SIDECARS, problems)
    return scan
