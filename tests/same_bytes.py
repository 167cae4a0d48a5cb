"""Compare the outputs of two checkouts of imagemill for the same inputs, byte for byte:

    python -m tests.same_bytes OLD NEW COCO128

Each checkout gets a data root with the same photographs, captions, Stage 1 records, annotations and tickets, and runs the
same commands on it: `run`, an edited caption and `run`, `withdraw`, `shards --append`, the steps of a preset, `stage-a`.
Records, npy files, tars, indexes, manifests, presets and merged groups must be equal; in manifests, versions and run ids
are ignored. Then the new checkout continues the old one's data root: nothing may change, and everything must validate.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

PHOTOS = 24
MISSION = "inspection"
COMPARED = ("derived", "shards", "public_data", "stage_a/output")
# SQLite writes its own version into a database; the card, the sheets and the second copy name versions and identities.
LEFT_OUT = re.compile(r"(\.sqlite|\.dropped\.jsonl)$|/\.imagemill\.json$")
# Modification time and inode of a file, which differ between data roots.
SIGNATURES = re.compile(rb"posix:\d+:\d+:\d+")
VERSIONS = re.compile(rb'"(?:imagemill|version|run_id|created|written)": *"[^"]*",? *')


def main(old: str, new: str, coco128: str) -> int:
    work = Path(os.environ.get("TMPDIR", "/tmp")) / f"same-bytes-{os.getpid()}"
    roots = {name: work / name / "data" for name in ("old", "new")}
    checkouts = {"old": Path(old).resolve(), "new": Path(new).resolve()}
    try:
        for name, root in roots.items():
            prepare(root, Path(coco128))
            make(checkouts[name], root, Path(coco128))
        wrong = differences(contents(roots["old"]), contents(roots["new"]))
        before = contents(roots["old"])
        coord = ["preset", "coord", "coco", "--preset", "rescale_32_768_max10"]
        for command in (["run"], ["verify"], ["shards", "--append"], coord, ["stage-a", "--mission", MISSION]):
            imagemill(checkouts["new"], roots["old"], *command)
        wrong += [f"continued: {line}" for line in differences(before, contents(roots["old"]))]
    finally:
        shutil.rmtree(work, ignore_errors=True)
    print(
        "\n".join(wrong)
        or f"{len(before)} files are equal; the new checkout continues the old data root without a change"
    )
    return 1 if wrong else 0


def prepare(root: Path, coco128: Path) -> None:
    """Write photographs with captions, some of them with Stage 1 records and vectors, and tickets for Stage-A."""
    approved = root / "approved"
    approved.mkdir(parents=True)
    photos = sorted((coco128 / "images").rglob("*.jpg"))[:PHOTOS]
    for number, photo in enumerate(photos):
        shutil.copyfile(photo, approved / photo.name)
        (approved / f"{photo.stem}.txt").write_text(f"photograph number {number} of the set")
        ticket = (
            root
            / "stage_a"
            / "input"
            / MISSION
            / ("审核通过" if number % 2 else "审核不通过")
            / f"ticket {number // 3}"
        )
        ticket.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(photo, ticket / photo.name)
    (root / "derived").mkdir()
    records = [
        {
            "image_path": f"data/approved/{photo.name}",
            "caption": f"record {number}",
            "height": 1,
            "width": 1,
            "note": number,
        }
        | {"dinov3_embedding": [number + 0.5] * 1024}
        for number, photo in enumerate(photos[:5])
    ]
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (root / "derived" / "approved_image_dataset.jsonl").write_text(lines)


def make(checkout: Path, root: Path, coco128: Path) -> None:
    imagemill(checkout, root, "run")
    caption = next(path for path in sorted((root / "approved").iterdir()) if path.suffix == ".txt")
    caption.write_text("another caption")
    imagemill(checkout, root, "run")
    last = sorted(path.stem for path in (root / "approved").iterdir())[-1]
    imagemill(checkout, root, "withdraw", last)
    imagemill(checkout, root, "shards", "--append")
    annotations = ["--annotations", str(coco128 / "instances_train2017.json"), "--images", str(coco128 / "images")]
    imagemill(checkout, root, "preset", "convert", "coco", "--adapter", "coco", *annotations)
    for preset in (["rescale", "coco", "--preset", "rescale_32_768"], ["coord", "coco", "--preset", "rescale_32_768"],
                   ["coord", "coco", "--preset", "rescale_32_768_max10"]):  # fmt: skip
        imagemill(checkout, root, "preset", *preset)
    imagemill(checkout, root, "stage-a", "--mission", MISSION)


def imagemill(checkout: Path, root: Path, *command: str) -> None:
    """Run a command of a checkout, with this interpreter."""
    environment = {**os.environ, "PYTHONPATH": str(checkout), "IMAGEMILL_DATA_ROOT": str(root)}
    done = subprocess.run(
        [sys.executable, "-P", "-c", "from dagster_project.cli.main import main; main()", *command],
        cwd=root.parent, env=environment, check=False, capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(
            f"{checkout}: imagemill {' '.join(command)}: exit {done.returncode}\n{done.stdout}{done.stderr}"
        )


def contents(root: Path) -> dict[str, bytes]:
    """Return the bytes of each file by its path below the data root."""
    files = (path for folder in COMPARED for path in sorted((root / folder).rglob("*")) if path.is_file())
    named = {str(path.relative_to(root)): path for path in files}
    return {name: _plain(path) for name, path in named.items() if not LEFT_OUT.search(name)}


def _plain(path: Path) -> bytes:
    data = path.read_bytes()
    if path.name == ".images.jsonl":  # several workers append to it
        data = b"".join(sorted(SIGNATURES.sub(b"", data).splitlines(keepends=True)))
    return VERSIONS.sub(b"", data) if path.suffix == ".json" else data


def differences(old: dict[str, bytes], new: dict[str, bytes]) -> list[str]:
    return [
        f"{name}: {'missing' if name not in new else 'new' if name not in old else 'differs'}"
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name)
    ]


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
