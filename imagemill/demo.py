"""Sample photographs for a first run, taken from scikit-image and scikit-learn.

    data/
    ├─ CREDITS.md                     title, author and licence of every sample, as the packages state them
    └─ approved/
       ├─ chelsea.png  chelsea.txt    a photograph byte for byte, and our caption
       ├─ rocket_tall.jpg  …          a crop, so that all seven buckets occur
       ├─ coffee_turned.jpg  …        stored on its side, upright by its EXIF orientation
       └─ not_a_photograph.jpg        text: one file that is not an image

The samples with their captions and credits are listed in demo.yaml. They are written only into a folder that is empty or
holds nothing but samples. A folder of the user's own images is handled by the Makefile.
Spec: docs/spec/conventions.md#locations
"""

import argparse
import importlib.resources
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

import jinja2
import msgspec
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


class ForeignFolder(WrongUsage):
    """The folder is not ours to write into: it is a symlink, or holds files that are not samples."""


class Sample(msgspec.Struct, frozen=True):
    """One file below `approved/`: a whole photograph, a `crop` (left, upper, right, lower in pixels), or `turned`."""

    name: str
    caption: str
    crop: tuple[int, int, int, int] | None = None
    turned: bool = False

    @property
    def caption_name(self) -> str:
        """Name of the caption file."""
        return f"{image_id_of(self.name)}.txt"


class Photograph(msgspec.Struct, frozen=True):
    """One photograph and the samples made from it.

    Attributes:
        source: file of an installed package that contains the photograph (`skimage/data/chelsea.png`).
        title: the photograph's name.
        author: its author according to the package.
        licence: the terms in the package's own words, with each run of whitespace replaced by one space.
        stated_in: file of the package that contains those words.
    """

    source: str
    title: str
    author: str
    licence: str
    stated_in: str
    samples: tuple[Sample, ...]

    @property
    def files(self) -> list[str]:
        """Names of the samples, with the change in brackets."""
        return [
            f"{s.name} ({'cropped' if s.crop else 'turned, with an EXIF orientation' if s.turned else 'unchanged'})"
            for s in self.samples
        ]


PHOTOGRAPHS = msgspec.yaml.decode(Path(__file__).with_suffix(".yaml").read_bytes(), type=tuple[Photograph, ...])
_SAMPLES = [(photograph, sample) for photograph in PHOTOGRAPHS for sample in photograph.samples]


def write_demo(approved: Path) -> tuple[Photograph, ...]:
    """Write the sample photographs into `approved`, and `CREDITS.md` beside that folder; existing files stay untouched.

    Raises:
        ForeignFolder: if `approved` is a symlink, or holds anything but samples; nothing is written.
        MissingInput: if the packages with the photographs are not installed; nothing is written.
    """
    _guard_folder(approved)
    # Everything is read before anything is written, so that a missing package does not leave some of the samples behind.
    missing = [(photograph.source, s) for photograph, s in _SAMPLES if not (approved / s.name).exists()]
    originals = {source: _packaged_bytes(source) for source in dict.fromkeys(source for source, _ in missing)}
    approved.mkdir(parents=True, exist_ok=True)
    sweep_temporaries(approved)
    page = jinja2.Template(
        Path(__file__).with_name("demo_credits.md.jinja").read_text("utf-8"), keep_trailing_newline=True
    )
    _write_absent(approved.parent / CREDITS_NAME, page.render(photographs=PHOTOGRAPHS).encode())
    # Captions come first, so that a sensor that runs in between finds no image without one.
    for _, sample in _SAMPLES:
        _write_absent(approved / sample.caption_name, f"{sample.caption}\n".encode())
    for source, sample in missing:
        write_bytes_atomic(approved / sample.name, _sample_bytes(originals[source], sample))
    _write_absent(approved / _BROKEN_NAME, Path(__file__).with_name("demo_not_a_photograph.txt").read_bytes())
    return PHOTOGRAPHS


def _write_absent(path: Path, data: bytes) -> None:
    if not path.exists():
        write_bytes_atomic(path, data)


def _guard_folder(approved: Path) -> None:
    why = None
    if approved.is_symlink():
        why = "it is a symlink to a folder of yours, which is only read"
    elif approved.exists():
        names = {entry.name for entry in os.scandir(approved) if not entry.name.startswith(".")}
        own = {_BROKEN_NAME, *(name for _, sample in _SAMPLES for name in (sample.name, sample.caption_name))}
        if foreign := sorted(names - own):
            why = f"it contains {foreign[0]!r}, which is not a sample"
    if why:
        raise ForeignFolder(
            "sample photographs are not copied into this folder",
            where=approved,
            why=why,
            do="continue with the existing files, or choose another data root for the samples",
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


def _sample_bytes(data: bytes, sample: Sample) -> bytes:
    if not (sample.crop or sample.turned):
        return data
    with Image.open(io.BytesIO(data)) as image:
        profile = image.info.get("icc_profile")
        changed = image.crop(sample.crop) if sample.crop else image.transpose(Image.Transpose.ROTATE_90)
    exif = Image.Exif()
    if sample.turned:
        exif[_ORIENTATION_TAG] = _STORED_LYING_LEFT
    buffer = io.BytesIO()
    if sample.name.endswith(".webp"):
        changed.save(buffer, "WEBP", lossless=True, icc_profile=profile)
    else:
        changed.save(buffer, "JPEG", quality=95, subsampling=0, icc_profile=profile, exif=exif)
    return buffer.getvalue()


def main(argv: Sequence[str] | None = None) -> int:
    """Write the samples into `approved/` and print their credits: `python -m imagemill.demo [DATA_ROOT]`."""
    parser = argparse.ArgumentParser(prog="python -m imagemill.demo", description="Put sample photographs in place.")
    parser.add_argument("data_root", nargs="?", help="data root (default: $IMAGEMILL_DATA_ROOT, else data)")
    root = DataRoot.resolve(parser.parse_args(argv).data_root)
    try:
        photographs = write_demo(root.path / "approved")
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
