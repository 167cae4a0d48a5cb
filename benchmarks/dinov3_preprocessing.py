"""Time of DINOv3's preprocessing of photographs of 12 megapixels, on one core, and the difference of its fast form.

    one resize   what transformers' processor does: all pixels to floats, then one antialiased resize
    exact        the product's default: the same bits, from blocks of rows
    fast         `preprocessing: fast`: resized as whole grey levels

With `--photos FOLDER`, the difference is also measured on these files: in grey levels, and as the cosine of the vectors of the
preview model.

Goals: `exact` takes at most 0.7 of one resize, `fast` at most 0.18.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch.nn.functional import interpolate

from imagemill.domain.embedding_specs import DINOV3
from imagemill.domain.encoder_settings import DinoV3Settings
from imagemill.encoders.dinov3 import DinoV3Encoder
from imagemill.formats.images import open_rgb

EXACT_GOAL, FAST_GOAL = 0.7, 0.18
HEIGHT, WIDTH = 3000, 4000


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--photos", type=Path, help="folder of photographs")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with TemporaryDirectory() as folder:
        exact, fast = _encoder("exact", Path(folder)), _encoder("fast", Path(folder))
        ways: dict[str, Callable[[np.ndarray], object]] = {
            "one resize": lambda pixels: _one_resize(exact, pixels),
            "exact": exact.prepare,
            "fast": fast.prepare,
        }
        pixels = np.random.default_rng(1).integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8)
        seconds = {name: [] for name in ways}  # type: dict[str, list[float]]
        for _ in range(arguments.rounds):
            for name, way in ways.items():
                began = time.process_time()
                way(pixels)
                seconds[name].append(time.process_time() - began)
        usual = {name: median(taken) for name, taken in seconds.items()}
        ratios = {name: taken / usual["one resize"] for name, taken in usual.items()}
        print(f"{WIDTH}x{HEIGHT}, one core, median of {arguments.rounds} rounds")
        for name, taken in usual.items():
            print(f"{name:<12}{1000 * taken:>8.1f} ms{ratios[name]:>8.2f}")
        if arguments.photos:
            _compare(exact, fast, arguments.photos)
    print(f"goals: exact at most {EXACT_GOAL}, fast at most {FAST_GOAL}")
    return 0 if ratios["exact"] <= EXACT_GOAL and ratios["fast"] <= FAST_GOAL else 1


def _encoder(preprocessing: str, folder: Path) -> DinoV3Encoder:
    settings = DinoV3Settings(device="cpu", preprocessing=preprocessing)  # type: ignore[arg-type]
    return DinoV3Encoder.load(settings, spec=DINOV3.requested(settings), threads=1, preview_root=folder)


def _one_resize(encoder: DinoV3Encoder, pixels: np.ndarray) -> torch.Tensor:
    host = encoder._host
    values = torch.from_numpy(pixels).permute(2, 0, 1).to(torch.float32, memory_format=torch.contiguous_format)
    resized = interpolate(
        values.mul_(host.scale)[None], host.size, mode="bilinear", align_corners=False, antialias=True
    )
    return (resized[0] - host.mean) / host.std


def _compare(exact: DinoV3Encoder, fast: DinoV3Encoder, folder: Path) -> None:
    levels, cosines = [], []
    for path in sorted(folder.iterdir()):
        pixels = open_rgb(path)
        one, other = exact.prepare(pixels), fast.prepare(pixels)
        levels.append(((one.payload - other.payload) * exact._host.std * 255).abs())
        [a], [b] = exact.encode([one]), fast.encode([other])
        cosines.append(float(a @ b / np.linalg.norm(a) / np.linalg.norm(b)))
    mean, most = float(torch.stack(levels).mean()), float(torch.stack(levels).max())
    print(
        f"{len(levels)} photographs: grey levels mean {mean:.3f}, most {most:.3f}; smallest cosine {min(cosines):.6f}"
    )


if __name__ == "__main__":
    sys.exit(main())
