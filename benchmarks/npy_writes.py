"""Disk cost of durable, atomic npy files: the pass's own way against one file of the same bytes and one flush.

    one file     every byte in one file, one fdatasync: the limit
    imagemill    stream and publish as in a real pass: staged, flushed, ledger row, rename, folder flushed
    plain        `np.save` under the final name and fsync, file by file

Nothing is decoded and no model runs: the arrays are given. Rounds are interleaved, each in an empty folder.

Goal: at most twice the limit.
"""

import argparse
import dataclasses
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.common.inputs import scratch
from imagemill.config import Config
from imagemill.domain.embedding_specs import EmbeddingSpec, embedding_specs
from imagemill.domain.encoder_settings import EncoderSettings
from imagemill.domain.layout import DataRoot
from imagemill.formats.npy import NpyStore, npy_header
from imagemill.fs.fingerprints import posix_signature
from imagemill.models import Prepared
from imagemill.pipeline.stage2.embed import EmbedWorker
from imagemill.pipeline.stage2.plan import Job
from imagemill.store.ledger import Ledger, SourceRow
from imagemill.store.provenance import read_recorded_models
from tests.helpers.passes import run_pass
from tests.helpers.stubs import StubEncoder

GOAL_RATIO = 2.0
# ext4 checks every file deleted in the last minutes before it allocates a new one: 20 µs become several hundred.
SLOW_TO_CREATE = 60
SIDE = 1024

Arrays = dict[EmbeddingSpec, list[np.ndarray]]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--samples", type=int, default=500, help="images of 1 MP, three files each")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--write-threads", type=int, default=Config().write_threads)
    arguments = parser.parse_args()
    arrays = _arrays(arguments.samples)

    def imagemill(arrays: Arrays, folder: Path) -> None:
        passes(arrays, folder, write_threads=arguments.write_threads)

    with scratch() as folder:
        _spread(folder)
        empty = _empty_file_microseconds(folder)
        ways = [one_file, imagemill, plain]
        rounds = [[_timed(way, arrays, folder) for way in ways] for _ in range(arguments.rounds + 1)][1:]
    seconds = [median(column) for column in zip(*rounds, strict=True)]
    megabytes = sum(array.nbytes for kind in arrays.values() for array in kind) / 1e6
    print(f"{3 * arguments.samples} files, {megabytes:.0f} MB, medians of {arguments.rounds} rounds")
    print(f"{'':<12}{'seconds':>10}{'of the limit':>16}{'fastest':>10}")
    for way, took, column in zip(ways, seconds, zip(*rounds, strict=True), strict=True):
        print(f"{way.__name__.replace('_', ' '):<12}{took:>10.2f}{took / seconds[0]:>16.2f}{min(column):>10.2f}")
    if empty > SLOW_TO_CREATE:
        print(
            f"an empty file takes {empty:.0f} µs here: files were deleted lately; wait five minutes, or set TMPDIR elsewhere"
        )
    ratio = median(ours / limit for limit, ours, _ in rounds)
    print(f"imagemill takes {ratio:.2f} times the limit, median over rounds (goal: at most {GOAL_RATIO:g})")
    return 0 if ratio <= GOAL_RATIO else 1


def _arrays(samples: int) -> Arrays:
    """Return noise of the stored shapes and dtypes, all different and all finite."""
    noise = np.random.default_rng(0)
    return {
        spec: [noise.random(spec.shape(SIDE, SIDE), np.float32).astype(spec.dtype) for _ in range(samples)]
        for spec in embedding_specs()
    }


def _spread(folder: Path) -> None:
    """Make ext4 place each round in another part of the disk, where nothing was deleted recently."""
    with suppress(FileNotFoundError):
        subprocess.run(["chattr", "+T", folder], capture_output=True, check=False)


def _empty_file_microseconds(folder: Path, count: int = 500) -> float:
    folder = Path(tempfile.mkdtemp(dir=folder))
    began = time.perf_counter()
    for number in range(count):
        os.close(os.open(folder / f"empty{number}", os.O_WRONLY | os.O_CREAT | os.O_EXCL))
    return (time.perf_counter() - began) / count * 1e6


def _timed(way: Callable[[Arrays, Path], None], arrays: Arrays, folder: Path) -> float:
    """Return the seconds in an empty folder. The written files are kept as empty files.

    For minutes after a deletion ext4 remembers the place of a file, and memory that no file has used yet costs as much as the
    copying.
    """
    name = Path(tempfile.mkdtemp(dir=folder))
    os.sync()
    began = time.perf_counter()
    way(arrays, name)
    took = time.perf_counter() - began
    for path in name.rglob("*.npy"):
        os.truncate(path, 0)
    return took


def one_file(arrays: Arrays, folder: Path) -> None:
    handle = os.open(folder / "all.npy", os.O_WRONLY | os.O_CREAT)
    for kind in arrays.values():
        for array in kind:
            os.writev(handle, [npy_header(array.shape, array.dtype), array.data.cast("B")])
    os.fdatasync(handle)
    os.close(handle)


def plain(arrays: Arrays, folder: Path) -> None:
    for spec, kind in arrays.items():
        (folder / spec.folder).mkdir()
        for number, array in enumerate(kind):
            with open(folder / spec.folder / f"{number}.npy", "wb") as file:
                np.save(file, array)
                file.flush()
                os.fsync(file.fileno())


def passes(arrays: Arrays, folder: Path, *, write_threads: int) -> None:
    """Run one pass per kind over images whose facts the ledger contains, so that no image is opened."""
    root = DataRoot(folder)
    with Ledger(root.ledger) as ledger:
        for kind, made in arrays.items():
            spec = _Ready.of(kind, made)
            worker = EmbedWorker(
                spec=spec,
                approved=root.approved,
                store=NpyStore(root.derived / spec.folder, spec),
                recorded_models=read_recorded_models(ledger, spec.kind),
                preview_root=root.preview_models,
                settings=EncoderSettings(),
                threads=1,
                write_threads=write_threads,
            )
            counts = run_pass(worker, _jobs(len(made)), ledger)
            assert counts["computed"] == len(made)


def _jobs(count: int) -> Sequence[Job]:
    """Return jobs whose `caption` is the number of the image's array."""
    stat = posix_signature(1, 1, 1)
    return [
        Job(name, name, stat, SourceRow(name, name, stat, "xxh3:0", SIDE, SIDE), str(number), f"xxh3:{number}", None)
        for number, name in enumerate(f"photo{number:06d}" for number in range(count))
    ]


class _Ready(EmbeddingSpec):
    """A kind made from captions by an encoder that has the arrays already."""

    @classmethod
    def of(cls, spec: EmbeddingSpec, arrays: list[np.ndarray]) -> "_Ready":
        fields = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
        ready = cls(**{**fields, "source": "caption"})
        object.__setattr__(ready, "arrays", arrays)
        return ready

    def encoder_class(self):
        arrays = self.arrays  # type: ignore[attr-defined]

        class Encoder(StubEncoder):
            def prepare(self, item):
                return Prepared(int(item), "all")

            def encode(self, batch):
                self.calls += 1
                return [arrays[item.payload] for item in batch]

        return Encoder


if __name__ == "__main__":
    sys.exit(main())
