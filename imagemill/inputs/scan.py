"""Classification of a folder of approved images: images with their captions, companions, and entries refused by name or type.

Spec: docs/spec/stage2.md#inputs, docs/spec/stage2.md#image-id, docs/spec/stage2.md#caption-sources
"""

import gc
import marshal
import os
import subprocess
import sys
import unicodedata
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import msgspec

from imagemill.domain.ids import (
    folder_problem,
    image_id_of,
    is_plain_id,
    path_problem,
    split_suffix,
    stem_of,
    stem_problem,
    suffix_of,
)
from imagemill.domain.inputs import (
    AUTO,
    FORMATS,
    HEIF_EXTRA,
    HEIF_FORMATS,
    NEW_INPUTS,
    OFF,
    InputSettings,
    formats_text,
)
from imagemill.domain.shares import ImageShare
from imagemill.errors import MissingInput
from imagemill.formats.heif import heif_is_installed
from imagemill.fs.fingerprints import FileSignature, RunningFingerprint, fingerprint
from imagemill.fs.folders import Folder, is_folder, state_of_file
from imagemill.fs.listing import is_inside
from imagemill.inputs.archives import archive_remedy, is_tar
from imagemill.inputs.listing import (
    FILE,
    FOLDER,
    IGNORED,
    Entry,
    Remark,
    UnusualEntry,
    concerns,
    in_order,
    is_companion,
    iterate_entries,
    list_entries,
)
from imagemill.inputs.matching import CaptionExtension, Matched, caption_extension, match_texts
from imagemill.inputs.metadata.rows import file_names
from imagemill.inputs.sources import SourceFile, SourceTable
from imagemill.parts import in_parts
from imagemill.store.ledger import Problem
from imagemill.text.settings import described
from imagemill.text.units import counted

IMAGE_SUFFIXES = frozenset(f".{name}" for name in FORMATS)

# Asset of the problems of names and types.
SOURCE_ASSET = "approved_images"

# Reasons for which a file is refused by its name alone.
_OF_NAMES = frozenset({"bad_id", "id_collision"})

# Reasons for which an image, or a file that may be one, is present but not used.
UNUSED_REASONS = frozenset({"id_collision", "unsupported_type", "bad_id", "not_a_file"})

_ARCHIVES: Final = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".zip", ".7z", ".rar")

_RECURSIVE: Final = "set inputs.recursive: true in imagemill.yaml to read it and its sub-folders"

# Extensions that trainers use for captions.
_CAPTIONS: Final = frozenset({"txt", "caption"})


class MetadataFile(msgspec.Struct, frozen=True, gc=False):
    """A file whose rows are captions of images.

    Attributes:
        path: below the folder of images, or absolute.
        stat: its signature.
        changed_ns: the later of its modification and change times, in nanoseconds.
        first: whether `captions.metadata` names it, so that it precedes caption files and applies to all images.
    """

    path: str
    stat: FileSignature
    changed_ns: int
    first: bool = False

    @property
    def folder(self) -> str:
        """The folder whose images it applies to, and to which the paths in it are relative."""
        return "" if self.path.startswith("/") else self.path.rpartition("/")[0]


