"""States of the empty caption in a set of several buckets. Spec: docs/spec/stage2.md#empty-caption"""

import numpy as np
import pytest

from imagemill.errors import ImagemillError
from imagemill.formats.npy import read_npy
from imagemill.reading import ShardSet
from tests.cli.test_regenerate import product
from tests.helpers.product import photos


def test_buckets_of_two_models_have_no_common_state(data_root):
    photos(data_root.approved, 2)
    photos(data_root.approved / "tall", 1, size=(32, 48))
    (data_root.approved / "tall" / "photo0000.jpg").rename(data_root.approved / "tall.jpg")
    (data_root.approved / "tall" / "photo0000.txt").rename(data_root.approved / "tall.txt")
    (data_root.approved / "tall").rmdir()
    product(data_root, "run")
    opened = ShardSet.open(data_root.shards, allow_preview=True)
    assert len(opened.buckets) == 2
    state = opened.empty_caption("t5_hidden")

    (derived,) = data_root.empty_captions.iterdir()
    np.save(derived, read_npy(derived) + 1)  # as another model would
    product(data_root, "shards", "--overwrite", "--bucket", opened.buckets[0].name)

    opened = ShardSet.open(data_root.shards, allow_preview=True)
    with pytest.raises(ImagemillError, match="different states of the empty caption of 't5_hidden'"):
        opened.empty_caption("t5_hidden")
    changed = ShardSet(opened.buckets[:1]).empty_caption("t5_hidden")
    assert np.array_equal(changed, state + 1)
