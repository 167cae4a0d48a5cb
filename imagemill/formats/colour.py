"""Colours: the description of an image file, whether converting to sRGB changes its pixels, and the conversion.

    file ──read_description──> ICC profile or code points ──judge──> Colour ──to_srgb──> pixels as a colour-managed viewer shows
                                                                                          them on an sRGB screen

Code points are parsed in formats/cicp.py. Files are opened, oriented and composited in formats/images.py.

Reference: ICC.1:2022; LittleCMS 2.19.
Spec: docs/spec/stage2.md#colour
"""

import io
import threading
import unicodedata
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, BinaryIO, Final, Generic, NamedTuple, TypeVar

import numpy as np
from PIL import Image, ImageCms

from imagemill.domain.inputs import BAD_PROFILE, HDR_TRANSFER, IS_SRGB, NO_DESCRIPTION, converts
from imagemill.formats.cicp import CodePoints, heif_code_points, icc_profile, png_code_points
from imagemill.fs.fingerprints import fingerprint

T = TypeVar("T")

# Larger profiles are not used.
MAX_PROFILE_BYTES = 4 * 1024 * 1024

# A name of a profile is a label: longer ones are shortened.
_MOST_NAME = 80

# Transforms and verdicts that are kept.
_CACHED = 64

_INTENT: Final = ImageCms.Intent.RELATIVE_COLORIMETRIC
_FLAGS: Final = ImageCms.Flags.BLACKPOINTCOMPENSATION

# Classes of profiles that describe the colours of a picture: input, display, output, colour space.
_CLASSES: Final = {"scnr", "mntr", "prtr", "spac"}

# Modes after `as_samples`, by the space of a profile that describes them. Grey samples may have an RGB profile.
_MODES: Final = {
    "RGB": {"RGB", "RGBA", "L", "LA", "I;16"},
    "GRAY": {"L", "LA", "I;16"},
    "CMYK": {"CMYK"},
}

# Largest difference from sRGB, in levels of 255, of a description that counts as sRGB.
_SAME = 1


class Colour(NamedTuple):
    """The colours of a picture.

    Attributes:
        state: `none` without a description, `srgb`, `bad_profile`, `hdr_transfer`; else conversion changes pixels, and this is
            the fingerprint of the description.
        profile: name of the description for people; empty without one.
    """

    state: str = NO_DESCRIPTION
    profile: str = ""

    @property
    def converts(self) -> bool:
        """Whether conversion to sRGB changes pixels."""
        return converts(self.state)


class Description(NamedTuple):
    """A colour description as found in a file.

    Attributes:
        profile: bytes of an ICC profile; empty if it cannot be read.
        points: code points instead of a profile.
    """

    profile: bytes = b""
    points: CodePoints | None = None


def read_description(image: Image.Image, file: BinaryIO) -> Description | None:
    """Return the colour description of an opened image file, None if it has none.

    Args:
        image: as Pillow has opened it; pixels are not decoded.
        file: the same file. Its position changes.
    """
    if image.format == "PNG" and (points := png_code_points(file)):
        return Description(points=points)
    if "icc_profile" in image.info:
        # Pillow's PNG reader stores None if the profile cannot be unpacked.
        return Description(image.info["icc_profile"] or b"")
    if image.format in {"AVIF", "HEIF"} and (points := heif_code_points(file)):
        return Description(points=points)
    return None


def judge(description: Description | None, mode: str) -> Colour:
    """Return the colours of a picture.

    Args:
        description: its description, if any.
        mode: Pillow's mode of the opened image.
    """
    if description is None:
        return Colour()
    if points := description.points:
        if points.is_hdr and points.valid:
            return Colour(HDR_TRANSFER, points.name)
        if not points.is_known:
            return Colour(BAD_PROFILE, points.name)
    elif not 0 < len(description.profile) <= MAX_PROFILE_BYTES:
        return Colour(BAD_PROFILE, "unreadable profile" if not description.profile else "profile over 4 MiB")
    key, samples, box = _key(description), _samples_mode(mode), points.box if points else ""
    return _verdicts.get((key, box, samples), lambda: _verdict(description, key, samples))


def to_srgb(image: Image.Image, description: Description) -> Image.Image:
    """Convert a loaded image that `judge` found to need it.

    Args:
        image: of a mode that `as_samples` returns. Its pixels may be overwritten.
        description: of its colours.

    Returns:
        RGB, or RGBA if the image has alpha, which is copied.
    """
    alpha = None
    if image.mode == "LA":
        image, alpha = image.getchannel("L"), image.getchannel("A")
    space, key = _header(_profile(description)).xcolor_space.strip(), _key(description)
    if space == "RGB" and image.mode not in {"RGB", "RGBA"}:
        # As R = G = B.
        image = (_high_bytes(image) if image.mode == "I;16" else image).convert("RGB")
    mode = image.mode
    transform = _transforms.get((key, mode), lambda: _transform(_profile(description), mode))
    if mode in {"RGB", "RGBA"}:
        transform.apply_in_place(image)
    else:
        image = transform.apply(image)
    if alpha is not None:
        image.putalpha(alpha)
    return image