@dataclass(frozen=True, slots=True)
class Scan:
    """Contents of a folder of images. Every entry counts once: as an image, a caption, a companion, ignored, or a problem.

    Attributes:
        sources: images that may be processed, in order of their paths.
        problems: one for every entry that is of no use.
        names: `fingerprint_names` of the paths of all entries, blank if only some ids were examined.
        other_captions: paths of metadata files, and of caption files of images that are not among `sources`.
        companions: paths of masks and control images beside an image.
        ignored: paths of entries that are ignored.
        metadata: files with rows of captions.
        elsewhere: number of entries of other shares, which are in none of the above.
        others: paths of the images among them.
    """

    sources: Mapping[str, SourceFile]
    problems: list[Problem]
    names: str = ""
    other_captions: tuple[str, ...] = ()
    companions: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    metadata: tuple[MetadataFile, ...] = ()
    elsewhere: int = 0
    others: frozenset[str] = frozenset()

    @property
    def captions(self) -> list[str]:
        """Paths of caption files that belong to an image, and of metadata files."""
        return [*(path for source in self.sources.values() for path in source.captions), *self.other_captions]

    @property
    def refused_images(self) -> list[Problem]:
        """Image files that are refused by their names; folders and dangling links with an image's name are not included."""
        return [p for p in self.problems if p.reason in _OF_NAMES and is_image(p.item)]

    @property
    def seen(self) -> int:
        """Number of image files in the folder, including those refused by name."""
        return len(self.sources) + len(self.refused_images)

    def of(self, ids: Collection[str]) -> "Scan":
        """Return the part with these image ids; that of a problem is made from its path."""
        return replace(
            self,
            sources={image_id: source for image_id, source in self.sources.items() if image_id in ids},
            problems=[problem for problem in self.problems if image_id_of(problem.item) in ids],
            names="",
        )


def scan_approved(
    folder: Folder,
    inputs: InputSettings = NEW_INPUTS,
    only: Collection[str] | None = None,
    own: Collection[Path] = (),
) -> Scan:
    """List a folder of approved images.

    Args:
        folder: the folder.
        inputs: which files are images, captions, companions, or ignored, and whether sub-folders are read.
        only: examine only the entries of these image ids; an entry's id is also made from its path as problems show it.
        own: folders of the data root, which links must not lead into.

    Raises:
        MissingInput: if the folder does not exist.
    """
    _refuse_missing(folder)
    inputs = _with_metadata_below(inputs, folder)
    if only is None:
        entries = list_entries(folder, inputs, own)
        names = fingerprint_names(entry.path for entry in entries)
        scan = replace(classify(_taken_from(entries), inputs), names=names)
    else:
        scan = classify(list_entries(folder, inputs, own, wanted=concerns(only)), inputs).of(only)
    named = _named_metadata(folder, inputs.metadata)
    return replace(scan, metadata=(named,)) if named else scan


class ListedFolder:
    """The entries of a folder of approved images, each looked up once. They are classified on first use of `scan`.

    Attributes:
        digest: a fingerprint of all that the classification depends on: entries, settings, and whether HEIC is decoded.

    Args:
        entries: in order of their paths.
        inputs: the settings, with the path of a named metadata file below the folder.
        named: the metadata file that the settings name.
    """

    def __init__(self, entries: list[Entry], inputs: InputSettings, named: MetadataFile | None = None) -> None:
        self.digest = _digest(map(_line, entries), inputs, named)
        self._entries, self._inputs, self._named = entries, inputs, named
        self._scan: Scan | None = None

    @cached_property
    def names(self) -> str:
        """A fingerprint of the paths of all entries, by `fingerprint_names`."""
        return fingerprint_names([entry.path for entry in self._entries])

    @property
    def scan(self) -> Scan:
        """The classified entries."""
        if self._scan is None:
            metadata = {"metadata": (self._named,)} if self._named else {}
            names, entries, self._entries = self.names, self._entries, []
            self._scan = replace(classify(_taken_from(entries), self._inputs), names=names, **metadata)
        return self._scan


def list_approved(folder: Folder, inputs: InputSettings = NEW_INPUTS, own: Collection[Path] = ()) -> ListedFolder:
    """List a folder of approved images as `scan_approved` does, but leave the entries to be classified on first use.

    Args:
        folder: as for `scan_approved`.
        inputs: as for `scan_approved`.
        own: as for `scan_approved`.

    Raises:
        MissingInput: if the folder does not exist.
    """
    _refuse_missing(folder)
    return _listed(folder, inputs, list_entries(folder, inputs, own))


def _listed(folder: Folder, inputs: InputSettings, entries: list[Entry]) -> ListedFolder:
    return ListedFolder(entries, _with_metadata_below(inputs, folder), _named_metadata(folder, inputs.metadata))


