"""Migration of a monolithic Stage 1 file and back: time, peak memory, size before and after, and completeness.

Every record holds a different vector; its image is one of a few small JPEGs, under a unique name. The command is compared with
a plain loop that does the same to the same file without any safety: `json.loads`, `np.save`, `json.dumps`, all in memory.

Goals: peak memory at most 1 GiB at 60,000 records (the libraries take most of it; the plain loop grows with the file); the
JSONL at least 90 % smaller; every vector bit for bit; rollback gives the original file.
"""

import argparse
import json
import os
import sys
from pathlib import Path

import numpy as np

from benchmarks.common.inputs import noise_photos, scratch
from benchmarks.common.processes import cost
from imagemill.domain.layout import DataRoot
from imagemill.formats.manifest import sha256_file
from imagemill.formats.npy import read_npy

RECORDS = 60_000
GOAL_SIZE = 0.1
GOAL_MEMORY = 1 << 30


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--records", type=int, default=RECORDS)
    records = parser.parse_args().records
    with scratch() as folder:
        root = DataRoot(folder / "data")
        make_stage1(root, folder, records)
        size, digest = root.stage2_jsonl.stat().st_size, sha256_file(root.stage2_jsonl)
        print(f"{records} records of Stage 1, {size / 1e6:.0f} MB", flush=True)
        report("plain loop in memory", [__file__, "--plain", root.stage2_jsonl, folder / "plain"])
        memory = report("stage2 --pass migrate", stage2(root, "--pass", "migrate"))
        smaller = root.stage2_jsonl.stat().st_size / size
        whole = all(
            read_npy(root.derived / "dinov3" / f"{n:06d}.npy").tobytes() == vector(n) for n in range(0, records, 97)
        )
        report("again, nothing to do", stage2(root, "--pass", "migrate"))
        report("stage2 --rollback", stage2(root, "--rollback"))
        same = sha256_file(root.stage2_jsonl) == digest
    print(f"peak memory {memory / 1e6:.0f} MB (goal: at most {GOAL_MEMORY / 1e6:.0f})")
    print(f"JSONL {100 * (1 - smaller):.1f} % smaller (goal: at least {100 * (1 - GOAL_SIZE):.0f} %)")
    print(f"vectors bit for bit: {whole}; rollback equals the original: {same}")
    return 0 if memory <= GOAL_MEMORY and smaller <= GOAL_SIZE and whole and same else 1


def make_stage1(root: DataRoot, folder: Path, records: int) -> None:
    noise_photos(folder / "photos", 8, width=64, height=48)
    photos = sorted((folder / "photos").glob("*.jpg"))
    root.approved.mkdir(parents=True)
    root.derived.mkdir()
    with open(root.stage2_jsonl, "w") as file:
        for n in range(records):
            os.link(photos[n % len(photos)], root.approved / f"{n:06d}.jpg")
            record = {
                "image_path": f"data/approved/{n:06d}.jpg",
                "dinov3_embedding": np.frombuffer(vector(n), np.float32).astype(float).tolist(),
                "caption": f"a photo of a house by a river, number {n}, in the light of a late afternoon",
                "t5_attention_mask": [1] * 20 + [0] * 57,
                "height": 48,
                "width": 64,
            }
            file.write(json.dumps(record) + "\n")


def vector(number: int) -> bytes:
    return np.random.default_rng(number).standard_normal(1024).astype(np.float32).tobytes()


def stage2(root: DataRoot, *arguments: str) -> list[object]:
    return ["-m", "dagster_project.cli.main", "stage2", *arguments, "--data-root", root.path]


def report(what: str, arguments: list[object]) -> int:
    """Run a command and print one line of the table. Return its peak memory in bytes."""
    taken = cost(arguments)
    seconds = f"{taken.seconds:>8.1f} s{taken.cpu_seconds:>8.1f} s of the processor"
    print(f"  {what:<24}{seconds}{taken.peak_bytes / 1e6:>8.0f} MB at most", flush=True)
    return taken.peak_bytes


def plain_loop(source: Path, folder: Path) -> None:
    (folder / "dinov3").mkdir(parents=True)
    records = [json.loads(line) for line in source.read_text().splitlines()]
    with open(folder / "records.jsonl", "w") as file:
        for record in records:
            image_id = Path(record["image_path"]).stem
            np.save(folder / "dinov3" / f"{image_id}.npy", np.array(record.pop("dinov3_embedding"), np.float32))
            file.write(
                json.dumps({"image_id": image_id, **record, "aspect_bucket": "1216x832", "format_version": 2}) + "\n"
            )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--plain"]:
        plain_loop(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        sys.exit(main())
