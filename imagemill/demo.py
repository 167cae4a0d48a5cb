"""Sample photographs for a first run: real ones that ship inside scikit-image and scikit-learn, and crops of them.

    data/
    ├─ CREDITS.md                     title, author and licence of every sample, as the packages state them
    └─ approved/
       ├─ chelsea.png  chelsea.txt    a photograph byte for byte, and our caption
       ├─ rocket_tall.jpg  …          a crop, so that all seven buckets occur
       ├─ coffee_turned.jpg  …        stored on its side, upright by its EXIF orientation
       └─ not_a_photograph.jpg        text: one file that is no image

Belongs here: which samples, their captions, their credits, putting them into a folder that is empty or holds only them.
Belongs elsewhere: what becomes of a folder of images (pipeline/stage2/scan.py), a folder of the user's own (Makefile).
Source: issue 3, "Two commands"; CONTRACTS, first table (`approved/` may be a symlink: then it is only read).
"""

import argparse
import importlib.resources
import io
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from PIL import Image

from imagemill.domain.ids import image_id_of
from imagemill.domain.layout import DataRoot
from imagemill.errors import ImagemillError, MissingInput, WrongUsage
from imagemill.fs.atomic import sweep_temporaries, write_bytes_atomic

CREDITS_NAME = "CREDITS.md"

_ORIENTATION_TAG = 0x0112
# "Row 0 is the right-hand side": a viewer turns the stored pixels by 90 degrees clockwise.
_STORED_LYING_LEFT = 6

_BROKEN_NAME = "not_a_photograph.jpg"
_BROKEN_TEXT = (
    "This file is text, whatever its name says. It stands among the sample photographs to show that\n"
    "one file that is no image stops nothing: imagemill reports it and does all the others.\n"
)


class ForeignFolder(WrongUsage):
    """The folder is not ours to write into: it is a symlink, or holds files that are no samples."""


@dataclass(frozen=True, slots=True)
class Credit:
    """One photograph's origin.

    Attributes:
        title: the photograph's name.
        author: who made it, as the package says.
        licence: the package's own words on the terms, whitespace runs as one space.
        source: file of the package that holds the photograph (`skimage/data/chelsea.png`).
        stated_in: file of the package that holds those words.
        files: names made from it, what was done in brackets.
    """

    title: str
    author: str
    licence: str
    source: str
    stated_in: str
    files: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Sample:
    """One file below `approved/`: the photograph whole, a `crop` (left, upper, right, lower in pixels), or `turned`."""

    name: str
    caption: str
    crop: tuple[int, int, int, int] | None = None
    turned: bool = False

    @property
    def description(self) -> str:
        change = "cropped" if self.crop else "turned, with an EXIF orientation" if self.turned else "unchanged"
        return f"{self.name} ({change})"


@dataclass(frozen=True, slots=True)
class _Photograph:
    """One file of an installed package, its credit, and the samples made from it."""

    source: str
    title: str
    author: str
    licence: str
    stated_in: str
    samples: tuple[_Sample, ...]

    @property
    def credit(self) -> Credit:
        made = tuple(sample.description for sample in self.samples)
        return Credit(self.title, self.author, self.licence, self.source, self.stated_in, made)


_SKIMAGE = "skimage/data/_fetchers.py"
_SKLEARN = "sklearn/datasets/images/README.txt"
# The README's words for both of its photographs; for the second it names the first one's author beside another's pages.
_SKLEARN_LICENCE = (
    "Released under a creative commons license. [1] Attribution: Some rights reserved by danielbuechele [2] "
    "Retrieved 21st August, 2011 from [3] by Robert Layton [1] https://creativecommons.org/licenses/by/2.0/ "
)