def as_samples(image: Image.Image) -> Image.Image:
    """Return a loaded image in a mode whose samples a profile can describe.

    P, PA and 1 become RGB, RGBA or L; the colour of tRNS becomes alpha; I;16B becomes I;16. Other modes stay as they are.
    """
    mode = _samples_mode(image.mode)
    if image.has_transparency_data:
        mode = {"RGB": "RGBA", "L": "LA"}.get(mode, mode)
    if mode == "I;16" and image.mode != mode:
        return Image.frombytes(mode, image.size, np.asarray(image).astype("<u2").tobytes())
    return image if image.mode == mode else image.convert(mode)


def _high_bytes(image: Image.Image) -> Image.Image:
    return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))


def _samples_mode(mode: str) -> str:
    """Return the mode that `as_samples` makes of a mode, apart from the alpha of tRNS."""
    if mode.startswith("I;16"):
        return "I;16"
    return {"1": "L", "P": "RGB", "PA": "RGBA", "RGBX": "RGB", "RGBa": "RGBA", "La": "LA"}.get(mode, mode)


# ---- transforms


class _Cache(Generic[T]):
    """The most recently used values by key, for several threads. A value that two threads need at once may be made twice."""

    def __init__(self, most: int) -> None:
        self._most, self._lock = most, threading.Lock()
        self._values: OrderedDict[Hashable, T] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key]
        value = make()
        with self._lock:
            self._values[key] = value
            while len(self._values) > self._most:
                self._values.popitem(last=False)
        return value


_verdicts: _Cache[Colour] = _Cache(_CACHED * 16)  # some hundred bytes each
_transforms: _Cache[ImageCms.ImageCmsTransform] = _Cache(_CACHED)


def _key(description: Description) -> str:
    data = description.points.key.encode() if description.points else description.profile
    return fingerprint(data)


def _profile(description: Description) -> ImageCms.ImageCmsProfile:
    data = icc_profile(description.points) if description.points else description.profile
    return ImageCms.ImageCmsProfile(io.BytesIO(data))


def _header(profile: ImageCms.ImageCmsProfile) -> Any:
    """Return LittleCMS's view of a profile, whose attributes Pillow does not declare."""
    return profile.profile


def _transform(profile: ImageCms.ImageCmsProfile, mode: str) -> ImageCms.ImageCmsTransform:
    target = "RGBA" if mode == "RGBA" else "RGB"
    return ImageCms.ImageCmsTransform(profile, _srgb(), mode, target, _INTENT, flags=_FLAGS)


def _srgb() -> ImageCms.ImageCmsProfile:
    return ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB"))


def _verdict(description: Description, key: str, mode: str) -> Colour:
    try:
        profile = _profile(description)
        name = description.points.name if description.points else _name(profile)
        space = _header(profile).xcolor_space.strip()
        if _header(profile).device_class not in _CLASSES or mode not in _MODES.get(space, ()):
            return Colour(BAD_PROFILE, name)
        same = space != "CMYK" and _is_srgb(profile, space)
        if space == "CMYK":
            _transform(profile, "CMYK")  # fails here rather than later
        return Colour(IS_SRGB if same else key, name)
    except (OSError, ImageCms.PyCMSError, ValueError, TypeError, UnicodeDecodeError):
        return Colour(BAD_PROFILE, "unreadable profile")


def _is_srgb(profile: ImageCms.ImageCmsProfile, space: str) -> bool:
    """Return whether a profile changes no value by more than one level."""
    if space == "GRAY":
        levels = np.arange(256, dtype=np.uint8)
        given, expected = Image.fromarray(levels[None]), np.repeat(levels[None, :, None], 3, axis=2)
        made = np.asarray(_transform(profile, "L").apply(given))
    else:
        steps = np.linspace(0, 255, 17).round().astype(np.uint8)
        expected = np.stack(np.meshgrid(steps, steps, steps, indexing="ij"), axis=-1).reshape(1, -1, 3)
        made = np.asarray(_transform(profile, "RGB").apply(Image.fromarray(expected)))
    return bool(np.abs(made.astype(np.int16) - expected).max() <= _SAME)


def _name(profile: ImageCms.ImageCmsProfile) -> str:
    """Return the description in a profile as one printable line."""
    text = _header(profile).profile_description or ""
    visible = "".join(" " if unicodedata.category(c)[0] in "CZ" else c for c in text)
    line = " ".join(visible.encode("utf-8", "replace").decode().split())
    return line[:_MOST_NAME] or "unnamed profile"