class ListingAhead:
    """`list_approved` in a child process, which begins at once. Use it as a context manager, which ends the process.

    Args:
        folder: as for `scan_approved`; a local one.
        inputs: as for `scan_approved`.
        own: as for `scan_approved`.
    """

    def __init__(self, folder: Path, inputs: InputSettings, own: Collection[Path]) -> None:
        self._folder, self._inputs, self._own = folder, inputs, own
        self._found: ListedFolder | None = None
        words = [msgspec.json.encode(inputs).decode(), str(folder), *map(str, own)]
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd="/",
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._process:
            if self._process.poll() is None:
                self._process.kill()

    def digest(self) -> str:
        """Wait for the digest of the listing. Raises MissingInput if the folder does not exist."""
        assert self._process.stdout
        line = self._process.stdout.readline()
        return line.decode().rstrip("\n") or self.listed().digest

    def listed(self) -> ListedFolder:
        """Return the listing, after `digest`. If the process has failed, list again, and raise as `list_approved` does."""
        if self._found is None:
            entries = list(self._received())
            if self._process.wait():
                self._found = list_approved(self._folder, self._inputs, self._own)
            else:
                self._found = _listed(self._folder, self._inputs, entries)
        return self._found

    def _received(self) -> Iterator[Entry]:
        """Yield the entries that the process sends; fewer if it fails."""
        assert self._process.stdin
        assert self._process.stdout
        with suppress(BrokenPipeError), self._process.stdin as asked:
            asked.write(b"entries")
        # In parts: memory between values that stay would not be free afterwards.
        with suppress(EOFError):
            while True:
                yield from (_entry_of(*each) for each in marshal.load(self._process.stdout))


def _values_of(entry: Entry) -> tuple[Any, ...]:
    values = entry.path, entry.kind, entry.signature, entry.changed_ns
    return values if type(entry) is Entry else (*values, tuple(entry.remark))


def _entry_of(path: str, kind: Any, signature: FileSignature | None, changed_ns: int, remark: Any = None) -> Entry:
    if remark is None:
        return Entry(path, kind, signature, changed_ns)
    return UnusualEntry(path, kind, signature, changed_ns, Remark(*remark))


def _list_for_parent(settings: str, approved: str, *own: str) -> None:
    """Print the digest of a listing, and its entries if the parent asks for them."""
    gc.disable()  # what is listed stays until the end
    folder, inputs = Path(approved), msgspec.json.decode(settings, type=InputSettings)
    _refuse_missing(folder)
    # In place of the entries, which take more memory: of a line, most of its entry can be made again.
    lines: list[str] = []
    changes: list[int] = []
    unusual: dict[str, Entry] = {}
    for entry in iterate_entries(folder, inputs, [Path(each) for each in own]):
        line = _line(entry)
        lines.append(line)
        changes.append(entry.changed_ns)
        if type(entry) is not Entry:
            unusual[line] = entry
    # Lines are in the order of their paths: the character after a path is the least one, and in no path.
    print(
        _digest(sorted(lines), _with_metadata_below(inputs, folder), _named_metadata(folder, inputs.metadata)),
        flush=True,
    )
    if sys.stdin.buffer.read():
        listed = zip(lines, changes, strict=True)
        for part in in_parts(in_order(unusual.get(line) or _entry_of_line(line, ns) for line, ns in listed)):
            marshal.dump([_values_of(entry) for entry in part], sys.stdout.buffer)


# Input settings that came after the digest, see `described`.
_ADDED: Final = frozenset({"share"})


def _digest(lines: Iterable[str], inputs: InputSettings, named: MetadataFile | None) -> str:
    """Return the digest of a listing. `lines`: those of its entries, in order of their paths."""
    digest = RunningFingerprint()
    digest.update_lines([f"{described(inputs, NEW_INPUTS, _ADDED)} {heif_is_installed()} {named}"])
    digest.update_lines(lines)
    return str(digest)