_PHOTOGRAPHS = (
    _Photograph(
        "skimage/data/astronaut.png",
        "The astronaut Eileen Collins",
        "NASA",
        "This image was downloaded from the NASA Great Images database <https://flic.kr/p/r9qvLn>`__. "
        "No known copyright restrictions, released into the public domain.",
        _SKIMAGE,
        (
            _Sample(
                "astronaut.png",
                "An astronaut in an orange space suit smiles before a flag, her helmet beside her, "
                "a model of the space shuttle behind.",
            ),
            _Sample(
                "astronaut_portrait.jpg",
                "Portrait of a smiling astronaut with short hair in an orange space suit with a round mission patch.",
                crop=(52, 0, 402, 512),
            ),
            _Sample(
                "astronaut_shuttle.jpg",
                "A white model of the space shuttle with its brown tank stands upright on a black base.",
                crop=(340, 0, 512, 328),
            ),
        ),
    ),
    _Photograph(
        "skimage/data/chelsea.png",
        "Chelsea the cat",
        "Stefan van der Walt",
        "No copyright restrictions. CC0 by the photographer (Stefan van der Walt).",
        _SKIMAGE,
        (_Sample("chelsea.png", "Close-up of a tabby cat with green eyes and a pink nose, looking past the camera."),),
    ),
    _Photograph(
        "skimage/data/coffee.png",
        "Coffee cup",
        "Rachel Michetti",
        "This photograph is courtesy of Pikolo Espresso Bar. [...] "
        "No copyright restrictions. CC0 by the photographer (Rachel Michetti).",
        _SKIMAGE,
        (
            _Sample(
                "coffee.png", "An espresso in a red cup with a white rim on a red saucer, a spoon beside it, on wood."
            ),
            _Sample(
                "coffee_turned.jpg",
                "A red espresso cup on its saucer on a wooden table, seen from above at a slant.",
                turned=True,
            ),
        ),
    ),
    _Photograph(
        "skimage/data/rocket.jpg",
        "Launch photo of DSCOVR on Falcon 9 by SpaceX",
        "SpaceX",
        "The image was captured by SpaceX and `released in the public domain "
        "<http://arstechnica.com/tech-policy/2015/03/elon-musk-puts-spacex-photos-into-the-public-domain/>`_.",
        _SKIMAGE,
        (
            _Sample("rocket.jpg", "A white rocket stands on its launch pad at dusk between four lattice towers."),
            _Sample(
                "rocket_tall.jpg",
                "A slender white rocket points into a dark blue evening sky, floodlights glowing at its foot.",
                crop=(194, 0, 450, 427),
            ),
        ),
    ),
    _Photograph(
        "skimage/data/hubble_deep_field.jpg",
        "Hubble eXtreme Deep Field",
        "NASA",
        "The image was captured by NASA and `may be freely used in the public domain "
        "<http://www.nasa.gov/audience/formedia/features/MP_Photo_Guidelines.html>`_.",
        _SKIMAGE,
        (
            _Sample("hubble_deep_field.jpg", "Thousands of small galaxies in many colours on the black of deep space."),
            _Sample(
                "hubble_wide.webp",
                "A wide strip of deep space scattered with orange, blue and white galaxies.",
                crop=(0, 150, 1000, 674),
            ),
        ),
    ),
    _Photograph(
        "skimage/data/retina.jpg",
        "Human retina",
        "Häggström, Mikael",
        "This file is made available under the Creative Commons CC0 1.0 Universal Public Domain Dedication.",
        _SKIMAGE,
        (
            _Sample(
                "retina.jpg",
                "The back of a human eye: an orange disc with branching blood vessels and a bright optic nerve.",
            ),
        ),
    ),
    _Photograph(
        "skimage/data/horse.png",
        "Black and white silhouette of a horse",
        "Andreas Preuss (marauder)",
        "No copyright restrictions. CC0 given by owner (Andreas Preuss (marauder)).",
        _SKIMAGE,
        (_Sample("horse.png", "Black silhouette of a horse standing in profile, facing right, on a white ground."),),
    ),
    _Photograph(
        "sklearn/datasets/images/china.jpg",
        "china.jpg",
        "danielbuechele",
        _SKLEARN_LICENCE + "[2] https://www.flickr.com/photos/danielbuechele/ "
        "[3] https://www.flickr.com/photos/danielbuechele/6061409035/sizes/z/in/photostream/",
        _SKLEARN,
        (
            _Sample("china.jpg", "A Chinese pagoda with tiled roofs rises above trees, a wide lake behind it."),
            _Sample(
                "china_wide.jpeg",
                "A four-storey pagoda with orange roofs over a hazy lake, dark trees at both sides.",
                crop=(0, 20, 640, 404),
            ),
        ),
    ),
    _Photograph(
        "sklearn/datasets/images/flower.jpg",
        "flower.jpg",
        "danielbuechele by the README's words, vultilion by its links",
        _SKLEARN_LICENCE + "[2] https://www.flickr.com/photos/vultilion/ "
        "[3] https://www.flickr.com/photos/vultilion/6056698931/sizes/z/in/photostream/",
        _SKLEARN,
        (_Sample("flower.jpg", "An orange dahlia in full bloom before dark green leaves out of focus."),),
    ),
)


def demo_credits() -> list[Credit]:
    """Title, author and licence of every sample photograph."""
    return [photograph.credit for photograph in _PHOTOGRAPHS]


