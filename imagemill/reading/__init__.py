"""Reading of shards for training scripts: batches of one bucket each, and single samples by id, directly from the tars.

    from imagemill.reading import ShardDataset, ShardSet

    dataset = ShardDataset("data/shards", batch_size=8, latents="crop", tail="pad")
    loader = dataset.loader(num_workers=4)
    for epoch in range(10):                         # every epoch has its own order
        for batch in loader:
            batch["vae"], batch["t5h"], batch["t5m"], batch["caption"], batch["image_id"], batch["bucket"]
            checkpoint["data"] = dataset.state_dict()  # later: dataset.load_state_dict(checkpoint["data"])

    ShardSet.open("data/shards")["chelsea"]["vae"]  # one sample, by its index entry

A reader sees the set that existed when it was opened: `--append` and `withdraw` do not disturb it. If the set is
repacked, the reader raises `ShardsReplaced`.

In place of a folder, both take the URL at which `imagemill push` has published (`s3://bucket/prefix`, or `https://host/path`),
with the same batches. A reader of a URL keeps the version that it opened.

A list of folders and URLs, such as those of shares, is read as one set.

For tars behind a pipe, or without our index, use plain `webdataset.WebDataset`: they are ordinary WebDataset tars, but it ignores
tombstones.

The documents of a set are described in pipeline/shards/shard_sets.py, the bytes of a tar in formats/tar.py.

Spec: docs/spec/shards.md#updating-a-set, docs/spec/shards.md#several-places
"""

from typing import TYPE_CHECKING, Any

from imagemill.reading.dataset import ShardDataset
from imagemill.reading.sets import Bucket, ShardSet
from imagemill.reading.tars import ShardsReplaced

if TYPE_CHECKING:
    from imagemill.reading.loader import ShardLoader

__all__ = ["Bucket", "ShardDataset", "ShardLoader", "ShardSet", "ShardsReplaced"]


def __getattr__(name: str) -> Any:
    """Import the loader on access, because it is a class of torch's."""
    if name == "ShardLoader":
        from imagemill.reading.loader import ShardLoader

        return ShardLoader
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
