"""Folders as trainers and datasets have them: scanned, run with the lines that `imagemill scan` prints, and trained from.

Spec: docs/spec/stage2.md#inputs, docs/spec/stage2.md#caption-sources, docs/spec/stage2.md#scan
"""

import csv
import json
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from imagemill.reading import ShardDataset
from tests.helpers.commands import called
from tests.helpers.stage2 import picture
from tests.helpers.wiring import stub_every_kind


@pytest.fixture(autouse=True)
def stubs(monkeypatch):
    stub_every_kind(monkeypatch)


class Folder(NamedTuple):
    """A folder of a trainer.

    Attributes:
        make: creates it.
        captions: all captions by image id.
        classes: entries by class; every other one is a sample or a problem.
        layout: what `scan` recognises.
        settings: the lines that `scan` prints.
        repeats: by image id, of those drawn more than once.
        problems: reason by path.
    """

    make: Callable[[Path], object]
    captions: Mapping[str, list[str]]
    classes: Mapping[str, list[str]] = {}
    layout: Sequence[str] = ()
    settings: Sequence[str] = ()
    repeats: Mapping[str, int] = {}
    problems: Mapping[str, str] = {}


def images(folder, *paths):
    for path in paths:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        picture(folder / path, size=(24, 24))


def texts(folder, **by_path):
    for path, text in by_path.items():
        (folder / path).write_bytes(text if isinstance(text, bytes) else text.encode())


def kohya_caption(folder):
    images(folder, "10_sks dog/a.png", "10_sks dog/b.png", "4_cat/a.png")
    texts(folder, **{"10_sks dog/a.caption": "a dog", "10_sks dog/b.caption": "two dogs", "4_cat/a.caption": "a cat"})
    texts(folder, **{"10_sks dog/a.npz": "cache", "10_sks dog/a_0032x0032_sdxl.npz": "cache"})


def kohya_txt(folder):
    images(folder, "3_dog/a.png", "1_dog/b.png")
    texts(folder, **{"3_dog/a.txt": "1dog, grass", "1_dog/b.txt": "1dog, sand"})


def kohya_metadata(folder):
    images(folder, "a.png", "b.png")
    rows = {
        "/home/me/train/a.png": {"caption": "a dog", "tags": "1dog, grass"},
        "/home/me/train/b": {"caption": "a cat"},
    }
    texts(folder, **{"meta_cap.json": json.dumps(rows)})


def simpletuner_lines(folder):
    images(folder, "a.png", "b.png")
    texts(folder, **{"a.txt": "a dog\na brown dog\n\n  a dog \n", "b.txt": "a cat"})


def simpletuner_parquet(folder):
    images(folder, "a.png", "b.png")
    table = pa.table({"filename": ["a.png", "b.png"], "caption": ["a dog", "a cat"], "width": [1, 2]})
    pq.write_table(table, folder / "dataset.parquet")


def ai_toolkit(folder):
    images(folder, "dogs/brown/a.png", "dogs/b.png", "_controls_/a.png")
    texts(folder, **{"dogs/brown/a.txt": "a dog", "dogs/b.txt": "b dog"})
    (folder / "dogs" / "_latent_cache").mkdir()
    texts(folder, **{"dogs/_latent_cache/a.safetensors": "cache"})


def one_trainer(folder):
    images(folder, "a.png", "a-masklabel.png", "b.png", "b-condlabel.png")
    texts(folder, **{"a.txt": "a dog", "b.txt": "a cat"})


def diffusion_pipe(folder):
    images(folder, "a.png", "b.png")
    texts(folder, **{"captions.json": json.dumps({"a.png": ["a dog", "a brown dog"], "b.png": "a cat"})})


def imagefolder_jsonl(folder):
    images(folder, "train/a.png", "train/b.png")
    rows = [{"file_name": "a.png", "text": "a dog"}, {"file_name": "b.png", "text": "a cat"}]
    texts(folder, **{"train/metadata.jsonl": "".join(json.dumps(row) + "\n" for row in rows)})


