"""Synthetic inputs: photographs of noise, which compress poorly and are never cached, and captions."""

import random
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from PIL import Image

MEMORY = Path("/dev/shm")


def noise_photos(folder: Path, count: int, *, width: int, height: int, smooth: int = 1) -> None:
    """Write JPEGs with captions, all different.

    Args:
        folder: folder of the files.
        count: number of images.
        smooth: pixels per grain of noise; 8 gives files of about the size of a camera's.
    """
    folder.mkdir(parents=True)
    for number in range(count):
        grains = (max(height // smooth, 1), max(width // smooth, 1), 3)
        pixels = np.random.default_rng(number).integers(0, 256, grains, dtype=np.uint8)
        image = Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC)
        image.save(folder / f"photo{number:06d}.jpg", quality=90)
        (folder / f"photo{number:06d}.txt").write_text(f"noise, number {number}", "utf-8")


@contextmanager
def scratch(*, in_memory_bytes: int = 0) -> Iterator[Path]:
    """Yield a temporary folder, in memory if that many bytes are free there, because a disk's CPU time is noisy."""
    roomy = in_memory_bytes and MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > in_memory_bytes
    with tempfile.TemporaryDirectory(prefix="imagemill-bench-", dir=MEMORY if roomy else None) as folder:
        yield Path(folder)


_SUBJECTS = ["a woman", "a man", "two children", "an old dog", "a black cat", "a red fishing boat", "a herd of horses"]
_DOINGS = ["standing", "walking slowly", "looking into the camera", "sleeping", "waiting", "playing", "resting"]
_PLACES = [
    "on a quiet beach",
    "in front of a white brick wall",
    "under a large tree",
    "in the snow",
    "at a market stall",
]
_DETAILS = [
    "soft evening light falls from the left",
    "the background is out of focus",
    "reflections are visible in the wet ground",
    "the colours are muted and warm",
    "a row of houses can be seen in the distance",
    "the sky is overcast",
    "the image is slightly grainy",
    "several people pass by without noticing",
    "a wooden fence leads the eye to the horizon",
]


def mixed_captions(count: int) -> list[str]:
    """Return captions from a few words, as people write them, to several sentences, as models do; some are equal."""
    choose = random.Random(0)
    captions = []
    for _ in range(count):
        if captions and choose.random() < 0.05:
            captions.append(choose.choice(captions))
            continue
        text = f"{choose.choice(_SUBJECTS)} {choose.choice(_DOINGS)} {choose.choice(_PLACES)}"
        for detail in choose.sample(_DETAILS, min(int(choose.expovariate(0.35)), 8)):
            text += f" and {detail}"
        captions.append(text)
    return captions
