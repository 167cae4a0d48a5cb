"""`vae_latents: {size: bucket}`: latents of the bucket's crop, one size per data root.

Spec: docs/spec/stage2.md#bucket-size
"""

import json
import math
import os
import random
import signal
import time
from contextlib import suppress

import numpy as np
import pytest
import torch
import webdataset
from PIL import Image, ImageOps

from imagemill.config import Config
from imagemill.domain.buckets import BUCKETS, assign_bucket, bucket_crop, bucket_size
from imagemill.domain.embedding_specs import VAE
from imagemill.encoders.preview import ensure_preview
from imagemill.formats.jsonl import read_jsonl
from imagemill.pipeline.shards.shard_statistics import POOR_USE
from imagemill.reading import ShardDataset
from imagemill.store.ledger import Ledger
from tests.cli.test_regenerate import made_files, product, use_model
from tests.helpers.product import coco_photos, imagemill, photos, start

BUCKET = {"size": "bucket"}


def records(root):
    return [line.value for line in read_jsonl(root.stage2_jsonl)]


@pytest.fixture
def root(data_root):
    photos(data_root.approved, 6)
    product(data_root, "run")
    return data_root


def test_changed_size_is_refused_until_the_kind_is_regenerated(root):
    before = made_files(root)
    use_model(root, "preview", **BUCKET)

    said = product(root, "run", code=1)

    assert "differs in size" in said
    assert "--regenerate vae_latents" in said
    assert made_files(root) == before


