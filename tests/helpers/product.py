"""The product as users run it: the command in a separate process, and folders of images to run it on."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image

from imagemill.store.second_copy import NAME as SECOND_COPY
from tests.helpers.forks import Forks
from tests.messages import recorder

STUBS = Path(__file__).with_name("stubs.py")
PROJECT = Path(__file__).parents[2]
# The checkout, then the test run's own PYTHONPATH: `make test-dagster` overlays the environment with another release.
SEARCH_PATH = os.pathsep.join(filter(None, [str(PROJECT), os.environ.get("PYTHONPATH")]))


def imagemill(*arguments, stub=False, folder=PROJECT, **environment):
    """Run a command to its end, in a folder; `.returncode`, `.stdout`, `.stderr` as text."""
    words, environment = command(*arguments, stub=stub), _environment(environment)
    if not recorder.environment() and _forks().can_run(environment):
        return _forks().run(words, environment, folder=folder)
    return subprocess.run(words, capture_output=True, text=True, check=False, cwd=folder, env=environment)


@cache
def _forks():
    return Forks(_environment({}), PROJECT)


def product(root, *arguments, code=0, stub=True, **environment):
    """Run a command on a data root, and check its exit code; return standard output and error."""
    done = imagemill(*arguments, "--data-root", root.path, stub=stub, **environment)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def start(*arguments, stub=True, **environment):
    """Start a command in a process group of its own."""
    return subprocess.Popen(
        command(*arguments, stub=stub), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=PROJECT,
        env=_environment(environment), start_new_session=True,
    )  # fmt: skip


def command(*arguments, stub):
    program = [str(STUBS)] if stub else ["-m", "dagster_project.cli.main"]
    return [sys.executable, *program, *map(str, arguments)]


def _environment(changes):
    kept = {k: v for k, v in os.environ.items() if k not in {"DAGSTER_HOME", "IMAGEMILL_DATA_ROOT", "IMAGEMILL_CONFIG"}}
    return {**kept, "PYTHONPATH": SEARCH_PATH, **recorder.environment(), **{k: str(v) for k, v in changes.items()}}


def photos(approved, count, *, size=(48, 32), prefix="photo", first=0):
    """Write small noisy JPEGs with captions, all different, numbered from `first` on."""
    approved.mkdir(parents=True, exist_ok=True)
    for n in range(first, first + count):
        pixels = np.random.default_rng(n).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
        Image.fromarray(pixels).save(approved / f"{prefix}{n:04d}.jpg")
        (approved / f"{prefix}{n:04d}.txt").write_text(f"noise number {n}\n")


def coco_photos(coco128, approved):
    """Link the 128 photographs, with captions made from the categories of their annotations."""
    approved.mkdir(parents=True, exist_ok=True)
    instances = json.loads((coco128 / "instances_train2017.json").read_text())
    names = {category["id"]: category["name"] for category in instances["categories"]}
    captions = {}
    for annotation in instances["annotations"]:
        captions.setdefault(annotation["image_id"], []).append(names[annotation["category_id"]])
    for image in sorted((coco128 / "images" / "train2017").iterdir()):
        (approved / image.name).symlink_to(image)
        found = captions.get(int(image.stem))
        if found:
            (approved / f"{image.stem}.txt").write_text(f"a photo of {', '.join(sorted(set(found)))}")


def shards_of_photos(coco128, root, **vae_latents):
    """Write shards of the 128 photographs with stub encoders, and with these settings of `vae_latents`."""
    coco_photos(coco128, root.approved)
    settings = {"encoders": {"vae_latents": {"model": "preview", **vae_latents}}}
    root.config_file.write_text(json.dumps(settings))
    done = imagemill("run", "--data-root", root.path, stub=True)
    assert done.returncode == 0, done.stdout + done.stderr


def snapshot(*folders):
    """Return bytes and modification time of every file below some folders."""
    files = [path for folder in folders for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path): (bytes_of(path), path.stat().st_mtime_ns) for path in files}


def bytes_of(path):
    """Return the bytes of a file; of a second copy, without the random ids of root and history."""
    if path.name != SECOND_COPY:
        return path.read_bytes()
    copy = json.loads(path.read_bytes())
    for name in ("root.id", "history"):
        copy["settings"].pop(name, None)
    return json.dumps(copy, indent=2).encode()


def contents(root):
    """Return the outputs of a run byte for byte, without times, inodes and random ids."""
    return {
        str(path.relative_to(root.path)): bytes_of(path)
        for folder in (root.derived, root.shards)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def built_plugin(folder):
    """Install examples/plugin from its wheel; return its folder of packages, for PYTHONPATH."""
    shutil.copytree(PROJECT / "examples" / "plugin", folder / "source", ignore=shutil.ignore_patterns("__pycache__"))
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder]
    subprocess.run(build, check=True, capture_output=True, cwd=folder / "source")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"
