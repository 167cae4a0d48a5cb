"""Preview checkpoints: the same bytes on every machine, built once, atomically."""

import hashlib
import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from imagemill.domain.embedding_specs import DINOV3, T5, VAE, EmbeddingSpec
from imagemill.encoders import preview
from imagemill.encoders.preview import ensure_preview, is_preview
from imagemill.errors import ModelUnusable

WEIGHTS = {
    DINOV3: ("model.safetensors", "1a66a8c820e1b6ce8fa212ce8eec62bb82843f8efb8c1a8ea70b1cf1855cb93f"),
    VAE: ("diffusion_pytorch_model.safetensors", "b65cf4bf89b2e232c0c2c6644bfa668dc2cd88db4aac67f0d7e2e3f5699319a5"),
    T5: ("model.safetensors", "4eafb9621219e52f1c4025bd7539e96955585bb6f51daad5fd03fdfe214ac927"),
}

TOY = """
import threading

class ToyEncoder:
    built = []
    together = threading.Barrier(1)

    @staticmethod
    def write_preview(folder):
        ToyEncoder.together.wait(10)
        ToyEncoder.built.append(folder)
        (folder / "config.json").write_text('{"model_type": "toy"}')
        (folder / "model.safetensors").write_bytes(b"weights")

class Bare:
    pass
"""


def toy_spec(encoder="toy_encoder:ToyEncoder"):
    return EmbeddingSpec(
        kind="toy",
        pass_name="toy",
        folder="toy",
        member="toy.npy",
        source="pixels",
        dtype="float32",
        array_shape=lambda contract, height, width: (4,),
        encoder=encoder,
        default_model="someone/toy",
    )


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """Register a kind that is not part of imagemill, as a user would."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "toy_encoder.py").write_text(TOY)
    monkeypatch.syspath_prepend(tmp_path / "code")
    yield toy_spec()
    sys.modules.pop("toy_encoder", None)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("spec", WEIGHTS, ids=lambda spec: spec.kind)
def test_preview_weights_have_the_same_bytes_everywhere(spec, preview_root):
    """Weights come from SHAKE-256 over keys, without a random generator. Spec: docs/spec/stage2.md#preview-models"""
    name, expected = WEIGHTS[spec]

    folder = ensure_preview(spec, preview_root)

    assert expected == hashlib.sha256((folder / name).read_bytes()).hexdigest()


@pytest.mark.parametrize("spec", WEIGHTS, ids=lambda spec: spec.kind)
def test_preview_is_marked_and_names_the_real_model(spec, preview_root):
    """Preview models can never be mistaken for real ones. Spec: docs/spec/conventions.md#provenance"""
    folder = ensure_preview(spec, preview_root)

    marker = json.loads((folder / "PREVIEW.json").read_text())

    assert is_preview(folder)
    assert ("preview", spec.default_model) == (marker["kind"], marker["stands_for"])
    assert set(marker["files"]) == {path.name for path in folder.iterdir()} - {"PREVIEW.json"}


def test_folder_without_marker_is_not_a_preview(tmp_path):
    assert not is_preview(tmp_path)


def test_preview_config_contains_no_library_version(preview_root):
    """Other versions of the library write the same model."""
    for spec in WEIGHTS:
        config = json.loads((ensure_preview(spec, preview_root) / "config.json").read_text())
        assert not config.keys() & {"transformers_version", "_diffusers_version", "dtype"}


def test_second_build_of_a_preview_gives_the_same_folder(tmp_path, preview_root):
    again = ensure_preview(VAE, tmp_path)

    assert contents(ensure_preview(VAE, preview_root)) == contents(again)


def test_building_a_preview_does_not_change_the_random_state(tmp_path):
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)

    ensure_preview(VAE, tmp_path)

    assert torch.equal(expected, torch.rand(3))


def test_custom_kind_gets_its_preview_from_its_own_encoder(toy, tmp_path):
    """A new kind consists of one spec and one encoder file."""
    folder = ensure_preview(toy, tmp_path / "previews")

    assert tmp_path / "previews" / "toy" == folder
    assert folder.joinpath("model.safetensors").read_bytes() == b"weights"
    assert json.loads((folder / "PREVIEW.json").read_text())["stands_for"] == "someone/toy"


def test_complete_preview_is_not_built_again(toy, tmp_path):
    folder = ensure_preview(toy, tmp_path)
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}

    ensure_preview(toy, tmp_path)

    assert before == {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert len(toy.encoder_class().built) == 1


@pytest.mark.parametrize("damage", ["truncate", "remove", "marker", "recipe", "file in its place"])
def test_damaged_preview_is_built_again(toy, tmp_path, damage, monkeypatch):
    """Completion is validity, not existence. Spec: docs/spec/conventions.md#completion-and-identity"""
    folder = ensure_preview(toy, tmp_path)
    good = contents(folder)
    match damage:
        case "truncate":
            (folder / "model.safetensors").write_bytes(b"wei")
        case "remove":
            (folder / "config.json").unlink()
        case "marker":
            (folder / "PREVIEW.json").write_text("[]")
        case "recipe":
            marker = json.loads((folder / "PREVIEW.json").read_text()) | {"recipe": "older"}
            (folder / "PREVIEW.json").write_text(json.dumps(marker))
        case "file in its place":
            (folder / "model.safetensors").write_bytes(b"WEIGHTS")

    ensure_preview(toy, tmp_path)

    assert good == contents(folder)


def test_preview_built_concurrently_is_complete_without_temporary_files(toy, tmp_path):
    """Each process renames a temporary folder: one wins, and all get the same bytes."""
    toy.encoder_class().together = threading.Barrier(4)

    with ThreadPoolExecutor(4) as pool:
        folders = list(pool.map(lambda _: ensure_preview(toy, tmp_path / "previews"), range(4)))

    assert {tmp_path / "previews" / "toy"} == set(folders)
    assert [path.name for path in (tmp_path / "previews").iterdir()] == ["toy"]
    assert preview._is_whole(folders[0])


def test_failed_build_of_a_preview_leaves_no_folder(toy, tmp_path, monkeypatch):
    def break_off(folder):
        (folder / "config.json").write_text("{")
        raise OSError("disk full")

    monkeypatch.setattr(toy.encoder_class(), "write_preview", break_off)

    with pytest.raises(ModelUnusable, match="toy: the preview model cannot be built: disk full"):
        ensure_preview(toy, tmp_path / "previews")

    assert list((tmp_path / "previews").iterdir()) == []


def test_folder_left_by_a_killed_build_is_removed(toy, tmp_path):
    """Only folders of dead processes are removed. Spec: docs/spec/conventions.md#completion-and-identity"""
    from imagemill.fs.atomic import temporary_path

    folder = temporary_path(tmp_path).name.removeprefix(".tmp-").partition("-")[0]
    dead = tmp_path / f".tmp-{folder}-0123456789ab-000001"
    dead.mkdir()
    (dead / "model.safetensors").touch()
    alive = temporary_path(tmp_path)
    alive.mkdir()

    ensure_preview(toy, tmp_path)

    assert (dead.exists(), alive.exists()) == (False, True)


def test_kind_without_preview_is_refused_with_the_remedy(toy, tmp_path):
    bare = toy_spec("toy_encoder:Bare")

    with pytest.raises(ModelUnusable) as caught:
        ensure_preview(bare, tmp_path)

    assert caught.value.what == "toy: there is no preview model of this kind"
    assert caught.value.do == "set encoders.toy.model in imagemill.yaml"
