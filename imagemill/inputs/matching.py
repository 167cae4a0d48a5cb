"""Which image a caption file belongs to, by names alone.

Spec: docs/spec/stage2.md#caption-sources
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from itertools import chain, groupby
from typing import NamedTuple

from imagemill.domain.ids import split_suffix, stem_of
from imagemill.domain.inputs import Sidecars, composed, folded


class CaptionExtension(NamedTuple):
    """The extension of a caption file.

    Attributes:
        rank: its position in `captions.sidecars`, from 0.
        plain: whether it is in lower case.
    """

    rank: int
    plain: bool


def caption_extension(suffix: str, sidecars: Sidecars) -> CaptionExtension | None:
    """Return the extension of a caption file whose name ends in `suffix`; None if files with that suffix are no captions."""
    written = suffix[1:]
    extension = written if sidecars.exact else written.lower()
    if extension not in sidecars.extensions:
        return None
    return CaptionExtension(sidecars.extensions.index(extension), written == extension)


class Matched(NamedTuple):
    """Caption files by the image that they belong to.

    Attributes:
        only: image id → name, of images with one file, which is named after the id: nearly all.
        several: names by image id, of all others with captions, in order of preference: `{image_id}.{extension}` by the order of
            the extensions, then `{file name}.{extension}`.
        orphans: names of those that belong to no image.
        shared: name → ids of the images that it could belong to.
        doubles: name → the name that is read in its place.
        ties: name → a name that belongs to the image just as well, so that neither is read.
    """

    only: dict[str, str]
    several: dict[str, tuple[str, ...]]
    orphans: list[str]
    shared: dict[str, list[str]]
    doubles: dict[str, str]
    ties: dict[str, str]

    def captions_of(self, image_id: str) -> tuple[str, ...]:
        """Return the names of the caption files of an image, the preferred one first."""
        name = self.only.get(image_id)
        return self.several.get(image_id, ()) if name is None else (name,)

    @property
    def images(self) -> Iterator[str]:
        """The ids of the images with captions."""
        return chain(self.only, self.several)


def match_texts(
    names: Iterable[str],
    extension_of: Callable[[str], CaptionExtension],
    images: Mapping[str, list[str]],
    *,
    exact: bool = False,
) -> Matched:
    """Assign caption files to images.

    A name is compared with the images' file names, then with their ids, first letter by letter, then as Unicode composes it
    (NFC), then regardless of case; only where exactly one image matches.

    Args:
        names: those of the caption files, in order.
        extension_of: returns the extension of a caption file whose name ends in a suffix, which begins with a dot.
        images: file names, which have extensions, by image id; of all images, also of refused ones.
        exact: compare with ids, letter by letter, only.
    """
    found: dict[str, list[_Found]] = {}
    result = Matched({}, {}, [], {}, {}, {})
    only, index = result.only, _Index(images)

    def named_after(image_id: str, name: str) -> _Found:
        rank, plain = extension_of(name[len(image_id) :])
        return _Found(False, rank, not plain, name)

    def add(image_id: str, text: _Found) -> None:
        first = only.pop(image_id, None)
        found.setdefault(image_id, [named_after(image_id, first)] if first else []).append(text)

    for name in names:
        base, suffix = split_suffix(name)
        # An image file's name contains a dot.
        if base in images and (exact or "." not in base or base not in index.file_names):
            if base in only or base in found:
                add(base, named_after(base, name))
            else:
                only[base] = name
            continue
        rank, plain = extension_of(suffix)
        match = _Match([]) if exact else index.find(base)
        if not match.ids:
            result.orphans.append(name)
        elif len(match.ids) > 1:
            result.shared[name] = match.ids
        else:
            add(match.ids[0], _Found(match.of_file, rank, 2 * match.level + (not plain), name))
    for image_id, texts in found.items():
        if chosen := tuple(_chosen(texts, result)):
            result.several[image_id] = chosen
    return result


class _Found(NamedTuple):
    """A caption file of an image. It is read before those that are greater, which are compared field by field."""

    of_file: bool
    rank: int
    distance: int
    name: str


def _chosen(texts: Iterable[_Found], result: Matched) -> Iterator[str]:
    """Yield the name of the closest of the files that differ in nothing else, and note the others; of two equally close, none."""
    for _, group in groupby(sorted(texts), key=lambda text: (text.of_file, text.rank)):
        first, *others = group
        tied = [text.name for text in others if text.distance == first.distance]
        if tied:
            result.ties[first.name] = tied[0]
            result.ties.update((text.name, first.name) for text in others)
        else:
            result.doubles.update((text.name, first.name) for text in others)
            yield first.name


class _Match(NamedTuple):
    """Ids of images with a name; whether it is a file's name; and how far it is from letter by letter."""

    ids: list[str]
    of_file: bool = False
    level: int = 0


class _Index:
    """Images by file name and id, as they are and in the two other forms, made for the first name that no image has."""

    def __init__(self, images: Mapping[str, list[str]]) -> None:
        self._images = images
        self._forms: dict[Callable[[str], str], tuple[dict[str, set[str]], dict[str, set[str]]]] = {}

    @cached_property
    def file_names(self) -> dict[str, str]:
        return {name: image_id for image_id, names in self._images.items() for name in names}

    def find(self, base: str) -> _Match:
        """Return the images of this file name, or with a name or id that is equal in another form."""
        if base in self.file_names:
            return _Match([self.file_names[base]], of_file=True)
        for level, form in enumerate((composed, folded), 1):
            by_file, by_id = self._in(form)
            wanted = form(base)
            if ids := by_file.get(wanted):
                return _Match(sorted(ids), True, level)
            if ids := by_id.get(wanted):
                return _Match(sorted(ids), False, level)
        return _Match([])

    def _in(self, form: Callable[[str], str]) -> tuple[dict[str, set[str]], dict[str, set[str]]]:
        if form not in self._forms:
            by_file, by_id = self._forms[form] = defaultdict(set), defaultdict(set)
            for image_id, names in self._images.items():
                by_id[form(image_id)].add(image_id)
                for name in names:
                    by_file[form(name)].add(image_id)
        return self._forms[form]


class PathIndex:
    """Images by path, for the rows of metadata files.

    Args:
        paths: of all images, below the folder of images.
    """

    def __init__(self, paths: Iterable[str]) -> None:
        self._paths = frozenset(paths)
        self._forms: dict[Callable[[str], str], dict[str, list[str]]] = {}

    def find(self, path: str) -> list[str]:
        """Return the images of a path: of this path, else with this stem, then in the other two forms."""
        if path in self._paths:
            return [path]
        for form in (str, composed, folded):
            index = self._in(form)
            wanted = form(path)
            for key in (wanted, f"{stem_of(wanted)}{_STEM}", f"{wanted}{_STEM}"):
                if found := index.get(key):
                    return found
        return []

    def _in(self, form: Callable[[str], str]) -> dict[str, list[str]]:
        if form not in self._forms:
            index = self._forms[form] = defaultdict(list)
            for path in self._paths:
                changed = form(path)
                index[changed].append(path)
                index[f"{stem_of(changed)}{_STEM}"].append(path)
        return self._forms[form]


# Marks a path without its extension in an index of paths.
_STEM = "\0"