def _line(entry: Entry) -> str:
    return f"{entry.path}\0{entry.kind}\0{entry.signature or ''}\0{'' if type(entry) is Entry else _inside(entry)}"


def _entry_of_line(line: str, changed_ns: int) -> Entry:
    path, kind, signature, _ = line.split("\0")
    return _entry_of(path, sys.intern(kind), FileSignature(signature) if signature else None, changed_ns)


def _inside(entry: Entry) -> str:
    remark = entry.remark
    return "\0".join((remark.why, *remark.names)) if remark.why or remark.names else ""


def _refuse_missing(folder: Folder) -> None:
    if not is_folder(folder):
        raise MissingInput(
            "no folder of approved images", where=folder, do="put images there, captions beside them as {image_id}.txt"
        )


def _with_metadata_below(inputs: InputSettings, folder: Folder) -> InputSettings:
    """Return the settings with the path of a named metadata file below the folder, if it is inside."""
    if inputs.metadata in (AUTO, OFF) or not isinstance(folder, Path):
        return inputs
    path = os.path.abspath(folder / inputs.metadata)
    inside = next((each for each in (str(folder), os.path.realpath(folder)) if is_inside(path, each)), None)
    return msgspec.structs.replace(inputs, metadata=path[len(inside) + 1 :] if inside else path)


def _named_metadata(folder: Folder, path: str) -> MetadataFile | None:
    if path in (AUTO, OFF):
        return None
    try:
        state = state_of_file(folder / path)
    except OSError as error:
        raise MissingInput(
            "the metadata file cannot be read",
            where=folder / path,
            why=error.strerror,
            do="restore it, or change captions.metadata in imagemill.yaml",
        ) from error
    return MetadataFile(path, *state, first=True)


def _taken_from(entries: list[Entry]) -> Iterator[Entry]:
    """Yield entries, and remove them from their list, so that each is in memory only until it is classified."""
    entries.reverse()
    while entries:
        yield entries.pop()


def classify(entries: Iterable[Entry], inputs: InputSettings = NEW_INPUTS) -> Scan:
    """Return what each entry is. Entries are in order of their paths."""
    folders: dict[str, _Folder] = {}
    for entry in entries:
        prefix = entry.path[: entry.path.rfind("/") + 1]
        if (folder := folders.get(prefix)) is None:
            folder = folders[prefix] = _Folder(prefix, inputs)
        folder.add(entry)
    shared = _shared_ids(folders)
    scans = [folder.scan(shared) for folder in folders.values()]
    return _of_share(_together(scans), share) if (share := inputs.own_share) else _together(scans)


def _together(scans: list[Scan]) -> Scan:
    if len(scans) == 1:
        return scans[0]
    places = sorted((source.file_name, n, i) for n, scan in enumerate(scans) for i, source in scan.sources.items())
    return Scan(
        SourceTable(scans[n].sources[image_id] for _, n, image_id in places),
        [problem for scan in scans for problem in scan.problems],
        other_captions=tuple(path for scan in scans for path in scan.other_captions),
        companions=tuple(sorted(path for scan in scans for path in scan.companions)),
        ignored=tuple(path for scan in scans for path in scan.ignored),
        metadata=tuple(file for scan in scans for file in scan.metadata),
    )


def _of_share(scan: Scan, share: ImageShare) -> Scan:
    """Return the part of a share: captions are where their image is, everything else by the id that its path would give.

    Metadata files belong to every share.
    """

    def inside(path: str) -> bool:
        return share.has(image_id_of(path))

    sources = SourceTable(source for image_id, source in scan.sources.items() if share.has(image_id))
    of_all = {file.path for file in scan.metadata}
    part = replace(
        scan,
        sources=sources,
        problems=[problem for problem in scan.problems if inside(problem.item)],
        other_captions=tuple(path for path in scan.other_captions if path in of_all or inside(path)),
        companions=tuple(filter(inside, scan.companions)),
        ignored=tuple(filter(inside, scan.ignored)),
        others=frozenset(source.file_name for image_id, source in scan.sources.items() if image_id not in sources),
    )
    return replace(part, elsewhere=_entries_of(scan) - _entries_of(part))


