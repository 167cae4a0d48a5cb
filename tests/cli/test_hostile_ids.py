"""Ids of records that could name a file outside the data root: refused by name, without any change outside."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagemill.domain.embedding_specs import DINOV3, embedding_specs
from imagemill.domain.ids import InvalidImageId, id_problem, image_id
from imagemill.domain.layout import DataRoot
from imagemill.formats.npy import NpyStore
from imagemill.store.ledger import Ledger
from tests.helpers.product import imagemill, photos
from tests.helpers.sessions import read_status
from tests.helpers.stage2 import record_of

# From derived/dinov3/, this leads to a folder beside the data root.
OUTSIDE = "../../../victim/precious"
VECTOR = [0.5] * 1024


@pytest.fixture
def root(tmp_path):
    root = DataRoot(tmp_path / "data")
    photos(root.approved, 2)
    (tmp_path / "victim").mkdir()
    for name in ("precious.npy", "precious", "precious.jpg"):
        (tmp_path / "victim" / name).write_bytes(b"precious")
    return root


def stage1(image_id, **more):
    return {"image_id": image_id, "image_path": "x.jpg", "caption": "text", "t5_attention_mask": [1] * 77, "height": 32,
            "width": 48, "dinov3_embedding": VECTOR, **more}  # fmt: skip


HOSTILE = {
    "parent": lambda tmp: OUTSIDE,
    "absolute": lambda tmp: str(tmp / "victim" / "precious"),
    "nul": lambda tmp: "a\0b",
    "dots": lambda tmp: "..",
    "temporary": lambda tmp: ".tmp-0-0-000001",
    "overlong": lambda tmp: "x" * 300,
}


SOME = {("parent", "stage1"), ("nul", "version 2"), ("overlong", "stage1")}


@pytest.mark.parametrize(
    ("hostile", "version"),
    [
        pytest.param(hostile, version, marks=() if (hostile, version) in SOME else pytest.mark.soak)
        for hostile in HOSTILE
        for version in ("stage1", "version 2")
    ],
)
def test_record_with_such_an_id_is_refused_and_the_others_proceed(root, tmp_path, hostile, version):
    bad = HOSTILE[hostile](tmp_path)
    line = stage1(bad) if version == "stage1" else {**record_of("x"), "image_id": bad}
    root.derived.mkdir()
    root.stage2_jsonl.write_text(f"{json.dumps(line)}\n{json.dumps(stage1('photo0000', image_path='photo0000.jpg'))}\n")

    done = imagemill("run", "--data-root", root.path, stub=True)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert all(path.read_bytes() == b"precious" for path in (tmp_path / "victim").iterdir())
    assert len(list((tmp_path / "victim").iterdir())) == 3
    assert "2 samples in 1 shard" in done.stdout
    (problem,) = [p for p in read_status(root).problems if p.reason == "bad_id"]
    assert problem.item == f"{root.stage2_jsonl.name}:1"
    (kept,) = root.quarantine.glob("*.quarantine.jsonl")
    assert "bad image id" in kept.read_text()
    assert len(root.stage2_jsonl.read_text().splitlines()) == 2
    again = imagemill("run", "--data-root", root.path, stub=True)
    assert again.returncode == 0


names = st.text(max_size=300) | st.sampled_from([OUTSIDE, "/etc/passwd", "..", ".", "", "a/b", "a\\b", "a\0", "..\\x"])


@given(names)
def test_store_writes_inside_its_folder_or_refuses(tmp_path_factory, name):
    """For any text, the path is a direct child of the folder."""
    folder = tmp_path_factory.getbasetemp() / "store"
    store = NpyStore(folder, DINOV3)
    try:
        path = store.path(name)
    except InvalidImageId:
        assert id_problem(name)
        with pytest.raises(InvalidImageId):
            store.path_text(name)
        return
    assert store.path_text(name) == str(path)
    assert path.parent == folder
    assert path.name == f"{image_id(name)}.npy"
    assert len(path.name.encode()) <= 255


def test_every_kind_refuses_a_path_as_id(tmp_path):
    for spec in embedding_specs():
        with pytest.raises(InvalidImageId, match="path separator"):
            NpyStore(tmp_path, spec).path(OUTSIDE)


def test_withdrawing_such_an_id_writes_nothing(root):
    assert imagemill("run", "--data-root", root.path, stub=True).returncode == 0

    done = imagemill("withdraw", OUTSIDE, "--data-root", root.path, stub=True)

    assert done.returncode == 1
    assert "no image" in done.stderr
    with Ledger(root.ledger, read_only=True) as ledger:
        assert ledger.withdrawals() == {}


def test_stage1_vectors_of_other_images_are_extracted(root):
    """The refusal of one line does not affect other lines."""
    root.derived.mkdir()
    root.stage2_jsonl.write_text("".join(f"{json.dumps(stage1(i))}\n" for i in (OUTSIDE, "gone1", "gone2")))

    assert imagemill("stage2", "--pass", "migrate", "--data-root", root.path, stub=True).returncode == 0

    vectors = {path.stem: np.load(path).tolist() for path in (root.derived / "dinov3").glob("*.npy")}
    assert {"gone1": VECTOR, "gone2": VECTOR}.items() <= vectors.items()
