"""Writes the HEIC samples of this folder. Made once, because the encoder is not a dependency of imagemill.

    python -m venv /tmp/heif && /tmp/heif/bin/pip install pillow-heif==1.8.1 numpy
    PYTHONPATH=. /tmp/heif/bin/python tests/data/heic/make_samples.py

Each sample is a gradient of 96 x 64 pixels. Pixel values are not checked against the gradient but against another decoding of the
same file, so that the version of the encoder does not matter.
"""

from pathlib import Path

import numpy as np
import pillow_heif
from PIL import Image

from imagemill.formats.cicp import CodePoints, icc_profile

HERE = Path(__file__).parent
P3, BT709, SRGB_CURVE, PQ = 12, 1, 13, 16


def gradient() -> np.ndarray:
    """Return uint8 (64, 96, 3): red grows to the right, green downwards, blue diagonally."""
    y, x = np.mgrid[0:64, 0:96]
    return np.stack([x * 255 // 95, y * 255 // 63, (x + y) * 255 // 158], axis=2).astype(np.uint8)


def save(name: str, image: Image.Image, **options: object) -> None:
    """Write one file."""
    pillow_heif.from_pillow(image).save(HERE / name, quality=90, **options)


def main() -> None:
    """Write all files."""
    picture = Image.fromarray(gradient())
    nclx = {"matrix_coefficients": 6, "full_range_flag": 1}
    save("srgb.heic", picture, color_primaries=BT709, transfer_characteristics=SRGB_CURVE, **nclx)
    save("p3_nclx.heic", picture, color_primaries=P3, transfer_characteristics=SRGB_CURVE, **nclx)
    save("pq.heic", picture, color_primaries=9, transfer_characteristics=PQ, **nclx)
    save("p3_icc.heic", picture, icc_profile=icc_profile(CodePoints(P3, SRGB_CURVE, "nclx")))
    pillow_heif.register_heif_opener()
    exif = Image.Exif()
    exif[0x0112] = 6
    picture.save(HERE / "turned.heic", quality=90, exif=exif.tobytes())
    several = pillow_heif.HeifFile()
    several.add_from_pillow(Image.fromarray(255 - gradient()))
    several.add_from_pillow(picture)
    several.save(HERE / "second_is_primary.heic", quality=90, primary_index=1)
    alpha = Image.fromarray(np.dstack([gradient(), np.full((64, 96), 128, np.uint8)]))
    save("alpha.heic", alpha, color_primaries=P3, transfer_characteristics=SRGB_CURVE, **nclx)


if __name__ == "__main__":
    main()
