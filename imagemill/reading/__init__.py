"""What a training script imports: batches of one bucket each, and single samples by id, straight out of the tars.

    from imagemill.reading import ShardDataset, ShardSet

    dataset = ShardDataset("data/shards", batch_size=8, latents="crop", tail="pad")
    loader = dataset.loader(num_workers=4)
    for epoch in range(10):                         # every epoch has its own order
        for batch in loader:
            batch["vae"], batch["t5h"], batch["t5m"], batch["caption"], batch["image_id"], batch["bucket"]
            checkpoint["data"] = dataset.state_dict()  # later: dataset.load_state_dict(checkpoint["data"])

    ShardSet.open("data/shards")["chelsea"]["vae"]  # one sample, by its index entry

What is read is the set that was there when it was opened: `--append` and `withdraw` do not disturb an open reader, a set packed
anew in its place ends it with `ShardsReplaced`.

It reads sets that lie in a file system, by their index. Tars behind a pipe or a URL, or without our index, are for plain
`webdataset.WebDataset`: they are ordinary WebDataset tars, but it knows no tombstones.

Belongs here: what is read, in which order, in what form.
Belongs elsewhere: what a set is on disk (pipeline/shards/shard_sets.py), the bytes of a tar (formats/tar.py).
Spec: docs/spec/shards.md#updating-a-set
"""

from imagemill.reading.dataset import ShardDataset, ShardLoader
from imagemill.reading.sets import Bucket, ShardSet
from imagemill.reading.tars import ShardsReplaced

__all__ = ["Bucket", "ShardDataset", "ShardLoader", "ShardSet", "ShardsReplaced"]
