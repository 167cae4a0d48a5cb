"""Small raw datasets for tests of presets."""

import io
import json

import numpy as np
from PIL import Image

from imagemill.store.public_data import Dataset


def picture(width, height, *, form="JPEG", seed=0, orientation=None, **options):
    """Return the bytes of a smooth picture, different for each seed."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 255, (4, 4, 3), np.uint8))
    image = coarse.resize((width, height), Image.Resampling.BICUBIC)
    exif = Image.Exif()
    if orientation:
        exif[0x0112] = orientation
    buffer = io.BytesIO()
    image.save(buffer, form, exif=exif, **options)
    return buffer.getvalue()


def record(name, width, height, *objects):
    objects = objects or ({"desc": "thing", "bbox_2d": [1, 2, width - 1, height - 2]},)
    return {"images": [f"images/{name}"], "objects": list(objects), "width": width, "height": height}


def put_image(dataset: Dataset, name, data):
    path = dataset.raw_images / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def put_records(dataset: Dataset, records, split="train"):
    dataset.raw.mkdir(parents=True, exist_ok=True)
    lines = [line if isinstance(line, str) else json.dumps(line, ensure_ascii=False) for line in records]
    dataset.raw_jsonl(split).write_text("".join(line + "\n" for line in lines), encoding="utf-8")


def raw_dataset(folder, sizes, split="train") -> Dataset:
    """Write a dataset with one picture and one record per size, named `0.jpg`, `1.jpg`, …"""
    dataset = Dataset(folder)
    for n, (width, height) in enumerate(sizes):
        put_image(dataset, f"{n}.jpg", picture(width, height, seed=n))
    put_records(dataset, [record(f"{n}.jpg", *size) for n, size in enumerate(sizes)], split)
    return dataset


def records_of(path):
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def snapshot(folder):
    """Return bytes and mtime of every file below a folder, by relative path."""
    return {
        str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