def imagefolder_csv(folder):
    images(folder, "a.png", "b.png")
    with open(folder / "metadata.csv", "w", newline="", encoding="utf-8-sig") as file:
        csv.writer(file).writerows([["file_name", "text"], ["a.png", 'a "big" dog,\nbrown'], ["b.png", "a cat"]])


def img2dataset_files(folder):
    images(folder, "00000/000000000.png", "00000/000000001.png")
    for n in range(2):
        texts(folder, **{f"00000/00000000{n}.txt": f"picture {n}", f"00000/00000000{n}.json": "{}"})
    texts(folder, **{"00000.parquet": b"PAR1", "00000_stats.json": "{}"})


def litter(folder):
    decomposed = unicodedata.normalize("NFD", "é")
    images(folder, "A.PNG", "café.png", "b.png", "c.png")
    texts(folder, **{"A.TXT": "\ufeffa dog".encode("utf-16-le"), f"caf{decomposed}.txt": "coffee", "Thumbs.db": "x"})
    texts(folder, **{"b.txt": "un café".encode("utf-16"), "c.txt": "0 0.5 0.5 0.1 0.2\n1 0.1 0.2 0.3 0.4\n"})
    texts(folder, **{".DS_Store": "x", "desktop.ini": "x", "._b.png": "x"})
    for path in ("__MACOSX", "@eaDir"):
        (folder / path).mkdir()
        texts(folder, **{f"{path}/._a.png": "x"})


FOLDERS = {
    "kohya with .caption": Folder(
        kohya_caption,
        {"10_sks dog%2Fa": ["a dog"], "10_sks dog%2Fb": ["two dogs"], "4_cat%2Fa": ["a cat"]},
        {"caption": ["10_sks dog/a.caption", "10_sks dog/b.caption", "4_cat/a.caption"],
         "ignored": ["10_sks dog/a.npz", "10_sks dog/a_0032x0032_sdxl.npz"]},
        ["kohya: 2 folders, repeats 10, 4"],
        ["inputs: {repeats: kohya}"],
        {"10_sks dog%2Fa": 10, "10_sks dog%2Fb": 10, "4_cat%2Fa": 4},
    ),
    "kohya with .txt": Folder(
        kohya_txt,
        {"3_dog%2Fa": ["1dog, grass"], "1_dog%2Fb": ["1dog, sand"]},
        {"caption": ["1_dog/b.txt", "3_dog/a.txt"]},
        ["kohya: 2 folders, repeats 1, 3"],
        ["inputs: {repeats: kohya}"],
        {"3_dog%2Fa": 3},
    ),
    "kohya's metadata with full paths": Folder(
        kohya_metadata,
        {"a": ["a dog, 1dog, grass"], "b": ["a cat"]},
        {"caption": ["meta_cap.json"]},
        [],
        ['captions: {metadata: "meta_cap.json", strip_prefix: "/home/me/train/"}'],
    ),
    "SimpleTuner with several lines": Folder(
        simpletuner_lines,
        {"a": ["a dog", "a brown dog"], "b": ["a cat"]},
        {"caption": ["a.txt", "b.txt"]},
        [],
        ["captions: {lines: each}"],
    ),
    "SimpleTuner with Parquet": Folder(
        simpletuner_parquet,
        {"a": ["a dog"], "b": ["a cat"]},
        {"caption": ["dataset.parquet"]},
        [],
        ['captions: {metadata: "dataset.parquet"}'],
    ),
    "ai-toolkit, nested": Folder(
        ai_toolkit,
        {"dogs%2Fbrown%2Fa": ["a dog"], "dogs%2Fb": ["b dog"]},
        {"caption": ["dogs/b.txt", "dogs/brown/a.txt"], "ignored": ["_controls_", "dogs/_latent_cache"]},
        ["ai-toolkit: folders with its caches", "sub-folders: 2 with images"],
    ),
    "OneTrainer with masks": Folder(
        one_trainer,
        {"a": ["a dog"], "b": ["a cat"]},
        {"caption": ["a.txt", "b.txt"], "companion": ["a-masklabel.png", "b-condlabel.png"]},
        ["OneTrainer: 2 companion images (masks, control images)"],
    ),
    "diffusion-pipe": Folder(
        diffusion_pipe,
        {"a": ["a dog", "a brown dog"], "b": ["a cat"]},
        {"caption": ["captions.json"]},
        ["diffusion-pipe: captions.json"],
    ),
    "imagefolder with JSON Lines": Folder(
        imagefolder_jsonl,
        {"train%2Fa": ["a dog"], "train%2Fb": ["a cat"]},
        {"caption": ["train/metadata.jsonl"]},
        ["Hugging Face imagefolder: metadata.jsonl", "sub-folders: 1 with images"],
    ),
    "imagefolder with CSV": Folder(
        imagefolder_csv,
        {"a": ['a "big" dog, brown'], "b": ["a cat"]},
        {"caption": ["metadata.csv"]},
        ["Hugging Face imagefolder: metadata.csv"],
    ),
    "img2dataset files": Folder(
        img2dataset_files,
        {"00000%2F000000000": ["picture 0"], "00000%2F000000001": ["picture 1"]},
        {"caption": ["00000/000000000.txt", "00000/000000001.txt"],
         "ignored": ["00000.parquet", "00000/000000000.json", "00000/000000001.json", "00000_stats.json"]},
        ["img2dataset: 2 files with its tables or counts", "sub-folders: 1 with images"],
    ),
    "litter of Windows and macOS": Folder(
        litter,
        {"A": ["a dog"], "café": ["coffee"], "b": ["un café"]},
        {"caption": ["A.TXT", "b.txt", "c.txt", f"caf{unicodedata.normalize('NFD', 'é')}.txt"],
         "ignored": [".DS_Store", "._b.png", "@eaDir", "Thumbs.db", "__MACOSX", "desktop.ini"]},
        problems={"c.png": "annotation_not_caption"},
    ),
}  # fmt: skip


