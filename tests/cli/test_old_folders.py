"""A data root of an earlier release, with entries that a new one reads otherwise, keeps every byte.

Spec: docs/spec/conventions.md#old-data-roots
"""

import json

import pytest

from imagemill.inputs import sidecars
from tests.helpers.commands import called
from tests.helpers.earlier_release import as_of_earlier_release
from tests.helpers.stage2 import picture
from tests.helpers.wiring import stub_every_kind

LABELS = "0 0.5 0.5 0.1 0.1"
TEXTS = {
    "a.txt": "a", "b.caption": "b", "C.TXT": "c", "labels.txt": LABELS, "x.txt": "x", "x-masklabel.txt": "a mask",
    "metadata.jsonl": '{"file_name": "d.png", "text": "d"}\n', "dog/e.txt": "e",
}  # fmt: skip
IMAGES = ("a.png", "b.png", "C.png", "d.png", "labels.png", "x.png", "x-masklabel.png", "dog/e.png")
KEPT = {"a": "a", "labels": LABELS, "x": "x", "x-masklabel": "a mask"}


@pytest.fixture
def old(data_root, monkeypatch):
    """A data root as the earlier release leaves it: with a mask as an image, and labels as a caption."""
    stub_every_kind(monkeypatch)
    (data_root.approved / "dog").mkdir(parents=True)
    for name in IMAGES:
        picture(data_root.approved / name, size=(24, 24))
    for name, text in TEXTS.items():
        (data_root.approved / name).write_text(text)
    data_root.derived.mkdir()
    data_root.stage2_jsonl.touch()
    with monkeypatch.context() as patch:
        patch.setattr(sidecars, "is_annotation", lambda text: False)
        called(data_root, "run")
    assert captions(data_root) == KEPT
    as_of_earlier_release(data_root)
    return data_root


def captions(root):
    records = (json.loads(line) for line in root.stage2_jsonl.read_text().splitlines())
    return {record["image_id"]: record["caption"] for record in records}


def written(root):
    paths = [path for folder in (root.derived, root.shards) for path in folder.rglob("*")]
    return {
        str(path): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in paths if path.suffix in {".npy", ".jsonl", ".tar"}
    }  # fmt: skip


def test_every_byte_stays_and_one_line_names_what_new_values_would_add(old):
    before = written(old)
    assert any(name.endswith(".tar") for name in before)

    done = called(old, "run")

    assert written(old) == before
    (line,) = (line for line in done.text.splitlines() if "as in an earlier release" in line)
    for part in (
        "pixels.color: srgb would convert 0 images (7 images not examined)",
        "inputs.recursive: true would read 1 sub-folder",
        "inputs.companions: true would leave out masks and control images: 1 image",
        "captions.sidecars: [txt, caption] would add 2 caption files",
        "captions.metadata: auto would read 1 metadata file",
    ):
        assert part in line
    assert called(old, "verify").code == 0


def test_new_values_read_what_the_line_names(old):
    called(old, "run")
    old.config_file.write_text(
        "inputs: {recursive: true, companions: true}\ncaptions: {sidecars: [txt, caption], metadata: auto}\n"
    )

    done = called(old, "run")

    new = {"b": "b", "C": "c", "d": "d", "dog%2Fe": "e"}
    assert captions(old) == KEPT | new, "a mask that is no longer read keeps its record"
    assert "captions.metadata is now auto; it was off" in done.text
    assert "would read" not in done.text


def test_labels_that_change_are_refused_and_the_sample_stays(old):
    called(old, "run")
    (old.approved / "labels.txt").write_text("0 0.5 0.5 0.2 0.2")

    done = called(old, "run")

    assert captions(old)["labels"] == LABELS
    assert "annotation_not_caption" in done.text