def _entries_of(scan: Scan) -> int:
    return sum(map(len, (scan.sources, scan.problems, scan.captions, scan.companions, scan.ignored)))


def _shared_ids(folders: Mapping[str, "_Folder"]) -> dict[str, list[str]]:
    """Return the paths of images by id, of ids that one at the top level and one in a sub-folder have."""
    found: dict[str, list[str]] = defaultdict(list)
    like_nested = folders[""].stems_like_nested_ids() if "" in folders else ()
    for folder in folders.values() if like_nested else ():
        for image_id, stem in folder.ids.items():
            if image_id in like_nested:
                found[image_id] += folder.paths(stem)
    return found


class _Use(NamedTuple):
    """The use of files whose names end in one suffix.

    Attributes:
        extension: the suffix in lower case, without the dot.
        caption: the suffix as the extension of a caption file; None if captions end in others.
        metadata: whether one of them may be a metadata file.
        other_case: whether they would be captions if the suffix were in lower case.
        unread: of an image: why it is not read, and what to do; None if it is.
    """

    extension: str
    caption: CaptionExtension | None
    metadata: bool
    other_case: bool
    unread: tuple[str, str] | None

    @classmethod
    def of(cls, suffix: str, inputs: InputSettings) -> Self:
        extension, sidecars = suffix[1:].lower(), inputs.sidecars
        return cls(
            extension,
            caption_extension(suffix, sidecars),
            any(name.endswith(suffix) for name in (inputs.metadata, *file_names())),
            sidecars.exact and extension in sidecars.extensions,
            _unread(extension, inputs.formats),
        )


class _FileNames(Mapping[str, list[str]]):
    """File names of the images of a folder by stem, of refused ones last; a dict of them would take much memory.

    Args:
        images: the first image of each stem.
        further: the other images of stems that several have.
        refused: names of refused images by stem.
        start: length of the folder's path.
    """

    def __init__(
        self,
        images: Mapping[str, Entry],
        further: Mapping[str, list[Entry]],
        refused: Mapping[str, list[str]],
        start: int,
    ) -> None:
        self._images, self._further, self._refused, self._start = images, further, refused, start

    def __getitem__(self, stem: str) -> list[str]:
        if stem not in self:
            raise KeyError(stem)
        files = [self._images[stem], *self._further.get(stem, ())] if stem in self._images else []
        return [file.path[self._start :] for file in files] + self._refused.get(stem, [])

    def __contains__(self, stem: object) -> bool:
        return stem in self._images or stem in self._refused

    def __iter__(self) -> Iterator[str]:
        yield from self._images
        yield from (stem for stem in self._refused if stem not in self._images)

    def __len__(self) -> int:
        return len(self._images.keys() | self._refused.keys())


