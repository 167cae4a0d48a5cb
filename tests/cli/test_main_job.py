"""The main job on the command line, on real photographs, with the preview models."""

import io
import re
from collections import Counter

import numpy as np
import pytest
import webdataset
from PIL import Image

from imagemill.domain.embedding_specs import embedding_specs
from imagemill.domain.layout import DataRoot
from imagemill.formats.jsonl import read_jsonl
from imagemill.store.ledger import Ledger
from tests.helpers.product import coco_photos, imagemill, snapshot

WITHOUT_ANNOTATION = {"000000000250", "000000000508"}
TURNED = "000000000009"


@pytest.fixture(scope="module")
def coco_run(coco128, tmp_path_factory):
    """A data root after a run on the 128 photographs, one of which has an EXIF rotation."""
    root = DataRoot(tmp_path_factory.mktemp("coco") / "data")
    coco_photos(coco128, root.approved)
    upright = Image.open(root.approved / f"{TURNED}.jpg").convert("RGB")
    (root.approved / f"{TURNED}.jpg").unlink()
    exif = Image.Exif()
    exif[0x0112] = 6  # "rotate by 90 degrees clockwise to show"
    upright.transpose(Image.Transpose.ROTATE_90).save(root.approved / f"{TURNED}.jpg", exif=exif, quality=95)
    (root.approved / "broken.jpg").write_bytes(b"this is no image")
    (root.approved / "broken.txt").write_text("a caption of nothing")
    done = imagemill("run", "--data-root", root.path)
    return root, done, upright


def samples_of(root):
    tars = sorted(str(tar) for tar in root.shards.glob("*/shard-*.tar"))
    return {
        s["json"]["image_id"]: s for s in webdataset.WebDataset(tars, shardshuffle=False, empty_check=False).decode()
    }


def calls(output, kind):
    return int(re.search(rf"{kind} +\d+ made in (\d+) model calls?", output)[1])


def test_every_photo_with_a_caption_becomes_a_sample_and_the_others_have_a_reason(coco_run):
    root, done, _ = coco_run

    assert done.returncode == 0, done.stdout + done.stderr
    samples = samples_of(root)
    assert len(samples) == 126
    assert not WITHOUT_ANNOTATION & samples.keys()
    with Ledger(root.ledger) as ledger:
        assert {(p.item, p.reason) for p in ledger.problems()} == {
            *((image_id, "missing_caption") for image_id in WITHOUT_ANNOTATION), ("broken", "undecodable"),
        }  # fmt: skip
    for image_id in WITHOUT_ANNOTATION:
        assert "missing_caption" in imagemill("explain", image_id, "--data-root", root.path).stdout


def test_shards_contain_every_npy_file_byte_for_byte(coco_run):
    """Read with plain webdataset and its decoding. Spec: docs/spec/shards.md#members"""
    root, _, _ = coco_run

    for image_id, sample in samples_of(root).items():
        for spec in embedding_specs():
            on_disk = np.load(root.derived / spec.folder / f"{image_id}.npy")
            assert sample[spec.member].dtype == on_disk.dtype
            assert np.array_equal(sample[spec.member], on_disk)
        assert sample["t5m.npy"].tolist() == sample["json"]["t5_attention_mask"]
    tar = webdataset.WebDataset(
        sorted(str(tar) for tar in root.shards.glob("*/shard-*.tar")), shardshuffle=False, empty_check=False
    )
    for sample in tar:
        image_id = np.load(io.BytesIO(sample["t5m.npy"])) is not None and sample["__key__"]
        for spec in embedding_specs():
            assert sample[spec.member] == (root.derived / spec.folder / f"{image_id}.npy").read_bytes()


def test_photo_with_an_exif_rotation_is_stored_upright(coco_run):
    """EXIF orientation is applied first, and sizes are measured afterwards. Spec: docs/spec/stage2.md#pixels"""
    root, _, upright = coco_run

    record = next(line.value for line in read_jsonl(root.stage2_jsonl) if line.value["image_id"] == TURNED)
    assert (record["width"], record["height"]) == upright.size
    latent = np.load(root.derived / "vae_latents" / f"{TURNED}.npy")
    assert latent.shape == (16, upright.height // 8, upright.width // 8)

    from imagemill.formats.images import open_rgb

    difference = np.abs(open_rgb(root.approved / f"{TURNED}.jpg").astype(int) - np.asarray(upright).astype(int))
    assert difference.mean() < 4, "only JPEG's own loss is left"


def test_only_the_file_that_is_not_an_image_is_not_materialised(coco_run):
    """One ledger row, one line in the summary, exit 0. Spec: docs/spec/conventions.md#refused-and-failed"""
    root, done, _ = coco_run
    from dagster_project.internals.instance import open_instance

    assert len([line for line in done.stdout.splitlines() if " broken:" in line]) == 1
    import dagster as dg

    with open_instance(root) as instance:
        for spec in embedding_specs():
            made = instance.get_materialized_partitions(dg.AssetKey(spec.kind))
            expected = {path.stem for path in (root.derived / spec.folder).glob("*.npy")}
            assert made == expected
            assert "broken" not in made


def test_second_run_calls_no_model_and_changes_no_file(coco_run):
    """Valid files are never rewritten: bytes and mtime do not change. Spec: docs/spec/conventions.md#completion"""
    root, _, _ = coco_run
    before = snapshot(root.derived, root.shards)

    again = imagemill("run", "--data-root", root.path)

    assert again.returncode == 0
    assert [calls(again.stdout, spec.kind) for spec in embedding_specs()] == [0, 0, 0]
    assert "nothing new" in again.stdout
    assert snapshot(root.derived, root.shards) == before


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(spec, marks=() if spec.kind == "dinov3_npy" else pytest.mark.soak, id=spec.kind)
        for spec in embedding_specs()
    ],
)
def test_deleted_npy_is_regenerated_identically_with_one_model_call(coco_run, spec):
    root, _, _ = coco_run
    captions = {line.value["image_id"]: line.value["caption"] for line in read_jsonl(root.stage2_jsonl)}
    counts = Counter(captions.values())
    # The state of a caption that another image has as well would be linked, without a model.
    image_id = next(image_id for image_id, caption in captions.items() if counts[caption] == 1)
    path = root.derived / spec.folder / f"{image_id}.npy"
    before = snapshot(root.derived)
    path.unlink()

    again = imagemill("run", "--data-root", root.path)

    assert again.returncode == 0
    made = {other.kind: calls(again.stdout, other.kind) for other in embedding_specs()}
    assert made == {other.kind: int(other is spec) for other in embedding_specs()}
    after = snapshot(root.derived)
    assert {name: data for name, (data, _) in after.items()} == {name: data for name, (data, _) in before.items()}
    assert {name for name in after if after[name] != before[name]} == {str(path)}


def test_verify_passes_and_finds_one_flipped_byte(coco_run):
    root, _, _ = coco_run
    assert imagemill("verify", "--data-root", root.path).returncode == 0
    tar = next(root.shards.glob("*/shard-000000.tar"))
    data = tar.read_bytes()
    tar.write_bytes(data[:2000] + bytes([data[2000] ^ 1]) + data[2001:])
    try:
        found = imagemill("verify", "--data-root", root.path)
        assert found.returncode == 1
        assert "checksum" in found.stdout
    finally:
        tar.write_bytes(data)
