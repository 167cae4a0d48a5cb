"""Other libraries stack the latents of a set made with `vae_latents: {size: bucket}`, with the values of imagemill's reader.

Megatron-Energon by imagemill's cooker and task encoder, webdataset and Hugging Face datasets as they are.
Spec: docs/spec/stage2.md#bucket-size
"""

import numpy as np
import pytest
import torch
import webdataset

from imagemill.domain.buckets import bucket_size
from imagemill.reading import ShardSet
from tests.helpers.product import shards_of_photos

energon = pytest.importorskip("megatron.energon", reason="megatron-energon is not installed: pip install '.[dev]'")
FatalSampleError = pytest.importorskip("megatron.energon.errors").FatalSampleError


def batches(root, count, **options):
    from imagemill.reading.energon import BucketEncoder

    dataset = energon.get_train_dataset(
        root.shards / "metadataset.yaml", task_encoder=BucketEncoder(4), batch_size=None,
        worker_config=energon.WorkerConfig(rank=0, world_size=1, num_workers=0),
        shuffle_buffer_size=100, max_samples_per_sequence=None, **options,
    )  # fmt: skip
    return [batch for batch, _ in zip(energon.get_loader(dataset), range(count), strict=False)]


@pytest.mark.slow
def test_every_batch_of_energon_is_full_of_one_bucket_and_stacks(square_set):
    """400 of 400, over 128 photographs that are repeated; then each once."""
    samples = ShardSet.open(square_set.shards, allow_preview=True)

    found = batches(square_set, 400)

    assert len(found) == 400
    for batch in found:
        wide, high = bucket_size(batch["bucket"])
        assert batch["vae"].shape == (4, 16, high // 8, wide // 8)
        assert batch["t5h"].shape == (4, 77, 1024)
        assert {samples[image_id]["bucket"] for image_id in batch["image_id"]} == {batch["bucket"]}
    for batch in found[:20]:
        for n, image_id in enumerate(batch["image_id"]):
            assert batch["caption"][n] == samples[image_id]["caption"]
            for name in ("vae", "t5h", "t5m", "dinov3"):
                assert np.array_equal(batch[name][n].numpy(), samples[image_id][name])

    once = [image_id for batch in batches(square_set, 400, repeat=False) for image_id in batch["image_id"]]
    assert sorted(once) == sorted(samples)


@pytest.mark.slow
def test_batches_of_plain_webdataset_stack(square_set):
    samples, seen = ShardSet.open(square_set.shards, allow_preview=True), []
    for bucket in samples.buckets:
        tars = sorted(map(str, bucket.folder.glob("*.tar")))
        dataset = webdataset.WebDataset(tars, shardshuffle=False).decode().to_tuple("json", "vae.npy").batched(4)
        for records, latents in dataset:
            assert latents.shape[1:] == (16, *bucket.latent_size)
            for record, latent in zip(records, latents, strict=True):
                assert np.array_equal(latent, samples[record["image_id"]]["vae"])
                seen.append(record["image_id"])
    assert sorted(seen) == sorted(samples)


@pytest.mark.slow
def test_batches_of_hugging_face_datasets_are_tensors(square_set, tmp_path, monkeypatch):
    """One configuration per bucket, as in the dataset card."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    datasets = pytest.importorskip("datasets", reason="datasets is not installed: pip install '.[dev]'")
    samples, seen = ShardSet.open(square_set.shards, allow_preview=True), []
    for bucket in samples.buckets:
        dataset = datasets.load_dataset(
            str(square_set.shards), bucket.name.removeprefix("bucket_"), split="train", streaming=True
        )
        for batch in dataset.with_format("torch").iter(batch_size=4):
            assert isinstance(batch["vae.npy"], torch.Tensor)
            assert batch["vae.npy"].shape[1:] == (16, *bucket.latent_size)
            for record, latent in zip(batch["json"], batch["vae.npy"], strict=True):
                assert np.array_equal(latent.numpy(), samples[record["image_id"]]["vae"])
                seen.append(record["image_id"])
    assert sorted(seen) == sorted(samples)


@pytest.mark.slow
def test_latents_of_the_original_size_are_refused_with_the_setting(data_root, coco128):
    shards_of_photos(coco128, data_root)

    with pytest.raises(FatalSampleError) as caught:
        batches(data_root, 100)

    assert "vae has several shapes in bucket" in str(caught.value)
    assert "vae_latents.size: bucket" in str(caught.value)
