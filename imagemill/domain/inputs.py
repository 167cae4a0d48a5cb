"""Input settings of a data root: the colours of pixels, which files are images, and which texts are captions.

Where the values of a data root are recorded is in store/inputs.py. Files are matched and sorted in inputs/.

Spec: docs/spec/stage2.md#colour, docs/spec/stage2.md#inputs, docs/spec/conventions.md#old-data-roots
"""

import re
import unicodedata
from collections.abc import Iterable
from typing import Final, Literal, get_args

import msgspec

from imagemill.domain.shares import ImageShare, parse_share

ColorSetting = Literal["srgb", "ignore"]
SRGB: Final = "srgb"
IGNORE: Final = "ignore"

# Colour states of a picture. A picture that conversion changes has the fingerprint of its description instead.
NO_DESCRIPTION: Final = "none"
IS_SRGB: Final = "srgb"
BAD_PROFILE: Final = "bad_profile"
HDR_TRANSFER: Final = "hdr_transfer"
UNCHANGED: Final = frozenset({NO_DESCRIPTION, IS_SRGB, BAD_PROFILE})

Format = Literal[
    "jpg", "jpeg", "jpe", "jfif", "png", "webp", "bmp", "gif", "tif", "tiff", "avif", "heic", "heif", "hif"
]
FORMATS: Final[tuple[Format, ...]] = get_args(Format)

# Those that need another package, and the extra of imagemill that installs it.
HEIF_FORMATS: Final = frozenset({"heic", "heif", "hif"})
HEIF_EXTRA: Final = "heic"


Lines = Literal["join", "first", "each"]
JOIN: Final = "join"
FIRST: Final = "first"
EACH: Final = "each"

Repeats = Literal["off", "kohya"]
KOHYA: Final = "kohya"

# Values of `captions.metadata` that name no file.
AUTO: Final = "auto"
OFF: Final = "off"


class Sidecars(msgspec.Struct, frozen=True):
    """Which text files beside an image are captions.

    Attributes:
        extensions: in lower case and without the dot, in order of preference.
        exact: only `{image_id}.{extension}`, letter by letter, as before this setting existed.
    """

    extensions: tuple[str, ...] = ("txt", "caption")
    exact: bool = False

    def __str__(self) -> str:
        return (", ".join(self.extensions) or "none") + (" (exact names)" if self.exact else "")


class InputSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the inputs of a data root.

    Attributes:
        color: `srgb` converts pixels whose colours are described otherwise to sRGB; `ignore` uses them as they are stored.
        formats: extensions, in lower case and without the dot, that make a file an image.
        recursive: whether sub-folders are read.
        companions: whether masks and control images beside an image are left out (`x-masklabel.png`, `x-condlabel.png`).
        exclude: patterns of paths that are ignored, as in `fnmatch.fnmatchcase`: `*` also matches `/`.
        sidecars: which text files are captions.
        lines: what a text of several lines gives: all of them as one line, the first, or each as a caption.
        encoding: of texts that are not Unicode; empty: such texts are refused.
        metadata: `auto`, `off`, or the path of a metadata file: below the folder of images, or absolute.
        file_column: column of a metadata file with the path of an image; empty: found by name.
        text_column: column with its caption; empty: found by name.
        strip_prefix: what paths in metadata files begin with, in front of the path below the folder of images.
        folder: whether the name of a folder is the caption of images without another one.
        repeats: `kohya` takes how often a sample is drawn from folders named `10_words`; `off` draws each once.
        share: `I/N`, the share of the images that the data root takes (domain/shares.py); empty: all.
    """

    color: ColorSetting = SRGB
    formats: tuple[Format, ...] = FORMATS
    recursive: bool = True
    companions: bool = True
    exclude: tuple[str, ...] = ()
    sidecars: Sidecars = Sidecars()
    lines: Lines = JOIN
    encoding: str = ""
    metadata: str = AUTO
    file_column: str = ""
    text_column: str = ""
    strip_prefix: str = ""
    folder: bool = False
    repeats: Repeats = OFF
    share: str = ""

    @property
    def own_share(self) -> ImageShare | None:
        """The share as a value; None: all images."""
        return parse_share(self.share) if self.share else None


NEW_INPUTS: Final = InputSettings()
"""Values of new data roots."""

OLD_INPUTS: Final = InputSettings(
    color=IGNORE,
    formats=("jpg", "jpeg", "png", "webp"),
    recursive=False,
    companions=False,
    sidecars=Sidecars(("txt",), exact=True),
    metadata=OFF,
)
"""Values of data roots that are older than these settings."""


def composed(text: str) -> str:
    """Return the text in Unicode's composed form (NFC): macOS may store names decomposed."""
    return text if text.isascii() else unicodedata.normalize("NFC", text)


def folded(text: str) -> str:
    """Return the text as it compares regardless of case and of Unicode form."""
    return (
        text.lower() if text.isascii() else unicodedata.normalize("NFC", unicodedata.normalize("NFC", text).casefold())
    )


# Most repeats of a folder. A number with more digits is part of the name, such as a date.
MAX_REPEATS: Final = 99_999
_KOHYA_FOLDER: Final = re.compile(r"([0-9]{1,5})_(.*)", re.DOTALL).fullmatch


def folder_repeats(path: str) -> int | None:
    """Return the repeats of an image by kohya's rule: the number in front of the name of its folder at the top level.

    >>> folder_repeats("10_sks dog/a.jpg"), folder_repeats("dogs/10_sks/a.jpg"), folder_repeats("10_a.jpg")
    (10, None, None)
    """
    folder, slash, _ = path.partition("/")
    found = _KOHYA_FOLDER(folder) if slash else None
    return int(found[1]) if found and int(found[1]) else None


def folder_words(path: str) -> str:
    """Return the caption that the innermost folder of an image gives: its name, without the number of kohya's rule.

    >>> folder_words("10_sks dog/a.jpg"), folder_words("dogs/brown/a.jpg"), folder_words("a.jpg")
    ('sks dog', 'brown', '')
    """
    name = path.rpartition("/")[0].rpartition("/")[2]
    found = _KOHYA_FOLDER(name)
    return normalise_caption(found[2] if found else name)


def normalise_caption(text: str) -> str:
    """Replace every run of white space, including line breaks, by one space, and strip both ends."""
    return " ".join(text.split())


def distinct_captions(texts: Iterable[str]) -> tuple[str, ...]:
    """Return captions with white space normalised, each once, without blank ones."""
    return tuple(dict.fromkeys(normal for text in texts if (normal := normalise_caption(text))))


def setting_text(value: object) -> str:
    """Return the value of a setting for people."""
    if isinstance(value, bool):
        return str(value).lower()
    return (", ".join(value) if isinstance(value, tuple) else str(value)) or "none"


def converts(state: str) -> bool:
    """Return whether conversion to sRGB changes the pixels of a picture in this state."""
    return state not in UNCHANGED and state != HDR_TRANSFER


def formats_text(formats: tuple[str, ...]) -> str:
    """Return extensions as text: `jpg, jpeg, png or webp`."""
    *first, last = formats
    return f"{', '.join(first)} or {last}" if first else last