def test_regeneration_changes_size_and_back(root):
    original = {path.stem: np.load(path).shape for path in (root.derived / "vae_latents").iterdir()}
    lines = root.stage2_jsonl.read_bytes()
    use_model(root, "preview", **BUCKET)
    product(root, "stage2", "--regenerate", "vae")
    product(root, "run")

    for record in records(root):
        wide, high = bucket_size(record["aspect_bucket"])
        assert record["crop_box"] == list(bucket_crop(record["width"], record["height"]))
        assert np.load(root.derived / "vae_latents" / f"{record['image_id']}.npy").shape == (16, high // 8, wide // 8)
    assert "0 errors" in product(root, "verify")

    use_model(root, "preview")
    product(root, "stage2", "--regenerate", "vae")
    product(root, "run")

    assert {path.stem: np.load(path).shape for path in (root.derived / "vae_latents").iterdir()} == original
    assert root.stage2_jsonl.read_bytes() == lines


def test_new_root_with_the_setting_is_complete_after_one_run(data_root):
    photos(data_root.approved, 4)
    use_model(data_root, "preview", **BUCKET)
    product(data_root, "run")
    before = made_files(data_root)

    assert "nothing to do" in product(data_root, "run")
    assert made_files(data_root) == before
    for manifest in map(json.loads, (path.read_text() for path in data_root.shards.glob("*/manifest.json"))):
        assert manifest["crop"]["size"] == "bucket"
        assert manifest["crop"]["median_coverage"] > 0.8


def test_rebuilt_ledger_contains_the_files_of_the_buckets_size(data_root):
    """`repair` reads files by the shape of the recorded model."""
    photos(data_root.approved, 4)
    use_model(data_root, "preview", **BUCKET)
    product(data_root, "run")
    before = made_files(data_root)
    for path in data_root.state.glob("ledger.sqlite*"):
        path.unlink()

    said = product(data_root, "repair", "--apply")

    assert "wrong_shape" not in said
    with Ledger(data_root.ledger, read_only=True) as ledger:
        assert len(ledger.files("vae_latents")) == 4
    assert "nothing to do" in product(data_root, "run")
    assert made_files(data_root) == before


def test_image_that_would_be_enlarged_too_much_is_refused_and_taken_back(root):
    """A changed limit is applied by the next run without deleting files. Spec: docs/spec/stage2.md#maximum-enlargement"""
    use_model(root, "preview", **BUCKET)
    product(root, "stage2", "--regenerate", "vae")
    product(root, "run")
    files = {path.name: path.stat().st_mtime_ns for path in (root.derived / "vae_latents").iterdir()}

    use_model(root, "preview", **BUCKET, max_upscale=1.01)
    said = product(root, "run", code=1)  # every image is refused

    assert "6 refused" in said
    assert "enlarged_too_much" in said
    assert not list(root.shards.glob("*/shard-*.tar"))
    assert "raise vae_latents.max_upscale" in product(root, "problems")
    assert {path.name: path.stat().st_mtime_ns for path in (root.derived / "vae_latents").iterdir()} == files

    use_model(root, "preview", **BUCKET, max_upscale=100)
    assert "enlarged_too_much" not in product(root, "run")
    assert {path.name: path.stat().st_mtime_ns for path in (root.derived / "vae_latents").iterdir()} == files
    assert len(list(ShardDataset(root.shards, 1, allow_preview=True))) == 6


@pytest.mark.parametrize("kills", [2, pytest.param(100, marks=pytest.mark.soak)])
def test_killed_change_of_size_never_mixes_latents(root, kills):
    """kill -9 at random moments, from original to bucket and back: sets and folders have latents of one size."""
    chance, before = random.Random(kills), "original"
    for _ in range(kills):
        after = "bucket" if before == "original" else "original"
        use_model(root, "preview", size=after)
        change = ["stage2", "--regenerate", "vae", "--data-root", root.path]
        process = start(*change, IMAGEMILL_STUB_SLEEP="0.1")
        time.sleep(chance.uniform(0.5, 4))
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()

        imagemill("shards", "--overwrite", "--allow-preview", "--data-root", root.path, stub=True)
        for folder in root.shards.glob("bucket_*"):
            assert "0 errors" in product(root, "validate", folder), "every latent has the size of the manifest"
        product(root, "stage2", "--regenerate", "vae")
        product(root, "run")
        assert "0 errors" in product(root, "verify")
        wanted = {shape_of(record, after) for record in records(root)}
        assert {np.load(path).shape for path in (root.derived / "vae_latents").iterdir()} == wanted
        before = after


def shape_of(record, size):
    """Return the shape of a record's latent."""
    wide, high = bucket_size(record["aspect_bucket"]) if size == "bucket" else (record["width"], record["height"])
    return 16, high // 8, wide // 8


def test_status_names_the_setting_where_training_would_see_little(root):
    """Spec: docs/spec/stage2.md#use-of-the-pictures"""
    said = product(root, "status")

    assert POOR_USE in said
    assert "of the picture, enlarged" in said


@pytest.fixture
def torch_threads():
    """The product's default number of threads in this process too: the last bits depend on it."""
    before = torch.get_num_threads()
    torch.set_num_threads(Config().model_threads)
    yield
    torch.set_num_threads(before)


def some_photos(coco128, folder):
    """Link every tenth photograph, up to 12."""
    coco_photos(coco128, folder)
    names = sorted(path.stem for path in folder.glob("*.jpg"))
    for name in set(names) - set(names[::10][:12]):
        for path in folder.glob(f"{name}.*"):
            path.unlink()


def large_photos(coco128, folder):
    """Write 40 photographs of 12 and 24 megapixels: enlarged, with seeded noise, so that JPEG 95 has details to keep."""
    chance = np.random.default_rng(18)
    for number, path in enumerate(sorted((coco128 / "images").rglob("*.jpg"))[:40]):
        image = Image.open(path).convert("RGB")
        times = math.sqrt((12, 24)[number % 2] * 1e6 / (image.width * image.height))
        image = image.resize((round(image.width * times), round(image.height * times)), Image.Resampling.BICUBIC)
        noise = chance.integers(-6, 7, (image.height, image.width, 3), np.int16)
        pixels = np.clip(np.asarray(image, np.int16) + noise, 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(folder / path.name, quality=95)
        (folder / path.name).with_suffix(".txt").write_text(f"photograph {number}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("photographs", "count"),
    [
        (some_photos, 12),
        pytest.param(coco_photos, 128, marks=pytest.mark.soak),
        pytest.param(large_photos, 40, marks=pytest.mark.soak),
    ],
)
def test_latents_of_real_photos_equal_those_of_pillow_and_diffusers(
    data_root, coco128, preview_root, torch_threads, photographs, count
):
    """Every photograph; then plain webdataset and the reader stack full batches of one shape."""
    from diffusers import AutoencoderKL

    photographs(coco128, data_root.approved)
    settings = {"encoders": {"vae_latents": {"model": "preview", **BUCKET}}}
    # The reference opens photographs with Pillow alone.
    data_root.config_file.write_text(json.dumps({**settings, "pixels": {"color": "ignore"}}))
    done = imagemill("run", "--data-root", data_root.path)
    assert done.returncode == 0, done.stdout + done.stderr

    vae = AutoencoderKL.from_pretrained(ensure_preview(VAE, preview_root), low_cpu_mem_usage=False).eval()
    equal = 0
    for path in sorted(data_root.approved.glob("*.jpg")):
        image = ImageOps.exif_transpose(Image.open(path)).convert("RGB")
        width, height = image.size
        wide, high = map(int, assign_bucket(width, height).split("x"))
        box_width, box_height = min(width, round(height * wide / high)), min(height, round(width * high / wide))
        left, top = (width - box_width) // 2, (height - box_height) // 2
        crop = image.crop((left, top, left + box_width, top + box_height))
        picture = crop.resize((wide, high), Image.Resampling.LANCZOS, reducing_gap=3.0)
        values = torch.from_numpy(np.asarray(picture, np.float32) / 127.5 - 1).permute(2, 0, 1)[None]
        with torch.inference_mode():
            expected = vae.encode(values.contiguous()).latent_dist.mean[0].numpy().astype(np.float16)
        equal += np.array_equal(expected, np.load(data_root.derived / "vae_latents" / f"{path.stem}.npy"))
    assert equal == count

    for bucket in BUCKETS:
        tars = sorted(map(str, (data_root.shards / f"bucket_{bucket}").glob("*.tar")))
        if not tars:
            continue
        wide, high = bucket_size(bucket)
        dataset = webdataset.WebDataset(tars, shardshuffle=False).decode().to_tuple("vae.npy").batched(4)
        for (batch,) in dataset:
            assert batch.shape[1:] == (16, high // 8, wide // 8)
    for batch in ShardDataset(data_root.shards, 4, allow_preview=True):
        assert isinstance(batch["vae"], torch.Tensor)
        assert batch["crop_box"].shape == (len(batch["image_id"]), 4)
        assert batch["original_size"].shape == (len(batch["image_id"]), 2)