class _Folder:
    """Entries of one folder, sorted by their names alone; then against each other.

    Attributes:
        prefix: what the paths of its entries begin with.
    """

    def __init__(self, prefix: str, inputs: InputSettings) -> None:
        self.prefix = prefix
        self._start = len(prefix)
        self._problem = folder_problem(prefix[:-1])
        self._inputs = inputs
        self._ignored: list[str] = []
        # By stem, the first image and the others, of which there are few.
        self._images: dict[str, Entry] = {}
        self._further: dict[str, list[Entry]] = defaultdict(list)
        # Images by stem that are refused by their names, or have formats that are not read.
        self._refused: dict[str, list[str]] = defaultdict(list)
        self._texts: dict[str, Entry] = {}
        self._tables: list[str] = []
        self._metadata: list[Entry] = []
        self._other_case: list[str] = []
        self._problems: list[Problem] = []
        self._names = _FileNames(self._images, self._further, self._refused, self._start)
        self._uses: dict[str, _Use] = {}  # by suffix, of which there are few

    def add(self, entry: Entry) -> None:
        name = entry.path[self._start :]
        stem, suffix = split_suffix(name)
        if (use := self._uses.get(suffix)) is None:
            use = self._uses[suffix] = _Use.of(suffix, self._inputs)
        if entry.kind == IGNORED:
            self._ignored.append(entry.path)
        elif entry.kind != FILE and (why := entry.remark.why):
            reason = entry.remark.reason or ("sub_folder" if entry.kind == FOLDER else "not_a_file")
            self._refuse(name, reason, why, entry.remark.do)
        elif use.metadata and entry.kind == FILE and (entry.path == self._inputs.metadata or name in file_names()):
            self._add_metadata(entry)
        elif use.caption:
            # A folder with a caption's name: the caption cannot be read, which `read_captions` reports.
            if problem := self._bad_stem(stem):
                self._refuse(name, "bad_id", f"the id {problem}", "rename the file")
            else:
                self._texts[name] = entry
        elif entry.kind == FOLDER:
            self._refuse(name, "sub_folder", *_contents(entry))
        elif use.extension in FORMATS and not use.other_case:
            self._add_image(entry, name, stem, use)
        elif use.extension == "json":
            self._tables.append(name)
        elif use.other_case:
            self._other_case.append(name)
        else:
            self._refuse(name, *_unused(self.prefix + name, use.extension, self._inputs))

    def _bad_stem(self, stem: str) -> str | None:
        """Return why a file with this stem cannot have an id here."""
        if self._problem is None and is_plain_id(stem):
            return None
        return self._problem or stem_problem(stem, self.prefix)

    def _add_metadata(self, entry: Entry) -> None:
        if problem := path_problem(entry.path):
            self._refuse(self._name(entry), "bad_id", f"the path {problem}", "rename the file or its folder")
        else:
            self._metadata.append(entry)

    def _add_image(self, entry: Entry, name: str, stem: str, use: _Use) -> None:
        if use.unread:
            self._refused[stem].append(name)
            self._refuse(name, "unsupported_type", *use.unread)
        elif problem := self._bad_stem(stem):
            self._refused[stem].append(name)
            self._refuse(name, "bad_id", f"the id {problem}", "rename the file")
        else:
            first = self._images.setdefault(stem, entry)
            if first is not entry:
                self._further[stem].append(entry)

    @property
    def ids(self) -> dict[str, str]:
        """The ids of its images, also of those that share theirs; each with the stem of its file's name."""
        return {self._id_of(stem): stem for stem in self._images}

    def _id_of(self, stem: str) -> str:
        return image_id_of(self._images[stem].path) if self.prefix else stem

    def stems_like_nested_ids(self) -> set[str]:
        """Return the stems of images that look like ids of files in sub-folders."""
        return {stem for stem in self._images if "%2F" in stem}

    def paths(self, stem: str) -> list[str]:
        """Return the paths of the images with a stem."""
        return [file.path for file in (self._images[stem], *self._further.get(stem, ()))]

    def scan(self, shared: Mapping[str, list[str]]) -> Scan:
        """Return what the entries are, once all have been added. Call it once: the entries are let go.

        Args:
            shared: paths of images by id, of ids that images in several folders have.
        """
        companions = self._take_companions() if self._inputs.companions else ()
        for name in self._tables:
            if stem_of(name) in self._names:
                self._ignored.append(self.prefix + name)
            else:
                self._refuse(name, *_unused(self.prefix + name, "json", self._inputs))
        matched = match_texts(self._texts, self._extension_of, self._names, exact=self._inputs.sidecars.exact)
        colliding = self._refuse_collisions(shared)
        self._refuse_texts(matched)
        metadata, used = self._metadata_in_use()
        unused = [stem for stem in matched.images if stem not in self._images or stem in colliding]
        captions = (*(self.prefix + name for stem in unused for name in matched.captions_of(stem)), *used)
        sources = SourceTable(self._sources(matched, colliding))
        return Scan(sources, self._problems, "", captions, companions, tuple(self._ignored), metadata)

    def _extension_of(self, suffix: str) -> CaptionExtension:
        extension = self._uses[suffix].caption
        assert extension
        return extension

    def _refuse_collisions(self, shared: Mapping[str, list[str]]) -> set[str]:
        """Add a problem for each image whose id another one has as well; return their stems."""
        colliding = set(self._further)
        if shared:
            colliding.update(stem for stem in self._images if len(shared.get(self._id_of(stem), ())) > 1)
        if not colliding:
            return colliding
        for stem in filter(colliding.__contains__, self._images):
            paths = shared.get(self._id_of(stem)) or self.paths(stem)
            for path in self.paths(stem):
                self._problems.append(_collision(path, [other for other in paths if other != path]))
        return colliding

    def _sources(self, matched: Matched, colliding: Set[str]) -> Iterator[SourceFile]:
        """Yield the images that may be processed, and let go of their entries, in whose memory the next ones are packed."""
        for stem in list(self._images):
            image_id = self._id_of(stem)
            image = self._images.pop(stem)
            if stem not in colliding:
                yield _source(image_id, image, [self._texts.pop(name) for name in matched.captions_of(stem)])

    def _metadata_in_use(self) -> tuple[tuple[MetadataFile, ...], tuple[str, ...]]:
        """Return the metadata files of the folder by `captions.metadata: auto`, and the paths of those that are used."""
        setting, found = self._inputs.metadata, self._metadata
        if setting == AUTO and len(found) == 1:
            assert found[0].signature
            return (MetadataFile(found[0].path, found[0].signature, found[0].changed_ns),), (found[0].path,)
        used: tuple[str, ...] = ()
        for entry in found:
            if entry.path == setting:
                used = (entry.path,)
                continue
            if setting == AUTO:
                others = " and ".join(self._name(other) for other in found if other is not entry)
                why = "two_metadata_files", f"{others} beside it may be meant as well, so neither is read"
                do = "remove one of them, or name one as captions.metadata in imagemill.yaml"
            elif setting == OFF:
                why = "metadata_not_read", "captions.metadata of this data root is off"
                do = "set captions.metadata: auto in imagemill.yaml to read it, or move it elsewhere"
            else:
                why, do = ("metadata_not_read", f"captions.metadata names {setting}"), "move it elsewhere"
            self._refuse(self._name(entry), *why, do)
        return (), used

    def _name(self, entry: Entry) -> str:
        return entry.path[self._start :]

    def _take_companions(self) -> tuple[str, ...]:
        # All are found before any is taken out.
        found = [stem for stem in self._images if is_companion(stem, self._names)]
        paths = tuple(sorted(path for stem in found for path in self.paths(stem)))
        for stem in found:
            del self._images[stem]
            self._further.pop(stem, None)
        return paths

    def _refuse_texts(self, matched: Matched) -> None:
        for name in self._other_case:
            extension = suffix_of(name)[1:].lower()
            wanted = f"{stem_of(name)}.{extension}"
            do = f"remove it: {wanted} is read" if wanted in self._texts else f"rename it to {wanted}"
            self._refuse(
                name, "caption_extension", f"captions are read from files that end in .{extension}, in lower case", do
            )
        for name in matched.orphans:
            entry = self._texts[name]
            if entry.kind == FOLDER:
                self._refuse(name, "sub_folder", *_contents(entry))
            else:
                self._refuse(
                    name, "orphan_caption", "a caption without an image", "add the image, or remove the caption"
                )
        for name, ids in matched.shared.items():
            files = " or ".join(file for image_id in ids for file in self._names[image_id])
            do = "rename it to the exact name of its image"
            self._refuse(name, "caption_collision", f"it may be the caption of {files}", do)
        for name, read in matched.doubles.items():
            self._refuse(name, "caption_collision", f"{read} is read as the caption of the same image", "remove it")
        for name, other in matched.ties.items():
            why = f"{other} may be the caption of the same image, so neither is read"
            self._refuse(name, "caption_collision", why, "remove one of them, or give one the exact name of the image")

    def _refuse(self, name: str, reason: str, detail: str, remedy: str) -> None:
        self._problems.append(_refusal(self.prefix + name, reason, detail, remedy))


