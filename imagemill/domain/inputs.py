"""Input settings of a data root: the colours of pixels, and the formats of image files.

Where the values of a data root are recorded is in store/inputs.py.

Spec: docs/spec/stage2.md#colour, docs/spec/stage2.md#inputs, docs/spec/conventions.md#old-data-roots
"""

from typing import Final, Literal, get_args

import msgspec

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


class InputSettings(msgspec.Struct, frozen=True):
    """Settings of the inputs of a data root.

    Attributes:
        color: `srgb` converts pixels whose colours are described otherwise to sRGB; `ignore` uses them as they are stored.
        formats: extensions, in lower case and without the dot, that make a file an image.
    """

    color: ColorSetting = SRGB
    formats: tuple[Format, ...] = FORMATS


NEW_INPUTS: Final = InputSettings()
"""Values of new data roots."""

OLD_INPUTS: Final = InputSettings(IGNORE, ("jpg", "jpeg", "png", "webp"))
"""Values of data roots that are older than these settings."""


def converts(state: str) -> bool:
    """Return whether conversion to sRGB changes the pixels of a picture in this state."""
    return state not in UNCHANGED and state != HDR_TRANSFER


def formats_text(formats: tuple[str, ...]) -> str:
    """Return extensions as text: `jpg, jpeg, png or webp`."""
    *first, last = formats
    return f"{', '.join(first)} or {last}" if first else last