def write_demo(approved: Path) -> list[Credit]:
    """Put the sample photographs into `approved`, and `CREDITS.md` beside that folder; what is there stays untouched.

    Raises:
        ForeignFolder: `approved` is a symlink, or holds anything but samples; nothing was written.
        MissingInput: the packages that hold the photographs are not installed; nothing was written.
    """
    _guard_folder(approved)
    # All is read before anything is written: a missing package leaves no half of the samples behind.
    missing = [(photograph.source, s) for photograph, s in _samples() if not (approved / s.name).exists()]
    originals = {source: _packaged_bytes(source) for source in dict.fromkeys(source for source, _ in missing)}
    approved.mkdir(parents=True, exist_ok=True)
    sweep_temporaries(approved)
    _write_absent(approved.parent / CREDITS_NAME, _credits_page().encode())
    # Captions come first: a sensor that looks in between finds no image without one.
    for _, sample in _samples():
        _write_absent(approved / _caption_name(sample), f"{sample.caption}\n".encode())
    for source, sample in missing:
        write_bytes_atomic(approved / sample.name, _sample_bytes(originals[source], sample))
    _write_absent(approved / _BROKEN_NAME, _BROKEN_TEXT.encode())
    return demo_credits()


def _write_absent(path: Path, data: bytes) -> None:
    if not path.exists():
        write_bytes_atomic(path, data)


def _samples() -> Iterator[tuple[_Photograph, _Sample]]:
    return ((photograph, sample) for photograph in _PHOTOGRAPHS for sample in photograph.samples)


def _caption_name(sample: _Sample) -> str:
    return f"{image_id_of(sample.name)}.txt"


def _own_names() -> set[str]:
    return {_BROKEN_NAME} | {name for _, sample in _samples() for name in (sample.name, _caption_name(sample))}


def _guard_folder(approved: Path) -> None:
    why = None
    if approved.is_symlink():
        why = "it is a symlink to a folder of yours, which is only read"
    elif approved.exists():
        names = {entry.name for entry in os.scandir(approved) if not entry.name.startswith(".")}
        if foreign := sorted(names - _own_names()):
            why = f"it holds {foreign[0]!r}, which is no sample"
    if why:
        raise ForeignFolder(
            "no sample photographs are put into this folder",
            where=approved,
            why=why,
            do="nothing, to work with the files that are there; or choose another data root for the samples",
        )


def _packaged_bytes(source: str) -> bytes:
    package, *parts = PurePosixPath(source).parts
    try:
        return importlib.resources.files(package).joinpath(*parts).read_bytes()
    except (ModuleNotFoundError, FileNotFoundError) as error:
        raise MissingInput(
            f"sample photograph {source} is not installed",
            why="the photographs come inside the packages of the optional 'demo' extra",
            do="pip install 'imagemill[demo]'",
        ) from error


def _sample_bytes(data: bytes, sample: _Sample) -> bytes:
    if not (sample.crop or sample.turned):
        return data
    with Image.open(io.BytesIO(data)) as image:
        profile = image.info.get("icc_profile")
        changed = image.crop(sample.crop) if sample.crop else image.transpose(Image.Transpose.ROTATE_90)
    return _encode(changed, PurePosixPath(sample.name).suffix, profile, turned=sample.turned)


def _encode(image: Image.Image, suffix: str, profile: bytes | None, *, turned: bool) -> bytes:
    exif = Image.Exif()
    if turned:
        exif[_ORIENTATION_TAG] = _STORED_LYING_LEFT
    buffer = io.BytesIO()
    if suffix == ".webp":
        image.save(buffer, "WEBP", lossless=True, icc_profile=profile)
    else:
        image.save(buffer, "JPEG", quality=95, subsampling=0, icc_profile=profile, exif=exif)
    return buffer.getvalue()


def _credits_page() -> str:
    head = (
        "# Credits of the sample photographs\n\n"
        "They come from the installed packages scikit-image and scikit-learn. Author and licence are quoted from\n"
        "the file of the package that is named; the captions beside the images are imagemill's own.\n"
    )
    return head + "".join(
        f"\n## {credit.title}\n\n"
        f"- author: {credit.author}\n"
        f"- licence: {credit.licence}\n"
        f"- from: `{credit.source}`, terms stated in `{credit.stated_in}`\n"
        f"- here: {', '.join(credit.files)}\n"
        for credit in demo_credits()
    )


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m imagemill.demo [DATA_ROOT]`: the samples into its `approved/`, the credits to the terminal."""
    parser = argparse.ArgumentParser(prog="python -m imagemill.demo", description="Put sample photographs in place.")
    parser.add_argument("data_root", nargs="?", help="data root (default: $IMAGEMILL_DATA_ROOT, else data)")
    root = DataRoot.resolve(parser.parse_args(argv).data_root)
    try:
        photographs = write_demo(root.approved)
    except ForeignFolder as note:
        print(note)
        return 0
    except ImagemillError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"sample photographs in {root.approved}, in full in {root.path / CREDITS_NAME}:")
    for credit in photographs:
        print(f"  {credit.title}, by {credit.author}: {', '.join(credit.files)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