def fingerprint_names(names: Iterable[str]) -> str:
    """Return a fingerprint of file names, which does not depend on their order."""
    return fingerprint("\0".join(sorted(names)).encode("utf-8", "surrogateescape"))


def share_line(share: str, elsewhere: int) -> str:
    """Return a share, and the number of files of other shares, for people."""
    return f"{share}; {counted(elsewhere, 'file')} of other shares left out"


def is_image(name: str) -> bool:
    """Return True if a name has the extension of an image format, in any case, whether or not the data root reads it."""
    return suffix_of(name).lower() in IMAGE_SUFFIXES


def _unused(path: str, extension: str, inputs: InputSettings) -> tuple[str, str, str]:
    """Return the reason, detail and remedy of a file that is neither an image nor a caption."""
    if extension in _CAPTIONS:
        remedy = f"add {extension} to captions.sidecars in imagemill.yaml, or move it elsewhere"
        return "unsupported_type", f"captions.sidecars of this data root does not contain {extension}", remedy
    if path.lower().endswith(_ARCHIVES):
        remedy = archive_remedy(path) if is_tar(path) else "unpack it into the folder, then remove it"
        return "archive", "an archive", remedy
    return "unsupported_type", f"not {formats_text(inputs.formats)}", "convert it, or move it elsewhere"


