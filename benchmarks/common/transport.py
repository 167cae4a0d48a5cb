"""A pass over files for Ray whose worker computes nothing, so that what is left is transport (benchmarks/ray_transport.py)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from imagemill.formats.npy import all_finite, stage_npy
from imagemill.fs.fingerprints import fingerprint, read_signed
from imagemill.pipeline.remote import About, Parcel, about_here

SENT_BYTES = 400_000


class Row(NamedTuple):
    """The result of a key."""

    name: str
    array: np.ndarray | None


@dataclass(frozen=True)
class Recipe:
    """Builds the worker. `values`: of the array that it returns, float16; 0 for none."""

    values: int

    def __call__(self) -> "Worker":
        return Worker(self.values)


class Worker:
    """Returns an array for every image."""

    def __init__(self, values: int) -> None:
        self._array = np.ones(values, np.float16) if values else None

    def about(self) -> About:
        return about_here()

    def stream(self, payloads: Sequence[tuple[str, Any]]) -> Iterator[Row]:
        for name, _ in payloads:
            yield Row(name, self._array)

    def stop(self) -> None:
        pass

    def close(self) -> None:
        pass


class Pass:
    """Reads and hashes the file of each key, and stages what returns; no file without bytes to send."""

    gpus, modules, model_batch = 0.0, (), 8

    def __init__(self, files: Sequence[Path], values: int, folder: Path) -> None:
        self.recipe = Recipe(values)
        self._files, self._folder = files, folder

    def weight(self, key: int) -> int:
        return SENT_BYTES if self._files else 0

    def name_of(self, key: Any) -> str:
        return key.name if isinstance(key, Row) else str(key)

    def read(self, key: int) -> bytes:
        data, _ = read_signed(self._files[key % len(self._files)])
        fingerprint(data)
        return data

    def send(self, key: int) -> Parcel:
        image = np.frombuffer(self.read(key), np.uint8) if self._files else None
        return Parcel(key, (str(key), image), 0 if image is None else image.nbytes)

    def receive(self, row: Row) -> str:
        if row.array is not None:
            assert all_finite(row.array)
            stage_npy(self._folder, row.array).unlink()
        return row.name

    def parts(self, key: int) -> list[int]:
        return [key]

    def lost(self, key: int, how: str) -> str:
        raise RuntimeError(f"the worker {how}")

    def fits(self, about: About) -> bool:
        return True

    def agree(self, about: About) -> None:
        pass
