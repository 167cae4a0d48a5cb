"""Colours of converted photographs, and the time of decoding beside an earlier revision.

    accuracy     five photographs of scikit-image, stored in a wide space: mean CIEDE2000 to the sRGB original, with the stored
                 values and after conversion; a lossless file, and JPEG, WebP and AVIF of quality 90 beside the codec's own error
    throughput   pictures without a profile and with that of sRGB: `decode_rgb` of this checkout and of `--before`, in turn; the
                 arrays are compared, too
    conversion   of 12 megapixels in Display P3, beside decoding alone: time, and memory on top of it

Goals: lossless below 0.3 (ProPhoto 0.7); quality 90 within 0.5 of the codec's error (not ProPhoto); time within 3 % of the
earlier revision; no array differs; at most 1.5 times the decoded picture more memory.
"""

import argparse
import io
import resource
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np
from PIL import Image

from imagemill.formats.images import decode_rgb, read_facts
from tests.helpers.images import encoded
from tests.helpers.profiles import ADOBE, P3, ROMM, SRGB, in_space

BEFORE = "a9709ff"
PHOTOGRAPHS = ("astronaut.png", "chelsea.png", "coffee.png", "rocket.jpg", "motorcycle_left.png")
SPACES = {"Display P3": P3, "Adobe RGB": ADOBE, "ProPhoto": ROMM}
CODECS = {"PNG": {}, "JPEG": {"quality": 90}, "WEBP": {"quality": 90}, "AVIF": {"quality": 90}}
LOSSLESS_GOAL = {"Display P3": 0.3, "Adobe RGB": 0.3, "ProPhoto": 0.7}
CODEC_GOAL, TIME_GOAL, MEMORY_GOAL = 0.5, 1.03, 1.5


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--before", default=BEFORE, help="revision to compare with")
    parser.add_argument("--photos", type=Path, help="folder of more photographs whose arrays are compared")
    parser.add_argument("--photographs", type=int, default=len(PHOTOGRAPHS))
    parser.add_argument("--memory", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.memory:
        print(_peak(*arguments.memory))
        return 0
    reached = [
        *_accuracy(arguments.photographs),
        *_throughput(arguments.before, arguments.rounds, arguments.photos),
        _conversion(arguments.rounds),
    ]
    print(f"goals reached: {sum(reached)} of {len(reached)}")
    return 0 if all(reached) else 1


# ---- accuracy


def photographs(number: int) -> dict[str, Image.Image]:
    import skimage

    folder = Path(skimage.__file__).parent / "data"
    # Without their own profiles: the stored values are the sRGB original here.
    return {name: Image.fromarray(np.array(Image.open(folder / name).convert("RGB"))) for name in PHOTOGRAPHS[:number]}


def difference(one: np.ndarray, other: np.ndarray) -> float:
    """Return the mean CIEDE2000 of two sRGB pictures, uint8 (H, W, 3)."""
    from skimage.color import deltaE_ciede2000, rgb2lab

    return float(deltaE_ciede2000(rgb2lab(one), rgb2lab(other)).mean())


def _accuracy(number: int) -> Iterator[bool]:
    print(f"{'space':<12}{'codec':<7}{'photograph':<22}{'stored':>8}{'converted':>11}{'codec alone':>13}")
    originals = photographs(number)
    for space, profile in SPACES.items():
        for codec, options in CODECS.items():
            rows = [_errors(original, profile, codec, options) for original in originals.values()]
            for name, row in zip(originals, rows, strict=True):
                print(f"{space:<12}{codec:<7}{name:<22}{row[0]:>8.2f}{row[1]:>11.2f}{row[2]:>13.2f}")
            if codec == "PNG":
                yield max(converted for _, converted, _ in rows) < LOSSLESS_GOAL[space]
            elif space != "ProPhoto":
                yield max(converted - alone for _, converted, alone in rows) < CODEC_GOAL


def _errors(original: Image.Image, profile: bytes, codec: str, options: dict[str, int]) -> tuple[float, float, float]:
    plain = np.asarray(original)
    data = encoded(in_space(original, profile), codec, icc_profile=profile, **options)
    alone = decode_rgb(encoded(original, codec, **options), "photo")
    return (
        difference(plain, decode_rgb(data, "photo", "ignore")),
        difference(plain, decode_rgb(data, "photo", "srgb")),
        difference(plain, alone),
    )


# ---- throughput


def _throughput(revision: str, rounds: int, folder: Path | None) -> Iterator[bool]:
    before = _earlier(revision)
    if before is None:
        print(f"throughput: not measured, because this checkout has no revision {revision}")
        return
    side = np.random.default_rng(1).integers(0, 256, (750, 1000, 3), dtype=np.uint8)
    picture = Image.fromarray(side).resize((2000, 1500), Image.Resampling.BICUBIC)
    for codec, options in CODECS.items():
        if codec == "AVIF":  # not read by the earlier revision
            continue
        for name, profile in {"no profile": {}, "sRGB": {"icc_profile": SRGB}}.items():
            data = encoded(picture, codec, **options, **profile)
            same = bool((before(data, "photo") == decode_rgb(data, "photo")).all())
            ratio = _ratio(lambda: decode_rgb(data, "photo"), lambda: before(data, "photo"), rounds)  # noqa: B023
            print(
                f"decoding {codec:<5} {name:<11} {ratio:.3f} of the time of {revision}, arrays {'equal' if same else 'DIFFER'}"
            )
            yield same and ratio <= TIME_GOAL
    if folder:
        files = sorted(path for path in folder.rglob("*") if path.suffix in {".jpg", ".png", ".webp"})
        plain = [path for path in files if not read_facts(path).colour.converts]
        found = [(path.read_bytes(), path.name) for path in plain]
        equal = sum(np.array_equal(before(*given), decode_rgb(*given)) for given in found)
        print(
            f"{len(files)} photographs: {equal} of {len(plain)} that are in sRGB or have no profile have equal arrays"
        )
        yield equal == len(plain)


def _ratio(one: Callable[[], object], other: Callable[[], object], rounds: int) -> float:
    """Return the time of one call relative to the other: median over pairs, in turn."""
    pairs = []
    for _ in range(rounds):
        taken = []
        for call in (one, other, other, one):
            began = time.process_time()
            call()
            taken.append(time.process_time() - began)
        pairs.append((taken[0] + taken[3]) / (taken[1] + taken[2]))
    return median(pairs)


def _earlier(revision: str) -> Callable[[bytes, str], np.ndarray] | None:
    """Return `decode_rgb` of another revision; None without git or that revision."""
    command = ["git", "show", f"{revision}:imagemill/formats/images.py"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent)
    except (OSError, subprocess.CalledProcessError):
        return None
    module = types.ModuleType("earlier_images")
    sys.modules[module.__name__] = module
    exec(compile(done.stdout, "earlier_images.py", "exec"), module.__dict__)
    return module.decode_rgb


# ---- conversion


def _conversion(rounds: int) -> bool:
    data = _large()
    ratio = _ratio(
        lambda: decode_rgb(data, "photo", "srgb"), lambda: decode_rgb(data, "photo", "ignore"), max(1, rounds // 5)
    )
    began = time.process_time()
    decode_rgb(data, "photo", "ignore")
    alone = time.process_time() - began
    with TemporaryDirectory() as folder:
        file = Path(folder, "photo.jpg")
        file.write_bytes(data)
        peaks = {color: int(_child(color, file)) for color in ("ignore", "srgb")}
    more = (peaks["srgb"] - peaks["ignore"]) * 1024 / (4000 * 3000 * 3)
    print(
        f"12 megapixels: decoding {alone:.2f} s, with conversion {alone * ratio:.2f} s; {more:.2f} x the picture more memory"
    )
    return more <= MEMORY_GOAL


def _child(color: str, file: Path) -> str:
    command = [sys.executable, "-m", "benchmarks.colour", "--memory", color, str(file)]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[1]).stdout


def _large() -> bytes:
    picture = Image.fromarray(np.random.default_rng(1).integers(0, 256, (300, 400, 3), dtype=np.uint8))
    buffer = io.BytesIO()
    picture.resize((4000, 3000), Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=90, icc_profile=P3)
    return buffer.getvalue()


def _peak(color: str, file: str) -> int:
    """Return the peak memory of this process in kB after decoding."""
    decode_rgb(Path(file).read_bytes(), "photo", "srgb" if color == "srgb" else "ignore")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    sys.exit(main())