def tree(folder):
    """Return size, time stamps and inode of everything in a folder."""
    found = {}
    for path in sorted(folder.rglob("*")):
        stat = path.lstat()
        found[str(path.relative_to(folder))] = (stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)
    return found


def is_entry(path, entries, folder):
    """Return whether a path is an entry: not inside an ignored folder, and no folder that is entered."""
    return path in entries or not ((folder / path).is_dir() or any(path.startswith(f"{each}/") for each in entries))


@pytest.mark.parametrize("name", FOLDERS)
def test_folder_becomes_shards_with_the_lines_that_scan_prints(name, tmp_path, data_root):
    case, folder = FOLDERS[name], tmp_path / "photos"
    folder.mkdir()
    case.make(folder)
    before = tree(folder)

    report = json.loads(called(data_root, "scan", folder, "--json").text)
    assert not data_root.state.exists()
    entries = {entry["path"]: entry["entry"] for entry in report["entries"]}
    assert set(entries) == {path for path in before if is_entry(path, entries, folder)}
    assert sum(report["counts"].values()) == len(entries)
    assert report["layouts"] == list(case.layout)
    assert report["settings"] == list(case.settings)
    assert len(report["settings"]) <= 3

    data_root.path.mkdir(exist_ok=True)
    data_root.config_file.write_text("".join(f"{line}\n" for line in report["settings"]))
    configured = json.loads(called(data_root, "scan", folder, "--json").text)
    assert configured["settings"] == []
    classes = {entry["path"]: entry["entry"] for entry in configured["entries"]}
    for each in ("caption", "companion", "ignored"):
        assert sorted(path for path in classes if classes[path] == each) == sorted(case.classes.get(each, []))
    assert {problem["item"]: problem["reason"] for problem in configured["problems"]} == case.problems

    done = called(data_root, "run", "--approved", folder)

    assert done.code == 0, done.text
    batches = list(ShardDataset(data_root.shards, 1, allow_preview=True))
    assert {batch["image_id"][0]: batch["captions"][0] for batch in batches} == case.captions
    assert {b["image_id"][0]: b["repeats"][0] for b in batches if b["repeats"][0] != 1} == case.repeats
    assert np.all([batch["t5m"].any() for batch in batches])
    assert tree(folder) == before
    assert "no Dagster run was started" in called(data_root, "run").text