def _unread(extension: str, formats: Collection[str]) -> tuple[str, str] | None:
    """Return why files with this extension are not read as images, and what to do; None if they are."""
    if extension not in formats:
        remedy = f"add {extension} to inputs.formats in imagemill.yaml, or move it elsewhere"
        return f"inputs.formats of this data root does not contain {extension}", remedy
    if extension in HEIF_FORMATS and not heif_is_installed():
        remedy = f"install imagemill[{HEIF_EXTRA}], then run imagemill again"
        return "a HEIC picture, whose decoder is not installed", remedy
    return None


def _contents(entry: Entry) -> tuple[str, str]:
    """Return what a folder that is not read directly contains, and what to do with it."""
    images = any(map(is_image, entry.remark.names))
    captions = any(suffix_of(name)[1:].lower() in _CAPTIONS for name in entry.remark.names)
    if images or captions:
        what = " and ".join(word for word, found in (("images", images), ("captions", captions)) if found)
        return f"a folder below approved/ that contains {what}", _RECURSIVE
    return "a folder below approved/", f"{_RECURSIVE}; or move the folder elsewhere"


def _source(image_id: str, image: Entry, captions: list[Entry]) -> SourceFile:
    assert image.signature
    caption, changed = None, image.changed_ns
    for each in captions:  # nearly always one
        if each.signature is not None:
            caption = each.signature if caption is None else FileSignature(f"{caption} {each.signature}")
        changed = max(changed, each.changed_ns)
    return SourceFile(image_id, image.path, image.signature, caption, changed, tuple([each.path for each in captions]))


def _collision(name: str, others: list[str]) -> Problem:
    most = "one" if len(others) == 1 else "all but one"
    remedy = f"rename {most} of them, or leave it out with inputs.exclude in imagemill.yaml: the id is the name without extension"
    return _refusal(name, "id_collision", f"the same id as {', '.join(others)}", remedy)


def _refusal(name: str, reason: str, detail: str, remedy: str) -> Problem:
    return Problem(_printable(name), SOURCE_ASSET, "refused", reason, detail, remedy)


def _printable(name: str) -> str:
    """Return a file name as problems show it."""
    # Names that are not UTF-8 arrive as lone surrogates, which SQLite cannot store; a line break would split a summary.
    visible = "".join(repr(c)[1:-1] if unicodedata.category(c) == "Cc" else c for c in name)
    return visible.encode("utf-8", "backslashreplace").decode()


if __name__ == "__main__":
    _list_for_parent(*sys.argv[1:])
