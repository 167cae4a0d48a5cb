"""Megatron-Energon over imagemill's shards: batches of one bucket each, as tensors.

    from megatron import energon
    from imagemill.reading.energon import BucketEncoder

    dataset = energon.get_train_dataset(
        "data/shards/metadataset.yaml", task_encoder=BucketEncoder(4), batch_size=None,
        worker_config=energon.WorkerConfig.default_worker_config(), shuffle_buffer_size=1000, max_samples_per_sequence=100,
    )
    for batch in energon.get_loader(dataset):
        batch["vae"], batch["t5h"], batch["t5m"], batch["caption"], batch["image_id"], batch["bucket"]

Latents have one shape per bucket in a set made with `vae_latents: {size: bucket}`; other sets are refused. Sets of preview models
are not: call `ShardSet.open(folder)` first, which refuses them.

This module imports megatron-energon, which imagemill does not require.
"""

from typing import Any

import torch  # noqa: TID253 (users import this module by name)
from megatron import energon
from megatron.energon.errors import FatalSampleError

from imagemill.errors import ImagemillError
from imagemill.reading.samples import short_name


@energon.edataclass
class BucketSample(energon.Sample):
    """One sample. `members`: tensors by short name (`vae`, `t5h`, `t5m`, …); `bucket`: as `1024x1024`."""

    image_id: str
    bucket: str
    caption: str
    members: dict[str, torch.Tensor]


@energon.stateless
def cook(sample: dict[str, Any]) -> BucketSample:
    """Convert a crude sample, the members of a tar by their suffixes."""
    record = sample["json"]
    arrays = {short_name(name): value for name, value in sample.items() if name.endswith(".npy")}
    return BucketSample(
        **energon.basic_sample_keys(sample),
        image_id=record["image_id"],
        bucket=sample["__subflavors__"]["bucket"],
        caption=record["caption"],
        members={name: torch.as_tensor(value) for name, value in arrays.items()},
    )


class BucketEncoder(energon.TaskEncoder):
    """Groups samples by bucket into full batches.

    A batch is a dict: `bucket`, lists `image_id` and `caption`, and one tensor per npy member, with the batch first.

    Args:
        batch_size: samples in a batch; an epoch's incomplete batches come at its end.
    """

    cookers = (energon.Cooker(cook),)

    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.batch_size = batch_size

    def encode_sample(self, sample: BucketSample) -> BucketSample:
        """Return the sample unchanged."""
        return sample

    def batch_group_criterion(self, sample: BucketSample) -> tuple[str, int]:
        """Return the bucket and the batch size."""
        return sample.bucket, self.batch_size

    def batch(self, samples: list[BucketSample]) -> dict[str, Any]:
        """Stack samples of one bucket.

        Raises:
            FatalSampleError: caused by an ImagemillError, if a member has several shapes in the bucket.
        """
        batch: dict[str, Any] = {
            "bucket": samples[0].bucket,
            "image_id": [sample.image_id for sample in samples],
            "caption": [sample.caption for sample in samples],
        }
        for name in samples[0].members:
            values = [sample.members[name] for sample in samples]
            if len({value.shape for value in values}) > 1:
                problem = ImagemillError(
                    f"{name} has several shapes in bucket {samples[0].bucket}",
                    why="latents of the images' own size cannot be stacked",
                    do="set encoders.vae_latents.size: bucket in imagemill.yaml, then `imagemill stage2 --regenerate vae`",
                )
                # Energon skips a batch that raises any other error, so that its samples would be lost.
                raise FatalSampleError(str(problem)) from problem
            batch[name] = torch.stack(values)
        return batch
